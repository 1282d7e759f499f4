"""`jspec bench step --measure controls|overlap|startup`: what controls and the host add to a step; an engine's start.

Controls: steps of programs with sampling and its controls are timed in turns, on the same weights. The first program
has no controls, and a cost is the median of the differences to its steps.

Overlap: the share of time in which the GPU waits for the host is 1 - loop / engine. "Loop" is the time of a step with
64 steps in one dispatch, which the host cannot delay; "engine" is that of a step with a dispatch of its own.

Startup: the seconds that an engine takes to compile all its programs before any runs, with an empty folder of compiled
programs ("cold") and with that folder once more ("warm").
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import Float

from jspec.core.records import Grammars, SlotState
from jspec.core.tree import Tree
from jspec.draft.eagle_head import EagleHead
from jspec.engine.callers.api import Engine
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.metrics import LowAcceptanceWarning
from jspec.engine.request.request import Request
from jspec.engine.request.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.step.program import Program, init_state
from jspec.tools.bench import profiling, random_models, step
from jspec.tools.bench.report import Column, Report, option, tree_name

CELLS, STATES = 4096, 16  # entries and states of a grammar's table
LOOP, LOOPS, LOOP_WARM_UP = 64, 4, 2  # steps of one dispatch; dispatches that are timed, and before these
STEPS = 200  # steps that are timed, each in a dispatch of its own
CHUNK = 2048  # tokens of a prefill
SPARE = 4  # steps for which a request has tokens left
ASKED, HIT = "/jax/compilation_cache/compile_requests_use_cache", "/jax/compilation_cache/cache_hits"


class Variant(NamedTuple):
    """The features that a step's program supports, and the sampling controls that its rows request."""

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


@dataclass(frozen=True)
class VariantTime:
    """The time of one variant's step, and its difference to the first variant's step."""

    case: step.StepCase
    kind: Annotated[Variant, Column("variant", lambda kind: kind.name)]
    batch: int  # number of batch rows
    milliseconds: Annotated[float, Column("ms", ".3f")]  # median time of a step
    more: Annotated[float, Column("more", "+.3f")]  # median difference to the first variant's step, milliseconds


def measure_controls(
    case: step.StepCase, target: Model, head: EagleHead | None, variants: Sequence[Variant] = VARIANTS
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
        runs.append(step.StepTimer(compiled[own], params, state, case))
    timed = profiling.time_in_turns(runs, step.GROUPS, warm_up=step.WARM_UP)
    times = np.array([[group.milliseconds for group in own] for own in timed])  # variant, group
    medians = zip(variants, np.median(times, 1).tolist(), np.median(times - times[0], 1).tolist(), strict=True)
    return [VariantTime(case, variant, case.batch, *figures) for variant, *figures in medians]


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
    return Report("ms a step with sampling controls, random weights, acceptance about 0", results)


@dataclass(frozen=True)
class Overlap:
    """The times of a step with and without the host between steps."""

    case: step.StepCase
    loop: Annotated[float, Column("loop ms", ".3f")]  # median time of a step with `LOOP` steps a dispatch
    engine: Annotated[float, Column("engine ms", ".3f")]  # median time of a step with one step a dispatch
    # Share of the engine's time in which the GPU waits, noise included; None: there is no GPU.
    idle: Annotated[float | None, Column("idle share", ".1%")]


def measure_overlap(case: step.StepCase, target: Model, head: EagleHead | None, *, overlap: bool = True) -> Overlap:
    """Time steps of an engine with many steps a dispatch, and with one; ``overlap`` is the engine's option."""
    # Attention takes longer as the text grows: both times are taken at the same mean length.
    before = max((LOOP_WARM_UP * 2 + LOOPS) * LOOP - STEPS, 0) // 2
    seconds = []
    for size, untimed, timed in ((LOOP, LOOP_WARM_UP, LOOPS), (1, before, STEPS)):
        max_len = case.context + max_tokens(case, untimed + timed, size)
        options = dict(rounds_per_dispatch=size, overlap=overlap, prefix_cache=False)
        with warnings.catch_warnings(), bench_engine(case, target, head, max_len, case.context, **options) as engine:
            warnings.simplefilter("ignore", LowAcceptanceWarning)  # weights are random
            wall = time_steps([engine], [case], untimed, timed, size)[1, 0]
        seconds.append(float(np.median(wall)) / size)
    loop, own = seconds
    return Overlap(case, loop * 1e3, own * 1e3, 1 - loop / own if profiling.has_gpu() else None)


def bench_engine(
    case: step.StepCase, target: Model, head: EagleHead | None, max_len: int, chunk: int, **options: Any
) -> Engine:
    """Return an engine that prefills the prompts of all batch rows, ``chunk`` tokens at once, before the first step."""
    sizes: dict[str, Any] = dict(
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
        compile_ahead=True,
    )
    drafter = None if case.tree is None or head is None else step.DRAFTERS[head.config.method](head, case.tree)
    return Engine(target, drafter=drafter, **sizes | options)


def max_tokens(case: step.StepCase, steps: int, size: int = 1) -> int:
    """Return more tokens than a request emits in ``steps`` engine steps of ``size`` decoding steps each."""
    return (steps + SPARE) * size * (case.tree_depth + 1)


def time_steps(
    engines: Sequence[Engine], cases: Sequence[step.StepCase], untimed: int, timed: int, size: int = 1
) -> Float[np.ndarray, "clock engine step"]:
    """Return the seconds of ``timed`` steps of each engine: CPU time of the thread (clock 0), wall time (clock 1).

    The engines alternate step by step, so a slow phase of the machine affects all of them. ``size`` is the number of
    decoding steps in a step of the engine.
    """
    with ExitStack() as stack:
        by_hand = [stack.enter_context(ByHand(engine)) for engine in engines]
        pairs = list(zip(by_hand, cases, strict=True))
        requests = [_begin(engine, case, max_tokens(case, untimed + timed, size)) for engine, case in pairs]
        seconds = np.array([[_step_seconds(engine) for engine in by_hand] for _ in range(untimed + timed)])
        assert all(one.finish_reason is None for rows in requests for one in rows), "all rows were active"
        for engine, rows in zip(by_hand, requests, strict=True):
            for request in rows:
                engine.abort(request)
                engine.result(request)
    return seconds[untimed:].T


def _begin(engine: ByHand, case: step.StepCase, tokens: int) -> list[Request]:
    """Submit a random prompt for each batch row and return the requests once each has its first token."""
    rng, vocab = np.random.default_rng(case.context), random_models.TARGETS[case.shape].vocab_size
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = rng.integers(0, vocab, (case.batch, case.context)).tolist()
    requests = [engine.submit(prompt, params) for prompt in prompts]
    while not all(request.token_ids or request.finish_reason for request in requests):
        engine.step()
    return requests


def _step_seconds(engine: ByHand) -> tuple[float, float]:
    """Step the engine once; return the CPU time of the thread and the wall time, seconds."""
    began, since = time.perf_counter(), time.thread_time()
    engine.step()
    return time.thread_time() - since, time.perf_counter() - began


def run_overlap(arguments: argparse.Namespace) -> Report:
    cases = step.cases_of(arguments)
    target, head = step.models_of(cases)
    results = (measure_overlap(case, target, head, overlap=not arguments.no_overlap) for case in cases)
    text = "" if profiling.has_gpu() else "idle share: not measured, as host and device are the same processor"
    headline = "the device's waiting for the host, random weights, acceptance about 0"
    return Report(headline, results, text)


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
    lower: Annotated[dict[str, float], Column("lower s", lambda own: f"{sum(own.values()):.1f}")]
    compile: Annotated[dict[str, float], Column("compile s", lambda own: f"{sum(own.values()):.1f}")]


def measure_startup(case: step.StepCase, target: Model, head: EagleHead | None, **options: Any) -> Iterator[Startup]:
    """Make an engine twice, and answer a short request; ``options`` are the engine's."""
    events: list[str] = []

    def listen(event: str, **_: Any) -> None:
        events.append(event)

    kept = jax.config.values["jax_compilation_cache_dir"]
    jax.monitoring.register_event_listener(listen)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for start in ("cold", "warm"):
                events.clear()
                jax.clear_caches()  # or the second engine would trace and lower less than the first one of a process
                began = time.perf_counter()
                with bench_engine(case, target, head, case.context, CHUNK, compile_cache=folder, **options) as engine:
                    ready = time.perf_counter()
                    engine.generate([1], SamplingParams(max_tokens=2, temperature=0.0))
                seconds, answer = ready - began, time.perf_counter() - ready
                programs = engine.lower_seconds, engine.compile_seconds
                yield Startup(start, case.tree, seconds, answer, events.count(ASKED), events.count(HIT), *programs)
    finally:  # later engines of this process must not look for the folder that is gone
        jax.monitoring.unregister_event_listener(listen)
        jax.config.update("jax_compilation_cache_dir", kept)
        compilation_cache.reset_cache()


def run_startup(arguments: argparse.Namespace) -> Report:
    cases = [case for case in step.cases_of(arguments) if case.batch == max(arguments.batch)]  # one for all batches
    models = step.models_of(cases)
    options: dict[str, Any] = dict(buckets=tuple(arguments.batch), prefill_buckets=None)
    results = (start for case in cases for start in measure_startup(case, *models, **options))
    return Report(f"start of an engine for batches of {arguments.batch}, texts up to --context", results)


OPTIONS = (option("--no-overlap", action="store_true", help="overlap: read every result before the next dispatch"),)
