"""The logit from which on tokens are kept under top-k, top-p and min-p, without sorting a vocabulary.

For a row of logits l: top-k keeps the k largest; of what is left, renormalised, top-p keeps the fewest largest whose
probability reaches p; of what is left then, min-p keeps those at least m times as likely as the likeliest. Tokens that
tie with the last one kept are kept too, and the likeliest always is. So all three together are one bound per row.

Floats are mapped to unsigned integers of the same order, and a bound is found four bits at a time: the weight (count or
probability) above each of 16 candidates in one pass over the row, eight passes in all.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.implementation import Implementation, choose

STEPS, BITS = 8, 4
BLOCK = 1024  # tokens a program weighs at once


def _ordered(x: Array) -> Array:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _float_of(order: Array) -> Array:
    """The inverse of `_ordered`."""
    bits = jnp.where(order >> 31 == 1, order & jnp.uint32((1 << 31) - 1), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _largest(weigh: Callable[[Array], Array], goal: Array, steps: Array | int) -> Array:
    """The largest bound above which there is at least `goal`; 0 after no steps.

    Args:
        weigh: from 16 candidates [..., 16] to the weight at or above each.
    """

    def step(index, bound):
        shift = (jnp.uint32(STEPS - 1) - index.astype(jnp.uint32)) * jnp.uint32(BITS)
        candidates = bound[..., None] + (jnp.arange(16, dtype=jnp.uint32) << shift)
        reached = jnp.sum((weigh(candidates) >= goal[..., None]).astype(jnp.int32), axis=-1)
        return bound + (jnp.maximum(reached - 1, 0).astype(jnp.uint32) << shift)

    return jax.lax.fori_loop(0, steps, step, jnp.zeros_like(goal, jnp.uint32))


def _bound(top, top_k, top_p, min_p, count_above, mass_above, *, steps_k, steps_p):
    """The bound from two functions that weigh what lies at or above candidates."""
    kth = jnp.where(top_k > 0, _largest(count_above, top_k.astype(jnp.float32), steps_k), jnp.uint32(0))
    total = mass_above(kth[..., None])[..., 0]
    nucleus = _largest(lambda c: mass_above(jnp.maximum(c, kth[..., None])), top_p * total, steps_p)
    kept = jnp.where(top_p < 1, jnp.maximum(kth, nucleus), kth)
    bound = jnp.where(kept > 0, _float_of(jnp.minimum(kept, _ordered(top))), -jnp.inf)
    likely = top + jnp.log(jnp.where(min_p > 0, min_p, 1.0))
    return jnp.where(min_p > 0, jnp.maximum(bound, likely), bound)


def _reference(logits, top_k, top_p, min_p):
    def bound():
        order, top = _ordered(logits), jnp.max(logits, axis=-1)
        weights = jnp.exp(logits - top[:, None])

        def above(candidates, weight):
            return jnp.sum(jnp.where(order[:, :, None] >= candidates[:, None], weight, 0.0), axis=1)

        return _bound(
            top,
            top_k,
            top_p,
            min_p,
            lambda c: above(c, 1.0),
            lambda c: above(c, weights[:, :, None]),
            steps_k=STEPS,
            steps_p=STEPS,
        )

    unrestricted = jnp.full(logits.shape[:1], -jnp.inf)
    return jax.lax.cond(jnp.any(_restricts(top_k, top_p, min_p)), bound, lambda: unrestricted)


def _restricts(top_k: Array, top_p: Array, min_p: Array) -> Array:
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


def _kernel(logits_ref, top_k_ref, top_p_ref, min_p_ref, bound_ref, *, vocab):
    """One program: one row; without a control it reads nothing."""
    row = pl.program_id(0)
    top_k, top_p, min_p = top_k_ref[row], top_p_ref[row], min_p_ref[row]
    blocks = _restricts(top_k, top_p, min_p).astype(jnp.int32) * pl.cdiv(vocab, BLOCK)

    def fold(combine, start):
        """Goes over the row a block at a time; past its end there is -inf."""

        def step(index, carry):
            column = index * BLOCK + jnp.arange(BLOCK)
            values = pltriton.load(logits_ref.at[row, column], mask=column < vocab, other=-jnp.inf)
            return combine(carry, values, column < vocab)

        return jax.lax.fori_loop(0, blocks, step, start)

    top = fold(lambda best, values, _: jnp.maximum(best, jnp.max(values)), jnp.float32(-jnp.inf))

    def above(candidates, weight):
        def add(mass, values, inside):
            reached = (_ordered(values)[:, None] >= candidates[None, :]) & inside[:, None]
            return mass + jnp.sum(jnp.where(reached, weight(values)[:, None], 0.0), axis=0)

        return fold(add, jnp.zeros(candidates.shape, jnp.float32))

    bound_ref[row] = _bound(
        top,
        top_k,
        top_p,
        min_p,
        lambda c: above(c, jnp.ones_like),
        lambda c: above(c, lambda values: jnp.exp(values - top)),
        steps_k=(top_k > 0).astype(jnp.int32) * STEPS,
        steps_p=(top_p < 1).astype(jnp.int32) * STEPS,
    )


def _pallas(logits, top_k, top_p, min_p, *, interpret):
    return pl.pallas_call(
        functools.partial(_kernel, vocab=logits.shape[1]),
        grid=logits.shape[:1],
        out_shape=jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="keep_bound",
    )(logits, top_k, top_p, min_p)


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
