"""Adds low-rank adapters to a product of up to a few hundred rows, in two kernels that read the chosen tables alone.

    z[t] = A_t x[t]            y[t] = sum_s sums[s, t] + B_t z[t]            t: the table that a row chose

XLA multiplies every row by all tables, and by the zeros of B where a weight is fused from several modules, in four to
six launches. Here a program has up to 16 rows of one sequence, and does its work once for each table that these rows
chose, which is one for most programs. The first kernel divides the sum over k among programs, and the second, which
also adds up the partial sums of the weight's product, adds these up. It can apply the gate of a feed-forward layer.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.plain_product import plain_product
from pallas_kernels.layers.partial_sums import PartialSums, add_adapters, split_scales, sum_f32
from pallas_kernels.layers.quantize_rows import Activation, activate, gated

DTYPES = jnp.bfloat16, jnp.float16  # of x, A and B
MOST_ROWS = 320  # with more rows, the products of XLA with all tables take less time
BLOCK = 16  # rows of a program, the smallest side of a product on tensor cores
COLUMNS = 16  # rows of A of a program
STEP, LEAST_STEP = 512, 64  # values of k per loop iteration
MOST_PARTS = 16  # most parts of the sum over k
TILES = 128, 64  # columns of a tile of the result; the first one that divides every module
WIDEST = 256  # most columns of a table that a program can hold


def product_f32(x: Float[Array, "*rows inner"], weight: Float[Array, "out inner"]) -> Float[Array, "*rows out"]:
    """Returns x @ weight.T in float32."""
    return plain_product(x, weight, jnp.dtype("float32"))


def has_kernel(x: Array | jax.ShapeDtypeStruct, weight: Adapted) -> bool:
    """Returns whether the kernels support a product of x [*rows, inner] with a weight that has adapters."""
    rows, inner = math.prod(x.shape[:-1]), x.shape[-1]
    same_dtype = x.dtype in DTYPES and x.dtype == weight.a.dtype == weight.b.dtype
    divides = math.gcd(inner, STEP) >= LEAST_STEP and weight.shape[0] % (2 * TILES[-1]) == 0
    return (
        same_dtype and divides and rows <= MOST_ROWS and weight.width <= WIDEST and weight.table.shape == x.shape[:-1]
    )


def _rows(block: Array, tokens: int) -> tuple[Int[Array, " rows"], Array]:
    """Returns the rows of a block, which are of one sequence of `tokens` rows, and whether they exist."""
    blocks = pl.cdiv(tokens, BLOCK)
    token = block % blocks * BLOCK + jnp.arange(BLOCK)
    return block // blocks * tokens + token, token < tokens


def _for_each_table(table: Int[Array, " rows"], add: Callable[[Array, Any], Any], total: Any) -> Any:
    """Returns `total` after `add(table, total)` for each table that rows chose, in a kernel."""

    def next_table(carry):
        left, total = carry
        chosen = jnp.max(left)
        return jnp.where(left == chosen, 0, left), add(chosen, total)

    return jax.lax.while_loop(lambda carry: jnp.max(carry[0]) > 0, next_table, (table, total))[1]


def _inner_kernel(
    # inputs
    x_ref,  # [T, K]
    a_ref,  # [columns, K]
    table_ref,  # [T]
    # outputs
    inner_ref,  # partial sums [parts, T, width] float32; zeros for a row without an adapter
    # static parameters
    *,
    tokens,  # rows of a sequence
    step,  # values of k per loop iteration
    steps,  # loop iterations per part of k
):
    """Multiplies the rows of a block by some rows of A of each table that they chose, over a part of k."""
    part, width = pl.program_id(1), inner_ref.shape[2]
    row, is_row = _rows(pl.program_id(0), tokens)
    column = pl.program_id(2) * COLUMNS + jnp.arange(COLUMNS)
    table = pltriton.load(table_ref.at[row], mask=is_row, other=0)

    def multiply(chosen, total):
        def add(index, product):
            k = (part * steps + index) * step + jnp.arange(step)[None, :]
            x = pltriton.load(x_ref.at[row[:, None], k], mask=is_row[:, None], other=0)
            a = pltriton.load(
                a_ref.at[(chosen - 1) * width + column[:, None], k], mask=(column < width)[:, None], other=0
            )
            return product + pltriton.dot(x, a, trans_b=True)

        product = jax.lax.fori_loop(0, steps, add, jnp.zeros((BLOCK, COLUMNS), jnp.float32))
        return jnp.where((table == chosen)[:, None], product, total)

    total = _for_each_table(table, multiply, jnp.zeros((BLOCK, COLUMNS), jnp.float32))
    mask = is_row[:, None] & (column < width)[None, :]
    pltriton.store(inner_ref.at[part, row[:, None], column[None, :]], total, mask=mask)


def _inner(x: Array, weight: Adapted, table: Array, tokens: int, interpret: bool) -> Float[Array, "parts rows width"]:
    """Runs the first kernel on x [rows, inner]."""
    rows, inner = x.shape
    step = math.gcd(inner, STEP)
    parts = max(parts for parts in range(1, MOST_PARTS + 1) if inner // step % parts == 0)
    return pl.pallas_call(
        functools.partial(_inner_kernel, tokens=tokens, step=step, steps=inner // step // parts),
        grid=(rows // tokens * pl.cdiv(tokens, BLOCK), parts, pl.cdiv(weight.width, COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((parts, rows, weight.width), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="low_rank_inner",
    )(x, weight.a, table)


def _sum_kernel(
    # inputs
    sums_ref,  # partial sums of the weight's product [parts, T, N]; with a gate [parts, T, 2 N]
    inner_ref,  # partial sums [parts, T, width]
    b_ref,  # [N, columns]; with a gate [2 N, columns]
    table_ref,  # [T]
    scale_refs,  # float32 scales of the sums, of rows [T] and of columns; empty: no scales
    # outputs
    out_ref,  # [T, N]
    # static parameters
    *,
    tokens,  # rows of a sequence
    tile,  # columns of a tile of the result
    ends,  # end of each module's rows of the weight; (): every row has all columns of a table
    gate,  # activation function of the gate; None: the product has no gate
):
    """Computes a tile of columns for the rows of a block, of which the weight's rows are of one module."""
    width, size = inner_ref.shape[2], out_ref.shape[1]
    rank = width // max(len(ends), 1)
    row, is_row = _rows(pl.program_id(0), tokens)
    column = jnp.arange(max(pl.next_power_of_2(rank), BLOCK))
    inside = (column < rank)[None, :]
    table = pltriton.load(table_ref.at[row], mask=is_row, other=0)

    def product(first):
        out = first + jnp.arange(tile)
        sums = [
            pltriton.load(sums_ref.at[part, row[:, None], out[None, :]], mask=is_row[:, None], other=0)
            for part in range(sums_ref.shape[0])
        ]
        module = sum((first >= end).astype(jnp.int32) for end in ends[:-1])
        of_module = (module * rank + column)[None, :]
        inner = sum_f32(
            pltriton.load(inner_ref.at[part, row[:, None], of_module], mask=is_row[:, None] & inside, other=0)
            for part in range(inner_ref.shape[0])
        )
        total = sum_f32(sums)
        if scale_refs:
            total = total * pltriton.load(scale_refs[0].at[row], mask=is_row, other=0)[:, None]
            total = total * pltriton.load(scale_refs[1].at[out])[None, :]

        def multiply(chosen, total):
            b = pltriton.load(b_ref.at[out[:, None], (chosen - 1) * width + of_module], mask=inside, other=0)
            of_table = jnp.where((table == chosen)[:, None], inner, 0).astype(b.dtype)
            return total + pltriton.dot(of_table, b, trans_b=True)

        return _for_each_table(table, multiply, total)

    first = pl.program_id(1) * tile
    total = product(first)
    if gate is not None:
        total = activate(total, gate) * product(size + first)
    at = out_ref.at[row[:, None], first + jnp.arange(tile)[None, :]]
    pltriton.store(at, total.astype(out_ref.dtype), mask=is_row[:, None])


def _pallas(
    sums: PartialSums, x: Array, weight: Adapted, *, dtype: jnp.dtype, gate: Activation | None, interpret: bool
) -> Float[Array, "*rows out"]:
    """Runs both kernels."""
    shape, out = x.shape[:-1], weight.shape[0] // (2 if gate else 1)
    rows, tokens = math.prod(shape), shape[-1]
    table, (values, scales) = weight.table.reshape(rows), split_scales(sums)
    inner = _inner(x.reshape(rows, -1), weight, table, tokens, interpret)
    modules = weight.modules or (out,)
    tile = next((size for size in TILES if all(end % size == 0 for end in (out, *modules))), 0)
    ends = tuple(sum(modules[: index + 1]) for index in range(len(modules))) if tile and weight.modules else ()
    tile = tile or TILES[-1]
    result = pl.pallas_call(
        functools.partial(_sum_kernel, tokens=tokens, tile=tile, ends=ends, gate=gate),
        grid=(rows // tokens * pl.cdiv(tokens, BLOCK), out // tile),
        out_shape=jax.ShapeDtypeStruct((rows, out), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="low_rank_sum",
    )(values.reshape(-1, rows, weight.shape[0]), inner, weight.b, table, [scale.ravel() for scale in scales])
    return result.reshape(*shape, out)


@functools.partial(jax.jit, static_argnames=("dtype", "gate", "implementation"))
def add_low_rank(
    sums: PartialSums,
    x: Float[Array, "*rows inner"],
    weight: Adapted,
    dtype: jnp.dtype,
    *,
    gate: Activation | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "*rows out"]:
    """Returns a product with a weight that has adapters, or activation(gate) * up of a product that holds both.

    Args:
        sums: product of x with the weight without adapters, not of several devices.
        x: activations.
        weight: the weight [out, inner], or gate above up [2 * out, inner].
        dtype: dtype of the result.
        gate: activation function of the gate; None: the product has no gate.
        implementation: as in `paged_attention`. XLA computes what the kernels do not support (`has_kernel`).
    """

    def reference(sums, x, weight):
        (product,) = add_adapters(sums, x, weight, product_f32, dtype)
        return gated(product, gate) if gate else product

    if not has_kernel(x, weight):
        return reference(sums, x, weight)
    kernel = functools.partial(_pallas, dtype=dtype, gate=gate)
    return dispatch(implementation, None, kernel, reference, sums, x, weight)
