"""Finds the markers of a model's reasoning among its tokens, and says how a request reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jspec.core.shorten import short
from jspec.core.thinking import MAX_FORCED, NO_THINKING, WAITS, WAITS_ONCE, Thinking
from jspec.engine.reading import reasoning
from jspec.engine.reading.answers import template_of
from jspec.engine.reading.reasoning import ReasoningFormat
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.text.tokenizer import without_hidden


class ThinkingInput:
    """Says how each request of an engine reasons.

    Args:
        tokenizer: the engine's tokenizer; None: no request reasons.
        end_text: text that ends reasoning when a budget is used up, which ends with an end marker; None: the end
            marker of the chat template's format of reasoning alone.

    Raises:
        ValueError: ``end_text`` is given, and cannot be used.
    """

    def __init__(self, tokenizer: Any, end_text: str | None) -> None:
        self._role_ids: frozenset[int] = frozenset()  # added tokens, such as those between turns, which end reasoning
        self._closings: tuple[str, ...] = ()
        self._tokens: Thinking | None = None  # markers and forced text; None: there are none, for this reason:
        self._reason = ""
        self.format_name: str | None = None  # of the format of these markers
        try:
            if tokenizer is None:
                raise ValueError("this engine has no tokenizer")
            format_ = _format_of(template_of(tokenizer), end_text)
            self._tokens, self._closings = _read(tokenizer, format_, end_text), format_.closings
            self.format_name = next(name for name, each in reasoning.FORMATS.items() if each is format_)
            opening, specials = "".join(format_.openings), getattr(tokenizer, "special_texts", {})
            added = getattr(tokenizer, "added_ids", tokenizer.hidden_ids)
            self._role_ids = added - {token for text, token in specials.items() if text in opening}
        except ValueError as error:
            self._reason = str(error)
            if end_text is not None:
                raise ValueError(
                    f"thinking_end: expected a text that can end the model's reasoning, got {short(end_text)}, but "
                    f"{error}"
                ) from None

    def of(self, params: SamplingParams, prompt: Sequence[int]) -> Thinking:
        """Return how a request reasons.

        Reasoning counts if the request has a budget, or a grammar that can wait for its end. It has begun in the prompt
        if a start marker follows the last end marker and the last added token, such as one between turns. With a budget
        it may also begin in the output: with the next start marker, or before a grammar with the first token alone.

        Raises:
            ValueError: the request has a budget, and the engine does not know the markers.
        """
        budget, has_grammar = params.thinking_budget, params.grammar_field is not None
        if self._tokens is None:
            if budget is None:
                return NO_THINKING
            raise ValueError(
                f"thinking_budget: expected nothing, because {self._reason}, got {budget}; leave it out, or give the "
                "engine a tokenizer with such markers, and thinking_end= if its chat template has none"
            )
        if budget is None and not has_grammar:
            return NO_THINKING
        begun, waits = self._begun(prompt), has_grammar and self._can_wait(params)
        if budget is None:
            return replace(self._tokens, begun=begun, grammar_waits=True) if waits and begun >= 0 else NO_THINKING
        if begun < 0 and has_grammar:
            begun = WAITS_ONCE
        return replace(self._tokens, begun=begun, budget=max(budget, begun), grammar_waits=waits)

    def _begun(self, prompt: Sequence[int]) -> int:
        assert self._tokens is not None
        for count, token in enumerate(reversed(prompt)):
            if token == self._tokens.start:
                return count
            if token == self._tokens.end or token in self._role_ids:
                break
        return WAITS

    def _can_wait(self, params: SamplingParams) -> bool:
        """Return whether a request's grammar has no end marker of its own, as text or as a token."""
        assert self._tokens is not None and params.grammar_field is not None
        text = getattr(params, params.grammar_field).replace("\\", "")
        return not any(marker in text for marker in (*self._closings, f"<[{self._tokens.end}]>"))


def _format_of(template: str | None, end_text: str | None) -> ReasoningFormat:
    """Return the format of reasoning of a chat template; if a text that ends reasoning is given, one that fits this.

    Raises:
        ValueError: there is none.
    """
    name = reasoning.format_name(template)
    names = [*([] if name is None else [name]), *([] if end_text is None else reasoning.FORMATS)]
    formats = [reasoning.FORMATS[each] for each in names]
    found = next((each for each in formats if end_text is None or end_text.endswith(each.closings)), None)
    if found is None and end_text is None:
        raise ValueError("the chat template has no markers of reasoning")
    if found is None:
        closings = dict.fromkeys(text for each in formats for text in each.closings)
        raise ValueError(f"it ends with none of {', '.join(closings)}")
    return found


def _read(tokenizer: Any, format_: ReasoningFormat, end_text: str | None) -> Thinking:
    """Return the markers and the forced text as tokens.

    Raises:
        ValueError: a marker is no single token, or the text cannot be forced.
    """
    closing = next(text for text in format_.closings if end_text is None or end_text.endswith(text))
    start, end = _token_of(tokenizer, format_.openings[-1]), _token_of(tokenizer, closing)
    text = (end_text or closing).removesuffix(closing)
    special = next((each for each in getattr(tokenizer, "special_texts", {}) if each in text), None)
    body = [] if special else _ids(tokenizer, text)
    if special or {start, end} & set(body):
        raise ValueError(f"it has {special or 'a marker'} before its end")
    if len(body) >= MAX_FORCED:
        raise ValueError(f"it has {len(body) + 1} tokens, more than {MAX_FORCED}")
    return Thinking(start, end, (*body, end))


def _token_of(tokenizer: Any, marker: str) -> int:
    specials = getattr(tokenizer, "special_texts", {})
    ids = [specials[marker]] if marker in specials else _ids(tokenizer, marker)
    if len(ids) != 1:
        raise ValueError(f"the marker {marker} of its reasoning is no single token")
    return ids[0]


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without those that the tokenizer adds."""
    return without_hidden(tokenizer.encode(text), tokenizer) if text else []
