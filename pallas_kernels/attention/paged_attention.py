"""Attention over a paged KV cache, for the queries of a few new rows (the nodes of a draft tree, or a prefill chunk).

    out[b,t,h] = sum_r softmax_r(scale * q[b,t,h] . K[b,r,h // G]) V[b,r,h // G],      G = H / KH

Query t of sequence b sees row r if r >= start and one of these is true:
    r < lengths[b]                                       the row is committed
    r = lengths[b] + j and bit j of bits[b,t] is set     the row is one of M new rows; without bits: j <= t, and M = T
If a chunk size is given, query t sees rows of its own chunk only: rows r with p - p mod chunk <= r, for its own row p
of the text, where new rows follow the committed ones along the query's path. If a window is given, query t sees the
newest `window` of these rows only, its own row included: a query that sees n new rows up to its own sees the committed
rows r >= lengths[b] + n - window, and all new rows whose bit is set. With bits or paths, n must be from 1 to the
window.

With a softcap, a score x = scale * q . K becomes softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118). With sinks,
exp(sinks[h]) is added to the sum that divides the softmax (gpt-oss, arXiv:2508.10925).

Row r of sequence b is at pool[page_table[b, r // page], :, r % page]; pools are [pages, KH, page, D]. bits[b,t] has
ceil(M/32) words; bit j % 32 of word j // 32 is set if query t sees new row j.

Keys and values of a row may share channels (latent attention, arXiv:2405.04434): if q has D + DV channels for pools of
D and DV channels, the key is the row of v_pool followed by that of k_pool, and the value is the row of v_pool.

Deterministic attention returns identical outputs for a query, bit for bit, in all calls in which the query sees equal
keys and values. It takes paths instead of bits: query t sees row lengths[b] + paths[b,t,d] at position lengths[b] + d.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.attention.ancestor_bits import bits_of_chunk, num_words
from pallas_kernels.attention.kernel import attend_kernel
from pallas_kernels.attention.kv_pages import HEAD_DIMS, POOL_DTYPES, PagedKV, check_pools
from pallas_kernels.attention.merge import MergeShape, merge_and_quantize_kernel, merge_kernel
from pallas_kernels.attention.reference import compute_dtype
from pallas_kernels.attention.scores import Scores
from pallas_kernels.attention.softmax import Arithmetic
from pallas_kernels.attention.tiling import MERGED, MMA_ROWS, AttentionTiles, choose_tiles, fixed_tiles, latent_dim
from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.quantize_rows import FP8, quantize_activation
from pallas_kernels.layers.weights import QuantizedActivation

MOST_OF_QUERY = 64 * 512  # most values of all heads of a query that one program of deterministic attention adds up
MOST_QUERIES = 128  # most queries per kernel call of deterministic attention, to limit the memory for splits' outputs


def _reference(*arguments, quantize_output, **options):
    out = attention_reference.reference(*arguments, **options)
    return quantize_heads(out, "reference") if quantize_output else out


def quantize_heads(out: Array, implementation: str) -> QuantizedActivation:
    """Quantises attention [B, T, H, D] to float8; all heads of a query form one row."""
    return quantize_activation(out.reshape(*out.shape[:2], -1), implementation=implementation)


def _pallas(q, kv, bits, sinks, *, scores, new_rows, quantize_output, interpret):
    sizes = {"new_rows": new_rows, "wide": compute_dtype(q, kv.k) == jnp.float32, "quantized": quantize_output}
    tiles = choose_tiles(q, kv.k, kv.page_table, bits, scores, **sizes)
    bits = None if bits is None else bits_of_chunk(bits, kv.lengths, scores.chunk)
    options = {"scores": scores, "quantize_output": quantize_output, "interpret": interpret}
    return _run(q, kv, bits, sinks, tiles=tiles, **options)


def _fixed_pallas(q, kv, paths, sinks, *, scores, interpret):
    outputs = []
    is_wide = compute_dtype(q, kv.k) == jnp.float32
    for first in range(0, q.shape[1], MOST_QUERIES):
        some = slice(first, first + MOST_QUERIES)
        part, path = q[:, some], None if paths is None else paths[:, some]
        committed = kv.lengths if path is not None else kv.lengths + first  # rows of earlier calls count as committed
        tiles = fixed_tiles(part, kv.k, kv.page_table, path, scores, wide=is_wide)
        options = {"scores": scores, "quantize_output": False, "interpret": interpret}
        outputs.append(_run(part, kv._replace(lengths=committed), path, sinks, tiles=tiles, **options))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def _run(q, kv, mask, sinks, *, tiles, scores, quantize_output, interpret):
    inputs = (q, *_pairs(kv.k, kv.v), kv.page_table, kv.lengths, mask, sinks)
    options = {"q": q, "tiles": tiles, "arithmetic": arithmetic(q, kv.k, scores, interpret)}
    return run_kernels(attend_kernel, inputs, name="paged_attention", quantize_output=quantize_output, **options)[0]


def arithmetic(q: Array | jax.ShapeDtypeStruct, k_pool: Array, scores: Scores, interpret: bool) -> Arithmetic:
    """Chooses how the kernel multiplies and adds, by the dtypes of queries and pools.

    Args:
        q: the queries, or their shape and dtype.
        k_pool: a pool.
        scores: factor and limit of the scores.
        interpret: whether the kernel is interpreted on a CPU.
    """
    dtype = compute_dtype(q, k_pool)
    # Three TF32 products are as exact as one float32 product, and run on tensor cores. A CPU has no TF32.
    three_products = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision = three_products if dtype == jnp.float32 and not interpret else jax.lax.Precision.HIGHEST
    return Arithmetic(scores.scale, scores.softcap, dtype, precision, interpret)


def run_kernels(
    kernel: Callable,
    inputs: Sequence[Any],
    *,
    q: Array | jax.ShapeDtypeStruct,
    tiles: AttentionTiles,
    arithmetic: Arithmetic,
    quantize_output: bool,
    name: str,
    pools: Sequence[int] = (),
) -> list[Any]:
    """Runs an attention kernel and, if contexts are split, the kernel that merges the splits.

    The merging kernel also quantises float8 output. A separate kernel does this if contexts are not split, or have more
    than 16 splits.

    Args:
        kernel: the attention kernel, a function of references.
        inputs: the kernel's inputs, in order: an array, the pools of K and V, the page table, the lengths, the mask or
            None, the sinks or None, and others.
        q: the queries, or their shape and dtype.
        tiles: static sizes of the call.
        arithmetic: how scores and sums are computed.
        quantize_output: return the attention as a `QuantizedActivation`.
        name: name of the attention kernel in profiles.
        pools: indices of the inputs that the kernel writes to.

    Returns:
        The attention, as an array [B, T, H, DV] or a `QuantizedActivation`; then the written inputs, in the order of
        `pools`.
    """
    batch, queries, heads, dim = q.shape
    interpret, sinks = arithmetic.interpret, inputs[6]
    dim = tiles.value_dim if tiles.is_latent else dim
    out = jax.ShapeDtypeStruct((batch, queries, heads, dim), q.dtype)
    partial_out = jax.ShapeDtypeStruct((batch, queries, heads, tiles.splits, dim), jnp.float32)
    log_sum_exp = jax.ShapeDtypeStruct((batch, queries, heads, tiles.splits), jnp.float32)
    attended = [out]
    if tiles.splits > 1:  # the merging kernel adds the sinks
        attended, inputs = [partial_out, log_sum_exp], (*inputs[:6], None, *inputs[7:])
    kv_heads = inputs[1].shape[1]
    outputs = pl.pallas_call(
        functools.partial(kernel, tiles=tiles, arithmetic=arithmetic),
        grid=(pl.cdiv(queries * tiles.span, tiles.packed) * tiles.splits, kv_heads, batch),
        out_shape=attended + [jax.ShapeDtypeStruct(inputs[pool].shape, inputs[pool].dtype) for pool in pools],
        input_output_aliases={pool: len(attended) + index for index, pool in enumerate(pools)},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name=name,
    )(*inputs)
    attended, written_pools = outputs[: len(attended)], outputs[len(attended) :]
    if quantize_output and 1 < tiles.splits <= MERGED:
        parts, log_sum_exp = attended
        return [_merge_and_quantize(parts, log_sum_exp, sinks, dtype=q.dtype, interpret=interpret), *written_pools]
    merged = attended[0]
    if tiles.splits > 1:
        shape = MergeShape.of(tiles.splits, dim)
        merged = pl.pallas_call(
            functools.partial(merge_kernel, shape=shape),
            grid=(heads * shape.blocks(dim), queries, batch),
            out_shape=out,
            compiler_params=pltriton.CompilerParams(num_warps=shape.warps, num_stages=1),
            interpret=interpret,
            name="paged_attention_merge",
        )(*attended, sinks)
    merged = quantize_heads(merged, "pallas" if interpret else "auto") if quantize_output else merged
    return [merged, *written_pools]


def _merge_and_quantize(parts, log_sum_exp, sinks, *, dtype, interpret):
    """Runs the kernel that merges the splits and quantises the result; `dtype` is the model's dtype."""
    batch, queries, heads, _, dim = parts.shape
    width = pl.next_power_of_2(heads) * pl.next_power_of_2(dim)
    values, scale = pl.pallas_call(
        functools.partial(merge_and_quantize_kernel, dtype=dtype),
        grid=(queries, batch),
        out_shape=[
            jax.ShapeDtypeStruct((batch, queries, heads, dim), FP8),
            jax.ShapeDtypeStruct((batch, queries), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=min(max(width // 128, 1), 32), num_stages=1),
        interpret=interpret,
        name="paged_attention_merge_and_round",
    )(parts, log_sum_exp, sinks)
    return QuantizedActivation(values.reshape(batch, queries, -1), scale, dtype)


def _pairs(*pools: Array) -> list[Array]:
    """Returns float8 pools viewed as pairs of channels, uint16 [pages, KH, page, D / 2]; XLA does not copy the pools.

    Pools of other dtypes, and pools of which one has fewer than 32 channels, are returned unchanged.
    """
    if pools[0].dtype != FP8 or min(pool.shape[-1] for pool in pools) < 2 * MMA_ROWS:
        return list(pools)
    by_pair = (pool.reshape(*pool.shape[:3], -1, 2) for pool in pools)
    return [jax.lax.bitcast_convert_type(pool, jnp.uint16) for pool in by_pair]


def most_query_heads(value_dim: int) -> int:
    """Returns the most query heads per KV head of deterministic attention, if a value has this number of channels."""
    return MOST_OF_QUERY // value_dim


def unsupported(
    q: Array | jax.ShapeDtypeStruct, k_pool: Array, bits: Array | None, *, deterministic: bool = False
) -> str | None:
    """Returns a text that says which limit of the kernel a call exceeds; None if the call is supported."""
    page, group = k_pool.shape[2], q.shape[2] // k_pool.shape[1]
    value_dim = latent_dim(q, k_pool) or q.shape[3]
    for dim in (k_pool.shape[3], value_dim):
        if dim not in HEAD_DIMS:
            return f"head_dim must be a multiple of 16 up to 512, got {dim}"
    if deterministic and group > (most := most_query_heads(value_dim)):
        return f"deterministic attention must have at most {most} query heads per KV head, got {group}"
    if page > 128:
        return f"the page size must be at most 128, got {page}"
    if bits is not None and bits.shape[-1] > 8:
        return f"bits can name at most 256 new rows, got {bits.shape[-1]} words"
    if unknown := {q.dtype, k_pool.dtype} - {*POOL_DTYPES} | {q.dtype} & {FP8}:
        return f"the dtype must be one of {', '.join(map(str, POOL_DTYPES))} (pools alone), got {unknown.pop()}"
    return None


def _check_arrays(q, kv):
    batch, _, heads, dim = q.shape
    k_pool, v_pool, page_table, lengths = kv
    check_pools(k_pool, v_pool)
    widths = k_pool.shape[3], v_pool.shape[3]
    if (widths != (dim, dim) and sum(widths) != dim) or heads % k_pool.shape[1]:
        expected = f"[pages, kv_heads, page, {dim}], or of {dim} channels together, with kv_heads dividing {heads}"
        raise ValueError(f"pools must be {expected}, got {k_pool.shape} and {v_pool.shape}")
    if page_table.shape[0] != batch or lengths.shape != (batch,):
        got = f"{page_table.shape} and {lengths.shape}"
        raise ValueError(f"page_table must be [{batch}, P] and lengths [{batch}], got {got}")


def _check_new_rows(q, bits, new_rows):
    batch, queries = q.shape[:2]
    if bits is not None and bits.shape != (batch, queries, num_words(new_rows)):
        raise ValueError(f"bits must be {(batch, queries, num_words(new_rows))}, got {bits.shape}")
    if bits is None and new_rows != queries:
        raise ValueError(f"without bits the {queries} queries are the new rows, got new_rows={new_rows}")


@functools.partial(
    jax.jit,
    static_argnames=(
        "new_rows",
        "start",
        "window",
        "chunk",
        "scale",
        "softcap",
        "quantize_output",
        "deterministic",
        "implementation",
    ),
)
def paged_attention(
    q: Float[Array, "B T H D"],
    k_pool: Float[Array, "pages KH page DK"],
    v_pool: Float[Array, "pages KH page DV"],
    page_table: Int32[Array, "B P"],
    lengths: Int32[Array, " B"],
    bits: UInt32[Array, "B T W"] | None,
    sinks: Float[Array, " heads"] | None = None,
    *,
    new_rows: int | None = None,
    start: int = 0,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    quantize_output: bool = False,
    deterministic: bool = False,
    paths: Int32[Array, "B T depths"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T H DV"] | QuantizedActivation:
    """Returns the attention of T queries per sequence over the committed rows of the cache and over new rows.

    The new rows are usually the rows of the queries. Their K and V must be in the pools already, from row lengths[b]
    on. Rows that no query sees may hold any value, even NaN. A padding node of a tree sees its own row, which was never
    written; the node's output is arbitrary, and no other output is affected. All other visible rows must be finite;
    infinities and NaN may be replaced by finite values.

    Args:
        q: queries [B, T, H, D].
        k_pool, v_pool: pages of keys [pages, KH, page, DK] and values [pages, KH, page, DV], of D channels each or
            together.
        page_table: page numbers [B, P], one for every `page` rows; rows past the table's end do not exist.
        lengths: number of committed rows of each sequence [B].
        bits: packed ancestor mask [B, T, W] (`ancestor_bits`); None: causal (prefill chunks). With
            chunks, no query may see rows after its own.
        sinks: score of each query head's sink [H], which has no value; None: no sinks.
        new_rows: number M of new rows; None: T. M exceeds T if some new rows belong to queries of earlier calls, when a
            tree is computed level by level.
        start: first cache row that queries may see.
        window: size of the sliding window in rows, the query's own row included. Pages outside every query's window
            are not read. None: no window.
        chunk: rows of a chunk; a query sees rows of its own chunk only. Pages before the chunk of the first new row are
            not read. None: no chunks.
        scale: factor of the scores, above 1e-30; None: 1 / sqrt(D).
        softcap: limit of the scores, above 0; None: no limit.
        quantize_output: return a `QuantizedActivation` of rows [B, T, H * DV].
        deterministic: make the bits of a query's output depend only on the query, and on the sequence of keys and
            values that the query sees; with a window or chunks, also on the number of older rows.
        paths: replaces `bits` if `deterministic`; index of the new row that each query sees at each depth
            [B, T, depths]. The query's own row comes last, then -1. None: causal.
        implementation: "auto": the kernel if the program is compiled for an NVIDIA GPU and the kernel supports the
            shape (prefill too), else the reference; "pallas": the kernel, interpreted on a CPU; "reference": the
            reference.

    Returns:
        The attention [B, T, H, DV] in q's dtype, or quantised from q's dtype; zeros for a query that sees no row.
        Softmax and sums are computed in float32.

    Raises:
        ValueError: shapes do not fit each other, or options contradict each other.
        NotImplementedError: implementation is "pallas", and the kernel does not support the shape or dtype.
    """
    new_rows = q.shape[1] if new_rows is None else new_rows
    kv = PagedKV(k_pool, v_pool, page_table, lengths)
    _check_arrays(q, kv)
    _check_new_rows(q, bits, new_rows)
    scores = Scores(1.0 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, window, chunk, start)
    scores.check(q.shape[2], sinks)
    if paths is not None and not deterministic:
        raise ValueError("paths: expected deterministic=True, or bits instead")
    if deterministic:
        if bits is not None or quantize_output:
            raise ValueError(
                "deterministic: got bits or quantize_output; pass paths instead of bits, and leave out quantize_output"
            )
        runs = _fixed_pallas, attention_reference.fixed_reference
        kernel, reference = (functools.partial(run, scores=scores) for run in runs)
        reason = unsupported(q, k_pool, None, deterministic=True)
        return dispatch(implementation, [Kernel(TRITON, kernel, reason)], reference, q, kv, paths, sinks)
    options = {"scores": scores, "new_rows": new_rows, "quantize_output": quantize_output}
    reference, kernel = (functools.partial(run, **options) for run in (_reference, _pallas))
    kernels = [Kernel(TRITON, kernel, unsupported(q, k_pool, bits))]
    return dispatch(implementation, kernels, reference, q, kv, bits, sinks)
