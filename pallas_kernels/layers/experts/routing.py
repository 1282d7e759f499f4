"""Chooses the experts of each row in a mixture of experts, and the weights of their outputs.

A row's result depends on no other row, to the last bit: sums are added up in an order that is fixed by the number of
experts. Among equal scores the expert with the smallest index is first. There is no limit to how many rows an expert
may have, so no row is dropped. XLA compiles the choice to about five kernels; for a few rows, their time is nothing but
launch overhead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import sum_f32
from pallas_kernels.layers.row_by_row import row_by_row

LEAST_SUM = 1e-20  # added to the sum of the chosen sigmoids, which may all be 0
MOST = 512  # most experts that the kernel supports; one warp holds the keys of all
LEAST = -(2**31)  # integer that is smaller than those of all keys
NONE = -1  # index of no expert


@dataclass(frozen=True)
class Choice:
    """How each row of a mixture of experts chooses its experts, and how it weights their outputs.

    A row chooses the experts with the largest scores.

    Attributes:
        count: number of experts.
        chosen: number of experts that a row chooses.
        scores: "softmax" of the router's logits over all experts, or the "sigmoid" of each logit.
        is_normalised: whether the scores of the chosen experts are divided by their sum, to be their weights. With
            "softmax" this equals a softmax over the logits of the chosen experts.
        factor: factor of the weights.
        groups: number of groups of experts; a row chooses among the experts of its best groups (arXiv:2412.19437).
        chosen_groups: number of groups that a row chooses.
        summed: number of a group's largest scores whose sum is the score of the group, 1 or 2.
    """

    count: int
    chosen: int
    scores: str = "softmax"
    is_normalised: bool = True
    factor: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    summed: int = 2


def _reference(logits, bias, correction, used, *, choice, shared, deterministic):
    logits, gates = logits[:, : choice.count], logits[:, choice.count :]
    logits = logits if bias is None else logits + bias
    rows = (logits,) if used is None else (logits, used)
    run = functools.partial(_reference_rows, correction=correction, choice=choice, shared=shared)
    experts, weights = row_by_row(run, *rows) if deterministic else run(*rows)
    if shared and gates.shape[1]:
        is_shared = jnp.arange(choice.chosen + shared) >= choice.chosen
        weights = jnp.where(is_shared, weights * jax.nn.sigmoid(gates), weights)
    return experts.T, weights.T


def _reference_rows(logits, used=None, *, correction, choice, shared):
    """Returns the experts and their weights, [rows, used] each."""
    scores = _scores(logits, choice)
    keys = _keys(logits, correction, choice)
    keys = jnp.where(jnp.isnan(keys), -jnp.inf, keys)
    if choice.groups > 1:
        keys = jnp.where(_of_best_groups(keys, choice), keys, -jnp.inf)
    is_chosen = _places(keys)[:, None] == jnp.arange(choice.chosen)[:, None]  # [rows, chosen, experts]
    experts = jnp.max(jnp.where(is_chosen, jnp.arange(choice.count), NONE), axis=-1)
    weights = jnp.max(jnp.where(is_chosen, scores[:, None], -jnp.inf), axis=-1)
    if choice.scores == "softmax":
        columns = [weights[:, rank] for rank in range(choice.chosen)]
        top = functools.reduce(jnp.maximum, columns) if choice.is_normalised else jnp.max(logits, axis=-1)
        weights = jnp.exp(weights - top[:, None])
        if not choice.is_normalised:
            weights = weights / _sum(jnp.exp(logits - top[:, None]))[:, None]
    if choice.is_normalised:
        total = sum_f32([weights[:, rank] for rank in range(choice.chosen)])
        weights = weights / (total[:, None] + (LEAST_SUM if choice.scores == "sigmoid" else 0))
    experts, weights = experts.astype(jnp.int32), weights * choice.factor
    if shared:
        behind = (0, 0), (0, shared)
        index = choice.count - choice.chosen + jnp.arange(choice.chosen + shared)
        experts = jnp.where(index < choice.count, jnp.pad(experts, behind), index)
        weights = jnp.pad(weights, behind, constant_values=1)
    weights = jnp.where(jnp.any(jnp.isnan(logits), axis=-1, keepdims=True), jnp.nan, weights)
    return experts if used is None else jnp.where(used[:, None], experts, NONE), weights


def _scores(logits: Array, choice: Choice) -> Array:
    """Returns the scores before the softmax, inside or outside of a kernel."""
    return jax.nn.sigmoid(logits) if choice.scores == "sigmoid" else logits


def _keys(logits: Array, correction: Array | None, choice: Choice) -> Array:
    """Returns the numbers by which experts are ranked, inside or outside of a kernel.

    Logits have the order of their sigmoids, and fewer ties: those above 17 have the sigmoid 1 in float32.
    """
    if correction is None and choice.groups == 1:
        return logits
    return _scores(logits, choice) + (0 if correction is None else correction)


def _places(keys: Float[Array, "*rows count"]) -> Int[Array, "*rows count"]:
    """Returns the place of each key in its row, from the largest one; of equal keys the first is first."""
    index = jnp.arange(keys.shape[-1])
    is_before = _precedes(keys[..., None, :], keys[..., :, None], index[None, :], index[:, None])
    return jnp.sum(is_before, axis=-1, dtype=jnp.int32)


def _precedes(other: Array, key: Array, other_index: Array, index: Array) -> Array:
    """Returns whether another key is before an own one: it is larger, or equal with a smaller index."""
    return (other > key) | ((other == key) & (other_index < index))


def _of_best_groups(keys: Float[Array, "rows experts"], choice: Choice) -> Array:
    """Returns whether each expert is in one of the row's best groups."""
    grouped = keys.reshape(keys.shape[0], choice.groups, -1)
    places = _places(grouped)
    largest = [jnp.max(jnp.where(places == rank, grouped, -jnp.inf), axis=-1) for rank in range(choice.summed)]
    is_best = _places(functools.reduce(jnp.add, largest)) < choice.chosen_groups
    return jnp.repeat(is_best, choice.count // choice.groups, axis=-1)


def _sum(values: Float[Array, "rows count"]) -> Float[Array, "rows"]:
    """Returns the sum of each row, in an order that depends on the number of columns only."""
    while (count := values.shape[-1]) > 1:
        half = (count + 1) // 2
        rest = jnp.pad(values[:, half:], ((0, 0), (0, 2 * half - count)))
        values = values[:, :half] + rest
    return values[:, 0]


def _kernel(
    # inputs
    logits_ref,  # [rows, count], or [rows, count + 1] with that of the shared experts' weight, float32
    bias_ref,  # [count] float32; None: no bias
    correction_ref,  # [count] float32; None: no correction
    used_ref,  # [rows] bool; None: all rows are used
    # outputs
    experts_ref,  # [used, rows] int32
    weights_ref,  # [used, rows] float32
    # static parameters
    *,
    choice,
    shared,
):
    """Chooses the experts of one row, one after another, in one Pallas program of one warp."""
    row, expert = pl.program_id(0), jnp.arange(pl.next_power_of_2(choice.count))
    is_expert = expert < choice.count

    def load(expert, mask):
        logits = pltriton.load(logits_ref.at[row, expert], mask=mask, other=-jnp.inf)
        return logits if bias_ref is None else logits + pltriton.load(bias_ref.at[expert], mask=mask, other=0)

    logits = load(expert, is_expert)
    is_nan = jnp.max((logits != logits).astype(jnp.int32)) > 0
    correction = None
    if correction_ref is not None:
        correction = pltriton.load(correction_ref.at[expert], mask=is_expert, other=0)
    keys = _keys(logits, correction, choice)
    keys = jnp.where(is_expert & (keys == keys), keys, -jnp.inf)
    if choice.groups > 1:
        keys = jnp.where(_of_best_groups_in_kernel(keys, expert, choice), keys, -jnp.inf)
    # Choose. A warp finds the maximum of integers in one instruction.
    left = jnp.where(is_expert, _ordered_integers(keys), LEAST)
    rank = jnp.arange(pl.next_power_of_2(choice.chosen + shared))
    experts = choice.count - choice.chosen + rank  # from place `chosen` on, the indices of the shared experts
    for step in range(choice.chosen):
        best = jnp.min(jnp.where(left == jnp.max(left), expert, choice.count))
        experts = jnp.where(rank == step, best, experts)
        left = jnp.where(expert == best, LEAST, left)
    # Weight.
    is_place, is_used = rank < choice.chosen, rank < choice.chosen + shared
    weights = _scores(load(experts, is_place), choice)
    if choice.scores == "softmax":
        top = jnp.max(weights if choice.is_normalised else logits)
        weights = jnp.exp(weights - top)
        if not choice.is_normalised:
            weights = weights / jnp.sum(jnp.exp(logits - top))
    if choice.is_normalised:
        weights = weights / (jnp.sum(weights) + (LEAST_SUM if choice.scores == "sigmoid" else 0))
    if used_ref is not None:
        experts = jnp.where(used_ref[row], experts, NONE)
    pltriton.store(experts_ref.at[rank, row], experts, mask=is_used)
    alike = jax.nn.sigmoid(logits_ref[row, choice.count]) if shared and logits_ref.shape[1] > choice.count else 1
    weights = jnp.where(is_nan, jnp.nan, jnp.where(is_place, weights * choice.factor, alike))
    pltriton.store(weights_ref.at[rank, row], weights, mask=is_used)


def _ordered_integers(values: Array) -> Array:
    """Returns integers in the order of float32 numbers; both zeros have the same."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _of_best_groups_in_kernel(keys, expert, choice):
    """Does what `_of_best_groups` does, for one row, on pairs of an expert and a group [experts, groups]."""
    group = jnp.arange(pl.next_power_of_2(choice.groups))
    is_own = jax.lax.div(expert, choice.count // choice.groups)[:, None] == group[None, :]
    group_keys, score = jnp.where(is_own, keys[:, None], -jnp.inf), jnp.zeros(group.shape, jnp.float32)
    for _ in range(choice.summed):
        largest = jnp.max(group_keys, axis=0)
        score += largest
        first = jnp.min(jnp.where(group_keys == largest[None, :], expert[:, None], choice.count), axis=0)
        group_keys = jnp.where(expert[:, None] == first[None, :], -jnp.inf, group_keys)
    score = jnp.where(group < choice.groups, score, -jnp.inf)
    is_before = _precedes(score[:, None], score[None, :], group[:, None], group[None, :])
    is_best = jnp.sum(is_before.astype(jnp.int32), axis=0) < choice.chosen_groups
    return jnp.max((is_own & is_best[None, :]).astype(jnp.int32), axis=1) > 0


def _pallas(logits, bias, correction, used, *, choice, shared, interpret):
    shape = choice.chosen + shared, logits.shape[0]
    return pl.pallas_call(
        functools.partial(_kernel, choice=choice, shared=shared),
        grid=(logits.shape[0],),
        out_shape=(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="route",
    )(logits, bias, correction, used)


@functools.partial(jax.jit, static_argnames=("choice", "shared", "deterministic", "implementation"))
def route(
    logits: Float[Array, "rows logits"],
    choice: Choice,
    *,
    bias: Float[Array, "experts"] | None = None,
    correction: Float[Array, "experts"] | None = None,
    used: Bool[Array, "rows"] | None = None,
    shared: int = 0,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Int[Array, "used rows"], Float[Array, "used rows"]]:
    """Returns the experts that each row chooses, best first, then those that all rows use, and weights in float32.

    Args:
        logits: the router's logits in float32. Behind those of the experts there may be one more, the logit of the
            shared experts' weight.
        choice: how a row chooses.
        bias: bias of the logits; None: none.
        correction: correction of the scores for the choice; None: none.
        used: whether a row chooses experts; the indices of other rows are -1. None: all rows do.
        shared: number of experts that every row uses beside the chosen ones; their indices are `count`, `count` + 1 and
            so on. Their weight is the sigmoid of the last logit, or 1 without one.
        deterministic: as in `add_rms_norm`.
        implementation: as in `paged_attention`.

    Returns:
        The indices of the experts, and their weights. If one of a row's logits is not a number, no weight is; an expert
        whose key is not a number comes last.

    Raises:
        NotImplementedError: implementation is "pallas", and there are more experts than the kernel supports.
    """
    unsupported = None if choice.count <= MOST else f"at most {MOST} experts, got {choice.count}"
    kernel, reference = (functools.partial(run, choice=choice, shared=shared) for run in (_pallas, _reference))
    reference = functools.partial(reference, deterministic=deterministic)
    return dispatch(implementation, [Kernel(TRITON, kernel, unsupported)], reference, logits, bias, correction, used)
