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
from jspec.core.replaced_rows import replaced_rows
from jspec.draft.base import active_slots

LENGTHS = (1, 2, 3, 5, 9, 13, 17, 25)  # smallest match length in tokens of each kind of match
# Rates of a new request by kind of match: of the tokens after the match, and of the tokens that a head drafts there.
# They are about those of the embedded pair, which edits functions of Python's library.
FIRST_RATES = (0.45, 0.6, 0.7, 0.8, 0.85, 0.9, 0.9, 0.9), (0.7, 0.75, 0.75, 0.8, 0.8, 0.8, 0.8, 0.8)
FIRST_TOKENS = 16.0  # number of tokens that a first rate counts for
LEAST = 1e-3  # smallest rate, whose logarithm is a score
DECAY = 0.98  # factor of the counts of a kind at each round in which its chains are measured


@struct.dataclass
class MatchRates:
    """Counts of compared tokens by kind of match, and the chains that are compared at the end of the round.

    Its sources are the look-up, and a head if the look-up may replace its chains. A head's tokens count for the kind of
    the match too: where a match is long, a head drafts well too.
    """

    right: Float[Array, "slots sources kinds"]  # tokens that were right, in chains whose earlier tokens were right too
    tried: Float[Array, "slots sources kinds"]  # tokens that were right, and the first wrong one of each chain
    chains: Int[Array, "slots sources depth"]  # the look-up's chain, and a head's; -1 after a chain's end
    kind: Int[Array, "slots"]  # kind of the match; -1: no match

    @classmethod
    def new(cls, slots: int, sources: int, depth: int) -> MatchRates:
        """Return the rates of new requests.

        Args:
            slots: number of slots.
            sources: 1 for a look-up, 2 for a look-up and a head.
            depth: number of tokens of the longest chain.
        """
        right, tried = _first(slots, sources)
        return cls(right, tried, jnp.full((slots, sources, depth), -1), jnp.full(slots, -1))

    def forget(self, slots: Int[Array, "pieces"]) -> MatchRates:
        """Return the rates where those of some slots are those of new requests."""
        right, tried = _first(len(slots), self.right.shape[1])
        return replace(
            self,
            right=self.right.at[slots].set(right, mode="drop"),
            tried=self.tried.at[slots].set(tried, mode="drop"),
        )

    def of(self, slots: Int[Array, "batch"], kind: Int[Array, "batch"]) -> Float[Array, "batch sources"]:
        """Return the rates of each row's kind: the probability that a token is right if those before it are."""
        place = slots, slice(None), jnp.maximum(kind, 0)
        right, tried = (field.at[place].get(mode="fill", fill_value=1.0) for field in (self.right, self.tried))
        return jnp.maximum(right / tried, LEAST)

    def keep(self, view: SlotView, chains: Int[Array, "batch sources depth"], kind: Int[Array, "batch"]) -> MatchRates:
        """Return the rates with the chains of this round."""
        return replace(self, **self._written(view, {"chains": chains, "kind": kind}))

    def learn(self, view: SlotView, verdict: Verdict) -> MatchRates:
        """Return the rates after the tokens that the round emitted."""
        chains = self.chains.at[view.slots].get(mode="fill", fill_value=-1)
        kind = self.kind.at[view.slots].get(mode="fill", fill_value=-1)
        depth = min(verdict.tokens.shape[1], chains.shape[2])
        emitted, proposed = verdict.tokens[:, None, :depth], chains[..., :depth]
        is_right = (emitted == proposed) & (proposed >= 0)
        right = jnp.min(jnp.where(is_right, depth, np.arange(depth, dtype=np.int32)), axis=-1)
        ends = jnp.sum((emitted >= 0) & (proposed >= 0), axis=-1)
        tried = right + (right < ends)  # a chain that agrees with all emitted tokens has no wrong one yet
        is_measured = (kind[:, None, None] == np.arange(len(LENGTHS))) & (tried > 0)[..., None]
        new = {}
        for name, tokens in (("right", right), ("tried", tried)):
            old = getattr(self, name).at[view.slots].get(mode="fill", fill_value=1.0)
            new[name] = jnp.where(is_measured, DECAY * old + tokens[..., None], old)
        return replace(self, **self._written(view, new))

    def _written(self, view: SlotView, new: dict[str, Array]) -> dict[str, Array]:
        """Return fields in which the rows of active slots are new."""
        old = {name: getattr(self, name) for name in new}
        return replaced_rows(old, active_slots(view, len(self.tried)), new)


def kind_of(length: Int[Array, "batch"]) -> Int[Array, "batch"]:
    """Return the kind of a match of a length in tokens; -1: no match."""
    return jnp.sum(length[:, None] >= np.array(LENGTHS), axis=1, dtype=jnp.int32) - 1


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


def _first(slots: int, sources: int) -> tuple[Float[Array, "slots sources kinds"], Float[Array, "slots sources kinds"]]:
    rates = np.array(FIRST_RATES[:sources], np.float32)
    right = jnp.tile(FIRST_TOKENS * rates, (slots, 1, 1))
    return right, jnp.full_like(right, FIRST_TOKENS)
