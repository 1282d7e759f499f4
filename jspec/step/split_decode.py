"""The decode step as two programs: one drafts, the other verifies the draft.

In all else the two programs equal the single program of `jspec.step.decode`, so they emit the same tokens. There are
two uses:

- Grammars whose token masks only the host can compute. The draft goes to the host, the host computes which tokens may
  follow each node, and the masks go back to the device. A batch runs as two programs only if one of its requests has
  such a grammar. The masks of all other rows allow every token.
- A draft model on other devices than the target (`jspec.step.side`). The draft goes to the target's devices; its
  verdict goes back, where `commit_step` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jspec.core.bitmask import EVERYTHING, words_of
from jspec.core.records import Draft, SlotState, StepOutput, Verdict
from jspec.step.decode import draft_commit_stage, draft_stage, output_of_one, round_view, verify_and_commit
from jspec.step.program import Params, Program, view_of

FirstMask = Callable[[], np.ndarray]  # returns the mask of an output's first token, [1, words] uint32
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
    draft, state = draft_stage(program, params, state, round_view(program, params, state, slots))
    if draft.probs is None:  # the map is of no use then, and may have to cross to other devices
        draft = replace(draft, vocab_map=None)
    return state, draft


def verify_step(
    program: Program,
    params: Params,
    state: SlotState,
    slots: Int[Array, "batch"],
    draft: Draft,
    masks: UInt32[Array, "batch nodes words"] | None = None,
) -> tuple[SlotState, StepOutput]:
    """Run the stages of a round that follow the draft stage.

    Args:
        state: the slot state; its buffers are donated.
        draft: the draft that `draft_step` returned for ``slots``.
        masks: tokens that may follow each node, one bit per token (`jspec.core.bitmask`), if the host computes them.
    """
    view = replace(round_view(program, params, state, slots), masks=masks)
    draft = replace(draft, tokens=draft.tokens.at[:, 0].set(view.root))  # other devices' state changes no output
    state, verdict, results = verify_and_commit(program, params, state, view, draft)
    return state, replace(output_of_one(program, results), path=verdict.path[None])


def commit_step(
    program: Program,
    params: Params,
    state: SlotState,
    slots: Int[Array, "batch"],
    draft: Draft,
    report: Int[Array, "1 batch columns"],
    path: Int[Array, "1 batch depth1"],
) -> SlotState:
    """Apply the verdict of a round on devices that have only the draft model.

    Args:
        state: the slot state; its buffers are donated.
        draft: the draft that `draft_step` returned for ``slots``.
        report, path: those of the output of `verify_step`.
    """
    verdict = Verdict.read(report[0], path[0])
    return draft_commit_stage(program, params, state, view_of(state, slots, program), draft, verdict)


def draft_masks(nodes: Sequence[np.ndarray], functions: Sequence[DraftMasks | None], vocab_size: int) -> np.ndarray:
    """Compute the masks that `verify_step` takes, [batch, nodes, words] uint32.

    Args:
        nodes: the fields tokens, parents and valid of the draft, [batch, nodes] each.
        functions: for each of the first batch rows, the function that computes its masks. The masks of later rows, and
            of rows with None, allow every token.
        vocab_size: number of tokens of the vocabulary.
    """
    rows, count = nodes[0].shape
    masks = _every_token(rows, count, vocab_size)
    for row, function in enumerate(functions):
        if function is not None:
            masks[row] = function(*(field[row] for field in nodes))
    return masks


def first_masks(pieces: int, functions: Sequence[FirstMask | None], vocab_size: int) -> np.ndarray:
    """Compute on the host the masks that `jspec.step.prefill.prefill_step` takes, [pieces, 1, words] uint32.

    Args:
        pieces: number of pieces of the compiled prefill.
        functions: for each of the first pieces, the function that computes its mask. The masks of later pieces, and of
            pieces with None, allow every token.
        vocab_size: number of tokens of the vocabulary.
    """
    masks = _every_token(pieces, 1, vocab_size)
    for row, function in enumerate(functions):
        if function is not None:
            masks[row] = function()
    return masks


def _every_token(rows: int, nodes: int, vocab_size: int) -> np.ndarray:
    return np.full((rows, nodes, words_of(vocab_size)), EVERYTHING, np.uint32)


def mask_shape(rows: int, nodes: int, vocab_size: int) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a batch's token masks, with one mask for each node of each row."""
    return jax.ShapeDtypeStruct((rows, nodes, words_of(vocab_size)), jnp.uint32)
