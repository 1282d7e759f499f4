"""Tokenizers that convert between text and token ids: one for bytes, and one for files of Hugging Face."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jspec.engine.chat_template import ChatTemplate

REPLACEMENT = "\ufffd"
BLANK = "\u2581"  # SentencePiece's character for a blank
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class Tokenizer(Protocol):
    """The interface of a tokenizer, with the methods that the engine calls.

    Attributes:
        vocab_size: number of ids, added tokens included.
        hidden_ids: ids that `decode` leaves out (special tokens).
        byte_ids: ids of single bytes that are decoded in runs. A run becomes text if all of it is UTF-8, else one
            replacement character per byte. Empty if the tokenizer decodes bytes one by one.
    """

    vocab_size: int
    hidden_ids: frozenset[int]
    byte_ids: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Convert a text to token ids, including the special tokens that the tokenizer adds."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Convert token ids to text; special tokens are left out."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Format a conversation with the chat template; return its token ids up to the assistant's next answer.

        Args:
            messages: mappings with "role" and "content".

        Raises:
            ValueError: the tokenizer has no chat template.
        """
        ...

    def token_bytes(self) -> list[bytes | None]:
        """Return the UTF-8 bytes that each token id adds to a text, by token id; None for ids without text.

        Raises:
            ValueError: the bytes of a token depend on the tokens around it.
        """
        ...


class ByteTokenizer:
    """A tokenizer with one token per byte. Ids above 255 and invalid UTF-8 are decoded to replacement characters."""

    vocab_size = 256
    hidden_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        invalid = 0xFF  # no UTF-8 text contains this byte
        return bytes(token if token < 256 else invalid for token in ids).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise ValueError("the byte tokenizer has no chat template: write the prompt as text and use generate")

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([byte]) for byte in range(256)]


class HFTokenizer:
    """A Hugging Face tokenizer, read from a folder without network access."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises errors of many classes, also Exception itself
            raise ValueError(
                f"{folder}: expected tokenizer files that transformers can read, got "
                f"{type(error).__name__}: {error}; mend the folder, or pass tokenizer=None for ids in and out"
            ) from error
        self.vocab_size = len(self._tokenizer)
        self.hidden_ids = frozenset(i for i in self._tokenizer.added_tokens_decoder if self.decode([i]) == "")
        added = self._tokenizer.added_tokens_decoder
        self.special_texts = {added[i].content: i for i in self.hidden_ids if added[i].content}
        self.byte_ids = self._byte_ids()
        self._chat_template = ChatTemplate(folder)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        # Removing blanks before punctuation would change text that was streamed already.
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"{self._folder}: the tokenizer has no chat template (expected chat_template in "
                "tokenizer_config.json or a chat_template.jinja): write the prompt as text and use generate"
            )
        text = self._chat_template.render(self._tokenizer, messages)
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def token_bytes(self) -> list[bytes | None]:
        kind, byte_of = self._vocabulary_kind(), {letter: i for i, letter in enumerate(_byte_level_letters())}
        texts: list[bytes | None] = [None] * self.vocab_size
        for token, i in self._tokenizer.get_vocab().items():
            if i in self.byte_ids:
                texts[i] = bytes([int(token[3:5], 16)])
            elif kind == "SentencePiece":
                texts[i] = token.replace(BLANK, " ").encode()
            elif all(letter in byte_of for letter in token):
                texts[i] = bytes(byte_of[letter] for letter in token)
        for i, added in self._tokenizer.added_tokens_decoder.items():
            texts[i] = added.content.encode()
        return [None if i in self.hidden_ids else text for i, text in enumerate(texts)]

    def _vocabulary_kind(self) -> str:
        """Return the vocabulary's kind: "ByteLevel" (one letter per byte) or "SentencePiece" (text with marked blanks).

        Raises:
            ValueError: the vocabulary is of another kind.
        """
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
        """Return the ids of the byte tokens <0x00> to <0xFF>; empty if the tokenizer does not use byte tokens."""
        vocab = self._tokenizer.get_vocab()
        ids = {byte: vocab.get(f"<0x{byte:02X}>") for byte in range(256)}
        letter = ids[ord("A")]
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        return frozenset(i for i in ids.values() if i is not None)


def _byte_level_letters() -> list[str]:
    """Return the letter of each byte in byte-level BPE: the byte itself if printable, else a letter from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def load_tokenizer(source: str | os.PathLike[str] | None) -> Tokenizer | None:
    """Load the tokenizer of a model folder.

    Args:
        source: a folder, "bytes" for models whose tokens are bytes, or None.

    Returns:
        The tokenizer; None if ``source`` is None or the folder has no tokenizer files.

    Raises:
        ValueError: the folder does not exist, or its files cannot be read.
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
