"""The Hopper kernel of weights of four or eight bits, which multiplies any number of rows by such a weight.

    parts[s, t, n] = sum_k x[t, k] (values[n, k] - zeros[n, k // group]) scale[n, k // group]   over part s of S parts

The weight is the first operand of `wgmma`, 64 output channels per warpgroup, and comes from registers. The second
operand is a tile of rows of x, and comes from shared memory. The TMA unit loads the packed bytes into shared memory,
and so the scales and zero points, if a row has enough of them for a copy: loads of their own, a slot ahead, arrived
later than the bytes. A thread loads 16 bytes of a row of the weight at once. They hold the values of 128 columns that
this thread passes to `wgmma`, in the order of the registers, because `int4.pack` orders them so. No value moves between
threads. Bytes of values of eight bits are in the order of the columns (`byte_registers`).

Differences of values and zero points are exact in x's dtype. The tensor cores sum a group of columns in float32, and
this sum is multiplied by the group's scale and added to the total, so no value is rounded twice. If a row of a weight
of eight bits has one scale, the tensor cores add up all columns, and the total is scaled.

With an activation function the weight has gate above up, and a thread joins its sums of both, as in `expert_kernel`:

    out[t, n] = activation(gate) * up,   gate[t, n] = parts[0, t, n],   up[t, n] = parts[0, t, N + n]

`packed_cta` says how a CTA loads slices of k and computes one output tile after the other.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed.byte_cta import ByteCta
from pallas_kernels.layers.packed.int4_cta import Int4Cta
from pallas_kernels.layers.packed.int4_registers import SLICE
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles, copied_groups
from pallas_kernels.layers.packed.launch import launch, memory_of
from pallas_kernels.layers.packed.packed_cta import FACTORS, PIECE
from pallas_kernels.layers.quantize_rows import Activation
from pallas_kernels.layers.weights import FORMATS, Kind


def multiply(
    x: Array,
    packed: Array,
    scale: Array,
    *zeros: Array,
    tiles: Int4Tiles,
    dtype: jnp.dtype,
    kind: Kind = "int4",
    activation: Activation | None = None,
    interpret: Any = False,
) -> Array:
    """Runs the Hopper kernel of packed weights, and returns partial sums of x @ w.T [parts, rows, out].

    Args:
        x: activations [rows, inner], bfloat16 or float16.
        packed: packed values [halves * out, blocks, 64] (`int4.pack`), or values of eight bits [halves * out, inner];
            two halves are gate and up.
        scale: float32 scales [halves * out, groups].
        zeros: zero points uint8 [halves * out, groups], if there are any.
        tiles: static sizes of the call.
        dtype: dtype of the result.
        kind: kind of the weight.
        activation: if not None, the weight has gate and up, and the result is activation(x @ gate.T) * (x @ up.T).
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    dtype = jnp.dtype(dtype)
    (rows, inner), (out, groups), halves = x.shape, scale.shape, 2 if activation else 1
    if rows > 8 and rows % 8:
        x = jnp.pad(x, ((0, -rows % 8), (0, 0)))  # TMA tiles of 8 rows must lie within more than 8 rows
    arrays = {
        "x": x,
        "weight": jax.lax.bitcast_convert_type(packed, jnp.uint8).reshape(out, -1),
        "scale": scale,
        **dict(zip(("zeros",), zeros, strict=False)),
    }
    piece = min(PIECE, math.gcd(inner // groups, SLICE))
    slot_bytes, is_packed = tiles.splits * int(tiles.columns * FORMATS[kind].value_bytes), FORMATS[kind].is_packed
    weights = tiles.stages, tiles.depth, halves, tiles.channels * HEIGHT // halves, slot_bytes
    columns = tiles.splits * tiles.depth * tiles.columns  # of a slot
    cta = Int4Cta if is_packed else ByteCta
    stored = (HEIGHT // halves, dtype) if tiles.has_many_rows and dtype.itemsize == 2 and not interpret else None
    groups_of = {
        name: copied_groups(groups, inner, arrays[name].dtype.itemsize, columns) for name in FACTORS if name in arrays
    }

    boxes = {
        name: plgpu.SMEM((tiles.stages, tiles.channels * HEIGHT, count), arrays[name].dtype)
        for name, count in groups_of.items()
        if count and not tiles.has_many_rows
    }
    rows_of_x, loads = (tiles.height, columns), halves * (tiles.depth + len(boxes)) + 1
    memory = memory_of(tiles, x.dtype, rows_of_x, piece, weights, loads, is_tiled=not is_packed, stored=stored)
    made = functools.partial(cta, tiles=tiles, kind=kind, activation=activation, interpret=bool(interpret))
    shape = jax.ShapeDtypeStruct((tiles.parts, len(x) if stored else rows, out // halves), dtype)
    return launch(made, arrays, shape, tiles, memory, boxes, name="int4_matmul", interpret=interpret)[:, :rows]
