"""Host records: a request (what was asked, its place in the schedule, its output) and what the user gets. No jax."""

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
        top: log-probability of the likeliest tokens, as many as asked for, best first; impossible tokens are left out.
    """

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True)
class Round:
    """One draft-verify round of one request, in numpy; recorded with ``trace=True``.

    Attributes:
        tokens, parents: [N] nodes in the target's vocabulary; node 0 is the root, parent -1 marks root and padding.
        scores: [N] cumulative draft log-probability (natural, untempered); root 0.
        path: accepted node ids, the root first.
        accept_len: draft tokens accepted.
        emitted: tokens emitted, cut where the request ended.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    path: list[int]
    accept_len: int
    emitted: list[int]

    def to_text(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """The tree with one node a line; accepted nodes are marked with a star.

        Args:
            decode: a tokenizer's ``decode``; None shows ids. A token without text of its own (a special token, a part
                of a character) shows as ``#id``.
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
        prefill_len: tokens to prefill: the prompt, and after a preemption the output except its newest token.
        num_prefilled: of those, tokens whose chunk was dispatched or whose rows were found in the prefix cache.
        num_cached_rows: rows found in the prefix cache at admission.
        num_draft_cached_tokens: tokens whose rows are committed in both the target's and the draft's cache.
        page_digests: digests of its full pages (`jspec.engine.page_pool.page_digests`).
        num_shared_pages: full pages that are in the prefix cache.
        num_synced_pages: pages that the device's page table has.
        steps_in_flight: chunks and round dispatches whose result was not read yet.
        rounds_in_flight: rounds of those dispatches.
        grammar_position: (output tokens followed, state of the grammar's automaton after them).
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

    A stream in another thread reads while the loop writes: ``pieces`` is extended last in a step and
    ``finish_reason`` is written last of all, so a reader that sees them sees everything else.

    Attributes:
        decoder: decodes tokens to text.
        token_ids: emitted tokens.
        from_draft: for each of them, whether a draft proposed it.
        pieces: text of each token; text that was held back comes with a later token or in ``tail``.
        tail: text after the last token's piece, known when the request ends.
        logprobs: one record per token, if asked for.
        prompt_logprobs: one record per prompt token (None for the first), shared by all completions of a prompt;
            None: not asked for.
        rounds: one record per round, with ``trace=True``.
        queued_at: `time.perf_counter` when the request was queued; None: it never was.
        finish_reason: None while the request runs or waits.
        stop_reason: the stop token or stop string.
        error: the error that ended it.
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
        """The stop string that the text was cut before."""
        return self.decoder.stop_string

    def finish_text(self) -> None:
        """Emit the text that was held back."""
        self.tail = self.decoder.finish(len(self.pieces))


@dataclass(frozen=True, eq=False)
class Request:
    """One completion to make: what was asked, with its place in the schedule and its output.

    Attributes:
        id: number in order of arrival.
        seed: seed of this completion, below 2**64.
        stop_ids: tokens that end it, ``eos_ids`` included.
        max_new_tokens: tokens it can emit at most: ``params.max_tokens``, or what ``max_len`` leaves.
        eos_ids: the model's end-of-sequence tokens; empty where ``params.ignore_eos``.
        trace: record every round.
        bad_words: the bad words as token ids.
        grammar: table of its grammar.
        matcher: parser of a grammar that fits no table; the host asks it for masks.
        index: place among the ``n`` completions of the prompt.
        siblings: the other completions of the prompt; only the first one has them.
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
        """All completions of the prompt, if this is the first."""
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
        """Sort key of the schedule: requests with smaller ones are served first."""
        return self.params.priority, self.id

    @property
    def scores_prompt(self) -> bool:
        """Whether its chunks report log-probabilities of the prompt; of ``n`` completions the first does."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def rows_needed(self) -> int:
        """Cache rows it may commit."""
        return len(self.prompt_token_ids) + self.max_new_tokens

    @property
    def rows_committed(self) -> int:
        """Rows in the target's cache, by the results read so far: all tokens but the newest."""
        return len(self.prompt_token_ids) + max(len(self.token_ids) - 1, 0)

    def tokens_between(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens of prompt and output at positions ``start`` to ``stop - 1``."""
        size = len(self.prompt_token_ids)
        return (*self.prompt_token_ids[start:stop], *self.token_ids[max(start - size, 0) : max(stop - size, 0)])


@dataclass(frozen=True)
class Chunk:
    """New output of one completion, as a stream yields it.

    Attributes:
        text: None without a tokenizer.
        from_draft: for each token, whether a draft proposed it.
        finish_reason: set in the last chunk of a completion.
        index: which of the ``n`` completions it belongs to.
        logprobs: one record per token of this chunk, if asked for.
        prompt_logprobs: those of the prompt, in the first chunk, if asked for.
    """

    text: str | None
    token_ids: list[int]
    from_draft: list[bool]
    finish_reason: str | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, repr=False)
class Completion:
    """The result of a request.

    Attributes:
        text: None without a tokenizer; prompt, end tokens and stop string are left out.
        from_draft: for each token, whether a draft proposed it.
        finish_reason: "eos", "stop", "length", "abort" or "error".
        stop_reason: the stop token or the stop string that ended it.
        error: the error that ended it, if any; the other requests of a batch are complete.
        rounds: with ``trace=True``, every round; else None.
        logprobs: one record per token; None: not asked for.
        prompt_logprobs: one record per prompt token, None for the first, which has no predecessor; None: not asked for.
        pieces: text of each token, for coloured display.
        others: with ``n`` > 1, the completions after this one, which is the first.
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
        """This completion, if neither it nor any of the others ended with an error; else that error is raised."""
        for sample in self.samples:
            if sample.error is not None:
                raise sample.error
        return self

    @property
    def samples(self) -> list[Completion]:
        """The ``n`` completions of the prompt; the first is this one."""
        return [self, *self.others]

    def __repr__(self) -> str:
        shown = self.text if self.text is not None else self.token_ids
        return f"Completion({len(self.token_ids)} tokens, finish_reason={self.finish_reason!r}, {shown!r:.80})"

    def _repr_html_(self) -> str:
        """For notebooks: drafted tokens on a coloured background."""
        shown = self.pieces or [f"{token} " for token in self.token_ids]
        spans = []
        for piece, drafted in zip(shown, self.from_draft, strict=False):
            style = ' style="background:#cfe8ff"' if drafted else ""
            spans.append(f"<span{style}>{html.escape(piece)}</span>")
        return f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'
