"""Accept rules: what the target makes of a drafted tree.

The rule is an option of the engine, fixed before any round; to choose one by the round's own draws would be lossy even
between lossless rules. All but "typical" yield the target's processed distribution, whatever the draft:

"coupled" (sample and match): the target's token at every node is drawn with noise that depends on seed and position
alone, and the walk follows the child that equals it. So the tokens are those of plain decoding with that seed, for
every drafter and tree. Greedy decoding is its temperature 0.

"multi_candidate" (`point`): siblings are tried one after the other as point masses; for drafts that were not drawn.

"rejection" (`rejection`): rejection sampling with the law q that the draft's tokens were drawn from, siblings without
replacement. A draft that comes without q falls under "multi_candidate", also with "block".

"block" (`block`): a drawn chain is judged as a whole.

"typical" (`typical`): lossy; what is likely enough stands.

The sampling rules take their draws as arguments and return laws: they can be fed recorded draws, and enumerated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.ancestors import ancestors, by_depth, depths
from jspec.core.records import AncestorMask, Draft, SlotView, Verdict
from jspec.core.tree import Tree
from jspec.sampling import penalties, sampler
from jspec.sampling.sampler import Purpose
from jspec.verify.block import block_verification
from jspec.verify.multi_candidate import Candidate, multi_candidate, multi_candidate_accept
from jspec.verify.rejection import without_replacement
from jspec.verify.tree_walk import AcceptResult, at_node, longest_accepted_path, ranks
from jspec.verify.typical import Typical, typical_acceptance
from pallas_kernels.layers.quantized import PartialSums, reduce_partials

__all__ = [
    "Candidate",
    "Typical",
    "accept",
    "ancestors",
    "by_depth",
    "check_rule",
    "cut",
    "depths",
    "multi_candidate",
    "verdict_of",
]


def check_rule(rule: str, tree: Tree) -> None:
    """Refuse an accept rule that does not fit a drafter's tree, and warn of the lossy one.

    Raises:
        ValueError: "block" without a chain, or a rule that needs the draft's law with a static tree that leaves out a
            rank: what stands behind the gap would not be a sample without replacement.
    """
    if rule == "block" and not tree.is_chain:
        raise ValueError(f'accept="block" expects a chain, got {tree}; use Tree.chain(length) or accept="rejection"')
    if rule in sampler.RULES_WITH_LAW and tree.paths is not None:
        for path in tree.paths:
            if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in tree.paths:
                raise ValueError(
                    f'accept="{rule}" expects sibling ranks without gaps, got {path} without '
                    f'{(*path[:-1], path[-1] - 1)}; add that path or use accept="coupled"'
                )
    if rule == "typical":
        warnings.warn(
            'accept="typical" does not keep the target\'s distribution; every other rule does',
            UserWarning,
            stacklevel=3,
        )


def accept(
    product: PartialSums,
    draft: Draft,
    ancestor_mask: AncestorMask,
    view: SlotView,
    tree: Tree,
    options: Typical,
) -> Verdict:
    """Decide which draft tokens stand, by the program's rule, and cut the result where the row ends.

    Args:
        product: the target's raw logits at every node, [1, batch, nodes, vocab], perhaps to be scaled.
        ancestor_mask: ancestors of each node (`ancestors`).
        options: of the rule "typical".
    """

    def decide(product: PartialSums) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        if view.accept == "coupled":  # whose kernel itself tells greedy rows from others
            return coupled(product, draft, ancestor_mask, view)
        return sampler.by_temperature(view, lambda branch: by_law(product, branch))

    def by_law(product: PartialSums, branch: SlotView) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        if branch.all_greedy:  # at temperature 0 all rules are one
            return coupled(product, draft, ancestor_mask, branch)
        logits = reduce_partials(product, jnp.float32)
        if branch.accept == "typical":
            return typical_acceptance(logits, draft, ancestor_mask, branch, options)
        return sampled(logits, draft, ancestor_mask, branch)

    (best, bonus), grammar_state = penalties.by_use(
        view, product, lambda: penalties.paths(draft, ancestor_mask, tree.depth), decide
    )
    return replace(verdict_of(best, bonus, draft, ancestor_mask, view, tree), grammar_state=grammar_state)


def coupled(
    product: PartialSums,
    draft: Draft,
    ancestor_mask: AncestorMask,
    view: SlotView,
) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """Sample and match: a node stands if it and all its ancestors are the tokens the target draws there.

    Args:
        product: as in `accept`.

    Returns:
        The deepest node that stands, and the target's token behind it.
    """
    wanted = sampler.target_tokens(product, view, depths(ancestor_mask) + 1)
    matches = draft.tokens == jnp.take_along_axis(wanted, jnp.maximum(draft.parents, 0), axis=1)
    _, best = longest_accepted_path(matches & draft.valid, draft, ancestor_mask)
    return best, at_node(wanted, best)


def sampled(
    logits: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    view: SlotView,
) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """Apply a sampling rule with draws that occur in this round only; greedy rows have one-hot laws.

    Returns:
        As `coupled`.
    """
    rank = ranks(draft)
    seed, root = view.sampling.seed, view.lengths
    keys = sampler.keys(seed[:, None], Purpose.ACCEPT, root[:, None], depths(ancestor_mask), rank)
    ruling = _rule(view.accept, draft)(
        sampler.law(logits, view.sampling, view.implementation), draft, ancestor_mask, sampler.uniform(keys)
    )
    noise = sampler.gumbel(sampler.keys(seed, Purpose.RESIDUAL, root), logits.shape[-1])
    return ruling.best, jnp.argmax(jnp.log(ruling.last_law) + noise, axis=-1).astype(jnp.int32)


def _rule(name: str, draft: Draft) -> Callable[[Array, Draft, AncestorMask, Array], AcceptResult]:
    if draft.probs is None or name == "multi_candidate":
        return multi_candidate_accept
    return block_verification if name == "block" else without_replacement


def verdict_of(
    best: Int[Array, "batch"],
    bonus: Int[Array, "batch"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    view: SlotView,
    tree: Tree,
) -> Verdict:
    """Lay the path to the last accepted node out by depth and cut the tokens where the row ends.

    Args:
        best: the last accepted node.
        bonus: the target's token behind it.
    """
    path, accept_len = at_node(by_depth(ancestor_mask, tree.depth), best), at_node(depths(ancestor_mask), best)
    steps = jnp.arange(tree.depth + 1)
    drafted = jnp.take_along_axis(draft.tokens, jnp.maximum(jnp.roll(path, -1, axis=1), 0), axis=1)
    tokens = jnp.where(steps < accept_len[:, None], drafted, -1)
    tokens = jnp.where(steps == accept_len[:, None], bonus[:, None], tokens)
    return cut(
        Verdict(accept_len=accept_len, path=path, tokens=tokens, counts=accept_len + 1, ended=~view.active),
        view,
    )


def cut(verdict: Verdict, view: SlotView) -> Verdict:
    """End a row at its first stop id (kept) or when `remaining` is used up, and say how many tokens it emits."""
    stops = jnp.any(verdict.tokens[..., None] == view.sampling.stop_ids[:, None], axis=-1) & (verdict.tokens >= 0)
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, verdict.counts)
    counts = jnp.minimum(jnp.minimum(first, verdict.counts), view.remaining).astype(jnp.int32)
    emitted = jnp.arange(verdict.tokens.shape[1]) < counts[:, None]
    ended = jnp.any(stops & emitted, axis=1) | (counts >= view.remaining)
    return replace(
        verdict, tokens=jnp.where(emitted, verdict.tokens, -1), counts=jnp.where(view.active, counts, 0), ended=ended
    )
