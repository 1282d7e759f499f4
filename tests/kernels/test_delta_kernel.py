"""Test the kernel of the gated delta rule, interpreted, against the reference, which has its own test of the rule."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.ancestors import ancestors
from pallas_kernels import dispatch
from pallas_kernels.dispatch import TracedGPU
from pallas_kernels.recurrent import delta_kernel, delta_rounds
from pallas_kernels.recurrent.record_ring import RecordRing
from pallas_kernels.recurrent.records import EVERY, DeltaTokens
from tests.support.mosaic import interpreted

mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")
SLOTS, KEY_HEADS, HEADS = 3, 2, 4
PUBLISHED, OTHER = (128, 128), (128, 192)  # channels of a key head and of a value head
REFERENCE: Any = partial(delta_rounds.verify_and_write, implementation="reference")
TREE = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 8]


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    rows = rng.standard_normal(shape)
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


def problem(
    parents: list[int],
    lengths: list[int],
    slots: list[int],
    dims: tuple[int, int] = PUBLISHED,
    all_slots: int = SLOTS,
) -> tuple[Any, ...]:
    """Draw states and records of all slots, and the nodes of a round."""
    rng, count, batch, (key_dim, dim) = np.random.default_rng(0), len(parents), len(slots), dims
    ring = RecordRing.zeros(all_slots, (KEY_HEADS, HEADS), dims, count, jnp.bfloat16)
    ring = RecordRing(
        jnp.asarray(unit(rng, *ring.keys.shape), jnp.bfloat16),
        jnp.asarray(rng.standard_normal(ring.values.shape), jnp.bfloat16),
        jnp.asarray(-rng.exponential(0.1, ring.decays.shape), jnp.float32),
    )
    state = jnp.asarray(rng.standard_normal((all_slots, HEADS, dim, key_dim)) * 0.1, jnp.float32)
    of_token = (batch, HEADS, count)
    new = DeltaTokens(
        jnp.asarray(unit(rng, batch, KEY_HEADS, count, key_dim) * key_dim**-0.5, jnp.bfloat16),
        jnp.asarray(unit(rng, batch, KEY_HEADS, count, key_dim), jnp.bfloat16),
        jnp.asarray(rng.standard_normal((*of_token, dim)), jnp.bfloat16),
        jnp.asarray(-rng.exponential(0.1, of_token), jnp.float32),
        jnp.asarray(rng.random(of_token), jnp.float32),
    )
    seen = jnp.asarray(ancestors(np.broadcast_to(np.array(parents, np.int32), (batch, count))))
    return state, ring, jnp.array(slots), jnp.array(lengths), new, seen, jnp.ones((batch, count), bool)


def differences(
    got: tuple[Any, RecordRing], wanted: tuple[Any, RecordRing], rows: slice = slice(None)
) -> tuple[float, float]:
    """Return the largest difference of an output, and the largest of a ring's value relative to the largest value."""
    values = [np.asarray(of[1].values, np.float64) for of in (got, wanted)]
    outputs = np.abs(np.asarray(got[0][rows]) - np.asarray(wanted[0][rows])).max()
    return float(outputs), float(np.abs(values[0] - values[1]).max() / np.abs(values[1]).max())


def is_written(ring: RecordRing, slots: list[int], lengths: list[int], counts: list[int]) -> np.ndarray:
    """Return which rows of the slots a round writes."""
    rows = np.zeros(ring.decays.shape[:2], bool)
    for slot, length, count in zip(slots, lengths, counts, strict=True):
        rows[slot, [position % ring.rows for position in range(length, length + count)]] = True
    return rows


def expect_only_written(before: RecordRing, after: RecordRing, rows: np.ndarray) -> None:
    """Fail if the values of a row outside of ``rows`` have changed, or those of one of them have not."""
    changed = np.any(np.asarray(before.values != after.values), axis=(2, 3))
    np.testing.assert_array_equal(changed, rows)


def run_kernel(
    state: jax.Array,
    ring: RecordRing,
    slots: jax.Array,
    lengths: jax.Array,
    new: DeltaTokens,
    seen: jax.Array,
    written: jax.Array,
    interpret: Any = False,
) -> tuple[jax.Array, RecordRing]:
    """Compute what `verify_and_write` does by the kernel, which writes values alone into the ring."""
    behind = delta_rounds.committed_factors(ring, slots, lengths)
    counts = delta_rounds.counts_of(written, slots, len(state))
    inputs = state, ring, slots, lengths, behind, counts, delta_rounds.nodes_of(new, seen)
    outputs, values = delta_kernel.verify(*inputs, interpret=interpret)
    return jnp.swapaxes(outputs[:, : written.shape[1]], 1, 2), ring._replace(values=values)


@mosaic
@pytest.mark.parametrize(
    ("parents", "lengths", "dims"),
    [([-1], [40, 71], PUBLISHED), ([-1, 0, 1, 2, 3], [32, 63], PUBLISHED), (TREE, [5, 60], OTHER)],
    ids=["plain", "chain", "tree"],
)
def test_outputs_and_records_of_nodes(parents: list[int], lengths: list[int], dims: tuple[int, int]) -> None:
    arguments = problem(parents, lengths, [2, 0], dims)
    wanted = REFERENCE(*arguments)
    got = interpreted(run_kernel, *arguments)
    outputs, values = differences(got, wanted)
    assert np.abs(wanted[0]).max() > 0.03
    assert outputs < 2e-5
    assert values < 2**-7, "a value may round to the other neighbour"
    expect_only_written(arguments[1], got[1], is_written(arguments[1], [2, 0], lengths, [len(parents)] * 2))
    state, ring, slots, lengths_, new, seen, written = arguments
    wrong = {
        "a record less": (state, ring, slots, lengths_ - 1, new, seen, written),
        "another slot": (state, ring, slots[::-1], lengths_, new, seen, written),
        "no ancestors": (
            state,
            ring,
            slots,
            lengths_,
            new,
            jnp.broadcast_to(jnp.eye(len(parents), dtype=bool), seen.shape),
            written,
        ),
    }
    for name, changed in wrong.items():
        if len(parents) > 1 or name != "no ancestors":
            other = REFERENCE(*changed)
            assert differences(got, other)[0] > 1e-3, name


@mosaic
@pytest.mark.parametrize(("parents", "lengths"), [([-1], [40, 71]), (TREE, [5, 60])], ids=["plain", "tree"])
def test_outputs_and_records_of_nodes_without_rates(parents: list[int], lengths: list[int]) -> None:
    """The sizes are those of Nemotron 3 Nano; values are not corrected, so that the records are exact."""
    state, ring, slots, lengths_, new, seen, written = problem(parents, lengths, [2, 0], (128, 64))
    arguments = state, ring, slots, lengths_, new._replace(rates=None), seen, written
    wanted, got = REFERENCE(*arguments), interpreted(delta_rounds._verify_nodes, *arguments)
    outputs, values = differences(got, wanted)
    assert outputs < 2e-5 and values == 0 and np.abs(wanted[0]).max() > 0.03
    jax.tree.map(np.testing.assert_array_equal, got[1], wanted[1])
    expect_only_written(ring, got[1], is_written(ring, [2, 0], lengths, [len(parents)] * 2))
    other = REFERENCE(state, ring, slots, lengths_, new, seen, written)
    assert differences(got, other)[0] > 1e-3, "control: with rates"


@mosaic
def test_kernels_have_forms_for_the_heads_of_some_published_mamba_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are those of Nemotron 3 Nano, of Nemotron Nano 9B v2, and of Nemotron-H 47B."""

    def has_kernel(*dims: int) -> bool:
        keys, values = (jax.ShapeDtypeStruct((1, 1, 1, dim), jnp.bfloat16) for dim in dims)
        return delta_rounds.has_kernel(SimpleNamespace(keys=keys, values=values))  # type: ignore[arg-type]

    assert not has_kernel(128, 64), "the tests run on a CPU"
    monkeypatch.setattr(dispatch, "traced_gpu", lambda: TracedGPU((9, 0), 132))
    assert [has_kernel(128, 64), has_kernel(128, 80), has_kernel(256, 64)] == [True, False, False]


@mosaic
def test_only_rows_of_slots_and_of_written_tokens_change() -> None:
    *arguments, written = problem(list(range(-1, 9)), [40, 71, 60], [1, SLOTS, 0])
    written = written.at[2, 9:].set(False)
    wanted = REFERENCE(*arguments, written)
    got = interpreted(run_kernel, *arguments, written)
    for rows in (slice(1), slice(2, 3)):
        outputs, values = differences(got, wanted, rows)
        assert outputs < 2e-5 and values < 2**-7
    expect_only_written(arguments[1], got[1], is_written(arguments[1], [1, 0], [40, 60], [10, 9]))


@mosaic
def test_fold_advances_the_states_of_slots_that_exist_and_no_others() -> None:
    state, ring, *_ = problem([-1, 0], [0, 0], [0, 0])
    slots, first = jnp.array([2, SLOTS, 0]), jnp.array([EVERY, 0, 2 * EVERY])
    wanted = delta_rounds.fold_round(state, ring, slots, first, implementation="reference")
    got = interpreted(delta_rounds._fold, state, ring, slots, first)
    np.testing.assert_array_equal(got[1], state[1])
    assert np.abs(got - wanted).max() < 2e-5
    assert (
        np.abs(got - delta_rounds.fold_round(state, ring, slots, first + EVERY, implementation="reference")).max()
        > 1e-2
    )
    jax.block_until_ready(got)


@mosaic
@pytest.mark.parametrize("count", [1, 64])
def test_kernels_compiled_for_h200_spill_nothing(count: int, compile_with_ptxas_output: Any) -> None:
    parents = list(range(-1, count - 1))
    arguments = jax.eval_shape(lambda: problem(parents, [40, 71], [2, 0]))

    @jax.jit
    def run(state: Any, ring: Any, slots: Any, lengths: Any, new: Any, seen: Any, written: Any) -> Any:
        outputs, _ = run_kernel(state, ring, slots, lengths, new, seen, written)
        return outputs, delta_rounds.fold_round(state, ring, slots, lengths)

    program, printed = compile_with_ptxas_output(run, *arguments)
    assert [launch.kind for launch in program.launches].count("kCustomCall") == 2
    reports = re.findall(r"\b(\d+) bytes spill stores", printed)
    assert len(reports) == 2 and set(reports) == {"0"}


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [PUBLISHED, OTHER], ids=str)
@pytest.mark.parametrize("count", [1, 5, 8, 16, 33, 64])
def test_outputs_and_values_on_a_gpu(count: int, dims: tuple[int, int]) -> None:
    parents = [-1, *np.random.default_rng(0).integers(0, np.arange(1, count))] if count > 1 else [-1]
    arguments = problem(parents, [40, 71], [2, 0], dims)
    assert delta_rounds.has_kernel(arguments[1])
    got = jax.jit(run_kernel)(*arguments)
    wanted = jax.jit(REFERENCE)(*arguments)
    outputs, values = differences(got, wanted)
    assert outputs < 2e-4, "a value may round to the other neighbour"
    assert values < 2**-7
    state, ring, *_ = arguments
    folded = [
        jax.jit(partial(delta_rounds.fold_round, implementation=name))(
            state, ring, jnp.array([2, SLOTS]), jnp.array([EVERY, 0])
        )
        for name in ("auto", "reference")
    ]
    np.testing.assert_array_equal(folded[0][:2], state[:2])
    assert jnp.abs(folded[0] - folded[1]).max() < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 5, 33])
def test_more_sequences_than_a_gpu_holds_at_a_time(count: int) -> None:
    rng, batch = np.random.default_rng(1), 150  # 1,200 pieces of states; an H200 holds 528 CTAs
    parents = [-1, *rng.integers(0, np.arange(1, count))] if count > 1 else [-1]
    lengths, slots = rng.integers(0, 1000, batch).tolist(), rng.permutation(batch).tolist()
    arguments = problem(parents, lengths, slots, PUBLISHED, batch)
    got = jax.jit(run_kernel)(*arguments)
    wanted = jax.jit(REFERENCE)(*arguments)
    outputs, values = differences(got, wanted)
    assert outputs < 4e-4 and values < 2**-7  # of 33 nodes in 150 sequences one output differs by 2.2e-4
    expect_only_written(arguments[1], got[1], is_written(arguments[1], slots, lengths, [count] * batch))
