"""Test deterministic=True for targets with recurrent states: which GPUs may have them, and bits of logits on a GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Engine, Model, SamplingParams, Suffix
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.deterministic import check_deterministic
from jspec.models.families import read_config
from jspec.models.weights.params import model_params, random_weights
from tests.support.h200 import h200_mesh

VOCAB, LAYERS = 512, 2  # compiling takes longer than decoding
SIZES = dict(vocab_size=VOCAB, hidden_size=512, intermediate_size=1024, num_hidden_layers=LAYERS, head_dim=64)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4
    ),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=8, mamba_head_dim=64, n_groups=2
    ),
    "lfm2": dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False),
}
LENGTHS = (1, 5, 16, 33, 64, 100, 130, 250)
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in LENGTHS]
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, logprobs=2)


def config(family: str, **more: Any) -> ModelConfig:
    return read_config({"model_type": family, **SIZES, **FAMILIES[family], **more})


@cache
def model(family: str) -> Model:
    """Return a random target; gated delta nets halve a state in about ten tokens."""
    c = config(family)
    weights = random_weights(model_params(c), "bfloat16", 0)
    for layer in weights["layers"]:
        if "dt_bias" in layer:
            layer["dt_bias"] -= 3.6
    return Model.from_weights(c, weights)


def engine(family: str, drafter: Suffix | None = None, **options: Any) -> Engine:
    options = dict(slots=8, max_len=400, buckets=(8,), prefill_buckets=(512,), prefix_cache=False) | options
    return Engine(model(family), drafter=drafter, controls=False, **{"deterministic": True} | options)


def seen(completions: list[Any]) -> list[Any]:
    """Return tokens and log-probabilities of completions for bitwise comparison."""
    return [(done.raise_for_error().token_ids, repr(done.logprobs)) for done in completions]


def one_by_one(family: str, **options: Any) -> list[Any]:
    """Decode prompts in programs of one sequence; long prompts are cut in pieces."""
    with engine(family, slots=1, buckets=(1,), prefill_buckets=(48,), **options) as plain:
        return [plain.generate([prompt], GREEDY)[0] for prompt in PROMPTS]


@pytest.mark.gpu
@pytest.mark.parametrize(("tree", "bucket"), [("chain:4", 512), ("static:0,1,0.0,0.1,1.0,0.0.0", 128)])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_on_a_gpu_depend_neither_on_drafts_nor_on_the_batch_nor_on_how_prompts_are_cut(
    family: str, tree: str, bucket: int
) -> None:
    """Texts are decoded one by one, then at once with rejected and with accepted drafts, and scored as prompts."""
    alone = one_by_one(family)
    scores = [[record.logprob for record in done.logprobs] for done in alone]
    texts = [[*prompt, *done.token_ids] for prompt, done in zip(PROMPTS, alone, strict=True)]
    with engine(family, Suffix(tree, scope="engine"), prefill_buckets=(bucket,)) as drafted:
        for _ in range(2):
            assert seen(drafted.generate(PROMPTS, GREEDY)) == seen(alone)
        assert drafted.metrics.num_accepted_tokens > len(PROMPTS)
        done = drafted.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        assert [[record.logprob for record in one.prompt_logprobs[-len(scores[0]) :]] for one in done] == scores


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_bits_on_a_gpu_depend_on_the_batch(family: str) -> None:
    """Negative control."""
    alone = one_by_one(family, deterministic=False)
    with engine(family, deterministic=False) as together:
        assert seen(together.generate(PROMPTS, GREEDY)) != seen(alone)


def shapes_of(c: ModelConfig, dtype: str = "bfloat16") -> Model:
    return jax.eval_shape(lambda: Model.from_weights(c, random_weights(model_params(c), dtype, 0)))


@pytest.mark.parametrize(
    ("family", "wider", "name"),
    [
        ("qwen3_5_text", {"linear_key_head_dim": 256}, "gated delta nets"),
        ("nemotron_h", {"ssm_state_size": 256}, "Mamba 2 mixers"),
    ],
)
def test_recurrent_states_without_a_kernel_on_a_gpu_are_refused(
    family: str, wider: dict[str, int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, wide = shapes_of(config(family)), shapes_of(config(family, **wider))
    check_deterministic(wide, "auto")
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    check_deterministic(wide, "reference")
    with pytest.raises(ValueError, match=rf"on a GPU {name} need compute capability 9\.0 and"):
        check_deterministic(target, "auto")
    if jax.__version_info__ >= (0, 11):
        with jax.sharding.use_abstract_mesh(h200_mesh().abstract_mesh):
            check_deterministic(target, "auto")
            with pytest.raises(ValueError, match=rf"{name}: heads must have at most 128 .* got 256 and"):
                check_deterministic(wide, "auto")


def test_convolutions_in_float32_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    check_deterministic(shapes_of(config("lfm2")), "auto")
    with pytest.raises(ValueError, match="on a GPU convolutions must have weights of 16 bits, got float32; leave"):
        check_deterministic(shapes_of(config("lfm2"), "float32"), "auto")
