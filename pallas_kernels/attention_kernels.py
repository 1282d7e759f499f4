"""The kernels of `paged_attention`: each split of a context by itself, then their merge, which may round its rows."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.ancestor_bits import WORD
from pallas_kernels.attention_tiles import Tiles
from pallas_kernels.round_rows import FP8, scaled_rows

MERGED = 16  # splits the merge reads at once


def attend_kernel(q_ref, k_ref, v_ref, table_ref, lengths_ref, *refs, tiles, **options):
    """Queries as they are: refs are the bits or paths, if any, and the outputs."""
    batch, (seen_ref, *outputs) = pl.program_id(2), refs if tiles.words or tiles.depths else (None, *refs)

    def queries(query, head, channels, mask):
        places = [q_ref.at[batch, query[:, None], head[:, None], dims] for dims in channels]
        return [pltriton.load(place, mask=mask, other=0) for place in places]

    attend(
        queries, k_ref, v_ref, table_ref, lengths_ref, seen_ref, outputs, dim=q_ref.shape[-1], tiles=tiles, **options
    )


def attend(
    queries,
    k_ref,
    v_ref,
    table_ref,
    lengths_ref,
    seen_ref,
    outputs,
    *,
    dim,
    tiles,
    scale,
    compute,
    precision,
    interpret,
):
    """One program: `packed` rows of one kv head over its share of the context, online softmax in base 2.

    Pools of one byte are read as pairs of numbers, even and odd channels apart.

    Args:
        queries: gives the channels asked for of some rows, before a pool is read.
        seen_ref: bits or paths; None: causal.
    """
    batch, kv_head = pl.program_id(2), pl.program_id(1)
    piece, block = pl.program_id(0) % tiles.splits, pl.program_id(0) // tiles.splits
    packed = block * tiles.packed + jnp.arange(tiles.packed)
    query, head = packed // tiles.span, kv_head * tiles.group + packed % tiles.span
    inside, width = query < tiles.queries, pl.next_power_of_2(k_ref.shape[-1])
    if tiles.depths:
        inside &= packed % tiles.span < tiles.group
    apart = dim // k_ref.shape[-1]
    columns = jnp.arange(width)[None, :]
    is_channel = columns < k_ref.shape[-1] if width > k_ref.shape[-1] else True
    channels = [columns * apart + half for half in range(apart)]
    length = lengths_ref[batch]
    new_rows = tiles.new  # that this program reads; causal: none past its own last query
    if not tiles.words and not tiles.depths:
        new_rows = jnp.minimum(((block + 1) * tiles.packed - 1) // tiles.group + 1, new_rows)
    first, last = jnp.minimum(tiles.start, length), jnp.minimum(length + new_rows, tiles.capacity)
    lowest = highest = tiles.start  # the first rows that any query here sees, and that all see
    if tiles.window:
        oldest = length - tiles.window + 1  # that the first query sees; causal: the next one sees from the next row on
        first = jnp.maximum(first, oldest + (0 if tiles.words else block * tiles.packed // tiles.group))
        lowest = highest = jnp.maximum(first, tiles.start)
        if not tiles.words:
            highest = jnp.maximum(lowest, oldest + ((block + 1) * tiles.packed - 1) // tiles.group)
    begin, end = (_own_tiles(tile, piece, tiles.splits) for tile in (first // tiles.tile, pl.cdiv(last, tiles.tile)))

    def rows_of(index):
        return (index * tiles.splits + piece) * tiles.tile + jnp.arange(tiles.tile)

    def places_of(index):
        """Loaded a step ahead: K and V are prefetched only if their addresses wait for nothing of the same step."""
        row = rows_of(index)
        if tiles.depths:
            own = seen_ref.at[batch, block, jnp.clip(row - length, 0, tiles.depths - 1)]
            own = pltriton.load(own, mask=row >= length, other=0)
            row = jnp.where(row >= length, jnp.where(own < 0, tiles.capacity, length + own), row)
        page = pltriton.load(table_ref.at[batch, jnp.minimum(row, tiles.capacity - 1) // tiles.page])
        return (page, row) if tiles.depths else (page,)

    def look():
        own_row, factor = (batch, query[:, None], head[:, None]), scale * math.log2(math.e)
        held = inside[:, None] & is_channel
        begins_at = places_of(begin)
        q = queries(query, head, channels, held)
        if q[0].dtype != compute:  # of less range, perhaps
            q, factor = [half.astype(jnp.float32) * factor for half in q], 1.0
        q = [half.astype(compute) for half in q]
        seen = [pltriton.load(seen_ref.at[batch, query, w], mask=inside, other=0) for w in range(tiles.words)]

        def step(index, carry, *, masked):
            acc, top, total, (pages, *place) = carry
            row = rows_of(index)
            (place,) = place or (row,)
            new = row - length
            loaded = (row < last) & (row >= lowest)
            if tiles.depths:
                loaded &= place < tiles.capacity
            at = (pages[:, None], kv_head, (place % tiles.page)[:, None], columns)
            mask = {"mask": loaded[:, None]} if masked else {}
            if is_channel is not True:
                whole = (loaded[:, None] if masked else True) & is_channel
                mask = {"mask": jnp.broadcast_to(whole, (tiles.tile, width)), "other": 0}
            k, v = (_numbers(pltriton.load(ref.at[at], **mask), compute, interpret) for ref in (k_ref, v_ref))
            scores = sum(pltriton.dot(*pair, trans_b=True, precision=precision) for pair in zip(q, k, strict=True))
            scores = scores * factor
            if masked:
                visible = loaded[None, :]
                if not tiles.depths:
                    visible &= (new < 0)[None, :] | _own(new, query, seen)
                if tiles.window and not tiles.words:
                    visible &= row[None, :] >= (oldest + query)[:, None]
                scores = jnp.where(visible, scores, -jnp.inf)
                # A row that was not loaded, or that only its own padding query sees, may be NaN, and so is 0 * NaN.
                sure = (loaded & (new < 0))[:, None]
                v = [jnp.where(sure | (jnp.abs(half) < jnp.inf), half, 0) for half in v]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights, fade = jnp.exp2(scores - base[:, None]), jnp.exp2(top - base)
            left = weights.astype(compute)
            acc = [a * fade[:, None] + pltriton.dot(left, b, precision=precision) for a, b in zip(acc, v, strict=True)]
            return acc, new_top, total * fade[:, None] + weights, places_of(index + 1)

        carry = (
            [jnp.zeros((tiles.packed, width), jnp.float32)] * apart,
            jnp.full((tiles.packed,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.packed, tiles.tile), jnp.float32),  # added up at the end: a reduction is a barrier
            begins_at,
        )
        masked, whole = functools.partial(step, masked=True), functools.partial(step, masked=False)
        whole_from = begin
        if tiles.start or tiles.window:
            whole_from = jnp.clip(_own_tiles(pl.cdiv(highest, tiles.tile), piece, tiles.splits), begin, end)
            carry = jax.lax.fori_loop(begin, whole_from, masked, carry)
        border = jnp.maximum(_own_tiles(jnp.minimum(length, last) // tiles.tile, piece, tiles.splits), whole_from)
        if tiles.fixed:  # one code for every tile: with masks others multiplications are fused with additions
            border = whole_from
        else:
            carry = jax.lax.fori_loop(whole_from, border, whole, carry)  # committed rows alone
        carry = jax.lax.fori_loop(border, end, masked, carry)
        acc, top, total, _ = carry
        total = jnp.sum(total, axis=1)
        place = (*own_row, piece) if tiles.splits > 1 else own_row
        for half, dims in zip(acc, channels, strict=True):
            out = (half / jnp.where(total == 0, 1.0, total)[:, None]).astype(outputs[0].dtype)
            pltriton.store(outputs[0].at[(*place, dims)], out, mask=held)
        if tiles.splits > 1:
            pltriton.store(outputs[1].at[batch, query, head, piece], top + jnp.log2(total), mask=inside)

    if tiles.splits == 1:
        look()
    else:
        pl.when(begin < end)(look)


def _own_tiles(tile: Array, piece: Array | int, splits: int) -> Array:
    """How many of the tiles before `tile` are a piece's, which has every so-many-th one.

    So all pieces have the same to do at any length, and whose a row is depends on where it stands alone.
    """
    return pl.cdiv(jnp.maximum(tile - piece, 0), splits)


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


def _own(new: Array, query: Array, seen: list[Array]) -> Array:
    """Returns bool [packed, tile]: does a query see new row `new` >= 0; `seen`: its words, none if causal."""
    if not seen:
        return new[None, :] <= query[:, None]
    words = seen[0][:, None]
    for index, word in enumerate(seen[1:], 1):
        words = jnp.where((new // WORD == index)[None, :], word[:, None], words)
    return ((words >> (new & (WORD - 1)).astype(jnp.uint32)[None, :]) & 1) != 0


def merge_kernel(parts_ref, weights_ref, lengths_ref, out_ref, *, tiles):
    """One program: the splits of one query head, weighted by 2**weights; only those that were written."""
    head, query, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dims = jnp.arange(pl.next_power_of_2(out_ref.shape[-1]))
    is_channel, is_written = dims < out_ref.shape[-1], _written(tiles, query, lengths_ref[batch])

    def step(index, carry):
        acc, top, total = carry
        piece = index * MERGED + jnp.arange(MERGED)
        written = (piece < tiles.splits) & is_written(piece)
        weight = pltriton.load(weights_ref.at[batch, query, head, piece], mask=written, other=-jnp.inf)
        at = (batch, query, head, piece[:, None], dims[None, :])
        part = pltriton.load(parts_ref.at[at], mask=written[:, None] & is_channel[None, :], other=0)
        new_top = jnp.maximum(top, jnp.max(weight))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, fade = jnp.exp2(weight - base), jnp.exp2(top - base)
        acc = acc * fade + jnp.sum(part * weight[:, None], axis=0)
        return acc, new_top, total * fade + jnp.sum(weight)

    empty = (jnp.zeros(dims.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0))
    acc, _, total = jax.lax.fori_loop(0, pl.cdiv(tiles.splits, MERGED), step, empty)
    out = (acc / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)
    pltriton.store(out_ref.at[batch, query, head, dims], out, mask=is_channel)


def merge_and_round_kernel(parts_ref, weights_ref, lengths_ref, values_ref, scale_ref, *, tiles, dtype):
    """One program: all heads of a query, merged and then, in the model's dtype, rounded to float8 as one row."""
    query, batch, (heads, dim) = pl.program_id(0), pl.program_id(1), values_ref.shape[2:]
    head, channel = jnp.arange(pl.next_power_of_2(heads)), jnp.arange(pl.next_power_of_2(dim))[None, :]
    is_head, is_written = head < heads, _written(tiles, query, lengths_ref[batch])
    inside = is_head[:, None] & (channel < dim)
    parts, weights = [], []
    for piece in range(tiles.splits):
        written, weight = is_written(piece), weights_ref.at[batch, query, head, piece]
        part = parts_ref.at[batch, query, head[:, None], piece, channel]
        weights.append(pltriton.load(weight, mask=is_head & written, other=-jnp.inf))
        parts.append(pltriton.load(part, mask=inside & written, other=0))
    top = functools.reduce(jnp.maximum, weights)
    weights = [jnp.exp2(weight - jnp.where(top == -jnp.inf, 0.0, top)) for weight in weights]
    acc = sum(part * weight[:, None] for part, weight in zip(parts, weights, strict=True))
    total = sum(weights)
    out = (acc / jnp.where(total == 0, 1.0, total)[:, None]).astype(dtype)
    values, scale_ref[batch, query] = scaled_rows(out, FP8, dims=2)
    pltriton.store(values_ref.at[batch, query, head[:, None], channel], values, mask=inside)


def _written(tiles: Tiles, query: Array, length: Array) -> Callable[[Array | int], Array]:
    """Returns what tells of a piece whether the first kernel wrote a query's part of it."""
    new_rows = tiles.new if tiles.words or tiles.depths else query + 1
    first = jnp.minimum(tiles.start, length)
    if tiles.window:
        first = jnp.maximum(first, length - tiles.window + 1 + (0 if tiles.words else query))
    last = jnp.minimum(length + new_rows, tiles.capacity)
    begin, end = first // tiles.tile, pl.cdiv(last, tiles.tile)
    return lambda piece: _own_tiles(begin, piece, tiles.splits) < _own_tiles(end, piece, tiles.splits)
