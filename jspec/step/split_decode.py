"""The decode step as two programs, for grammars whose token masks only the host can compute.

The first program drafts. Then the draft goes to the host, the host computes which tokens may follow each node, and the
masks go back to the device. The second program verifies the draft. In all else the two programs equal the single
program of `jspec.step.decode`, so the output equals masked decoding token by token. A batch runs as two programs only
if one of its requests has such a grammar. The masks of all other rows allow every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jspec.core.bitmask import EVERYTHING, words_of
from jspec.core.records import Draft, SlotState, StepOutput
from jspec.step.decode import draft_stage, output_of_one, verify_and_commit
from jspec.step.program import Params, Program, view_of

FirstMask = Callable[[], np.ndarray]
# Takes the fields tokens, parents and valid of one row's draft, [nodes] each; returns masks [nodes, words] uint32.
DraftMasks = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def draft_step(
    program: Program, params: Params, state: SlotState, slots: Int[Array, "batch"]
) -> tuple[SlotState, Draft]:
    """Run the draft stage of a round.

    Args:
        state: the slot state; its buffers are donated.
        slots: slot of each batch row; a padding row has the number of slots.
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
        state: the slot state; its buffers are donated.
        draft: the draft that `draft_step` returned for ``slots``.
        masks: tokens that may follow each node, one bit per token (`jspec.core.bitmask`).
    """
    view = replace(view_of(state, slots, program), masks=masks)
    state, *results = verify_and_commit(program, params, state, view, draft)
    return state, output_of_one(results)


def draft_masks(
    draft: Sequence[np.ndarray], mask_functions: Sequence[DraftMasks | None], vocab_size: int
) -> np.ndarray:
    """Compute the masks that `verify_step` takes.

    Args:
        draft: the fields tokens, parents and valid of the draft that `draft_step` returned, [batch, nodes] each.
        mask_functions: for each of the first batch rows, the function that computes its masks. The masks of later rows,
            and of rows with None, allow every token.
    """
    masks = np.full((*draft[0].shape, words_of(vocab_size)), EVERYTHING, np.uint32)
    for row, mask_function in enumerate(mask_functions):
        if mask_function is not None:
            masks[row] = mask_function(*(field[row] for field in draft))
    return masks


def prompt_masks(pieces: int, mask_functions: Sequence[FirstMask | None], vocab_size: int) -> np.ndarray:
    """Compute the masks that a masked prefill takes.

    Args:
        pieces: number of pieces of the program.
        mask_functions: for each of the first pieces, a function that returns the mask of the output's first token,
            [1, words] uint32. The masks of later pieces, and of pieces with None, allow every token.
    """
    masks = np.full((pieces, 1, words_of(vocab_size)), EVERYTHING, np.uint32)
    for row, mask_function in enumerate(mask_functions):
        if mask_function is not None:
            masks[row] = mask_function()
    return masks


def mask_shape(rows: int, nodes: int, vocab_size: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a batch's token masks, with one mask for each node of each row."""
    return jax.ShapeDtypeStruct((rows, nodes, words_of(vocab_size)), jnp.uint32)
