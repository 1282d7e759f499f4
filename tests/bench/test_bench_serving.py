"""`jspec bench serve-sim`: who comes when, whose time runs from when to when, and what is printed of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from jspec import Engine
from jspec.__main__ import main
from jspec.tools.bench import serve_sim
from jspec.tools.bench.load import Arrival, Load, Log, serve
from jspec.tools.bench.serve_sim import Serving, summary
from jspec.tools.bench.spread import Spread
from tests.support import folders, small

pytestmark = pytest.mark.once


# -- what comes


@pytest.mark.parametrize(("ratio", "shortest"), [(0.7, 7), (0.0, 1), (1.0, 10)])
def test_lengths_are_uniform_from_the_ratio_to_the_whole(ratio: float, shortest: int) -> None:
    load = Load(num_prompts=2000, input_len=10, output_len=20, range_ratio=ratio)
    arrivals = load.arrivals(vocab_size=5)
    lengths = np.array([len(one.prompt) for one in arrivals])
    counts = [int(np.sum(lengths == size)) for size in range(shortest, 11)]
    assert sum(counts) == 2000 and (len(counts) == 1 or stats.chisquare(counts).pvalue > 1e-3)
    outputs = {one.output_len for one in arrivals}
    assert outputs == set(range(max(2 * shortest, 1) if ratio else 1, 21))
    assert {token for one in arrivals for token in one.prompt} == set(range(5))


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array([one.at for one in Load(num_prompts=2000, input_len=2, rate=4.0).arrivals(9)])
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert stats.kstest(gaps, "expon", args=(0, 0.25)).pvalue > 1e-3
    even = np.random.default_rng(0).uniform(0, 0.5, 2000)  # negative control: as many in the same time
    assert stats.kstest(even, "expon", args=(0, 0.25)).pvalue < 1e-3
    assert {one.at for one in Load(num_prompts=20, input_len=2).arrivals(9)} == {0.0}


def test_a_load_is_what_its_seed_says() -> None:
    load = Load(num_prompts=5, input_len=4, rate=2.0, seed=3)
    assert load.arrivals(50) == load.arrivals(50) != replace(load, seed=4).arrivals(50)


def test_prompts_may_be_cuts_of_a_text() -> None:
    load = Load(num_prompts=50, input_len=6, range_ratio=0.5)
    prompts = [one.prompt for one in load.arrivals(9, text=range(100))]
    assert all(prompt == list(range(prompt[0], prompt[0] + len(prompt))) for prompt in prompts)
    assert len({prompt[0] for prompt in prompts}) > 20
    with pytest.raises(ValueError, match="at least 6 tokens"):
        load.arrivals(9, text=range(5))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prompts", 0),
        ("input_len", 0),
        ("range_ratio", 1.5),
        ("rate", 0.0),
        ("rate", math.nan),
        ("max_concurrency", 0),
        ("seed", -1),
    ],
)
def test_no_other_load(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected"):
        Load(**{field: value})  # type: ignore[arg-type]


# -- whose time runs from when to when


class Clock:
    """A second passes with every step of the engine, and none otherwise unless waited for."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, step = Clock(), Engine.step

    def steps(self: Engine) -> None:
        step(self)
        clock.time += 1.0

    monkeypatch.setattr(Engine, "step", steps)
    yield clock
    assert small.plain().pages_in_use == 0


def run(clock: Clock, arrivals: list[Arrival], most: int | None = None) -> Log:
    return serve(small.plain(), arrivals, max_concurrency=most, now=clock.now, wait=clock.wait)


def test_times_run_from_arrival_to_each_piece(clock: Clock) -> None:
    """By hand: a result is read a step behind its dispatch; the second request comes within the third step."""
    log = run(clock, [Arrival(0.0, [3, 1], 3), Arrival(2.5, [4], 2)])
    first, second = log.served
    assert (first.began, first.pieces) == (0.0, [(2.0, 1), (3.0, 2), (4.0, 3)])
    assert (second.began, second.pieces) == (2.5, [(5.0, 1), (6.0, 2)])
    result = summary("none", log)
    assert (result.ttft.min, result.ttft.max) == (2000.0, 2500.0)
    assert (result.e2e.min, result.e2e.max) == (3500.0, 4000.0)
    assert (result.tpot.mean, result.itl.count, result.itl.mean) == (1000.0, 3, 1000.0)
    assert (log.seconds, log.steps, result.output_tokens, result.input_tokens) == (6.0, [1.0] * 6, 5, 3)
    assert result.request_throughput == 2 / 6 and result.output_throughput == 5 / 6


def test_whoever_waits_outside_does_not_age(clock: Clock) -> None:
    """One at a time: the second's time begins when the first has ended; the third comes to an idle engine."""
    log = run(clock, [Arrival(0.0, [3, 1], 3), Arrival(0.5, [4], 2), Arrival(50.0, [5], 1)], most=1)
    assert [one.began for one in log.served] == [0.0, 4.0, 50.0]
    assert [one.pieces[0][0] - one.began for one in log.served] == [2.0, 2.0, 2.0]
    together = run(clock, [Arrival(0.0, [3, 1], 3), Arrival(0.5, [4], 2)], most=2)
    assert [one.began for one in together.served] == [0.0, 0.5]  # there was room, so its time runs


def test_answers_have_the_lengths_that_were_asked_for(clock: Clock) -> None:
    load = Load(num_prompts=30, input_len=20, output_len=8, rate=0.5)
    arrivals = load.arrivals(small.VOCAB)
    log = run(clock, arrivals, most=5)
    assert len(log.served) == 30
    for one in log.served:
        assert one.completion is not None and one.completion.prompt_token_ids == one.arrival.prompt
        assert one.pieces[-1][1] == len(one.completion.token_ids) == one.arrival.output_len


# -- what is told of it


@pytest.fixture
def result(clock: Clock) -> Serving:
    log = run(clock, [Arrival(0.0, [3, 1], 3), Arrival(2.5, [4], 2), Arrival(30.0, [2], 2)])
    bad = log.served[-1]
    assert bad.completion is not None
    bad.completion = replace(bad.completion, error=KeyError("no such token"))
    return summary("chain:1", log)


def test_a_failed_request_is_counted_as_such_alone(result: Serving) -> None:
    assert (result.completed, result.failed) == (2, 1)
    assert (result.input_tokens, result.output_tokens, result.ttft.count) == (3, 5, 2)


def test_the_report_is_laid_out_as_a_servers(result: Serving) -> None:
    lines = serve_sim.block(replace(result, seconds=8.0)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    told = dict(line.rsplit(maxsplit=1) for line in lines if ": " in line)
    assert {len(line) for line in lines if line[0] in "=-"} == {50}
    assert (told["Successful requests:"], told["Failed requests:"]) == ("2", "1")
    assert told["Request throughput (req/s):"] == "0.25" and told["Output token throughput (tok/s):"] == "0.62"
    assert told["Total token throughput (tok/s):"] == "1.00"
    for name, mean, p99 in (
        ("TTFT", "2250.00", "2495.00"),
        ("TPOT", "1000.00", "1000.00"),
        ("ITL",) + ("1000.00",) * 2,
    ):
        assert [told[f"{word} {name} (ms):"] for word in ("Mean", "Median", "P99")] == [mean, mean, p99]
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    table = serve_sim.text([result]).splitlines()[len(lines) + 1 :]
    assert table[0].split() == ["min", "max", "mean", "std", ".25", ".5", ".75"]
    spread = ["3500.000", "4000.000", "3750.000", "250.000", "3625.000", "3750.000", "3875.000"]
    assert table[2].split() == ["E2E", "(ms)", *spread]
    assert [line.split()[0] for line in table[2:]] == ["E2E", "TTFT", "step"]


def test_a_comparison_stands_beside_the_first(result: Serving) -> None:
    faster = replace(result, tree="topk:16,4,4", seconds=result.seconds / 2)
    assert serve_sim.text([result, faster]).endswith(serve_sim.comparison([result, faster]))
    rows = [line.split() for line in serve_sim.comparison([result, faster]).splitlines()[2:]]
    assert [(row[0], row[2]) for row in rows] == [("chain:1", "1.00"), ("topk:16,4,4", "2.00")]


def test_figures_of_values_by_hand() -> None:
    spread = Spread.of([4.0, 1.0, 2.0, 3.0], 10.0)
    assert (spread.min, spread.max, spread.mean, spread.median) == (10.0, 40.0, 25.0, 25.0)
    assert (spread.q25, spread.q75) == (17.5, 32.5) and spread.std == pytest.approx(math.sqrt(125))
    assert Spread.of([]).count == 0 and Spread.of([]).fields()["mean"] is None


def test_the_command_serves_the_same_load_with_every_tree(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = {**folders.TARGET, "num_hidden_layers": 1, "eos_token_id": 2}
    folders.write(tmp_path / "target", config, folders.target_tensors(config))
    sizes = {"num-prompts": 6, "input-len": 12, "output-len": 9, "rate": "200", "max-concurrency": 2, "slots": 1}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    pair = ["--target", str(tmp_path / "target"), "--tokenizer", "bytes", "--draft", "ngram"]
    out = tmp_path / "results.json"
    assert main(["bench", "serve-sim", *pair, *words, "--tree", "none", "chain:2", "--json", str(out)]) == 0
    printed, written = capsys.readouterr().out, json.loads(out.read_text())
    arrivals = Load(num_prompts=6, input_len=12, output_len=9, rate=200.0).arrivals(config["vocab_size"])
    assert [one["tree"] for one in written["results"]] == ["none", "chain:2"]
    assert written["load"]["max_concurrency"] == 2 and written["load"]["rate"] == 200.0
    for one in written["results"]:
        assert one["completed"] == 6 and one["failed"] == 0 and one["mean_acceptance_length"] >= 1
        assert one["total_output_tokens"] == sum(arrival.output_len for arrival in arrivals)
        assert 0 < one["mean_ttft_ms"] < one["e2e_ms"]["mean"] and one["p99_itl_ms"] >= one["median_itl_ms"]
        assert one["request_throughput"] == pytest.approx(6 / one["duration"])
    assert printed.count("Serving Benchmark Result") == 2 and printed.splitlines()[-1].split()[0] == "chain:2"


def test_who_drafts_a_tree_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = {**folders.TARGET, "num_hidden_layers": 1}
    folders.write(tmp_path / "target", config, folders.target_tensors(config))
    words = ["--target", str(tmp_path / "target"), "--tokenizer", "bytes", "--tree", "chain:2"]
    assert main(["bench", "serve-sim", *words]) == 2
    assert "expected --draft" in capsys.readouterr().err
