"""Packs requests into the arrays that prefills and `write_pending_rows_step` take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.core.prefill_input import PromptPiece
from jspec.core.sampling import Sampling
from jspec.engine.input.input_processor import draft_cap
from jspec.engine.request.request import Request
from jspec.engine.schedule.scheduler import Piece


def pack_piece(piece: Piece, *, width: int, depth: int, vocab_size: int, adapter: int = 0) -> PromptPiece:
    """Return a piece of a prompt as the record that `jspec.step.prefill.prefill_step` reads.

    Args:
        width: number of columns of the page table.
        depth: depth of the drafter's tree.
        adapter: table of the request's adapter, counted from 1; 0: none.
    """
    request, params = piece.request, piece.request.params
    assert request.state.slot is not None
    end = piece.start + piece.count
    page_row = np.zeros(width, np.int32)
    page_row[: len(piece.pages)] = piece.pages
    return PromptPiece(
        slot=np.int32(request.state.slot),
        start=np.int32(piece.start),
        count=np.int32(piece.count),
        last=np.int32(piece.is_last),
        write=np.int32(piece.is_written),
        root=np.int32(next(iter(request.tokens_between(end, end + 1)), -1)),
        remaining=np.int32(request.max_new_tokens - max(len(request.token_ids) - 1, 0)),
        controlled=np.int32(bool(params.controls_used)),
        sampling=sampling_of(request, depth=depth, vocab_size=vocab_size, adapter=adapter),
        page_row=page_row,
    )


def sampling_of(request: Request, *, depth: int, vocab_size: int, adapter: int = 0) -> Sampling:
    """Return the sampling parameters that a request brings to the device, as one row of the host."""
    params = request.params
    return Sampling.row(
        temperature=params.temperature,
        top_k=max(min(params.top_k, vocab_size), 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seed=(request.seed >> 32, request.seed & 0xFFFFFFFF),
        stop_ids=request.stop_ids,
        draft_cap=draft_cap(params, depth),
        adapter=adapter,
    )


def pack_pending_rows(request: Request, pages: Sequence[int], *, width: int) -> np.ndarray:
    """Pack a request that has ended into the array that `jspec.step.prefill.write_pending_rows_step` takes.

    Args:
        pages: pages of the request, in the order of their rows.
        width: number of columns of the page table.
    """
    padding = [0] * (width - len(pages))
    return np.array([request.state.slot, request.token_ids[-1], request.rows_committed, *pages, *padding], np.int32)
