"""Growing a tree level by level, for every drafter that predicts a token's followers from the tokens before it.

Some nodes are fed: run through the draft model, which writes their rows to the draft's cache behind the root's, level
by level, and gives the logits from which their children are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from jspec.core.records import Draft, SlotView, TokenBatch
from jspec.core.tree import Tree
from jspec.draft.base import static_draft
from jspec.sampling import sampler
from pallas_kernels.attention.ancestor_bits import WORD, num_words, own_bits
from pallas_kernels.layers.quantized import PartialSums, reduce_partials
from pallas_kernels.sampling.top_log_probs import top, top_in_order, top_log_probs


@struct.dataclass
class Level:
    """The fed nodes of one level."""

    tokens: Int[Array, "batch fed"]  # target vocabulary
    ids: Int[Array, "batch fed"]  # draft vocabulary
    parents: Int[Array, "batch fed"]  # which of the level before's fed nodes
    bits: UInt32[Array, "batch fed words"] | None  # rows seen, counted from the root's; None: all (a chain)
    depth: int = struct.field(pytree_node=False)  # 1 below the root
    first: int = struct.field(pytree_node=False)  # row of the first one, counted from the root's
    draft_rows: int = struct.field(pytree_node=False)  # rows that bits may name: those of the whole tree

    def batch(self, view: SlotView, position: Int[Array, "batch"], window: int | None = None) -> TokenBatch:
        """The level as a batch for the forward pass; its nodes all stand at one position.

        Args:
            window: the drafter's; a node's ancestors count towards it, though in a tree they lie in other rows.
        """
        shape = self.tokens.shape
        return TokenBatch(
            tokens=self.tokens,
            positions=jnp.broadcast_to(position[:, None], shape),
            valid=jnp.broadcast_to(view.active[:, None], shape),
            first_row=view.lengths + self.first,
            page_table=view.page_table,
            bits=self.bits,
            implementation=view.implementation,
            base=None if self.bits is None else view.lengths,
            new_rows=None if self.bits is None else self.draft_rows,
            window=window if window is None or self.bits is None else window - self.depth,
        )


@struct.dataclass
class ExpandedTree:
    """A tree, and where the draft's cache holds its nodes: rows counted from the root's, -1 if not fed."""

    draft: Draft
    rows: Int[Array, "batch nodes"]


# The drafter's forward pass: (state, level) -> (logits [1, batch, fed, vocab] of each fed node over the draft
# vocabulary, perhaps to be scaled, and the state).
Feed = Callable[[Any, Level], tuple[PartialSums, Any]]


@dataclass(frozen=True)
class Vocabulary:
    """The draft's vocabulary: the target ids of its ids (None: the same), and the target's size."""

    to_target: Int[Array, "draft_vocab"] | None
    target_size: int

    def lift(self, ids: Int[Array, "..."]) -> Int[Array, "..."]:
        """Draft ids as target ids."""
        return ids if self.to_target is None else self.to_target[ids]


def expand_tree(
    tree: Tree, view: SlotView, vocabulary: Vocabulary, product: PartialSums, state: Any, feed: Feed
) -> tuple[ExpandedTree, Any]:
    """Grow the tree from the root's logits on.

    Args:
        product: the logits behind the root, [1, batch, 1, vocab] over the draft vocabulary, perhaps to be scaled.
        state: of the drafter, threaded through ``feed``.
    """
    run = _grow_dynamic if tree.paths is None else _grow_static
    return run(tree, view, vocabulary, product, state, feed)


def _grow_static(
    tree: Tree, view: SlotView, vocabulary: Vocabulary, product: PartialSums, state: Any, feed: Feed
) -> tuple[ExpandedTree, Any]:
    """Fill the places of a tree whose shape is known: a node of rank r is its parent's r-th choice."""
    rows = view.root.shape[0]
    tokens, log_probs = [], []
    laws: dict[int, Array] = {}
    dispatch = sampler.child_chooser(view, tree.depth, vocabulary.to_target, vocabulary.target_size)
    bits, fed = _root_bits(tree, rows), [0]
    for depth, level in enumerate(tree.levels[1:], 1):
        with jax.named_scope(f"draft{depth}"):
            ids, law = dispatch(product, depth, max(level.ranks) + 1)
            chosen = (slice(None), np.array(level.fed_parents), np.array(level.ranks))
            log_probs.append(sampler.log_prob(reduce_partials(product, jnp.float32), ids)[chosen])
            tokens.append(vocabulary.lift(ids[chosen]))
            if law is not None:
                laws |= {node: law[:, index] for index, node in enumerate(fed)}
            fed = [level.nodes[place] for place in level.with_children]
            if fed:
                places, first = np.array(level.with_children), tree.fed.index(fed[0])
                parents = jnp.broadcast_to(np.array(level.fed_parents)[places], (rows, len(fed)))
                bits = _own_bits(bits, parents, first)
                of_level = tokens[-1][:, places], ids[chosen][:, places], parents, bits
                product, state = feed(state, Level(*of_level, depth, first, tree.draft_rows))
    row_of = [tree.fed.index(node) if node in tree.fed else -1 for node in range(tree.nodes)]
    draft = static_draft(tree, view, tokens, log_probs, laws, vocabulary.to_target)
    return ExpandedTree(draft, jnp.broadcast_to(jnp.array(row_of, jnp.int32), (rows, tree.nodes))), state


@struct.dataclass
class _Candidates:
    """Every node that was drafted, level after level; a parent is an index among them, -1 for the root."""

    ids: Int[Array, "batch candidates"]  # draft vocabulary
    scores: Float[Array, "batch candidates"]
    parents: Int[Array, "batch candidates"]
    rows: Int[Array, "batch candidates"]


def _grow_dynamic(
    tree: Tree, view: SlotView, vocabulary: Vocabulary, product: PartialSums, state: Any, feed: Feed
) -> tuple[ExpandedTree, Any]:
    """EAGLE-2 (arXiv:2406.16858, section 4): the k best of a level are fed, the best of all candidates verified.

    A score is the sum of untempered log-probabilities, so it never grows along a path; every choice among equals
    takes the earlier candidate. So the parent of a chosen candidate is chosen too, ties or not.
    """
    rows, k = view.root.shape[0], tree.k
    # The fed nodes of the level before, at first the root: their scores and their own indices among the candidates.
    scores, own = jnp.zeros((rows, 1)), jnp.full((rows, 1), -1, jnp.int32)
    bits, levels, count = _root_bits(tree, rows), [], 0
    for depth in range(1, tree.depth + 1):
        with jax.named_scope(f"draft{depth}"):
            level = _children(scores, own, reduce_partials(product, jnp.float32), k, view.implementation)
            if depth < tree.depth:
                first = 1 + (depth - 1) * k
                scores, slots, parents = top(level.scores, k, group=k, implementation=view.implementation)
                row_of = first + jnp.arange(k, dtype=jnp.int32)
                level = replace(level, rows=_put(level.rows, slots, jnp.broadcast_to(row_of, slots.shape)))
                ids = jnp.take_along_axis(level.ids, slots, axis=1)
                own = count + slots
                bits = _own_bits(bits, parents, first)
                of_level = vocabulary.lift(ids), ids, parents, bits
                product, state = feed(state, Level(*of_level, depth, first, tree.draft_rows))
            levels.append(level)
            count += level.ids.shape[1]
    candidates = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *levels)
    with jax.named_scope("select"):
        return _select(tree, view, vocabulary, candidates), state


def _children(scores: Array, own: Array, logits: Array, k: int, implementation: str) -> _Candidates:
    """The k best followers of every fed node, side by side."""
    rows, fed, size = logits.shape
    base = scores.reshape(rows * fed)
    scores, ids = top_log_probs(logits.reshape(rows * fed, size), k, base=base, implementation=implementation)
    return _Candidates(
        ids=ids.reshape(rows, fed * k),
        scores=scores.reshape(rows, fed * k),
        parents=jnp.repeat(own, k, axis=1),
        rows=jnp.full((rows, fed * k), -1, jnp.int32),
    )


def _select(tree: Tree, view: SlotView, vocabulary: Vocabulary, candidates: _Candidates) -> ExpandedTree:
    """The best candidates as nodes, in the candidates' order."""
    chosen = top_in_order(candidates.scores, tree.nodes - 1, implementation=view.implementation)

    def take(field: Array) -> Array:
        return jnp.take_along_axis(field, chosen, axis=1)

    def behind(root: Array, nodes: Array) -> Array:
        return jnp.concatenate([root[:, None], nodes], axis=1)

    zero = jnp.zeros_like(view.root)
    is_parent = take(candidates.parents)[:, :, None] == chosen[:, None]
    node = jnp.sum(jnp.where(is_parent, jnp.arange(1, tree.nodes), 0), axis=-1, dtype=jnp.int32)  # no match: the root
    draft = Draft(
        tokens=behind(view.root, vocabulary.lift(take(candidates.ids))),
        parents=behind(zero - 1, node),
        scores=behind(zero.astype(jnp.float32), take(candidates.scores)),
        valid=jnp.ones((zero.shape[0], tree.nodes), bool),
        probs=None,
        vocab_map=vocabulary.to_target,
    )
    return ExpandedTree(draft, behind(zero, take(candidates.rows)))


def _put(field: Array, at: Array, values: Array) -> Array:
    """``field[b, at[b, i]] = values[b, i]``."""
    return jnp.put_along_axis(field, at, values, axis=1, inplace=False)


def _root_bits(tree: Tree, rows: int) -> UInt32[Array, "batch 1 words"] | None:
    """The root sees itself; the rows of a chain see all before them and need no bits."""
    if tree.is_chain:
        return None
    return jnp.broadcast_to(own_bits(np.arange(1), tree.draft_rows), (rows, 1, num_words(tree.draft_rows)))


def _own_bits(bits: Array | None, parents: Array, first: int) -> Array | None:
    """What the nodes at rows ``first`` on see: what their parents see, and themselves."""
    if bits is None:
        return None
    own = own_bits(first + np.arange(parents.shape[1]), bits.shape[-1] * WORD)
    return jnp.take_along_axis(bits, parents[:, :, None], axis=1) | own
