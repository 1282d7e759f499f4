"""`jspec bench step --measure controls|overlap|host`: time that controls and the host add to a step.

Controls: steps of programs with sampling and its controls, timed in turns on the same weights. A cost is the median of
the differences to the first program, which has none.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.core.records import Grammars, SlotState, StepOutput
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.engine.api import Engine
from jspec.engine.metrics import LowAcceptanceWarning
from jspec.engine.request import Request
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.step.program import Program, init_state
from jspec.tools.bench import random_models, step
from jspec.tools.bench.profiling import time_in_turns
from jspec.tools.bench.report import Report, columns, option

CELLS, STATES = 4096, 16  # entries and states of a grammar's table
LOOP, LOOPS, LOOP_WARM_UP = 64, 4, 2  # steps of one dispatch; dispatches that are timed, and before these
STEPS = 200  # steps that are timed, each in a dispatch of its own
CHUNK = 2048  # tokens of a prefill
WARM_UP = 5  # steps before those that are timed
TOKEN = 5


class Variant(NamedTuple):
    """Features that a step's program supports, and sampling controls that its rows request."""

    name: str  # name in the table
    controls: bool = False  # program supports controls
    grammars: bool = False  # program supports grammars
    sampled: bool = False  # rows sample at temperature 1; otherwise greedy
    cuts: bool = False  # rows request top-k, top-p and min-p
    used: bool = False  # rows request bias, penalties, bad words, min_tokens, and a grammar if supported


VARIANTS = (
    Variant("greedy, no controls compiled"),
    Variant("greedy, all off", controls=True),
    Variant("greedy, all on", controls=True, used=True),
    Variant("temperature", sampled=True),
    Variant("temperature, top-k, top-p, min-p", sampled=True, cuts=True),
    Variant("all controls", controls=True, sampled=True, cuts=True, used=True),
    Variant("temperature and cuts, all else off", controls=True, grammars=True, sampled=True, cuts=True),
    Variant("all controls and a grammar", controls=True, grammars=True, sampled=True, cuts=True, used=True),
)


class VariantTime(NamedTuple):
    """Time of one variant's step, and its difference to the first variant's step."""

    kind: Variant
    batch: int  # number of batch rows
    milliseconds: float  # median time of a step, milliseconds
    more: float  # median difference to the first variant's step, milliseconds


VARIANT_COLUMNS = (
    *columns(batch="batch", kind__name="variant"),
    *columns(".3f", milliseconds="ms"),
    *columns("+.3f", more="more"),
)


def measure_controls(
    case: step.Case, target: Model, head: EagleHead | None, variants: Sequence[Variant] = VARIANTS
) -> list[VariantTime]:
    """Time steps of all variants in turns, on the same weights; return one result a variant."""
    program, params, pool = step.build(case, target, head)
    compiled: dict[Program, Any] = {}
    runs = []
    for variant in variants:
        own = replace(program, controls=variant.controls, grammar_cells=CELLS if variant.grammars else 0)
        state = _filled(step.filled_state(init_state(own, params, pool), case), variant)
        if own not in compiled:
            compiled[own] = step.compile_step(own, params, state, case.batch)
        runs.append(step.Runner(compiled[own], params, state, case))
    times = [[ms for ms, _ in own] for own in time_in_turns(runs, step.GROUPS, warm_up=step.WARM_UP)]
    more = [[one - first for one, first in zip(own, times[0], strict=True)] for own in times]
    medians = zip(variants, map(statistics.median, times), map(statistics.median, more), strict=True)
    return [VariantTime(variant, case.batch, *figures) for variant, *figures in medians]


def _filled(state: SlotState, variant: Variant) -> SlotState:
    """Return the state with the variant's controls in every slot; no control can end a row."""
    sampling, each = state.sampling, partial(jnp.full, state.root.shape[0])
    if variant.sampled:
        sampling = replace(sampling, temperature=each(1.0))
    if variant.cuts:
        sampling = replace(sampling, top_k=each(50), top_p=each(0.9), min_p=each(0.01))
    controls, grammars = state.controls, state.grammars
    if variant.used and controls is not None:
        rng, vocab = np.random.default_rng(0), controls.bias.shape[1]
        controls = replace(
            controls,
            **dict(used=each(True), repetition=each(1.2), presence=each(0.3), frequency=each(0.3)),
            **dict(may_end_at=each(2**30), grammar_state=each(0)),
            bias=jnp.asarray(rng.normal(size=controls.bias.shape), jnp.float32),
            counts=jnp.asarray(rng.integers(0, 4, controls.counts.shape), jnp.int32),
            bad_beginnings=jnp.asarray(rng.integers(-1, vocab, controls.bad_beginnings.shape), jnp.int32),
            bad_ends=jnp.asarray(rng.integers(0, vocab, controls.bad_ends.shape), jnp.int32),
        )
        grammars = None if grammars is None else _tables(grammars)
    return replace(state, sampling=sampling, controls=controls, grammars=grammars)


def _tables(grammars: Grammars) -> Grammars:
    """Return grammar tables in which each state forbids one token class and no state is final."""
    rng, (tables, vocab) = np.random.default_rng(0), grammars.class_of.shape
    classes = grammars.next.shape[1] // STATES
    following = rng.integers(0, STATES, (STATES, classes))
    following[np.arange(STATES), np.arange(STATES)] = -1
    return Grammars(
        class_of=jnp.asarray(rng.integers(0, classes, (tables, vocab)), jnp.int16),
        next=jnp.asarray(np.tile(following.reshape(1, -1), (tables, 1)), jnp.int16),
        classes=jnp.full(tables, classes, jnp.int16),
    )


def run_controls(arguments: argparse.Namespace) -> Report:
    cases = step.cases_of(arguments)
    target, head = step.models_of(cases)
    results = (one for case in cases for one in measure_controls(case, target, head))
    return Report(f"steps of {', '.join(case.name for case in cases)}", VARIANT_COLUMNS, results)


class Overlap(NamedTuple):
    """Times of a step with and without the host between steps."""

    case: step.Case
    loop: float  # median time of a step with `LOOP` steps a dispatch, milliseconds
    engine: float  # median time of a step with one step a dispatch, milliseconds
    idle: float  # share of the engine's time in which the device waits; noise can make it negative


OVERLAP_COLUMNS = (
    *columns(case__batch="batch", case__context="context", case__tree_text="tree"),
    *columns(".3f", loop="loop ms", engine="engine ms"),
    *columns(".1%", idle="idle"),
)


def measure_overlap(case: step.Case, target: Model, head: EagleHead | None, *, overlap: bool = True) -> Overlap:
    """Time steps of an engine with many steps a dispatch, and with one; ``overlap`` is the engine's option."""
    # Attention takes longer as the text grows: both times are taken at the same mean length.
    before = max((LOOP_WARM_UP * 2 + LOOPS) * LOOP - STEPS, 0) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LowAcceptanceWarning)  # weights are random
        loop, engine = (
            statistics.median(_dispatch_seconds(case, target, head, *counts, overlap)) / counts[0]
            for counts in ((LOOP, LOOP_WARM_UP, LOOPS), (1, before, STEPS))
        )
    return Overlap(case, loop * 1e3, engine * 1e3, 1 - loop / engine)


def _dispatch_seconds(
    case: step.Case, target: Model, head: EagleHead | None, size: int, before: int, count: int, overlap: bool
) -> list[float]:
    """Return the seconds of each of ``count`` dispatches of ``size`` steps, after ``before`` untimed dispatches."""
    tokens = (before + count + 2) * size * (1 + case.tree_depth)  # one dispatch is in flight
    options = dict(rounds_per_dispatch=size, overlap=overlap, prefix_cache=False)
    with _engine(case, target, head, case.context + tokens, case.context, **options) as engine:
        requests = _begin(engine, case, tokens)
        times = [_step_seconds(engine)[1] for _ in range(before + count)]
        assert not any(request.finish_reason for request in requests), "every row is active to the end"
        return times[before:]


def _engine(case: step.Case, target: Model, head: EagleHead | None, max_len: int, chunk: int, **options: Any) -> Engine:
    """Return an engine with the case's batch rows, which prefills all prompts, in chunks, before the first step."""
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
    """Submit a random prompt for each batch row and return the requests once each has its first token."""
    rng, vocab = np.random.default_rng(case.context), random_models.TARGETS[case.shape].vocab_size
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    prompts = rng.integers(0, vocab, (case.batch, case.context)).tolist()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while not all(request.token_ids for request in requests):
        engine.step()
    return requests


def _step_seconds(engine: Engine) -> tuple[float, float]:
    """Step the engine once; return the CPU time of the thread and the wall time, seconds."""
    began, since = time.perf_counter(), time.thread_time()
    engine.step()
    return time.thread_time() - since, time.perf_counter() - began


def run_overlap(arguments: argparse.Namespace) -> Report:
    cases = step.cases_of(arguments)
    target, head = step.models_of(cases)
    results = (measure_overlap(case, target, head, overlap=not arguments.no_overlap) for case in cases)
    return Report("the device's waiting for the host, random weights, acceptance about 0", OVERLAP_COLUMNS, results)


class HostTime(NamedTuple):
    """Host's time of one `Engine.step`, without a device."""

    case: step.Case
    milliseconds: float  # CPU time of the thread, median over blocks of each block's median step, milliseconds
    spread: float  # largest less smallest block median of CPU time, milliseconds
    wall: float  # wall time, median over blocks of each block's median step, milliseconds
    ratio: float  # CPU time over the first case's in the same block, median over blocks


HOST_COLUMNS = (
    *columns(case__batch="rows", case__context="context", case__tree_text="tree"),
    *columns(".3f", milliseconds="ms a step", spread="max-min", wall="wall ms", ratio="beside the first"),
)


class ReadyResult(np.ndarray):
    """Array in place of a step's result on the device; it is ready at once."""

    def block_until_ready(self) -> ReadyResult:
        return self


def measure_host(engines: Sequence[Engine], cases: Sequence[step.Case], steps: int, blocks: int) -> list[HostTime]:
    """Return the host's time of a step for each case, over ``blocks`` of ``steps`` steps of its `ready_engine`."""
    cpu, wall = np.array([_block(engines, cases, steps) for _ in range(blocks)]).transpose(1, 2, 0) * 1e3
    figures = (np.median(cpu, 1), np.ptp(cpu, 1), np.median(wall, 1), np.median(cpu / cpu[0], 1))
    return [HostTime(*line) for line in zip(cases, *(one.tolist() for one in figures), strict=True)]


def max_tokens(case: step.Case, steps: int) -> int:
    """Return a limit above the number of tokens that a request emits in ``steps`` steps."""
    return (steps + WARM_UP + 8) * (case.tree_depth + 1)


def ready_engine(case: step.Case, max_len: int) -> Engine:
    """Return an engine whose programs compute nothing; each step's ready result accepts half of the chain."""
    target, head = step.models_of([case])
    if head is not None:
        head = replace(head, config=replace(head.config, feature_layers=(0, 1, 2)))  # of a target with one layer
    engine = _engine(case, target, head, max_len, CHUNK)
    compiled = engine.core.runner.programs.compiled
    answers: dict[str, Callable[..., Any]] = {
        "prefill": _answer(1, case.tree_depth, 0),
        "round": _answer(case.batch, case.tree_depth, (case.tree_depth + 1) // 2),
        "update_page_table": lambda table, new: table,
        "write_pending_rows": lambda params, state, request: state,
    }
    compiled.update({key: answers[key.kind] for key in compiled if key.kind in answers})
    return engine


def _answer(rows: int, length: int, accepted: int) -> Callable[..., Any]:
    """Return a program whose ready result accepts ``accepted`` draft tokens a row; columns as in `StepResult`."""
    line = [TOKEN] * (accepted + 1) + [-1] * (length - accepted) + [accepted + 1, accepted, length, 0]
    output = StepOutput(report=np.array([[line] * rows], np.int32).view(ReadyResult), trace=None)  # type: ignore[arg-type]
    return lambda params, state, packed: (state, output)


def _block(engines: Sequence[Engine], cases: Sequence[step.Case], steps: int) -> np.ndarray:
    """Return the median seconds of a step of each case: CPU time of the thread, and wall time.

    The cases alternate step by step, so a slow phase of the machine affects all of them.
    """
    pairs = list(zip(engines, cases, strict=True))
    requests = [_begin(engine, case, max_tokens(case, steps)) for engine, case in pairs]
    for engine in [*engines] * WARM_UP:
        engine.step()
    seconds = np.array([[_step_seconds(engine) for engine in engines] for _ in range(steps)])
    assert all(one.finish_reason is None for rows in requests for one in rows), "all rows were active"
    for engine, rows in zip(engines, requests, strict=True):
        for request in rows:
            engine.abort(request)
            engine.result(request)
    return np.median(seconds, axis=0).T


def run_host(arguments: argparse.Namespace) -> Report:
    """Measure the host's time of a step with the smallest model, as the device's time does not count."""
    a = arguments
    if min(a.steps, a.blocks, *a.batch, *a.context) < 1 or any(tree and not tree.is_chain for tree in a.tree):
        raise ValueError("host: expected chains or none, and at least 1 row, token of context, step and block")
    return Report("host time of a step over programs that return at once", HOST_COLUMNS, _host_times(a))


def _host_times(a: argparse.Namespace) -> Iterator[HostTime]:
    for rows, tree in ((rows, tree) for rows in a.batch for tree in a.tree):
        cases = [step.Case("least", rows, context, tree, dtype="float32") for context in a.context]
        max_len = max(a.context) + max_tokens(cases[0], a.steps)
        with ExitStack() as stack:
            engines = [stack.enter_context(ready_engine(case, max_len)) for case in cases]
            yield from measure_host(engines, cases, a.steps, a.blocks)


OPTIONS = (
    option("--no-overlap", action="store_true", help="overlap: read every result before the next dispatch"),
    option("--steps", type=int, default=50, help="host: steps of a block"),
    option("--blocks", type=int, default=5, help="host: blocks of each context"),
)
