"""Test which draft nodes a round with a budget selects, and that packed rows compute what all rows compute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DraftModel, Tree
from jspec.core.packing import NO_ROW, Packing
from jspec.core.records import Draft, SlotState
from jspec.models.parts.kv_pool import PoolShape
from jspec.step import decode
from jspec.step.budget import apply_budget
from jspec.step.prefill import prefill_step
from jspec.step.program import Params, Program, init_state
from pallas_kernels.layers.partial_sums import Scaled
from tests.support import tiny
from tests.support.arrays import on_device

VOCAB, PAGE, ROWS = 16, 4, 4
PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 6], [8, 8, 1, 2])
SLOTS = (1, 0, 2, 4)  # slot 4 does not exist: a padding row


budgeted = jax.jit(apply_budget, static_argnums=2, static_argnames="is_chain")


def random_draft(rng: np.random.Generator, rows: int, nodes: int, *, grid: int | None = None) -> Draft:
    """Return random trees whose scores fall from parent to child; with a grid many scores are equal."""
    parents = np.stack([[-1, *(rng.integers(0, n) for n in range(1, nodes))] for _ in range(rows)]).astype(np.int32)
    scores, valid = np.zeros((rows, nodes), np.float32), np.ones((rows, nodes), bool)
    for node in range(1, nodes):
        step = -rng.integers(0, grid, rows) if grid else -rng.exponential(size=rows)
        scores[:, node] = scores[np.arange(rows), parents[:, node]] + step
        valid[:, node] = valid[np.arange(rows), parents[:, node]] & (rng.random(rows) < 0.9)
    tokens = rng.integers(0, VOCAB, (rows, nodes)).astype(np.int32)
    return Draft(*map(on_device, (tokens, parents, scores, valid)), probs=None, vocab_map=None)


@pytest.mark.parametrize("grid", [None, 2])
def test_budget_selects_the_most_probable_nodes_and_their_ancestors(grid: int | None) -> None:
    rng = np.random.default_rng(0)
    for count in (3, 7, 12, 20):
        draft, active = random_draft(rng, 3, 8, grid=grid), np.array([True, False, True])
        selected, packing = budgeted(draft, on_device(active), count)
        kept = np.asarray(packing.places) != NO_ROW
        assert kept.sum() == count == packing.size
        assert kept[active, 0].all(), "every active root must be selected"
        usable = np.asarray(draft.valid) & active[:, None]
        scores = np.asarray(draft.scores)
        if (usable & ~kept).any() and (kept & usable)[:, 1:].any():
            assert scores[:, 1:][(kept & usable)[:, 1:]].min() >= scores[usable & ~kept].max()
        assert np.array_equal(np.asarray(selected.valid), np.asarray(draft.valid) & kept)
        for row, node in zip(*np.nonzero(kept & usable), strict=True):
            parent = draft.parents[row, node]
            assert node == 0 or kept[row, parent]
        assert usable.sum() <= count or not (kept & ~usable).any(), "padding must not take a usable node's place"


def test_budget_with_a_score_that_is_nan_does_not_select_the_node() -> None:
    draft = random_draft(np.random.default_rng(0), 2, 4)
    scores = np.array(draft.scores)
    scores[0, 2] = np.nan
    draft = replace(draft, scores=on_device(scores), valid=on_device(np.ones((2, 4), bool)))
    _, packing = budgeted(draft, on_device(np.ones(2, bool)), 7)
    assert np.asarray(packing.places == NO_ROW).sum() == 1 and packing.places[0, 2] == NO_ROW


def test_budget_of_chains_goes_to_the_row_with_the_higher_confidence() -> None:
    """The scores say the opposite; in a tree, whose siblings have one confidence, the scores count."""
    parents = on_device([[-1, 0, 1, 2]] * 2)
    scores = on_device([[0, -1, -2, -3], [0, -9, -10, -11]], jnp.float32)
    confidence = on_device([[1, 0.5, 0.5, 0.5], [1, 0.9, 0.9, 0.1]], jnp.float32)
    tokens, valid = on_device(np.zeros((2, 4), np.int32)), on_device(np.ones((2, 4), bool))
    draft = Draft(tokens, parents, scores, valid, None, None, confidence)
    for is_chain, counts in ((True, [2, 3]), (False, [4, 1])):
        _, packing = budgeted(draft, on_device(np.ones(2, bool)), 5, is_chain=is_chain)
        assert np.asarray(packing.places != NO_ROW).sum(axis=1).tolist() == counts


def test_packing_and_unpacking_return_the_selected_rows_and_zeros_elsewhere() -> None:
    rng = np.random.default_rng(0)
    _, packing = budgeted(random_draft(rng, 3, 5), on_device(np.ones(3, bool)), 9)
    values = on_device(rng.normal(size=(3, 5, 2)))
    kept = np.asarray(packing.places) != NO_ROW

    @partial(jax.jit, static_argnums=1)
    def packed_and_back(packing: Any, more: int) -> Any:
        padded = packing.pad(more)
        sums = padded.pack(values)
        return sums, padded.unpack(sums[None])[0], padded.unpack(Scaled(sums[None], sums[..., 0], jnp.ones(2)))

    expected = np.where(kept[..., None], values, 0)
    for more in (0, 3):
        packed, unpacked, scaled = jax.tree.map(np.asarray, packed_and_back(packing, more))
        assert packed.shape == (1, 9 + more, 2) and not packed[0, 9:].any()
        assert np.array_equal(packed[0, :9], np.asarray(values)[kept])  # row after row
        assert np.array_equal(unpacked, expected)
        assert np.array_equal(scaled.values[0], expected) and np.array_equal(scaled.row_scale, expected[..., 0])


# -- rounds


def program_of(tree: Tree, *, nodes: int | None = None, deterministic: bool = False) -> tuple[Program, Params]:
    target = tiny.model(VOCAB, layers=2, sharpness=2.0)
    method = DraftModel(target, tree)  # its drafts are accepted, if their rows are right
    program = Program(method, method.feature_layers(target), "coupled", "reference", trace=True, nodes=nodes)
    return replace(program, deterministic=deterministic), Params(target=target, draft=method.bind(target))


def prefilled(program: Program, params: Params) -> SlotState:
    pool = PoolShape(slots=4, pages=33, page_size=PAGE, max_len=16, dtype="float32", draft_dtype="float32")
    state, width = init_state(program, params, pool), pool.width(program.drafter.tree)
    prefill = jax.jit(partial(prefill_step, program))
    for slot, prompt in enumerate(PROMPTS):
        pages = np.arange(1 + 8 * slot, 9 + 8 * slot)[:width]
        options = dict(slot=slot, slots=4, page_row=pages, temperature=np.float32(slot % 2), remaining=np.int32(11))
        state, _ = prefill(params, state, tiny.prefill_input(prompt, size=5, **options))
    return state


def run(program: Program, params: Params, state: SlotState) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the reports of three rounds, and all cache rows of the slots afterwards."""
    step, slots, reports = jax.jit(partial(decode.spec_round, program)), on_device(SLOTS), []
    for _ in range(3):
        state, report, *_ = step(params, state, slots)
        reports.append(np.asarray(report))
    lengths, rows = np.asarray(state.lengths), []
    for slot in range(len(PROMPTS)):
        at = np.arange(lengths[slot])
        pages = np.asarray(state.page_table)[slot, at // PAGE]
        rows += [np.asarray(pool)[pages, :, at % PAGE] for pool in jax.tree.leaves(state.target)]
    return reports, np.concatenate([row.ravel() for row in rows])


@pytest.mark.parametrize(
    ("tree", "deterministic"),
    [
        pytest.param(Tree.chain(3), False, id="chain-False", marks=pytest.mark.long),
        pytest.param(Tree.chain(3), True, id="chain-True"),
        pytest.param(Tree.topk(9, 3, 3), False, id="tree-False"),
        pytest.param(Tree.topk(9, 3, 3), True, id="tree-True", marks=pytest.mark.long),
    ],
)
def test_round_whose_budget_is_all_nodes_equals_a_round_without_budget(tree: Tree, deterministic: bool) -> None:
    program, params = program_of(tree, deterministic=deterministic)
    state = prefilled(program, params)
    reports, rows = run(program, params, state)
    packed_reports, packed_rows = run(replace(program, nodes=tree.nodes - 1), params, state)
    assert all(np.array_equal(a, b) for a, b in zip(reports, packed_reports, strict=True))
    assert np.allclose(rows, packed_rows, atol=1e-5)
    assert sum(report[:, -3].sum() for report in reports) > 2, "drafts must be accepted"


def test_round_with_a_budget_computes_only_the_selected_rows() -> None:
    tree, rows = Tree.topk(9, 3, 3), ROWS * (1 + 2)
    program, params = program_of(tree, nodes=2)
    state = prefilled(program, params)
    traced = jax.jit(partial(decode.spec_round, program)).trace(params, state, on_device(SLOTS))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()  # for a CPU, products of few rows are transposed
    gate_up = params.target.layers[0].gate_up.shape[0]
    products = [line for line in text.splitlines() if "dot_general" in line and f"x{gate_up}xf32>" in line]
    assert any(f"tensor<1x{rows}x{gate_up}xf32>" in line for line in products)
    assert not any(f"tensor<{ROWS}x{tree.nodes}x{gate_up}xf32>" in line for line in products)


def test_unpacking_with_places_of_other_nodes_changes_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison above."""
    program, params = program_of(Tree.chain(3))
    state = prefilled(program, params)
    reports, _ = run(program, params, state)
    unpack = Packing.unpack
    monkeypatch.setattr(
        Packing, "unpack", lambda self, sums: unpack(replace(self, places=jnp.roll(self.places, 1, axis=1)), sums)
    )
    others, _ = run(replace(program, nodes=3), params, state)
    assert not all(np.array_equal(a, b) for a, b in zip(reports, others, strict=True))
