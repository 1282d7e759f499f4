"""Compare `add_rms_norm` with float64, and on a GPU the kernel with the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm
from pallas_kernels.layers.partial_sums import Scaled
from tests.kernels.test_quantize_rows import half_step_error
from tests.support import cover
from tests.support.arrays import on_device

EPS = 1e-5


def inputs(hidden: int, dtype: str, parts: int = 1) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
    rng = np.random.default_rng(parts)
    x = on_device(rng.normal(size=(3, 5, hidden)), dtype)
    delta = on_device(rng.normal(size=(parts, 3, 5, hidden)), dtype if parts == 1 else "float32")
    return x, delta, on_device(rng.normal(size=hidden), dtype)


def added(x: jnp.ndarray, delta: jnp.ndarray) -> jnp.ndarray:
    """Return x plus the total of the partial sums; the total and the result are each rounded to the model's dtype."""
    return x + on_device(np.asarray(delta, np.float64).sum(0), x.dtype)


def oracle(x: jnp.ndarray, delta: jnp.ndarray, weight: jnp.ndarray, eps: float = EPS) -> np.ndarray:
    total = np.asarray(added(x, delta), np.float64)
    return total / np.sqrt((total**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


@pytest.mark.parametrize(
    ("hidden", "parts", "dtype", "implementation"),
    cover.with_kernel(cover.diagonal([(64, 1), (96, 2), (4096, 4), (4096, 8)], ("float32", "bfloat16")), 2),
)
def test_residual_norm_of_random_rows_matches_float64(hidden: int, parts: int, dtype: str, implementation: str) -> None:
    x, delta, weight = inputs(hidden, dtype, parts)
    total, normed = add_rms_norm(x, delta, weight, eps=EPS, implementation=implementation)
    unit = 2**-8 if dtype == "bfloat16" else 2**-20  # a float32 sum of the partial sums may round the other way
    wanted = np.asarray(added(x, delta), np.float32)
    np.testing.assert_allclose(np.asarray(total, np.float32), wanted, rtol=unit * (parts > 1), atol=unit * (parts > 1))
    # Three roundings: of the sum, which a compiler may leave out, of the quotient, and of the product.
    tolerance = 3 * unit
    np.testing.assert_allclose(
        np.asarray(normed, np.float64), oracle(x, delta, weight), rtol=tolerance, atol=tolerance * (parts > 1) + 1e-6
    )


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_residual_norm_of_bfloat16_partial_sums_adds_them_in_float32(implementation: str) -> None:
    x, delta, weight = inputs(96, "bfloat16", 8)
    delta = delta.astype(x.dtype)  # a float32 sum of so few values is exact
    total, _ = add_rms_norm(x, delta, weight, eps=EPS, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(added(x, delta), np.float32))
    first, *others = delta
    assert np.any(np.asarray(total != x + sum(others, first))), "control: a sum in bfloat16"


@pytest.mark.parametrize(("hidden", "parts", "implementation"), cover.with_kernel([(4096, 4), (96, 1)], 1))
def test_residual_norm_with_quantize_output_returns_the_norm_quantised(
    hidden: int, parts: int, implementation: str
) -> None:
    x, delta, weight = inputs(hidden, "bfloat16", parts)
    total, quantized = add_rms_norm(x, delta, weight, eps=EPS, quantize_output=True, implementation=implementation)
    wanted, normed = add_rms_norm(x, delta, weight, eps=EPS, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(wanted, np.float32))
    # A compiler may leave out the rounding to bfloat16 in between: a little more than half a step of float8.
    assert half_step_error(quantized.values, quantized.scale, np.asarray(normed, np.float64)) < 1.3
    assert half_step_error(quantized.values, quantized.scale, np.asarray(normed, np.float64) + 0.25) > 2, (
        "control: another norm"
    )


@pytest.mark.parametrize(
    ("quantize_output", "deterministic", "implementation"),
    cover.with_kernel(cover.diagonal((False, True), (False, True)), 2),
)
def test_residual_norm_with_two_weights_equals_two_separate_norms(
    quantize_output: bool, deterministic: bool, implementation: str
) -> None:
    x, delta, weight = inputs(96, "float32", 2)
    call = partial(add_rms_norm, x, delta, eps=EPS, deterministic=deterministic, implementation=implementation)
    total, first, second = call(weight, weight[::-1], quantize_output=quantize_output)
    np.testing.assert_allclose(total, added(x, delta), rtol=1e-6, atol=1e-6)
    own, other = oracle(x, delta, weight[::-1]), oracle(x, delta, weight)
    if quantize_output:
        assert half_step_error(second.values, second.scale, own) < 1.1
        assert half_step_error(second.values, second.scale, other) > 2, "control"
    else:
        np.testing.assert_allclose(second, own, rtol=1e-5, atol=1e-5)
        assert np.abs(np.asarray(second) - other).max() > 0.1, "control"
    alone = call(weight, quantize_output=quantize_output)[1]
    jax.tree.map(np.testing.assert_array_equal, first, alone)


OPTIONS: dict[str, dict[str, Any]] = {
    "Granite": {"factor": 0.22, "norms": 1},
    "Gemma": {"post_norm": True, "norms": 1, "weights": "float32"},
    "OLMo": {"post_norm": True, "norms": 0, "weights": "float32"},
    "Muse": {"post_norm": True, "norms": 1, "weights": "float32", "post_eps": 0.2},
    "Gemma 4": {"post_norm": True, "norms": 1, "weights": "float32", "scale": 0.37},
    "all": {"post_norm": True, "factor": 0.22, "norms": 2, "weights": "bfloat16", "scale": 0.37},
}


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    return np.asarray(on_device(values, dtype), np.float64)


def normed(values: np.ndarray, weight: np.ndarray, dtype: Any, eps: float = EPS) -> np.ndarray:
    """Return the float64 norm of rows; a bfloat16 weight multiplies the rounded quotient."""
    quotient = values / np.sqrt((values**2).mean(-1, keepdims=True) + eps)
    quotient = quotient if weight.dtype == jnp.float32 else rounded(quotient, dtype)
    return rounded(quotient * np.asarray(weight, np.float64), dtype)


def float64_outputs(
    x: Any,
    delta: Any,
    weights: list[Any],
    post_norm: Any,
    factor: float,
    scale: Any = 1.0,
    post_eps: float = EPS,
) -> list[np.ndarray]:
    """Return the sum and its norms, computed in float64; each step that the module names is rounded to x's dtype."""
    step = rounded(np.asarray(delta, np.float64).sum(0), x.dtype)
    step = step if post_norm is None else normed(step, post_norm, x.dtype, post_eps)
    total = rounded(np.asarray(x, np.float64) + rounded(step * factor, x.dtype), x.dtype)
    total = rounded(total * np.asarray(scale, np.float64), x.dtype)
    return [total, *(normed(total, weight, x.dtype) for weight in weights)]


def mean_error(got: Sequence[Any], wanted: Sequence[np.ndarray]) -> float:
    """Return the largest mean error of the outputs, in units of the mean size of their values."""
    pairs = [(np.asarray(one, np.float64), other) for one, other in zip(got, wanted, strict=True)]
    return max(float(np.abs(one - other).mean() / np.abs(other).mean()) for one, other in pairs)


@pytest.mark.parametrize(
    ("family", "dtype", "implementation"),
    cover.with_kernel(cover.diagonal(list(OPTIONS)[::-1], ("bfloat16", "float32")), 2),
)
def test_residual_norm_with_options_of_each_family_matches_float64(
    family: str, dtype: str, implementation: str
) -> None:
    check_options(family, dtype, implementation=implementation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_residual_norm_with_options_matches_float64(dtype: str) -> None:
    check_options("all", dtype, implementation="reference", deterministic=True)


def check_options(family: str, dtype: str, **fixed: Any) -> None:
    """Assert that the sum and its norms match float64, and differ from float64 without one of the options."""
    options = OPTIONS[family]
    x, delta, weight = inputs(96, dtype, 2)
    weight = weight.astype(options.get("weights", dtype))
    weights, post = [weight, weight[::-1]][: options["norms"]], weight * 0.5 if "post_norm" in options else None
    factor = options.get("factor", 1.0)
    post_eps = options.get("post_eps", EPS)
    run = partial(add_rms_norm, x, delta, eps=EPS, post_eps=options.get("post_eps"), **fixed)
    scale = on_device([options["scale"]], dtype) if "scale" in options else None
    got = run(*weights, post_norm=post, scale=scale, factor=factor)
    assert [(one.shape, one.dtype) for one in got] == [(x.shape, x.dtype)] * (1 + len(weights))
    error = partial(mean_error, got)
    outputs = partial(float64_outputs, x, delta, weights, scale=1.0 if scale is None else scale, post_eps=post_eps)
    # A compiler may leave out roundings; most values are equal nevertheless.
    assert error(outputs(post, factor)) < (2e-6 if dtype == "float32" else 2e-3)
    if factor != 1:
        assert error(outputs(post, 1.0)) > 0.1, "control: without the factor"
    if post is not None:
        assert error(outputs(None, factor)) > 0.1, "control: without the norm of delta"
        assert error(outputs(post - 1, factor)) > 0.1, "control: a weight without its 1"
        late = [normed(one, post, x.dtype) for one in outputs(None, factor)]
        assert error(late) > 0.1, "control: the norm after the sum"
    if post_eps != EPS:
        assert error(outputs(post, factor, post_eps=EPS)) > 0.01, "control: the epsilon of the other norms"
    if scale is not None:
        assert error(outputs(post, factor, scale=1.0)) > 0.1, "control: without the factor of the sum"


@pytest.mark.parametrize(("is_post_norm", "implementation"), cover.with_kernel((True, False), 1))
def test_residual_norm_multiplies_float32_weights_before_it_rounds(is_post_norm: bool, implementation: str) -> None:
    """One of the sum's operands is zero, so the norm of the other operand is the only operation that rounds."""
    x, _, weight = inputs(4096, "bfloat16")
    weight = 1 + 2e-3 * weight.astype(jnp.float32)  # bfloat16 cannot represent these weights
    run = partial(add_rms_norm, eps=EPS, implementation=implementation)

    def norm_of_x(weight: jnp.ndarray) -> Any:
        return run(0 * x, x[None], post_norm=weight)[0] if is_post_norm else run(x, 0 * x[None], weight)[1]

    wanted = normed(np.asarray(x, np.float64), np.asarray(weight), x.dtype)
    assert mean_error([norm_of_x(weight)], [wanted]) < 1e-5
    assert mean_error([norm_of_x(weight.astype(x.dtype))], [wanted]) > 1e-3, "control: rounded weights"


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_residual_norm_multiplies_delta_by_a_factor_that_bfloat16_cannot_represent(implementation: str) -> None:
    x, delta, _ = inputs(4096, "bfloat16")
    (got,) = add_rms_norm(0 * x, delta, eps=EPS, factor=0.22, implementation=implementation)
    wanted = rounded(np.asarray(delta[0], np.float64) * 0.22, x.dtype)
    np.testing.assert_array_equal(np.asarray(got, np.float64), wanted)
    assert np.any(np.asarray(got != delta[0] * on_device(0.22, x.dtype))), "control: a rounded factor"


@pytest.mark.parametrize(("parts", "implementation"), cover.with_kernel((1, 2), 1))
def test_residual_norm_of_scaled_delta_applies_row_and_column_scales(parts: int, implementation: str) -> None:
    x, delta, weight = inputs(96, "float32", parts)
    row_scale = on_device(np.arange(1, 1 + x[..., 0].size, dtype=jnp.float32)).reshape(x.shape[:-1]) / 8
    scale = on_device(np.arange(96, dtype=jnp.float32)) / 64
    scaled = Scaled(delta, row_scale, scale)
    options: dict[str, Any] = {"post_norm": weight[::-1], "factor": 0.5} if parts == 2 else {}
    call = partial(add_rms_norm, eps=EPS, implementation=implementation, **options)
    for got, wanted in zip(call(x, scaled, weight), call(x, delta * row_scale[..., None] * scale, weight), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    quantized = call(x, scaled, weight, quantize_output=True)[1]
    assert half_step_error(quantized.values, quantized.scale, np.asarray(call(x, scaled, weight)[1], np.float64)) < 1.3
    # A norm of delta cancels the row scales.
    for changed in ({"scale": scale[::-1]}, {"row_scale": row_scale[:, ::-1]})[: 1 if options else 2]:
        wrong = dataclasses.replace(scaled, **changed)
        assert np.abs(np.asarray(call(x, wrong, weight)[0] - call(x, scaled, weight)[0])).max() > 0.1


@pytest.mark.parametrize(("deterministic", "implementation"), cover.with_kernel((False, True), 1))
def test_residual_norm_adds_several_arrays_of_partial_sums_and_a_bias(implementation: str, deterministic: bool) -> None:
    x, delta, weight = inputs(96, "bfloat16", 4)
    parts, bias = delta[:3].astype(x.dtype), weight[::-1]
    call = partial(add_rms_norm, eps=EPS, implementation=implementation, deterministic=deterministic)

    def wanted(*rows: Any) -> list[np.ndarray]:
        terms = [np.broadcast_to(np.asarray(one, np.float64), x.shape) for one in rows]
        return float64_outputs(x, np.stack(terms), [weight], None, 1.0)

    got = call(x, (parts, delta), weight, bias=bias)
    assert mean_error(got, wanted(*parts, *delta, bias)) < 2e-3
    assert mean_error(got, wanted(*parts, *delta)) > 0.1, "control: without the bias"
    assert mean_error(got, wanted(*parts, bias)) > 0.1, "control: without the second array"
    (total,) = call(x, delta, bias=bias)
    assert mean_error([total], wanted(*delta, bias)[:1]) < 2e-3


def test_residual_norm_of_small_rows_differs_from_a_norm_without_eps() -> None:
    """Negative control: the comparison with float64 detects a missing eps."""
    x, delta, weight = inputs(64, "float32")
    _, normed = add_rms_norm(x * 1e-3, delta * 1e-3, weight, eps=EPS)
    assert np.abs(np.asarray(normed) - oracle(x * 1e-3, delta * 1e-3, weight, 0.0)).max() > 0.1


def test_residual_norm_of_too_wide_rows_raises() -> None:
    x = on_device(np.zeros((1, 20000)))
    with pytest.raises(NotImplementedError, match="16384 columns"):
        add_rms_norm(x, x[None], on_device(np.zeros(20000)), eps=EPS, implementation="pallas")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", OPTIONS)
def test_residual_norm_on_gpu_with_options_of_each_family_matches_float64(family: str, dtype: str) -> None:
    options = OPTIONS[family]
    x, delta, weight = inputs(3584, dtype, 4)
    weight = weight.astype(options.get("weights", dtype))
    weights, post = [weight, weight[::-1]][: options["norms"]], weight * 0.5 if "post_norm" in options else None
    scale, factor = jnp.asarray([options["scale"]], dtype) if "scale" in options else None, options.get("factor", 1.0)
    run = partial(add_rms_norm, x, delta, eps=EPS, post_eps=options.get("post_eps"), implementation="pallas")
    got = run(*weights, post_norm=post, scale=scale, factor=factor)
    numbers = 1.0 if scale is None else scale, options.get("post_eps", EPS)
    wanted = float64_outputs(x, delta, weights, post, factor, *numbers)
    assert mean_error(got, wanted) < (2e-6 if dtype == "float32" else 2e-3)
    assert mean_error(got, float64_outputs(x, delta, weights, None, 1.0)) > 0.1, "control: without the options"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hidden", [96, 4096, 8192])
def test_residual_norm_on_gpu_matches_the_reference(hidden: int, dtype: str) -> None:
    arrays = inputs(hidden, dtype, parts=4)
    for got, wanted in zip(
        add_rms_norm(*arrays, eps=EPS, implementation="pallas"),
        add_rms_norm(*arrays, eps=EPS, implementation="reference"),
        strict=True,
    ):
        tolerance = 2**-7 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(
            np.asarray(got, np.float32), np.asarray(wanted, np.float32), rtol=tolerance, atol=1e-6
        )
