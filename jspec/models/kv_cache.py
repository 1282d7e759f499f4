"""The paged KV cache on the device: allocated once, written by every forward pass, committed by a length per slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.core.config import EngineConfig
from jspec.core.records import KVCache, SlotView, Verdict
from jspec.core.tree import Tree
from jspec.models.config import LayerConfig
from pallas_kernels.attention.kv_pages import move_rows

MAX_POOL_ELEMENTS = 2**31


@dataclass(frozen=True)
class PoolShape:
    """The sizes of the pools; target and draft use the same page numbers."""

    slots: int
    pages: int  # the null page included
    page_size: int
    max_len: int
    dtype: str
    draft_dtype: str
    prefix_cache: bool = False  # drafters store per page the state that a request beginning with it needs

    @classmethod
    def of(cls, config: EngineConfig, tree: Tree, dtype: str) -> PoolShape:
        """The pools of an engine: as many pages as the config says, or enough for every slot to reach ``max_len``.

        Args:
            dtype: of the weights.
        """
        shape = cls(
            slots=config.slots,
            pages=config.pages or 2,
            page_size=config.page_size,
            max_len=config.max_len,
            dtype=config.kv_dtype or dtype,
            draft_dtype=config.draft_kv_dtype or dtype,
            prefix_cache=config.prefix_cache,
        )
        if config.pages is None:
            shape = replace(shape, pages=config.slots * shape.width(tree) + 1)
        return shape

    def width(self, tree: Tree) -> int:
        """Columns of the page table: the pages for ``max_len`` rows and the scratch rows of a round."""
        return math.ceil((self.max_len + tree.scratch_rows) / self.page_size)


def create(layers: Sequence[LayerConfig], pool: PoolShape, dtype: str) -> KVCache:
    """Zeroed pools for these layers.

    Raises:
        ValueError: a pool would reach 2**31 elements; index arithmetic is verified below that only.
    """
    shapes = [(pool.pages, layer.attention.kv_heads, pool.page_size, layer.attention.head_dim) for layer in layers]
    largest = max(shapes, key=math.prod)
    if math.prod(largest) >= MAX_POOL_ELEMENTS:
        most = MAX_POOL_ELEMENTS // math.prod(largest[1:]) - 1
        raise ValueError(f"a pool of {pool.pages} pages reaches 2**31 elements; lower pages to at most {most}")
    return KVCache(k=[jnp.zeros(shape, dtype) for shape in shapes], v=[jnp.zeros(shape, dtype) for shape in shapes])


def places(
    page_table: Int[Array, "batch columns"],
    rows: Int[Array, "batch rows"],
    valid: Bool[Array, "batch rows"],
    shape: tuple[int, ...],
) -> tuple[Int[Array, "batch rows"], Int[Array, "batch rows"]]:
    """Page and row in the page of each slot's rows; invalid rows get the page ``pages``, which does not exist.

    Args:
        shape: of the paged array, ``[pages, page_size, ...]``.
    """
    pages, page_size = shape[:2]
    columns = jnp.minimum(rows // page_size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, columns, axis=1)
    return jnp.where(valid, page, pages), rows % page_size


def update_page_table(
    page_table: Int[Array, "slots pages"], updates: Int[Array, "updates 3"]
) -> Int[Array, "slots pages"]:
    """The page table (donated) with each (slot, column, page) written; updates with an invalid slot are dropped."""
    slot, column, page = updates.T
    return page_table.at[slot, column].set(page, mode="drop")


def write_text(
    text: Int[Array, "pages page_size"],
    page_table: Int[Array, "batch columns"],
    first_row: Int[Array, "batch"],
    tokens: Int[Array, "batch rows"],
    count: Int[Array, "batch"],
) -> Int[Array, "pages page_size"]:
    """The tokens of all pages, with the first ``count`` of ``tokens`` written from each slot's ``first_row`` on."""
    steps = jnp.arange(tokens.shape[1])
    index = places(page_table, first_row[:, None] + steps, steps < count[:, None], text.shape)
    return text.at[index].set(tokens, mode="drop")


def commit(
    cache: KVCache, tree: Tree, view: SlotView, verdict: Verdict, rows: Int[Array, "batch nodes"] | None = None
) -> KVCache:
    """Move the rows of the accepted path together: the row of node ``path[d]`` becomes row d after the committed rows.

    The nodes of a chain are written to their final rows, so nothing has to move.

    Args:
        rows: row of each node, relative to the root's; -1: it has none; None: node n has row n.
    """
    if tree.is_chain:
        return cache
    depth = jnp.arange(verdict.path.shape[1])
    source = verdict.path
    if rows is not None:
        source = jnp.take_along_axis(rows, jnp.maximum(verdict.path, 0), axis=1)
    is_moved = (verdict.path >= 0) & (source >= 0) & (source != depth)
    first = view.lengths[:, None]
    k, v = move_rows(
        cache.k, cache.v, view.page_table, first + source, first + depth, is_moved, implementation=view.implementation
    )
    return KVCache(k=k, v=v)
