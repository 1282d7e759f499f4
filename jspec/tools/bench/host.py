"""`jspec bench host`: what the host spends on a round, by the engine itself over programs that answer at once.

The engine schedules, dispatches and reads as ever; only its compiled programs are replaced, by functions that hand out
a result that is ready. What `Engine.step` takes then is the host's own. It is told in seconds of the thread, which
other processes on the machine hardly change, and by the clock on the wall.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jspec.core.records import StepOutput
from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.engine.api import Engine
from jspec.engine.request import Request
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.bench import report, shapes
from jspec.tools.table import table

SHAPE, DTYPE = "least", "float32"
STATES = (0, 1, 2)  # of a target of one layer, that the head is given
CHUNK = 2048  # tokens of a prefill
WARM_UP = 5  # rounds before those that are timed
TOKEN = 5


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        rows: requests that decode at once.
        contexts: tokens before the first round of a block.
        length: of the chain that is drafted.
        accepted: draft tokens that every round accepts.
        rounds: in a block.
        blocks: of every context, in turns.
    """

    rows: int = 64
    contexts: tuple[int, ...] = (1024, 32768)
    length: int = 4
    accepted: int = 2
    page_size: int = 16
    rounds: int = 50
    blocks: int = 5

    def __post_init__(self) -> None:
        for name in ("rows", "length", "page_size", "rounds", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts: expected at least one, each at least 1, got {self.contexts}")
        if not 0 <= self.accepted <= self.length:
            raise ValueError(f"accepted: expected in [0, {self.length}], got {self.accepted}")

    @property
    def tokens(self) -> int:
        """That a request may emit, more than it will."""
        return (self.rounds + WARM_UP + 8) * (self.length + 1)


@dataclass(frozen=True)
class Host:
    """One context, in milliseconds a round.

    Attributes:
        milliseconds: of the thread, median over blocks of a block's median.
        spread: of the blocks, largest less smallest.
        wall: by the clock on the wall, likewise a median.
        ratio: to the first context, median over blocks of the two that were timed one after the other.
    """

    context: int
    milliseconds: float
    spread: float
    wall: float
    ratio: float


class Ready(np.ndarray):
    """A result that is there."""

    def block_until_ready(self) -> Ready:
        return self


def measure(case: Case = Case()) -> list[Host]:
    """Time the rounds of every context."""
    with ExitStack() as stack:
        return measure_with([stack.enter_context(ready_engine(case)) for _ in case.contexts], case)


def measure_with(engines: Sequence[Engine], case: Case) -> list[Host]:
    """Likewise, with engines that `ready_engine` made of the case, one a context: each has pools for the longest."""
    blocks = [block(engines, case) for _ in range(case.blocks)]
    results = []
    for i, context in enumerate(case.contexts):
        own = [line[i][0] for line in blocks]
        results.append(
            Host(
                context=context,
                milliseconds=statistics.median(own) * 1e3,
                spread=(max(own) - min(own)) * 1e3,
                wall=statistics.median(line[i][1] for line in blocks) * 1e3,
                ratio=statistics.median(line[i][0] / line[0][0] for line in blocks),
            )
        )
    return results


def ready_engine(case: Case) -> Engine:
    """An engine whose programs do nothing but answer."""
    head = shapes.random_head(SHAPE, DTYPE)
    head = replace(head, config=replace(head.config, feature_layers=STATES))
    max_len = max(case.contexts) + case.tokens
    engine = Engine(
        shapes.random_target(SHAPE, DTYPE),
        drafter=Eagle3(head, Tree.chain(case.length)),
        slots=case.rows,
        buckets=(case.rows,),
        max_len=max_len,
        page_size=case.page_size,
        prefill_buckets=(CHUNK,),
        prefill_budget=case.rows * (max_len + CHUNK),  # all prompts come before the first round
        log_interval=None,
    )
    programs = engine.core.runner.programs
    first, chain = _answer(1, case.length, 0), _answer(case.rows, case.length, case.accepted)
    answers: dict[str, Callable[..., Any]] = {
        "prefill": first,
        "round": chain,
        "update_page_table": lambda table, new: table,
        "write_pending_rows": lambda params, state, request: state,
    }
    programs.compiled.update({key: answers[key.kind] for key in programs.compiled if key.kind in answers})
    return engine


def _answer(rows: int, length: int, accepted: int) -> Callable[..., Any]:
    """A program that accepts so many draft tokens in every row, by `jspec.core.records.StepResult`'s columns."""
    columns = [TOKEN] * (accepted + 1) + [-1] * (length - accepted) + [accepted + 1, accepted, length, 0]
    report = np.array([[columns] * rows], np.int32).view(Ready)
    output = StepOutput(report=report, trace=None)  # type: ignore[arg-type]
    return lambda params, state, packed: (state, output)


def block(engines: Sequence[Engine], case: Case) -> list[tuple[float, float]]:
    """Median seconds of a round at each context: of the thread, and by the wall.

    The contexts take turns round by round, so that what slows the machine for a while slows all of them.
    """
    requests = [_begin(engine, case, context) for engine, context in zip(engines, case.contexts, strict=True)]
    for engine in [*engines] * WARM_UP:
        engine.step()
    own, wall = np.array([[_timed_step(engine) for engine in engines] for _ in range(case.rounds)]).T
    assert all(one.finish_reason is None for rows in requests for one in rows), "all rows were at work"
    for engine, rows in zip(engines, requests, strict=True):
        for request in rows:
            engine.abort(request)
            engine.result(request)
    return list(zip(np.median(own, axis=1), np.median(wall, axis=1), strict=True))


def _timed_step(engine: Engine) -> tuple[float, float]:
    began, since = time.perf_counter(), time.thread_time()
    engine.step()
    return time.thread_time() - since, time.perf_counter() - began


def _begin(engine: Engine, case: Case, context: int) -> list[Request]:
    """As many requests as there are rows, behind their prompts."""
    rng, vocab = np.random.default_rng(context), shapes.TARGETS[SHAPE].vocab_size
    params = SamplingParams(max_tokens=case.tokens, temperature=0.0, ignore_eos=True)
    requests = [engine.submit(rng.integers(0, vocab, context).tolist(), params) for _ in range(case.rows)]
    while not all(request.token_ids for request in requests):
        engine.step()
    return requests


def text(case: Case, results: Sequence[Host]) -> str:
    """One line a context."""
    rows = [["rows", "context", "ms a round", "max-min", "wall ms", f"beside {results[0].context}"]]
    for one in results:
        figures = (f"{value:.3f}" for value in (one.milliseconds, one.spread, one.wall, one.ratio))
        rows.append([str(case.rows), str(one.context), *figures])
    return table(rows)


def write_json(path: Path, case: Case, results: Sequence[Host]) -> None:
    """Environment, case and results as one JSON object."""
    report.write(path, [asdict(one) for one in results], case=asdict(case))
