"""Adds a layer's output to the residual stream and normalises the sum, in one kernel.

    sum = x + delta        normed = sum / sqrt(mean(sum^2) + eps) * weight        for every row of [..., hidden]

delta is given as partial sums, with a bias if it has one. It and `sum` are rounded to the model's dtype. The mean is
computed in float32. The quotient is rounded before it is multiplied by the weight, unless the weight is float32: then
the product is rounded instead. Before delta is added, it may be normed with a weight and an epsilon of its own
(`post_norm`, `post_eps`) and multiplied by a constant (`factor`). The rounded sum may be multiplied by a weight of one
number (`scale`). The result may be quantised to float8 for the next matrix product, as `quantize_rows` does. XLA
compiles the norm alone to two kernels; for a few rows, their time is nothing but launch overhead.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials, split_scales, sum_f32
from pallas_kernels.layers.quantize_rows import FP8, scaled_rows
from pallas_kernels.layers.row_by_row import row_by_row
from pallas_kernels.layers.weights import QuantizedActivation

WIDEST = 16384  # columns that a Pallas program can hold in registers


def quotients(parts: Sequence[Array], eps: float, size: int) -> list[Array]:
    """Returns x / sqrt(mean(x^2) + eps) in float32 for rows x of `size` columns, inside or outside of a kernel.

    The rows may be given in several parts [..., columns], each padded with zeros.
    """
    wide = [part.astype(jnp.float32) for part in parts]
    first, *others = (jnp.sum(part * part, axis=-1, keepdims=True) for part in wide)
    inverse = jax.lax.rsqrt(sum(others, first) / size + eps)
    return [part * inverse for part in wide]


def weighted(quotient: Array, weight: Array, dtype: jnp.dtype) -> Array:
    """Multiplies a float32 quotient by the weight of a norm; float32 weights are multiplied before rounding."""
    if weight.dtype == jnp.float32:
        return (quotient * weight).astype(dtype)
    return quotient.astype(dtype) * weight


def rms_norm(
    x: Float[Array, "*rows hidden"], weight: Float[Array, "*states hidden"], eps: float, size: int | None = None
) -> Float[Array, "*rows hidden"]:
    """Returns the root-mean-square norm of the last axis (arXiv:1910.07467), inside or outside of a kernel.

    The mean is computed in float32. The quotient is rounded to x's dtype before it is multiplied by the weight, unless
    the weight is float32: then the product is rounded instead.

    Args:
        x: rows to norm.
        weight: weight of each column.
        eps: number that is added to the mean square.
        size: number of columns if rows are padded with zeros; None: rows are not padded.
    """
    return weighted(quotients([x], eps, size or x.shape[-1])[0], weight, x.dtype)


def _sum(
    x: Array, delta: Array, post_norm: Array | None, scale: Array | None, *, eps: float, factor: float, size: int
) -> Array:
    """Returns scale * (x + factor * norm(delta)) for rows of `size` columns padded with zeros; rounds each step."""
    if post_norm is not None:
        delta = rms_norm(delta, post_norm, eps, size)
    if factor != 1.0:
        delta = (delta.astype(jnp.float32) * factor).astype(x.dtype)
    return x + delta if scale is None else (x + delta) * scale


def _reference(x, delta, bias, post_norm, scale, *weights, eps, post_eps, factor, quantize_output):
    several = len(delta) > 1
    step = sum_f32(part for parts in delta for part in parts) if several else reduce_partials(delta[0], jnp.float32)
    step = (step if bias is None else step + bias).astype(x.dtype)
    total = _sum(x, step, post_norm, scale, eps=post_eps, factor=factor, size=x.shape[-1])
    (quotient,) = quotients([total], eps, x.shape[-1])
    normed = [weighted(quotient, weight, x.dtype) for weight in weights]
    return total, *(array for rows in normed for array in (scaled_rows(rows, FP8) if quantize_output else (rows,)))


def _reference_by_row(x, delta, *weights, **options):
    flat = [parts.reshape(parts.shape[0], -1, x.shape[-1]).swapaxes(0, 1) for parts in delta]
    outputs = row_by_row(
        lambda x, delta: _reference(x, [parts.swapaxes(0, 1) for parts in delta], *weights, **options),
        x.reshape(-1, x.shape[-1]),
        flat,
    )
    return tuple(array.reshape(*x.shape[:-1], *array.shape[1:]) for array in outputs)


def _kernel(
    # inputs
    x_ref,  # [T, hidden], the model's dtype
    delta_refs,  # partial sums [parts, T, hidden] each
    scale_refs,  # float32 scales of rows [T] and of columns [hidden]; empty: no scales
    bias_ref,  # [hidden]; None: no bias
    post_ref,  # weight of delta's norm [hidden]; None: delta is not normed
    factor_ref,  # factor of the sum [1]; None: 1
    weight_refs,  # weight of each norm of the sum [hidden]
    # outputs
    total_ref,  # the sum [T, hidden]
    *norm_refs,  # for each norm of the sum the result [T, hidden] and, if quantised, its scale [T] float32
    # static parameters
    eps,
    post_eps,
    factor,
    hidden,
    quantize_output,
):
    """Adds and normalises one row in one Pallas program; padding columns are zero and not written."""
    per_norm = 1 + quantize_output  # number of output arrays per norm
    row, column = pl.program_id(0), jnp.arange(pl.next_power_of_2(hidden))
    inside = column < hidden
    load = functools.partial(pltriton.load, mask=inside, other=0)
    # Add up the parts, and add their sum to the residual stream.
    total = load(x_ref.at[row, column])
    delta = sum_f32([load(ref.at[part, row, column]) for ref in delta_refs for part in range(ref.shape[0])])
    if scale_refs:
        delta = delta * scale_refs[0][row] * load(scale_refs[1].at[column])
    if bias_ref is not None:
        delta = delta + load(bias_ref.at[column]).astype(jnp.float32)
    post_norm = None if post_ref is None else load(post_ref.at[column])
    scale = None if factor_ref is None else factor_ref[0]
    total = _sum(total, delta.astype(total.dtype), post_norm, scale, eps=post_eps, factor=factor, size=hidden)
    weights = [load(ref.at[column]) for ref in weight_refs]
    pltriton.store(total_ref.at[row, column], total, mask=inside)
    # Normalise, and quantise.
    (quotient,) = quotients([total], eps, hidden)
    for index, weight in enumerate(weights):
        normed = weighted(quotient, weight, total.dtype)
        if quantize_output:
            normed, norm_refs[1 + per_norm * index][row] = scaled_rows(normed, FP8)
        pltriton.store(norm_refs[per_norm * index].at[row, column], normed, mask=inside)


def warps_for(columns: int, parts: Array) -> int:
    """Returns the number of warps of a program that adds up partial sums [parts, ...] and norms a row of columns."""
    # Columns per warp. With several partial sums, a thread loads 16 bytes of each partial sum.
    warp_columns = 512 if parts.shape[0] == 1 else 512 // parts.dtype.itemsize
    return min(max(pl.next_power_of_2(columns) // warp_columns, 1), 32)


def _pallas(x, delta, bias, post_norm, scale, *weights, quantize_output, interpret, **numbers):
    hidden, (first, scales) = x.shape[-1], split_scales(delta[0])
    rows, scales = x.reshape(-1, hidden), tuple(scale.ravel() for scale in scales)
    delta = [parts.reshape(-1, *rows.shape) for parts in (first, *delta[1:])]
    same, row_scale = jax.ShapeDtypeStruct(rows.shape, x.dtype), jax.ShapeDtypeStruct(rows.shape[:1], jnp.float32)
    per_norm = [jax.ShapeDtypeStruct(rows.shape, FP8), row_scale] if quantize_output else [same]
    warps = max(warps_for(hidden, parts) for parts in delta)
    outputs = pl.pallas_call(
        functools.partial(_kernel, hidden=hidden, quantize_output=quantize_output, **numbers),
        grid=(rows.shape[0],),
        out_shape=[same, *per_norm * len(weights)],
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(rows, delta, scales, bias, post_norm, scale, weights)
    return tuple(array.reshape(*x.shape[:-1], *array.shape[1:]) for array in outputs)


@functools.partial(
    jax.jit, static_argnames=("eps", "post_eps", "factor", "quantize_output", "deterministic", "implementation")
)
def add_rms_norm(
    x: Float[Array, "*rows hidden"],
    delta: PartialSums | tuple[Array, ...],
    *weights: Float[Array, " hidden"],
    eps: float,
    bias: Float[Array, " hidden"] | None = None,
    post_norm: Float[Array, " hidden"] | None = None,
    post_eps: float | None = None,
    scale: Float[Array, " one"] | None = None,
    factor: float = 1.0,
    quantize_output: bool = False,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Any, ...]:
    """Returns the sum x + delta [*rows, hidden], then the root-mean-square norm of the sum with each weight.

    Source: arXiv:1910.07467.

    Args:
        x: residual stream [*rows, hidden].
        delta: partial sums [parts, *rows, hidden], as `split_matmul` returns them, or several arrays of these, without
            scales.
        weights: weight of each norm of the sum, [hidden] each.
        eps: number that is added to the mean square.
        bias: bias of delta; None: none.
        post_norm: weight of a norm of delta before it is added [hidden]; None: delta is not normed.
        post_eps: ``eps`` of this norm; None: the same.
        scale: factor of the sum, a weight of one number in x's dtype [1]; None: 1.
        factor: factor of delta, after its norm.
        quantize_output: return the norms as `QuantizedActivation`.
        deterministic: make the bits of a row's result independent of the number of rows. This option changes only the
            reference, because the kernel's results never depend on the number of rows.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and rows are wider than the kernel supports.
    """
    unsupported = None if x.shape[-1] <= WIDEST else f"rows of at most {WIDEST} columns, got {x.shape[-1]}"
    options = {"eps": eps, "post_eps": eps if post_eps is None else post_eps, "factor": factor}
    kernel, reference = (
        functools.partial(run, quantize_output=quantize_output, **options)
        for run in (_pallas, _reference_by_row if deterministic else _reference)
    )
    arrays = x, delta if isinstance(delta, tuple) else (delta,), bias, post_norm, scale
    total, *normed = dispatch(implementation, [Kernel(TRITON, kernel, unsupported)], reference, *arrays, *weights)
    if quantize_output:
        normed = [
            QuantizedActivation(values, scale, x.dtype) for values, scale in zip(normed[::2], normed[1::2], strict=True)
        ]
    return total, *normed
