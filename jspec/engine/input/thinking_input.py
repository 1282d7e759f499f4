"""Finds the markers of a model's reasoning among its tokens, and says how a request reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jspec.core.shorten import short
from jspec.core.thinking import MAX_FORCED, NO_THINKING, WAITS, WAITS_ONCE, Thinking
from jspec.engine.reading import reasoning
from jspec.engine.reading.answers import template_of
from jspec.engine.request.sampling_params import SamplingParams


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
        self._hidden_ids: frozenset[int] = frozenset() if tokenizer is None else tokenizer.hidden_ids
        self._closings: tuple[str, ...] = ()
        self._tokens: Thinking | None = None
        self._fault = ""
        try:
            self._tokens = self._read(tokenizer, end_text)
        except ValueError as error:
            if end_text is not None:
                raise ValueError(f"thinking_end: {error}, got {short(end_text)}") from None
            self._fault = str(error)

    def _read(self, tokenizer: Any, end_text: str | None) -> Thinking:
        """Return markers and forced text.

        Raises:
            ValueError: there are none that can be used.
        """
        if tokenizer is None:
            raise ValueError("expected an engine with a tokenizer; pass tokenizer= to the engine")
        name = reasoning.format_name(template_of(tokenizer))
        names = [name] if name is not None else []
        if end_text is not None:
            names = [
                each for each in (*names, *reasoning.FORMATS) if end_text.endswith(reasoning.FORMATS[each].closings)
            ]
        if not names:
            closings = dict.fromkeys(text for format_ in reasoning.FORMATS.values() for text in format_.closings)
            wanted = f"a text that ends with one of {', '.join(closings)}"
            if end_text is not None:
                raise ValueError(f"expected {wanted}")
            raise ValueError(
                f"expected a chat template with markers of reasoning; pass thinking_end= to Engine, {wanted}"
            )
        format_ = reasoning.FORMATS[names[0]]
        self._closings = format_.closings
        closing = next(text for text in format_.closings if end_text is None or end_text.endswith(text))
        start, end = _token_of(tokenizer, format_.openings[-1]), _token_of(tokenizer, closing)
        body = _ids(tokenizer, (end_text or closing).removesuffix(closing))
        if len(body) >= MAX_FORCED or {start, end} & set(body):
            raise ValueError(f"expected at most {MAX_FORCED} tokens, of which the last one alone is a marker")
        return Thinking(start, end, (*body, end))

    @property
    def end_id(self) -> int | None:
        """The token with which reasoning ends; None: no request of this engine can be known to reason."""
        return None if self._tokens is None else self._tokens.end

    def of(self, params: SamplingParams, prompt: Sequence[int]) -> Thinking:
        """Return how a request reasons.

        Reasoning counts if the request has a budget, or a grammar that can wait for its end. It has begun in the prompt
        if a start marker follows the last special token and the last end marker. With a budget it may also begin in the
        output: with the next start marker, or before a grammar with the first token alone.

        Raises:
            ValueError: the request has a budget, and the engine does not know the markers.
        """
        if params.thinking_budget is None and (self._tokens is None or params.grammar_field is None):
            return NO_THINKING
        if self._tokens is None:
            raise ValueError(f"thinking_budget: {self._fault}, got {params.thinking_budget}")
        begun, waits = self._begun(prompt), self._can_wait(params)
        if params.thinking_budget is None:
            return replace(self._tokens, begun=begun, grammar_waits=True) if waits and begun >= 0 else NO_THINKING
        if begun < 0 and params.grammar_field is not None:
            begun = WAITS_ONCE
        budget = max(params.thinking_budget, begun)
        return replace(self._tokens, begun=begun, budget=budget, grammar_waits=waits)

    def _begun(self, prompt: Sequence[int]) -> int:
        assert self._tokens is not None
        for count, token in enumerate(reversed(prompt)):
            if token == self._tokens.start:
                return count
            if token == self._tokens.end or token in self._hidden_ids:
                break
        return WAITS

    def _can_wait(self, params: SamplingParams) -> bool:
        """Return whether a request has a grammar, and this has no end marker of its own."""
        if params.grammar_field is None:
            return False
        text = getattr(params, params.grammar_field).replace("\\", "")
        return not any(marker in text for marker in (*self._closings, f"<[{self.end_id}]>"))


def _token_of(tokenizer: Any, marker: str) -> int:
    specials = getattr(tokenizer, "special_texts", {})
    ids = [specials[marker]] if marker in specials else _ids(tokenizer, marker)
    if len(ids) != 1:
        raise ValueError(f"expected a tokenizer with a token {marker}, which is {len(ids)} tokens here")
    return ids[0]


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text without those that the tokenizer adds.

    Raises:
        ValueError: the text has a special token.
    """
    special = next((each for each in getattr(tokenizer, "special_texts", {}) if each in text), None)
    if special is not None:
        raise ValueError(f"expected no special token in it but the marker, found {special}")
    return [token for token in tokenizer.encode(text) if token not in tokenizer.hidden_ids] if text else []
