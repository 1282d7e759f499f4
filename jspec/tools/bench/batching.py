"""`jspec bench batching`: the same requests one by one, all at once, and all at once without overlap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jspec.core.config import PREFILL_BUCKETS
from jspec.core.tree import Tree
from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.bench import report
from jspec.tools.bench.acceptance import prompts
from jspec.tools.bench.pair import Pair
from jspec.tools.table import table

PROMPT = 16  # characters: prefill is the same work in every way
WAYS = ("one by one", "all at once", "all at once, no overlap")


@dataclass(frozen=True)
class Way:
    """One way of serving.

    Attributes:
        tokens_per_second: median over repeats.
        ratio: of the first way's time to this one's, median over repeats of those that followed each other.
    """

    name: str
    tokens_per_second: float
    ratio: float


def measure(
    pair: Pair, tree: Tree | None, *, requests: int = 64, tokens: int = 64, repeats: int = 5, **options: Any
) -> tuple[list[Way], float]:
    """Serve in each way, in turns; the ways, and what overlap gains: time without it over time with it.

    Pages are not shared, so that a repeat is like the first.

    Args:
        requests: which is also the number of slots.
        tokens: of each answer.

    Raises:
        ValueError: fewer than two requests, or none of the others.
    """
    for name, value, least in (("requests", requests, 2), ("tokens", tokens, 1), ("repeats", repeats, 1)):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    texts = [list(pair.tokenizer.encode(text)) for text in prompts(requests, PROMPT)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    longest = max(map(len, texts))
    with pair.engine(
        tree,
        slots=requests,
        buckets=tuple(sorted({1, requests})),
        max_len=longest + tokens,
        prefill_buckets=(longest,),
        prefill_budget=PREFILL_BUCKETS[-1],  # an engine's own where prompts may be long
        prefix_cache=False,
        **options,
    ) as engine:
        runs = [lambda: [engine.generate(text, params) for text in texts], lambda: engine.generate(texts, params)]
        times = [[timed(engine, run, o) for run, o in _ways(runs)] for _ in range(repeats + 1)][1:]
    total = requests * tokens
    ways = [
        Way(
            name,
            total / statistics.median(line[i] for line in times),
            statistics.median(line[0] / line[i] for line in times),
        )
        for i, name in enumerate(WAYS)
    ]
    return ways, statistics.median(line[2] / line[1] for line in times)


def _ways(runs: Sequence[Callable[[], Any]]) -> list[tuple[Callable[[], Any], bool]]:
    """What runs, and whether it overlaps; in the order of `WAYS`."""
    one_by_one, at_once = runs
    return [(one_by_one, True), (at_once, True), (at_once, False)]


def timed(engine: Engine, run: Callable[[], Any], overlap: bool) -> float:
    """Seconds of a run; the programs are the same with and without overlap."""
    engine.config = replace(engine.config, overlap=overlap)
    began = time.perf_counter()
    run()
    engine.step()  # reads what is still in flight, which else the next run would pay for
    return time.perf_counter() - began


def text(ways: Sequence[Way], gain: float) -> str:
    """One line a way."""
    rows = [["", "tokens/s", f"beside {WAYS[0]}"]]
    rows += [[way.name, f"{way.tokens_per_second:.1f}", f"{way.ratio:.2f}"] for way in ways]
    return f"{table(rows)}\nwith overlap {gain:.3f} times as fast as without"


def write_json(path: Path, ways: Sequence[Way], gain: float) -> None:
    """Environment and results as one JSON object."""
    report.write(path, [asdict(way) for way in ways], overlap_gain=gain)
