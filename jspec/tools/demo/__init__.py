"""`jspec demo`: shows speculative decoding with a small pair of models that is part of the package.

The target is a Llama with 8 layers and 256 byte tokens, the drafter an EAGLE-3 head of it; both were trained on Python
source.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.engine.api import Engine
from jspec.engine.request import Completion
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.table import table

FOLDER = Path(__file__).parent
TARGET, HEAD = FOLDER / "target", FOLDER / "head"
PROMPT = "class Config:\n    def _interpolate_some(self, parser, option, accum, "
TOKENS = 160
LENGTH = 3  # draft tokens per round
OPTIONS: dict[str, Any] = dict(slots=1, max_len=512, prefill_buckets=(128,), tokenizer="bytes", dtype="float32")
COLOURS = {True: "\033[36m", False: "\033[33m"}
RESET = "\033[0m"


def engine(*, drafted: bool) -> Engine:
    """An engine with the embedded target, with the embedded EAGLE-3 head as drafter if ``drafted``, else without."""
    drafter = Eagle3.from_pretrained(HEAD, tree=Tree.chain(LENGTH), dtype="float32") if drafted else None
    return Engine.from_pretrained(TARGET, drafter=drafter, **OPTIONS)


def run(out: TextIO = sys.stdout) -> int:
    """Run `jspec demo`: print a completion with draft tokens in their own colour, then compare it with plain decoding.

    Args:
        out: stream to print to.

    Returns:
        0 if both texts are equal, else 1.
    """
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    print("compiling (a few seconds) ...", file=out, flush=True)
    with engine(drafted=True) as speculative, engine(drafted=False) as plain:
        colour = out.isatty()
        _legend(out, colour)
        print(PROMPT, end="", file=out)
        for chunk in speculative.stream(PROMPT, params):
            print(_painted(chunk.text or "", chunk.from_draft, colour), end="", file=out, flush=True)
        print("\n", file=out)
        results = {
            name: _timed(one, params) for name, one in (("plain", plain), (f"EAGLE-3 chain of {LENGTH}", speculative))
        }
    print(_comparison(results), file=out)
    texts = {completion.text for completion, _ in results.values()}
    equal = len(texts) == 1
    print("the two texts are equal" if equal else "THE TWO TEXTS DIFFER", file=out)
    return 0 if equal else 1


def _legend(out: TextIO, colour: bool) -> None:
    if colour:
        print(f"{COLOURS[True]}drafted and accepted{RESET}, {COLOURS[False]}the target's own{RESET}\n", file=out)
    else:
        print("drafted and accepted text is in [brackets]\n", file=out)


def _painted(text: str, from_draft: list[bool], colour: bool) -> str:
    """The text of one round, with the text of draft tokens in colour or, without colours, in brackets.

    Args:
        text: text of the round, one character per token, draft tokens first.
        from_draft: whether each token is a draft token.
        colour: whether to print in colour.
    """
    drafted = sum(from_draft)
    parts = ((True, text[:drafted]), (False, text[drafted:]))
    if colour:
        return "".join(f"{COLOURS[kind]}{part}{RESET}" for kind, part in parts if part)
    return "".join(f"[{part}]" if kind else part for kind, part in parts if part)


def _timed(one: Engine, params: SamplingParams) -> tuple[Completion, float]:
    """A completion of the prompt, and the tokens/s of the fastest of three runs."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        completion = one.generate(PROMPT, params)[0].raise_for_error()
        best = min(best, time.perf_counter() - began)
    return completion, len(completion.token_ids) / best


def _comparison(results: dict[str, tuple[Completion, float]]) -> str:
    rows = [["", "tokens/s", "rounds", "mean acceptance length"]]
    for name, (completion, speed) in results.items():
        metrics = completion.metrics
        rows.append([name, f"{speed:.0f}", str(metrics.num_drafts), f"{metrics.mean_acceptance_length:.2f}"])
    return table(rows)
