"""Token masks packed into 32-bit words: token t is bit ``t % 32`` of word ``t // 32``; a set bit allows the token."""

from __future__ import annotations

import numpy as np

WORD = 32  # tokens per word
EVERYTHING = np.uint32(2**WORD - 1)  # a mask word that allows all 32 tokens


def words_of(vocab_size: int) -> int:
    """Number of 32-bit words in a token mask over the vocabulary."""
    return -(-vocab_size // WORD)
