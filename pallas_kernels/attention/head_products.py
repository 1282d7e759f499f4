"""Products of each head with its own matrix, out[r, h] = x[r, h, :K] W_h^T; those of `append_latent` are with W_h."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.attention.kv_pages import POOL_DTYPES
from pallas_kernels.attention.tiling import MMA_ROWS
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.row_by_row import row_by_row

FIXED_ROWS = 64  # rows of a Pallas program in deterministic products, and with many rows
WIDTH = 128  # columns of the product that a Pallas program computes
INNER = 64  # values of the sum that a loop iteration adds up
FEW_WIDTH, FEW_INNER = 32, 128  # the same with few rows: more programs of fewer iterations, which wait for memory
MOST_INNER = 4096  # most rows and most columns of a head's matrix


def product_reference(x, weight, terms):
    wide = x.astype(jnp.float32), weight.astype(jnp.float32)  # not every CPU product widens bfloat16
    return jnp.einsum(terms, *wide, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)


def _products_reference(x, weight, *, deterministic):
    def product(x):
        return product_reference(x.reshape(-1, weight.shape[0], weight.shape[2]), weight, "rhk,hnk->rhn")

    return row_by_row(product, x) if deterministic else product(x)


class ProductBlocks(NamedTuple):
    """How the Pallas programs divide products of heads: the static sizes of a call."""

    rows: int  # rows per program
    width: int  # columns of the product per program
    step: int  # values of the sum per loop iteration
    is_transposed: bool  # whether a head's matrix is [N, K]
    precision: Any  # precision of the matrix products

    def own_rows(self, block, count):
        """Returns the rows of a program and whether they exist, and existing rows to load, [rows, 1] each.

        Args:
            block: index of the block of rows.
            count: number of rows that exist.
        """
        row = block * self.rows + jnp.arange(self.rows)[:, None]
        return row, row < count, jnp.minimum(row, count - 1)


def multiply(x_ref, weight_ref, out_ref, first, program, blocks):
    """Multiplies some rows of one head by some columns of its matrix, in one Pallas program.

    Args:
        x_ref: [rows, columns], from `first` on the K values of the head.
        weight_ref: [H, K, N], or [H, N, K] if it is transposed.
        out_ref: [rows, H, N or more].
        first: column of x.
        program: indices of the Pallas program: of the block of rows, of the head and of the block of columns.
        blocks: `ProductBlocks`.
    """
    block, head, tile = program
    sizes, (width, step) = weight_ref.shape[1:], (blocks.width, blocks.step)
    inner, out = sizes[::-1] if blocks.is_transposed else sizes
    row, is_row, loaded_row = blocks.own_rows(block, x_ref.shape[0])
    column = tile * width + jnp.arange(width)
    is_column = column < out

    def add(index, total):
        term = index * step + jnp.arange(step)
        is_inner, is_out = (term < inner) if inner % step else None, is_column if out % width else None
        x = pltriton.load(x_ref.at[loaded_row, first + term[None, :]], **_masked((blocks.rows, step), None, is_inner))
        if blocks.is_transposed:
            ref, mask = weight_ref.at[head, column[:, None], term[None, :]], _masked((width, step), is_out, is_inner)
        else:
            ref, mask = weight_ref.at[head, term[:, None], column[None, :]], _masked((step, width), is_inner, is_out)
        weight = pltriton.load(ref, **mask)
        return total + pltriton.dot(x, weight, trans_b=blocks.is_transposed, precision=blocks.precision)

    total = jax.lax.fori_loop(0, pl.cdiv(inner, step), add, jnp.zeros((blocks.rows, width), jnp.float32))
    ref = out_ref.at[row, head, column[None, :]]
    pltriton.store(ref, total.astype(out_ref.dtype), mask=is_row & is_column[None, :])


def _masked(shape, rows, columns):
    """Returns mask options for a load of this shape; a condition of None holds for all rows or all columns."""
    known = [] if rows is None else [rows[:, None]]
    known += [] if columns is None else [columns[None, :]]
    return {"mask": jnp.broadcast_to(functools.reduce(jnp.logical_and, known), shape), "other": 0} if known else {}


def _products_kernel(x_ref, weight_ref, out_ref, *, blocks):
    """Runs `multiply` for rows of all heads side by side."""
    program = tuple(pl.program_id(axis) for axis in range(3))
    multiply(x_ref, weight_ref, out_ref, program[1] * weight_ref.shape[2], program, blocks)


def grid_of(x, weight, *, is_transposed, deterministic, interpret):
    """Returns the `ProductBlocks` of a product of heads, and the numbers of blocks of rows, of heads and of columns."""
    rows, (heads, *sizes) = x.shape[0], weight.shape
    inner, out = sizes[::-1] if is_transposed else sizes
    wide = x.dtype == jnp.float32 and not interpret
    # Three TF32 products are as exact as one float32 product, and run on tensor cores. A CPU has no TF32.
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if wide else jax.lax.Precision.HIGHEST
    is_few = not deterministic and rows <= 2 * MMA_ROWS
    most = (FEW_WIDTH, FEW_INNER) if is_few else (WIDTH, INNER)
    width, step = (
        min(max(pl.next_power_of_2(size), MMA_ROWS), limit) for size, limit in zip((out, inner), most, strict=True)
    )
    blocks = ProductBlocks(MMA_ROWS if is_few else FIXED_ROWS, width, step, is_transposed, precision)
    return blocks, (pl.cdiv(rows, blocks.rows), heads, pl.cdiv(out, width))


def _products_pallas(x, weight, *, deterministic, interpret):
    blocks, grid = grid_of(x, weight, is_transposed=True, deterministic=deterministic, interpret=interpret)
    return pl.pallas_call(
        functools.partial(_products_kernel, blocks=blocks),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], *weight.shape[:2]), x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="head_products",
    )(x, weight)


def unsupported(x: Array, weight: Array) -> str | None:
    """Returns a text that says which limit of the kernels a product exceeds; None if it is supported."""
    if x.dtype != weight.dtype or x.dtype not in POOL_DTYPES[:3]:
        return f"x and weight must be bfloat16, float16 or float32 alike, got {x.dtype} and {weight.dtype}"
    if max(weight.shape[1:]) > MOST_INNER:
        return f"at most {MOST_INNER} channels, got {weight.shape}"
    return None


@functools.partial(jax.jit, static_argnames=("deterministic", "implementation"))
def head_products(
    x: Float[Array, "*rows width"],
    weight: Float[Array, "H N K"],
    *,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "*rows H N"]:
    """Returns x[..., h * K : (h + 1) * K] @ weight[h].T for each head h, summed in float32 and rounded once.

    Args:
        x: the channels of all heads side by side [*rows, H * K].
        weight: matrix of each head [H, N, K].
        deterministic: make the bits of a row's result independent of the number of rows.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the sizes or dtypes.
    """
    runs = _products_pallas, _products_reference
    kernel, reference = (functools.partial(run, deterministic=deterministic) for run in runs)
    rows = x.reshape(-1, x.shape[-1])
    out = dispatch(implementation, [Kernel(TRITON, kernel, unsupported(x, weight))], reference, rows, weight)
    return out.reshape(*x.shape[:-1], *out.shape[1:])
