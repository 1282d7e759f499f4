"""Finds the smallest logit that top-k, top-p and min-p keep, without sorting the vocabulary.

In each row, top-k keeps the tokens with the k largest logits. Top-p renormalises the probabilities of these tokens, and
keeps the smallest number of most probable tokens whose sum reaches p. Of these tokens, min-p keeps the tokens at least
m times as probable as the most probable token. Each filter also keeps tokens that tie with its last kept token. The
most probable token is always kept. So one threshold per row expresses all three filters.

Floats are mapped to unsigned integers that have the same order, and bisection finds the threshold. About 25 times, it
computes the weight (number or probability) of all tokens at or above a candidate. The first kernel reads each row once,
and stores the largest logit of every token group (32 neighbouring tokens of a row). The second kernel loads the 256
token groups with the largest stored logits into registers. If the probabilities are very flat, these token groups may
lack a token that can be kept. The second kernel then reads the whole row for every candidate.

A group without the word "token" is a group of neighbouring rows that share their sampling controls.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.sampling.ordered_floats import float_of, largest_bound, ordered

GROUP = 32  # tokens per token group
MOST = 256  # token groups that a Pallas program holds in registers
SLICE = 4096  # tokens that a Pallas program of the survey kernel reads; several programs share a row
IN_FLIGHT = 8192  # tokens that a Pallas program loads at once when it reads a whole row


def _threshold(top, controls, low, count_above, mass_above):
    """Returns the smallest logit that each row keeps.

    Args:
        top: largest logit of each row.
        controls: temperature, top_k, top_p and min_p of each row.
        low: lower bound of the search, an `ordered` integer; no token below this bound can be kept.
        count_above, mass_above: functions that take an `ordered` integer, and return the number, or the total
            probability (not normalised), of the tokens at or above this integer.
    """
    temperature, top_k, top_p, min_p = controls
    end, nothing = ordered(top) + 1, low + 1
    kth = largest_bound(count_above, top_k.astype(jnp.float32), low, jnp.where(top_k > 0, end, nothing))
    kth = jnp.where(top_k > 0, kth, jnp.uint32(0))
    goal = top_p * mass_above(kth)
    nucleus = largest_bound(lambda c: mass_above(jnp.maximum(c, kth)), goal, low, jnp.where(top_p < 1, end, nothing))
    kept = jnp.where(top_p < 1, jnp.maximum(kth, nucleus), kth)
    threshold = jnp.where(kept > 0, float_of(jnp.minimum(kept, ordered(top))), -jnp.inf)
    likely = top + temperature * jnp.log(jnp.where(min_p > 0, min_p, 1.0))
    return jnp.where(min_p > 0, jnp.maximum(threshold, likely), threshold)


def _reference(logits, *controls):
    temperature, *limits = (jnp.repeat(control, logits.shape[0] // control.shape[0]) for control in controls)
    is_restricted = restricts(temperature, *limits)

    def threshold():
        above_zero = jnp.where(temperature > 0, temperature, 1.0)
        order, top = ordered(logits), jnp.max(logits, axis=-1)
        weights = jnp.exp((logits - top[:, None]) / above_zero[:, None])

        def above(candidate, weight):
            return jnp.sum(jnp.where(order >= candidate[:, None], weight, 0.0), axis=1)

        low = jnp.zeros(top.shape, jnp.uint32)
        count_above, mass_above = lambda c: above(c, 1.0), lambda c: above(c, weights)
        found = _threshold(top, (above_zero, *limits), low, count_above, mass_above)
        return jnp.where(is_restricted, found, -jnp.inf)

    unrestricted = jnp.full(logits.shape[:1], -jnp.inf)
    return jax.lax.cond(jnp.any(is_restricted), threshold, lambda: unrestricted)


def with_nan_largest(scores: Array) -> Array:
    """Returns scores with NaN replaced by infinity, and with infinity replaced by the largest finite number."""
    return jnp.where(jnp.isnan(scores), jnp.inf, jnp.minimum(scores, jnp.finfo(jnp.float32).max))


def restricts(temperature: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns whether a row's sampling controls can exclude tokens."""
    return (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))


def controls_of(row, rows, refs):
    """Reads the sampling controls of a row from `refs`, inside a kernel; all rows of a group share their controls."""
    return [ref[group_of(row, rows, ref)] for ref in refs]


def group_of(row, rows, ref):
    """Returns the index of a row's group, inside a kernel; `ref` has one entry per group of equal size."""
    return row // (rows // ref.shape[0])


class Survey(NamedTuple):
    """The float32 arrays that the survey kernel stores about each row; inside a kernel, references to these arrays."""

    best: Any  # [rows, token groups], largest logit of each token group; infinity if one is NaN
    top: Any  # [rows, slices], largest logit of each slice; infinity if one is NaN
    mass: Any  # [rows, slices], sum of exp((logit - top) / temperature) over each slice


def slice_columns(index):
    """Returns the columns of one slice, [SLICE // GROUP, GROUP], one row per token group, inside a kernel."""
    return index * SLICE + jnp.arange(SLICE // GROUP)[:, None] * GROUP + jnp.arange(GROUP)[None, :]


def survey_slice(values, row, index, temperature, survey):
    """Stores the results for one slice of a row in `survey`, inside a kernel.

    Args:
        values: logits of the slice [SLICE // GROUP, GROUP], one row per token group.
        row, index: indices of the row and of the slice.
        temperature: temperature of the row.
        survey: `Survey` references.
    """
    best = jnp.max(with_nan_largest(values), axis=1)
    top = jnp.max(best)
    pltriton.store(survey.best.at[row, index * (SLICE // GROUP) + jnp.arange(SLICE // GROUP)], best)
    survey.top[row, index] = top
    below = values - jnp.where(top == -jnp.inf, 0.0, top)
    survey.mass[row, index] = jnp.sum(jnp.exp(below / temperature))


def _survey_kernel(
    # inputs
    logits_ref,  # [rows, vocab] float32
    temperature_ref,  # [groups] float32
    top_k_ref,  # [groups] int32
    top_p_ref,  # [groups] float32
    min_p_ref,  # [groups] float32
    # outputs
    *survey_refs,  # as in `Survey`
):
    """Stores the `Survey` of one slice in one Pallas program, if the slice's row has top-k, top-p or min-p."""
    row, index, (rows, vocab) = pl.program_id(0), pl.program_id(1), logits_ref.shape
    temperature, *limits = controls_of(row, rows, (temperature_ref, top_k_ref, top_p_ref, min_p_ref))

    @pl.when(restricts(temperature, *limits))
    def _():
        column = slice_columns(index)
        values = pltriton.load(logits_ref.at[row, column], mask=column < vocab, other=-jnp.inf)
        survey_slice(values, row, index, temperature, Survey(*survey_refs))


def _best_groups(best_ref, groups_ref, row, most, interpret):
    """Finds a row's best token groups (those with the largest logits), inside a kernel.

    The numbers of all token groups are written to `groups_ref`, with the best token groups first.

    Args:
        best_ref: largest logit of each token group [rows, token groups].
        groups_ref: memory for the numbers of token groups [rows, token groups, padded].
        row: index of the row.
        most: number of token groups to find.
        interpret: whether the kernel is interpreted on a CPU.

    Returns:
        The number of best token groups (at most `most`; fewer if token groups tie), and a bound as an `ordered`
        integer. The largest logit of a best token group is at or above the bound; that of any other token group is
        below it.
    """
    groups = best_ref.shape[1]
    group = jnp.arange(pl.next_power_of_2(groups))
    best = pltriton.load(best_ref.at[row, group], mask=group < groups, other=-jnp.inf)
    order = jnp.where(group < groups, ordered(best), jnp.uint32(0))
    ends = jnp.min(order) & 0, jnp.max(order) + 1
    least = largest_bound(lambda c: jnp.sum((order >= c).astype(jnp.int32)), jnp.int32(most + 1), *ends) + 1
    return put_first(order >= least, group, groups_ref, row, interpret), least


def put_first(chosen, numbers, ref, row, interpret):
    """Writes numbers to a row of `ref`, with the chosen numbers first, inside a kernel.

    Args:
        chosen: whether each number is chosen, bool [count].
        numbers: int32 [count].
        ref: memory [rows, count].
        row: index of the row.
        interpret: whether the kernel is interpreted on a CPU.

    Returns:
        How many numbers are chosen.
    """
    place = jnp.arange(chosen.shape[0])
    count, before = jnp.sum(chosen.astype(jnp.int32)), jnp.cumsum(chosen.astype(jnp.int32))
    pltriton.store(ref.at[row, jnp.where(chosen, before - 1, count + place - before)], numbers)
    if not interpret:
        pltriton.debug_barrier()  # all threads write before any thread reads
    return count


class BestGroups(NamedTuple):
    """The tokens of a row's best token groups (those with the largest logits), in registers of a Pallas program."""

    logits: Array  # [tokens]; -inf for padding
    column: Array  # [tokens], column of each token in the row
    has_all: Array  # whether the best token groups contain every token that the threshold keeps
    top: Array  # largest logit of the whole row; infinity if one is NaN


def row_threshold(read, row, vocab, controls, survey, groups_ref, *, interpret):
    """Finds the smallest logit that a row keeps, inside a kernel.

    The search covers the row's best token groups or, if these may lack a token to keep, the whole row.

    Args:
        read: function (columns, mask) that loads logits of the row, and returns -inf where the mask is false.
        row, vocab: index and length of the row.
        controls: temperature, top_k, top_p and min_p of the row.
        survey: `Survey` references.
        groups_ref: memory for the numbers of the row's token groups [rows, token groups, padded].
        interpret: whether the kernel is interpreted on a CPU.

    Returns:
        The threshold, and the row's `BestGroups`.
    """
    temperature, top_k, top_p = controls[:3]
    slices, most = survey.top.shape[1], min(MOST, groups_ref.shape[1])
    # Compute the row's largest logit, and the row's total probability, not normalised.
    index = jnp.arange(pl.next_power_of_2(slices))
    tops = pltriton.load(survey.top.at[row, index], mask=index < slices, other=-jnp.inf)
    masses = pltriton.load(survey.mass.at[row, index], mask=index < slices, other=0)
    top = jnp.max(tops)
    total = jnp.sum(masses * jnp.exp((tops - top) / temperature))
    # Load the tokens of the best token groups.
    count, least = _best_groups(survey.best, groups_ref, row, most, interpret)
    place = jnp.arange(most * GROUP)  # a flat array, because each reduction of it takes one barrier only
    is_token = place // GROUP < count
    group = pltriton.load(groups_ref.at[row, place // GROUP], mask=is_token, other=0)
    column = group * GROUP + place % GROUP
    is_token &= column < vocab
    values = read(column, is_token)
    order = jnp.where(is_token, ordered(values), jnp.uint32(0))
    weights = jnp.exp((values - top) / temperature)

    def count_above(candidate):
        return jnp.sum(jnp.where(order >= candidate, 1.0, 0.0))

    def mass_above(candidate):
        return jnp.where(candidate == 0, total, jnp.sum(jnp.where(order >= candidate, weights, 0.0)))

    # Search by bisection among the loaded tokens, or over the whole row.
    has_nucleus = (top_p >= 1) | (mass_above(least) >= top_p * total)
    is_enough = jnp.where(top_k > 0, count_above(least) >= top_k.astype(jnp.float32), has_nucleus)
    threshold = jax.lax.cond(
        is_enough,
        lambda: _threshold(top, controls, least, count_above, mass_above),
        lambda: _threshold(top, controls, least & 0, *_weights_of_row(read, vocab, top, temperature)),
    )
    finite = jnp.maximum(threshold, jnp.finfo(jnp.float32).min)  # logits of -inf are never kept
    return threshold, BestGroups(values, column, ordered(finite) >= least, top)


def _threshold_kernel(
    # inputs
    logits_ref,  # [rows, vocab] float32
    best_ref,  # as in `Survey`, like the next two
    top_ref,
    mass_ref,
    temperature_ref,  # [groups] float32
    top_k_ref,  # [groups] int32
    top_p_ref,  # [groups] float32
    min_p_ref,  # [groups] float32
    # outputs
    threshold_ref,  # [rows] float32
    groups_ref,  # [rows, token groups, padded] int32: memory for the numbers of token groups
    # static parameters
    *,
    interpret,
):
    """Finds the threshold of one row, in one Pallas program."""
    row, (rows, vocab) = pl.program_id(0), logits_ref.shape
    controls = controls_of(row, rows, (temperature_ref, top_k_ref, top_p_ref, min_p_ref))
    survey = Survey(best_ref, top_ref, mass_ref)

    def read(column, mask):
        return pltriton.load(logits_ref.at[row, column], mask=mask, other=-jnp.inf)

    is_restricted = restricts(*controls)
    # Store -inf, which is right for rows without top-k, top-p and min-p. The thresholds of other rows are stored below.
    threshold_ref[row] = jnp.where(is_restricted, controls[2], -jnp.inf)

    @pl.when(is_restricted)
    def _():
        threshold_ref[row], _ = row_threshold(read, row, vocab, controls, survey, groups_ref, interpret=interpret)


def _weights_of_row(read, vocab, top, temperature):
    """Returns two functions that read a whole row.

    Both functions take an `ordered` integer. One returns the number, and the other the total probability, of the row's
    tokens at or above this integer.

    Args:
        read, vocab: as in `row_threshold`.
        top: largest logit of the row; probabilities are exp((logit - top) / temperature), not normalised.
        temperature: temperature of the row.
    """

    def above(candidate, weight):
        def step(index, sums):
            column = index * IN_FLIGHT + jnp.arange(IN_FLIGHT)
            values = read(column, column < vocab)
            is_above = (ordered(values) >= candidate) & (column < vocab)
            return sums + jnp.where(is_above, weight(values), 0.0)

        sums = jax.lax.fori_loop(0, pl.cdiv(vocab, IN_FLIGHT), step, jnp.zeros(IN_FLIGHT, jnp.float32))
        return jnp.sum(sums)

    return lambda c: above(c, jnp.ones_like), lambda c: above(c, lambda values: jnp.exp((values - top) / temperature))


def survey_shapes(rows: int, vocab: int) -> tuple[Survey, jax.ShapeDtypeStruct]:
    """Returns the shapes of a `Survey`, and of the memory for the numbers of token groups."""
    array, slices = jax.ShapeDtypeStruct, pl.cdiv(vocab, SLICE)
    groups, per_slice = slices * SLICE // GROUP, array((rows, slices), jnp.float32)
    numbers = array((rows, pl.next_power_of_2(groups)), jnp.int32)
    return Survey(array((rows, groups), jnp.float32), per_slice, per_slice), numbers


def _pallas(logits, *controls, interpret):
    (rows, vocab), call = logits.shape, functools.partial(pl.pallas_call, interpret=interpret)
    shapes, group_numbers = survey_shapes(rows, vocab)
    survey = call(
        _survey_kernel,
        grid=(rows, shapes.top.shape[1]),
        out_shape=list(shapes),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="sampling_threshold_survey",
    )(logits, *controls)
    threshold, _ = call(
        functools.partial(_threshold_kernel, interpret=interpret),
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct((rows,), jnp.float32), group_numbers],
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        name="sampling_threshold",
    )(logits, *survey, *controls)
    return threshold


def check_groups(rows: int, controls: Sequence[Array]) -> None:
    """Raises ValueError if controls differ in their number of groups, or rows do not divide equally into groups."""
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
    """Returns the smallest logit that top-k, top-p and min-p keep in each row.

    The result is -inf for rows in which all three filters are off, and for rows of temperature 0. Neighbouring rows
    form groups of equal size. The rows of a group share their sampling controls.

    Args:
        logits: float32 [rows, vocab], not divided by the temperature.
        temperature: [groups].
        top_k: [groups]; 0: off.
        top_p: [groups]; 1: off.
        min_p: [groups]; 0: off.
        implementation: as in `paged_attention`.

    Raises:
        ValueError: the controls differ in their number of groups, or the rows do not divide equally into groups.
    """
    controls = (temperature, top_k, top_p, min_p)
    check_groups(logits.shape[0], controls)
    return dispatch(implementation, [Kernel(TRITON, _pallas)], _reference, logits, *controls)
