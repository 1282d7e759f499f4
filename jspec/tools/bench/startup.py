"""`jspec bench startup`: time from the start of a process until its engines serve, without and then with a cache.

Each start is a process of its own: it makes random weights on the device, builds an engine for each tree, whose
programs are all compiled before any runs, and answers one short request with each. The second start finds the programs
of the first one in the folder of `compile_cache`.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
from jspec.tools.bench import random_models
from jspec.tools.bench.report import Report, ints, option, tree_name
from jspec.tools.bench.step import MODEL_OPTIONS
from jspec.tools.table import table

ABOUT = "programs are lowered one after the other and compiled side by side: their seconds add up to more than passed"
ROWS, PREFILL = (1, 8, 32, 64), (128, 512, 2048)
PROMPT, TOKENS = [1, 2, 3, 4], 4
HIT, ASKED = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/compile_requests_use_cache"


@dataclass(frozen=True)
class Case:
    """What is started."""

    shape: str
    trees: tuple[str, ...]  # an engine each, drafted by an EAGLE-3 head; "none": plain decoding
    rows: tuple[int, ...] = ROWS
    prefill: tuple[int, ...] = PREFILL
    max_len: int = 2048
    page_size: int = 16
    dtype: str = "bfloat16"
    implementation: str = "auto"
    quantize: str | None = None  # kind for target and heads
    draft_quantize: str | None = None  # kind for the heads alone; None: as the target
    kv_dtype: str | None = None  # dtype of both caches; None: `dtype`

    def options(self) -> dict[str, Any]:
        """Options of the engines."""
        same = {name: getattr(self, name) for name in ("max_len", "page_size", "implementation", "kv_dtype")}
        sizes = dict(slots=self.rows[-1], buckets=self.rows, prefill_buckets=self.prefill)
        return same | sizes | {"draft_kv_dtype": self.kv_dtype}


@dataclass
class Startup:
    """One process; times in seconds, those of programs by tree and name."""

    start: str = ""  # "cold" or "warm"
    ready: float = 0.0  # from the start of the process until the last engine could serve
    stages: dict[str, float] = field(default_factory=dict)  # in their order
    lower: dict[str, float] = field(default_factory=dict)
    compile: dict[str, float] = field(default_factory=dict)
    asked: int = 0  # programs that were looked up in the cache, small ones included
    hits: int = 0  # programs that were found there

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        began = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - began

    def count(self, event: str, **_: Any) -> None:
        self.hits += event == HIT
        self.asked += event == ASKED


def measure(case: Case, folder: Path | None = None) -> tuple[Startup, Startup]:
    """Start twice.

    Args:
        folder: new or empty, for compiled programs; None: a temporary one.

    Raises:
        ValueError: options that an engine refuses, or a folder that is not empty.
        ChildProcessError: a start that failed.
    """
    EngineConfig(**case.options())
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: expected a new or an empty folder, so that the first start is cold; name another")
    with tempfile.TemporaryDirectory() as own:
        return _start(case, folder or Path(own), "cold"), _start(case, folder or Path(own), "warm")


def _start(case: Case, folder: Path, name: str) -> Startup:
    """One start in a process of its own; its log goes to the standard error."""
    spec = json.dumps({"case": asdict(case), "folder": str(folder), "started": time.time()})
    process = subprocess.run([sys.executable, "-m", __name__, spec], stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode:
        raise ChildProcessError(f"startup: a process that started an engine ended with {process.returncode}; see above")
    return Startup(**json.loads(process.stdout.splitlines()[-1]) | {"start": name})


def start(case: Case, folder: str, started: float) -> Startup:
    """The work that `measure` times, in this process.

    Args:
        started: start of the process, seconds since the epoch.
    """
    result = Startup()
    jax.monitoring.register_event_listener(result.count)
    result.stages["process, imports"] = time.time() - started
    with result.stage("device"):
        jax.devices()
    keep_compiled(folder)  # as `compile_cache` does, but for the programs that make the weights too
    with result.stage("weights"):
        target = random_models.random_target(case.shape, case.dtype, case.quantize)
        head = None
        if any(tree != "none" for tree in case.trees):
            head = random_models.random_head(case.shape, case.dtype, case.draft_quantize or case.quantize)
        jax.block_until_ready((target, head))
    answers = Startup()
    for tree in case.trees:
        with result.stage(f"{tree}: engine"):
            drafter = None if tree == "none" or head is None else Eagle3(head, Tree.parse(tree))
            engine = Engine(target, drafter=drafter, **case.options())
        result.lower |= {f"{tree}: {name}": seconds for name, seconds in engine.lower_seconds.items()}
        result.compile |= {f"{tree}: {name}": seconds for name, seconds in engine.compile_seconds.items()}
        with answers.stage(f"{tree}: first answer"), engine:
            engine.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0))
    result.ready = sum(result.stages.values())
    result.stages |= answers.stages
    return result


def text(cold: Startup, warm: Startup) -> str:
    """Stages, then programs, cold beside warm."""
    stages = [["stage", "cold s", "warm s"]]
    stages += [[name, f"{cold.stages[name]:.1f}", f"{warm.stages[name]:.1f}"] for name in cold.stages]
    stages += [["ready, without the answers", f"{cold.ready:.1f}", f"{warm.ready:.1f}"]]
    programs = [["program", "lower s", "compile s", "warm: lower s", "compile s"]]
    for name in cold.compile:
        seconds = (cold.lower[name], cold.compile[name], warm.lower[name], warm.compile[name])
        programs.append([name, *(f"{value:.1f}" for value in seconds)])
    hits = ", ".join(f"{one.hits} of {one.asked} ({one.start})" for one in (cold, warm))
    return f"{table(stages)}\n\n{table(programs)}\n{ABOUT}\nprograms found in the cache, small ones included: {hits}"


def run(arguments: argparse.Namespace) -> Report:
    names = ("shape", "dtype", "implementation", "quantize", "draft_quantize", "kv_dtype", "max_len", "page_size")
    case = Case(
        trees=tuple(tree_name(tree) for tree in arguments.tree),
        rows=tuple(arguments.batch),
        prefill=tuple(arguments.prefill),
        **{name: getattr(arguments, name) for name in names},
    )
    results = measure(case, arguments.cache)
    return Report(f"random weights of {case.shape}, made on the device", (), results, text(*results), {"case": case})


def main(spec: str) -> None:
    """The process of one start: its result is the last line of the standard output."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("jspec").setLevel(logging.INFO)
    given = json.loads(spec)
    own: dict[str, Any] = {name: tuple(of) if isinstance(of, list) else of for name, of in given["case"].items()}
    print(json.dumps(asdict(start(Case(**own), given["folder"], given["started"]))))


OPTIONS = (
    *(one for one in MODEL_OPTIONS if one[0] != ("--batch",)),
    option("--batch", type=ints, default=ROWS, metavar="1,8,32,64", help="rows of the compiled steps"),
    option("--prefill", type=ints, default=PREFILL, metavar="128,512,2048", help="tokens of the compiled prefills"),
    option("--max-len", type=int, default=2048),
    option("--page-size", type=int, default=16),
    option("--cache", type=Path, metavar="DIR", help="new or empty; keeps the compiled programs"),
)


if __name__ == "__main__":
    main(sys.argv[1])
