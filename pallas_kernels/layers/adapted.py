"""A weight with low-rank adapters (LoRA, arXiv:2106.09685), of which each row of activations chooses one or none.

    y = x @ w.T + B_t (A_t x)        t: the table that a row chose; a row without an adapter gets x @ w.T

The adapters of all tables lie side by side: A is [columns, inner] and B is [out, columns]. The columns of a module of a
fused weight are adjacent, `rank` of one table after those of another, and after them there are those of the next
module. Columns at the end may be unused: they are zero. XLA computes A x of all tables and, after the columns of other
tables are set to zero, B times this. All rows share these two products, whichever tables they chose, so nothing is
gathered. The kernels of `low_rank`, for up to a few hundred rows, read the chosen tables alone.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight [out, inner], or a device's part of one, with the adapters of the rows that it is multiplied by."""

    weight: Any  # an array or a `Quantized`
    a: Float[Array, "columns inner"]
    b: Float[Array, "out columns"]  # times the scale of each adapter
    table: Int[Array, "*rows"]  # table of each row, counted from 1; 0: the row has no adapter
    width: int = field(metadata=STATIC)  # number of columns of a table, of all modules
    rank: int = field(metadata=STATIC)  # number of columns of a table of each module
    tables: int = field(metadata=STATIC)  # number of tables
    # Rows of each module of a fused weight; in these, B's columns of other modules are zero. (): they are not known.
    modules: tuple[int, ...] = field(default=(), metadata=STATIC)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype

    @property
    def stride(self) -> int:
        """Number of columns from a module to the next one."""
        return self.tables * self.rank

    def of_tables(self, products: Float[Array, "*rows columns"]) -> Float[Array, "*rows columns"]:
        """Returns products with A in the dtype of B, with zeros in the columns of tables that a row did not choose."""
        of_column = 1 + jnp.arange(self.a.shape[0]) % self.stride // self.rank
        return jnp.where(of_column == self.table[..., None], products, 0).astype(self.b.dtype)
