"""The online softmax of the attention kernel: how it computes weights of scores and adds up weighted values."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.ptx import scaled_exp2
from pallas_kernels.attention.tiling import MMA_ROWS


class Arithmetic(NamedTuple):
    """Static parameters that say how the kernel computes scores and sums."""

    scale: float  # factor of the scores
    softcap: float | None  # limit of the scores; None: no limit
    dtype: jnp.dtype  # dtype of the operands of the matrix products
    precision: Any  # precision of the matrix products
    interpret: bool  # the kernel is interpreted on a CPU, with jax operations instead of PTX instructions

    @property
    def is_exact(self) -> bool:
        """Whether functions are computed to the precision of float32."""
        return self.interpret or self.dtype == jnp.float32


class SoftmaxSums(NamedTuple):
    """The running sums of an online softmax, for each packed row (pair of a query and a query head)."""

    values: list[Array]  # weighted sum of values, float32 [packed, width] for each vector
    top: Array  # largest score, float32 [packed]
    total: Array  # sum of weights, float32 [packed, MMA_ROWS], equal in all columns


def online_softmax_update(
    sums: SoftmaxSums, scores: Array, v: list[Array], factor: float, arithmetic: Arithmetic
) -> SoftmaxSums:
    """Returns the running sums after one more tile of the context is added.

    Args:
        sums: the sums over the earlier tiles.
        scores: float32 [packed, tile].
        v: values of the tile, one array [tile, width] per vector.
        factor: factor of the scores in the softmax weights 2**(factor * score).
        arithmetic: how the sums are computed.
    """
    acc, top, total = sums
    dtype, precision, interpret = v[0].dtype, arithmetic.precision, arithmetic.interpret
    ones = jnp.ones((scores.shape[1], MMA_ROWS), dtype)  # a product with ones takes less time than a sum over columns
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    fade = scaled_exp2(top - base, factor, jnp.zeros_like(base), interpret)[:, None]  # exactly 1 where top is unchanged
    offset = jnp.broadcast_to((base * factor)[:, None], scores.shape)
    weights = scaled_exp2(scores, factor, offset, interpret).astype(dtype)
    total, *acc = (
        before * fade + pltriton.dot(weights, right, precision=precision)
        for before, right in zip([total, *acc], [ones, *v], strict=True)
    )
    return SoftmaxSums(acc, new_top, total)


def sink_weight(sink: Array, top: Array) -> Array:
    """Returns the term that sinks add to a sum of weights 2**(score - top); it may be infinite.

    Args:
        sink: score of each sink.
        top: base-2 score to which the weights refer; -inf if there are no weights.
    """
    return jnp.exp2(sink.astype(jnp.float32) * math.log2(math.e) - top)
