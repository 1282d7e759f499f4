"""`jspec bench serve`: latencies, throughput and acceptance of an engine under a load, for each tree.

The engine runs in this process; there is no network. Times of a request begin when it is due (and when
``max_concurrency`` leaves room for it). The inter-token latency is the time between two pieces of an answer; a piece is
the output of one step, so with drafting it may hold several tokens, and the time per output token says more.

`--measure depths` and `--measure batching` time variants of an engine in turns (`serve_variants`).
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from jspec.core.tree import Tree
from jspec.engine.api import Engine
from jspec.engine.metrics import Metrics
from jspec.engine.request import Completion, Request
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.bench.pair import ENGINE_OPTIONS, PROMPT_FIELDS, Pair, engine_options, read_prompts
from jspec.tools.bench.report import TREES, Report, file_option, option, tree_name
from jspec.tools.table import table

LATENCIES = ("ttft", "tpot", "itl")  # time to first token, per output token after the first, between two pieces
WORDS = ("mean", "median", "p99")
DRAFTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "mean_acceptance_length")
METRICS = (*DRAFTS, "prefix_hit_rate", "num_preemptions")
WARM_UP = 8  # tokens
NUM_PROMPTS = 500


@dataclass(frozen=True)
class Arrival:
    """A request to come, in seconds from the start."""

    at: float
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Load:
    """How many requests come, how long and when.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    num_prompts: int = NUM_PROMPTS
    input_len: int = 1024  # tokens of a prompt at most
    output_len: int = 1024  # tokens of an answer at most
    range_ratio: float = 0.7  # lengths are uniform from int(range_ratio * len), at least 1, to len
    rate: float = math.inf  # requests a second, a Poisson process that begins with the first request; inf: all at once
    max_concurrency: int | None = None  # requests in the engine at most; the time of the others does not run
    temperature: float = 0.0
    seed: int = 0  # seed of lengths, prompts and arrivals

    def __post_init__(self) -> None:
        limits = (
            *((name, getattr(self, name) >= 1, "at least 1") for name in ("num_prompts", "input_len", "output_len")),
            ("range_ratio", 0 <= self.range_ratio <= 1, "in [0, 1]"),
            ("rate", self.rate > 0, "more than 0, inf included"),
            ("max_concurrency", self.max_concurrency is None or self.max_concurrency >= 1, "at least 1"),
            ("seed", self.seed >= 0, "at least 0"),
        )
        for name, holds, allowed in limits:
            if not holds:
                raise ValueError(f"{name}: expected {allowed}, got {getattr(self, name)}")

    def arrivals(self, vocab_size: int, text: Sequence[int] | None = None) -> list[Arrival]:
        """The requests, equal for equal seeds; each emits all its tokens, end tokens or not.

        Args:
            text: token ids, of which prompts are parts; None: tokens drawn uniformly from the vocabulary.

        Raises:
            ValueError: a text that is shorter than a prompt.
        """
        if text is not None and len(text) < self.input_len:
            raise ValueError(f"text: expected at least {self.input_len} tokens, a prompt's, got {len(text)}")
        rng = np.random.default_rng(self.seed)
        inputs, outputs = (
            rng.integers(max(int(self.range_ratio * most), 1), most + 1, self.num_prompts)
            for most in (self.input_len, self.output_len)
        )
        times = self._times(rng)

        def prompt(size: int) -> list[int]:
            if text is None:
                return rng.integers(0, vocab_size, size).tolist()
            start = int(rng.integers(0, len(text) - size + 1))
            return list(text[start : start + size])

        def params(size: int) -> SamplingParams:
            return SamplingParams(max_tokens=size, temperature=self.temperature, ignore_eos=True)

        sizes = zip(times, inputs.tolist(), outputs.tolist(), strict=True)
        return [Arrival(float(at), prompt(size), params(output)) for at, size, output in sizes]

    def arrivals_of(self, prompts: Sequence[list[int]]) -> list[Arrival]:
        """Requests with given prompts, which end as usual and have `output_len` tokens at most."""
        params = SamplingParams(max_tokens=self.output_len, temperature=self.temperature, seed=self.seed)
        times = self._times(np.random.default_rng(self.seed))
        return [Arrival(float(at), prompt, params) for at, prompt in zip(times, prompts, strict=True)]

    def _times(self, rng: np.random.Generator) -> np.ndarray:
        times = np.zeros(self.num_prompts)
        if self.rate < math.inf:
            times[1:] = np.cumsum(rng.exponential(1 / self.rate, self.num_prompts - 1))
        return times


@dataclass
class Served:
    """One request in progress or done."""

    arrival: Arrival
    began: float  # when it was due and there was room for it, seconds from the start
    request: Request
    pieces: list[tuple[float, int]] = field(default_factory=list)  # time and token count of each growth
    completion: Completion | None = None

    def record(self, now: float) -> None:
        count = len(self.request.token_ids)
        if count > (self.pieces[-1][1] if self.pieces else 0):
            self.pieces.append((now, count))

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.pieces[0][0] - self.began

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.pieces[-1][0] - self.began


@dataclass(frozen=True)
class Log:
    """A run: its requests in the order of their ends, and the seconds of each step and of all."""

    served: list[Served]
    steps: list[float]
    seconds: float


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    max_concurrency: int | None = None,
    now: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> Log:
    """Submit requests when they are due and step the engine until all are answered.

    A request that comes during a step is submitted after it, but its time runs from when it was due.

    Args:
        arrivals: in the order of their times.
        max_concurrency: requests in the engine at most.
        now, wait: the clock, in seconds.
    """
    most = len(arrivals) if max_concurrency is None else max_concurrency
    due, live, log = deque(arrivals), list[Served](), Log([], [], 0.0)
    start, full_until, passed = now(), 0.0, 0.0
    while due or live:
        while due and due[0].at <= passed and len(live) < most:
            arrival = due.popleft()
            live.append(Served(arrival, max(arrival.at, full_until), engine.submit(arrival.prompt, arrival.params)))
        if not live:
            wait(due[0].at - passed)
            passed = now() - start
            continue
        is_full, before = len(live) == most, now()
        engine.step()
        passed = now() - start
        log.steps.append(passed + start - before)
        for one in live:
            one.record(passed)
        ended = [one for one in live if one.request.finish_reason is not None]
        for one in ended:
            one.completion = engine.result(one.request)
        if ended:
            live = [one for one in live if one.completion is None]
            full_until = passed if is_full else full_until
        log.served.extend(ended)
    return Log(log.served, log.steps, passed)


@dataclass(frozen=True)
class Spread:
    """Statistics of some values, in their unit; quantiles are interpolated linearly; nan without values."""

    count: int
    min: float
    max: float
    mean: float
    std: float  # standard deviation of the values themselves
    q25: float
    median: float
    q75: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float], scale: float = 1.0) -> Spread:
        """Statistics of the values times a scale."""
        found = np.array(list(values), np.float64) * scale
        if not found.size:
            return cls(0, *[float("nan")] * 8)
        quantiles = np.quantile(found, (0.25, 0.5, 0.75, 0.99))
        return cls(found.size, *map(float, (found.min(), found.max(), found.mean(), found.std(), *quantiles)))


def figures_of(tree: Tree | None, log: Log) -> dict[str, Any]:
    """Figures of a load with one tree, under the names of vLLM's ``bench serve`` and offline example.

    Requests that ended with an error count as ``failed`` alone. The spreads are in milliseconds: latencies of the
    requests, and times of `Engine.step`.
    """
    good = [one for one in log.served if one.completion is not None and one.completion.error is None]
    several = [one for one in good if one.pieces[-1][1] > 1]
    gaps = (b - a for one in good for (a, _), (b, _) in pairwise(one.pieces))
    spreads = {
        "ttft": Spread.of((one.first_token for one in good), 1e3),
        "tpot": Spread.of(((one.latency - one.first_token) / (one.pieces[-1][1] - 1) for one in several), 1e3),
        "itl": Spread.of(gaps, 1e3),
        "e2e": Spread.of((one.latency for one in good), 1e3),
        "step": Spread.of(log.steps, 1e3),
    }
    metrics = sum((one.request.metrics for one in good), Metrics())
    inputs, outputs = sum(len(one.arrival.prompt) for one in good), sum(one.pieces[-1][1] for one in good)
    shares = metrics.acceptance_per_position
    counts = {
        "tree": tree_name(tree),
        "completed": len(good),
        "failed": len(log.served) - len(good),
        "duration": log.seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / log.seconds if good else math.nan,
        "output_throughput": outputs / log.seconds,
        "total_token_throughput": (inputs + outputs) / log.seconds,
        **{name: getattr(metrics, name) for name in METRICS},
        "acceptance_per_position": shares + [0.0] * ((tree.depth if tree else 0) - len(shares)),
    }
    means = {f"{word}_{name}_ms": getattr(spreads[name], word) for name in LATENCIES for word in WORDS}
    return counts | means | {f"{name}_ms": spread for name, spread in spreads.items()}


def text(results: Sequence[dict[str, Any]]) -> str:
    """One line a figure, one column a tree; then requests a second beside the first tree's."""
    rows = [[name, *(_shown(one[name]) for one in results)] for name in results[0] if not name.startswith("acceptance")]
    longest = max(len(one["acceptance_per_position"]) for one in results)
    for i in range(longest):
        shares = (one["acceptance_per_position"][i:] for one in results)
        rows.append([f"acceptance at token {i}", *(_shown(share[0]) if share else "" for share in shares)])
    first = results[0]["request_throughput"]
    ratios = [f"{one['request_throughput'] / first:.2f}" for one in results]
    return table([*rows, ["requests a second, beside the first", *ratios]])


def _shown(value: Any) -> str:
    if isinstance(value, Spread):
        return "/".join(f"{one:.3f}" for one in (value.min, value.q25, value.median, value.q75, value.max))
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def measure(
    pair: Pair, trees: Iterable[Tree | None], arrivals: Sequence[Arrival], most: int | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Serve the same requests at the same times, once with every tree; None is plain decoding.

    Args:
        most: requests in the engine at most.
        options: options of the engines.
    """
    drafters = {tree: pair.drafter(tree) for tree in trees}  # raises before anything runs
    results = []
    for tree, drafter in drafters.items():
        with pair.engine(drafter, **options) as engine:
            _warm_up(engine)
            results.append(figures_of(tree, serve(engine, arrivals, max_concurrency=most)))
    return results


def _warm_up(engine: Engine) -> None:
    """Run every program once: steps of each bucket of rows, and a prompt for each prefill bucket.

    Prompts repeat one token, so no page of theirs in the prefix cache begins a later prompt.
    """
    params, config = SamplingParams(max_tokens=WARM_UP, temperature=0.0, ignore_eos=True), engine.config
    assert config.buckets is not None and config.prefill_buckets is not None
    rows = [[[0]] * count for count in config.buckets]
    for prompts in [*rows, *([[0] * max(min(size, config.max_len - WARM_UP), 1)] for size in config.prefill_buckets)]:
        for completion in engine.generate(prompts, params):
            completion.raise_for_error()


def run(arguments: argparse.Namespace) -> Report:
    a = arguments
    names = ("input_len", "output_len", "range_ratio", "rate", "max_concurrency", "temperature", "seed")
    texts = None if a.prompts is None else read_prompts(a.prompts, a.num_prompts)
    count = (a.num_prompts or NUM_PROMPTS) if texts is None else len(texts)
    load = Load(count, **{name: getattr(a, name) for name in names})
    pair = Pair.of(a)
    if texts is None:
        source = None if a.text is None else pair.tokenizer.encode(a.text.read_text(encoding="utf-8"))
        arrivals, longest = load.arrivals(pair.target.config.vocab_size, source), load.input_len
    else:
        arrivals = load.arrivals_of([encode(pair, text, chat=a.chat) for text in texts])
        longest = max(len(one.prompt) for one in arrivals)
    options = engine_options(a) | {"max_len": longest + load.output_len}
    results = measure(pair, a.tree, arrivals, load.max_concurrency, **options)
    about = {"load": load, "prompts": a.prompts or a.text or "random tokens"}
    return Report(f"{load}, spreads from least to largest with quartiles", (), results, text(results), about)


def encode(pair: Pair, text: str, *, chat: bool) -> list[int]:
    """Token ids of a prompt; with ``chat`` as a user's message in the tokenizer's chat template."""
    return list(pair.tokenizer.chat([{"role": "user", "content": text}]) if chat else pair.tokenizer.encode(text))


OPTIONS = (
    file_option("--prompts", f"JSON lines with {PROMPT_FIELDS}; answers end as usual"),
    option("--num-prompts", type=int, help=f"all of --prompts, {NUM_PROMPTS} otherwise, if left out"),
    option("--chat", action="store_true", help="lay --prompts out by the tokenizer's chat template"),
    file_option("--text", "prompts are parts of it; random tokens if left out"),
    option("--rate", type=float, default=math.inf, help="requests a second, Poisson; inf: all at once"),
    option("--input-len", type=int, default=1024, help="tokens of a prompt at most"),
    option("--output-len", type=int, default=1024, help="tokens of an answer at most"),
    option("--range-ratio", type=float, default=0.7, help="lengths are uniform from int(ratio * len) to len"),
    option("--max-concurrency", type=int, help="requests in the engine at most"),
    option("--temperature", type=float, default=0.0),
    option("--seed", type=int, default=0, help="seed of lengths, prompts and arrivals"),
    TREES(default=(None, Tree.chain(1), Tree.topk(16, 4, 4))),
    *ENGINE_OPTIONS,
)
