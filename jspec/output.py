"""From reports to what the user sees: tokens, text, counters, rounds. Host only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.records import Report, Trace
from jspec.requests import Chunk, Completion, Request, Round
from jspec.tokenizer import IncrementalDetokenizer, Tokenizer


class OutputText:
    """The text of one request, token by token; nothing without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, list(prompt_ids))
        self._taken = 0
        self.pieces: list[str] = []  # one a token; what is held back comes with a later one
        self.tail = ""

    def push(self, request: Request) -> None:
        """Take the request's new tokens; a token that ends it has no text."""
        for token in request.token_ids[self._taken :]:
            is_end = token in request.stop_ids
            self.pieces.append("" if is_end or self._detokenizer is None else self._detokenizer.push([token]))
        self._taken = len(request.token_ids)

    def finish(self) -> None:
        """Let go of what was held back."""
        if self._detokenizer is not None:
            self.tail = self._detokenizer.finish()

    @property
    def text(self) -> str | None:
        return None if self._detokenizer is None else "".join(self.pieces) + self.tail

    def chunk(self, request: Request, start: int) -> Chunk:
        """What is new from token ``start`` on; also while another thread steps, which adds a token's piece last."""
        reason = request.finish_reason  # behind it nothing comes
        end = len(self.pieces) if reason is None else len(request.token_ids)
        text = None
        if self._detokenizer is not None:
            text = "".join(self.pieces[start:end]) + (self.tail if reason else "")
        return Chunk(text, request.token_ids[start:end], request.from_draft[start:end], reason, request.index)


def take_report(
    request: Request,
    report: np.ndarray,
    trace: Trace | None,
    row: int,
    is_round: bool,
    eos_ids: Sequence[int],
) -> str | None:
    """Add one row of a step's result to its request.

    Args:
        report: [rounds, columns] of this row.
        trace: arrays of the whole step, in numpy.
        row: the row, for the trace.
        is_round: False for the first token, which belongs to no round.

    Returns:
        Why the request ended, or None.
    """
    for index, fields in enumerate(Report.rounds(report)):
        count, accept_len = fields.counts, fields.accept_len
        if count == 0:
            continue  # ended in an earlier round of this dispatch
        emitted = fields.tokens[:count]
        request.whole_rows = len(request.prompt_token_ids) + len(request.token_ids)  # a round writes up to its root
        request.token_ids += emitted
        request.from_draft += [position < accept_len for position in range(count)]
        request.metrics.num_tokens += count
        request.metrics.num_first_tokens += not is_round
        if is_round:
            emitted_drafts = min(count, accept_len)
            request.metrics.count_round(
                depth=fields.depth, drafted=fields.num_drafted, accept_len=accept_len, emitted_drafts=emitted_drafts
            )
            if trace is not None and request.trace:
                request.rounds.append(_round(trace, index, row, accept_len, emitted))
        if fields.ended:
            return _finish_reason(request, eos_ids)
    return None


def _finish_reason(request: Request, eos_ids: Sequence[int]) -> str:
    last = request.token_ids[-1]
    if last not in request.stop_ids:
        return "length"
    request.stop_reason = last
    return "eos" if last in eos_ids and not request.params.ignore_eos else "stop"


def _round(trace: Trace, index: int, row: int, accept_len: int, emitted: list[int]) -> Round:
    return Round(
        tokens=np.asarray(trace.tokens[index, row]),
        parents=np.asarray(trace.parents[index, row]),
        scores=np.asarray(trace.scores[index, row]),
        path=[int(node) for node in trace.path[index, row, : accept_len + 1]],
        accept_len=accept_len,
        emitted=emitted,
    )


def completion_of(request: Request, output: OutputText) -> Completion:
    """The request as its user gets it."""
    assert request.finish_reason is not None
    return Completion(
        text=output.text,
        token_ids=list(request.token_ids),
        from_draft=list(request.from_draft),
        prompt_token_ids=list(request.prompt_token_ids),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        error=request.error,
        metrics=request.metrics,
        rounds=list(request.rounds) if request.trace else None,
        pieces=list(output.pieces) if output.text is not None else None,
    )
