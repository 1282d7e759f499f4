"""The tables of low-rank adapters (LoRA, arXiv:2106.09685) on the devices, which rows of a batch choose by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
from flax import struct
from jaxtyping import Array, Int

from jspec.models.parts.layer_weights import LayerWeights
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.shard import Shard

Layer = TypeVar("Layer", bound=LayerWeights)


@struct.dataclass
class LowRank:
    """The adapters of one weight [out, inner] in all tables, or that of one table, which has ``width`` columns.

    Columns of a module are adjacent, those of one table after those of another. Columns at the end may be unused.
    """

    a: Any  # array of the devices or of the host [columns, inner]
    b: Any  # [out, columns]
    width: int = struct.field(pytree_node=False)
    rank: int = struct.field(pytree_node=False)  # columns of a table of each module
    tables: int = struct.field(pytree_node=False, default=1)
    # Rows of each module in the weight, or in each device's part of it; (): unknown.
    modules: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def adapted(self, weight: Any, table: Int[Array, "*rows"]) -> Any:
        """Return the weight with these adapters, for rows of which each chose a table or none."""
        if isinstance(weight, Shard):
            return replace(weight, weight=self.adapted(weight.weight, table))
        return Adapted(weight, self.a, self.b, table, self.width, self.rank, self.tables, self.modules)


@struct.dataclass
class AdapterTables:
    """The adapters of all tables, for each layer by the name of the weight."""

    layers: Sequence[Mapping[str, LowRank]]

    def adapted(self, layers: Sequence[Layer], table: Int[Array, "*rows"]) -> list[Layer]:
        """Return the weights of layers with adapters.

        Args:
            layers: the weights.
            table: table of each row of the activations, counted from 1; 0: the row has no adapter.
        """
        adapted: list[Layer] = []
        for layer, pairs in zip(layers, self.layers, strict=True):
            weights: dict[str, Any] = {name: pair.adapted(getattr(layer, name), table) for name, pair in pairs.items()}
            adapted.append(replace(layer, **weights))
        return adapted

    def with_table(self, index: int, adapter: Sequence[Mapping[str, LowRank]]) -> AdapterTables:
        """Return the tables with another adapter in one of them; the arrays of the old ones are donated.

        Args:
            index: index of the table, from 0 on.
            adapter: arrays of the adapter, for each layer by the name of the weight.
        """
        layers = [
            {name: _put(pair, adapter[i][name], index) for name, pair in pairs.items()}
            for i, pairs in enumerate(self.layers)
        ]
        return AdapterTables(layers)


@partial(jax.jit, donate_argnums=0)
def _put(tables: LowRank, adapter: LowRank, index: Int[Array, ""]) -> LowRank:
    """Write the columns of one table."""
    a, b, rank = tables.a, tables.b, tables.rank
    for module in range(tables.width // rank):
        first, columns = (module * tables.tables + index) * rank, slice(module * rank, (module + 1) * rank)
        a = jax.lax.dynamic_update_slice_in_dim(a, adapter.a[columns], first, axis=0)
        b = jax.lax.dynamic_update_slice_in_dim(b, adapter.b[:, columns], first, axis=1)
    return replace(tables, a=a, b=b)
