"""Folders of small tokenizers in the kinds that published models use, each built here from a few pages of English."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support import tiny

BLANK = "▁"  # SentencePiece's character for a blank
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIALS = ["<unk>", "<s>", "</s>"]
WORDS = (  # a word with the blank before it, digits, punctuation and line ends, as in Qwen2's files
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def lines() -> list[str]:
    """The English text from which the vocabularies are built, by lines without blanks at their ends."""
    text = "Once upon a time, there was a little girl.\n" * 20 + tiny.english()
    return [line.strip() for line in text.splitlines()]


def merged_pieces(size: int, splits: pre_tokenizers.PreTokenizer | None) -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges of a BPE vocabulary over text whose blanks are marked as SentencePiece marks them.

    Args:
        size: number of pieces.
        splits: where pieces must end; None: a piece may hold several words.
    """
    trained = Tokenizer(models.BPE())
    if splits is not None:
        trained.pre_tokenizer = splits
    text = [BLANK + line.replace(" ", BLANK) for line in lines()]
    trained.train_from_iterator(text, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    return sorted(state["vocab"], key=state["vocab"].get), [tuple(merge) for merge in state["merges"]]


def llama(pieces: list[str], merges: list[tuple[str, str]], *, has_bytes: bool) -> Tokenizer:
    """A tokenizer as in Llama 2: a blank before the text, <s> in front, and bytes for unknown characters."""
    tokens = [*SPECIALS, *(BYTE_TOKENS if has_bytes else []), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=has_bytes, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(SPECIALS)
    return made


def sentencepiece() -> tuple[Tokenizer, dict[str, Any]]:
    """512 tokens: special tokens, bytes, and pieces of words with the blank before them."""
    splits = pre_tokenizers.Split(BLANK, "merged_with_next")
    made = llama(*merged_pieces(512 - len(SPECIALS) - len(BYTE_TOKENS), splits), has_bytes=True)
    return made, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def many_words() -> tuple[Tokenizer, dict[str, Any]]:
    """2048 tokens without bytes; a token may hold several words and end with a blank."""
    made = llama(*merged_pieces(2048 - len(SPECIALS), None), has_bytes=False)
    own = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True, "add_eos_token": False}
    return made, own | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}


def byte_level(specials: tuple[str, ...] = ("<|endoftext|>",)) -> tuple[Tokenizer, dict[str, Any]]:
    """1200 tokens as in GPT-2: each character of a piece stands for a byte."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = dict(initial_alphabet=alphabet, special_tokens=list(specials), show_progress=False)
    made.train_from_iterator(lines(), trainers.BpeTrainer(vocab_size=1200, **options))
    return made, dict.fromkeys(("bos_token", "eos_token", "unk_token"), specials[0])


def chat() -> tuple[Tokenizer, dict[str, Any]]:
    """As in Qwen2: byte-level, text in Unicode's composed form, and a chat template."""
    made, own = byte_level(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    return made, own | {"eos_token": "<|im_end|>", "chat_template": CHATML}


def metaspace() -> tuple[Tokenizer, dict[str, Any]]:
    """As in T5 and some Llama conversions: byte fallback, and a blank before all words but the first."""
    words = ["<unk>", "</s>", "▁", "▁a", "▁and", "an", "d", ".", ",", "c", "x", "m", "é"]
    vocab = {word: i for i, word in enumerate([*words, *BYTE_TOKENS])}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", BLANK)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    made.add_special_tokens(["<unk>", "</s>"])
    return made, {"unk_token": "<unk>", "eos_token": "</s>"}


KINDS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    one.__name__: one for one in (sentencepiece, many_words, byte_level, chat, metaspace)
}
PUBLISHED = {  # a tokenizer of each kind under the folder of outside data
    "sentencepiece": "stories260k",
    "many_words": "tinystories656k",
    "byte_level": "tokenizers/gpt2",
    "chat": "tokenizers/qwen2.5",
}


def write(folder: Path, kind: str) -> Path:
    """Write the files of a tokenizer of ``kind``, a key of `KINDS`, to the folder; return the folder."""
    made, config = KINDS[kind]()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder
