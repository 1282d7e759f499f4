"""Counts the tokens of a request's reasoning, and forces the text that ends it when a budget is used up.

Reasoning lies between two markers of one token each. Its state is a number (`jspec.core.thinking`), mostly the count of
its tokens so far. The state after a draft node follows from the slot's state and the tokens on the node's path alone,
so a budget is exact in every tree, under every accept rule.

At a node whose count is the budget plus j, only token j of the forced text is allowed. The last token of this text is
the end marker, so the reasoning ends by itself. What is forced overrides bans and grammars. A grammar that waits for
the answer stays in its start state while reasoning goes on.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import Controls
from jspec.core.thinking import ENDED, WAITS


def follow(
    row: Controls, count: Int[Array, "batch *more"], token: Int[Array, "batch *more"]
) -> Int[Array, "batch *more"]:
    """Return the state of the reasoning after a token in each state; a negative token leaves the state unchanged."""
    start, end = (marker.reshape(-1, *(1,) * (count.ndim - 1)) for marker in (row.think_start, row.think_end))
    ended = jnp.where(count == WAITS, WAITS, ENDED)  # of the states that are no counts, only this one lasts
    begun = jnp.where((token == start) & (count != ENDED), 0, ended)
    moved = jnp.where(count < 0, begun, jnp.where(token == end, ENDED, count + 1))
    return jnp.where(token < 0, count, moved)


def states(
    row: Controls, path: Int[Array, "batch nodes depth"]
) -> tuple[Int[Array, "batch nodes"], Bool[Array, "batch nodes depth"]]:
    """Return the state of the reasoning after each path of tokens from the root.

    Returns:
        The states, and which tokens of the paths belong to reasoning, its markers included.
    """
    count = jnp.broadcast_to(row.thought[:, None], path.shape[:2])
    is_thought = []
    for index in range(path.shape[-1]):
        before, count = count, follow(row, count, path[..., index])
        is_thought.append((before >= 0) | (count >= 0))
    return count, jnp.stack(is_thought, axis=-1) if is_thought else path == NO_TOKEN


def force(
    logits: Float[Array, "batch nodes vocab"], row: Controls, path: Int[Array, "batch nodes depth"]
) -> Float[Array, "batch nodes vocab"]:
    """Allow only the next token of the forced text at the nodes whose count has reached the budget.

    Args:
        row: controls of each row.
        path: token ids on the path to each node (`jspec.sampling.penalties.node_paths`).
    """
    count, _ = states(row, path)
    place = count - row.thinking_budget[:, None]
    is_forced = row.used[:, None] & (row.thinking_budget >= 0)[:, None] & (count >= 0)
    is_forced &= (place >= 0) & (place < row.forced_size[:, None])
    token = jnp.take_along_axis(row.forced, jnp.clip(place, 0, row.forced.shape[1] - 1), axis=1)
    is_token = jnp.arange(logits.shape[-1]) == token[..., None]
    allowed = jnp.where(logits == -jnp.inf, 0.0, logits)  # the token may be banned; NaN stays, for the host to see
    return jnp.where(is_forced[..., None], jnp.where(is_token, allowed, -jnp.inf), logits)
