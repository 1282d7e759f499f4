"""`jspec bench train`: the speed and the memory of training an EAGLE-3 head for a target with random weights."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models import load
from jspec.models.decoder import Model
from jspec.tools.bench import random_models, roofline
from jspec.tools.bench.report import Column, Report, count, counts, option, scaled
from jspec.tools.table import table
from jspec.train import plan
from jspec.train.config import TrainConfig
from jspec.train.methods import METHODS
from jspec.train.rows import Rows

if TYPE_CHECKING:
    from jspec.train.program import TrainingProgram, TrainState
    from jspec.train.program import UpdateReport as TrainReport

WARM_UP = 2  # updates before the clock starts
DOCUMENTS = 4  # documents of a row
GB = 1e9


@dataclass
class Training:
    """What was measured with one number of draft tokens."""

    shape: Annotated[str, Column("target")]
    ttt: Annotated[int, Column("draft tokens")]
    tokens: Annotated[int, Column("tokens an update", ",")]
    updates: Annotated[int, Column("updates")]
    seconds: Annotated[float, Column("ms an update", scaled(1e3, ".0f"))]  # of an update
    tokens_per_second: Annotated[float, Column("tokens/s", ",.0f")]
    flops: Annotated[float, Column("GFLOP a token", scaled(1e-9, ".2f"))]  # the gradient's second forward included
    rate: Annotated[float, Column("TFLOP/s", scaled(1e-12, ".1f"))]
    share: Annotated[float | None, Column("of the chip's", ".1%")]  # of the rate of its matrix products
    planned: Annotated[float, Column("planned GB", scaled(1 / GB, ".1f"))]
    compiled: Annotated[float, Column("compiled GB", scaled(1 / GB, ".1f"))]  # arguments and workspace of the program
    peak_so_far: Annotated[float | None, Column("peak GB so far", scaled(1 / GB, ".1f"))]  # of all cases until now
    compile_seconds: Annotated[float, Column("compile s", ".0f")]
    loss: Annotated[float, Column("loss", ".3f")]  # of the last update
    plan: dict[str, int] = field(default_factory=dict)  # bytes of each planned part


def measure(config: TrainConfig, shape: str, dtype: str | None, seconds: float) -> Training:
    """Train a head on random tokens for some seconds.

    Args:
        config: options of the run.
        shape: name of a shape in `random_models`.
        dtype: dtype of the target.
        seconds: how long updates are made after the first ones.
    """
    from jspec.train.program import (
        TrainingProgram,
    )  # here, because it imports the optimiser, which no other command needs

    target = random_models.random_target(shape, load.dtype_name(dtype))
    method = METHODS[config.method](config)
    vocab, size = target.config.vocab_size, config.draft_vocab or target.config.vocab_size
    head = method.create(target, np.sort(np.random.default_rng(0).choice(vocab, size, replace=False)))
    planned, flops = plan.memory_plan(config, target, head), _flops(config, target, head)
    program = TrainingProgram(method, target, head, steps=10**6)
    state, batches = program.start(head), _batches(config, vocab)
    del head
    began = time.perf_counter()
    compiled = program.compile(state, next(batches))
    compile_seconds = time.perf_counter() - began
    found = compiled.memory_analysis()
    used = found.argument_size_in_bytes + found.temp_size_in_bytes
    used += found.output_size_in_bytes - found.alias_size_in_bytes
    report, updates, each = _time(program, state, batches, seconds)
    tokens = config.batch * config.length
    chip, rate = roofline.chip(), flops * tokens / each
    return Training(
        shape=shape,
        ttt=config.ttt,
        tokens=tokens,
        updates=updates,
        seconds=each,
        tokens_per_second=tokens / each,
        flops=flops,
        rate=rate,
        share=None if chip is None else rate / chip.matmul_rate,
        planned=sum(planned.values()),
        compiled=used,
        peak_so_far=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        compile_seconds=compile_seconds,
        loss=report.measured.figures().loss,
        plan=planned,
    )


def _time(
    program: TrainingProgram, state: TrainState, batches: Iterator[Rows], seconds: float
) -> tuple[TrainReport, int, float]:
    """Make updates for some seconds, one in advance; return the last report, their number and the seconds of each."""
    for _ in range(WARM_UP):
        state, report = program.update(state, next(batches))
    jax.block_until_ready(report)
    began, updates, before = time.perf_counter(), 0, report
    while updates < 1 or time.perf_counter() - began < seconds:
        state, report = program.update(state, next(batches))
        jax.block_until_ready(before)
        before, updates = report, updates + 1
    jax.block_until_ready(report)
    assert bool(report.is_finite), "the loss of random tokens is finite"
    return report, updates, (time.perf_counter() - began) / updates


def _flops(config: TrainConfig, target: Model, head: Any) -> float:
    """Return the operations of an update for one token, the target's pass included."""
    costs = roofline.verify_costs(target.config, config.batch, config.length, config.length // 2)
    layers = sum(cost.flops for cost in costs if cost.name != "head") / (config.batch * config.length)
    return layers + plan.target_logit_flops(target, head) + plan.head_flops(config, head)


def _batches(config: TrainConfig, vocab: int) -> Iterator[Rows]:
    """Yield batches of random tokens, all of which count, in rows of several documents."""
    draws, shape = np.random.default_rng(0), (config.batch, config.length)
    segments = np.minimum(1 + np.arange(config.length) // (16 * max(1, config.length // DOCUMENTS // 16)), DOCUMENTS)
    while True:
        tokens = jnp.asarray(draws.integers(0, vocab, shape), jnp.int32)
        yield Rows(tokens, jnp.broadcast_to(jnp.asarray(segments, jnp.int32), shape), jnp.ones(shape, bool))


def text(results: Any) -> str:
    """Format the planned memory by parts."""
    return table([["planned", "GB"], *([name, f"{size / GB:.2f}"] for name, size in results[-1].plan.items())])


def run(arguments: argparse.Namespace) -> Report:
    a = arguments
    shape = a.shape or random_models.default_shape()
    sizes: dict[str, Any] = dict(length=a.length, batch=a.batch, draft_vocab=random_models.DRAFT_VOCAB[shape])
    sizes["keep_activations"] = a.keep_activations
    results = (measure(TrainConfig(**sizes, ttt=ttt), shape, a.dtype, a.seconds) for ttt in a.ttt)
    return Report("random weights and tokens", results, text)


OPTIONS = (
    option("--shape", choices=random_models.DENSE, help=f"target; {random_models.DEFAULT_SHAPE}"),
    option("--dtype", help="dtype of the target; default: float32 on CPU, bfloat16 elsewhere"),
    option("--length", type=count, default=2048, help="tokens of a row"),
    option("--batch", type=count, default=8, help="rows of an update"),
    option("--ttt", type=counts, default=[7], metavar="7,5,3", help="draft tokens that the loss covers"),
    option("--keep-activations", action="store_true", help="keep what all steps compute for the gradient"),
    option("--seconds", type=float, default=60.0, help="how long to measure"),
)
