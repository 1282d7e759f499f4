"""Test engines of targets whose last layers read the keys and values of earlier ones, and embed each token anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec import Engine, Model, NGram, SamplingParams, Suffix
from jspec.models import decoder
from jspec.models.mixers.shared_kv import SharedKV
from jspec.models.parts.kv_pool import KVPool, NoPool
from jspec.models.weights.quantize import quantize_weights
from jspec.train import log_probs
from tests.support import engines, folders, tiny
from tests.support.arrays import on_device
from tests.support.recordings import recording

pytestmark = pytest.mark.once

FAMILIES = ("gemma4_e2b", pytest.param("gemma4_26b_a4b", marks=pytest.mark.long))
TREE = Suffix("static:0,1,0.0,0.1,1.0,0.0.0", scope="engine")
GREEDY = SamplingParams(max_tokens=64, temperature=0)
# Prompts are cut into pieces of at most 16 tokens, and three requests need more pages than there are.
OPTIONS: dict[str, Any] = dict(slots=3, max_len=176, buckets=(3,), prefill_buckets=(16,), page_size=8, controls=False)
PAGES = 31

Recorded = tuple[Model, list[list[int]], list[list[int]]]


def recorded(family: str, golden: Path) -> Recorded:
    """Return a target, three prompts, and the greedy tokens after each that transformers computes."""
    folder = golden / "families" / family
    data = recording(folder / "expect.npz")
    prompts, tokens = ([data[f"{name}{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy"))
    return tiny.load_target(folder), prompts, tokens


def tokens_of(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [one.raise_for_error().token_ids for one in engine.generate(prompts, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_requests_in_pieces_of_prompts_with_prefix_hits_have_the_recorded_tokens(
    family: str, golden: Path
) -> None:
    target, prompts, expected = recorded(family, golden)
    with engines.make(target, drafter=TREE, pages=PAGES, **OPTIONS) as engine:
        assert tokens_of(engine, prompts * 3) == expected * 3
        assert engine.metrics.num_preemptions > 0 and engine.metrics.num_accepted_tokens > 48
        (done,) = engine.generate(prompts[2], GREEDY)
        assert done.token_ids == expected[2] and done.metrics.num_cached_tokens > 64
        engine.core.scheduler.pages.check()


def test_layers_that_share_keys_have_no_pools(golden: Path) -> None:
    """Layers 0 and 1 have heads of 16 channels, layer 2 of 32; layers 3 to 5 read those of layers 1 and 2."""
    target, *_ = recorded("gemma4_e2b", golden)
    with engines.make(target, drafter=TREE, pages=PAGES, **OPTIONS) as engine:
        assert [type(state) for state in engine.core.runner.state.target] == [KVPool] * 3 + [NoPool] * 3
        assert engine.memory_plan.target_pool == PAGES * 8 * 2 * (16 + 16 + 32) * 4


def test_layers_that_read_the_pools_before_the_batch_was_written_emit_other_tokens(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: queries need the keys of the batch's own tokens."""
    target, prompts, expected = recorded("gemma4_e2b", golden)
    forward, mix = decoder.forward, SharedKV.mix

    def stale(model: Model, cache: Any, *rest: Any, **options: Any) -> Any:
        def mix_stale(self: SharedKV, layer: Any, x: Any, state: Any, *more: Any, **kept: Any) -> Any:
            return mix(self, layer, x, cache[self.source], *more, **kept)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedKV, "mix", mix_stale)
            return forward(model, cache, *rest, **options)

    for stage in ("prefill", "decode"):
        monkeypatch.setattr(f"jspec.step.{stage}.forward", stale)
    with Engine(target, **OPTIONS) as engine:
        assert tokens_of(engine, prompts) != expected


@pytest.mark.parametrize(
    ("family", "quantize", "options"),
    [
        ("gemma4_e2b", "int8", dict(kv_dtype="float8_e4m3fn")),
        *(
            pytest.param(family, quantize, options, marks=pytest.mark.long)
            for family in ("gemma4_e2b", "gemma4_26b_a4b")
            for quantize, options in [(kind, {}) for kind in ("int8", "fp8", "fp8_dynamic", "int4")]
            if (family, quantize) != ("gemma4_26b_a4b", "fp8_dynamic")  # no kind of experts
        ),
        pytest.param("gemma4_26b_a4b", "int4", dict(kv_dtype="float8_e4m3fn"), marks=pytest.mark.long),
    ],
)
def test_quantised_targets_emit_the_same_tokens_with_and_without_a_drafter(
    family: str, quantize: str, options: dict[str, Any], golden: Path
) -> None:
    target, prompts, expected = recorded(family, golden)
    target, found = quantize_weights(target, quantize), []
    for drafter in (None, TREE):
        with engines.make(target, drafter=drafter, **OPTIONS, **options) as engine:
            found.append(tokens_of(engine, prompts * 2))
    assert found[0] == found[1] != expected * 2, "control: rounding shows"


@pytest.mark.parametrize("family", FAMILIES)
def test_update_by_names_of_a_checkpoint_with_images_gives_the_tokens_of_a_fresh_engine(
    family: str, golden: Path, tmp_path: Path
) -> None:
    folder = golden / "families" / family
    fields, plain = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    new = {name.replace("model.", "model.language_model.", 1): values * 1.1 for name, values in plain.items()}
    new["model.vision_tower.patch.weight"] = np.zeros((3, 3), np.float32)
    folders.write(tmp_path, {"model_type": "gemma4", "text_config": fields, "vision_config": {}}, new)
    target, prompts, expected = recorded(family, golden)
    with (
        engines.make(target, **OPTIONS) as engine,
        engines.make(Model.from_pretrained(tmp_path, dtype="float32"), **OPTIONS) as fresh,
    ):
        wanted = tokens_of(fresh, prompts)
        assert tokens_of(engine, prompts) == expected != wanted
        engine.update_weights({name: on_device(values) for name, values in new.items()})
        assert tokens_of(engine, prompts) == wanted
        engine.update_weights(folder)
        assert tokens_of(engine, prompts) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_a_deterministic_engine_are_those_of_log_probs_bit_for_bit(
    family: str, dtype: str, golden: Path
) -> None:
    _, prompts, _ = recorded(family, golden)
    target = Model.from_pretrained(golden / "families" / family, dtype=dtype)
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logprobs=0)
    with engines.make(target, drafter=NGram("chain:3"), deterministic=True, **OPTIONS) as engine:
        done = [one.raise_for_error() for one in engine.generate(prompts, params)]
    for one in done:
        text, first = np.array([*one.prompt_token_ids, *one.token_ids]), len(one.prompt_token_ids)
        scores = [record.logprob for record in one.logprobs or ()]
        np.testing.assert_array_equal(np.asarray(log_probs(target, text[None]))[0, first:], np.float32(scores))
