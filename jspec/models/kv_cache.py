"""The paged KV cache on the device, with its page table and token history.

Every forward pass writes new cache rows. A slot's length says how many of its cache rows are committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.core.records import AcceptedPath, LayerState, SlotView, Verdict
from jspec.core.tree import Tree
from jspec.models.config.layer_config import LayerConfig
from jspec.models.parts.kv_pool import PoolShape

S = TypeVar("S", bound=LayerState)


def create(layers: Sequence[LayerConfig], pool: PoolShape, dtype: str) -> list[Any]:
    """Make the state of each layer, of zeros; `jspec.models.mixers.mixer.Mixer.state` documents errors."""
    return [layer.mixer.state(pool, dtype) for layer in layers]


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


def copy_state(cache: Sequence[S], packed: Int[Array, "3"], *, is_load: bool) -> list[S]:
    """Copy the state of a slot in all layers into a copy for the prefix cache, or back.

    Args:
        cache: state of each layer.
        packed: slot, index of the copy, and number of tokens that the state has seen.
        is_load: whether the slot takes the copy.
    """
    slot, entry, position = packed
    return [state.loaded(slot, entry, position) if is_load else state.saved(slot, entry) for state in cache]


def commit(
    cache: Sequence[S], tree: Tree, view: SlotView, verdict: Verdict, rows: Int[Array, "batch nodes"] | None = None
) -> list[S]:
    """Let every layer keep the accepted path: its cache rows come directly after the committed rows, in their order.

    Cache rows are counted here from the root's row: the row of node ``path[d]`` is moved to row d. The nodes of a chain
    are in their final rows already, so their cache rows do not move.

    Args:
        cache: state of each layer of the target or of a draft model.
        tree: draft tree.
        view: the slots of the batch.
        verdict: accepted path of each batch row.
        rows: cache row of each node; -1: the node has no cache row; None: node n has cache row n.
    """
    path = AcceptedPath(jnp.where(view.active, verdict.counts, 0), longest=verdict.path.shape[1])
    if not tree.is_chain:
        source = verdict.path
        if rows is not None:
            source = jnp.take_along_axis(rows, jnp.maximum(verdict.path, 0), axis=1)
        is_moved = (verdict.path >= 0) & (source >= 0) & (source != jnp.arange(source.shape[1])) & view.active[:, None]
        path = replace(path, source=source, moved=is_moved)
    committed = list(cache)
    kinds: list[type[S]] = list(dict.fromkeys(map(type, cache)))
    for kind in kinds:
        layers = [index for index, state in enumerate(cache) if type(state) is kind]
        states = kind.commit([cache[index] for index in layers], view, path)
        for index, state in zip(layers, states, strict=True):
            committed[index] = state
    return committed
