"""Lets a target complete thousands of prompts at once, in plain JAX: its text to train itself or its heads on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from jspec.tools.demo.training.model import NORMS, THETA, Shape, Weights, norm, read, rotated, shape_of

END = 0  # id of the token that begins and ends documents
ROWS = 4096  # prompts that are completed at once


class Sample(NamedTuple):
    """A completion."""

    text: str
    has_ended: bool  # with an end token


def samples(
    folder: Path,
    prompts: Sequence[str],
    temperatures: Sequence[float],
    size: int,
    *,
    seed: int,
    rows: int | None = None,
    dtype: str = "bfloat16",
) -> Iterator[Sample]:
    """Yield the completion of each prompt by a target.

    Args:
        folder: folder of the target and its tokenizer.
        prompts: the prompts; longer ones than ``size`` tokens are refused.
        temperatures: temperature of each completion; 0: greedy.
        size: tokens of a prompt and its completion.
        seed: seed of the samples.
        rows: prompts that are completed at once; None: `ROWS`.
        dtype: dtype of products.
    """
    tokenizer, shape = Tokenizer.from_file(str(folder / "tokenizer.json")), shape_of(folder)
    weights = jax.tree.map(lambda value: value.astype(dtype), read(folder, shape))
    ids = [one.ids for one in tokenizer.encode_batch(list(prompts))]
    if max(map(len, ids)) >= size:
        raise ValueError(f"expected prompts of fewer than {size} tokens, got one of {max(map(len, ids))}")
    rows = rows or ROWS
    for start in range(0, len(ids), rows):
        chosen = ids[start : start + rows]
        given, lengths = np.zeros((rows, size), np.int32), np.full(rows, size, np.int32)
        for row, own in enumerate(chosen):
            given[row, : len(own)], lengths[row] = own, len(own)
        heat = np.zeros(rows, np.float32)
        heat[: len(chosen)] = temperatures[start : start + rows]
        done = np.asarray(sample(weights, given, lengths, heat, jax.random.key(seed + start), shape=shape))
        completions = [row[len(own) :] for row, own in zip(done, chosen, strict=False)]
        ends = [np.flatnonzero(row == END) for row in completions]
        cut = [row[: end[0]] if len(end) else row for row, end in zip(completions, ends, strict=True)]
        texts = tokenizer.decode_batch([row.tolist() for row in cut])
        yield from (Sample(text, len(end) > 0) for text, end in zip(texts, ends, strict=True))


@partial(jax.jit, static_argnames="shape")
def sample(
    weights: Weights,
    prompts: Int[Array, "rows size"],
    lengths: Int[Array, "rows"],
    temperatures: Float[Array, "rows"],
    key: Array,
    *,
    shape: Shape,
) -> Int[Array, "rows size"]:
    """Return prompts with the tokens that a target writes behind them.

    All rows are at the same position; before the end of its prompt, a row takes the prompt's token.

    Args:
        weights: the weights, whose dtype is that of the products.
        prompts: tokens of the prompts, with any behind them.
        lengths: tokens of each prompt.
        temperatures: temperature of each row; 0: the most probable token.
        key: key of the random numbers.
        shape: sizes of the target.
    """
    rows, size = prompts.shape
    empty = jnp.zeros((rows, size, shape.kv_heads, shape.head_dim), weights["embed_tokens"].dtype)

    def step(carry: tuple[Array, list[Array]], position: Array) -> tuple[tuple[Array, list[Array]], Array]:
        token, cache = carry
        x, written = weights["embed_tokens"][token], list[Array]()
        for index in range(shape.layers):
            own = {name: value[index] for name, value in weights.items() if name not in ("embed_tokens", "norm")}
            x, *new = _layer(x, own, cache[2 * index], cache[2 * index + 1], position, shape)
            written += new
        normed = norm(x, weights["norm"])
        scores = jnp.matmul(normed, weights["embed_tokens"].T, preferred_element_type=jnp.float32)
        noise = jax.random.gumbel(jax.random.fold_in(key, position), scores.shape)
        chosen = jnp.argmax(scores + temperatures[:, None] * noise, axis=-1).astype(prompts.dtype)
        token = jnp.where(position + 1 < lengths, prompts[:, position + 1], chosen)
        return (token, written), token

    _, written = jax.lax.scan(step, (prompts[:, 0], [empty] * (2 * shape.layers)), jnp.arange(size - 1))
    return jnp.concatenate([prompts[:, :1], written.T], axis=1)


def _layer(
    x: Float[Array, "rows hidden"], own: Weights, keys: Array, values: Array, position: Array, shape: Shape
) -> tuple[Array, Array, Array]:
    """Return the output of a layer for one token of each row, and the cache [rows, size, kv_heads, head_dim]."""
    rows, size, *_ = keys.shape
    frequencies = THETA ** (-jnp.arange(0, shape.head_dim, 2) / shape.head_dim)
    normed, angles = norm(x, own[NORMS[0]]), (position * frequencies)[None]
    q, k, v = ((normed @ own[f"self_attn.{name}_proj"].T).reshape(rows, 1, -1, shape.head_dim) for name in "qkv")
    keys = jax.lax.dynamic_update_slice_in_dim(keys, rotated(k, angles), position, axis=1)
    values = jax.lax.dynamic_update_slice_in_dim(values, v, position, axis=1)
    grouped = rotated(q, angles).reshape(rows, shape.kv_heads, -1, shape.head_dim)
    scores = jnp.einsum("rkgd,rskd->rkgs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.arange(size) <= position, scores / math.sqrt(shape.head_dim), -jnp.inf)
    mixed = jnp.einsum("rkgs,rskd->rkgd", jax.nn.softmax(scores, axis=-1).astype(x.dtype), values)
    x += mixed.reshape(rows, -1) @ own["self_attn.o_proj"].T
    normed = norm(x, own[NORMS[1]])
    gated = jax.nn.silu(normed @ own["mlp.gate_proj"].T) * (normed @ own["mlp.up_proj"].T)
    return x + gated @ own["mlp.down_proj"].T, keys, values
