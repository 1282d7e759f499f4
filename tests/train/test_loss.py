"""Test loss and gradients against the equations in numpy, and packed documents against single ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.draft.eagle_head import EagleHead
from jspec.train import eagle3, losses, observe
from jspec.train.config import TrainConfig
from jspec.train.methods import Eagle3Method
from jspec.train.rows import Rows
from pallas_kernels.attention import interval_reference
from tests.reference import training
from tests.support.arrays import on_device
from tests.train import support

pytestmark = pytest.mark.once

STEPS, DECAY = 3, 0.7
SIZES = (11, 18, 5, 16)  # tokens of the documents
FIELDS = ("qkv", "o", "gate_up", "down", "mlp_norm", "input_norm", "hidden_norm")  # weights of the layer


def named(head: EagleHead) -> dict[str, np.ndarray]:
    """Return the trained weights of a head by the names of the reference, in float64."""
    found = {name: getattr(head.layers[0], name) for name in FIELDS}
    found |= {name: getattr(head, name) for name in ("fc", "norm", "head", "fc_norm")}
    return {name: np.asarray(value, np.float64) for name, value in found.items() if value is not None}


def expected(weights: dict[str, np.ndarray], head: EagleHead, sizes: Sequence[int], **options: Any) -> float:
    """Return the loss of documents of some sizes by the reference."""
    target, config = support.target(), head.config
    shape = training.Shape(4, 2, 4, config.norm_eps, 10000.0, config.norm_output, config.fc_norm)
    given = (np.asarray(target.embed, np.float64), np.asarray(head.draft_to_target))
    settings: dict[str, Any] = dict(steps=STEPS, decay=DECAY, **options)
    return sum(training.loss(weights, shape, document, *given, **settings) for document in observed(tuple(sizes)))


@cache
def observed(sizes: tuple[int, ...]) -> list[training.ReferenceDocument]:
    """Return documents with the target's states and logits."""
    documents = []
    for tokens, counted in support.documents(sizes):
        states, logits = support.outputs(tokens, support.STATES)
        documents.append(training.ReferenceDocument(tokens, counted, states.reshape(len(tokens), 3, -1), logits))
    return documents


def trained(head: EagleHead, rows: Rows) -> tuple[float, EagleHead]:
    """Return the loss of packed rows and its gradient."""
    weights, rest = Eagle3Method(TrainConfig()).split(head)
    value, gradient = compiled()(weights, rest, rows)
    return float(value), gradient


@cache
def compiled(kind: str = "soft", *, keeps: bool = False) -> Any:
    """Return the function that computes the loss and its gradient."""
    target = support.target()

    def loss(weights: EagleHead, rest: Any, rows: Rows) -> jax.Array:
        seen = observe.observe(target, rows, support.STATES)
        options = eagle3.Eagle3Loss(STEPS, DECAY, kind, keeps)
        return eagle3.loss(weights.replace(**rest), target, seen, rows, options)[0]

    return jax.jit(jax.value_and_grad(loss))


def lk(p: np.ndarray, q: np.ndarray, weight: float | None = None) -> float:
    overlap = float(np.minimum(p, q).sum())
    w = np.exp(-3 * overlap) if weight is None else weight
    return float(w * (q * np.log(q / p)).sum() + (1 - w) * (1 - overlap))


@pytest.mark.parametrize("eagle31", [False, True])
def test_loss_and_gradient_of_packed_documents_equal_the_equations(eagle31: bool) -> None:
    head = support.head(eagle31=eagle31)
    value, gradient = trained(head, support.packed(support.documents(SIZES), 48))
    weights = named(head)
    assert value == pytest.approx(expected(weights, head, SIZES), rel=1e-5)
    gradients, rng = named(gradient), np.random.default_rng(0)
    assert gradients.keys() == weights.keys()
    for name, array in weights.items():
        direction, size = rng.normal(size=array.shape), 1e-5
        direction /= np.linalg.norm(direction)
        ends = [expected({**weights, name: array + sign * size * direction}, head, SIZES) for sign in (1, -1)]
        derivative = (ends[0] - ends[1]) / (2 * size)
        scale = np.linalg.norm(gradients[name])
        assert scale > 1e-3, name
        assert (gradients[name] * direction).sum() == pytest.approx(derivative, abs=1e-5 * max(scale, 1)), name


def test_lk_loss_equals_its_equation() -> None:
    sizes = [11, 18]
    head = support.head()
    value, gradient = compiled("lk")(
        *Eagle3Method(TrainConfig()).split(head), support.packed(support.documents(sizes), 48)
    )
    assert float(value) == pytest.approx(expected(named(head), head, sizes, of=lk), rel=1e-5)
    assert float(value) != pytest.approx(expected(named(head), head, sizes), rel=1e-2)
    assert float(jnp.abs(gradient.head).max()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_gradient_of_rounded_probabilities_has_the_sum_zero(kind: str) -> None:
    rng = np.random.default_rng(0)
    logits = on_device(rng.normal(size=(4, 4096)), jnp.float32)
    teacher = jax.nn.softmax(2 * logits[::-1]).astype(jnp.bfloat16).astype(jnp.float32)
    assert float(jnp.abs(teacher.sum(axis=-1) - 1).max()) > 1e-4
    gradient = jax.grad(lambda logits: losses.LOSSES[kind](logits, teacher).sum())(logits)
    np.testing.assert_allclose(gradient.sum(axis=-1), 0, atol=1e-6)
    assert float(jnp.abs(gradient).max()) > 1e-3


def test_trained_weights_are_copies_of_those_of_the_head() -> None:
    head = support.head()
    weights = Eagle3Method(TrainConfig()).split(head)[0]
    assert weights.fc.unsafe_buffer_pointer() != head.fc.unsafe_buffer_pointer()  # type: ignore[union-attr]
    np.testing.assert_array_equal(weights.fc, head.fc)


def test_loss_that_ignores_segments_masks_or_the_draft_vocabulary_differs() -> None:
    head, rows = support.head(), support.packed(support.documents(SIZES), 48)
    value = trained(head, rows)[0]
    merged = rows.replace(segments=jnp.ones_like(rows.segments))
    every = rows.replace(counted=rows.segments > 0)
    others = [trained(head, other)[0] for other in (merged, every)]
    assert all(abs(other - value) > 1e-2 * value for other in others)
    weights, everything = named(head), np.arange(40)
    target_ids = np.asarray(head.draft_to_target)
    assert len(target_ids) < len(everything)
    unmasked = expected(weights, head.replace(draft_to_target=on_device(target_ids[::-1].copy())), SIZES)
    assert abs(unmasked - value) > 1e-2 * value  # draft ids in another order


def test_blocks_of_tokens_vocabulary_and_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = support.head(), support.packed(support.documents(SIZES), 48)
    value, gradient = trained(head, rows)
    sizes = (observe, "LOGITS", 400), (losses, "LOGITS", 400), (interval_reference, "TILE", 8)
    for module, name, size in sizes:
        monkeypatch.setattr(module, name, size)
    assert losses.largest_divisor(96, 400 // 16) < 96  # several blocks of tokens
    blocks, own = compiled(keeps=True)(*Eagle3Method(TrainConfig()).split(head), rows)  # nothing is computed again
    assert float(blocks) == pytest.approx(value, rel=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-5), own, gradient)


def test_choices_of_equal_logits_are_the_smallest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "LOGITS", 32)
    target = support.target()
    normed = on_device(np.random.default_rng(0).normal(size=(1, 16, 16)), jnp.float32)
    flat = target.replace(head=jnp.concatenate([target.head[:20]] * 2))  # type: ignore[index]
    expected = np.argmax(np.asarray(normed @ flat.head.T), axis=-1)
    np.testing.assert_array_equal(observe.choose(flat, normed), expected)
    assert expected.max() < 20
