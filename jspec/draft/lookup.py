"""Drafting by look-up: find earlier occurrences of the newest tokens in a text, and draft the tokens that followed.

`jspec.draft.ngram` and `jspec.draft.suffix` use this file. There are three stages, all inside the compiled step:
1. `find_ngram_matches` compares every position of a text with the newest tokens and keeps the M best matches. If
   requests may have predictions, `with_predicted` adds matches in these.
2. `build_trie` merges the tokens after the matches (continuations) into a trie, in which siblings are distinct tokens.
3. `tree_from_trie` chooses trie nodes as the nodes of the draft tree.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from jspec.core.records import Draft, PromptBatch, SlotView, Verdict
from jspec.core.shorten import short
from jspec.core.tree import Tree, tree_of
from jspec.draft.base import Drafter, Params, active_slots
from jspec.draft.matches import GAP, GROUPS, UNKNOWN, continuations, find_ngram_matches
from jspec.draft.prediction import Places, with_predicted
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape

MATCHES_PER_BRANCH = 4  # number of matches to keep per branch, to count how often a continuation occurred

History = Int[Array, "slots positions"]  # token of each slot at each position, or `GAP`


@struct.dataclass
class LookupState:
    """The texts that a look-up drafter searches."""

    history: History  # tokens of each slot's request
    corpus: Int[Array, "corpus"] | None = None  # texts of earlier requests, oldest first, each with a gap after it
    places: Places | None = None  # how far each slot's output has come in its prediction; None: there are none


def states_with_corpus(state: Any) -> list[LookupState]:
    """Return the states of look-ups in a drafter's state that search texts of earlier requests."""
    leaves = jax.tree.leaves(state, is_leaf=_has_corpus)
    return [leaf for leaf in leaves if _has_corpus(leaf)]


def with_corpora(state: Any, kept: Sequence[LookupState]) -> Any:
    """Return a drafter's state in which the states of `states_with_corpus` are others."""
    others = iter(kept)
    return jax.tree.map(lambda node: next(others) if _has_corpus(node) else node, state, is_leaf=_has_corpus)


def _has_corpus(node: Any) -> bool:
    return isinstance(node, LookupState) and node.corpus is not None


class Found(NamedTuple):
    """The result of a look-up."""

    draft: Draft  # drafted tree
    length: Int[Array, "batch"]  # match length of the best match in tokens; 0: no match


class LookupDrafter(Drafter):
    """Base class of n-gram and suffix drafting, with their options and a history of every slot's tokens.

    Args:
        tree: draft tree of any kind, or its text such as "chain:4".
        max_n: largest length of a match in tokens, including the root (the newest token).
        min_n: smallest length of a match in tokens, including the root.

    Raises:
        ValueError: ``1 <= min_n <= max_n`` does not hold.
    """

    reads_text = True
    reads_predictions = True

    def __init__(self, tree: Tree | str, *, max_n: int, min_n: int) -> None:
        _check_lengths(type(self).__name__, max_n, min_n)
        self.tree = tree_of(type(self).__name__, tree)
        self.max_n = max_n
        self.min_n = min_n

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def init(self, params: Params, pool: PoolShape) -> LookupState:
        history = new_history(pool, self.tree)
        check_size(type(self).__name__, self.max_n, history.shape[1], "max_len")
        return LookupState(history=history, places=self.new_places(pool))

    def new_places(self, pool: PoolShape) -> Places | None:
        """Return the places of new requests in their predictions; None: no request may have one."""
        if not pool.predicted_tokens:
            return None
        check_size(type(self).__name__, self.max_n, self.max_n + pool.predicted_tokens, "predicted_tokens")
        return Places.new(pool.slots)

    def prefill(
        self, params: Params, state: LookupState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> LookupState:
        places = None if state.places is None else state.places.forget(view.slots)
        return replace(state, history=write_pieces(state.history, view, batch), places=places)

    def commit(
        self,
        params: Params,
        state: LookupState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> LookupState:
        places = None if state.places is None else state.places.follow(view, verdict)
        return replace(state, history=write_emitted(state.history, view, verdict), places=places)

    def write_pending_rows(self, params: Params, state: LookupState, view: SlotView) -> LookupState:
        return replace(state, history=write_roots(state.history, view))

    @abc.abstractmethod
    def look_up(self, state: LookupState, view: SlotView) -> tuple[Found, LookupState]:
        """Draft as `draft` does, and return the match length too."""

    def draft(self, params: Params, state: LookupState, view: SlotView) -> tuple[Draft, LookupState]:
        found, state = self.look_up(state, view)
        return found.draft, state

    def find_tree(
        self,
        state: LookupState,
        view: SlotView,
        text: Int[Array, "texts positions"],
        query: Int[Array, "batch max_n"],
        *,
        by_count: bool,
        preferred: Int[Array, "batch 2"] | None = None,
    ) -> tuple[Found, LookupState]:
        """Draft a tree from the best matches of the newest tokens in a text and in the requests' predictions.

        Args:
            state: the drafter's state.
            view: the slots of the batch.
            text, query, preferred: arguments of `find_ngram_matches`.
            by_count: argument of `build_trie`.
        """
        count = match_count(self.tree)
        matches = find_ngram_matches(text, query, min_n=self.min_n, count=count, preferred=preferred)
        tokens, longest, weights = continuations(text, matches.ends, self.tree.depth), matches.longest, None
        if state.places is not None:
            joined, places = with_predicted(state.places, view, query, matches, tokens, min_n=self.min_n)
            (tokens, longest, weights), state = joined, replace(state, places=places)
        trie = build_trie(tokens, by_count=by_count, weights=weights)
        return Found(tree_from_trie(view, trie, self.tree), longest), state


def _check_lengths(method: str, max_n: object, min_n: object) -> None:
    if type(max_n) is not int or type(min_n) is not int or not 1 <= min_n <= max_n:
        raise ValueError(
            f"{method}: expected ints 1 <= min_n <= max_n, the fewest and the most tokens that are compared, "
            f"got min_n={short(min_n)} and max_n={short(max_n)}; change either"
        )


def check_size(method: str, max_n: int, positions: int, remedy: str) -> None:
    """Raise ValueError if the scores of `find_ngram_matches` would overflow int32.

    Args:
        method: name of the drafter, for the error.
        max_n: largest length of a match in tokens.
        positions: number of positions of the searched text.
        remedy: name of the option to lower, for the error.
    """
    if (2 * max_n + 2) * (positions + GROUPS) >= 2**31:
        raise ValueError(
            f"{method}: expected (2 * max_n + 2) * (positions + {GROUPS}) below 2**31, got max_n={max_n} and "
            f"{positions} positions of text to search; lower max_n or {remedy}"
        )


def match_count(tree: Tree) -> int:
    """Return the number of matches (M) to keep, which is enough to fill the tree even if one token repeats."""
    branches = tree.k if tree.paths is None else tree.nodes - len(tree.fed)
    wanted = max(MATCHES_PER_BRANCH * branches, tree.depth, -(-(tree.nodes - 1) // tree.depth))
    return min(wanted, GROUPS)  # `find_ngram_matches` returns no more; a tree has at most 256 nodes


# ---- the history: every slot's tokens by position


def new_history(pool: PoolShape, tree: Tree) -> History:
    """Make a history without tokens; columns from ``pool.max_len`` on always stay gaps."""
    return jnp.full((pool.slots, pool.max_len + tree.scratch_rows), GAP, jnp.int32)


def history_rows(history: History, slots: Int[Array, "batch"]) -> Int[Array, "batch positions"]:
    """Return the history of each batch row's slot; a padding row has only gaps."""
    return history.at[slots].get(mode="fill", fill_value=GAP)


def write_pieces(history: History, view: SlotView, batch: PromptBatch) -> History:
    """Write prompts' tokens up to the end of each piece into the history, and gaps after them.

    The tokens before a piece come from ``view.token_history``, or else from the history.
    """
    width = history.shape[1]
    if view.token_history is not None:
        rows = jnp.where(jnp.arange(width) < batch.ends[:, None], view.token_history[:, :width], GAP)
        return history.at[view.slots].set(rows, mode="drop")
    rows = jnp.where(jnp.arange(width) < batch.starts[:, None], history_rows(history, view.slots), GAP)
    places = jnp.where(batch.valid, batch.positions, width)
    rows = rows.at[batch.piece[:, None], places].set(batch.tokens, mode="drop")
    return history.at[view.slots].set(rows, mode="drop")


def write_roots(history: History, view: SlotView) -> History:
    """Write each row's root (its newest token) into the history, because `write_emitted` omits a request's first."""
    return history.at[active_slots(view, history.shape[0]), view.lengths].set(view.root, mode="drop")


def write_emitted(history: History, view: SlotView, verdict: Verdict) -> History:
    """Write the tokens that a step emitted into the history, after each row's root."""
    steps = jnp.arange(1, verdict.tokens.shape[1] + 1)
    places = jnp.where(verdict.tokens >= 0, view.lengths[:, None] + steps, history.shape[1])
    return history.at[active_slots(view, history.shape[0])[:, None], places].set(verdict.tokens, mode="drop")


def newest_tokens(history: History, view: SlotView, count: int) -> Int[Array, "batch count"]:
    """Return the last ``count`` tokens of each row, newest first; `UNKNOWN` before the beginning of the text."""
    places = view.lengths[:, None] - jnp.arange(count)
    places = jnp.where(view.active[:, None] & (places >= 0), places, history.shape[1])
    tokens = history.at[view.slots[:, None], places].get(mode="fill", fill_value=GAP)
    return jnp.where(tokens >= 0, tokens, UNKNOWN)


# ---- the trie


class Trie(NamedTuple):
    """A trie, which merges continuations that begin with the same tokens.

    The first d + 1 tokens of match j's continuation in batch row b lead to a node, which entry ``[b, d, j]`` describes.
    A node has one entry for each match whose continuation passes through it. The best of these matches is the node's
    leader, and the leader's entry represents the node.
    """

    tokens: Int[Array, "batch depth matches"]  # token of the node
    leader: Int[Array, "batch depth matches"]  # index of the best match through the node
    leads: Bool[Array, "batch depth matches"]  # whether match j is the leader
    passing: Int[Array, "batch depth matches"]  # weight of the matches through the node; 0 after a continuation's end
    rank: Int[Array, "batch depth matches"]  # rank of the node among its siblings in the trie, from 0
    found: Int[Array, "batch"]  # weight of all matches


def build_trie(
    tokens: Int[Array, "batch depth matches"], *, by_count: bool, weights: Int[Array, "batch matches"] | None = None
) -> Trie:
    """Merge continuations into a trie.

    Args:
        tokens: continuations of the matches, best match first (`continuations`).
        by_count: whether to rank siblings by number of matches, then by best match; False: only by best match.
        weights: as how many matches each one counts, at most M; None: as one.
    """
    depth, matches = tokens.shape[1:]
    match = jnp.arange(matches)
    token, most = tokens[:, 0], matches if weights is None else 2 * matches  # most: largest weight through a node
    together = (token[:, :, None] >= 0) & (token[:, None] >= 0)  # whether two matches pass through the same node
    levels = []
    for level in range(depth):
        siblings, token = together, tokens[:, level]
        together = siblings & (token[:, :, None] == token[:, None]) & (token[:, :, None] >= 0)
        counted = together if weights is None else jnp.where(together, weights[:, None], 0)
        passing = jnp.sum(counted, axis=2, dtype=jnp.int32)
        leader = jnp.argmax(together, axis=2).astype(jnp.int32)
        leads = (leader == match) & (passing > 0)
        order = leader - most * passing if by_count else leader
        earlier = siblings & leads[:, None] & (order[:, None] < order[:, :, None])
        levels.append((leader, leads, passing, jnp.sum(earlier, axis=2, dtype=jnp.int32)))
    leader, leads, passing, rank = (jnp.stack(parts, axis=1) for parts in zip(*levels, strict=True))
    is_match = tokens[:, 0] >= 0
    found = jnp.sum(is_match if weights is None else jnp.where(is_match, weights, 0), axis=1, dtype=jnp.int32)
    return Trie(tokens, leader, leads, passing, rank, found)


# ---- the tree


def tree_from_trie(view: SlotView, trie: Trie, tree: Tree) -> Draft:
    """Make a `Draft` from trie nodes. A static tree takes the nodes at its paths, a dynamic tree the best nodes.

    A node's score is the logarithm of the share of matches that pass through it. Tree nodes without a trie node are
    padding at the end of the draft.
    """
    rows, _, matches = trie.tokens.shape
    priority = _static_priority(trie, tree) if tree.paths is not None else _dynamic_priority(trie, tree)
    best, entry = jax.lax.top_k(jnp.where(trie.leads, priority, -1).reshape(rows, -1), tree.nodes - 1)
    valid = best >= 0

    def pick(field: Array, places: Array) -> Array:
        return jnp.take_along_axis(field.reshape(rows, -1), places, axis=1)

    above = jnp.maximum(entry - matches, 0)  # entry of this match one level higher
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
    """Return each trie node's priority for a static tree, larger for earlier tree nodes and -1 outside the tree."""
    assert tree.paths is not None
    priority = []
    for depth in range(1, tree.depth + 1):
        nodes, paths = zip(*((n, path) for n, path in enumerate(tree.paths, 1) if len(path) == depth), strict=True)
        ranks = np.array(paths, np.int32).T[:, None]
        is_node = jnp.all(trie.rank[:, :depth, :, None] == ranks, axis=1)
        priority.append(jnp.max(jnp.where(is_node, tree.nodes - np.array(nodes, np.int32), -1), axis=-1))
    return jnp.stack(priority, axis=1)


def _dynamic_priority(trie: Trie, tree: Tree) -> Int[Array, "batch depth matches"]:
    """Return each trie node's priority for a dynamic tree.

    Nodes with more matches come first, then nodes of less depth, then nodes with a better match. So a parent comes
    before its children. Children of rank ``tree.k`` or more, and their descendants, have priority -1. More than
    ``tree.k`` nodes of a level may have children.
    """
    depth, matches = trie.tokens.shape[1:]
    size = depth * matches
    entry = jnp.arange(size).reshape(depth, matches)
    allowed = jax.lax.cummax(trie.rank, axis=1) < tree.k
    return jnp.where(allowed, trie.passing * size + size - 1 - entry, -1)
