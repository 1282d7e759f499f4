"""Test that several devices make the updates of one."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jspec.train.config import TrainConfig
from jspec.train.methods import Eagle3Method
from jspec.train.program import TrainingProgram, TrainState, mesh_of
from tests.train import support

pytestmark = pytest.mark.once

UPDATES = 3


@cache
def program_on(devices: int) -> TrainingProgram:
    method = Eagle3Method(TrainConfig(feature_layers=support.STATES, ttt=2, learning_rate=1e-2))
    return TrainingProgram(method, support.target(), support.head(), 10, mesh_of(devices))


def updated(devices: int, rows: Any) -> tuple[TrainState, list[Any]]:
    """Return the state after some updates of one batch, and what each measured."""
    program = program_on(devices)
    state, measured = program.start(support.head()), []
    for _ in range(UPDATES):
        state, report = program.update(state, rows)
        assert bool(report.is_finite)
        measured.append(report.measured.figures())
    return state, [*measured, program.measure(state, rows).figures()]


def test_updates_on_four_devices_equal_those_on_one() -> None:
    rows = support.packed(support.documents([30, 16, 25, 32, 9, 12, 31]), 32)
    rows = jax.tree.map(lambda x: np.concatenate([x, np.zeros((-len(x) % 4, 32), x.dtype)]), rows)
    (one, single), (four, several) = updated(1, rows), updated(4, rows)
    for own, other in zip(single, several, strict=True):
        assert (own.hits, own.acceptance) == (other.hits, other.acceptance)
        assert own.loss == pytest.approx(other.loss, rel=1e-5)
    start = support.head()
    for name in ("fc", "head", "norm"):
        values = [np.asarray(getattr(state.weights, name)) for state in (one, four)]
        np.testing.assert_allclose(*values, atol=2e-5)
        assert np.abs(values[0] - np.asarray(getattr(start, name))).max() > 1e-3  # the updates changed it
    halves = jax.tree.map(lambda x: np.concatenate([x[:2]] * (len(x) // 2)), rows)
    other = updated(4, halves)[0]
    assert np.abs(np.asarray(other.weights.head) - np.asarray(one.weights.head)).max() > 1e-3  # other rows differ


def test_more_devices_than_there_are_or_rows_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ValueError, match="devices: expected at most 4, the number of devices, got 5"):
        mesh_of(5)
    with pytest.raises(ValueError, match=r"batch: expected a multiple of devices \(3\), got 8"):
        TrainConfig(devices=3)
