"""Negative controls of `paged_attention`: faulty arguments lead to errors above the tests' tolerance."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.problems import FACTORS, AttentionCase, bits_of, make_problem


def _causal_instead_of_tree(arrays):
    q, *rest, bits = arrays
    chain = bits_of(np.arange(-1, q.shape[1] - 1, dtype=np.int32)[None])
    return (q, *rest, jnp.broadcast_to(chain, bits.shape))


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
    problem = make_problem(AttentionCase(dtype=dtype, lengths="full", queries=17)).finite()
    assert problem.error(paged_attention(*problem.arrays)) <= problem.tolerance
    assert problem.error(paged_attention(*fault(problem.arrays))) > 10 * problem.tolerance


@pytest.mark.once
def test_paged_attention_from_row_0_instead_of_1_has_an_error_above_tolerance():
    problem = make_problem(AttentionCase(start=1)).finite()
    assert problem.error(paged_attention(*problem.arrays, start=1)) <= problem.tolerance
    assert problem.error(paged_attention(*problem.arrays, start=0)) > 10 * problem.tolerance
