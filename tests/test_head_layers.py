"""Heads of several layers: every layer's cache must be right, not only what the last one reads."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Eagle3, Engine, SamplingParams, Tree
from jspec.draft.heads import EagleHead
from jspec.records import KVCache
from tests import tiny

pytestmark = pytest.mark.once

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [1]]
TARGET = tiny.model(16, layers=2)


def two_layers() -> EagleHead:
    """A random head with a second, ordinary layer."""
    head = tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0, 2))
    config = replace(head.config, num_layers=2)
    other = tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0,), seed=5).layers[0]
    width = config.hidden_size
    second = other.replace(qkv=other.qkv[:, :width], hidden_norm=None, input_norm=jnp.ones(width))
    return head.replace(layers=[head.layers[0], second], config=config)


def scores(chunk: int, fill: float) -> list[np.ndarray]:
    """The draft scores of every round, with prompts in chunks and whatever was in the cache before."""
    engine = Engine(
        TARGET,
        drafter=Eagle3(two_layers(), Tree.topk(6, 3, 2)),
        slots=2,
        max_len=40,
        page_size=4,
        buckets=(2,),
        prefill_buckets=(chunk,),
        prefix_cache=False,
        controls=False,
    )
    cache = engine._device.state.draft.cache
    dirty = KVCache(*([jnp.full_like(pool, fill) for pool in pools] for pools in (cache.k, cache.v)))
    engine._device.state = replace(engine._device.state, draft=replace(engine._device.state.draft, cache=dirty))
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0), trace=True)
    return [np.concatenate([one.scores for one in completion.rounds or []]) for completion in done]


def test_drafts_depend_neither_on_chunks_nor_on_what_the_cache_held() -> None:
    for one, other in zip(scores(16, 0.0), scores(3, np.nan), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
