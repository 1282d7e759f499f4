"""Tokens a second over the batch: plain decoding, drafts of fixed depth, and the depth that an engine chooses itself.

Full batches alone are timed: from when every row has its first token until the first row has its last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

from jspec.core.tree import TREE_FORMS, Tree
from jspec.draft.base import Drafter
from jspec.draft.eagle import Eagle3
from jspec.engine.api import Engine
from jspec.engine.draft_length import Adaptive, Fixed, Policy, halvings
from jspec.engine.metrics import Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.engine.tokenizer import Tokenizer
from jspec.models.decoder import Model
from jspec.tools import check_head, demo
from jspec.tools.bench.acceptance import prompts
from jspec.tools.bench.numbers import ints
from jspec.tools.bench.report import environment, write
from jspec.tools.table import table

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TREE = Tree.chain(4)
TOKENS = 128
REPEATS = 9
PREFILL = 128  # tokens that a prompt may have


@dataclass(frozen=True)
class Case:
    """A pair and how it is run.

    Attributes:
        target, head: folders or hub ids; the head is an EAGLE-3 head.
        tokenizer: "bytes" for byte-level models; None: the target folder's.
        dtype: of the weights; None: float32 on CPU, bfloat16 elsewhere.
        tokens: that a row emits at most.
        repeats: that are timed, behind one that is not.
    """

    batches: tuple[int, ...] = BATCHES
    tree: Tree = TREE
    target: str = str(demo.TARGET)
    head: str = str(demo.HEAD)
    tokenizer: str | None = "bytes"
    dtype: str | None = None
    tokens: int = TOKENS
    temperature: float = 0.0
    repeats: int = REPEATS

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or self.tokens < 2:
            raise ValueError(f"adaptive: expected batches >= 1 and tokens >= 2, got {self.batches} and {self.tokens}")


@dataclass(frozen=True)
class Speed:
    """What a way to decode came to in a batch.

    Attributes:
        way: "plain", "depth K" or "adaptive".
        tokens_per_second: of all rows, median over repeats.
        spread: of that, largest less smallest.
        ratio: to plain decoding, median over repeats of two that were timed in the same turn.
        length: mean acceptance length.
        rounds_at: rounds of rows by the depth that was drafted.
    """

    way: str
    batch: int
    tokens_per_second: float
    spread: float
    ratio: float
    length: float
    rounds_at: dict[int, int]


def measure(case: Case) -> list[Speed]:
    """All ways in all batches; in a batch they take turns, so that what slows the machine down slows all."""
    target, words = check_head.load_target(case.target, case.tokenizer, dtype=case.dtype)
    drafter = Eagle3.from_pretrained(case.head, tree=case.tree, dtype=case.dtype)
    with _engine(case, target, words, None) as plain, _engine(case, target, words, drafter) as drafting:
        results = []
        for batch in sorted(set(case.batches)):
            results += _batch(case, batch, plain, drafting)
    return results


def _engine(case: Case, target: Model, words: Tokenizer, drafter: Drafter | None) -> Engine:
    slots = max(case.batches)
    return Engine(
        target,
        drafter=drafter,
        tokenizer=words,
        slots=slots,
        buckets=tuple(sorted(set(case.batches))),
        max_len=PREFILL + case.tokens,
        prefill_buckets=(PREFILL,),
        prefill_budget=PREFILL * slots,  # no round before all prompts are in
        prefix_cache=False,
        adaptive=drafter is not None,
        log_interval=None,
    )


def _batch(case: Case, batch: int, plain: Engine, drafting: Engine) -> list[Speed]:
    depths = halvings(case.tree.depth)
    ways: dict[str, tuple[Engine, Policy]] = {"plain": (plain, Fixed(0))}
    ways |= {f"depth {depth}": (drafting, Fixed(depth)) for depth in depths}
    ways["adaptive"] = (drafting, Adaptive(depths, shared_acceptance=case.tree.paths is not None))
    seen: dict[str, list[tuple[float, Metrics]]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(1 + case.repeats):
        for way in order:
            engine, policy = ways[way]
            engine.policy = policy
            seen[way].append(run(engine, case, batch))
        order.reverse()  # so that a machine that grows slower or faster favours none
    plains = [speed for speed, _ in seen["plain"][1:]]
    return [_speed(way, batch, runs[1:], plains) for way, runs in seen.items()]  # the first ones warm up


def run(engine: Engine, case: Case, batch: int) -> tuple[float, Metrics]:
    """Tokens a second of a full batch, and what was counted; nothing is under way behind it."""
    texts = list(islice(cycle(prompts()), batch))
    params = [
        SamplingParams(max_tokens=case.tokens, temperature=case.temperature, seed=seed, ignore_eos=True)
        for seed in range(batch)
    ]
    requests = [engine.submit(text, own) for text, own in zip(texts, params, strict=True)]
    while not all(request.token_ids for request in requests):
        engine.step()
    began, before = time.perf_counter(), sum(len(request.token_ids) for request in requests)
    while not any(request.finish_reason for request in requests):
        engine.step()
    seconds, tokens = time.perf_counter() - began, sum(len(request.token_ids) for request in requests) - before
    for request in requests:
        engine.abort(request)
    engine.step()  # reads what is still in flight
    done = [engine.result(request).raise_for_error() for request in requests]
    return tokens / seconds, sum((completion.metrics for completion in done), Metrics())


def _speed(way: str, batch: int, runs: Sequence[tuple[float, Metrics]], plains: Sequence[float]) -> Speed:
    speeds, metrics = [speed for speed, _ in runs], sum((own for _, own in runs), Metrics())
    return Speed(
        way=way,
        batch=batch,
        tokens_per_second=statistics.median(speeds),
        spread=max(speeds) - min(speeds),
        ratio=statistics.median(speed / plain for speed, plain in zip(speeds, plains, strict=True)),
        length=metrics.mean_acceptance_length,
        rounds_at=metrics.num_rounds_per_depth,
    )


def text(results: Sequence[Speed]) -> str:
    """One line a batch: tokens/s of plain decoding, of the others as multiples of it, and the depths chosen."""
    by_batch: dict[int, dict[str, Speed]] = {}
    for result in results:
        by_batch.setdefault(result.batch, {})[result.way] = result
    ways = [way for way in next(iter(by_batch.values())) if way != "plain"]
    rows = [["batch", "plain, tokens/s", *ways, "tokens a round", "depths chosen"]]
    for batch, own in by_batch.items():
        plain, adaptive = own["plain"].tokens_per_second, own["adaptive"]
        ratios = [f"{own[way].ratio:.2f}" for way in ways]
        rows.append([str(batch), f"{plain:.0f}", *ratios, f"{adaptive.length:.2f}", _shares(adaptive.rounds_at)])
    return table(rows)


def _shares(rounds_at: dict[int, int]) -> str:
    total = sum(rounds_at.values())
    return ", ".join(f"{depth}: {rounds_at[depth] / total:.0%}" for depth in sorted(rounds_at))


def write_json(path: Path, case: Case, results: Sequence[Speed]) -> None:
    """Environment, the case and results as one JSON object."""
    write(path, [asdict(result) for result in results], case=asdict(case) | {"tree": str(case.tree)})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec bench adaptive`."""
    parser.add_argument("--target", default=demo.TARGET, metavar="PATH", help="folder or hub id; the embedded one")
    parser.add_argument("--eagle3", default=demo.HEAD, metavar="PATH", help="likewise its EAGLE-3 head")
    parser.add_argument("--tokenizer", help='"bytes" for byte-level models; else the folder\'s own')
    parser.add_argument("--dtype", help="of the weights; float32 on CPU, bfloat16 elsewhere")
    parser.add_argument("--batch", type=ints, default=BATCHES, metavar=",".join(map(str, BATCHES)))
    parser.add_argument("--tree", type=Tree.parse, default=TREE, help=f"the largest that is drafted: {TREE_FORMS}")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="that a row emits at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    case = Case(
        batches=tuple(arguments.batch),
        target=str(arguments.target),
        head=str(arguments.eagle3),
        tokenizer=arguments.tokenizer or ("bytes" if arguments.target == demo.TARGET else None),
        **{name: getattr(arguments, name) for name in ("tree", "dtype", "tokens", "temperature", "repeats")},
    )
    results = measure(case)
    print(f"{case.tree} against plain decoding in full batches, as multiples of its speed; {environment()}")
    print(text(results))
    if arguments.json:
        write_json(arguments.json, case, results)
    return 0
