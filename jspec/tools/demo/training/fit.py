"""Trains the embedded target: each update is one compiled program, and all tokens are in the memory of the device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Float, Int

from jspec.tools.demo.training.model import LINEAR, Attention, Shape, Weights, initial, losses
from jspec.tools.demo.training.prepare import HELD, INDEX, STARTS, TRAIN


@dataclass(frozen=True)
class Recipe:
    """How to train: by Muon (arXiv:2502.16982), and embedding and norms by AdamW (arXiv:1711.05101).

    Attributes:
        rows: texts of an update.
        own_rows: functions and classes of an update besides, if some are given.
        rate: highest learning rate.
        decay: weight decay of linear weights.
        warmup: updates until the highest learning rate; it falls linearly to 0 from there on.
        chunk: updates between two lines of progress.
        attention: implementation of the attention.
        dtype: dtype of products; weights are float32.
        seed: seed of the weights and of the order of the texts.
    """

    rows: int = 64
    own_rows: int = 128
    rate: float = 8e-3
    decay: float = 0.1
    warmup: int = 200
    chunk: int = 100
    attention: Attention = "xla"
    dtype: str = "bfloat16"
    seed: int = 0


class State(NamedTuple):
    """What an update changes."""

    weights: Weights
    moments: optax.OptState
    step: Int[Array, ""]


class Windows(NamedTuple):
    """Held-out texts of one group, cut to the context; the first token of a row is not predicted."""

    tokens: Int[np.ndarray, "rows longer"]
    is_text: np.ndarray  # bool [rows, size]: which of the predicted tokens belong to the text
    bytes: int  # of all rows


class Own(NamedTuple):
    """Texts of functions and classes as rows of tokens; each stands between two end tokens.

    Attributes:
        tokens: the tokens, padded with end tokens.
        signs: what to learn of each token but the first: 1: it follows, -1: it should not follow, 0: nothing.
    """

    tokens: np.ndarray  # int [texts, longer]
    signs: np.ndarray  # int8 [texts, size]


def fit(
    data: Path,
    shape: Shape,
    recipe: Recipe,
    *,
    minutes: float | None = None,
    updates: int = 0,
    init: Weights | None = None,
    own: Own | None = None,
) -> Weights:
    """Train a target, print its progress, and return its weights in float32.

    Args:
        data: folder of `jspec.tools.demo.training.prepare.prepare`.
        shape: sizes of the target.
        recipe: how to train.
        minutes: time to train for; the clock tells the number of updates.
        updates: updates to train for, if ``minutes`` is None.
        init: weights to begin with; None: random ones.
        own: functions and classes to learn besides; their mean loss is added to that of the text.
    """
    stored = np.load(data / TRAIN)
    if stored.max() >= shape.vocab:
        raise ValueError(f"vocab: expected at least {stored.max() + 1}, the tokens of {data}, got {shape.vocab}")
    blocks = np.load(data / STARTS)
    state, update = prepared(shape, recipe, init)
    tokens, blocks, random = jnp.asarray(stored), jnp.asarray(blocks), np.random.default_rng(recipe.seed)
    began = time.perf_counter()
    # With a time limit, the clock tells the number of updates after each chunk but the first, which compiles.
    total, done = (updates if minutes is None else 2**30), 0
    while done < total:
        start, chunk = time.perf_counter(), min(recipe.chunk, total - done)
        means = []
        for _ in range(chunk):
            places = None if own is None else random.integers(len(own.tokens), size=recipe.own_rows)
            chosen = None if own is None else Own(own.tokens[places].astype(np.int32), own.signs[places])
            state, mean = update(state, tokens, blocks, jnp.float32(total), chosen)
            means.append(mean)
        loss, done = float(jnp.mean(jnp.stack(means))), done + chunk
        seconds = time.perf_counter() - start
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss after {done} updates is {loss}: lower --rate")
        if minutes is not None and done > recipe.chunk:
            left = 60 * minutes - (time.perf_counter() - began)
            total = done + max(0, int(left / seconds)) * recipe.chunk
        report(done, total, loss, chunk * recipe.rows * shape.context / seconds, began)
    for group, windows in held_out(data, shape.context).items():
        bits = bits_per_byte(state.weights, windows, shape, recipe)
        print(f"held-out {group}: {bits:.3f} bits a byte ({windows.bytes} bytes)", flush=True)
    return state.weights


def report(done: int, total: int, loss: float, rate: float, began: float) -> None:
    """Print a line of progress."""
    print(
        f"update {done} of {total}: loss {loss:.4f} nats a token, {rate / 1e6:.3f} M tokens/s, "
        f"{time.perf_counter() - began:.0f} s",
        flush=True,
    )


def prepared(
    shape: Shape, recipe: Recipe, init: Weights | None = None
) -> tuple[State, Callable[[State, Array, Array, Float[Array, ""], Own | None], tuple[State, Float[Array, ""]]]]:
    """Return the state before the first update, and the compiled program of an update.

    The program takes a state, all tokens, the starts of blocks, the number of all updates, and functions and classes if
    there are any. It returns the new state and the loss.
    """
    optimizer = _optimizer(recipe)
    weights = initial(shape, jax.random.key(recipe.seed)) if init is None else init
    state = State(weights, optimizer.init(weights), jnp.int32(0))

    def loss_of(weights: Weights, rows: Int[Array, "rows longer"], own: Own | None) -> Float[Array, ""]:
        cast = jax.tree.map(lambda value: value.astype(recipe.dtype), weights)
        loss = jnp.mean(losses(cast, rows, shape, recipe.attention))
        if own is None:
            return loss
        texts, signs = map(jnp.asarray, own)
        return loss + own_loss(losses(cast, texts, shape, recipe.attention), signs)

    @partial(jax.jit, donate_argnums=0)
    def update(
        state: State,
        tokens: Int[Array, "tokens"],
        blocks: Int[Array, "blocks"],
        total: Float[Array, ""],
        own: Own | None,
    ) -> tuple[State, Float[Array, ""]]:
        key = jax.random.fold_in(jax.random.key(recipe.seed + 1), state.step)
        rows = drawn(key, tokens, blocks, recipe.rows, shape.context + 1)
        loss, gradient = jax.value_and_grad(loss_of)(state.weights, rows, own)
        changes, moments = optimizer.update(gradient, state.moments, state.weights)
        rate = learning_rate(recipe, state.step, total)
        changed = jax.tree.map(lambda value, change: value + rate * change, state.weights, changes)
        return State(changed, moments, state.step + 1), loss

    return state, update


def own_loss(nats: Float[Array, "rows size"], signs: Int[Array, "rows size"]) -> Float[Array, ""]:
    """Return the mean of minus the log-probability of tokens that follow, and of that others do not follow.

    Args:
        nats: minus the log-probability of each token.
        signs: 1: the token follows, -1: it should not, 0: it does not count.
    """
    unlikely = -jnp.log(-jnp.expm1(-jnp.maximum(nats, 1e-5)))
    return jnp.sum(jnp.where(signs > 0, nats, jnp.where(signs < 0, unlikely, 0))) / jnp.sum(signs != 0)


def drawn(
    key: Array, tokens: Int[Array, "tokens"], blocks: Int[Array, "blocks"], count: int, size: int
) -> Int[Array, "count size"]:
    """Draw ``count`` rows of a text: half begin anywhere, half with an end token and then a block, as prompts do."""
    anywhere, chosen = jax.random.split(key)
    starts = jax.random.randint(anywhere, (count,), 0, len(tokens) - size + 1)
    begun = jnp.minimum(blocks[jax.random.randint(chosen, (count // 2,), 0, len(blocks))], len(tokens) - size + 1) - 1
    rows = tokens[starts.at[: count // 2].set(begun)[:, None] + jnp.arange(size)].astype(jnp.int32)
    return rows.at[: count // 2, 0].set(0)


def learning_rate(recipe: Recipe, step: Int[Array, ""], total: Float[Array, ""]) -> Float[Array, ""]:
    """Return the learning rate of an update: a linear rise, then a linear fall to 0."""
    rise = (step + 1) / recipe.warmup
    fall = (total - step) / jnp.maximum(total - recipe.warmup, 1)
    return recipe.rate * jnp.minimum(1.0, jnp.minimum(rise, fall))


def held_out(data: Path, context: int) -> dict[str, Windows]:
    """Return the held-out texts of a prepared folder by group, in rows of ``context`` predicted tokens."""
    tokens = np.load(data / HELD).astype(np.int32)
    found: dict[str, list[tuple[np.ndarray, int]]] = {}
    for one in json.loads((data / INDEX).read_text()):
        ids = tokens[one["start"] : one["start"] + one["tokens"]]
        found.setdefault(one["group"], []).append((ids, one["bytes"]))
    groups = {}
    for group, texts in found.items():
        cuts = [ids[i : i + context + 1] for ids, _ in texts for i in range(0, len(ids) - 1, context)]
        rows = np.zeros((len(cuts), context + 1), np.int32)
        is_text = np.zeros((len(cuts), context), bool)
        for row, cut in enumerate(cuts):
            rows[row, : len(cut)], is_text[row, : len(cut) - 1] = cut, True
        groups[group] = Windows(rows, is_text, sum(size for _, size in texts))
    return groups


def bits_per_byte(weights: Weights, windows: Windows, shape: Shape, recipe: Recipe) -> float:
    """Return the mean code length of held-out texts in bits a byte; weights are rounded as they are written."""
    rounded = jax.tree.map(lambda value: value.astype(jnp.bfloat16).astype(recipe.dtype), weights)
    run = jax.jit(lambda weights, rows: losses(weights, rows, shape, recipe.attention))
    nats, size = 0.0, recipe.rows
    for start in range(0, len(windows.tokens), size):
        rows, is_text = windows.tokens[start : start + size], windows.is_text[start : start + size]
        padded = np.pad(rows, ((0, size - len(rows)), (0, 0)))
        nats += float(np.sum(np.asarray(run(rounded, padded))[: len(rows)], where=is_text, dtype=np.float64))
    return nats / math.log(2) / windows.bytes


def _optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Return the optimizer with a learning rate of 1, by which the caller multiplies the changes."""
    muon = optax.contrib.muon(
        1.0,
        weight_decay=recipe.decay,
        adam_b1=0.9,
        adam_b2=0.95,
        consistent_rms=0.2,  # changes of AdamW's size
        muon_weight_dimension_numbers=_axes,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def _axes(weights: Weights) -> dict[str, optax.contrib.MuonDimensionNumbers | None]:
    """Return the axes of the linear weights [layers, out, in]; None for embedding and norms, which AdamW changes."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    return {name: axes if name in LINEAR else None for name in weights}
