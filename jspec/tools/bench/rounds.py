"""Time of one round: the compiled step alone, at acceptance 0, for a shape with random weights."""

from __future__ import annotations

import statistics
import time
import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.records import KVCache, SlotState
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, NoDraft
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.step.decode import spec_step
from jspec.step.program import Params, Program, init_state
from jspec.tools.bench import clocks, floors, shapes

GROUP = 32  # rounds dispatched between two looks at the clock: the first finds an idle device, as none does that serves
GROUPS = 12
WARM_UP = 3
LONGEST = 40  # characters of a tree in a case's name


@dataclass(frozen=True)
class Case:
    """One point of the table."""

    shape: str
    batch: int
    context: int
    tree: Tree | None  # drafted by an EAGLE-3 head; None is plain decoding
    page_size: int = 16
    dtype: str = "bfloat16"
    implementation: str = "auto"
    greedy: bool = True
    quantize: str | None = None  # target and head
    draft_quantize: str | None = None  # the head alone; None: as the target
    kv_dtype: str | None = None  # of both caches; None: dtype
    idle: int = 0  # rows of the batch that hold no request
    depth: int | None = None  # at which a round cuts the tree, 0: it drafts nothing; None: the tree's own
    deterministic: bool = False

    @property
    def name(self) -> str:
        """One word that can name a folder; a long tree is told from others by a checksum."""
        tree = str(self.tree).lower().replace(":", "-").replace(",", "-")
        if self.tree is not None and len(tree) > LONGEST:
            tree = f"tree-{self.tree.nodes}-{zlib.crc32(tree.encode()):08x}"
        words = [self.shape, self.dtype, tree, f"batch{self.batch}", f"context{self.context}", f"page{self.page_size}"]
        words += [word for word in (self.quantize, self.kv_dtype) if word]
        words += [f"head-{self.draft_quantize}"] if self.draft_quantize and self.tree else []
        words += [] if self.implementation == "auto" else [self.implementation]
        words += [f"idle{self.idle}"] if self.idle else []
        words += [] if self.depth is None else [f"depth{self.depth}"]
        words += ["deterministic"] * self.deterministic
        return "_".join(words if self.greedy else [*words, "sampled"])

    @property
    def weights(self) -> str:
        """What they are stored as."""
        head = f", head {self.draft_quantize}" if self.draft_quantize and self.tree else ""
        return f"{self.quantize or self.dtype}{head}"

    @property
    def drafted(self) -> Tree | None:
        """What of the tree a round drafts; None: nothing."""
        tree = self.tree if self.tree is None or self.depth is None else self.tree.cut(self.depth)
        return tree if tree is not None and tree.depth else None


@dataclass(frozen=True)
class Timing:
    """What a case came to, in milliseconds; ``tokens`` is the mean emitted a round and row."""

    case: Case
    milliseconds: float
    spread: float  # 90th less 10th percentile
    floor: float
    compile_seconds: float
    tokens: float
    clock: clocks.Clock | None = None  # of the GPU, in more rounds, which are not timed


def build(
    case: Case, target: Model, head: EagleHead | None, *, growth: int | None = None
) -> tuple[Program, Params, PoolShape]:
    """Program, weights and pool shape of a case; the models may be trees of shapes.

    Args:
        growth: tokens that a row may gain beyond the context; None: those of `GROUP` rounds.

    Raises:
        ValueError: no row that is not idle.
    """
    if not 0 <= case.idle < case.batch:
        raise ValueError(f"idle: expected 0 to {case.batch - 1} of a batch of {case.batch} rows, got {case.idle}")
    drafter: Drafter = NoDraft()
    if case.tree is not None:
        assert head is not None
        drafter = Eagle3(head, case.tree)
    program = Program(
        drafter=drafter,
        feature_layers=drafter.feature_layers(target),
        accept="coupled",
        implementation=case.implementation,
        deterministic=case.deterministic,
    )
    max_len = case.context + (GROUP * (_depth(case) + 1) + 1 if growth is None else growth)
    dtypes = (case.kv_dtype or case.dtype,) * 2
    width = PoolShape(case.batch, 2, case.page_size, max_len, *dtypes).width(drafter.tree)
    pool = PoolShape(case.batch, case.batch * width + 1, case.page_size, max_len, *dtypes)
    return program, Params(target=target, draft=drafter.bind(target)), pool


def compile_step(program: Program, params: Params, state: Any, batch: int) -> Any:
    """The executable of one round; params and state may be shapes."""
    slots = jax.ShapeDtypeStruct((batch,), jnp.int32)
    lowered = jax.jit(partial(spec_step, program), donate_argnums=(1,)).lower(params, state, slots)
    return lowered.compile(compiler_options=program.compiler_options)


def measure(case: Case, target: Model, head: EagleHead | None, *, profile: Path | None = None) -> Timing:
    """Compile a case and time it: groups of rounds, dispatched back to back, median over groups.

    Args:
        profile: folder for a trace of one more group, which is not timed; None: no trace.
    """
    program, params, pool = build(case, target, head)
    state = filled_state(init_state(program, params, pool), case)
    started = time.perf_counter()
    if case.depth is not None:
        program = replace(program, drafter=program.drafter.cut(case.depth))
    step = compile_step(program, params, state, case.batch)
    compile_seconds = time.perf_counter() - started
    groups = []
    for _ in range(WARM_UP + GROUPS):
        state, *seen = group(step, params, state, case)
        groups.append(seen)
    times, emitted = zip(*groups[WARM_UP:], strict=True)
    clock, state = _clock(step, params, state, case)
    if profile is not None:
        with jax.profiler.trace(str(profile)):
            group(step, params, state, case)
    deciles = statistics.quantiles(times, n=10)
    return Timing(
        case=case,
        milliseconds=statistics.median(times),
        spread=deciles[-1] - deciles[0],
        floor=floor(case) * 1e3,
        compile_seconds=compile_seconds,
        tokens=statistics.fmean(emitted),
        clock=clock,
    )


def _clock(step: Any, params: Params, state: SlotState, case: Case) -> tuple[clocks.Clock | None, SlotState]:
    """How the GPU runs in more such groups, and the state behind them."""

    def again() -> None:
        nonlocal state
        state, *_ = group(step, params, state, case)

    return clocks.watch(again), state


def group(step: Any, params: Params, state: SlotState, case: Case) -> tuple[SlotState, float, float]:
    """Rounds from the case's context on: the state behind them, milliseconds a round, and tokens of the last one."""
    slots = jnp.arange(case.batch, dtype=jnp.int32)
    state = replace(state, lengths=jnp.full(case.batch, case.context, jnp.int32))
    jax.block_until_ready((state, slots))
    began = time.perf_counter()
    for _ in range(GROUP):
        state, output = step(params, state, slots)
    jax.block_until_ready((state, output))
    milliseconds = (time.perf_counter() - began) / GROUP * 1e3
    return state, milliseconds, float(np.asarray(output.report)[..., -4].sum()) / (case.batch - case.idle)


def floor(case: Case) -> float:
    """Seconds the case takes at least."""
    nodes = 1 if case.drafted is None else case.drafted.nodes
    rows = case.batch - case.idle
    costs = floors.verify_costs(
        shapes.TARGETS[case.shape], rows, nodes, case.context, _widths(case.quantize, case.kv_dtype)
    )
    if case.drafted is not None:
        widths = _widths(case.draft_quantize or case.quantize, case.kv_dtype)
        costs += floors.draft_costs(shapes.head_config(case.shape), rows, case.drafted, case.context, widths)
    return floors.seconds(costs)


def _widths(quantize: str | None, kv_dtype: str | None) -> floors.Widths:
    return floors.Widths(
        weight=1 if quantize else 2,
        cache=jnp.dtype(kv_dtype or "bfloat16").itemsize,
        speed=2 if quantize == "fp8_dynamic" else 1,
    )


def _depth(case: Case) -> int:
    return 0 if case.tree is None else case.tree.depth


def filled_state(state: SlotState, case: Case) -> SlotState:
    """Every slot that is not idle in the middle of a text: its own pages, random K and V in all caches, random root."""
    width = state.page_table.shape[1]
    rng = np.random.default_rng(0)

    def noise(x: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)

    def fill(part: Any) -> Any:
        return jax.tree.map(noise, part) if isinstance(part, KVCache) else part

    target, draft = jax.tree.map(fill, (state.target, state.draft), is_leaf=lambda part: isinstance(part, KVCache))
    temperature = state.sampling.temperature if case.greedy else state.sampling.temperature + 1
    controls = replace(
        state.sampling, temperature=temperature, draft_cap=jnp.full(case.batch, max(_depth(case), 1), jnp.int32)
    )
    return replace(
        state,
        root=jnp.asarray(rng.integers(0, shapes.TARGETS[case.shape].vocab_size, case.batch), jnp.int32),
        active=jnp.arange(case.batch) < case.batch - case.idle,
        remaining=jnp.full(case.batch, 2**30, jnp.int32),
        page_table=jnp.asarray(1 + np.arange(case.batch * width).reshape(case.batch, width), jnp.int32),
        sampling=controls,
        target=target,
        draft=draft,
    )
