"""The base class of the accept rules that compare probabilities, and the random numbers that these rules use."""

from __future__ import annotations

import abc
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.core.accept_rule import AcceptRule
from jspec.core.ancestors import depths
from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import AncestorMask, Draft, SlotView
from jspec.sampling import sampler
from jspec.sampling.sampler import Purpose
from jspec.verify.coupled import match_target_tokens
from jspec.verify.tree_walk import AcceptResult, at_node
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.shard import OwnColumns

AcceptFunction = Callable[[Array, Draft, AncestorMask, Array], AcceptResult]


class SampledRule(AcceptRule):
    """An accept rule that compares probabilities. In a batch with only greedy rows, it matches the target's argmax."""

    def reads_probabilities(self, *, is_sampled: bool) -> bool:
        return is_sampled

    def decide(
        self, logits: PartialSums, draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        if isinstance(logits, OwnColumns):  # then `reads_probabilities` is False for every row
            return match_target_tokens(logits, draft, ancestor_mask, view)

        def run(branch: SlotView) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
            if branch.all_greedy:
                return match_target_tokens(logits, draft, ancestor_mask, branch)
            return self.decide_sampled(reduce_partials(logits, jnp.float32), draft, ancestor_mask, branch)

        return sampler.by_temperature(view, run)

    @abc.abstractmethod
    def decide_sampled(
        self, logits: Float[Array, "batch nodes vocab"], draft: Draft, ancestor_mask: AncestorMask, view: SlotView
    ) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
        """Return what `decide` returns, for a batch with a sampled row; greedy rows have one-hot probabilities."""


def draw_and_accept(
    accept_function: AcceptFunction,
    logits: Float[Array, "batch nodes vocab"],
    draft: Draft,
    ancestor_mask: AncestorMask,
    view: SlotView,
) -> tuple[Int[Array, "batch"], Int[Array, "batch"]]:
    """Call an accept function with this round's uniforms, and draw the last token from the residual that it returns.

    The random keys contain the root's position, and a node's depth and place among the nodes of this depth. A root has
    a given position in one round only, so no key is used twice.

    Args:
        accept_function: function of target probabilities, draft, ancestor mask and uniforms.
        logits: the target's edited logits after every node.

    Returns:
        The last accepted node [batch], and the token after that node [batch].
    """
    seed, root, depth = view.sampling.seed, view.lengths, depths(ancestor_mask)
    index_in_level = jnp.sum(jnp.tril(depth[:, :, None] == depth[:, None], -1), axis=-1, dtype=jnp.int32)
    keys = sampler.keys(seed[:, None], Purpose.ACCEPT, root[:, None], depth, index_in_level)
    target_probs = sampler.processed_probs(logits, view.sampling, view.implementation)
    result = accept_function(target_probs, draft, ancestor_mask, sampler.uniform(keys))
    noise = sampler.gumbel(sampler.keys(seed, Purpose.RESIDUAL, root), logits.shape[-1])
    token = jnp.argmax(jnp.log(result.residual_probs) + noise, axis=-1).astype(jnp.int32)
    return result.last_node, no_token_if_nan(token, target_probs, result.last_node, ancestor_mask)


def no_token_if_nan(
    token: Int[Array, "batch"],
    probs: Float[Array, "batch nodes vocab"],
    last_node: Int[Array, "batch"],
    ancestor_mask: AncestorMask,
) -> Int[Array, "batch"]:
    """Replace the last token of each row by `NO_TOKEN` if NaN decided about any token of the row.

    Args:
        token: the token after the last accepted node.
        probs: processed probabilities of the token after each node; a row of them is all NaN or has none.
        last_node: the last accepted node.
    """
    on_path = at_node(jnp.broadcast_to(ancestor_mask, (len(token), *ancestor_mask.shape[1:])), last_node)
    return jnp.where(jnp.any(jnp.isnan(probs[..., 0]) & on_path, axis=-1), NO_TOKEN, token)
