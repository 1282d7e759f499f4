"""Measures a target with `jspec.Engine`: bits a byte of held-out text, and how many functions it writes that parse.

Functions are judged as in HumanEval (arXiv:2107.03374, section 2.1): the target goes on behind a first line until
another statement begins in column 0, where its text is cut off.
"""

from __future__ import annotations

import ast
import codeop
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.demo.training.prepare import HELD, INDEX

HEADS = 100  # `def` and `class` lines that are completed
STEP = 128  # tokens after which a completion is looked at


def evaluate(folder: Path, data: Path) -> None:
    """Measure a target and print its bits a byte of held-out modules, and the shares of completions that end and parse.

    Args:
        folder: folder of the target and its tokenizer.
        data: folder of `jspec.tools.demo.training.prepare.prepare`.
    """
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    tokens = np.load(data / HELD)
    index = [one for one in json.loads((data / INDEX).read_text()) if one["group"] == "modules"]
    modules = [tokens[one["start"] : one["start"] + one["tokens"]] for one in index]
    with Engine.from_pretrained(folder, slots=8, max_len=context) as engine:
        tokenizer = engine.tokenizer
        assert tokenizer is not None, "the folder has a tokenizer"
        texts = [tokenizer.decode(module[1:].tolist()) for module in modules]
        print(shares(completions(engine, heads(texts), context)), flush=True)
        bits = sum(code_length(engine, module, context - 1) for module in modules)
    print(f"held-out modules: {bits / sum(one['bytes'] for one in index):.3f} bits a byte")


def heads(texts: Sequence[str], count: int = HEADS) -> list[str]:
    """Return ``count`` of the `first_lines` of some texts, evenly spaced."""
    lines = first_lines(texts)
    return lines[:: max(1, len(lines) // count)][:count]


def first_lines(texts: Sequence[str]) -> list[str]:
    """Return the different lines of some texts that begin a function or a class."""
    lines = [line for text in texts for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith(("def ", "class ")) and line.endswith(":")))


@dataclass
class Written:
    """A completion of the first line of a function or a class.

    Attributes:
        tokens: tokens of the line and of its completion.
        text: text of both, up to the end of the function or class.
        has_ended: whether another statement or the end of the document follows, and not the limit of the context.
    """

    tokens: list[int]
    text: str
    has_ended: bool = False

    @property
    def parses(self) -> bool:
        """Whether it ended, and is Python."""
        return self.has_ended and is_python(self.text)


def completions(engine: Engine, prompts: Sequence[str], context: int) -> list[Written]:
    """Return the greedy completion of each prompt, up to the end of its statement or of the context."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    all_written = [Written(list(tokenizer.encode(prompt)), prompt) for prompt in prompts]
    open_ones = all_written
    while open_ones:
        steps = [min(STEP, context - len(one.tokens)) for one in open_ones]
        params = [SamplingParams(max_tokens=step, temperature=0.0) for step in steps]
        done = engine.generate([one.tokens for one in open_ones], params)
        for one, more in zip(open_ones, done, strict=True):
            one.tokens += more.raise_for_error().token_ids
            one.text += more.text or ""
            end = statement_end(one.text)
            one.has_ended = end is not None or more.finish_reason == "eos"
            one.text = one.text[:end]
        open_ones = [one for one in open_ones if not one.has_ended and len(one.tokens) < context]
    return all_written


def statement_end(text: str) -> int | None:
    """Return where the first statement of a text ends: at a line that begins another one in column 0.

    Lines in column 0 within brackets or a string do not end it. A statement that is no Python ends there too.

    Returns:
        Number of characters before that line; None if there is none.
    """
    return next((end for end in _unindented(text) if is_python(text[:end]) or not _is_unfinished(text[:end])), None)


def _unindented(text: str) -> Iterator[int]:
    """Yield where lines but the first begin that have no space in front; the last line may be incomplete."""
    start = text.find("\n") + 1
    while 0 < start < len(text):
        if not text[start].isspace():
            yield start
        start = text.find("\n", start) + 1


def is_python(text: str) -> bool:
    """Return whether a text parses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True


def _is_unfinished(text: str) -> bool:
    """Return whether a text that does not parse is the beginning of one that does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return codeop.compile_command(text, symbol="exec") is None
        except (SyntaxError, ValueError, OverflowError):
            return False


def shares(found: Sequence[Written]) -> str:
    """Return a line with the shares of completions that end, and that parse too."""
    ended, parsing = (sum(getattr(one, name) for one in found) / len(found) for name in ("has_ended", "parses"))
    return (
        f"of {len(found)} functions and classes written greedily behind a first line, {ended:.0%} end within the "
        f"context, and {parsing:.0%} parse"
    )


def code_length(engine: Engine, tokens: np.ndarray, width: int) -> float:
    """Return minus the log-probability of all tokens but the first, in bits.

    Args:
        engine: engine of the target.
        tokens: token ids.
        width: tokens of a request; a token has at least half as many before it, if the text has.
    """
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    starts = range(0, max(1, len(tokens) - width + width // 2), width // 2)
    done = engine.generate([tokens[start : start + width].tolist() for start in starts], params)
    nats, counted = 0.0, 1
    for start, one in zip(starts, done, strict=True):
        records = one.raise_for_error().prompt_logprobs
        assert records is not None
        new = records[counted - start :]
        nats -= sum(record.logprob for record in new if record is not None)
        counted += len(new)
    assert counted == len(tokens)
    return nats / math.log(2)
