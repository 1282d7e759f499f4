"""Turns step results into the user's output: tokens, text, counters and recorded rounds. Runs on the host."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from operator import attrgetter

import numpy as np

from jspec.core.prompt_blocks import NO_TOKEN
from jspec.core.records import StepOutput, Trace
from jspec.engine.request.request import Chunk, Completion, OutputState, Request
from jspec.engine.request.round_record import Round
from jspec.engine.request.token_logprobs import TokenLogprob, token_logprobs


def process_step_output(request: Request, step: StepOutput, row: int, *, is_round: bool) -> str | None:
    """Add a row of a step's result to the output of its request, up to the token that completes a stop string.

    Args:
        step: result of the step for all rows, as numpy arrays.
        row: the request's row in the result.
        is_round: False for the first token, which the prefill samples outside any round.

    Returns:
        The finish reason if the request ended, else None.

    Raises:
        FloatingPointError: the logits of an emitted token contain NaN.
    """
    output = request.output
    for index, fields in enumerate(step.rounds(row)):
        if fields.counts == 0:
            continue  # the request ended in an earlier round of this dispatch
        if NO_TOKEN in fields.tokens[: fields.counts]:
            raise FloatingPointError(
                f"expected logits that are numbers, got NaN within {fields.counts} tokens after the first "
                f"{len(output.token_ids)}; look for NaN or infinity in the weights, the drafter excepted, for values "
                "too large for their dtype, and for a logits_processor that returns NaN"
            )
        pieces = output.decoder.push(fields.tokens[: fields.counts], len(output.pieces))
        count = len(pieces)
        emitted = fields.tokens[:count]
        # A round writes draft cache rows up to its root (the newest token before the round).
        request.state.num_draft_cached_tokens = len(request.prompt_token_ids) + len(output.token_ids)
        if request.params.logprobs is not None:
            output.logprobs += token_logprobs(step.logprobs, (index, row), emitted, request.params.logprobs)
        start = len(output.token_ids)
        output.token_ids += emitted
        emitted_drafts = min(count, fields.accept_len)
        output.from_draft += [True] * emitted_drafts + [False] * (count - emitted_drafts)
        output.metrics.num_tokens += count
        output.metrics.num_first_tokens += not is_round
        if is_round:
            output.metrics.count_round(
                depth=len(fields.tokens) - 1,
                drafted=fields.num_drafted,
                accept_len=fields.accept_len,
                emitted_drafts=emitted_drafts,
                lookup_drafted=fields.lookup_drafted,
                head_accepted=fields.head_accepted,
            )
            if step.trace is not None and request.trace:
                scores = None if request.params.logprobs is None else output.logprobs[start:]
                record = _round(step.trace, (index, row), fields.accept_len, emitted)
                output.rounds.append(replace(record, start=start, logprobs=scores))
        output.pieces += pieces  # last, because a stream in another thread may now yield the tokens
        if output.stop_string is not None:
            return "stop"
        if fields.ended:
            return _finish_reason(request)
    return None


def _finish_reason(request: Request) -> str:
    """Return why the device has ended a request: "eos", "stop" or "length".

    The device reports only that the request has ended. If the last token is a stop token, this token is the reason;
    otherwise the request reached its length limit.
    """
    last = request.token_ids[-1]
    if last not in request.stop_ids:
        return "length"
    request.output.stop_reason = last
    return "eos" if last in request.eos_ids else "stop"


def _round(trace: Trace, at: tuple[int, int], accept_len: int, emitted: list[int]) -> Round:
    return Round(
        tokens=np.asarray(trace.tokens[at]),
        parents=np.asarray(trace.parents[at]),
        scores=np.asarray(trace.scores[at]),
        path=[int(node) for node in trace.path[at][: accept_len + 1]],
        accept_len=accept_len,
        emitted=emitted,
        confidence=None if trace.confidence is None else np.asarray(trace.confidence[at]),
        from_lookup=None if trace.from_lookup is None else np.asarray(trace.from_lookup[at]),
        match_length=None if trace.match_length is None else int(trace.match_length[at]),
    )


def _rounds(request: Request, start: int, end: int) -> list[Round] | None:
    """Return the recorded rounds that emitted the output tokens ``start`` to ``end - 1``; None without ``trace``."""
    if not request.trace:
        return None
    first, last = (bisect_left(request.output.rounds, at, key=attrgetter("start")) for at in (start, end))
    return request.output.rounds[first:last]


def make_chunk(request: Request, start: int) -> Chunk:
    """Make a chunk of a request's output that begins at output token ``start``.

    A step appends a token's text last, after its other values.
    """
    output, reason = request.output, request.finish_reason  # once this is set, the output is complete
    end = len(output.pieces) if reason is None else len(output.token_ids)
    pieces, text = None, None
    if output.decoder.has_text:
        pieces = output.pieces[start:end]
        text = "".join(pieces) + (output.tail if reason else "")
    return Chunk(
        text,
        output.token_ids[start:end],
        output.from_draft[start:end],
        reason,
        request.index,
        output.logprobs[start:end] if request.params.logprobs is not None else None,
        _prompt_logprobs(request) if start == 0 and request.index == 0 else None,
        pieces,
        stop_reason=output.stop_reason if reason else None,
        rounds=_rounds(request, start, end),
        metrics=output.metrics if reason else None,
    )


def make_completion(request: Request) -> Completion:
    """Make the completion of an ended request; the other completions of its prompt become its ``others``."""
    prompt = list(request.prompt_token_ids)
    first, *others = (_completion(sample, prompt) for sample in request.samples)
    return replace(first, others=tuple(others))


def _completion(request: Request, prompt: list[int]) -> Completion:
    output = request.output
    assert output.finish_reason is not None
    return Completion(
        text=output.text,
        token_ids=list(output.token_ids),
        from_draft=list(output.from_draft),
        prompt_token_ids=prompt,
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        error=output.error,
        metrics=output.metrics,
        rounds=list(output.rounds) if request.trace else None,
        logprobs=list(output.logprobs) if request.params.logprobs is not None else None,
        prompt_logprobs=_prompt_logprobs(request),
        pieces=list(output.pieces) if output.decoder.has_text else None,
        weight_versions=_version_spans(output),
    )


def _version_spans(output: OutputState) -> tuple[tuple[int, int, int], ...]:
    starts = [start for start, _ in output.weight_versions]
    ends = [*starts[1:], len(output.token_ids)]
    spans = zip(starts, ends, output.weight_versions, strict=False)
    return tuple((start, end, version) for start, end, (_, version) in spans if start < end)


def _prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
    scores = request.output.prompt_logprobs
    return None if scores is None else scores.records()
