"""Counts the tokens of a request's reasoning, and forces the text that ends it when a budget is used up.

Reasoning lies between two markers of one token each. Its state is a number (`jspec.core.thinking`), mostly the count of
its tokens so far. The state after a draft node follows from the slot's state and the tokens on the node's path alone,
so a budget is exact in every tree, under every accept rule.

At a node whose count is the budget plus j, only token j of the forced text is allowed. The last token of this text is
the end marker, so the reasoning ends by itself. What is forced overrides bans and grammars. A grammar that waits for
the answer stays in its start state while reasoning goes on.
"""

from __future__ import annotations

from functools import reduce

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import Controls
from jspec.core.thinking import ENDED, WAITS, WAITS_ONCE

NEVER = np.int32(2**30)  # a place that no path has


def states(row: Controls, path: Int[Array, "batch nodes depth"]) -> Int[Array, "batch nodes"]:
    """Return the state of the reasoning after each path of tokens from the root."""
    begin = _begin(row, path)
    tokens = [path[..., index] for index in range(path.shape[-1])]
    is_end = [(index > begin) & (token == row.think_markers[:, 1:]) for index, token in enumerate(tokens)]
    has_ended = reduce(jnp.logical_or, is_end, jnp.zeros(begin.shape, bool))
    size = sum((token != NO_TOKEN).astype(jnp.int32) for token in tokens)
    thought = row.thought[:, None]
    outside = jnp.where((thought == WAITS_ONCE) & (size > 0), ENDED, thought)
    return jnp.where(begin == NEVER, outside, jnp.where(has_ended, ENDED, size - 1 - begin))


def _begin(row: Controls, path: Int[Array, "batch nodes depth"]) -> Int[Array, "batch nodes"]:
    """Return the place of the start marker on each path; before the root it is negative; `NEVER`: there is none."""
    begin = jnp.full(path.shape[:2], NEVER)
    for index in reversed(range(path.shape[-1])):
        begin = jnp.where(path[..., index] == row.think_markers[:, :1], index, begin)
    thought = row.thought[:, None]
    may_begin = (thought == WAITS) | ((thought == WAITS_ONCE) & (begin == 0))
    return jnp.where(thought >= 0, -1 - thought, jnp.where(may_begin, begin, NEVER))


def forced_tokens(row: Controls, path: Int[Array, "batch nodes depth"]) -> Int[Array, "batch nodes"]:
    """Return the token of the forced text that must follow each node; `NO_TOKEN`: any may.

    Args:
        row: controls of each row.
        path: token ids on the path to each node (`jspec.sampling.penalties.node_paths`).
    """
    count = states(row, path)
    place = count - row.thinking_budget[:, None]
    is_forced = row.used[:, None] & (row.thinking_budget >= 0)[:, None] & (count >= 0)
    is_forced &= (place >= 0) & (place < row.forced_size[:, None])
    token = jnp.take_along_axis(row.forced, jnp.clip(place, 0, row.forced.shape[1] - 1), axis=1)
    return jnp.where(is_forced, token, NO_TOKEN)


def force(
    logits: Float[Array, "batch nodes vocab"], forced: Int[Array, "batch nodes"]
) -> Float[Array, "batch nodes vocab"]:
    """Allow only the token that each node forces (`forced_tokens`), if the node forces one."""
    is_token = jnp.arange(logits.shape[-1]) == forced[..., None]
    allowed = jnp.where(logits == -jnp.inf, 0.0, logits)  # the token may be banned; NaN stays, for the host to see
    return jnp.where(forced[..., None] >= 0, jnp.where(is_token, allowed, -jnp.inf), logits)
