"""Splits a QKV projection, rotates queries and keys, and writes keys and values to the paged cache, in one kernel.

A row of the projection holds heads of width D: first queries, then keys, then values. A bias is added first. Then each
query, key and value head may be normed (arXiv:1910.07467). The rotary embedding (arXiv:2104.09864) pairs channel i
of a head with channel i + D/2. With the cosine c_i and the sine s_i of the row, the two channels become
x_i c_i - x_{i+D/2} s_i and x_{i+D/2} c_i + x_i s_i. They are computed in float32 and rounded to the model's dtype.
`kv_pages` describes the layout of the pools.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention.kv_pages import HEAD_DIMS, POOL_DTYPES, Pool, append, cast_to_pool, locate
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials, split_scales, sum_f32
from pallas_kernels.layers.residual_norm import quotients, rms_norm, weighted
from pallas_kernels.layers.row_by_row import row_by_row
from pallas_kernels.layers.weights import STATIC

KEYS, QUERIES, ALL = slice(0, 2), slice(-2, None), slice(None)  # the rotary tables of keys, of queries, and of both


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadTransform:
    """How the heads of a fused QKV projection become rotated queries and keys: bias, norm of each head, rotation."""

    # Cosines and sines of every row, float32. 2 tables: for keys and queries; 4: those of keys, then those of queries.
    cos_sin: Float[Array, "tables B T half"]
    bias: Float[Array, " width"] | None = None  # bias of all heads [(H + 2 KH) * D]; None: none
    q_norm: Float[Array, " D"] | None = None  # weight of the norm of a query head; None: no norm
    k_norm: Float[Array, " D"] | None = None  # weight of the norm of a key head; None: no norm
    v_norm: Float[Array, " D"] | None = None  # weight of the norm of a value head; None: no norm
    eps: float = field(default=0.0, metadata=STATIC)  # epsilon of the norms


def rotate(x: Float[Array, "B T H D"], cos_sin: Float[Array, "2 B T half"]) -> Float[Array, "B T H D"]:
    """Rotates every head of every row of x by the row's angles; this is the reference of the kernel's rotation."""
    cos, sin = cos_sin[:, :, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def split_qkv(qkv, cos_sin, transform, *, heads, kv_heads, dtype):
    """Splits a projection into rotated queries [B, T, H, D], rotated keys [B, T, KH, D] and values [B, T, KH, D].

    This is the reference of the kernel, which also writes keys and values to the cache.
    """
    if transform.bias is None:
        added = reduce_partials(qkv, dtype)
    else:
        added = (reduce_partials(qkv, jnp.float32) + transform.bias).astype(dtype)
    by_head = added.reshape(*added.shape[:-1], heads + 2 * kv_heads, -1)
    q, k, v = jnp.split(by_head, [heads, heads + kv_heads], axis=2)
    if transform.q_norm is not None:
        q = rms_norm(q, transform.q_norm, transform.eps)
    if transform.k_norm is not None:
        k = rms_norm(k, transform.k_norm, transform.eps)
    if transform.v_norm is not None:
        v = rms_norm(v, transform.v_norm, transform.eps)
    return rotate(q, cos_sin[QUERIES]), rotate(k, cos_sin[KEYS]), v


def _reference(k_pool, v_pool, qkv, transform, page_table, first_row, valid, *, heads, dtype, deterministic=False):
    split = functools.partial(split_qkv, transform=transform, heads=heads, kv_heads=k_pool.shape[1], dtype=dtype)
    cos_sin = transform.cos_sin
    if deterministic:
        rows = qkv.reshape(qkv.shape[0], -1, qkv.shape[-1]).swapaxes(0, 1)
        tables = cos_sin.reshape(cos_sin.shape[0], -1, cos_sin.shape[-1]).swapaxes(0, 1)
        split_rows = lambda *arrays: split(*(array.swapaxes(0, 1)[:, :, None] for array in arrays))  # noqa: E731
        outputs = row_by_row(split_rows, rows, tables)
        q, k, v = (array.reshape(*valid.shape, *array.shape[2:]) for array in outputs)
    else:
        q, k, v = split(qkv, cos_sin)
    return q, *append(k_pool, v_pool, k, v, page_table, first_row, valid, implementation="reference")


def column_loader(qkv_ref, scale_refs, bias_ref, sequence, token, dtype, first=0):
    """Returns a function `load(columns, mask)` for use in a kernel, which loads columns of one row of the projection.

    `load` adds up the partial sums, applies the scales, adds the bias and rounds to `dtype`. Its argument `mask` is a
    dictionary with the options `mask` and `other` of the loads, or an empty dictionary.

    Args:
        qkv_ref: partial sums [parts, B, T, (H + 2 KH) * D].
        scale_refs: scales of the rows [B, T] and of the columns [(H + 2 KH) * D]; empty: no scales.
        bias_ref: bias of the columns [(H + 2 KH) * D]; None: no bias.
        sequence, token: indices of the row (scalars or arrays).
        dtype: the model's dtype.
        first: column of the projection that is column 0 of `load` and of the bias.
    """

    def load(columns, mask):
        at = (sequence, token, first + columns)
        total = sum_f32([pltriton.load(qkv_ref.at[(part, *at)], **mask) for part in range(count)])
        if scale_refs:
            row_scale = pltriton.load(scale_refs[0].at[sequence, token])
            total = total * row_scale * pltriton.load(scale_refs[1].at[columns], **mask)
        if bias_ref is not None:
            bias_columns = jnp.broadcast_to(columns, total.shape)  # the shape of the mask
            total += pltriton.load(bias_ref.at[bias_columns], **mask).astype(jnp.float32)
        return total.astype(dtype)

    count = qkv_ref.shape[0]
    return load


def load_cos_sin(cos_sin_ref, row, channel, mask, tables=ALL):
    """Loads the cosines and the sines of rows, inside a kernel; returns a list of tables, as in `HeadTransform`.

    Args:
        cos_sin_ref: float32 [2 or 4, *rows, D / 2]; rows have the axes B and T, or one axis for both.
        row: indices of the rows, a tuple of one for each of these axes.
        channel: channels of the first half of a head.
        mask: options of the loads, `mask` and `other`; empty: no mask.
        tables: the tables to load: `KEYS`, `QUERIES` or `ALL`.
    """
    indices = range(cos_sin_ref.shape[0])[tables]
    return [pltriton.load(cos_sin_ref.at[index, *row, channel], **mask) for index in indices]


class HeadNorm(NamedTuple):
    """The norm of query, key or value heads, loaded in a kernel."""

    weights: list[Array]  # for the first half of a head, and for the second half
    eps: float
    size: int  # number of channels of a head


def load_norm(weight_ref, eps, channels, mask):
    """Loads the weight of a norm, inside a kernel; returns a `HeadNorm`, or None if there is no norm.

    Args:
        weight_ref: weight [D]; None: no norm.
        eps: epsilon of the norm.
        channels: channels of the first half of a head, and channels of the second half.
        mask: options of the loads, `mask` and `other`; empty: no mask.
    """
    if weight_ref is None:
        return None
    return HeadNorm([pltriton.load(weight_ref.at[half], **mask) for half in channels], eps, weight_ref.shape[0])


def load_normed(load, start, channels, norm, mask):
    """Loads heads of the projection and norms them, inside a kernel; returns both halves in the model's dtype.

    Args:
        load: function that `column_loader` returned.
        start: first column of the heads in the projection.
        channels: channels of the first half of a head, and channels of the second half.
        norm: norm that `load_norm` returned.
        mask: options of the loads, `mask` and `other`; empty: no mask. Masked channels must be 0.
    """
    halves = [load(start + half, mask) for half in channels]
    if norm is None:
        return halves
    both = zip(quotients(halves, norm.eps, norm.size), norm.weights, strict=True)
    return [weighted(quotient, weight, halves[0].dtype) for quotient, weight in both]


def load_rotated(load, start, channels, norm, cos_sin, mask):
    """Loads heads of the projection, norms and rotates them, inside a kernel; returns both halves in float32.

    Args:
        load, start, channels, norm, mask: as in `load_normed`.
        cos_sin: cosines and sines of keys or of queries, which `load_cos_sin` returned.
    """
    halves = [half.astype(jnp.float32) for half in load_normed(load, start, channels, norm, mask)]
    return rotate_halves(halves, cos_sin)


def rotate_halves(halves, cos_sin):
    """Returns both halves of channels rotated by the angles with these cosines and sines."""
    (first, second), (cos, sin) = halves, cos_sin
    return first * cos - second * sin, second * cos + first * sin


def _kernel(
    # inputs
    qkv_ref,  # [parts, B, T, (H + 2 KH) * D]
    transform,  # a `HeadTransform` of references
    pool_row_ref,  # [B, T] int32: page * page size + row in the page; -1: not written
    scale_refs,  # scales of rows [B, T] and of columns [(H + 2 KH) * D]; empty: no scales
    _k_in,  # [pages, KH, page, D]; k_ref aliases it
    _v_in,
    # outputs
    q_ref,  # [B, T, H, D]
    k_ref,  # [pages, KH, page, D]
    v_ref,
    # static parameters
    heads,  # query heads
):
    """Rotates and writes one KV head of one row, and rotates the head's group of queries, in one Pallas program.

    No load depends on the result of another load, so all loads are in flight at once.
    """
    token, kv_head, sequence = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, kv_heads, page, dim = k_ref.shape
    half, group = dim // 2, heads // kv_heads
    channel, pool_row = jnp.arange(pl.next_power_of_2(half)), pool_row_ref[sequence, token]
    is_channel, channels = channel < half, [channel, half + channel]
    mask = {"mask": is_channel, "other": 0}
    tables = load_cos_sin(transform.cos_sin, (sequence, token), channel, mask)
    load = column_loader(qkv_ref, scale_refs, transform.bias, sequence, token, q_ref.dtype)

    # Load and rotate both halves of the group's queries [group, D / 2], the key [D / 2] and the value [D / 2].
    member = jnp.arange(pl.next_power_of_2(group))[:, None]
    head, is_query = kv_head * group + member, (member < group) & is_channel[None, :]
    query_tables, start = [part[None, :] for part in tables[QUERIES]], head * dim
    columns = [part[None, :] for part in channels]
    q_norm = load_norm(transform.q_norm, transform.eps, columns, {"mask": is_channel[None, :], "other": 0})
    k_norm, v_norm = (load_norm(ref, transform.eps, channels, mask) for ref in (transform.k_norm, transform.v_norm))
    query = load_rotated(load, start, columns, q_norm, query_tables, {"mask": is_query, "other": 0})
    key = load_rotated(load, (heads + kv_head) * dim, channels, k_norm, tables[KEYS], mask)
    value = load_normed(load, (heads + kv_heads + kv_head) * dim, channels, v_norm, mask)

    # Store half by half.
    for part, query_half, *new in zip(channels, query, key, value, strict=True):
        pltriton.store(q_ref.at[sequence, token, head, part[None, :]], query_half.astype(q_ref.dtype), mask=is_query)
        at = (pool_row // page, kv_head, pool_row % page, part)
        for ref, values in zip((k_ref, v_ref), new, strict=True):
            values = cast_to_pool(values.astype(q_ref.dtype), ref.dtype)
            pltriton.store(ref.at[at], values, mask=(pool_row >= 0) & is_channel)


def written_rows(page_table, first_row, valid, page):
    """Returns the pool row to which each new row is written [B, T]; -1 for rows that are not written.

    A pool row is the number of a row in the whole pool: page number * page size + row in the page.
    """
    rows = first_row[:, None] + jnp.arange(valid.shape[1], dtype=jnp.int32)
    pages, places, exists = locate(page_table, rows, page)
    return jnp.where(valid & exists, pages * page + places, -1)


def _pallas(k_pool, v_pool, qkv, transform, page_table, first_row, valid, *, heads, dtype, interpret):
    batch, tokens = valid.shape
    qkv, scales = split_scales(qkv)
    inputs = (qkv, transform, written_rows(page_table, first_row, valid, k_pool.shape[2]), scales)
    first_pool = len(jax.tree.leaves(inputs))
    q = jax.ShapeDtypeStruct((batch, tokens, heads, k_pool.shape[3]), dtype)
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)]
    return pl.pallas_call(
        functools.partial(_kernel, heads=heads),
        grid=(tokens, k_pool.shape[1], batch),
        out_shape=[q, *pools],
        input_output_aliases={first_pool: 1, first_pool + 1: 2},
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="rotate_append",
    )(*inputs, k_pool, v_pool)


def unsupported(k_pool: Array) -> str | None:
    """Returns a text that says which limit of the kernel a call exceeds; None if the call is supported."""
    if k_pool.shape[3] not in HEAD_DIMS:
        return f"head_dim must be a multiple of 16 up to 512, got {k_pool.shape[3]}"
    if k_pool.dtype not in POOL_DTYPES:
        return f"the pool's dtype must be one of {', '.join(map(str, POOL_DTYPES))}, got {k_pool.dtype}"
    return None


def check_heads(qkv: PartialSums, k_pool: Array, heads: int, transform: HeadTransform) -> None:
    """Raises ValueError unless projection and transform fit `heads` query heads and the pool's KV heads."""
    kv_heads, dim = k_pool.shape[1], k_pool.shape[3]
    width, tables = (heads + 2 * kv_heads) * dim, transform.cos_sin.shape
    if qkv.shape[-1] != width or heads % kv_heads:
        raise ValueError(f"qkv must be {width} wide, got {qkv.shape[-1]}")
    if tables[0] not in (2, 4) or tables[1:] != (*qkv.shape[1:3], dim // 2):
        raise ValueError(f"cos_sin must be {(2, *qkv.shape[1:3], dim // 2)}, or 4 tables, got {tables}")
    for name, size in (("bias", width), ("q_norm", dim), ("k_norm", dim), ("v_norm", dim)):
        weight = getattr(transform, name)
        if weight is not None and weight.shape != (size,):
            raise ValueError(f"{name} must be None or {(size,)}, got {weight.shape}")


@functools.partial(jax.jit, static_argnames=("heads", "dtype", "deterministic", "implementation"))
def rotate_append(
    k_pool: Pool,
    v_pool: Pool,
    qkv: PartialSums,
    transform: HeadTransform,
    page_table: Int32[Array, "B P"],
    first_row: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    *,
    heads: int,
    dtype: jnp.dtype,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T H D"], Pool, Pool]:
    """Splits a QKV projection, rotates queries and keys, writes keys and values to the cache, and returns the queries.

    The key and the value of row t of sequence b are written to cache row first_row[b] + t, where valid[b, t].

    Args:
        k_pool, v_pool: pages of keys and values [pages, KH, page, D].
        qkv: partial sums [parts, B, T, (heads + 2 * KH) * D], as `split_matmul` returns them.
        transform: bias, norms and rotation of the heads.
        page_table: page numbers [B, P].
        first_row: first cache row to write in each sequence [B].
        valid: whether a row is written [B, T].
        heads: number of query heads.
        dtype: the model's dtype, in which the queries are returned.
        deterministic: as in `add_rms_norm`.
        implementation: as in `paged_attention`.

    Returns:
        The rotated queries [B, T, heads, D], and the two new pools, which take the memory of the old pools if the old
        pools are donated.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the head_dim or the dtype.
    """
    check_heads(qkv, k_pool, heads, transform)
    kernel = functools.partial(_pallas, heads=heads, dtype=dtype)
    reference = functools.partial(_reference, heads=heads, dtype=dtype, deterministic=deterministic)
    arguments = (k_pool, v_pool, qkv, transform, page_table, first_row, valid)
    return dispatch(implementation, [Kernel(TRITON, kernel, unsupported(k_pool))], reference, *arguments)
