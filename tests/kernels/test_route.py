"""Compare the kernel that chooses experts with its reference, which `tests/models/test_routing.py` checks, exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layers.experts.routing import Choice, route
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

CHOICES = {
    "Qwen3": Choice(128, 8),
    "DeepSeek-V2-Lite": Choice(64, 6, is_normalised=False),
    "gpt-oss": Choice(32, 4),
    "Mixtral": Choice(8, 2),
    "DeepSeek-V2": Choice(160, 6, is_normalised=False, factor=16.0, groups=8, chosen_groups=3, summed=1),
    "DeepSeek-V3": Choice(256, 8, scores="sigmoid", factor=2.5, groups=8, chosen_groups=4),
    "Kimi K2": Choice(384, 8, scores="sigmoid", factor=2.827),
    "sigmoid": Choice(12, 3, scores="sigmoid", is_normalised=False),
    "three groups of five": Choice(15, 6, scores="sigmoid", groups=3, chosen_groups=2),
    "groups of one": Choice(6, 3, groups=6, chosen_groups=5, summed=1),
    "one of one": Choice(1, 1),
    "all": Choice(5, 5, is_normalised=False),
    "Llama 4": Choice(16, 1, scores="sigmoid", is_normalised=False),
}
SHARED = {"DeepSeek-V2-Lite": 2, "Llama 4": 1, "DeepSeek-V3": 1}  # experts that every row uses


def problem(choice: Choice, rows: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Return logits, half of whose rows have many equal ones, and a correction with equal numbers too."""
    rng = np.random.default_rng(choice.count)
    logits = rng.normal(size=(rows, choice.count)).astype(np.float32)
    logits[::2] = logits[::2].round()
    return logits, rng.integers(-2, 3, choice.count).astype(np.float32) / 4


def run(
    logits: Any, choice: Choice, correction: Any = None, implementation: Any = "pallas", **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    experts, weights = route(on_device(logits), choice, correction=correction, implementation=implementation, **options)
    return np.asarray(experts), np.asarray(weights)


@pytest.mark.parametrize(
    ("name", "shared", "has_vectors"),
    [
        pytest.param(name, shared, has_vectors, marks=[pytest.mark.long] * ((row + has_vectors) % 2))
        for row, (name, shared) in enumerate([*((name, 0) for name in CHOICES), *SHARED.items()])
        for has_vectors in (False, True)
    ],
)
def test_route_kernel_chooses_the_same_experts_as_the_reference(name: str, shared: int, has_vectors: bool) -> None:
    choice = CHOICES[name]
    logits, correction = problem(choice)
    own, bias = (on_device(correction), on_device(correction[::-1])) if has_vectors else (None, None)
    experts, weights = run(logits, choice, own, bias=bias, shared=shared)
    expected = run(logits, choice, own, "reference", bias=bias, shared=shared)
    np.testing.assert_array_equal(experts, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=2e-6, atol=1e-7)
    assert (experts.dtype, weights.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
def test_shared_experts_have_the_sigmoid_of_the_last_logit_as_weight(implementation: str) -> None:
    choice = CHOICES["Qwen3"]
    logits, _ = problem(choice)
    gates = np.random.default_rng(0).normal(size=(len(logits), 1)).astype(np.float32)
    plain = run(logits, choice, implementation=implementation, shared=2)
    experts, weights = run(np.hstack([logits, gates]), choice, implementation=implementation, shared=2)
    np.testing.assert_array_equal(experts, plain[0])
    np.testing.assert_array_equal(weights[:-2], plain[1][:-2])
    np.testing.assert_allclose(weights[-2:], np.tile(1 / (1 + np.exp(-gates.T)), (2, 1)), rtol=1e-6)
    alone = run(np.hstack([logits, gates]), choice, implementation=implementation)
    np.testing.assert_array_equal(alone[1], weights[:-2])


def test_route_kernel_without_its_bias_differs() -> None:
    """Negative control of the comparison."""
    logits, bias = problem(CHOICES["gpt-oss"])
    expected = route(on_device(logits + bias), CHOICES["gpt-oss"], implementation="reference")
    for own, other in zip(run(logits, CHOICES["gpt-oss"], bias=on_device(bias)), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-6)
    assert np.any(run(logits, CHOICES["gpt-oss"])[0] != expected[0])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Qwen3", {"is_normalised": False}),
        ("Qwen3", {"factor": 2.0}),
        ("DeepSeek-V2-Lite", {"scores": "sigmoid"}),
        ("DeepSeek-V2", {"chosen_groups": 4}),
        ("DeepSeek-V3", {"summed": 1}),
        ("three groups of five", {"groups": 1, "chosen_groups": 1}),
    ],
    ids=str,
)
def test_route_kernel_with_another_trait_differs(name: str, fields: dict[str, Any]) -> None:
    """Negative controls of the comparison."""
    logits, _ = problem(CHOICES[name])
    pairs = zip(
        run(logits, CHOICES[name]),
        run(logits, replace(CHOICES[name], **fields), implementation="reference"),
        strict=True,
    )
    assert max(np.abs(own.astype(float) - other).max() for own, other in pairs) > 1e-2


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_normalised", [False, True])
def test_route_kernel_of_rows_with_infinite_logits_and_no_numbers_equals_the_reference(
    is_normalised: bool, scores: str
) -> None:
    """If a logit is not a number, no weight of its row is; experts have indices, so that they are multiplied."""
    choice = Choice(5, 2, scores=scores, is_normalised=is_normalised)
    rows = [1e30, -1e30, 0, 1, 1], [-np.inf, 2, -np.inf, 1, 2], [np.nan, 1, 2, 3, 0], [0, 4, np.nan, 3, 1], [np.nan] * 5
    logits = np.asarray(rows, np.float32)
    experts, weights = run(logits, choice)
    expected = run(logits, choice, implementation="reference")
    np.testing.assert_array_equal(experts, expected[0])
    np.testing.assert_allclose(weights, expected[1], rtol=1e-6)
    assert experts.min() >= 0 and experts.max() == 4
    assert np.isfinite(weights[:, :2]).all() and np.isnan(weights[:, 2:]).all()


def test_route_kernel_chooses_no_experts_for_unused_rows() -> None:
    logits, _ = problem(CHOICES["gpt-oss"], rows=3)
    used = on_device([True, False, True])
    experts, weights = run(logits, CHOICES["gpt-oss"], used=used)
    every, expected = run(logits, CHOICES["gpt-oss"])
    np.testing.assert_array_equal(experts, np.where(used, every, -1))
    np.testing.assert_array_equal(weights, expected)
    assert every.min() >= 0, "control"


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
@pytest.mark.parametrize("name", ["DeepSeek-V2", "sigmoid", "one of one"])
def test_experts_that_every_row_uses_come_last_with_weight_one(name: str, implementation: str) -> None:
    """A row that is not used has none of them, and without a number among its logits no weight of a row is one."""
    logits, used = problem(CHOICES[name], rows=4)[0], np.asarray([True, False, True, True])
    logits[2, 0] = np.nan
    options: dict[str, Any] = {"implementation": implementation, "used": on_device(used)}
    experts, weights = run(logits, CHOICES[name], **options)
    shared = run(logits, CHOICES[name], shared=3, **options)
    last = np.where(used, CHOICES[name].count + np.arange(3)[:, None], -1)
    np.testing.assert_array_equal(shared[0], np.concatenate([experts, last]))
    np.testing.assert_array_equal(
        shared[1], np.concatenate([weights, np.where(np.arange(4) == 2, np.nan, np.ones((3, 4)))])
    )


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek-V3"])
def test_route_kernel_gives_a_row_the_same_bits_among_other_rows(name: str) -> None:
    logits, correction = problem(CHOICES[name])
    whole = run(logits, CHOICES[name], on_device(correction))
    for rows in ([3], [23, 5, 17]):
        for own, of_all in zip(run(logits[rows], CHOICES[name], on_device(correction)), whole, strict=True):
            np.testing.assert_array_equal(own, of_all[:, rows])


def test_route_kernel_of_too_many_experts_raises() -> None:
    with pytest.raises(NotImplementedError, match="at most 512 experts, got 1024"):
        run(np.zeros((1, 1024), np.float32), Choice(1024, 8))


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek-V3"])
def test_route_compiled_for_h200_is_one_launch_without_spills(name: str) -> None:
    choice, shape = CHOICES[name], jax.ShapeDtypeStruct
    arrays = shape((8, choice.count), jnp.float32), shape((choice.count,), jnp.float32), shape((8,), jnp.bool)
    choose = partial(route, choice=choice)
    program = compile_for_h200(
        lambda logits, correction, used: choose(logits, correction=correction, used=used), *arrays, fail_on_spills=True
    )
    assert [launch.name for launch in program.launches] == ["route"]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shared"), [*((name, 0) for name in CHOICES), *SHARED.items()])
def test_route_on_gpu_equals_the_reference(name: str, shared: int) -> None:
    logits, correction = problem(CHOICES[name], rows=300)
    logits[7, 0] = np.nan
    experts, weights = run(logits, CHOICES[name], jnp.asarray(correction), shared=shared)
    expected = run(logits, CHOICES[name], jnp.asarray(correction), implementation="reference", shared=shared)
    assert np.isnan(weights[:, 7]).all()
    for own, other in ((experts, expected[0]), (weights, expected[1])):
        np.testing.assert_allclose(np.delete(own, 7, 1), np.delete(other, 7, 1), rtol=1e-5, atol=1e-6)
    alone = run(logits[5:6], CHOICES[name], jnp.asarray(correction), shared=shared)
    np.testing.assert_array_equal(alone[1][:, 0], weights[:, 5])
