"""Chooses the experts of each row in a mixture of experts, and the weights of their outputs.

A row's result depends on no other row, to the last bit: sums are added up in an order that is fixed by the number of
experts. Among equal scores the expert with the smallest index is first. There is no limit to how many rows an expert
may have, so no row is dropped.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.models.mlp_config import Router
from pallas_kernels.layers.quantized import sum_f32

LEAST_SUM = 1e-20  # added to the sum of the chosen sigmoids, which may all be 0


def route(
    logits: Float[Array, "rows experts"], router: Router, correction: Float[Array, "experts"] | None = None
) -> tuple[Int[Array, "chosen rows"], Float[Array, "chosen rows"]]:
    """Return the experts that each row chooses, best first, and their weights in float32.

    Args:
        logits: the router's logits, with their bias, in float32.
        router: config of the router.
        correction: correction of the scores for the choice; None: none.

    Returns:
        The indices of the experts, and their weights. An index is -1, and its weight is not a number or 0, if a row's
        logits are not numbers.
    """
    scores = jax.nn.sigmoid(logits) if router.scores == "sigmoid" else logits
    keys = scores if correction is None else scores + correction
    if router.groups > 1:
        keys = jnp.where(_of_best_groups(keys, router), keys, -jnp.inf)
    is_chosen = _places(keys)[:, None] == jnp.arange(router.chosen)[:, None]  # [rows, chosen, experts]
    experts = jnp.max(jnp.where(is_chosen, jnp.arange(router.count), -1), axis=-1)
    weights = jnp.max(jnp.where(is_chosen, scores[:, None], -jnp.inf), axis=-1)
    if router.scores == "softmax":
        columns = [weights[:, place] for place in range(router.chosen)]
        top = functools.reduce(jnp.maximum, columns) if router.is_normalised else jnp.max(logits, axis=-1)
        weights = jnp.exp(weights - top[:, None])
        if not router.is_normalised:
            weights = weights / _sum(jnp.exp(logits - top[:, None]))[:, None]
    if router.is_normalised:
        total = sum_f32([weights[:, place] for place in range(router.chosen)])
        weights = weights / (total[:, None] + (LEAST_SUM if router.scores == "sigmoid" else 0))
    return experts.T, weights.T * router.factor


def _places(keys: Float[Array, "*rows count"]) -> Int[Array, "*rows count"]:
    """Return the place of each key in its row, from the largest one; of equal keys the first is first."""
    index = jnp.arange(keys.shape[-1])
    own, other = keys[..., :, None], keys[..., None, :]
    is_before = (other > own) | ((other == own) & (index[None, :] < index[:, None]))
    return jnp.sum(is_before, axis=-1, dtype=jnp.int32)


def _of_best_groups(keys: Float[Array, "rows experts"], router: Router) -> Array:
    """Return whether each expert is in one of the row's best groups."""
    grouped = keys.reshape(keys.shape[0], router.groups, -1)
    places = _places(grouped)
    largest = [jnp.max(jnp.where(places == place, grouped, -jnp.inf), axis=-1) for place in range(router.summed)]
    is_best = _places(functools.reduce(jnp.add, largest)) < router.chosen_groups
    return jnp.repeat(is_best, router.count // router.groups, axis=-1)


def _sum(values: Float[Array, "rows count"]) -> Float[Array, "rows"]:
    """Return the sum of each row, in an order that depends on the number of columns only."""
    while (count := values.shape[-1]) > 1:
        half = (count + 1) // 2
        rest = jnp.pad(values[:, half:], ((0, 0), (0, 2 * half - count)))
        values = values[:, :half] + rest
    return values[:, 0]
