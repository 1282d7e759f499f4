"""GPU clock from a program in place of `nvidia-smi`, kernel launches in a trace, runs timed in turns."""

from __future__ import annotations

import stat
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jspec.__main__ import main
from jspec.tools.bench import profiling, step
from jspec.tools.bench.profiling import KernelTime, watch_clock
from jspec.tools.bench.results import table_of
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

# The first line is from before the work, the last one cut off.
ANSWER = ["1980, 1980, 120.1, Not Active", "1560, 1980, 691.0, Active", "1600, 1980, 699.5, Active"]
ANSWER += ["1980, 1980, 640.0, Not Active", "1590, 1980, 700.0, Active", "15"]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a program in place of `nvidia-smi`, which prints the file `answer` and stores its arguments."""
    program = tmp_path / "nvidia-smi"
    wait = "test $(wc -l < answer) -gt 1 && exec sleep 60"
    program.write_text("\n".join(["#!/bin/sh", f"cd {tmp_path}", 'echo "$@" > asked', "cat answer", wait]))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")])
    return tmp_path


def watched(folder: Path, lines: list[str]) -> profiling.GpuClock | None:
    (folder / "answer").write_text("\n".join(lines))
    return watch_clock(lambda: None, seconds=0.3)


def test_gpu_clock_is_the_median_over_samples(smi: Path) -> None:
    clock = watched(smi, ANSWER)
    assert clock is not None
    assert asdict(clock) == {"mhz": 1595.0, "highest": 1980.0, "watts": 695.25, "capped": 0.75}
    unclear = ["1, 1, [N/A], Active", "[Unknown Error], 1980, 691.0, Active"]
    assert watched(smi, [ANSWER[0], *unclear, *ANSWER[1:]]) == clock
    asked = (smi / "asked").read_text()
    assert all(field in asked for field in profiling.FIELDS) and f"--loop-ms={profiling.INTERVAL}" in asked


@pytest.mark.parametrize(("visible", "own"), [(None, "--id=0"), ("3,1", "--id=3")])
def test_gpu_clock_with_several_gpus_reads_the_first_visible_gpu(
    visible: str | None, own: str, smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    watched(smi, ANSWER)
    assert own in (smi / "asked").read_text()


def test_gpu_clock_with_silent_nvidia_smi_or_failing_work_ends_nvidia_smi(smi: Path) -> None:
    (smi / "answer").write_text("\n".join(ANSWER))
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        watch_clock(lambda: 1 // 0)
    (smi / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    assert watch_clock(lambda: None, seconds=0.1) is None
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "lines",
    [[], ['Field "clocks_event_reasons.sw_power_cap" is not a valid field to query.'], ["1, 1, [N/A], Active"] * 4],
    ids=["nothing", "an old driver", "a GPU that does not tell"],
)
def test_gpu_clock_with_unknown_nvidia_smi_output_is_none(smi: Path, lines: list[str]) -> None:
    assert watched(smi, lines) is None


@pytest.mark.parametrize(("answer", "watts"), [("700.00", 700.0), ("[N/A]", None), ("", None)])
def test_gpu_power_limit_is_that_of_nvidia_smi_or_none(smi: Path, answer: str, watts: float | None) -> None:
    (smi / "answer").write_text(f"{answer}\n")
    assert profiling.power_limit() == watts
    assert "--query-gpu=power.limit " in (smi / "asked").read_text()


def test_gpu_clock_without_gpu_does_not_start_nvidia_smi(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="cpu")])
    assert watched(smi, ANSWER) is None and not (smi / "asked").exists()


def line(name: str, *events: tuple[str, float]) -> SimpleNamespace:
    return SimpleNamespace(name=name, events=[SimpleNamespace(name=name, duration_ns=ns) for name, ns in events])


STREAMS = [
    line("Stream #14(Compute)", ("norm", 1000), ("product", 9000), ("norm", 3000), ("norm", 2000)),
    line("Stream #15(MemcpyD2H)", ("copy", 1000), ("norm", 2000)),
]


def test_trace_events_of_host_and_modules_are_left_out() -> None:
    host = SimpleNamespace(name="/host:CPU", lines=[line("python", ("norm", 9e9)), *STREAMS])
    device = SimpleNamespace(name="/device:GPU:0", lines=[line("XLA Modules", ("jit_step", 9e9)), *STREAMS])
    assert sum(event.duration_ns for event in profiling.stream_events([host, device])) == 18000
    assert profiling.stream_events([host]) == []


def test_trace_kernel_launches_are_counted_by_name_and_summed() -> None:
    events = profiling.stream_events([SimpleNamespace(name="/device:GPU:0", lines=STREAMS)])
    assert profiling.launches_by_name(events, steps=2) == [
        KernelTime("product", 0.5, 9.0, pytest.approx(0.0045), 0.5),
        KernelTime("norm", 2.0, 2.0, pytest.approx(0.004), pytest.approx(8 / 18)),
        KernelTime("copy", 0.5, 1.0, pytest.approx(0.0005), pytest.approx(1 / 18)),
        KernelTime("all", 3.0, None, pytest.approx(0.009)),
    ]
    found = profiling.launches_by_name(events, steps=1)
    printed = table_of(found).splitlines()
    assert printed[2].split() == ["product", "1", "9.0", "0.009", "50.0%"]
    assert printed[-1].split() == ["all", "6", "0.018"]


def test_trace_folder_with_several_traces_is_read_from_the_newest(tmp_path: Path) -> None:
    """A trace on a CPU holds no GPU launches, and the table says so."""
    for _ in range(2):
        with jax.profiler.trace(tmp_path):
            jax.block_until_ready(on_device(np.ones(3)) + 1)
    assert profiling.launches_of(tmp_path, steps=1) == "no launches of a GPU in the trace"


def test_timing_in_turns_reverses_the_order_of_runs_in_each_repeat() -> None:
    seen: list[str] = []
    runs = [lambda name=name: seen.append(name) or len(seen) for name in "abc"]
    assert profiling.time_in_turns(runs, 2) == [[6, 7], [5, 8], [4, 9]]
    assert "".join(seen) == "abccbaabc"


@pytest.mark.gpu
def test_step_command_profile_on_gpu_lists_kernel_launches(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--shape", "tiny", "--dtype", "bfloat16", "--tree", "chain:2", "--batch", "1", "--context", "64"]
    assert main(["bench", "step", *words, "--profile", str(tmp_path)]) == 0
    (trace,) = tmp_path.iterdir()
    found = profiling.launches_by_name(profiling.gpu_events(trace), step.GROUP)
    one = {launch.name: launch.count for launch in found}
    layers = sum(count for name, count in one.items() if name.startswith("append_attention"))
    assert one["gather_rows"] == 1 and layers >= 8
    assert profiling.launches_of(trace, step.GROUP) in capsys.readouterr().out
