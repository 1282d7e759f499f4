"""A product with a weight of four or eight bits per value that has a scale for each group of columns in each row.

    parts[s, t, n] = sum_k x[t, k] values[n, k] scale[n, k // group]  over the s-th of S equal parts of k

Of packed weights (`int4`), which may have zero points too, values[n, k] - zeros[n, k // group] is multiplied.

The sum over s is x @ w.T. The kernel reads the weight's bytes, widens a tile of them in registers, and multiplies the
sum over a step of k by the step's scales, so no widened copy of the weight is written to memory, and no value is
rounded. On a Hopper GPU `int4_kernel` multiplies any number of rows by packed weights in blocks of 128 columns, and by
weights of eight bits, which may have one scale for each row there; with more than 64 rows, values that have scales of
groups are multiplied by these and rounded to the rows' dtype. More than 2048 rows with scales of groups, and elsewhere
more than 64 rows of a packed weight or 768 of another, are multiplied by a copy of the weight, whose values are rounded
to the rows' dtype. Products with a copy that is scaled by rows are rounded before they are scaled, too. The scales of
blocks of rows and columns, as DeepSeek-V3 stores them (arXiv:2412.19437 section 3.3), are repeated for each row of a
block.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.dispatch import HOPPER, TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers import hopper
from pallas_kernels.layers.packed import int4, int4_kernel
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles, choose_tiles
from pallas_kernels.layers.weights import Quantized

STEP = 128  # most values of k per loop iteration; a row of them is 128 bytes
LEAST_STEP = 32  # fewest values of k in a product of 8-bit operands on tensor cores
FEW_ROWS = 16  # smallest side of a product on tensor cores
MOST_ROWS = 64  # most rows of x per Pallas program
MOST_ROWS_OF_BYTES = 768  # with more rows, it takes less time to widen a copy of a weight of eight bits
MOST_ROWS_OF_GROUPS = 2048  # the same on a Hopper GPU if the weight has scales of groups
MOST_WIDENED = 2**27  # most values of a packed weight that are widened at once for many rows, 256 MiB


def widened(weight: Quantized) -> Float[Array, "out inner"]:
    """Returns a weight in float32: each value times the scale of its row and group."""
    scale = weight.in_groups.scale
    if weight.kind == "int4":
        return int4.widened(weight.values, scale, weight.zeros)
    return weight.values.astype(jnp.float32) * jnp.repeat(scale, weight.shape[1] // scale.shape[1], axis=1)


def _reference(x, weight, *, parts, dtype):
    """Computes the product from a widened copy of the weight; the sums are float32."""
    return _product(x.astype(jnp.float32), widened(weight), parts, jnp.float32).astype(dtype)


def _product(x, weight, parts, dtype):
    """Returns x @ weight.T as partial sums [parts, rows, out] of this dtype, by XLA."""
    pieces, weights = (array.reshape(array.shape[0], parts, -1) for array in (x, weight))
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((2,), (2,)), ((1,), (1,)))
    return jax.lax.dot_general(pieces, weights, dims, precision=precision, preferred_element_type=dtype)


def _by_widening(x, weight, *, parts, dtype):
    """Computes the product of many rows from a copy of a weight in x's dtype, of which it writes pieces of rows.

    A kernel would widen the values again for each tile of rows, which takes longer than to write and read the copy. The
    barriers keep XLA from widening values again for each of its tiles, and from widening pieces or weights of other
    products before they are needed. Scales of rows scale the products; those of groups, the copy.
    """
    out, inner = weight.shape
    rows, is_scaled_by_row = widened_rows(out, inner), weight.scale.shape[1] == 1 and not weight.is_packed
    # The sums of unscaled float8 or int8 values may exceed float16's largest number, 65504.
    sums_dtype = jnp.dtype("float32") if is_scaled_by_row and dtype == jnp.float16 else dtype
    products: list[Array] = []
    for first in range(0, out, rows):
        x, weight, products = jax.lax.optimization_barrier((x, weight, products))
        piece = weight.rows(slice(first, first + rows))
        copy = (piece.values if is_scaled_by_row else widened(piece)).astype(x.dtype)
        products.append(_product(x, jax.lax.optimization_barrier(copy), parts, sums_dtype))
    product = jnp.concatenate(products, axis=2)
    return (product * weight.scale[:, 0]).astype(dtype) if is_scaled_by_row else product


def exceeds_kernel(rows: int, weight: Quantized) -> bool:
    """Returns whether a copy of a weight is faster than a Triton kernel, which widens the values for each tile of rows.

    The Hopper kernel multiplies more rows (`packed_tiles`).
    """
    return rows > (MOST_ROWS if weight.is_packed else MOST_ROWS_OF_BYTES)


def widened_rows(out: int, inner: int) -> int:
    """Returns how many rows of a packed weight [out, inner] are widened at once for a product of many rows."""
    return math.ceil(out / math.ceil(out * inner / MOST_WIDENED))


def _kernel(
    # inputs
    x_ref,  # [T, K]; of a packed weight in the order of the bytes of a step: values of low bits, then of high bits
    values_ref,  # [N, K], one byte per value, or packed [N, K / 2]
    scale_ref,  # [N, K / group] float32
    *refs,  # zeros_ref [N, K / group] uint8, if the weight has zero points; output: parts_ref [parts, T, N]
    # static parameters
    rows,  # T
    row_tile,  # rows of x per Pallas program
    out_tile,  # rows of the weight per Pallas program
    steps,  # loop iterations per part of k
    inner,  # values of k per loop iteration, a divisor of `group`
    group,  # values of k per scale
    block,  # columns of a block of a packed weight; 0: the weight is not packed
    interpret,  # whether the kernel is interpreted
):
    """Computes one output tile, summed over one part of k, in one Pallas program.

    The weight is the first operand of the tensor-core product, because the first operand can have more rows than the
    second.
    """
    *zeros_ref, parts_ref = refs
    part = pl.program_id(2)
    row = pl.program_id(0) * row_tile + jnp.arange(row_tile)
    out = pl.program_id(1) * out_tile + jnp.arange(out_tile)
    is_row, is_out = row < rows, out < scale_ref.shape[0]

    def product(values, column):
        x = pltriton.load(x_ref.at[row[:, None], column], mask=is_row[:, None])  # padding is arbitrary and not stored
        return pltriton.dot(values.astype(x.dtype), x, trans_b=True)

    def step(index, total):
        first = (part * steps + index) * inner
        scale = pltriton.load(scale_ref.at[out, first // group], mask=is_out)
        if not block:
            column = first + jnp.arange(inner)[None, :]
            values = pltriton.load(values_ref.at[out[:, None], column], mask=is_out[:, None])
            return total + product(values, column) * scale[:, None]
        byte = jnp.arange(inner // 2)[None, :]
        run = inner // 8  # consecutive bytes of a step in a block
        offset = byte if inner == block else first % block // 8 + byte // run * (block // 8) + byte % run
        offset += first // block * (block // 2)
        values = pltriton.load(values_ref.at[out[:, None], offset], mask=is_out[:, None])
        zero = pltriton.load(zeros_ref[0].at[out, first // group], mask=is_out) if zeros_ref else jnp.full(out_tile, 8)
        low, high = int4.differences(values, jnp.broadcast_to(zero[:, None], values.shape), x_ref.dtype, interpret)
        sums = product(low, first + byte) + product(high, first + inner // 2 + byte)
        return total + sums * scale[:, None]

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((out_tile, row_tile), jnp.float32))
    at = parts_ref.at[part, row[None, :], out[:, None]]
    pltriton.store(at, total.astype(parts_ref.dtype), mask=is_row[None, :] & is_out[:, None])


def _pallas(x, weight, *, parts, dtype, interpret):
    if exceeds_kernel(len(x), weight):
        return _by_widening(x, weight, parts=parts, dtype=dtype)
    rows, (out, inner), group = len(x), weight.shape, weight.group
    block = 2 * weight.values.shape[2] if weight.is_packed else 0
    is_few = rows <= MOST_ROWS
    step = math.gcd(group, STEP, block)
    if block:
        x = int4.ordered(x, step).reshape(rows, inner)
    row_tile = min(max(pl.next_power_of_2(rows), FEW_ROWS), MOST_ROWS)
    out_tile = 64 if rows > FEW_ROWS and is_few else 128
    sizes = {"rows": rows, "row_tile": row_tile, "out_tile": out_tile, "steps": inner // parts // step}
    return pl.pallas_call(
        functools.partial(_kernel, **sizes, inner=step, group=group, block=block, interpret=interpret),
        grid=(pl.cdiv(rows, row_tile), pl.cdiv(out, out_tile), parts),  # neighbours share rows of the weight
        out_shape=jax.ShapeDtypeStruct((parts, rows, out), dtype),
        # Up to 64 rows, five stages fit into the 99 KiB of shared memory of compute capability 8.9. The larger tiles
        # of more rows would not fit, and would exceed the registers of four warps.
        compiler_params=pltriton.CompilerParams(num_warps=4 if is_few else 8, num_stages=5 if is_few else 3),
        interpret=interpret,
        name="grouped_matmul",
    )(x, *(weight.arrays | {"values": weight.values.reshape(out, -1)}).values())


def _hopper(x, weight, **options):
    return int4_kernel.multiply(x, *weight.arrays.values(), kind=weight.kind, **options)


def packed_tiles(
    rows: int, weight: Quantized, dtype: jnp.dtype, parts: int | None = None, *, gated: bool = False
) -> Int4Tiles | None:
    """Returns the tile sizes of the Hopper kernel of narrow weights; None if the Hopper kernel is not used.

    Args:
        rows: number of rows of x.
        weight: the weight [out, inner], of four or eight bits.
        dtype: dtype of x.
        parts: number of partial sums; None: as many as the kernel needs.
        gated: whether the weight has gate and up, which are joined; `parts` must be 1 or None then.
    """
    count = hopper.multiprocessors()
    out, inner = weight.shape
    if count is None or weight.is_dynamic or inner % STEP:
        return None
    if not weight.is_packed and weight.group < inner and rows > MOST_ROWS_OF_GROUPS:
        return None
    packed = weight.values.shape if weight.is_packed else (out, inner // STEP, STEP)
    return choose_tiles(rows, packed, inner // weight.group, dtype, count, parts, gated=gated, kind=weight.kind)


def is_grouped(rows: int, weight: Quantized, dtype: jnp.dtype) -> bool:
    """Returns whether `grouped_matmul` multiplies rows by a weight, because it has group scales or is faster.

    On a Hopper GPU it is faster than a product by XLA also for weights of eight bits with a scale for each row.
    """
    if weight.has_groups or weight.is_dynamic or hopper.multiprocessors() is None:
        return weight.has_groups
    return packed_tiles(rows, weight, dtype, 1) is not None or (exceeds_kernel(rows, weight) and dtype.itemsize == 2)


def unsupported(inner: int, groups: int, dtype: jnp.dtype, parts: int = 1, block: int = STEP) -> str | None:
    """Returns a text that says which limit of the kernel a product exceeds; None if the product is supported.

    Args:
        inner: number of columns of the weight.
        groups: number of scales of a row.
        dtype: dtype of x.
        parts: number of partial sums.
        block: columns of a block of a packed weight.
    """
    step = math.gcd(inner // groups, STEP, block)
    if step < LEAST_STEP:
        packed = f" and packed blocks of {block}" if block < STEP else ""
        return f"groups must be multiples of {LEAST_STEP} columns, got {inner // groups}{packed}"
    if inner % (parts * step):
        return f"a part of the columns must be a multiple of {step}, got {parts} parts of {inner} columns"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"x must be bfloat16 or float16, got {dtype}"
    return None


@functools.partial(jax.jit, static_argnames=("dtype", "parts", "implementation"))
def grouped_matmul(
    x: Float[Array, "*rows inner"],
    weight: Quantized,
    dtype: jnp.dtype,
    *,
    parts: int = 1,
    implementation: Implementation = "auto",
) -> Float[Array, "parts *rows out"]:
    """Returns x @ w.T as partial sums [parts, *rows, out], which are computed in float32; w is `widened`.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner], with group scales.
        dtype: dtype of the result.
        parts: number of equal parts into which the sum over k is divided.
        implementation: as in `paged_attention`. The kernel needs activations of two bytes per value and groups that are
            multiples of 32 columns. The reference writes a widened copy of the weight, and rounds none of its values.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the call.
    """
    weight = weight.in_groups
    rows, (out, groups) = x.shape[:-1], weight.scale.shape
    options = {"parts": parts, "dtype": dtype}
    kernel, reference = functools.partial(_pallas, **options), functools.partial(_reference, **options)
    flat = x.reshape(-1, x.shape[-1])
    tiles = packed_tiles(len(flat), weight, x.dtype, parts)
    block = 2 * weight.values.shape[2] if weight.is_packed else STEP
    limit = unsupported(x.shape[-1], groups, x.dtype, parts, block)
    kernels = [
        Kernel(HOPPER, functools.partial(_hopper, tiles=tiles, dtype=dtype), tiles is None),
        Kernel(TRITON, kernel, limit),
    ]
    return dispatch(implementation, kernels, reference, flat, weight).reshape(parts, *rows, out)
