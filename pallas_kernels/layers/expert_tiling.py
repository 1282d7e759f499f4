"""Chooses the tile sizes of the Hopper kernel of packed experts (`expert_kernel`)."""

import itertools
import math

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.layers.expert_bytes import BLOCK, SLICE
from pallas_kernels.layers.expert_rows import MOST_LISTED
from pallas_kernels.layers.hopper_kernel import multiprocessors
from pallas_kernels.layers.hopper_tiling import HEIGHT
from pallas_kernels.layers.int4_tiling import Tiles, most_stages
from pallas_kernels.layers.quantized import Quantized

# Rows of a block, and the most choices of an expert on average for which they usually suffice.
HEIGHTS = ((8, 4), (16, 11), (32, 24), (64, math.inf))
# Channels and splits of a CTA by the rows of a block, the preferred first. Splits read longer pieces of the weight's
# rows; warpgroups side by side share the rows of x, whose bytes are more than the weight's at 32 rows.
SHAPES = {
    8: ((1, 4), (2, 2), (3, 1), (2, 1)),
    16: ((2, 2), (1, 4), (3, 1), (2, 1)),
    32: ((3, 1), (4, 1), (2, 2), (2, 1)),
    64: ((3, 1), (4, 1), (2, 1)),
}
LOADED = (16, 32)  # rows of a block with which a warpgroup of its own loads slots; with others this gains nothing
SHAPE_WORTH = 0.95  # a shape is chosen instead of one before it if the time is below this share
PARTS_WORTH = 0.9  # more parts of k are worth their sums if the time is below this share


def choose_tiles(
    chosen: tuple[int, ...], shape: tuple[int, ...], *, gated: bool, multiprocessors: int, parts: tuple[int, ...] = (1,)
) -> Tiles | None:
    """Chooses the sizes of the kernel for a weight; None: the kernel does not support its shape, or so many choices.

    Args:
        chosen: number of experts of a row, and number of rows.
        shape: shape of the unpacked weight [experts, N, inner].
        gated: whether gate and up are joined.
        multiprocessors: number of multiprocessors of the GPU.
        parts: numbers of parts of k that are possible.
    """
    (each, rows), (experts, out, inner) = chosen, shape
    width = out // (1 + gated)
    if each * rows > MOST_LISTED or width % HEIGHT:
        return None
    used = experts * (1 - (1 - min(each / experts, 1)) ** rows)  # expected, with experts chosen at random
    height = next(height for height, most in HEIGHTS if each * rows / used <= most)
    blocks = max(used, each * rows / height)
    channels_of, slices = HEIGHT // (1 + gated), math.ceil(inner / SLICE)
    best, least = None, math.inf
    for count, (channels, splits) in itertools.product(parts, SHAPES[height]):
        if width % (channels * channels_of) or splits * count > slices:
            continue
        items = blocks * (width // (channels * channels_of)) * count
        slots = math.ceil(slices / (splits * count))
        waves = math.ceil(items / multiprocessors)
        time = waves * multiprocessors / items * slots * splits * count / slices  # 1: nothing is ever idle
        worth = 1 if best is None else SHAPE_WORTH if best.parts == count else PARTS_WORTH
        if time < least * worth:
            stages = min(most_stages(height, channels, splits, splits), slots * waves)
            own = height in LOADED
            best, least = Tiles(height, channels, splits, stages, count, multiprocessors, own), time
    return best


def packed_tiles(
    weight: Array | Quantized,
    dtype: jnp.dtype,
    chosen: tuple[int, ...],
    *,
    gated: bool,
    parts: tuple[int, ...] = (1,),
) -> Tiles | None:
    """Returns the sizes of the kernel for a product; None: the Hopper kernel of packed experts is not used.

    Args:
        weight: weights of all experts.
        dtype: dtype of the activations.
        chosen: number of experts of a row, and number of rows.
        gated: whether gate and up are joined.
        parts: as in `choose_tiles`.
    """
    count = multiprocessors()
    if count is None or not isinstance(weight, Quantized) or weight.group is None or weight.shape[-1] % BLOCK:
        return None
    is_mxfp4, is_int4 = weight.kind == "mxfp4", weight.kind == "int4" and weight.group % SLICE == 0
    if not ((is_mxfp4 and dtype == jnp.bfloat16) or (is_int4 and dtype in (jnp.bfloat16, jnp.float16))):
        return None
    return choose_tiles(chosen, weight.shape, gated=gated, multiprocessors=count, parts=parts)
