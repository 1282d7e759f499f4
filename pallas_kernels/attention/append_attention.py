"""Rotates queries and keys, writes keys and values to the cache, and attends, in one kernel instead of two.

`paged_attention` divides a context into splits, and a tile of the context is read only by Pallas programs of one split.
So each program can write the new rows in its own tiles before it reads them. If several programs work on one split,
each of them writes the same values. Every program rotates its own queries.

The result equals that of `rotate_append` followed by `paged_attention`, provided that each page with new rows belongs
to one sequence only.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.attention.ancestor_bits import bits_of_chunk, num_words
from pallas_kernels.attention.kernel import KVRefs, attend
from pallas_kernels.attention.kv_pages import PagedKV, Pool
from pallas_kernels.attention.paged_attention import (
    arithmetic,
    paged_attention,
    run_kernels,
    unsupported,
)
from pallas_kernels.attention.reference import compute_dtype
from pallas_kernels.attention.rope_append import (
    KEYS,
    QUERIES,
    HeadTransform,
    check_heads,
    column_loader,
    load_cos_sin,
    load_norm,
    load_normed,
    load_rotated,
    rotate_append,
    written_rows,
)
from pallas_kernels.attention.scores import Scores
from pallas_kernels.attention.tiling import choose_tiles
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.partial_sums import PartialSums, Scaled
from pallas_kernels.layers.quantize_rows import FP8
from pallas_kernels.layers.weights import QuantizedActivation

MOST_ROWS = 8  # most new rows per sequence in one kernel; 60 rows took 19.5 us in one kernel, 2.9 + 12.5 us in two


def _kernel(
    # inputs
    qkv_ref,  # [parts, B, T, (H + 2 KH) * D]
    _k_in,  # [pages, KH, page, D]; k_ref aliases it
    _v_in,
    page_table_ref,  # [B, P] int32
    lengths_ref,  # [B] int32, committed rows
    mask_ref,  # [B, T, W] uint32; None: causal
    sinks_ref,  # as in `attend`
    transform,  # a `HeadTransform` of references
    pool_row_ref,  # [B, T] int32: page * page size + row in the page; -1: no row
    *refs,  # outputs: as in `attend`, then k_ref and v_ref [pages, KH, page, D]
    # static parameters
    tiles,
    arithmetic,
    heads,  # query heads
    dtype,  # of the queries: the model's dtype
):
    """Writes the new rows in the tiles of one split, then attends to the split, in one Pallas program (`attend`)."""
    *out_refs, k_ref, v_ref = refs
    kv_head, sequence, half = pl.program_id(1), pl.program_id(2), transform.cos_sin.shape[-1]
    split, (_, kv_heads, page, dim), tokens = pl.program_id(0) % tiles.splits, k_ref.shape, qkv_ref.shape[2]
    length = lengths_ref[sequence]

    def load_queries(query, head, layouts):
        """Writes the new rows of this program's split, and returns the program's rotated queries.

        All loads are issued before any result is used.
        """
        (layout,) = layouts
        channels = layout.channels

        def columns(token):
            return column_loader(qkv_ref, (), transform.bias, sequence, token, dtype)

        def rotated(token, head, rows, tables, weight_ref):
            mask = layout.load_mask(rows)
            cos_sin = load_cos_sin(transform.cos_sin, (sequence, token), channels[0], mask, tables)
            norm = load_norm(weight_ref, transform.eps, channels, layout.load_mask(1))
            halves = load_rotated(columns(token), head * dim, channels, norm, cos_sin, mask)
            return [half.astype(dtype) for half in halves]

        queries = rotated(query[:, None], head[:, None], tiles.packed, QUERIES, transform.q_norm)
        # Load all new rows, and write only the rows in tiles of this split.
        count = pl.next_power_of_2(tokens)
        row = jnp.arange(count)[:, None]
        is_own = (row < tokens) & ((length + row) // tiles.tile % tiles.splits == split)
        token = jnp.minimum(row, tokens - 1)
        pool_row = jnp.where(is_own, pltriton.load(pool_row_ref.at[sequence, token]), -1)
        key = rotated(token, heads + kv_head, count, KEYS, transform.k_norm)
        norm = load_norm(transform.v_norm, transform.eps, channels, layout.load_mask(1))
        start = (heads + kv_heads + kv_head) * dim
        value = load_normed(columns(token), start, channels, norm, layout.load_mask(count))
        mask = (pool_row >= 0) & (channels[0] < half)
        for part, *new in zip(channels, key, value, strict=True):
            for ref, values in zip((k_ref, v_ref), new, strict=True):
                at = (pool_row // page, kv_head, pool_row % page, part)
                pltriton.store(ref.at[at], values.astype(ref.dtype), mask=mask)
        if not arithmetic.interpret:
            pltriton.debug_barrier()  # all threads have written before any thread reads
        return queries

    kv = KVRefs(k_ref, v_ref, page_table_ref, lengths_ref, mask_ref)
    attend(load_queries, kv, sinks_ref, out_refs, parts=2, tiles=tiles, arithmetic=arithmetic)


def _pallas(kv, new, bits, sinks, *, heads, scores, dtype, quantize_output, interpret):
    qkv, transform, valid = new
    q = jax.ShapeDtypeStruct((*valid.shape, heads, kv.k.shape[3]), dtype)
    sizes = {"new_rows": valid.shape[1], "quantized": quantize_output}
    tiles = choose_tiles(q, kv.k, kv.page_table, bits, scores, wide=compute_dtype(q, kv.k) == jnp.float32, **sizes)
    bits = None if bits is None else bits_of_chunk(bits, kv.lengths, scores.chunk)
    pool_rows = written_rows(kv.page_table, kv.lengths, valid, kv.k.shape[2])
    inputs = (qkv, *kv, bits, sinks, transform, pool_rows)
    kernel = functools.partial(_kernel, heads=heads, dtype=dtype)
    how = arithmetic(q, kv.k, scores, interpret)
    options = {"q": q, "tiles": tiles, "arithmetic": how, "quantize_output": quantize_output, "pools": (1, 2)}
    return tuple(run_kernels(kernel, inputs, name="append_attention", **options))


def _two_kernels(kv, new, bits, sinks, *, heads, scores, dtype, quantize_output, implementation):
    """Returns the result of `append_attention`, computed by `rotate_append` followed by `paged_attention`."""
    qkv, transform, valid = new
    rows = kv.page_table, kv.lengths
    q, *pools = rotate_append(
        kv.k, kv.v, qkv, transform, *rows, valid, heads=heads, dtype=dtype, implementation=implementation
    )
    options = {"quantize_output": quantize_output, "implementation": implementation, **dataclasses.asdict(scores)}
    return paged_attention(q, *pools, *rows, bits, sinks, **options), *pools


@functools.partial(
    jax.jit,
    static_argnames=(
        "heads",
        "start",
        "window",
        "chunk",
        "scale",
        "softcap",
        "dtype",
        "quantize_output",
        "implementation",
    ),
)
def append_attention(
    k_pool: Pool,
    v_pool: Pool,
    qkv: PartialSums,
    transform: HeadTransform,
    page_table: Int32[Array, "B P"],
    lengths: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    bits: UInt32[Array, "B T W"] | None,
    sinks: Float[Array, " heads"] | None = None,
    *,
    heads: int,
    dtype: jnp.dtype,
    start: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    quantize_output: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T H D"] | QuantizedActivation, Pool, Pool]:
    """Writes keys and values of new rows to the cache from row lengths[b] on, and returns the new rows' attention.

    One kernel does this if a sequence has up to 8 new rows, the pools have two or four bytes per value, and the
    projection has no scales. Otherwise two kernels run.

    Args:
        k_pool, v_pool, qkv, transform, valid, heads, dtype: as in `rotate_append`.
        page_table: page numbers [B, P]; a page with new rows must belong to one sequence only.
        lengths, bits, sinks, start, window, chunk, scale, softcap, quantize_output: as in `paged_attention`; each query
            has one new row.
        implementation: as in `paged_attention`.

    Returns:
        The attention [B, T, H, D] in `dtype`, or quantised from `dtype`; and the two new pools, which take the memory
        of the old pools if the old pools are donated.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernels do not support the shape or dtype.
    """
    check_heads(qkv, k_pool, heads, transform)
    scores = Scores(1.0 / math.sqrt(k_pool.shape[3]) if scale is None else scale, softcap, window, chunk, start)
    scores.check(heads, sinks)
    tokens = valid.shape[1]
    if bits is not None and bits.shape != (*valid.shape, num_words(tokens)):
        raise ValueError(f"bits must be {(*valid.shape, num_words(tokens))}, got {bits.shape}")
    arguments = PagedKV(k_pool, v_pool, page_table, lengths), (qkv, transform, valid), bits, sinks
    options = {"heads": heads, "scores": scores, "dtype": dtype, "quantize_output": quantize_output}
    kernel, two_kernels = (functools.partial(run, **options) for run in (_pallas, _two_kernels))
    q = jax.ShapeDtypeStruct((*valid.shape, heads, k_pool.shape[3]), jnp.dtype(dtype))
    if tokens > MOST_ROWS or k_pool.dtype == FP8 or isinstance(qkv, Scaled) or unsupported(q, k_pool, bits):
        return two_kernels(*arguments, implementation=implementation)
    reference = functools.partial(two_kernels, implementation="reference")
    return dispatch(implementation, [Kernel(TRITON, kernel)], reference, *arguments)
