"""A round on several H200s, compiled without them: one CUDA graph, whose exchanges are kernels, and no copies."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec import Eagle3, Model
from jspec.draft.base import Drafter, NoDraft
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.params import abstract_weights, model_params
from jspec.models.weights.tensor_parallel import place, state_layout
from jspec.step.decode import spec_step
from jspec.step.on_mesh import on_one, step_on
from jspec.step.program import KERNELS_IN_GRAPHS, Params, Program, init_state
from jspec.step.program_memory import exchange_bytes
from jspec.tools.bench import random_models as shapes
from pallas_kernels.layers.shard import AXIS
from pallas_kernels.sampling.threshold import SLICE
from tests.support.h200 import H200Program, compile_for_h200, h200_mesh

LAYERS = 2
POOL = PoolShape(1, 66, 16, 1030, "bfloat16", "bfloat16", state_dtype="bfloat16")
BOOKKEEPING = ("kAsyncStart", "kAsyncDone")  # of a collective kernel; nothing is launched for them
COLLECTIVES = ("kCollectiveKernel", "kAllGather")


def target(shape: str) -> Model:
    """Return the shapes of a target cut to its last two layers."""
    config = shapes.TARGETS[shape]
    config = replace(config, layers=config.layers[-LAYERS:])
    return Model.from_weights(config, abstract_weights(model_params(config), "bfloat16"))


def head() -> EagleHead:
    config = replace(shapes.head_config("llama3-8b"), feature_layers=(0, 1, 2))
    return EagleHead.from_weights(config, abstract_weights(head_params(config), "bfloat16"))


def build(
    drafter: Drafter, mesh: Mesh | None, *, divides_logits: bool, shape: str = "llama3-8b"
) -> tuple[Program, Params, Any]:
    """Return a program, and the shapes of its parameters and of its state on a mesh."""
    whole = target(shape)
    layers = drafter.feature_layers(whole)
    program = Program(drafter, layers, "coupled", "auto", mesh=mesh, divides_logits=divides_logits)
    if mesh is None:
        params = Params(whole, drafter.bind(whole))
        return program, params, jax.eval_shape(lambda p: init_state(program, p, POOL), params)
    whole, drafter = place(whole, mesh), drafter.on_mesh(mesh)
    params = place(Params(whole, drafter.bind(whole)), mesh)
    one, local = on_one(program, params)
    state = jax.eval_shape(lambda p: init_state(one, p, POOL), local)

    def of_all(spec: P, own: Any) -> Any:
        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            sizes = list(leaf.shape)
            for axis in (axis for axis, name in enumerate(spec) if name == AXIS):
                sizes[axis] *= mesh.size
            return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(shape, own)

    return program, params, jax.tree.map(of_all, state_layout(state), state, is_leaf=lambda node: isinstance(node, P))


@cache
def compile_round(
    tree: str | None, devices: int, *, divides_logits: bool = True, on_mesh: bool = False, shape: str = "llama3-8b"
) -> tuple[H200Program, Any]:
    """Return a compiled round with an EAGLE-3 head and a tree, or without a draft, and the shapes of its state.

    It is on a mesh if it has several devices, or if `on_mesh`.
    """
    mesh = Mesh(h200_mesh(devices).devices, (AXIS,)) if devices > 1 or on_mesh else None
    drafter = NoDraft() if tree is None else Eagle3(head(), tree)
    program, params, state = build(drafter, mesh, divides_logits=mesh is not None and divides_logits, shape=shape)
    slots = jax.ShapeDtypeStruct((1,), "int32")
    step = step_on(mesh, partial(spec_step, program), params, divides_logits=program.divides_logits)
    options = program.compiler_options
    compiled = compile_for_h200(step, params, state, slots, donate_argnums=1, options=options, mesh=mesh)
    return compiled, state


def launches(program: H200Program) -> int:
    return sum(launch.kind not in BOOKKEEPING for launch in program.launches)


def exchanged_sizes(program: H200Program) -> set[int]:
    """Return all sizes in the shapes of arrays that are exchanged."""
    text = program.compiled.as_text() or ""
    shapes = re.findall(r"= \(?(.*)\)? (?:all-gather|all-reduce)(?:-start)?\(", text)
    assert shapes
    return {int(size) for shape in shapes for sizes in re.findall(r"\[([\d,]+)\]", shape) for size in sizes.split(",")}


# Sizes of the vocabulary, of the draft vocabulary, and of each device's part of them.
WIDTHS = {size // devices for size in (128256, 32000) for devices in (1, 2, 4, 8)}

needs_kernels = pytest.mark.skipif(
    jax.__version_info__ < KERNELS_IN_GRAPHS, reason="needs jax 0.12, whose exchanges are in graphs"
)


@needs_kernels
@pytest.mark.parametrize(
    ("tree", "devices", "exchanges", "more"),
    [
        # Two sums a layer, and the tokens. Two more launches compute the device's first token id.
        (None, 2, 2 * LAYERS + 1, 2),
        # Also two sums and the tokens of each of the head's four passes, and the fused features.
        pytest.param("chain:4", 2, 2 * LAYERS + 1 + 4 * 3 + 1, 4, marks=pytest.mark.long),
        pytest.param(None, 4, 2 * LAYERS + 1, 2, marks=pytest.mark.long),
        pytest.param(None, 8, 2 * LAYERS + 1, 2, marks=pytest.mark.long),
        # XLA divides the sums of the smallest products, and adds up the parts in a launch of its own.
        pytest.param("chain:4", 8, 2 * LAYERS + 1 + 4 * 3 + 1, 14, marks=pytest.mark.long),
    ],
)
def test_round_on_several_gpus_is_one_graph_with_a_launch_more_for_each_exchange(
    tree: str | None, devices: int, exchanges: int, more: int
) -> None:
    one, _ = compile_round(tree, 1)
    many, state = compile_round(tree, devices)
    assert len(many.graphs) == 1 and not many.outside_graphs
    assert sum(launch.kind in COLLECTIVES for launch in many.launches) == exchanges
    assert launches(many) <= launches(one) + exchanges + more
    assert not many.copies(1 << 20)
    local = sum(leaf.dtype.itemsize * _size(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state))
    assert many.alias_bytes == local


@needs_kernels
def test_round_of_a_hybrid_on_two_gpus_is_one_graph_with_the_kernels_of_states() -> None:
    program, state = compile_round(None, 2, shape="qwen3.8-27b")
    assert len(program.graphs) == 1 and not program.outside_graphs and not program.copies(1 << 20)
    assert sum(launch.kind == "kCustomCall" for launch in program.launches) == 3, "inputs, nodes and fold of one layer"
    local = sum(leaf.dtype.itemsize * _size(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state))
    assert program.alias_bytes == local


@needs_kernels
@pytest.mark.parametrize(
    "tree", [None, *(pytest.param(tree, marks=pytest.mark.long) for tree in ("chain:4", "topk:60,8,10"))]
)
def test_round_on_two_gpus_exchanges_no_logits_by_kernels_alone(tree: str | None) -> None:
    divided, _ = compile_round(tree, 2)
    assert not exchanged_sizes(divided) & WIDTHS
    assert not any(launch.kind == "kAllGather" for launch in divided.launches)
    gathered, _ = compile_round(tree, 2, divides_logits=False)
    assert exchanged_sizes(gathered) & WIDTHS, "control"
    assert any(launch.kind == "kAllGather" for launch in gathered.launches), "control"


@needs_kernels
def test_exchanges_keep_two_buffers_for_two_parts_of_each_sum_in_bfloat16_and_for_the_best_tokens() -> None:
    program, _ = compile_round(None, 2)
    words = 2 * math.ceil(128256 / 2 / SLICE)
    assert exchange_bytes(program.compiled.as_text() or "", 2) == 2 * (2 * 2 * LAYERS * 2 * 4096 + 4 * words)


@pytest.mark.long
def test_round_on_a_mesh_of_one_gpu_has_the_launches_of_the_default_device() -> None:
    default, _ = compile_round(None, 1)
    meshed, _ = compile_round(None, 1, on_mesh=True)
    assert len(meshed.graphs) == 1 and not meshed.outside_graphs
    assert [launch.kind for launch in meshed.launches] == [launch.kind for launch in default.launches]
    assert meshed.alias_bytes == default.alias_bytes and not meshed.copies(1 << 20)


def _size(shape: tuple[int, ...]) -> int:
    return jax.ShapeDtypeStruct(shape, "int8").size
