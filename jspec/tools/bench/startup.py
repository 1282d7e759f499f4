"""`jspec bench startup`: seconds until a process's engines serve, first without and then with a compile cache.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from jspec.core.config import EngineConfig
from jspec.draft.eagle import Eagle3
from jspec.engine.api import Engine
from jspec.engine.sampling_params import SamplingParams
from jspec.step.compile_cache import keep_compiled
from jspec.tools.bench import random_models, step
from jspec.tools.bench.report import Report, count, counts, option, tree_name, tree_or_none
from jspec.tools.table import table

ABOUT = "programs are lowered one after the other and compiled side by side: their seconds add up to more than passed"
ROWS, PREFILL = (1, 8, 32, 64), (128, 512, 2048)
PROMPT, TOKENS = [1, 2, 3, 4], 4
HIT, ASKED = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/compile_requests_use_cache"
MODEL = ("shape", "dtype", "quantize", "draft_quantize")
SAME = ("max_len", "page_size", "implementation", "kv_dtype")  # options of the command and of the engines


@dataclass
class Startup:
    """The times of one process, in seconds; programs are named by tree and program."""

    start: str = ""  # "cold" (empty compile cache) or "warm"
    shape: str = ""  # name of a shape in `random_models`
    ready: float = 0.0  # seconds from the start of the process until the last engine could serve
    stages: dict[str, float] = field(default_factory=dict)  # seconds of each stage, in order
    lower: dict[str, float] = field(default_factory=dict)  # seconds to trace and lower each program
    compile: dict[str, float] = field(default_factory=dict)  # seconds to compile or load each program
    asked: int = 0  # number of programs that were looked up in the cache, small ones included
    hits: int = 0  # number of programs that were found there

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Store the seconds of the `with` block as the stage ``name``."""
        began = time.perf_counter()
        yield
        self.stages[name] = time.perf_counter() - began

    def count(self, event: str, **_: Any) -> None:
        self.hits += event == HIT
        self.asked += event == ASKED


def measure(case: dict[str, Any]) -> Iterator[Startup]:
    """Start a process twice with the same compile cache; yield the times of the cold and the warm start."""
    EngineConfig(**options_of(case))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            spec = json.dumps({"case": case, "folder": folder, "started": time.time()})
            command = [sys.executable, "-m", __name__, spec]  # its log goes to the standard error
            process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            if process.returncode:
                code = process.returncode
                raise ChildProcessError(f"startup: a process that started an engine ended with {code}; see above")
            yield Startup(**json.loads(process.stdout.splitlines()[-1]) | {"start": name})


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the engines' options of a case, with lists (from JSON) as tuples."""
    return {name: tuple(own) if isinstance(own, list) else own for name, own in case["options"].items()}


def start(case: dict[str, Any], folder: str, started: float) -> Startup:
    """Build engines and answer a request with each; return the times since ``started`` (seconds since the epoch)."""
    result, answers = Startup(), Startup()
    jax.monitoring.register_event_listener(result.count)
    result.stages["process, imports"] = time.time() - started
    with result.stage("device"):
        jax.devices()
    keep_compiled(folder)  # as `compile_cache` does, but for the programs that make the weights too
    trees = {text: tree_or_none(text) for text in case["trees"]}
    with result.stage("weights"):
        model = {name: case[name] for name in MODEL} | {"shape": case["shape"] or random_models.default_shape()}
        result.shape = model["shape"]
        target, head = step.models_of([step.Case(batch=1, context=1, tree=tree, **model) for tree in trees.values()])
        jax.block_until_ready((target, head))
    for text, tree in trees.items():
        with result.stage(f"{text}: engine"):
            drafter = None if tree is None or head is None else Eagle3(head, tree)
            engine = Engine(target, drafter=drafter, **options_of(case))
        with answers.stage(f"{text}: first answer"), engine:
            engine.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0))
        result.lower |= {f"{text}: {name}": seconds for name, seconds in engine.lower_seconds.items()}
        result.compile |= {f"{text}: {name}": seconds for name, seconds in engine.compile_seconds.items()}
    result.ready = sum(result.stages.values())
    result.stages |= answers.stages
    return result


def text(results: Sequence[Startup]) -> str:
    """Format the seconds of each stage and program; the cold and the warm start have columns of their own."""
    cold, warm = results
    stages = {**cold.stages, "ready, without the answers": cold.ready}
    other = {**warm.stages, "ready, without the answers": warm.ready}
    times = [["stage", "cold s", "warm s"], *([name, f"{stages[name]:.1f}", f"{other[name]:.1f}"] for name in stages)]
    programs = [["program", "lower s", "compile s", "warm: lower s", "compile s"]]
    own = [times_of for one in results for times_of in (one.lower, one.compile)]
    programs += [[name, *(f"{times_of[name]:.1f}" for times_of in own)] for name in cold.compile]
    hits = ", ".join(f"{one.hits} of {one.asked} ({one.start})" for one in results)
    return f"{table(times)}\n\n{table(programs)}\n{ABOUT}\nprograms found in the cache, small ones included: {hits}"


def run(arguments: argparse.Namespace) -> Report:
    a = arguments
    sizes = dict(slots=a.batch[-1], buckets=list(a.batch), prefill_buckets=list(a.prefill), draft_kv_dtype=a.kv_dtype)
    options = sizes | {name: getattr(a, name) for name in SAME}
    case = {name: getattr(a, name) for name in MODEL} | {"trees": list(map(tree_name, a.tree)), "options": options}
    results = list(measure(case))  # this process leaves the device to those that it starts
    return Report(f"random weights of {results[0].shape}, made on the device", results, text, {"case": case})


def main(spec: str) -> None:
    """Run one start, the entry point of its process; print its times, as JSON, as the last line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("jspec").setLevel(logging.INFO)
    print(json.dumps(asdict(start(**json.loads(spec)))))


OPTIONS = (
    *(one for one in step.MODEL_OPTIONS if one[0] != ("--batch",)),
    option("--batch", type=counts, default=ROWS, metavar="1,8,32,64", help="rows of the compiled steps"),
    option("--prefill", type=counts, default=PREFILL, metavar="128,512", help="tokens of the compiled prefills"),
    option("--max-len", type=count, default=2048, help="tokens of a request, prompt included"),
    option("--page-size", type=count, default=16, help="tokens of a cache page"),
)


if __name__ == "__main__":
    main(sys.argv[1])
