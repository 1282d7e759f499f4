"""Samples one token per row by adding Gumbel noise to the logits (arXiv:1611.01144), in two kernels.

    argmax_v l[v] / T + g(key, id v)   over l[v] >= threshold,      g = -log(-log u)      (argmax l where T is 0)

The threshold is the smallest logit that top-k, top-p and min-p keep (`sampling_threshold`). A row's key is its seed, in
which a purpose and a position are folded as by `jax.random.fold_in`. u is the uniform number of a token in
`jax.random.gumbel(key, [vocab])`: threefry-2x32 (Salmon et al., SC 2011) of the key and the token's id, in JAX's
partitionable form. So the noise of a token follows from seed, position and token id, for any vocabulary.

The first kernel reads all logits once, in slices of the vocabulary. In greedy rows (temperature 0), and in rows without
top-k, top-p and min-p, it stores the best token of each slice. In other rows it stores the `Survey` that
`sampling_threshold` needs. The second kernel chooses each row's token. Noise is never stored. In rows with top-k, top-p
or min-p, noise is computed only for the tokens that the second kernel holds in registers, unless the probabilities are
very flat.

A row with a logit that is NaN gets NO_TOKEN. GPUs ignore NaN in a maximum, so before each maximum NaN is replaced by
infinity, and larger scores by the largest finite number.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials, split_scales
from pallas_kernels.sampling.threshold import (
    GROUP,
    MOST,
    SLICE,
    Survey,
    check_groups,
    controls_of,
    group_of,
    put_first,
    restricts,
    row_threshold,
    sampling_threshold,
    slice_columns,
    survey_shapes,
    survey_slice,
    with_nan_largest,
)

NO_TOKEN = -1  # token of a row whose logits contain NaN
AT_ONCE = 1024  # tokens whose noise a Pallas program computes at once; more tokens would need too many registers
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # constants of threefry-2x32, like PARITY
PARITY = 0x1BD11BDA


def _threefry(first: Array, second: Array, low: Array) -> tuple[Array, Array]:
    """Returns both words of threefry-2x32 with 20 rounds, for the counter (0, low) and the key (first, second)."""
    words = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x, y = jnp.zeros_like(low + first) + words[0], low + words[1]
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(rotation)) | (y >> jnp.uint32(32 - rotation)))
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _key(seed: Sequence[Array], purpose: int, position: Array) -> tuple[Array, Array]:
    """Returns the random key of a row: the purpose and then the position are folded into the row's seed."""
    first, second = seed
    return _threefry(*_threefry(first, second, jnp.uint32(purpose)), position.astype(jnp.uint32))


def _gumbel(key: Sequence[Array], token: Array) -> Array:
    """Returns the Gumbel noise of token ids for a random key."""
    first, second = key
    x, y = _threefry(first, second, token.astype(jnp.uint32))
    tiny = jnp.finfo(jnp.float32).tiny
    bits = ((x ^ y) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)  # a float in [1, 2)
    uniform = jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32) - 1 + tiny, tiny)
    return -jnp.log(-jnp.log(uniform))


def gumbel_noise(
    seed: UInt32[Array, "*rows 2"], position: Int32[Array, "*rows"], tokens: Int32[Array, " vocab"], *, purpose: int
) -> Float[Array, "*rows vocab"]:
    """Returns the noise that `sample_tokens` adds to the logits of each token id at a position."""
    key = _key((seed[..., 0], seed[..., 1]), purpose, position)
    return _gumbel([word[..., None] for word in key], tokens)


def scored_reference(scaled_logits, seed, first, offsets, ids, noise, *controls, purpose):
    """Returns the tokens of `sample_tokens` and their scores [*rows]; the score of NO_TOKEN is NaN.

    The arguments are those of `sample_tokens`; `controls` are temperature, top_k, top_p and min_p.
    """
    logits = reduce_partials(scaled_logits, jnp.float32).reshape(-1, scaled_logits.shape[-1])
    temperature, first, seed = (  # one value of each group -> one of each row
        jnp.repeat(array, len(logits) // len(array), axis=0) for array in (controls[0], first, seed)
    )

    def best(scores):
        # On a CPU, argmax takes several times as long as these two reductions, and XLA may ignore NaN in a maximum.
        scores = with_nan_largest(scores)
        top, column = jnp.max(scores, axis=-1), jnp.arange(scores.shape[-1], dtype=jnp.int32)
        token = jnp.min(jnp.where(scores == top[:, None], column, scores.shape[-1]), axis=-1)
        is_nan = top == jnp.inf
        return jnp.where(is_nan, NO_TOKEN, token), jnp.where(is_nan, jnp.nan, top)

    def sample():
        tokens = jnp.arange(logits.shape[1]) if ids is None else ids
        if noise is None:
            drawn = gumbel_noise(seed, first + offsets.ravel(), tokens, purpose=purpose)
        else:
            drawn = noise.reshape(len(logits), -1)
            if ids is not None or drawn.shape[1] != len(tokens):  # else a gather would copy all columns
                drawn = drawn[:, tokens]
        tempered = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
        threshold = sampling_threshold(logits, *controls, implementation="reference")
        scores = jnp.where(logits < threshold[:, None], -jnp.inf, tempered + drawn)  # keeps NaN
        return best(jnp.where(temperature[:, None] > 0, scores, logits))

    token, score = jax.lax.cond(jnp.any(temperature > 0), sample, lambda: best(logits))
    return token.astype(jnp.int32).reshape(offsets.shape), score.reshape(offsets.shape)


def _reference(*arguments, purpose):
    return scored_reference(*arguments, purpose=purpose)[0]


class Inputs(NamedTuple):
    """References to the inputs of both kernels; neighbouring rows form groups of equal size."""

    logits: Any  # [rows, vocab] float32
    seed: Any  # [groups, 2] uint32
    first: Any  # [groups] int32, first position of each group of rows
    offsets: Any  # [rows] int32, position of the row minus its group's first position
    controls: Sequence[Any]  # temperature, top_k, top_p and min_p, [groups] each
    scales: Sequence[Any]  # float32 scales of the rows [rows] and of the columns [vocab]; empty: no scales
    ids: Any  # [vocab] int32; None: a token's id is its column

    @classmethod
    def of(cls, refs: Sequence[Any], *, scales: int, has_ids: bool) -> "Inputs":
        """Selects the inputs from the references of a kernel, whose first ones they are."""
        (logits, seed, first, offsets), end = refs[:4], 8 + scales
        return cls(logits, seed, first, offsets, refs[4:8], refs[8:end], refs[end] if has_ids else None)


class SampledRow:
    """One row inside a kernel, with its logits, noise key and sampling controls (temperature, top-k, top-p, min-p).

    Attributes:
        vocab: number of columns that hold logits.
        first_token: token of column 0.
    """

    def __init__(self, refs, row, purpose, *, vocab=None, first_token=0):
        self.logits, seed_ref, first_ref, offsets_ref, control_refs, self.scales, self.ids = refs
        self.row, (self.rows, width) = row, self.logits.shape
        self.vocab, self.first_token = width if vocab is None else vocab, first_token
        group = group_of(row, self.rows, seed_ref)
        position = first_ref[group] + offsets_ref[row]
        self.key = _key([seed_ref[group, word] for word in range(2)], purpose, position)
        self.controls = controls_of(row, self.rows, control_refs)
        self.temperature, self.is_restricted = self.controls[0], restricts(*self.controls)

    def read(self, column, mask):
        """Loads the row's logits at the given columns and applies the scales; -inf where the mask is false."""
        if not self.scales:
            return pltriton.load(self.logits.at[self.row, column], mask=mask, other=-jnp.inf)
        value = pltriton.load(self.logits.at[self.row, column], mask=mask, other=0)
        value = value * self.scales[0][self.row] * pltriton.load(self.scales[1].at[column], mask=mask, other=0)
        return jnp.where(mask, value, -jnp.inf)

    def best(self, scores, token):
        """Returns the largest score, and the first token with this score; NO_TOKEN if the largest is infinity."""
        top = jnp.max(scores)
        first = jnp.min(jnp.where(scores == top, token, jnp.maximum(self.vocab - 1, 0)))
        return top, jnp.where(top == jnp.inf, NO_TOKEN, first)

    def draw(self, count, column_of, threshold):
        """Samples one of `count` tokens, but only among tokens whose logit is at least the threshold.

        Args:
            count: number of tokens to choose from.
            column_of: function (indices, mask) that maps indices below `count` to columns of the logits.
            threshold: smallest logit that may be sampled.

        Returns:
            The largest score (logit / temperature + noise), and the column with this score.
        """

        def step(index, best):
            place = index * AT_ONCE + jnp.arange(AT_ONCE)
            column = column_of(place, place < count)
            inside = (place < count) & (column < self.vocab)
            logits, token = self.read(column, inside), column + self.first_token
            if self.ids is not None:
                token = pltriton.load(self.ids.at[token], mask=inside, other=0)
            noise = _gumbel(self.key, token)
            score = with_nan_largest(logits / self.temperature + noise)
            score = jnp.where(logits < threshold, -jnp.inf, score)
            return jnp.maximum(best[0], score), jnp.where(score > best[0], column, best[1])

        nothing = jnp.full(AT_ONCE, -jnp.inf), jnp.zeros(AT_ONCE, jnp.int32)
        return self.best(*jax.lax.fori_loop(0, pl.cdiv(count, AT_ONCE), step, nothing))

    def slice(self, index):
        """Returns the logits of one slice of the row."""
        column = slice_columns(index)
        return self.read(column, column < self.vocab)

    def best_of_slice(self, index, store):
        """Calls store(score, column) for the best token of one slice, if the row has no cuts."""

        @pl.when(self.temperature <= 0)  # greedy: the most probable token
        def _():
            store(*self.best(with_nan_largest(self.slice(index)), slice_columns(index)))

        @pl.when((self.temperature > 0) & jnp.logical_not(self.is_restricted))  # the best token with noise
        def _():
            store(*self.draw(SLICE, lambda place, _: index * SLICE + place, -jnp.inf))


def _survey_kernel(
    *refs,  # inputs, in the order of `Inputs`; outputs: as in `Survey`, then token_ref [rows, slices] int32
    # static parameters
    inputs,  # function that selects `Inputs` from `refs`
    purpose,
):
    """Stores the best token of one slice of a row in one Pallas program; for a row with cuts, the slice's `Survey`."""
    row, index = SampledRow(inputs(refs), pl.program_id(0), purpose), pl.program_id(1)
    *survey_refs, token_ref = refs[-4:]
    survey = Survey(*survey_refs)

    def store(score, column):
        survey.top[row.row, index], token_ref[row.row, index] = score, column

    row.best_of_slice(index, store)

    @pl.when(row.is_restricted)  # store the survey from which the threshold is found
    def _():
        survey_slice(row.slice(index), row.row, index, row.temperature, survey)


def _choose_kernel(
    *refs,  # inputs, in the order of `Inputs`, then the survey kernel's outputs; outputs: chosen_ref [rows] int32, and
    # scratch memory: groups_ref [rows, token groups, padded] int32, kept_ref [rows, MOST * GROUP] int32
    # static parameters
    inputs,  # function that selects `Inputs` from `refs`
    purpose,
    interpret,
):
    """Chooses the token of one row, in one Pallas program."""
    row = SampledRow(inputs(refs), pl.program_id(0), purpose)
    survey, (token_ref, chosen_ref, groups_ref, kept_ref) = Survey(*refs[-7:-4]), refs[-4:]

    @pl.when(row.is_restricted)  # find the threshold, then sample among the tokens that it keeps
    def _():
        options = {"interpret": interpret}
        threshold, held = row_threshold(row.read, row.row, row.vocab, row.controls, survey, groups_ref, **options)
        count = put_first(held.logits >= threshold, held.column, kept_ref, row.row, interpret)

        def column_of(place, is_token):
            listed = pltriton.load(kept_ref.at[row.row, place], mask=is_token & held.has_all, other=0)
            return jnp.where(held.has_all, listed, place)

        drawn = row.draw(jnp.where(held.has_all, count, row.vocab), column_of, threshold)[1]
        chosen_ref[row.row] = jnp.where(held.top == jnp.inf, NO_TOKEN, drawn)

    @pl.when(jnp.logical_not(row.is_restricted))  # choose the best of the slices' tokens
    def _():
        slices = survey.top.shape[1]
        index = jnp.arange(pl.next_power_of_2(slices))
        tops = pltriton.load(survey.top.at[row.row, index], mask=index < slices, other=-jnp.inf)
        tokens = pltriton.load(token_ref.at[row.row, index], mask=index < slices, other=row.vocab - 1)
        chosen_ref[row.row] = row.best(tops, tokens)[1]


def _pallas(scaled_logits, seed, first, offsets, ids, _noise, *controls, purpose, interpret):
    logits, scales = split_scales(scaled_logits)
    logits, scales = logits.reshape(-1, scaled_logits.shape[-1]), tuple(scale.ravel() for scale in scales)
    rows, vocab = logits.shape
    arrays = (logits, seed, first, offsets.reshape(rows), *controls, *scales, *([] if ids is None else [ids]))
    inputs = functools.partial(Inputs.of, scales=len(scales), has_ids=ids is not None)
    shapes, group_numbers = survey_shapes(rows, vocab)
    call, array = functools.partial(pl.pallas_call, interpret=interpret), jax.ShapeDtypeStruct
    survey = call(
        functools.partial(_survey_kernel, inputs=inputs, purpose=purpose),
        grid=(rows, shapes.top.shape[1]),
        out_shape=[*shapes, array(shapes.top.shape, jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="sample_tokens_survey",
    )(*arrays)
    chosen = call(
        functools.partial(_choose_kernel, inputs=inputs, purpose=purpose, interpret=interpret),
        grid=(rows,),
        out_shape=[array((rows,), jnp.int32), group_numbers, array((rows, MOST * GROUP), jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        name="sample_tokens",
    )(*arrays, *survey)
    return chosen[0].reshape(scaled_logits.shape[1:-1])


@functools.partial(jax.jit, static_argnames=("purpose", "implementation"))
def sample_tokens(
    logits: PartialSums,
    seed: UInt32[Array, "groups 2"],
    first: Int32[Array, " groups"],
    offsets: Int32[Array, "*rows"],
    temperature: Float[Array, " groups"],
    top_k: Int32[Array, " groups"],
    top_p: Float[Array, " groups"],
    min_p: Float[Array, " groups"],
    ids: Int32[Array, " vocab"] | None = None,
    noise: Float[Array, "*rows ids"] | None = None,
    *,
    purpose: int = 0,
    implementation: Implementation = "auto",
) -> Int32[Array, "*rows"]:
    """Samples a token for each row, and returns the tokens' columns [*rows]; among equal scores, the first column.

    The result is NO_TOKEN for a row with a logit that is NaN.

    Neighbouring rows form groups of equal size. The rows of a group share seed, first position and sampling controls.

    Args:
        logits: a single partial sum [1, *rows, vocab] in float32, not divided by the temperature; scales may still be
            unapplied.
        seed: the two words of a threefry-2x32 key [groups, 2].
        first: first position of each group [groups].
        offsets: position of each row minus the first position of its group [*rows].
        temperature: [groups]; 0: choose the most probable token, and ignore the other controls.
        top_k, top_p, min_p: as in `sampling_threshold`.
        ids: token id of each column, which selects the column's noise [vocab]; None: the column's index.
        noise: `gumbel_noise` of every token id for each row, if it is known; the kernel always computes it.
        purpose: number that is folded into the seed before the position.
        implementation: as in `paged_attention`.

    Raises:
        ValueError: the arrays differ in their number of groups, or the rows do not divide equally into groups.
    """
    controls = (temperature, top_k, top_p, min_p)
    check_groups(offsets.size, (seed, first, *controls))
    kernel, reference = (functools.partial(run, purpose=purpose) for run in (_pallas, _reference))
    return dispatch(
        implementation, [Kernel(TRITON, kernel)], reference, logits, seed, first, offsets, ids, noise, *controls
    )
