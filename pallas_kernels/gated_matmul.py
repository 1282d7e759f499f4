"""The first half of a SiLU-gated feed-forward layer in one kernel, for tens to hundreds of rows on Hopper GPUs.

    out[t, i] = silu(x[t] . w[i]) * (x[t] . w[I + i])        w = [gate, up], [2 I, K]    (arXiv:2002.05202)

x and w are of two bytes a number, or both are float8 with a scale for each row, by which sums are multiplied.

A tile of the output is `columns` wide and as high as x, so every weight is read once. Its columns of gate and of up lie
one above the other in shared memory, as one operand of a `wgmma`; both products of an output end up in one thread. Each
warpgroup holds 64 rows. The first one also asks for the tiles to come (TMA), as soon as all have done with the oldest.

The width is chosen so that the tiles are a little less than a multiple of the multiprocessors: an 8B model's 14336
columns are 128 tiles of 112 or 256 of 56, for 132.
"""

import functools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.quantized import Inputs, Quantized, Weight, factors, matmul
from pallas_kernels.round_rows import FP8, gated

DTYPES = {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), FP8}
INNER_BYTES = 128  # of a row in a step: the widest swizzle
HEIGHT = 64  # rows of a warpgroup's product
LEAST_ROWS = 32  # fewer: XLA's product is as fast
MOST_GROUPS = 5  # warpgroups that share the registers of a multiprocessor
LEAST_COLUMNS, MOST_COLUMNS = 48, 128  # twice as many are one operand, of 256 at most
OTHER_REGISTERS = 40  # of a thread, beside its sums
SHARED_BYTES = 227 * 1024 - 512  # of a multiprocessor, without the barriers
WASTE = 1.15  # of the time, at most, for tiles that leave multiprocessors idle


class Tiles(NamedTuple):
    """Static sizes of one kernel call."""

    groups: int  # warpgroups
    columns: int  # of the output
    inner: int  # numbers of a row in a step
    stages: int  # steps in flight
    store: int  # columns that are stored at once
    programs: int


def choose_tiles(rows: int, inner: int, out: int, dtype: jnp.dtype, multiprocessors: int) -> Tiles | None:
    """How the kernel divides a product [rows, inner] x [2 out, inner]; None where it is not for it."""
    groups, step = math.ceil(rows / HEIGHT), INNER_BYTES // dtype.itemsize
    if dtype not in DTYPES or rows < LEAST_ROWS or groups > MOST_GROUPS or rows % 8 or inner % step:
        return None
    most = min(512 // groups // 8 * 8 - OTHER_REGISTERS, MOST_COLUMNS)
    widths = [width for width in range(most, LEAST_COLUMNS - 1, -8) if out % width == 0]
    time = {width: math.ceil(out / width / multiprocessors) * width * multiprocessors / out for width in widths}
    if not widths or min(time.values()) > WASTE:
        return None
    columns = min(widths, key=lambda width: time[width])
    store = 16 if columns % 16 == 0 else 8
    free = SHARED_BYTES - groups * HEIGHT * 2 * 2 * store  # two places for what is stored
    stages = min(free // ((groups * HEIGHT + 2 * columns) * INNER_BYTES), inner // step)
    return Tiles(groups, columns, step, stages, store, min(out // columns, multiprocessors))


def _kernel(x_ref, w_ref, row_scale_ref, scale_ref, out_ref, *memory, tiles):
    """One program: every so-many-th tile, one after the other, without a pause of the loads between them."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x_tiles, w_tiles, out_tiles, arrived, done = memory
    (rows, inner), out = x_ref.shape, out_ref.shape[1]
    group, program = jax.lax.axis_index("group"), jax.lax.axis_index("program")
    own_rows = pl.ds(group * HEIGHT, HEIGHT)  # those past the last are not stored
    steps = inner // tiles.inner  # of a tile
    own = (out // tiles.columns - program + tiles.programs - 1) // tiles.programs
    total = own * steps

    def column_of(tile):
        return (program + tile * tiles.programs) * tiles.columns

    def slot_of(step):
        return jax.lax.rem(step, tiles.stages)

    def load(step):
        slot, across = slot_of(step), pl.ds(jax.lax.rem(step, steps) * tiles.inner, tiles.inner)
        column = column_of(jax.lax.div(step, steps))
        for first, part in ((column, pl.ds(0, tiles.columns)), (out + column, pl.ds(tiles.columns, tiles.columns))):
            weights = w_ref.at[pl.ds(first, tiles.columns), across]
            plgpu.copy_gmem_to_smem(weights, w_tiles.at[slot, part], arrived.at[slot])
        plgpu.copy_gmem_to_smem(x_ref.at[:, across], x_tiles.at[slot, pl.ds(0, rows)], arrived.at[slot])

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

    def scaled(sums, first):
        if scale_ref is None:
            return sums
        down, across = (
            jax.lax.broadcast_in_dim(plgpu.load(ref, optimized=False), sums.shape, [axis])  # type: ignore[call-arg]
            for axis, ref in enumerate((row_scale_ref.at[own_rows], scale_ref.at[pl.ds(first, tiles.store)]))
        )
        return sums * down * across

    def store(both, tile):
        last = rows - (tiles.groups - 1) * HEIGHT  # rows of the last warpgroup
        heights = ((HEIGHT, group < tiles.groups - 1), (last, group == tiles.groups - 1))
        for index in range(tiles.columns // tiles.store):
            first, column = index * tiles.store, column_of(tile) + index * tiles.store
            gate = scaled(both[:, first : first + tiles.store], column)
            up = scaled(both[:, tiles.columns + first : tiles.columns + first + tiles.store], out + column)
            # Of two places the one that is written next; a tile's first may be that of the last one's last piece.
            plgpu.wait_smem_to_gmem(min(index, 1), wait_read_only=True)
            out_tiles[group, index % 2] = (gate / (1 + jnp.exp(-gate)) * up).astype(out_ref.dtype)
            plgpu.commit_smem()
            for height, is_own in heights:
                place = out_ref.at[pl.ds(group * HEIGHT, height), pl.ds(column, tiles.store)]
                piece = out_tiles.at[group, index % 2, pl.ds(0, height)]
                pl.when(is_own)(functools.partial(plgpu.copy_smem_to_gmem, piece, place))

    @pl.when(group == 0)
    def _():
        pl.loop(0, jnp.minimum(tiles.stages, total))(load)

    @pl.loop(0, own)
    def _(tile):
        both = pl.run_scoped(functools.partial(products, tile), plgpu.ACC((HEIGHT, 2 * tiles.columns), jnp.float32))
        store(both, tile)

    @pl.when(group == 0)
    def _():
        @pl.loop(jnp.maximum(total - tiles.stages, 0), total)
        def _(step):
            plgpu.barrier_wait(done.at[slot_of(step)])  # none is left before the others have arrived

    plgpu.wait_smem_to_gmem(0)


def _mosaic(x, weight, *scales, tiles, dtype, interpret):
    """Interpreted with jax's parameters for that, by which its interpreter looks for races."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # which needs absl, so not before it is used

    def memory(*shape, dtype=x.dtype):
        width = shape[-1] * jnp.dtype(dtype).itemsize
        swizzled = (plgpu.TilingTransform((8, shape[-1])), plgpu.SwizzleTransform(width)) if width > 16 else ()
        return plgpu.SMEM(shape, dtype, transforms=swizzled)

    def entry(x_ref, w_ref, *refs):
        *scale_refs, out_ref = refs
        pl.run_scoped(
            functools.partial(_kernel, x_ref, w_ref, *(scale_refs or (None, None)), out_ref, tiles=tiles),
            memory(tiles.stages, tiles.groups * HEIGHT, tiles.inner),
            memory(tiles.stages, 2 * tiles.columns, tiles.inner),
            memory(tiles.groups, 2, HEIGHT, tiles.store, dtype=dtype),
            plgpu.Barrier(num_arrivals=3, num_barriers=tiles.stages),  # gate, up and x
            plgpu.Barrier(num_arrivals=tiles.groups, num_barriers=tiles.stages),
            collective_axes="group",
        )

    if scales:
        padding = tiles.groups * HEIGHT - x.shape[0]
        scales = (jnp.pad(scales[0], (0, padding)) if padding else scales[0], scales[1])
    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((x.shape[0], weight.shape[0] // 2), dtype),
        grid=(tiles.programs,),
        grid_names=("program",),
        num_threads=tiles.groups,
        thread_name="group",
        kernel_name="gated_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True),
        interpret=interpret,
    )(x, weight, *scales)


def _multiprocessors() -> int | None:
    """Of the GPU that a program is traced for, if it is of the Hopper generation (compute capability 9.0)."""
    if jax.__version_info__ < (0, 11):
        return None  # before, kernels of this kind are not compiled here
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return device.num_cores if re.search(r"\bG?H\d+\b", device.device_kind) else None
    own = jax.local_devices()[0]
    return own.core_count if getattr(own, "compute_capability", None) == "9.0" else None


def tiles_for(x: Inputs, weight: Weight) -> Tiles | None:
    """How the kernel takes a product; None where XLA does, which rounds gate and up before they are multiplied."""
    multiprocessors, dtype = _multiprocessors(), jnp.dtype(x.dtype)  # that of the result
    if multiprocessors is None or dtype.itemsize != 2:
        return None
    if isinstance(weight, Quantized):
        if not weight.dynamic:
            return None
        dtype = weight.values.dtype
    elif weight.dtype != dtype:
        return None
    (both, inner), rows = weight.shape, math.prod(x.shape[:-1])
    return choose_tiles(rows, inner, both // 2, dtype, multiprocessors)


@functools.partial(jax.jit, static_argnames="implementation")
def gated_matmul(x: Inputs, weight: Weight, *, implementation: Implementation = "auto") -> Float[Array, "*rows out"]:
    """silu(x @ gate.T) * (x @ up.T), in x's dtype; sums in float32.

    Args:
        weight: gate and up, one above the other, [2 out, inner].
        implementation: as in `paged_attention`; the kernel takes 32 to 320 rows, a multiple of 8, with weights of two
            bytes a number or of "fp8_dynamic", on a Hopper GPU with jax 0.11 or later (`tiles_for`). Else it is XLA's.
    """
    tiles = tiles_for(x, weight)

    def reference(x, weight):
        return gated(matmul(x, weight, implementation=implementation))

    def kernel(x, weight, interpret):
        f = factors(x, weight, implementation=implementation)
        scales = () if f.row_scale is None else (f.row_scale.reshape(-1), f.scale)
        flat = _mosaic(
            f.x.reshape(-1, f.x.shape[-1]), f.weight, *scales, tiles=tiles, dtype=x.dtype, interpret=interpret
        )
        return flat.reshape(*x.shape[:-1], -1)

    if tiles is None:
        return reference(x, weight)
    # The interpreter has effects that a branch for one platform may not have: a CPU beside such a GPU has XLA's.
    compiled = "auto" if implementation == "pallas" else implementation
    return choose(compiled, None, kernel, reference, x, weight)
