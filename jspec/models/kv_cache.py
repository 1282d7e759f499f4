"""The paged KV cache on the device, with its page table and token history.

Every forward pass writes new cache rows. A slot's length says how many of its cache rows are committed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.core.config import EngineConfig
from jspec.core.records import KVCache, SlotView, Verdict
from jspec.core.tree import Tree
from jspec.models.layer_config import LayerConfig
from pallas_kernels.attention.kv_pages import move_rows

MAX_POOL_ELEMENTS = 2**31


@dataclass(frozen=True)
class PoolShape:
    """The sizes of the KV cache's pools; a page has the same number in the target's and the drafter's pools."""

    slots: int  # number of slots
    pages: int  # number of pages per pool, the null page included
    page_size: int  # number of cache rows per page
    max_len: int  # largest number of tokens per slot
    dtype: str  # dtype of the target's pools
    draft_dtype: str  # dtype of the drafter's pools
    prefix_cache: bool = False  # whether drafters store a state for each page, for requests that reuse the page

    @classmethod
    def of(cls, config: EngineConfig, tree: Tree, dtype: str) -> PoolShape:
        """Return the pool sizes of an engine.

        If ``config.pages`` is None, there are enough pages for every slot to reach ``max_len``.

        Args:
            config: options of the engine.
            tree: draft tree; its scratch rows need pages too.
            dtype: dtype of the weights, which is the default dtype of the pools.
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
        """Return the number of page table columns: pages per slot for ``max_len`` rows and a round's scratch rows."""
        return math.ceil((self.max_len + tree.scratch_rows) / self.page_size)


def create(layers: Sequence[LayerConfig], pool: PoolShape, dtype: str) -> KVCache:
    """Make a KV cache of zeros, with one key pool and one value pool per layer.

    Raises:
        ValueError: a pool would reach 2**31 elements; index arithmetic is verified only below that size.
    """
    attentions = [layer.attention for layer in layers]
    k, v = (
        [(pool.pages, own.kv_heads, pool.page_size, own.pool_dims[which]) for own in attentions] for which in (0, 1)
    )
    largest = max((*k, *v), key=math.prod, default=(0,))
    if math.prod(largest) >= MAX_POOL_ELEMENTS:
        most = MAX_POOL_ELEMENTS // math.prod(largest[1:]) - 1
        raise ValueError(
            f"pages: expected a pool below 2**31 elements, got {pool.pages} pages (slots={pool.slots}, max_len="
            f"{pool.max_len}, page_size={pool.page_size}); lower slots, max_len or page_size, or set pages to at most "
            f"{most}"
        )
    return KVCache(k=[jnp.zeros(shape, dtype) for shape in k], v=[jnp.zeros(shape, dtype) for shape in v])


def places(
    page_table: Int[Array, "batch columns"],
    rows: Int[Array, "batch rows"],
    valid: Bool[Array, "batch rows"],
    shape: tuple[int, ...],
) -> tuple[Int[Array, "batch rows"], Int[Array, "batch rows"]]:
    """Look up the page number of each cache row, and the index of the cache row within its page.

    Args:
        page_table: page numbers of each batch row's pages.
        rows: cache rows, counted from the beginning of each batch row's text.
        valid: False for cache rows to drop; they get page number ``pages``, which does not exist.
        shape: shape of the paged array, ``[pages, page_size, ...]``.
    """
    pages, page_size = shape[:2]
    columns = jnp.minimum(rows // page_size, page_table.shape[1] - 1)
    page = jnp.take_along_axis(page_table, columns, axis=1)
    return jnp.where(valid, page, pages), rows % page_size


def update_page_table(
    page_table: Int[Array, "slots pages"], updates: Int[Array, "updates 3"]
) -> Int[Array, "slots pages"]:
    """Write updates (slot, column, page) into the page table; updates of slots that do not exist are dropped."""
    slot, column, page = updates.T
    return page_table.at[slot, column].set(page, mode="drop")


def write_token_history(
    text: Int[Array, "pages page_size"],
    page_table: Int[Array, "batch columns"],
    first_row: Int[Array, "batch"],
    tokens: Int[Array, "batch rows"],
    count: Int[Array, "batch"],
) -> Int[Array, "pages page_size"]:
    """Write new tokens into the paged token history.

    Args:
        text: token of each row of each page.
        page_table: page numbers of each batch row's pages.
        first_row: cache row of the first new token.
        tokens: new tokens.
        count: number of new tokens to write in each batch row; later tokens are dropped.

    Returns:
        The updated ``text``.
    """
    steps = jnp.arange(tokens.shape[1])
    index = places(page_table, first_row[:, None] + steps, steps < count[:, None], text.shape)
    return text.at[index].set(tokens, mode="drop")


def commit(
    cache: KVCache, tree: Tree, view: SlotView, verdict: Verdict, rows: Int[Array, "batch nodes"] | None = None
) -> KVCache:
    """Move the cache rows of the accepted path directly after the committed rows, in the order of the path.

    Cache rows are counted here from the root's row: the row of node ``path[d]`` is moved to row d. The nodes of a chain
    are in their final rows already, so the cache of a chain is returned unchanged.

    Args:
        cache: the KV cache of the target or of a draft model.
        tree: draft tree.
        view: the slots of the batch.
        verdict: accepted path of each batch row.
        rows: cache row of each node; -1: the node has no cache row; None: node n has cache row n.
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
