"""Test that a head which begins with its target's last layers computes what they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jspec.draft.eagle_head import EagleHead
from jspec.train import eagle3
from jspec.train.config import TrainConfig
from jspec.train.methods import Eagle3Method
from jspec.train.observe import observe
from tests.support.arrays import on_device
from tests.train import support

pytestmark = pytest.mark.once

HIDDEN, IDS = 16, np.arange(40, dtype=np.int32)


def made(**options: Any) -> EagleHead:
    return Eagle3Method(TrainConfig(**options)).create(support.target(), IDS)


def without_random_part(head: EagleHead) -> EagleHead:
    """Return the head without the part of its weights that the target does not have."""
    assert isinstance(head.fc, jax.Array)
    width = support.target().config.layers[0].mlp.width
    channels = np.arange(head.layers[0].down.shape[1])
    layers = [layer.replace(down=on_device(np.where(channels < width, layer.down, 0))) for layer in head.layers]
    qkv = np.array(layers[0].qkv)
    qkv[:, :HIDDEN] = 0
    layers[0] = layers[0].replace(qkv=on_device(qkv))
    return head.replace(layers=layers, fc=on_device(np.eye(HIDDEN, 3 * HIDDEN, 2 * HIDDEN)))


@pytest.mark.parametrize(
    ("states", "layers", "wider"), [((0, 2, 1), 1, 0), ((0, 2, 1), 1, 5), ((1, 2, 0), 2, 5)], ids=str
)
def test_head_without_its_random_part_computes_the_targets_last_layers(
    states: tuple[int, ...], layers: int, wider: int
) -> None:
    target, rows = support.target(), support.packed(support.documents([20, 9, 30]), 32)
    options = dict(feature_layers=states, layers=layers)
    width = target.config.layers[0].mlp.width + wider
    head = without_random_part(made(**options, intermediate_size=width, copy_layers=True))
    seen, out = (jax.jit(observe, static_argnums=2)(target, rows, own) for own in ((states[-1],), (2,)))
    teacher = on_device(np.zeros((*rows.tokens.shape, 40))), seen.choices, on_device(np.zeros(rows.tokens.shape))
    valid = np.asarray(rows.segments > 0)

    @jax.jit
    def features_of(head: EagleHead) -> Any:
        return eagle3._run_step(head, seen.features, [], rows, teacher, step=0, kind="soft")[0]

    def run(head: EagleHead) -> np.ndarray:
        return np.asarray(features_of(head))[valid]

    np.testing.assert_allclose(run(head), np.asarray(out.features)[valid], atol=1e-4)
    np.testing.assert_array_equal(head.norm, target.norm)
    others = without_random_part(made(**options, intermediate_size=width))
    assert np.abs(run(others) - np.asarray(out.features)[valid]).max() > 0.1, "random layers compute something else"


def test_fc_begins_as_the_last_state_beside_a_small_random_part() -> None:
    options = dict(feature_layers=support.STATES, eagle31=True)
    begun, random = (made(**options, copy_layers=copies).fc for copies in (True, False))
    np.testing.assert_allclose(begun - random, np.eye(HIDDEN, 3 * HIDDEN, 2 * HIDDEN), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, "layers: expected at most 2, those of the target, got 3"),
        ({"rope_theta": 5.0}, "copy_layers: expected layers of the target like the head's, .*rope_theta"),
        ({"intermediate_size": 1}, "copy_layers: .* at most as wide"),
    ],
)
def test_target_whose_layers_do_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(feature_layers=support.STATES, copy_layers=True, **options)


def test_target_with_other_norms_is_refused() -> None:
    target = support.target()
    layers = tuple(replace(layer, norms="both") for layer in target.config.layers)
    other = target.replace(config=replace(target.config, layers=layers))
    with pytest.raises(ValueError, match=r"copy_layers: .*both"):
        Eagle3Method(TrainConfig(feature_layers=support.STATES, copy_layers=True)).create(other, IDS)
