"""The accept rules by name, and one step's verdict: decide by the program's rule, then cut where the row ends.

The rule is an option of the engine, fixed before any step: choosing one by a step's own draws would be lossy even
between lossless rules. All but "typical" emit the target's processed distribution, whatever the draft.

| rule | file | what |
|---|---|---|
| "coupled" | `coupled` | accept the tokens that the target draws itself (sample and match) |
| "rejection" | `rejection` | rejection sampling with the draft's probabilities, siblings without replacement |
| "block" | `block` | a sampled chain is verified as a whole |
| "multi_candidate" | `multi_candidate` | siblings are tried in order as point masses, for deterministic drafts |
| "typical" | `typical` | lossy: accept what is likely enough |

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
    """The rule of a name; a rule is returned unchanged.

    Args:
        options: of the rule's constructor, for a name.

    Raises:
        ValueError: an unknown name.
    """
    if isinstance(accept, AcceptRule):
        return accept
    if accept not in RULES:
        raise ValueError(f"accept: expected one of {ACCEPT_RULES}, got {accept!r}")
    return RULES[accept](**options)


def accept(logits: PartialSums, draft: Draft, ancestor_mask: AncestorMask, view: SlotView, tree: Tree) -> Verdict:
    """Decide which draft tokens are accepted, by the program's rule, and cut the result where the row ends.

    Args:
        logits: the target's raw logits at every node, [1, batch, nodes, vocab], perhaps still to be scaled.
        ancestor_mask: ancestors of each node (`jspec.core.ancestors.ancestors`).
    """

    def decide(edited: PartialSums) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        return view.accept.decide(edited, draft, ancestor_mask, view)

    (last_node, bonus), grammar_state = penalties.by_use(
        view, logits, lambda: penalties.paths(draft, ancestor_mask, tree.depth), decide
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
    """Lay out the path to the last accepted node by depth and cut the tokens where the row ends.

    Args:
        last_node: the last accepted node.
        bonus: the target's token after it.
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
    """End a row at its first stop id (which is emitted) or when `remaining` is used up, and count its tokens."""
    stops = jnp.any(verdict.tokens[..., None] == view.sampling.stop_ids[:, None], axis=-1) & (verdict.tokens >= 0)
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, verdict.counts)
    counts = jnp.minimum(jnp.minimum(first, verdict.counts), view.remaining).astype(jnp.int32)
    emitted = jnp.arange(verdict.tokens.shape[1]) < counts[:, None]
    ended = jnp.any(stops & emitted, axis=1) | (counts >= view.remaining)
    return replace(
        verdict, tokens=jnp.where(emitted, verdict.tokens, -1), counts=jnp.where(view.active, counts, 0), ended=ended
    )
