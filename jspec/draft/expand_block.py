"""Drafts a tree from one distribution for each depth, for drafters that compute a whole block in one pass.

The distributions do not depend on each other: the probability of a path is the product of its tokens' probabilities.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.records import Draft, SlotView
from jspec.core.tree import Tree
from jspec.draft.base import static_draft
from jspec.draft.expand_tree import Vocabulary
from jspec.sampling import sampler
from pallas_kernels.layers.quantized import PartialSums, reduce_partials


def expand_block(tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: PartialSums) -> Draft:
    """Draft a tree from the logits of a block.

    Args:
        tree: draft tree.
        view: the slots of the batch.
        vocabulary: the draft vocabulary.
        logits: logits of the token at each depth from 1 on, [1, batch, depth, draft_vocab].
    """
    choose = sampler.child_chooser(view, tree.depth, vocabulary.to_target, vocabulary.target_size)
    ids, probs = choose(logits, np.arange(1, tree.depth + 1), tree.branching)
    with jax.named_scope("scores"):
        own = sampler.log_prob(reduce_partials(logits, jnp.float32), ids)
    tokens, log_probs, parent_probs = [], [], []
    for depth, level in enumerate(tree.levels[1:]):
        ranks = np.array(level.ranks)
        tokens.append(vocabulary.lift(ids[:, depth, ranks]))
        log_probs.append(own[:, depth, ranks])
        if probs is not None:
            parent_probs.append([probs[:, depth]] * level.num_parents)
    return static_draft(tree, view, tokens, log_probs, parent_probs, vocabulary.to_target)
