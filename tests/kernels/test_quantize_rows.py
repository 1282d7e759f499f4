"""Compare `quantize_rows` with rounding in float64, and check its launches on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import quantize_rows
from pallas_kernels.layers.quantize_rows import Activation, activate
from tests.reference.activations import ACTIVATIONS
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200


def rows(inner: int, dtype: str) -> jax.Array:
    """Return rows [2, 3, inner] whose magnitudes differ by up to a factor of a million; the last row is zero."""
    rng = np.random.default_rng(inner)
    x = rng.normal(size=(2, 3, inner)) * 10.0 ** rng.uniform(-3, 3, (2, 3, 1))
    x[1, 2] = 0
    return on_device(x, dtype)


def expected(x: jax.Array, activation: str | None) -> np.ndarray:
    """Return the float64 values that are to be quantised; gated values are rounded once to the dtype of `x`."""
    wide = np.asarray(x, np.float64)
    if activation is None:
        return wide
    gate, up = np.split(wide, 2, axis=-1)
    return np.asarray(on_device(ACTIVATIONS[activation](gate) * up, x.dtype), np.float64)


def half_step_error(values: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, wanted: np.ndarray) -> float:
    """Return the largest error of quantised rows, in units of half the distance between neighbouring float8 values."""
    scale = np.asarray(scale, np.float64)[..., None]
    got, exact = np.asarray(values, np.float64), wanted / scale
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-6))) - 3, -9)
    return float((np.abs(got - exact) / (step / 2)).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_function_of_each_value_matches_float64(name: Activation, dtype: str) -> None:
    x = jnp.linspace(-10, 10, 4001).astype(dtype)
    got = np.asarray(jax.jit(activate, static_argnums=1)(x, name), np.float64)
    wide = np.asarray(x, np.float64)
    errors = {other: (np.abs(got - exact(wide)) / (1 + np.abs(wide))).max() for other, exact in ACTIVATIONS.items()}
    # GELU is rounded once. silu is rounded after each of three operations.
    assert errors.pop(name) < (5e-7 if dtype == "float32" else 2**-7 if name == "silu" else 2**-8)
    if dtype == "float32":
        assert min(errors.values()) > 1e-4, "control: the other functions"


def test_unknown_activation_function_raises_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"silu, gelu_tanh, gelu, relu2, got 'relu'"):
        quantize_rows(on_device(np.zeros((1, 64))), gate="relu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("inner", "gate", "dtype", "implementation"),
    cover.with_kernel(
        cover.diagonal(
            [(200, None), (64, "silu"), (64, "gelu"), (200, "gelu_tanh"), (64, None), (200, "silu")],
            ("float32", "bfloat16"),
        ),
        4,
    ),
)
def test_row_quantisation_with_a_scale_per_row_rounds_to_the_nearest_float8(
    inner: int, gate: Activation | None, dtype: str, implementation: str
) -> None:
    x = rows(inner, dtype)
    wanted = expected(x, gate)
    values, scale = quantize_rows(x, gate=gate, implementation=implementation)
    assert values.dtype == jnp.float8_e4m3fn and values.shape == wanted.shape
    loose = 2**-7 if gate and dtype == "bfloat16" else 2**-20  # the gated value may be rounded the other way
    np.testing.assert_allclose(scale, np.abs(wanted).max(-1) / 448, rtol=loose, atol=1e-37)
    # A little more than half a step, for halfway cases and for the rounding of gated values.
    assert half_step_error(values, scale, wanted) < 1.01 + 32 * loose
    assert not np.asarray(values, np.float32)[1, 2].any(), "a row of zeros stays one"
    if gate and dtype == "float32":
        others = [expected(x, other) for other in ACTIVATIONS if other != gate]
        assert all((np.abs(np.abs(other).max(-1) / 448 / scale - 1) > 1e-5).any() for other in others), "control"


def test_row_quantisation_with_one_common_scale_has_an_error_above_tolerance() -> None:
    """Negative control: rows of small values have large relative errors."""
    x = rows(64, "float32")
    wanted = expected(x, None)
    common, own = np.abs(wanted).max() / 448, np.maximum(np.abs(wanted).max(-1), 1e-37) / 448
    values = (wanted / common).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert half_step_error(values * common / own[..., None], own, wanted) > 2


def test_row_quantisation_of_too_wide_rows_raises() -> None:
    with pytest.raises(NotImplementedError, match="32768 columns, got 40000"):
        quantize_rows(on_device(np.zeros((1, 40000))), implementation="pallas")


@pytest.mark.parametrize(
    ("inner", "gate"), [(4096, None), (8192, None), (28672, "silu"), (28672, "gelu_tanh"), (18432, "gelu")]
)
def test_row_quantisation_compiled_for_h200_is_one_launch_without_spills(inner: int, gate: Activation | None) -> None:
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quantize_rows(x, gate=gate, implementation="pallas")

    program = compile_for_h200(run, jax.ShapeDtypeStruct((320, inner), jnp.bfloat16), fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["quantize_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [None, *ACTIVATIONS])
def test_row_quantisation_on_gpu_matches_float64(gate: Activation | None) -> None:
    x = rows(28672, "bfloat16")
    values, scale = quantize_rows(x, gate=gate, implementation="pallas")
    assert half_step_error(values, scale, expected(x, gate)) < 1.3
    if gate:
        assert half_step_error(values, scale, expected(x, "gelu" if gate == "silu" else "silu")) > 2, "control"
