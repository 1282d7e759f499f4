"""The partial sums of a matrix product, which the kernel that reads them adds up, with scales or on several devices."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.shard import OwnColumns, Shard, gather_columns


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scaled:
    """A float8 product x @ weight.T, kept as partial sums and scales: sum(values) * row_scale[..., None] * scale."""

    values: Float[Array, "parts *rows out"]
    row_scale: Float[Array, "*rows"]
    scale: Float[Array, " out"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class Factors(NamedTuple):
    """The operands of a matrix product, and the scales of its float32 result; None: no scale."""

    x: Array  # [*rows, inner]
    weight: Array  # [out, inner]; int8 and float8 values are exact in x's dtype
    row_scale: Array | None  # [*rows]
    scale: Array | None  # [out]

    def scaled(self, sums: Float[Array, "*parts rows out"]) -> Array:
        """Multiplies sums of the product x @ weight.T by the scales, if there are any."""
        if self.scale is None:
            return sums
        sums = sums if self.row_scale is None else sums * self.row_scale[..., None]
        return sums * self.scale


# The kernel that reads partial sums adds them up. It cannot read `OwnColumns`; `reduce_partials` gathers these.
PartialSums = Float[Array, "parts *rows out"] | Scaled | OwnColumns


def join(
    own: PartialSums, weight: Shard, dtype: jnp.dtype, *, deterministic: bool = False
) -> Float[Array, "parts_of_all *rows out_of_all"] | OwnColumns:
    """Returns a product with a weight of several devices: by rows `OwnColumns`, by columns the parts of `Shard.join`.

    Args:
        own: product with this device's part of the weight.
        weight: the weight.
        dtype, deterministic: as in `Shard.join`.
    """
    if weight.by == "columns":
        return weight.join(with_scales(own), dtype, deterministic=deterministic)
    columns = OwnColumns(own, weight.size)
    return reduce_partials(columns, dtype)[None] if weight.gathers else columns


def split_scales(parts: PartialSums) -> tuple[Array, tuple[Array, ...]]:
    """Returns partial sums without scales, and the scales: (row scales, column scales), or () if there are none."""
    assert not isinstance(parts, OwnColumns), "a kernel reads the columns of one device, or those of all after a gather"
    return (parts.values, (parts.row_scale, parts.scale)) if isinstance(parts, Scaled) else (parts, ())


def columns(parts: PartialSums, first: int, end: int | None = None) -> Float[Array, "parts *rows some"] | Scaled:
    """Returns some columns of partial sums that all devices have."""
    values, scales = split_scales(parts)
    return Scaled(values[..., first:end], scales[0], scales[1][first:end]) if scales else values[..., first:end]


def with_scales(parts: PartialSums) -> Float[Array, "parts *rows out"]:
    """Returns partial sums that are multiplied by their scales, if they have any."""
    values, scales = split_scales(parts)
    return values * scales[0][..., None] * scales[1] if scales else values


def sum_f32(parts: Iterable[Array]) -> Array:
    """Adds arrays in float32, in their order, inside or outside of a kernel.

    On a CPU, this sum is more exact than the reduction of jax 0.11.2.
    """
    first, *others = (part.astype(jnp.float32) for part in parts)
    return sum(others, first)


def reduce_partials(parts: PartialSums, dtype: jnp.dtype) -> Float[Array, "*rows out"]:
    """Adds up partial sums [parts, *rows, out], applies their scales, and rounds the result once to `dtype`.

    `OwnColumns` are gathered then, so that each device has the columns of all.
    """
    if isinstance(parts, OwnColumns):
        return gather_columns(reduce_partials(parts.own, dtype))[..., : parts.size]
    values, scales = split_scales(parts)
    total = sum_f32(values)
    return (total * scales[0][..., None] * scales[1] if scales else total).astype(dtype)


def add_adapters(
    sums: PartialSums,
    x: Float[Array, "*rows inner"],
    weight: Adapted,
    multiply: Callable[[Array, Array], Float[Array, "*rows out"]],
    dtype: jnp.dtype,
) -> Float[Array, "1 *rows out"]:
    """Returns a product with a weight that has adapters as one partial sum.

    Args:
        sums: product of x with the weight without adapters.
        x: activations.
        weight: the weight.
        multiply: function (x, w) that returns x @ w.T in float32.
        dtype: dtype of the result.
    """
    inner = weight.of_tables(multiply(x, weight.a))
    return (reduce_partials(sums, jnp.float32) + multiply(inner, weight.b)).astype(dtype)[None]
