"""The part of a weight that one of several devices holds, inside of `jax.shard_map` over the mesh axis `AXIS`.

    "rows"      y = [x @ w_0.T, x @ w_1.T, ...]         a device holds rows; the outputs are put side by side
    "columns"   y = x_0 @ w_0.T + x_1 @ w_1.T + ...     a device holds columns, and the same columns of x

The exchanges give every device the same bits: sums over devices are added up in one order everywhere. If a reader needs
only a few numbers of a product by rows, the product may stay divided (`OwnColumns`).
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

AXIS = "model"  # name of the mesh axis over whose devices weights are divided
STATIC = {"static": True}
FEW_BYTES = 2**19  # partial sums of so many bytes are exchanged as they are; others are added up first
MOST_GATHERED_ROWS = 64  # with more rows, the exchange adds up the devices' sums, so that fewer bytes arrive


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """A device's rows or columns of a weight; after the rows of the last device there may be padding."""

    weight: Any  # the device's part, an array or a `Quantized`
    by: Literal["rows", "columns"] = field(metadata=STATIC)
    size: int = field(metadata=STATIC)  # number of rows of the whole weight, without padding
    gathers: bool = field(default=True, metadata=STATIC)  # by rows: whether products are gathered, or `OwnColumns`

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype

    def join(
        self, parts: Float[Array, "parts *rows out"], dtype: jnp.dtype, *, deterministic: bool = False
    ) -> Float[Array, "parts_of_all *rows out"]:
        """Returns a product by columns as partial sums of all devices, from the partial sums of each device.

        Args:
            parts: partial sums of the product with this device's part, without scales.
            dtype: dtype in which devices add up their sums if there are more than `MOST_GATHERED_ROWS` rows.
            deterministic: add up in the same order for any number of rows.
        """
        if parts.nbytes <= FEW_BYTES and not deterministic:
            return jax.lax.all_gather(parts, AXIS, tiled=True)  # the reader adds them up, which saves a launch
        first, *others = parts.astype(jnp.float32)
        own = sum(others, first)
        if deterministic or math.prod(own.shape[:-1]) <= MOST_GATHERED_ROWS:
            return jax.lax.all_gather(own, AXIS)
        return jax.lax.psum(own.astype(dtype), AXIS)[None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OwnColumns:
    """This device's columns of a product, as partial sums; the other devices have the other columns."""

    own: Any  # `PartialSums` [parts, *rows, width]
    size: int = field(metadata=STATIC)  # number of columns of all devices; the columns from `size` on are padding

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.own.shape[:-1], self.size)

    @property
    def width(self) -> int:
        """Number of columns of each device."""
        return self.own.shape[-1]

    @property
    def is_padded(self) -> bool:
        return self.width * jax.lax.axis_size(AXIS) > self.size


def gather_columns(own: Float[Array, "*rows width"], copies: int = 1) -> Float[Array, "*rows width_of_all"]:
    """Returns the columns of all devices side by side.

    Args:
        own: columns of this device.
        copies: number of consecutive devices that have the same columns, which are returned once.
    """
    columns = jax.lax.all_gather(own, AXIS, axis=own.ndim - 1, tiled=True)
    return columns.reshape(*own.shape[:-1], -1, copies, own.shape[-1])[..., 0, :].reshape(*own.shape[:-1], -1)


def own_columns(columns: Float[Array, "*rows width_of_all"], width: int, copies: int = 1) -> Array:
    """Returns this device's columns among those of all devices; the inverse of `gather_columns`."""
    start = jax.lax.axis_index(AXIS) // copies * width
    return jax.lax.dynamic_slice_in_dim(columns, start, width, axis=columns.ndim - 1)


def look_up(table: Array | Shard, ids: Int[Array, "*rows"]) -> Float[Array, "*rows width"]:
    """Returns rows of a table that every device holds, or of which each device holds some rows."""
    if not isinstance(table, Shard):
        return table[ids]
    count = table.shape[0]
    local_ids = ids - jax.lax.axis_index(AXIS) * count
    rows = jnp.where(
        ((local_ids >= 0) & (local_ids < count))[..., None], table.weight[jnp.clip(local_ids, 0, count - 1)], 0
    )
    return jax.lax.psum(rows, AXIS)  # one device's row and zeros, so the sum is exact
