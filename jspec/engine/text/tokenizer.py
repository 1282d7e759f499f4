"""Tokenizers that convert between text and token ids: one for bytes, and one for files of Hugging Face."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from convert import hub
from convert.fields import CheckpointError, short
from jspec.engine.text.chat_template import ChatTemplate
from jspec.engine.text.token_texts import BLANK, TokenTexts, byte_level_letters, decodes_independently
from jspec.engine.text.tokenizer_files import MAX_VOCAB, REMEDY, TOKENIZER_FILES, named_faults, read_folder

ROUND_TRIPS = ("hello world", "Hello, world! See 42 trees.")  # texts that every tokenizer with their letters keeps


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

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Convert a text to token ids.

        Args:
            add_special_tokens: whether to include the special tokens that the tokenizer adds; the engine itself never
                gives this argument.

        Raises:
            UnicodeEncodeError: the text has half of a surrogate pair.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Convert token ids to text; special tokens are left out."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Format a conversation with the chat template; return its token ids up to the assistant's next answer.

        Args:
            messages: mappings with "role" and "content".
            options: those of `jspec.engine.input.chat_input.TemplateFields` that the caller gave; tools are JSON
                schemas.

        Raises:
            ValueError: the tokenizer has no chat template, or the template fails or does not read an option.
        """
        ...

    def with_special_tokens(self, texts: Collection[str] | None = None) -> Tokenizer:
        """Return a tokenizer of the same tokens whose `decode` also gives the texts of special tokens.

        Needed only for requests with ``skip_special_tokens=False`` or ``visible_special_tokens``.

        Args:
            texts: texts of the special tokens that it shows, which need not be tokens; None: it shows all.
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
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        invalid = 0xFF  # no UTF-8 text contains this byte
        return bytes(token if token < 256 else invalid for token in ids).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        raise ValueError("the byte tokenizer has no chat template: write the prompt as text and use generate")

    def with_special_tokens(self, texts: Collection[str] | None = None) -> ByteTokenizer:
        return self

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([byte]) for byte in range(256)]


class HFTokenizer:
    """A Hugging Face tokenizer, read from a folder without network access and without code from the folder.

    Args:
        source: folder with the tokenizer's files, or a tokenizer of transformers.

    Attributes:
        eos_id: id of the tokenizer's EOS token; None: it has none.

    Raises:
        CheckpointError: the files are damaged, have no vocabulary, need code of their own, or the tokenizer that
            transformers makes of them loses blanks.
    """

    def __init__(self, source: Path | Any) -> None:
        made: Any = None if isinstance(source, Path) else source
        self._folder = Path(str(source if made is None else getattr(made, "name_or_path", "") or "tokenizer"))
        with named_faults(self._folder):
            self._tokenizer: Any = read_folder(self._folder) if made is None else made
            vocab = self._tokenizer.get_vocab()
            added = self._tokenizer.added_tokens_decoder
            if not vocab.keys() - {token.content for token in added.values()}:
                raise CheckpointError(self._folder, f"expected a vocabulary, got {len(vocab)} special tokens; {REMEDY}")
            self.vocab_size = max(len(self._tokenizer), 1 + max(vocab.values()), 1 + max(added, default=0))
            if (last := self.vocab_size - 1) >= MAX_VOCAB:  # lists of all tokens would exhaust the memory
                raise CheckpointError(self._folder, f"expected token ids below {MAX_VOCAB}, got {last}; {REMEDY}")
            self._skips_special_tokens = True
            self.hidden_ids = frozenset(i for i in added if self.decode([i]) == "")
            self.special_texts = {added[i].content: i for i in self.hidden_ids if added[i].content}
            self.added_ids = frozenset(i for i in added if added[i].content.strip())
            self._showing: dict[frozenset[int], HFTokenizer] = {}  # tokenizers that show some of the hidden ids
            self._chat_template = ChatTemplate(self._folder)
            self.byte_ids = self._byte_ids()
            self.eos_id: int | None = self._tokenizer.eos_token_id
            self._check_round_trips()

    def _check_round_trips(self) -> None:
        """Raise CheckpointError if the tokenizer loses blanks, as a class for another kind of file does."""
        for text in ROUND_TRIPS:
            got = self.decode(self._tokenizer.encode(text, add_special_tokens=False)).casefold()
            has_letters = "".join(got.split()) == "".join(text.casefold().split())
            if has_letters and got.split() != text.casefold().split():
                raise CheckpointError(
                    self._folder, f"expected a tokenizer that keeps a text's blanks, got {got!r} for {text!r} from "
                    f"{type(self._tokenizer).__name__}; correct tokenizer_class in tokenizer_config.json, or install "
                    "another version of transformers",
                )  # fmt: skip

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        text.encode("utf-8")  # raises UnicodeEncodeError, where tokenizers raises a TypeError without the reason
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int]) -> str:
        # Removing blanks before punctuation would change text that was streamed already.
        skips = self._skips_special_tokens
        shown = list(ids) if skips else [token for token in ids if token not in self.hidden_ids]
        return self._tokenizer.decode(shown, skip_special_tokens=skips, clean_up_tokenization_spaces=False)

    @property
    def repairs(self) -> tuple[str, ...]:
        """What was repaired in the folder's tokenizer when it was read, in words."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return ("Mistral's regular expression for words",) if getattr(backend, "fix_mistral_regex", False) else ()

    def with_special_tokens(self, texts: Collection[str] | None = None) -> HFTokenizer:
        names = self.special_texts
        shown = self.hidden_ids if texts is None else frozenset(names[text] for text in texts if text in names)
        if texts is not None and not shown:
            return self
        if shown not in self._showing:
            other = copy(self)
            other._skips_special_tokens, other._showing = False, {}
            other.hidden_ids = self.hidden_ids - shown
            other.special_texts = {text: token for text, token in names.items() if token in other.hidden_ids}
            other.__dict__.pop("token_texts", None)
            self._showing[shown] = other
        return self._showing[shown]

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template, or several by name; None: there is none."""
        return self._tokenizer.chat_template or None

    @chat_template.setter
    def chat_template(self, template: str) -> None:
        self._tokenizer.chat_template = template

    @cached_property
    def token_texts(self) -> TokenTexts | None:
        """The texts of single tokens, for the detokenizer; None if the decoder does not decode tokens one by one."""
        return TokenTexts(self) if decodes_independently(self._tokenizer) else None

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if not self._tokenizer.chat_template and "{" not in options.get("chat_template", ""):
            raise ValueError(
                f"{self._folder}: the tokenizer has no chat template (expected chat_template in "
                "tokenizer_config.json or a chat_template.jinja): write the prompt as text and use generate"
            )
        text = self._chat_template.render(self._tokenizer, messages, **options)
        return self.encode(text, add_special_tokens=False)

    def token_bytes(self) -> list[bytes | None]:
        kind, byte_of = self._vocabulary_kind(), {letter: i for i, letter in enumerate(byte_level_letters())}
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
        """Return the vocabulary's kind, "ByteLevel" or "SentencePiece".

        Tokens of the first kind have one letter for each byte. Those of the second kind are text in which a special
        letter stands for a blank.

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


def load_tokenizer(source: Any) -> Tokenizer | None:
    """Load a tokenizer.

    Args:
        source: a folder, a hub id ("owner/name"), "bytes" for models whose tokens are bytes, a tokenizer of
            transformers, a `Tokenizer`, or None.

    Returns:
        The tokenizer; None if ``source`` is None or a folder without tokenizer files.

    Raises:
        ValueError: the folder does not exist, or its files cannot be read.
        FileNotFoundError: the hub has no such tokenizer.
        TypeError: the source is of another type.
    """
    if source is None:
        return None
    if source == "bytes":
        return ByteTokenizer()
    if hasattr(source, "hidden_ids") and hasattr(source, "byte_ids"):
        return source
    if hasattr(source, "get_vocab") and hasattr(source, "added_tokens_decoder"):
        return HFTokenizer(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f'tokenizer: expected a folder, a hub id, a tokenizer of transformers, "bytes" or None, got {short(source)}'
        )
    folder = Path(source).expanduser().absolute()
    if not folder.is_dir() and not hub.is_id(source):
        raise ValueError(f'tokenizer: expected a folder, "bytes" or None, got {str(source)!r}: no such folder')
    folder = hub.find(source, tokenizer=True)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return HFTokenizer(folder)


def warn_if_replaced(tokenizer: Tokenizer | None, folder: Path) -> None:
    """Warn if bytes are the tokens for a target whose folder has a tokenizer of its own."""
    files = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if isinstance(tokenizer, ByteTokenizer) and files:
        warnings.warn(
            f'{folder}: expected the folder\'s own tokenizer ({files[0]}), got tokenizer="bytes"; leave it out, unless '
            "the target's tokens are bytes",
            stacklevel=3,
        )


def without_hidden(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    """Return token ids without those that texts hide, such as those that the tokenizer adds."""
    return [token for token in ids if token not in tokenizer.hidden_ids]


def encode(tokenizer: Tokenizer | None, text: str, name: str) -> list[int]:
    """Convert a caller's text to token ids.

    Args:
        name: the argument that has the text, for the errors.

    Raises:
        ValueError: there is no tokenizer, or the text has half of a surrogate pair.
    """
    if tokenizer is None:
        raise ValueError(
            f"{name}: expected token ids, because this engine has no tokenizer, got {short(text)}; pass tokenizer= "
            "to the engine or give ids"
        )
    try:
        return tokenizer.encode(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected a text that UTF-8 can represent, got an error: {error}") from None


def check_size(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise ValueError if a tokenizer gives ids that the target's vocabulary lacks.

    Special tokens beyond the vocabulary are accepted: some checkpoints add a padding token that the model lacks.

    Args:
        vocab_size: number of tokens of the target's vocabulary.
    """
    if tokenizer is None or all(token in tokenizer.hidden_ids for token in range(vocab_size, tokenizer.vocab_size)):
        return
    raise ValueError(
        f"tokenizer: expected ids below {vocab_size}, the target's vocabulary, got a tokenizer of "
        f"{tokenizer.vocab_size}; pass the target's own tokenizer"
    )
