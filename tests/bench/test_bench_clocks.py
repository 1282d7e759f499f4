"""The clock of a GPU, as a program in `nvidia-smi`'s place tells it."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jspec.tools.bench import clocks, report, rounds, shapes

pytestmark = pytest.mark.once

# The first line is from the beginning of the work, the last one broken off.
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
    clock = watched(tell, ANSWER)
    assert clock is not None
    assert asdict(clock) == {"mhz": 1595.0, "highest": 1980.0, "watts": 695.25, "capped": 0.75}
    unclear = ["1, 1, [N/A], Active", "[Unknown Error], 1980, 691.0, Active"]
    assert watched(tell, [ANSWER[0], *unclear, *ANSWER[1:]]) == clock
    asked = (tell / "asked").read_text()
    assert all(field in asked for field in clocks.FIELDS) and f"--loop-ms={clocks.INTERVAL}" in asked


def test_the_first_visible_gpu_is_asked(tell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, own in ((None, "--id=0"), ("3,1", "--id=3")):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        watched(tell, ANSWER)
        assert own in (tell / "asked").read_text()


def test_a_program_that_says_nothing_is_ended(tell: Path) -> None:
    (tell / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    began = time.monotonic()
    assert clocks.watch(lambda: None, seconds=0.1) is None
    assert time.monotonic() - began < 30


def test_it_is_ended_where_the_work_fails(tell: Path) -> None:
    (tell / "answer").write_text("\n".join(ANSWER))
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        clocks.watch(lambda: 1 // 0)
    assert time.monotonic() - began < 30


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
    both = report.timings([known, unknown])
    assert "1560/1980" in both and "None" not in both


def test_more_rounds_follow_those_that_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes the state of the one before, whose memory is gone."""
    clock, seen = clocks.Clock(1560.0, 1980.0, 691.6, 0.75), []

    def twice(work: Callable[[], object]) -> clocks.Clock:
        seen.extend([work(), work()])
        return clock

    monkeypatch.setattr(clocks, "watch", twice)
    for name, count in (("GROUP", 2), ("GROUPS", 2), ("WARM_UP", 1)):
        monkeypatch.setattr(rounds, name, count)
    case = rounds.Case("tiny", 2, 32, None, dtype="float32")
    timing = rounds.measure(case, shapes.random_target("tiny", "float32"), None)
    assert timing.clock == clock and len(seen) == 2
