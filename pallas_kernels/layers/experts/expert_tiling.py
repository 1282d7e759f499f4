"""Chooses the tile sizes of the Hopper kernel of narrow experts (`expert_kernel`)."""

import itertools
import math

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.layers.experts.expert_boxes import box_bytes, places
from pallas_kernels.layers.experts.expert_bytes import BLOCK, PACKED, SLICE
from pallas_kernels.layers.experts.expert_rows import MOST_LISTED
from pallas_kernels.layers.hopper import HEIGHT, multiprocessors
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles, most_stages
from pallas_kernels.layers.weights import FORMATS, Kind, Quantized

# Rows of a block, and the most choices of an expert on average for which they usually suffice.
HEIGHTS = ((8, 4), (16, 11), (32, 24), (64, math.inf))
# Channels and splits of a CTA, and rows of the weight of a warpgroup, by the rows of a block, the preferred first.
# Splits read longer pieces of the weight's rows; warpgroups side by side share the rows of x, whose bytes are more than
# the weight's at 32 rows.
SHAPES = {
    8: ((1, 4, 64), (1, 4, 48), (2, 2, 64), (3, 1, 64), (2, 1, 64)),
    16: ((2, 2, 64), (1, 4, 64), (3, 1, 64), (2, 1, 64)),
    32: ((3, 1, 64), (4, 1, 64), (2, 2, 64), (2, 1, 64)),
    64: ((3, 1, 64), (4, 1, 64), (2, 1, 64)),
}
FEW_ROWS = 8  # most rows of a block with which registers suffice for two slices at once of packed values
# Rows of a block with which a warpgroup of its own loads slots; with others this gains nothing. Beside four others that
# multiply 32 rows by values of eight bits it would leave them too few registers.
LOADED, MOST_GROUPS = (16, 32), 4
SHAPE_WORTH = 0.95  # a shape is chosen instead of one before it if the time is below this share
NARROW_WORTH = 0.8  # so are tiles of fewer rows, whose values take as many instructions as those of 64
PARTS_WORTH = 0.9  # more parts of k are worth their sums if the time is below this share


def choose_tiles(
    chosen: tuple[int, ...],
    shape: tuple[int, ...],
    groups: int,
    kind: Kind,
    *,
    gated: bool,
    multiprocessors: int,
    parts: tuple[int, ...] = (1,),
) -> Int4Tiles | None:
    """Chooses the sizes of the kernel for a weight; None: the kernel does not support its shape, or so many choices.

    Args:
        chosen: number of experts of a row, and number of rows.
        shape: shape of the unpacked weight [experts, N, inner].
        groups: number of scales of a row of the weight.
        kind: kind of the weight, one of `PACKED`.
        gated: whether gate and up are joined.
        multiprocessors: number of multiprocessors of the GPU.
        parts: numbers of parts of k that are possible.
    """
    (each, rows), (experts, out, inner), form = chosen, shape, FORMATS[kind]
    width = out // (1 + gated)
    if each * rows > MOST_LISTED or width % HEIGHT:
        return None
    used = experts * (1 - (1 - min(each / experts, 1)) ** rows)  # expected, with experts chosen at random
    height = next(height for height, most in HEIGHTS if each * rows / used <= most)
    blocks = max(used, each * rows / height)
    slices, best, least = math.ceil(inner / SLICE), None, math.inf
    for count, (channels, splits, weight_rows) in itertools.product(parts, SHAPES[height]):
        tile = channels * weight_rows // (1 + gated)  # output channels
        if width % tile or splits * count > slices:
            continue
        items = blocks * (width // tile) * count
        slots = math.ceil(slices / (splits * count))
        waves = math.ceil(items / multiprocessors)
        time = waves * multiprocessors / items * slots * splits * count / slices  # 1: nothing is ever idle
        worth = 1 if best is None else SHAPE_WORTH if best.parts == count else PARTS_WORTH
        worth = NARROW_WORTH if best and best.width > weight_rows else worth
        if time < least * worth:
            depth = 2 if form.is_packed and height <= FEW_ROWS and slots % 2 == 0 else 1
            is_loaded = height in LOADED and (form.is_packed or height < LOADED[-1] or channels * splits < MOST_GROUPS)
            sizes = height, channels, splits * depth, splits
            stages = min(most_stages(*sizes, value_bytes=form.value_bytes), slots // depth * waves)
            best = Int4Tiles(height, channels, splits, stages, count, multiprocessors, is_loaded, depth, weight_rows)
            least = time
            # Scales of mxfp4 that are loaded into registers for two slices at once take less time than copied ones.
            if height <= PACKED[kind].copy_rows and (kind != "mxfp4" or depth == 1):
                scale_bytes = (1 + gated) * box_bytes(tile, groups, kind)
                best = _copying_scales(best, slots // depth, scale_bytes, form.value_bytes)
    return best


def _copying_scales(tiles: Int4Tiles, slots: int, size: int, value_bytes: float) -> Int4Tiles:
    """Returns sizes with which scales are copied into shared memory, and which have fewer slots in flight for that.

    Args:
        tiles: sizes with as many slots in flight as fit into shared memory, and at most as many as there are.
        slots: slots of a work item.
        size: bytes of the scales and zero points of a tile; 0: they cannot be copied.
        value_bytes: bytes of a value of the weight.
    """
    shape = tiles.height, tiles.channels, tiles.slices, tiles.splits
    for stages in (8, 4, 3, 2):  # for a power of two, places in shared memory need no division
        reserved = places(stages, slots) * size
        if size and stages <= min(tiles.stages, most_stages(*shape, reserved=reserved, value_bytes=value_bytes)):
            return tiles._replace(stages=stages, copies_scales=True)
    return tiles


def packed_tiles(
    weight: Array | Quantized,
    dtype: jnp.dtype,
    chosen: tuple[int, ...],
    *,
    gated: bool,
    parts: tuple[int, ...] = (1,),
) -> Int4Tiles | None:
    """Returns the sizes of the kernel for a product; None: the Hopper kernel of narrow experts is not used.

    Args:
        weight: weights of all experts.
        dtype: dtype of the activations.
        chosen: number of experts of a row, and number of rows.
        gated: whether gate and up are joined.
        parts: as in `choose_tiles`.
    """
    count = multiprocessors()
    if count is None or not isinstance(weight, Quantized) or not weight.has_groups or weight.shape[-1] % BLOCK:
        return None
    has_parts = weight.kind != "mxfp4" and weight.group % SLICE  # of slices in a group
    if has_parts or dtype not in PACKED[weight.kind].dtypes:
        return None
    sizes = chosen, weight.shape, weight.scale.shape[-1], weight.kind
    return choose_tiles(*sizes, gated=gated, multiprocessors=count, parts=parts)
