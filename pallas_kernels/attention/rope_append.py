"""Take a fused projection apart: rotate queries and keys, write keys and values to their pages, in one kernel.

A row of the projection holds heads of width D: the queries, then the keys, then the values. Rotary embedding
(arXiv:2104.09864) in the halves layout: with angle a_i = position * speeds[i], channel i and i + D/2 of a head become
x_i cos a_i - x_{i+D/2} sin a_i and x_{i+D/2} cos a_i + x_i sin a_i; in float32, rounded to the model's dtype.
Where a row goes in the pools, and what they look like: `kv_pages`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention.kv_pages import HEAD_DIMS, POOL_DTYPES, Pool, append, locate, rounded
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.quantized import PartialSums, reduce_partials, split_scales, sum_f32
from pallas_kernels.layers.row_blocks import in_row_blocks


def turns(positions, speeds):
    """Cosines and sines, [2, B, T, D / 2]: those of all layers are the same, and XLA computes them once."""
    angles = positions[..., None].astype(jnp.float32) * speeds
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)])


def rotate(
    x: Float[Array, "B T H D"], positions: Int32[Array, "B T"], speeds: Float[Array, " half"]
) -> Float[Array, "B T H D"]:
    """Rotates every head of every row by its position; the reference."""
    cos, sin = turns(positions, speeds)[:, :, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _apart(qkv, positions, speeds, *, heads, kv_heads, dtype):
    """Queries and keys, rotated, and values, of one group of rows."""
    heads_apart = reduce_partials(qkv, dtype).reshape(*positions.shape, heads + 2 * kv_heads, -1)
    q, k, v = jnp.split(heads_apart, [heads, heads + kv_heads], axis=2)
    return rotate(q, positions, speeds), rotate(k, positions, speeds), v


def _reference(
    k_pool, v_pool, qkv, positions, speeds, page_table, first_row, valid, *, heads, dtype, deterministic=False
):
    take = functools.partial(_apart, speeds=speeds, heads=heads, kv_heads=k_pool.shape[1], dtype=dtype)
    if deterministic:
        rows = qkv.reshape(qkv.shape[0], -1, qkv.shape[-1]).swapaxes(0, 1)
        alone = lambda row, at: take(row.swapaxes(0, 1)[:, :, None], at[:, None])  # noqa: E731
        found = in_row_blocks(alone, rows, positions.ravel())
        q, k, v = (array.reshape(*positions.shape, *array.shape[2:]) for array in found)
    else:
        q, k, v = take(qkv, positions)
    return q, *append(k_pool, v_pool, k, v, page_table, first_row, valid, implementation="reference")


def columns_of(qkv_ref, scale_refs, sequence, token, dtype):
    """In a kernel: loads columns of a projection's rows, their parts added up, scaled and rounded to the model's dtype.

    Args:
        scale_refs: of the rows and of the columns, or none.
    """

    def load(columns, hidden):
        total = sum_f32([pltriton.load(qkv_ref.at[part, sequence, token, columns], **hidden) for part in range(count)])
        if scale_refs:
            row_scale = pltriton.load(scale_refs[0].at[sequence, token])
            total = total * row_scale * pltriton.load(scale_refs[1].at[columns], **hidden)
        return total.astype(dtype)

    count = qkv_ref.shape[0]
    return load


def turn_of(turn_ref, sequence, token, channel, hidden):
    """In a kernel: the cosines and sines of rows for channels of a half."""
    return [pltriton.load(turn_ref.at[index, sequence, token, channel], **hidden) for index in range(2)]


def rotated(load, start, channels, turn, hidden):
    """In a kernel: both halves of heads that start at some columns, rotated; float32.

    Args:
        load: as `columns_of` gives it.
        channels: of the first half, and of the second.
        turn: as `turn_of` gives it.
        hidden: how to load them, `mask` and `other`; empty: all of it.
    """
    first, second = (load(start + half, hidden).astype(jnp.float32) for half in channels)
    cos, sin = turn
    return first * cos - second * sin, second * cos + first * sin


def _kernel(qkv_ref, turn_ref, row_ref, *refs, heads):
    """One program: one kv head of one row, with the query heads of its group.

    All that it reads it asks for at once: nothing it loads is the place of something else.
    """
    *scale_refs, _k_in, _v_in, q_ref, k_ref, v_ref = refs
    token, kv_head, sequence = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, kv_heads, page, dim = k_ref.shape
    half, group = dim // 2, heads // kv_heads
    channel, row = jnp.arange(pl.next_power_of_2(half)), row_ref[sequence, token]
    is_channel, channels = channel < half, [channel, half + channel]
    hidden = {"mask": is_channel, "other": 0}
    turn = turn_of(turn_ref, sequence, token, channel, hidden)
    load = columns_of(qkv_ref, scale_refs, sequence, token, q_ref.dtype)

    member = jnp.arange(pl.next_power_of_2(group))[:, None]
    head, inside = kv_head * group + member, (member < group) & is_channel[None, :]
    across = [part[None, :] for part in turn]
    own = {"mask": inside, "other": 0}
    query = rotated(load, head * dim, [part[None, :] for part in channels], across, own)
    key = rotated(load, (heads + kv_head) * dim, channels, turn, hidden)
    value = [load((heads + kv_heads + kv_head) * dim + part, hidden) for part in channels]
    for part, of_query, *new in zip(channels, query, key, value, strict=True):
        pltriton.store(q_ref.at[sequence, token, head, part[None, :]], of_query.astype(q_ref.dtype), mask=inside)
        at = (row // page, kv_head, row % page, part)
        for ref, numbers in zip((k_ref, v_ref), new, strict=True):
            numbers = rounded(numbers.astype(q_ref.dtype), ref.dtype)
            pltriton.store(ref.at[at], numbers, mask=(row >= 0) & is_channel)


def new_rows(qkv, positions, speeds, page_table, first_row, valid, page):
    """What a kernel that writes new rows reads: projection, cosines and sines, each row's place in a pool, scales.

    A place counts the rows of all pages; -1 is none.
    """
    qkv, scales = split_scales(qkv)
    rows = first_row[:, None] + jnp.arange(valid.shape[1], dtype=jnp.int32)
    pages, places, known = locate(page_table, rows, page)
    return qkv, turns(positions, speeds), jnp.where(valid & known, pages * page + places, -1), *scales


def _pallas(k_pool, v_pool, qkv, positions, speeds, page_table, first_row, valid, *, heads, dtype, interpret):
    batch, tokens = valid.shape
    inputs = new_rows(qkv, positions, speeds, page_table, first_row, valid, k_pool.shape[2])
    q = jax.ShapeDtypeStruct((batch, tokens, heads, k_pool.shape[3]), dtype)
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)]
    return pl.pallas_call(
        functools.partial(_kernel, heads=heads),
        grid=(tokens, k_pool.shape[1], batch),
        out_shape=[q, *pools],
        input_output_aliases={len(inputs): 1, len(inputs) + 1: 2},
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="rotate_append",
    )(*inputs, k_pool, v_pool)


def _unsupported(k_pool: Array) -> str | None:
    """Says which limit of the kernel a call breaks, if any."""
    if k_pool.shape[3] not in HEAD_DIMS:
        return f"head_dim must be a multiple of 16 up to 256, got {k_pool.shape[3]}"
    if k_pool.dtype not in POOL_DTYPES:
        return f"the pool's dtype must be one of {', '.join(map(str, POOL_DTYPES))}, got {k_pool.dtype}"
    return None


def check_width(qkv: PartialSums, k_pool: Array, heads: int) -> None:
    """Raises ValueError where a projection is not of so many heads beside those of a pool."""
    kv_heads, dim = k_pool.shape[1], k_pool.shape[3]
    if qkv.shape[-1] != (heads + 2 * kv_heads) * dim or heads % kv_heads:
        raise ValueError(f"qkv must be {(heads + 2 * kv_heads) * dim} wide, got {qkv.shape[-1]}")


@functools.partial(jax.jit, static_argnames=("heads", "dtype", "deterministic", "implementation"))
def rotate_append(
    k_pool: Pool,
    v_pool: Pool,
    qkv: PartialSums,
    positions: Int32[Array, "B T"],
    speeds: Float[Array, " half"],
    page_table: Int32[Array, "B P"],
    first_row: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    *,
    heads: int,
    dtype: jnp.dtype,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T H D"], Pool, Pool]:
    """Rotates queries and keys, and writes keys and values of row t to row first_row[b] + t, where valid.

    Args:
        qkv: [parts, B, T, (heads + 2 * kv_heads) * head_dim] to be added up, as `split_matmul` leaves them.
        speeds: float32 radians per position, head_dim / 2 of them.
        heads: query heads.
        dtype: of the model, in which the queries come back.
        deterministic: a row's last bits are the same among any number of rows; the kernel's always are, with cosines
            and sines by XLA, each by itself.
        implementation: as in `paged_attention`.

    Returns:
        The rotated queries, and the pools, in the memory of the old ones if those are donated.

    Raises:
        NotImplementedError: "pallas" with a head_dim or dtype that the kernel does not support.
    """
    check_width(qkv, k_pool, heads)
    kernel = functools.partial(_pallas, heads=heads, dtype=dtype)
    reference = functools.partial(_reference, heads=heads, dtype=dtype, deterministic=deterministic)
    arguments = (k_pool, v_pool, qkv, positions, speeds, page_table, first_row, valid)
    return dispatch(implementation, _unsupported(k_pool), kernel, reference, *arguments)
