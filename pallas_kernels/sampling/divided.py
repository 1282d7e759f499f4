"""Chooses tokens from logits whose columns are divided over devices (`OwnColumns`), without gathering the logits.

Each device chooses among its own columns. Then the devices exchange a few numbers for each row, as int32 words in one
exchange, and all devices choose the same tokens from them. Among equal values, the token with the smallest column is
chosen, as on one device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials, split_scales
from pallas_kernels.layers.shard import AXIS, OwnColumns
from pallas_kernels.sampling.sample_tokens import NO_TOKEN, Inputs, SampledRow, scored_reference
from pallas_kernels.sampling.threshold import SLICE
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


def own_part(logits: OwnColumns, values: Array) -> Array:
    """Returns this device's values [..., width] among those of all columns; those of padding columns are arbitrary."""
    return values[..., jnp.minimum(_columns(logits), logits.size - 1)]


def _columns(logits: OwnColumns) -> Int32[Array, " width"]:
    return _first_column(logits) + jnp.arange(logits.width, dtype=jnp.int32)


def _first_column(logits: OwnColumns) -> Array:
    return jax.lax.axis_index(AXIS) * logits.width


def _best_kernel(
    *refs,  # inputs, in the order of `Inputs`, then first_ref [1] int32, this device's first column; output:
    # words_ref [rows, slices, 2] int32
    # static parameters
    inputs,  # function that selects `Inputs` from `refs`
    purpose,
    size,  # number of columns of all devices
):
    """Stores score and column of the best token of one slice of a row, in one Pallas program."""
    first, words_ref = refs[-2][0], refs[-1]
    row_number, index = pl.program_id(0), pl.program_id(1)
    own = jnp.minimum(refs[0].shape[1], size - first)  # without padding
    row = SampledRow(inputs(refs), row_number, purpose, vocab=own, first_token=first)

    def store(score, column):
        words_ref[row_number, index, 0] = _words(score)
        words_ref[row_number, index, 1] = jnp.where(column == NO_TOKEN, NO_TOKEN, column + first)

    row.best_of_slice(index, store)


def _choose_kernel(words_ref, chosen_ref):
    """Chooses one row's token in one Pallas program: words_ref [devices, rows, slices, 2] -> chosen_ref [rows]."""
    row, (devices, _, slices, _) = pl.program_id(0), words_ref.shape
    place = jnp.arange(pl.next_power_of_2(devices * slices))
    inside, at = place < devices * slices, (place // slices, row, place % slices)
    scores = _floats(pltriton.load(words_ref.at[(*at, 0)], mask=inside, other=0))
    columns = pltriton.load(words_ref.at[(*at, 1)], mask=inside, other=0)
    scores = jnp.where(inside, scores, -jnp.inf)
    chosen_ref[row] = _first_best(scores, jnp.where(inside, columns, OUT))


def _first_best(scores: Array, columns: Array) -> Array:
    """Returns the first column of the largest score along axis 0; `NO_TOKEN` comes first if its score is infinity."""
    return jnp.min(jnp.where(scores == jnp.max(scores, axis=0), columns, OUT), axis=0)


def _pallas(scaled_logits, seed, first, offsets, ids, _noise, first_column, *controls, purpose, size, interpret):
    logits, scales = split_scales(scaled_logits)
    logits, scales = logits.reshape(-1, scaled_logits.shape[-1]), tuple(scale.ravel() for scale in scales)
    rows, slices = logits.shape[0], pl.cdiv(logits.shape[1], SLICE)
    ids = () if ids is None else (ids,)
    call = functools.partial(
        pl.pallas_call,
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )
    inputs = functools.partial(Inputs.of, scales=len(scales), has_ids=bool(ids))
    words = call(
        functools.partial(_best_kernel, inputs=inputs, purpose=purpose, size=size),
        grid=(rows, slices),
        out_shape=jax.ShapeDtypeStruct((rows, slices, 2), jnp.int32),
        name="sample_own_tokens",
    )(logits, seed, first, offsets.reshape(rows), *controls, *scales, *ids, first_column[None])
    chosen = call(
        _choose_kernel,
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.int32),
        name="sample_tokens_of_devices",
    )(jax.lax.all_gather(words, AXIS))
    return chosen.reshape(offsets.shape)


def _reference(logits, seed, first, offsets, ids, noise, first_column, *controls, purpose, size):
    columns = first_column + jnp.arange(logits.shape[-1], dtype=jnp.int32)
    own = jnp.where(columns < size, reduce_partials(logits, jnp.float32), -jnp.inf)[None]
    ids = columns if ids is None else ids[jnp.minimum(columns, size - 1)]
    chosen, scores = scored_reference(own, seed, first, offsets, ids, noise, *controls, purpose=purpose)
    scores = jnp.where(chosen == NO_TOKEN, jnp.inf, scores)
    chosen = jnp.where(chosen == NO_TOKEN, NO_TOKEN, chosen + first_column)
    words = jax.lax.all_gather(jnp.stack([_words(scores), chosen]), AXIS)
    return _first_best(_floats(words[:, 0]), words[:, 1])


@functools.partial(jax.jit, static_argnames=("purpose", "implementation"))
def sample_tokens_of_devices(
    logits: OwnColumns,
    seed: Any,
    first: Any,
    offsets: Int32[Array, "*rows"],
    *controls: Any,
    ids: Int32[Array, " columns"] | None = None,
    noise: Float[Array, "*rows ids"] | None = None,
    purpose: int = 0,
    implementation: Implementation = "auto",
) -> Int32[Array, "*rows"]:
    """Samples a token for each row like `sample_tokens`, for rows without top-k, top-p and min-p.

    Args:
        logits: [1, *rows, columns].
        seed, first, offsets, controls, noise, purpose, implementation: as in `sample_tokens`.
        ids: token id of each column of all devices [columns]; None: the column's index.
    """
    options = {"purpose": purpose, "size": logits.size}
    kernel, reference = (functools.partial(run, **options) for run in (_pallas, _reference))
    arguments = (logits.own, seed, first, offsets, ids, noise, _first_column(logits), *controls)
    return dispatch(implementation, [Kernel(TRITON, kernel)], reference, *arguments)


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
    kernel, reference = (functools.partial(run, k=kept) for run in (best_of_blocks, best_of_blocks_reference))
    best, ids, sums = dispatch(implementation, [Kernel(TRITON, kernel, unsupported)], reference, own)
    mine = jnp.concatenate([_words(best), ids, _words(sums)[..., None]], axis=-1)
    words = jax.lax.all_gather(mine, AXIS)  # [devices, rows, blocks, 2 * kept + 1]
    ids = words[..., kept:-1]
    ids = jnp.where(ids == OUT, OUT, ids + _first_columns(words, logits.width))
    of_all = [_floats(words[..., :kept]), ids, _floats(words[..., -1])]
    blocks = [jnp.moveaxis(field, 0, 1).reshape(len(own), -1, *field.shape[3:]) for field in of_all]
    kernel, reference = (functools.partial(run, k=k) for run in (merge_blocks, merge_blocks_reference))
    kernels = [Kernel(TRITON, kernel, unsupported)]
    return dispatch(implementation, kernels, reference, *blocks, *([] if base is None else [base]))


def _first_columns(exchanged: Int32[Array, "devices *more"], width: int) -> Array:
    """Returns the first column of each device, in a shape that broadcasts with exchanged numbers."""
    return (jnp.arange(len(exchanged), dtype=jnp.int32) * width).reshape(-1, *(1,) * (exchanged.ndim - 1))


def _words(values: Float[Array, "*rows"]) -> Int32[Array, "*rows"]:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _floats(words: Int32[Array, "*rows"]) -> Float[Array, "*rows"]:
    return jax.lax.bitcast_convert_type(words, jnp.float32)
