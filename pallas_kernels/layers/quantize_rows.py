"""Quantises rows to one byte per value, each row with its own scale. One kernel quantises activations.

    scale[t] = max_k |y[t, k]| / largest        values[t, k] = y[t, k] / scale[t], rounded

Usually y is x. If x has gate and up side by side, y is activation(gate) * up, rounded to x's dtype. `largest` is the
largest value of the dtype: 127 for int8, 448 for float8_e4m3fn.
"""

import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Num

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.weights import QuantizedActivation

INT8, FP8 = jnp.dtype("int8"), jnp.dtype("float8_e4m3fn")
LARGEST = {INT8: 127.0, FP8: 448.0}
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
SIGMOIDS = ("silu", "gelu_tanh")  # activation functions that are x * sigmoid(z), which more kernels support
WIDEST = 32768  # columns that a Pallas program can hold in registers


def activate(x: Array, name: Activation) -> Array:
    """Returns an activation function of each value, inside or outside of a kernel: silu(x) = x * sigmoid(x), GELU, or
    relu2(x) = max(x, 0)^2 (arXiv:2109.08668).

    GELU (arXiv:1606.08415) and relu2 are computed in float32 and rounded to x's dtype.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in get_args(Activation):
        raise ValueError(f"activation: expected one of {', '.join(get_args(Activation))}, got {name!r}")
    if name == "silu":
        return x * jax.lax.logistic(x)
    wide = x.astype(jnp.float32)
    if name == "relu2":
        return jnp.square(jnp.maximum(wide, 0)).astype(x.dtype)
    return (wide * (_normal_cdf(wide) if name == "gelu" else jax.lax.logistic(gate_logit(wide, name)))).astype(x.dtype)


def gate_logit(x: Array, name: Activation) -> Array:
    """Returns z so that x * sigmoid(z) is the activation function "silu" or "gelu_tanh" of a float32 x.

    "gelu_tanh" approximates GELU by 0.5 x (1 + tanh(z / 2)), which equals x * sigmoid(z), where
    z / 2 = sqrt(2 / pi) (x + 0.044715 x^3). Unlike 1 + tanh, the sigmoid is exact to the last bits for negative z.
    """
    assert name in SIGMOIDS, name
    if name == "silu":
        return x
    factor = math.sqrt(8 / math.pi)
    return x * (factor + 0.044715 * factor * (x * x))


def _normal_cdf(x: Array) -> Array:
    """Returns the distribution function of the standard normal distribution, (1 + erf(x / sqrt(2))) / 2, in float32.

    The error is below 3e-7. jax's erf cannot be used in a Triton kernel.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, formula 7.1.26.
    """
    size = jnp.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * jnp.exp(-size * size)
    return jnp.where(x < 0, tail, 1 - tail)


def gated(x: Float[Array, "*rows twice"], activation: Activation) -> Float[Array, "*rows inner"]:
    """Returns activation(gate) * up, where x holds gate and up side by side (arXiv:2002.05202)."""
    gate, up = jnp.split(x, 2, axis=-1)
    return activate(gate, activation) * up


def scaled_rows(
    x: Float[Array, "*rows inner"], dtype: jnp.dtype, *, dims: int = 1
) -> tuple[Num[Array, "*rows inner"], Array]:
    """Quantises rows to int8 or float8_e4m3fn; a row is the last `dims` axes of x.

    Returns:
        The values in `dtype`, in x's shape, and the float32 scale of each row.
    """
    wide, axes = x.astype(jnp.float32), tuple(range(-dims, 0))
    order = jax.lax.bitcast_convert_type(jnp.abs(wide), jnp.int32)  # one instruction finds a warp's largest integer
    largest = jax.lax.bitcast_convert_type(jnp.max(order, axis=axes), jnp.float32)
    scale = jnp.maximum(largest / LARGEST[dtype], jnp.finfo(jnp.float32).tiny)
    values = wide / jnp.expand_dims(scale, axes)
    return (jnp.round(values) if dtype == INT8 else values).astype(dtype), scale


def _reference(x, *, gate):
    return scaled_rows(gated(x, gate) if gate else x, FP8)


def _kernel(
    # inputs
    x_ref,  # [T, K], or [T, 2 K]: gate and up
    # outputs
    values_ref,  # [T, K] float8_e4m3fn
    scale_ref,  # [T] float32
    # static parameters
    *,
    gate,
):
    """Quantises one row in one Pallas program; padding columns are zero and not written."""
    row, inner = pl.program_id(0), values_ref.shape[1]
    column = jnp.arange(pl.next_power_of_2(inner))
    inside = column < inner

    def load(first):
        return pltriton.load(x_ref.at[row, first + column], mask=inside, other=0).astype(jnp.float32)

    wide = load(0)
    if gate:
        wide = (activate(wide, gate) * load(inner)).astype(x_ref.dtype).astype(jnp.float32)
    values, scale_ref[row] = scaled_rows(wide, FP8)
    pltriton.store(values_ref.at[row, column], values, mask=inside)


def _pallas(x, *, gate, interpret):
    inner = x.shape[-1] // 2 if gate else x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    columns = 512 if inner <= 8192 else 1024  # per warp: for 14336 columns 16 warps are faster than 32
    values, scale = pl.pallas_call(
        functools.partial(_kernel, gate=gate),
        grid=(rows.shape[0],),
        out_shape=[
            jax.ShapeDtypeStruct((rows.shape[0], inner), FP8),
            jax.ShapeDtypeStruct((rows.shape[0],), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=min(max(pl.next_power_of_2(inner) // columns, 1), 32)),
        interpret=interpret,
        name="quantize_rows",
    )(rows)
    return values.reshape(*x.shape[:-1], inner), scale.reshape(x.shape[:-1])


@functools.partial(jax.jit, static_argnames=("gate", "implementation"))
def quantize_rows(
    x: Float[Array, "*rows width"], *, gate: Activation | None = None, implementation: Implementation = "auto"
) -> tuple[Float[Array, "*rows inner"], Float[Array, "*rows"]]:
    """Quantises rows to float8_e4m3fn; returns the values [*rows, inner] and the float32 scale of each row [*rows].

    Args:
        x: activations [*rows, inner], or [*rows, 2 * inner] if gated.
        gate: activation function; x has gate and up side by side, and activation(gate) * up is quantised. None: x is.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and rows are wider than the kernel supports.
    """
    unsupported = None if x.shape[-1] <= WIDEST else f"rows of at most {WIDEST} columns, got {x.shape[-1]}"
    kernel, reference = (functools.partial(run, gate=gate) for run in (_pallas, _reference))
    return dispatch(implementation, [Kernel(TRITON, kernel, unsupported)], reference, x)


def quantize_activation(
    x: Array, *, gate: Activation | None = None, implementation: str = "auto"
) -> QuantizedActivation:
    """Returns activations quantised for a weight of "fp8_dynamic"; the arguments are those of `quantize_rows`."""
    values, scale = quantize_rows(x, gate=gate, implementation=implementation)
    return QuantizedActivation(values, scale, x.dtype)
