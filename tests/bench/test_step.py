"""`jspec bench step`: cases, the command with picture and trace, and the costs of controls and of a waiting host."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.draft.eagle_head import EagleHead
from jspec.engine.core import EngineCore
from jspec.models.decoder import Model
from jspec.tools.bench import profiling, random_models, step, step_costs
from pallas_kernels.layers.quantized import Quantized

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.once

TINY = ["bench", "step", "--shape", "tiny", "--dtype", "float32"]
PLAIN = [*TINY, "--tree", "none", "--batch", "2", "--context", "16"]
CLOCK = profiling.Clock(1560.0, 1980.0, 691.6, 0.75)
HEADINGS = [
    "shape",
    "dtype",
    "weights",
    "cache",
    "page",
    "batch",
    "idle",
    "context",
    "tree",
    "depth",
    "ms",
    "p90-p10",
    "floor",
    "ratio",
    "tokens",
    "compile",
    "s",
]


@pytest.fixture
def few_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("GROUP", 2), ("GROUPS", 3), ("WARM_UP", 1)):
        monkeypatch.setattr(step, name, count)


def test_command_outputs_have_table_json_picture_and_trace(
    few_groups: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, further steps follow those that were timed; each takes the state of the step before."""

    def twice(work: Callable[[], object]) -> profiling.Clock:
        work()
        work()
        return CLOCK

    monkeypatch.setattr(profiling, "watch_clock", twice)
    files = ["--picture", str(tmp_path / "step.png"), "--profile", str(tmp_path / "traces")]
    assert main([*PLAIN, "--idle", "1", *files, "--json", str(tmp_path / "step.json")]) == 0
    trace = tmp_path / "traces" / "shape-tiny_batch-2_context-16_tree-none_dtype-float32_idle-1"
    _, heads, _, row, where, last = capsys.readouterr().out.splitlines()
    assert heads.split() == [*HEADINGS[:14], "SM", "MHz", "W", "capped", *HEADINGS[14:]]
    assert row.split()[:10] == ["tiny", "float32", "float32", "float32", "16", "2", "1", "16", "none", "0"]
    assert row.split()[-5:-1] == ["1560/1980", "692", "75%", "1.00"]  # a token a row
    assert where == f"trace: {trace}" and last == "no launches of a GPU in the trace"
    assert [path.suffix for path in trace.rglob("*.pb")] == [".pb"]
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    (result,) = json.loads((tmp_path / "step.json").read_text())["results"]
    names = "shape batch context tree page_size dtype implementation greedy quantize draft_quantize kv_dtype idle depth"
    assert list(result["case"]) == [*names.split(), "deterministic"] and result["case"]["tree"] == "none"
    assert {"milliseconds", "spread", "floor", "compile_seconds", "tokens"} < set(result)
    assert set(result["clock"]) == {"mhz", "highest", "watts", "capped"}


def test_command_draft_quantize_stores_the_head_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    seen = []

    def measure(case: step.Case, target: Model, head: EagleHead, **_: Any) -> step.Timing:
        seen.append([type(model.layers[0].qkv) for model in (target, head)])
        return step.Timing(case, 1.0, 0.1, 0.5, 9.0, 1.0)

    monkeypatch.setattr(step, "measure", measure)
    for more in ([], ["--quantize", "fp8"]):
        assert main([*TINY, "--tree", "chain:1", "--draft-quantize", "int8", *more]) == 0
        printed = capsys.readouterr().out
        assert f" {more[-1] if more else 'float32'}, head int8 " in printed and "MHz" not in printed
    (plain, small), both = seen
    assert small is Quantized is not plain and both == [Quantized] * 2


def test_command_all_rows_idle_is_refused(capsys: pytest.CaptureFixture) -> None:
    assert main([*PLAIN, "--idle", "2"]) == 2
    assert "idle: expected 0 to 1 of a batch of 2 rows, got 2" in capsys.readouterr().err


def test_case_names_differ_and_can_be_folders() -> None:
    wide = [Tree.static((rank,) for rank in range(count)) for count in (200, 201)]
    trees = (None, Tree.chain(1), Tree.chain(4), Tree.topk(60, 8, 10), *wide)
    cases = [step.Case("tiny", 1, 8, tree, greedy=greedy) for tree in trees for greedy in (True, False)]
    cases += [step.Case("tiny", 1, 8, Tree.chain(4), depth=depth) for depth in (4, 0)]
    cases.append(step.Case("tiny", 1, 8, Tree.chain(4), draft_quantize="fp8"))
    names = {case.name for case in cases}
    assert len(names) == len(cases) and max(map(len, names)) < 100
    assert not any(character in name for name in names for character in "/:, ")


def test_filled_state_caches_hold_no_zeros() -> None:
    """Zeros cost less power (NOTES, "Tried"); the draft's cache counts too."""
    case = step.Case("tiny", 3, 20, Tree.chain(2), dtype="float32")
    target, head = random_models.random_target("tiny", "float32"), random_models.random_head("tiny", "float32")
    program, params, pool = step.build(case, target, head)
    state = step.filled_state(step.init_state(program, params, pool), case)
    pools = [*step.jax.tree.leaves(state.target), *step.jax.tree.leaves(state.draft.cache)]
    assert len(pools) == 2 * (len(target.layers) + 1)
    assert all(np.abs(np.asarray(pool, np.float32)).max(axis=(1, 2, 3)).min() > 0 for pool in pools)


WAIT = 0.03  # seconds a step of a program that supports grammars


@pytest.mark.long
def test_controls_program_that_waits_costs_its_wait(
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
def test_overlap_host_that_waits_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    dispatch, wait = EngineCore._dispatch, 0.02  # seconds before each dispatch, many times a step of this shape

    def slow(self: EngineCore, plan: Any) -> Any:
        time.sleep(wait)
        return dispatch(self, plan)

    monkeypatch.setattr(step_costs, "LOOP", 4)
    monkeypatch.setattr(step_costs, "STEPS", 9)
    monkeypatch.setattr(EngineCore, "_dispatch", slow)
    words = ["--measure", "overlap", "--batch", "12", "--json", str(tmp_path / "out.json")]
    assert main([*TINY, "--tree", "none", "--context", "16", *words]) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["case"]["batch"] == 12 and result["case"]["tree"] == "none"
    assert result["engine"] >= wait * 1e3
    assert result["loop"] >= wait * 1e3 / 4  # once in four steps
    assert result["idle"] == pytest.approx(3 / 4, abs=0.2)
    *_, heads, _, row = capsys.readouterr().out.splitlines()
    assert heads.split() == ["batch", "context", "tree", "loop", "ms", "engine", "ms", "idle"]
    assert row.split()[-1] == f"{result['idle']:.1%}"
