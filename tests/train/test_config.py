"""Test that wrong options are refused by name, with what was expected and what was given."""

from __future__ import annotations

from typing import Any

import pytest

from jspec.train import config, methods
from jspec.train.config import TrainConfig

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle4"}, "method: expected one of eagle3.*'eagle4'"),
        ({"loss": "hard"}, "loss: expected one of soft, lk"),
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"steps": 2.5}, "steps: expected an int, got 2.5"),
        ({"batch": True}, "batch: expected an int"),
        ({"length": 100}, "length: expected a multiple of 16, got 100"),
        ({"learning_rate": 0}, "learning_rate: expected more than 0"),
        ({"learning_rate": "fast"}, "learning_rate: expected a number"),
        ({"held_out": 1.5}, "held_out: expected at most 1"),
        ({"epochs": float("nan")}, "epochs: expected more than 0, got nan"),
        ({"feature_layers": 3}, "feature_layers: expected a list of ints, got 3"),
        ({"feature_layers": [1, "2"]}, "feature_layers: expected a list of ints"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_methods_that_can_be_chosen_are_those_that_can_be_trained() -> None:
    assert tuple(methods.METHODS) == config.METHODS


def test_feature_layers_may_be_a_list() -> None:
    assert TrainConfig(feature_layers=[1, 2]) == TrainConfig(feature_layers=(1, 2))  # type: ignore[arg-type]
