"""Writes to a paged KV cache: appends new rows, and moves the rows of a tree's accepted path to their final places.

K and V have one pool each, [pages, kv_heads, page, head_dim]; their head_dims may differ. Row r of sequence b is at
pool[page_table[b, r // page], :, r % page]. Page 0 is the null page, which is never read. A row is not written if it is
not valid, or if the page table has no page for it.

A pool of float8_e4m3fn has no scale; values are clipped to +-448.

One kernel writes both pools in place. The caller should donate the pools, and use only the returned pools.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.quantize_rows import FP8, LARGEST

LAYERS = 8  # most layers whose rows one kernel moves, because the kernel's code grows with every layer
HEAD_DIMS = range(16, 513, 16)  # head_dims that the kernels support; registers are padded to powers of two
POOL_DTYPES = (*(jnp.dtype(name) for name in ("bfloat16", "float16", "float32")), FP8)
Pool = Float[Array, "pages KH page D"]
VPool = Float[Array, "pages KH page DV"]


class PagedKV(NamedTuple):
    """Pools of keys and values, with the places of each sequence's committed rows, as in `paged_attention`."""

    k: Pool
    v: VPool
    page_table: Int32[Array, "B P"]
    lengths: Int32[Array, " B"]


def locate(page_table: Array, rows: Array, page: int) -> tuple[Array, Array, Array]:
    """Looks up the page number of each row [B, T], the row's index in its page, and whether the row exists.

    A row exists if the page table has a page for it.
    """
    exists = (rows >= 0) & (rows < page_table.shape[1] * page)
    rows = jnp.where(exists, rows, 0)
    return jnp.take_along_axis(page_table, rows // page, axis=1, mode="clip"), rows % page, exists


def cast_to_pool(values: Array, dtype: jnp.dtype) -> Array:
    """Casts values to a pool's dtype, clipped to +-448 for float8, inside or outside of a kernel."""
    if dtype == FP8:
        values = jnp.clip(values.astype(jnp.float32), -LARGEST[FP8], LARGEST[FP8])
    return values.astype(dtype)


def _scatter(pool: Array, values: Array, pages: Array, places: Array, valid: Array) -> Array:
    """Writes values [B, T, KH, D] to the given pages and places within the pages, where valid; returns the pool."""
    pages = jnp.where(valid, pages, pool.shape[0])  # mode="drop" skips a page number past the end
    return pool.at[pages, :, places].set(cast_to_pool(values, pool.dtype), mode="drop")


def _append_reference(k_pool, v_pool, k, v, page_table, first_row, valid):
    rows = first_row[:, None] + jnp.arange(k.shape[1], dtype=jnp.int32)
    pages, places, exists = locate(page_table, rows, k_pool.shape[2])
    valid &= exists
    return _scatter(k_pool, k, pages, places, valid), _scatter(v_pool, v, pages, places, valid)


def _move_reference(k_pools, v_pools, *rows):
    moved = [_move_layer(k, v, *rows) for k, v in zip(k_pools, v_pools, strict=True)]
    return [k for k, _ in moved], [v for _, v in moved]


def _move_layer(k_pool, v_pool, page_table, source_rows, target_rows, valid):
    source_pages, source_places, source_exists = locate(page_table, source_rows, k_pool.shape[2])
    pages, places, exists = locate(page_table, target_rows, k_pool.shape[2])
    valid &= source_exists & exists
    k, v = k_pool[source_pages, :, source_places], v_pool[source_pages, :, source_places]
    return _scatter(k_pool, k, pages, places, valid), _scatter(v_pool, v, pages, places, valid)


def locate_in_kernel(page_table_ref, sequence, row, valid, page):
    """Looks up a row's page number and place in the page, and whether the row is written, inside a kernel.

    A row is written if it is valid and the page table has a page for it.
    """
    valid &= (row >= 0) & (row < page_table_ref.shape[1] * page)
    row = jnp.where(valid, row, 0)
    return page_table_ref[sequence, row // page], row % page, valid


def _append_kernel(
    # inputs
    k_ref,  # [B, T, KH, D]
    v_ref,  # [B, T, KH, DV]
    page_table_ref,  # [B, P] int32
    first_row_ref,  # [B] int32
    valid_ref,  # [B, T] bool
    _k_in,  # [pages, KH, page, D]; the outputs alias the pools
    _v_in,  # [pages, KH, page, DV]
    # outputs
    k_pool_ref,  # as the inputs
    v_pool_ref,
):
    """Writes all KV heads of one new row, in one Pallas program."""
    token, sequence = pl.program_id(0), pl.program_id(1)
    _, kv_heads, page, _ = k_pool_ref.shape
    row, valid = first_row_ref[sequence] + token, valid_ref[sequence, token]
    target_page, target_row, valid = locate_in_kernel(page_table_ref, sequence, row, valid, page)
    head = jnp.arange(pl.next_power_of_2(kv_heads))[:, None]
    for new_ref, pool_ref in ((k_ref, k_pool_ref), (v_ref, v_pool_ref)):
        channel = jnp.arange(pl.next_power_of_2(pool_ref.shape[3]))[None, :]
        exists = (head < kv_heads) & (channel < pool_ref.shape[3])
        values = pltriton.load(new_ref.at[sequence, token, head, channel], mask=exists, other=0)
        at = (target_page, head, target_row, channel)
        pltriton.store(pool_ref.at[at], cast_to_pool(values, pool_ref.dtype), mask=exists & valid)


def _move_kernel(
    # inputs
    page_table_ref,  # [B, P] int32
    source_ref,  # [B, T] int32, rows to copy
    target_ref,  # [B, T] int32, rows to write
    valid_ref,  # [B, T] bool
    *pool_refs,  # [pages, KH, page, D or DV]: K and V of every layer, then the outputs that alias them
    # static parameters
    interpret,
):
    """Moves all rows of one KV head of one sequence in one layer, in one Pallas program.

    The old values are read through the output references, which alias the inputs.
    """
    head, sequence, own_layer = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layers = len(pool_refs) // 4
    pools = list(zip(pool_refs[2 * layers : 3 * layers], pool_refs[3 * layers :], strict=True))
    page, tokens = pools[0][0].shape[2], source_ref.shape[1]
    # Look up the page numbers and the places in the pages, for the rows to copy and the rows to write.
    token = jnp.arange(pl.next_power_of_2(tokens))
    is_token = token < tokens
    rows = [pltriton.load(ref.at[sequence, token], mask=is_token, other=-1) for ref in (source_ref, target_ref)]
    valid = pltriton.load(valid_ref.at[sequence, token], mask=is_token, other=False)
    source_page, source_row, valid = locate_in_kernel(page_table_ref, sequence, rows[0], valid, page)
    target_page, target_row, valid = locate_in_kernel(page_table_ref, sequence, rows[1], valid, page)
    source, target = (
        (source_page[:, None], head, source_row[:, None]),
        (target_page[:, None], head, target_row[:, None]),
    )

    def move(pools_of_layer):
        channels = [jnp.arange(pl.next_power_of_2(pool_ref.shape[3]))[None, :] for pool_ref in pools_of_layer]
        places = list(zip(pools_of_layer, channels, strict=True))
        masks = [valid[:, None] & (channel < pool_ref.shape[3]) for pool_ref, channel in places]
        values = [
            pltriton.load(pool_ref.at[(*source, channel)], mask=mask)
            for (pool_ref, channel), mask in zip(places, masks, strict=True)
        ]
        if not interpret:
            pltriton.debug_barrier()  # rows may overlap, so all threads read before any thread writes
        for (pool_ref, channel), moved, mask in zip(places, values, masks, strict=True):
            pltriton.store(pool_ref.at[(*target, channel)], moved, mask=mask)

    for layer, pools_of_layer in enumerate(pools):
        pl.when(own_layer == layer)(functools.partial(move, pools_of_layer))


def _in_place(kernel, grid, pools, inputs, name, interpret):
    """Calls a kernel that writes the pools in place: the pools are its last inputs, and its outputs alias the pools."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        input_output_aliases={len(inputs) + index: index for index in range(len(pools))},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=name,
    )(*inputs, *pools)


def _append_pallas(k_pool, v_pool, k, v, page_table, first_row, valid, *, interpret):
    inputs = (k, v, page_table, first_row, valid)
    kernel = functools.partial(_append_kernel)  # a new function object for every call (jax issue 40847)
    return _in_place(kernel, valid.shape[::-1], (k_pool, v_pool), inputs, "append_rows", interpret)


def _move_pallas(k_pools, v_pools, page_table, source_rows, target_rows, valid, *, interpret):
    inputs = (page_table, source_rows, target_rows, valid)
    kernel = functools.partial(_move_kernel, interpret=interpret)
    grid = (k_pools[0].shape[1], valid.shape[0], len(k_pools))
    moved = _in_place(kernel, grid, (*k_pools, *v_pools), inputs, "move_rows", interpret)
    return list(moved[: len(k_pools)]), list(moved[len(k_pools) :])


def _unsupported(k_pool: Array, v_pool: Array, moved: int) -> str | None:
    """Returns a text that says which limit of the kernel a call exceeds; None if the call is supported."""
    width = max(k_pool.shape[3], v_pool.shape[3])
    if k_pool.dtype not in POOL_DTYPES:
        return f"the pool's dtype must be one of {', '.join(map(str, POOL_DTYPES))}, got {k_pool.dtype}"
    if moved * width > 64 * 256:
        return f"at most {64 * 256 // width} rows of a sequence can be moved at once, got {moved}"
    return None


def check_pools(k_pool: Array, v_pool: Array) -> None:
    """Raises ValueError unless the pools of K and V are alike, except for their numbers of channels."""
    if k_pool.shape[:3] != v_pool.shape[:3] or k_pool.dtype != v_pool.dtype:
        got = f"{k_pool.shape} {k_pool.dtype} and {v_pool.shape} {v_pool.dtype}"
        raise ValueError(f"the pools of K and V must be alike, except for their channels, got {got}")


@functools.partial(jax.jit, static_argnames=("implementation",))
def append(
    k_pool: Pool,
    v_pool: VPool,
    k: Float[Array, "B T KH D"],
    v: Float[Array, "B T KH DV"],
    page_table: Int32[Array, "B P"],
    first_row: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    *,
    implementation: Implementation = "auto",
) -> tuple[Pool, VPool]:
    """Writes k[b, t] and v[b, t] to cache row first_row[b] + t of sequence b, where valid[b, t]; returns the pools.

    Args:
        k_pool, v_pool: pages of keys [pages, KH, page, D] and values [pages, KH, page, DV].
        k, v: new keys [B, T, KH, D] and values [B, T, KH, DV] of one float dtype, which are cast to the pools' dtype.
        page_table: page numbers [B, P].
        first_row: first row to write in each sequence [B].
        valid: whether each row is written [B, T].
        implementation: as in `paged_attention`.

    Returns:
        The new pools, which take the memory of the old pools if the old pools are donated.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the pool's dtype.
    """
    check_pools(k_pool, v_pool)
    wanted = [(*valid.shape, pool.shape[1], pool.shape[3]) for pool in (k_pool, v_pool)]
    if [k.shape, v.shape] != wanted or k.dtype != v.dtype:
        got = f"{k.shape} {k.dtype} and {v.shape} {v.dtype}"
        raise ValueError(f"k and v must be of one dtype, of shapes {wanted[0]} and {wanted[1]}, got {got}")
    arguments = (k_pool, v_pool, k, v, page_table, first_row, valid)
    kernels = [Kernel(TRITON, _append_pallas, _unsupported(k_pool, v_pool, 0))]
    return dispatch(implementation, kernels, _append_reference, *arguments)


@functools.partial(jax.jit, static_argnames=("implementation",))
def move_rows(
    k_pools: list[Float[Array, "pages _ page _"]],
    v_pools: list[Float[Array, "pages _ page _"]],
    page_table: Int32[Array, "B P"],
    source_rows: Int32[Array, "B T"],
    target_rows: Int32[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    implementation: Implementation = "auto",
) -> tuple[list[Array], list[Array]]:
    """Copies cache row source_rows[b, t] of sequence b to row target_rows[b, t] in every layer, where valid[b, t].

    This commits a tree's accepted path. All source rows are read before any target row is written, so source and target
    rows may overlap. The target rows of a sequence must be distinct.

    Args:
        k_pools, v_pools: pools of every layer, of one dtype, with pages of one size. One kernel moves rows of up to
            eight layers whose pools have the same shapes.
        page_table: page numbers [B, P].
        source_rows, target_rows: row numbers [B, T].
        valid: whether each row is copied [B, T].
        implementation: as in `paged_attention`.

    Returns:
        The new pools, which take the memory of the old pools if the old pools are donated.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the number of rows or the
            pools' dtype.
    """
    alike: dict[Any, list[int]] = {}  # layers by the shapes of their pools
    for layer, (k, v) in enumerate(zip(k_pools, v_pools, strict=True)):
        check_pools(k, v)
        if k.shape[::2] != k_pools[0].shape[::2]:
            raise ValueError(f"the pages of all layers must be alike, got pools {k.shape} beside {k_pools[0].shape}")
        alike.setdefault((k.shape, v.shape), []).append(layer)
    moved: dict[int, tuple[Array, Array]] = {}
    for layers in alike.values():
        for first in range(0, len(layers), LAYERS):
            some = layers[first : first + LAYERS]
            pools = [k_pools[layer] for layer in some], [v_pools[layer] for layer in some]
            kernels = [Kernel(TRITON, _move_pallas, _unsupported(pools[0][0], pools[1][0], source_rows.shape[1]))]
            arguments = (*pools, page_table, source_rows, target_rows, valid)
            new_pools = dispatch(implementation, kernels, _move_reference, *arguments)
            moved |= dict(zip(some, zip(*new_pools, strict=True), strict=True))
    pairs = [moved[layer] for layer in range(len(k_pools))]
    return [k for k, _ in pairs], [v for _, v in pairs]
