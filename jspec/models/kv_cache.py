"""The paged KV cache on the device: made once, written by every forward, committed by counting."""

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
    """How large the pools are; the same pages serve target and draft."""

    slots: int
    pages: int  # the null page included
    page_size: int
    max_len: int
    dtype: str
    draft_dtype: str
    prefix_cache: bool = False  # drafters keep, by page, what a request that begins with the page needs

    @classmethod
    def of(cls, config: EngineConfig, tree: Tree, dtype: str) -> PoolShape:
        """The pools of an engine, with pages for every slot to reach ``max_len`` unless the config says how many.

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
        """Columns of the page table: a slot's rows up to ``max_len`` and what a round writes beyond."""
        return math.ceil((self.max_len + tree.scratch_rows) / self.page_size)


def create(layers: Sequence[LayerConfig], pool: PoolShape, dtype: str) -> KVCache:
    """Zeroed pools for these layers.

    Raises:
        ValueError: a pool would reach 2**31 elements, beyond what index arithmetic is checked for.
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
    """Page and place in it of each slot's rows, for arrays ``[pages, page_size, ...]``; beyond them where not valid."""
    pages, page_size = shape[:2]
    columns = jnp.minimum(rows // page_size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, columns, axis=1)
    return jnp.where(valid, page, pages), rows % page_size


def update_page_table(
    page_table: Int[Array, "slots pages"], updates: Int[Array, "updates 3"]
) -> Int[Array, "slots pages"]:
    """The page table (donated) with (slot, column, page) entered; those of no slot are dropped."""
    slot, column, page = updates.T
    return page_table.at[slot, column].set(page, mode="drop")


def write_text(
    text: Int[Array, "pages page_size"],
    page_table: Int[Array, "batch columns"],
    first_row: Int[Array, "batch"],
    tokens: Int[Array, "batch rows"],
    count: Int[Array, "batch"],
) -> Int[Array, "pages page_size"]:
    """The tokens by page, with the first ``count`` of each slot's entered from ``first_row`` on."""
    steps = jnp.arange(tokens.shape[1])
    where = places(page_table, first_row[:, None] + steps, steps < count[:, None], text.shape)
    return text.at[where].set(tokens, mode="drop")


def commit(
    cache: KVCache, tree: Tree, view: SlotView, verdict: Verdict, rows: Int[Array, "batch nodes"] | None = None
) -> KVCache:
    """Keep the rows of the accepted path: of those behind the committed ones, node ``path[d]``'s becomes the d-th.

    A chain's nodes are written where they will stay, so nothing is done for it.

    Args:
        rows: of each node, counted from the root's; -1: it has none; None: row n is node n's.
    """
    if tree.is_chain:
        return cache
    depth = jnp.arange(verdict.path.shape[1])
    source = verdict.path
    if rows is not None:
        source = jnp.take_along_axis(rows, jnp.maximum(verdict.path, 0), axis=1)
    keep = (verdict.path >= 0) & (source >= 0) & (source != depth)
    first = view.lengths[:, None]
    k, v = move_rows(
        cache.k, cache.v, view.page_table, first + source, first + depth, keep, implementation=view.implementation
    )
    return KVCache(k=k, v=v)
