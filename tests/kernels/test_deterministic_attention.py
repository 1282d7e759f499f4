"""Test that deterministic `paged_attention` matches numpy and gives a query equal bits in every call."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.problems import AttentionCase, Problem, make_problem
from tests.support import cover
from tests.support.arrays import on_device

CASES = [
    AttentionCase(queries=5, tree="causal", page=1, dtype="bfloat16", start=1),
    AttentionCase(
        queries=17, tree="random", group=8, window=40, start=1, scale=0.4, softcap=1.5, sinks=True, lengths="full"
    ),
    AttentionCase(queries=17, tree="causal", chunk=16, start=1, lengths="full"),
    AttentionCase(queries=5, tree="random", lengths="full", dtype="bfloat16", pool="float8_e4m3fn"),
    AttentionCase(queries=5, tree="causal", dim=64),
    AttentionCase(queries=9, tree="padded", group=8, page=64),
    AttentionCase(queries=60, tree="chain", lengths="zero"),
    AttentionCase(queries=5, tree="chain", dtype="bfloat16", pool="float8_e4m3fn", window=129, sinks=True),
]
LONG = [  # their traits are those of other cases too
    AttentionCase(queries=5, tree="random"),
    AttentionCase(queries=5, tree="causal", window=3, softcap=2.0, lengths="full"),
    AttentionCase(queries=17, tree="random", chunk=131, sinks=True),
]
LENGTH, NEW, KV_HEADS, DIM = 580, 6, 2, 16  # each of the kernel's splits has more than one tile


def paths_of(problem: Problem) -> jax.Array | None:
    """Return paths [B, T, depths] with the new rows of each query's ancestor bits; None for causal problems."""
    if problem.bits is None:
        return None
    bits = np.asarray(problem.bits)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    seen = bits.reshape(*bits.shape[:2], -1)
    paths = np.full((*seen.shape[:2], seen.sum(-1).max()), -1, np.int32)
    for place in np.ndindex(*seen.shape[:2]):
        rows = np.flatnonzero(seen[place])
        paths[place][: len(rows)] = rows
    return on_device(paths)


def check(case: AttentionCase, implementation: str) -> None:
    problem = make_problem(case)
    arrays = (*problem.arrays[:-1], None)
    options: dict[str, Any] = dict(implementation=implementation, deterministic=True) | problem.options
    out = paged_attention(*arrays, paths=paths_of(problem), **options)
    assert out.dtype == problem.q.dtype
    assert problem.error(out) <= problem.tolerance
    if case.window:  # control: windows that are one row shorter or longer
        for window in (case.window - 1, case.window + 1):
            assert problem.error(out, problem.finite().expected_with(window=window)) > 2 * problem.tolerance
    if case.chunk:
        for chunk in (case.chunk - 1, case.chunk + 1, None):
            assert problem.error(out, problem.finite().expected_with(chunk=chunk)) > 2 * problem.tolerance


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(CASES, 4, long=LONG))
def test_deterministic_attention_of_random_problems_matches_float64(case: AttentionCase, implementation: str) -> None:
    check(case, implementation)


def test_deterministic_attention_with_bits_or_quantisation_raises() -> None:
    problem = make_problem(AttentionCase())
    arrays = problem.arrays[:-1]
    with pytest.raises(ValueError, match="pass paths instead of bits"):
        paged_attention(*arrays, problem.bits, deterministic=True)
    with pytest.raises(ValueError, match="leave out quantize_output"):
        paged_attention(*arrays, None, quantize_output=True, deterministic=True)
    with pytest.raises(ValueError, match="expected deterministic=True"):
        paged_attention(*arrays, None, paths=paths_of(problem))


class AttendedText:
    """The keys, values and queries of one sequence, for calls with any page size and batch."""

    def __init__(self, dtype: str, implementation: str, *, deterministic: bool = True, **options: Any) -> None:
        rng = np.random.default_rng(0)
        self.k, self.v = rng.normal(size=(2, LENGTH + NEW, KV_HEADS, DIM))
        self.q = rng.normal(size=(LENGTH + NEW, 4 * KV_HEADS, DIM))
        self.dtype = dtype
        options |= {"implementation": implementation, "deterministic": deterministic}
        self.attend = jax.jit(partial(paged_attention, **options))

    def run(self, length: int, rows: list[int], *, page: int = 16, mates: int = 0, paths: Any = None) -> np.ndarray:
        """Return the attention of the text's queries `rows`, whose keys and values follow `length` committed rows.

        Args:
            page: rows per page.
            mates: number of other sequences in the batch.
            paths: paths of the queries [T, depths]; None: causal.
        """
        columns = -(-(LENGTH + NEW + page) // page)
        order = np.random.default_rng(page).permutation((1 + mates) * columns) + 1
        table = order.reshape(1 + mates, columns)
        at = np.concatenate([np.arange(length), rows]).astype(int)
        pools = np.random.default_rng(1).normal(size=(2, (1 + mates) * columns + 1, KV_HEADS, page, DIM))
        place = np.arange(len(at))
        for pool, own in zip(pools, (self.k, self.v), strict=True):
            pool[table[-1, place // page], :, place % page] = own[at]
        q = np.random.default_rng(2).normal(size=(1 + mates, len(rows), *self.q.shape[1:]))
        q[-1] = self.q[rows]
        lengths = [*([length // 2] * mates), length]
        if paths is not None:
            paths = on_device(np.broadcast_to(paths, (1 + mates, *np.shape(paths))), jnp.int32)
        arrays = (on_device(array, self.dtype) for array in (q, *pools))
        tables = (on_device(table, jnp.int32), on_device(lengths, jnp.int32))
        extra = {} if paths is None else {"paths": paths}
        return np.asarray(self.attend(*arrays, *tables, None, **extra)[-1], np.float32)


FIRST = 574  # the queries that are compared are rows 574 to 579: tiles of the context end at row 576


def one_by_one(text: AttendedText) -> np.ndarray:
    """Return the attention of the compared queries, each computed by a separate call."""
    return np.concatenate([text.run(row, [row]) for row in range(FIRST, LENGTH)])


def in_other_calls(text: AttendedText, *names: str) -> dict[str, np.ndarray]:
    """Return the attention of the compared queries by calls that differ in number of queries, page size or batch.

    Args:
        text: the text.
        names: names of the calls; none: all of them.
    """
    chain = list(range(FIRST, LENGTH))
    calls = {
        "chain": lambda: text.run(FIRST, chain),
        "chunk": lambda: text.run(FIRST - 24, list(range(FIRST - 24, LENGTH)))[24:],
        "pages of 1 row": lambda: text.run(FIRST, chain, page=1),
        "pages of 5 rows": lambda: text.run(FIRST, chain, page=5),
        "batch of 3": lambda: text.run(FIRST, chain, mates=2),
    }
    return {name: calls[name]() for name in names or calls}


@pytest.mark.parametrize(
    ("dtype", "implementation", "window"),
    [
        pytest.param("bfloat16", "reference", None, marks=pytest.mark.once),
        pytest.param("bfloat16", "pallas", None, marks=pytest.mark.once),
        pytest.param("bfloat16", "pallas", 64, marks=pytest.mark.once),
        pytest.param("float32", "reference", None, marks=[pytest.mark.slow, pytest.mark.once]),
        pytest.param("float32", "reference", 64, marks=[pytest.mark.slow, pytest.mark.once]),
        pytest.param("float32", "pallas", None, marks=pytest.mark.matrix),
        pytest.param("float32", "pallas", 64, marks=pytest.mark.matrix),
    ],
)
def test_deterministic_attention_of_a_query_has_equal_bits_in_every_call(
    dtype: str, implementation: str, window: int | None
) -> None:
    """A query's bits are equal alone, in a chain, in a chunk, in a batch, in a tree, and with other page sizes.

    The windows of the compared queries begin in two tiles of the context, and scores are limited if there is a window.
    """
    options = {} if window is None else {"window": window, "softcap": 2.0, "scale": 0.4}
    text = AttendedText(dtype, implementation, **options)
    alone = one_by_one(text)
    for name, out in in_other_calls(text, *(["chain", "chunk"] if window else [])).items():
        np.testing.assert_array_equal(out, alone, err_msg=name)
    # Nodes 1, 3 and 4 are a chain below the root; nodes 2 and 5 belong to other branches.
    nodes = [FIRST, FIRST + 1, 3, FIRST + 2, FIRST + 3, 7]
    paths = [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1], [0, 1, 3, -1], [0, 1, 3, 4], [0, 2, 5, -1]]
    tree = text.run(FIRST, nodes, paths=paths, mates=1)
    np.testing.assert_array_equal(tree[[0, 1, 3, 4]], alone[:4])
    paths[4] = [0, 1, 2, 4]
    assert (text.run(FIRST, nodes, paths=paths, mates=1)[4] != alone[3]).any(), "control: another ancestor"


def test_ordinary_attention_of_a_query_has_other_bits_in_some_calls() -> None:
    """Negative control: in jax 0.12 the call in a chunk has other bits, in jax 0.10 the call with another page size.

    With the instructions of some processors all calls happen to have equal bits.
    """
    text = AttendedText("float32", "reference", deterministic=False)
    alone, others = one_by_one(text), in_other_calls(text)
    for name, out in others.items():
        np.testing.assert_allclose(out, alone, rtol=0, atol=1e-5, err_msg=name)
    if not any((out != alone).any() for out in others.values()):
        pytest.skip("this processor gives equal bits in all of these calls, so it has no control")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_deterministic_attention_on_gpu_matches_float64(case: AttentionCase) -> None:
    check(case, "pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 64])
def test_deterministic_attention_on_gpu_of_a_query_has_equal_bits_in_every_call(dtype: str, window: int | None) -> None:
    test_deterministic_attention_of_a_query_has_equal_bits_in_every_call(dtype, "pallas", window)
