"""Test the first change of weights by each optimiser, which follows from the gradient alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jspec.train.config import TrainConfig
from jspec.train.optimizer import optimizer
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

RATE = 0.25


@struct.dataclass
class OptimizedWeights:
    fc: Any
    norm: Any
    head: Any
    embed: Any = None  # as a frozen field


def first_change(kind: str, weights: OptimizedWeights, gradient: OptimizedWeights) -> OptimizedWeights:
    config = TrainConfig(optimizer=kind, learning_rate=RATE, warmup=0.0, final=1.0, clip=1e9)
    made = optimizer(config, 4)
    change, _ = made.update(gradient, made.init(weights), weights)
    return change  # type: ignore[return-value]


@pytest.fixture
def gradient() -> OptimizedWeights:
    rng = np.random.default_rng(0)
    return OptimizedWeights(*(on_device(rng.normal(size=size), jnp.float32) for size in ((6, 20), (6,), (30, 6))))


def test_muon_makes_matrices_orthogonal_and_leaves_norms_and_output_heads_to_adamw(gradient: OptimizedWeights) -> None:
    change = first_change("muon", gradient.replace(embed=None), gradient)
    u, values, v = np.linalg.svd(np.asarray(gradient.fc), full_matrices=False)
    size = RATE * 0.2 * np.sqrt(20)
    found = -np.asarray(change.fc) / size
    # Five steps of Newton and Schulz bring each singular value near 1 and keep the singular vectors.
    rotated = u.T @ found @ v.T
    np.testing.assert_allclose(rotated - np.diag(np.diag(rotated)), 0, atol=1e-3)
    assert ((np.diag(rotated) > 0.6) & (np.diag(rotated) < 1.3)).all() and values.max() > 1.3 * values.min()
    looked_ahead = 0.9 * 0.1 / (1 - 0.9**2) + 0.1 / (1 - 0.9)  # the mean of gradients with Nesterov's momentum
    for name in ("norm", "head"):
        expected = -RATE * looked_ahead * np.sign(getattr(gradient, name))
        np.testing.assert_allclose(getattr(change, name), expected, rtol=1e-4)
    assert change.embed is None


def test_adamw_changes_each_weight_by_the_sign_of_its_gradient(gradient: OptimizedWeights) -> None:
    change = first_change("adamw", gradient, gradient)
    for name in ("fc", "norm", "head"):
        np.testing.assert_allclose(getattr(change, name), -RATE * np.sign(getattr(gradient, name)), rtol=1e-4)
