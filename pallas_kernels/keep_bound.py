"""The logit from which on tokens are kept under top-k, top-p and min-p, without sorting a vocabulary.

For a row of logits l: top-k keeps the k largest; of what is left, renormalised, top-p keeps the fewest largest whose
probability reaches p; of what is left then, min-p keeps those at least m times as likely as the likeliest. Tokens that
tie with the last one kept are kept too, and the likeliest always is. So all three together are one bound per row.

Floats are mapped to unsigned integers of the same order, and a bound is found bit by bit: 32 times the weight (count or
probability) at or above a candidate. The kernel reads a row once for the largest logit of every group of tokens; the
best groups then stay in registers, and what weighs enough lies within them but for very flat laws.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.implementation import Implementation, choose

BITS = 32
GROUP = 32  # tokens
MOST = 512  # groups that a program holds
SLICE = 4096  # tokens a program reads at once


def _ordered(x: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _float_of(order: Array) -> Array:
    """The inverse of `_ordered`."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32((1 << 31) - 1), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest(weigh: Callable[[Array], Array], goal: Array, bits: Array | int = BITS) -> Array:
    """The largest bound above which there is at least `goal`; 0, which is below everything, if there is none.

    Args:
        weigh: from a candidate to the weight at or above it.
        bits: to be found, the highest first; 0 finds nothing.
    """

    def step(index, bound):
        candidate = bound | (jnp.uint32(1) << (BITS - 1 - index).astype(jnp.uint32))
        return jnp.where(weigh(candidate) >= goal, candidate, bound)

    return jax.lax.fori_loop(0, bits, step, jnp.zeros_like(goal, jnp.uint32))


def _bound(top, top_k, top_p, min_p, count_above, mass_above, *, bits_k=BITS, bits_p=BITS):
    """The bound from two functions that weigh what lies at or above a candidate."""
    kth = jnp.where(top_k > 0, _largest(count_above, top_k.astype(jnp.float32), bits_k), jnp.uint32(0))
    nucleus = _largest(lambda c: mass_above(jnp.maximum(c, kth)), top_p * mass_above(kth), bits_p)
    kept = jnp.where(top_p < 1, jnp.maximum(kth, nucleus), kth)
    bound = jnp.where(kept > 0, _float_of(jnp.minimum(kept, _ordered(top))), -jnp.inf)
    likely = top + jnp.log(jnp.where(min_p > 0, min_p, 1.0))
    return jnp.where(min_p > 0, jnp.maximum(bound, likely), bound)


def _reference(logits, top_k, top_p, min_p):
    def bound():
        order, top = _ordered(logits), jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - top[:, None])

        def above(candidate, weight):
            return jnp.sum(jnp.where(order >= candidate[:, None], weight, 0.0), axis=1)

        return _bound(top, top_k, top_p, min_p, lambda c: above(c, 1.0), lambda c: above(c, weights))

    unrestricted = jnp.full(logits.shape[:1], -jnp.inf)
    return jax.lax.cond(jnp.any(_restricts(top_k, top_p, min_p)), bound, lambda: unrestricted)


def _restricts(top_k: Array, top_p: Array, min_p: Array) -> Array:
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


def _survey_kernel(logits_ref, top_k_ref, top_p_ref, min_p_ref, best_ref, top_ref, mass_ref, *, vocab):
    """One program: a slice of a row; the largest logit of each group, that of the slice, and its mass beside it."""
    row, piece = pl.program_id(0), pl.program_id(1)

    @pl.when(_restricts(top_k_ref[row], top_p_ref[row], min_p_ref[row]))
    def _():
        group = piece * (SLICE // GROUP) + jnp.arange(SLICE // GROUP)
        column = group[:, None] * GROUP + jnp.arange(GROUP)[None, :]
        values = pltriton.load(logits_ref.at[row, column], mask=column < vocab, other=-jnp.inf)
        best = jnp.max(values, axis=1)
        top = jnp.max(best)
        pltriton.store(best_ref.at[row, group], best)
        top_ref[row, piece] = top
        mass_ref[row, piece] = jnp.sum(jnp.exp(values - jnp.where(top == -jnp.inf, 0.0, top)))


def _choose_kernel(best_ref, top_k_ref, top_p_ref, min_p_ref, groups_ref, count_ref, least_ref, *, most):
    """One program: a row's groups, at most so many of the best first; all that is at least `least` lies in those."""
    row, groups = pl.program_id(0), best_ref.shape[1]

    @pl.when(_restricts(top_k_ref[row], top_p_ref[row], min_p_ref[row]))
    def _():
        group = jnp.arange(pl.next_power_of_2(groups))
        best = pltriton.load(best_ref.at[row, group], mask=group < groups, other=-jnp.inf)
        order = jnp.where(group < groups, _ordered(best), jnp.uint32(0))
        least = _largest(lambda c: jnp.sum((order >= c).astype(jnp.int32)), jnp.int32(most + 1)) + 1
        chosen = order >= least
        count, before = jnp.sum(chosen.astype(jnp.int32)), jnp.cumsum(chosen.astype(jnp.int32))
        pltriton.store(groups_ref.at[row, jnp.where(chosen, before - 1, count + group - before)], group)
        count_ref[row] = count
        least_ref[row] = least


def _bound_kernel(
    logits_ref,
    top_k_ref,
    top_p_ref,
    min_p_ref,
    tops_ref,
    masses_ref,
    groups_ref,
    count_ref,
    least_ref,
    bound_ref,
    *,
    most,
):
    """One program: the bound of a row, from its best groups, or from all of it if they are not enough."""
    row, vocab, slices = pl.program_id(0), logits_ref.shape[1], tops_ref.shape[1]
    top_k, top_p, min_p = top_k_ref[row], top_p_ref[row], min_p_ref[row]
    bits = {"bits_k": (top_k > 0).astype(jnp.int32) * BITS, "bits_p": (top_p < 1).astype(jnp.int32) * BITS}

    def bound():
        piece = jnp.arange(pl.next_power_of_2(slices))
        tops = pltriton.load(tops_ref.at[row, piece], mask=piece < slices, other=-jnp.inf)
        masses = pltriton.load(masses_ref.at[row, piece], mask=piece < slices, other=0)
        top = jnp.max(tops)
        total = jnp.sum(masses * jnp.exp(tops - top))
        slot = jnp.arange(most)
        is_held = slot < count_ref[row]
        group = pltriton.load(groups_ref.at[row, slot], mask=is_held, other=0)
        column = group[:, None] * GROUP + jnp.arange(GROUP)[None, :]
        is_held = is_held[:, None] & (column < vocab)
        values = pltriton.load(logits_ref.at[row, column], mask=is_held, other=-jnp.inf)
        order, weights = jnp.where(is_held, _ordered(values), jnp.uint32(0)), jnp.exp(values - top)

        def count_above(candidate):
            return jnp.sum(jnp.where(order >= candidate, 1.0, 0.0))

        def mass_above(candidate):
            return jnp.where(candidate == 0, total, jnp.sum(jnp.where(order >= candidate, weights, 0.0)))

        least = least_ref[row]
        has_nucleus = (top_p >= 1) | (mass_above(least) >= top_p * total)
        is_enough = jnp.where(top_k > 0, count_above(least) >= top_k.astype(jnp.float32), has_nucleus)
        return jax.lax.cond(
            is_enough,
            lambda: _bound(top, top_k, top_p, min_p, count_above, mass_above, **bits),
            lambda: _bound(top, top_k, top_p, min_p, *_of_row(logits_ref, row, top), **bits),
        )

    restricts = _restricts(top_k, top_p, min_p)
    bound_ref[row] = jnp.where(restricts, top_p, -jnp.inf)  # a row without controls, or one whose bound is to come

    @pl.when(restricts)
    def _():
        bound_ref[row] = bound()


def _of_row(logits_ref, row, top):
    """Functions that weigh what of a whole row lies at or above a candidate."""
    vocab = logits_ref.shape[1]

    def above(candidate, weight):
        def step(index, weighed):
            column = index * SLICE + jnp.arange(SLICE)
            values = pltriton.load(logits_ref.at[row, column], mask=column < vocab, other=-jnp.inf)
            reached = (_ordered(values) >= candidate) & (column < vocab)
            return weighed + jnp.where(reached, weight(values), 0.0)

        weighed = jax.lax.fori_loop(0, pl.cdiv(vocab, SLICE), step, jnp.zeros(SLICE, jnp.float32))
        return jnp.sum(weighed)

    return lambda c: above(c, jnp.ones_like), lambda c: above(c, lambda values: jnp.exp(values - top))


def _pallas(logits, top_k, top_p, min_p, *, interpret, most=MOST):
    (rows, vocab), array = logits.shape, jax.ShapeDtypeStruct
    slices, controls = pl.cdiv(vocab, SLICE), (top_k, top_p, min_p)
    per_slice, per_row = array((rows, slices), jnp.float32), array((rows,), jnp.int32)
    call = functools.partial(pl.pallas_call, interpret=interpret)
    groups = slices * SLICE // GROUP
    best, tops, masses = call(
        functools.partial(_survey_kernel, vocab=vocab),
        grid=(rows, slices),
        out_shape=[array((rows, groups), jnp.float32), per_slice, per_slice],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="keep_bound_survey",
    )(logits, *controls)
    chosen = call(
        functools.partial(_choose_kernel, most=most),
        grid=(rows,),
        out_shape=[array((rows, pl.next_power_of_2(groups)), jnp.int32), per_row, array((rows,), jnp.uint32)],
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        name="keep_bound_choose",
    )(best, *controls)
    return call(
        functools.partial(_bound_kernel, most=min(most, pl.next_power_of_2(groups))),
        grid=(rows,),
        out_shape=array((rows,), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=16, num_stages=1),
        name="keep_bound",
    )(logits, *controls, tops, masses, *chosen)


@functools.partial(jax.jit, static_argnames=("implementation",))
def keep_bound(
    logits: Float[Array, "rows vocab"],
    top_k: Int32[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, " rows"]:
    """Returns for each row the smallest logit that stays; -inf for a row without controls.

    Args:
        logits: float32, already divided by the temperature.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        implementation: as in `paged_attention`.
    """
    return choose(implementation, None, _pallas, _reference, logits, top_k, top_p, min_p)
