"""Test the losses of block heads and Medusa heads, and their gradients, against their equations in numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.train import blocks, losses, observe
from jspec.train.blocks import choose_blocks
from jspec.train.config import TrainConfig
from jspec.train.methods import METHODS
from tests.reference import dflash, dspark
from tests.reference.head import norm
from tests.support.arrays import on_device
from tests.train import support

pytestmark = pytest.mark.once

DEPTH, ANCHORS, LENGTH = 3, 5, 48
OPTIONS: dict[str, Any] = dict(ttt=DEPTH, anchors=ANCHORS, length=LENGTH, feature_layers=(1, 3), layers=2)
SIZES = (19, 30, 7, 16)
drawn_blocks = jax.jit(choose_blocks, static_argnums=(3, 4))


def config_of(method: str) -> TrainConfig:
    extra = {"feature_layers": None, "layers": None} if method == "medusa" else {}
    return TrainConfig(method=method, **{**OPTIONS, "markov_rank": 4, **extra})


def head_of(method: str) -> Any:
    """Return a head of the small target with larger random weights than a new one's, norms and biases too."""
    made = METHODS[method](config_of(method))
    head, rng = made.create(support.target(), np.arange(40)), np.random.default_rng(1)
    trained, rest = made.split(head)

    def draw(x: Any) -> Any:
        is_norm = x.ndim == 1 and bool((np.asarray(x) == 1).all())
        return on_device(rng.uniform(0.5, 1.5, x.shape) if is_norm else rng.normal(0, 0.4, x.shape), jnp.float32)

    return jax.tree.map(draw, trained).replace(**rest)


def compiled(method: str, head: Any) -> Any:
    """Return a function of packed rows that returns their loss and its gradient."""
    made, target = METHODS[method](config_of(method)), support.target()
    weights, rest = made.split(head)

    def loss(weights: Any, rest: Any, rows: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), len(rows.tokens))
        seen = observe.observe(target, rows, made.states(head, target))
        return made.loss(weights.replace(**rest), target, seen, rows, keys)[0]

    gradients = jax.jit(jax.value_and_grad(loss))
    return lambda rows: gradients(weights, rest, rows)


class BlockCase:
    """A head and packed documents; each is predicted by the reference from the files of the head."""

    def __init__(self, method: str) -> None:
        self.method, self.head = method, head_of(method)
        self.run = compiled(method, self.head)
        self.documents = support.documents(SIZES)
        self.rows = support.packed(self.documents, LENGTH)
        made, target = METHODS[method](config_of(method)), support.target()
        self.fields, self.tensors = made.files(self.head, target, {})
        self.outputs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.labels: dict[tuple[int, int, int], float] = {}  # of the confidences, by the weights of the first call
        for tokens, _ in self.documents:
            states = made.states(self.head, target) or (1,)
            found, logits = support.outputs(tokens, (*states, 3))
            self.outputs.append((found[:, :-16], found[:, -16:], logits))

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Return the document and the position of each anchor that training draws."""
        keys = jax.random.split(jax.random.key(0), len(self.rows.tokens))
        drawn = drawn_blocks(self.rows, self.rows.tokens, keys, ANCHORS, DEPTH)
        found = []
        tokens, segments = np.asarray(self.rows.tokens), np.asarray(self.rows.segments)
        for row in range(len(tokens)):
            for place in np.asarray(drawn.anchors)[row]:
                segment = segments[row, place]
                start = int(np.flatnonzero(segments[row] == segment)[0])
                own = tokens[row, segments[row] == segment]
                same = [i for i, (ids, _) in enumerate(self.documents) if np.array_equal(ids, own)]
                if segment and self.fits(same[0], int(place) - start):
                    found.append((same[0], int(place) - start))
        return found

    def fits(self, document: int, position: int) -> bool:
        _, counted = self.documents[document]
        return 0 < position < len(counted) - 1 and bool(counted[position] and counted[position + 1])

    def loss(self, tensors: dict[str, np.ndarray]) -> float:
        """Return the loss of all anchors, or of all places of Medusa heads, by the equations."""
        each: Callable[..., float] = {"dflash": self._dflash, "dspark": self._dspark, "medusa": self._medusa}[
            self.method
        ]
        places = self.places
        if self.method == "medusa":
            places = [(i, position) for i, (tokens, _) in enumerate(self.documents) for position in range(len(tokens))]
        return sum(each(tensors, document, position) for document, position in places)

    def _labels(self, document: int, position: int) -> list[tuple[int, int, int]]:
        """Return (depth from 1, place of the teacher, token) of each token that counts behind a position."""
        tokens, counted = self.documents[document]
        ahead = [(k, position + k - 1, position + k) for k in range(1, DEPTH + 1) if position + k < len(tokens)]
        return [(k, teacher, int(tokens[label])) for k, teacher, label in ahead if counted[label]]

    def _dflash(self, tensors: Any, document: int, position: int) -> float:
        tokens, (features, _, _) = self.documents[document][0], self.outputs[document]
        target = support.target()
        output = np.asarray(target.output_head, np.float64)
        given = (self.fields, tensors, np.asarray(target.embed), features[:position], int(tokens[position]), DEPTH)
        logits = dflash.block_logits(*given, output=output)
        p = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        weights = np.exp(-np.arange(DEPTH) / ((DEPTH + 1) / 2))
        return sum(-weights[k - 1] * np.log(p[k - 1, label]) for k, _, label in self._labels(document, position))

    def _dspark(self, tensors: Any, document: int, position: int) -> float:
        tokens, (features, _, behind) = self.documents[document][0], self.outputs[document]
        target, eps = support.target(), self.fields["rms_norm_eps"]
        given = (self.fields, tensors, np.asarray(target.embed), features[:position], int(tokens[position]), DEPTH)
        states = norm(dflash.block_states(*given), np.asarray(tensors["norm.weight"], np.float64), eps)
        before = np.array([tokens[min(position + k, len(tokens) - 1)] for k in range(DEPTH)])
        base = states @ np.asarray(target.output_head, np.float64).T
        logits = dspark.corrected(tensors, base, states, before)
        c = dspark.confidences(tensors, states, before, with_markov=True)
        p = np.exp(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        total = 0.0
        for k, teacher, label in self._labels(document, position):
            q = np.exp(behind[teacher] - np.log(np.exp(behind[teacher]).sum()))
            distance = np.abs(p[k - 1] - q).sum()
            accepted = self.labels.setdefault((document, position, k), 1 - distance / 2)  # has no gradient
            entropy = -(accepted * np.log(c[k - 1]) + (1 - accepted) * np.log(1 - c[k - 1]))
            total += np.exp(-(k - 1) / DEPTH) * (-0.1 * np.log(p[k - 1, label]) + 0.9 * distance + entropy)
        return total

    def _medusa(self, tensors: Any, document: int, position: int) -> float:
        (tokens, counted), total = self.documents[document], 0.0
        for head in range(DEPTH):
            at = position + 2 + head
            if at < len(tokens) and counted[at]:
                x = self.outputs[document][1][position]
                inner = (
                    np.asarray(tensors[f"{head}.0.linear.weight"], np.float64) @ x + tensors[f"{head}.0.linear.bias"]
                )
                x = x + inner / (1 + np.exp(-inner))
                logits = tensors[f"{head}.1.weight"] @ x
                total += 0.8**head * (np.log(np.exp(logits).sum()) - logits[tokens[at]])
        return total


case_of = cache(BlockCase)  # each compiles one program


@pytest.mark.parametrize("method", ["dflash", "dspark", "medusa"])
def test_loss_and_gradient_equal_the_equations(method: str) -> None:
    case = case_of(method)
    value, gradient = case.run(case.rows)
    assert len(case.places) >= 6
    tensors = {name: np.asarray(tensor, np.float64) for name, tensor in case.tensors.items()}
    assert float(value) == pytest.approx(case.loss(tensors), rel=1e-5)
    made = METHODS[method](config_of(method))
    gradients = made.files(gradient.replace(**made.split(case.head)[1]), support.target(), {})[1]
    rng = np.random.default_rng(0)
    assert set(tensors) == set(gradients)
    for name in rng.choice(sorted(tensors), min(10, len(tensors)), replace=False):
        direction, size = rng.normal(size=tensors[name].shape), 1e-5
        direction /= np.linalg.norm(direction)
        ends = [case.loss({**tensors, name: tensors[name] + sign * size * direction}) for sign in (1, -1)]
        scale = float(np.linalg.norm(gradients[name]))
        assert scale > 1e-4, name
        found = (np.asarray(gradients[name], np.float64) * direction).sum()
        assert found == pytest.approx((ends[0] - ends[1]) / (2 * size), abs=1e-5 * max(scale, 1)), name


@pytest.mark.parametrize("method", ["dflash", "dspark", "medusa"])
def test_blocks_of_tokens_and_anchors_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(method)
    value, gradient = case.run(case.rows)
    for module, name, size in ((losses, "LOGITS", 500), (blocks, "SCORES", 2 * 4 * 4 * LENGTH)):
        monkeypatch.setattr(module, name, size)
    again, own = compiled(method, case.head)(case.rows)
    assert float(again) == pytest.approx(float(value), rel=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), own, gradient)


@pytest.mark.parametrize("method", ["dflash", "dspark", "medusa"])
def test_loss_that_ignores_segments_differs(method: str) -> None:
    case = case_of(method)
    value = case.run(case.rows)[0]
    merged = case.rows.replace(segments=(case.rows.segments > 0).astype(jnp.int32))
    assert abs(case.run(merged)[0] - value) > 1e-3 * value


def test_anchors_are_distinct_tokens_that_count_before_others_that_count() -> None:
    case = case_of("dflash")
    keys = jax.random.split(jax.random.key(3), len(case.rows.tokens))
    drawn = drawn_blocks(case.rows, case.rows.tokens, keys, 40, DEPTH)
    counts, anchors = np.asarray(drawn.counts), np.asarray(drawn.anchors)
    counted, segments = np.asarray(case.rows.counted), np.asarray(case.rows.segments)
    for row in range(len(anchors)):
        used = anchors[row][counts[row, :, 0]]
        assert len(set(used.tolist())) == len(used)
        first = np.flatnonzero(np.diff(segments[row], prepend=0) > 0)
        fits = counted[row] & np.roll(counted[row], -1) & (segments[row] == np.roll(segments[row], -1))
        fits &= (segments[row] > 0) & ~np.isin(np.arange(LENGTH), first)
        assert set(used.tolist()) == set(np.flatnonzero(fits).tolist())
