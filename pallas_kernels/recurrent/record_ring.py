"""Where the records of each slot are kept: the record of position p is in row ``p % rows``."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.recurrent.records import EVERY, Records, SlotStates, States


class RecordRing(NamedTuple):
    """The rows of all slots."""

    keys: Float[Array, "slots rows key_heads key_dim"]  # finite
    values: Float[Array, "slots rows heads value_dim"]
    decays: Float[Array, "slots rows heads"]  # float32

    @classmethod
    def zeros(
        cls, slots: int, heads: tuple[int, int], dims: tuple[int, int], round_rows: int, dtype: Any
    ) -> RecordRing:
        """Make the rows for a round of ``round_rows`` tokens behind up to ``EVERY - 1`` committed ones.

        Args:
            slots: number of slots.
            heads: number of key heads and of value heads.
            dims: number of channels of a key head and of a value head.
            round_rows: number of tokens of a round.
            dtype: dtype of keys and values.
        """
        rows = -(-(EVERY - 1 + round_rows) // EVERY) * EVERY  # a block of `EVERY` positions is never cut
        keys, values = (jnp.zeros((slots, rows, *of), dtype) for of in zip(heads, dims, strict=True))
        return cls(keys, values, jnp.zeros((slots, rows, heads[1]), jnp.float32))

    @property
    def rows(self) -> int:
        """Number of rows of a slot."""
        return self.decays.shape[1]

    def at(self, slots: Int[Array, "batch"], position: Int[Array, "batch tokens"]) -> Records:
        """Return the records of some positions; zeros for a slot that does not exist."""
        return Records(*(_at(rows, slots, position % self.rows) for rows in self))

    def decays_at(
        self, slots: Int[Array, "batch"], position: Int[Array, "batch tokens"]
    ) -> Float[Array, "batch heads tokens"]:
        """Return the log decays of some positions; zeros for a slot that does not exist."""
        return _at(self.decays, slots, position % self.rows)

    def window(self, slots: Int[Array, "batch"], lengths: Int[Array, "batch"]) -> Records:
        """Return the records of the committed tokens behind the states of some slots, and zeros for other rows."""
        position = block_of(lengths)
        return self.at(slots, position).masked(position < lengths[:, None])

    def written(
        self,
        slots: Int[Array, "batch tokens"],
        position: Int[Array, "batch tokens"],
        new: Records,
        *,
        has_values: bool = False,
    ) -> RecordRing:
        """Return the rows with the records of new tokens; those of slots that do not exist are dropped.

        A key that is not finite becomes 0: rows that nobody reads are multiplied by 0. The token's output tells of it.

        Args:
            slots: slot of each token.
            position: position of each token.
            new: records of the tokens.
            has_values: whether the values are in their rows already.
        """
        row, keys = position % self.rows, jnp.where(jnp.isfinite(new.keys), new.keys, 0)

        def put(old: Array, of: Array) -> Array:
            return old.at[slots, row].set(jnp.swapaxes(of, 1, 2), mode="drop")

        values = self.values if has_values else put(self.values, new.values)
        return RecordRing(put(self.keys, keys), values, put(self.decays, new.decays))


def _at(rows: Array, slots: Array, row: Array) -> Array:
    return jnp.swapaxes(rows.at[slots[:, None], row].get(mode="fill", fill_value=0), 1, 2)


def block_of(position: Int[Array, "batch"]) -> Int[Array, "batch every"]:
    """Return the positions of the block of `EVERY` records in which each position is."""
    return position[:, None] // EVERY * EVERY + jnp.arange(EVERY)


def states_of(state: SlotStates, slots: Int[Array, "batch"]) -> States:
    """Return the states of some slots; zeros for one that does not exist."""
    return state.at[slots].get(mode="fill", fill_value=0)
