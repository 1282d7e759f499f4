"""Trees as packed bits: which of the new rows each row sees. Bit j % 32 of word j // 32 of row n is row j's."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32, UInt32

WORD = 32  # bits a word
ALL = np.uint32(2**WORD - 1)


def num_words(n: int) -> int:
    """Words that hold n bits."""
    return -(-n // WORD)


def own_bits(rows: Int[np.ndarray, " n"], size: int) -> UInt32[np.ndarray, "n W"]:
    """One bit a row: the row itself, of ``size`` in all."""
    bits = np.zeros((len(rows), num_words(size)), np.uint32)
    bits[np.arange(len(rows)), rows // WORD] = np.uint32(1) << (rows % WORD).astype(np.uint32)
    return bits


def ancestor_bits(parents: Int32[Array | np.ndarray, "B N"]) -> UInt32[Array, "B N W"]:
    """Which nodes of a tree each node sees: itself and its ancestors, as packed bits.

    Args:
        parents: index of each node's parent, smaller than its own; -1 for the root and for padding nodes.

    Returns:
        Bit j % 32 of word j // 32 of row n is set iff j == n or j is an ancestor of n.
    """
    batch, nodes = parents.shape
    # Pointer doubling. One more node, which sees nothing and is its own parent, stands for "no parent".
    ancestors = jnp.where(parents < 0, nodes, parents).astype(jnp.int32)
    ancestors = jnp.pad(ancestors, ((0, 0), (0, 1)), constant_values=nodes)
    own = np.pad(own_bits(np.arange(nodes), nodes), ((0, 1), (0, 0)))
    bits = jnp.broadcast_to(own, (batch, *own.shape))
    for _ in range((nodes - 1).bit_length()):
        bits = bits | jnp.take_along_axis(bits, ancestors[:, :, None], axis=1, mode="clip")
        ancestors = jnp.take_along_axis(ancestors, ancestors, axis=1, mode="clip")
    return bits[:, :nodes]


def causal_bits(n: int) -> UInt32[np.ndarray, "n W"]:
    """The bits of a chain of n nodes: row t sees 0..t."""
    seen = np.tri(n, num_words(n) * WORD, dtype=np.uint32).reshape(n, num_words(n), WORD)
    return (seen << np.arange(WORD, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def marked(seen: list[Array], first: Array, low: Array, high: Array, tile: int) -> Array:
    """In a kernel: bool [queries, tile], does a query see new row first + column, and is that from `low` to `high` - 1?

    Rows below 0 are seen by all. The queries' bits are moved to where the columns are; one by one they would be looked
    up for each column.

    Args:
        seen: words of the queries' bits, [queries] each.
    """

    def moved(start):
        """The word of 32 columns, of which the first is new row `start`."""
        index, shift = start // WORD, (start & (WORD - 1)).astype(jnp.uint32)
        word, following = _word(seen, index), _word(seen, index + 1)
        bits = (word >> shift) | ((following << 1) << (WORD - 1 - shift))
        return bits & _ones(high - start) & (_ones(low - start) ^ ALL)

    column = jnp.arange(tile)
    words = moved(first)[:, None]
    for start in range(WORD, tile, WORD):
        words = jnp.where((column < start)[None, :], words, moved(first + start)[:, None])
    return ((words >> (column & (WORD - 1)).astype(jnp.uint32)[None, :]) & 1) != 0


def _word(seen: list[Array], index: Array) -> Array:
    """A word of bits: ones in front of the first, zeros behind the last."""
    word = jnp.where(index < 0, jnp.full_like(seen[0], ALL), 0)
    for place, own in enumerate(seen):
        word = jnp.where(index == place, own, word)
    return word


def _ones(count: Array) -> Array:
    """A word of so many ones, from the lowest bit on."""
    ones = (jnp.uint32(1) << jnp.clip(count, 0, WORD - 1).astype(jnp.uint32)) - 1
    return jnp.where(count >= WORD, ALL, ones)
