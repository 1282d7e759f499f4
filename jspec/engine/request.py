"""Host records: a request on its way, and what comes back. No jax here."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jspec.engine.grammar.cfg_matcher import Matcher
from jspec.engine.grammar.token_table import Grammar
from jspec.engine.metrics import Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.token_logprobs import TokenLogprob


@dataclass(frozen=True)
class Round:
    """One draft-verify round of one request, in numpy; made when a trace is asked for.

    Attributes:
        tokens, parents: [N] nodes in the target's vocabulary; node 0 is the root, parent -1 marks root and padding.
        scores: [N] cumulative draft log-probability (natural, untempered); root 0.
        path: accepted node ids, the root first.
        accept_len: draft tokens accepted.
        emitted: tokens handed out, cut where the request ended.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    path: list[int]
    accept_len: int
    emitted: list[int]

    def to_text(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """The tree with one node a line; accepted nodes carry a star.

        Args:
            decode: a tokenizer's, which turns ids into text; None shows ids. A token that has no text of its own
                (a special one, a part of a character) shows as ``#id``.
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
class Request:
    """A completion on its way through the engine: what was asked, and what is known so far.

    Of the ``n`` completions of a prompt the first stands for all: it has the others as its siblings.
    """

    id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    limit: int  # tokens it can emit at most: max_tokens, or what max_len leaves
    trace: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()  # as token ids
    grammar: Grammar | None = None
    grammar_at: tuple[int, int] = (0, 0)  # tokens of the output that it has followed, and to which state
    matcher: Matcher | None = None  # of a grammar that fits no table
    slot: int | None = None
    prefill_len: int = field(init=False)  # tokens to prefill: the prompt, and of the output what a preemption lost
    prefilled: int = 0  # of these, those whose chunks were dispatched or that were found in kept pages
    cached_rows: int = 0  # those found in kept pages, at the beginning
    num_draft_cached_tokens: int = 0  # committed for good in both pools, as far as is known
    digests: list[bytes] = field(default_factory=list)  # of its text's full pages
    num_shared_pages: int = 0  # of these, those that others can find
    num_synced_pages: int = 0  # of its pages, those that the device's table tells
    steps_in_flight: int = 0  # chunks and dispatches of rounds that were not read yet
    rounds_in_flight: int = 0
    token_ids: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # where asked for, as `prompt_logprobs`
    prompt_logprobs: list[TokenLogprob | None] | None = None
    rounds: list[Round] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: BaseException | None = None
    index: int = 0  # of the completion among those of its prompt
    siblings: tuple[Request, ...] = ()

    def __post_init__(self) -> None:
        self.prefill_len = len(self.prompt_token_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * self.prefill_len

    @property
    def samples(self) -> tuple[Request, ...]:
        """All completions of its prompt, if it is the first."""
        return (self, *self.siblings)

    @property
    def order(self) -> tuple[int, int]:
        """The smaller, the sooner it is served."""
        return self.params.priority, self.id

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled == self.prefill_len

    @property
    def scores_prompt(self) -> bool:
        """Whether its chunks are to say what the target makes of the prompt: of ``n`` the first one's do."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def rows_needed(self) -> int:
        """Cache rows it may commit."""
        return len(self.prompt_token_ids) + self.limit

    @property
    def rows_committed(self) -> int:
        """Rows of its text in the target's cache, as far as is known: the newest token is not among them."""
        return len(self.prompt_token_ids) + max(len(self.token_ids) - 1, 0)

    def text(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens of the prompt and the output, by position."""
        size = len(self.prompt_token_ids)
        return (*self.prompt_token_ids[start:stop], *self.token_ids[max(start - size, 0) : max(stop - size, 0)])


@dataclass(frozen=True)
class Chunk:
    """New output of one completion, as a stream hands it out. ``text`` is None without a tokenizer.

    ``index`` tells which of the ``n`` completions goes on. The log-probabilities that were asked for are those of
    ``token_ids``; those of the prompt come with the first chunk.
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
    """What a request came to.

    Attributes:
        text: None without a tokenizer; without the prompt, end tokens and stop string left out.
        from_draft: for each token, whether a draft proposed it.
        finish_reason: "eos", "stop", "length", "abort" or "error".
        stop_reason: the stop token or the stop string that ended it.
        error: what ended it, if that was an error; of several requests the others are complete.
        rounds: with ``trace=True``, every round; else None.
        logprobs: one a token; None where not asked for.
        prompt_logprobs: one a token of the prompt, None for the first, before which there is nothing; None where
            not asked for.
        others: where ``n`` is more than one, all completions but this, the first.
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
    pieces: list[str] | None = field(default=None, repr=False)  # text token by token, for coloured display
    others: tuple[Completion, ...] = field(default=(), repr=False)

    def raise_for_error(self) -> Completion:
        """The completion itself, unless an error ended it or one of the others: then that is raised."""
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
        """Drafted tokens on a coloured ground, for notebooks."""
        shown = self.pieces or [f"{token} " for token in self.token_ids]
        spans = []
        for piece, drafted in zip(shown, self.from_draft, strict=False):
            style = ' style="background:#cfe8ff"' if drafted else ""
            spans.append(f"<span{style}>{html.escape(piece)}</span>")
        return f'<pre style="white-space:pre-wrap">{"".join(spans)}</pre>'
