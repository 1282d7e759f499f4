"""Compare `paged_attention` over a latent cache, whose values are channels of the keys, with float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from tests.kernels.problems import AttentionCase, Problem, make_problem
from tests.kernels.test_deterministic_attention import paths_of
from tests.support import cover

LATENT = {48: 32, 80: 64, 96: 64, 192: 128}  # channels of a value, by channels of a key
CASES = [
    AttentionCase(dim=48, group=8),
    AttentionCase(dim=96, tree="causal", dtype="bfloat16", pool="float8_e4m3fn", lengths="full"),
    AttentionCase(dim=48, queries=17, tree="padded", page=1, start=1),
    AttentionCase(dim=80, queries=60, dtype="bfloat16", group=1),
    AttentionCase(dim=192, queries=1, tree="causal", group=8, page=64, scale=0.3),
    AttentionCase(dim=80, queries=17, window=40, softcap=2.0, sinks=True, lengths="full"),
]


def latent(case: AttentionCase) -> Problem:
    """Return a problem in which the first channels of a key are the value: in the pool of values, and in no other."""
    problem, size = make_problem(case), LATENT[case.dim]
    whole = problem.k_pool
    problem = dataclasses.replace(problem, v_pool=whole[..., :size])
    expected = problem.expected_with()
    return dataclasses.replace(problem, k_pool=whole[..., size:], expected=expected)


def attend(problem: Problem, implementation: str, **options: Any) -> Any:
    return paged_attention(*problem.arrays, **problem.options, implementation=implementation, **options)


def check(case: AttentionCase, implementation: str) -> None:
    problem = latent(case)
    assert problem.k_pool.shape[3] + problem.v_pool.shape[3] == problem.q.shape[3] == case.dim
    assert problem.error(attend(problem, implementation)) <= problem.tolerance
    size = LATENT[case.dim]
    plain = dataclasses.replace(problem, q=problem.q.at[..., size:].set(0))
    swapped = dataclasses.replace(problem, q=jnp.roll(problem.q, size, axis=-1))
    for wrong in (plain, swapped):  # controls: without the rotated channels, and with keys in the other order
        assert problem.error(attend(wrong, implementation)) > 2 * problem.tolerance


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(CASES, 2, is_thinned=True))
def test_attention_over_a_latent_cache_matches_float64(case: AttentionCase, implementation: str) -> None:
    check(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_over_a_latent_cache_on_a_gpu_matches_float64(case: AttentionCase) -> None:
    check(case, "pallas")


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_deterministic_attention_over_a_latent_cache_matches_float64_with_equal_bits(implementation: str) -> None:
    problem = latent(AttentionCase(dim=48, group=8, tree="random"))
    paths = paths_of(problem)
    arrays = (*problem.arrays[:-1], None)
    options: dict[str, Any] = {**problem.options, "deterministic": True, "implementation": implementation}
    out = paged_attention(*arrays, paths=paths, **options)
    assert problem.error(out) <= problem.tolerance
    assert paths is not None
    alone = paged_attention(
        problem.q[2:3, 4:], *arrays[1:3], *(x[2:3] for x in arrays[3:5]), None, paths=paths[2:3, 4:], **options
    )
    np.testing.assert_array_equal(alone[0, 0], out[2, 4])


def test_attention_with_queries_of_other_channels_than_the_pools_raises() -> None:
    problem = latent(AttentionCase(dim=48))
    with pytest.raises(ValueError, match="or of 40 channels together"):
        paged_attention(problem.q[..., :40], *problem.arrays[1:], **problem.options)
