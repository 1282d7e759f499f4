"""`jspec bench serve`: latencies, throughput and acceptance of an engine under a load, for each configuration.

A configuration is a tree, the depth to which steps draft it, a concurrency, and whether dispatches overlap. The engine
runs in this process, without a network. The times of a request begin when it is due and the concurrency leaves room for
it. An answer comes in pieces, each the output of one step: with drafting a piece may hold several tokens. The
inter-token latency is the time between two pieces. All requests are due at once by default; the largest ``ttft_ms`` is
then the time until every prompt has its first token. ``--output-len 1 --range-ratio 1`` measures the prompts alone.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise, product
from typing import Any, NamedTuple

import numpy as np

from jspec.core.tree import Tree
from jspec.engine.callers.api import Engine
from jspec.engine.request.metrics import Metrics
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.run.build import policy_of
from jspec.engine.schedule.draft_length import Fixed, Policy
from jspec.engine.schedule.sizes import halvings, portions
from jspec.tools.bench.load import Arrival, Load, Log, serve
from jspec.tools.bench.options import AUTO, NUM_PROMPTS, tree_name
from jspec.tools.bench.pair import BenchPair
from jspec.tools.bench.profiling import time_in_turns
from jspec.tools.bench.prompt_sets import prompts_of
from jspec.tools.bench.results import Results
from jspec.tools.table import table

DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length", "num_rounds_per_depth")
WARM_UP = 8  # tokens


@dataclass(frozen=True)
class ServeSetting:
    """One configuration of the engine under a load."""

    tree: Tree | None = None  # draft tree; None: plain decoding
    depth: int | str | None = None  # depth that steps draft; "auto": the engine chooses; None: the tree's
    max_concurrency: int | None = None  # largest number of requests in the engine; None: no limit
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.depth not in (None, AUTO, *self.depths):
            raise ValueError(f"depth: expected {AUTO} or one of {self.depths} for {self.tree}, got {self.depth}")

    @property
    def depths(self) -> tuple[int, ...]:
        return () if self.tree is None else tuple(halvings(self.tree.depth))

    @property
    def label(self) -> str:
        depth = "" if self.depth is None else f", depth {self.depth}"
        most = "" if self.max_concurrency is None else f", at most {self.max_concurrency} at once"
        return f"{tree_name(self.tree)}{depth}{most}{'' if self.overlap else ', no overlap'}"

    @property
    def engine(self) -> tuple[Tree | None, bool]:
        """The tree, and whether the engine's programs can cut it; settings with equal values share an engine."""
        return self.tree, self.depth is not None

    def policy(self, engine: Engine) -> Policy | None:
        """Return a new policy that chooses the draft depth; None if steps draft the whole tree or nothing."""
        if self.tree is None or self.depth is None:
            return None
        if isinstance(self.depth, int):
            return Fixed(self.depth)
        return policy_of(engine.config, self.tree, self.depths, portions(self.tree.nodes - 1), engine.core.runner)


class Spread(NamedTuple):
    """The linearly interpolated quantiles, mean and standard deviation of values, in the values' unit."""

    count: int  # type: ignore[assignment]
    min: float
    q25: float
    median: float
    q75: float
    max: float
    p99: float
    mean: float
    std: float  # standard deviation of the values themselves

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> Spread:
        """Return the statistics of the values times ``scale``; nan without values."""
        scaled = np.array(list(values), np.float64) * scale
        if not scaled.size:
            return cls(0, *[math.nan] * 8)
        quantiles = np.quantile(scaled, (0, 0.25, 0.5, 0.75, 1, 0.99)).tolist()
        return cls._make([scaled.size, *quantiles, float(scaled.mean()), float(scaled.std())])


def figures_of(setting: ServeSetting, log: Log) -> dict[str, Any]:
    """Return one setting's latencies, throughput and acceptance, named as in vLLM's ``bench serve``.

    Requests that ended with an error count as ``failed`` alone. The spreads are in milliseconds: latencies of the
    requests (time to first token, per output token after it, between pieces, to the end), and times of `Engine.step`.
    """
    good = log.good
    long = [served for served in good if served.pieces[-1][1] > 1]
    gaps = (b - a for served in good for (a, _), (b, _) in pairwise(served.pieces))
    spreads = {
        "ttft": Spread.of((served.first_token for served in good), 1e3),
        "tpot": Spread.of(((served.latency - served.first_token) / (served.pieces[-1][1] - 1) for served in long), 1e3),
        "itl": Spread.of(gaps, 1e3),
        "e2e": Spread.of((served.latency for served in good), 1e3),
        "step": Spread.of(log.steps, 1e3),
    }
    metrics = sum((served.request.metrics for served in good), Metrics())
    inputs, outputs = sum(len(served.arrival.prompt) for served in good), log.output_tokens
    shares = metrics.acceptance_per_position
    counts = {
        **vars(setting),
        "tree": tree_name(setting.tree),
        "completed": len(good),
        "failed": len(log.served) - len(good),
        "duration": log.seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / log.seconds if good else math.nan,
        "output_throughput": log.rate,
        "total_token_throughput": (inputs + outputs) / log.seconds,
        **{name: getattr(metrics, name) for name in (*DRAFTS, "prefix_hit_rate", "num_preemptions")},
        "acceptance_per_position": shares + [0.0] * ((setting.tree.depth if setting.tree else 0) - len(shares)),
    }
    latencies = product(("ttft", "tpot", "itl"), ("mean", "median", "p99"))
    means = {f"{word}_{name}_ms": getattr(spreads[name], word) for name, word in latencies}
    return counts | means | {f"{name}_ms": spread for name, spread in spreads.items()}


def text(results: Sequence[dict[str, Any]]) -> str:
    """Format the results of all settings: a line for each measured value, a column for each setting."""
    return table([[name, *(_shown(result[name]) for result in results)] for name in results[0]])


def _shown(value: Any) -> str:
    if isinstance(value, Spread):
        return "/".join(f"{number:.3f}" for number in value[1:6])
    if isinstance(value, list):
        return "/".join(f"{number:.2f}" for number in value)
    if isinstance(value, dict):  # counts, as shares
        return ", ".join(f"{name}: {value[name] / sum(value.values()):.0%}" for name in sorted(value))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def measure(
    pair: BenchPair, settings: Sequence[ServeSetting], arrivals: Sequence[Arrival], repeats: int = 1, **options: Any
) -> Iterator[dict[str, Any]]:
    """Serve the same requests at the same times with each setting and yield its results.

    Args:
        repeats: timed repeats, all settings in turns, after one that is not timed; 1: one setting after the other.
            Results are from the median repeat; ``ratio`` is the median of the ratios to the first setting.
        options: options of the engines. An engine that serves the load more than once shares no pages.
    """
    drafters = {setting.tree: pair.drafter(setting.tree) for setting in settings}  # raises before anything runs
    by_engine = [list(group) for _, group in groupby(settings, key=lambda setting: setting.engine)]
    if repeats > 1 or len(by_engine) < len(settings):
        options |= {"prefix_cache": False}
    first: list[Log] = []
    for group in [list(settings)] if repeats > 1 else by_engine:
        with ExitStack() as stack:
            engines = {
                (tree, cuts): stack.enter_context(pair.engine(drafters[tree], adaptive=cuts, **options))
                for tree, cuts in dict.fromkeys(setting.engine for setting in group)
            }
            for engine in engines.values():
                warm_up(engine)
            runs = [
                partial(_run, engines[setting.engine], setting, setting.policy(engines[setting.engine]), arrivals)
                for setting in group
            ]
            all_logs = time_in_turns(runs, repeats, warm_up=int(repeats > 1))
        first = first or all_logs[0]
        for setting, logs in zip(group, all_logs, strict=True):
            seconds = [log.seconds for log in logs]
            ratios = (first_log.seconds / duration for first_log, duration in zip(first, seconds, strict=True))
            more = {"duration_spread": max(seconds) - min(seconds), "ratio": statistics.median(ratios)}
            yield figures_of(setting, sorted(logs, key=lambda log: log.seconds)[len(logs) // 2]) | more


def _run(engine: Engine, setting: ServeSetting, policy: Policy | None, arrivals: Sequence[Arrival]) -> Log:
    """Serve the load once with a setting; an engine can change overlap, as its programs do not depend on it."""
    engine.config = replace(engine.config, overlap=setting.overlap)
    if policy is not None:
        engine.policy = policy
    log = serve(engine, arrivals, max_concurrency=setting.max_concurrency)
    print(f"{setting.label}: {log.rate:.0f} tokens/s", file=sys.stderr, flush=True)  # shows that a long load goes on
    return log


def warm_up(engine: Engine) -> None:
    """Run each program once, untimed: a step of every batch bucket, a prompt of every prefill bucket.

    Prompts repeat one token, so their pages in the prefix cache never match a later prompt.
    """
    params, config = SamplingParams(max_tokens=WARM_UP, temperature=0.0, ignore_eos=True), engine.config
    assert config.buckets is not None and config.prefill_buckets is not None
    rows = [[[0]] * count for count in config.buckets]
    for prompts in [*rows, *([[0] * max(min(size, config.max_len - WARM_UP), 1)] for size in config.prefill_buckets)]:
        for completion in engine.generate(prompts, params):
            completion.raise_for_error()


def run(arguments: argparse.Namespace) -> Results:
    a = arguments
    names = ("input_len", "output_len", "range_ratio", "rate", "temperature", "seed")
    texts = None if a.prompts is None else prompts_of(a.prompts, a.num_prompts)
    requests = (a.num_prompts or NUM_PROMPTS) if texts is None else len(texts)
    load = Load(requests, **{name: getattr(a, name) for name in names})
    grid = product(a.tree, a.depth, a.max_concurrency, a.overlap)
    settings = [ServeSetting(tree, depth if tree else None, most, how == "yes") for tree, depth, most, how in grid]
    pair = BenchPair.of(a)
    if texts is None:
        source = None if a.text is None else pair.tokenizer.encode(a.text.read_text(encoding="utf-8"))
        arrivals, longest = load.arrivals(pair.target.config.vocab_size, source), load.input_len
    else:
        arrivals = load.arrivals_of(pair.encode(texts, chat=a.chat))
        longest = max(len(arrival.prompt) for arrival in arrivals)
    options = {name: getattr(a, name) for name in ("slots", "page_size", "prefill_budget")}
    options["max_len"] = longest + load.output_len
    results = measure(pair, list(dict.fromkeys(settings)), arrivals, a.repeats, **options)
    about = {"load": load, "prompts": a.prompts or a.text or "random tokens", "repeats": a.repeats}
    return Results(f"{load}, spreads from least to largest with quartiles", results, text, about)
