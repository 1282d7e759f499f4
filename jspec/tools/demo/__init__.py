"""Runs `jspec demo`, which shows speculative decoding with a small pair of models of this package.

The target is a Llama model with 7 layers and 2,048 tokens, which writes Python. It was trained on the sources and the
documentation of Python (their licence is beside the weights), and tuned on functions that end: of 100 functions and
classes that it writes greedily behind first lines of modules that it did not read, 95 end and parse. The code that
trained it is in git, last in commit 5d6877e5 (`jspec/tools/demo/training`). Its logits are sharpened: at temperature 1
it writes as the trained weights do at 1 / 1.5, as models that are trained to answer are sharper than those that only
read text. The drafter is an EAGLE-3.1 head of two layers that `jspec train` made for this target, as it made the DFlash
head that is also here.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.engine.callers.api import Engine
from jspec.engine.request.request import Completion
from jspec.engine.request.sampling_params import SamplingParams
from jspec.tools.colour import has_colours, legend, painted
from jspec.tools.table import table

FOLDER = Path(__file__).parent
TARGET, HEAD, DFLASH = FOLDER / "target", FOLDER / "head", FOLDER / "dflash_head"
PROMPT = 'class Cache:\n    """A cache of results."""\n\n    def __init__(self'
TOKENS = 96
LENGTH = 3  # draft tokens per round
NAME = "demo"  # name of the embedded pair on the command line
EXPLANATION = """mean acceptance length: tokens per forward pass of the target; plain decoding has 1.00
speed-up: this target is only 1.5 times as large as its head, and a CPU takes longer for several tokens than for one;
a round of an 8B target on a GPU takes 1.24 times as long as a plain step (README.md)"""
NEXT = """next:
  jspec generate --target demo --eagle3 demo "def parse_args(argv"
  jspec chat --target meta-llama/Llama-3.1-8B-Instruct --eagle3 yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
  notebooks/1_quickstart.ipynb shows the same from Python"""
OPTIONS: dict[str, Any] = dict(slots=1, max_len=512, prefill_buckets=(128,), dtype="float32")
OPTIONS |= dict(controls=False)  # smaller programs, which compile sooner


def folder(path: str | Path, kind: str) -> str | Path:
    """Return the embedded folder for the name "demo", and any other path unchanged.

    Args:
        path: "demo", a folder or a hub id.
        kind: "target", "draft_model" (the target itself), "dflash", or another kind of head, for which the EAGLE-3 head
            stands.
    """
    if str(path) != NAME:
        return path
    return {"target": TARGET, "draft_model": TARGET, "dflash": DFLASH}.get(kind, HEAD)


def engine(*, drafted: bool) -> Engine:
    """Make an engine of the embedded target, with the embedded EAGLE-3 head if ``drafted``, else without drafter."""
    drafter = Eagle3.from_pretrained(HEAD, tree=Tree.chain(LENGTH), dtype="float32") if drafted else None
    return Engine.from_pretrained(TARGET, drafter=drafter, **OPTIONS)


def run(out: TextIO | None = None) -> int:
    """Run `jspec demo`: print a completion with its drafted tokens in colour, then compare it with plain decoding.

    Args:
        out: stream to print to; None: the standard output.

    Returns:
        0 if both texts are equal, else 1.
    """
    out = sys.stdout if out is None else out
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    with engine(drafted=True) as speculative, engine(drafted=False) as plain:
        _print_completion(speculative, params, out)
        results = {"plain": _timed(plain, params), f"EAGLE-3 chain of {LENGTH}": _timed(speculative, params)}
    print(_comparison(results), file=out)
    is_equal = len({completion.text for completion, _ in results.values()}) == 1
    verdict = "identical output: lossless" if is_equal else "THE TWO OUTPUTS DIFFER: please report this"
    print(f"{EXPLANATION}\n\n{verdict}\n\n{NEXT}", file=out)
    return 0 if is_equal else 1


def _print_completion(engine: Engine, params: SamplingParams, out: TextIO) -> None:
    """Print prompt and completion, with drafted tokens in colour on a terminal, and the share of drafted tokens."""
    colours = has_colours(out)
    print(f"{legend()}\n" if colours else "A small model continues this code:\n", file=out)
    print(PROMPT, end="", file=out)
    drafted = 0
    for chunk in engine.stream(PROMPT, params):
        drafted += sum(chunk.from_draft)
        print(painted(chunk) if colours else chunk.text, end="", file=out, flush=True)
    print(f" ...\n\ncut after {TOKENS} tokens, of which {drafted / TOKENS:.0%} were drafted and accepted\n", file=out)


def _timed(engine: Engine, params: SamplingParams) -> tuple[Completion, float]:
    """Complete the prompt three times; return the last completion, and the speed of the fastest run in tokens/s."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        completion = engine.generate(PROMPT, params)[0].raise_for_error()
        best = min(best, time.perf_counter() - began)
    return completion, len(completion.token_ids) / best


def _comparison(results: dict[str, tuple[Completion, float]]) -> str:
    """Return the table of speeds and counters; the first result is plain decoding."""
    rows = [["", "tokens/s", "speed-up", "rounds", "mean acceptance length"]]
    (_, plain), *_ = results.values()
    for name, (completion, speed) in results.items():
        metrics, ratio = completion.metrics, f"{speed / plain:.1f}x"
        rows.append([name, f"{speed:.0f}", ratio, str(metrics.num_drafts), f"{metrics.mean_acceptance_length:.2f}"])
    return table(rows)
