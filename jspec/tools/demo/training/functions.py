"""Lets a target write functions and classes behind first lines, and keeps those that are worth training it on again.

So a target learns to end what it begins (rejection sampling, arXiv:2308.01825): decoded greedily, a small model that
only read text repeats itself until the context is full.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.demo.training.evaluate import first_lines, is_python, statement_end
from jspec.tools.demo.training.prepare import TRAIN

PROMPT, COMPLETION = 128, 256  # most tokens of a first line, and of what is written behind it
END = "\n\n\n"  # two empty lines end a function or a class
REPEATED = 0.35  # a text that deflate shortens to less than this part repeats itself
TOKENIZER = "tokenizer.json"


def write_functions(data: Path, target: Path, out: Path, *, seed: int, slots: int) -> None:
    """Write the functions and classes that a target samples behind the first lines of its training text.

    Args:
        data: folder of `jspec.tools.demo.training.prepare.prepare`.
        target: folder of the target.
        out: file to write, with a line for each text that is `good`.
        seed: seed of the samples; another one gives other texts behind the same lines.
        slots: texts that are written at once.
    """
    lines = first_lines(documents(data))
    sizes: Any = dict(slots=slots, buckets=(slots,), max_len=PROMPT + COMPLETION, prefill_buckets=(8 * PROMPT,))
    with Engine.from_pretrained(target, controls=False, prefix_cache=False, **sizes) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None
        lines = [line for line in lines if len(tokenizer.encode(line)) <= PROMPT]
        params = [
            SamplingParams(max_tokens=COMPLETION, temperature=1.0, stop=END, seed=len(lines) * seed + index)
            for index in range(len(lines))
        ]
        done = engine.generate(lines, params)
    ended = [
        f"{line}{one.text}"
        for line, one in zip(lines, done, strict=True)
        if one.raise_for_error().finish_reason != "length"
    ]
    kept = [text for text in (whole[: statement_end(whole)] for whole in ended) if good(text)]
    out.write_text("".join(f"{json.dumps({'text': text})}\n" for text in kept))
    print(f"{out}: {len(kept)} of {len(lines)} texts, {len(ended)} of which ended")


def documents(data: Path) -> list[str]:
    """Return the different documents of a prepared training text, in their order."""
    tokens, tokenizer = np.load(data / TRAIN), Tokenizer.from_file(str(data / TOKENIZER))
    parts = np.split(tokens, np.flatnonzero(tokens == 0))[1:]
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
