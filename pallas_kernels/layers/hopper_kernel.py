"""A product with a large weight on Hopper GPUs, for up to some hundreds of rows: what two wrappers share.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal pieces of k          (`split_matmul`)
    out[t, i] = silu(x[t] . w[i]) * (x[t] . w[I + i])                                     (`gated_matmul`)

x and w are of two bytes a number, or both are float8 with a scale for each row, by which sums are multiplied.

A tile of the output is `columns` wide and as high as x, so every weight is read once. (Gated: its columns of gate and
of up lie one above the other in shared memory, as one operand of a `wgmma`, turned as two; both products of an output
end up in one thread.) Each warpgroup holds 64 rows; the TMA unit reads rows past the last as zeros and does not write
them. Turned (`hopper_tiles`), it holds 64 columns of gate and as many of up, and all rows. The first one also asks for
the tiles to come, as soon as all have done with the oldest.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.hopper_tiling import HEIGHT, INNER_BYTES, MOST_COLUMNS, PLACES, Tiles


def _kernel(x_ref, w_ref, row_scale_ref, scale_ref, out_ref, *memory, tiles):
    """One program: every so-many-th tile or part of one, one after the other, without a pause of the loads between."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (x_tiles, out_tiles), w_tiles, arrived, done, *scales_memory = memory
    inner, out, parts = x_ref.shape[1], out_ref.shape[2], tiles.parts
    group, program = jax.lax.axis_index("group"), jax.lax.axis_index("program")
    own_part = pl.ds(group * HEIGHT, HEIGHT)  # of the rows, or of the tile's columns
    all_rows = pl.ds(0 * program, tiles.height)  # a traced start: they may be more than there are
    steps = inner // tiles.inner // parts  # of a tile
    own = (out // tiles.columns * parts - program + tiles.programs - 1) // tiles.programs
    total = own * steps

    def place_of(tile):
        """Its first column, and its part."""
        index = program + tile * tiles.programs
        return jax.lax.div(index, parts) * tiles.columns, jax.lax.rem(index, parts)

    def slot_of(step):
        return jax.lax.rem(step, tiles.stages)

    def load(step):
        slot, (column, part) = slot_of(step), place_of(jax.lax.div(step, steps))
        across = pl.ds((part * steps + jax.lax.rem(step, steps)) * tiles.inner, tiles.inner)
        for half in range(tiles.halves):
            weights = w_ref.at[pl.ds(half * out + column, tiles.columns), across]
            place = w_tiles.at[slot, pl.ds(half * tiles.columns, tiles.columns)]
            plgpu.copy_gmem_to_smem(weights, place, arrived.at[slot])
        plgpu.copy_gmem_to_smem(x_ref.at[all_rows, across], x_tiles.at[slot], arrived.at[slot])

    def release(step):
        """This warpgroup has read a step's tiles, and its results there; when all have, others may take their place."""
        slot = slot_of(step)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(done.at[slot])

        @pl.when((group == 0) & (step + tiles.stages < total))
        def _():
            plgpu.barrier_wait(done.at[slot])
            load(step + tiles.stages)

    def operands(slot):
        """Of each of the sums."""
        if not tiles.turned:
            return [(x_tiles.at[slot, own_part], w_tiles.at[slot].T)]
        starts = [half * tiles.columns + group * HEIGHT for half in range(tiles.halves)]
        return [(w_tiles.at[slot, pl.ds(start, HEIGHT)], x_tiles.at[slot].T) for start in starts]

    def products(tile, *sums):
        @pl.loop(0, steps)
        def _(index):
            step = tile * steps + index
            slot = slot_of(step)
            plgpu.barrier_wait(arrived.at[slot])
            for total_of, pair in zip(sums, operands(slot), strict=True):
                plgpu.wgmma(total_of, *pair)
            plgpu.wgmma_wait(len(sums))  # all but these
            pl.when(step > 0)(lambda: release(step - 1))

        plgpu.wgmma_wait(0)
        return [total_of[...] for total_of in sums]

    def load_scales():
        row_scales, column_scales, scales_arrived = scales_memory
        for first in range(0, tiles.height, HEIGHT):
            some, place = row_scale_ref.at[pl.ds(0 * program + first, HEIGHT)], row_scales.at[pl.ds(first, HEIGHT)]
            plgpu.copy_gmem_to_smem(some, place, scales_arrived)
        for tile, half in itertools.product(range(tiles.kept), range(tiles.halves)):
            column, _ = place_of(tile)
            place = column_scales.at[tile, half, pl.ds(0, tiles.columns)]
            plgpu.copy_gmem_to_smem(scale_ref.at[pl.ds(half * out + column, tiles.columns)], place, scales_arrived)

    def piece_of(first):
        """Of a piece of the tile's output: its first row and their number, its first column and their number."""
        own, across = (group * HEIGHT, HEIGHT), (first, tiles.store)
        return (across, own) if tiles.turned else (own, across)

    def scaled(sums, tile, half, first):
        """A piece of gate or up."""
        place = first if tiles.turned else half * tiles.columns + first
        piece = sums[half if tiles.turned else 0][:, place : place + tiles.store]
        if scale_ref is None:
            return piece
        rows, (start, size) = piece_of(first)
        if tiles.kept:
            row_scales, column_scales, _ = scales_memory
            refs = row_scales.at[pl.ds(*rows)], column_scales.at[tile, half, pl.ds(start, size)]
        else:
            first_scale = half * out + place_of(tile)[0] + start
            refs = row_scale_ref.at[pl.ds(*rows)], scale_ref.at[pl.ds(first_scale, size)]
        for axis, ref in enumerate(refs[::-1] if tiles.turned else refs):
            scale = plgpu.load(ref, optimized=False)  # type: ignore[call-arg]
            piece *= jax.lax.broadcast_in_dim(scale, piece.shape, [axis])
        return piece

    def place_for(index, tile):
        """For a piece that is stored."""
        if not tiles.lent:
            return out_tiles.at[group, index % PLACES]
        lent = out_tiles.at[slot_of(tile * steps + steps - 1), group]
        return lent if lent.shape == tiles.piece else lent.at[pl.ds(0, math.prod(tiles.piece))].reshape(tiles.piece)

    def store(sums, tile):
        column, part = place_of(tile)
        for index in range((tiles.turned or tiles.columns) // tiles.store):
            first = index * tiles.store
            result = scaled(sums, tile, 0, first)
            if tiles.halves == 2:
                result = result / (1 + jnp.exp(-result)) * scaled(sums, tile, 1, first)
            if index >= PLACES:  # the first ones' have been read: a step was released since the last tile
                plgpu.wait_smem_to_gmem(PLACES - 1, wait_read_only=True)
            shared = place_for(index, tile)
            (shared.T if tiles.turned else shared)[...] = result.astype(out_ref.dtype)
            plgpu.commit_smem()
            rows, (start, size) = piece_of(first)
            plgpu.copy_smem_to_gmem(shared, out_ref.at[part, pl.ds(*rows), pl.ds(column + start, size)])

    @pl.when(group == 0)
    def _():
        pl.loop(0, jnp.minimum(tiles.stages, total))(load)
        if tiles.kept:
            load_scales()

    @pl.loop(0, own)
    def _(tile):
        zeros = [plgpu.ACC(shape, jnp.float32) for shape in tiles.sums]
        sums = pl.run_scoped(functools.partial(products, tile), *zeros)
        if tiles.kept:
            pl.when(tile == 0)(lambda: plgpu.barrier_wait(scales_memory[-1]))
        store(sums, tile)

    pl.when(total > 0)(lambda: release(total - 1))

    @pl.when(group == 0)
    def _():
        @pl.loop(jnp.maximum(total - tiles.stages, 0), total)
        def _(step):
            plgpu.barrier_wait(done.at[slot_of(step)])  # none is left before the others have arrived

    plgpu.wait_smem_to_gmem(0)


def multiply(x: Array, weight: Array, *scales: Array, tiles: Tiles, dtype: jnp.dtype, interpret: Any = False) -> Array:
    """The kernel, [parts, rows, out].

    Args:
        scales: of the rows and of the weight, if there are any.
        interpret: jax's parameters for that, by which its interpreter looks for races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # which needs absl, so not before it is used

    def memory(*shape, dtype=x.dtype):
        width = shape[-1] * jnp.dtype(dtype).itemsize
        swizzled = (plgpu.TilingTransform((8, shape[-1])), plgpu.SwizzleTransform(width)) if width > 16 else ()
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    scales_memory = [
        plgpu.SMEM((math.ceil(tiles.height / HEIGHT) * HEIGHT,), jnp.float32),
        plgpu.SMEM((tiles.kept, tiles.halves, MOST_COLUMNS), jnp.float32),
        plgpu.Barrier(num_arrivals=math.ceil(tiles.height / HEIGHT) + tiles.kept * tiles.halves),
    ]

    def results_memory(x_tiles):
        if not tiles.lent:
            return x_tiles, memory(tiles.groups, PLACES, *tiles.piece, dtype=dtype)
        if interpret:  # the interpreter takes refs that share memory for one, and does not know `reshape`
            return x_tiles, plgpu.SMEM((tiles.stages, tiles.groups, *tiles.piece), dtype)
        room = HEIGHT * INNER_BYTES // dtype.itemsize  # of which the results take the beginning
        return plgpu.RefUnion(x_tiles, plgpu.SMEM((tiles.stages, tiles.groups, room), dtype))

    def entry(x_ref, w_ref, *refs):
        *scale_refs, out_ref = refs
        pl.run_scoped(
            functools.partial(_kernel, x_ref, w_ref, *(scale_refs or (None, None)), out_ref, tiles=tiles),
            results_memory(memory(tiles.stages, tiles.height, tiles.inner)),
            memory(tiles.stages, tiles.halves * tiles.columns, tiles.inner),
            plgpu.Barrier(num_arrivals=tiles.halves + 1, num_barriers=tiles.stages),  # the weights, and x
            plgpu.Barrier(num_arrivals=tiles.groups, num_barriers=tiles.stages),
            *(scales_memory if tiles.kept else ()),
            collective_axes="group",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((tiles.parts, x.shape[0], weight.shape[0] // tiles.halves), dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.groups,
        thread_name="group",
        kernel_name="gated_matmul" if tiles.halves == 2 else "split_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(x, weight, *scales)


def choose_compiled(implementation: Implementation, kernel: Callable, reference: Callable, *arguments: Any) -> Any:
    """As `dispatch`, for a kernel that is this one: a CPU has the reference, with "pallas" too.

    jax interprets the kernel only with parameters of its own, and with effects that a branch for one platform may not
    have: also a CPU beside a Hopper GPU, for which the kernel's tiles were chosen, has no other way.
    """
    compiled: Implementation = "auto" if implementation == "pallas" else implementation
    return dispatch(compiled, None, kernel, reference, *arguments)


def multiprocessors() -> int | None:
    """Of the GPU that a program is traced for, if it is of the Hopper generation (compute capability 9.0)."""
    if jax.__version_info__ < (0, 11):
        return None  # before, kernels of this kind are not compiled here
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return device.num_cores if re.search(r"\bG?H\d+\b", device.device_kind) else None
    own = jax.local_devices()[0]
    return own.core_count if getattr(own, "compute_capability", None) == "9.0" else None
