"""`jspec bench startup`: the second process compiles nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from jspec.__main__ import main

pytestmark = pytest.mark.once

MODEL = ("--shape", "tiny", "--dtype", "float32")
COMMAND = ("bench", "startup", *MODEL, "--batch", "1", "--prefill", "8", "--max-len", "32")


@pytest.mark.long
def test_startup_of_a_second_process_loads_every_program_from_the_cache(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    results = tmp_path / "results.json"
    assert main([*COMMAND, "--tree", "chain:1", "--json", str(results)]) == 0
    said, written = capfd.readouterr(), json.loads(results.read_text())
    cold, warm = written["results"]
    assert (cold["start"], warm["start"]) == ("cold", "warm")
    assert cold["asked"] - cold["hits"] > 2, "negative control: the first one had to compile"
    assert warm["hits"] == warm["asked"] == cold["asked"]
    programs = [
        f"chain:1: {name}" for name in ("round[1]", "prefill[8]", "update_page_table", "controls", "write_pending_rows")
    ]
    assert sorted(cold["compile"]) == sorted(warm["lower"]) == sorted(programs)
    assert sum(warm["compile"].values()) < sum(cold["compile"].values()) / 2
    stages = ["process, imports", "device", "weights", "chain:1: engine"]
    assert list(warm["stages"]) == [*stages, "chain:1: first answer"]
    assert warm["ready"] == pytest.approx(sum(warm["stages"][stage] for stage in stages))
    for row in (*programs, *stages):
        assert any(line.strip().startswith(row) for line in said.out.splitlines())
    assert f"{cold['hits']} of {cold['asked']} (cold), {warm['asked']} of {warm['asked']} (warm)" in said.out
    assert said.err.count("compiled round[1] in") == 2, "progress"
    assert written["case"]["options"]["buckets"] == [1] and warm["shape"] == "tiny"


def test_startup_command_with_wrong_buckets_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("a process was started"))
    assert main([*COMMAND, "--batch", "2,1"]) == 2
    error = capsys.readouterr().err
    assert "buckets: expected ascending" in error and error.count("\n") == 1


def test_startup_command_with_a_failing_process_raises_with_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    ended = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    assert main(COMMAND) == 2
    assert "ended with 1" in capsys.readouterr().err
