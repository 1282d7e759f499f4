"""The first half of a SiLU-gated feed-forward layer in one kernel on Hopper GPUs.

    out[t, i] = silu(x[t] . w[i]) * (x[t] . w[I + i])        w = [gate, up], [2 I, K]    (arXiv:2002.05202)

The kernel is `hopper_matmul`'s. An 8B model's 14336 columns are 128 tiles of 112, 256 of 56 or 112 of 128,
for 132 multiprocessors.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation
from pallas_kernels.layers import hopper_kernel
from pallas_kernels.layers.hopper_tiling import Tiles, choose_tiles
from pallas_kernels.layers.quantize_rows import gated
from pallas_kernels.layers.quantized import Inputs, Quantized, Weight, factors, matmul

LEAST_ROWS = 32  # of two bytes a number: for fewer XLA's product is as fast; of float8 XLA needs six launches more


def tiles_for(x: Inputs | jax.ShapeDtypeStruct, weight: Weight) -> Tiles | None:
    """How the kernel takes a product; None where XLA does, which rounds gate and up before they are multiplied."""
    multiprocessors, dtype = hopper_kernel.multiprocessors(), jnp.dtype(x.dtype)  # that of the result
    (both, inner), rows = weight.shape, math.prod(x.shape[:-1])
    if multiprocessors is None or dtype.itemsize != 2:
        return None
    if isinstance(weight, Quantized):
        if not weight.dynamic:
            return None
        dtype = weight.values.dtype
    elif weight.dtype != dtype or rows < LEAST_ROWS:
        return None
    return choose_tiles(rows, inner, both // 2, dtype, multiprocessors, halves=2)


def kernel_padding(sequences: int, rows: int, weight: Weight, dtype: jnp.dtype) -> int:
    """How many rows more a sequence needs for a product of at least 32 that the kernel takes; 0 if not fewer than 8."""
    more = -rows % (8 // math.gcd(sequences, 8))
    if sequences * rows < LEAST_ROWS or sequences * more >= 8:
        return 0
    x = jax.ShapeDtypeStruct((sequences, rows + more, weight.shape[1]), dtype)
    return more if tiles_for(x, weight) else 0


@functools.partial(jax.jit, static_argnames="implementation")
def gated_matmul(x: Inputs, weight: Weight, *, implementation: Implementation = "auto") -> Float[Array, "*rows out"]:
    """silu(x @ gate.T) * (x @ up.T), in x's dtype; sums in float32.

    Args:
        weight: gate and up, one above the other, [2 out, inner].
        implementation: as in `paged_attention`; the kernel takes up to 8 rows or a multiple of 8 up to 320 with weights
            of "fp8_dynamic", from 32 on with those of two bytes a number, on a Hopper GPU with jax 0.11 or later
            (`tiles_for`). Else it is XLA's.
    """

    def reference(x, weight):
        return gated(matmul(x, weight, implementation=implementation))

    tiles = tiles_for(x, weight)
    if tiles is None:
        return reference(x, weight)

    def kernel(x, weight, interpret):
        f = factors(x, weight, implementation=implementation)
        scales = () if f.row_scale is None else (f.row_scale.reshape(-1), f.scale)
        flat = f.x.reshape(-1, f.x.shape[-1])
        (product,) = hopper_kernel.multiply(flat, f.weight, *scales, tiles=tiles, dtype=x.dtype, interpret=interpret)
        return product.reshape(*x.shape[:-1], -1)

    return hopper_kernel.choose_compiled(implementation, kernel, reference, x, weight)
