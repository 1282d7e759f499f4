"""Rotate queries and keys, write keys and values to their pages, and attend, in one kernel: `rotary`'s launch less.

A program of `paged_attention` reads tiles of a context that no program of another share reads. So it can write the new
rows in its own tiles itself, before it reads them; where a share's queries are dealt to several programs, each writes
the same. Queries are rotated by whoever needs them. What is computed: `rotate_append`, then `paged_attention`, where
pages that new rows go to are in the table of one sequence alone.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.attention.ancestor_bits import num_words
from pallas_kernels.attention.kernel import attend
from pallas_kernels.attention.kv_pages import Pool
from pallas_kernels.attention.paged_attention import paged_attention, run_kernels, unsupported
from pallas_kernels.attention.reference import compute_dtype
from pallas_kernels.attention.rope_append import check_width, columns_of, new_rows, rotate_append, rotated, turn_of
from pallas_kernels.attention.tiling import choose_tiles
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.quantized import FP8, PartialSums, QuantizedActivation, Scaled

MOST_ROWS = 8  # of a sequence: a tree of 60 nodes took 19.5 us so, and 12.5 and 2.9 in two kernels


def _kernel(qkv_ref, _k_in, _v_in, table_ref, lengths_ref, *refs, tiles, heads, dtype, interpret, **options):
    """One program of `paged_attention`'s first kernel, with what it needs of the projection."""
    seen_ref, turn_ref, place_ref, *outputs, k_ref, v_ref = refs if tiles.words else (None, *refs)
    kv_head, sequence, half = pl.program_id(1), pl.program_id(2), turn_ref.shape[-1]
    piece, (_, kv_heads, page, dim), tokens = pl.program_id(0) % tiles.splits, k_ref.shape, qkv_ref.shape[2]
    length = lengths_ref[sequence]

    def queries(query, head, channels, hidden):
        """Reads all that is asked for of the projection at once; a program writes what lies in its own tiles."""

        def columns(token):
            return columns_of(qkv_ref, (), sequence, token, dtype)

        def turned(token, head, rows):
            turn = turn_of(turn_ref, sequence, token, channels[0], hidden(rows))
            halves = rotated(columns(token), head * dim, channels, turn, hidden(rows))
            return [half.astype(dtype) for half in halves]

        of_query = turned(query[:, None], head[:, None], tiles.packed)
        row = jnp.arange(MOST_ROWS)[:, None]
        is_own = (row < tokens) & ((length + row) // tiles.tile % tiles.splits == piece)
        token = jnp.minimum(row, tokens - 1)
        place = jnp.where(is_own, pltriton.load(place_ref.at[sequence, token]), -1)
        key = turned(token, heads + kv_head, MOST_ROWS)
        start = (heads + kv_heads + kv_head) * dim
        value = [columns(token)(start + part, hidden(MOST_ROWS)) for part in channels]
        written = (place >= 0) & (channels[0] < half)
        for part, *new in zip(channels, key, value, strict=True):
            for ref, numbers in zip((k_ref, v_ref), new, strict=True):
                at = (place // page, kv_head, place % page, part)
                pltriton.store(ref.at[at], numbers.astype(ref.dtype), mask=written)
        if not interpret:
            pltriton.debug_barrier()  # every thread has written before one reads
        return of_query

    arguments = (queries, k_ref, v_ref, table_ref, lengths_ref, seen_ref, outputs)
    attend(*arguments, parts=2, tiles=tiles, interpret=interpret, **options)


def _pallas(
    k_pool,
    v_pool,
    qkv,
    positions,
    speeds,
    page_table,
    lengths,
    valid,
    bits,
    *,
    heads,
    start,
    dtype,
    quantize_output,
    interpret,
):
    q = jax.ShapeDtypeStruct((*valid.shape, heads, k_pool.shape[3]), dtype)
    wide, tokens = compute_dtype(q, k_pool) == jnp.float32, valid.shape[1]
    tiles = choose_tiles(q, k_pool, page_table, bits, new_rows=tokens, start=start, window=None, wide=wide)
    qkv, *new = new_rows(qkv, positions, speeds, page_table, lengths, valid, k_pool.shape[2])
    inputs = (qkv, k_pool, v_pool, page_table, lengths, *([] if bits is None else [bits]), *new)
    kernel = functools.partial(_kernel, heads=heads, dtype=dtype)
    options = {"q": q, "k_pool": k_pool, "tiles": tiles, "quantize_output": quantize_output, "interpret": interpret}
    scale = 1.0 / math.sqrt(q.shape[-1])
    return tuple(run_kernels(kernel, inputs, name="append_attention", pools=(1, 2), scale=scale, **options))


def _two(*arguments, heads, start, dtype, quantize_output, implementation):
    *inputs, bits = arguments
    q, *pools = rotate_append(*inputs, heads=heads, dtype=dtype, implementation=implementation)
    page_table, lengths = inputs[5:7]
    options = {"start": start, "quantize_output": quantize_output, "implementation": implementation}
    out = paged_attention(q, *pools, page_table, lengths, bits, **options)
    return out, *pools


@functools.partial(jax.jit, static_argnames=("heads", "start", "dtype", "quantize_output", "implementation"))
def append_attention(
    k_pool: Pool,
    v_pool: Pool,
    qkv: PartialSums,
    positions: Int32[Array, "B T"],
    speeds: Float[Array, " half"],
    page_table: Int32[Array, "B P"],
    lengths: Int32[Array, " B"],
    valid: Bool[Array, "B T"],
    bits: UInt32[Array, "B T W"] | None,
    *,
    heads: int,
    dtype: jnp.dtype,
    start: int = 0,
    quantize_output: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "B T H D"] | QuantizedActivation, Pool, Pool]:
    """Attention of new rows, of which keys and values are written from row lengths[b] on.

    It is one kernel for up to 8 rows a sequence, pools of two or four bytes a number, and a projection that is scaled;
    else it is two.

    Args:
        qkv, positions, speeds, valid, heads, dtype: as in `rotate_append`.
        page_table: no two sequences share a page that new rows go to.
        lengths, bits, start, is_rounded: as in `paged_attention`; the queries' rows are the new ones.
        implementation: as in `paged_attention`.

    Returns:
        What was attended, in `dtype` or rounded from it, and the pools, in the memory of the old ones if donated.

    Raises:
        NotImplementedError: "pallas" with a shape or dtype that the kernel does not support.
    """
    check_width(qkv, k_pool, heads)
    tokens = valid.shape[1]
    if bits is not None and bits.shape != (*valid.shape, num_words(tokens)):
        raise ValueError(f"bits must be {(*valid.shape, num_words(tokens))}, got {bits.shape}")
    arguments = (k_pool, v_pool, qkv, positions, speeds, page_table, lengths, valid, bits)
    options = {"heads": heads, "start": start, "dtype": dtype, "quantize_output": quantize_output}
    kernel, two = (functools.partial(run, **options) for run in (_pallas, _two))
    q = jax.ShapeDtypeStruct((*valid.shape, heads, k_pool.shape[3]), jnp.dtype(dtype))
    if tokens > MOST_ROWS or k_pool.dtype == FP8 or isinstance(qkv, Scaled) or unsupported(q, k_pool, bits):
        return two(*arguments, implementation=implementation)
    return dispatch(implementation, None, kernel, functools.partial(two, implementation="reference"), *arguments)
