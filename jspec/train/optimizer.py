"""The optimisers, and the learning rate over a run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jspec.train.config import TrainConfig

OUTPUTS = {"head", "output"}  # fields of a head whose rows are tokens
RMS = 0.2  # root mean square of Muon's changes at a learning rate of 1, about that of AdamW's


def learning_rate(config: TrainConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by the number of updates: a linear rise, then a cosine down to a part of the rate."""
    rising = round(config.warmup * steps)

    def rate(count: Any) -> Any:
        done = count + 1
        falling = jnp.clip((done - rising) / max(steps - rising, 1), 0, 1)
        part = config.final + (1 - config.final) * (1 + jnp.cos(jnp.pi * falling)) / 2
        return config.learning_rate * part * jnp.minimum(done / max(rising, 1), 1)

    return rate


def optimizer(config: TrainConfig, steps: int) -> optax.GradientTransformation:
    """Return the optimiser of a run, which limits the norm of gradients first.

    "adamw" is AdamW (arXiv:1711.05101). "muon" is Muon (arXiv:2502.16982) for matrices, and AdamW with Nesterov's
    momentum for norms, biases and output heads.
    """
    rate, decay = learning_rate(config, steps), config.weight_decay
    if config.optimizer == "adamw":
        changes = optax.adamw(rate, config.beta1, config.beta2, weight_decay=decay)
    else:
        changes = optax.contrib.muon(
            rate,
            weight_decay=decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            adam_weight_decay=decay,
            consistent_rms=RMS,
            muon_weight_dimension_numbers=_matrices,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), changes)


def _matrices(weights: Any) -> Any:
    """Return the axes of each matrix [out, in] but output heads, and None for the other weights."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)

    def of(path: tuple[Any, ...], value: Any) -> Any:
        return axes if value.ndim == 2 and getattr(path[-1], "name", None) not in OUTPUTS else None

    return jax.tree_util.tree_map_with_path(of, weights)
