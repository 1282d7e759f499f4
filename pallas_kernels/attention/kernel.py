"""The attention kernel of `paged_attention`, which attends to one split of a context; `merge` merges the splits."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.ancestor_bits import WORD, low_ones
from pallas_kernels.attention.kv_range import KVRange, first_seen, kv_range, tile_ranges, visible_rows
from pallas_kernels.attention.ptx import count_ones, divmod_u32, replace_nonfinite, scaled_tanh, unpack_fp8
from pallas_kernels.attention.softmax import Arithmetic, SoftmaxSums, online_softmax_update, sink_weight
from pallas_kernels.attention.tiling import MMA_ROWS, AttentionTiles, own_tiles


class KVRefs(NamedTuple):
    """References to the KV cache, and to the arrays that define which cache rows a query sees."""

    k: Any  # [pages, KH, page, DK] in the pool's dtype, or [pages, KH, page, DK / 2] uint16: pairs of float8
    v: Any  # [pages, KH, page, DV], as for k
    page_table: Any  # [B, P] int32
    lengths: Any  # [B] int32, number of committed rows
    mask: Any  # ancestor bits [B, T, W] uint32, or paths [B, T, depths] int32; None: causal


def attend_kernel(
    # inputs
    q_ref,  # [B, T, H, D], the model's dtype
    k_ref,  # as in `KVRefs`, like the next three
    v_ref,
    page_table_ref,
    lengths_ref,
    mask_ref,
    sinks_ref,  # as in `attend`
    *out_refs,
    # static parameters
    tiles,
    arithmetic,
):
    """Attends to one split for queries that are rotated already, in one Pallas program (`attend`)."""
    batch = pl.program_id(2)

    def load_queries(query, head, layouts):
        return [
            pltriton.load(q_ref.at[batch, query[:, None], head[:, None], channels], **layout.load_mask(tiles.packed))
            for layout in layouts
            for channels in layout.channels
        ]

    pairs = q_ref.shape[-1] // (k_ref.shape[-1] + (v_ref.shape[-1] if tiles.is_latent else 0))
    kv = KVRefs(k_ref, v_ref, page_table_ref, lengths_ref, mask_ref)
    attend(load_queries, kv, sinks_ref, out_refs, pairs=pairs, tiles=tiles, arithmetic=arithmetic)


class GridIndex(NamedTuple):
    """The indices that say which part of the work one Pallas program does."""

    batch: Array  # index of the sequence
    kv_head: Array  # index of the KV head
    split: Array  # index of the split of the context
    block: Array  # index of the block of `tiles.packed` packed rows (pairs of a query and a query head of the group)


class ChannelLayout:
    """The assignment of a row's channels to vectors, the register arrays into which a Pallas program loads the row.

    Args:
        elements: number of elements of a row in the pool.
        pairs: number of channels per element: 1, or 2 for pairs of float8. Even and odd channels of pairs become
            separate vectors.
        parts: number of vectors per row: 1, or 2 for the two halves that a rotation combines.
        start: channel of a query that the row's first channel is multiplied by.
    """

    def __init__(self, elements: int, pairs: int, parts: int, start: int = 0):
        self.size = elements // parts
        column = jnp.arange(max(pl.next_power_of_2(self.size), MMA_ROWS))[None, :]
        self.is_column, self.width = column < self.size, column.shape[-1]
        self.columns = [part * self.size + column for part in range(parts)]  # element indices, [1, width] each
        self.channels = [start + columns * pairs + half for columns in self.columns for half in range(pairs)]

    def load_mask(self, rows: int) -> dict[str, Any]:
        """Returns mask options for a load of [rows, width]; empty unless the width is padded to a power of two."""
        if self.width == self.size:
            return {}
        return {"mask": jnp.broadcast_to(self.is_column, (rows, self.width)), "other": 0}


@dataclasses.dataclass
class ContextReader:
    """A reader of the tiles of one split of a sequence's context."""

    kv: KVRefs
    grid: GridIndex
    rows: KVRange
    layouts: list[ChannelLayout]  # of a row of V, then of K if keys are the rows of both
    tiles: AttentionTiles
    arithmetic: Arithmetic

    def first_row(self, index):
        """Returns the first cache row of the split's tile `index`; the splits take the tiles of the context in turn."""
        return (index * self.tiles.splits + self.grid.split) * self.tiles.tile

    def tile_rows(self, index):
        """Returns the row numbers of tile number `index` of the split, [tile]."""
        return self.first_row(index) + jnp.arange(self.tiles.tile)

    def locate(self, index):
        """Returns the page numbers of a tile's rows and, if queries have paths, the cache rows to read, [tile] each.

        The loop calls this one iteration ahead, because K and V are prefetched only if their addresses do not depend on
        a load of the same iteration.
        """
        row, length = self.tile_rows(index), self.rows.length
        if self.tiles.depths:
            depth = jnp.clip(row - length, 0, self.tiles.depths - 1)
            node = self.kv.mask.at[self.grid.batch, self.grid.block, depth]
            node = pltriton.load(node, mask=row >= length, other=0)
            row = jnp.where(row >= length, jnp.where(node < 0, self.tiles.capacity, length + node), row)
        column, _ = divmod_u32(jnp.minimum(row, self.tiles.capacity - 1), self.tiles.page)
        page = pltriton.load(self.kv.page_table.at[self.grid.batch, column])
        return (page, row) if self.tiles.depths else (page,)

    def oldest_rows(self, query, words):
        """Returns the first row of each query's window and chunk [packed]; if queries have paths, of the one query's.

        A query whose chunk begins after the committed rows has no bit for the first new row (`bits_of_chunk`). Its
        other bits say which new rows it sees.

        Args:
            query: query number of each packed row [packed].
            words: the words of the queries' ancestor bits, [packed] each; empty without ancestor bits.
        """
        tiles, length = self.tiles, self.rows.length
        if tiles.is_causal:
            return first_seen(length + query, tiles.window, tiles.chunk)
        if words:
            has_root = (words[0] & 1) == 1
            if tiles.queries == tiles.new:  # new rows after the query's own are not counted
                words = [word & low_ones(query + 1 - index * WORD) for index, word in enumerate(words)]
            seen = sum(count_ones(word, self.arithmetic.interpret) for word in words)
            oldest = first_seen(length + seen - 1, tiles.window, tiles.chunk)
            return jnp.where(has_root, oldest, length) if tiles.chunk else oldest
        depth = jnp.arange(pl.next_power_of_2(tiles.depths))
        path = self.kv.mask.at[self.grid.batch, self.grid.block, depth]
        path = pltriton.load(path, mask=depth < tiles.depths, other=-1)
        return first_seen(length + jnp.sum((path >= 0).astype(jnp.int32)) - 1, tiles.window, tiles.chunk)

    def load(self, row, page, source, *, masked):
        """Loads the keys and values of one tile.

        Args:
            row: row numbers of the tile [tile].
            page: page numbers of the rows [tile].
            source: cache rows of the keys and values [tile]; they differ from `row` if queries have paths.
            masked: load only rows that some query sees.

        Returns:
            The keys and the values, each as a list of vectors [tile, width]; and whether some query sees each row,
            bool [tile].
        """
        tiles, dtype, interpret = self.tiles, self.arithmetic.dtype, self.arithmetic.interpret
        is_loaded = (row < self.rows.end) & (row >= self.rows.lowest)
        if tiles.depths:
            is_loaded &= source < tiles.capacity
        at = (page[:, None], self.grid.kv_head, divmod_u32(source, tiles.page)[1][:, None])

        def vectors(ref, layout):
            options = layout.load_mask(tiles.tile)
            if masked:
                rows_loaded = jnp.broadcast_to(is_loaded[:, None], (tiles.tile, layout.width))
                options["mask"] = options["mask"] & rows_loaded if options else rows_loaded
            return [pltriton.load(ref.at[(*at, columns)], **options) for columns in layout.columns]

        k, v = vectors(self.kv.k, self.layouts[-1]), vectors(self.kv.v, self.layouts[0])
        k, v = ([half for part in parts for half in unpack_fp8(part, dtype, interpret)] for parts in (k, v))
        return [*v, *k] if tiles.is_latent else k, v, is_loaded


def attend(
    load_queries,
    kv,
    sinks_ref,
    out_refs,
    # static parameters
    *,
    tiles,
    arithmetic,
    pairs=1,
    parts=1,
):
    """Attends to one split of the context for one block of queries of a KV head, in one Pallas program.

    A block has `tiles.packed` packed rows, which are pairs of a query and a query head of the KV head's group.

    Args:
        load_queries: function (query, head, layouts) that returns the block's queries as vectors [packed, width], in
            the order of the layouts' channels. It runs before any tile of the cache is read, and may write to the
            cache.
        kv: references to the cache and the mask.
        sinks_ref: score of each query head's sink [H]; None: no sinks, or the merging kernel adds them.
        out_refs: the output [B, T, H, DV]. With several splits, the outputs of the splits [B, T, H, splits, DV] and
            their base-2 log-sum-exps [B, T, H, splits], both float32; of a split without rows to read, the latter are
            -inf and the former are not written.
        tiles: static sizes of the call.
        arithmetic: how scores and sums are computed.
        pairs, parts: as in `ChannelLayout`.
    """
    batch, kv_head = pl.program_id(2), pl.program_id(1)
    split, block = pl.program_id(0) % tiles.splits, pl.program_id(0) // tiles.splits
    grid = GridIndex(batch, kv_head, split, block)
    # The packed rows of this block: pairs of a query and a head of the group, padded.
    packed_row = block * tiles.packed + jnp.arange(tiles.packed)
    query, member = packed_row // tiles.span, packed_row % tiles.span
    is_real = (query < tiles.queries) & (member < tiles.group)
    head = kv_head * tiles.group + member
    layout = ChannelLayout(kv.v.shape[-1], pairs, parts)
    layouts = [layout]
    if tiles.is_latent:
        layouts.append(ChannelLayout(kv.k.shape[-1], pairs, parts, start=kv.v.shape[-1] * pairs))
    # The tiles of this split, numbered within the split: from `begin` to `end`.
    rows = kv_range(kv.lengths[batch], block, tiles)
    bounds = rows.first // tiles.tile, pl.cdiv(rows.end, tiles.tile)
    begin, end = (own_tiles(tile, split, tiles.splits) for tile in bounds)
    context = ContextReader(kv, grid, rows, layouts, tiles, arithmetic)

    def attend_tiles():
        factor = arithmetic.scale * math.log2(math.e)
        ranges = tile_ranges(rows, begin, end, split, tiles)
        # Each loop loads its own first page numbers. If the loop before passed them on, every iteration would wait for
        # them.
        first_locations = [context.locate(first) for first, _, _ in ranges]

        # Queries. Padding rows load a real row (clamped index), so no mask is needed. Their results are not stored.
        loaded_query = jnp.minimum(query, tiles.queries - 1)
        loaded_head = kv_head * tiles.group + jnp.minimum(member, tiles.group - 1)
        q = load_queries(loaded_query, loaded_head, layouts)
        if q[0].dtype != arithmetic.dtype:  # this dtype's range may be smaller, so scale first, in float32
            q, factor = [half.astype(jnp.float32) * factor for half in q], 1.0
        q = [half.astype(arithmetic.dtype) for half in q]
        words = [pltriton.load(kv.mask.at[batch, loaded_query, w]) for w in range(tiles.words)]
        oldest = context.oldest_rows(query, words) if tiles.hides_old_rows else None
        if arithmetic.softcap is not None:  # base-2 scores become limit * tanh(score / limit)
            limit = arithmetic.softcap * math.log2(math.e)
            scores_factor, factor = factor / limit, limit

        def step(index, carry, *, masked):
            sums, (page, *source) = carry
            row = context.tile_rows(index)
            k, v, is_loaded = context.load(row, page, *(source or [row]), masked=masked)
            scores = sum(
                pltriton.dot(*pair, trans_b=True, precision=arithmetic.precision) for pair in zip(q, k, strict=True)
            )
            if arithmetic.softcap is not None:
                scores = scaled_tanh(scores, scores_factor, arithmetic.is_exact)
            if masked:
                visible = visible_rows(row, context.first_row(index), is_loaded, query, words, oldest, rows, tiles)
                scores = jnp.where(visible, scores, -jnp.inf)
                # Rows that were not loaded, or that only a padding query sees, may hold NaN: 0 * NaN is NaN.
                v = [replace_nonfinite(half, arithmetic.interpret) for half in v]
            return online_softmax_update(sums, scores, v, factor, arithmetic), context.locate(index + 1)

        # Scores, softmax and values, tile by tile.
        sums = SoftmaxSums(
            [jnp.zeros((tiles.packed, layout.width), jnp.float32)] * len(layout.channels),
            jnp.full((tiles.packed,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.packed, MMA_ROWS), jnp.float32),
        )
        for (first, stop, masked), location in zip(ranges, first_locations, strict=True):
            sums, _ = jax.lax.fori_loop(first, stop, functools.partial(step, masked=masked), (sums, location))

        # Normalise and store. Divide once per row, because a division takes as long as several multiplications.
        total = jnp.max(sums.total, axis=1)
        if sinks_ref is not None:
            total += sink_weight(pltriton.load(sinks_ref.at[loaded_head]), sums.top * factor)
        at = (batch, query[:, None], head[:, None], *([split] if tiles.splits > 1 else []))
        inverse = (1.0 / jnp.where(total == 0, 1.0, total))[:, None]
        mask = is_real[:, None] & layout.is_column
        for part, channels in zip(sums.values, layout.channels, strict=True):
            pltriton.store(out_refs[0].at[(*at, channels)], (part * inverse).astype(out_refs[0].dtype), mask=mask)
        if tiles.splits > 1:
            store_log_sum_exp(sums.top * factor + jnp.log2(total))

    def store_log_sum_exp(values):
        pltriton.store(out_refs[1].at[batch, query, head, split], values, mask=is_real)

    if tiles.splits == 1:
        attend_tiles()
    else:
        empty = functools.partial(store_log_sum_exp, jnp.full((tiles.packed,), -jnp.inf, jnp.float32))
        jax.lax.cond(begin < end, attend_tiles, empty)
