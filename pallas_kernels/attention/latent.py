"""Products of each head with its own matrix, and the rows of a latent cache (DeepSeek-V2, arXiv:2405.04434, 2.1).

    head_products       out[r, h] = x[r, h, :K] W_h, or its product with W_h transposed
    latent_queries      the same, with the rotated channels of the query after the product
    append_latent       rotates a row's shared key, and writes it and the row's latent vector to the paged cache

The rotary embedding is that of `rope_append`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.attention.kv_pages import (
    POOL_DTYPES,
    Pool,
    VPool,
    append,
    cast_to_pool,
    check_pools,
    locate_in_kernel,
)
from pallas_kernels.attention.rope_append import KEYS, QUERIES, load_cos_sin, rotate
from pallas_kernels.attention.tiling import MMA_ROWS
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.row_blocks import in_row_blocks

FIXED_ROWS = 64  # rows of a Pallas program in deterministic products, and with many rows
WIDTH = 128  # columns of the product that a Pallas program computes
INNER = 64  # values of the sum that a loop iteration adds up
FEW_WIDTH, FEW_INNER = 32, 128  # the same with few rows: more programs of fewer iterations, which wait for memory
MOST_INNER = 4096  # most rows and most columns of a head's matrix


def _reference(x, weight, cos_sin, *, start, is_transposed, deterministic):
    heads, inner = weight.shape[0], weight.shape[2 if is_transposed else 1]
    channels = inner + (0 if cos_sin is None else 2 * cos_sin.shape[-1])

    def product(x, *tables):
        x = x[:, start : start + heads * channels].reshape(-1, heads, channels)
        terms = "rhk,hnk->rhn" if is_transposed else "rhk,hkn->rhn"
        wide = x[..., :inner].astype(jnp.float32), weight.astype(jnp.float32)  # not every CPU product widens bfloat16
        out = jnp.einsum(terms, *wide, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)
        if not tables:
            return out
        by_table = tables[0].swapaxes(0, 1)[:, None]
        return jnp.concatenate([out, rotate(x[None, ..., inner:], by_table[QUERIES])[0]], axis=-1)

    rows = (x,) if cos_sin is None else (x, cos_sin.swapaxes(0, 1))
    return in_row_blocks(product, *rows) if deterministic else product(*rows)


def _kernel(
    # inputs
    x_ref,  # [rows, columns], from `start` on H * (K + rotated channels)
    weight_ref,  # [H, K, N], or [H, N, K] if it is transposed
    cos_sin_ref,  # [2, rows, half]; None: no channels are rotated
    # outputs
    out_ref,  # [rows, H, N + rotated channels]
    # static parameters
    *,
    start,
    block,  # rows per Pallas program
    widest,  # most columns per Pallas program
    longest,  # most values of the sum per loop iteration
    is_transposed,
    precision,  # precision of the matrix products
):
    """Multiplies some rows of one head by some columns of its matrix, or rotates them, in one Pallas program."""
    head, tile = pl.program_id(1), pl.program_id(2)
    rows, sizes = x_ref.shape[0], weight_ref.shape[1:]
    inner, out = sizes[::-1] if is_transposed else sizes
    start += head * (inner + (0 if cos_sin_ref is None else 2 * cos_sin_ref.shape[-1]))
    row = pl.program_id(0) * block + jnp.arange(block)[:, None]
    is_row, own = row < rows, jnp.minimum(row, rows - 1)  # padding rows load the last one, and are not stored
    width, step = (
        min(max(pl.next_power_of_2(size), MMA_ROWS), most) for size, most in ((out, widest), (inner, longest))
    )
    column = tile * width + jnp.arange(width)
    is_column = column < out

    def add(index, total):
        place = index * step + jnp.arange(step)
        is_inner, is_out = (place < inner) if inner % step else None, is_column if out % width else None
        x = pltriton.load(x_ref.at[own, start + place[None, :]], **_masked((block, step), None, is_inner))
        if is_transposed:
            ref, mask = weight_ref.at[head, column[:, None], place[None, :]], _masked((width, step), is_out, is_inner)
        else:
            ref, mask = weight_ref.at[head, place[:, None], column[None, :]], _masked((step, width), is_inner, is_out)
        weight = pltriton.load(ref, **mask)
        return total + pltriton.dot(x, weight, trans_b=is_transposed, precision=precision)

    def multiply():
        total = jax.lax.fori_loop(0, pl.cdiv(inner, step), add, jnp.zeros((block, width), jnp.float32))
        ref = out_ref.at[row, head, column[None, :]]
        pltriton.store(ref, total.astype(out_ref.dtype), mask=is_row & is_column[None, :])

    def turn():
        half = cos_sin_ref.shape[-1]
        channel = jnp.arange(pl.next_power_of_2(half))[None, :]
        inside = jnp.broadcast_to(channel < half, (block, channel.size))
        load = functools.partial(pltriton.load, mask=inside, other=0)
        halves = (x_ref.at[own, start + inner + part * half + channel] for part in (0, 1))
        first, second = (load(ref).astype(jnp.float32) for ref in halves)
        cos, sin = (load(cos_sin_ref.at[table, own, channel]) for table in (0, 1))
        stored = is_row & (channel < half)
        for part, values in enumerate((first * cos - second * sin, second * cos + first * sin)):
            ref = out_ref.at[row, head, out + part * half + channel]
            pltriton.store(ref, values.astype(out_ref.dtype), mask=stored)

    if cos_sin_ref is None:
        multiply()
        return
    products = pl.cdiv(out, widest)
    pl.when(tile < products)(multiply)
    pl.when(tile == products)(turn)


def _masked(shape, rows, columns):
    """Returns mask options for a load of this shape; a condition of None holds for all rows or all columns."""
    known = [] if rows is None else [rows[:, None]]
    known += [] if columns is None else [columns[None, :]]
    return {"mask": jnp.broadcast_to(functools.reduce(jnp.logical_and, known), shape), "other": 0} if known else {}


def _pallas(x, weight, cos_sin, *, start, is_transposed, deterministic, interpret):
    rows, (heads, *sizes) = x.shape[0], weight.shape
    out = sizes[0] if is_transposed else sizes[1]
    rotated = 0 if cos_sin is None else 2 * cos_sin.shape[-1]
    cos_sin = None if cos_sin is None else cos_sin[QUERIES]
    wide = x.dtype == jnp.float32 and not interpret
    # Three TF32 products are as exact as one float32 product, and run on tensor cores. A CPU has no TF32.
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if wide else jax.lax.Precision.HIGHEST
    is_few = not deterministic and rows <= 2 * MMA_ROWS
    widest, longest = (FEW_WIDTH, FEW_INNER) if is_few else (WIDTH, INNER)
    block, tiles = MMA_ROWS if is_few else FIXED_ROWS, pl.cdiv(out, widest) + (cos_sin is not None)
    options = {"block": block, "widest": widest, "longest": longest, "is_transposed": is_transposed}
    return pl.pallas_call(
        functools.partial(_kernel, start=start, precision=precision, **options),
        grid=(pl.cdiv(rows, block), heads, tiles),
        out_shape=jax.ShapeDtypeStruct((rows, heads, out + rotated), x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="head_products" if cos_sin is None else "latent_queries",
    )(x, weight, cos_sin)


def _run(x, weight, cos_sin, *, implementation, **options):
    kernel, reference = (functools.partial(run, **options) for run in (_pallas, _reference))
    reason = None if max(weight.shape[1:]) <= MOST_INNER else f"at most {MOST_INNER} channels, got {weight.shape}"
    if x.dtype != weight.dtype or x.dtype not in POOL_DTYPES[:3]:
        reason = f"x and weight must be bfloat16, float16 or float32 alike, got {x.dtype} and {weight.dtype}"
    rows = x.reshape(-1, x.shape[-1])
    tables = None if cos_sin is None else cos_sin.reshape(cos_sin.shape[0], -1, cos_sin.shape[-1])
    out = dispatch(implementation, reason, kernel, reference, rows, weight, tables)
    return out.reshape(*x.shape[:-1], *out.shape[1:])


@functools.partial(jax.jit, static_argnames=("deterministic", "implementation"))
def head_products(
    x: Float[Array, "*rows width"],
    weight: Float[Array, "H N K"],
    *,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "*rows H N"]:
    """Returns x[..., h * K : (h + 1) * K] @ weight[h].T for each head h, summed in float32 and rounded once.

    Args:
        x: the channels of all heads side by side [*rows, H * K].
        weight: matrix of each head [H, N, K].
        deterministic: make the bits of a row's result independent of the number of rows.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the sizes or dtypes.
    """
    options = {"deterministic": deterministic, "implementation": implementation}
    return _run(x, weight, None, start=0, is_transposed=True, **options)


@functools.partial(jax.jit, static_argnames=("start", "deterministic", "implementation"))
def latent_queries(
    q: Float[Array, "B T width"],
    weight: Float[Array, "H K N"],
    cos_sin: Float[Array, "tables B T half"],
    *,
    start: int = 0,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "B T H out"]:
    """Returns for each head the product of its first K channels with weight[h], and its other channels, rotated.

    Args:
        q: columns [B, T, width], from `start` on those of the query heads, K + 2 * half each.
        weight: matrix of each head [H, K, N].
        cos_sin: rotary tables, as in `HeadTransform`.
        start: first column of the queries.
        deterministic, implementation: as in `head_products`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the sizes or dtypes.
    """
    options = {"deterministic": deterministic, "implementation": implementation}
    return _run(q, weight, cos_sin, start=start, is_transposed=False, **options)


def _append_reference(k_pool, v_pool, rows, cos_sin, page_table, first_row, valid, *, start, deterministic):
    ends = start, start + v_pool.shape[3], start + v_pool.shape[3] + k_pool.shape[3]
    _, latent, key, _ = jnp.split(rows, ends, axis=-1)

    def turn(key, tables):
        return rotate(key[None, :, None], tables.swapaxes(0, 1)[:, None][KEYS])[0]

    flat = key.reshape(-1, key.shape[-1]), cos_sin.reshape(cos_sin.shape[0], -1, cos_sin.shape[-1]).swapaxes(0, 1)
    key = (in_row_blocks(turn, *flat) if deterministic else turn(*flat)).reshape(*key.shape[:2], 1, -1)
    where = page_table, first_row, valid
    return append(k_pool, v_pool, key, latent[:, :, None], *where, implementation="reference")


def _append_kernel(
    # inputs
    rows_ref,  # [B, T, columns], from `start` on N + 2 * half
    cos_sin_ref,  # [tables, B, T, half]
    page_table_ref,  # [B, P] int32
    first_row_ref,  # [B] int32
    valid_ref,  # [B, T] bool
    _k_in,  # [pages, 1, page, 2 * half]; the outputs alias the pools
    _v_in,  # [pages, 1, page, N]
    # outputs
    k_ref,
    v_ref,
    # static parameters
    *,
    start,
):
    """Writes one row of the cache, in one Pallas program."""
    token, sequence = pl.program_id(0), pl.program_id(1)
    latent, half, page = v_ref.shape[3], cos_sin_ref.shape[-1], k_ref.shape[2]
    row, valid = first_row_ref[sequence] + token, valid_ref[sequence, token]
    number, place, valid = locate_in_kernel(page_table_ref, sequence, row, valid, page)
    channel = jnp.arange(pl.next_power_of_2(latent))
    values = pltriton.load(rows_ref.at[sequence, token, start + channel], mask=channel < latent, other=0)
    ref = v_ref.at[number, 0, place, channel]
    pltriton.store(ref, cast_to_pool(values, v_ref.dtype), mask=valid & (channel < latent))
    channel = jnp.arange(pl.next_power_of_2(half))
    mask = {"mask": channel < half, "other": 0}
    cos, sin = load_cos_sin(cos_sin_ref, sequence, token, channel, mask, KEYS)
    refs = [rows_ref.at[sequence, token, start + latent + part * half + channel] for part in (0, 1)]
    first, second = (pltriton.load(ref, **mask).astype(jnp.float32) for ref in refs)
    for part, turned in enumerate((first * cos - second * sin, second * cos + first * sin)):
        values = cast_to_pool(turned.astype(rows_ref.dtype), k_ref.dtype)
        ref = k_ref.at[number, 0, place, part * half + channel]
        pltriton.store(ref, values, mask=valid & (channel < half))


def _append_pallas(k_pool, v_pool, *inputs, start, deterministic, interpret):
    del deterministic  # the kernel computes each row in the same way for any number of rows
    *_, valid = inputs
    return pl.pallas_call(
        functools.partial(_append_kernel, start=start),
        grid=valid.shape[::-1],
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)],
        input_output_aliases={len(inputs): 0, len(inputs) + 1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="append_latent",
    )(*inputs, k_pool, v_pool)


@functools.partial(jax.jit, static_argnames=("start", "deterministic", "implementation"))
def append_latent(
    k_pool: Pool,
    v_pool: VPool,
    rows: Float[Array, "B T width"],
    cos_sin: Float[Array, "tables B T half"],
    page_table: Int32[Array, "B P"],
    first_row: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    *,
    start: int = 0,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Pool, VPool]:
    """Writes the latent vector of each row to the pool of V, and its other channels, rotated, to the pool of K.

    Args:
        k_pool, v_pool: pages of rotated keys [pages, 1, page, 2 * half] and of latent vectors [pages, 1, page, N].
        rows: columns [B, T, width], from `start` on latent vectors and keys side by side, N + 2 * half.
        cos_sin: rotary tables, as in `HeadTransform`.
        page_table, first_row, valid: as in `append`.
        start: first column of the latent vectors.
        deterministic: make the bits of a row independent of the number of rows; the kernel always does.
        implementation: as in `paged_attention`.

    Returns:
        The new pools, which take the memory of the old pools if the old pools are donated.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the pools' dtype.
    """
    check_pools(k_pool, v_pool)
    if start + k_pool.shape[3] + v_pool.shape[3] > rows.shape[-1] or k_pool.shape[1] != 1:
        expected = f"[pages, 1, page, _] of at most {rows.shape[-1] - start} channels together"
        raise ValueError(f"pools must be {expected}, got {k_pool.shape} and {v_pool.shape}")
    options = {"start": start, "deterministic": deterministic}
    kernel, reference = (functools.partial(run, **options) for run in (_append_pallas, _append_reference))
    reason = None if k_pool.dtype in POOL_DTYPES else f"the pool's dtype must not be {k_pool.dtype}"
    arguments = (k_pool, v_pool, rows, cos_sin, page_table, first_row, valid)
    return dispatch(implementation, reason, kernel, reference, *arguments)
