"""The reference of `expert_matmul`, and how the weights of experts are stored."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.dense.grouped_matmul import widened
from pallas_kernels.layers.experts import mxfp4
from pallas_kernels.layers.experts.expert_blocks import blocks_of
from pallas_kernels.layers.experts.expert_bytes import unpack
from pallas_kernels.layers.packed import int4
from pallas_kernels.layers.row_by_row import row_by_row
from pallas_kernels.layers.weights import Quantized

REFERENCE_ROWS = 8  # rows of a block in the reference


def rows_of(expert: Array, columns: Array, sizes: tuple[int, int], *, gated: bool, shared: int) -> list[Array]:
    """Returns in which rows of all experts' weights an expert has some of its columns, of gate and of up if gated.

    The rows of the last experts are those of one dense weight: all gates, then all ups; or in a product with down,
    rows of which each expert has its part of k, one after another.

    Args:
        expert: index of the expert.
        columns: columns of the result.
        sizes: numbers of experts, and of rows of an expert.
        gated: whether gate and up are joined.
        shared: number of the last experts.
    """
    (experts, rows), width = sizes, sizes[1] // 2
    if shared < 2:
        first_half = expert * rows + columns
        return [first_half, first_half + width] if gated else [first_half]
    first = experts - shared
    is_shared, shared_index = expert >= first, expert - first
    if gated:
        first_half = jnp.where(is_shared, first * rows + shared_index * width, expert * rows) + columns
        return [first_half, jnp.where(is_shared, first_half + shared * width, first_half + width)]
    return [jnp.where(is_shared, first * rows + shared_index + shared * columns, expert * rows + columns)]


def reference(x, weight, bias, factors, chosen, *, gate, dtype, deterministic, shared):
    """Computes what the kernels do; the arguments are those of `expert_matmul`."""
    experts, flat = weight.shape[0], x.reshape(-1, x.shape[-1])

    def values_of(expert):
        if shared < 2:
            return _values_of(weight, expert, x.dtype)
        (_, out, inner), halves = weight.shape, gate.halves if gate else 1
        rows = rows_of(expert, jnp.arange(out // halves), (experts, out), gated=halves > 1, shared=shared)
        return weight.reshape(-1, inner)[jnp.concatenate(rows)].astype(x.dtype), None

    def block(expert, choices):
        """Returns the products of some choices of one expert [choices, N], or of none: 0."""
        existing = jnp.minimum(expert, experts - 1)
        rows = flat[jnp.maximum(choices, 0) % flat.shape[0]]
        values, scale = values_of(existing)
        exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        sums = jnp.einsum("tk,nk->tn", rows.astype(values.dtype), values, **exact)
        sums = sums if scale is None else sums * scale
        sums = sums if bias is None else sums + bias[existing].astype(jnp.float32)
        sums = gate.join(*jnp.split(sums, gate.halves, axis=-1)) if gate else sums
        sums = sums if factors is None else sums * factors.ravel()[choices][:, None]
        return jax.lax.optimization_barrier(jnp.where(expert < experts, sums, 0).astype(dtype))

    if deterministic:
        expert = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).ravel()
        out = row_by_row(lambda expert, choice: block(expert[0], choice), expert, jnp.arange(chosen.size))
        return out.reshape(*chosen.shape, -1)
    blocks = blocks_of(chosen.ravel(), experts, REFERENCE_ROWS)
    products = jax.lax.map(lambda listed: block(*listed), blocks)
    at = jnp.where(blocks.choices < 0, chosen.size, blocks.choices)
    out = jnp.zeros((chosen.size, products.shape[-1]), dtype).at[at].set(products, mode="drop")
    return out.reshape(*chosen.shape, -1)


def _values_of(weight, expert, dtype):
    """Returns the weight of an expert, and the scales of the rows of its product; None: there are none."""
    if not isinstance(weight, Quantized):
        return weight[expert].astype(dtype), None
    if weight.has_groups:
        return widened_expert(weight, expert), None
    return weight.values[expert].astype(dtype), weight.scale[expert]


def widened_expert(weight: Quantized, expert: Int[Array, ""] | int) -> Float[Array, "out inner"]:
    """Returns the weight of one of the experts with group scales in float32."""
    if not weight.is_packed:
        return widened(weight.rows(expert))
    values, scale = weight.values[expert], weight.scale[expert]
    if weight.kind == "mxfp4":
        return mxfp4.widened(values, scale)
    return int4.scaled(unpack(values), scale, None if weight.zeros is None else weight.zeros[expert])
