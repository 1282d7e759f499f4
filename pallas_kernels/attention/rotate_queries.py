"""Norms and rotates the queries of layers that read the keys and values of another layer, and so write none.

The rotary embedding, bias and norm are those of `rope_append`, whose functions both kernels share.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.attention.kv_pages import HEAD_DIMS
from pallas_kernels.attention.rope_append import (
    QUERIES,
    HeadTransform,
    column_loader,
    load_cos_sin,
    load_norm,
    load_rotated,
    split_qkv,
)
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import PartialSums, split_scales
from pallas_kernels.layers.row_by_row import row_by_row


def _reference(queries, transform, *, heads, dtype, deterministic):
    def rotated(queries, cos_sin):
        return split_qkv(queries, cos_sin, transform, heads=heads, kv_heads=0, dtype=dtype)[0]

    if not deterministic:
        return rotated(queries, transform.cos_sin)
    flat = [array.reshape(array.shape[0], -1, array.shape[-1]).swapaxes(0, 1) for array in (queries, transform.cos_sin)]
    rows = row_by_row(lambda *arrays: rotated(*(array.swapaxes(0, 1)[:, :, None] for array in arrays)), *flat)
    return rows.reshape(*queries.shape[1:3], *rows.shape[2:])


def _kernel(
    # inputs
    queries_ref,  # [parts, B, T, H * D]
    transform,  # a `HeadTransform` of references
    scale_refs,  # scales of rows [B, T] and of columns [H * D]; empty: no scales
    # output
    out_ref,  # [B, T, H, D]
):
    """Norms and rotates one head of one row in one Pallas program."""
    token, head, sequence = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    half = out_ref.shape[3] // 2
    channel = jnp.arange(pl.next_power_of_2(half))
    is_channel, channels = channel < half, [channel, half + channel]
    mask = {"mask": is_channel, "other": 0}
    tables = load_cos_sin(transform.cos_sin, (sequence, token), channel, mask, QUERIES)
    load = column_loader(queries_ref, scale_refs, transform.bias, sequence, token, out_ref.dtype)
    norm = load_norm(transform.q_norm, transform.eps, channels, mask)
    halves = load_rotated(load, head * 2 * half, channels, norm, tables, mask)
    for part, values in zip(channels, halves, strict=True):
        pltriton.store(out_ref.at[sequence, token, head, part], values.astype(out_ref.dtype), mask=is_channel)


def _pallas(queries, transform, *, heads, dtype, deterministic, interpret):
    del deterministic  # a program computes one head of one row, in the same way for any number of rows
    queries, scales = split_scales(queries)
    _, batch, tokens, width = queries.shape
    return pl.pallas_call(
        _kernel,
        grid=(tokens, heads, batch),
        out_shape=jax.ShapeDtypeStruct((batch, tokens, heads, width // heads), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rotate_queries",
    )(queries, transform, scales)


@functools.partial(jax.jit, static_argnames=("heads", "dtype", "deterministic", "implementation"))
def rotate_queries(
    queries: PartialSums,
    transform: HeadTransform,
    *,
    heads: int,
    dtype: jnp.dtype,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "B T H D"]:
    """Returns the queries of a projection that has no keys and values, with bias, norm and rotation.

    Args:
        queries: partial sums [parts, B, T, heads * D], as `split_matmul` returns them.
        transform: bias, norm of query heads and rotation.
        heads: number of query heads.
        dtype: the model's dtype, in which the queries are returned.
        deterministic: make the bits of a row's result independent of the number of rows. This option changes only the
            reference, because the kernel's results never depend on the number of rows.
        implementation: as in `paged_attention`.

    Raises:
        ValueError: the width of the projection is not that of the heads and of the rotation.
        NotImplementedError: implementation is "pallas", and the kernel does not support the number of channels.
    """
    width, (tables, *rows, half) = queries.shape[-1], transform.cos_sin.shape
    if width != heads * 2 * half or tables not in (2, 4) or tuple(rows) != tuple(queries.shape[1:3]):
        raise ValueError(
            f"queries must be [parts, B, T, {heads} * {2 * half}] for cos_sin {transform.cos_sin.shape}, got "
            f"{queries.shape}"
        )
    unsupported = None if 2 * half in HEAD_DIMS else f"head_dim must be a multiple of 16 up to 512, got {2 * half}"
    options = {"heads": heads, "dtype": dtype, "deterministic": deterministic}
    kernel, reference = (functools.partial(run, **options) for run in (_pallas, _reference))
    return dispatch(implementation, [Kernel(TRITON, kernel, unsupported)], reference, queries, transform)
