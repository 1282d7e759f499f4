"""Drafts a tree level by level, for autoregressive drafters (EAGLE heads and draft models).

Fed nodes are the tree nodes that have children. The drafter's model runs on the fed nodes of one level at a time. It
writes their keys and values to the draft cache, after the row of the root (the newest token), and returns the logits
for their children.
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
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.sampling.best_tree import choose_nodes
from pallas_kernels.sampling.top_log_probs import top

EXCLUDED = -1e30  # logit of a token that is no candidate, whose probability becomes 0


@struct.dataclass
class Level:
    """The fed nodes of one tree level, which have children and on which the drafter's model runs."""

    tokens: Int[Array, "batch fed"]  # token id of each fed node in the target's vocabulary
    ids: Int[Array, "batch fed"]  # token id of each fed node in the draft vocabulary
    parents: Int[Array, "batch fed"]  # index of the parent among the fed nodes of the level before
    bits: UInt32[Array, "batch fed words"] | None  # mask of visible rows, bit 0 is the root's; None: all (a chain)
    depth: int = struct.field(pytree_node=False)  # depth of the level; 1 for the root's children
    first: int = struct.field(pytree_node=False)  # cache row of the first fed node, counted from the root's row
    draft_rows: int = struct.field(pytree_node=False)  # number of rows that ``bits`` covers: all fed nodes of the tree

    def batch(self, view: SlotView, position: Int[Array, "batch"], window: int | None = None) -> TokenBatch:
        """Make a batch of the level's nodes for the forward pass; all nodes of a level have one position.

        Args:
            view: the slots of the batch.
            position: rotary position of the level's nodes.
            window: number of newest tokens that the drafter attends to, including a node's ancestors; None: all.
        """
        shape = self.tokens.shape
        return TokenBatch(
            tokens=self.tokens,
            positions=jnp.broadcast_to(position[:, None], shape),
            valid=jnp.broadcast_to(view.active[:, None], shape),
            first_row=view.lengths + self.first,
            page_table=view.page_table,
            bits=self.bits,
            numerics=view.numerics.relaxed,
            base=None if self.bits is None else view.lengths,
            new_rows=None if self.bits is None else self.draft_rows,
            window=window,
        )


@struct.dataclass
class ExpandedTree:
    """A drafted tree with the draft cache row of each node."""

    draft: Draft  # drafted tree
    rows: Int[Array, "batch nodes"]  # cache row of each node, counted from the root's row; -1: not fed


# Logits after the fed nodes [1, batch, fed, draft_vocab]; `reduce_partials` applies the scales of a quantised output
# head. Those of dynamic trees may have corrections.
Logits = PartialSums | sampler.Corrected
Feed = Callable[[Any, Level], tuple[Logits, Any]]  # the drafter's forward pass over one level: (state, level)


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a drafter, with its map to the target's vocabulary."""

    to_target: Int[Array, "draft_vocab"] | None  # target id of each draft id; None: ids are equal
    target_size: int  # size of the target's vocabulary

    def lift(self, ids: Int[Array, "..."]) -> Int[Array, "..."]:
        """Convert draft ids to target ids."""
        return ids if self.to_target is None else self.to_target[ids]


def expand_tree(
    tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: Logits, state: Any, feed: Feed
) -> tuple[ExpandedTree, Any]:
    """Draft a tree of any kind, level by level.

    Args:
        tree: draft tree.
        view: the slots of the batch.
        vocabulary: the draft vocabulary.
        logits: logits after the root, in the form that ``feed`` returns, [1, batch, 1, draft_vocab].
        state: the drafter's state, which ``feed`` takes and returns.
        feed: the drafter's forward pass over one level.

    Returns:
        The drafted tree and the drafter's new state.
    """
    run = _expand_dynamic if tree.paths is None else _expand_static
    return run(tree, view, vocabulary, logits, state, feed)


def _expand_static(
    tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: Logits, state: Any, feed: Feed
) -> tuple[ExpandedTree, Any]:
    """Draft a chain or a static tree; the child of rank r gets the r-th token that was chosen after its parent."""
    rows = view.root.shape[0]
    tokens, log_probs, probs = [], [], []
    choose = sampler.child_chooser(view, tree.depth, vocabulary.to_target, vocabulary.target_size)
    bits = _root_bits(tree, rows)
    for depth, level in enumerate(tree.levels[1:], 1):
        assert not isinstance(logits, sampler.Corrected), "the logits of static trees are whole"
        with jax.named_scope(f"draft{depth}"):
            ids, parent_probs = choose(logits, depth, max(level.ranks) + 1)
            chosen = (slice(None), np.array(level.fed_parents), np.array(level.ranks))
            log_probs.append(sampler.log_prob(reduce_partials(logits, jnp.float32), ids)[chosen])
            tokens.append(vocabulary.lift(ids[chosen]))
            if parent_probs is not None:
                probs.append([parent_probs[:, index] for index in range(level.num_parents)])
            if level.with_children:
                fed, first = np.array(level.with_children), tree.fed.index(level.nodes[level.with_children[0]])
                parents = jnp.broadcast_to(np.array(level.fed_parents)[fed], (rows, len(fed)))
                bits = _visible_bits(bits, parents, first)
                fields = tokens[-1][:, fed], ids[chosen][:, fed], parents, bits
                logits, state = feed(state, Level(*fields, depth, first, tree.draft_rows))
    row_of = [tree.fed.index(node) if node in tree.fed else -1 for node in range(tree.nodes)]
    draft = static_draft(tree, view, tokens, log_probs, probs, vocabulary.to_target)
    return ExpandedTree(draft, jnp.broadcast_to(jnp.array(row_of, jnp.int32), (rows, tree.nodes))), state


@struct.dataclass
class Candidates:
    """The candidates for the nodes of a dynamic tree, which are all drafted nodes in the order of levels."""

    ids: Int[Array, "batch candidates"]  # token ids in the draft vocabulary
    scores: Float[Array, "batch candidates"]  # sum of the draft log-probabilities along the path
    parents: Int[Array, "batch candidates"]  # index of the parent among the candidates, -1 for the root
    rows: Int[Array, "batch candidates"]  # draft cache row, counted from the root's row; -1: not fed


def _expand_dynamic(
    tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: Logits, state: Any, feed: Feed
) -> tuple[ExpandedTree, Any]:
    """Draft a dynamic tree (EAGLE-2, arXiv:2406.16858, section 4).

    In every level the k nodes of highest score are fed. Of all candidates, the nodes of highest score become the tree.
    A node's score is the sum of the log-probabilities (at temperature 1) along its path, so it is at most its parent's
    score. Of equal scores the earlier candidate is chosen. The parent of a chosen candidate is therefore chosen too.
    """
    rows, k = view.root.shape[0], tree.k
    # Scores and candidate indices of the fed nodes of the previous level; the root is the level of depth 0.
    scores, fed = jnp.zeros((rows, 1)), jnp.full((rows, 1), -1, jnp.int32)
    bits, levels, count = _root_bits(tree, rows), [], 0
    for depth in range(1, tree.depth + 1):
        with jax.named_scope(f"draft{depth}"):
            level = _children(scores, fed, logits, k, view.implementation)
            if depth < tree.depth:
                first = 1 + (depth - 1) * k
                scores, best, parents = top(level.scores, k, group=k, implementation=view.implementation)
                row_of = first + jnp.arange(k, dtype=jnp.int32)
                level = replace(level, rows=_put(level.rows, best, jnp.broadcast_to(row_of, best.shape)))
                ids = jnp.take_along_axis(level.ids, best, axis=1)
                fed = count + best
                bits = _visible_bits(bits, parents, first)
                fields = vocabulary.lift(ids), ids, parents, bits
                logits, state = feed(state, Level(*fields, depth, first, tree.draft_rows))
            levels.append(level)
            count += level.ids.shape[1]
    candidates = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *levels)
    with jax.named_scope("select"):
        return _select_nodes(tree, view, vocabulary, candidates), state


def _children(scores: Array, fed: Array, logits: Logits, k: int, implementation: Any) -> Candidates:
    """Return the k most likely children of every fed node (node with children), as candidates.

    Args:
        scores: scores of the fed nodes [batch, fed].
        fed: candidate indices of the fed nodes [batch, fed].
        logits: logits after the fed nodes [1, batch, fed, draft_vocab].
    """
    rows, count = scores.shape
    scores, ids = sampler.most_likely(logits, k, base=scores.reshape(rows * count), implementation=implementation)
    return Candidates(
        ids=ids.reshape(rows, count * k),
        scores=scores.reshape(rows, count * k),
        parents=jnp.repeat(fed, k, axis=1),
        rows=jnp.full((rows, count * k), -1, jnp.int32),
    )


def _select_nodes(tree: Tree, view: SlotView, vocabulary: Vocabulary, candidates: Candidates) -> ExpandedTree:
    """Make the tree of the root and the candidates of highest score, in the order in which they were drafted."""
    how: Any = view.implementation
    chosen, parents = choose_nodes(candidates.scores, candidates.parents, tree.nodes - 1, implementation=how)

    def take(field: Array) -> Array:
        return jnp.take_along_axis(field, chosen, axis=1)

    def with_root(root: Array, nodes: Array) -> Array:
        return jnp.concatenate([root[:, None], nodes], axis=1)

    zero = jnp.zeros_like(view.root)
    draft = Draft(
        tokens=with_root(view.root, vocabulary.lift(take(candidates.ids))),
        parents=with_root(zero - 1, parents),
        scores=with_root(zero.astype(jnp.float32), take(candidates.scores)),
        valid=jnp.ones((zero.shape[0], tree.nodes), bool),
        probs=None,
        vocab_map=vocabulary.to_target,
    )
    return ExpandedTree(draft, with_root(zero, take(candidates.rows)))


def _put(field: Array, at: Array, values: Array) -> Array:
    """Return a copy of ``field`` in which ``field[b, at[b, i]]`` is ``values[b, i]``."""
    return jnp.put_along_axis(field, at, values, axis=1, inplace=False)


def _root_bits(tree: Tree, rows: int) -> UInt32[Array, "batch 1 words"] | None:
    """Return a bit mask by which the root sees only its own row; None for a chain, whose rows see all earlier rows."""
    if tree.is_chain:
        return None
    return jnp.broadcast_to(own_bits(np.arange(1), tree.draft_rows), (rows, 1, num_words(tree.draft_rows)))


def _visible_bits(bits: Array | None, parents: Array, first: int) -> Array | None:
    """Return a bit mask by which each fed node of a level sees its own row and all rows that its parent sees.

    Args:
        bits: bit masks of the fed nodes of the previous level; None for a chain.
        parents: index of each node's parent among the fed nodes of the previous level.
        first: cache row of the level's first fed node, counted from the root's row.
    """
    if bits is None:
        return None
    own_row = own_bits(first + np.arange(parents.shape[1]), bits.shape[-1] * WORD)
    return jnp.take_along_axis(bits, parents[:, :, None], axis=1) | own_row
