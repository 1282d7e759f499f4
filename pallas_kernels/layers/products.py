"""Matrix products with weights of any kind: which kernel multiplies, and what is done with the scales."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.grouped_matmul import grouped_matmul, is_grouped
from pallas_kernels.layers.dense.plain_product import plain_product
from pallas_kernels.layers.low_rank import add_low_rank
from pallas_kernels.layers.partial_sums import Factors, PartialSums, Scaled, join, reduce_partials
from pallas_kernels.layers.quantize_rows import Activation, gated, quantize_activation
from pallas_kernels.layers.shard import Shard
from pallas_kernels.layers.weights import Inputs, Quantized, QuantizedActivation, Weight, has_group_scales

FEW_ROWS = 64  # with more rows, rounding a float8 product twice takes less time than writing it in float32


def factors(x: Inputs, weight: Weight, *, gate: Activation | None = None, implementation: str = "auto") -> Factors:
    """Returns the operands and the scales of x @ weight.T.

    For a weight of "fp8_dynamic", x is quantised first, unless x is quantised already.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner].
        gate: activation function; x has gate and up side by side [*rows, 2 * inner], and activation(gate) * up is
            multiplied by the weight. None: x is multiplied.
        implementation: implementation that quantises x, as in `paged_attention`.

    Raises:
        TypeError: x is quantised, and the weight is not of "fp8_dynamic".
    """
    assert not has_group_scales(weight), "sums over several groups have no common scale"
    assert not isinstance(weight, Shard), "products of several devices have no common scale"
    if isinstance(weight, Quantized) and weight.is_dynamic:
        if not isinstance(x, QuantizedActivation):
            x = quantize_activation(x, gate=gate, implementation=implementation)
        return Factors(x.values, weight.values, x.scale, weight.scale)
    if isinstance(x, QuantizedActivation):
        raise TypeError("x: quantised activations need a weight of fp8_dynamic; pass them unquantised")
    x = gated(x, gate) if gate else x
    if isinstance(weight, Quantized):
        return Factors(x, weight.values, None, weight.scale)
    return Factors(x, weight, None, None)


def matmul_unscaled(
    x: Inputs,
    weight: Weight | Adapted,
    dtype: jnp.dtype | None = None,
    *,
    gate: Activation | None = None,
    implementation: str = "auto",
) -> PartialSums:
    """Returns the product of `matmul` as one partial sum [1, *rows, out]; the arguments are those of `matmul`.

    Only for a weight of "fp8_dynamic" are the scales not yet applied: the result is then a `Scaled`, and the kernel
    that reads it applies them. The product of several devices is that of `join`.
    """
    if isinstance(weight, Shard):
        own_dtype = dtype if weight.by == "rows" else jnp.float32
        own = matmul_unscaled(x, weight.weight, own_dtype, gate=gate, implementation=implementation)
        return join(own, weight, dtype or x.dtype)
    if isinstance(weight, Adapted):
        assert not isinstance(x, QuantizedActivation)
        sums = matmul_unscaled(x, weight.weight, jnp.float32, gate=gate, implementation=implementation)
        x = gated(x, gate) if gate else x
        return add_low_rank(sums, x, weight, dtype or x.dtype, implementation=implementation)[None]
    if isinstance(weight, Quantized) and is_grouped(math.prod(x.shape[:-1]), weight, x.dtype):
        return matmul_grouped(x, weight, dtype, gate=gate, implementation=implementation)
    f = factors(x, weight, gate=gate, implementation=implementation)
    dtype = dtype or x.dtype
    is_rounded_twice = f.row_scale is not None and math.prod(x.shape[:-1]) > FEW_ROWS and dtype != jnp.float16
    sums_dtype = dtype if f.scale is None or is_rounded_twice else jnp.float32
    right = f.weight if f.scale is None else f.weight.astype(f.x.dtype)
    sums = plain_product(f.x, right, sums_dtype)
    if f.row_scale is not None and f.scale is not None:
        return Scaled(sums[None], f.row_scale, f.scale)
    return f.scaled(sums).astype(dtype)[None]


def matmul_grouped(
    x: Inputs,
    weight: Quantized,
    dtype: jnp.dtype | None = None,
    *,
    parts: int = 1,
    gate: Activation | None = None,
    implementation: str = "auto",
) -> Float[Array, "parts *rows out"]:
    """Returns the product with a weight that has group scales, as partial sums.

    Args:
        x, gate, implementation: as in `matmul`.
        dtype: dtype of the partial sums; None: float32 for several ones, else x's dtype.
        weight: [out, inner], with group scales.
        parts: number of partial sums.
    """
    if isinstance(x, QuantizedActivation) or weight.is_dynamic:
        raise TypeError("weight: group scales need activations that are not quantised; use kind fp8")
    x = gated(x, gate) if gate else x
    dtype = dtype or (jnp.dtype("float32") if parts > 1 else x.dtype)
    return grouped_matmul(x, weight, dtype, parts=parts, implementation=implementation)


def matmul(
    x: Inputs,
    weight: Weight | Adapted,
    dtype: jnp.dtype | None = None,
    *,
    gate: Activation | None = None,
    implementation: str = "auto",
) -> Float[Array, "*rows out"]:
    """Returns x @ weight.T [*rows, out], summed in float32 and rounded once.

    float32 inputs are multiplied in float32 on every device.

    With "fp8_dynamic" and more than 64 rows, the product is also rounded to the result's dtype before it is scaled. It
    is not rounded to float16, whose largest value is below 448 * 448.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner].
        dtype: dtype of the result; None: x's dtype.
        gate, implementation: as in `factors`.
    """
    dtype = dtype or x.dtype
    return reduce_partials(matmul_unscaled(x, weight, dtype, gate=gate, implementation=implementation), dtype)
