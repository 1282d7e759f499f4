"""Compare `quantize_rows` with rounding in float64, and check its launches on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import quantize_rows
from tests.support.h200 import compile_for_h200


def rows(inner: int, dtype: str) -> jax.Array:
    """Return rows [2, 3, inner] whose magnitudes differ by up to a factor of a million; the last row is zero."""
    rng = np.random.default_rng(inner)
    x = rng.normal(size=(2, 3, inner)) * 10.0 ** rng.uniform(-3, 3, (2, 3, 1))
    x[1, 2] = 0
    return jnp.asarray(x, dtype)


def expected(x: jax.Array, gate: bool) -> np.ndarray:
    """Return the float64 values that are to be quantised; gated values are rounded once to the dtype of `x`."""
    wide = np.asarray(x, np.float64)
    if not gate:
        return wide
    gate, up = np.split(wide, 2, axis=-1)
    return np.asarray(jnp.asarray(gate / (1 + np.exp(-gate)) * up, x.dtype), np.float64)


def half_step_error(values: jax.typing.ArrayLike, scale: jax.typing.ArrayLike, wanted: np.ndarray) -> float:
    """Return the largest error of quantised rows, in units of half the distance between neighbouring float8 values."""
    scale = np.asarray(scale, np.float64)[..., None]
    got, exact = np.asarray(values, np.float64), wanted / scale
    step = 2.0 ** np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-6))) - 3, -9)
    return float((np.abs(got - exact) / (step / 2)).max())


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("inner", [64, 200])
def test_row_quantisation_with_a_scale_per_row_rounds_to_the_nearest_float8(
    inner: int, gate: bool, dtype: str, implementation: str
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


def test_row_quantisation_with_one_common_scale_has_an_error_above_tolerance() -> None:
    """Negative control: rows of small values have large relative errors."""
    x = rows(64, "float32")
    wanted = expected(x, gate=False)
    common, own = np.abs(wanted).max() / 448, np.maximum(np.abs(wanted).max(-1), 1e-37) / 448
    values = (wanted / common).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert half_step_error(values * common / own[..., None], own, wanted) > 2


def test_row_quantisation_of_too_wide_rows_raises() -> None:
    with pytest.raises(NotImplementedError, match="32768 columns, got 40000"):
        quantize_rows(jnp.zeros((1, 40000)), implementation="pallas")


@pytest.mark.parametrize(("inner", "gate"), [(4096, False), (8192, False), (28672, True)])
def test_row_quantisation_compiled_for_h200_is_one_launch_without_spills(inner: int, gate: bool) -> None:
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return quantize_rows(x, gate=gate, implementation="pallas")

    program = compile_for_h200(run, jax.ShapeDtypeStruct((320, inner), jnp.bfloat16), fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["quantize_rows"]


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [False, True])
def test_row_quantisation_on_gpu_matches_float64(gate: bool) -> None:
    x = rows(28672, "bfloat16")
    values, scale = quantize_rows(x, gate=gate, implementation="pallas")
    assert half_step_error(values, scale, expected(x, gate)) < 1.3
