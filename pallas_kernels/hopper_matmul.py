"""A product with a large weight on Hopper GPUs, for up to some hundreds of rows: what two wrappers share.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal pieces of k          (`split_matmul`)
    out[t, i] = silu(x[t] . w[i]) * (x[t] . w[I + i])                                     (`gated_matmul`)

x and w are of two bytes a number, or both are float8 with a scale for each row, by which sums are multiplied.

A tile of the output is `columns` wide and as high as x, so every weight is read once. (Gated: its columns of gate and
of up lie one above the other in shared memory, as one operand of a `wgmma`; both products of an output end up in one
thread.) Each warpgroup holds 64 rows; the TMA unit reads rows past the last as zeros and does not write them. The first
warpgroup also asks for the tiles to come, as soon as all have done with the oldest.

The rows are the tensor core's first operand and the weights its second, whose size goes in steps of 8, not 64: so the
width can be chosen with which tiles are a little less than a multiple of the multiprocessors.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.round_rows import FP8

DTYPES = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), FP8}
INNER_BYTES = 128  # of a row in a step: the widest swizzle
HEIGHT = 64  # rows of a warpgroup's product
SHARED_BYTES = 227 * 1024 - 512  # of a multiprocessor, without the barriers
ALIGNMENT = 1024  # bytes, of each array in shared memory; what is copied goes to multiples of 128
MOST_GROUPS = 5  # warpgroups that share the registers of a multiprocessor
REGISTERS = 512  # of a thread, if one warpgroup had a multiprocessor's
OTHER_REGISTERS = 40  # of a thread, beside its sums
LEAST_COLUMNS, MOST_COLUMNS = 48, 128  # twice as many are one operand of gate and up, of 256 at most
WASTE = 1.15  # of the time, at most, for tiles that leave multiprocessors idle


class Tiles(NamedTuple):
    """Static sizes of one kernel call."""

    groups: int  # warpgroups
    columns: int  # of a tile of the output
    inner: int  # numbers of a row in a step
    stages: int  # steps in flight
    store: int  # columns that are stored at once
    programs: int
    parts: int = 1  # pieces of the sum over k
    halves: int = 1  # 2: gate and up
    kept: int = 0  # tiles of a program whose scales wait in shared memory; 0: there are none, or no room for them


def choose_tiles(
    rows: int, inner: int, out: int, dtype: jnp.dtype, multiprocessors: int, *, parts: int = 1, halves: int = 1
) -> Tiles | None:
    """How the kernel divides a product [rows, inner] x [halves * out, inner]; None where it is not for it.

    Args:
        parts: that the sum over `inner` comes in, float32 if there are several.
        halves: 2: gated.
    """
    groups, step = math.ceil(rows / HEIGHT), INNER_BYTES // dtype.itemsize
    if dtype not in DTYPES or groups > MOST_GROUPS or (rows > 8 and rows % 8) or inner % (step * parts):
        return None
    most = min(REGISTERS // groups // 8 * 8 - OTHER_REGISTERS, MOST_COLUMNS)
    widths = [width for width in range(most, LEAST_COLUMNS - 1, -8) if out % width == 0]
    items = {width: out // width * parts for width in widths}
    time = {width: math.ceil(items[width] / multiprocessors) * multiprocessors / items[width] for width in widths}
    if not widths or min(time.values()) > WASTE:
        return None
    columns = min(widths, key=lambda width: time[width])
    store = 16 if columns % 16 == 0 else 8
    free = SHARED_BYTES - groups * HEIGHT * 2 * store * (4 if parts > 1 else 2)  # two places for what is stored
    kept = math.ceil(items[columns] / multiprocessors) if dtype == FP8 else 0
    sizes = (groups * HEIGHT, kept * halves * MOST_COLUMNS) if kept else ()
    beside = sum(math.ceil(4 * size / ALIGNMENT) * ALIGNMENT for size in sizes)
    own = (groups * HEIGHT + halves * columns) * INNER_BYTES  # of a step
    stages, fewer = (min(room // own, inner // step // parts) for room in (free, free - beside))
    if fewer < stages and rows % HEIGHT == 0:  # else what lies behind the rows' scales would be read
        kept = 0
    stages = fewer if kept else stages
    return Tiles(groups, columns, step, stages, store, min(items[columns], multiprocessors), parts, halves, kept)


def _kernel(x_ref, w_ref, row_scale_ref, scale_ref, out_ref, *memory, tiles):
    """One program: every so-many-th tile or part of one, one after the other, without a pause of the loads between."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x_tiles, w_tiles, out_tiles, arrived, done, *scales_memory = memory
    inner, out, parts = x_ref.shape[1], out_ref.shape[2], tiles.parts
    group, program = jax.lax.axis_index("group"), jax.lax.axis_index("program")
    own_rows = pl.ds(group * HEIGHT, HEIGHT)
    all_rows = pl.ds(0 * program, tiles.groups * HEIGHT)  # a traced start: they may be more than there are
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
        """This warpgroup has read a step's tiles; when all have, others may take their place."""
        slot = slot_of(step)
        plgpu.barrier_arrive(done.at[slot])

        @pl.when((group == 0) & (step + tiles.stages < total))
        def _():
            plgpu.barrier_wait(done.at[slot])
            load(step + tiles.stages)

    def products(tile, sums):
        @pl.loop(0, steps)
        def _(index):
            step = tile * steps + index
            slot = slot_of(step)
            plgpu.barrier_wait(arrived.at[slot])
            plgpu.wgmma(sums, x_tiles.at[slot, own_rows], w_tiles.at[slot].T)
            plgpu.wgmma_wait(1)  # all but this one
            pl.when(index > 0)(lambda: release(step - 1))

        plgpu.wgmma_wait(0)
        release(tile * steps + steps - 1)
        return sums[...]

    def load_scales():
        row_scales, column_scales, scales_arrived = scales_memory
        for first in range(0, tiles.groups * HEIGHT, HEIGHT):
            some, place = row_scale_ref.at[pl.ds(0 * program + first, HEIGHT)], row_scales.at[pl.ds(first, HEIGHT)]
            plgpu.copy_gmem_to_smem(some, place, scales_arrived)
        for tile, half in itertools.product(range(tiles.kept), range(tiles.halves)):
            column, _ = place_of(tile)
            place = column_scales.at[tile, half, pl.ds(0, tiles.columns)]
            plgpu.copy_gmem_to_smem(scale_ref.at[pl.ds(half * out + column, tiles.columns)], place, scales_arrived)

    def scaled(sums, tile, half, first):
        if scale_ref is None:
            return sums
        if tiles.kept:
            row_scales, column_scales, _ = scales_memory
            across = column_scales.at[tile, half, pl.ds(first, tiles.store)]
        else:
            row_scales, across = row_scale_ref, scale_ref.at[pl.ds(half * out + place_of(tile)[0] + first, tiles.store)]
        for axis, ref in enumerate((row_scales.at[own_rows], across)):
            scale = plgpu.load(ref, optimized=False)  # type: ignore[call-arg]
            sums *= jax.lax.broadcast_in_dim(scale, sums.shape, [axis])
        return sums

    def store(sums, tile):
        column, part = place_of(tile)
        for index in range(tiles.columns // tiles.store):
            first = index * tiles.store
            result = scaled(sums[:, first : first + tiles.store], tile, 0, first)
            if tiles.halves == 2:
                second = tiles.columns + first
                up = scaled(sums[:, second : second + tiles.store], tile, 1, first)
                result = result / (1 + jnp.exp(-result)) * up
            # Of two places the one that is written next; a tile's first may be that of the last one's last piece.
            plgpu.wait_smem_to_gmem(min(index, 1), wait_read_only=True)
            out_tiles[group, index % 2] = result.astype(out_ref.dtype)
            plgpu.commit_smem()
            place = out_ref.at[part, own_rows, pl.ds(column + first, tiles.store)]
            plgpu.copy_smem_to_gmem(out_tiles.at[group, index % 2], place)

    @pl.when(group == 0)
    def _():
        pl.loop(0, jnp.minimum(tiles.stages, total))(load)
        if tiles.kept:
            load_scales()

    @pl.loop(0, own)
    def _(tile):
        sums = plgpu.ACC((HEIGHT, tiles.halves * tiles.columns), jnp.float32)
        sums = pl.run_scoped(functools.partial(products, tile), sums)
        if tiles.kept:
            pl.when(tile == 0)(lambda: plgpu.barrier_wait(scales_memory[-1]))
        store(sums, tile)

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
        plgpu.SMEM((tiles.groups * HEIGHT,), jnp.float32),
        plgpu.SMEM((tiles.kept, tiles.halves, MOST_COLUMNS), jnp.float32),
        plgpu.Barrier(num_arrivals=tiles.groups + tiles.kept * tiles.halves),
    ]

    def entry(x_ref, w_ref, *refs):
        *scale_refs, out_ref = refs
        pl.run_scoped(
            functools.partial(_kernel, x_ref, w_ref, *(scale_refs or (None, None)), out_ref, tiles=tiles),
            memory(tiles.stages, tiles.groups * HEIGHT, tiles.inner),
            memory(tiles.stages, tiles.halves * tiles.columns, tiles.inner),
            memory(tiles.groups, 2, HEIGHT, tiles.store, dtype=dtype),
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
    """As `choose`, for a kernel that is this one: a CPU has the reference, with "pallas" too.

    jax interprets the kernel only with parameters of its own, and with effects that a branch for one platform may not
    have: also a CPU beside a Hopper GPU, for which the kernel's tiles were chosen, has no other way.
    """
    compiled: Implementation = "auto" if implementation == "pallas" else implementation
    return choose(compiled, None, kernel, reference, *arguments)


def multiprocessors() -> int | None:
    """Of the GPU that a program is traced for, if it is of the Hopper generation (compute capability 9.0)."""
    if jax.__version_info__ < (0, 11):
        return None  # before, kernels of this kind are not compiled here
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return device.num_cores if re.search(r"\bG?H\d+\b", device.device_kind) else None
    own = jax.local_devices()[0]
    return own.core_count if getattr(own, "compute_capability", None) == "9.0" else None
