"""Chooses tokens from logits whose columns are divided over devices (`OwnColumns`), without gathering the logits.

Each device chooses among its own columns. Then the devices exchange a few numbers for each row, as int32 words, and all
devices choose the same tokens from them. Among equal values, the token with the smallest column is chosen, as on one
device.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.quantized import PartialSums, reduce_partials
from pallas_kernels.layers.shard import AXIS, OwnColumns
from pallas_kernels.sampling.sample_tokens import NO_TOKEN
from pallas_kernels.sampling.top_log_probs import (
    BLOCK,
    OUT,
    best_of_blocks,
    best_of_blocks_reference,
    merge_blocks,
    merge_blocks_reference,
    too_many_candidates,
)


def own_logits(logits: OwnColumns) -> PartialSums:
    """Returns this device's logits [1, *rows, width]; those of padding columns are -inf."""
    if not logits.is_padded:
        return logits.own
    return jnp.where(_columns(logits) < logits.size, reduce_partials(logits.own, jnp.float32), -jnp.inf)[None]


def own_ids(logits: OwnColumns, ids: Int[Array, " columns"] | None) -> Int32[Array, " width"]:
    """Returns the token ids of this device's columns; those of padding columns are arbitrary.

    Args:
        logits: the logits.
        ids: token id of each column of all devices; None: the column's index.
    """
    return _columns(logits) if ids is None else own_part(logits, ids)


def own_part(logits: OwnColumns, values: Array) -> Array:
    """Returns the values [..., width] of this device's columns among those of all [..., columns]."""
    return values[..., jnp.minimum(_columns(logits), logits.size - 1)]


def _columns(logits: OwnColumns) -> Int32[Array, " width"]:
    return jax.lax.axis_index(AXIS) * logits.width + jnp.arange(logits.width, dtype=jnp.int32)


def best_of_devices(tokens: Int32[Array, "*rows"], scores: Float[Array, "*rows"], width: int) -> Int32[Array, "*rows"]:
    """Returns the column of the largest score of all devices for each row; `NO_TOKEN` if a device has no token.

    Args:
        tokens: the column that this device chose among its own columns, or `NO_TOKEN`.
        scores: the column's score.
        width: number of columns of each device.
    """
    words = jax.lax.all_gather(jnp.stack([tokens, _words(scores)]), AXIS)
    tokens, scores = words[:, 0], _floats(words[:, 1])
    is_token, columns = tokens != NO_TOKEN, tokens + _first_columns(tokens, width)
    first = jnp.min(jnp.where(scores == jnp.max(scores, axis=0), columns, OUT), axis=0)
    return jnp.where(jnp.all(is_token, axis=0), first, NO_TOKEN)


def top_log_probs_of_devices(
    logits: OwnColumns, k: int, *, base: Float[Array, " rows"] | None = None, implementation: Implementation = "auto"
) -> tuple[Float[Array, "rows k"], Int32[Array, "rows k"]]:
    """Returns the k largest natural log-probabilities of each row and their columns, like `top_log_probs`.

    The devices exchange the k largest logits and the log-sum-exp of each block of columns. So the ids are those that
    `top_log_probs` returns for the gathered logits, and the log-probabilities equal up to rounding.

    Args:
        logits: [1, *rows, columns].
        k: at most the number of columns.
        base, implementation: as in `top_log_probs`.
    """
    own = reduce_partials(own_logits(logits), jnp.float32).reshape(-1, logits.width)
    kept = min(k, BLOCK)
    unsupported = too_many_candidates(logits.width, kept, jax.lax.axis_size(AXIS))
    kernel, reference = (partial(run, k=kept) for run in (best_of_blocks, best_of_blocks_reference))
    best, ids, sums = dispatch(implementation, unsupported, kernel, reference, own)
    mine = jnp.concatenate([_words(best), ids, _words(sums)[..., None]], axis=-1)
    words = jax.lax.all_gather(mine, AXIS)  # [devices, rows, blocks, 2 * kept + 1]
    ids = words[..., kept:-1]
    ids = jnp.where(ids == OUT, OUT, ids + _first_columns(words, logits.width))
    of_all = [_floats(words[..., :kept]), ids, _floats(words[..., -1])]
    blocks = [jnp.moveaxis(field, 0, 1).reshape(len(own), -1, *field.shape[3:]) for field in of_all]
    kernel, reference = (partial(run, k=k) for run in (merge_blocks, merge_blocks_reference))
    return dispatch(implementation, unsupported, kernel, reference, *blocks, *([] if base is None else [base]))


def _first_columns(exchanged: Int32[Array, "devices *more"], width: int) -> Array:
    """Returns the first column of each device, in a shape that broadcasts with exchanged numbers."""
    return (jnp.arange(len(exchanged), dtype=jnp.int32) * width).reshape(-1, *(1,) * (exchanged.ndim - 1))


def _words(values: Float[Array, "*rows"]) -> Int32[Array, "*rows"]:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _floats(words: Int32[Array, "*rows"]) -> Float[Array, "*rows"]:
    return jax.lax.bitcast_convert_type(words, jnp.float32)
