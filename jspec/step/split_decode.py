"""The round of `jspec.step` cut in two, for grammars that only the host can follow: draft; masks; verify.

Between the launches the device waits: the draft goes to the host, which finds what may follow each of its nodes
(`jspec.engine.grammar.cfg_matcher`), and the masks go back. All else is the fused round's, so tokens are those of
masking one by one. Only
buckets that hold a request with such a grammar run this way; the masks of the other rows leave out nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jspec.core.records import Draft, SlotState, StepOutput
from jspec.engine.grammar.cfg_matcher import EVERYTHING, Matcher, words_of
from jspec.step.decode import draft_stage, output_of_one, verify_and_commit
from jspec.step.program import Params, Program, view_of

Step = Callable[[Params, SlotState, Any], tuple[SlotState, StepOutput]]


def draft_step(
    program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]
) -> tuple[SlotState, Draft]:
    """A round up to its draft.

    Args:
        state: donated.
        slots: slot of each row of the bucket; S for padding rows.
    """
    draft, draft_state = draft_stage(program, params, state, view_of(state, slots, program))
    return replace(state, draft=draft_state), draft


def verify_step(
    program: Program,
    params: Params,
    state: SlotState,
    slots: Int[Array, "batch"],
    draft: Draft,
    masks: UInt32[Array, "batch nodes words"],
) -> tuple[SlotState, StepOutput]:
    """The rest of the round.

    Args:
        state: donated.
        draft: of `draft_step` with the same slots.
        masks: tokens that may follow each node, as bits.
    """
    view = replace(view_of(state, slots, program), masks=masks)
    state, *results = verify_and_commit(program, params, state, view, draft)
    return state, output_of_one(results)


def split_step(draft: Any, verify: Any, matchers: Sequence[Matcher | None]) -> Step:
    """A round as one call, like the fused program's.

    Args:
        draft, verify: the compiled steps of a bucket.
        matchers: of the bucket's first rows, None for those whose grammar, if they have one, is a table.
    """

    def step(params: Params, state: SlotState, slots: Array) -> tuple[SlotState, StepOutput]:
        state, drafted = draft(params, state, slots)
        nodes = jax.device_get((drafted.tokens, drafted.parents, drafted.valid))
        words = words_of(params.target.config.vocab_size)
        masks = np.full((*nodes[0].shape, words), EVERYTHING, np.uint32)
        for row, matcher in enumerate(matchers):
            if matcher is not None:
                masks[row] = matcher.masks(*(field[row] for field in nodes))
        return verify(params, state, slots, drafted, jax.device_put(masks))

    return step


def first_token(prefill: Any, matcher: Matcher) -> Step:
    """The last chunk of a prompt as one call, like the usual program's."""
    return lambda params, state, packed: prefill(params, state, packed, jax.device_put(matcher.first()[None]))


def mask_shape(rows: int, nodes: int, vocab_size: int) -> jax.ShapeDtypeStruct:
    """Of the masks of a bucket."""
    return jax.ShapeDtypeStruct((rows, nodes, words_of(vocab_size)), jnp.uint32)
