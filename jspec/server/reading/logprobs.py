"""Log-probabilities in the forms of OpenAI's two routes and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

from jspec.engine.request.token_logprobs import TokenLogprob
from jspec.engine.text.tokenizer import Tokenizer

LEAST = -9999.0  # stands for minus infinity, which JSON lacks; OpenAI's value


@final
class ShownTokens:
    """The text and the bytes of single tokens.

    Args:
        tokenizer: the engine's tokenizer; None: the text of a token is its id.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> list[bytes | None]:
        """The bytes of each token; [] if they depend on the tokens around it. Takes a second for large vocabularies."""
        try:
            return [] if self._tokenizer is None else self._tokenizer.token_bytes()
        except ValueError:
            return []

    @cached_property
    def _specials(self) -> dict[int, str]:
        return {token: text for text, token in getattr(self._tokenizer, "special_texts", {}).items()}

    def prepare(self) -> None:
        """Read the vocabulary, which a worker thread should do before the event loop needs it."""
        _ = self._bytes, self._specials

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; of a special token, those of its name."""
        if token in self._specials:
            return self._specials[token].encode()
        known = self._bytes[token] if token < len(self._bytes) else None
        if known is not None:
            return known
        text = "" if self._tokenizer is None else self._tokenizer.decode([token])
        return (text or f"<{token}>").encode()

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", errors="replace")


def chat_entries(records: Sequence[TokenLogprob], texts: ShownTokens) -> list[dict[str, Any]]:
    """Return the log-probabilities of output tokens in the form of the chat route, one entry a token."""
    return [
        {
            **_entry(record.token_id, record.logprob, texts),
            "top_logprobs": [_entry(token, logprob, texts) for token, logprob in record.top.items()],
        }
        for record in records
    ]


def _entry(token: int, logprob: float, texts: ShownTokens) -> dict[str, Any]:
    encoded = texts.bytes_of(token)
    return {"token": encoded.decode("utf-8", errors="replace"), "logprob": max(logprob, LEAST), "bytes": list(encoded)}


def completion_logprobs(
    records: Sequence[TokenLogprob | None], tokens: Sequence[int], offsets: Sequence[int], texts: ShownTokens
) -> dict[str, Any]:
    """Return log-probabilities in the form of the completions route.

    Args:
        records: one record a token; None for the first token of a prompt.
        tokens: token ids.
        offsets: where the text of each token begins.
    """
    return {
        "tokens": [texts.text_of(token) for token in tokens],
        "token_logprobs": [None if record is None else max(record.logprob, LEAST) for record in records],
        "top_logprobs": [None if record is None else _top(record, texts) for record in records],
        "text_offset": list(offsets),
    }


def _top(record: TokenLogprob, texts: ShownTokens) -> dict[str, float]:
    """Return the likeliest tokens and the token itself by text; of tokens with one text, the likeliest counts."""
    chosen = {record.token_id: record.logprob}
    top: dict[str, float] = {}
    for token, logprob in {**record.top, **chosen}.items():
        text = texts.text_of(token)
        top[text] = max(logprob, top.get(text, LEAST))
    return top


def prompt_entries(records: Sequence[TokenLogprob | None], texts: ShownTokens) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt's tokens in vLLM's form: for each token, entries by token id."""
    return [None if record is None else _by_id(record, texts) for record in records]


def _by_id(record: TokenLogprob, texts: ShownTokens) -> dict[str, Any]:
    ranks = {token: rank for rank, token in enumerate(record.top, 1)} | {record.token_id: record.rank}
    logprobs = {**record.top, record.token_id: record.logprob}
    return {
        str(token): {"logprob": max(logprobs[token], LEAST), "rank": rank, "decoded_token": texts.text_of(token)}
        for token, rank in ranks.items()
    }
