"""Packs some of the nodes of a batch of draft trees into the rows of one sequence.

The matrix products of a forward pass run on the packed rows only. Attention, whose time depends little on the number of
rows, gets all nodes in their places.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.layers.partial_sums import Scaled
from pallas_kernels.layers.shard import OwnColumns

NO_ROW = 2**30  # packed row of a node that is left out; no such row exists


@struct.dataclass
class Packing:
    """The nodes of a batch of trees that are rows of one sequence."""

    rows: Int[Array, "packed"]  # index of each packed row among the nodes of all batch rows; padding: batch * nodes
    places: Int[Array, "batch nodes"]  # packed row of each node; NO_ROW: the node is left out

    @property
    def size(self) -> int:
        """Number of packed rows."""
        return self.rows.shape[0]

    def pad(self, more: int) -> Packing:
        """Return this packing with ``more`` padding rows."""
        return replace(self, rows=jnp.pad(self.rows, (0, more), constant_values=self.places.size))

    def pack(self, values: Any) -> Any:
        """Return the packed rows [1, packed, ...] of values [batch, nodes, ...]; padding rows are zero."""
        return jax.tree.map(self._pack, values)

    def _pack(self, values: Shaped[Array, "batch nodes ..."]) -> Shaped[Array, "1 packed ..."]:
        flat = values.reshape(-1, *values.shape[2:])
        return flat.at[self.rows].get(mode="fill", fill_value=0)[None]

    def unpack(
        self, sums: Float[Array, "parts 1 packed out"] | Scaled | OwnColumns
    ) -> Float[Array, "parts batch nodes out"] | Scaled | OwnColumns:
        """Return the partial sums [parts, batch, nodes, out] from those of the packed rows [parts, 1, packed, out].

        Nodes that are left out get zeros.
        """
        if isinstance(sums, OwnColumns):
            return replace(sums, own=self.unpack(sums.own))
        if isinstance(sums, Scaled):
            return replace(sums, values=self._unpack(sums.values), row_scale=self._unpack(sums.row_scale[None])[0])
        return self._unpack(sums)

    def _unpack(self, values: Shaped[Array, "parts 1 packed ..."]) -> Shaped[Array, "parts batch nodes ..."]:
        return values[:, 0].at[:, self.places].get(mode="fill", fill_value=0)
