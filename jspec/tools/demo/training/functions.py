"""Gathers functions and classes that a target learns to end: those of its training text, and its own.

Decoded greedily, a small model that only read text repeats itself until the context is full. Here are the texts that
teach it to end: functions and classes of the text, each cut out; those that the target itself samples behind first
lines, of which the shortest that ends, parses and does not repeat itself is kept (rejection sampling,
arXiv:2308.01825); and its greedy loops, whose repeated tokens are made less probable (arXiv:1908.04319, section 5.2).
"""

from __future__ import annotations

import ast
import json
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from jspec.tools.demo.training.evaluate import first_lines, is_python, statement_end
from jspec.tools.demo.training.fit import Own
from jspec.tools.demo.training.prepare import TOKENIZER, TRAIN
from jspec.tools.demo.training.sample import END, samples

LINE = 64  # most tokens of a first line
SIZE = 320  # most tokens of a text, its end token included
LINES = 4096  # first lines that a target completes
HEATS = (0.0, 0.4, 0.7, 1.0)  # temperatures of the samples behind a first line
CHARACTERS = 5  # a text with more characters than these for each of its tokens at most is not tokenised
REPEATED = 0.35  # a text that deflate shortens to less than this part repeats itself
AGAIN = 8  # tokens that are a repetition if they stood in the text before


def cut_functions(data: Path, out: Path) -> None:
    """Write the functions, the methods and the classes of a prepared training text that are short enough.

    A longer class is cut behind one of its statements.

    Args:
        data: folder of `jspec.tools.demo.training.prepare.prepare`.
        out: file to write, with a line for each text.
    """
    tokenizer = Tokenizer.from_file(str(data / TOKENIZER))
    found = [
        [piece for piece in pieces if len(piece) <= CHARACTERS * SIZE]
        for document in documents(data)
        if is_python(document)
        for pieces in statements(document)
    ]
    sizes = iter(len(one.ids) for one in tokenizer.encode_batch([piece for pieces in found for piece in pieces]))
    cuts = [[piece for piece in pieces if next(sizes) <= SIZE] for pieces in found]
    kept = list(dict.fromkeys(pieces[-1] for pieces in cuts if pieces))
    _write(out, [(text, True) for text in kept])
    print(f"{out}: {len(kept)} of {len(found)} functions and classes")


def statements(source: str) -> Iterator[Iterator[str]]:
    """Yield the functions, the methods and the classes of a source, each as its parts from the shortest to the whole.

    A function has one part, a class one up to each of its statements. Methods have no indentation.
    """
    lines = source.splitlines(keepends=True)

    def between(first: ast.stmt, last: ast.stmt) -> str:
        return textwrap.dedent("".join(lines[first.lineno - 1 : last.end_lineno]))

    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(source).body:
        if isinstance(node, functions):
            yield iter([between(node, node)])
        elif isinstance(node, ast.ClassDef):
            yield (between(node, last) for last in node.body)
            yield from (iter([between(own, own)]) for own in node.body if isinstance(own, functions))


def write_functions(data: Path, target: Path, out: Path, *, seed: int) -> None:
    """Write what is to be learnt of a target's completions of the first lines of its training text.

    Args:
        data: folder of `jspec.tools.demo.training.prepare.prepare`.
        target: folder of the target.
        out: file to write, with a line for the shortest `good` text behind each first line, and for each greedy one
            that repeats itself without end.
        seed: seed of the samples.
    """
    tokenizer = Tokenizer.from_file(str(target / TOKENIZER))
    every = first_lines(documents(data))
    chosen = [every[place] for place in np.random.default_rng(seed).permutation(len(every))[:LINES]]
    lines = [line for line in chosen if len(tokenizer.encode(line).ids) <= LINE]
    heats = [heat for heat in HEATS for _ in lines]
    found = samples(target, lines * len(HEATS), heats, SIZE + 1, seed=seed)
    kept: dict[tuple[str, bool], str] = {}
    for line, heat, one in zip(lines * len(HEATS), heats, found, strict=True):
        text = f"{line}{one.text}"
        whole = function(text, has_ended=one.has_ended)
        is_good = whole is not None and good(whole)
        if is_good or (whole is None and heat == 0 and repeats(text)):
            text = whole or text
            kept[line, is_good] = min(kept.get((line, is_good), text), text, key=len)
    _write(out, ((text, is_good) for (_, is_good), text in kept.items()))
    count = sum(is_good for _, is_good in kept)
    print(f"{out}: {count} good ones and {len(kept) - count} loops behind {len(lines)} first lines")


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
    return "\n" in text.strip() and is_python(text) and not repeats(text)


def repeats(text: str) -> bool:
    """Return whether a text repeats itself."""
    raw = text.strip().encode()
    return len(zlib.compress(raw)) < REPEATED * len(raw)


def read_functions(files: Sequence[Path], data: Path) -> Own:
    """Return the texts of some files as rows to train on; smaller files are repeated to the rows of the largest.

    Raises:
        ValueError: a line of a file has not the fields that `_write` writes, or a file has no lines.
    """
    tokenizer = Tokenizer.from_file(str(data / TOKENIZER))
    found = [_rows(_read(file), tokenizer) for file in files]
    most = max(len(one.tokens) for one in found)
    return Own(
        *(np.concatenate([np.resize(x, (most, *x.shape[1:])) for x in parts]) for parts in zip(*found, strict=True))
    )


def _read(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if not lines or not all({"text", "is_good"} <= line.keys() for line in lines):
        raise ValueError(
            f"--own: expected lines with text and is_good, got {'other ones' if lines else 'none'} in {file}; "
            "write the file by --cut or --functions"
        )
    return lines


def _rows(found: list[dict[str, Any]], tokenizer: Tokenizer) -> Own:
    """Return texts as rows."""
    rows = tokenizer.encode_batch([f"{one['text'].rstrip()}\n" for one in found])
    own = Own(np.full((len(rows), SIZE + 1), END, np.uint16), np.zeros((len(rows), SIZE), np.int8))
    for tokens, signs, row, one in zip(*own, rows, found, strict=True):
        ids = row.ids[: SIZE + 1]  # begin with the end token
        tokens[: len(ids)] = ids
        if one["is_good"]:
            signs[: len(ids)] = 1
        else:
            signs[: len(ids) - 1] = -again(ids)[1:]
    return own


def again(ids: Sequence[int]) -> np.ndarray:
    """Return for each token 1 if it and the ones before it are a repetition of `AGAIN` tokens, else 0."""
    seen, found = set[tuple[int, ...]](), np.zeros(len(ids), np.int8)
    for end in range(AGAIN, len(ids) + 1):
        part = tuple(ids[end - AGAIN : end])
        found[end - 1] = part in seen
        seen.add(part)
    return found


def _write(out: Path, texts: Iterable[tuple[str, bool]]) -> None:
    """Write texts, each with whether it is a good one."""
    out.write_text("".join(f"{json.dumps({'text': text, 'is_good': is_good})}\n" for text, is_good in texts))
