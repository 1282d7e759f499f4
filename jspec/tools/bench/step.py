"""`jspec bench step`: time of one decoding step for a shape with random weights, beside its floor.

The compiled step runs alone, at acceptance about 0. `--measure` chooses other times of a step: the cost of sampling
controls (`step_controls`), the device's waiting for the host and the host's own time (`step_host`).
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from jspec.tools.bench.report import PICTURE, TREES, Column, Mark, Report, ints, option, tree_label, tree_name
from pallas_kernels.layers.quantized import KINDS

GROUP = 32  # steps dispatched between two looks at the clock; only the first one finds an idle device
GROUPS = 12
WARM_UP = 3
LONGEST = 40  # characters of a tree in a case's name


@dataclass(frozen=True)
class Case:
    """One point of the table."""

    shape: str
    batch: int
    context: int
    tree: Tree | None  # drafted by an EAGLE-3 head; None: plain decoding
    page_size: int = 16
    dtype: str = "bfloat16"
    implementation: str = "auto"
    greedy: bool = True
    quantize: str | None = None  # kind for target and head
    draft_quantize: str | None = None  # kind for the head alone; None: as the target
    kv_dtype: str | None = None  # dtype of both caches; None: `dtype`
    idle: int = 0  # rows of the batch without a request
    depth: int | None = None  # depth at which a step cuts the tree, 0: nothing is drafted; None: the tree's own
    deterministic: bool = False

    @property
    def name(self) -> str:
        """One word that can name a folder; a long tree is identified by a checksum."""
        tree = self.tree_text.replace(":", "-").replace(",", "-")
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
        """How the weights are stored."""
        head = f", head {self.draft_quantize}" if self.draft_quantize and self.tree else ""
        return f"{self.quantize or self.dtype}{head}"

    cache = property(lambda self: self.kv_dtype or self.dtype)
    tree_text = property(lambda self: tree_name(self.tree))
    drafted_depth = property(lambda self: self.drafted.depth if self.drafted else 0)

    @property
    def drafted(self) -> Tree | None:
        """The part of the tree that a step drafts; None: nothing."""
        tree = self.tree if self.tree is None or self.depth is None else self.tree.cut(self.depth)
        return tree if tree is not None and tree.depth else None


def case_columns(path: str = "case.") -> list[Column]:
    """Table columns of the case that results hold under an attribute."""
    renamed = {"page_size": "page", "tree_text": "tree", "drafted_depth": "depth"}
    names = "shape dtype weights cache page_size batch idle context tree_text drafted_depth"
    return [Column(path + name, renamed.get(name, name)) for name in names.split()]


@dataclass(frozen=True)
class Timing:
    """Times of a case."""

    case: Case
    milliseconds: float  # median time of a step
    spread: float  # 90th less 10th percentile, milliseconds
    floor: float  # least time of a step, milliseconds
    compile_seconds: float
    tokens: float  # mean number of tokens emitted a step and row
    clock: profiling.Clock | None = None  # clock of the GPU, during further steps that are not timed

    ratio = property(lambda self: self.milliseconds / self.floor)


COLUMNS = (
    *case_columns(),
    Column("milliseconds", "ms", ".3f"),
    Column("spread", "p90-p10", ".3f"),
    Column("floor", "floor", ".3f"),
    Column("ratio", "ratio", ".2f"),
    *profiling.clock_columns(),
    Column("tokens", "tokens", ".2f"),
    Column("compile_seconds", "compile s", ".1f"),
)


def build(
    case: Case, target: Model, head: EagleHead | None, *, growth: int | None = None
) -> tuple[Program, Params, PoolShape]:
    """Program, weights and pool shape of a case; the models may hold shapes in place of arrays.

    Args:
        growth: tokens that a row may gain beyond the context; None: those of `GROUP` steps.

    Raises:
        ValueError: every row is idle.
    """
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
    max_len = case.context + (GROUP * (_depth(case) + 1) + 1 if growth is None else growth)
    dtypes = (case.kv_dtype or case.dtype,) * 2
    width = PoolShape(case.batch, 2, case.page_size, max_len, *dtypes).width(drafter.tree)
    pool = PoolShape(case.batch, case.batch * width + 1, case.page_size, max_len, *dtypes)
    return program, Params(target=target, draft=drafter.bind(target)), pool


def compile_step(program: Program, params: Params, state: Any, batch: int) -> Any:
    """The executable of one step; params and state may hold shapes."""
    slots = jax.ShapeDtypeStruct((batch,), jnp.int32)
    lowered = jax.jit(partial(spec_step, program), donate_argnums=(1,)).lower(params, state, slots)
    return lowered.compile(compiler_options=program.compiler_options)


def measure(case: Case, target: Model, head: EagleHead | None, *, profile: Path | None = None) -> Timing:
    """Compile a case and time it: groups of steps, dispatched back to back, median over groups.

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
    seen: list[tuple[float, float]] = []

    def group() -> None:
        nonlocal state
        state, *figures = run_group(step, params, state, case)
        seen.append((figures[0], figures[1]))

    for _ in range(WARM_UP + GROUPS):
        group()
    times, emitted = zip(*seen[WARM_UP:], strict=True)
    clock = profiling.watch_clock(group)
    if profile is not None:
        with jax.profiler.trace(str(profile)):
            group()
    deciles = statistics.quantiles(times, n=10)
    return Timing(
        case=case,
        milliseconds=statistics.median(times),
        spread=deciles[-1] - deciles[0],
        floor=floor_seconds(case) * 1e3,
        compile_seconds=compile_seconds,
        tokens=statistics.fmean(emitted),
        clock=clock,
    )


def run_group(step: Any, params: Params, state: SlotState, case: Case) -> tuple[SlotState, float, float]:
    """`GROUP` steps from the case's context on: the next state, milliseconds a step, tokens a row of the last step."""
    slots = jnp.arange(case.batch, dtype=jnp.int32)
    state = replace(state, lengths=jnp.full(case.batch, case.context, jnp.int32))
    jax.block_until_ready((state, slots))
    began = time.perf_counter()
    for _ in range(GROUP):
        state, output = step(params, state, slots)
    jax.block_until_ready((state, output))
    milliseconds = (time.perf_counter() - began) / GROUP * 1e3
    return state, milliseconds, float(np.asarray(output.report)[..., -4].sum()) / (case.batch - case.idle)


def floor_seconds(case: Case) -> float:
    """The least time of a step."""
    nodes = 1 if case.drafted is None else case.drafted.nodes
    rows = case.batch - case.idle
    widths = _widths(case.quantize, case.kv_dtype)
    costs = roofline.verify_costs(random_models.TARGETS[case.shape], rows, nodes, case.context, widths)
    if case.drafted is not None:
        widths = _widths(case.draft_quantize or case.quantize, case.kv_dtype)
        costs += roofline.draft_costs(random_models.head_config(case.shape), rows, case.drafted, case.context, widths)
    return roofline.seconds(costs)


def _widths(quantize: str | None, kv_dtype: str | None) -> roofline.Widths:
    return roofline.Widths(
        weight=1 if quantize else 2,
        cache=jnp.dtype(kv_dtype or "bfloat16").itemsize,
        speed=2 if quantize == "fp8_dynamic" else 1,
    )


def _depth(case: Case) -> int:
    return 0 if case.tree is None else case.tree.depth


def filled_state(state: SlotState, case: Case) -> SlotState:
    """The state with every slot that is not idle in use: own pages, random K and V in all caches, random roots."""
    width = state.page_table.shape[1]
    rng = np.random.default_rng(0)

    def noise(x: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)

    def fill(part: Any) -> Any:
        return jax.tree.map(noise, part) if isinstance(part, KVCache) else part

    target, draft = jax.tree.map(fill, (state.target, state.draft), is_leaf=lambda part: isinstance(part, KVCache))
    temperature = state.sampling.temperature if case.greedy else state.sampling.temperature + 1
    sampling = replace(
        state.sampling, temperature=temperature, draft_cap=jnp.full(case.batch, max(_depth(case), 1), jnp.int32)
    )
    return replace(
        state,
        root=jnp.asarray(rng.integers(0, random_models.TARGETS[case.shape].vocab_size, case.batch), jnp.int32),
        active=jnp.arange(case.batch) < case.batch - case.idle,
        remaining=jnp.full(case.batch, 2**30, jnp.int32),
        page_table=jnp.asarray(1 + np.arange(case.batch * width).reshape(case.batch, width), jnp.int32),
        sampling=sampling,
        target=target,
        draft=draft,
    )


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """All cases of the parsed options."""
    names = ("shape", "dtype", "implementation", "quantize", "draft_quantize", "kv_dtype", "depth", "deterministic")
    common = {name: value for name, value in vars(arguments).items() if name in names}
    common["greedy"] = not getattr(arguments, "sampled", False)
    idles = getattr(arguments, "idle", [0])
    grid = product(arguments.page_size, arguments.context, arguments.batch, arguments.tree, idles)
    return [
        Case(context=context, batch=batch, tree=tree, page_size=page, idle=idle, **common)
        for page, context, batch, tree, idle in grid
    ]


def models_of(cases: Iterable[Case]) -> tuple[Model, EagleHead | None]:
    """Random target and, where a case drafts, head of the cases' common shape, dtype and quantisation."""
    models = {(case.shape, case.dtype, case.quantize, case.draft_quantize or case.quantize) for case in cases}
    (shape, dtype, quantize, draft_quantize), *others = models
    assert not others, "one shape, dtype and quantisation a run"
    head = random_models.random_head(shape, dtype, draft_quantize) if any(case.tree for case in cases) else None
    return random_models.random_target(shape, dtype, quantize), head


def run(arguments: argparse.Namespace) -> Report:
    cases, profile = cases_of(arguments), arguments.profile
    target, head = models_of(cases)
    results = [measure(case, target, head, profile=profile and profile / case.name) for case in cases]
    traces = []
    for folder in (profile / case.name for case in cases) if profile else ():
        launches = profiling.launches_by_name(profiling.gpu_events(folder), GROUP)
        traces.append(f"trace: {folder}\n{profiling.launch_table(launches)}")
    headline = "ms a step, drafted by an EAGLE-3 head, random weights, acceptance about 0"
    return Report(headline, COLUMNS, results, "\n".join(traces), marks=list(map(_mark, results)))


def _mark(result: Timing) -> Mark:
    case = result.case
    panel = f"context {case.context}, page size {case.page_size}" + f", {case.idle} rows idle" * bool(case.idle)
    return Mark(panel, tree_label(case.tree), case.batch, result.milliseconds, result.floor)


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
