"""The kernel of `paged_attention`: each split of a context by itself."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.ancestor_bits import marked
from pallas_kernels.attention.tiling import MMA_ROWS, Tiles, own_tiles
from pallas_kernels.layers.quantize_rows import FP8


def attend_kernel(q_ref, k_ref, v_ref, table_ref, lengths_ref, *refs, tiles, **options):
    """Queries as they are: refs are the bits or paths, if any, and the outputs."""
    batch, (seen_ref, *outputs) = pl.program_id(2), refs if tiles.words or tiles.depths else (None, *refs)

    def queries(query, head, channels, hidden):
        places = [q_ref.at[batch, query[:, None], head[:, None], dims] for dims in channels]
        return [pltriton.load(place, **hidden(tiles.packed)) for place in places]

    pairs = q_ref.shape[-1] // k_ref.shape[-1]
    attend(queries, k_ref, v_ref, table_ref, lengths_ref, seen_ref, outputs, pairs=pairs, tiles=tiles, **options)


class Sight(NamedTuple):
    """Which rows of a context the queries of one program see; all are numbers of rows."""

    length: Array  # of what is committed
    first: Array  # row that is read
    end: Array  # behind the last one
    lowest: Array | int  # first row that any query sees
    highest: Array | int  # from which on all queries see what is committed
    oldest: Array | int  # first that the first query sees (causal: the next query from the next one on); 0: no window


def sight_of(length: Array, block: Array, tiles: Tiles) -> Sight:
    """What the block-th queries see of a context of so many committed rows."""
    new_rows: Array | int = tiles.new  # that this program reads; causal: none past its own last query
    if not tiles.words and not tiles.depths:
        new_rows = jnp.minimum(((block + 1) * tiles.packed - 1) // tiles.group + 1, new_rows)
    first, end = jnp.minimum(tiles.start, length), jnp.minimum(length + new_rows, tiles.capacity)
    if not tiles.window:
        return Sight(length, first, end, tiles.start, tiles.start, 0)
    oldest = length - tiles.window + 1
    first = jnp.maximum(first, oldest + (0 if tiles.words else block * tiles.packed // tiles.group))
    lowest = highest = jnp.maximum(first, tiles.start)
    if not tiles.words:
        highest = jnp.maximum(lowest, oldest + ((block + 1) * tiles.packed - 1) // tiles.group)
    return Sight(length, first, end, lowest, highest, oldest)


class Sums(NamedTuple):
    """Of an online softmax over the rows until now, for each row that a program holds."""

    values: list[Array]  # weighted
    top: Array  # the largest score
    total: Array  # of the weights


def attend(
    queries,
    k_ref,
    v_ref,
    table_ref,
    lengths_ref,
    seen_ref,
    outputs,
    *,
    tiles,
    scale,
    compute,
    precision,
    interpret,
    pairs=1,
    parts=1,
):
    """One program: `packed` rows of one kv head over its share of the context, online softmax in base 2.

    Args:
        queries: gives the channels asked for of some rows, before a pool is read, with loads as `hidden` tells.
        seen_ref: bits or paths; None: causal.
        pairs: numbers that a pool's element holds: of one byte two, even and odd channels apart.
        parts: of a row, read one by one, as queries are that a half is rotated with the other.
    """
    batch, kv_head = pl.program_id(2), pl.program_id(1)
    piece, block = pl.program_id(0) % tiles.splits, pl.program_id(0) // tiles.splits
    packed = block * tiles.packed + jnp.arange(tiles.packed)
    query, member = packed // tiles.span, packed % tiles.span
    inside = (query < tiles.queries) & (member < tiles.group)
    head = kv_head * tiles.group + member
    size = k_ref.shape[-1] // parts
    column = jnp.arange(max(pl.next_power_of_2(size), MMA_ROWS))[None, :]
    is_channel, width = column < size, column.shape[-1]
    columns = [part * size + column for part in range(parts)]
    channels = [dims * pairs + half for dims in columns for half in range(pairs)]
    sight = sight_of(lengths_ref[batch], block, tiles)
    ends = sight.first // tiles.tile, pl.cdiv(sight.end, tiles.tile)
    begin, end = (own_tiles(tile, piece, tiles.splits) for tile in ends)

    def hidden(rows):
        """How to load some rows, where they are narrower than what a program holds."""
        return {} if width == size else {"mask": jnp.broadcast_to(is_channel, (rows, width)), "other": 0}

    def row_of(index):
        return (index * tiles.splits + piece) * tiles.tile

    def rows_of(index):
        return row_of(index) + jnp.arange(tiles.tile)

    def places_of(index):
        """Loaded a step ahead: K and V are prefetched only if their addresses wait for nothing of the same step."""
        row = rows_of(index)
        if tiles.depths:
            own = seen_ref.at[batch, block, jnp.clip(row - sight.length, 0, tiles.depths - 1)]
            own = pltriton.load(own, mask=row >= sight.length, other=0)
            row = jnp.where(row >= sight.length, jnp.where(own < 0, tiles.capacity, sight.length + own), row)
        index, _ = _divided(jnp.minimum(row, tiles.capacity - 1), tiles.page)
        page = pltriton.load(table_ref.at[batch, index])
        return (page, row) if tiles.depths else (page,)

    def read(row, pages, place, *, masked):
        """Keys and values of a tile's rows from where they lie, and which of them are loaded where some are not."""
        loaded = (row < sight.end) & (row >= sight.lowest)
        if tiles.depths:
            loaded &= place < tiles.capacity
        at, mask = (pages[:, None], kv_head, _divided(place, tiles.page)[1][:, None]), hidden(tiles.tile)
        if masked:
            whole = jnp.broadcast_to(loaded[:, None], (tiles.tile, width))
            mask["mask"] = mask["mask"] & whole if mask else whole
        k, v = ([pltriton.load(ref.at[(*at, dims)], **mask) for dims in columns] for ref in (k_ref, v_ref))
        k, v = ([half for part in rows for half in _numbers(part, compute, interpret)] for rows in (k, v))
        return k, v, loaded

    def look():
        factor = scale * math.log2(math.e)
        stretches = stretches_of(sight, begin, end, piece, tiles)
        # What one loop hands to the next would be waited for in every step.
        places = [places_of(first) for first, _, _ in stretches]
        # Rows that nobody asked for are somebody's, and not kept: a load without a mask needs no zeros.
        asked = jnp.minimum(query, tiles.queries - 1)
        q = queries(asked, kv_head * tiles.group + jnp.minimum(member, tiles.group - 1), channels, hidden)
        if q[0].dtype != compute:  # of less range, perhaps
            q, factor = [half.astype(jnp.float32) * factor for half in q], 1.0
        q = [half.astype(compute) for half in q]
        seen = [pltriton.load(seen_ref.at[batch, asked, w]) for w in range(tiles.words)]

        def step(index, carry, *, masked):
            sums, (pages, *place) = carry
            row = rows_of(index)
            k, v, loaded = read(row, pages, *(place or [row]), masked=masked)
            scores = sum(pltriton.dot(*pair, trans_b=True, precision=precision) for pair in zip(q, k, strict=True))
            if masked:
                visible = visible_of(row, row_of(index), loaded, query, seen, sight, tiles)
                scores = jnp.where(visible, scores, -jnp.inf)
                # A row that was not loaded, or that only its own padding query sees, may be NaN, and so is 0 * NaN.
                v = [_finite(half, interpret) for half in v]
            return folded(sums, scores, v, factor, precision, interpret), places_of(index + 1)

        sums = Sums(
            [jnp.zeros((tiles.packed, width), jnp.float32)] * len(channels),
            jnp.full((tiles.packed,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.packed, MMA_ROWS), jnp.float32),  # one number in all columns
        )
        for (first, stop, is_masked), first_places in zip(stretches, places, strict=True):
            own_step = functools.partial(step, masked=is_masked)
            sums, _ = jax.lax.fori_loop(first, stop, own_step, (sums, first_places))
        total = jnp.max(sums.total, axis=1)
        place = (batch, query[:, None], head[:, None], *([piece] if tiles.splits > 1 else []))
        # Once a row: a division costs as much as several products.
        share = (1.0 / jnp.where(total == 0, 1.0, total))[:, None]
        held = inside[:, None] & is_channel
        for part, dims in zip(sums.values, channels, strict=True):
            pltriton.store(outputs[0].at[(*place, dims)], (part * share).astype(outputs[0].dtype), mask=held)
        if tiles.splits > 1:
            pltriton.store(outputs[1].at[batch, query, head, piece], sums.top * factor + jnp.log2(total), mask=inside)

    if tiles.splits == 1:
        look()
    else:
        pl.when(begin < end)(look)


def stretches_of(sight: Sight, begin: Array, end: Array, piece: Array, tiles: Tiles) -> list[tuple[Array, Array, bool]]:
    """A program's tiles: from one to behind another, and whether rows of theirs may be hidden from a query."""
    if tiles.fixed:  # one code for every tile: with masks others multiplications are fused with additions
        return [(begin, end, True)]
    hides_first, open_from = tiles.start or tiles.window, begin
    if hides_first:
        open_from = jnp.clip(own_tiles(pl.cdiv(sight.highest, tiles.tile), piece, tiles.splits), begin, end)
    new_from = own_tiles(jnp.minimum(sight.length, sight.end) // tiles.tile, piece, tiles.splits)
    new_from = jnp.maximum(new_from, open_from)
    return [(begin, open_from, True)] * bool(hides_first) + [(open_from, new_from, False), (new_from, end, True)]


def visible_of(
    row: Array, first: Array, loaded: Array, query: Array, seen: list[Array], sight: Sight, tiles: Tiles
) -> Array:
    """Which of a tile's rows, from the first one on, each query sees: [packed, tile], or [1, tile] if all see the same.

    Args:
        seen: words of bits.
    """
    if tiles.depths:
        return loaded[None, :]
    if tiles.words:
        bounds = (sight.lowest - sight.length, sight.end - sight.length)
        return marked(seen, first - sight.length, *bounds, tiles.tile)
    visible = (row - sight.length)[None, :] <= jnp.minimum(query, sight.end - sight.length - 1)[:, None]
    if tiles.start:
        visible &= row[None, :] >= sight.lowest
    if tiles.window:
        visible &= row[None, :] >= (sight.oldest + query)[:, None]
    return visible


def folded(sums: Sums, scores: Array, v: list[Array], factor: float, precision: Any, interpret: bool) -> Sums:
    """The sums over the rows until now, and over a tile's."""
    acc, top, total = sums
    compute = v[0].dtype
    ones = jnp.ones((scores.shape[1], MMA_ROWS), compute)  # sums of weights cost a product less than a reduction
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = _power(top - base, factor, jnp.zeros_like(base), interpret)[:, None]  # 1 where the top stays
    of_each = jnp.broadcast_to((base * factor)[:, None], scores.shape)
    weights = _power(scores, factor, of_each, interpret).astype(compute)
    total, *acc = (
        before * fade + pltriton.dot(weights, right, precision=precision)
        for before, right in zip([total, *acc], [ones, *v], strict=True)
    )
    return Sums(acc, new_top, total)


def _numbers(loaded: Array, compute: jnp.dtype, interpret: bool) -> list[Array]:
    """Returns what was loaded in the dtype to compute in; of a pair of float8 first the even channels, then the odd.

    Pairs are what a tensor core's operand can be read by: a transposed one of single bytes would be read byte by byte.
    """
    if loaded.dtype != jnp.uint16:
        return [loaded.astype(compute)]
    if interpret:
        halves = [(loaded >> shift).astype(jnp.uint8) for shift in (0, 8)]
        return [jax.lax.bitcast_convert_type(half, FP8).astype(compute) for half in halves]
    halves = []
    for bytes_taken in ("0x20", "0x31"):  # of two pairs, one above the other
        halves += pltriton.elementwise_inline_asm(
            f"{{ .reg .b32 own; .reg .b16 pair; prmt.b32 own, $1, 0, {bytes_taken}; cvt.u16.u32 pair, own; "
            "cvt.rn.f16x2.e4m3x2 $0, pair; }",
            args=[loaded],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(loaded.shape, jnp.float16)],
        )
    return [half.astype(compute) for half in halves]


def _finite(numbers: Array, interpret: bool) -> Array:
    """What is finite as it is; all else as the largest number of its sign, NaN as the least, of float32 as 0."""
    if numbers.dtype == jnp.float32:  # three products of whose parts end before its largest numbers do
        return jnp.where(jnp.abs(numbers) < jnp.inf, numbers, 0)
    if interpret:
        most = jnp.finfo(numbers.dtype).max
        return jnp.where(jnp.isnan(numbers), -most, jnp.clip(numbers, -most, most))
    kind, largest = ("bf16x2", 0x7F7F) if numbers.dtype == jnp.bfloat16 else ("f16x2", 0x7BFF)
    bounds = [f"{pair | pair << 16:#x}" for pair in (largest | 0x8000, largest)]
    (numbers,) = pltriton.elementwise_inline_asm(
        f"{{ .reg .b32 low, high; mov.b32 low, {bounds[0]}; mov.b32 high, {bounds[1]}; "
        f"max.{kind} low, $1, low; min.{kind} $0, low, high; }}",  # of a number and NaN both take the number
        args=[numbers],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(numbers.shape, numbers.dtype)],
    )
    return numbers


def _power(exponent: Array, factor: float, base: Array, interpret: bool) -> Array:
    """2**(exponent * factor - base) for a factor above 0; in two instructions, which make what is below 2**-126 0."""
    if interpret:
        return jnp.exp2(exponent * factor - base)
    bits = np.float32(factor).view(np.uint32)
    (power,) = pltriton.elementwise_inline_asm(
        f"{{ .reg .f32 e; fma.rn.f32 e, $1, 0f{bits:08X}, $2; ex2.approx.ftz.f32 $0, e; }}",
        args=[exponent, -base],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(exponent.shape, jnp.float32)],
    )
    return power


def _divided(row: Array, page: int) -> tuple[Array, Array]:
    """Quotient and rest; of numbers without a sign, which for a power of two are one instruction each."""
    row = row.astype(jnp.uint32)
    return (row // page).astype(jnp.int32), (row % page).astype(jnp.int32)
