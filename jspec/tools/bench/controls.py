"""`jspec bench controls`: what sampling and its controls cost a round, beside a program without any of their code.

The programs are timed in turns on the same weights, so that what moves one moves all; the price is the median of what
a program took more than the first one, turn by turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.records import Controls, Grammars, SlotState
from jspec.core.tree import TREE_FORMS, Tree
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.step.program import Program, init_state
from jspec.tools.bench import report, rounds, shapes
from jspec.tools.bench.numbers import ints
from jspec.tools.table import table

CELLS = 4096  # of a grammar's table
STATES = 16


@dataclass(frozen=True)
class Kind:
    """What a program can do, and what its rows ask for."""

    name: str
    controls: bool = False  # has code for controls
    grammars: bool = False  # and for grammars
    sampled: bool = False  # temperature 1
    cuts: bool = False  # top-k, top-p and min-p
    used: bool = False  # bias, penalties, bad words, min_tokens, and a grammar where there is code for it


KINDS = (
    Kind("greedy, no such code"),
    Kind("greedy, all off", controls=True),
    Kind("greedy, all on", controls=True, used=True),
    Kind("temperature", sampled=True),
    Kind("temperature, top-k, top-p, min-p", sampled=True, cuts=True),
    Kind("all of it", controls=True, sampled=True, cuts=True, used=True),
    Kind("temperature and cuts, all else off", controls=True, grammars=True, sampled=True, cuts=True),
    Kind("all of it, and a grammar", controls=True, grammars=True, sampled=True, cuts=True, used=True),
)


@dataclass(frozen=True)
class Price:
    """One program, in milliseconds a round, medians."""

    kind: Kind
    batch: int
    milliseconds: float
    more: float  # than the first kind


def measure(case: rounds.Case, target: Model, head: EagleHead | None, kinds: Sequence[Kind] = KINDS) -> list[Price]:
    """Time rounds of all kinds in turns."""
    program, params, pool = rounds.build(case, target, head)
    steps: dict[Program, Any] = {}
    running: list[tuple[Any, SlotState]] = []
    for kind in kinds:
        own = replace(program, controls=kind.controls, grammar_cells=CELLS if kind.grammars else 0)
        state = _filled(rounds.filled_state(init_state(own, params, pool), case), kind)
        if own not in steps:
            steps[own] = rounds.compile_step(own, params, state, case.batch)
        running.append((steps[own], state))
    turns = []
    for _ in range(rounds.WARM_UP + rounds.GROUPS):
        turn = []
        for index, (step, state) in enumerate(running):
            state, milliseconds, _ = rounds.group(step, params, state, case)
            running[index] = step, state
            turn.append(milliseconds)
        turns.append(turn)
    columns = list(zip(*turns[rounds.WARM_UP :], strict=True))
    return [
        Price(
            kind,
            case.batch,
            statistics.median(own),
            statistics.median(one - first for one, first in zip(own, columns[0], strict=True)),
        )
        for kind, own in zip(kinds, columns, strict=True)
    ]


def _filled(state: SlotState, kind: Kind) -> SlotState:
    """The state with what the kind's rows ask for in every slot; nothing may end one."""
    sampling, slots = state.sampling, state.root.shape[0]

    def each(value: float, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.full(slots, value, dtype)

    if kind.sampled:
        sampling = replace(sampling, temperature=each(1))
    if kind.cuts:
        sampling = replace(sampling, top_k=each(50, jnp.int32), top_p=each(0.9), min_p=each(0.01))
    state = replace(state, sampling=sampling)
    if not kind.used:
        return state
    assert state.controls is not None
    state = replace(state, controls=_used(state.controls, each))
    return state if state.grammars is None else replace(state, grammars=_tables(state.grammars))


def _used(controls: Controls, each: Any) -> Controls:
    rng = np.random.default_rng(0)
    vocab = controls.bias.shape[1]
    return replace(
        controls,
        used=each(True, bool),
        repetition=each(1.2),
        presence=each(0.3),
        frequency=each(0.3),
        may_end_at=each(2**30, jnp.int32),
        bias=jnp.asarray(rng.normal(size=controls.bias.shape), jnp.float32),
        counts=jnp.asarray(rng.integers(0, 4, controls.counts.shape), jnp.int32),
        bad_beginnings=jnp.asarray(rng.integers(-1, vocab, controls.bad_beginnings.shape), jnp.int32),
        bad_ends=jnp.asarray(rng.integers(0, vocab, controls.bad_ends.shape), jnp.int32),
        grammar_state=each(0, jnp.int32),
    )


def _tables(grammars: Grammars) -> Grammars:
    """Each state forbids one of the classes, and every token leads on."""
    rng = np.random.default_rng(0)
    tables, vocab = grammars.class_of.shape
    classes = grammars.next.shape[1] // STATES
    behind = rng.integers(0, STATES, (STATES, classes))
    behind[np.arange(STATES), np.arange(STATES)] = -1
    return Grammars(
        class_of=jnp.asarray(rng.integers(0, classes, (tables, vocab)), jnp.int16),
        next=jnp.asarray(np.tile(behind.reshape(1, -1), (tables, 1)), jnp.int16),
        classes=jnp.full(tables, classes, jnp.int16),
    )


def text(results: Sequence[Price]) -> str:
    """One line a kind."""
    rows = [["batch", "round", "ms", "more"]]
    rows += [[str(one.batch), one.kind.name, f"{one.milliseconds:.3f}", f"{one.more:+.3f}"] for one in results]
    return table(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jspec bench controls`."""
    parser.add_argument("--shape", choices=sorted(shapes.TARGETS), default="llama3-8b")
    parser.add_argument("--batch", type=ints, default=[32], metavar="1,32")
    parser.add_argument("--tree", type=Tree.parse, default=Tree.chain(4), help=TREE_FORMS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    target = shapes.random_target(arguments.shape, arguments.dtype)
    head = shapes.random_head(arguments.shape, arguments.dtype)
    results = []
    for batch in arguments.batch:
        own = {name: getattr(arguments, name) for name in ("context", "tree", "page_size", "dtype")}
        results += measure(rounds.Case(arguments.shape, batch=batch, **own), target, head)
    print(f"rounds of {arguments.tree} at {arguments.shape}; {report.environment()}")
    print(text(results))
    if arguments.json:
        report.write(arguments.json, [asdict(one) for one in results])
    return 0
