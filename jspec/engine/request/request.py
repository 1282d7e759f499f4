"""Records of the host: requests with their schedule state and output, and the user's chunks and completions."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jspec.core.thinking import ENDED, NO_THINKING, Thinking
from jspec.engine.grammar.cfg_matcher import Matcher
from jspec.engine.grammar.token_table import Grammar
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.round_record import Round
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.request.token_logprobs import PromptLogprobs, TokenLogprob
from jspec.engine.text.detokenizer import TextDecoder


@dataclass(eq=False)
class RequestState:
    """The schedule state of a request, which the scheduler and the loop change.

    Attributes:
        slot: slot in the device's state; None while the request waits.
        prefill_len: number of tokens to prefill: those of the prompt, and after a preemption also those of the output
            except the newest.
        num_prefilled: number of tokens to prefill that were dispatched or found in the prefix cache.
        num_cached_rows: number of rows found in the prefix cache at admission.
        num_draft_cached_tokens: number of tokens whose rows are committed in both the target's and the draft's cache.
        page_digests: digests of the request's full pages (`jspec.engine.schedule.page_pool.page_digests`).
        salt: bytes that keep the request from sharing pages with requests of an earlier prefix cache.
        num_shared_pages: number of the request's full pages that are in the prefix cache.
        num_synced_pages: number of the request's pages that are in the device's page table.
        steps_in_flight: number of dispatched steps with this request whose results were not read.
        rounds_in_flight: number of rounds in the steps in flight.
        grammar_position: (number of output tokens read, states of the reasoning for which the grammar waits and of the
            grammar's automaton after these tokens).
        prefill_sizes: compiled numbers of tokens of the prefills with this request, ascending; empty: all numbers.
        awaits_rounds: whether the programs of the request's rounds are still to be compiled, so no round may run it.
    """

    slot: int | None = None
    prefill_len: int = 0
    num_prefilled: int = 0
    num_cached_rows: int = 0
    num_draft_cached_tokens: int = 0
    page_digests: list[bytes] = field(default_factory=list)
    salt: bytes = b""
    num_shared_pages: int = 0
    num_synced_pages: int = 0
    steps_in_flight: int = 0
    rounds_in_flight: int = 0
    grammar_position: tuple[int, int, int] = (0, ENDED, 0)
    prefill_sizes: tuple[int, ...] = ()
    awaits_rounds: bool = False

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == self.prefill_len


@dataclass(eq=False)
class OutputState:
    """The tokens, text and counters of one completion so far, and how it ended.

    A stream in another thread may read while the loop writes. Each step extends ``pieces`` last, and the end of the
    request sets ``finish_reason`` last, so a reader of these two sees all output before them.

    Attributes:
        decoder: decodes tokens to text.
        token_ids: emitted tokens.
        from_draft: for each emitted token, whether a draft proposed the token.
        pieces: text of each token. Text that was held back is in the piece of a later token or in ``tail``.
        tail: text after the last piece, set when the request ends.
        logprobs: one record per emitted token, if requested.
        prompt_logprobs: log-probabilities of the prompt's tokens, shared by all completions of the prompt; None: not
            requested.
        rounds: one record per round, with ``trace=True``.
        metrics: counters of the request.
        weight_versions: (index of the first token, version of the weights that it was computed with), for each version.
        queued_at: value of `time.perf_counter` (seconds) when the request was queued; None: it was never queued.
        finish_reason: reason for which the request ended; None while the request runs or waits.
        stop_reason: the stop token or stop string that ended the request.
        error: the error that ended the request.
        is_refused: whether its programs could not be compiled; then the caller of any call gets the error raised.
        before_change: called with the request before its output changes (`jspec.engine.callers.watch`); None: nobody
            asks.
    """

    decoder: TextDecoder = field(default_factory=TextDecoder)
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    tail: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    rounds: list[Round] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    weight_versions: list[tuple[int, int]] = field(default_factory=list)
    queued_at: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    is_refused: bool = False
    before_change: Callable[[Request], None] | None = field(default=None, repr=False)

    @property
    def text(self) -> str | None:
        """The output text so far; None without a tokenizer."""
        return "".join(self.pieces) + self.tail if self.decoder.has_text else None

    @property
    def stop_string(self) -> str | None:
        """The stop string before which the text was cut; None: none was found."""
        return self.decoder.stop_string

    def finish_text(self) -> None:
        """Move the held-back text into ``tail``."""
        self.tail = self.decoder.finish(len(self.pieces))


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank adapter of the target, which an engine has loaded.

    Attributes:
        name: name that requests give.
        path: folder or hub id that it was read from.
        digest: digest of its values; equal ones share a table and the prefix cache.
        layers: its arrays on the host (`jspec.models.adapters.as_tables`).
    """

    name: str
    path: str
    digest: bytes
    layers: Any = field(repr=False)


@dataclass(frozen=True, eq=False)
class Request:
    """A request for one completion, with its prompt, parameters, schedule state and output.

    Attributes:
        id: number of the request, in order of arrival.
        seed: seed of this completion, below 2**64.
        stop_ids: tokens that end the request, ``eos_ids`` included.
        max_new_tokens: largest number of tokens that the request can emit: ``params.max_tokens``, or fewer because of
            the engine's ``max_len``.
        eos_ids: the model's end-of-sequence tokens; empty if ``params.ignore_eos``.
        trace: whether every round is recorded.
        bad_words: the bad words as token ids.
        grammar: the request's grammar as a table for the device; None: no grammar, or ``matcher`` serves it.
        prediction: tokens that the output will probably repeat.
        thinking: how the request reasons, if it has a budget or a grammar.
        matcher: parser that computes masks on the host for a grammar that fits no table; else None.
        gathers_logits: whether, on several devices, the request's rounds gather the logits of the whole vocabulary.
        index: index among the ``n`` completions of the prompt.
        siblings: the other completions of the prompt; empty except in the first completion.
        adapter: adapter of the target; None: it has none.
        cache_salt: bytes that keep requests whose tokens have other cache rows, such as those of another adapter, from
            sharing pages: only requests with equal salts share them.
        owner: the input processor that made the request; it tells an engine its own requests from those of others.
    """

    id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    trace: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    prediction: tuple[int, ...] = ()
    thinking: Thinking = NO_THINKING
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    gathers_logits: bool = False
    index: int = 0
    siblings: tuple[Request, ...] = ()
    adapter: Adapter | None = None
    cache_salt: bytes = b""
    owner: object = field(default=None, repr=False)
    state: RequestState = field(default_factory=RequestState)
    output: OutputState = field(default_factory=OutputState)

    def __post_init__(self) -> None:
        self.state.prefill_len = len(self.prompt_token_ids)
        self.state.grammar_position = 0, self.thinking.held, 0

    @property
    def samples(self) -> tuple[Request, ...]:
        """The requests of all completions of the prompt, if this request is the first one."""
        return (self, *self.siblings)

    @property
    def token_ids(self) -> list[int]:
        return self.output.token_ids

    @property
    def metrics(self) -> Metrics:
        return self.output.metrics

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason

    @property
    def error(self) -> BaseException | None:
        return self.output.error

    @property
    def is_prefilled(self) -> bool:
        return self.state.is_prefilled

    @property
    def order(self) -> tuple[int, int]:
        """The sort key of the schedule; requests with smaller keys are served first."""
        return self.params.priority, self.id

    @property
    def scores_prompt(self) -> bool:
        """Return whether this request computes prompt log-probabilities; only the first of ``n`` completions does."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def prefill_outputs(self) -> tuple[bool, bool, bool, bool]:
        """Four bools that say what the prefill computes, which requests of one prefill have in common.

        They stand for log-probabilities of the first token, log-probabilities of the prompt, a mask from the host for
        the first token, and an adapter.
        """
        scores_prompt = self.scores_prompt
        has_scores, is_adapted = scores_prompt or self.params.logprobs is not None, self.adapter is not None
        return has_scores, scores_prompt, self.matcher is not None, is_adapted

    @property
    def rows_needed(self) -> int:
        """The number of cache rows for the prompt and all tokens that the request may emit."""
        return len(self.prompt_token_ids) + self.max_new_tokens

    @property
    def rows_committed(self) -> int:
        """The number of committed rows in the target's cache, one for each token read so far except the newest."""
        return len(self.prompt_token_ids) + max(len(self.token_ids) - 1, 0)

    def tell(self) -> None:
        """Tell the caller that takes the output, if there is one, that the output is about to change."""
        if self.output.before_change is not None:
            self.output.before_change(self)

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens of prompt and output at positions ``start`` to ``stop - 1``."""
        size = len(self.prompt_token_ids)
        return (*self.prompt_token_ids[start:stop], *self.token_ids[max(start - size, 0) : max(stop - size, 0)])


@dataclass(frozen=True)
class Chunk:
    """A part of one completion's output that a stream yields.

    Attributes:
        text: new text; None without a tokenizer.
        token_ids: new tokens.
        from_draft: for each new token, whether a draft proposed the token.
        finish_reason: reason for which the completion ended; None except in its last chunk.
        index: index of the completion among the ``n`` completions of the prompt.
        logprobs: one record per token of this chunk, if requested.
        prompt_logprobs: one record per prompt token (None for the first token), if requested; only in the first chunk.
        pieces: text of each new token, for coloured display; None without a tokenizer.
        stop_reason: the stop token or the stop string that ended the completion; None except in the last chunk.
        rounds: one record per round whose tokens are in this chunk, with ``trace=True``; else None.
        metrics: counters of the completion; None except in its last chunk.
        reasoning: new text of the reasoning, of a chat; as in `Completion`.
    """

    text: str | None
    token_ids: list[int]
    from_draft: list[bool]
    finish_reason: str | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    pieces: list[str] | None = None
    stop_reason: int | str | None = None
    rounds: list[Round] | None = None
    metrics: Metrics | None = None
    reasoning: str | None = None


FOREIGN_ATTRIBUTES = {  # attributes of other libraries' results, and what jspec has instead
    "outputs": "samples, the n completions of the prompt",
    "choices": "samples, the n completions of the prompt",
    "generated_text": "text",
    "output_token_ids": "token_ids",
    "reasoning_content": "reasoning",
    "cumulative_logprob": "logprobs, whose records have one logprob a token",
}


@dataclass(frozen=True, repr=False)
class Completion:
    """The finished output of one request.

    Attributes:
        text: text of the output, without prompt, end tokens and stop string; None without a tokenizer.
        token_ids: emitted tokens.
        from_draft: for each emitted token, whether a draft proposed the token.
        finish_reason: "eos", "stop", "length", "abort" or "error".
        stop_reason: the stop token or the stop string that ended the request; None: another reason.
        error: the error that ended the request, if any; other requests are not affected.
        metrics: counters of the request.
        rounds: one record per round with ``trace=True``; else None.
        logprobs: one record per emitted token; None: not requested.
        prompt_logprobs: one record per prompt token (None for the first token); None: not requested. The list, like
            ``prompt_token_ids``, is shared by the completions of the prompt.
        pieces: text of each token, for coloured display.
        others: with ``n`` > 1, the second and later completions of the prompt; else empty.
        reasoning: of a chat, the reasoning before the answer, which ``text`` then lacks and ``pieces`` have; None: the
            chat template has none of the formats of `jspec.engine.reading.reasoning`, the tokenizer cannot show their
            markers, a grammar leaves no room for it and does not wait for it, or this is no chat.
        weight_versions: (start, end, version) of the output tokens that were computed with the same weights
            (`jspec.Engine.update_weights`), in order.
    """

    text: str | None
    token_ids: list[int]
    from_draft: list[bool]
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    error: BaseException | None
    metrics: Metrics
    rounds: list[Round] | None = None
    logprobs: list[TokenLogprob] | None = field(default=None, repr=False)
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None, repr=False)
    pieces: list[str] | None = field(default=None, repr=False)
    others: tuple[Completion, ...] = field(default=(), repr=False)
    reasoning: str | None = field(default=None, repr=False)
    weight_versions: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)

    def raise_for_error(self) -> Completion:
        """Raise the first error of the prompt's completions; return this completion if none has an error."""
        for sample in self.samples:
            if sample.error is not None:
                raise sample.error
        return self

    @property
    def samples(self) -> list[Completion]:
        """The ``n`` completions of the prompt, beginning with this one."""
        return [self, *self.others]

    def __getattr__(self, name: str) -> NoReturn:
        if name in FOREIGN_ATTRIBUTES:
            raise AttributeError(f"Completion.{name}: expected {FOREIGN_ATTRIBUTES[name]}, got {name}")
        raise AttributeError(f"'Completion' object has no attribute {name!r}")

    def __repr__(self) -> str:
        shown = self.text if self.text is not None else self.token_ids
        number = f"first of {len(self.samples)} samples, " if self.others else ""
        return f"Completion({number}{len(self.token_ids)} tokens, finish_reason={self.finish_reason!r}, {shown!r:.80})"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks, with a coloured background behind tokens from drafts."""
        shown = self.pieces or [f"{token} " for token in self.token_ids]
        spans = []
        for piece, drafted in zip(shown, self.from_draft, strict=False):
            style = ' style="background:#cfe8ff"' if drafted else ""
            spans.append(f"<span{style}>{html.escape(piece)}</span>")
        return f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'
