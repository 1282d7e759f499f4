"""The kernel of `gated_matmul` for a few rows, in which a program has a tile of gate and one of up."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array

from pallas_kernels.layers import hopper
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.hopper_tiling import imbalance
from pallas_kernels.layers.quantize_rows import Activation, activate
from pallas_kernels.layers.weights import Inputs, Quantized, Weight

KERNEL_ROWS = range(8, 65)  # numbers of rows that the kernel multiplies
TILE, COLUMNS, STAGES = 64, 128, 4  # tile, values of k per loop iteration, and iterations whose loads are in flight
MOST_IDLE = 1.25  # most time of all tiles over that of an even distribution; XLA or the Hopper kernel is faster above


def _kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [2 I, K]
    # outputs
    out_ref,  # [T, I]
):
    """Computes one tile of columns of all rows with silu, in one Pallas program."""
    (rows, inner), width = x_ref.shape, out_ref.shape[1]
    row = jnp.arange(max(pl.next_power_of_2(rows), 16))
    is_row, out = row < rows, pl.program_id(0) * TILE + jnp.arange(TILE)

    def step(index, totals):
        column = index * COLUMNS + jnp.arange(COLUMNS)[None, :]
        x = pltriton.load(x_ref.at[row[:, None], column], mask=is_row[:, None])  # others are arbitrary and not stored
        weights = [pltriton.load(weight_ref.at[first + out[:, None], column]) for first in (0, width)]
        return [total + pltriton.dot(weight, x, trans_b=True) for total, weight in zip(totals, weights, strict=True)]

    zeros = jnp.zeros((TILE, row.shape[0]), jnp.float32)
    gate, up = jax.lax.fori_loop(0, inner // COLUMNS, step, [zeros, zeros])
    result = (activate(gate, "silu") * up).astype(out_ref.dtype)
    pltriton.store(out_ref.at[row[None, :], out[:, None]], result, mask=is_row[None, :])


def multiply(x: Array, weight: Array, *, interpret: bool) -> Array:
    """Runs the kernel of a few rows, x [rows, inner]."""
    width = weight.shape[0] // 2
    return pl.pallas_call(
        functools.partial(_kernel),  # a new function object for every call (jax issue 40847)
        grid=(width // TILE,),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="gated_matmul",
    )(x, weight)


def has_few_rows(x: Inputs | jax.ShapeDtypeStruct, weight: Weight | Adapted, activation: Activation = "silu") -> bool:
    """Returns whether the kernel of a few rows multiplies, which was only timed on a Hopper GPU with silu."""
    multiprocessors, (both, inner), rows = hopper.multiprocessors(), weight.shape, math.prod(x.shape[:-1])
    is_supported = not isinstance(weight, (Adapted, Quantized)) and weight.dtype == x.dtype and x.dtype.itemsize == 2
    if multiprocessors is None or not is_supported or activation != "silu" or rows not in KERNEL_ROWS:
        return False
    if both % (2 * TILE) or inner % COLUMNS:
        return False
    tiles = both // (2 * TILE)
    return tiles > multiprocessors and imbalance(tiles, multiprocessors) <= MOST_IDLE
