"""Accept rules: what the target makes of a drafted tree.

Every rule yields the target's processed distribution, whatever the draft (lossless), and is fixed before the round.

"coupled" (sample and match): the target's token at every node is drawn with noise that depends on seed and position
alone, and the walk follows the child that equals it. So the tokens are those of plain decoding with that seed, for
every drafter and tree. Greedy decoding is its temperature 0.

"rejection": a draft drawn from its law q is accepted with probability min(1, p/q); the first rejected one is replaced
by a draw from the residual max(p - q, 0), normalised (arXiv:2211.17192, theorem 1; arXiv:2302.01318, theorem 1).
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec import sampling
from jspec.records import Draft, SlotView, Verdict
from jspec.sampling import Purpose
from jspec.tree import Tree
from pallas_kernels.paged_attention import ancestor_bits


def ancestors(parents: Int[Array, "batch nodes"]) -> Bool[Array, "batch nodes nodes"]:
    """Who stands on the way from the root to each node: ``[b, n, m]`` is True when m is n or an ancestor of n.

    Args:
        parents: -1 for the root and for padding nodes (which have themselves alone), else ``parents[i] < i``.
    """
    node = jnp.arange(parents.shape[1], dtype=jnp.uint32)
    words = jnp.take(ancestor_bits(parents), node // 32, axis=-1)
    return (words >> (node % 32)) & 1 == 1


def depths(reach: Bool[Array, "batch nodes nodes"]) -> Int[Array, "batch nodes"]:
    """Edges between the root and each node; 0 for the root and for padding nodes."""
    return jnp.sum(reach, axis=-1, dtype=jnp.int32) - 1


def accept(
    logits: Float[Array, "batch nodes vocab"],
    draft: Draft,
    reach: Bool[Array, "batch nodes nodes"],
    view: SlotView,
    tree: Tree,
) -> Verdict:
    """Decide which draft tokens stand, by the program's rule, and cut the result where the row ends.

    Args:
        logits: the target's raw logits at every node, float32.
        reach: ancestors of each node (`jspec.tree.ancestors`).
    """
    rule = coupled if view.accept == "coupled" else rejection
    accepted, best, bonus = sampling.by_temperature(view, lambda branch: rule(logits, draft, reach, branch))
    return _verdict(accepted, best, bonus, draft, reach, view, tree)


def coupled(
    logits: Float[Array, "batch nodes vocab"],
    draft: Draft,
    reach: Bool[Array, "batch nodes nodes"],
    view: SlotView,
) -> tuple[Bool[Array, "batch nodes"], Int[Array, "batch"], Int[Array, "batch"]]:
    """Sample and match: a node stands if it and all its ancestors are the tokens the target draws there.

    Returns:
        Nodes that stand, the deepest of them, and the target's token behind it.
    """
    depth = depths(reach)
    drawn = sampling.target_tokens(logits, view, view.lengths[:, None] + depth + 1)
    wanted = jnp.take_along_axis(drawn, jnp.maximum(draft.parents, 0), axis=1)
    matches = draft.valid & (draft.tokens == wanted)
    accepted, best = walk(matches, draft, reach)
    return accepted, best, jnp.take_along_axis(drawn, best[:, None], axis=1)[:, 0]


def walk(
    matches: Bool[Array, "batch nodes"], draft: Draft, reach: Bool[Array, "batch nodes nodes"]
) -> tuple[Bool[Array, "batch nodes"], Int[Array, "batch"]]:
    """Keep the nodes whose whole way from the root matches; the root stands always, a padding node never."""
    is_root = jnp.arange(matches.shape[1]) == 0
    matches = (matches & (draft.parents >= 0)) | is_root
    accepted = jnp.all(matches[:, None] | ~reach, axis=-1)
    best = jnp.argmax(jnp.where(accepted, depths(reach), -1), axis=-1).astype(jnp.int32)
    return accepted, best


def rejection(
    logits: Float[Array, "batch nodes vocab"],
    draft: Draft,
    reach: Bool[Array, "batch nodes nodes"],
    view: SlotView,
) -> tuple[Bool[Array, "batch nodes"], Int[Array, "batch"], Int[Array, "batch"]]:
    """Rejection sampling along a chain. A draft without q is a point mass: accepted with probability p.

    Without sampled rows it is decided by `coupled`, which is the same thing at temperature 0.

    Returns:
        As `coupled`.
    """
    if view.all_greedy:
        return coupled(logits, draft, reach, view)
    target_law = sampling.law(logits, view.sampling)
    depth = jnp.arange(1, draft.tokens.shape[1])
    accept_keys = sampling.keys(view.sampling.seed[:, None], Purpose.ACCEPT, view.lengths[:, None], depth)
    bonus_key = sampling.keys(view.sampling.seed, Purpose.RESIDUAL, view.lengths)
    draws = sampling.uniform(accept_keys), sampling.gumbel(bonus_key, logits.shape[-1])
    return rejection_chain(target_law, draft, draws)


def rejection_chain(
    target_law: Float[Array, "batch nodes vocab"],
    draft: Draft,
    draws: tuple[Float[Array, "batch depth"], Float[Array, "batch vocab"]],
) -> tuple[Bool[Array, "batch nodes"], Int[Array, "batch"], Int[Array, "batch"]]:
    """The rule itself, with its draws given: uniforms for each draft token, gumbel noise for the last token."""
    uniforms, noise = draws
    stands = uniforms < accept_probs(target_law, draft)  # strictly: a uniform may be exactly 0
    stands = stands & draft.valid[:, 1:]
    run = jnp.cumprod(stands.astype(jnp.int32), axis=1)
    accepted = jnp.concatenate([jnp.ones_like(run[:, :1]), run], axis=1).astype(bool)
    best = jnp.sum(run, axis=1)
    final = final_law(target_law, draft, best)
    return accepted, best, jnp.argmax(jnp.log(final) + noise, axis=-1).astype(jnp.int32)


def accept_probs(target_law: Float[Array, "batch nodes vocab"], draft: Draft) -> Float[Array, "batch depth"]:
    """``p(x) / q(x)`` of every draft token x, which may exceed 1; q is 1 where the draft had no law."""
    tokens = draft.tokens[:, 1:, None]
    p = jnp.take_along_axis(target_law[:, :-1], tokens, axis=-1)[..., 0]
    if draft.probs is None:
        return p
    if draft.vocab_map is None:
        q = jnp.take_along_axis(draft.probs[:, :-1], tokens, axis=-1)[..., 0]
    else:
        q = jnp.sum(jnp.where(draft.vocab_map == tokens, draft.probs[:, :-1], 0.0), axis=-1)
    return p / jnp.maximum(q, jnp.finfo(q.dtype).tiny)


def final_law(
    target_law: Float[Array, "batch nodes vocab"], draft: Draft, best: Int[Array, "batch"]
) -> Float[Array, "batch vocab"]:
    """The law of the token behind the last accepted node: the residual after a rejection, else the target's own.

    Where no residual mass is left (p equals q up to rounding) it is the target's law.
    """
    nodes, vocab = target_law.shape[1:]
    p = jnp.take_along_axis(target_law, best[:, None, None], axis=1)[:, 0]
    following = jnp.minimum(best + 1, nodes - 1)[:, None]
    was_tried = (best < nodes - 1) & jnp.take_along_axis(draft.valid, following, axis=1)[:, 0]
    if draft.probs is None:
        q = jax.nn.one_hot(jnp.take_along_axis(draft.tokens, following, axis=1)[:, 0], vocab, dtype=p.dtype)
    else:
        own = jnp.take_along_axis(draft.probs, best[:, None, None], axis=1)[:, 0]
        q = spread(own, draft.vocab_map, vocab)
    residual = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(residual, axis=-1, keepdims=True)
    use = was_tried[:, None] & (mass > 0)
    return jnp.where(use, residual / jnp.where(mass > 0, mass, 1.0), p)


def spread(
    probs: Float[Array, "... draft_vocab"], vocab_map: Int[Array, "draft_vocab"] | None, vocab: int
) -> Float[Array, "... vocab"]:
    """A law over the draft vocabulary as one over the target's; ids outside have probability 0."""
    if vocab_map is None:
        return probs
    return jnp.zeros((*probs.shape[:-1], vocab), probs.dtype).at[..., vocab_map].set(probs)


def _verdict(
    accepted: Bool[Array, "batch nodes"],
    best: Int[Array, "batch"],
    bonus: Int[Array, "batch"],
    draft: Draft,
    reach: Bool[Array, "batch nodes nodes"],
    view: SlotView,
    tree: Tree,
) -> Verdict:
    """Lay the path to the deepest accepted node out by depth and cut the tokens where the row ends."""
    on_path = jnp.take_along_axis(reach, best[:, None, None], axis=1)[:, 0]
    accept_len = jnp.sum(on_path, axis=-1, dtype=jnp.int32) - 1
    steps = jnp.arange(tree.depth + 1)
    at_depth = on_path[:, None] & (depths(reach)[:, None] == steps[:, None])
    node = jnp.argmax(at_depth, axis=-1).astype(jnp.int32)
    path = jnp.where(steps <= accept_len[:, None], node, -1)
    drafted = jnp.take_along_axis(draft.tokens, jnp.roll(node, -1, axis=1), axis=1)
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
