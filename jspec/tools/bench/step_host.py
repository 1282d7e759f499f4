"""`jspec bench step --measure overlap` and `--measure host`: the host's part of a step.

Overlap: the share of time in which the device waits for the host between steps of an engine,

    idle = 1 - loop / engine

where loop is the time of a step with 64 steps in one dispatch, which the host cannot delay, and engine is the time
between two steps of an engine that dispatches and reads every step. Both run on the same weights, at acceptance 0.

Host: the time of `Engine.step` over compiled programs that are replaced by functions with a ready result. The engine
schedules, dispatches and reads as always. CPU time of the thread hardly depends on other processes; wall time does.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jspec.core.records import StepOutput
from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.engine.api import Engine
from jspec.engine.metrics import LowAcceptanceWarning
from jspec.engine.request import Request
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.tools.bench import random_models, step
from jspec.tools.bench.report import Column, Report, option

LOOP, LOOPS, LOOP_WARM_UP = 64, 4, 2  # steps of one dispatch; dispatches that are timed, and before these
STEPS = 200  # steps that are timed, each in a dispatch of its own
CHUNK = 2048  # tokens of a prefill
WARM_UP = 5  # steps before those that are timed
TOKEN = 5


class Overlap(NamedTuple):
    """Median times of a step, milliseconds."""

    case: step.Case
    loop: float  # with `LOOP` steps a dispatch
    engine: float  # with one
    idle: float  # share of the engine's time in which the device waits; noise can make it negative


OVERLAP_COLUMNS = (
    *(Column(f"case.{name}", name) for name in ("batch", "context")),
    Column("case.tree_text", "tree"),
    *(Column(name, f"{name} ms", ".3f") for name in ("loop", "engine")),
    Column("idle", "idle", ".1%"),
)


def measure_overlap(case: step.Case, target: Model, head: EagleHead | None, *, overlap: bool = True) -> Overlap:
    """Time a case with many steps a dispatch, and with one; ``overlap`` is the engine's option."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowAcceptanceWarning)  # weights are random
        loop = statistics.median(_dispatch_seconds(case, target, head, LOOP, LOOP_WARM_UP, LOOPS, overlap)) / LOOP
        # Attention takes longer as the text grows: both times are taken at the same mean length.
        before = max((LOOP_WARM_UP * 2 + LOOPS) * LOOP - STEPS, 0) // 2
        engine = statistics.median(_dispatch_seconds(case, target, head, 1, before, STEPS, overlap))
    return Overlap(case, loop * 1e3, engine * 1e3, 1 - loop / engine)


def _dispatch_seconds(
    case: step.Case, target: Model, head: EagleHead | None, size: int, before: int, count: int, overlap: bool
) -> list[float]:
    """Seconds of each of ``count`` dispatches of ``size`` steps, after ``before`` others, with all rows active."""
    tokens = (before + count + 2) * size * (1 + case.drafted_depth)  # one dispatch is in flight
    options = dict(rounds_per_dispatch=size, overlap=overlap, prefix_cache=False)
    with _engine(case, target, head, case.context + tokens, case.context, **options) as engine:
        requests = _begin(engine, case, tokens)
        times = [_step_seconds(engine)[1] for _ in range(before + count)]
        assert not any(request.finish_reason for request in requests), "every row is active to the end"
        return times[before:]


def _engine(case: step.Case, target: Model, head: EagleHead | None, max_len: int, chunk: int, **options: Any) -> Engine:
    """An engine of the case's rows, which prefills all prompts, in chunks, before the first step."""
    return Engine(
        target,
        drafter=None if case.tree is None or head is None else Eagle3(head, case.tree),
        slots=case.batch,
        buckets=(case.batch,),
        prefill_buckets=(chunk,),
        prefill_budget=case.batch * (max_len + chunk),
        max_len=max_len,
        page_size=case.page_size,
        implementation=case.implementation,
        kv_dtype=case.kv_dtype,
        draft_kv_dtype=case.kv_dtype,
        log_interval=None,
        **options,
    )


def _begin(engine: Engine, case: step.Case, max_tokens: int) -> list[Request]:
    """Requests of random prompts, with their first token read."""
    rng, vocab = np.random.default_rng(case.context), random_models.TARGETS[case.shape].vocab_size
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = rng.integers(0, vocab, (case.batch, case.context)).tolist()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while not all(request.token_ids for request in requests):
        engine.step()
    return requests


def _step_seconds(engine: Engine) -> tuple[float, float]:
    """CPU time of the thread and wall time of a step."""
    began, since = time.perf_counter(), time.thread_time()
    engine.step()
    return time.thread_time() - since, time.perf_counter() - began


def run_overlap(arguments: argparse.Namespace) -> Report:
    cases = step.cases_of(arguments)
    target, head = step.models_of(cases)
    results = (measure_overlap(case, target, head, overlap=not arguments.no_overlap) for case in cases)
    return Report("the device's waiting for the host, random weights, acceptance about 0", OVERLAP_COLUMNS, results)


@dataclass(frozen=True)
class HostCase:
    """Requests of which the host's time is measured."""

    rows: int = 64  # requests that decode at once
    contexts: tuple[int, ...] = (1024, 32768)  # numbers of tokens before the first step
    length: int = 4  # nodes of the drafted chain
    accepted: int = 2  # draft tokens that every step accepts
    rounds: int = 50  # steps of a block
    blocks: int = 5  # blocks of every context

    def __post_init__(self) -> None:
        if min(self.rows, self.rounds, self.blocks, *self.contexts) < 1:
            raise ValueError(f"host: expected at least 1 row, token of context, step and block, got {self}")

    max_tokens = property(lambda self: (self.rounds + WARM_UP + 8) * (self.length + 1))  # more than a request emits

    def point(self, context: int) -> step.Case:
        """The least model, as only the host's time counts."""
        return step.Case("least", self.rows, context, Tree.chain(self.length), dtype="float32")


class HostTime(NamedTuple):
    """Times of a step at one context."""

    rows: int
    context: int
    milliseconds: float  # CPU time of the thread, median over blocks of each block's median
    spread: float  # largest less smallest block median
    wall: float  # the same median of wall time
    ratio: float  # CPU time beside the first context's, median over blocks timed one after the other


HOST_HEADINGS = ("rows", "context", "ms a step", "max-min", "wall ms", "beside the first")
HOST_FORMATS = ("", "", *[".3f"] * 4)
HOST_COLUMNS = tuple(Column(*one) for one in zip(HostTime._fields, HOST_HEADINGS, HOST_FORMATS, strict=True))


class ReadyResult(np.ndarray):
    """A step's result that needs no waiting."""

    def block_until_ready(self) -> ReadyResult:
        return self


def measure_host(engines: Sequence[Engine], case: HostCase) -> list[HostTime]:
    """Time steps of every context, with an engine of `ready_engine` for each."""
    cpu, wall = np.array([_block(engines, case) for _ in range(case.blocks)]).transpose(1, 2, 0) * 1e3
    figures = (np.median(cpu, 1), np.ptp(cpu, 1), np.median(wall, 1), np.median(cpu / cpu[0], 1))
    lines = zip(case.contexts, *(one.tolist() for one in figures), strict=True)
    return [HostTime(case.rows, *line) for line in lines]


def ready_engine(case: HostCase) -> Engine:
    """An engine, with room for the longest context, whose programs only return a ready result."""
    point = case.point(max(case.contexts))
    target, head = step.models_of([point])
    assert head is not None
    head = replace(head, config=replace(head.config, feature_layers=(0, 1, 2)))  # of a target with one layer
    engine = _engine(point, target, head, point.context + case.max_tokens, CHUNK)
    compiled = engine.core.runner.programs.compiled
    answers: dict[str, Callable[..., Any]] = {
        "prefill": _answer(1, case.length, 0),
        "round": _answer(case.rows, case.length, case.accepted),
        "update_page_table": lambda table, new: table,
        "write_pending_rows": lambda params, state, request: state,
    }
    compiled.update({key: answers[key.kind] for key in compiled if key.kind in answers})
    return engine


def _answer(rows: int, length: int, accepted: int) -> Callable[..., Any]:
    """A program that accepts a fixed number of draft tokens; columns as in `jspec.core.records.StepResult`."""
    columns = [TOKEN] * (accepted + 1) + [-1] * (length - accepted) + [accepted + 1, accepted, length, 0]
    report = np.array([[columns] * rows], np.int32).view(ReadyResult)
    output = StepOutput(report=report, trace=None)  # type: ignore[arg-type]
    return lambda params, state, packed: (state, output)


def _block(engines: Sequence[Engine], case: HostCase) -> np.ndarray:
    """Median seconds of a step: CPU time of the thread and wall time, each at every context.

    The contexts alternate step by step, so a slow phase of the machine affects all of them.
    """
    pairs = list(zip(engines, case.contexts, strict=True))
    requests = [_begin(engine, case.point(context), case.max_tokens) for engine, context in pairs]
    for engine in [*engines] * WARM_UP:
        engine.step()
    seconds = np.array([[_step_seconds(engine) for engine in engines] for _ in range(case.rounds)])
    assert all(one.finish_reason is None for rows in requests for one in rows), "all rows were active"
    for engine, rows in zip(engines, requests, strict=True):
        for request in rows:
            engine.abort(request)
            engine.result(request)
    return np.median(seconds, axis=0).T


def run_host(arguments: argparse.Namespace) -> Report:
    results = []
    for rows in arguments.batch:
        case = HostCase(rows, tuple(arguments.context), rounds=arguments.steps, blocks=arguments.blocks)
        with ExitStack() as stack:
            results += measure_host([stack.enter_context(ready_engine(case)) for _ in case.contexts], case)
    return Report("host time of a step over programs that return at once", HOST_COLUMNS, results)


OPTIONS = (
    option("--no-overlap", action="store_true", help="overlap: read every result before the next dispatch"),
    option("--steps", type=int, default=50, help="host: steps of a block"),
    option("--blocks", type=int, default=5, help="host: blocks of each context"),
)
