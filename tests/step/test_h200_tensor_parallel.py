"""A round on two H200s, compiled without them: one CUDA graph, whose exchanges are kernels, and no copies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jspec import Eagle3, Model
from jspec.draft.base import Drafter, NoDraft
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.models.kv_cache import PoolShape
from jspec.models.params import abstract_weights, model_params
from jspec.models.tensor_parallel import place, state_layout
from jspec.step.decode import spec_step
from jspec.step.on_mesh import on_one, step_on
from jspec.step.program import KERNELS_IN_GRAPHS, Params, Program, init_state
from jspec.tools.bench import random_models as shapes
from pallas_kernels.layers.shard import AXIS
from tests.support.h200 import H200Program, compile_for_h200, h200_mesh

LAYERS = 2
POOL = PoolShape(1, 66, 16, 1030, "bfloat16", "bfloat16")
BOOKKEEPING = ("kAsyncStart", "kAsyncDone")  # of a collective kernel; nothing is launched for them
COLLECTIVES = ("kCollectiveKernel", "kAllGather")


def target() -> Model:
    """Return the shapes of an 8B target cut to two layers."""
    config = shapes.TARGETS["llama3-8b"]
    config = replace(config, layers=config.layers[:LAYERS])
    return Model.from_weights(config, abstract_weights(model_params(config), "bfloat16"))


def head() -> EagleHead:
    config = replace(shapes.head_config("llama3-8b"), feature_layers=(0, 1, 2))
    return EagleHead.from_weights(config, abstract_weights(head_params(config), "bfloat16"))


def build(drafter: Drafter, mesh: Mesh | None) -> tuple[Program, Params, Any]:
    """Return a program, and the shapes of its parameters and of its state on a mesh."""
    whole = target()
    program = Program(drafter, drafter.feature_layers(whole), "coupled", "auto", mesh=mesh)
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


def compile_round(drafter: Drafter, mesh: Mesh | None) -> tuple[H200Program, Any]:
    program, params, state = build(drafter, mesh)
    slots = jax.ShapeDtypeStruct((1,), "int32")
    step, options = step_on(mesh, partial(spec_step, program), params), program.compiler_options
    compiled = compile_for_h200(step, params, state, slots, donate_argnums=1, options=options, mesh=mesh)
    return compiled, state


def launches(program: H200Program) -> int:
    return sum(launch.kind not in BOOKKEEPING for launch in program.launches)


@pytest.mark.skipif(jax.__version_info__ < KERNELS_IN_GRAPHS, reason="needs jax 0.12, whose exchanges are in graphs")
@pytest.mark.parametrize(
    ("drafter", "exchanges", "more"),
    [
        (NoDraft(), 2 * LAYERS + 1, 0),  # two sums a layer, and the logits
        # Also two sums and the logits of each of the head's four passes, and the fused features.
        pytest.param("chain:4", 2 * LAYERS + 1 + 4 * 3 + 1, 2, marks=pytest.mark.long),
    ],
)
def test_round_on_two_gpus_is_one_graph_with_a_launch_more_for_each_exchange(
    drafter: Drafter | str, exchanges: int, more: int
) -> None:
    made = Eagle3(head(), drafter) if isinstance(drafter, str) else drafter
    one, _ = compile_round(made, None)
    two, state = compile_round(made, Mesh(h200_mesh(2).devices, (AXIS,)))
    assert len(two.graphs) == 1 and not two.outside_graphs
    assert sum(launch.kind in COLLECTIVES for launch in two.launches) == exchanges
    assert launches(two) <= launches(one) + exchanges + more
    assert not two.copies(1 << 20)
    local = sum(leaf.dtype.itemsize * _size(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state))
    assert two.alias_bytes == local


@pytest.mark.long
def test_round_on_a_mesh_of_one_gpu_has_the_launches_of_the_default_device() -> None:
    default, _ = compile_round(NoDraft(), None)
    given, _ = compile_round(NoDraft(), Mesh(h200_mesh(1).devices, (AXIS,)))
    assert len(given.graphs) == 1 and not given.outside_graphs
    assert [launch.kind for launch in given.launches] == [launch.kind for launch in default.launches]
    assert given.alias_bytes == default.alias_bytes and not given.copies(1 << 20)


def _size(shape: tuple[int, ...]) -> int:
    return jax.ShapeDtypeStruct(shape, "int8").size
