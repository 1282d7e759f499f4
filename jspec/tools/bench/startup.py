"""`jspec bench step --measure startup`: the seconds that the start of an engine takes.

The engine compiles all its programs before any runs, with an empty folder of compiled programs ("cold") and with that
folder once more ("warm").
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jspec.core.tree import Tree
from jspec.draft.eagle_head import EagleHead
from jspec.engine.callers.api import Engine
from jspec.engine.request.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.tools.bench import step
from jspec.tools.bench.results import Column, Results, tree_name

ASKED, HIT = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True)
class Startup:
    """The seconds of the start of an engine."""

    start: Annotated[str, Column("start")]  # "cold" (empty folder of compiled programs) or "warm"
    tree: Annotated[Tree | None, Column("tree", tree_name)]
    seconds: Annotated[float, Column("engine s", ".1f")]  # until the engine can serve
    answer: Annotated[float, Column("first answer s", ".1f")]
    asked: Annotated[int, Column("programs")]  # programs looked up in the folder, small ones included
    hits: Annotated[int, Column("found")]  # of these
    # Seconds to trace and lower each program, one after the other, and to compile or load each, side by side.
    lower: Annotated[dict[str, float], Column("lower s", lambda times: f"{sum(times.values()):.1f}")]
    compile: Annotated[dict[str, float], Column("compile s", lambda times: f"{sum(times.values()):.1f}")]


def measure_startup(
    case: step.StepCase, target: Model, head: EagleHead | None, buckets: tuple[int, ...]
) -> Iterator[Startup]:
    """Make an engine twice, and answer a short request; ``buckets`` are the engine's."""
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        events.append(event)

    options: dict[str, Any] = dict(slots=case.batch, buckets=buckets, max_len=case.context, page_size=case.page_size)
    options |= dict(implementation=case.implementation, kv_dtype=case.kv_dtype, draft_kv_dtype=case.kv_dtype)
    options |= dict(compile_ahead=True, log_interval=None)
    kept = jax.config.values["jax_compilation_cache_dir"]
    jax.monitoring.register_event_listener(listen)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for start in ("cold", "warm"):
                events.clear()
                jax.clear_caches()  # or the second engine would trace and lower less than the first one of a process
                began = time.perf_counter()
                drafter = step.DRAFTERS[head.config.method](head, case.tree) if head and case.tree else None
                with Engine(target, drafter=drafter, compile_cache=folder, **options) as engine:
                    ready = time.perf_counter()
                    engine.generate([1], SamplingParams(max_tokens=2, temperature=0.0))
                seconds, answer = ready - began, time.perf_counter() - ready
                programs = engine.lower_seconds, engine.compile_seconds
                yield Startup(start, case.tree, seconds, answer, events.count(ASKED), events.count(HIT), *programs)
    finally:  # later engines of this process must not look for the folder that is gone
        jax.monitoring.unregister_event_listener(listen)
        jax.config.update("jax_compilation_cache_dir", kept)
        compilation_cache.reset_cache()


def run(arguments: argparse.Namespace) -> Results:
    cases = [case for case in step.cases_of(arguments) if case.batch == max(arguments.batch)]  # one for all batches
    models = step.models_of(cases)
    results = (start for case in cases for start in measure_startup(case, *models, tuple(arguments.batch)))
    return Results(f"start of an engine for batches of {arguments.batch}, texts up to --context", results)
