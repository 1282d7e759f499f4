"""Test arrays that go from some devices to others without the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jspec.models.exchange import from_names
from jspec.models.parts.transfer import moved, on_one
from jspec.models.weights.tensor_parallel import place
from tests.models.test_exchange import tensors_of
from tests.support import tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

VALUES = np.arange(48, dtype=np.float32).reshape(4, 12)


def over(spec: P, *devices: int) -> Sharding:
    """Return how arrays are divided over the devices of these numbers, a trainer's axis of which is named "fsdp"."""
    return NamedSharding(Mesh(np.array([jax.devices()[number] for number in devices]), ("fsdp",)), spec)


ROWS, COLUMNS, WHOLE = P("fsdp"), P(None, "fsdp"), P()
SHARDINGS = {
    "one": SingleDeviceSharding,
    "rows": lambda _: over(ROWS, 0, 1),
    "columns": lambda _: over(COLUMNS, 0, 1),
    "reversed": lambda _: over(COLUMNS, 1, 0),
    "others": lambda _: over(ROWS, 2, 3),
    "whole": lambda _: over(WHOLE, 1, 2),
    "one of a mesh": lambda _: over(ROWS, 3),
}


@contextlib.contextmanager
def without_the_host() -> Iterator[None]:
    """Let transfers between the host and devices fail; on a CPU no guard of jax sees those to the host."""

    def fail(array: jax.Array) -> None:
        raise AssertionError("an array came to the host")

    kind = type(on_device(VALUES))
    with pytest.MonkeyPatch.context() as patch, jax.transfer_guard_host_to_device("disallow_explicit"):
        patch.setattr(kind, "_value", property(fail))
        yield


@pytest.mark.parametrize("source", SHARDINGS)
def test_array_goes_to_any_devices_without_the_host(source: str) -> None:
    shardings = {name: make(jax.devices()[0]) for name, make in SHARDINGS.items()}
    array = jax.device_put(VALUES, shardings[source])
    with without_the_host():
        results = {name: moved(array, sharding) for name, sharding in shardings.items()}
        whole = on_one(array)
    np.testing.assert_array_equal(whole, VALUES)
    assert len(whole.devices()) == 1
    for name, result in results.items():
        np.testing.assert_array_equal(result, VALUES)
        assert result.sharding.is_equivalent_to(shardings[name], 2)


def trainers() -> dict[str, Mesh]:
    """Return meshes over which a trainer may have its weights; by default `jax.make_mesh` makes explicit axes."""
    pair = jax.devices()[:2]
    explicit = jax.make_mesh((2,), ("fsdp",), (AxisType.Explicit,), devices=pair)
    return {"automatic": Mesh(np.array(pair), ("fsdp",)), "explicit": explicit, "engine": engine()}


def engine() -> Mesh:
    return Mesh(np.array(jax.devices()[2:4]), ("model",))


def divided(tree: Any, mesh: Mesh, axis: int) -> Any:
    """Return arrays that are divided along an axis, if they have it with an even size."""

    def spread(leaf: Any) -> Any:
        is_even = leaf.ndim > axis and leaf.shape[axis] % 2 == 0
        return jax.device_put(leaf, NamedSharding(mesh, P(*[None] * axis, mesh.axis_names[0]) if is_even else P()))

    return jax.tree.map(spread, tree)


@pytest.mark.parametrize("trainer", [None, "automatic", "explicit", "engine"])
def test_model_of_a_mesh_goes_to_another_without_the_host(trainer: str | None) -> None:
    """Rows of its matrices get another order there, and a vocabulary of 15 is padded."""
    model = tiny.model(15, layers=1)
    wanted = place(model, engine())
    for axis in (0, 1):
        source = model if trainer is None else divided(model, trainers()[trainer], axis)
        with without_the_host():
            result = place(source, engine())
        for leaf, other in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(leaf, other)
            assert leaf.sharding == other.sharding


@pytest.mark.parametrize("trainer", ["automatic", "explicit", "engine"])
def test_arrays_of_a_mesh_by_name_become_a_model(trainer: str, golden: Path) -> None:
    folder = golden / "families" / "llama"
    wanted, arrays = tiny.load_target(folder), tensors_of(folder)
    for axis in (0, 1):
        result = from_names(divided(arrays, trainers()[trainer], axis), wanted.config, "float32")
        jax.tree.map(np.testing.assert_array_equal, result, wanted)


def test_control_that_jax_sends_divided_arrays_through_the_host() -> None:
    array = jax.device_put(on_device(VALUES), over(ROWS, 0, 1))
    with without_the_host(), pytest.raises(AssertionError, match="the host"):
        jax.device_put(array, over(COLUMNS, 2, 3))
