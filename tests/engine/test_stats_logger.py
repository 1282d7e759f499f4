"""Test an engine's reports: the text for Prometheus, and a log line at intervals."""

from __future__ import annotations

import logging
import re
import time

import pytest

from jspec import Engine, Metrics, SamplingParams
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.run.prometheus import Gauges, Histogram, Latencies, exposition
from jspec.engine.run.stats_logger import StatsLogger
from tests.support.brittle import PARAMS, PROMPTS

pytestmark = pytest.mark.once


def samples(text: str) -> dict[str, float]:
    """Return values by metric name and labels, except the model's; check that every metric has a TYPE line."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            match = re.fullmatch(r'((?:vllm|jspec):\w+)\{model_name="m\\"1",engine="0",?(.*)\} (\S+)', line)
            assert match, line
            name, labels, value = match.groups()
            family = next(f for f in (name, re.sub("_(bucket|sum|count)$", "", name)) if f in kinds)
            assert kinds[family] != "counter" or family.endswith("_total")
            found[f"{name.split(':')[1]} {labels}".strip()] = float(value)
    return found


def test_prometheus_text_of_a_running_engine_contains_its_metrics(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], SamplingParams(max_tokens=40))
    engine.tokenizer.fails = lambda ids: bool(time.sleep(0.005))  # type: ignore[func-returns-value,union-attr]
    next(stream)
    found, metrics = engine.threads.do(lambda: (samples(engine.prometheus('m"1')), engine.metrics))
    assert found["num_requests_running"] == 1 and found["num_requests_waiting"] == 0
    assert found["kv_cache_usage_perc"] == metrics.pages_in_use / (engine.scheduler.pages.pages - 1) > 0
    assert not [name for name in found if "per_source" in name], "an n-gram drafter has one source"
    for name, value in (
        ("generation_tokens_total", metrics.num_tokens),
        ("prompt_tokens_total", metrics.num_prompt_tokens),
        ("prefix_cache_queries_total", metrics.num_prompt_tokens),
        ("prefix_cache_hits_total", metrics.num_cached_tokens),
        ("num_preemptions_total", metrics.num_preemptions),
        ("spec_decode_num_drafts_total", metrics.num_drafts),
    ):
        assert found[name] == value
    assert metrics.num_tokens > 0
    assert found['request_success_total finished_reason="length"'] == metrics.finished["length"] > 0
    count = found["time_to_first_token_seconds_count"]
    assert count == found['time_to_first_token_seconds_bucket le="+Inf"'] == metrics.finished["length"]
    assert count == found["request_queue_time_seconds_count"] == found["request_generation_tokens_count"]
    stream.close()
    assert samples(engine.prometheus('m"1'))['request_success_total finished_reason="abort"'] >= 1


def test_prometheus_text_of_given_metrics_has_positions_reasons_and_buckets() -> None:
    """These are draft positions, finish reasons and histogram buckets."""
    metrics = Metrics(
        num_accepted_per_position=[5, 2],
        finished={"eos": 2, "stop": 1, "error": 1},
        num_draft_tokens_per_source={"head": 9, "lookup": 4},
        num_accepted_tokens_per_source={"head": 5, "lookup": 2},
    )
    latencies = Latencies(first_token=Histogram((1.0, 2.0)))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        latencies.first_token.observe(seconds)
    drafter = {"drafter": "Beside", "head": 'a"b\\', "tree": "chain:4"}
    text = exposition(metrics, latencies, Gauges(0, 0, 0.0), 'm"1', drafter=drafter)
    found = samples(text)
    assert found['drafter_info drafter="Beside",head="a\\"b\\\\",tree="chain:4"'] == 1
    by_source = {name: count for name, count in found.items() if "per_source" in name}
    assert by_source == {
        f'spec_decode_num_{kind}_tokens_per_source_total source="{source}"': count
        for kind, counts in (("draft", {"head": 9, "lookup": 4}), ("accepted", {"head": 5, "lookup": 2}))
        for source, count in counts.items()
    }
    per_position = "spec_decode_num_accepted_tokens_per_pos_total position="
    assert (found[per_position + '"0"'], found[per_position + '"1"']) == (5, 2)
    assert found['request_success_total finished_reason="stop"'] == 3
    buckets = [found[f'time_to_first_token_seconds_bucket le="{bound}"'] for bound in ("1.0", "2.0", "+Inf")]
    assert buckets == [2, 3, 4] and found["time_to_first_token_seconds_sum"] == 12.0


def test_prometheus_times_of_phases_add_up_and_outputs_are_counted_by_step(engine: Engine) -> None:
    """Three of four requests get the slots; the fourth waits for one of them to end."""
    before = samples(engine.prometheus('m"1'))
    done = engine.generate([PROMPTS[1]] * 4, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
    after = samples(engine.prometheus('m"1'))
    new = {name: after[name] - before.get(name, 0.0) for name in after}
    queue, prefill, decode, inference = (
        new[f"request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode", "inference")
    )
    assert queue + prefill == pytest.approx(new["time_to_first_token_seconds_sum"])
    assert prefill + decode == pytest.approx(inference)
    assert queue + inference == pytest.approx(new["e2e_request_latency_seconds_sum"])
    waits = [one.metrics.queue_seconds for one in done]
    first, *_ = (one.metrics for one in done)
    assert waits[3] > first.time_to_first_token + first.decode_seconds > max(waits[:3]) > 0
    assert new["inter_token_latency_seconds_count"] == sum(one.metrics.num_drafts for one in done) == 4 * 19
    assert new["inter_token_latency_seconds_sum"] == pytest.approx(decode)
    assert new["request_generation_tokens_sum"] == 80 and new["request_prompt_tokens_sum"] == 4 * len(PROMPTS[1])


def test_stats_logger_after_each_interval_logs_one_line(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="jspec.engine.run.stats_logger")
    engine.generate(PROMPTS[0], PARAMS[0])
    assert not caplog.records, "no interval was given"
    monkeypatch.setattr(engine.threads, "_stats_logger", StatsLogger(3600.0))
    engine.generate(PROMPTS[0], PARAMS[0])
    assert not caplog.records
    monkeypatch.setattr(engine.threads, "_stats_logger", StatsLogger(0.0))
    with ByHand(engine) as by_hand:
        request = by_hand.submit(PROMPTS[0], PARAMS[0])
        for _ in range(3):
            by_hand.step()
        assert len(caplog.records) == 3
        by_hand.result(request)
    assert re.match(r"1 running, 0 waiting, \d+ % of the pages held, \d+\.\d tokens/s, mean", caplog.messages[2])


def test_line_of_a_look_up_beside_a_head_has_what_each_had_accepted_since_the_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="jspec.engine.run.stats_logger")
    lines, gauges, one = StatsLogger(0.0), Gauges(0, 0, 0.0), Metrics(num_drafts=1, num_accepted_tokens=2)
    first = Metrics(num_accepted_tokens_per_source={"head": 2, "lookup": 0}) + one
    more = Metrics(4, 16, 7, num_accepted_tokens_per_source={"head": 2, "lookup": 5})
    for metrics in (one, first, first + more):
        lines.write(metrics, gauges)
    parts = [re.search(r"length (.*?),", message).group(1) for message in caplog.messages]  # type: ignore[union-attr]
    assert parts[0] == "3.00"
    assert parts[2] == "2.75 (1 + 0.50 by head + 1.25 by lookup)"
