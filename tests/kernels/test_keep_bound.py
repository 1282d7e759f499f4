"""`keep_bound` against sorting in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import keep_bound
from tests.h200 import compile_for_h200
from tests.reference.decoder import law

CONTROLS = [
    (k, p, m) for k in (0, 1, 5, 50, 2999, 4000) for p in (1.0, 0.999, 0.5, 0.01) for m in (0.0, 0.1, 0.5)
]  # top_k, top_p, min_p; 4000 exceeds the vocabulary
VOCAB = 3000


def problem(seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    logits = np.random.default_rng(seed).normal(0, 3, (len(CONTROLS), VOCAB)).astype(np.float32)
    k, p, m = zip(*CONTROLS, strict=True)
    return logits, [np.array(k, np.int32), np.array(p, np.float32), np.array(m, np.float32)]


def mismatches(bounds: np.ndarray, logits: np.ndarray) -> list[tuple]:
    """Cases that keep other tokens; at the nucleus's edge float32 sums may let in or leave out a token of 1e-5."""
    found = []
    for case, bound, row in zip(CONTROLS, bounds, logits, strict=True):
        k, p, m = case
        differ = (law(row, temperature=1.0, top_k=k, top_p=p, min_p=m) > 0) != (row >= bound)
        if law(row, temperature=1.0)[differ].sum() > 1e-5 * (p < 1):
            found.append(case)
    return found


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_the_kept_tokens_are_those_that_sorting_keeps(implementation: str) -> None:
    logits, controls = problem()
    assert not mismatches(np.asarray(keep_bound(logits, *controls, implementation=implementation)), logits)


def test_a_top_p_before_top_k_is_caught() -> None:
    """The negative control: without renormalising what top-k left, the nucleus is another."""
    logits, (k, p, m) = problem()
    apart = np.maximum(keep_bound(logits, k, np.ones_like(p), m), keep_bound(logits, 0 * k, p, m))
    assert mismatches(np.asarray(apart), logits)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_ties_stay_together_and_the_likeliest_always_stays(implementation: str) -> None:
    logits = jnp.asarray([[2.0, 5.0, 5.0, 5.0, -jnp.inf, 1.0], [0.0] * 6])
    bound = keep_bound(
        logits, jnp.asarray([2, 1]), jnp.asarray([1.0, 0.1]), jnp.zeros(2), implementation=implementation
    )
    assert bound.tolist() == [5.0, 0.0]


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_tokens_taken_out_before_weigh_nothing(implementation: str) -> None:
    """Two thirds are -inf, so that some top-k ask for more than are left: the bounds are those of the others alone."""
    logits, controls = problem()
    left = logits[:, ::3]
    logits[:, 1::3] = logits[:, 2::3] = -np.inf
    bounds = np.asarray(keep_bound(logits, *controls, implementation=implementation))
    assert not mismatches(bounds, left)


def test_a_row_without_controls_keeps_everything() -> None:
    bound = keep_bound(jnp.zeros((2, 9)), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2))
    assert bound.tolist() == [-jnp.inf] * 2


def test_it_is_one_kernel_on_an_h200() -> None:
    shape, rows = jax.ShapeDtypeStruct, 160
    controls = [shape((rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    program = compile_for_h200(keep_bound, shape((rows, 128256), jnp.float32), *controls, fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["keep_bound"]


@pytest.mark.gpu
def test_on_a_gpu_the_kept_tokens_are_those_that_sorting_keeps() -> None:
    logits, controls = problem()
    assert not mismatches(np.asarray(keep_bound(logits, *controls, implementation="pallas")), logits)
