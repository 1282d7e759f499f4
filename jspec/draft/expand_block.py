"""Drafts a tree from one distribution for each depth, for drafters that compute a whole block in one pass.

The distributions of `expand_block` do not depend on each other: the probability of a path is the product of its tokens'
probabilities. Those of `expand_corrected` depend on the token before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec.core.accept_rule import DraftSampling
from jspec.core.records import Draft, SlotView
from jspec.core.tree import Tree
from jspec.draft.base import static_draft
from jspec.draft.expand_tree import Level, Logits, Vocabulary, expand_tree
from jspec.sampling import sampler
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.shard import OwnColumns
from pallas_kernels.sampling import divided
from pallas_kernels.sampling.best_tree import best_tree

# Corrections of the logits after the nodes of one level: (depth, target ids [batch, nodes], state) -> (corrections
# [batch, nodes, draft_vocab], new state). A state of arrays has the shape [batch, nodes, ...].
Correct = Callable[[int, Array, Any], tuple[Float[Array, "batch nodes draft_vocab"], Any]]


def expand_block(tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: PartialSums) -> Draft:
    """Draft a tree of any kind from the logits of a block.

    Args:
        tree: draft tree.
        view: the slots of the batch.
        vocabulary: the draft vocabulary.
        logits: logits of the token at each depth from 1 on, [1, batch, depth, draft_vocab].
    """
    run = _expand_dynamic if tree.paths is None else _expand_static
    return run(tree, view, vocabulary, logits)


def expand_corrected(
    tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: PartialSums, correct: Correct, state: Any = None
) -> Draft:
    """Draft a tree of any kind from the logits of a block, which the token before each position corrects.

    A dynamic tree has the nodes of highest score, the joint log-probability, as `expand_tree` finds them.

    Args:
        tree, view, vocabulary, logits: as for `expand_block`.
        correct: function that computes the corrections of the logits after the nodes of one level.
        state: state of ``correct`` before the root.
    """
    columns = logits if isinstance(logits, OwnColumns) else None
    sums = reduce_partials(logits if columns is None else columns.own, jnp.float32)

    def after(depth: int, tokens: Array, state: Any) -> tuple[Logits, Any]:
        corrections, state = correct(depth, tokens, state)
        if columns is None and tree.paths is None:
            return sampler.Corrected(corrections, sums, depth), state
        if columns is None:
            return (sums[:, depth, None] + corrections)[None], state
        own = (sums[:, depth, None] + divided.own_part(columns, corrections))[None]
        return replace(columns, own=own), state

    def feed(state: Any, level: Level) -> tuple[Logits, Any]:
        parents = level.parents[:, :, None]
        return after(
            level.depth, level.tokens, jax.tree.map(lambda leaf: jnp.take_along_axis(leaf, parents, axis=1), state)
        )

    first, state = after(0, view.root[:, None], state)
    expanded, _ = expand_tree(tree, view, vocabulary, first, state, feed)
    return expanded.draft


def _expand_static(tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: PartialSums) -> Draft:
    """Draft a chain or a static tree; a node of rank r gets the r-th token that was chosen at its depth.

    If tokens are drawn, they are drawn for each parent: accept rules need the children of different nodes to be
    independent. With `OwnColumns` every row is greedy, and nothing is drawn.
    """
    choose = sampler.child_chooser(view, tree.depth, vocabulary.to_target, vocabulary.target_size)
    is_drawn = view.accept.draft_sampling is DraftSampling.OWN_DISTRIBUTION and not isinstance(logits, OwnColumns)
    levels = tree.levels[1:]
    counts = [level.num_parents if is_drawn else 1 for level in levels]
    depths = np.repeat(np.arange(tree.depth), counts)
    if len(depths) > tree.depth:
        logits = reduce_partials(logits, jnp.float32)[None, :, depths]
    ids, probs = choose(logits, 1 + depths, tree.branching)
    with jax.named_scope("scores"):
        log_p = sampler.log_prob(reduce_partials(logits, jnp.float32), ids)
    tokens, log_probs, parent_probs, first = [], [], [], 0
    for level, count in zip(levels, counts, strict=True):
        place_of = first + np.minimum(np.arange(level.num_parents), count - 1)
        chosen = (slice(None), place_of[np.array(level.fed_parents)], np.array(level.ranks))
        tokens.append(vocabulary.lift(ids[chosen]))
        log_probs.append(log_p[chosen])
        if probs is not None:
            parent_probs.append([probs[:, index] for index in place_of])
        first += count
    return static_draft(tree, view, tokens, log_probs, parent_probs, vocabulary.to_target)


def _expand_dynamic(tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: PartialSums) -> Draft:
    """Draft the paths of highest probability among those whose every token is one of the k likeliest of its depth."""
    shape = (*logits.shape[1:3], tree.k)
    likeliest = sampler.most_likely(logits, tree.k, implementation=view.implementation)
    log_probs, ids = (field.reshape(shape) for field in likeliest)
    with jax.named_scope("select"):
        tokens, parents, scores = best_tree(
            view.root, vocabulary.lift(ids), log_probs, tree.nodes, implementation=view.implementation
        )
    return Draft(
        tokens=tokens,
        parents=parents,
        scores=scores,
        valid=jnp.ones(tokens.shape, bool),
        probs=None,
        vocab_map=vocabulary.to_target,
    )
