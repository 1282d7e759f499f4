"""The decode step split in two, for grammars that only the host can follow: draft step, host masks, verify step.

Between the two launches the device waits: the draft goes to the host, the host computes which tokens may follow each
node, and the masks go back. Everything else equals the fused step of `jspec.step.decode`, so the output equals masked
decoding token by token. A bucket runs in two launches only if one of its requests has such a grammar; the masks of
its other rows allow every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jspec.core.bitmask import EVERYTHING, words_of
from jspec.core.records import Draft, SlotState, StepOutput
from jspec.step.decode import draft_stage, output_of_one, verify_and_commit
from jspec.step.program import Params, Program, view_of

Step = Callable[[Params, SlotState, Any], tuple[SlotState, StepOutput]]
# Takes tokens, parents and valid [nodes] of one row's draft as numpy arrays; returns masks [nodes, words] uint32.
DraftMasks = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def draft_step(
    program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]
) -> tuple[SlotState, Draft]:
    """Run the draft stage of a round.

    Args:
        state: donated.
        slots: slot of each bucket row; S for padding rows.
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
    """Run the stages of a round that follow the draft stage, with token masks from the host.

    Args:
        state: donated.
        draft: the result of `draft_step` for the same slots.
        masks: tokens that may follow each node, as bits (`jspec.core.bitmask`).
    """
    view = replace(view_of(state, slots, program), masks=masks)
    state, *results = verify_and_commit(program, params, state, view, draft)
    return state, output_of_one(results)


def split_step(draft: Any, verify: Any, mask_functions: Sequence[DraftMasks | None]) -> Step:
    """Combine the two compiled steps of a bucket into one call with the signature of the fused step.

    Args:
        draft: the compiled `draft_step`.
        verify: the compiled `verify_step`.
        mask_functions: functions that compute the masks of a row's nodes, for the first rows of the bucket; None: the
            masks of the row allow every token.
    """

    def step(params: Params, state: SlotState, slots: Array) -> tuple[SlotState, StepOutput]:
        state, drafted = draft(params, state, slots)
        nodes = jax.device_get((drafted.tokens, drafted.parents, drafted.valid))
        words = words_of(params.target.config.vocab_size)
        masks = np.full((*nodes[0].shape, words), EVERYTHING, np.uint32)
        for row, mask_function in enumerate(mask_functions):
            if mask_function is not None:
                masks[row] = mask_function(*(field[row] for field in nodes))
        return verify(params, state, slots, drafted, jax.device_put(masks))

    return step


def masked_prefill(prefill: Any, first_mask: Callable[[], np.ndarray]) -> Step:
    """Wrap a compiled masked prefill into a call with the signature of the usual prefill.

    Args:
        prefill: compiled `jspec.step.prefill.prefill_step` with masks.
        first_mask: returns the mask of the output's first token, [1, words] uint32.
    """
    return lambda params, state, packed: prefill(params, state, packed, jax.device_put(first_mask()[None]))


def mask_shape(rows: int, nodes: int, vocab_size: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a bucket's masks."""
    return jax.ShapeDtypeStruct((rows, nodes, words_of(vocab_size)), jnp.uint32)
