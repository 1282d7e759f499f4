"""Lets a target write functions and classes behind first lines, and keeps those that are worth training it on again.

So a target learns to end what it begins (rejection sampling, arXiv:2308.01825): decoded greedily, a small model that
only read text repeats itself until the context is full.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jspec.tools.demo.training.evaluate import first_lines, is_python, statement_end
from jspec.tools.demo.training.prepare import TOKENIZER, TRAIN
from jspec.tools.demo.training.sample import END, samples

PROMPT, COMPLETION = 128, 256  # most tokens of a first line, and of its completion
COUNT = 4  # samples behind a first line
REPEATED = 0.35  # a text that deflate shortens to less than this part repeats itself


def write_functions(data: Path, target: Path, out: Path, *, seed: int, count: int = COUNT) -> None:
    """Write the functions and classes that a target samples as completions of the first lines of its training text.

    Args:
        data: folder of `jspec.tools.demo.training.prepare.prepare`.
        target: folder of the target.
        out: file to write, with a line for each text that is `good`.
        seed: seed of the samples.
        count: samples behind each first line.
    """
    tokenizer = Tokenizer.from_file(str(target / TOKENIZER))
    lines = [line for line in first_lines(documents(data)) if len(tokenizer.encode(line).ids) <= PROMPT] * count
    found = samples(target, lines, [1.0] * len(lines), PROMPT + COMPLETION, seed=seed)
    whole = [function(f"{line}{one.text}", has_ended=one.has_ended) for line, one in zip(lines, found, strict=True)]
    kept = [text for text in whole if text is not None and good(text)]
    out.write_text("".join(f"{json.dumps({'text': text})}\n" for text in kept))
    print(f"{out}: {len(kept)} of {len(lines)} texts, {sum(text is not None for text in whole)} of which ended")


def function(text: str, *, has_ended: bool) -> str | None:
    """Return the first statement of a text; None if it does not end.

    Args:
        text: the text.
        has_ended: whether the document ends with it.
    """
    end = statement_end(text)
    return text[:end] if has_ended or end is not None else None


def documents(data: Path) -> list[str]:
    """Return the different documents of a prepared training text, in their order."""
    tokens, tokenizer = np.load(data / TRAIN), Tokenizer.from_file(str(data / TOKENIZER))
    parts = np.split(tokens, np.flatnonzero(tokens == END))[1:]
    return list(dict.fromkeys(tokenizer.decode_batch([part[1:].tolist() for part in parts])))


def good(text: str) -> bool:
    """Return whether a text parses, has more than a line, and does not repeat itself."""
    raw = text.strip().encode()
    return b"\n" in raw and is_python(text) and len(zlib.compress(raw)) >= REPEATED * len(raw)


def read_functions(files: list[Path], data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of written texts, each behind an end token, and the places where they begin."""
    tokenizer = Tokenizer.from_file(str(data / TOKENIZER))
    lines = [line for file in files for line in file.read_text().splitlines()]
    texts = [f"{json.loads(line)['text'].rstrip()}\n" for line in lines]
    parts = [np.array(one.ids, np.uint16) for one in tokenizer.encode_batch(texts)]  # begin with the end token
    starts = np.cumsum([0, *(len(part) for part in parts[:-1])]) + 1
    return np.concatenate(parts), starts.astype(np.uint32)
