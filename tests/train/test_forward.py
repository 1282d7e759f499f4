"""Test that training runs the forward pass of the engine: features of the target, and drafts of the head."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.tools.replay import Replay, ReplayedTexts, continue_greedily
from jspec.tools.replay import observe as replay_observe
from jspec.train import eagle3
from jspec.train.observe import observe
from jspec.train.rows import Rows
from tests.support import byte_pair, tiny
from tests.support.arrays import on_device
from tests.train import support

pytestmark = pytest.mark.once

DEPTH, PROMPT, COUNT = 4, 24, 56
TEXTS = 8
TARGET = tiny.load_target(byte_pair.TARGET)
DRAFTER = Eagle3(tiny.load_head(byte_pair.HEAD), Tree.chain(DEPTH))
LAYERS = DRAFTER.feature_layers(TARGET)
LAST = TARGET.config.num_layers + 1


@pytest.fixture(scope="module")
def texts() -> ReplayedTexts:
    """Eight greedy texts of the target, with its outputs as the engine's forward pass gives them."""
    ids = list(tiny.english().encode())
    starts = np.random.default_rng(0).integers(0, len(ids) - PROMPT, TEXTS)
    prompts = np.array([ids[start : start + PROMPT] for start in starts])
    return replay_observe(TARGET, continue_greedily(TARGET, prompts, COUNT), (*range(LAST + 1),))


@pytest.fixture(scope="module")
def accepted(texts: ReplayedTexts) -> dict[tuple[int, int], int]:
    """The number of accepted draft tokens at every root after the prompts, by text and position of the root."""
    rounds = Replay(DRAFTER, TARGET)(texts, layers=LAYERS, start=[PROMPT] * TEXTS, stepwise=[True] * TEXTS)
    where = np.argwhere(rounds.is_round)
    return {(int(text), int(rounds.positions[i, text])): int(rounds.accept_len[i, text]) for i, text in where}


def predicted(texts: ReplayedTexts, **changes: Any) -> np.ndarray:
    """Return the predicted number of accepted tokens [texts, column]; a column's root is the next position.

    Args:
        changes: `theta`, `norm_output`, `layers` or `shift`: how the training forward is broken.
    """
    head = DRAFTER.bind(TARGET)
    config = head.config.with_theta(changes.get("theta", 10000.0)).resized(
        norm_output=changes.get("norm_output", False)
    )
    tokens = jnp.roll(texts.tokens, changes.get("shift", 0), axis=1)
    rows = Rows(texts.tokens, jnp.ones_like(texts.tokens), on_device(np.ones(texts.tokens.shape, bool)))
    seen = jax.jit(observe, static_argnums=2)(TARGET, rows, changes.get("layers", LAYERS))
    run = partial(eagle3.unroll, options=eagle3.Eagle3Loss(steps=DEPTH))
    _, hits, _ = jax.jit(run)(head.replace(config=config), TARGET, seen, rows.replace(tokens=tokens))
    return np.cumprod(np.asarray(hits), axis=0).sum(axis=0)


def test_predicted_acceptance_equals_that_of_replay_at_every_root(
    texts: ReplayedTexts, accepted: dict[tuple[int, int], int]
) -> None:
    found = predicted(texts)
    assert len(accepted) >= TEXTS * (COUNT - DEPTH - 2)
    assert {root: found[root[0], root[1] - 1] for root in accepted} == accepted
    assert 1.5 < np.mean(list(accepted.values())) < DEPTH  # chains that are neither hopeless nor always right


@pytest.mark.parametrize(
    "change", [{"theta": 1e6}, {"norm_output": True}, {"layers": (1, 3, 4)}, {"shift": 1}], ids=lambda c: next(iter(c))
)
def test_predicted_acceptance_of_another_forward_differs_at_some_root(
    texts: ReplayedTexts, accepted: dict[tuple[int, int], int], change: dict[str, Any]
) -> None:
    found = predicted(texts, **change)
    assert {root: found[root[0], root[1] - 1] for root in accepted} != accepted


def test_features_of_packed_documents_equal_those_of_single_ones() -> None:
    found = support.documents([7, 33, 16, 20, 48, 3])
    rows = support.packed(found, 64)
    target, layers = support.target(), (0, 2, 3)
    seen = jax.jit(observe, static_argnums=2)(target, rows, layers)
    others = {}
    for index, (tokens, _) in enumerate(found):
        others[index] = replay_observe(target, tokens[None], layers)
    segments, order = np.asarray(rows.segments), []
    for row, segment in sorted({(r, s) for r, own in enumerate(segments) for s in own if s}):
        at = np.flatnonzero(segments[row] == segment)
        (index,) = [i for i, (tokens, _) in enumerate(found) if np.array_equal(tokens, rows.tokens[row, at])]
        order.append(index)
        one = others[index]
        expected = np.concatenate([np.asarray(one.states[layer][0]) for layer in layers], axis=-1)
        np.testing.assert_allclose(seen.features[row, at], expected, atol=1e-5)
        np.testing.assert_allclose(seen.normed[row, at], one.states[3][0], atol=1e-5)
        np.testing.assert_array_equal(seen.choices[row, at], one.choices[0])
    assert sorted(order) == list(range(len(found)))
    whole = rows.replace(segments=jnp.ones_like(rows.segments))
    control = jax.jit(observe, static_argnums=2)(target, whole, layers)
    assert np.abs(np.asarray(control.features - seen.features))[segments > 0].max() > 1e-3
