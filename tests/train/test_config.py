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
        ({"optimizer": "sgd"}, "optimizer: expected one of adamw, muon"),
        ({"intermediate_size": 0}, "intermediate_size: expected at least 1, got 0"),
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
        ({"ttt": 31, "length": 32}, "ttt: expected at most 30, .*, got 31"),
        ({"anchors": 33, "length": 32}, r"anchors: expected at most length \(32\), got 33"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"markov_rank": 4},
            r"markov_rank: expected none with method 'eagle3' \(those of dspark have it\), got 4; leave",
        ),
        ({"anchors": 8, "method": "medusa"}, "anchors: expected none with method 'medusa'"),
        ({"eagle31": True, "method": "dflash"}, "eagle31: expected none with method 'dflash'"),
        ({"decay": 0.8, "method": "dspark"}, "decay: expected none with method 'dspark'"),  # the default, but given
        ({"intermediate_size": 8, "method": "medusa"}, "intermediate_size: expected none with method 'medusa'"),
        ({"intermediate_size": 8, "init": "head"}, "intermediate_size: expected none with init"),
        ({"copy_layers": True, "init": "head"}, "copy_layers: expected none with init"),
        ({"copy_layers": True, "method": "dflash"}, r"copy_layers: expected none .* \(those of eagle3 have it\)"),
        ({"draft_vocab": 8, "method": "dflash"}, "draft_vocab: expected none with method 'dflash'"),
        ({"rope_theta": 5.0, "method": "medusa"}, "rope_theta: expected none with method 'medusa'"),
        ({"layers": 2, "init": "head"}, "layers: expected none with init, whose head has its own, got 2; leave it out"),
        ({"temperature": 1.0}, "temperature: expected none without regenerate"),
        ({"steps": 3, "epochs": 2.0}, r"epochs: expected none with steps \(3\).*, got 2.0; leave it out, or leave out"),
        ({"held_out": 0, "eval_rows": 8}, "eval_rows: expected none without held-out documents, got 8"),
    ],
)
def test_options_without_effect_beside_others_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    made = TrainConfig(**options)
    with pytest.raises(ValueError, match=message):
        config.refuse_unused(made, options)
    config.refuse_unused(made, ())  # a default is no request


def test_options_that_ask_for_nothing_or_have_an_effect_are_not_refused() -> None:
    for options in (
        {"method": "medusa", "eagle31": False, "draft_vocab": None, "decay": 0.5},
        {"method": "dspark", "markov_rank": 4, "anchors": 8, "gamma": 2.0, "mask_token": 0, "rope_theta": 5.0},
        {"regenerate": True, "temperature": 1.0, "max_tokens": 4, "epochs": 2.0, "eagle31": True, "loss": "lk"},
    ):
        config.refuse_unused(TrainConfig(**options), options)


def test_methods_that_can_be_chosen_are_those_that_can_be_trained() -> None:
    assert tuple(methods.METHODS) == config.METHODS


def test_feature_layers_may_be_a_list() -> None:
    assert TrainConfig(feature_layers=[1, 2]) == TrainConfig(feature_layers=(1, 2))  # type: ignore[arg-type]
