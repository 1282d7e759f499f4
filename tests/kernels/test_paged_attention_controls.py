"""Negative controls of `paged_attention`: faulty arguments lead to errors above the tests' tolerance."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_bits, paged_attention
from tests.kernels.problems import FACTORS, Case, make_problem


def _causal_instead_of_tree(arrays):
    q, *rest, bits = arrays
    return (q, *rest, jnp.broadcast_to(causal_bits(q.shape[1]), bits.shape))


def _table_off_by_one_page(arrays):
    *rest, table, lengths, bits = arrays
    return (*rest, jnp.roll(table, 1, axis=1), lengths, bits)


def _one_row_too_few(arrays):
    *rest, lengths, bits = arrays
    return (*rest, lengths - 1, bits)


def _heads_interleaved(arrays):
    q, *rest = arrays
    batch, queries, _, dim = q.shape
    return (q.reshape(batch, queries, -1, 2, dim).swapaxes(2, 3).reshape(q.shape), *rest)


def _no_values(arrays):
    q, k_pool, v_pool, *rest = arrays
    return (q, k_pool, jnp.zeros_like(v_pool), *rest)


FAULTS = [_causal_instead_of_tree, _table_off_by_one_page, _one_row_too_few, _heads_interleaved, _no_values]


@pytest.mark.once
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
def test_paged_attention_with_faulty_arguments_has_an_error_above_tolerance(fault, dtype):
    """All values are finite, because NaN would be too easy to detect."""
    problem = make_problem(Case(dtype=dtype, lengths="full", queries=17)).finite()
    assert problem.error(paged_attention(*problem.arrays)) <= problem.tolerance
    assert problem.error(paged_attention(*fault(problem.arrays))) > 10 * problem.tolerance


@pytest.mark.once
def test_paged_attention_from_row_0_instead_of_1_has_an_error_above_tolerance():
    problem = make_problem(Case(start=1)).finite()
    assert problem.error(paged_attention(*problem.arrays, start=1)) <= problem.tolerance
    assert problem.error(paged_attention(*problem.arrays, start=0)) > 10 * problem.tolerance


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("tree", ["causal", "random"])
def test_paged_attention_with_window_off_by_one_has_an_error_above_tolerance(tree, implementation):
    problem = make_problem(Case(tree=tree, queries=5, window=12, lengths="full")).finite()
    out = paged_attention(*problem.arrays, window=12, implementation=implementation)
    errors = [problem.error(out, problem.expected_with(window=window)) for window in (12, 11, 13)]
    assert errors[0] <= problem.tolerance and min(errors[1:]) > 10 * problem.tolerance


@pytest.mark.once
def test_paged_attention_with_one_window_for_all_tree_nodes_has_an_error_above_tolerance():
    """The window of each node ends at the node; the control moves all windows to that of the root."""
    problem = make_problem(Case(tree="random", queries=5, window=12, lengths="full")).finite()
    out = paged_attention(*problem.arrays, window=12)
    moved = {seen: problem.expected_with(window=11 + seen) for seen in range(1, 6)}
    fixed = [[moved[len(new)][b, node] for node, new in enumerate(rows)] for b, rows in enumerate(problem.new_rows)]
    assert problem.error(out, problem.expected_with(window=12)) <= problem.tolerance
    assert problem.error(out, np.array(fixed)) > 10 * problem.tolerance
