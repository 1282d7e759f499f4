"""Makes the tokenizer of the embedded target, and the tokens that it is trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from jspec.tools.demo.training.text import Document, bytes_of, documents, split

END = "<|endoftext|>"  # id 0; stands before each document and after the last, and begins every prompt
# Newlines and indentation are tokens of their own, so that a prompt may end with them; words have the space in front.
PIECES = r"\n|(?<=\n) +| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+"
VOCABULARY = 2048
REPEATS = {"modules": 2}  # how often the training text has the documents of a group, which is measured; others once
TRAIN, STARTS, HELD, INDEX = "train.npy", "starts.npy", "held_out.npy", "held_out.json"
PROMPTS = "prompts.jsonl"
TOKENIZER = "tokenizer.json"
PROMPT, COMPLETION = (16, 96), 128  # least and most tokens of a prompt, and tokens of a completion


def prepare(folders: Sequence[Path], out: Path, vocabulary: int = VOCABULARY, prompts: int = 0) -> None:
    """Write the tokenizer and the tokens of the text of some folders, and print the sizes.

    Args:
        folders: folders of Python sources and documentation.
        out: folder to write: tokenizer.json, tokenizer_config.json, the tokens to train on (uint16), the places in them
            where `block_starts` are (uint32), the tokens that are held out, and for each held-out document its name,
            group, first token, number of tokens and of bytes.
        vocabulary: tokens of the tokenizer.
        prompts: parts of the training text to write as lines of prompt and completion, to train a head with.
    """
    kept, held = split(documents(folders))
    if not kept or not held:
        raise ValueError(f"--text: expected folders with Python sources, got {', '.join(map(str, folders))}")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = trained([document.text for document in kept], vocabulary)
    write_tokenizer(tokenizer, out)
    repeated = [document for document in kept for _ in range(REPEATS.get(document.group, 1))]
    (tokens, _), (held_tokens, index) = (encoded(tokenizer, some) for some in (repeated, held))
    np.save(out / TRAIN, tokens)
    starts = block_starts(tokenizer, tokens)
    np.save(out / STARTS, starts)
    np.save(out / HELD, held_tokens)
    (out / INDEX).write_text(json.dumps(index))
    with (out / PROMPTS).open("w") as lines:
        lines.writelines(f"{json.dumps(one)}\n" for one in parts_of(tokens, starts, tokenizer, prompts))
    for name, some, ids in (("train", repeated, tokens), ("held out", held, held_tokens)):
        count = sum(bytes_of(some).values())
        print(f"{name}: {len(some)} files, bytes {bytes_of(some)}, {len(ids)} tokens of {count / len(ids):.2f} bytes")


def parts_of(tokens: np.ndarray, starts: np.ndarray, tokenizer: Tokenizer, count: int) -> Iterator[dict[str, str]]:
    """Yield parts of a text that begin at random ones of the given places: a prompt, and what follows it."""
    random = np.random.default_rng(0)
    for start in random.choice(starts, count).tolist():
        size = int(random.integers(*PROMPT))
        cut = (slice(start, start + size), slice(start + size, start + size + COMPLETION))
        prompt, completion = (tokenizer.decode(tokens[part].tolist()) for part in cut)
        yield {"prompt": prompt, "completion": completion}


def trained(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE (arXiv:1508.07909) of so many tokens, which encodes every text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = (END, tokenizer.token_to_id(END))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[end])
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files of a tokenizer as Hugging Face's folders have them."""
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encoded(tokenizer: Tokenizer, found: Sequence[Document]) -> tuple[np.ndarray, list[dict[str, str | int]]]:
    """Return the tokens of all documents, each behind an end token, and where each document lies among them."""
    parts: list[np.ndarray] = []
    index: list[dict[str, str | int]] = []
    start = 0
    for document, encoding in zip(found, tokenizer.encode_batch([one.text for one in found]), strict=True):
        ids = np.array(encoding.ids, np.uint16)
        sizes = {"tokens": len(ids), "bytes": len(document.text.encode())}
        index.append({"name": document.name, "group": document.group, "start": start, **sizes})
        parts.append(ids)
        start += len(ids)
    return np.concatenate([*parts, parts[0][:1]]), index


def block_starts(tokenizer: Tokenizer, tokens: np.ndarray) -> np.ndarray:
    """Return the places of tokens that begin a line without indentation behind an empty line."""
    vocabulary = tokenizer.get_vocab()
    newline, end = vocabulary["Ċ"], vocabulary[END]
    spaces = [token for text, token in vocabulary.items() if text.startswith(("Ġ", "Ċ", "ĉ"))]
    is_newline = tokens == newline
    is_start = is_newline[:-2] & is_newline[1:-1] & ~np.isin(tokens[2:], [*spaces, end])
    return (np.flatnonzero(is_start) + 2).astype(np.uint32)
