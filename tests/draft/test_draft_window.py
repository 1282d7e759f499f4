"""Compare scores under a draft window with dense attention, and output tokens with plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DraftModel, Eagle, Eagle3, Engine, Medusa, NGram, SamplingParams, Tree
from jspec.core.numerics import REFERENCE
from jspec.core.records import TokenBatch
from jspec.draft.base import Drafter
from jspec.draft.eagle_head import EagleHead
from jspec.engine.request.request import Completion
from jspec.models.decoder import Model, forward
from jspec.models.parts.kv_pool import KVPool
from tests.draft.test_head_layers import two_layers
from tests.reference import decoder
from tests.support import tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

WINDOW = 6
TARGET = tiny.model(16, layers=2)
SMALL = tiny.model(16, layers=2, seed=7)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
PARAMS = SamplingParams(max_tokens=14, temperature=0)
CHAIN, DYNAMIC = Tree.chain(3), Tree.topk(7, 3, 2)


def with_windows(head: EagleHead) -> EagleHead:
    """Return a head whose layers have the window themselves."""
    layers = [replace(layer, mixer=replace(layer.attention, window=WINDOW)) for layer in head.config.layers]
    return head.replace(config=replace(head.config, layers=tuple(layers)))


DRAFTERS: dict[str, Drafter] = {
    "EAGLE-3, two layers, dynamic": Eagle3(two_layers(), DYNAMIC, draft_window=WINDOW),
    "EAGLE-3, two layers with windows of their own": Eagle3(with_windows(two_layers()), DYNAMIC),
    "EAGLE-3, chain": Eagle3(tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0, 2)), CHAIN),
    "draft model, chain": DraftModel(SMALL, CHAIN, draft_window=WINDOW),
}


def run(drafter: Drafter | None, **options: Any) -> Completion:
    """Decode the prompt after a prefill in chunks that end inside a page."""
    options |= dict(slots=1, max_len=40, page_size=4, buckets=(1,), prefill_buckets=(6,))
    options |= dict(prefix_cache=False, controls=False)
    with Engine(TARGET, drafter=drafter, **options) as engine:
        (done,) = engine.generate(PROMPT, PARAMS, trace=drafter is not None)
    return done.raise_for_error()


@cache
def completed(name: str) -> Completion:
    """Decode with a named drafter; if neither the drafter nor its layers have a window, the engine's option sets it."""
    drafter = DRAFTERS[name]
    return run(drafter, **({} if drafter.draft_window or "own" in name else {"draft_window": WINDOW}))


@cache
def plain() -> list[int]:
    return run(None).token_ids


@cache
def features() -> np.ndarray:
    """Return the target's hidden states 0 and 2 at each token of prompt and completion [tokens, 2 * hidden]."""
    tokens = on_device([PROMPT + plain()])
    c, count = TARGET.config, tokens.shape[1]
    pages = -(-count // 8)
    pools = [on_device(np.zeros((pages + 1, c.num_kv_heads, 8, c.head_dim))) for _ in range(c.num_layers)]
    batch = TokenBatch(
        tokens=tokens,
        positions=on_device(np.arange(count))[None],
        valid=on_device(np.ones((1, count), bool)),
        first_row=on_device(np.zeros(1, jnp.int32)),
        page_table=1 + on_device(np.arange(pages, dtype=jnp.int32))[None],
        bits=None,
        numerics=REFERENCE,
    )
    out, _ = forward(TARGET, list(map(KVPool, pools, pools)), batch, feature_layers=(0, 2), with_logits=False)
    return np.asarray(out.features[0], np.float64)


def normed(x: np.ndarray, weight: Any) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * np.asarray(weight, np.float64)


def head_pass(head: EagleHead, feature: np.ndarray, tokens: list[int], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the head's hidden state and log-probabilities at the last token, by dense attention."""
    embedded, hidden = np.asarray(TARGET.embed, np.float64)[tokens], feature
    for index, layer in enumerate(head.layers):
        w = {n: np.asarray(a, np.float64) for n in layer.__dataclass_fields__ if (a := getattr(layer, n)) is not None}
        x = normed(hidden, w["input_norm"])
        if index == 0:
            x = np.concatenate([normed(embedded, w["input_norm"]), normed(hidden, w["hidden_norm"])], axis=-1)
        hidden = hidden + decoder.attention((x @ w["qkv"].T)[None], head.config, window)[0] @ w["o"].T
        gate, up = np.split(normed(hidden, w["mlp_norm"]) @ w["gate_up"].T, 2, axis=-1)
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    return hidden[-1], log_softmax(normed(hidden[-1], head.norm) @ np.asarray(head.head, np.float64).T)


def log_softmax(row: np.ndarray) -> np.ndarray:
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def eagle_scores(head: EagleHead, text: list[int], path: list[int], window: int) -> float:
    """Return the score of a path's last token; the path follows the text, whose last token is the root."""
    ids = np.asarray(head.draft_to_target).tolist()
    fused = features()[: len(text) - 1] @ np.asarray(head.fc, np.float64).T
    tokens, score = text[1:], 0.0
    for token in path:
        hidden, log_probs = head_pass(head, fused, tokens, window)
        score += log_probs[ids.index(token)]
        fused, tokens = np.concatenate([fused, hidden[None]]), [*tokens, token]
    return score


def model_scores(model: Model, text: list[int], path: list[int], window: int) -> float:
    logits = decoder.logits(model, np.array([text + path]), window)[0]
    return sum(log_softmax(logits[len(text) - 1 + i])[token] for i, token in enumerate(path))


def differences(name: str, window: int) -> np.ndarray:
    """Return the difference between the engine's score and the one by dense attention for each drafted node."""
    drafter, done = DRAFTERS[name], completed(name)
    text, found = [*PROMPT, done.token_ids[0]], []
    for one in done.rounds or []:
        for node in range(1, len(one.tokens)):
            path, at = [], node
            while at > 0:
                path, at = [int(one.tokens[at]), *path], int(one.parents[at])
            own = (
                model_scores(drafter.model, text, path, window)
                if isinstance(drafter, DraftModel)
                else eagle_scores(drafter.head, text, path, window)
            )
            found.append(one.scores[node] - own)
        text = [*text, *map(int, one.emitted)]
    assert len(found) > 20
    return np.abs(found)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * name.endswith("dynamic")) for name in DRAFTERS]
)
def test_draft_scores_with_a_window_equal_dense_attention_with_a_sliding_mask(name: str) -> None:
    """Negative control: a mask of one token more or less leads to other scores."""
    assert differences(name, WINDOW).max() < 2e-4
    for other in (WINDOW - 1, WINDOW + 1):
        assert np.median(differences(name, other)) > 1e-3


@pytest.mark.parametrize("name", DRAFTERS)
def test_engine_with_draft_window_emits_tokens_of_plain_decoding(name: str) -> None:
    assert completed(name).token_ids == plain()


@pytest.mark.parametrize("window", [0, -1, 3, 2.0, True])
def test_drafter_with_a_window_smaller_than_its_tree_or_not_an_int_raises(window: Any) -> None:
    head, eagle1 = tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0, 2)), tiny.eagle1_head(TARGET)
    for make in (
        lambda: Eagle3(head, CHAIN, draft_window=window),
        lambda: Eagle(eagle1, CHAIN, draft_window=window),
        lambda: DraftModel(SMALL, CHAIN, draft_window=window),
        lambda: Engine(TARGET, drafter=DraftModel(SMALL, CHAIN), draft_window=window),
    ):
        with pytest.raises(ValueError, match=rf"draft_window: expected None or an int >= 4, .*chain:3.* got {window}"):
            make()
    Eagle(eagle1, CHAIN, draft_window=4)


@pytest.mark.parametrize("drafter", [None, NGram(CHAIN), Medusa(tiny.medusa_heads(TARGET, heads=3), CHAIN)])
def test_drafter_without_kv_cache_with_a_draft_window_raises(drafter: Drafter | None) -> None:
    with pytest.raises(ValueError, match=r"draft_window: expected a drafter with a window .* leave it out"):
        Engine(TARGET, drafter=drafter, draft_window=8)


LONG, NEW = 16_400, 12


@pytest.mark.matrix
def test_engine_with_a_context_of_16400_tokens_emits_tokens_of_plain_decoding() -> None:
    """Heads were trained on shorter contexts; one drafter has a draft window and one has none."""
    target = tiny.model(16, layers=1, seed=3)
    prompt = np.random.default_rng(0).integers(0, 16, LONG).tolist()
    head = tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1))
    drafters = [None, Eagle3(head, CHAIN), DraftModel(target, CHAIN, draft_window=8192)]
    texts = []
    for drafter in drafters:
        options: dict[str, Any] = dict(slots=1, max_len=LONG + NEW, page_size=128, prefix_cache=False)
        with Engine(target, drafter=drafter, buckets=(1,), prefill_buckets=(512,), **options) as engine:
            (done,) = engine.generate(prompt, SamplingParams(max_tokens=NEW, temperature=0))
        texts.append(done.raise_for_error().token_ids)
    assert len(texts[0]) == NEW and texts[1:] == [texts[0]] * 2
    assert done.metrics.mean_acceptance_length > 2  # the draft model is the target itself
