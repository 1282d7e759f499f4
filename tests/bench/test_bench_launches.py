"""What a trace says of a GPU's launches: whose events count, and what the table makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jspec.__main__ import main
from jspec.tools.bench import launches, rounds

pytestmark = pytest.mark.once


@dataclass
class Event:
    name: str
    duration_ns: float


@dataclass
class Line:
    name: str
    events: list[Event]


@dataclass
class Plane:
    name: str
    lines: list[Line] = field(default_factory=list)


STREAMS = [
    Line(
        "Stream #14(Compute)", [Event("norm", 1000), Event("product", 9000), Event("norm", 3000), Event("norm", 2000)]
    ),
    Line("Stream #15(MemcpyD2H)", [Event("copy", 1000), Event("norm", 2000)]),
]
HOST = Line("python", [Event("norm", 9e9)])


def test_only_what_a_gpu_did_counts() -> None:
    modules = Line("XLA Modules", [Event("jit_step", 9e9)])
    planes = [Plane("/host:CPU", [HOST, *STREAMS]), Plane("/device:GPU:0", [modules, *STREAMS])]
    assert sum(event.duration_ns for event in launches.on_gpus(planes)) == 18000
    assert launches.on_gpus(planes[:1]) == [], "a trace without a GPU says nothing"


def test_launches_are_counted_by_name() -> None:
    found = launches.by_name(launches.on_gpus([Plane("/device:GPU:0", STREAMS)]), rounds=2)
    assert found == [
        launches.Launch("product", 0.5, 9.0, pytest.approx(0.0045)),
        launches.Launch("norm", 2.0, 2.0, pytest.approx(0.004)),
        launches.Launch("copy", 0.5, 1.0, pytest.approx(0.0005)),
    ]
    found = launches.by_name(launches.on_gpus([Plane("/device:GPU:0", STREAMS)]), rounds=1)
    _, _, product, *_, last = (line.split() for line in launches.text(found).splitlines())
    assert product == ["product", "1", "9.0", "0.009", "50.0%"]
    assert last == ["all", "6", "0.018"]


def test_the_newest_of_several_traces_counts(tmp_path: Path) -> None:
    """On a CPU none of them holds a GPU's launches, and the table says so."""
    for _ in range(2):
        with jax.profiler.trace(tmp_path):
            jax.block_until_ready(jnp.ones(3) + 1)
    assert launches.text(launches.by_name(launches.events(tmp_path), rounds=1)) == "no launches of a GPU in the trace"


@pytest.mark.gpu
def test_on_a_gpu_a_rounds_launches_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--shape", "tiny", "--dtype", "bfloat16", "--tree", "chain:2", "--batch", "1", "--context", "64"]
    assert main(["bench", "step", *words, "--profile", str(tmp_path)]) == 0
    (trace,) = tmp_path.iterdir()
    found = launches.by_name(launches.events(trace), rounds.GROUP)
    one = {launch.name: launch.count for launch in found}
    layers = sum(count for name, count in one.items() if name.startswith("append_attention"))
    assert one["gather_rows"] == 1 and layers >= 8
    assert launches.text(found) in capsys.readouterr().out
