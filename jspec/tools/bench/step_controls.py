"""`jspec bench step --measure controls`: what sampling and its controls cost a step, beside a program without them.

The programs are timed in turns on the same weights; a cost is the median of the differences to the first program.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jspec.core.records import Grammars, SlotState
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.step.program import Program, init_state
from jspec.tools.bench import step
from jspec.tools.bench.profiling import time_in_turns
from jspec.tools.bench.report import Column, Report

CELLS = 4096  # entries of a grammar's table
STATES = 16


class Variant(NamedTuple):
    """A program and what its rows request."""

    name: str
    controls: bool = False  # the program supports controls
    grammars: bool = False  # the program supports grammars
    sampled: bool = False  # temperature 1
    cuts: bool = False  # top-k, top-p and min-p
    used: bool = False  # bias, penalties, bad words, min_tokens, and a grammar if the program supports it


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
    """Median time of a step, and of the difference to the first variant's step, milliseconds."""

    kind: Variant
    batch: int
    milliseconds: float
    more: float


COLUMNS = (
    Column("batch", "batch"),
    Column("kind.name", "variant"),
    Column("milliseconds", "ms", ".3f"),
    Column("more", "more", "+.3f"),
)


def measure(
    case: step.Case, target: Model, head: EagleHead | None, variants: Sequence[Variant] = VARIANTS
) -> list[VariantTime]:
    """Time steps of all variants in turns."""
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
    """The state with the variant's requests in every slot; none of them can end a row."""
    sampling, each = state.sampling, partial(jnp.full, state.root.shape[0])
    if variant.sampled:
        sampling = replace(sampling, temperature=each(1.0))
    if variant.cuts:
        sampling = replace(sampling, top_k=each(50), top_p=each(0.9), min_p=each(0.01))
    controls, grammars = state.controls, state.grammars
    if variant.used and controls is not None:
        rng = np.random.default_rng(0)
        vocab = controls.bias.shape[1]
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
    """Grammar tables in which each state forbids one token class and no state is final."""
    rng, (tables, vocab) = np.random.default_rng(0), grammars.class_of.shape
    classes = grammars.next.shape[1] // STATES
    following = rng.integers(0, STATES, (STATES, classes))
    following[np.arange(STATES), np.arange(STATES)] = -1
    return Grammars(
        class_of=jnp.asarray(rng.integers(0, classes, (tables, vocab)), jnp.int16),
        next=jnp.asarray(np.tile(following.reshape(1, -1), (tables, 1)), jnp.int16),
        classes=jnp.full(tables, classes, jnp.int16),
    )


def run(arguments: argparse.Namespace) -> Report:
    cases = step.cases_of(arguments)
    target, head = step.models_of(cases)
    results = (one for case in cases for one in measure(case, target, head))
    return Report(f"steps of {', '.join(case.name for case in cases)}", COLUMNS, results)
