"""Test that an engine on a mesh of one device runs there alone, with the tokens and programs of the default device."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec import DFlash, Drafter, DraftModel, Eagle3, Engine, Medusa, NGram, SamplingParams, Suffix
from jspec.models.weights.quantize import check_device, quantize_weights
from tests.support import engines, folders, lettered, tiny

VOCAB = 61
PROMPTS = [[5, 3, 9, 1], [7, 8, 9] * 5, [2]]
PARAMS = [
    SamplingParams(max_tokens=10, temperature=0.0),
    SamplingParams(max_tokens=10, seed=3, temperature=0.8, top_p=0.9),
    SamplingParams(max_tokens=10, seed=4),
]
OPTIONS: dict[str, Any] = dict(slots=3, max_len=64, buckets=(3,), prefill_buckets=(32,), controls=False)
target = cache(lambda: tiny.model(VOCAB, layers=1, hidden=32))
DRAFTERS: dict[str, Any] = {
    "none": lambda: None,
    "eagle3": lambda: Eagle3(tiny.eagle_head(target(), draft_vocab=31, feature_layers=(0, 1)), "chain:2"),
    "dflash": lambda: DFlash(tiny.dflash_head(target(), block_size=3, feature_layers=(0, 1)), "chain:2"),
    "draft_model": lambda: DraftModel(tiny.model(VOCAB, layers=1, hidden=32, seed=3), "chain:2"),
    "medusa": lambda: Medusa(tiny.medusa_heads(target(), heads=2), "chain:2"),
    "ngram": lambda: NGram("chain:2"),
    "suffix": lambda: Suffix("chain:2"),
}


def mesh(*numbers: int) -> Mesh:
    """Return a mesh of the devices with these numbers."""
    return Mesh(np.array([jax.devices()[number] for number in numbers]), ("model",))


def devices_of(engine: Engine) -> set[jax.Device]:
    """Return the devices of all arrays that an engine holds."""
    runner = engine.core.runner
    return {device for leaf in jax.tree.leaves((runner.params, runner.state)) for device in leaf.devices()}


def exchanges(engine: Engine) -> set[str]:
    """Return which exchanges between devices the compiled programs of an engine have."""
    texts = [program.as_text() for program in engine.core.runner.programs.compiled.values()]
    return {name for name in ("all-gather", "all-reduce", "collective") if any(name in text for text in texts)}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "dflash" else pytest.mark.long) for name in DRAFTERS],
)
def test_engine_on_another_device_emits_the_tokens_of_the_default_device_and_leaves_that_alone(name: str) -> None:
    drafter: Drafter | None = DRAFTERS[name]()
    first, other = (engines.make(target(), drafter=drafter, mesh=own, **OPTIONS) for own in (None, mesh(2)))
    one, two = (engine.generate(PROMPTS, PARAMS) for engine in (first, other))
    assert [done.token_ids for done in two] == [done.token_ids for done in one]
    assert (devices_of(first), devices_of(other)) == ({jax.devices()[0]}, {jax.devices()[2]})
    assert other.core.runner.target_side.send(np.zeros(3)).devices() == {jax.devices()[2]}  # what the host sends
    assert not exchanges(other)


def test_programs_for_two_devices_have_exchanges() -> None:
    """A negative control of the search for exchanges."""
    with engines.make(target(), mesh=mesh(0, 1), **OPTIONS) as engine:
        engine.generate([1, 2], max_tokens=1)
        assert "all-gather" in exchanges(engine)


@pytest.mark.long
def test_grammars_and_penalties_on_another_device_give_the_tokens_of_the_default_device() -> None:
    """The host sends masks between the two programs of a round, and a table of the regex."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    asked = [
        SamplingParams(max_tokens=12, temperature=0.7, seed=1, json_schema=schema),
        SamplingParams(max_tokens=12, temperature=0.7, seed=2, regex="(ab|1){4}"),
        SamplingParams(max_tokens=12, temperature=0.7, seed=3, repetition_penalty=1.3, logit_bias={3: 2.0}),
    ]
    tokenizer = lettered.Lettered(lettered.JSON_TEXTS[: engines.VOCAB])
    options = OPTIONS | {
        "controls": True,
        "max_len": engines.MAX_LEN,
        "tokenizer": tokenizer,
        "eos_ids": (lettered.END,),
    }
    found = []
    for own in (None, mesh(3)):
        engine = engines.make(engines.target(), drafter=NGram("chain:2"), mesh=own, **options)
        found.append([one.raise_for_error().token_ids for one in engine.generate(["{", "ab", "b"], asked)])
    assert found[0] == found[1]
    assert devices_of(engine) == {jax.devices()[3]}


def test_checkpoint_for_another_device_is_read_onto_it(tmp_path: Path) -> None:
    folder = folders.write(tmp_path, folders.TARGET, folders.target_tensors())
    one, other = (Engine.from_pretrained(folder, mesh=own, quantize="int8", **OPTIONS) for own in (None, mesh(3)))
    assert devices_of(other) == {jax.devices()[3]}
    leaves = (jax.tree.leaves(engine.core.runner.params) for engine in (one, other))
    assert all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))


def test_engine_on_the_device_of_its_model_holds_no_second_copy_of_the_weights() -> None:
    def pointers(tree: Any) -> list[int]:
        return sorted(leaf.addressable_data(0).unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree))

    with (
        engines.make(target(), mesh=mesh(0), **OPTIONS) as own,
        engines.make(target(), mesh=mesh(1), **OPTIONS) as other,
    ):
        assert pointers(own.core.runner.params) == pointers(target())
        assert not set(pointers(other.core.runner.params)) & set(pointers(target()))


def test_float8_is_refused_for_the_given_device_alone() -> None:
    model = quantize_weights(tiny.model(40), "fp8")
    with pytest.raises(ValueError, match=r"8\.9 or later, got 8\.0"):
        check_device(model, "bfloat16", device=SimpleNamespace(compute_capability="8.0"))  # type: ignore[arg-type]
    check_device(model, "bfloat16", device=SimpleNamespace(compute_capability="9.0"))  # type: ignore[arg-type]
