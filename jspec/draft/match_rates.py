"""How often the tokens after a match are right, learned for each request and each length of match.

Every chain that a drafter proposes is compared with the tokens that the round emits, whether the round verified the
chain or not. So a look-up whose chains are not used is measured too.

The rates are history: they depend on the tokens of earlier rounds, and not on what is drawn in this round. A choice
between two chains by these rates is therefore exact under every accept rule.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.records import SlotView, Verdict
from jspec.draft.base import active_slots
from pallas_kernels.state.scatter_rows import scatter_rows

LENGTHS = (1, 2, 3, 5, 9, 13, 17, 25)  # smallest match length in tokens of each kind of match
HEAD = len(LENGTHS)  # kind of the chains of a head, after the kinds of matches
FIRST_RATES = (0.4, 0.5, 0.6, 0.75, 0.85, 0.9, 0.9, 0.9, 0.7)  # of a new request; the last is the head's
FIRST_TOKENS = 4.0  # number of tokens that the first rate counts for
DECAY = 0.95  # factor of all counts of a kind at each round in which a chain of this kind is measured


@struct.dataclass
class MatchRates:
    """Counts of compared tokens by kind of chain, and the chains that are compared at the end of the round."""

    right: Float[Array, "slots kinds"]  # tokens that were right, in chains whose earlier tokens were right too
    tried: Float[Array, "slots kinds"]  # tokens that were right, and the first wrong one of each chain
    chains: Int[Array, "slots sources depth"]  # the look-up's chain, and a head's; -1 after a chain's end
    kinds: Int[Array, "slots sources"]  # kind of each chain

    @classmethod
    def new(cls, slots: int, sources: int, depth: int) -> MatchRates:
        """Return the rates of new requests.

        Args:
            slots: number of slots.
            sources: number of chains that a round compares.
            depth: number of tokens of the longest chain.
        """
        right, tried = _first(slots)
        return cls(right, tried, jnp.full((slots, sources, depth), -1), jnp.zeros((slots, sources), jnp.int32))

    def forget(self, slots: Int[Array, "pieces"]) -> MatchRates:
        """Return the rates where those of some slots are those of new requests."""
        right, tried = _first(len(slots))
        return replace(
            self,
            right=self.right.at[slots].set(right, mode="drop"),
            tried=self.tried.at[slots].set(tried, mode="drop"),
        )

    def of(self, slots: Int[Array, "batch"]) -> Float[Array, "batch kinds"]:
        """Return the rate of each kind: the probability that a token is right if those before it are."""
        right, tried = (field.at[slots].get(mode="fill", fill_value=1.0) for field in (self.right, self.tried))
        return right / tried

    def keep(
        self, view: SlotView, chains: Int[Array, "batch sources depth"], kinds: Int[Array, "batch sources"]
    ) -> MatchRates:
        """Return the rates with the chains of this round; those of a cut tree are shorter."""
        short = self.chains.shape[2] - chains.shape[2]
        new = {"chains": jnp.pad(chains, ((0, 0), (0, 0), (0, short)), constant_values=-1), "kinds": kinds}
        return replace(self, **self._written(view, new))

    def learn(self, view: SlotView, verdict: Verdict) -> MatchRates:
        """Return the rates after the tokens that the round emitted."""
        chains = self.chains.at[view.slots].get(mode="fill", fill_value=-1)
        kinds = self.kinds.at[view.slots].get(mode="fill", fill_value=0)
        depth = min(verdict.tokens.shape[1], chains.shape[2])
        emitted, proposed = verdict.tokens[:, None, :depth], chains[..., :depth]
        is_right = jnp.cumprod((emitted == proposed) & (proposed >= 0), axis=-1, dtype=jnp.int32)
        count = jnp.sum(is_right, axis=-1)
        ends = jnp.sum((emitted >= 0) & (proposed >= 0), axis=-1)
        tried = count + (count < ends)  # a chain that agrees with all emitted tokens has no wrong one yet
        of_kind = (kinds[..., None] == np.arange(HEAD + 1)) & (tried > 0)[..., None]
        factor = jnp.where(jnp.any(of_kind, axis=1), DECAY, 1.0)
        new = {}
        for name, tokens in (("right", count), ("tried", tried)):
            old = getattr(self, name).at[view.slots].get(mode="fill", fill_value=1.0)
            new[name] = factor * old + jnp.sum(jnp.where(of_kind, tokens[..., None], 0), axis=1)
        return replace(self, **self._written(view, new))

    def _written(self, view: SlotView, new: dict[str, Array]) -> dict[str, Array]:
        """Return fields in which the rows of active slots are new."""
        old = {name: getattr(self, name) for name in new}
        return scatter_rows(old, active_slots(view, len(self.tried)), new, implementation=view.implementation)


def kind_of(length: Int[Array, "batch"]) -> Int[Array, "batch"]:
    """Return the kind of a match of a length in tokens, at least 1."""
    return jnp.sum(length[:, None] >= np.array(LENGTHS[1:]), axis=1, dtype=jnp.int32)


def expected_length(
    rate: Float[Array, "batch"], count: Int[Array | np.ndarray, "batch"], depth: int
) -> Float[Array, "batch"]:
    """Return how many tokens of a chain are right on average: the sum of ``rate ** d`` for d from 1 to ``count``.

    Args:
        rate: rate of each chain.
        count: number of tokens of each chain, at most ``depth``.
        depth: largest number of tokens.
    """
    steps = np.arange(1, depth + 1)
    return jnp.sum(jnp.where(steps <= count[:, None], rate[:, None] ** steps, 0.0), axis=1)


def _first(slots: int) -> tuple[Float[Array, "slots kinds"], Float[Array, "slots kinds"]]:
    tried = jnp.full((slots, HEAD + 1), FIRST_TOKENS)
    return tried * np.array(FIRST_RATES, np.float32), tried
