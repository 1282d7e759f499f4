"""`jspec bench cold-start`: from the start of a process to an engine that serves, first without and then with a cache.

Each start is a process of its own: it makes random weights on the device, builds an engine for each tree, whose
programs are all compiled before any runs, and answers one short request with each. The second start finds in the
folder of `compile_cache` what the first one compiled.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax

from jspec.core.config import EngineConfig
from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.step.executables import keep_compiled
from jspec.tools.bench import report, shapes
from jspec.tools.table import table

ABOUT = "programs are lowered one after the other and compiled side by side: their seconds add up to more than passed"
ROWS, PREFILL = (1, 8, 32, 64), (128, 512, 2048)
PROMPT, TOKENS = [1, 2, 3, 4], 4
HIT, ASKED = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/compile_requests_use_cache"


@dataclass(frozen=True)
class Case:
    """What is started."""

    shape: str
    trees: tuple[str, ...]  # an engine each; drafted by an EAGLE-3 head, "none" is plain decoding
    rows: tuple[int, ...] = ROWS
    prefill: tuple[int, ...] = PREFILL
    max_len: int = 2048
    page_size: int = 16
    dtype: str = "bfloat16"
    implementation: str = "auto"
    quantize: str | None = None  # target and heads
    draft_quantize: str | None = None  # the heads alone; None: as the target
    kv_dtype: str | None = None  # of both caches; None: dtype

    def options(self) -> dict[str, Any]:
        """Of the engines."""
        return dict(
            slots=self.rows[-1],
            buckets=self.rows,
            prefill_buckets=self.prefill,
            max_len=self.max_len,
            page_size=self.page_size,
            implementation=self.implementation,
            kv_dtype=self.kv_dtype,
            draft_kv_dtype=self.kv_dtype,
        )


@dataclass
class Start:
    """One process, in seconds; programs by tree and name."""

    ready: float = 0.0  # from the start of the process until the last engine could serve
    stages: dict[str, float] = field(default_factory=dict)  # in their order
    lower: dict[str, float] = field(default_factory=dict)
    compile: dict[str, float] = field(default_factory=dict)
    asked: int = 0  # programs that were asked of the cache, small ones included
    hits: int = 0  # and were there


def measure(case: Case, folder: Path | None = None) -> tuple[Start, Start]:
    """Start twice.

    Args:
        folder: new or empty, keeps what was compiled; None: one that is removed afterwards.

    Raises:
        ValueError: options that an engine refuses, or a folder that holds something.
        ChildProcessError: a start that failed.
    """
    EngineConfig(**case.options())
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: expected a new or an empty folder, so that the first start is cold; name another")
    if folder is not None:
        return _start(case, folder), _start(case, folder)
    with tempfile.TemporaryDirectory() as own:
        return _start(case, Path(own)), _start(case, Path(own))


def _start(case: Case, folder: Path) -> Start:
    """One start in a process of its own; what it logs goes on to the standard error."""
    spec = json.dumps({"case": asdict(case), "folder": str(folder), "started": time.time()})
    process = subprocess.run([sys.executable, "-m", __name__, spec], stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise ChildProcessError(
            f"cold-start: a process that started an engine ended with {process.returncode}; see above"
        )
    return Start(**json.loads(process.stdout.splitlines()[-1]))


def start(case: Case, folder: str, started: float) -> Start:
    """Do what `measure` times, in this process.

    Args:
        started: when the process was, seconds since the epoch.
    """
    result = Start()
    clock = _clock(result.stages)
    jax.monitoring.register_event_listener(lambda event, **_: _count(result, event))
    result.stages["process, imports"] = time.time() - started
    with clock("device"):
        jax.devices()
    keep_compiled(folder)  # as `compile_cache` does, but what makes the weights is to be found there too
    with clock("weights"):
        target = shapes.random_target(case.shape, case.dtype, case.quantize)
        head = None
        if any(tree != "none" for tree in case.trees):
            head = shapes.random_head(case.shape, case.dtype, case.draft_quantize or case.quantize)
        jax.block_until_ready((target, head))
    answering = {}
    for tree in case.trees:
        with clock(f"{tree}: engine"):
            drafter = None if tree == "none" or head is None else Eagle3(head, Tree.parse(tree))
            engine = Engine(target, drafter=drafter, **case.options())
        result.lower |= {f"{tree}: {name}": seconds for name, seconds in engine.lower_seconds.items()}
        result.compile |= {f"{tree}: {name}": seconds for name, seconds in engine.compile_seconds.items()}
        began = time.perf_counter()
        with engine:
            engine.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0))
        answering[f"{tree}: first answer"] = time.perf_counter() - began
    result.ready = sum(result.stages.values())
    result.stages |= answering
    return result


def _clock(stages: dict[str, float]) -> Callable[[str], Any]:
    @contextmanager
    def clock(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        stages[name] = time.perf_counter() - began

    return clock


def _count(result: Start, event: str) -> None:
    result.hits += event == HIT
    result.asked += event == ASKED


def text(cold: Start, warm: Start) -> str:
    """Stages, then programs, cold beside warm."""
    stages = [["stage", "cold s", "warm s"]]
    stages += [[name, f"{cold.stages[name]:.1f}", f"{warm.stages[name]:.1f}"] for name in cold.stages]
    stages += [["ready, without the answers", f"{cold.ready:.1f}", f"{warm.ready:.1f}"]]
    programs = [["program", "lower s", "compile s", "warm: lower s", "compile s"]]
    for name in cold.compile:
        seconds = (cold.lower[name], cold.compile[name], warm.lower[name], warm.compile[name])
        programs.append([name, *(f"{value:.1f}" for value in seconds)])
    hits = ", ".join(f"{start.hits} of {start.asked} ({name})" for name, start in (("cold", cold), ("warm", warm)))
    return f"{table(stages)}\n\n{table(programs)}\n{ABOUT}\nprograms found in the cache, small ones included: {hits}"


def write_json(path: Path, case: Case, starts: Sequence[Start]) -> None:
    """Environment, case, and the starts as results, the cold one first."""
    named = zip(("cold", "warm"), starts, strict=True)
    report.write(path, [{"start": name, **asdict(start)} for name, start in named], case=asdict(case))


def main(spec: str) -> None:
    """The process of one start: its result is the last line of the standard output."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("jspec").setLevel(logging.INFO)
    given = json.loads(spec)
    own: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in given["case"].items()}
    print(json.dumps(asdict(start(Case(**own), given["folder"], given["started"]))))


if __name__ == "__main__":
    main(sys.argv[1])
