"""Runs `jspec demo`, which shows speculative decoding with a small pair of models of this package.

The target is a Llama model with 7 layers and 2,048 tokens, which writes Python. It was trained on the sources and the
documentation of Python (their licence is beside the weights), and tuned on functions that end: of 100 functions and
classes that it writes greedily behind first lines of modules that it did not read, 95 end and parse. The code that
trained it is in git, last in commit 5d6877e5 (`jspec/tools/demo/training`). Its logits are sharpened: at temperature 1
it writes as the trained weights do at 1 / 1.5, as models that are trained to answer are sharper than those that only
read text. The drafter is an EAGLE-3.1 head of two layers that `jspec train` made for this target, as it made the DFlash
head that is also here.

The command widens the target's feed-forwards with zeros, which computes the same in more time (`widened`): a step of
the target then takes longer than one of its head, as it does for large models.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import jspec
from jspec.tools.colour import has_colours, legend, painted
from jspec.tools.progress import settled
from jspec.tools.table import table

if TYPE_CHECKING:  # the command line parses its options before it imports jax
    from jspec import Completion, Engine, Model, SamplingParams

FOLDER = Path(__file__).parent
TARGET, HEAD, DFLASH = FOLDER / "target", FOLDER / "head", FOLDER / "dflash_head"
PROMPT = '''class Index:
    """An index of items."""

    def __init__(self, items=()):
        """Initialize the items."""
        self.items = items

    def '''
TOKENS = 89  # they end with a line
LENGTH = 3  # draft tokens per round
WIDTH = 4096  # channels of the widened feed-forwards, instead of 384
RUNS = 4  # of each engine, in turns
BAR = 40  # characters of the longest bar
NAME = "demo"  # name of the embedded pair on the command line
NAMES = "plain", f"EAGLE-3 chain of {LENGTH}"
EXPLANATION = f"""Plain decoding takes a forward pass of the target for each token. With a draft a
pass also checks {LENGTH} guesses of a small head, and keeps those that are right.
The target's layers were widened from 384 to {WIDTH} channels, without a change of
what they compute, so that it costs more than its head, as large targets do."""
NEXT = """next:
  jspec serve --live
      serves this pair, with a page that shows each draft tree
  jspec generate --target demo --eagle3 demo "def parse_args(argv"
  jspec chat --target demo --eagle3 demo
  notebooks/1_quickstart.ipynb shows the same from Python"""
OPTIONS: dict[str, Any] = dict(slots=1, max_len=512, prefill_buckets=(128,))
OPTIONS |= dict(controls=False)  # smaller programs, which compile sooner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `jspec demo`, which has no options, on a parser."""
    parser.set_defaults(run=lambda arguments: run())


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


def engine(*, drafted: bool, target: Model | None = None) -> Engine:
    """Make an engine of the embedded target, with the embedded EAGLE-3 head if ``drafted``, else without drafter.

    Args:
        target: a model that computes the same as the embedded target; None: this one.
    """
    drafter = jspec.Eagle3.from_pretrained(HEAD, tree=jspec.Tree.chain(LENGTH), dtype="float32") if drafted else None
    model = jspec.Model.from_pretrained(TARGET, dtype="float32") if target is None else target
    return jspec.Engine(model, drafter=drafter, tokenizer=str(TARGET), **OPTIONS)


def widened() -> Model:
    """Return the embedded target with feed-forwards of `WIDTH` channels, of which all but the trained ones are zero."""
    from jspec.tools.bench.inflate.convert import grow_pair

    model = jspec.Model.from_pretrained(TARGET, dtype="float32")
    return grow_pair(model, {"intermediate_size": WIDTH})[0]


def run(out: TextIO | None = None) -> int:
    """Run `jspec demo`: print a completion with its drafted tokens in colour, then compare it with plain decoding.

    Args:
        out: stream to print to; None: the standard output.

    Returns:
        0 if both texts are equal, else 1.
    """
    out = sys.stdout if out is None else out
    params = jspec.SamplingParams(max_tokens=TOKENS, temperature=0)
    target = widened()
    with engine(drafted=True, target=target) as speculative, engine(drafted=False, target=target) as plain:
        _print_completion(speculative, params, out)
        results = _in_turns((plain, speculative), params)
    passes, speeds = _passes(results), _speeds(results)
    print(f"{passes}\n\n{EXPLANATION}\n\n{speeds}\n", file=out)
    is_equal = len({completion.text for completion, _ in results}) == 1
    verdict = "identical output: lossless" if is_equal else "THE TWO OUTPUTS DIFFER: please report this"
    print(f"{verdict}\n\n{NEXT}", file=out)
    return 0 if is_equal else 1


def _print_completion(engine: Engine, params: SamplingParams, out: TextIO) -> None:
    """Print prompt and completion, with drafted tokens in colour on a terminal, and the share of drafted tokens."""
    colours = has_colours(out)
    chunks = list[Any]()
    for chunk in settled(engine.stream(PROMPT, params)):
        if not chunks:
            print(f"{legend()}\n" if colours else "A small model continues this code:\n", file=out)
            print(PROMPT, end="", file=out)
        chunks.append(chunk)
        print(painted(chunk) if colours else chunk.text, end="", file=out, flush=True)
    tokens = sum(len(chunk.token_ids) for chunk in chunks)
    drafted = sum(sum(chunk.from_draft) for chunk in chunks) / tokens
    print(f" ...\n\ncut after {tokens} tokens, of which {drafted:.0%} were drafted and accepted\n", file=out)


def _in_turns(engines: tuple[Engine, ...], params: SamplingParams) -> list[tuple[Completion, float]]:
    """Complete the prompt with each engine in turns; return the last completions, and the shortest time of each."""
    done, best = list[Any]([None] * len(engines)), [float("inf")] * len(engines)
    for _ in range(RUNS):
        for index, engine in enumerate(engines):
            began = time.perf_counter()
            done[index] = engine.generate(PROMPT, params)[0].raise_for_error()
            best[index] = min(best[index], time.perf_counter() - began)
    return list(zip(done, best, strict=True))


def _passes(results: list[tuple[Completion, float]]) -> str:
    """Return the numbers of forward passes after the prompt as bars."""
    numbers = [completion.metrics.num_drafts for completion, _ in results]
    rows = zip(NAMES, numbers, strict=True)
    lines = [f"  {name:<20}{number:>3}  {'=' * round(BAR * number / max(numbers))}" for name, number in rows]
    plain, drafted = numbers
    return "\n".join([f"forward passes of the target: {plain} -> {drafted}", *lines])


def _speeds(results: list[tuple[Completion, float]]) -> str:
    """Return the table of speeds; the first result is plain decoding."""
    import jax

    rows = [["", "tokens/s", "speed-up", "tokens per pass"]]
    slowest = results[0][1]
    for name, (completion, seconds) in zip(NAMES, results, strict=True):
        speed, length = len(completion.token_ids) / seconds, completion.metrics.mean_acceptance_length
        rows.append([name, f"{speed:.0f}", f"{slowest / seconds:.1f}x", f"{length:.2f}"])
    device = jax.default_backend().upper()
    return f"speed on this {device}, the best of {RUNS} runs in turns:\n{table(rows)}"
