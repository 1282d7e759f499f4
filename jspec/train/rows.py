"""Batches of packed rows: several documents one after another, each from a multiple of `ALIGN` tokens on."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int, Shaped

ALIGN = 16  # a document starts at a multiple of this number: the target reads documents in blocks of whole pages


Tree = TypeVar("Tree")


@struct.dataclass
class Rows:
    """Packed rows of one length, a multiple of `ALIGN`.

    Attributes:
        tokens: token id of each place.
        segments: number of the document within the row, from 1; 0: padding.
        counted: whether a token counts: the tokens that the target would generate, such as an assistant's.
    """

    tokens: Int[Array, "rows size"]
    segments: Int[Array, "rows size"]
    counted: Bool[Array, "rows size"]

    @property
    def starts(self) -> Int[Array, "rows size"]:
        """The place of the first token of each token's document."""
        first = self.segments != jnp.pad(self.segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
        return jax.lax.cummax(jnp.where(first, jnp.arange(self.tokens.shape[1]), 0), axis=1)

    @property
    def ends(self) -> Int[Array, "rows size"]:
        """The place after the last token of each token's document."""
        size = self.tokens.shape[1]
        last = self.segments != jnp.pad(self.segments, ((0, 0), (0, 1)), constant_values=-1)[:, 1:]
        return jax.lax.cummin(jnp.where(last, jnp.arange(1, size + 1), size), axis=1, reverse=True)

    @property
    def positions(self) -> Int[Array, "rows size"]:
        """The position of each token in its document."""
        return jnp.arange(self.tokens.shape[1]) - self.starts

    def reaches(self, by: int) -> Bool[Array, "rows size"]:
        """Return whether the token ``by`` places ahead belongs to the same document; False for padding."""
        return (self.segments == ahead(self.segments, by)) & (self.segments > 0)


def ahead(values: Shaped[Array, "rows size ..."], by: int) -> Shaped[Array, "rows size ..."]:
    """Return for each place the value ``by`` places ahead; 0 where the row ends before."""
    rest = [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values[:, by:], ((0, 0), (0, min(by, values.shape[1])), *rest))


def behind(values: Shaped[Array, "rows size ..."], by: int) -> Shaped[Array, "rows size ..."]:
    """Return for each place the value ``by`` places before; 0 where the row begins after."""
    rest = [(0, 0)] * (values.ndim - 2)
    return jnp.pad(values[:, : max(values.shape[1] - by, 0)], ((0, 0), (min(by, values.shape[1]), 0), *rest))


def cast(tree: Tree, dtype: jnp.dtype) -> Tree:
    """Return a tree of arrays whose floating-point ones have another dtype."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
