"""The input of a prefill: pieces of prompts with their tokens, and how host and device pack and unpack them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.core.prompt_blocks import block_rows, padded
from jspec.core.sampling import Sampling


class PromptPiece(NamedTuple):
    """One piece of one prompt on the host, or all pieces of a prefill on the device, with an axis for the pieces.

    All fields but the last two are int32 scalars.
    """

    slot: Any  # slot index; a padding piece has the number of slots
    start: Any  # position of the piece's first token
    count: Any  # number of tokens in the piece
    last: Any  # 1 if this is the prompt's last piece
    write: Any  # 1: write the piece's cache rows; 0: the cache has these rows, and other requests may be reading them
    root: Any  # token after the piece, if known; -1: sample this token
    remaining: Any  # number of tokens that the request may still emit, the root included
    controlled: Any  # 1: the slot's `Controls` belong to this request; 0: the request has no controls
    sampling: Sampling
    page_row: Any  # the slot's row of the page table, int32 [P]

    @staticmethod
    def width(pages: int) -> int:
        """Return the number of int32 values of a packed piece, for a page table of ``pages`` columns."""
        return SCALARS + Sampling.width() + pages

    def pack(self) -> np.ndarray:
        """Pack all fields into a new int32 vector; floats and seeds keep their bits."""
        return np.concatenate([np.array(self[:SCALARS], np.int32), self.sampling.pack(), self.page_row])

    @classmethod
    def unpack(cls, packed: Int[Array, "pieces width"]) -> PromptPiece:
        """Split packed pieces into their fields on the device; this is the inverse of `pack`."""
        sampling, page_row = jnp.split(packed[:, SCALARS:], [Sampling.width()], axis=1)
        return cls._make([*packed.T[:SCALARS], Sampling.unpack(sampling), page_row])


SCALARS = PromptPiece._fields.index("sampling")


class PrefillInput(NamedTuple):
    """The input of a prefill: pieces of prompts, and their tokens in blocks of rows (`block_rows`).

    The blocks of a piece are consecutive and in the order of the pieces. All blocks of a piece are full but the last.
    """

    pieces: Any  # int32 [pieces, width]: packed pieces, then padding pieces; on the device a `PromptPiece`
    tokens: Any  # int32 [blocks, rows]: the tokens; padding rows and padding blocks have any value

    @classmethod
    def shapes(cls, size: int, *, slots: int, pages: int) -> PrefillInput:
        """Return the shapes of the arrays for a prefill of ``size`` tokens."""
        blocks, rows = block_rows(size)
        shapes = (min(blocks, slots), PromptPiece.width(pages)), (blocks, rows)
        return cls(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))

    @classmethod
    def pack(
        cls, pieces: Sequence[PromptPiece], tokens: Sequence[Sequence[int]], size: int, *, slots: int
    ) -> PrefillInput:
        """Pack pieces and their tokens into arrays for a prefill of ``size`` tokens.

        Args:
            pieces: at most as many pieces as there are blocks and slots.
            tokens: the tokens of each piece.
            size: number of tokens of the compiled program.
            slots: number of slots.
        """
        shapes = cls.shapes(size, slots=slots, pages=len(pieces[0].page_row))
        packed, filled = (np.zeros(shape.shape, np.int32) for shape in shapes)
        packed[:, 0], rows = slots, filled.shape[1]
        flat, at = filled.reshape(-1), 0
        for index, (piece, ids) in enumerate(zip(pieces, tokens, strict=True)):
            packed[index] = piece.pack()
            flat[at : at + len(ids)] = ids
            at += padded(len(ids), rows)
        return cls(packed, filled)

    def unpack(self) -> PrefillInput:
        """Split the packed pieces into their fields on the device."""
        return PrefillInput(PromptPiece.unpack(jnp.asarray(self.pieces)), jnp.asarray(self.tokens))
