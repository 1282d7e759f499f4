"""Test the attention of the training-time test and its gradient against the dense form, with a mask of all keys."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.config.layer_config import LayerConfig
from jspec.train import attention, eagle3, observe
from jspec.train.attention import Keys
from tests.support.arrays import on_device
from tests.train import support

pytestmark = pytest.mark.once

HEADS, KV_HEADS, DIM, STEPS = 4, 2, 16, 3


def layer(window: int | None) -> LayerConfig:
    own = support.target().config.layers[0]
    sizes = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, window=window)
    return replace(own, mixer=replace(own.attention, **sizes))


def dense(window: int | None, q: Any, steps: list[Keys], rows: Any) -> Any:
    """Concatenate the keys of all steps, and mask them."""
    size, group, ahead = q.shape[1], HEADS // KV_HEADS, len(steps) - 1
    k, v = (jnp.repeat(jnp.concatenate(of, axis=1), group, axis=2) for of in zip(*steps, strict=True))
    i, m = on_device(np.arange(size))[:, None], on_device(np.arange(size))
    causal = (m <= i) & (rows.segments[:, :, None] == rows.segments[:, None])
    if window is not None:
        causal &= i + ahead - m < window
    own = jnp.broadcast_to(jnp.tile(i == m, (1, ahead)), (len(q), size, ahead * size))
    seen = jnp.concatenate([causal, own], axis=2)
    scores = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / np.sqrt(DIM)
    p = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", p, v, precision="highest").reshape(len(q), size, -1)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("count", [1, STEPS])
def test_attention_of_the_test_and_its_gradient_equal_the_dense_form(count: int, window: int | None) -> None:
    rows, rng = support.packed(support.documents([20, 7, 16, 30]), 48), np.random.default_rng(0)
    shape = rows.tokens.shape

    def draw(heads: int) -> Any:
        return on_device(rng.normal(size=(*shape, heads, DIM)), jnp.float32)

    q, steps = draw(HEADS), [Keys(draw(KV_HEADS), draw(KV_HEADS)) for _ in range(count)]
    weights = draw(HEADS).reshape(*shape, -1) * (rows.segments > 0)[..., None]

    def loss(attend: Any, q: Any, steps: Any) -> Any:
        return jnp.sum(attend(q, steps) * weights)

    forms = [partial(attention.attend, layer(window), rows=rows), partial(dense, window, rows=rows)]
    (own, gradient), (expected, wanted) = (
        jax.jit(jax.value_and_grad(partial(loss, form), argnums=(0, 1)))(q, steps) for form in forms
    )
    assert own == pytest.approx(float(expected), rel=1e-5, abs=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), gradient, wanted)


def test_gradient_with_the_log_sum_exp_of_the_rows_alone_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge of two attentions by their outputs, whose gradient ignores the weights of the merge."""
    monkeypatch.setattr(attention, "interval_attention_gradient", _of_rows_alone)
    with pytest.raises(AssertionError):
        test_attention_of_the_test_and_its_gradient_equal_the_dense_form(STEPS, None)
    test_attention_of_the_test_and_its_gradient_equal_the_dense_form(1, None)  # nothing is merged


def _of_rows_alone(q: Any, k: Any, v: Any, dout: Any, starts: Any, ends: Any, lse: Any, delta: Any, **of: Any) -> Any:
    own = attention.interval_attention(q, k, v, starts, **of)[1]
    return GRADIENT(q, k, v, dout, starts, ends, own, delta, **of)


GRADIENT = attention.interval_attention_gradient


def test_a_step_attends_once_and_keeps_the_result_for_its_gradient() -> None:
    head, target = support.head(), support.target()
    rows = support.packed(support.documents([20, 7]), 48)

    def loss(fc: Any) -> Any:
        seen = observe.observe(target, rows, support.STATES)
        own = head.replace(fc=fc)
        return eagle3.loss(own, target, seen, rows, eagle3.Eagle3Loss(STEPS))[0]

    text = str(jax.make_jaxpr(jax.grad(loss))(head.fc))
    assert text.count("name=interval_attention\n") + text.count("name=interval_attention ") == STEPS
    assert text.count("name=interval_attention_gradient") == STEPS
