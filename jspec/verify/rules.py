"""The accept rules by name, and the verdict of one round: apply the program's rule, then cut where the row ends.

The rule is an option of the engine, fixed before any round: choosing a rule by a round's own draws would be lossy even
if all rules were lossless. All rules but "typical" emit the target's processed distribution for any draft.

| rule | file | method |
|---|---|---|
| "coupled" | `coupled` | accept a draft token if the target draws the same one (sample and match) |
| "rejection" | `rejection` | rejection sampling with the draft's probabilities, siblings without replacement |
| "block" | `block` | a sampled chain is verified as a whole |
| "multi_candidate" | `multi_candidate` | siblings are tried in order as point masses, for deterministic drafts |
| "typical" | `typical` | lossy: accept tokens that are likely enough |

The accept functions of the sampling rules take their uniforms as arguments and return probabilities, which lets tests
feed recorded draws and enumerate all outcomes.
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
from jspec.verify.tree_walk import at_node
from jspec.verify.typical import Typical
from pallas_kernels.layers.quantized import PartialSums

RULES: dict[str, type[AcceptRule]] = {rule.name: rule for rule in (Coupled, Rejection, Block, MultiCandidate, Typical)}


def resolve(accept: str | AcceptRule, **options: float) -> AcceptRule:
    """Construct the accept rule of a given name; a rule object is returned unchanged.

    Args:
        accept: name of the rule, or a rule.
        options: arguments of the rule's constructor; ignored for a rule object.

    Raises:
        ValueError: the name is unknown.
    """
    if isinstance(accept, AcceptRule):
        return accept
    if accept not in RULES:
        raise ValueError(f"accept: expected one of {ACCEPT_RULES}, got {accept!r}")
    return RULES[accept](**options)


def accept(logits: PartialSums, draft: Draft, ancestor_mask: AncestorMask, view: SlotView, tree: Tree) -> Verdict:
    """Decide by the program's rule which draft tokens are accepted, and cut the result where the row ends.

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
    """Make the verdict from the last accepted node of each row, cut where the row ends.

    Args:
        last_node: the last accepted node.
        bonus: the target's token after the last accepted node.
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
