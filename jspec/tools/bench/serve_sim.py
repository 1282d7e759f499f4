"""`jspec bench serve-sim`: latencies and throughput of an engine under a load, as a server's bench tells them.

The engine runs in this process; there is no network. Times of a request begin when it is due (and when
``max_concurrency`` leaves room for it). The inter-token latency is the time between two pieces of an answer; a piece is
what one round emits, so with drafting it may be several tokens, and the time per output token tells more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jspec.core.tree import Tree
from jspec.engine.api import Engine
from jspec.engine.metrics import Metrics
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.bench import report, spread
from jspec.tools.bench.load import Load, Log, Served, serve
from jspec.tools.bench.pair import Pair
from jspec.tools.bench.spread import Spread
from jspec.tools.table import table

TREES = (None, Tree.chain(1), Tree.topk(16, 4, 4))
WIDTH = 50
LATENCIES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}
WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Serving:
    """What a load came to, with one way of drafting.

    Attributes:
        tree: as `Tree.parse` reads it, or "none".
        failed: requests that ended with an error; they count nowhere else.
        seconds: from the first arrival to the last token.
        ttft, tpot, itl, e2e: of the requests, milliseconds; see the module's docstring.
        step: of `Engine.step`, milliseconds.
        metrics: of the completed requests.
    """

    tree: str
    completed: int
    failed: int
    seconds: float
    input_tokens: int
    output_tokens: int
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    step: Spread
    metrics: Metrics

    @property
    def request_throughput(self) -> float:
        return self.completed / self.seconds if self.completed else math.nan

    @property
    def output_throughput(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_throughput(self) -> float:
        return (self.input_tokens + self.output_tokens) / self.seconds


def run(
    pair: Pair,
    load: Load,
    trees: Iterable[Tree | None] = TREES,
    *,
    text: Sequence[int] | None = None,
    temperature: float = 0.0,
    **options: Any,
) -> list[Serving]:
    """Serve the same requests at the same times, once with every tree; None is plain decoding.

    Args:
        text: token ids that prompts are cut from; None: random tokens.
        options: of the engines.
    """
    arrivals = load.arrivals(pair.target.config.vocab_size, text)
    results = []
    for tree, drafter in pair.drafters(trees).items():
        with pair.engine(drafter, **options) as engine:
            _warm_up(engine)
            log = serve(engine, arrivals, max_concurrency=load.max_concurrency, temperature=temperature)
            results.append(summary(str(tree).lower(), log))
    return results


def _warm_up(engine: Engine) -> None:
    """Run every program once: the rounds of each bucket of rows, and a prompt for each of tokens.

    Prompts are the same token over and over: no page that is kept of them holds a beginning of those to come.
    """
    params, config = SamplingParams(max_tokens=WARM_UP, temperature=0.0, ignore_eos=True), engine.config
    assert config.buckets is not None and config.prefill_buckets is not None
    rows = [[[0]] * count for count in config.buckets]
    for prompts in [*rows, *([[0] * max(min(size, config.max_len - WARM_UP), 1)] for size in config.prefill_buckets)]:
        for completion in engine.generate(prompts, params):
            completion.raise_for_error()


def summary(tree: str, log: Log) -> Serving:
    """A run in figures."""
    good = [one for one in log.served if one.completion is not None and one.completion.error is None]
    return Serving(
        tree=tree,
        completed=len(good),
        failed=len(log.served) - len(good),
        seconds=log.seconds,
        input_tokens=sum(len(one.arrival.prompt) for one in good),
        output_tokens=sum(one.pieces[-1][1] for one in good),
        ttft=Spread.of((first_token(one) for one in good), 1e3),
        tpot=Spread.of((per_token(one) for one in good if one.pieces[-1][1] > 1), 1e3),
        itl=Spread.of((b - a for one in good for (a, _), (b, _) in pairwise(one.pieces)), 1e3),
        e2e=Spread.of((latency(one) for one in good), 1e3),
        step=Spread.of(log.steps, 1e3),
        metrics=sum((one.request.metrics for one in good), Metrics()),
    )


def first_token(one: Served) -> float:
    """Seconds to the first token."""
    return one.pieces[0][0] - one.began


def latency(one: Served) -> float:
    """Seconds to the last token."""
    return one.pieces[-1][0] - one.began


def per_token(one: Served) -> float:
    """Seconds a token after the first, of a request with several."""
    return (latency(one) - first_token(one)) / (one.pieces[-1][1] - 1)


def text(results: Sequence[Serving]) -> str:
    """A block for each tree, laid out as vLLM's ``bench serve`` prints its own; then a comparison, if there are two."""
    blocks = [f"tree {result.tree}\n{block(result)}\n{_spreads(result)}" for result in results]
    return "\n\n".join(blocks + [comparison(results)] * (len(results) > 1))


def block(result: Serving) -> str:
    """Counts, throughput, and mean, median and P99 of the latencies."""
    counts: list[tuple[str, int | float]] = [
        ("Successful requests:", result.completed),
        ("Failed requests:", result.failed),
        ("Benchmark duration (s):", result.seconds),
        ("Total input tokens:", result.input_tokens),
        ("Total generated tokens:", result.output_tokens),
        ("Request throughput (req/s):", result.request_throughput),
        ("Output token throughput (tok/s):", result.output_throughput),
        ("Total token throughput (tok/s):", result.total_throughput),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *(_line(*count) for count in counts)]
    for name, heading in LATENCIES.items():
        own: Spread = getattr(result, name)
        lines.append(heading.center(WIDTH, "-"))
        for word, value in (("Mean", own.mean), ("Median", own.median), ("P99", own.p99)):
            lines.append(_line(f"{word} {name.upper()} (ms):", value))
    return "\n".join([*lines, "=" * WIDTH])


def _line(name: str, value: int | float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{name:<40} {shown:<9}".rstrip()


def _spreads(result: Serving) -> str:
    rows = {"E2E (ms)": result.e2e, "TTFT (ms)": result.ttft, "step (ms)": result.step}
    return spread.text(rows)


def comparison(results: Sequence[Serving]) -> str:
    """Requests a second of every tree, beside the first."""
    rows = [["tree", "req/s", "beside the first", "output tok/s", "tokens a round"]]
    for one in results:
        ratio = one.request_throughput / results[0].request_throughput
        length = one.metrics.mean_acceptance_length
        rows.append(
            [one.tree, f"{one.request_throughput:.3f}", f"{ratio:.2f}", f"{one.output_throughput:.1f}", f"{length:.2f}"]
        )
    return table(rows)


def write_json(path: Path, load: Load, results: Sequence[Serving], **about: Any) -> None:
    """Environment, load and results as one JSON object, latencies also under vLLM's names."""
    shown = {name: str(value) if value == float("inf") else value for name, value in asdict(load).items()}
    report.write(path, [fields(result) for result in results], load=shown, **about)


def fields(result: Serving) -> dict[str, Any]:
    """A result as it is written."""
    own: dict[str, Any] = {
        "tree": result.tree,
        "completed": result.completed,
        "failed": result.failed,
        "duration": result.seconds,
        "total_input_tokens": result.input_tokens,
        "total_output_tokens": result.output_tokens,
        "request_throughput": result.request_throughput,
        "output_throughput": result.output_throughput,
        "total_token_throughput": result.total_throughput,
        "mean_acceptance_length": result.metrics.mean_acceptance_length,
        "prefix_hit_rate": result.metrics.prefix_hit_rate,
        "num_preemptions": result.metrics.num_preemptions,
    }
    for name in LATENCIES:
        values = getattr(result, name).fields()
        own |= {f"{word}_{name}_ms": values[word] for word in ("mean", "median", "p99")}
    return own | {f"{name}_ms": getattr(result, name).fields() for name in ("e2e", "ttft", "tpot", "itl", "step")}
