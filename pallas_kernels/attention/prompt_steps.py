"""Which blocks and heads a CTA of `prompt_kernel` has, and the order in which it reads tiles of cache rows.

A step reads one tile for all blocks of one sequence. If a CTA has blocks of several sequences, it reads the tiles of
one sequence after those of the other.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

ROWS = 64  # query rows of a warpgroup, as many as `wgmma` multiplies at once
COMPUTING = 2  # warpgroups that compute


class PromptSizes(NamedTuple):
    """The static sizes of a call."""

    tokens: int  # tokens of a block, a power of two up to `ROWS`
    group: int  # query heads per KV head
    page: int  # cache rows of a page
    dim: int  # channels of a head
    window: int | None  # newest rows that a query sees; None: all

    @property
    def tile(self) -> int:
        """Number of cache rows of a tile: as many as leave space for two tiles of K and of V, and for their scores."""
        return 128 if self.dim <= 128 else 64

    @property
    def pages(self) -> int:
        """Number of pages of a tile."""
        return self.tile // self.page

    @property
    def heads(self) -> int:
        """Number of query heads of a warpgroup: the largest one that divides those of a KV head and `ROWS`."""
        return math.gcd(self.group, ROWS // self.tokens)

    @property
    def joined(self) -> int:
        """Number of blocks of a warpgroup."""
        return ROWS // (self.tokens * self.heads)

    @property
    def shares_blocks(self) -> bool:
        """Whether both computing warpgroups have the same blocks, and different heads."""
        return self.group // self.heads % COMPUTING == 0

    @property
    def blocks(self) -> int:
        """Number of blocks of a CTA."""
        return self.joined if self.shares_blocks else COMPUTING * self.joined

    @property
    def parts(self) -> int:
        """Number of CTAs among which the query heads of a KV head are divided."""
        return self.group // self.heads // (COMPUTING if self.shares_blocks else 1)


class Refs(NamedTuple):
    """The arrays in device memory."""

    q: Any  # [blocks, tokens, heads, dim]
    k: Any  # [pages, kv_heads, page, dim]
    v: Any
    page_table: Any  # [blocks, columns]
    first_row: Any  # [blocks]
    sequence: Any  # [blocks]
    ends: Any  # [blocks]
    out: Any  # [blocks, tokens, heads, dim]


class Span(NamedTuple):
    """The cache rows that a block's queries see, and the steps that read them: traced scalars."""

    first: Any  # row of the block's first query
    end: Any  # number of rows that the block's sequence has
    lowest: Any  # first row that a query of the CTA's blocks of this sequence sees
    start: Any  # first tile
    stop: Any  # tile after the last one
    base: Any  # step i reads tile i + base
    switch: Any  # first step that reads tiles of the block's sequence

    @property
    def steps(self) -> tuple[Any, Any]:
        """The first step that reads a tile of the block, and the step after the last one."""
        return self.start - self.base, self.stop - self.base


def spans_of(blocks: list[Any], refs: Refs, sizes: PromptSizes) -> list[Span]:
    """Return the spans of successive blocks of a CTA.

    Args:
        blocks: indices of the blocks.
        refs: the arrays of the call.
        sizes: static sizes of the call.
    """
    spans: list[Span] = []
    for index, block in enumerate(blocks):
        first, end = refs.first_row[block], refs.ends[block]
        stop = lax.div(jnp.minimum(first + sizes.tokens, end) + (sizes.tile - 1), sizes.tile)
        lowest = jnp.int32(0) if sizes.window is None else jnp.maximum(first - (sizes.window - 1), 0)
        start = jnp.minimum(lax.div(lowest, sizes.tile), stop)
        if not index:
            spans.append(Span(first, end, lowest, start, stop, start, jnp.int32(0)))
            continue
        before = spans[-1]
        goes_on, switch = refs.sequence[block] == refs.sequence[blocks[index - 1]], before.stop - before.base
        lowest, base, switch = (
            jnp.where(goes_on, *pair)
            for pair in ((before.lowest, lowest), (before.base, start - switch), (before.switch, switch))
        )
        spans.append(Span(first, end, lowest, start, stop, base, switch))
    return spans


def at_step(step: Any, spans: list[Span], values: list[Any]) -> Any:
    """Return the value of the block whose sequence a step reads; that of any of its blocks."""
    value = values[0]
    for span, later in zip(spans[1:], values[1:], strict=True):
        value = jnp.where(step >= span.switch, later, value)
    return value
