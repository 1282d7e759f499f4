"""A product with a weight of one byte per value that has a scale for each group of columns in each row.

    parts[s, t, n] = sum_k x[t, k] values[n, k] scale[n, k // group]  over the s-th of S equal parts of k

The sum over s is x @ w.T. The kernel reads the weight's bytes, widens a tile of them in registers, and multiplies the
sum over a step of k by the step's scales, so no widened copy of the weight is written to memory. The scales of blocks
of rows and columns, as DeepSeek-V3 stores them (arXiv:2412.19437 section 3.3), are repeated for each row of a block.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Num

from pallas_kernels.dispatch import Implementation, dispatch

STEP = 128  # most values of k per loop iteration; a row of them is 128 bytes
LEAST_STEP = 32  # fewest values of k in a product of 8-bit operands on tensor cores
FEW_ROWS = 16  # smallest side of a product on tensor cores
MOST_ROWS = 64  # most rows of x per Pallas program


def widened(values: Num[Array, "out inner"], scale: Float[Array, "out groups"]) -> Float[Array, "out inner"]:
    """Returns the weight in float32: each value times the scale of its row and group."""
    return values.astype(jnp.float32) * jnp.repeat(scale, values.shape[1] // scale.shape[1], axis=1)


def _reference(x, values, scale, *, parts, dtype):
    """Computes the product from a widened copy of the weight; the sums are float32."""
    pieces, weights = (
        array.astype(jnp.float32).reshape(array.shape[0], parts, -1) for array in (x, widened(values, scale))
    )
    dims = (((2,), (2,)), ((1,), (1,)))
    return jax.lax.dot_general(pieces, weights, dims, precision=jax.lax.Precision.HIGHEST).astype(dtype)


def _kernel(
    # inputs
    x_ref,  # [T, K]
    values_ref,  # [N, K], one byte per value
    scale_ref,  # [N, K / group] float32
    # outputs
    parts_ref,  # [parts, T, N]
    # static parameters
    *,
    rows,  # T
    row_tile,  # rows of x per Pallas program
    out_tile,  # rows of the weight per Pallas program
    steps,  # loop iterations per part of k
    inner,  # values of k per loop iteration, a divisor of `group`
    group,  # values of k per scale
):
    """Computes one output tile, summed over one part of k, in one Pallas program.

    The weight is the first operand of the tensor-core product, because the first operand can have more rows than the
    second.
    """
    part = pl.program_id(2)
    row = pl.program_id(0) * row_tile + jnp.arange(row_tile)
    out = pl.program_id(1) * out_tile + jnp.arange(out_tile)
    is_row, is_out = row < rows, out < values_ref.shape[0]

    def step(index, total):
        first = (part * steps + index) * inner
        column = first + jnp.arange(inner)[None, :]
        x = pltriton.load(x_ref.at[row[:, None], column], mask=is_row[:, None])  # padding is arbitrary and not stored
        values = pltriton.load(values_ref.at[out[:, None], column], mask=is_out[:, None]).astype(x.dtype)
        scale = pltriton.load(scale_ref.at[out, first // group], mask=is_out)
        return total + pltriton.dot(values, x, trans_b=True) * scale[:, None]

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((out_tile, row_tile), jnp.float32))
    at = parts_ref.at[part, row[None, :], out[:, None]]
    pltriton.store(at, total.astype(parts_ref.dtype), mask=is_row[None, :] & is_out[:, None])


def _pallas(x, values, scale, *, parts, dtype, interpret):
    (rows, inner), out, group = x.shape, values.shape[0], values.shape[1] // scale.shape[1]
    step = math.gcd(group, STEP)
    row_tile = min(max(pl.next_power_of_2(rows), FEW_ROWS), MOST_ROWS)
    is_few = rows <= MOST_ROWS
    out_tile = 64 if rows > FEW_ROWS and is_few else 128
    sizes = {"rows": rows, "row_tile": row_tile, "out_tile": out_tile, "steps": inner // parts // step}
    return pl.pallas_call(
        functools.partial(_kernel, **sizes, inner=step, group=group),
        grid=(pl.cdiv(rows, row_tile), pl.cdiv(out, out_tile), parts),  # neighbours share rows of the weight
        out_shape=jax.ShapeDtypeStruct((parts, rows, out), dtype),
        # Up to 64 rows, five stages fit into the 99 KiB of shared memory of compute capability 8.9. The larger tiles
        # of more rows would not fit, and would exceed the registers of four warps.
        compiler_params=pltriton.CompilerParams(num_warps=4 if is_few else 8, num_stages=5 if is_few else 3),
        interpret=interpret,
        name="grouped_matmul",
    )(x, values, scale)


def _unsupported(x: Array, values: Array, scale: Array, parts: int) -> str | None:
    """Returns a text that says which limit of the kernel a call exceeds; None if the call is supported."""
    group = values.shape[1] // scale.shape[1]
    step = math.gcd(group, STEP)
    if step < LEAST_STEP or values.shape[1] % (parts * step):
        return f"groups must be multiples of {LEAST_STEP} columns, got {group}"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x must be bfloat16 or float16, got {x.dtype}"
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "parts", "implementation"))
def grouped_matmul(
    x: Float[Array, "*rows inner"],
    values: Num[Array, "out inner"],
    scale: Float[Array, "out groups"],
    dtype: jnp.dtype,
    *,
    parts: int = 1,
    implementation: Implementation = "auto",
) -> Float[Array, "parts *rows out"]:
    """Returns x @ w.T as partial sums [parts, *rows, out], which are computed in float32; w is `widened`.

    Args:
        x: activations [*rows, inner].
        values: int8 or float8 values of the weight [out, inner].
        scale: float32 scales [out, groups]; each belongs to inner / groups columns of a row.
        dtype: dtype of the result.
        parts: number of equal parts into which the sum over k is divided.
        implementation: as in `paged_attention`. The kernel needs activations of two bytes per value and groups that are
            multiples of 32 columns. The reference writes a widened copy of the weight.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the call.
    """
    rows, out = x.shape[:-1], values.shape[0]
    options = {"parts": parts, "dtype": dtype}
    kernel, reference = functools.partial(_pallas, **options), functools.partial(_reference, **options)
    flat = x.reshape(-1, x.shape[-1])
    sums = dispatch(implementation, _unsupported(x, values, scale, parts), kernel, reference, flat, values, scale)
    return sums.reshape(parts, *rows, out)
