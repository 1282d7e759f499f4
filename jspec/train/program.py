"""The compiled programs: an update, and an evaluation. The target, the loss and the optimiser are one program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Int

from jspec.models.decoder import Model
from jspec.train.config import TrainConfig
from jspec.train.measured import Measured
from jspec.train.methods import Method
from jspec.train.observe import observe
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
class Report:
    """What an update reports: what was measured, and whether loss and gradient were finite numbers."""

    measured: Measured
    is_finite: Bool[Array, ""]


def learning_rate(config: TrainConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by the number of updates: a linear rise, then a cosine down to a part of the rate."""
    rising = round(config.warmup * steps)

    def rate(count: Any) -> Any:
        done = count + 1
        falling = jnp.clip((done - rising) / max(steps - rising, 1), 0, 1)
        part = config.final + (1 - config.final) * (1 + jnp.cos(jnp.pi * falling)) / 2
        return config.learning_rate * part * jnp.minimum(done / max(rising, 1), 1)

    return rate


class Program:
    """Updates a head's weights, and evaluates them.

    Args:
        method: the method of drafting.
        target: the target.
        head: the head; its weights are not kept.
        steps: number of updates of the whole run.
    """

    def __init__(self, method: Method, target: Model, head: Any, steps: int) -> None:
        config, self._method, self._target = method.config, method, target
        self._states = method.states(head, target)
        adam = optax.adamw(learning_rate(config, steps), config.beta1, config.beta2, weight_decay=config.weight_decay)
        self._optimizer = optax.chain(optax.clip_by_global_norm(config.clip), adam)
        self._rest = {name: getattr(head, name) for name in method.frozen}
        self._run: Any = jax.jit(self._update, donate_argnums=0)
        self._measure = jax.jit(self._measured)

    def start(self, head: Any) -> TrainState:
        """Return the state before the first update."""
        weights = self._method.split(head)[0]
        return TrainState(weights, self._optimizer.init(weights), jnp.zeros((), jnp.int32))

    def head(self, state: TrainState) -> Any:
        """Return the head with its trained weights."""
        return state.weights.replace(**self._rest)

    def update(self, state: TrainState, rows: Rows) -> tuple[TrainState, Report]:
        """Make one update; the given state's arrays are reused. A loss that is not finite leaves the weights as is."""
        return self._run(state, self._target, self._rest, rows)

    def compile(self, state: TrainState, rows: Rows) -> Any:
        """Compile the update for a batch's shape, which `update` takes from then on; return the compiled program."""
        self._run = jax.jit(self._update, donate_argnums=0).lower(state, self._target, self._rest, rows).compile()
        return self._run

    def measure(self, state: TrainState, rows: Rows) -> Measured:
        """Measure the weights without changing them."""
        return self._measure(state, self._target, self._rest, rows)

    def _key(self, step: Array) -> Array:
        return jax.random.fold_in(jax.random.key(self._method.config.seed), step)

    def _update(self, state: TrainState, target: Model, rest: Any, rows: Rows) -> tuple[TrainState, Report]:
        seen = observe(target, rows, self._states)

        def loss(weights: Any) -> tuple[Array, Measured]:
            head = weights.replace(**rest)
            total, measured = self._method.loss(head, target, seen, rows, self._key(state.step))
            return total / rows.tokens.size, measured

        (value, measured), gradient = jax.value_and_grad(loss, has_aux=True)(state.weights)
        is_finite = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(gradient))
        changes, optimizer = self._optimizer.update(gradient, state.optimizer, state.weights)
        new = TrainState(optax.apply_updates(state.weights, changes), optimizer, state.step + 1)
        kept = jax.tree.map(lambda after, before: jnp.where(is_finite, after, before), new, state)
        return kept, Report(measured, is_finite)

    def _measured(self, state: TrainState, target: Model, rest: Any, rows: Rows) -> Measured:
        seen = observe(target, rows, self._states)
        key = jax.random.key(self._method.config.seed)
        return self._method.loss(state.weights.replace(**rest), target, seen, rows, key)[1]
