"""Compare `top_log_probs`, `top` and `top_in_order` with sorting in float64."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import top_log_probs
from pallas_kernels.sampling.top_log_probs import top, top_in_order
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200


def expected(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1, keepdims=True)) + wide.max(1, keepdims=True)
    ids = np.argsort(-wide, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(wide, ids, 1) - total, ids


def problem(vocab: int, ties: bool) -> np.ndarray:
    logits = np.random.default_rng(vocab).normal(0, 4, (3, vocab)).astype(np.float32)
    return logits.round(0) if ties else logits


@pytest.mark.parametrize(
    ("vocab", "k", "ties", "implementation"),
    cover.with_kernel(cover.diagonal([(3000, 10), (1025, 4), (7, 7), (1024, 1), (5000, 24)], (True, False)), 3),
)
def test_top_log_probs_of_random_logits_equal_those_by_sorting(
    vocab: int, k: int, ties: bool, implementation: str
) -> None:
    logits = problem(vocab, ties)
    log_probs, ids = top_log_probs(on_device(logits), k, implementation=implementation)
    wanted, wanted_ids = expected(logits, k)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(log_probs, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_top_log_probs_with_a_base_have_the_base_added(implementation: str) -> None:
    logits, base = on_device(problem(50, ties=False)), on_device([-1.0, -2.0, 0.0])
    log_probs, _ = top_log_probs(logits, 4, base=base, implementation=implementation)
    np.testing.assert_allclose(log_probs, expected(np.asarray(logits), 4)[0] + np.asarray(base)[:, None], atol=1e-5)


@pytest.mark.parametrize(("vocab", "implementation"), cover.with_kernel((2500, 50), 1))
def test_top_log_probs_with_shared_logits_are_those_of_the_sums(vocab: int, implementation: str) -> None:
    logits, shared, places = problem(vocab, ties=False), problem(vocab + 1, ties=False)[:, 1:], np.array([2, 0, 2])
    arrays = on_device(shared), on_device(places, jnp.int32)
    log_probs, ids = top_log_probs(on_device(logits), 4, shared=arrays, implementation=implementation)
    wanted, wanted_ids = expected(logits + shared[places], 4)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(log_probs, wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("ties", "implementation"), cover.with_kernel((True, False), 1))
def test_top_values_function_with_random_values_equals_sorting(ties: bool, implementation: str) -> None:
    values = problem(100, ties)
    best, places, groups = top(on_device(values), 10, group=7, implementation=implementation)
    wanted = np.argsort(-values, axis=1, kind="stable")[:, :10]
    np.testing.assert_array_equal(places, wanted)
    np.testing.assert_array_equal(groups, np.repeat(np.arange(15), 7)[wanted])
    np.testing.assert_array_equal(best, np.take_along_axis(values, wanted, 1))


@pytest.mark.parametrize(
    ("size", "k", "ties", "implementation"),
    cover.with_kernel(cover.diagonal([(710, 59), (64, 64), (1, 1), (1030, 1)], (True, False)), 3),
)
def test_top_in_order_function_with_random_values_equals_sorting(
    size: int, k: int, ties: bool, implementation: str
) -> None:
    values = problem(size, ties)
    values[1] = -np.inf  # all equal
    wanted = np.sort(np.argsort(-values, axis=1, kind="stable")[:, :k], axis=1)
    np.testing.assert_array_equal(top_in_order(on_device(values), k, implementation=implementation), wanted)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF])
def test_top_in_order_function_with_nan_counts_it_as_the_largest_value(bits: int, implementation: str) -> None:
    values = problem(100, ties=False)
    values[0].view(np.uint32)[7] = bits
    found = top_in_order(on_device(values), 5, implementation=implementation)
    rest = np.argsort(-np.delete(values[0], 7))[:4]
    np.testing.assert_array_equal(found[0], np.sort([7, *(rest + (rest >= 7))]))
    np.testing.assert_array_equal(found[1:], np.sort(np.argsort(-values[1:], axis=1)[:, :5], axis=1))


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("function", [top, top_in_order])
def test_top_functions_with_zeros_of_both_signs_treat_them_as_equal(function: Callable, implementation: str) -> None:
    found = function(on_device([[-0.0, -1.0, 0.0]]), 1, implementation=implementation)
    np.testing.assert_array_equal(found[1] if function is top else found, [[0]])


def test_top_log_probs_with_larger_id_first_among_equals_differ_from_sorting() -> None:
    """Negative control of the comparison with sorting."""
    logits = problem(3000, ties=True)
    flipped = 2999 - np.asarray(top_log_probs(on_device(logits[:, ::-1]), 10)[1])
    assert (flipped != expected(logits, 10)[1]).any()


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_top_log_probs_with_logits_of_minus_infinity_put_them_last(implementation: str) -> None:
    logits = np.full((1, 1030), -np.inf, np.float32)
    logits[0, [1028, 5]] = [1.0, 0.0]
    log_probs, ids = top_log_probs(on_device(logits), 5, implementation=implementation)
    assert ids[0].tolist() == [1028, 5, 0, 1, 2]
    assert np.isneginf(log_probs[0, 2:]).all()
    np.testing.assert_allclose(np.exp(log_probs[0, :2]), [1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))], rtol=1e-5)


def test_top_functions_with_too_many_candidates_raise() -> None:
    for function in top, top_in_order:
        with pytest.raises(NotImplementedError, match="rows of at most 4096, got 5000"):
            function(on_device(np.zeros((1, 5000))), 10, implementation="pallas")
    with pytest.raises(NotImplementedError, match="at most 4096 candidates fit: a vocabulary of 200000"):
        top_log_probs(on_device(np.zeros((1, 200000))), 24, implementation="pallas")


@pytest.mark.parametrize(("rows", "vocab", "k"), [(10, 32000, 10), (640, 32000, 10), (1, 128256, 16)])
def test_top_log_probs_compiled_for_h200_are_two_launches_without_spills(rows: int, vocab: int, k: int) -> None:
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    program = compile_for_h200(lambda x: top_log_probs(x, k, implementation="pallas"), logits, fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["top_log_probs", "top_log_probs_merge"]


@pytest.mark.gpu
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("size", [100, 710, 3630])
def test_top_functions_on_gpu_equal_sorting(size: int, ties: bool) -> None:
    values = problem(size, ties)
    wanted = np.argsort(-values, axis=1, kind="stable")[:, :59]
    np.testing.assert_array_equal(top(jnp.asarray(values), 59, implementation="pallas")[1], wanted)
    np.testing.assert_array_equal(top_in_order(jnp.asarray(values), 59, implementation="pallas"), np.sort(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("ties", [False, True])
def test_top_log_probs_on_gpu_equal_those_by_sorting(ties: bool) -> None:
    logits = problem(32000, ties)
    log_probs, ids = top_log_probs(jnp.asarray(logits), 10, implementation="pallas")
    wanted, wanted_ids = expected(logits, 10)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(log_probs, wanted, atol=1e-5, rtol=1e-5)
