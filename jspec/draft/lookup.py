"""Drafting by look-up: find earlier occurrences of the newest tokens in a text, and draft the tokens that followed.

Shared by `jspec.draft.ngram` and `jspec.draft.suffix`. Three stages, all inside the step's program:
`find_ngram_matches` compares every position of a text with the newest tokens and keeps the M best matches;
`build_trie` merges their continuations into a trie, which makes siblings distinct tokens; `tree_from_trie` takes a
tree's nodes from it.

A text is int32 tokens, with `GAP` at every position without a token: after each text's end, and therefore between any
two texts. A match or a continuation ends at a gap.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, Params, active_slots
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape

GAP = -1  # in a text: no token
UNKNOWN = -2  # in a query: equals neither a token nor a gap
GROUPS = 2048  # `lax.top_k` of any k is one sort kernel on a GPU up to about this length
MATCHES_PER_BRANCH = 4  # enough matches to count how often a continuation occurred
DEFAULT_TREE = Tree.chain(5)

History = Int[Array, "slots positions"]


@struct.dataclass
class LookupState:
    """The texts that a look-up drafter searches."""

    history: History  # each slot's tokens by position
    corpus: Int[Array, "corpus"] | None = None  # texts of earlier requests, oldest first, a gap after each


class LookupDrafter(Drafter):
    """What n-gram and suffix drafting share: options, and a history of every slot's tokens.

    Args:
        tree: any tree.
        max_n: largest number of tokens compared, the root included.
        min_n: smallest number of tokens that must agree.

    Raises:
        ValueError: not ``1 <= min_n <= max_n``.
    """

    reads_text = True

    def __init__(self, tree: Tree, *, max_n: int, min_n: int) -> None:
        _check_lengths(type(self).__name__, max_n, min_n)
        self.tree = tree
        self.max_n = max_n
        self.min_n = min_n

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def init(self, params: Params, pool: PoolShape) -> LookupState:
        history = new_history(pool, self.tree)
        check_size(type(self).__name__, self.max_n, history.shape[1], "max_len")
        return LookupState(history=history)

    def prefill(
        self, params: Params, state: LookupState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> LookupState:
        return replace(state, history=write_chunk(state.history, view, batch))

    def commit(
        self,
        params: Params,
        state: LookupState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> LookupState:
        return replace(state, history=write_emitted(state.history, view, verdict))

    def write_pending_rows(self, params: Params, state: LookupState, view: SlotView) -> LookupState:
        return replace(state, history=write_roots(state.history, view))

    def find_tree(
        self,
        view: SlotView,
        text: Int[Array, "texts positions"],
        query: Int[Array, "batch max_n"],
        *,
        by_count: bool,
        preferred: Int[Array, "batch 2"] | None = None,
    ) -> Draft:
        """The tree of the best matches of a query in a text; arguments as in the three stages."""
        count = match_count(self.tree)
        ends = find_ngram_matches(text, query, min_n=self.min_n, count=count, preferred=preferred)
        trie = build_trie(continuations(text, ends, self.tree.depth), by_count=by_count)
        return tree_from_trie(view, trie, self.tree)


def _check_lengths(method: str, max_n: object, min_n: object) -> None:
    if type(max_n) is not int or type(min_n) is not int or not 1 <= min_n <= max_n:
        raise ValueError(
            f"{method}: expected ints 1 <= min_n <= max_n, the fewest and the most tokens that are compared, "
            f"got min_n={min_n!r} and max_n={max_n!r}; change either"
        )


def check_size(method: str, max_n: int, positions: int, remedy: str) -> None:
    """Raise ValueError if the scores of `find_ngram_matches` over so many positions would overflow int32."""
    if (2 * max_n + 2) * (positions + GROUPS) >= 2**31:
        raise ValueError(
            f"{method}: expected (2 * max_n + 2) * (positions + {GROUPS}) below 2**31, got max_n={max_n} and "
            f"{positions} positions of text to search; lower max_n or {remedy}"
        )


def match_count(tree: Tree) -> int:
    """Number of matches that a tree is built from (M): enough to fill it, and to repeat a text of period 1."""
    branches = tree.k if tree.paths is None else tree.nodes - len(tree.fed)
    wanted = max(MATCHES_PER_BRANCH * branches, tree.depth, -(-(tree.nodes - 1) // tree.depth))
    return min(wanted, GROUPS)  # `find_ngram_matches` returns no more; a tree has at most 256 nodes


# ---- the history: every slot's tokens by position


def new_history(pool: PoolShape, tree: Tree) -> History:
    """Empty rows; their last columns stay gaps, because no committed token is at ``pool.max_len`` or later."""
    return jnp.full((pool.slots, pool.max_len + tree.scratch_rows), GAP, jnp.int32)


def history_rows(history: History, slots: Int[Array, "batch"]) -> Int[Array, "batch positions"]:
    """The history of a bucket's rows; a padding row is all gaps."""
    return history.at[slots].get(mode="fill", fill_value=GAP)


def write_chunk(history: History, view: SlotView, batch: TokenBatch) -> History:
    """Write a prompt's tokens up to a chunk's end, and gaps after them over the tokens of the slot's last request."""
    width = history.shape[1]
    if view.token_history is not None:
        ends = batch.first_row + jnp.maximum(jnp.sum(batch.valid, axis=1), 1)
        rows = jnp.where(jnp.arange(width) < ends[:, None], view.token_history[:, :width], GAP)
        return history.at[view.slots].set(rows, mode="drop")
    rows = jnp.where(jnp.arange(width) < batch.first_row[:, None], history_rows(history, view.slots), GAP)
    places = jnp.where(batch.valid, batch.positions, width)
    rows = rows.at[jnp.arange(rows.shape[0])[:, None], places].set(batch.tokens, mode="drop")
    return history.at[view.slots].set(rows, mode="drop")


def write_roots(history: History, view: SlotView) -> History:
    """Write each row's root; only a request's first root is not in the history yet."""
    return history.at[active_slots(view, history.shape[0]), view.lengths].set(view.root, mode="drop")


def write_emitted(history: History, view: SlotView, verdict: Verdict) -> History:
    """Write the tokens that a step emitted."""
    steps = jnp.arange(1, verdict.tokens.shape[1] + 1)
    places = jnp.where(verdict.tokens >= 0, view.lengths[:, None] + steps, history.shape[1])
    return history.at[active_slots(view, history.shape[0])[:, None], places].set(verdict.tokens, mode="drop")


def newest_tokens(history: History, view: SlotView, count: int) -> Int[Array, "batch count"]:
    """The last tokens of each row, the root first and then backwards; `UNKNOWN` before the text's beginning."""
    places = view.lengths[:, None] - jnp.arange(count)
    places = jnp.where(view.active[:, None] & (places >= 0), places, history.shape[1])
    tokens = history.at[view.slots[:, None], places].get(mode="fill", fill_value=GAP)
    return jnp.where(tokens >= 0, tokens, UNKNOWN)


# ---- matches


def find_ngram_matches(
    text: Int[Array, "texts positions"],
    query: Int[Array, "batch max_n"],
    *,
    min_n: int,
    count: int,
    preferred: Int[Array, "batch 2"] | None = None,
) -> Int[Array, "batch matches"]:
    """Find earlier occurrences of the newest tokens in a text.

    The length of the match that ends at a position is the number of query tokens, from the newest backwards, that
    equal the tokens from that position backwards. A match is a position of length ``min_n`` or more that a token
    follows. The best match is the longest; of equally long ones those in the preferred interval, then the last.

    Positions that are equal modulo `GROUPS` form a group, and only the best match of a group is kept: in texts of
    at most `GROUPS` positions all matches count; in longer ones the best match is always found, but of two others
    a multiple of `GROUPS` apart the worse is lost. A full sort of a long text would cost more than it gains.

    Costs ``max_n`` comparisons a position and row, and scratch memory of up to 4 bytes a position and row.

    Args:
        text: one text a row, or a single one for all rows.
        query: newest tokens of each row (`newest_tokens`).
        min_n: smallest length of a match.
        count: number of matches to keep (M).
        preferred: half-open interval of positions that win ties of length.

    Returns:
        The last position of each match, best first; -1 where there are fewer matches.
    """
    size, max_n = text.shape[1], query.shape[1]
    groups = min(GROUPS, max(size, count))
    width = size + -size % groups
    padded = jnp.pad(text, ((0, 0), (max_n - 1, width - size + 1)), constant_values=GAP)
    place = jnp.arange(width)
    length = jnp.full((), max_n, jnp.int32)  # the first query token that differs; a plain minimum fuses into one kernel
    for back in range(max_n):
        start = max_n - 1 - back
        agrees = padded[:, start : start + width] == query[:, back, None]
        length = jnp.minimum(length, jnp.where(agrees, max_n, back))
    priority = 2 * length
    if preferred is not None:
        priority = priority + ((place >= preferred[:, :1]) & (place < preferred[:, 1:]))
    score = jnp.where((length >= min_n) & (padded[:, max_n:] >= 0), priority * width + place, -1)
    best, _ = jax.lax.top_k(jnp.max(score.reshape(score.shape[0], -1, groups), axis=1), count)
    return jnp.where(best >= 0, best % width, -1)


def continuations(
    text: Int[Array, "texts positions"], ends: Int[Array, "batch matches"], depth: int
) -> Int[Array, "batch depth matches"]:
    """The tokens after each match, valid up to the first `GAP`; a row's own text has one after its root."""
    texts, size = text.shape
    rows = jnp.arange(ends.shape[0]) % texts
    places = jnp.where(ends >= 0, ends, size)[:, None] + jnp.arange(1, depth + 1)[:, None]
    return text.at[rows[:, None, None], places].get(mode="fill", fill_value=GAP)


# ---- the trie


class Trie(NamedTuple):
    """Continuations merged by their prefixes.

    Entry ``[b, d, j]`` describes the trie node that the first d + 1 tokens of match j lead to. All matches through a
    node have the same entry; the best of them is its leader and represents the node.
    """

    tokens: Int[Array, "batch depth matches"]  # token of the node
    leader: Int[Array, "batch depth matches"]  # best match through the node
    leads: Bool[Array, "batch depth matches"]  # whether match j is the leader
    passing: Int[Array, "batch depth matches"]  # number of matches through the node; 0 after a continuation's end
    rank: Int[Array, "batch depth matches"]  # place among all siblings, whether they become tree nodes or not
    found: Int[Array, "batch"]  # number of matches


def build_trie(tokens: Int[Array, "batch depth matches"], *, by_count: bool) -> Trie:
    """Merge continuations into a trie.

    Args:
        tokens: continuations of the matches, best match first (`continuations`).
        by_count: order siblings by their number of matches, then by their best match; else by their best match only.
    """
    depth, matches = tokens.shape[1:]
    match = jnp.arange(matches)
    own = tokens[:, 0]
    together = (own[:, :, None] >= 0) & (own[:, None] >= 0)  # whether two matches pass through the same node
    levels = []
    for level in range(depth):
        siblings, own = together, tokens[:, level]
        together = siblings & (own[:, :, None] == own[:, None]) & (own[:, :, None] >= 0)
        passing = jnp.sum(together, axis=2, dtype=jnp.int32)
        leader = jnp.argmax(together, axis=2).astype(jnp.int32)
        leads = (leader == match) & (passing > 0)
        order = leader - matches * passing if by_count else leader
        earlier = siblings & leads[:, None] & (order[:, None] < order[:, :, None])
        levels.append((leader, leads, passing, jnp.sum(earlier, axis=2, dtype=jnp.int32)))
    leader, leads, passing, rank = (jnp.stack(parts, axis=1) for parts in zip(*levels, strict=True))
    return Trie(tokens, leader, leads, passing, rank, jnp.sum(tokens[:, 0] >= 0, axis=1, dtype=jnp.int32))


# ---- the tree


def tree_from_trie(view: SlotView, trie: Trie, tree: Tree) -> Draft:
    """Take a tree's nodes from a trie.

    A node's score is the log of the share of matches that pass through it. Nodes that the trie lacks are padding,
    after all others.
    """
    rows, _, matches = trie.tokens.shape
    priority = _static_priority(trie, tree) if tree.paths is not None else _dynamic_priority(trie, tree)
    best, entry = jax.lax.top_k(jnp.where(trie.leads, priority, -1).reshape(rows, -1), tree.nodes - 1)
    valid = best >= 0

    def pick(field: Array, places: Array) -> Array:
        return jnp.take_along_axis(field.reshape(rows, -1), places, axis=1)

    above = jnp.maximum(entry - matches, 0)  # the same match, one level up
    parent = above // matches * matches + pick(trie.leader, above)
    parents = 1 + jnp.argmax(parent[:, :, None] == entry[:, None], axis=2).astype(jnp.int32)
    parents = jnp.where(entry < matches, 0, parents)
    share = pick(trie.passing, entry) / jnp.maximum(trie.found, 1)[:, None]

    def with_root(root: Array, nodes: Array) -> Array:
        return jnp.concatenate([root[:, None].astype(nodes.dtype), nodes], axis=1)

    zero = jnp.zeros_like(view.root)
    return Draft(
        tokens=with_root(view.root, jnp.where(valid, pick(trie.tokens, entry), 0)),
        parents=with_root(zero - 1, jnp.where(valid, parents, -1)),
        scores=with_root(zero, jnp.where(valid, jnp.log(jnp.where(valid, share, 1.0)), 0.0)),
        valid=with_root(zero == 0, valid),
        probs=None,
        vocab_map=None,
    )


def _static_priority(trie: Trie, tree: Tree) -> Int[Array, "batch depth matches"]:
    """Larger for nodes that come earlier in the tree, -1 for trie nodes that are not in it."""
    assert tree.paths is not None
    priority = []
    for depth in range(1, tree.depth + 1):
        nodes, paths = zip(*((n, path) for n, path in enumerate(tree.paths, 1) if len(path) == depth), strict=True)
        ranks = np.array(paths, np.int32).T[:, None]
        is_node = jnp.all(trie.rank[:, :depth, :, None] == ranks, axis=1)
        priority.append(jnp.max(jnp.where(is_node, tree.nodes - np.array(nodes, np.int32), -1), axis=-1))
    return jnp.stack(priority, axis=1)


def _dynamic_priority(trie: Trie, tree: Tree) -> Int[Array, "batch depth matches"]:
    """By count, equal counts by depth and then by best match: no node comes before its parent.

    A node has at most ``tree.k`` children; the number of nodes with children per level is not bounded.
    """
    depth, matches = trie.tokens.shape[1:]
    size = depth * matches
    entry = jnp.arange(size).reshape(depth, matches)
    allowed = jax.lax.cummax(trie.rank, axis=1) < tree.k
    return jnp.where(allowed, trie.passing * size + size - 1 - entry, -1)
