"""`jspec bench serve`: arrivals, times of requests, and report."""

from __future__ import annotations

import json
import math
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jspec import Engine, SamplingParams, Tree
from jspec.__main__ import main
from jspec.core.config import PREFILL_BUCKETS
from jspec.engine.callers.by_hand import ByHand
from jspec.tools.bench import pair as pairs
from jspec.tools.bench import serve as bench
from jspec.tools.bench.load import Arrival, Load, Log, serve
from jspec.tools.bench.pair import BenchPair
from jspec.tools.bench.prompt_sets import SOURCE_TEXT
from jspec.tools.bench.serve import ServeSetting, Spread, figures_of
from tests.support import engines, folders

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("ratio", "shortest"), [(0.7, 7), (0.0, 1), (1.0, 10)])
def test_serve_load_request_lengths_are_uniform(ratio: float, shortest: int) -> None:
    load = Load(num_prompts=2000, input_len=10, output_len=20, range_ratio=ratio)
    arrivals = load.arrivals(vocab_size=5)
    lengths = np.array([len(one.prompt) for one in arrivals])
    counts = [int(np.sum(lengths == size)) for size in range(shortest, 11)]
    assert sum(counts) == 2000 and (len(counts) == 1 or stats.chisquare(counts).pvalue > 1e-3)
    outputs = {one.params.max_tokens for one in arrivals}
    assert outputs == set(range(max(2 * shortest, 1) if ratio else 1, 21))
    assert {token for one in arrivals for token in one.prompt} == set(range(5))


def test_serve_load_with_a_rate_has_arrival_times_of_a_poisson_process() -> None:
    times = np.array([one.at for one in Load(num_prompts=2000, input_len=2, rate=4.0).arrivals(9)])
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert stats.kstest(gaps, "expon", args=(0, 0.25)).pvalue > 1e-3
    even = np.random.default_rng(0).uniform(0, 0.5, 2000)  # negative control: as many in the same time
    assert stats.kstest(even, "expon", args=(0, 0.25)).pvalue < 1e-3
    assert {one.at for one in Load(num_prompts=20, input_len=2).arrivals(9)} == {0.0}


def test_serve_load_of_equal_seeds_has_equal_requests() -> None:
    load = Load(num_prompts=5, input_len=4, rate=2.0, seed=3)
    assert load.arrivals(50) == load.arrivals(50) != replace(load, seed=4).arrivals(50)


def test_serve_load_with_a_text_has_prompts_that_are_parts_of_it() -> None:
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
        ("seed", -1),
    ],
)
def test_serve_load_with_a_wrong_field_raises(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected"):
        Load(**{"num_prompts": 1, field: value})  # type: ignore[arg-type]


class SteppedClock:
    """Clock that advances by one second with every step of the engine, and by the seconds waited for."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.time += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedClock]:
    clock, step = SteppedClock(), ByHand.step
    engines.plain().warmup()  # a turn that waits for a compilation is a step of the clock too

    def steps(self: ByHand) -> bool:
        has_work = step(self)
        clock.time += 1.0
        return has_work

    monkeypatch.setattr(ByHand, "step", steps)
    yield clock
    assert engines.plain().pages_in_use == 0


def arrival(at: float, prompt: list[int], output_len: int) -> Arrival:
    return Arrival(at, prompt, SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True))


def run(clock: SteppedClock, arrivals: list[Arrival], most: int | None = None) -> Log:
    return serve(engines.plain(), arrivals, max_concurrency=most, now=clock.now, wait=clock.wait)


def test_serve_request_times_are_measured_from_the_due_time_to_each_chunk(clock: SteppedClock) -> None:
    """A result is read one step after its dispatch; the second request is due during the third step."""
    log = run(clock, [arrival(0.0, [3, 1], 3), arrival(2.5, [4], 2)])
    first, second = log.served
    assert (first.began, first.pieces) == (0.0, [(2.0, 1), (3.0, 2), (4.0, 3)])
    assert (second.began, second.pieces) == (2.5, [(5.0, 1), (6.0, 2)])
    found = figures_of(ServeSetting(), log)
    assert (found["ttft_ms"].min, found["ttft_ms"].max) == (2000.0, 2500.0)
    assert (found["e2e_ms"].min, found["e2e_ms"].max) == (3500.0, 4000.0)
    assert (found["mean_tpot_ms"], found["itl_ms"].count, found["mean_itl_ms"]) == (1000.0, 3, 1000.0)
    assert (log.seconds, log.steps) == (6.0, [1.0] * 6)
    assert (found["total_output_tokens"], found["total_input_tokens"]) == (5, 3)
    assert found["request_throughput"] == 2 / 6 and found["output_throughput"] == 5 / 6


def test_serve_request_times_under_max_concurrency_begin_when_a_place_is_free(clock: SteppedClock) -> None:
    """Concurrency is 1: the second request begins when the first ends; the third is due at an idle engine."""
    log = run(clock, [arrival(0.0, [3, 1], 3), arrival(0.5, [4], 2), arrival(50.0, [5], 1)], most=1)
    assert [one.began for one in log.served] == [0.0, 4.0, 50.0]
    assert [one.pieces[0][0] - one.began for one in log.served] == [2.0, 2.0, 2.0]
    together = run(clock, [arrival(0.0, [3, 1], 3), arrival(0.5, [4], 2)], most=2)
    assert [one.began for one in together.served] == [0.0, 0.5]  # there was room, so its time runs


def test_serve_answers_have_the_requested_number_of_tokens(clock: SteppedClock) -> None:
    load = Load(num_prompts=30, input_len=20, output_len=8, rate=0.5)
    arrivals = load.arrivals(engines.VOCAB)
    log = run(clock, arrivals, most=5)
    assert len(log.served) == 30
    for one in log.served:
        assert one.completion is not None and one.completion.prompt_token_ids == one.arrival.prompt
        assert one.pieces[-1][1] == len(one.completion.token_ids) == one.arrival.params.max_tokens


def failing(clock: SteppedClock) -> Log:
    """Log of a run whose last request ends with an error."""
    log = run(clock, [arrival(0.0, [3, 1], 3), arrival(2.5, [4], 2), arrival(30.0, [2], 2)])
    bad = log.served[-1]
    assert bad.completion is not None
    bad.completion = replace(bad.completion, error=KeyError("no such token"))
    return log


def test_serve_report_names_and_values_equal_those_of_vllm_without_failed_requests(clock: SteppedClock) -> None:
    log = failing(clock)._replace(seconds=8.0)
    found = figures_of(ServeSetting(), log)
    assert (found["completed"], found["failed"], found["ttft_ms"].count) == (2, 1, 2)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (3, 5)
    rates = [found[f"{name}_throughput"] for name in ("request", "output")] + [found["total_token_throughput"]]
    assert rates == [2 / 8, 5 / 8, 1]
    for name, mean, p99 in (("ttft", 2250, 2495), ("tpot", 1000, 1000), ("itl", 1000, 1000)):
        assert [found[f"{word}_{name}_ms"] for word in ("mean", "median", "p99")] == [mean, mean, pytest.approx(p99)]


def test_serve_table_has_one_column_for_each_setting(clock: SteppedClock) -> None:
    log = failing(clock)
    found = [figures_of(ServeSetting(tree), log) for tree in (Tree.chain(1), Tree.chain(2))]
    lines = [line.split() for line in bench.text(found).splitlines()]
    assert ["tree", "chain:1", "chain:2"] in lines and ["acceptance_per_position", "0.00", "0.00/0.00"] in lines
    assert ["median_ttft_ms", "2250.00", "2250.00"] in lines
    assert ["e2e_ms", *["3500.000/3625.000/3750.000/3875.000/4000.000"] * 2] in lines


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(depth=3), r"depth: expected auto or one of \(0, 1, 2, 4\) for chain:4, got 3"),
        (dict(tree=None, depth=1), "depth: expected"),
    ],
)
def test_serve_setting_with_a_wrong_field_raises(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSetting(**{"tree": Tree.chain(4)} | changed)


def test_serve_report_has_quantiles_mean_and_deviation_computed_by_hand() -> None:
    spread = Spread.of([4.0, 1.0, 2.0, 3.0], 10.0)
    assert (spread.min, spread.max, spread.mean, spread.median) == (10.0, 40.0, 25.0, 25.0)
    assert (spread.q25, spread.q75) == (17.5, 32.5) and spread.std == pytest.approx(math.sqrt(125))
    assert Spread.of([]).count == 0 and math.isnan(Spread.of([]).mean)


@pytest.fixture(autouse=True)
def quick_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines of the command do without controls, which no request of a load has."""
    monkeypatch.setattr(pairs, "Engine", partial(Engine, controls=False))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command-line options that name a target of one layer over bytes."""
    folder = tmp_path_factory.mktemp("pair")
    config = {**folders.TARGET, "num_hidden_layers": 1, "vocab_size": 256, "eos_token_id": None}
    folders.write(folder, config, folders.target_tensors(config))
    return ["--target", str(folder), "--tokenizer", "bytes"]


def test_serve_command_with_several_trees_serves_equal_requests_to_each(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    sizes = {"num-prompts": 6, "input-len": 12, "output-len": 9, "rate": "200", "max-concurrency": 2, "slots": 1}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "results.json"
    words += ["--draft", "ngram", "--tree", "none", "chain:2", "--json", str(out)]
    assert main(["bench", "serve", *pair, *words]) == 0
    (printed, progress), written = capsys.readouterr(), json.loads(out.read_text())
    rates = [f"{one['output_throughput']:.0f}" for one in written["results"]]
    told = re.findall(r"^(none|chain:2), at most 2 at once: (\d+) tokens/s$", progress, re.MULTILINE)
    assert told == list(zip(("none", "chain:2"), rates, strict=True))
    arrivals = Load(num_prompts=6, input_len=12, output_len=9, rate=200.0).arrivals(256)
    assert [one["tree"] for one in written["results"]] == ["none", "chain:2"]
    assert written["results"][0]["max_concurrency"] == 2 and written["load"]["rate"] == 200.0
    for one in written["results"]:
        assert one["completed"] == 6 and one["failed"] == 0 and one["mean_acceptance_length"] >= 1
        assert one["total_output_tokens"] == sum(arrival.params.max_tokens for arrival in arrivals)
        assert 0 < one["mean_ttft_ms"] < one["e2e_ms"]["mean"] and one["p99_itl_ms"] >= one["median_itl_ms"]
        assert one["request_throughput"] == pytest.approx(6 / one["duration"])
    assert re.search(r"^ *completed  +6  +6$", printed, re.MULTILINE)


def test_serve_command_with_settings_in_turns_emits_equal_numbers_of_tokens(pair: list[str], tmp_path: Path) -> None:
    """For all depths, concurrencies and overlaps, tokens add up and only the requested depths are drafted."""
    out = tmp_path / "out.json"
    words = "--num-prompts 2 --input-len 12 --output-len 12 --range-ratio 1 --slots 2 --repeats 2 --draft ngram"
    grid = "--tree none chain:2 --depth 1 auto --max-concurrency 1 2 --overlap yes no"
    assert main(["bench", "serve", *pair, *words.split(), *grid.split(), "--json", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    assert len(found) == 4 + 2 * 4 and len({json.dumps([one[n] for n in NAMES]) for one in found}) == len(found)
    assert found[0]["ratio"] == 1 and all(one["ratio"] > 0 and one["duration_spread"] >= 0 for one in found)
    for one in found:
        assert (one["completed"], one["total_output_tokens"], one["prefix_hit_rate"]) == (2, 24, 0)
        tokens = one["mean_acceptance_length"] * sum(one["num_rounds_per_depth"].values())
        # A row's first token belongs to no step; a last step that is cut after a drafted token counts a bonus too.
        assert 2 * 11 - 0.01 < tokens < 2 * 11 + 2.01
        depths = {None: {"0"}, 1: {"1"}, "auto": {"0", "1", "2"}}[one["depth"]]
        assert set(one["num_rounds_per_depth"]) <= depths


NAMES = ("tree", "depth", "max_concurrency", "overlap")


EMBEDDED = Namespace(target=None, draft=None, tokenizer=None, dtype=None)


@pytest.mark.timing
@pytest.mark.parametrize("tree", [None, Tree.chain(3)], ids=str)
def test_serve_throughput_of_a_batch_is_over_3_times_that_of_single_requests(tree: Tree | None) -> None:
    settings = [ServeSetting(tree, max_concurrency=1), ServeSetting(tree), ServeSetting(tree, overlap=False)]
    arrivals = Load(64, 16, 64, range_ratio=1.0).arrivals(256, text=SOURCE_TEXT.encode())
    sizes = dict(slots=64, buckets=(1, 64), max_len=80, prefill_buckets=(16,), prefill_budget=PREFILL_BUCKETS[-1])
    found = list(bench.measure(BenchPair.of(EMBEDDED), settings, arrivals, 5, **sizes))
    print(bench.text(found))
    assert found[1]["ratio"] >= 3.0
    assert found[1]["ratio"] / found[2]["ratio"] >= 0.98  # as fast, but for the difference of two medians


def test_serve_command_with_a_tree_but_no_drafter_is_refused(pair: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "serve", *pair, "--tree", "chain:2"]) == 2
    assert "expected --draft" in capsys.readouterr().err


TOKENS = 12


def test_serve_command_with_a_prompt_file_has_steps_plus_accepted_drafts_as_tokens(
    pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The printed numbers equal the JSON file's; steps and accepted drafts add up to the tokens."""
    texts = ["one two one two one", "aaaaaaaa", "x y z"]
    objects = [{"turns": [texts[0], "not read"]}, {"prompt": texts[1]}, {"question": texts[2]}, {"prompt": "left out"}]
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    path.write_text("\n".join(map(json.dumps, objects)))
    words = ["--draft", "ngram", "--slots", "1", "--prompts", str(path), "--num-prompts", "3", "--tree", "chain:3"]
    assert main(["bench", "serve", *pair, *words, "--output-len", str(TOKENS), "--json", str(out)]) == 0
    printed = dict(re.findall(r"^ *(\w+)  +([\d./]+)$", capsys.readouterr().out, re.MULTILINE))
    (own,) = json.loads(out.read_text())["results"]
    assert own["total_output_tokens"] == 3 * TOKENS == int(printed["total_output_tokens"])
    assert own["total_input_tokens"] == sum(map(len, texts))
    steps, accepted = own["num_drafts"], own["num_accepted_tokens"]
    assert accepted > 0 and steps + accepted - 3 <= 3 * (TOKENS - 1) <= steps + accepted
    assert accepted <= own["num_draft_tokens"] <= 3 * steps
    shares = own["acceptance_per_position"]
    assert len(shares) == 3 and shares == sorted(shares, reverse=True)
    assert steps * sum(shares) >= accepted  # a step that was cut at the end accepted more than it emitted
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert int(printed[name]) == own[name]
    assert float(printed["mean_acceptance_length"]) == pytest.approx(1 + accepted / steps, abs=0.005)
    printed_shares = [float(share) for share in printed["acceptance_per_position"].split("/")]
    assert printed_shares == pytest.approx(shares, abs=0.005)


@pytest.mark.long
def test_serve_command_with_a_shape_serves_random_weights_with_and_without_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out.json"
    words = ["bench", "serve", "--shape", "tiny", "--num-prompts", "3", "--input-len", "20", "--output-len", "4"]
    assert main([*words, "--slots", "2", "--tree", "none", "chain:2", "--json", str(out)]) == 0
    plain, drafted = json.loads(out.read_text())["results"]
    assert plain["completed"] == drafted["completed"] == 3
    assert plain["total_output_tokens"] == drafted["total_output_tokens"] <= 12
    assert (plain["num_draft_tokens"], drafted["num_draft_tokens"] > 0) == (0, True)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a text"}')
    assert main([*words, "--prompts", str(prompts), "--num-prompts", "1"]) == 2
    assert "pass a --target" in capsys.readouterr().err
