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

from jspec.tools.demo.training.model import LINEAR, NORMS, Shape, Weights, layer, output, read, shape_of
from jspec.tools.demo.training.prepare import TOKENIZER

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
    tokenizer, shape = Tokenizer.from_file(str(folder / TOKENIZER)), shape_of(folder)
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
    """Return prompts, each followed by its completion.

    All rows are at the same position; before the end of its prompt, a row takes the prompt's token.

    Args:
        weights: the weights, whose dtype is that of the products.
        prompts: tokens of the prompts, padded with any tokens.
        lengths: tokens of each prompt.
        temperatures: temperature of each row; 0: the most probable token.
        key: key of the random numbers.
        shape: sizes of the target.
    """
    rows, size = prompts.shape
    empty = jnp.zeros((rows, size, shape.kv_heads, shape.head_dim), weights["embed_tokens"].dtype)

    def step(carry: tuple[Array, list[Array]], position: Array) -> tuple[tuple[Array, list[Array]], Array]:
        token, cache = carry
        x, written = weights["embed_tokens"][token][:, None], list[Array]()

        def attend(q: Array, k: Array, v: Array) -> Array:
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(rows, own, position, axis=1)
                for rows, own in zip(cache[len(written) :], (k, v), strict=False)
            )
            written.extend((keys, values))
            return _attention(q, keys, values, position)

        for index in range(shape.layers):
            own = {name: weights[name][index] for name in (*LINEAR, *NORMS)}
            x = layer(x, own, position[None], attend, shape)
        scores = output(x[:, 0], weights)
        noise = jax.random.gumbel(jax.random.fold_in(key, position), scores.shape)
        chosen = jnp.argmax(scores + temperatures[:, None] * noise, axis=-1).astype(prompts.dtype)
        token = jnp.where(position + 1 < lengths, prompts[:, position + 1], chosen)
        return (token, written), token

    _, written = jax.lax.scan(step, (prompts[:, 0], [empty] * (2 * shape.layers)), jnp.arange(size - 1))
    return jnp.concatenate([prompts[:, :1], written.T], axis=1)


def _attention(
    q: Float[Array, "rows one heads head_dim"],
    keys: Float[Array, "rows size kv_heads head_dim"],
    values: Float[Array, "rows size kv_heads head_dim"],
    position: Int[Array, ""],
) -> Float[Array, "rows kv_heads group head_dim"]:
    """Return the attention of one token of each row to the cache up to its position."""
    rows, size, kv_heads, head_dim = keys.shape
    grouped = q.reshape(rows, kv_heads, -1, head_dim)
    scores = jnp.einsum("rkgd,rskd->rkgs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.arange(size) <= position, scores / math.sqrt(head_dim), -jnp.inf)
    return jnp.einsum("rkgs,rskd->rkgd", jax.nn.softmax(scores, axis=-1).astype(q.dtype), values)
