"""`jspec bench overlap`: a host that is known to wait is told as one, and by how much."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from jspec.__main__ import main
from jspec.engine.core import EngineCore
from jspec.tools.bench import overlap

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("runs_long")]  # rounds must be short beside the wait

WORDS = ["bench", "overlap", "--shape", "tiny", "--dtype", "float32", "--context", "16", "--tree", "none"]
WAIT = 0.02  # seconds before each dispatch, many times a round of this shape


@pytest.mark.long
def test_a_host_that_waits_before_every_dispatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    dispatch = EngineCore._dispatch

    def slow(self: EngineCore, plan: Any) -> Any:
        time.sleep(WAIT)
        return dispatch(self, plan)

    monkeypatch.setattr(overlap, "LOOP", 4)
    monkeypatch.setattr(overlap, "STEPS", 9)
    monkeypatch.setattr(EngineCore, "_dispatch", slow)
    path = tmp_path / "idle.json"
    assert main([*WORDS, "--batch", "12", "--json", str(path)]) == 0
    (result,) = json.loads(path.read_text())["results"]
    assert result["case"]["batch"] == 12 and result["case"]["tree"] == "none"
    assert result["engine"] >= WAIT * 1e3
    assert result["loop"] >= WAIT * 1e3 / 4  # once in four rounds
    assert result["idle"] == pytest.approx(3 / 4, abs=0.2)
    *_, heads, _, row = capsys.readouterr().out.splitlines()
    assert heads.split() == ["batch", "context", "tree", "loop", "ms", "engine", "ms", "idle"]
    assert row.split()[-1] == f"{result['idle']:.1%}"
