"""From reports to what the user sees: tokens, text, counters, rounds. Host only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jspec.core.records import LogProbs, StepOutput, StepResult, Trace
from jspec.engine.request import Chunk, Completion, Request, Round
from jspec.engine.stop_strings import StopStringMatcher
from jspec.engine.token_logprobs import TokenLogprob, token_logprobs
from jspec.engine.tokenizer import IncrementalDetokenizer, Tokenizer, front_ids


class OutputState:
    """The text of one request, token by token; nothing without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        prompt = list(request.prompt_token_ids)
        if tokenizer is not None and request.params.grammar_field is not None:
            is_seen = not tokenizer.hidden_ids.issuperset(prompt)
            prompt = prompt if is_seen else front_ids(tokenizer)  # else a first blank is lost, which the grammar counts
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt)
        self._stops = StopStringMatcher(request.params.stop)
        self._stop_ids, self._min_tokens = request.stop_ids, request.params.min_tokens
        self.pieces: list[str] = []  # one a token; what is held back comes with a later one
        self.tail = ""

    @property
    def stop(self) -> str | None:
        """The stop string that the text was cut before."""
        return self._stops.found

    def read(self, tokens: Sequence[int]) -> list[str]:
        """The pieces of new tokens, to be added to ``pieces``; a token that ends the request has no text.

        With the token that completes a stop string they end.
        """
        if self._detokenizer is None and not self._stops:
            return [""] * len(tokens)
        pieces: list[str] = []
        for count, token in enumerate(tokens, len(self.pieces) + 1):
            is_end = token in self._stop_ids
            text = "" if is_end or self._detokenizer is None else self._detokenizer.push([token])
            pieces.append(self._stops.push(text, may_end=count > self._min_tokens))
            if self.stop is not None:
                break
        return pieces

    def finish(self) -> None:
        """Let go of what was held back, unless there is a stop string in it."""
        if self._detokenizer is not None:
            text = self._stops.push(self._detokenizer.finish(), may_end=len(self.pieces) > self._min_tokens)
            self.tail = text + self._stops.finish()

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
        return Chunk(
            text,
            request.token_ids[start:end],
            request.from_draft[start:end],
            reason,
            request.index,
            request.logprobs[start:end] if request.params.logprobs is not None else None,
            _prompt_logprobs(request) if start == 0 and request.index == 0 else None,
        )


def process_step_output(
    request: Request,
    text: OutputState,
    output: StepOutput,
    row: int,
    is_round: bool,
    eos_ids: Sequence[int],
) -> str | None:
    """Add one row of a step's result to its request, up to the token that completes a stop string.

    Args:
        text: of the request.
        output: of the whole step, in numpy.
        is_round: False for the first token, which belongs to no round.

    Returns:
        Why the request ended, or None.
    """
    trace = output.trace
    for index, fields in enumerate(StepResult.rounds(np.asarray(output.report)[:, row])):
        accept_len = fields.accept_len
        if fields.counts == 0:
            continue  # ended in an earlier round of this dispatch
        pieces = text.read(fields.tokens[: fields.counts])
        count = len(pieces)
        emitted = fields.tokens[:count]
        request.num_draft_cached_tokens = len(request.prompt_token_ids) + len(
            request.token_ids
        )  # a round writes up to its root
        if request.params.logprobs is not None:
            request.logprobs += token_logprobs(output.logprobs, (index, row), emitted, request.params.logprobs)
        request.token_ids += emitted
        emitted_drafts = min(count, accept_len)
        request.from_draft += [True] * emitted_drafts + [False] * (count - emitted_drafts)
        request.metrics.num_tokens += count
        request.metrics.num_first_tokens += not is_round
        if is_round:
            depth, drafted = len(fields.tokens) - 1, fields.num_drafted
            request.metrics.count_round(
                depth=depth, drafted=drafted, accept_len=accept_len, emitted_drafts=emitted_drafts
            )
            if trace is not None and request.trace:
                request.rounds.append(_round(trace, index, row, accept_len, emitted))
        text.pieces += pieces  # last: from now on a stream in another thread hands the tokens out
        if text.stop is not None:
            return "stop"
        if fields.ended:
            return _finish_reason(request, eos_ids)
    return None


def process_prompt_logprobs(request: Request, scores: LogProbs, start: int, count: int) -> None:
    """Add what a chunk's result says of the prompt's tokens to its request.

    Args:
        scores: of the token behind each of the chunk's, in numpy.
        start: position of the chunk's first token.
        count: tokens in the chunk.
    """
    known, top = request.prompt_logprobs, request.params.prompt_logprobs
    assert known is not None and top is not None
    tokens = request.prompt_token_ids[start + 1 : start + 1 + count]  # without what comes behind the prompt
    known[start + 1 : start + 1 + len(tokens)] = token_logprobs(scores, ..., tokens, top)


def _prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    return None if request.prompt_logprobs is None else list(request.prompt_logprobs)


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


def completion_of(request: Request, output: OutputState) -> Completion:
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
        logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
        prompt_logprobs=_prompt_logprobs(request),
        pieces=list(output.pieces) if output.text is not None else None,
    )
