"""Test the update by itself, with a loss of one product."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jspec.train import program
from jspec.train.config import TrainConfig
from jspec.train.measured import Measured
from jspec.train.rows import Rows
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

COLUMNS = 2**20


@struct.dataclass
class HeadWeights:
    x: Any


def loss(head: HeadWeights, *arguments: Any) -> tuple[Any, Measured]:
    """Return a sum over products in float16, whose least number is 6e-8."""
    total = jnp.sum((head.x.astype(jnp.float16) * jnp.float16(0.01)).astype(jnp.float32))
    none = on_device(np.zeros((1, 4)))
    return total, Measured.of(none, none > 0, none > 0)


def test_gradient_is_divided_by_the_number_of_places_after_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "observe", lambda *arguments: None)
    method: Any = SimpleNamespace(config=TrainConfig(), frozen=(), loss=loss, columns=lambda rows: COLUMNS)
    method.states, method.split = lambda head, target: (), lambda head: (head, {})
    target: Any = None
    made = program.TrainingProgram(method, target, HeadWeights(on_device(np.ones(3))), steps=1)
    state = made.start(HeadWeights(on_device(np.ones(3))))
    rows = Rows(
        on_device(np.zeros((1, 16), jnp.int32)),
        on_device(np.ones((1, 16), jnp.int32)),
        on_device(np.ones((1, 16), bool)),
    )
    state, report = made.update(state, rows)
    mean = np.asarray(state.optimizer[1][0].mu.x)  # Adam's mean, (1 - beta1) times the gradient
    np.testing.assert_allclose(mean, 0.1 * float(np.float16(0.01)) / COLUMNS, rtol=1e-3)
    assert bool(report.is_finite) and np.float16(0.01) * np.float16(1 / COLUMNS) == 0  # what an early division gives
