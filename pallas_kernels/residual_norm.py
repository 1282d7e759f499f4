"""Add a layer's output to the residual stream and normalise the sum, in one kernel.

sum = x + delta, normed = sum / sqrt(mean(sum^2) + eps) * weight, for every row of [..., hidden]: delta, the sum of its
parts, and the sum rounded to the model's dtype, the mean in float32, the quotient rounded before it is scaled.
XLA makes two kernels of the norm alone, which for a few rows is all launch time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.split_matmul import add_up

WIDEST = 16384  # columns a program holds in registers


def _normed(total: Array, weight: Array, eps: float, size: int) -> Array:
    wide = total.astype(jnp.float32)
    mean = jnp.sum(wide * wide, axis=-1, keepdims=True) / size
    return (wide * jax.lax.rsqrt(mean + eps)).astype(total.dtype) * weight


def _reference(x, parts, weight, *, eps):
    total = x + add_up(parts, x.dtype)
    return total, _normed(total, weight, eps, x.shape[-1])


def _kernel(x_ref, parts_ref, weight_ref, sum_ref, normed_ref, *, eps, hidden):
    """One program: one row; columns past the last are zero and not written."""
    row, column = pl.program_id(0), jnp.arange(pl.next_power_of_2(hidden))
    inside = column < hidden
    total = pltriton.load(x_ref.at[row, column], mask=inside, other=0)
    parts = [pltriton.load(parts_ref.at[part, row, column], mask=inside, other=0) for part in range(parts_ref.shape[0])]
    total = total + sum(parts[1:], parts[0]).astype(total.dtype)
    weight = pltriton.load(weight_ref.at[column], mask=inside, other=0)
    pltriton.store(sum_ref.at[row, column], total, mask=inside)
    pltriton.store(normed_ref.at[row, column], _normed(total, weight, eps, hidden), mask=inside)


def _pallas(x, parts, weight, *, eps, interpret):
    hidden = x.shape[-1]
    rows = x.reshape(-1, hidden)
    parts = parts.reshape(-1, *rows.shape)
    out = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    columns = 512 if parts.shape[0] == 1 else 128  # of a warp: several parts take several loads a column
    warps = min(max(pl.next_power_of_2(hidden) // columns, 1), 32)
    total, normed = pl.pallas_call(
        functools.partial(_kernel, eps=eps, hidden=hidden),
        grid=(rows.shape[0],),
        out_shape=[out, out],
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="add_rms_norm",
    )(rows, parts, weight)
    return total.reshape(x.shape), normed.reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def add_rms_norm(
    x: Float[Array, "*rows hidden"],
    delta: Float[Array, "parts *rows hidden"],
    weight: Float[Array, " hidden"],
    *,
    eps: float,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*rows hidden"], Float[Array, "*rows hidden"]]:
    """Returns x + delta, and its root-mean-square norm (arXiv:1910.07467) scaled by the weight.

    Args:
        delta: in parts to be added up, as `split_matmul` leaves them.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: "pallas" with rows wider than the kernel holds.
    """
    unsupported = None if x.shape[-1] <= WIDEST else f"rows of at most {WIDEST} columns, got {x.shape[-1]}"
    kernel, reference = functools.partial(_pallas, eps=eps), functools.partial(_reference, eps=eps)
    return choose(implementation, unsupported, kernel, reference, x, delta, weight)
