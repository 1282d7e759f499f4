"""What the gated delta rule reads and keeps of tokens (`pallas_kernels.recurrent.gated_delta`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

LEAST = -128.0  # a log decay below it is a factor of 0 in float32
EVERY = 32  # number of tokens after which a state advances


class Records(NamedTuple):
    """What is kept of tokens: keys, corrected values and log decays, of all heads."""

    keys: Float[Array, "batch key_heads tokens key_dim"]
    values: Float[Array, "batch heads tokens value_dim"]
    decays: Float[Array, "batch heads tokens"]  # float32

    def masked(self, kept: Bool[Array, "batch tokens"]) -> Records:
        """Return the records with zeros for tokens that are not kept; such a token changes nothing."""
        kept = kept[:, None, :]
        keys, values = (jnp.where(kept[..., None], rows, 0) for rows in self[:2])
        return Records(keys, values, jnp.where(kept, self.decays, 0))

    def map(self, function: Callable[[Array], Array]) -> Records:
        """Return the records whose arrays are function(array)."""
        return Records(*map(function, self))


class DeltaTokens(NamedTuple):
    """The inputs of new tokens; keys and values are rounded to the dtype of records."""

    queries: Float[Array, "batch key_heads tokens key_dim"]
    keys: Float[Array, "batch key_heads tokens key_dim"]
    values: Float[Array, "batch heads tokens value_dim"]
    decays: Float[Array, "batch heads tokens"]  # log decays g <= 0, float32
    # beta, float32; None: values are not corrected by what keys read of the state, as in Mamba 2
    rates: Float[Array, "batch heads tokens"] | None


States = Float[Array, "batch heads value_dim key_dim"]
SlotStates = Float[Array, "slots heads value_dim key_dim"]  # those of all slots


def each_head(rows: Float[Array, "batch key_heads tokens dim"], heads: int) -> Float[Array, "batch heads tokens dim"]:
    """Return keys or queries of each value head; successive value heads share a key head."""
    return jnp.repeat(rows, heads // rows.shape[1], axis=1)
