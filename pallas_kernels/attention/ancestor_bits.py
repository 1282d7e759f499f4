"""Packs ancestor masks of draft trees: bit j % 32 of word j // 32 of row n is set if node n sees node j."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, UInt32

WORD = 32  # bits per word
ALL_ONES = np.uint32(2**WORD - 1)


def num_words(n: int) -> int:
    """Returns the number of 32-bit words that hold n bits."""
    return -(-n // WORD)


def own_bits(rows: Int[np.ndarray, " n"], size: int) -> UInt32[np.ndarray, "n W"]:
    """Returns one packed mask of `size` bits for each entry r of `rows`, in which only bit r is set."""
    bits = np.zeros((len(rows), num_words(size)), np.uint32)
    bits[np.arange(len(rows)), rows // WORD] = np.uint32(1) << (rows % WORD).astype(np.uint32)
    return bits


def ancestor_bits(parents: Int32[Array | np.ndarray, "B N"]) -> UInt32[Array, "B N W"]:
    """Returns the packed ancestor masks of trees, in which each node sees itself and its ancestors.

    Args:
        parents: index of each node's parent [B, N], below the node's index; -1 for the root and for padding nodes.

    Returns:
        Bit j % 32 of word j // 32 of row n is set iff j == n or j is an ancestor of n.
    """
    batch, nodes = parents.shape
    # Pointer doubling. An extra last node stands for "no parent". It sees nothing, and is its own parent.
    ancestors = jnp.where(parents < 0, nodes, parents).astype(jnp.int32)
    ancestors = jnp.pad(ancestors, ((0, 0), (0, 1)), constant_values=nodes)
    self_bits = np.pad(own_bits(np.arange(nodes), nodes), ((0, 1), (0, 0)))
    bits = jnp.broadcast_to(self_bits, (batch, *self_bits.shape))
    for _ in range((nodes - 1).bit_length()):
        bits = bits | jnp.take_along_axis(bits, ancestors[:, :, None], axis=1, mode="clip")
        ancestors = jnp.take_along_axis(ancestors, ancestors, axis=1, mode="clip")
    return bits[:, :nodes]


def bits_of_chunk(
    bits: UInt32[Array, "B T W"], lengths: Int32[Array, " B"], chunk: int | None
) -> UInt32[Array, "B T W"]:
    """Returns ancestor masks without the ancestors that are not in the chunk of the query's own row.

    The new rows that a query sees are successive rows of the text; the first one is row `lengths[b]`, and the last one
    is the query's own: with chunks, no query may see rows after its own. A query without bit 0 sees no committed row
    either, because its chunk begins after them.

    Args:
        bits: packed ancestor masks.
        lengths: number of committed rows of each sequence.
        chunk: rows of a chunk; None: no chunks, the masks are returned unchanged.
    """
    if chunk is None:
        return bits
    bit = np.arange(WORD, dtype=np.uint32)
    is_seen = ((bits[..., None] >> bit) & 1).reshape(*bits.shape[:2], -1)
    row = lengths[:, None, None] + jnp.cumsum(is_seen, axis=-1, dtype=jnp.int32) - 1
    kept = jnp.where(row // chunk == row[..., -1:] // chunk, is_seen, 0)
    return (kept.reshape(*bits.shape, WORD) << bit).sum(-1, dtype=jnp.uint32)


def mask_tile(words: list[Array], first: Array, low: Array, high: Array, tile: int) -> Array:
    """Expands packed ancestor bits to the attention mask of one tile of the context, inside a kernel.

    New rows are numbered from 0; the committed rows before the new rows have negative numbers. Column c of the tile is
    row `first` + c. A query sees a row if low <= row < high, and if the row is committed or its bit is set. Bits are
    not looked up for each column: one shift serves 32 columns.

    Args:
        words: the queries' packed bits, one array [queries] per word.
        first: row number of column 0.
        low, high: first visible row, for all queries or for each [queries], and one past the last visible row.
        tile: number of columns.

    Returns:
        bool [queries, tile].
    """

    def word_at(start):
        """Returns one word per query, with the query's bits for rows `start` to `start` + 31."""
        index, shift = start // WORD, (start & (WORD - 1)).astype(jnp.uint32)
        word, following = _word(words, index), _word(words, index + 1)
        bits = (word >> shift) | ((following << 1) << (WORD - 1 - shift))
        return bits & low_ones(high - start) & (low_ones(low - start) ^ ALL_ONES)

    column = jnp.arange(tile)
    shifted = word_at(first)[:, None]
    for start in range(WORD, tile, WORD):
        shifted = jnp.where((column < start)[None, :], shifted, word_at(first + start)[:, None])
    return ((shifted >> (column & (WORD - 1)).astype(jnp.uint32)[None, :]) & 1) != 0


def _word(words: list[Array], index: Array) -> Array:
    """Returns word number `index` of each query; all bits are 1 before the first word, and 0 after the last word."""
    word = jnp.where(index < 0, jnp.full_like(words[0], ALL_ONES), 0)
    for number, bits in enumerate(words):
        word = jnp.where(index == number, bits, word)
    return word


def low_ones(count: Array) -> Array:
    """Returns a word whose lowest `count` bits are 1; `count` may be below 0 or above 32."""
    ones = (jnp.uint32(1) << jnp.clip(count, 0, WORD - 1).astype(jnp.uint32)) - 1
    return jnp.where(count >= WORD, ALL_ONES, ones)
