"""`jspec bench step`: time of one decoding step for a shape with random weights, beside its least possible time.

The compiled step runs without an engine, and almost no draft is accepted. `--measure` times other costs of a step
(`step_costs`).
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.config import KV_DTYPES
from jspec.core.records import KVCache, SlotState
from jspec.core.tree import Tree
from jspec.draft.base import Drafter, NoDraft
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.step.decode import spec_step
from jspec.step.program import Params, Program, init_state
from jspec.tools.bench import profiling, random_models, roofline
from jspec.tools.bench.report import PICTURE, TREES, Mark, Report, columns, ints, option, tree_label, tree_name
from pallas_kernels.layers.quantized import KINDS

GROUP = 32  # steps dispatched between two looks at the clock; only the first one finds an idle device
GROUPS = 12
WARM_UP = 3
LONGEST = 90  # characters of a case's name


@dataclass(frozen=True)
class Case:
    """Model, batch and settings of one measured step: one line of the table."""

    shape: str  # name of a shape in `random_models`
    batch: int  # number of batch rows
    context: int  # committed tokens of a row
    tree: Tree | None  # tree drafted by an EAGLE-3 head; None: plain decoding
    page_size: int = 16
    dtype: str = "bfloat16"
    implementation: str = "auto"
    greedy: bool = True
    quantize: str | None = None  # quantisation of target and head
    draft_quantize: str | None = None  # quantisation of the head alone; None: as the target
    kv_dtype: str | None = None  # dtype of both caches; None: `dtype`
    idle: int = 0  # number of batch rows without a request
    depth: int | None = None  # depth at which a step cuts the tree, 0: nothing is drafted; None: the tree's own
    deterministic: bool = False

    @property
    def name(self) -> str:
        """Folder name made of all settings that are not the default; a long name ends with its checksum."""
        own = [(one.name, one.default, getattr(self, one.name)) for one in fields(self)]
        words = [f"{name}-{value}" for name, default, value in own if value != default]
        text = re.sub("[^a-z0-9._-]+", "-", "_".join(words).lower())
        return text if len(text) < LONGEST else f"{text[:LONGEST]}-{zlib.crc32(text.encode()):08x}"

    @property
    def weights(self) -> str:
        """Text that names the dtype or quantisation of target and head."""
        head = f", head {self.draft_quantize}" if self.draft_quantize and self.tree else ""
        return f"{self.quantize or self.dtype}{head}"

    cache = property(lambda self: self.kv_dtype or self.dtype)
    tree_text = property(lambda self: tree_name(self.tree))
    tree_depth = property(lambda self: self.tree.depth if self.tree else 0)
    drafted_depth = property(lambda self: self.drafted.depth if self.drafted else 0)

    @property
    def drafted(self) -> Tree | None:
        """The tree cut to the depth that a step drafts; None if it drafts nothing."""
        tree = self.tree if self.tree is None or self.depth is None else self.tree.cut(self.depth)
        return tree if tree is not None and tree.depth else None


@dataclass(frozen=True)
class Timing:
    """Measured and least times of a case's step."""

    case: Case
    milliseconds: float  # median time of a step, milliseconds
    spread: float  # 90th less 10th percentile, milliseconds
    floor: float  # least time of a step, milliseconds
    compile_seconds: float  # time to compile the step, seconds
    tokens: float  # mean number of tokens emitted a step and row
    clock: profiling.Clock | None = None  # clock of the GPU, during further steps that are not timed

    ratio = property(lambda self: self.milliseconds / self.floor)


COLUMNS = (
    *columns(case__shape="shape", case__dtype="dtype", case__weights="weights", case__cache="cache"),
    *columns(case__page_size="page", case__batch="batch", case__idle="idle", case__context="context"),
    *columns(case__tree_text="tree", case__drafted_depth="depth"),
    *columns(".3f", milliseconds="ms", spread="p90-p10", floor="floor"),
    *columns(".2f", ratio="ratio"),
    *profiling.clock_columns(),
    *columns(".2f", tokens="tokens"),
    *columns(".1f", compile_seconds="compile s"),
)


def build(
    case: Case, target: Model, head: EagleHead | None, *, growth: int | None = None
) -> tuple[Program, Params, PoolShape]:
    """Return the program, weights and pool shape of a case; the models may hold shapes in place of arrays."""
    if not 0 <= case.idle < case.batch:
        raise ValueError(f"idle: expected 0 to {case.batch - 1} of a batch of {case.batch} rows, got {case.idle}")
    assert case.tree is None or head is not None
    drafter: Drafter = NoDraft() if case.tree is None or head is None else Eagle3(head, case.tree)
    program = Program(
        drafter=drafter,
        feature_layers=drafter.feature_layers(target),
        accept="coupled",
        implementation=case.implementation,
        deterministic=case.deterministic,
    )
    max_len = case.context + (GROUP * (case.tree_depth + 1) + 1 if growth is None else growth)
    dtypes = (case.kv_dtype or case.dtype,) * 2
    width = PoolShape(case.batch, 2, case.page_size, max_len, *dtypes).width(drafter.tree)
    pool = PoolShape(case.batch, case.batch * width + 1, case.page_size, max_len, *dtypes)
    return program, Params(target=target, draft=drafter.bind(target)), pool


def compile_step(program: Program, params: Params, state: Any, batch: int) -> Any:
    """Compile one decoding step and return its executable; params and state may hold shapes."""
    slots = jax.ShapeDtypeStruct((batch,), jnp.int32)
    lowered = jax.jit(partial(spec_step, program), donate_argnums=(1,)).lower(params, state, slots)
    return lowered.compile(compiler_options=program.compiler_options)


class Runner:
    """A timer of groups of steps, dispatched one after the other without waiting; each call times one group."""

    def __init__(self, executable: Any, params: Params, state: SlotState, case: Case) -> None:
        self.executable, self.params, self.state, self.case = executable, params, state, case

    def __call__(self) -> tuple[float, float]:
        """Run `GROUP` steps, starting with ``case.context`` committed tokens in each row.

        Returns:
            Milliseconds per step, and the tokens that an active row emitted in the last step, on average.
        """
        case, state = self.case, self.state
        slots = jnp.arange(case.batch, dtype=jnp.int32)
        state = replace(state, lengths=jnp.full(case.batch, case.context, jnp.int32))
        jax.block_until_ready((state, slots))
        began = time.perf_counter()
        for _ in range(GROUP):
            state, output = self.executable(self.params, state, slots)
        jax.block_until_ready((state, output))
        milliseconds = (time.perf_counter() - began) / GROUP * 1e3
        self.state = state
        return milliseconds, float(np.asarray(output.report)[..., -4].sum()) / (case.batch - case.idle)


def measure(case: Case, target: Model, head: EagleHead | None, *, profile: Path | None = None) -> Timing:
    """Compile a case's step and return its median time over groups of steps, in milliseconds."""
    program, params, pool = build(case, target, head)
    state = filled_state(init_state(program, params, pool), case)
    started = time.perf_counter()
    if case.depth is not None:
        program = replace(program, drafter=program.drafter.cut(case.depth))
    run = Runner(compile_step(program, params, state, case.batch), params, state, case)
    compile_seconds = time.perf_counter() - started
    ((*groups,),) = profiling.time_in_turns([run], GROUPS, warm_up=WARM_UP)
    times, emitted = zip(*groups, strict=True)
    clock = profiling.watch_clock(run)
    if profile is not None:
        with jax.profiler.trace(str(profile)):
            run()
    deciles, floor = statistics.quantiles(times, n=10), floor_seconds(case) * 1e3
    figures = (statistics.median(times), deciles[-1] - deciles[0], floor, compile_seconds, statistics.fmean(emitted))
    return Timing(case, *figures, clock)


def floor_seconds(case: Case) -> float:
    """Return the least seconds of a case's step, by the memory and arithmetic rates of `roofline`."""

    def widths(quantize: str | None) -> roofline.Widths:
        cache = jnp.dtype(case.kv_dtype or "bfloat16").itemsize
        return roofline.Widths(1 if quantize else 2, cache, 2 if quantize == "fp8_dynamic" else 1)

    nodes, rows = 1 if case.drafted is None else case.drafted.nodes, case.batch - case.idle
    target, head = random_models.TARGETS[case.shape], random_models.head_config(case.shape)
    costs = roofline.verify_costs(target, rows, nodes, case.context, widths(case.quantize))
    if case.drafted is not None:
        own = widths(case.draft_quantize or case.quantize)
        costs += roofline.draft_costs(head, rows, case.drafted, case.context, own)
    return roofline.seconds(costs)


def filled_state(state: SlotState, case: Case) -> SlotState:
    """Return the state with a request in every slot that is not idle: own pages, random K and V, random root token."""
    width, rng, rows = state.page_table.shape[1], np.random.default_rng(0), case.batch

    def fill(part: Any) -> Any:
        def noise(x: jax.Array) -> jax.Array:
            return jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)

        return jax.tree.map(noise, part) if isinstance(part, KVCache) else part

    target, draft = jax.tree.map(fill, (state.target, state.draft), is_leaf=lambda part: isinstance(part, KVCache))
    temperature = state.sampling.temperature if case.greedy else state.sampling.temperature + 1
    cap = jnp.full(rows, max(case.tree_depth, 1), jnp.int32)
    return replace(
        state,
        root=jnp.asarray(rng.integers(0, random_models.TARGETS[case.shape].vocab_size, rows), jnp.int32),
        active=jnp.arange(rows) < rows - case.idle,
        remaining=jnp.full(rows, 2**30, jnp.int32),
        page_table=jnp.asarray(1 + np.arange(rows * width).reshape(rows, width), jnp.int32),
        sampling=replace(state.sampling, temperature=temperature, draft_cap=cap),
        target=target,
        draft=draft,
    )


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that the parsed command line asks for."""
    given = vars(arguments)
    names = {"shape", "dtype", "implementation", "quantize", "draft_quantize", "kv_dtype", "depth", "deterministic"}
    common = {name: given[name] for name in names & given.keys()} | {"greedy": not given.get("sampled")}
    grid = product(given["page_size"], given["context"], given["batch"], given["tree"], given.get("idle", [0]))
    return [
        Case(context=context, batch=batch, tree=tree, page_size=page, idle=idle, **common)
        for page, context, batch, tree, idle in grid
    ]


def models_of(cases: Sequence[Case]) -> tuple[Model, EagleHead | None]:
    """Return a random target and, if a case drafts, head, of the shape, dtype and quantisation of all cases."""
    one, drafts = cases[0], any(case.tree for case in cases)
    head = random_models.random_head(one.shape, one.dtype, one.draft_quantize or one.quantize) if drafts else None
    return random_models.random_target(one.shape, one.dtype, one.quantize), head


def run(arguments: argparse.Namespace) -> Report:
    cases, profile = cases_of(arguments), arguments.profile
    target, head = models_of(cases)

    def traces(results: Sequence[Timing]) -> str:
        folders = [profile / result.case.name for result in results] if profile else []
        return "\n".join(f"trace: {folder}\n{profiling.launches_of(folder, GROUP)}" for folder in folders)

    results = (measure(case, target, head, profile=profile and profile / case.name) for case in cases)
    headline = "ms a step, drafted by an EAGLE-3 head, random weights, acceptance about 0"
    return Report(headline, COLUMNS, results, traces, marks=_marks)


def _marks(result: Timing) -> list[Mark]:
    case = result.case
    panel = f"context {case.context}, page size {case.page_size}" + f", {case.idle} rows idle" * bool(case.idle)
    return [Mark(panel, tree_label(case.tree), case.batch, result.milliseconds, result.floor)]


MODEL_OPTIONS = (
    option("--shape", choices=sorted(random_models.TARGETS), default="llama3-8b"),
    option("--batch", type=ints, default=[1], metavar="1,8,32"),
    TREES(default=[None, Tree.chain(4)]),
    option("--dtype", default="bfloat16"),
    option("--quantize", choices=KINDS, help="weights of target and head"),
    option("--draft-quantize", choices=KINDS, help="weights of the head alone; as --quantize if left out"),
    option("--kv-dtype", choices=KV_DTYPES, help="dtype of both caches; the weights' dtype if left out"),
    option("--implementation", default="auto"),
)
POINT_OPTIONS = (
    option("--context", type=ints, default=[1024], metavar="1024"),
    option("--page-size", type=ints, default=[16], metavar="16"),
    PICTURE,
)
OPTIONS = (
    *MODEL_OPTIONS,
    *POINT_OPTIONS,
    option("--idle", type=ints, default=[0], metavar="0,7", help="rows of the batch without a request"),
    option("--depth", type=int, help="depth at which steps cut their trees; 0: nothing is drafted"),
    option("--deterministic", action="store_true", help="steps whose tokens are the same in every program"),
    option("--sampled", action="store_true", help="temperature 1 instead of greedy"),
    option("--profile", type=Path, metavar="DIR", help="trace steps of each case into DIR/CASE"),
)
