"""Formats an engine's counters as text for Prometheus, under the metric names of vLLM."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from jspec.engine.request.metrics import Metrics

PHASES = ("queue", "prefill", "decode", "inference")
SIZES = ("prompt", "generation")
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
OUTPUT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))  # of a prompt or an answer
REASONS = {"eos": "stop"}  # maps a finish reason to vLLM's finished_reason if they differ


@dataclass
class Histogram:
    """A histogram of values: times in seconds, or numbers of tokens.

    Attributes:
        bounds: upper bounds of the intervals, ascending.
        counts: entry i is the number of values in (bounds[i - 1], bounds[i]]; the last entry, of values above all.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class Latencies:
    """The histograms of all requests that were neither aborted nor failed, by vLLM's definitions of the times.

    Attributes:
        inter_token: time between two outputs of a request, each the tokens of one step; also of requests that were
            aborted or failed later.
        phases: times that requests wait before their first prefill, prefill, decode, and both of the latter.
        tokens: numbers of tokens of prompts and of outputs.
    """

    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    output_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN))
    inter_token: Histogram = field(default_factory=lambda: Histogram(OUTPUT_TOKEN))
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST))
    phases: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram(REQUEST) for name in PHASES})
    tokens: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram(TOKENS) for name in SIZES})

    def observe(self, metrics: Metrics) -> None:
        """Add the times and sizes of one request to the histograms."""
        total = metrics.time_to_first_token + metrics.decode_seconds
        self.first_token.observe(metrics.time_to_first_token)
        self.request.observe(total)
        if metrics.num_tokens > 1:
            self.output_token.observe(metrics.time_per_output_token)
        prefill = metrics.time_to_first_token - metrics.queue_seconds
        inference = total - metrics.queue_seconds
        times = (metrics.queue_seconds, prefill, metrics.decode_seconds, inference)
        for name, seconds in zip(PHASES, times, strict=True):
            self.phases[name].observe(seconds)
        for name, count in zip(SIZES, (metrics.num_prompt_tokens, metrics.num_tokens), strict=True):
            self.tokens[name].observe(count)


@dataclass(frozen=True)
class Gauges:
    """The current load of an engine.

    Attributes:
        running: number of running requests.
        waiting: number of waiting requests.
        pages_used: share of all pages that requests hold, from 0 to 1.
        weight_version: version of the weights; 0 before the first update.
        is_sleeping: whether the engine has no memory for requests.
    """

    running: int
    waiting: int
    pages_used: float
    weight_version: int = 0
    is_sleeping: bool = False


@dataclass
class _Text:
    """Collects lines in Prometheus' text format, version 0.0.4.

    Attributes:
        label: names and values of the labels that every sample gets, as ``name="value"``.
    """

    label: str
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, kind: str, about: str, samples: Iterable[tuple[str, str, float]]) -> None:
        """Add one metric family.

        Args:
            name: name of the family with its prefix: "vllm:" for vLLM's metrics, "jspec:" for others.
            kind: Prometheus type of the family ("counter", "gauge" or "histogram").
            about: help text.
            samples: (suffix of the name, labels, value) of each sample.
        """
        self.lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
        for suffix, labels, value in samples:
            joined = f"{self.label},{labels}" if labels else self.label
            self.lines.append(f"{name}{suffix}{{{joined}}} {float(value)!r}")


def exposition(
    metrics: Metrics,
    latencies: Latencies,
    gauges: Gauges,
    model_name: str,
    *,
    number: int = 0,
    drafter: Mapping[str, str] | None = None,
) -> str:
    """Format all metrics of an engine as a Prometheus text, with the help and the type of each metric.

    Args:
        number: value of the label "engine" of every sample.
        drafter: labels of the metric about the drafter; None: none.
    """
    text = _Text(_labels({"model_name": model_name, "engine": str(number)}))  # vLLM numbers the engines of a server
    about = "1; its labels name the drafter, to be joined to other metrics of the engine."
    text.add("jspec:drafter_info", "gauge", about, [("", _labels(drafter), 1)] if drafter else [])
    _add_gauges(text, gauges)
    _add_counters(text, metrics)
    _add_states(text, metrics)
    _add_histograms(text, latencies)
    return "\n".join(text.lines) + "\n"


def _labels(values: Mapping[str, str]) -> str:
    """Format names and values of labels."""
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in values.items())


def joined(texts: Iterable[str]) -> str:
    """Join the texts of several engines to one, in which each metric has the samples of all engines."""
    metrics: dict[str, list[str]] = {}  # lines of each metric by its name
    for text in texts:
        metric_lines: list[str] = []
        for line in text.splitlines():
            if line.startswith("#"):
                metric_lines = metrics.setdefault(line.split()[2], [])
            if not (line.startswith("#") and line in metric_lines):
                metric_lines.append(line)
    return "\n".join(line for lines in metrics.values() for line in lines) + "\n"


def _add_gauges(text: _Text, gauges: Gauges) -> None:
    for name, value, about in (
        ("num_requests_running", gauges.running, "Requests that have a slot."),
        ("num_requests_waiting", gauges.waiting, "Requests that wait for a slot."),
        ("kv_cache_usage_perc", gauges.pages_used, "Share of the cache's pages that requests hold; 1 is all."),
    ):
        text.add(f"vllm:{name}", "gauge", about, [("", "", value)])
    about = "Version of the weights; 0 before the first update."
    text.add("jspec:weight_version", "gauge", about, [("", "", gauges.weight_version)])
    text.add("jspec:is_sleeping", "gauge", "1 while the engine has no memory.", [("", "", gauges.is_sleeping)])


def _add_counters(text: _Text, metrics: Metrics) -> None:
    for name, value, about in (
        ("prefix_cache_queries", metrics.num_prompt_tokens, "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", metrics.num_cached_tokens, "Prompt tokens found in the prefix cache."),
        ("num_preemptions", metrics.num_preemptions, "Times that a request lost its pages to another."),
        ("prompt_tokens", metrics.num_prompt_tokens, "Tokens of prompts."),
        ("generation_tokens", metrics.num_tokens, "Tokens generated."),
        ("spec_decode_num_drafts", metrics.num_drafts, "Rounds."),
        ("spec_decode_num_draft_tokens", metrics.num_draft_tokens, "Draft tokens verified."),
        ("spec_decode_num_accepted_tokens", metrics.num_accepted_tokens, "Draft tokens accepted and emitted."),
    ):
        text.add(f"vllm:{name}_total", "counter", about, [("", "", value)])
    text.add(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "counter",
        "Rounds that accepted the position, tokens after the end of a text included.",
        [("", f'position="{position}"', count) for position, count in enumerate(metrics.num_accepted_per_position)],
    )
    text.add(
        "jspec:spec_decode_num_drafts_per_depth_total",
        "counter",
        "Rounds by the depth that they drafted.",
        [("", f'depth="{depth}"', count) for depth, count in sorted(metrics.num_rounds_per_depth.items())],
    )
    for name, counts, about in (
        ("draft", metrics.num_draft_tokens_per_source, "Draft tokens verified, of a head and of a look-up beside it."),
        ("accepted", metrics.num_accepted_tokens_per_source, "Draft tokens accepted and emitted, of each of the two."),
    ):
        by_source = [("", f'source="{source}"', count) for source, count in sorted(counts.items())]
        text.add(f"jspec:spec_decode_num_{name}_tokens_per_source_total", "counter", about, by_source)
    ended: Counter[str] = Counter()
    for reason, count in metrics.finished.items():
        ended[REASONS.get(reason, reason)] += count
    by_reason = [("", f'finished_reason="{reason}"', count) for reason, count in sorted(ended.items())]
    text.add("vllm:request_success_total", "counter", "Requests that ended, by reason.", by_reason)


def _add_states(text: _Text, metrics: Metrics) -> None:
    """Add what the prefix cache says of recurrent states."""
    for name, kind, value, about in (
        ("state_hits_total", "counter", metrics.num_state_hits, "Requests that began at a kept recurrent state."),
        ("states_evicted_total", "counter", metrics.num_states_evicted, "Kept states that others have overwritten."),
        ("states_kept", "gauge", metrics.states_kept, "Recurrent states that the prefix cache keeps."),
    ):
        text.add(f"jspec:prefix_cache_{name}", kind, about, [("", "", value)])


def _add_histograms(text: _Text, latencies: Latencies) -> None:
    for name, histogram, about in (
        ("time_to_first_token_seconds", latencies.first_token, "From arrival to the first token."),
        ("request_time_per_output_token_seconds", latencies.output_token, "A request's mean after its first token."),
        ("inter_token_latency_seconds", latencies.inter_token, "Between two outputs of a request, one a step."),
        ("e2e_request_latency_seconds", latencies.request, "From arrival to the last token."),
        ("request_queue_time_seconds", latencies.phases["queue"], "From arrival to the first prefill."),
        ("request_prefill_time_seconds", latencies.phases["prefill"], "From the first prefill to the first token."),
        ("request_decode_time_seconds", latencies.phases["decode"], "From the first token to the last."),
        ("request_inference_time_seconds", latencies.phases["inference"], "From the first prefill to the last token."),
        ("request_prompt_tokens", latencies.tokens["prompt"], "Tokens of a prompt."),
        ("request_generation_tokens", latencies.tokens["generation"], "Tokens of an output."),
    ):
        text.add(f"vllm:{name}", "histogram", about, _samples(histogram))


def _samples(histogram: Histogram) -> list[tuple[str, str, float]]:
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    cumulative = list(accumulate(histogram.counts))
    buckets = [("_bucket", f'le="{bound}"', count) for bound, count in zip(bounds, cumulative, strict=True)]
    return [*buckets, ("_sum", "", histogram.total), ("_count", "", cumulative[-1])]
