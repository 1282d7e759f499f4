"""The Hopper kernel of narrow experts, whose weights have four or eight bits a value and scales of groups.

    parts[s, c, n] = sum_k x[c, k] w[expert of c, n, k]     over part s of S parts of k, for each choice c

It multiplies blocks of rows by the weights of their experts. `int4_kernel` describes how a warpgroup multiplies: the
weight is the first operand of `wgmma` and comes from registers. Values of eight bits are loaded as there. Of values of
four bits a thread loads 16 bytes of the order of `expert_bytes`, the values of 32 consecutive columns, and the columns
of x are put into an order (`expert_bytes.registered`) in which these values are those that `wgmma` needs. A group of
mxfp4 has 32 columns, so that a thread needs one power of two for its 16 bytes. It multiplies the values by it, which is
exact. Sums of other kinds, whose groups have whole slices of 128 columns, are scaled as in `int4_kernel`.

With a gate, the 64 rows of a warpgroup are 32 rows of gate and 32 rows of up, 8 of both in turn. A thread then has the
sums of a channel's gate and of its up, and joins them.

The rows are in blocks, each of one expert (`expert_blocks.blocks_of`). A work item is a block, a tile of output
channels, and a part of k. There are as many CTAs as multiprocessors, and each computes every n-th work item, of as many
blocks as there are. Neighbours in time share a block, so that the weight is read in its order. A row of a block is
stored in the row of its choice, or where the same blocks are the rows of x of another product, in their order.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.layers.experts.expert_blocks import ExpertBlocks
from pallas_kernels.layers.experts.expert_boxes import boxes_of, item_slots, memory_of_boxes, places
from pallas_kernels.layers.experts.expert_cta import ExpertCta, PackedProduct
from pallas_kernels.layers.experts.expert_rows import gather_blocks
from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed.int4_registers import SLICE
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles
from pallas_kernels.layers.packed.launch import launch, memory_of
from pallas_kernels.layers.packed.packed_cta import PIECE
from pallas_kernels.layers.weights import FORMATS, Kind, Quantized


def multiply_chosen(
    x: Array,
    weight: Quantized,
    bias: Array | None,
    factors: Array | None,
    chosen: Array,
    *,
    gate: Any,
    tiles: Int4Tiles,
    dtype: jnp.dtype,
    interpret: Any = False,
) -> Array:
    """Returns partial sums of the products of `expert_matmul` [parts, chosen, rows, width]; its arguments are the same.

    Args:
        x, weight, bias, factors, chosen, gate, dtype: as in `expert_matmul`.
        tiles: static sizes of the call.
        interpret: as in `multiply`.
    """
    flat, experts = x.reshape(-1, x.shape[-1]), weight.shape[0]
    fixed: dict[str, Any] = {"size": tiles.height, "kind": weight.kind, "interpret": bool(interpret)}
    rows, own_blocks, counts = gather_blocks(flat, chosen.ravel(), experts, **fixed)
    optional = named(bias=bias, factors=factors)
    options = {"gate": gate, "tiles": tiles, "dtype": dtype, "interpret": interpret}
    return multiply(rows, weight, (own_blocks, counts), optional, chosen.size, **options).reshape(
        tiles.parts, *chosen.shape, -1
    )


def named(**arrays: Array | None) -> dict[str, Array]:
    """Returns the arrays that are not None."""
    return {name: array for name, array in arrays.items() if array is not None}


def multiply(
    x: Array,
    weight: Quantized,
    blocks: tuple[ExpertBlocks, Array],
    optional: dict[str, Array],
    choices: int,
    *,
    gate: Any,
    tiles: Int4Tiles,
    dtype: jnp.dtype,
    order: Kind | None = None,
    interpret: Any = False,
) -> Array:
    """Runs the Hopper kernel of narrow experts, and returns partial sums of the products [parts, choices, out].

    Args:
        x: rows of all blocks [slices, blocks * height, 128], `registered`; `PACKED` has their dtypes.
        weight: weights of all experts, of a kind of `PACKED`.
        blocks: blocks of choices, those of experts first, then those of none, and how many of both there are
            (`expert_rows.gather_blocks`). What is listed for other blocks is arbitrary.
        optional: bias [experts, N], and float32 factors of the choices, if there are any.
        choices: number of choices.
        gate: as in `expert_matmul`; with a gate, k has one part.
        tiles: static sizes of the call.
        dtype: dtype of the result.
        order: None, or kind of the weight of another product, of which the result is to be x. k has one part then, and
            there are no factors.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    (experts, rows, inner), halves = weight.shape, 2 if gate else 1
    product = PackedProduct(weight.kind, experts, weight.group, gate, order)
    values = jax.lax.bitcast_convert_type(weight.values, jnp.uint8)
    arrays = {"x": x, **named(weight=values, scale=weight.scale, zeros=weight.zeros), **optional}
    boxes = boxes_of(weight, tiles, halves)
    for name in {"weight", "scale", "zeros"} & arrays.keys():
        arrays[name] = arrays[name].reshape((-1, boxes[name].size) if name in boxes else (experts * rows, -1))
    for name in {"bias", "factors"} & arrays.keys():
        arrays[name] = arrays[name].reshape(-1, 1)
    (expert, listed_choices), counts = blocks
    arrays |= {"expert": expert, "choices": listed_choices, "counts": counts}
    beside = max(count for count in range(1, 5) if tiles.splits % count == 0)  # slices of a copy
    copied_bytes = int(beside * SLICE * FORMATS[weight.kind].value_bytes)
    weights = tiles.stages, tiles.slices // beside, halves, tiles.channels * HEIGHT // halves, copied_bytes
    shape = tiles.parts, choices, rows // halves
    if order:
        shape = math.ceil(rows // halves / SLICE), x.shape[1], SLICE

    rows_of_x, loads = (tiles.slices, tiles.height, SLICE), halves * tiles.slices // beside + 1
    memory = memory_of(tiles, x.dtype, rows_of_x, PIECE, weights, loads, is_tiled=not weight.is_packed)
    dtypes, count = {name: arrays[name].dtype for name in boxes}, places(tiles.stages, item_slots(inner, tiles))
    copied = memory_of_boxes(boxes, dtypes, halves, count)
    made = functools.partial(ExpertCta, boxes=boxes, tiles=tiles, product=product, interpret=bool(interpret))
    out = jax.ShapeDtypeStruct(shape, dtype)
    return launch(made, arrays, out, tiles, memory, copied, name="packed_expert_matmul", interpret=interpret)
