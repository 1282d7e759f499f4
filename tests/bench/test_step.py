"""`jspec bench step`: cases, command, floors, start of an engine."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.draft.dflash_head import dflash_params
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.gemma4_assistant_head import assistant_params
from jspec.models.decoder import Model
from jspec.models.mixers.short_conv import ShortConv
from jspec.models.parts.param_spec import ParamSpec
from jspec.models.weights.params import model_params
from jspec.step.program import init_state
from jspec.tools.bench import profiling, random_models, roofline, step
from jspec.tools.bench.step import StepCase
from pallas_kernels.layers.weights import Quantized

pytestmark = pytest.mark.once

TINY = ["bench", "step", "--shape", "tiny", "--dtype", "float32"]
PLAIN = [*TINY, "--tree", "none", "--batch", "2", "--context", "16"]
CLOCK = profiling.GpuClock(1560.0, 1980.0, 691.6, 0.75)
CASE = ["shape", "batch", "context", "tree", "page", "dtype", "idle", "drafter", "devices", "adapters"]


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
        list(result["case"]) == [*names.split(), "nodes", "drafter", "deterministic", "tensor_parallel", "adapters"]
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


def test_step_command_on_two_devices_runs_on_both_with_adapters(
    few_groups: None, capsys: pytest.CaptureFixture
) -> None:
    options = ["--context", "16", "--tensor-parallel", "2", "--adapters", "3"]
    assert main([*TINY, "--tree", "chain:1", "--batch", "2", *options]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split()[:10] == ["tiny", "2", "16", "chain:1", "16", "float32", "0", "eagle3", "2", "3"]


def test_rows_of_a_step_choose_adapters_in_turn() -> None:
    for adapters, tables in ((0, [0, 0, 0]), (2, [1, 2, 1])):
        case = StepCase("tiny", 3, 16, None, dtype="float32", adapters=adapters)
        target, head = step.models_of([case])
        program, params, pool = step.build(case, target, head)
        assert step.filled_state(init_state(program, params, pool), case).sampling.adapter.tolist() == tables
        assert (params.adapters is None) == (not adapters)


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


def test_least_bytes_of_an_assistant_are_its_weights_and_the_targets_rows_for_each_level() -> None:
    """Three layers see the newest 1024 rows of 8 heads of 256 channels, one all rows of 2 heads of 512."""
    config, rows = random_models.head_config("gemma4-26b-a4b", "gemma4_assistant"), 8 * 1024
    weights, cache = size_of_matrices(assistant_params(config)), 2 * rows * (3 * 8 * 256 + 4 * 2 * 512)
    for tree in (Tree.chain(2), Tree.topk(8, 2, 4)):
        costs = roofline.head_costs(config, 8, tree, 4096)
        assert sum(cost.bytes for cost in costs) == 2 * 2 * (weights + cache)


def test_least_flops_of_a_step_with_a_budget_are_those_of_its_rows() -> None:
    target = random_models.TARGETS["llama3-8b"]
    whole, some = (roofline.verify_costs(target, 32, 5, 1024, rows=rows) for rows in (None, 32 * 3))
    ratios = {cost.name: own.flops / cost.flops for cost, own in zip(whole, some, strict=True)}
    assert ratios.pop("attention") == 1 and set(ratios.values()) == {0.6}


MIB = 2.0**20


@pytest.mark.parametrize(
    ("shape", "states", "record", "row", "nodes", "tokens", "gigabytes"),
    [
        ("qwen3.8-27b", 144, 777, 960, 1, 1, 0.173),
        ("qwen3.8-27b", 144, 777, 960, 5, 3, 0.189),
        ("qwen3.8-27b", 144, 777, 960, 48, 4.5, 0.273),
        ("qwen3.5-35b-a3b", 60, 363.75, 480, 1, 1, 0.0731),
    ],
)
def test_least_bytes_of_gated_delta_nets_are_their_states_records_and_inputs(
    shape: str, states: float, record: float, row: float, nodes: int, tokens: float, gigabytes: float
) -> None:
    """Each head has a state of 128 x 128 in float32; ``states`` has MiB, ``record`` and ``row`` have KiB of a token.

    A record has keys and values in two bytes each and a decay in four, an input the queries, keys and values.
    """
    target = random_models.TARGETS[shape]
    costs = [cost for cost in roofline.verify_costs(target, 8, nodes, 1024, tokens=tokens) if "delta" in cost.name]
    assert len(costs) == target.num_layers * 3 // 4
    by_hand = states * MIB * (1 + tokens / 32) + 1024 * (record * (15.5 + nodes) + row * (nodes + 3))
    assert sum(cost.bytes for cost in costs) == pytest.approx(8 * by_hand, rel=1e-6)
    assert by_hand == pytest.approx(gigabytes * 1e9, rel=5e-3)


def test_least_bytes_of_a_short_convolution_are_its_inputs() -> None:
    """The inputs of 4 nodes are written and those of 2 tokens before them read, each of 64 channels in two bytes."""
    cost = roofline.mixing(ShortConv(64, 3), 8, 4, 1024, roofline.BF16)
    assert (cost.name, cost.bytes, cost.flops) == ("short convolution", 8 * 6 * 64 * 2, 0)


@pytest.mark.parametrize(
    "shape", ["qwen3.8-27b", "qwen3.5-35b-a3b", "nemotron3-nano", "deepseek-v2-lite", "gpt-oss-20b"]
)
def test_floor_of_many_rows_reads_every_matrix_of_a_shape(shape: str) -> None:
    """So many rows choose every expert; the embedding alone is not read."""
    target = random_models.TARGETS[shape]
    stored = {name: math.prod(spec.shape) for name, spec in model_params(target).items() if len(spec.shape) > 1}
    expected = sum(size for name, size in stored.items() if name != "embed" and not name.endswith("bias"))
    costs = roofline.verify_costs(target, 4096, 5, 1024)
    names = {name.rpartition(".")[2] for name in stored} - {"embed"}
    read = sum(cost.bytes for cost in costs if cost.name in names)
    assert read == pytest.approx(2 * expected, rel=1e-6)


def test_step_command_measures_the_first_layers_of_a_hybrid(few_groups: None, capsys: pytest.CaptureFixture) -> None:
    words = ["--shape", "tiny-hybrid:7", "--dtype", "float32", "--batch", "2", "--context", "40"]
    assert main(["bench", "step", *words, "--tree", "none", "topk:8,3,2"]) == 0
    *_, plain, topk = capsys.readouterr().out.splitlines()
    assert [row.split()[:4:3] for row in (plain, topk)] == [["tiny-hybrid:7", tree] for tree in ("none", "topk:8,3,2")]


def test_layers_of_a_shape_are_its_first_ones() -> None:
    whole, cut = (random_models.target_config(f"tiny-hybrid{end}") for end in ("", ":5"))
    assert cut.layers == whole.layers[:5] and len(whole.layers) == 8
    with pytest.raises(ValueError, match="expected 1 to 8 layers of tiny-hybrid, got 9"):
        random_models.target_config("tiny-hybrid:9")


def test_state_of_a_hybrid_for_timing_has_decays_below_one_and_answers_without_nan() -> None:
    case = step.StepCase("tiny-hybrid:7", 2, 40, Tree.chain(3), dtype="float32")
    target, head = random_models.random_target(case.shape, "float32"), random_models.random_head(case.shape, "float32")
    program, params, pool = step.build(case, target, head)
    state = step.filled_state(init_state(program, params, pool), case)
    delta = state.target[0]
    assert delta.records.rows == 64 and delta.inputs.inputs.shape[1] == 4 + 3, "rows for the 4 nodes of a round"
    assert np.max(delta.records.decays) < 0 and 0.05 < np.std(delta.state) < 0.2
    executable = step.compile_step(program, params, state, case.batch)
    for _ in range(3):
        state, _ = executable(params, state, step.jnp.arange(case.batch))
    assert all(np.isfinite(values).all() for values in step.jax.tree.leaves(state.target))


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
