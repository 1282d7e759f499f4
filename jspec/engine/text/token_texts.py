"""The texts of tokens that decode to the same characters wherever they stand, so that most need no decoding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jspec.engine.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
BLANK = "\u2581"  # SentencePiece's character for a blank

# Steps of a decoder that turn each token into text by itself, apart from byte tokens and the blank before a text.
INDEPENDENT_STEPS: tuple[dict[str, Any], ...] = (
    {"type": "ByteLevel"},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Metaspace", "replacement": BLANK},
    {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
    {"type": "Strip", "content": " ", "stop": 0},
)


class TokenTexts(dict[int, str | None]):
    """Maps a token id to the text that the token adds after any visible text of whole characters.

    The value is None for a token whose text depends on the tokens beside it: a byte token, or a token with a part of a
    character. Entries are made when they are first read.

    Args:
        tokenizer: a tokenizer that `decodes_independently`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context = visible_context(tokenizer)
        self._before = tokenizer.decode(self._context)

    def __missing__(self, token: int) -> str | None:
        self[token] = text = self._text_of(token)
        return text

    def _text_of(self, token: int) -> str | None:
        if not self._before or token in self._tokenizer.byte_ids:
            return None
        text = self._tokenizer.decode([*self._context, token])
        if REPLACEMENT in text or not text.startswith(self._before):
            return None
        return text[len(self._before) :]


def decodes_independently(tokenizer: Any) -> bool:
    """Return whether a tokenizer of transformers decodes by the `INDEPENDENT_STEPS` and nothing else."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return False
    methods = (type(tokenizer).decode, type(tokenizer)._decode)
    if not all(method.__module__.startswith("transformers.tokenization_utils") for method in methods):
        return False  # a class with its own way of decoding
    state = json.loads(backend.decoder.__getstate__())
    steps = state.get("decoders", [state])
    return all(any(step.items() >= known.items() for known in INDEPENDENT_STEPS) for step in steps)


def visible_context(tokenizer: Tokenizer) -> list[int]:
    """Find a token id with visible text; return it in a list, which is empty if there is none.

    SentencePiece tokenizers drop the leading blank of a text's first token. A token decoded after this id keeps it.
    """
    for token in range(tokenizer.vocab_size):
        if token not in tokenizer.hidden_ids and token not in tokenizer.byte_ids:
            text = tokenizer.decode([token])
            if text.strip() and REPLACEMENT not in text:
                return [token]
    return []


def byte_level_letters() -> list[str]:
    """Return the letter of each byte in byte-level BPE: the byte itself if printable, else a letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
