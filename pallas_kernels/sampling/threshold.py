"""The logit from which on tokens are kept under top-k, top-p and min-p, without sorting a vocabulary.

For a row of logits l: top-k keeps the k largest; of what is left, renormalised, top-p keeps the fewest largest whose
probability reaches p; of what is left then, min-p keeps those at least m times as likely as the likeliest. Tokens that
tie with the last one kept are kept too, and the likeliest always is. So all three together are one bound per row.

Floats are mapped to unsigned integers of the same order, among which a bound is found by halving: some 25 times the
weight (count or probability) at or above a candidate. The kernel reads a row once for the largest logit of every group
of tokens; the best groups then stay in registers, and what weighs enough lies within them but for very flat laws.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.sampling.ordered_floats import float_of, largest_bound, ordered

GROUP = 32  # tokens
MOST = 256  # groups that a program holds
SLICE = 4096  # tokens a program reads, where many share a row
IN_FLIGHT = 8192  # tokens a program reads at once, where it has a row to itself


def _bound(top, controls, low, count_above, mass_above):
    """The bound from two functions that weigh what lies at or above a candidate.

    Args:
        low: above it lies all that is wanted.
    """
    temperature, top_k, top_p, min_p = controls
    end, nothing = ordered(top) + 1, low + 1
    kth = largest_bound(count_above, top_k.astype(jnp.float32), low, jnp.where(top_k > 0, end, nothing))
    kth = jnp.where(top_k > 0, kth, jnp.uint32(0))
    goal = top_p * mass_above(kth)
    nucleus = largest_bound(lambda c: mass_above(jnp.maximum(c, kth)), goal, low, jnp.where(top_p < 1, end, nothing))
    kept = jnp.where(top_p < 1, jnp.maximum(kth, nucleus), kth)
    bound = jnp.where(kept > 0, float_of(jnp.minimum(kept, ordered(top))), -jnp.inf)
    likely = top + temperature * jnp.log(jnp.where(min_p > 0, min_p, 1.0))
    return jnp.where(min_p > 0, jnp.maximum(bound, likely), bound)


def _reference(logits, *controls):
    temperature, *others = (jnp.repeat(control, logits.shape[0] // control.shape[0]) for control in controls)
    is_bounded = restricts(temperature, *others)

    def bound():
        above_zero = jnp.where(temperature > 0, temperature, 1.0)
        order, top = ordered(logits), jnp.max(logits, axis=-1)
        weights = jnp.exp((logits - top[:, None]) / above_zero[:, None])

        def above(candidate, weight):
            return jnp.sum(jnp.where(order >= candidate[:, None], weight, 0.0), axis=1)

        low = jnp.zeros(top.shape, jnp.uint32)
        bound = _bound(top, (above_zero, *others), low, lambda c: above(c, 1.0), lambda c: above(c, weights))
        return jnp.where(is_bounded, bound, -jnp.inf)

    unrestricted = jnp.full(logits.shape[:1], -jnp.inf)
    return jax.lax.cond(jnp.any(is_bounded), bound, lambda: unrestricted)


def restricts(temperature: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Whether a row's controls take tokens out."""
    return (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))


def controls_of(row, rows, refs):
    """In a kernel: a row's controls, which it shares with its neighbours."""
    return [ref[group_of(row, rows, ref)] for ref in refs]


def group_of(row, rows, ref):
    """In a kernel: which of the equal groups of neighbours that an array is of a row belongs to."""
    return row // (rows // ref.shape[0])


class Survey(NamedTuple):
    """What one reading leaves of each row: references in a kernel."""

    best: Any  # [rows, groups], the largest logit of each group of tokens
    top: Any  # [rows, slices], that of a slice
    mass: Any  # [rows, slices], its mass beside its largest


def slice_columns(piece):
    """In a kernel: the tokens of a slice, [groups, GROUP]."""
    return piece * SLICE + jnp.arange(SLICE // GROUP)[:, None] * GROUP + jnp.arange(GROUP)[None, :]


def survey_slice(values, row, piece, temperature, left):
    """In a kernel: leaves the `Survey` of a slice's logits, [groups, GROUP]."""
    best = jnp.max(values, axis=1)
    top = jnp.max(best)
    pltriton.store(left.best.at[row, piece * (SLICE // GROUP) + jnp.arange(SLICE // GROUP)], best)
    left.top[row, piece] = top
    below = values - jnp.where(top == -jnp.inf, 0.0, top)
    left.mass[row, piece] = jnp.sum(jnp.exp(below / temperature))


def _survey_kernel(logits_ref, *refs):
    """One program: a slice of a row."""
    row, piece, (rows, vocab) = pl.program_id(0), pl.program_id(1), logits_ref.shape
    temperature, *others = controls_of(row, rows, refs[:4])

    @pl.when(restricts(temperature, *others))
    def _():
        column = slice_columns(piece)
        values = pltriton.load(logits_ref.at[row, column], mask=column < vocab, other=-jnp.inf)
        survey_slice(values, row, piece, temperature, Survey(*refs[4:]))


def _best_groups(best_ref, groups_ref, row, most, interpret):
    """Puts a row's groups in order, at most so many of the best first; returns how many, and what those reach."""
    groups = best_ref.shape[1]
    group = jnp.arange(pl.next_power_of_2(groups))
    best = pltriton.load(best_ref.at[row, group], mask=group < groups, other=-jnp.inf)
    order = jnp.where(group < groups, ordered(best), jnp.uint32(0))
    ends = jnp.min(order) & 0, jnp.max(order) + 1
    least = largest_bound(lambda c: jnp.sum((order >= c).astype(jnp.int32)), jnp.int32(most + 1), *ends) + 1
    return put_first(order >= least, group, groups_ref, row, interpret), least


def put_first(chosen, numbers, ref, row, interpret):
    """In a kernel: writes a row's numbers, those that are chosen before the others; returns how many are."""
    place = jnp.arange(chosen.shape[0])
    count, before = jnp.sum(chosen.astype(jnp.int32)), jnp.cumsum(chosen.astype(jnp.int32))
    pltriton.store(ref.at[row, jnp.where(chosen, before - 1, count + place - before)], numbers)
    if not interpret:
        pltriton.debug_barrier()  # every thread has written before one reads
    return count


class Held(NamedTuple):
    """Of a row's best groups."""

    logits: Array
    column: Array
    has_all: Array  # that stays


def bound_row(read, row, vocab, controls, left, groups_ref, *, interpret):
    """In a kernel: the bound of a row, from its best groups or all of it if they are not enough, and what was `Held`.

    Args:
        read: loads logits of the row by their columns and a mask; others are -inf.
    """
    temperature, top_k, top_p = controls[:3]
    slices, most = left.top.shape[1], min(MOST, groups_ref.shape[1])
    piece = jnp.arange(pl.next_power_of_2(slices))
    tops = pltriton.load(left.top.at[row, piece], mask=piece < slices, other=-jnp.inf)
    masses = pltriton.load(left.mass.at[row, piece], mask=piece < slices, other=0)
    top = jnp.max(tops)
    total = jnp.sum(masses * jnp.exp((tops - top) / temperature))
    count, least = _best_groups(left.best, groups_ref, row, most, interpret)
    place = jnp.arange(most * GROUP)  # flat: one reduction is one barrier
    is_held = place // GROUP < count
    group = pltriton.load(groups_ref.at[row, place // GROUP], mask=is_held, other=0)
    column = group * GROUP + place % GROUP
    is_held &= column < vocab
    values = read(column, is_held)
    order = jnp.where(is_held, ordered(values), jnp.uint32(0))
    weights = jnp.exp((values - top) / temperature)

    def count_above(candidate):
        return jnp.sum(jnp.where(order >= candidate, 1.0, 0.0))

    def mass_above(candidate):
        return jnp.where(candidate == 0, total, jnp.sum(jnp.where(order >= candidate, weights, 0.0)))

    has_nucleus = (top_p >= 1) | (mass_above(least) >= top_p * total)
    is_enough = jnp.where(top_k > 0, count_above(least) >= top_k.astype(jnp.float32), has_nucleus)
    bound = jax.lax.cond(
        is_enough,
        lambda: _bound(top, controls, least, count_above, mass_above),
        lambda: _bound(top, controls, least & 0, *_of_row(read, vocab, top, temperature)),
    )
    is_finite = jnp.maximum(bound, jnp.finfo(jnp.float32).min)  # what is -inf is out, whatever the bound
    return bound, Held(values, column, ordered(is_finite) >= least)


def _bound_kernel(logits_ref, best_ref, top_ref, mass_ref, *refs, interpret):
    """One program: the bound of a row."""
    *control_refs, bound_ref, groups_ref = refs
    row, (rows, vocab) = pl.program_id(0), logits_ref.shape
    controls, left = controls_of(row, rows, control_refs), Survey(best_ref, top_ref, mass_ref)

    def read(column, mask):
        return pltriton.load(logits_ref.at[row, column], mask=mask, other=-jnp.inf)

    is_bounded = restricts(*controls)
    bound_ref[row] = jnp.where(is_bounded, controls[2], -jnp.inf)  # without controls, or the bound is to come

    @pl.when(is_bounded)
    def _():
        bound_ref[row], _ = bound_row(read, row, vocab, controls, left, groups_ref, interpret=interpret)


def _of_row(read, vocab, top, temperature):
    """Functions that weigh what of a whole row lies at or above a candidate."""

    def above(candidate, weight):
        def step(index, weighed):
            column = index * IN_FLIGHT + jnp.arange(IN_FLIGHT)
            values = read(column, column < vocab)
            reached = (ordered(values) >= candidate) & (column < vocab)
            return weighed + jnp.where(reached, weight(values), 0.0)

        weighed = jax.lax.fori_loop(0, pl.cdiv(vocab, IN_FLIGHT), step, jnp.zeros(IN_FLIGHT, jnp.float32))
        return jnp.sum(weighed)

    return lambda c: above(c, jnp.ones_like), lambda c: above(c, lambda values: jnp.exp((values - top) / temperature))


def survey_shapes(rows: int, vocab: int) -> tuple[Survey, jax.ShapeDtypeStruct]:
    """What a survey leaves, and room for the numbers of the groups that are held."""
    array, slices = jax.ShapeDtypeStruct, pl.cdiv(vocab, SLICE)
    groups, per_slice = slices * SLICE // GROUP, array((rows, slices), jnp.float32)
    held = array((rows, pl.next_power_of_2(groups)), jnp.int32)
    return Survey(array((rows, groups), jnp.float32), per_slice, per_slice), held


def _pallas(logits, *controls, interpret):
    (rows, vocab), call = logits.shape, functools.partial(pl.pallas_call, interpret=interpret)
    left, held = survey_shapes(rows, vocab)
    surveyed = call(
        _survey_kernel,
        grid=(rows, left.top.shape[1]),
        out_shape=list(left),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="sampling_threshold_survey",
    )(logits, *controls)
    bound = call(
        functools.partial(_bound_kernel, interpret=interpret),
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct((rows,), jnp.float32), held],
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        name="sampling_threshold",
    )(logits, *surveyed, *controls)
    return bound[0]


def check_groups(rows: int, controls: Sequence[Array]) -> None:
    """Raises ValueError where rows are no equal groups, or controls are of different ones."""
    groups = {control.shape[0] for control in controls}
    if len(groups) > 1 or rows % max(groups):
        raise ValueError(f"controls must be of as many groups each, equal ones of {rows} rows, got {groups}")


@functools.partial(jax.jit, static_argnames=("implementation",))
def sampling_threshold(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " groups"],
    top_k: Int32[Array, " groups"],
    top_p: Float[Array, " groups"],
    min_p: Float[Array, " groups"],
    *,
    implementation: Implementation = "auto",
) -> Float[Array, " rows"]:
    """Returns for each row the smallest logit that stays; -inf for a row without controls, or of temperature 0.

    The rows are so many equal groups of neighbours, each under controls of its own.

    Args:
        logits: float32, not divided by the temperature yet.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.
        implementation: as in `paged_attention`.

    Raises:
        ValueError: the rows are no equal groups, or controls are of different ones.
    """
    controls = (temperature, top_k, top_p, min_p)
    check_groups(logits.shape[0], controls)
    return dispatch(implementation, None, _pallas, _reference, logits, *controls)
