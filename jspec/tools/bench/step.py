"""`jspec bench step`: time of one decoding step for a shape with random weights, beside its least possible time.

The compiled step runs without an engine, and almost no draft is accepted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, tree_map_with_path

from jspec.core.records import LayerState, SlotState
from jspec.core.tree import ROOT_ONLY, Tree
from jspec.draft.auto import DRAFTERS
from jspec.draft.base import Drafter, NoDraft
from jspec.draft.dflash_head import DFlashHead
from jspec.draft.eagle_head import EagleHead
from jspec.models.adapters import empty_tables
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.tensor_parallel import mesh_of, place
from jspec.step.decode import spec_step
from jspec.step.on_mesh import make_state, shapes_of, step_on
from jspec.step.program import Params, Program
from jspec.tools.bench import profiling, random_models, roofline
from jspec.tools.bench.options import tree_name
from jspec.tools.bench.results import Column, Results
from pallas_kernels.layers.weights import FORMATS, Kind

GROUP = 32  # steps dispatched between two looks at the clock; only the first one finds an idle device
GROUPS = 12
UNHINDERED = 8  # first dispatches of a group, in which the host does not yet wait for the device
WARM_UP = 3
RANK = 16  # of adapters


@dataclass(frozen=True)
class StepCase:
    """The model, batch and settings of one measured step."""

    shape: Annotated[str, Column("shape")]  # name of a shape in `random_models`
    batch: Annotated[int, Column("batch")]  # number of batch rows
    context: Annotated[int, Column("context")]  # committed tokens of a row
    tree: Annotated[Tree | None, Column("tree", tree_name)]  # tree drafted by a head; None: plain decoding
    page_size: Annotated[int, Column("page")] = 16
    dtype: Annotated[str, Column("dtype")] = "bfloat16"
    implementation: str = "auto"
    greedy: bool = True
    quantize: Annotated[Kind | None, Column("weights")] = None  # quantisation of target and head
    draft_quantize: Annotated[Kind | None, Column("head")] = None  # quantisation of the head alone; None: as the target
    kv_dtype: Annotated[str | None, Column("cache")] = None  # dtype of both caches; None: `dtype`
    idle: Annotated[int, Column("idle")] = 0  # number of batch rows without a request
    # Depth at which a step cuts the tree, 0: nothing is drafted; None: the tree's depth.
    depth: Annotated[int | None, Column("depth")] = None
    nodes: Annotated[int | None, Column("nodes")] = None  # draft nodes verified per row, on average; None: all
    drafter: Annotated[str, Column("drafter")] = "eagle3"  # kind of the head, by its name in `random_models.HEADS`
    deterministic: bool = False
    tensor_parallel: Annotated[int, Column("devices")] = 1  # number of devices over which weights are divided
    adapters: Annotated[int, Column("adapters")] = 0  # tables of rank `RANK`, from which the rows choose in turn

    tree_depth = property(lambda self: self.tree.depth if self.tree else 0)


@dataclass(frozen=True)
class Timing:
    """The measured and least times of a case's step."""

    case: StepCase
    milliseconds: Annotated[float, Column("ms", ".3f")]  # median time of a step
    spread: Annotated[float, Column("p90-p10", ".3f")]  # 90th less 10th percentile, milliseconds
    floor: Annotated[float | None, Column("floor", ".3f")]  # least time of a step, milliseconds; None: unknown device
    ratio: Annotated[float | None, Column("ratio", ".2f")]  # measured over least time
    clock: profiling.GpuClock | None  # clock of the GPU, during further steps that are not timed
    tokens: Annotated[float, Column("tokens", ".2f")]  # mean number of tokens emitted a step and row
    host: Annotated[float, Column("host ms", ".2f")]  # median time in which the host dispatches a step, milliseconds


def build(case: StepCase, target: Model, head: EagleHead | DFlashHead | None) -> tuple[Program, Params, PoolShape]:
    """Return the program, weights and pool shape of a case; the models may hold shapes in place of arrays."""
    if not 0 <= case.idle < case.batch:
        raise ValueError(f"idle: expected 0 to {case.batch - 1} of a batch of {case.batch} rows, got {case.idle}")
    assert case.tree is None or head is not None
    drafter: Drafter = DRAFTERS[head.config.method](head, case.tree) if head and case.tree else NoDraft()
    mesh = mesh_of(case.tensor_parallel) if case.tensor_parallel > 1 else None
    if mesh is not None:
        target, drafter = place(target, mesh), drafter.on_mesh(mesh)
    program = Program(
        drafter=drafter,
        feature_layers=drafter.feature_layers(target),
        accept="coupled",
        implementation=case.implementation,
        deterministic=case.deterministic,
        nodes=case.nodes,
        mesh=mesh,
        divides_logits=mesh is not None,  # no row cuts or edits logits
        adapted=case.adapters > 0,
    )
    max_len = case.context + GROUP * (case.tree_depth + 1) + 1
    pool = PoolShape(case.batch, 2, case.page_size, max_len, *(case.kv_dtype or case.dtype,) * 2)
    pool = replace(pool, round_rows=drafter.tree.nodes, state_dtype=case.dtype)
    pool = replace(pool, pages=case.batch * pool.width(drafter.tree) + 1)
    params = Params(target=target, draft=drafter.bind(target))
    params = params if mesh is None else place(params, mesh)
    tables = empty_tables(target, case.adapters, RANK) if case.adapters else None
    return program, replace(params, adapters=tables), pool


def compile_step(program: Program, params: Params, state: Any, batch: int) -> Any:
    """Compile a step that takes params, state and slots [batch]."""
    arguments = shapes_of((params, state, jax.ShapeDtypeStruct((batch,), jnp.int32)), program.mesh)
    on_devices = step_on(program.mesh, partial(spec_step, program), params, divides_logits=program.divides_logits)
    lowered = jax.jit(on_devices, donate_argnums=(1,)).lower(*arguments)
    return lowered.compile(compiler_options=program.compiler_options)


class Group(NamedTuple):
    """What a group of steps took."""

    milliseconds: float  # per step
    tokens: float  # that an active row emitted in the last step, on average
    host: float  # milliseconds in which the host dispatched one of the first steps


class StepTimer:
    """A timer of steps; each call times a group of steps that are dispatched without waiting for results."""

    def __init__(self, executable: Any, params: Params, state: SlotState, case: StepCase) -> None:
        self.executable, self.params, self.state, self.case = executable, params, state, case

    def __call__(self) -> Group:
        """Run `GROUP` steps, starting with ``case.context`` committed tokens in each row."""
        case, state = self.case, self.state
        slots = jnp.arange(case.batch, dtype=jnp.int32)
        lengths = jnp.full(case.batch, case.context, jnp.int32)
        slots, lengths = (jax.device_put(array, self.state.root.sharding) for array in (slots, lengths))
        state = replace(state, lengths=lengths)
        jax.block_until_ready((state, slots))
        began = time.perf_counter()
        for index in range(GROUP):
            state, output = self.executable(self.params, state, slots)
            if index < UNHINDERED:
                host = (time.perf_counter() - began) / (index + 1)
        jax.block_until_ready((state, output))
        ended = time.perf_counter()
        self.state = state
        tokens = float(np.asarray(output.report)[..., -4].sum()) / (case.batch - case.idle)
        return Group((ended - began) / GROUP * 1e3, tokens, host * 1e3)


def measure(
    case: StepCase, target: Model, head: EagleHead | DFlashHead | None, *, profile: Path | None = None
) -> Timing:
    """Compile a case's step and return its median time over groups of steps, in milliseconds."""
    program, params, pool = build(case, target, head)
    state = filled_state(make_state(program, params, pool), case)
    if case.depth is not None:
        program = replace(program, drafter=program.drafter.cut(case.depth))
    run = StepTimer(compile_step(program, params, state, case.batch), params, state, case)
    ((*groups,),) = profiling.time_in_turns([run], GROUPS, warm_up=WARM_UP)
    times, emitted, host = zip(*groups, strict=True)
    clock = profiling.watch_clock(run)
    if profile is not None:
        with jax.profiler.trace(str(profile)):
            run()
    middle, deciles, floor = statistics.median(times), statistics.quantiles(times, n=10), floor_milliseconds(case)
    ratio, spread = None if floor is None else middle / floor, deciles[-1] - deciles[0]
    return Timing(case, middle, spread, floor, ratio, clock, statistics.fmean(emitted), statistics.median(host))


def floor_milliseconds(case: StepCase) -> float | None:
    """Return the least milliseconds of a case's step without adapters, a token a row; None: the device is unknown."""

    def widths(quantize: Kind | None) -> roofline.Widths:
        cache = jnp.dtype(case.kv_dtype or "bfloat16").itemsize
        form = None if quantize is None else FORMATS[quantize]
        if form is not None and form.group is not None and not form.is_dense:
            return roofline.Widths(2, form.value_bytes + 1 / form.group, cache)  # a scale has a byte
        width = 2 if form is None else form.value_bytes
        return roofline.Widths(width, None, cache, speed=1 + (quantize == "fp8_dynamic"))

    tree, rows = case.tree or ROOT_ONLY, case.batch - case.idle
    tree = tree if case.depth is None else tree.cut(case.depth)
    target, draft_widths = random_models.target_config(case.shape), widths(case.draft_quantize or case.quantize)
    packed = None if case.nodes is None else rows * (1 + case.nodes)
    point = rows, tree.nodes, case.context, widths(case.quantize)
    costs = roofline.verify_costs(target, *point, rows=packed)
    layers = target.num_layers  # that run in a step
    if tree.depth:
        head = random_models.head_config(case.shape, case.drafter)
        costs += roofline.head_costs(head, rows, tree, case.context, draft_widths)
        layers += head.num_layers * (tree.depth if case.drafter in ("eagle3", "gemma4_assistant") else 1)
    seconds = roofline.seconds(costs, devices=case.tensor_parallel, sums=2 * layers)
    return None if seconds is None else seconds * 1e3


def filled_state(state: SlotState, case: StepCase) -> SlotState:
    """Return the state with an active request, random keys, values and root token in every slot but the idle ones."""
    width, rng, rows = state.page_table.shape[1], np.random.default_rng(0), case.batch

    def fill(part: Any) -> Any:
        def noise(path: Any, x: jax.Array) -> jax.Array:
            values = 0.1 * jax.random.normal(jax.random.key(x.size), x.shape, x.dtype)
            return -abs(values) if path[-1] == GetAttrKey("decays") else values  # logarithms of decays below 1

        return tree_map_with_path(noise, part) if isinstance(part, LayerState) else part

    target, draft = jax.tree.map(fill, (state.target, state.draft), is_leaf=lambda part: isinstance(part, LayerState))
    temperature = state.sampling.temperature if case.greedy else state.sampling.temperature + 1
    cap = jnp.full(rows, max(case.tree_depth, 1), jnp.int32)
    adapter = 1 + jnp.arange(rows, dtype=jnp.int32) % case.adapters if case.adapters else state.sampling.adapter
    filled = replace(
        state,
        root=jnp.asarray(rng.integers(0, random_models.target_config(case.shape).vocab_size, rows), jnp.int32),
        active=jnp.arange(rows) < rows - case.idle,
        remaining=jnp.full(rows, 2**30, jnp.int32),
        page_table=jnp.asarray(1 + np.arange(rows * width).reshape(rows, width), jnp.int32),
        sampling=replace(state.sampling, temperature=temperature, draft_cap=cap, adapter=adapter),
        target=target,
        draft=draft,
    )
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), filled, state)


def cases_of(arguments: argparse.Namespace) -> list[StepCase]:
    """Return the cases that the parsed command line asks for."""
    options = vars(arguments) | {"shape": arguments.shape or random_models.default_shape()}
    options["greedy"] = not options.get("sampled")
    first = ("shape", "page_size", "context", "batch", "tree")  # varies slowest
    names = [*first, *(field.name for field in fields(StepCase) if field.name in options and field.name not in first)]
    values = [options[name] if isinstance(options[name], (list, tuple)) else [options[name]] for name in names]
    return [StepCase(**dict(zip(names, choice, strict=True))) for choice in product(*values)]


def models_of(cases: Sequence[StepCase]) -> tuple[Model, Any]:
    """Return a random target, and a random head if a case drafts; all cases have the first one's settings."""
    first, drafts = cases[0], any(case.tree for case in cases)
    quantize = first.draft_quantize or first.quantize
    head = random_models.random_head(first.shape, first.dtype, quantize, method=first.drafter) if drafts else None
    mesh = mesh_of(first.tensor_parallel) if first.tensor_parallel > 1 else None
    return random_models.random_target(first.shape, first.dtype, first.quantize, mesh=mesh), head


def run(arguments: argparse.Namespace) -> Results:
    cases, profile = cases_of(arguments), arguments.profile
    folders = [profile and profile / str(number) for number in range(1, len(cases) + 1)]

    def traces(results: Sequence[Timing]) -> str:
        return "\n".join(f"trace: {folder}\n{profiling.launches_of(folder, GROUP)}" for folder in folders if profile)

    def timings() -> Iterator[Timing]:
        for _, group in groupby(zip(cases, folders, strict=True), lambda pair: pair[0].shape):
            pairs = list(group)
            target, head = models_of([case for case, _ in pairs])
            yield from (measure(case, target, head, profile=folder) for case, folder in pairs)
            del target, head  # the next shape needs the memory

    return Results("ms a step, random weights, acceptance about 0", timings(), traces, count=len(cases))
