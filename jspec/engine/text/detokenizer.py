"""Decodes a stream of token ids to text, and cuts the text before the first stop string. Runs on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy

from jspec.engine.text.stop_strings import StopStringMatcher
from jspec.engine.text.token_texts import REPLACEMENT, TokenTexts
from jspec.engine.text.tokenizer import Tokenizer

NO_STOPS = StopStringMatcher(())  # has no state, so all decoders without stop strings share it
CONTEXT = 8  # earlier tokens decoded with new ones, to keep leading blanks and all bytes of a character


class TextDecoder:
    """Decodes the tokens of one completion into pieces of text, one per token, and stops at the first stop string.

    Args:
        tokenizer: the tokenizer; None: every piece is empty.
        prompt_ids: tokens before the completion; they decide whether its first blank is kept.
        stop: stop strings; of several that end at one character, the first one counts.
        stop_ids: tokens that end the completion; their text is left out.
        min_tokens: number of first tokens in which no stop string counts.
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
        self._matcher = StopStringMatcher(stop) if stop else NO_STOPS
        self._stop_ids, self._min_tokens = stop_ids, min_tokens

    def copy(self) -> TextDecoder:
        """Return a decoder for another completion of the prompt, before any token is pushed.

        Both decoders share what was computed of the prompt and of the stop strings.
        """
        other = copy(self)
        other._detokenizer = None if self._detokenizer is None else self._detokenizer.copy()
        other._matcher = self._matcher.copy()
        return other

    @property
    def has_text(self) -> bool:
        """Return whether tokens are decoded to text; False without a tokenizer."""
        return self._detokenizer is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found and before which the text is cut; None: none was found."""
        return self._matcher.found

    def push(self, tokens: Sequence[int], num_before: int) -> list[str]:
        """Decode new tokens to pieces, one per token, up to the token that completes a stop string.

        Args:
            tokens: new tokens of the completion.
            num_before: number of tokens pushed earlier.
        """
        texts = self._texts(tokens)
        if not self._matcher:
            return list(texts)
        pieces: list[str] = []
        for count, text in enumerate(texts, num_before + 1):
            pieces.append(self._matcher.push(text, may_end=count > self._min_tokens))
            if self.stop_string is not None:
                break
        return pieces

    def _texts(self, tokens: Sequence[int]) -> Iterable[str]:
        """Decode new tokens to texts, one per token."""
        if self._detokenizer is None:
            return [""] * len(tokens)
        shown = [token for token in tokens if token not in self._stop_ids]
        texts = self._detokenizer.pieces(shown)
        if len(shown) == len(tokens):
            return texts
        each = iter(texts)
        return ("" if token in self._stop_ids else next(each) for token in tokens)

    def finish(self, num_tokens: int) -> str:
        """Return the held-back text, cut before a stop string; call this when the completion has ended.

        Args:
            num_tokens: number of tokens in the whole completion.
        """
        if self._detokenizer is None:
            return ""
        text = self._matcher.push(self._detokenizer.finish(), may_end=num_tokens > self._min_tokens)
        return text + self._matcher.finish()


class IncrementalDetokenizer:
    """Decodes a stream of token ids, and emits text as soon as no later id can change it.

    All emitted text together equals ``decode(prompt + ids)`` without the leading ``decode(prompt)``. Each `push`
    decodes only a window of the last tokens, so its cost does not grow with the number of earlier ids.

    Two kinds of text are held back: the last character while it may be incomplete, and a run of byte tokens until the
    run ends, because one invalid byte turns the whole run into replacement characters.

    While nothing is held back, a token that has the same text everywhere needs no decoding: `TokenTexts` has its text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._tail(self._visible(prompt_ids))
        end = len(self._window)
        while end and self._window[end - 1] in tokenizer.byte_ids:
            end -= 1
        text = tokenizer.decode(self._window)
        self._sent = _final_length(text if end == len(self._window) else tokenizer.decode(self._window[:end]))
        self._echo = text[self._sent :]  # incomplete end of the prompt's text, emitted only if new ids change it
        self._token_texts: TokenTexts | None = getattr(tokenizer, "token_texts", None)
        self._is_settled = self._can_settle(text)  # whether `pieces` may use the texts of tokens; `_sent` is then stale

    def copy(self) -> IncrementalDetokenizer:
        other = copy(self)
        other._window = list(self._window)
        return other

    def pieces(self, ids: Sequence[int]) -> Iterable[str]:
        """Add ids; return or yield for each one the text that has become final with it."""
        if self._is_settled and self._token_texts is not None:
            texts = [self._token_texts[token] for token in ids]
            if None not in texts:
                self._window += self._visible(ids)
                if len(self._window) > 4 * CONTEXT:
                    self._window = self._tail(self._window)
                return texts  # type: ignore[return-value]  # no None is left
        return self._push_each(ids)

    def _push_each(self, ids: Sequence[int]) -> Iterator[str]:
        for token in ids:
            yield self.push([token])

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that has become final."""
        if self._is_settled:
            self._sent = len(self._tokenizer.decode(self._window))
        visible = self._visible(ids)
        self._window += visible
        if not visible:
            return ""
        self._is_settled = False
        if self._window[-1] in self._tokenizer.byte_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        piece = self._take(text, _final_length(text))
        if len(self._window) > 4 * CONTEXT:
            self._shorten(len(text) - self._sent)
        else:
            self._is_settled = self._can_settle(text)
        return piece

    def finish(self) -> str:
        """Return the text that `push` has held back, even if its last character is incomplete."""
        if self._is_settled:
            return ""
        text = self._tokenizer.decode(self._window)
        return self._take(text, len(text))

    def _can_settle(self, text: str) -> bool:
        """Return whether all of the window's text is emitted, so that it ends with a whole character."""
        return self._token_texts is not None and text != "" and not self._echo and self._sent == len(text)

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._tokenizer.hidden_ids]

    def _take(self, text: str, end: int) -> str:
        """Return the unsent characters of the window's text up to ``end``, and mark them as emitted."""
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if piece and self._echo:
            piece, self._echo = piece[_common_prefix_length(piece, self._echo) :], ""
        return piece

    def _shorten(self, unsent: int) -> None:
        """Drop old tokens from the window; the last ``unsent`` characters of its text are not emitted yet."""
        self._window = self._tail(self._window)
        self._sent = len(self._tokenizer.decode(self._window)) - unsent

    def _tail(self, ids: list[int]) -> list[int]:
        """Return the last tokens: the whole run of byte tokens at the end, and some tokens with text before it."""
        start = len(ids)
        while start and ids[start - 1] in self._tokenizer.byte_ids:
            start -= 1
        start = max(start - CONTEXT, 0)
        while start and not self._tokenizer.decode(ids[start:]):
            start = max(2 * start - len(ids), 0)
        return ids[start:]


def _final_length(text: str) -> int:
    """Count the characters that no later token can change, which are all but a replacement character at the end."""
    return len(text) - text.endswith(REPLACEMENT)


def _common_prefix_length(text: str, other: str) -> int:
    pairs = zip(text, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(text), len(other)))
