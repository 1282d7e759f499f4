"""Text to token ids and back, and text from a stream of ids.

One interface over byte models and Hugging Face tokenizers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

REPLACEMENT = "\ufffd"
BLANK = "\u2581"  # SentencePiece's
CONTEXT = 8  # tokens in front of new ones, so that a piece keeps its leading blank and a character its bytes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer.

    Attributes:
        vocab_size: number of ids, added tokens included.
        hidden_ids: ids that `decode` leaves out (special tokens).
        byte_ids: ids that stand for one byte each in a run that is decoded as a whole: the run becomes text
            when all of it is UTF-8, and one replacement character a byte otherwise. Empty where bytes are
            decoded one by one.
    """

    vocab_size: int
    hidden_ids: frozenset[int]
    byte_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the model's tokenizer adds."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation up to where the answer begins.

        Raises:
            ValueError: there is no chat template.
        """
        ...

    def token_bytes(self) -> list[bytes | None]:
        """The bytes of UTF-8 that each id adds to a text; None for those that have no text.

        Raises:
            ValueError: what a token adds depends on the tokens around it.
        """
        ...


class ByteTokenizer:
    """One token a byte, ids 0 to 255. What is no UTF-8, or no byte, shows as a replacement character."""

    vocab_size = 256
    hidden_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        no_byte = 0xFF  # never part of UTF-8
        return bytes(token if token < 256 else no_byte for token in ids).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ValueError("the byte tokenizer has no chat template: write the prompt as text and use generate")

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([byte]) for byte in range(256)]


class HFTokenizer:
    """A Hugging Face tokenizer folder, read without a network."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises many kinds, some of them bare
            raise ValueError(
                f"{folder}: expected tokenizer files that transformers can read, got "
                f"{type(error).__name__}: {error}; mend the folder, or pass tokenizer=None for ids in and out"
            ) from error
        self.vocab_size = len(self._tokenizer)
        self.hidden_ids = frozenset(i for i in self._tokenizer.added_tokens_decoder if self.decode([i]) == "")
        self.byte_ids = self._byte_ids()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        # No clean-up of blanks before punctuation: it would change text that has been streamed.
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{self._folder}: the tokenizer has no chat template (expected chat_template in "
                "tokenizer_config.json or a chat_template.jinja): write the prompt as text and use generate"
            )
        messages = [dict(message) for message in messages]
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def token_bytes(self) -> list[bytes | None]:
        spell, known = self._spelling(), {token: i for i, token in enumerate(_byte_level_letters())}
        spelled: list[bytes | None] = [None] * self.vocab_size
        for token, i in self._tokenizer.get_vocab().items():
            if i in self.byte_ids:
                spelled[i] = bytes([int(token[3:5], 16)])
            elif spell == "SentencePiece":
                spelled[i] = token.replace(BLANK, " ").encode()
            elif all(letter in known for letter in token):
                spelled[i] = bytes(known[letter] for letter in token)
        for i, added in self._tokenizer.added_tokens_decoder.items():
            spelled[i] = added.content.encode()
        return [None if i in self.hidden_ids else one for i, one in enumerate(spelled)]

    def _spelling(self) -> str:
        """How the vocabulary writes text: as letters that stand for bytes, or as it is but for blanks."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None and backend.decoder is not None:
            state = json.loads(backend.decoder.__getstate__())
            steps = state.get("decoders", [state])
            if any(step["type"] == "ByteLevel" for step in steps):
                return "ByteLevel"
            blanks = [step for step in steps if step.get("pattern") == {"String": BLANK} and step["content"] == " "]
            if blanks or any(step["type"] == "Metaspace" for step in steps):
                return "SentencePiece"
        raise ValueError(
            f"{self._folder}: expected a tokenizer of bytes (byte-level BPE) or of SentencePiece's kind, whose tokens "
            "have the same text wherever they stand; a grammar needs that"
        )

    def _byte_ids(self) -> frozenset[int]:
        """Ids of the tokens <0x00> to <0xFF>, where the tokenizer falls back to bytes."""
        vocab = self._tokenizer.get_vocab()
        ids = {byte: vocab.get(f"<0x{byte:02X}>") for byte in range(256)}
        letter = ids[ord("A")]
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        return frozenset(i for i in ids.values() if i is not None)


def _byte_level_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where that can be seen, else one from U+0100 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def load_tokenizer(source: str | os.PathLike[str] | None) -> Tokenizer | None:
    """The tokenizer of a model folder.

    Args:
        source: a folder, "bytes" for models whose tokens are bytes, or None.

    Returns:
        None for None and for a folder without tokenizer files: ids in and out, no text.

    Raises:
        ValueError: no such folder, or files that cannot be read.
    """
    if source is None:
        return None
    if source == "bytes":
        return ByteTokenizer()
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f'tokenizer: expected a folder, "bytes" or None, got {str(source)!r}: no such folder')
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return HFTokenizer(folder)


def front_ids(tokenizer: Tokenizer) -> list[int]:
    """An id with a text of its own: behind it a token keeps the blank that SentencePiece's lose in front of a text."""
    for token in range(tokenizer.vocab_size):
        if token not in tokenizer.hidden_ids and token not in tokenizer.byte_ids:
            text = tokenizer.decode([token])
            if text.strip() and REPLACEMENT not in text:
                return [token]
    return []


class IncrementalDetokenizer:
    """Text of a stream of ids, handed out as soon as no later id can change it.

    All pieces together are `decode` of prompt and ids, less what `decode` of the prompt alone begins it with.
    The cost of a push does not grow with what was pushed before: only a window of the last tokens is decoded.

    What is held back: the last character while it may be a part of one (at most three bytes), and a run of
    byte-fallback tokens until it ends, because one bad byte turns the whole run into replacement characters.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._tail(self._visible(prompt_ids))
        end = len(self._window)
        while end and self._window[end - 1] in tokenizer.byte_ids:
            end -= 1
        text = tokenizer.decode(self._window)
        self._sent = _settled(text if end == len(self._window) else tokenizer.decode(self._window[:end]))
        self._echo = text[self._sent :]  # the prompt's open end, said again only if the new ids change it

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the new text that is final."""
        visible = self._visible(ids)
        self._window += visible
        if not visible or self._window[-1] in self._tokenizer.byte_ids:
            return ""
        text = self._tokenizer.decode(self._window)
        piece = self._take(text, _settled(text))
        if len(self._window) > 4 * CONTEXT:
            self._shorten(len(text) - self._sent)
        return piece

    def finish(self) -> str:
        """The rest of the text, complete or not."""
        text = self._tokenizer.decode(self._window)
        return self._take(text, len(text))

    def _visible(self, ids: Iterable[int]) -> list[int]:
        return [token for token in ids if token not in self._tokenizer.hidden_ids]

    def _take(self, text: str, end: int) -> str:
        """The text from what was sent to ``end``, which is sent from now on."""
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if piece and self._echo:
            piece, self._echo = piece[_shared(piece, self._echo) :], ""
        return piece

    def _shorten(self, unsent: int) -> None:
        """Drop old tokens; ``unsent`` characters at the end of the window's text stay to be sent."""
        self._window = self._tail(self._window)
        self._sent = len(self._tokenizer.decode(self._window)) - unsent

    def _tail(self, ids: list[int]) -> list[int]:
        """The last tokens: a byte run at the end is kept whole, and some text stands before what follows."""
        start = len(ids)
        while start and ids[start - 1] in self._tokenizer.byte_ids:
            start -= 1
        start = max(start - CONTEXT, 0)
        while start and not self._tokenizer.decode(ids[start:]):
            start = max(2 * start - len(ids), 0)
        return ids[start:]


def _settled(text: str) -> int:
    """Characters that no later token can change: an unfinished one shows as one replacement character."""
    return len(text) - text.endswith(REPLACEMENT)


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
