"""One draw from each row's law, by Gumbel noise, in two kernels for any mixture of rows.

    argmax_v l[v] / T + g(key, id v)   over l[v] >= bound,      g = -log(-log u)      (argmax l where T is 0)

The bound is that of top-k, top-p and min-p (`sampling_threshold`). A row's key is its seed with a purpose and a
position folded in, as `jax.random.fold_in` does; u is what `jax.random.gumbel(key, [vocab])` takes for a token:
threefry-2x32 (Salmon
et al., SC 2011) of the key and the token's id, in JAX's partitionable form. So a draw can be repeated anywhere by seed,
position and token, over another vocabulary too.

The first kernel reads all logits once. Of a row whose every token may be drawn, and of one of temperature 0, it leaves
the best token of each slice; of the others what `sampling_threshold` surveys. So noise is written down for none, and
made for no more tokens of the latter than a program of the second kernel holds, unless the law is very flat.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.quantized import PartialSums, reduce_partials, split_scales
from pallas_kernels.sampling.threshold import (
    GROUP,
    MOST,
    SLICE,
    Survey,
    bound_row,
    check_groups,
    controls_of,
    group_of,
    put_first,
    restricts,
    sampling_threshold,
    slice_columns,
    survey_shapes,
    survey_slice,
)

IN_HAND = 1024  # tokens whose noise a program makes at once
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def _threefry(first: Array, second: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 in 20 rounds of the counter (0, low) under the key (first, second)."""
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
    """A seed with purpose and position folded in."""
    first, second = seed
    return _threefry(*_threefry(first, second, jnp.uint32(purpose)), position.astype(jnp.uint32))


def _gumbel(key: Sequence[Array], token: Array) -> Array:
    """The noise of some tokens."""
    first, second = key
    x, y = _threefry(first, second, token.astype(jnp.uint32))
    tiny = jnp.finfo(jnp.float32).tiny
    bits = ((x ^ y) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)  # a float from 1 to below 2
    uniform = jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32) - 1 + tiny, tiny)
    return -jnp.log(-jnp.log(uniform))


def _reference(product, seed, first, offsets, ids, *controls, purpose):
    logits = reduce_partials(product, jnp.float32).reshape(-1, product.shape[-1])
    shared = (controls[0], first, seed[:, 0], seed[:, 1])
    temperature, first, *words = (jnp.repeat(of, len(logits) // len(of)) for of in shared)

    def drawn():
        tokens = jnp.arange(logits.shape[1]) if ids is None else ids
        key = _key(words, purpose, first + offsets.ravel())
        noise = _gumbel([word[:, None] for word in key], tokens[None])
        tempered = logits / jnp.where(temperature > 0, temperature, 1)[:, None]
        bound = sampling_threshold(logits, *controls, implementation="reference")
        scores = jnp.where(logits >= bound[:, None], tempered + noise, -jnp.inf)
        return jnp.argmax(jnp.where(temperature[:, None] > 0, scores, logits), axis=-1)

    token = jax.lax.cond(jnp.any(temperature > 0), drawn, lambda: jnp.argmax(logits, axis=-1))
    return token.astype(jnp.int32).reshape(product.shape[1:-1])


class _Row:
    """In a kernel: a row's logits, controls and noise."""

    def __init__(self, refs, row, purpose):
        self.logits, seed_ref, first_ref, offsets_ref, *control_refs, self.scales, self.ids = refs
        self.row, (self.rows, self.vocab) = row, self.logits.shape
        group = group_of(row, self.rows, seed_ref)
        position = first_ref[group] + offsets_ref[row]
        self.key = _key([seed_ref[group, word] for word in range(2)], purpose, position)
        self.controls = controls_of(row, self.rows, control_refs)
        self.temperature, self.is_bounded = self.controls[0], restricts(*self.controls)

    def read(self, column, mask):
        """Logits; -inf where the mask does not hold."""
        if not self.scales:
            return pltriton.load(self.logits.at[self.row, column], mask=mask, other=-jnp.inf)
        value = pltriton.load(self.logits.at[self.row, column], mask=mask, other=0)
        value = value * self.scales[0][self.row] * pltriton.load(self.scales[1].at[column], mask=mask, other=0)
        return jnp.where(mask, value, -jnp.inf)

    def best(self, scores, token):
        """The largest score, and the first token that has it."""
        top = jnp.max(scores)
        return top, jnp.min(jnp.where(scores == top, token, self.vocab - 1))

    def draw(self, count, column_of, bound):
        """The best of some tokens from a bound on, with their noise; a few at a time, or too many registers are used.

        Args:
            column_of: from places below `count` to tokens.
        """

        def step(index, best):
            place = index * IN_HAND + jnp.arange(IN_HAND)
            column = column_of(place, place < count)
            inside = (place < count) & (column < self.vocab)
            logits, token = self.read(column, inside), column
            if self.ids is not None:
                token = pltriton.load(self.ids.at[column], mask=inside, other=0)
            noise = _gumbel(self.key, token)
            score = jnp.where(logits >= bound, logits / self.temperature + noise, -jnp.inf)
            return jnp.maximum(best[0], score), jnp.where(score > best[0], column, best[1])

        nothing = jnp.full(IN_HAND, -jnp.inf), jnp.zeros(IN_HAND, jnp.int32)
        return self.best(*jax.lax.fori_loop(0, pl.cdiv(count, IN_HAND), step, nothing))


def _survey_kernel(*refs, inputs, purpose):
    """One program: a slice of a row."""
    row, piece = _Row(inputs(refs), pl.program_id(0), purpose), pl.program_id(1)
    *left, token_ref = refs[-4:]

    def logits():
        column = slice_columns(piece)
        return row.read(column, column < row.vocab)

    def keep(best):
        left[1][row.row, piece], token_ref[row.row, piece] = best

    @pl.when(row.temperature <= 0)
    def _():
        keep(row.best(logits(), slice_columns(piece)))

    @pl.when((row.temperature > 0) & jnp.logical_not(row.is_bounded))
    def _():
        keep(row.draw(SLICE, lambda place, _: piece * SLICE + place, -jnp.inf))

    @pl.when(row.is_bounded)
    def _():
        survey_slice(logits(), row.row, piece, row.temperature, Survey(*left))


def _choose_kernel(*refs, inputs, purpose, interpret):
    """One program: the token of a row."""
    row = _Row(inputs(refs), pl.program_id(0), purpose)
    left, (token_ref, chosen_ref, groups_ref, kept_ref) = Survey(*refs[-7:-4]), refs[-4:]

    @pl.when(row.is_bounded)
    def _():
        bound, held = bound_row(row.read, row.row, row.vocab, row.controls, left, groups_ref, interpret=interpret)
        count = put_first(held.logits >= bound, held.column, kept_ref, row.row, interpret)

        def column_of(place, inside):
            listed = pltriton.load(kept_ref.at[row.row, place], mask=inside & held.has_all, other=0)
            return jnp.where(held.has_all, listed, place)

        chosen_ref[row.row] = row.draw(jnp.where(held.has_all, count, row.vocab), column_of, bound)[1]

    @pl.when(jnp.logical_not(row.is_bounded))
    def _():
        slices = left.top.shape[1]
        piece = jnp.arange(pl.next_power_of_2(slices))
        tops = pltriton.load(left.top.at[row.row, piece], mask=piece < slices, other=-jnp.inf)
        tokens = pltriton.load(token_ref.at[row.row, piece], mask=piece < slices, other=row.vocab - 1)
        chosen_ref[row.row] = row.best(tops, tokens)[1]


def _pallas(product, seed, first, offsets, ids, *controls, purpose, interpret):
    logits, scales = split_scales(product)
    logits, scales = logits.reshape(-1, product.shape[-1]), tuple(scale.ravel() for scale in scales)
    rows, vocab = logits.shape
    arrays = (logits, seed, first, offsets.reshape(rows), *controls, *scales, *([] if ids is None else [ids]))

    def inputs(refs):
        """The references of the arrays, in the order of `_Row`."""
        end = 8 + len(scales)
        return *refs[:8], refs[8:end], None if ids is None else refs[end]

    left, held = survey_shapes(rows, vocab)
    call, array = functools.partial(pl.pallas_call, interpret=interpret), jax.ShapeDtypeStruct
    surveyed = call(
        functools.partial(_survey_kernel, inputs=inputs, purpose=purpose),
        grid=(rows, left.top.shape[1]),
        out_shape=[*left, array(left.top.shape, jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="sample_tokens_survey",
    )(*arrays)
    chosen = call(
        functools.partial(_choose_kernel, inputs=inputs, purpose=purpose, interpret=interpret),
        grid=(rows,),
        out_shape=[array((rows,), jnp.int32), held, array((rows, MOST * GROUP), jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        name="sample_tokens",
    )(*arrays, *surveyed)
    return chosen[0].reshape(product.shape[1:-1])


@functools.partial(jax.jit, static_argnames=("purpose", "implementation"))
def sample_tokens(
    product: PartialSums,
    seed: UInt32[Array, "groups 2"],
    first: Int32[Array, " groups"],
    offsets: Int32[Array, "*rows"],
    temperature: Float[Array, " groups"],
    top_k: Int32[Array, " groups"],
    top_p: Float[Array, " groups"],
    min_p: Float[Array, " groups"],
    ids: Int32[Array, " vocab"] | None = None,
    *,
    purpose: int = 0,
    implementation: Implementation = "auto",
) -> Int32[Array, "*rows"]:
    """Returns one of the `vocab` tokens for each row, the first of equals (arXiv:1611.01144).

    The rows are so many equal groups of neighbours, each under a seed, a first position and controls of its own.

    Args:
        product: [1, *rows, vocab], the logits in float32, perhaps to be scaled; not divided by the temperature yet.
        seed: the words of a threefry-2x32 key.
        first, offsets: their sum is a row's position.
        purpose: folded into the seed before the position.
        temperature: 0 takes the likeliest token, whatever the other controls say.
        top_k, top_p, min_p: as in `sampling_threshold`.
        ids: whose noise each of the tokens gets; None: its own.
        implementation: as in `paged_attention`.

    Raises:
        ValueError: the rows are no equal groups, or controls are of different ones.
    """
    controls = (temperature, top_k, top_p, min_p)
    check_groups(offsets.size, (seed, first, *controls))
    kernel, reference = (functools.partial(run, purpose=purpose) for run in (_pallas, _reference))
    return dispatch(implementation, None, kernel, reference, product, seed, first, offsets, ids, *controls)
