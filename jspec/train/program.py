"""The compiled programs: an update, and an evaluation. The target, the loss and the optimiser are one program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jspec.models.decoder import Model
from jspec.train.measured import Measured
from jspec.train.method import Method
from jspec.train.observe import observe
from jspec.train.optimizer import optimizer
from jspec.train.rows import Rows


@struct.dataclass
class TrainState:
    """All that an update changes.

    Attributes:
        weights: the trained weights of the head in float32; its other fields are None.
        optimizer: state of the optimiser.
        step: number of updates.
    """

    weights: Any
    optimizer: Any
    step: Int[Array, ""]


@struct.dataclass
class UpdateReport:
    """What an update reports: what was measured, and whether loss and gradient were finite numbers."""

    measured: Measured
    is_finite: Bool[Array, ""]


AXIS = "rows"  # axis of the mesh, over which the rows of a batch are divided


def mesh_of(devices: int) -> Mesh | None:
    """Return a mesh of the first devices; None for one device.

    Raises:
        ValueError: there are fewer devices.
    """
    available = jax.devices()
    if devices > len(available):
        raise ValueError(f"train: devices: expected at most {len(available)}, the number of devices, got {devices}")
    return None if devices == 1 else Mesh(np.array(available[:devices]), (AXIS,))


class TrainingProgram:
    """Updates a head's weights, and evaluates them.

    On several devices, each has the target and the weights, and computes the gradient of its rows of a batch; the
    gradients are added up.

    Args:
        method: the method of drafting.
        target: the target.
        head: the head; its trained weights are not kept.
        steps: number of updates of the whole run.
        mesh: devices; None: the default device.
    """

    def __init__(self, method: Method, target: Model, head: Any, steps: int, mesh: Mesh | None = None) -> None:
        config, self._method, self._mesh = method.config, method, mesh
        self._states = method.states(head, target)
        self._optimizer = optimizer(config, steps)
        self.use(target, head)
        self._run: Any = jax.jit(self._divided(self._update), donate_argnums=0)
        self._measure = jax.jit(self._divided(self._measured))

    def use(self, target: Model, head: Any) -> None:
        """Let later updates run with a target of the same shapes, and with the parts of a head that are not trained."""
        self._fixed = self._everywhere((target, {name: getattr(head, name) for name in self._method.frozen}))

    def start(self, head: Any) -> TrainState:
        """Return the state before the first update."""
        weights = self._method.split(head)[0]
        return self._everywhere(TrainState(weights, self._optimizer.init(weights), jnp.zeros((), jnp.int32)))

    def head(self, state: TrainState) -> Any:
        """Return the head with its trained weights."""
        return state.weights.replace(**self._fixed[1])

    def update(self, state: TrainState, rows: Rows) -> tuple[TrainState, UpdateReport]:
        """Make one update; the given state's arrays are reused. A loss that is not finite leaves the weights as is."""
        return self._run(state, *self._fixed, self._divide(rows))

    def measure(self, state: TrainState, rows: Rows) -> Measured:
        """Measure the weights without changing them."""
        return self._measure(state, *self._fixed, self._divide(rows))

    def _everywhere(self, tree: Any) -> Any:
        return tree if self._mesh is None else jax.device_put(tree, NamedSharding(self._mesh, P()))

    def _divide(self, rows: Rows) -> Rows:
        return rows if self._mesh is None else jax.device_put(rows, NamedSharding(self._mesh, P(AXIS)))

    def _divided(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose last argument, rows, is divided over the devices; all others are on each device."""
        if self._mesh is None:
            return function
        specs = (P(), P(), P(), P(AXIS))
        return jax.shard_map(function, mesh=self._mesh, in_specs=specs, out_specs=P(), check_vma=False)

    def _sum(self, tree: Any) -> Any:
        """Add up the values of all devices."""
        return tree if self._mesh is None else jax.lax.psum(tree, AXIS)

    def _keys(self, step: Array, rows: Rows) -> Array:
        """Return the key of the random numbers of each row; it does not depend on the number of devices."""
        count = rows.tokens.shape[0]
        first = 0 if self._mesh is None else jax.lax.axis_index(AXIS) * count
        key = jax.random.fold_in(jax.random.key(self._method.config.seed), step)
        return jax.vmap(partial(jax.random.fold_in, key))(first + jnp.arange(count))

    def _update(self, state: TrainState, target: Model, rest: Any, rows: Rows) -> tuple[TrainState, UpdateReport]:
        seen = observe(target, rows, self._states)
        size = self._method.columns(rows.tokens.shape[0] * (1 if self._mesh is None else self._mesh.size))

        def loss(weights: Any) -> tuple[Array, Measured]:
            keys = self._keys(state.step, rows)
            return self._method.loss(weights.replace(**rest), target, seen, rows, keys)

        outputs, gradient = jax.value_and_grad(loss, has_aux=True)(state.weights)
        (value, measured), gradient = self._sum((outputs, gradient))
        value, gradient = jax.tree.map(lambda x: x / size, (value, gradient))  # in float32; small terms are not lost
        is_finite = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(gradient))
        changes, optimizer = self._optimizer.update(gradient, state.optimizer, state.weights)
        new = TrainState(optax.apply_updates(state.weights, changes), optimizer, state.step + 1)
        kept = jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, state)
        return kept, UpdateReport(measured, is_finite)

    def _measured(self, state: TrainState, target: Model, rest: Any, rows: Rows) -> Measured:
        seen = observe(target, rows, self._states)
        keys = self._keys(jnp.zeros((), jnp.int32), rows)
        return self._sum(self._method.loss(state.weights.replace(**rest), target, seen, rows, keys)[1])
