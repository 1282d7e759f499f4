"""Formats an engine's counters as text for Prometheus, under the metric names of vLLM."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from jspec.engine.metrics import Metrics

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
OUTPUT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
REASONS = {"eos": "stop"}  # maps a finish reason to vLLM's finished_reason if they differ


@dataclass
class Histogram:
    """A histogram of times in seconds.

    Attributes:
        bounds: upper bounds of the intervals in seconds, ascending.
        counts: entry i is the number of times in (bounds[i - 1], bounds[i]]; the last entry, of times above all bounds.
        total: sum of the times in seconds.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


@dataclass
class Latencies:
    """The latency histograms of all requests that were neither aborted nor failed."""

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN))
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST))

    def observe(self, metrics: Metrics) -> None:
        """Add the latencies of one request to the histograms."""
        self.first_token.observe(metrics.time_to_first_token)
        self.request.observe(metrics.time_to_first_token + metrics.decode_seconds)
        if metrics.num_tokens > 1:
            self.output_token.observe(metrics.time_per_output_token)


@dataclass(frozen=True)
class Gauges:
    """The current load of an engine.

    Attributes:
        running: number of running requests.
        waiting: number of waiting requests.
        pages_used: share of all pages that requests hold, from 0 to 1.
    """

    running: int
    waiting: int
    pages_used: float


@dataclass
class _Text:
    """Collects lines in Prometheus' text format, version 0.0.4.

    Attributes:
        label: name and value of the label that every sample gets, as ``name="value"``.
    """

    label: str
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, kind: str, about: str, samples: Iterable[tuple[str, str, float]]) -> None:
        """Add one metric family.

        Args:
            name: name of the family, without the prefix "vllm:".
            kind: Prometheus type of the family ("counter", "gauge" or "histogram").
            about: help text.
            samples: (suffix of the name, labels, value) of each sample.
        """
        self.lines += [f"# HELP vllm:{name} {about}", f"# TYPE vllm:{name} {kind}"]
        for suffix, labels, value in samples:
            joined = f"{self.label},{labels}" if labels else self.label
            self.lines.append(f"vllm:{name}{suffix}{{{joined}}} {float(value)!r}")


def exposition(metrics: Metrics, latencies: Latencies, gauges: Gauges, model_name: str) -> str:
    """Format all metrics as a Prometheus text, with the help and the type of each metric."""
    escaped = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    text = _Text(f'model_name="{escaped}"')
    _add_gauges(text, gauges)
    _add_counters(text, metrics)
    _add_histograms(text, latencies)
    return "\n".join(text.lines) + "\n"


def _add_gauges(text: _Text, gauges: Gauges) -> None:
    for name, value, about in (
        ("num_requests_running", gauges.running, "Requests that have a slot."),
        ("num_requests_waiting", gauges.waiting, "Requests that wait for a slot."),
        ("kv_cache_usage_perc", gauges.pages_used, "Share of the cache's pages that requests hold; 1 is all."),
    ):
        text.add(name, "gauge", about, [("", "", value)])


def _add_counters(text: _Text, metrics: Metrics) -> None:
    for name, value, about in (
        ("prefix_cache_queries", metrics.num_prompt_tokens, "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", metrics.num_cached_tokens, "Prompt tokens found in the prefix cache."),
        ("num_preemptions", metrics.num_preemptions, "Times that a request lost its pages to another."),
        ("prompt_tokens", metrics.num_prompt_tokens, "Tokens of prompts."),
        ("generation_tokens", metrics.num_tokens, "Tokens generated."),
        ("spec_decode_num_drafts", metrics.num_drafts, "Rounds."),
        ("spec_decode_num_draft_tokens", metrics.num_draft_tokens, "Draft tokens verified."),
        ("spec_decode_num_accepted_tokens", metrics.num_accepted_tokens, "Draft tokens emitted."),
    ):
        text.add(f"{name}_total", "counter", about, [("", "", value)])
    text.add(
        "spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Rounds that accepted the position.",
        [("", f'position="{position}"', count) for position, count in enumerate(metrics.num_accepted_per_position)],
    )
    text.add(
        "spec_decode_num_drafts_per_depth_total",
        "counter",
        "Rounds by the depth that they drafted.",
        [("", f'depth="{depth}"', count) for depth, count in sorted(metrics.num_rounds_per_depth.items())],
    )
    ended: Counter[str] = Counter()
    for reason, count in metrics.finished.items():
        ended[REASONS.get(reason, reason)] += count
    by_reason = [("", f'finished_reason="{reason}"', count) for reason, count in sorted(ended.items())]
    text.add("request_success_total", "counter", "Requests that ended, by reason.", by_reason)


def _add_histograms(text: _Text, latencies: Latencies) -> None:
    for name, histogram, about in (
        ("time_to_first_token_seconds", latencies.first_token, "From arrival to the first token."),
        ("request_time_per_output_token_seconds", latencies.output_token, "A request's mean after its first token."),
        ("e2e_request_latency_seconds", latencies.request, "From arrival to the last token."),
    ):
        text.add(name, "histogram", about, _samples(histogram))


def _samples(histogram: Histogram) -> list[tuple[str, str, float]]:
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    cumulative = list(accumulate(histogram.counts))
    buckets = [("_bucket", f'le="{bound}"', count) for bound, count in zip(bounds, cumulative, strict=True)]
    return [*buckets, ("_sum", "", histogram.total), ("_count", "", cumulative[-1])]
