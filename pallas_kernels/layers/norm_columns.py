"""Adds up a projection, and norms the first columns of each row, in one kernel.

A row of a QKV projection holds all queries, all keys and all values. OLMo 2 (arXiv:2501.00656) norms all queries of a
row together, and all keys of a row together. So each range of columns has its own mean square (arXiv:1910.07467). Each
range that has no norm is only added up. Sums are computed in float32 and rounded to the model's dtype before the norm.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials, split_scales, sum_f32
from pallas_kernels.layers.residual_norm import WIDEST, rms_norm, warps_for
from pallas_kernels.layers.row_by_row import row_by_row


def _reference(parts, bias, weights, *, eps, dtype, deterministic):
    total = reduce_partials(parts, jnp.float32)
    total = (total if bias is None else total + bias).astype(dtype)
    ends = list(itertools.accumulate(weight.shape[0] for weight in weights))

    def norm(rows):
        *pieces, rest = jnp.split(rows, ends, axis=-1)
        normed = [rms_norm(piece, weight, eps) for piece, weight in zip(pieces, weights, strict=True)]
        return jnp.concatenate([*normed, rest], axis=-1)

    if not deterministic:
        return norm(total)
    return row_by_row(norm, total.reshape(-1, total.shape[-1])).reshape(total.shape)


def _kernel(
    # inputs
    parts_ref,  # [parts, T, width]
    scale_refs,  # float32 scales of rows [T] and of columns [width]; empty: no scales
    bias_ref,  # [width]; None: no bias
    weight_refs,  # weight of each norm [columns]
    # outputs
    out_ref,  # [T, width], the model's dtype
    # static parameters
    *,
    eps,
):
    """Adds up one range of columns of one row, and norms it if it has a norm, in one Pallas program."""
    row, count = pl.program_id(0), parts_ref.shape[0]
    ends = [*itertools.accumulate(ref.shape[0] for ref in weight_refs), out_ref.shape[1]]

    def add_and_norm(start, size, weight_ref):
        offset = jnp.arange(pl.next_power_of_2(size))
        inside, column = offset < size, start + offset
        load = functools.partial(pltriton.load, mask=inside, other=0)
        total = sum_f32([load(parts_ref.at[part, row, column]) for part in range(count)])
        if scale_refs:
            total = total * scale_refs[0][row] * load(scale_refs[1].at[column])
        if bias_ref is not None:
            total = total + load(bias_ref.at[column]).astype(jnp.float32)
        total = total.astype(out_ref.dtype)
        if weight_ref is not None:
            total = rms_norm(total, load(weight_ref.at[offset]), eps, size)
        pltriton.store(out_ref.at[row, column], total, mask=inside)

    for index, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        weight_ref = weight_refs[index] if index < len(weight_refs) else None
        pl.when(pl.program_id(1) == index)(functools.partial(add_and_norm, start, end - start, weight_ref))


def _pallas(parts, bias, weights, *, eps, dtype, deterministic, interpret):
    del deterministic  # the kernel computes each row in the same way for any number of rows
    parts, scales = split_scales(parts)
    (count, *shape, width), scales = parts.shape, tuple(scale.ravel() for scale in scales)
    parts = parts.reshape(count, -1, width)
    sizes = [weight.shape[0] for weight in weights]
    warps = warps_for(max(*sizes, width - sum(sizes)), parts)
    out = pl.pallas_call(
        functools.partial(_kernel, eps=eps),
        grid=(parts.shape[1], len(weights) + 1),
        out_shape=jax.ShapeDtypeStruct(parts.shape[1:], dtype),
        compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="norm_columns",
    )(parts, scales, bias, weights)
    return out.reshape(*shape, width)


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "deterministic", "implementation"))
def norm_columns(
    parts: PartialSums,
    *weights: Float[Array, "_"],
    eps: float,
    dtype: jnp.dtype,
    bias: Float[Array, " width"] | None = None,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "*rows width"]:
    """Returns the sum of partial sums [*rows, width], whose first ranges of columns are normed.

    Args:
        parts: partial sums [parts, *rows, width], as `split_matmul` returns them.
        weights: weight of each norm. The first norm is that of the first columns, as many as its weight has, the second
            that of the next columns, and so on. At least one column remains without a norm.
        eps: number that is added to the mean squares.
        dtype: dtype of the model.
        bias: bias that is added before the norms; None: none.
        deterministic: make the bits of a row's result independent of the number of rows. This option changes only the
            reference, because the kernel's results never depend on the number of rows.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and a range is wider than the kernel supports.
    """
    sizes = [weight.shape[0] for weight in weights]
    widest = max(*sizes, parts.shape[-1] - sum(sizes))
    unsupported = None if widest <= WIDEST else f"ranges of at most {WIDEST} columns, got {widest}"
    options = {"eps": eps, "dtype": dtype, "deterministic": deterministic}
    kernel, reference = (functools.partial(run, **options) for run in (_pallas, _reference))
    return dispatch(implementation, [Kernel(TRITON, kernel, unsupported)], reference, parts, bias, weights)
