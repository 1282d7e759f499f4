"""`jspec bench step --measure host`: the time of the host between the steps of a device that needs none.

Functions that return a ready result replace the compiled programs. What is timed is a turn of the server's engine
thread: a step, and making and handing over its output. CPU time of the thread hardly depends on other processes; wall
time does. With ``--tokenizer`` the results are tokens of English text, which are decoded.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle, product
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from jspec.core.records import StepOutput
from jspec.engine.callers.api import Engine
from jspec.engine.text.tokenizer import Tokenizer, load_tokenizer
from jspec.tools.bench import step
from jspec.tools.bench.report import Column, Report, count, option, tree_name
from jspec.tools.bench.step_costs import CHUNK, bench_engine, max_tokens, time_steps

TEXT = Path(__file__).parent.parent / "sample_text.txt"
WARM_UP = 5  # steps before those that are timed
TOKEN = 5


@dataclass(frozen=True)
class HostTime:
    """The host's time of one turn of an engine thread; a block is several turns, timed one by one."""

    case: step.StepCase
    milliseconds: Annotated[float, Column("ms a step", ".3f")]  # CPU time, median over blocks of medians
    spread: Annotated[float, Column("max-min", ".3f")]  # largest less smallest block median of CPU time, milliseconds
    wall: Annotated[float, Column("wall ms", ".3f")]  # wall time, median over blocks of a block's median
    ratio: Annotated[float, Column("beside the first", ".3f")]  # CPU time over the first case's, median over blocks


def measure_host(engines: Sequence[Engine], cases: Sequence[step.StepCase], steps: int, blocks: int) -> list[HostTime]:
    """Return the host's time of a turn for each case, over ``blocks`` of ``steps`` turns of its `ready_engine`."""
    medians = [np.median(time_steps(engines, cases, WARM_UP, steps), axis=-1) for _ in range(blocks)]
    cpu, wall = np.stack(medians, axis=-1) * 1e3  # each: case, block
    figures = (np.median(cpu, 1), np.ptp(cpu, 1), np.median(wall, 1), np.median(cpu / cpu[0], 1))
    return [HostTime(*line) for line in zip(cases, *(one.tolist() for one in figures), strict=True)]


def ready_engine(case: step.StepCase, max_len: int, tokenizer: Tokenizer | None = None) -> Engine:
    """Return an engine whose programs compute nothing; the ready result of a step accepts half of the chain.

    Args:
        tokenizer: decodes the results, which are then tokens of a text; None: output is ids.
    """
    target, head = step.models_of([case])
    if head is not None:
        head = replace(head, config=replace(head.config, feature_layers=(0, 1, 2)))  # of a target with one layer
    engine = bench_engine(case, target, head, max_len, CHUNK)
    engine.input_processor.tokenizer = tokenizer  # of any vocabulary, because no program reads the results
    ids = [TOKEN] * (case.tree_depth + 1) if tokenizer is None else tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    compiled = engine.core.runner.programs.compiled
    answers: dict[str, Callable[..., Any]] = {
        "prefill": _answer(case.batch, case.tree_depth, 0, ids),
        "round": _answer(case.batch, case.tree_depth, (case.tree_depth + 1) // 2, ids),
        "update_page_table": lambda table, new: table,
        "write_pending_rows": lambda params, state, request: state,
    }
    compiled.update({key: answers[key.kind] for key in compiled if key.kind in answers})
    return engine


def _answer(rows: int, length: int, accepted: int, ids: Sequence[int]) -> Callable[..., Any]:
    """Return a program whose results, ready at once, emit the next tokens of ``ids`` in every row.

    Args:
        length: depth of the tree.
        accepted: number of draft tokens that each row accepts.
    """
    rest = [-1] * (length - accepted) + [accepted + 1, accepted, length, 0]
    count = accepted + 1
    lines = [[*ids[at : at + count], *rest] for at in range(0, len(ids) - accepted, count)]
    reports = [np.array([[line] * rows], np.int32) for line in lines]
    outputs = cycle(StepOutput(report=one, trace=None) for one in reports)  # type: ignore[arg-type]
    return lambda params, state, packed: (state, next(outputs))


def run(arguments: argparse.Namespace) -> Report:
    """Measure the host's time of a turn; the model is the smallest, as the device computes nothing."""
    a, tokenizer = arguments, load_tokenizer(arguments.tokenizer)
    if any(tree and not tree.is_chain for tree in a.tree):
        raise ValueError(f"host: expected chains or none, got {' '.join(map(tree_name, a.tree))}")

    def times() -> Iterator[HostTime]:
        for rows, tree in product(a.batch, a.tree):
            cases = [step.StepCase("least", rows, context, tree, dtype="float32") for context in a.context]
            max_len = max(a.context) + max_tokens(cases[0], WARM_UP + a.steps)
            with ExitStack() as stack:
                engines = [stack.enter_context(ready_engine(case, max_len, tokenizer)) for case in cases]
                yield from measure_host(engines, cases, a.steps, a.blocks)

    return Report("host time of a step and its delivery over programs that return at once", times())


OPTIONS = (
    option("--steps", type=count, default=50, help="host: steps of a block"),
    option("--blocks", type=count, default=5, help="host: blocks of each context"),
    option("--tokenizer", help='host: folder of a tokenizer that decodes output, or "bytes"; default: output is ids'),
)
