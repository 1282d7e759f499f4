"""The first half of a gated feed-forward layer, in one kernel on Hopper GPUs.

    out[t, i] = activation(x[t] . w[i]) * (x[t] . w[I + i])        w = [gate, up], [2 I, K]    (arXiv:2002.05202)

`hopper_kernel` has the kernel of many rows, of float8, and of widths that `gated_kernel`, which has that of a few rows,
cannot divide evenly. It divides the 14336 columns of an 8B model into 128 tiles of 112 columns, 256 tiles of 56
columns, or 112 tiles of 128 columns, for 132 multiprocessors. `int4_kernel` has the kernel of packed weights.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import HOPPER, HOPPER_TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers import hopper
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense import gated_kernel, hopper_kernel
from pallas_kernels.layers.dense.gated_kernel import has_few_rows
from pallas_kernels.layers.dense.grouped_matmul import packed_tiles
from pallas_kernels.layers.dense.hopper_tiling import HopperTiles, choose_tiles
from pallas_kernels.layers.low_rank import add_low_rank
from pallas_kernels.layers.packed import int4_kernel
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles
from pallas_kernels.layers.products import factors, matmul, matmul_unscaled
from pallas_kernels.layers.quantize_rows import SIGMOIDS, Activation, gated
from pallas_kernels.layers.weights import Inputs, Quantized, QuantizedActivation, Weight

MOST_WIDE = 64  # more rows with adapters are rounded before adapters are added, because they are written faster
LEAST_ROWS = 32  # with fewer rows of two bytes XLA is as fast as `hopper_kernel`; with float8 it has six more launches


def tiles_for(
    x: Inputs | jax.ShapeDtypeStruct, weight: Weight | Adapted, activation: Activation = "silu"
) -> HopperTiles | None:
    """Returns the tile sizes of the Hopper kernel for x and a weight [2 out, inner]; None: it does not support them.

    XLA rounds gate and up before it multiplies activation(gate) by up. It computes activation functions that are not in
    `SIGMOIDS`: Mosaic has no erf for "gelu", and a series of it needs more registers than the kernel has.
    """
    multiprocessors, dtype = hopper.multiprocessors(), jnp.dtype(x.dtype)
    (both, inner), rows = weight.shape, math.prod(x.shape[:-1])
    if isinstance(weight, Adapted) or multiprocessors is None or dtype.itemsize != 2 or activation not in SIGMOIDS:
        return None
    if isinstance(weight, Quantized):
        if not weight.is_dynamic:
            return None
        dtype = weight.values.dtype
    elif weight.dtype != dtype or rows < LEAST_ROWS:
        return None
    return choose_tiles(rows, inner, both // 2, dtype, multiprocessors, halves=2)


def kernel_padding(
    sequences: int, rows: int, weight: Weight | Adapted, dtype: jnp.dtype, activation: Activation = "silu"
) -> int:
    """Returns how many padding rows each sequence needs so that the Hopper kernel can run.

    Args:
        sequences: number of sequences.
        rows: number of rows per sequence.
        weight: gate above up [2 out, inner].
        dtype: dtype of the activations.
        activation: the gate's activation function.

    Returns:
        The number of padding rows per sequence. It is 0 if the kernel would not run even with padding, if the kernel of
        a few rows runs, or if all sequences together would need 8 or more padding rows.
    """
    more = -rows % (8 // math.gcd(sequences, 8))
    if sequences * rows < LEAST_ROWS or sequences * more >= 8:
        return 0
    x = jax.ShapeDtypeStruct((sequences, rows + more, weight.shape[1]), dtype)
    return more if tiles_for(x, weight, activation) and not has_few_rows(x, weight, activation) else 0


def _tiles_of_packed(x: Inputs, weight: Weight | Adapted, activation: Activation) -> Int4Tiles | None:
    """Returns the tile sizes of `int4_kernel` for the arguments of `gated_matmul`; None: it does not support them."""
    if not isinstance(weight, Quantized) or activation not in SIGMOIDS:
        return None
    return packed_tiles(math.prod(x.shape[:-1]), weight, x.dtype, gated=True)


def _multiply_packed(x, weight, *, tiles, activation, interpret):
    arrays = x.reshape(-1, x.shape[-1]), *weight.in_groups.arrays.values()
    options = {"tiles": tiles, "dtype": x.dtype, "kind": weight.kind, "activation": activation}
    (out,) = int4_kernel.multiply(*arrays, **options, interpret=interpret)
    return out.reshape(*x.shape[:-1], -1)


def _multiply_few(x, weight, *, interpret):
    out = gated_kernel.multiply(x.reshape(-1, x.shape[-1]), weight, interpret=interpret)
    return out.reshape(*x.shape[:-1], -1)


def _multiply_many(x, weight, *, tiles, activation, implementation, interpret):
    f = factors(x, weight, implementation=implementation)
    scales = () if f.row_scale is None else (f.row_scale.reshape(-1), f.scale)
    flat = f.x.reshape(-1, f.x.shape[-1])
    options = {"tiles": tiles, "dtype": x.dtype, "activation": activation, "interpret": interpret}
    (out,) = hopper_kernel.multiply(flat, f.weight, *scales, **options)
    return out.reshape(*x.shape[:-1], -1)


def _with_adapters(x: Array, weight: Adapted, activation: Activation, implementation: Implementation) -> Array:
    """Returns what `gated_matmul` does with adapters; many rows of the weight's product are written in x's dtype."""
    dtype = jnp.dtype("float32") if math.prod(x.shape[:-1]) <= MOST_WIDE else x.dtype
    sums = matmul_unscaled(x, weight.weight, dtype, implementation=implementation)
    return add_low_rank(sums, x, weight, x.dtype, gate=activation, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("activation", "implementation"))
def gated_matmul(
    x: Inputs, weight: Weight | Adapted, *, activation: Activation = "silu", implementation: Implementation = "auto"
) -> Float[Array, "*rows out"]:
    """Returns activation(x @ gate.T) * (x @ up.T) in x's dtype; sums are computed in float32.

    Args:
        x: activations [*rows, inner].
        weight: gate above up [2 out, inner].
        activation: the gate's activation function.
        implementation: as in `paged_attention`. The kernel runs on a Hopper GPU with jax 0.11 or later (`tiles_for`),
            for up to 8 rows or a multiple of 8 up to 320, and activations in `SIGMOIDS`. The weight must be of kind
            "fp8_dynamic", or have two bytes per value while x has at least 32 rows. The kernel of a few rows multiplies
            8 to 64 rows by a wide weight of two bytes per value (`has_few_rows`). A weight of kind "int4" is multiplied
            by its own kernel (`packed_tiles`). Otherwise XLA computes the product. With adapters the product is that of
            `matmul_unscaled`, and the kernel that adds the adapters computes the gate.
    """

    def reference(x, weight):
        return gated(matmul(x, weight, implementation=implementation), activation)

    if isinstance(weight, Adapted):
        assert not isinstance(x, QuantizedActivation)
        return _with_adapters(x, weight, activation, implementation)
    packed, tiles = _tiles_of_packed(x, weight, activation), tiles_for(x, weight, activation)
    of_packed = functools.partial(_multiply_packed, tiles=packed, activation=activation)
    of_many = functools.partial(_multiply_many, tiles=tiles, activation=activation, implementation=implementation)
    kernels = [
        Kernel(HOPPER, of_packed, packed is None),
        Kernel(HOPPER_TRITON, _multiply_few, not has_few_rows(x, weight, activation)),
        Kernel(HOPPER, of_many, tiles is None),
    ]
    return dispatch(implementation, kernels, reference, x, weight)
