"""Measures a target with `jspec.Engine`: bits a byte of held-out text, and how much of what it writes is Python."""

from __future__ import annotations

import ast
import codeop
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.demo.training.prepare import HELD, INDEX

HEADS = 100  # `def` and `class` lines that are completed
TOKENS = 200  # tokens of a completion


def evaluate(folder: Path, data: Path) -> None:
    """Measure a target and print its bits a byte of held-out modules, and the shares of completions that parse.

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
        verdicts = [verdict(text) for text in completions(engine, heads(texts))]
        print(parsed(verdicts), flush=True)
        bits = sum(code_length(engine, module, context - 1) for module in modules)
    print(f"held-out modules: {bits / sum(one['bytes'] for one in index):.3f} bits a byte")


def heads(texts: Sequence[str], count: int = HEADS) -> list[str]:
    """Return ``count`` different lines of some texts, evenly spaced, that begin a function or a class."""
    lines = [line for text in texts for line in text.splitlines()]
    found = [line for line in lines if line.startswith(("def ", "class ")) and line.endswith(":")]
    unique = list(dict.fromkeys(found))
    return unique[:: max(1, len(unique) // count)][:count]


def completions(engine: Engine, prompts: Sequence[str]) -> list[str]:
    """Return each prompt with its greedy completion."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    done = engine.generate(list(prompts), params)
    return [f"{prompt}{one.raise_for_error().text}" for prompt, one in zip(prompts, done, strict=True)]


def parsed(verdicts: Sequence[str]) -> str:
    """Return two lines with the shares of completions that parse: as they are, and without an unfinished end."""
    whole, unfinished = (verdicts.count(kind) / len(verdicts) for kind in ("whole", "unfinished"))
    return (
        f"{whole:.0%} of {len(verdicts)} greedy completions after def and class lines parse up to the last whole line\n"
        f"{whole + unfinished:.0%} parse if a last statement that the limit of {TOKENS} tokens cuts off is left out"
    )


def verdict(text: str) -> str:
    """Say whether a text parses as Python up to its last whole line.

    Returns:
        "whole" if it does; "unfinished" if more lines could make it parse, as the text ends within brackets, a string
        or a block; else "wrong".
    """
    lines = text[: text.rfind("\n") + 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in strings
        try:
            ast.parse(lines)
        except SyntaxError:
            return _unfinished(lines)
    return "whole"


def _unfinished(lines: str) -> str:
    try:
        return "unfinished" if codeop.compile_command(lines, symbol="exec") is None else "wrong"
    except (SyntaxError, ValueError, OverflowError):
        return "wrong"


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
