"""Negative controls of `paged_attention`: faulty arguments lead to errors above the tests' tolerance."""

from __future__ import annotations

import jax.numpy as jnp
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
    problem = make_problem(Case(dtype=dtype, lengths="full", queries=17))
    finite = [jnp.nan_to_num(pool, nan=0.5) for pool in (problem.k_pool, problem.v_pool)]
    arrays = (problem.q, *finite, *problem.arrays[3:])
    assert problem.error(paged_attention(*arrays)) <= problem.tolerance
    assert problem.error(paged_attention(*fault(arrays))) > 10 * problem.tolerance


@pytest.mark.once
def test_paged_attention_from_row_0_instead_of_1_has_an_error_above_tolerance():
    problem = make_problem(Case(start=1))
    finite = [jnp.nan_to_num(pool, nan=0.5) for pool in (problem.k_pool, problem.v_pool)]
    arrays = (problem.q, *finite, *problem.arrays[3:])
    assert problem.error(paged_attention(*arrays, start=1)) <= problem.tolerance
    assert problem.error(paged_attention(*arrays, start=0)) > 10 * problem.tolerance


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("tree", ["causal", "random"])
def test_paged_attention_with_window_off_by_one_has_an_error_above_tolerance(tree, implementation):
    problem = make_problem(Case(tree=tree, queries=5, window=12, lengths="full"))
    finite = [jnp.nan_to_num(pool, nan=0.5) for pool in (problem.k_pool, problem.v_pool)]
    arrays = (problem.q, *finite, *problem.arrays[3:])
    errors = [problem.error(paged_attention(*arrays, window=w, implementation=implementation)) for w in (12, 11, 13)]
    assert errors[0] <= problem.tolerance and min(errors[1:]) > 10 * problem.tolerance
