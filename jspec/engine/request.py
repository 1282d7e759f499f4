"""Host records: requests with their schedule state and output, and the user's chunks and completions. No jax."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jspec.engine.detokenizer import TextDecoder
from jspec.engine.grammar.cfg_matcher import Matcher
from jspec.engine.grammar.token_table import Grammar
from jspec.engine.metrics import Metrics
from jspec.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of one token given all tokens before it, natural logarithm.

    Attributes:
        rank: 1 for the likeliest token; rank - 1 tokens are likelier than this one.
        top: log-probability of the likeliest tokens, as many as requested, largest first; impossible tokens are left
            out.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True)
class Round:
    """One draft-verify round of one request, as numpy arrays; recorded with ``trace=True``.

    Attributes:
        tokens: [N] target-vocabulary id of each node; node 0 is the root.
        parents: [N] parent of each node; -1 for the root and for padding nodes.
        scores: [N] cumulative draft log-probability (natural, untempered); root 0.
        path: accepted node ids, the root first.
        accept_len: number of draft tokens accepted.
        emitted: emitted tokens, cut where the request ended.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    path: list[int]
    accept_len: int
    emitted: list[int]

    def to_text(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """Text of the tree with one node per line; accepted nodes are marked with a star.

        Args:
            decode: a tokenizer's ``decode``; None: tokens are shown as ids. A token without text of its own (a special
                token, a part of a character) is shown as ``#id``.
        """
        lines: list[str] = []

        def show(token: int) -> str:
            if decode is None:
                return str(token)
            text = decode([token])
            return repr(text) if text and "\ufffd" not in text else f"#{token}"

        def walk(node: int, indent: int) -> None:
            star = "*" if node in self.path else " "
            lines.append(f"{star} {'  ' * indent}{show(int(self.tokens[node]))}  ({self.scores[node]:.3f})")
            for child in np.flatnonzero(self.parents == node):
                walk(int(child), indent + 1)

        walk(0, 0)
        emitted = self.emitted if decode is None else repr(decode(self.emitted))
        return "\n".join([*lines, f"emitted {emitted}"])


@dataclass(eq=False)
class RequestState:
    """A request's place in the schedule; written by the scheduler and the loop.

    Attributes:
        slot: slot of the device's state; None while the request waits.
        prefill_len: number of tokens to prefill: the prompt, and after a preemption the output except its newest token.
        num_prefilled: number of these tokens whose chunk was dispatched or whose rows were in the prefix cache.
        num_cached_rows: number of rows found in the prefix cache at admission.
        num_draft_cached_tokens: number of tokens whose rows are committed in both the target's and the draft's cache.
        page_digests: digests of the request's full pages (`jspec.engine.page_pool.page_digests`).
        num_shared_pages: number of the request's full pages that are in the prefix cache.
        num_synced_pages: number of the request's pages that are in the device's page table.
        steps_in_flight: number of prefill and round dispatches whose result was not read yet.
        rounds_in_flight: number of rounds in these dispatches.
        grammar_position: (number of output tokens followed, state of the grammar's automaton after those tokens).
    """

    slot: int | None = None
    prefill_len: int = 0
    num_prefilled: int = 0
    num_cached_rows: int = 0
    num_draft_cached_tokens: int = 0
    page_digests: list[bytes] = field(default_factory=list)
    num_shared_pages: int = 0
    num_synced_pages: int = 0
    steps_in_flight: int = 0
    rounds_in_flight: int = 0
    grammar_position: tuple[int, int] = (0, 0)

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == self.prefill_len


@dataclass(eq=False)
class OutputState:
    """The tokens, text and counters of one completion so far, and how it ended.

    A stream in another thread reads while the loop writes: in a step ``pieces`` is extended last, and at the end
    ``finish_reason`` is written last, so a reader that sees either of the two sees all earlier output.

    Attributes:
        decoder: decodes tokens to text.
        token_ids: emitted tokens.
        from_draft: for each emitted token, whether a draft proposed the token.
        pieces: text of each token; text that was held back is in the piece of a later token or in ``tail``.
        tail: text after the last token's piece, known when the request ends.
        logprobs: one record per token, if requested.
        prompt_logprobs: one record per prompt token (None for the first), shared by all completions of a prompt;
            None: not requested.
        rounds: one record per round, with ``trace=True``.
        metrics: counters of the request.
        queued_at: `time.perf_counter` when the request was queued; None: the request was never queued.
        finish_reason: reason for which the request ended; None while the request runs or waits.
        stop_reason: the stop token or stop string that ended the request.
        error: the error that ended the request.
    """

    decoder: TextDecoder = field(default_factory=TextDecoder)
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    tail: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    rounds: list[Round] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    queued_at: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None

    @property
    def text(self) -> str | None:
        """The text so far; None without a tokenizer."""
        return "".join(self.pieces) + self.tail if self.decoder.has_text else None

    @property
    def stop_string(self) -> str | None:
        """The stop string before which the text was cut; None: none was found."""
        return self.decoder.stop_string

    def finish_text(self) -> None:
        """Put the text that was held back into ``tail``."""
        self.tail = self.decoder.finish(len(self.pieces))


@dataclass(frozen=True, eq=False)
class Request:
    """One completion to make: prompt and parameters, with its schedule state and its output.

    Attributes:
        id: number in order of arrival.
        seed: seed of this completion, below 2**64.
        stop_ids: tokens that end the request, ``eos_ids`` included.
        max_new_tokens: the most tokens that the request can emit: ``params.max_tokens``, or fewer if ``max_len`` allows
            only those.
        eos_ids: the model's end-of-sequence tokens; empty if ``params.ignore_eos``.
        trace: whether every round is recorded.
        bad_words: the bad words as token ids.
        grammar: the request's grammar as a table; None: no grammar, or one that fits no table.
        matcher: parser of a grammar that fits no table, which computes masks on the host.
        index: index among the ``n`` completions of the prompt.
        siblings: the other completions of the prompt; empty except in the first completion.
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
    grammar: Grammar | None = None
    matcher: Matcher | None = None
    index: int = 0
    siblings: tuple[Request, ...] = ()
    state: RequestState = field(default_factory=RequestState)
    output: OutputState = field(default_factory=OutputState)

    def __post_init__(self) -> None:
        self.state.prefill_len = len(self.prompt_token_ids)

    @property
    def samples(self) -> tuple[Request, ...]:
        """All completions of the prompt, if this request is the first of them."""
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
        """Sort key of the schedule; requests with smaller keys are served first."""
        return self.params.priority, self.id

    @property
    def scores_prompt(self) -> bool:
        """Whether this request computes the prompt's log-probabilities; of ``n`` completions only the first does."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def rows_needed(self) -> int:
        """Cache rows for the prompt and all output tokens that the request may emit."""
        return len(self.prompt_token_ids) + self.max_new_tokens

    @property
    def rows_committed(self) -> int:
        """Committed rows in the target's cache, by the results read so far: one for each token except the newest."""
        return len(self.prompt_token_ids) + max(len(self.token_ids) - 1, 0)

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens of prompt and output at positions ``start`` to ``stop - 1``."""
        size = len(self.prompt_token_ids)
        return (*self.prompt_token_ids[start:stop], *self.token_ids[max(start - size, 0) : max(stop - size, 0)])


@dataclass(frozen=True)
class Chunk:
    """New output of one completion, as a stream yields it.

    Attributes:
        text: new text; None without a tokenizer.
        token_ids: new tokens.
        from_draft: for each new token, whether a draft proposed the token.
        finish_reason: reason for which the completion ended, in its last chunk; else None.
        index: index of the completion among the ``n`` completions of the prompt.
        logprobs: one record per token of this chunk, if requested.
        prompt_logprobs: one record per prompt token (None for the first), in the first chunk, if requested.
        pieces: text of each new token, for coloured display; None without a tokenizer.
    """

    text: str | None
    token_ids: list[int]
    from_draft: list[bool]
    finish_reason: str | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    pieces: list[str] | None = None


@dataclass(frozen=True, repr=False)
class Completion:
    """The result of a request.

    Attributes:
        text: text of the output, without prompt, end tokens and stop string; None without a tokenizer.
        token_ids: emitted tokens.
        from_draft: for each emitted token, whether a draft proposed the token.
        finish_reason: "eos", "stop", "length", "abort" or "error".
        stop_reason: the stop token or the stop string that ended the request; None: neither.
        error: the error that ended the request, if any; other requests of the batch are unaffected.
        metrics: counters of the request.
        rounds: one record per round with ``trace=True``; else None.
        logprobs: one record per token; None: not requested.
        prompt_logprobs: one record per prompt token, None for the first, which has no predecessor; None: not requested.
        pieces: text of each token, for coloured display.
        others: with ``n`` > 1, the prompt's other completions; this one is the first.
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

    def raise_for_error(self) -> Completion:
        """Raise the first error among the prompt's completions; return this completion if there is none."""
        for sample in self.samples:
            if sample.error is not None:
                raise sample.error
        return self

    @property
    def samples(self) -> list[Completion]:
        """The ``n`` completions of the prompt, beginning with this one."""
        return [self, *self.others]

    def __repr__(self) -> str:
        shown = self.text if self.text is not None else self.token_ids
        return f"Completion({len(self.token_ids)} tokens, finish_reason={self.finish_reason!r}, {shown!r:.80})"

    def _repr_html_(self) -> str:
        """HTML for notebooks: tokens from drafts have a coloured background."""
        shown = self.pieces or [f"{token} " for token in self.token_ids]
        spans = []
        for piece, drafted in zip(shown, self.from_draft, strict=False):
            style = ' style="background:#cfe8ff"' if drafted else ""
            spans.append(f"<span{style}>{html.escape(piece)}</span>")
        return f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'
