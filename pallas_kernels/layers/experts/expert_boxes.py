"""How scales and zero points of narrow experts' weights are copied into shared memory (`expert_kernel`).

The rows of a tile are one after the other in memory, and so are their scales. They are copied once for each work item,
as an array whose rows have a length that the TMA unit copies, of any number of scales of a row of the weight.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.layers.experts.expert_bytes import PACKED, SLICE
from pallas_kernels.layers.packed.int4_tiling import COPIED, Int4Tiles
from pallas_kernels.layers.weights import FORMATS, Kind, Quantized

MOST_ELEMENTS = 256  # of each dimension of a copy
ALIGNED = 128  # bytes; a copy begins at a multiple of them in shared memory


class Box(NamedTuple):
    """The place of what the rows of a tile have, of one half if the weight has gate and up."""

    groups: int  # elements of a row of the weight
    rows: int  # rows for which there is memory
    lines: int  # rows of the copied array
    size: int  # elements of each of them

    @property
    def stored_lines(self) -> int:
        """Number of rows of the copied array for which there is memory."""
        return self.rows * self.groups // self.size


def box_of(rows: int, groups: int, element_bytes: int) -> Box | None:
    """Returns the place of what some rows of a weight have; None: the TMA unit does not copy it at once.

    Args:
        rows: number of rows.
        groups: elements of a row.
        element_bytes: bytes of an element.
    """
    size = math.gcd(rows * groups, MOST_ELEMENTS)
    lines, aligned = rows * groups // size, ALIGNED // math.gcd(ALIGNED, groups * element_bytes)
    if size * element_bytes % COPIED or lines > MOST_ELEMENTS:
        return None
    return Box(groups, math.ceil(rows / aligned) * aligned, lines, size)


def box_bytes(rows: int, groups: int, kind: Kind) -> int:
    """Returns the bytes of the scales and zero points of a tile's rows in shared memory; 0: they cannot be copied.

    Args:
        rows: number of rows, of one half if the weight has gate and up.
        groups: number of groups of a row.
        kind: kind of the weight.
    """
    total = 0
    for size in filter(None, (jnp.dtype(FORMATS[kind].scale_dtype).itemsize, PACKED[kind].zero_bytes)):
        if (box := box_of(rows, groups, size)) is None:
            return 0
        total += box.rows * groups * size
    return total


def boxes_of(weight: Quantized, tiles: Int4Tiles, halves: int) -> dict[str, Box]:
    """Returns the places of a tile's scales and zero points by name.

    Args:
        weight: weights of all experts.
        tiles: static sizes of the call.
        halves: 2 if the weight has gate and up, else 1.
    """
    boxes = {}
    for name, array in (("scale", weight.scale), ("zeros", weight.zeros)):
        if tiles.copies_scales and array is not None:
            box = box_of(tiles.channels * tiles.width // halves, array.shape[-1], array.dtype.itemsize)
            assert box, f"{name}: {array.shape[-1]} groups cannot be copied for tiles {tiles}"
            boxes[name] = box
    return boxes


def item_slots(inner: int, tiles: Int4Tiles) -> int:
    """Returns the number of slots of a work item of a weight with so many columns."""
    return math.ceil(inner / (SLICE * tiles.slices * tiles.parts))


def places(stages: int, slots: int) -> int:
    """Returns of how many work items scales are in shared memory.

    A slot is loaded when all warpgroups have released the one that is `stages` before. When the first slot of a work
    item is loaded, they must have released the last slot of the work item whose scales are replaced.

    Args:
        stages: slots in flight.
        slots: slots of a work item.
    """
    return 1 + math.ceil((stages - 1) / slots)


def memory_of_boxes(boxes: dict[str, Box], dtypes: dict[str, jnp.dtype], halves: int, count: int) -> list[Any]:
    """Returns the shared memory of boxes by name, and if there are any, the barriers of their places.

    Args:
        boxes: places by name.
        dtypes: dtypes of the arrays.
        halves: 2 if the weight has gate and up, else 1.
        count: `places`.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    memory = {
        name: plgpu.SMEM((count, halves * box.stored_lines, box.size), dtypes[name]) for name, box in boxes.items()
    }
    return [memory, *([plgpu.Barrier(num_arrivals=halves * len(boxes), num_barriers=count)] if boxes else [])]
