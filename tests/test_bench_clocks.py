"""The clock of a GPU, as a program in `nvidia-smi`'s place tells it."""

from __future__ import annotations

import stat
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jspec.bench import clocks, report, rounds

# The first line is from before the work, the last one broken off.
ANSWER = ["1980, 1980, 120.1, Not Active", "1560, 1980, 691.0, Active", "1600, 1980, 699.5, Active"]
ANSWER += ["1980, 1980, 640.0, Not Active", "1590, 1980, 700.0, Active", "15"]


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets a test write what `nvidia-smi` prints, on a machine that seems to have a GPU; with its arguments behind."""
    program = tmp_path / "nvidia-smi"
    lines = [
        "#!/bin/sh",
        f"cd {tmp_path}",
        'echo "$@" > asked',
        "cat answer",
        "test $(wc -l < answer) -gt 1 && exec sleep 60",
    ]
    program.write_text("\n".join(lines))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    return tmp_path


def watched(folder: Path, lines: list[str]) -> clocks.Clock | None:
    (folder / "answer").write_text("\n".join(lines))
    return clocks.watch(lambda: None, seconds=0.3)


def test_the_clock_is_the_median_of_the_samples(tell: Path) -> None:
    clock = watched(tell, ["before the work", *ANSWER])
    assert clock is not None
    assert asdict(clock) == {"mhz": 1595.0, "highest": 1980.0, "watts": 695.25, "capped": 0.75}
    asked = (tell / "asked").read_text()
    assert all(field in asked for field in clocks.FIELDS) and f"--loop-ms={clocks.INTERVAL}" in asked


def test_the_first_visible_gpu_is_asked(tell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    watched(tell, ANSWER)
    assert "--id=3" in (tell / "asked").read_text()


@pytest.mark.parametrize(
    "lines",
    [[], ['Field "clocks_event_reasons.sw_power_cap" is not a valid field to query.'], ["1, 1, [N/A], Active"] * 4],
    ids=["nothing", "an old driver", "a GPU that does not tell"],
)
def test_nothing_is_known_of_others(tell: Path, lines: list[str]) -> None:
    assert watched(tell, lines) is None


def test_no_program_is_started_without_a_gpu(tell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu")])
    assert watched(tell, ANSWER) is None and not (tell / "asked").exists()


def test_the_table_has_the_clock_where_it_is_known() -> None:
    unknown = rounds.Timing(rounds.Case("tiny", 1, 32, None), 1.0, 0.1, 0.5, 9.0, 1.0)
    known = replace(unknown, clock=clocks.Clock(1560.0, 1980.0, 691.6, 0.75))
    header, row = (line.split() for line in report.timings([known]).splitlines()[::2][:2])
    assert {"1560/1980", "692", "75%"} <= set(row) and {"MHz", "W", "capped"} <= set(header)
    assert "MHz" not in report.timings([unknown])
