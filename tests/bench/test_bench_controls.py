"""`jspec bench controls`: what is known to cost time is told as that, and rounds do what they are called."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec.__main__ import main
from jspec.tools.bench import controls, rounds

pytestmark = pytest.mark.once

WAIT = 0.03  # seconds a round of a program that serves grammars
KINDS = tuple(controls.KINDS[index] for index in (0, 1, 2, 7))


@pytest.mark.long
def test_a_program_that_is_known_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, reports = rounds.compile_step, []

    def slow(program: Any, *shapes: Any) -> Any:
        step = compiled(program, *shapes)

        def run(*arguments: Any) -> Any:
            time.sleep(WAIT * bool(program.grammar_cells))
            state, output = step(*arguments)
            reports.append(np.asarray(output.report))
            return state, output

        return run

    monkeypatch.setattr(rounds, "compile_step", slow)
    for name, count in (("GROUP", 2), ("GROUPS", 3), ("WARM_UP", 1)):
        monkeypatch.setattr(rounds, name, count)
    monkeypatch.setattr(controls, "measure", partial(controls.measure, kinds=KINDS))
    path, options = tmp_path / "prices.json", ["--dtype", "float32", "--context", "32", "--tree", "chain:2"]
    assert main(["bench", "controls", "--shape", "tiny", "--batch", "2", *options, "--json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [one["kind"]["name"] for one in results] == [kind.name for kind in KINDS]
    assert results[0]["more"] == 0 and results[-1]["more"] == pytest.approx(WAIT * 1e3, rel=0.5)
    without, off, on, _ = (reports[2 * index] for index in range(len(KINDS)))  # the first round of each
    np.testing.assert_array_equal(off, without)
    assert (on != without).any()
