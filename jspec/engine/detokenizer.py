"""Text from a stream of token ids, emitted as soon as it is final and cut before the first stop string. Host only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from jspec.engine.stop_strings import StopStringMatcher
from jspec.engine.tokenizer import REPLACEMENT, Tokenizer

CONTEXT = 8  # tokens decoded before new ones, so that a piece keeps its leading blank and a character all its bytes


class TextDecoder:
    """Pieces of text for the tokens of one completion.

    Args:
        tokenizer: None: every piece is empty.
        prompt_ids: tokens before the completion; they decide whether its first blank is shown.
        stop: stop strings, in the order of precedence.
        stop_ids: tokens that end the completion; they have no text.
        min_tokens: number of tokens before which no stop string matches.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = None if tokenizer is None else IncrementalDetokenizer(tokenizer, prompt_ids)
        self._matcher = StopStringMatcher(stop)
        self._stop_ids, self._min_tokens = stop_ids, min_tokens

    @property
    def has_text(self) -> bool:
        """Whether there is a tokenizer."""
        return self._detokenizer is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found; the text is cut before it."""
        return self._matcher.found

    def push(self, tokens: Sequence[int], num_before: int) -> list[str]:
        """The pieces of new tokens, one per token; the list ends with the token that completes a stop string.

        Args:
            num_before: tokens of the completion that were pushed before.
        """
        if self._detokenizer is None and not self._matcher:
            return [""] * len(tokens)
        pieces: list[str] = []
        for count, token in enumerate(tokens, num_before + 1):
            is_end = token in self._stop_ids
            text = "" if is_end or self._detokenizer is None else self._detokenizer.push([token])
            pieces.append(self._matcher.push(text, may_end=count > self._min_tokens))
            if self.stop_string is not None:
                break
        return pieces

    def finish(self, num_tokens: int) -> str:
        """The text that was held back, cut before a stop string.

        Args:
            num_tokens: tokens of the completion.
        """
        if self._detokenizer is None:
            return ""
        text = self._matcher.push(self._detokenizer.finish(), may_end=num_tokens > self._min_tokens)
        return text + self._matcher.finish()


class IncrementalDetokenizer:
    """Text of a stream of token ids, emitted as soon as no later id can change it.

    All pieces together equal `decode` of prompt and ids, without the beginning that `decode` of the prompt alone has.
    The cost of a push does not grow with the number of earlier ids: only a window of the last tokens is decoded.

    Text is held back in two cases: the last character while it may be incomplete (at most three bytes), and a run of
    byte-fallback tokens until it ends, because one bad byte makes the whole run replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._tail(self._visible(prompt_ids))
        end = len(self._window)
        while end and self._window[end - 1] in tokenizer.byte_ids:
            end -= 1
        text = tokenizer.decode(self._window)
        self._sent = _final_length(text if end == len(self._window) else tokenizer.decode(self._window[:end]))
        self._echo = text[self._sent :]  # unfinished end of the prompt's text; emitted again only if new ids change it

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns the new text that is final."""
        visible = self._visible(ids)
        self._window += visible
        if not visible or self._window[-1] in self._tokenizer.byte_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        piece = self._take(text, _final_length(text))
        if len(self._window) > 4 * CONTEXT:
            self._shorten(len(text) - self._sent)
        return piece

    def finish(self) -> str:
        """The rest of the text, whether complete characters or not."""
        text = self._tokenizer.decode(self._window)
        return self._take(text, len(text))

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._tokenizer.hidden_ids]

    def _take(self, text: str, end: int) -> str:
        """The text from the last emitted character to ``end``; marks it as emitted."""
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if piece and self._echo:
            piece, self._echo = piece[_common_prefix_length(piece, self._echo) :], ""
        return piece

    def _shorten(self, unsent: int) -> None:
        """Drop old tokens from the window; the last ``unsent`` characters of its text remain to be emitted."""
        self._window = self._tail(self._window)
        self._sent = len(self._tokenizer.decode(self._window)) - unsent

    def _tail(self, ids: list[int]) -> list[int]:
        """The last tokens: a byte run at the end is kept whole, and some text precedes it."""
        start = len(ids)
        while start and ids[start - 1] in self._tokenizer.byte_ids:
            start -= 1
        start = max(start - CONTEXT, 0)
        while start and not self._tokenizer.decode(ids[start:]):
            start = max(2 * start - len(ids), 0)
        return ids[start:]


def visible_context(tokenizer: Tokenizer) -> list[int]:
    """One id that has text of its own.

    SentencePiece tokenizers drop the blank of the first token of a text; after this id a token keeps its blank.
    """
    for token in range(tokenizer.vocab_size):
        if token not in tokenizer.hidden_ids and token not in tokenizer.byte_ids:
            text = tokenizer.decode([token])
            if text.strip() and REPLACEMENT not in text:
                return [token]
    return []


def _final_length(text: str) -> int:
    """Number of characters that no later token can change: an incomplete one shows as one replacement character."""
    return len(text) - text.endswith(REPLACEMENT)


def _common_prefix_length(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
