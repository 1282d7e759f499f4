"""Test UNO: the target drafts with an adapter of its own, in rows that the round verifies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import UNO, Beside, Engine, Model, NGram, SamplingParams, Tree
from jspec.draft import uno
from jspec.draft.named import make_drafter
from jspec.models import decoder
from jspec.models.adapters import as_tables, empty_tables, on_devices
from jspec.step import decode
from jspec.step.program import Program
from jspec.testing import check_lossless
from tests.support import engines, tiny
from tests.support.recordings import run_texts

pytestmark = pytest.mark.once

VOCAB, DEPTH, LENGTH = 40, 3, 40
NAMES = ("qkv", "o", "gate_up", "down")
OPTIONS: dict[str, Any] = dict(slots=3, buckets=(3,), prefill_buckets=(16,), max_len=64, page_size=4, controls=False)
TREES = (Tree.chain(DEPTH), Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]), Tree.topk(8, 3, 3))
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], list(range(20))]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny.model(VOCAB, layers=2, sharpness=2.0)


@pytest.fixture(scope="module")
def adapted(target: Model) -> Model:
    """The target with the adapter in all rows."""
    table = on_devices(as_tables(tiny.uno_adapter(target), target, 2), target)
    tables = empty_tables(target, 1, 2).with_table(0, table)
    return replace(target, layers=tables.adapted(target.layers, jnp.ones((1, 1), jnp.int32)))


def drafted_after(adapted: Model, text: list[int]) -> list[int]:
    """Return the chain that is drafted after a text, by one pass over the whole text, without a cache.

    The rows of the text and the root choose no adapter, the rows of random tokens after them choose it. Further rows,
    which no row before them sees, make all texts equally long.
    """
    positions = jnp.arange(len(text), len(text) + DEPTH - 1)
    rows = text + np.asarray(uno.random_tokens(positions[None], VOCAB))[0].tolist()
    table = (jnp.arange(LENGTH)[None] >= len(text)).astype(jnp.int32)
    layers = [
        replace(layer, **{name: replace(getattr(layer, name), table=table) for name in NAMES})
        for layer in adapted.layers
    ]
    padded = jnp.asarray([rows + [0] * (LENGTH - len(rows))], jnp.int32)
    logits = run_texts(replace(adapted, layers=layers), padded).logits[0]
    return np.argmax(logits[len(text) - 1 : len(rows)], axis=-1).tolist()


def test_drafted_chains_are_those_of_passes_over_the_whole_text(target: Model, adapted: Model) -> None:
    with engines.make(target, UNO(tiny.uno_adapter(target), TREES[0]), **OPTIONS) as engine:
        for done in engine.generate(PROMPTS, GREEDY, trace=True):
            assert done.rounds is not None
            for one_round in done.rounds:
                text = done.prompt_token_ids + done.token_ids[: one_round.start]
                assert one_round.tokens[1:].tolist() == drafted_after(adapted, text)


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_tokens_are_those_of_plain_decoding(target: Model, tree: Tree) -> None:
    check_lossless(
        UNO(tiny.uno_adapter(target), tree), target, PROMPTS, max_tokens=20, make_engine=engines.make, **OPTIONS
    )


def test_first_draft_token_is_the_targets_own_and_always_accepted(target: Model) -> None:
    with engines.make(target, UNO(tiny.uno_adapter(target), TREES[0]), **OPTIONS) as engine:
        params = [replace(GREEDY, temperature=t, seed=5) for t in (0.0, 1.0, 0.7)]
        done = engine.generate(PROMPTS, params, trace=True)
        assert all(each.accept_len > 0 for one in done for each in one.rounds[:-1])


def test_kernels_of_a_chain_run_concurrently_because_rows_have_an_adapter(target: Model) -> None:
    drafters = UNO(tiny.uno_adapter(target), TREES[0]), NGram(TREES[0])
    options = [Program(drafter, (), "coupled", "auto").compiler_options for drafter in drafters]
    assert ["CONCURRENT" in values.values() for values in options] == [True, False]


def test_adapter_in_the_rows_that_are_verified_emits_other_tokens(
    target: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines.make(target, **OPTIONS) as engine:
        plain = [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]
    verify = decode.verify_stage

    def adapted(program: Any, params: Any, *rest: Any) -> Any:
        layers = params.draft.adapter.adapted(params.target.layers, jnp.ones((1, 1), jnp.int32))
        return verify(program, replace(params, target=replace(params.target, layers=layers)), *rest)

    monkeypatch.setattr(decode, "verify_stage", adapted)
    with Engine(target, drafter=UNO(tiny.uno_adapter(target), TREES[0]), **OPTIONS) as engine:
        assert [done.token_ids for done in engine.generate(PROMPTS, GREEDY)] != plain


def test_rows_that_a_kernel_pads_have_no_adapter(target: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with engines.make(target, **OPTIONS) as engine:
        plain = [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]
    monkeypatch.setattr(decoder, "kernel_padding", lambda *sizes: 1)
    with Engine(target, drafter=UNO(tiny.uno_adapter(target), TREES[0]), **OPTIONS) as engine:
        assert [done.token_ids for done in engine.generate(PROMPTS, GREEDY)] == plain


@pytest.mark.parametrize(
    "options", [{"tensor_parallel": 2}, {"deterministic": True}, {"pages": 20, "adaptive": True}], ids=str
)
def test_pairs_with_devices_equal_bits_preemption_and_adaptive_depth(target: Model, options: dict[str, Any]) -> None:
    drafter = UNO(tiny.uno_adapter(target), TREES[1])
    with engines.make(target, **OPTIONS) as engine:
        plain = [done.token_ids for done in engine.generate(PROMPTS * 2, GREEDY)]
    with engines.make(target, drafter, **OPTIONS | options) as engine:
        assert [done.raise_for_error().token_ids for done in engine.generate(PROMPTS * 2, GREEDY)] == plain


def test_folder_of_an_adapter_is_a_drafter(golden: Path) -> None:
    drafter = make_drafter(golden / "adapters" / "llama" / "all")
    assert isinstance(drafter, UNO) and drafter.tree == Tree.chain(5)


def test_targets_with_states_and_joins_are_refused(target: Model) -> None:
    drafter = UNO(tiny.uno_adapter(target))
    with pytest.raises(ValueError, match="UNO: expected a target with attention in all layers"):
        Engine(tiny.hybrid(VOCAB), drafter=drafter)
    with pytest.raises(ValueError, match="UNO: expected adapters of"):
        Engine(tiny.model(VOCAB, layers=1), drafter=drafter)
    with pytest.raises(NotImplementedError, match="drafts in the target's caches; take it alone"):
        Beside(drafter, NGram(Tree.chain(2)))
