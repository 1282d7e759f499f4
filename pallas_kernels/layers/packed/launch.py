"""How the Hopper kernels of narrow weights (`int4_kernel`, `expert_kernel`) are launched, and their shared memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layers.hopper import HEIGHT
from pallas_kernels.layers.packed import byte_registers
from pallas_kernels.layers.packed.int4_tiling import STORE_BUFFERS, STORED_ROWS, Int4Tiles
from pallas_kernels.layers.packed.packed_cta import PackedCta


def launch(
    cta: Callable[..., PackedCta],
    arrays: dict[str, Array],
    out: jax.ShapeDtypeStruct,
    tiles: Int4Tiles,
    *memory: Any,
    name: str,
    interpret: Any,
) -> Array:
    """Runs a kernel with a CTA for each program, and returns its output.

    Args:
        cta: function of references, of `arrays` by name and of the output as "out", and of each tree of shared memory
            that returns the operations of a CTA.
        arrays: inputs in global memory by name.
        out: shape and dtype of the output.
        tiles: static sizes of the call.
        memory: trees of shared memory.
        name: name of the kernel.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    def entry(*refs):
        by_name = dict(zip((*arrays, "out"), refs, strict=True))
        pl.run_scoped(lambda *scoped: cta(by_name, *scoped).run(), *memory, collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=out,
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(*arrays.values())


def memory_of(
    tiles: Int4Tiles,
    dtype: jnp.dtype,
    x: tuple[int, ...],
    piece: int,
    weights: tuple[int, ...],
    loads: int,
    *,
    is_tiled: bool = False,
    stored: tuple[int, jnp.dtype] | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Returns the shared memory of a CTA, which `PackedCta` takes.

    Args:
        tiles: static sizes of the call.
        dtype: dtype of x.
        x: shape of the rows of x of a slot.
        piece: columns of an operand of `wgmma`.
        weights: shape of the bytes of all slots.
        loads: number of copies that load a slot.
        is_tiled: whether the weights are tiled as `byte_registers.widened` has them.
        stored: channels of a warpgroup whose results go through shared memory, and their dtype; None: none do.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def tiled(columns, dtype):
        return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * dtype.itemsize)

    slots = [
        plgpu.SMEM((tiles.stages, *x), dtype, transforms=tiled(piece, dtype)),
        plgpu.SMEM(weights, jnp.uint8, transforms=byte_registers.transforms(tiles.columns) if is_tiled else ()),
        plgpu.Barrier(num_arrivals=loads, num_barriers=tiles.stages),
        plgpu.Barrier(num_arrivals=tiles.groups, num_barriers=tiles.stages),
    ]
    joining, results = [], []
    if tiles.splits > 1:
        joining = [
            plgpu.SMEM((tiles.splits - 1, tiles.channels, HEIGHT, tiles.height), jnp.float32),
            plgpu.Barrier(num_arrivals=tiles.channels * (tiles.splits - 1)),
            plgpu.Barrier(num_arrivals=tiles.channels),
        ]
    if stored:
        buffers = tiles.groups, STORE_BUFFERS, STORED_ROWS
        results = [plgpu.SMEM((*buffers, stored[0]), stored[1], transforms=tiled(*stored))]
    return slots, joining, results
