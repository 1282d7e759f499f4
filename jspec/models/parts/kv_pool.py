"""The pages of keys and values of one layer, and the sizes of all pools of an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jspec.core.config import EngineConfig
from jspec.core.records import AcceptedPath, LayerState, SlotView
from jspec.core.tree import Tree
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
    round_rows: int = 1  # number of rows that a round of the target writes in a slot
    state_dtype: str = "float32"  # dtype of what layers without a cache keep of a token
    predicted_tokens: int = 0  # largest number of tokens of a slot's prediction
    copies: int = 0  # number of copies of slots' states that such layers keep for the prefix cache

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
            round_rows=tree.nodes,
            state_dtype=dtype,
            predicted_tokens=config.predicted_tokens,
        )
        if config.pages is None:
            shape = replace(shape, pages=config.slots * shape.width(tree) + 1)
        return shape

    def width(self, tree: Tree) -> int:
        """Return the number of page table columns: pages per slot for ``max_len`` rows and a round's scratch rows."""
        return math.ceil((self.max_len + tree.scratch_rows) / self.page_size)


class _Pools(NamedTuple):
    k: Float[Array, "pages kv_heads page_size head_dim"]
    v: Float[Array, "pages kv_heads page_size head_dim"]


class KVPool(_Pools, LayerState):
    """The pages of keys and of values of one layer, ``k`` and ``v``. Page 0 is the null page, which no request owns.

    Latent attention has its latent vectors in the pool of values, [pages, 1, page_size, latent], and the rotated keys
    in the pool of keys, [pages, 1, page_size, rotated].

    It is a tuple because jax makes one for each layer after every dispatch, which takes a third of a dataclass's time.
    """

    __slots__ = ()

    @property
    def page_size(self) -> int:
        """Number of cache rows of a page."""
        return self.k.shape[2]

    def specs(self, axis: str) -> P:
        """Divide the pools by heads; `LayerState.specs`."""
        return P(None, axis)

    @classmethod
    def commit(cls, states: Sequence[Self], view: SlotView, path: AcceptedPath) -> list[Self]:
        """Move cache rows, those of several layers in one kernel; `LayerState.commit`."""
        if path.source is None:
            return list(states)
        first = view.lengths[:, None]
        pools = [state.k for state in states], [state.v for state in states]
        rows = view.page_table, first + path.source, first + jnp.arange(path.source.shape[1]), path.moved
        return list(map(cls, *move_rows(*pools, *rows, implementation=view.implementation)))


class _Nothing(NamedTuple):
    pass


class NoPool(_Nothing, LayerState):
    """The state of a layer that keeps nothing of tokens, as it reads the pools of an earlier layer."""

    __slots__ = ()

    def specs(self, axis: str) -> P:
        return P()

    @classmethod
    def commit(cls, states: Sequence[Self], view: SlotView, path: AcceptedPath) -> list[Self]:
        return list(states)


def check_size(pool: PoolShape, *shapes: tuple[int, ...]) -> None:
    """Raise ValueError if a pool would reach `MAX_POOL_ELEMENTS`."""
    elements = max(map(math.prod, shapes))
    if elements >= MAX_POOL_ELEMENTS:
        raise ValueError(
            f"pages: expected a pool below 2**31 elements, got {pool.pages} pages (slots={pool.slots}, max_len="
            f"{pool.max_len}, page_size={pool.page_size}); lower slots, max_len or page_size, or set pages to at most "
            f"{MAX_POOL_ELEMENTS // (elements // pool.pages) - 1}"
        )
