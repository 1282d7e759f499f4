"""Finds accept rules by name, applies the engine's rule in each round, and ends rows at stop ids and length limits.

The rule is an option of the engine and never changes. A choice of the rule that depended on a round's random numbers
would be lossy, even among lossless rules. All rules except "typical" emit the target's processed distribution for any
draft.

| rule | file | method |
|---|---|---|
| "coupled" | `coupled` | accept a draft token if the target draws the same token (sample and match) |
| "rejection" | `rejection` | rejection sampling with the draft's probabilities, siblings without replacement |
| "block" | `block` | verify a sampled chain as a whole |
| "traversal" | `traversal` | verify a sampled tree from its leaves to its root; on a chain, "block" |
| "multi_candidate" | `multi_candidate` | try siblings in order as point masses, for deterministic drafts |
| "typical" | `typical` | accept tokens that are likely enough (lossy) |

The accept functions take uniforms as arguments and return probabilities, so that tests can pass recorded uniforms and
enumerate all outcomes.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.core.accept_rule import AcceptRule
from jspec.core.ancestors import by_depth, depths
from jspec.core.config import ACCEPT_RULES
from jspec.core.records import AncestorMask, Draft, SlotView, Verdict
from jspec.core.tree import Tree
from jspec.sampling import penalties
from jspec.verify.block import Block
from jspec.verify.coupled import Coupled
from jspec.verify.multi_candidate import MultiCandidate
from jspec.verify.rejection import Rejection
from jspec.verify.traversal import Traversal
from jspec.verify.tree_walk import at_node
from jspec.verify.typical import Typical
from pallas_kernels.layers.partial_sums import PartialSums

RULES: dict[str, type[AcceptRule]] = {
    rule.name: rule for rule in (Coupled, Rejection, Block, Traversal, MultiCandidate, Typical)
}


def resolve(accept: str | AcceptRule) -> AcceptRule:
    """Make the accept rule with a given name and its default options; a rule object is returned unchanged.

    Args:
        accept: name of the rule, or a rule.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(accept, AcceptRule):
        return accept
    if accept not in RULES:
        raise ValueError(f"accept: expected one of {ACCEPT_RULES}, got {accept!r}")
    return RULES[accept]()


def accept(logits: PartialSums, draft: Draft, ancestor_mask: AncestorMask, view: SlotView, tree: Tree) -> Verdict:
    """Apply the program's accept rule, and end rows at their first stop id or at their length limit.

    Args:
        logits: the target's raw logits after every node, [1, batch, nodes, vocab]; scales may still be unapplied.
        ancestor_mask: ancestors of each node (`jspec.core.ancestors.ancestors`).
    """

    def decide(edited: PartialSums) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        return view.accept.decide(edited, draft, ancestor_mask, view)

    (last_node, bonus), grammar_state = penalties.decide_with_penalties(
        view, logits, lambda: penalties.node_paths(draft, ancestor_mask, tree.depth), decide
    )
    return replace(verdict_of(last_node, bonus, draft, ancestor_mask, view, tree), grammar_state=grammar_state)


def verdict_of(
    last_node: Int[Array, "batch"],
    bonus: Int[Array, "batch"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    view: SlotView,
    tree: Tree,
) -> Verdict:
    """Make the verdict from the last accepted node of each row, and end rows at a stop id or their length limit.

    Args:
        last_node: the last accepted node [batch].
        bonus: the target's token after the last accepted node [batch].
    """
    path, accept_len = (
        at_node(by_depth(ancestor_mask, tree.depth), last_node),
        at_node(depths(ancestor_mask), last_node),
    )
    steps = jnp.arange(tree.depth + 1)
    drafted = jnp.take_along_axis(draft.tokens, jnp.maximum(jnp.roll(path, -1, axis=1), 0), axis=1)
    tokens = jnp.where(steps < accept_len[:, None], drafted, -1)
    tokens = jnp.where(steps == accept_len[:, None], bonus[:, None], tokens)
    return cut(
        Verdict(accept_len=accept_len, path=path, tokens=tokens, counts=accept_len + 1, ended=~view.active),
        view,
    )


def cut(verdict: Verdict, view: SlotView) -> Verdict:
    """End each row after its first stop id or after ``remaining`` tokens, and count the emitted tokens."""
    stops = jnp.any(verdict.tokens[..., None] == view.sampling.stop_ids[:, None], axis=-1) & (verdict.tokens >= 0)
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, verdict.counts)
    counts = jnp.minimum(jnp.minimum(first, verdict.counts), view.remaining).astype(jnp.int32)
    emitted = jnp.arange(verdict.tokens.shape[1]) < counts[:, None]
    ended = jnp.any(stops & emitted, axis=1) | (counts >= view.remaining)
    return replace(
        verdict, tokens=jnp.where(emitted, verdict.tokens, -1), counts=jnp.where(view.active, counts, 0), ended=ended
    )
