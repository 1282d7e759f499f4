"""`jspec bench step`: cases, command, cost of sampling controls, idle share of the device, host's time."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Engine, Tree
from jspec.__main__ import main
from jspec.draft.dflash_head import dflash_params
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.engine.request.request import Request
from jspec.engine.run.core import EngineCore
from jspec.engine.schedule.scheduler import Scheduler
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.models.decoder import Model
from jspec.models.param_spec import ParamSpec
from jspec.models.params import model_params
from jspec.step.program import init_state
from jspec.tools.bench import host, profiling, random_models, roofline, step, step_costs
from jspec.tools.bench.host import HostTime, measure_host, ready_engine
from jspec.tools.bench.report import table_of
from jspec.tools.bench.step import StepCase
from jspec.tools.bench.step_costs import max_tokens
from pallas_kernels.layers.weights import Quantized

pytestmark = pytest.mark.once

TINY = ["bench", "step", "--shape", "tiny", "--dtype", "float32"]
PLAIN = [*TINY, "--tree", "none", "--batch", "2", "--context", "16"]
CLOCK = profiling.GpuClock(1560.0, 1980.0, 691.6, 0.75)
CASE = ["shape", "batch", "context", "tree", "page", "dtype", "idle", "drafter", "devices"]


QUICK = partial(Engine, controls=False)  # compiles sooner; no measured request has controls


@pytest.fixture
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("GROUP", 2), ("GROUPS", 3), ("WARM_UP", 1)):
        monkeypatch.setattr(step, name, count)


def test_step_command_writes_table_json_and_trace(
    few_groups: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, untimed steps for the clock follow the timed ones; each gets the state of the step before."""

    def twice(work: Callable[[], object]) -> profiling.GpuClock:
        work()
        work()
        return CLOCK

    monkeypatch.setattr(profiling, "watch_clock", twice)
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H200"])
    files = ["--profile", str(tmp_path / "traces"), "--json", str(tmp_path / "step.json")]
    assert main([*PLAIN, "--idle", "1", *files]) == 0
    trace = tmp_path / "traces" / "1"
    _, heads, _, row, where, last = capsys.readouterr().out.splitlines()
    clock = ["SM", "MHz", "of", "MHz", "W", "capped"]
    assert heads.split() == [*CASE, "ms", "p90-p10", "floor", "ratio", *clock, "tokens", "host", "ms"]
    assert row.split()[:7] == ["tiny", "2", "16", "none", "16", "float32", "1"]
    assert row.split()[-6:-1] == ["1560", "1980", "692", "75%", "1.00"]  # a token a row
    assert where == f"trace: {trace}" and last == "no launches of a GPU in the trace"
    assert [path.suffix for path in trace.rglob("*.pb")] == [".pb"]
    (result,) = json.loads((tmp_path / "step.json").read_text())["results"]
    names = "shape batch context tree page_size dtype implementation greedy quantize draft_quantize kv_dtype idle depth"
    assert (
        list(result["case"]) == [*names.split(), "nodes", "drafter", "deterministic", "tensor_parallel"]
        and result["case"]["tree"] == "none"
    )
    assert {"milliseconds", "spread", "floor", "tokens"} < set(result)
    assert result["ratio"] == pytest.approx(result["milliseconds"] / result["floor"])
    assert set(result["clock"]) == {"mhz", "highest", "watts", "capped"}


def test_step_command_on_cpu_measures_tiny_shape_without_floors(
    few_groups: None, capsys: pytest.CaptureFixture
) -> None:
    """A CPU's memory bandwidth is unknown, and the 8B shape would take minutes."""
    assert main(["bench", "step", "--tree", "none", "--context", "16"]) == 0
    about, heads, _, row = capsys.readouterr().out.splitlines()
    assert about.endswith("floors: none, as the memory bandwidth of this device is unknown")
    assert heads.split() == [*CASE, "ms", "p90-p10", "tokens", "host", "ms"] and row.split()[0] == "tiny"


def test_step_command_on_two_devices_runs_on_both(few_groups: None, capsys: pytest.CaptureFixture) -> None:
    assert main([*TINY, "--tree", "chain:1", "--batch", "2", "--context", "16", "--tensor-parallel", "2"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split()[:9] == ["tiny", "2", "16", "chain:1", "16", "float32", "0", "eagle3", "2"]


@pytest.mark.parametrize("drafter", [pytest.param("dflash", marks=pytest.mark.long), "peagle"])
def test_step_command_with_another_head_and_a_budget_names_both(
    drafter: str, few_groups: None, capsys: pytest.CaptureFixture
) -> None:
    options = ["--tree", "chain:3", "--batch", "2", "--context", "16", "--drafter", drafter, "--nodes", "1"]
    assert main([*TINY, *options]) == 0
    _, heads, _, row = capsys.readouterr().out.splitlines()
    printed = dict(zip(heads.split(), row.split(), strict=False))
    assert printed["nodes"] == "1" and printed["drafter"] == drafter


@pytest.mark.parametrize(("tree", "alone", "two"), [(None, 5.01, 2.89), (Tree.chain(4), 6.00, 3.44)])
def test_floor_on_two_devices_is_half_and_the_time_of_exchanges(
    tree: Tree | None, alone: float, two: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An 8B target exchanges parts 64 times a pass, and its head twice; an exchange takes 6 microseconds."""
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H100 80GB HBM3"])
    floors = [step.floor_milliseconds(StepCase("llama3-8b", 1, 1024, tree, tensor_parallel=n)) for n in (1, 2)]
    assert floors == pytest.approx([alone, two], abs=0.02)


def size_of_matrices(params: dict[str, ParamSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in params.values() if len(spec.shape) == 2)


@pytest.mark.parametrize(("batch", "rows", "milliseconds"), [(1, 1, 2.04), (1, 5, 6.13), (8, 1, 8.82), (32, 5, 21.1)])
def test_floor_of_a_mixture_of_experts_counts_the_experts_that_random_choices_hit(
    batch: int, rows: int, milliseconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row, 8 of 128 experts are read; with many, all of them."""
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H100 80GB HBM3"])
    target = random_models.TARGETS["qwen3-30b-a3b"]
    costs = roofline.verify_costs(target, batch, rows, 1024)
    assert 1000 * (roofline.seconds(costs) or 0) == pytest.approx(milliseconds, rel=0.01)
    read = sum(cost.bytes for cost in costs if cost.name.startswith("experts"))
    params = model_params(target)
    stored = sum(2 * math.prod(spec.shape) for name, spec in params.items() if "experts_" in name)
    assert read == pytest.approx(stored * (1 - (1 - 8 / 128) ** (batch * rows)))


def test_floor_with_experts_in_mxfp4_counts_their_packed_bytes_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step of gpt-oss-20b reads 4 of 32 experts a layer, 17 bytes for 32 values instead of 64."""
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H100 80GB HBM3"])
    plain, packed, int4 = (
        step.floor_milliseconds(StepCase("gpt-oss-20b", 1, 1024, None, quantize=kind)) or 0
        for kind in (None, "mxfp4", "int4")
    )
    values = 24 * 4 * 3 * 2880 * 2880
    assert plain - packed == pytest.approx(1000 * values * (2 - 17 / 32) / 3.02e12) and int4 < packed


def test_least_bytes_of_a_dflash_block_are_its_weights_and_its_caches() -> None:
    config, target = random_models.head_config("llama3-8b", "dflash"), random_models.TARGETS["llama3-8b"]
    head, cache = target.vocab_size * target.hidden_size, 2 * 5 * 1024 * 8 * 1024  # keys and values of 8 rows
    costs = roofline.head_costs(config, 8, Tree.chain(7), 1024)
    assert sum(cost.bytes for cost in costs) == 2 * (size_of_matrices(dflash_params(config)) + head + cache)


def test_least_bytes_of_a_peagle_block_are_its_weights_and_its_caches_at_any_depth() -> None:
    """An EAGLE-3 head reads them once for each level of the tree."""
    config, cache = random_models.head_config("llama3-8b", "peagle"), 2 * 4 * 1024 * 8 * 1024
    weights = size_of_matrices(head_params(config))
    for tree in (Tree.chain(1), Tree.chain(7)):
        assert sum(cost.bytes for cost in roofline.head_costs(config, 8, tree, 1024)) == 2 * (weights + cache)


def test_least_flops_of_a_step_with_a_budget_are_those_of_its_rows() -> None:
    target = random_models.TARGETS["llama3-8b"]
    whole, some = (roofline.verify_costs(target, 32, 5, 1024, rows=rows) for rows in (None, 32 * 3))
    ratios = {cost.name: own.flops / cost.flops for cost, own in zip(whole, some, strict=True)}
    assert ratios.pop("attention") == 1 and set(ratios.values()) == {0.6}


def test_step_command_with_draft_quantize_quantises_only_the_head(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    seen = []

    def measure(case: step.StepCase, target: Model, head: EagleHead, **_: Any) -> step.Timing:
        seen.append([type(model.layers[0].qkv) for model in (target, head)])
        return step.Timing(case, 1.0, 0.1, 0.5, 2.0, None, 1.0, 0.3)

    monkeypatch.setattr(step, "measure", measure)
    for more in ([], ["--quantize", "fp8"]):
        assert main([*TINY, "--tree", "chain:1", "--draft-quantize", "int8", *more]) == 0
        printed = capsys.readouterr().out
        assert [*more[1:], "int8"] == printed.splitlines()[3].split()[6 : 7 + len(more[1:])] and "MHz" not in printed
    (plain, small), both = seen
    assert small is Quantized is not plain and both == [Quantized] * 2


def test_step_command_with_all_batch_rows_idle_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main([*PLAIN, "--idle", "2"]) == 2
    assert "idle: expected 0 to 1 of a batch of 2 rows, got 2" in capsys.readouterr().err


def test_step_state_for_timing_has_no_zeros_in_its_caches() -> None:
    """A GPU draws less power for zeros (NOTES, "Tried"); the drafter's cache is checked too."""
    case = step.StepCase("tiny", 3, 20, Tree.chain(2), dtype="float32")
    target, head = random_models.random_target("tiny", "float32"), random_models.random_head("tiny", "float32")
    program, params, pool = step.build(case, target, head)
    state = step.filled_state(init_state(program, params, pool), case)
    pools = [*step.jax.tree.leaves(state.target), *step.jax.tree.leaves(state.draft.cache)]
    assert len(pools) == 2 * (len(target.layers) + 1)
    assert all(np.abs(np.asarray(pool, np.float32)).max(axis=(1, 2, 3)).min() > 0 for pool in pools)


WAIT = 0.03  # seconds a step of a program that supports grammars


@pytest.mark.long
def test_measured_cost_of_a_program_with_a_wait_is_near_the_wait(
    few_groups: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = tuple(step_costs.VARIANTS[index] for index in (0, 1, 2, 7))
    compiled, reports = step.compile_step, []

    def slow(program: Any, *shapes: Any) -> Any:
        executable = compiled(program, *shapes)

        def run(*arguments: Any) -> Any:
            time.sleep(WAIT * bool(program.grammar_cells))
            state, output = executable(*arguments)
            reports.append(np.asarray(output.report))
            return state, output

        return run

    monkeypatch.setattr(step, "compile_step", slow)
    monkeypatch.setattr(step_costs, "measure_controls", partial(step_costs.measure_controls, variants=variants))
    words = ["--measure", "controls", "--batch", "2", "--context", "32", "--tree", "chain:2"]
    assert main([*TINY, *words, "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [one["kind"]["name"] for one in results] == [variant.name for variant in variants]
    assert results[0]["more"] == 0 and results[-1]["more"] == pytest.approx(WAIT * 1e3, rel=0.5)
    without, off, on, _ = (reports[2 * index] for index in range(len(variants)))  # the first step of each
    np.testing.assert_array_equal(off, without)
    assert (on != without).any()


@pytest.mark.long
@pytest.mark.usefixtures("runs_long")  # steps must be short beside the wait
def test_device_idle_share_of_a_host_slowed_by_a_wait_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    dispatch, wait = EngineCore._dispatch, 0.02  # seconds before each dispatch, many times a step of this shape

    def slow(self: EngineCore, plan: Any) -> Any:
        time.sleep(wait)
        return dispatch(self, plan)

    monkeypatch.setattr(step_costs, "LOOP", 4)
    monkeypatch.setattr(step_costs, "STEPS", 9)
    monkeypatch.setattr(EngineCore, "_dispatch", slow)
    monkeypatch.setattr(profiling, "has_gpu", lambda: True)
    words = ["--measure", "overlap", "--batch", "12", "--json", str(tmp_path / "out.json")]
    assert main([*TINY, "--tree", "none", "--context", "16", *words]) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["case"]["batch"] == 12 and result["case"]["tree"] == "none"
    assert result["engine"] >= wait * 1e3
    assert result["loop"] >= wait * 1e3 / 4  # once in four steps
    assert result["idle"] == pytest.approx(3 / 4, abs=0.2)
    *_, heads, _, row = capsys.readouterr().out.splitlines()
    assert heads.split() == [*CASE, "loop", "ms", "engine", "ms", "idle", "share"]
    assert row.split()[-1] == f"{result['idle']:.1%}"


def test_overlap_command_on_cpu_prints_no_idle_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(step_costs, "Engine", QUICK)
    for name in ("LOOP", "LOOPS", "LOOP_WARM_UP", "STEPS"):
        monkeypatch.setattr(step_costs, name, 2)
    assert main([*PLAIN, "--measure", "overlap"]) == 0
    _, heads, *_, last = capsys.readouterr().out.splitlines()
    assert heads.split()[-4:] == ["loop", "ms", "engine", "ms"]
    assert last == "idle share: not measured, as host and device are the same processor"


@pytest.mark.long
def test_second_start_of_an_engine_loads_every_program_from_the_folder_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--measure", "startup", "--tree", "chain:1", "--batch", "1,2", "--context", "32"]
    assert main([*TINY, *words, "--json", str(tmp_path / "out.json")]) == 0
    cold, warm = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (cold["start"], warm["start"], cold["tree"]) == ("cold", "warm", "chain:1")
    assert cold["asked"] - cold["hits"] > 2, "negative control: the first one had to compile"
    assert warm["hits"] == warm["asked"] > 2
    programs = {"round[1]", "round[2]", "prefill[128]", "update_page_table", "controls", "write_pending_rows"}
    assert set(cold["compile"]) == set(warm["lower"]) == programs
    assert sum(warm["compile"].values()) < sum(cold["compile"].values()) / 2
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["cold", "chain:1"] and second.split()[-1] == f"{sum(warm['compile'].values()):.1f}"


def test_startup_command_with_wrong_buckets_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main([*TINY, "--measure", "startup", "--tree", "none", "--batch", "2,1"]) == 2
    assert "buckets: expected ascending" in capsys.readouterr().err


@pytest.mark.parametrize("shape", random_models.TARGETS)
def test_overlap_command_default_lengths_fit_every_shape(shape: str) -> None:
    case = StepCase(shape, 1, 1024, Tree.chain(8))
    longest = case.context + max_tokens(case, step_costs.LOOP_WARM_UP + step_costs.LOOPS, step_costs.LOOP)
    assert longest <= random_models.TARGETS[shape].max_position


CASES = [StepCase("least", 4, context, Tree.chain(1), dtype="float32") for context in (64, 16384)]
FULL = [StepCase("least", 64, context, Tree.chain(4), dtype="float32") for context in (1024, 32768)]
STEPS = 20


def max_len(cases: list[StepCase]) -> int:
    return cases[-1].context + max_tokens(cases[-1], 50)


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_costs, "Engine", QUICK)
        return [ready_engine(case, max_len(CASES)) for case in CASES]


def read_all(self: Scheduler, request: Request, rows: int, keep: Callable[..., None] = Scheduler.cache_prefix) -> None:
    """Read a request's whole text 16 times, then do what `keep` does: the negative control of a slow host."""
    for _ in range(16):
        request.tokens_between(0, rows)
    keep(self, request, rows)


def test_host_time_measurement_decodes_every_row_in_every_step(engines: list[Engine]) -> None:
    """All rows are active at the case's context, and each step accepts as many drafts as the case says."""
    before = [engine.metrics for engine in engines]
    short, _ = measure_host(engines, CASES, STEPS, 1)
    assert short.case.context == 64 and short.milliseconds > 0 and short.ratio == 1.0
    for engine, was, case in zip(engines, before, CASES, strict=True):
        metrics = engine.metrics
        assert metrics.num_prompt_tokens - was.num_prompt_tokens == 4 * case.context
        steps = metrics.num_drafts - was.num_drafts
        assert steps >= 4 * (STEPS + host.WARM_UP - 1)
        assert metrics.num_accepted_tokens - was.num_accepted_tokens == steps
        assert engine.pages_in_use == 0


def test_host_time_of_a_step_that_reads_the_whole_text_grows_with_context(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure_host(engines, CASES, STEPS, 5)[1].ratio < 2
    monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
    assert measure_host(engines, CASES, STEPS, 5)[1].ratio > 2


def test_host_time_table_has_the_numbers_of_the_results() -> None:
    results = [HostTime(case, *[0.1 * (i + 1)] * 4) for i, case in enumerate(CASES)]
    rows = [line.split() for line in table_of(results).splitlines()[2:]]
    assert [row[1:4] + row[-4:] for row in rows] == [
        ["4", "64", "chain:1", *["0.100"] * 4],
        ["4", "16384", "chain:1", *["0.200"] * 4],
    ]


def test_host_time_command_with_a_tree_that_is_no_chain_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "step", "--measure", "host", "--tree", "none", "topk:4,2,2"]) == 2
    assert "host: expected chains or none, got none topk:4,2,2" in capsys.readouterr().err


@pytest.mark.timing
def test_host_time_of_a_step_is_below_a_millisecond_at_any_context(monkeypatch: pytest.MonkeyPatch) -> None:
    with ready_engine(FULL[0], max_len(FULL)) as first, ready_engine(FULL[1], max_len(FULL)) as second:
        short, long = measure_host([first, second], FULL, 50, 5)
        print(table_of([short, long]))
        assert max(short.milliseconds, long.milliseconds) < 1.0
        assert abs(long.ratio - 1) < 0.1
        monkeypatch.setattr(Scheduler, "cache_prefix", read_all)
        assert measure_host([first, second], FULL, 50, 1)[1].ratio > 1.1


def test_ready_engine_with_a_tokenizer_emits_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token comes from the prefill, which has results of its own; every round emits two, and none ends."""
    monkeypatch.setattr(step_costs, "Engine", QUICK)
    text = host.TEXT.read_text()
    with ready_engine(CASES[0], max_len(CASES), ByteTokenizer()) as engine:
        stream = engine.stream([1] * 8, max_tokens=40)
        assert "".join(next(stream).text or "" for _ in range(5)) == text[0] + text[:8]
        stream.close()
