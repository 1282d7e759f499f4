"""A matrix product of a few rows with a large weight, returned as partial sums that the next kernel adds up.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal parts of k;   the sum over s is x @ w.T

With few rows, reading the weight takes all the time. Most weights have too few output tiles to read them fast with one
Pallas program per tile. So the sum over k is divided into parts, and different programs compute different parts. The
kernel that reads the result (`residual_norm`, `rope_append`) adds up the partial sums, which saves a launch.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import HOPPER, TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers import hopper
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense import hopper_kernel, split_kernel
from pallas_kernels.layers.dense.grouped_matmul import is_grouped, packed_tiles
from pallas_kernels.layers.dense.hopper_tiling import HopperTiles, choose_tiles
from pallas_kernels.layers.dense.low_rank_kernels import both_products, sizes_of_both
from pallas_kernels.layers.dense.low_rank_sum import sum_products
from pallas_kernels.layers.dense.split_kernel import FEW_ROWS, LEAST_OUT, MOST_ROWS, WIDEST_OUT, kernel_sizes, parts_of
from pallas_kernels.layers.low_rank import add_low_rank, has_kernel
from pallas_kernels.layers.partial_sums import PartialSums, Scaled, join
from pallas_kernels.layers.products import factors, matmul_grouped, matmul_unscaled
from pallas_kernels.layers.quantize_rows import FP8, Activation, gated
from pallas_kernels.layers.shard import Shard
from pallas_kernels.layers.weights import Inputs, Quantized, QuantizedActivation, Weight, has_dynamic_activations


def _hopper(f, after, *, tiles, interpret):
    return hopper_kernel.multiply(*f, tiles=tiles, dtype=jnp.float32, interpret=interpret)


def hopper_tiles(rows: int, weight: Weight) -> HopperTiles | None:
    """Returns the tile sizes of the Hopper kernel for a product of `rows` rows; None if the Hopper kernel is not used.

    The Hopper kernel is used for weights of "fp8_dynamic" with 17 to 64 rows, because it is faster there.
    """
    multiprocessors = hopper.multiprocessors()
    if multiprocessors is None or not has_dynamic_activations(weight) or not FEW_ROWS < rows <= MOST_ROWS:
        return None
    out, inner = weight.shape
    return choose_tiles(rows, inner, out, FP8, multiprocessors, parts=2)


def _with_adapters(
    x: Array, weight: Adapted, after: Any, dtype: jnp.dtype | None, implementation: Implementation
) -> Float[Array, "*rows out"]:
    """Returns the product with a weight that has adapters; for few rows one launch may compute A x too."""
    wide, flat = jnp.dtype("float32"), (math.prod(x.shape[:-1]), x.shape[-1])

    def reference(x, weight, after):
        sums = split_matmul(x, weight.weight, after=after, dtype=dtype, implementation=implementation)
        return add_low_rank(sums, x, weight, wide, implementation=implementation)

    def kernel(x, weight, after, interpret):
        assert sizes is not None
        awaited = None if after is None else jax.tree.leaves(after)[0]
        both = both_products(x.reshape(flat), weight, awaited, sizes=sizes, interpret=interpret)
        return sum_products(*both, weight, wide, gate=None, interpret=interpret)

    sizes = sizes_of_both(weight) if has_kernel(x, weight) else None
    return dispatch(implementation, [Kernel(TRITON, kernel, sizes is None)], reference, x, weight, after)


@functools.partial(jax.jit, static_argnames=("gate", "dtype", "first", "implementation"))
def split_matmul(
    x: Inputs,
    weight: Weight | Adapted,
    *,
    gate: Activation | None = None,
    after: Float[Array, "..."] | None = None,
    dtype: jnp.dtype | None = None,
    first: int = 0,
    implementation: Implementation = "auto",
) -> PartialSums:
    """Returns x @ weight.T as partial sums [parts, *rows, out], which the caller adds up in float32.

    A single partial sum has x's dtype, or float32 if it is the kernel's and x is float16, whose largest value it may
    exceed. Several partial sums are float32. There are exceptions:
    - With more than 64 rows of bfloat16, several partial sums are bfloat16, because they are written faster. Their
      total rounding error is about that of one rounding of the sum, unless the partial sums cancel each other.
    - The product with adapters is a single partial sum of float32.
    - The product of several devices is that of `join`. If devices hold columns, several partial sums of bfloat16 rows
      are bfloat16, so that devices exchange half as many bytes.
    - With "fp8_dynamic", the result is a `Scaled` if there is a single partial sum (in float32 up to 64 rows), or if
      there are more than 64 rows.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner].
        gate: activation function; x has gate and up side by side [*rows, 2 * inner], and activation(gate) * up is
            multiplied by the weight. None: x is multiplied.
        after: an array that the kernel waits for but does not read, to order launches that could run side by side. XLA
            and the Hopper kernel ignore it.
        dtype: dtype of several partial sums of at most 64 rows; None: float32. The Hopper kernel ignores it.
        first: first of the weight's rows that are multiplied; where XLA multiplies, it may copy them. Quantised weights
            have all.
        implementation: as in `paged_attention`. XLA computes a product of more than 64 rows, or of sizes that the
            kernel does not support (`kernel_sizes`), unless the weight has group scales (`grouped_matmul`). The Hopper
            kernel computes some products of "fp8_dynamic" on a Hopper GPU (`hopper_tiles`). There a product of "int4"
            has as many partial sums as `packed_tiles` chooses.
    """
    if isinstance(weight, Shard):
        own_dtype = x.dtype if weight.by == "columns" and x.dtype == jnp.bfloat16 else dtype
        own = split_matmul(x, weight.weight, gate=gate, after=after, dtype=own_dtype, implementation=implementation)
        return join(own, weight, x.dtype)
    if isinstance(weight, Adapted):
        assert not first and not isinstance(x, QuantizedActivation)
        x = gated(x, gate) if gate else x
        return _with_adapters(x, weight, after, dtype, implementation)[None]
    assert not first or not isinstance(weight, Quantized)
    (out, inner), shape = (weight.shape[0] - first, weight.shape[1]), x.shape[:-1]
    rows, width = math.prod(shape), 1 if isinstance(weight, Quantized) else weight.dtype.itemsize
    sizes = kernel_sizes(rows, out, inner, x.dtype, width, copied=first > 0)
    quantize_output = has_dynamic_activations(weight)
    parts = sizes.parts if sizes else parts_of(rows, out, inner, x.dtype, width, quantize_output=quantize_output)
    many = x.dtype if rows > MOST_ROWS and x.dtype == jnp.bfloat16 else None
    if isinstance(weight, Quantized) and is_grouped(rows, weight, x.dtype):
        if LEAST_OUT <= out <= WIDEST_OUT:
            packed = packed_tiles(rows, weight, x.dtype)
            parts = packed.parts if packed else parts
        return matmul_grouped(x, weight, many, parts=parts, gate=gate, implementation=implementation)
    if first and sizes is None and not isinstance(weight, Quantized):
        weight, first = weight[first:], 0  # XLA may copy these
    if parts == 1 and sizes is None:
        return matmul_unscaled(x, weight, gate=gate, implementation=implementation)
    f = factors(x, weight, gate=gate, implementation=implementation)
    f = f._replace(x=f.x.reshape(-1, inner))
    if rows > MOST_ROWS:
        unscaled = f._replace(row_scale=None, scale=None)
        sums = split_kernel.reference(unscaled, None, parts=parts, dtype=many or jnp.float32)
        sums = sums.reshape(parts, *shape, out)
        if f.row_scale is None or f.scale is None:
            return sums
        return Scaled(sums, f.row_scale, f.scale)
    f = f if f.row_scale is None else f._replace(row_scale=f.row_scale.reshape(-1))
    awaited = None if after is None else jax.tree.leaves(after)[0]
    tiles = hopper_tiles(rows, weight)
    parts = tiles.parts if tiles else parts
    sums_dtype = x.dtype if parts == 1 and x.dtype == jnp.bfloat16 else dtype or jnp.float32
    options: dict[str, Any] = {"dtype": sums_dtype, "first": first}
    reference = functools.partial(split_kernel.reference, parts=parts, **options)
    if tiles:
        kernels = [Kernel(HOPPER, functools.partial(_hopper, tiles=tiles))]
    else:
        assert sizes is not None
        kernels = [Kernel(TRITON, functools.partial(split_kernel.multiply, sizes=sizes, **options))]
    sums = dispatch(implementation, kernels, reference, f, awaited)
    return sums.reshape(parts, *shape, out)
