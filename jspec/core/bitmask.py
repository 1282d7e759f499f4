"""Packed token masks, in which bit ``t % 32`` of 32-bit word ``t // 32`` is set if token t is allowed."""

from __future__ import annotations

import numpy as np

WORD = 32  # tokens per word
EVERYTHING = np.uint32(2**WORD - 1)  # a mask word that allows all 32 tokens


def words_of(vocab_size: int) -> int:
    """Return the number of 32-bit words in a packed token mask over ``vocab`` tokens."""
    return -(-vocab_size // WORD)
