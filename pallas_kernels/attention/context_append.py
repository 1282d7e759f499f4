"""Rotates the keys of several layers, and writes keys and values of all layers to their caches, in one kernel.

A drafter computes the keys and values of all its layers from one vector per token, by one projection. A row of the
projection holds the heads of the first layer, first its keys, then its values, then those of the second layer, and so
on. `rope_append` describes what becomes of a head.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention.kv_pages import LAYERS, Pool, append, cast_to_pool, check_pools
from pallas_kernels.attention.rope_append import (
    KEYS,
    HeadTransform,
    check_heads,
    column_loader,
    load_cos_sin,
    load_norm,
    load_normed,
    load_rotated,
    split_qkv,
    unsupported,
    written_rows,
)
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch


def split_layers(
    projected: Float[Array, "B T columns"], transforms: list[HeadTransform], kv_heads: int
) -> list[tuple[Float[Array, "B T KH D"], Float[Array, "B T KH D"]]]:
    """Splits a projection into the rotated keys and the values of each layer, with jax.numpy.

    Args:
        projected, transforms: as in `append_layers`.
        kv_heads: number of KV heads of a layer.
    """
    pairs = []
    for columns, transform in zip(jnp.split(projected, len(transforms), axis=-1), transforms, strict=True):
        heads = {"heads": 0, "kv_heads": kv_heads, "dtype": projected.dtype}
        _, k, v = split_qkv(columns[None], transform.cos_sin, transform, **heads)
        pairs.append((k, v))
    return pairs


def _reference(k_pools, v_pools, projected, transforms, page_table, first_row, valid):
    rows = (page_table, first_row, valid)
    layers = split_layers(projected, transforms, k_pools[0].shape[1])
    pools = zip(k_pools, v_pools, layers, strict=True)
    written = [append(k_pool, v_pool, k, v, *rows, implementation="reference") for k_pool, v_pool, (k, v) in pools]
    return [k for k, _ in written], [v for _, v in written]


def _kernel(
    # inputs
    projected_ref,  # [1, B, T, layers * 2 * KH * D]
    transforms,  # a `HeadTransform` of references for each layer
    pool_row_ref,  # [B, T] int32: page * page size + row in the page; -1: not written
    *pool_refs,  # [pages, KH, page, D]: K and V of every layer, then the outputs that alias them
):
    """Writes one KV head of one row in one layer, in one Pallas program."""
    token, kv_head, index = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layers, pools = len(transforms), pool_refs[len(pool_refs) // 2 :]
    sequence, own_layer = index // layers, index % layers
    _, kv_heads, page, dim = pools[0].shape
    half, dtype, pool_row = dim // 2, projected_ref.dtype, pool_row_ref[sequence, token]
    channel = jnp.arange(pl.next_power_of_2(half))
    is_channel, channels = channel < half, [channel, half + channel]
    mask = {"mask": is_channel, "other": 0}

    def write(layer):
        transform, first = transforms[layer], 2 * layer * kv_heads * dim
        load = column_loader(projected_ref, (), transform.bias, sequence, token, dtype, first=first)
        cos_sin = load_cos_sin(transform.cos_sin, (sequence, token), channel, mask, KEYS)
        k_norm, v_norm = (load_norm(ref, transform.eps, channels, mask) for ref in (transform.k_norm, transform.v_norm))
        key = load_rotated(load, kv_head * dim, channels, k_norm, cos_sin, mask)
        value = load_normed(load, (kv_heads + kv_head) * dim, channels, v_norm, mask)
        for part, *new in zip(channels, key, value, strict=True):
            at = (pool_row // page, kv_head, pool_row % page, part)
            for ref, values in zip((pools[layer], pools[layers + layer]), new, strict=True):
                values = cast_to_pool(values.astype(dtype), ref.dtype)
                pltriton.store(ref.at[at], values, mask=(pool_row >= 0) & is_channel)

    for layer in range(layers):
        pl.when(own_layer == layer)(functools.partial(write, layer))


def _pallas(k_pools, v_pools, projected, transforms, page_table, first_row, valid, *, interpret):
    pools, (batch, tokens) = (*k_pools, *v_pools), valid.shape
    inputs = (projected[None], transforms, written_rows(page_table, first_row, valid, pools[0].shape[2]))
    first_pool = len(jax.tree.leaves(inputs))
    written = pl.pallas_call(
        functools.partial(_kernel),  # a new function object for every call (jax issue 40847)
        grid=(tokens, pools[0].shape[1], batch * len(transforms)),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={first_pool + index: index for index in range(len(pools))},
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="append_layers",
    )(*inputs, *pools)
    return list(written[: len(k_pools)]), list(written[len(k_pools) :])


@functools.partial(jax.jit, static_argnames=("implementation",))
def append_layers(
    k_pools: list[Pool],
    v_pools: list[Pool],
    projected: Float[Array, "B T columns"],
    transforms: list[HeadTransform],
    page_table: Int32[Array, "B P"],
    first_row: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    *,
    implementation: Implementation = "auto",
) -> tuple[list[Pool], list[Pool]]:
    """Writes keys and values of every layer to cache row first_row[b] + t of sequence b, where valid[b, t].

    Args:
        k_pools, v_pools: pages of keys and values of each layer [pages, KH, page, D], all of one shape and dtype. One
            kernel writes up to eight layers.
        projected: keys and values of each layer [B, T, layers * 2 * KH * D], in the model's dtype.
        transforms: bias of keys and values [2 * KH * D], norms and rotation of the heads of each layer.
        page_table: page numbers [B, P].
        first_row: first row to write in each sequence [B].
        valid: whether a row is written [B, T].
        implementation: as in `paged_attention`.

    Returns:
        The new pools, which take the memory of the old pools if the old pools are donated.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the head_dim or the dtype.
    """
    _, kv_heads, _, dim = k_pools[0].shape
    width, written = 2 * kv_heads * dim, (list[Pool](), list[Pool]())
    if projected.shape[-1] != width * len(transforms):
        raise ValueError(f"projected must be {width * len(transforms)} wide, got {projected.shape[-1]}")
    for k_pool, v_pool, transform in zip(k_pools, v_pools, transforms, strict=True):
        check_pools(k_pool, v_pool)
        if (k_pool.shape, k_pool.dtype) != (k_pools[0].shape, k_pools[0].dtype):
            raise ValueError(f"the pools of all layers must be alike, got {k_pool.shape} beside {k_pools[0].shape}")
        check_heads(projected[None, ..., :width], k_pool, 0, transform)
    kernels = [Kernel(TRITON, _pallas, unsupported(k_pools[0]))]
    for first in range(0, len(transforms), LAYERS):
        some = slice(first, first + LAYERS)
        columns = projected[..., first * width : (first + LAYERS) * width]
        arguments = (k_pools[some], v_pools[some], columns, transforms[some], page_table, first_row, valid)
        new_pools = dispatch(implementation, kernels, _reference, *arguments)
        for all_layers, pools in zip(written, new_pools, strict=True):
            all_layers.extend(pools)
    return written
