"""Drafting by look-up: where the newest tokens stand in a text already, and what came after them there.

Shared by `jspec.draft.ngram` and `jspec.draft.suffix`. Three steps, all inside the round's program:
`find` compares every position of a text with the newest tokens and keeps the M best matches; `merge` lays their
continuations over each other as a trie, so that siblings are distinct tokens; `plant` takes a tree's nodes from it.

A text is int32 tokens with `GAP` wherever no token is known: behind each text's end, and so between any two texts.
A match or a continuation that would cross a gap ends there.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import active_slots
from jspec.models.kv_cache import PoolShape

GAP = -1  # in a text: no token
UNKNOWN = -2  # in a query: equals neither a token nor a gap
GROUPS = 2048  # `lax.top_k` of any k is one sort kernel on a GPU up to about this length
MATCHES_PER_BRANCH = 4  # so that counting them says how often a continuation occurred

History = Int[Array, "slots positions"]


def check_lengths(method: str, max_n: object, min_n: object) -> None:
    """Raise unless both are ints and ``1 <= min_n <= max_n``."""
    if type(max_n) is not int or type(min_n) is not int or not 1 <= min_n <= max_n:
        raise ValueError(
            f"{method}: expected ints 1 <= min_n <= max_n, the fewest and the most tokens that are compared, "
            f"got min_n={min_n!r} and max_n={max_n!r}; change either"
        )


def check_size(method: str, max_n: int, positions: int, remedy: str) -> None:
    """Raise if the scores of `find` over a text of so many positions would not fit into int32."""
    if (2 * max_n + 2) * (positions + GROUPS) >= 2**31:
        raise ValueError(
            f"{method}: expected (2 * max_n + 2) * (positions + {GROUPS}) below 2**31, got max_n={max_n} and "
            f"{positions} positions of text to search; lower max_n or {remedy}"
        )


def match_count(tree: Tree) -> int:
    """How many matches a tree is made of (M): enough to fill it, and, for a chain, to repeat a text of period 1."""
    branches = tree.k if tree.paths is None else tree.nodes - len(tree.fed)
    wanted = max(MATCHES_PER_BRANCH * branches, tree.depth, -(-(tree.nodes - 1) // tree.depth))
    return min(wanted, GROUPS)  # `find` gives no more; a tree has at most 256 nodes


# ---- the history: every slot's tokens by position


def new_history(pool: PoolShape, tree: Tree) -> History:
    """Empty rows; their last columns stay gaps, for no committed token reaches ``pool.max_len``."""
    return jnp.full((pool.slots, pool.max_len + tree.scratch_rows), GAP, jnp.int32)


def rows_of(history: History, slots: Int[Array, "batch"]) -> Int[Array, "batch positions"]:
    """The rows of a bucket; a padding row is all gaps."""
    return history.at[slots].get(mode="fill", fill_value=GAP)


def take_chunk(history: History, view: SlotView, batch: TokenBatch) -> History:
    """Write a prompt's text up to a chunk's end, and gaps behind it: what the slot's last request left is gone."""
    width = history.shape[1]
    if view.text is not None:
        ends = batch.first_row + jnp.maximum(jnp.sum(batch.valid, axis=1), 1)
        rows = jnp.where(jnp.arange(width) < ends[:, None], view.text[:, :width], GAP)
        return history.at[view.slots].set(rows, mode="drop")
    rows = jnp.where(jnp.arange(width) < batch.first_row[:, None], rows_of(history, view.slots), GAP)
    places = jnp.where(batch.valid, batch.positions, width)
    rows = rows.at[jnp.arange(rows.shape[0])[:, None], places].set(batch.tokens, mode="drop")
    return history.at[view.slots].set(rows, mode="drop")


def take_roots(history: History, view: SlotView) -> History:
    """Write each row's root; only the first one of a request is news."""
    return history.at[active_slots(view, history.shape[0]), view.lengths].set(view.root, mode="drop")


def take_verdict(history: History, view: SlotView, verdict: Verdict) -> History:
    """Write the tokens that a round emitted."""
    steps = jnp.arange(1, verdict.tokens.shape[1] + 1)
    places = jnp.where(verdict.tokens >= 0, view.lengths[:, None] + steps, history.shape[1])
    return history.at[active_slots(view, history.shape[0])[:, None], places].set(verdict.tokens, mode="drop")


def newest(history: History, view: SlotView, count: int) -> Int[Array, "batch count"]:
    """The last tokens of each row's text, the root first and then backwards; `UNKNOWN` where there is none."""
    places = view.lengths[:, None] - jnp.arange(count)
    places = jnp.where(view.active[:, None] & (places >= 0), places, history.shape[1])
    tokens = history.at[view.slots[:, None], places].get(mode="fill", fill_value=GAP)
    return jnp.where(tokens >= 0, tokens, UNKNOWN)


# ---- matches


def find(
    text: Int[Array, "texts positions"],
    query: Int[Array, "batch max_n"],
    *,
    min_n: int,
    count: int,
    preferred: Int[Array, "batch 2"] | None = None,
) -> Int[Array, "batch matches"]:
    """Where the newest tokens stand in a text already.

    The length of the match that ends at a position is the number of query tokens, from the newest backwards, that
    equal the tokens from there backwards. A match is a position of length ``min_n`` or more with a token behind it.
    The best is the longest; of equally long ones those in a preferred place, and then the last.

    Positions that are equal modulo `GROUPS` form a group, and only the best match of a group is kept: in texts of
    at most `GROUPS` positions all matches count; in longer ones the best match is always found, but of two others
    that stand a multiple of `GROUPS` apart the worse is lost. A full sort of a long text would cost more than it.

    Costs ``max_n`` comparisons a position and row, and scratch memory of up to 4 bytes a position and row.

    Args:
        text: one text a row, or a single one for all rows.
        query: from `newest`.
        count: matches to keep (M).
        preferred: a half-open interval of positions that win ties of length.

    Returns:
        The last position of each match, best first; -1 where there are fewer.
    """
    size, reach = text.shape[1], query.shape[1]
    groups = min(GROUPS, max(size, count))
    width = size + -size % groups
    padded = jnp.pad(text, ((0, 0), (reach - 1, width - size + 1)), constant_values=GAP)
    place = jnp.arange(width)
    length = jnp.full((), reach, jnp.int32)  # the first query token that differs; a plain minimum fuses into one kernel
    for back in range(reach):
        start = reach - 1 - back
        agrees = padded[:, start : start + width] == query[:, back, None]
        length = jnp.minimum(length, jnp.where(agrees, reach, back))
    worth = 2 * length
    if preferred is not None:
        worth = worth + ((place >= preferred[:, :1]) & (place < preferred[:, 1:]))
    score = jnp.where((length >= min_n) & (padded[:, reach:] >= 0), worth * width + place, -1)
    best, _ = jax.lax.top_k(jnp.max(score.reshape(score.shape[0], -1, groups), axis=1), count)
    return jnp.where(best >= 0, best % width, -1)


def continuations(
    text: Int[Array, "texts positions"], ends: Int[Array, "batch matches"], depth: int
) -> Int[Array, "batch depth matches"]:
    """The tokens behind each match. They count up to the first `GAP`, in a row's own text the one behind its root."""
    texts, size = text.shape
    rows = jnp.arange(ends.shape[0]) % texts
    places = jnp.where(ends >= 0, ends, size)[:, None] + jnp.arange(1, depth + 1)[:, None]
    return text.at[rows[:, None, None], places].get(mode="fill", fill_value=GAP)


# ---- the trie


class Trie(NamedTuple):
    """Continuations merged by their beginnings.

    Entry ``[b, d, j]`` tells of the node on which the first d + 1 tokens of match j end. All matches through a node
    tell the same; the best of them leads it and stands for it.
    """

    tokens: Int[Array, "batch depth matches"]
    leader: Int[Array, "batch depth matches"]
    leads: Bool[Array, "batch depth matches"]
    passing: Int[Array, "batch depth matches"]  # matches through the node; 0 beyond a continuation's end
    rank: Int[Array, "batch depth matches"]  # place among all its siblings, whether they are planted or not
    found: Int[Array, "batch"]  # matches in all


def merge(tokens: Int[Array, "batch depth matches"], *, by_count: bool) -> Trie:
    """Lay continuations over each other.

    Args:
        tokens: as `continuations`, of matches from best to worst.
        by_count: siblings stand in order of their counts, equal ones in that of their best matches; else in that of
            their best matches alone.
    """
    depth, matches = tokens.shape[1:]
    number = jnp.arange(matches)
    here = tokens[:, 0]
    together = (here[:, :, None] >= 0) & (here[:, None] >= 0)
    levels = []
    for level in range(depth):
        siblings, here = together, tokens[:, level]
        together = siblings & (here[:, :, None] == here[:, None]) & (here[:, :, None] >= 0)
        passing = jnp.sum(together, axis=2, dtype=jnp.int32)
        leader = jnp.argmax(together, axis=2).astype(jnp.int32)
        leads = (leader == number) & (passing > 0)
        order = leader - matches * passing if by_count else leader
        earlier = siblings & leads[:, None] & (order[:, None] < order[:, :, None])
        levels.append((leader, leads, passing, jnp.sum(earlier, axis=2, dtype=jnp.int32)))
    leader, leads, passing, rank = (jnp.stack(parts, axis=1) for parts in zip(*levels, strict=True))
    return Trie(tokens, leader, leads, passing, rank, jnp.sum(tokens[:, 0] >= 0, axis=1, dtype=jnp.int32))


# ---- the tree


def plant(view: SlotView, trie: Trie, tree: Tree) -> Draft:
    """Take a tree's nodes from a trie.

    A node's score is the log of the share of all matches that pass through it. Nodes that the trie lacks are padding,
    behind all others.
    """
    rows, _, matches = trie.tokens.shape
    worth = _static_worth(trie, tree) if tree.paths is not None else _dynamic_worth(trie, tree)
    best, entry = jax.lax.top_k(jnp.where(trie.leads, worth, -1).reshape(rows, -1), tree.nodes - 1)
    valid = best >= 0

    def pick(field: Array, places: Array) -> Array:
        return jnp.take_along_axis(field.reshape(rows, -1), places, axis=1)

    above = jnp.maximum(entry - matches, 0)  # the same match, one level up
    parent = above // matches * matches + pick(trie.leader, above)
    parents = 1 + jnp.argmax(parent[:, :, None] == entry[:, None], axis=2).astype(jnp.int32)
    parents = jnp.where(entry < matches, 0, parents)
    share = pick(trie.passing, entry) / jnp.maximum(trie.found, 1)[:, None]

    def behind(root: Array, nodes: Array) -> Array:
        return jnp.concatenate([root[:, None].astype(nodes.dtype), nodes], axis=1)

    zero = jnp.zeros_like(view.root)
    return Draft(
        tokens=behind(view.root, jnp.where(valid, pick(trie.tokens, entry), 0)),
        parents=behind(zero - 1, jnp.where(valid, parents, -1)),
        scores=behind(zero, jnp.where(valid, jnp.log(jnp.where(valid, share, 1.0)), 0.0)),
        valid=behind(zero == 0, valid),
        probs=None,
        vocab_map=None,
    )


def _static_worth(trie: Trie, tree: Tree) -> Int[Array, "batch depth matches"]:
    """Larger for nodes that come earlier in the tree, -1 for those that are not in it."""
    assert tree.paths is not None
    worth = []
    for depth in range(1, tree.depth + 1):
        nodes, paths = zip(*((n, path) for n, path in enumerate(tree.paths, 1) if len(path) == depth), strict=True)
        ranks = np.array(paths, np.int32).T[:, None]
        is_node = jnp.all(trie.rank[:, :depth, :, None] == ranks, axis=1)
        worth.append(jnp.max(jnp.where(is_node, tree.nodes - np.array(nodes, np.int32), -1), axis=-1))
    return jnp.stack(worth, axis=1)


def _dynamic_worth(trie: Trie, tree: Tree) -> Int[Array, "batch depth matches"]:
    """By count, equal counts from the root outwards and from the best match on: so no node comes before its parent.

    A node has at most ``tree.k`` children; how many nodes of a level have children is not bounded.
    """
    depth, matches = trie.tokens.shape[1:]
    size = depth * matches
    entry = jnp.arange(size).reshape(depth, matches)
    allowed = jax.lax.cummax(trie.rank, axis=1) < tree.k
    return jnp.where(allowed, trie.passing * size + size - 1 - entry, -1)
