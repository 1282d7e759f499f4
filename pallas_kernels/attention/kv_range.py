"""In the attention kernel: which cache rows a program reads, and which of them each of its queries sees."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.attention.ancestor_bits import mask_tile
from pallas_kernels.attention.tiling import Tiles, own_tiles


class KVRange(NamedTuple):
    """Cache rows of one sequence that one program reads and its queries see; row numbers count from row 0."""

    length: Array  # number of committed rows
    first: Array  # first row to read
    end: Array  # end of the rows to read (exclusive)
    lowest: Array | int  # first row that any query sees
    unmasked_from: Array | int  # first row from which on every query sees every committed row
    window_start: Array | int  # first row inside query 0's window (causal: query t's starts t rows later); 0: no window


def kv_range(length: Array, block: Array, tiles: Tiles) -> KVRange:
    """The rows for the block-th `tiles.packed` rows (query, head) of a sequence with `length` committed rows."""
    new_rows: Array | int = tiles.new
    if not tiles.words and not tiles.depths:  # causal: no row after the program's own last query
        new_rows = jnp.minimum(((block + 1) * tiles.packed - 1) // tiles.group + 1, new_rows)
    first, end = jnp.minimum(tiles.start, length), jnp.minimum(length + new_rows, tiles.capacity)
    if not tiles.window:
        return KVRange(length, first, end, tiles.start, tiles.start, 0)
    window_start = length - tiles.window + 1
    first = jnp.maximum(first, window_start + (0 if tiles.words else block * tiles.packed // tiles.group))
    lowest = unmasked_from = jnp.maximum(first, tiles.start)
    if not tiles.words:  # the last query's window starts last
        unmasked_from = jnp.maximum(lowest, window_start + ((block + 1) * tiles.packed - 1) // tiles.group)
    return KVRange(length, first, end, lowest, unmasked_from, window_start)


def tile_ranges(rows: KVRange, begin: Array, end: Array, split: Array, tiles: Tiles) -> list[tuple[Array, Array, bool]]:
    """Divides a split's tiles into runs: (first tile, end, whether the run needs a mask).

    A mask is needed at the beginning (`start` or a window hides rows) and at the end (new rows); the committed rows
    between are seen by every query.
    """
    if tiles.fixed:  # masked and unmasked tiles fuse other multiplications with additions: one code for all
        return [(begin, end, True)]
    hides_first, open_from = tiles.start or tiles.window, begin
    if hides_first:
        open_from = jnp.clip(own_tiles(pl.cdiv(rows.unmasked_from, tiles.tile), split, tiles.splits), begin, end)
    new_from = own_tiles(jnp.minimum(rows.length, rows.end) // tiles.tile, split, tiles.splits)
    new_from = jnp.maximum(new_from, open_from)
    return [(begin, open_from, True)] * bool(hides_first) + [(open_from, new_from, False), (new_from, end, True)]


def visible_rows(
    row: Array, first: Array, is_loaded: Array, query: Array, words: list[Array], rows: KVRange, tiles: Tiles
) -> Array:
    """Which rows of a tile each query sees.

    Args:
        row: the tile's row numbers [tile].
        first: the first of them.
        is_loaded: rows that exist and that any query sees [tile].
        query: query number of each packed row [packed].
        words: words of the queries' ancestor bits [packed] each; empty without bits.

    Returns:
        bool [packed, tile], or [1, tile] where all queries see the same rows.
    """
    if tiles.depths:
        return is_loaded[None, :]
    if tiles.words:
        bounds = (rows.lowest - rows.length, rows.end - rows.length)
        return mask_tile(words, first - rows.length, *bounds, tiles.tile)
    visible = (row - rows.length)[None, :] <= jnp.minimum(query, rows.end - rows.length - 1)[:, None]
    if tiles.start:
        visible &= row[None, :] >= rows.lowest
    if tiles.window:
        visible &= row[None, :] >= (rows.window_start + query)[:, None]
    return visible
