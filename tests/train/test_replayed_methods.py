"""Test that each method's training forward drafts what its drafter drafts, at every root of greedy texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.tree import Tree
from jspec.draft.base import Drafter
from jspec.draft.dflash import DFlash
from jspec.draft.dspark import DSpark
from jspec.draft.eagle import Eagle3
from jspec.draft.medusa import Medusa
from jspec.tools.replay import Replay, continue_greedily
from jspec.tools.replay import observe as replay_observe
from jspec.train import dflash, dspark, eagle3, medusa
from jspec.train.blocks import choose_blocks
from jspec.train.observe import Observed, observe
from jspec.train.rows import Rows
from tests.support import tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

VOCAB, DEPTH, PROMPT, SIZE, TEXTS = 6, 2, 4, 48, 16
TARGET = tiny.model(VOCAB, layers=3, sharpness=4.0)
Predicted = Callable[[Observed, Rows], Any]


def eagle() -> tuple[Drafter, Predicted]:
    """A head of two layers with a window and a reduced vocabulary."""
    head = tiny.eagle_head(TARGET, draft_vocab=5, feature_layers=(0, 2, 3))
    second = replace(head.layers[0], hidden_norm=None, qkv=head.layers[0].qkv[:, :16] * 1.5)  # type: ignore[index]
    head = replace(head, layers=[head.layers[0], second], config=head.config.resized(num_layers=2))
    layers = [replace(one, mixer=replace(one.attention, window=9)) for one in head.config.layers]
    drafter = Eagle3(replace(head, config=replace(head.config, layers=tuple(layers))), Tree.chain(DEPTH))
    bound = replace(drafter.bind(TARGET), precomputed=None)

    def hits(seen: Observed, rows: Rows) -> Any:
        return eagle3.unroll(bound, TARGET, seen, rows, eagle3.Eagle3Loss(steps=DEPTH))[1]

    return drafter, hits


def block(drafter: DFlash, predict: Callable[..., Any]) -> tuple[Drafter, Predicted]:
    def hits(seen: Observed, rows: Rows) -> Any:
        keys = jax.random.split(jax.random.key(0), TEXTS)
        blocks = choose_blocks(rows, seen.choices, keys, SIZE - 2, DEPTH)  # all places but the first and the last
        found = predict(drafter.head, TARGET, seen, rows, blocks)[1].reshape(blocks.counts.shape)
        at = jnp.arange(TEXTS)[:, None]
        return jnp.moveaxis(jnp.zeros((TEXTS, SIZE, DEPTH), bool).at[at, blocks.anchors - 1].set(found), -1, 0)

    return drafter, hits


def drafters() -> dict[str, tuple[Drafter, Predicted]]:
    """Return each method's drafter, and the function of its hits [depth, texts, place before the root]."""
    fields: dict[str, Any] = dict(block_size=DEPTH + 1, feature_layers=(1, 3))
    heads = tiny.medusa_heads(TARGET, DEPTH)
    return {
        "eagle3": eagle(),
        "dflash": block(DFlash(tiny.dflash_head(TARGET, **fields), Tree.chain(DEPTH)), dflash.predict),
        "dspark": block(DSpark(tiny.dspark_head(TARGET, **fields), Tree.chain(DEPTH)), dspark.predict),
        "dspark-rnn": block(
            DSpark(tiny.dspark_head(TARGET, markov="rnn", **fields), Tree.chain(DEPTH)), dspark.predict
        ),
        "medusa": (Medusa(heads, Tree.chain(DEPTH)), lambda seen, rows: medusa.predict(heads, seen, rows)[1]),
    }


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark", "dspark-rnn", "medusa"])
def test_predicted_acceptance_of_each_method_equals_that_of_replay_at_every_root(method: str) -> None:
    drafter, predict = drafters()[method]
    prompts = np.random.default_rng(0).integers(0, VOCAB, (TEXTS, PROMPT))
    layers = drafter.feature_layers(TARGET)
    texts = replay_observe(TARGET, continue_greedily(TARGET, prompts, SIZE - PROMPT), layers)
    rounds = Replay(drafter, TARGET)(texts, layers=layers, start=[PROMPT] * TEXTS, stepwise=[True] * TEXTS)
    rows = Rows(texts.tokens, jnp.ones_like(texts.tokens), on_device(np.ones(texts.tokens.shape, bool)))
    states = () if method == "medusa" else layers
    seen = jax.jit(partial(observe, states=states))(TARGET, rows)
    found = np.cumprod(np.asarray(jax.jit(predict)(seen, rows)), axis=0).sum(axis=0)
    roots = [(text, int(rounds.positions[i, text]), i) for i, text in np.argwhere(rounds.is_round).tolist()]
    expected = [int(rounds.accept_len[i, text]) for text, _, i in roots]
    assert [int(found[text, root - 1]) for text, root, _ in roots] == expected
    assert len(roots) >= TEXTS * (SIZE - PROMPT - DEPTH - 2) and len(set(expected)) > 1
