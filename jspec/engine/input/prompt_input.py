"""Packs requests into the arrays that prefills and `write_pending_rows_step` take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.core.prompt_blocks import MAX_STOP_IDS
from jspec.core.records import PromptPiece
from jspec.engine.input.input_processor import draft_cap
from jspec.engine.request.request import Request
from jspec.engine.schedule.scheduler import Piece


def pack_piece(piece: Piece, *, width: int, depth: int, vocab_size: int) -> PromptPiece:
    """Return a piece of a prompt as the record that `jspec.step.prefill.prefill_step` reads.

    Args:
        width: number of columns of the page table.
        depth: depth of the drafter's tree.
    """
    request, params = piece.request, piece.request.params
    assert request.state.slot is not None
    end = piece.start + piece.count
    page_row = np.zeros(width, np.int32)
    page_row[: len(piece.pages)] = piece.pages
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    return PromptPiece(
        slot=np.int32(request.state.slot),
        start=np.int32(piece.start),
        count=np.int32(piece.count),
        last=np.int32(piece.is_last),
        write=np.int32(piece.is_written),
        root=np.int32(next(iter(request.tokens_between(end, end + 1)), -1)),
        remaining=np.int32(request.max_new_tokens - max(len(request.token_ids) - 1, 0)),
        top_k=np.int32(max(min(params.top_k, vocab_size), 0)),
        draft_cap=np.int32(draft_cap(params, depth)),
        controlled=np.int32(bool(params.controls_used)),
        temperature=np.float32(params.temperature),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        seed=np.array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32),
        stop_ids=stop_ids,
        page_row=page_row,
    )


def pack_pending_rows(request: Request, pages: Sequence[int], *, width: int) -> np.ndarray:
    """Pack a request that has ended into the array that `jspec.step.prefill.write_pending_rows_step` takes.

    Args:
        pages: pages of the request, in the order of their rows.
        width: number of columns of the page table.
    """
    padding = [0] * (width - len(pages))
    return np.array([request.state.slot, request.token_ids[-1], request.rows_committed, *pages, *padding], np.int32)
