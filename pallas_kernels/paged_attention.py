"""Attention of a few new rows (a tree of draft nodes, a prefill chunk) over a paged KV cache.

    out[b,t,h] = sum_r softmax_r(scale * q[b,t,h] . K[b,r,h // G]) V[b,r,h // G],      G = H / KH
    r < lengths[b]                                       the committed rows, seen by every query
    r = lengths[b] + j, if bit j of bits[b,t] is set     the M new rows; bits None means j <= t, and M = T
    r >= start                                           in either case
    r > lengths[b] - window, without bits + t            in either case, where a window is given

Row r of sequence b lives at pool[page_table[b, r // page], :, r % page], pools are [pages, KH, page, D].
bits[b,t] holds ceil(M/32) words, bit j % 32 of word j // 32 says that query t sees new row j.

Deterministic attention gives a query the same bits in every call in which it sees the same keys and values. A query
of a tree then names its rows instead of marking them: row lengths[b] + paths[b,t,d] is seen as if at lengths[b] + d.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.ancestor_bits import WORD, num_words
from pallas_kernels.attention_tiles import MMA_ROWS, choose_tiles, fixed_tiles
from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.kv_pages import HEAD_DIMS, POOL_DTYPES
from pallas_kernels.quantized import FP8
from pallas_kernels.row_blocks import in_row_blocks

MERGED = 16  # splits the merge reads at once
FIXED_TILE = 32  # rows of context that the deterministic reference reads in a step
MOST_QUERIES = 128  # of one deterministic call: its parts are the same for any context, and wide


def _visible(
    lengths: Array, bits: Array | None, queries: int, rows: int, start: int | Array, window: int | None
) -> Array:
    """Returns bool [B, T, rows]: does query t of sequence b see row r; `start` may be one for each sequence."""
    row = jnp.arange(rows, dtype=jnp.int32)
    new = row - lengths[:, None]
    if bits is None:
        own = new[:, None] <= jnp.arange(queries, dtype=jnp.int32)[:, None]
    else:
        own = jnp.zeros((1, 1, 1), bool)
        for word in range(bits.shape[-1]):
            bit = (bits[:, :, word, None] >> (new[:, None] % WORD).astype(jnp.uint32)) & 1
            own = own | ((new[:, None] // WORD == word) & (bit == 1))
    seen = (row >= jnp.reshape(start, (-1, 1, 1))) & ((new < 0)[:, None] | ((new[:, None] >= 0) & own))
    if window is None:
        return seen
    own_step = jnp.arange(queries, dtype=jnp.int32)[:, None] if bits is None else 0
    return seen & (new[:, None] > own_step - window)


def _gather(pool: Array, page_table: Array) -> Array:
    """Returns the rows of every sequence in order, [B, KH, P * page, D]."""
    batch, columns = page_table.shape
    _, heads, page, dim = pool.shape
    return pool[page_table].transpose(0, 2, 1, 3, 4).reshape(batch, heads, columns * page, dim)


def _recent(page_table: Array, lengths: Array, page: int, new_rows: int, window: int) -> tuple[Array, Array]:
    """Returns the columns of the table that hold the window and the new rows, and which row comes first in them."""
    columns = min(pl.cdiv(window + new_rows - 2, page) + 1, page_table.shape[1])
    first = jnp.clip((lengths - window + 1) // page, 0, page_table.shape[1] - columns)
    recent = jnp.take_along_axis(page_table, first[:, None] + jnp.arange(columns, dtype=jnp.int32), axis=1)
    return recent, first * page


def _reference(q, k_pool, v_pool, page_table, lengths, bits, *, new_rows, start, window, scale):
    batch, queries, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    if window is not None:
        page_table, skipped = _recent(page_table, lengths, k_pool.shape[2], new_rows, window)
        lengths, start = lengths - skipped, start - skipped
    group = heads // kv_heads
    keys, values = _gather(k_pool, page_table), _gather(v_pool, page_table).astype(jnp.float32)
    rows = keys.shape[2]
    visible = _visible(lengths, bits, queries, rows, start, window)
    # 0 * NaN is NaN: rows that no query sees are zeroed. A new row may be seen by its own padding query alone
    # (bits) and hold anything, so there what is not finite is zeroed as well.
    new = jnp.arange(rows) >= lengths[:, None]
    keep = visible.any(1)[:, None, :, None] & (~new[:, None, :, None] | jnp.isfinite(values))
    values = jnp.where(keep, values, 0)
    packed = q.reshape(batch, queries, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    keys = keys.astype(_compute_dtype(q, keys))
    packed = packed.reshape(batch, kv_heads, queries * group, dim)
    seen = jnp.repeat(visible, group, axis=1)[:, None]
    exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
    scores = jnp.where(seen, jnp.einsum("bkrd,bksd->bkrs", packed, keys, **exact) * scale, -jnp.inf)
    top = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bkrs,bksd->bkrd", weights, values, **exact)
    out = out / jnp.where(total == 0, 1.0, total)
    out = out.reshape(batch, kv_heads, queries, group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, queries, heads, dim).astype(q.dtype)


def _fixed_reference(q, k_pool, v_pool, page_table, lengths, paths, *, start, scale):
    """One query after the other, and for each its rows in order, tile by tile."""
    batch, queries, heads, dim = q.shape
    kv_heads, page = k_pool.shape[1:3]
    most = page_table.shape[1] * page
    causal = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32)[:, None, None], (batch, queries, 1, 1))[:, :, 0]
    exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}

    def one(q, table, length, path):
        q, table, length, path = (array[0] for array in (q, table, length, path))
        last = length + 1 + (path[0] if paths is None else jnp.sum(path >= 0) - 1)
        last = jnp.minimum(last, most)
        packed = q.reshape(kv_heads, heads // kv_heads, dim)

        def step(index, carry):
            acc, top, total = carry
            row = index * FIXED_TILE + jnp.arange(FIXED_TILE, dtype=jnp.int32)
            new = row - length
            place = row
            if paths is not None:
                place = jnp.where(new < 0, row, length + path[jnp.clip(new, 0, path.shape[0] - 1)])
            place = jnp.clip(place, 0, most - 1)
            k, v = (pool[table[place // page], :, place % page] for pool in (k_pool, v_pool))
            visible = (row >= start) & (row < last)
            v = v.astype(jnp.float32)
            v = jnp.where(visible[:, None, None] & ((new < 0)[:, None, None] | jnp.isfinite(v)), v, 0)
            scores = jnp.einsum("kgd,skd->kgs", packed, k.astype(_compute_dtype(q, k)), **exact) * scale
            scores = jnp.where(visible, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights, fade = jnp.exp(scores - base[..., None]), jnp.exp(top - base)
            acc = acc * fade[..., None] + jnp.einsum("kgs,skd->kgd", weights, v, **exact)
            return acc, new_top, total * fade + weights.sum(-1)

        sums = jnp.zeros((*packed.shape[:2],), jnp.float32)
        empty = (jnp.zeros(packed.shape, jnp.float32), jnp.full_like(sums, -jnp.inf), sums)
        acc, _, total = jax.lax.fori_loop(start // FIXED_TILE, pl.cdiv(last, FIXED_TILE), step, empty)
        return (acc / jnp.where(total == 0, 1.0, total)[..., None]).reshape(1, heads, dim).astype(q.dtype)

    per_query = (jnp.repeat(array, queries, axis=0) for array in (page_table, lengths))
    own = (causal if paths is None else paths).reshape(batch * queries, -1)
    out = in_row_blocks(one, q.reshape(-1, heads, dim), *per_query, own, size=1)
    return out.reshape(q.shape)


def _compute_dtype(q: Array, pool: Array) -> jnp.dtype:
    """In which scores and sums of values are multiplied."""
    if pool.dtype == FP8:
        return q.dtype if q.dtype == jnp.float32 else jnp.dtype(jnp.float16)
    return jnp.promote_types(q.dtype, pool.dtype)


def _attend_kernel(q_ref, k_ref, v_ref, table_ref, lengths_ref, *refs, tiles, scale, compute, precision, interpret):
    """One program: `packed` rows of one kv head over its share of the context, online softmax in base 2.

    Pools of one byte are read as pairs of numbers, even and odd channels apart.
    """
    outputs = refs[1:] if tiles.words or tiles.depths else refs  # refs are the bits or paths, if any, and the outputs
    batch, kv_head = pl.program_id(2), pl.program_id(1)
    piece, block = pl.program_id(0) % tiles.splits, pl.program_id(0) // tiles.splits
    packed = block * tiles.packed + jnp.arange(tiles.packed)
    query, head = packed // tiles.span, kv_head * tiles.group + packed % tiles.span
    inside, width = query < tiles.queries, pl.next_power_of_2(k_ref.shape[-1])
    if tiles.depths:
        inside &= packed % tiles.span < tiles.group
    apart = q_ref.shape[-1] // k_ref.shape[-1]
    columns = jnp.arange(width)[None, :]
    is_channel = columns < k_ref.shape[-1] if width > k_ref.shape[-1] else True
    channels = [columns * apart + half for half in range(apart)]
    length = lengths_ref[batch]
    new_rows = tiles.new  # that this program reads; causal: none past its own last query
    if not tiles.words and not tiles.depths:
        new_rows = jnp.minimum(((block + 1) * tiles.packed - 1) // tiles.group + 1, new_rows)
    first, last = jnp.minimum(tiles.start, length), jnp.minimum(length + new_rows, tiles.capacity)
    lowest = highest = tiles.start  # the first rows that any query here sees, and that all see
    if tiles.window:
        oldest = length - tiles.window + 1  # that the first query sees; causal: the next one sees from the next row on
        first = jnp.maximum(first, oldest + (0 if tiles.words else block * tiles.packed // tiles.group))
        lowest = highest = jnp.maximum(first, tiles.start)
        if not tiles.words:
            highest = jnp.maximum(lowest, oldest + ((block + 1) * tiles.packed - 1) // tiles.group)
    begin, end = (_own_tiles(tile, piece, tiles.splits) for tile in (first // tiles.tile, pl.cdiv(last, tiles.tile)))

    def attend():
        own_row, factor = (batch, query[:, None], head[:, None]), scale * math.log2(math.e)
        held = inside[:, None] & is_channel
        q = [pltriton.load(q_ref.at[(*own_row, dims)], mask=held, other=0) for dims in channels]
        if q[0].dtype != compute:  # of less range, perhaps
            q, factor = [half.astype(jnp.float32) * factor for half in q], 1.0
        q = [half.astype(compute) for half in q]
        seen = [pltriton.load(refs[0].at[batch, query, w], mask=inside, other=0) for w in range(tiles.words)]

        def rows_of(index):
            return (index * tiles.splits + piece) * tiles.tile + jnp.arange(tiles.tile)

        def places_of(index):
            """Loaded a step ahead: K and V are prefetched only if their addresses wait for nothing of the same step."""
            row = rows_of(index)
            if tiles.depths:
                own = refs[0].at[batch, block, jnp.clip(row - length, 0, tiles.depths - 1)]
                own = pltriton.load(own, mask=row >= length, other=0)
                row = jnp.where(row >= length, jnp.where(own < 0, tiles.capacity, length + own), row)
            page = pltriton.load(table_ref.at[batch, jnp.minimum(row, tiles.capacity - 1) // tiles.page])
            return (page, row) if tiles.depths else (page,)

        def step(index, carry, *, masked):
            acc, top, total, (pages, *place) = carry
            row = rows_of(index)
            (place,) = place or (row,)
            new = row - length
            loaded = (row < last) & (row >= lowest)
            if tiles.depths:
                loaded &= place < tiles.capacity
            at = (pages[:, None], kv_head, (place % tiles.page)[:, None], columns)
            mask = {"mask": loaded[:, None]} if masked else {}
            if is_channel is not True:
                whole = (loaded[:, None] if masked else True) & is_channel
                mask = {"mask": jnp.broadcast_to(whole, (tiles.tile, width)), "other": 0}
            k, v = (_numbers(pltriton.load(ref.at[at], **mask), compute, interpret) for ref in (k_ref, v_ref))
            scores = sum(pltriton.dot(*pair, trans_b=True, precision=precision) for pair in zip(q, k, strict=True))
            scores = scores * factor
            if masked:
                visible = loaded[None, :]
                if not tiles.depths:
                    visible &= (new < 0)[None, :] | _own(new, query, seen)
                if tiles.window and not tiles.words:
                    visible &= row[None, :] >= (oldest + query)[:, None]
                scores = jnp.where(visible, scores, -jnp.inf)
                # A row that was not loaded, or that only its own padding query sees, may be NaN, and so is 0 * NaN.
                sure = (loaded & (new < 0))[:, None]
                v = [jnp.where(sure | (jnp.abs(half) < jnp.inf), half, 0) for half in v]
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
            weights, fade = jnp.exp2(scores - base[:, None]), jnp.exp2(top - base)
            left = weights.astype(compute)
            acc = [a * fade[:, None] + pltriton.dot(left, b, precision=precision) for a, b in zip(acc, v, strict=True)]
            return acc, new_top, total * fade[:, None] + weights, places_of(index + 1)

        carry = (
            [jnp.zeros((tiles.packed, width), jnp.float32)] * apart,
            jnp.full((tiles.packed,), -jnp.inf, jnp.float32),
            jnp.zeros((tiles.packed, tiles.tile), jnp.float32),  # added up at the end: a reduction is a barrier
            places_of(begin),
        )
        masked, whole = functools.partial(step, masked=True), functools.partial(step, masked=False)
        whole_from = begin
        if tiles.start or tiles.window:
            whole_from = jnp.clip(_own_tiles(pl.cdiv(highest, tiles.tile), piece, tiles.splits), begin, end)
            carry = jax.lax.fori_loop(begin, whole_from, masked, carry)
        border = jnp.maximum(_own_tiles(jnp.minimum(length, last) // tiles.tile, piece, tiles.splits), whole_from)
        if tiles.fixed:  # one code for every tile: with masks others multiplications are fused with additions
            border = whole_from
        else:
            carry = jax.lax.fori_loop(whole_from, border, whole, carry)  # committed rows alone
        carry = jax.lax.fori_loop(border, end, masked, carry)
        acc, top, total, _ = carry
        total = jnp.sum(total, axis=1)
        place = (*own_row, piece) if tiles.splits > 1 else own_row
        for half, dims in zip(acc, channels, strict=True):
            out = (half / jnp.where(total == 0, 1.0, total)[:, None]).astype(outputs[0].dtype)
            pltriton.store(outputs[0].at[(*place, dims)], out, mask=held)
        if tiles.splits > 1:
            pltriton.store(outputs[1].at[batch, query, head, piece], top + jnp.log2(total), mask=inside)

    if tiles.splits == 1:
        attend()
    else:
        pl.when(begin < end)(attend)


def _own_tiles(tile: Array, piece: Array | int, splits: int) -> Array:
    """How many of the tiles before `tile` are a piece's, which has every so-many-th one.

    So all pieces have the same to do at any length, and whose a row is depends on where it stands alone.
    """
    return pl.cdiv(jnp.maximum(tile - piece, 0), splits)


def _numbers(loaded: Array, compute: jnp.dtype, interpret: bool) -> list[Array]:
    """Returns what was loaded in the dtype to compute in; of a pair of float8 first the even channels, then the odd.

    Pairs are what a tensor core's operand can be read by: a transposed one of single bytes would be read byte by byte.
    """
    if loaded.dtype != jnp.uint16:
        return [loaded.astype(compute)]
    if interpret:
        halves = [(loaded >> shift).astype(jnp.uint8) for shift in (0, 8)]
        return [jax.lax.bitcast_convert_type(half, FP8).astype(compute) for half in halves]
    halves = []
    for bytes_taken in ("0x20", "0x31"):  # of two pairs, one above the other
        halves += pltriton.elementwise_inline_asm(
            f"{{ .reg .b32 own; .reg .b16 pair; prmt.b32 own, $1, 0, {bytes_taken}; cvt.u16.u32 pair, own; "
            "cvt.rn.f16x2.e4m3x2 $0, pair; }",
            args=[loaded],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(loaded.shape, jnp.float16)],
        )
    return [half.astype(compute) for half in halves]


def _own(new: Array, query: Array, seen: list[Array]) -> Array:
    """Returns bool [packed, tile]: does a query see new row `new` >= 0; `seen`: its words, none if causal."""
    if not seen:
        return new[None, :] <= query[:, None]
    words = seen[0][:, None]
    for index, word in enumerate(seen[1:], 1):
        words = jnp.where((new // WORD == index)[None, :], word[:, None], words)
    return ((words >> (new & (WORD - 1)).astype(jnp.uint32)[None, :]) & 1) != 0


def _merge_kernel(parts_ref, weights_ref, lengths_ref, out_ref, *, tiles):
    """One program: the splits of one query head, weighted by 2**weights; only those that were written."""
    head, query, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length, dims = lengths_ref[batch], jnp.arange(pl.next_power_of_2(out_ref.shape[-1]))
    is_channel = dims < out_ref.shape[-1]
    new_rows = tiles.new if tiles.words or tiles.depths else query + 1
    first = jnp.minimum(tiles.start, length)
    if tiles.window:
        first = jnp.maximum(first, length - tiles.window + 1 + (0 if tiles.words else query))
    last = jnp.minimum(length + new_rows, tiles.capacity)
    first_tile, last_tile = first // tiles.tile, pl.cdiv(last, tiles.tile)

    def step(index, carry):
        acc, top, total = carry
        piece = index * MERGED + jnp.arange(MERGED)
        begin, end = (_own_tiles(tile, piece, tiles.splits) for tile in (first_tile, last_tile))
        written = (piece < tiles.splits) & (begin < end)
        weight = pltriton.load(weights_ref.at[batch, query, head, piece], mask=written, other=-jnp.inf)
        at = (batch, query, head, piece[:, None], dims[None, :])
        part = pltriton.load(parts_ref.at[at], mask=written[:, None] & is_channel[None, :], other=0)
        new_top = jnp.maximum(top, jnp.max(weight))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, fade = jnp.exp2(weight - base), jnp.exp2(top - base)
        acc = acc * fade + jnp.sum(part * weight[:, None], axis=0)
        return acc, new_top, total * fade + jnp.sum(weight)

    empty = (jnp.zeros(dims.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0))
    acc, _, total = jax.lax.fori_loop(0, pl.cdiv(tiles.splits, MERGED), step, empty)
    out = (acc / jnp.where(total == 0, 1.0, total)).astype(out_ref.dtype)
    pltriton.store(out_ref.at[batch, query, head, dims], out, mask=is_channel)


def _pallas(q, k_pool, v_pool, page_table, lengths, bits, *, new_rows, start, window, scale, interpret):
    wide = _compute_dtype(q, k_pool) == jnp.float32
    tiles = choose_tiles(q, k_pool, page_table, bits, new_rows=new_rows, start=start, window=window, wide=wide)
    return _run(q, k_pool, v_pool, page_table, lengths, bits, tiles=tiles, scale=scale, interpret=interpret)


def _fixed_pallas(q, k_pool, v_pool, page_table, lengths, paths, *, start, scale, interpret):
    wide, outputs = _compute_dtype(q, k_pool) == jnp.float32, []
    for first in range(0, q.shape[1], MOST_QUERIES):
        own = slice(first, first + MOST_QUERIES)
        part, path = q[:, own], None if paths is None else paths[:, own]
        before = lengths if path is not None else lengths + first  # as if committed
        tiles = fixed_tiles(part, k_pool, page_table, path, start=start, wide=wide)
        options = {"tiles": tiles, "scale": scale, "interpret": interpret}
        outputs.append(_run(part, k_pool, v_pool, page_table, before, path, **options))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=1)


def _run(q, k_pool, v_pool, page_table, lengths, bits, *, tiles, scale, interpret):
    """Two kernels (one where nothing is split): partial attention of every split, then their merge."""
    batch, queries, heads, dim = q.shape
    compute = _compute_dtype(q, k_pool)
    wide = compute == jnp.float32
    # Three TF32 products are as exact as one of float32, and run on tensor cores; a CPU has none.
    three_products = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    precision = three_products if wide and not interpret else jax.lax.Precision.HIGHEST
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    parts = jax.ShapeDtypeStruct((batch, queries, heads, tiles.splits, dim), jnp.float32)
    weights = jax.ShapeDtypeStruct((batch, queries, heads, tiles.splits), jnp.float32)
    options = {"tiles": tiles, "scale": scale, "compute": compute, "precision": precision, "interpret": interpret}
    attended = pl.pallas_call(
        functools.partial(_attend_kernel, **options),
        grid=(pl.cdiv(queries * tiles.span, tiles.packed) * tiles.splits, k_pool.shape[1], batch),
        out_shape=[out] if tiles.splits == 1 else [parts, weights],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="paged_attention",
    )(q, _pairs(k_pool), _pairs(v_pool), page_table, lengths, *([] if bits is None else [bits]))
    if tiles.splits == 1:
        return attended[0]
    return pl.pallas_call(
        functools.partial(_merge_kernel, tiles=tiles),
        grid=(heads, queries, batch),
        out_shape=out,
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="paged_attention_merge",
    )(*attended, lengths)


def _pairs(pool: Array) -> Array:
    """A pool of one byte a number as pairs of them, [pages, KH, page, D / 2] uint16; XLA copies nothing for it."""
    if pool.dtype != FP8 or pool.shape[-1] < 2 * MMA_ROWS:
        return pool
    return jax.lax.bitcast_convert_type(pool.reshape(*pool.shape[:3], -1, 2), jnp.uint16)


def _unsupported(q: Array, k_pool: Array, bits: Array | None) -> str | None:
    """Says which limit of the kernel a call breaks, if any."""
    dim, page = q.shape[-1], k_pool.shape[2]
    if dim not in HEAD_DIMS:
        return f"head_dim must be a multiple of 16 up to 256, got {dim}"
    if page > 128:
        return f"the page size must be at most 128, got {page}"
    if bits is not None and bits.shape[-1] > 8:
        return f"bits can name at most 256 new rows, got {bits.shape[-1]} words"
    if unknown := {q.dtype, k_pool.dtype} - {*POOL_DTYPES} | {q.dtype} & {FP8}:
        return f"the dtype must be one of {', '.join(map(str, POOL_DTYPES))} (pools alone), got {unknown.pop()}"
    return None


def _check(q, k_pool, v_pool, page_table, lengths, bits, new_rows, window):
    batch, queries, heads, dim = q.shape
    if k_pool.shape != v_pool.shape or k_pool.dtype != v_pool.dtype:
        got = f"{k_pool.shape} {k_pool.dtype} and {v_pool.shape} {v_pool.dtype}"
        raise ValueError(f"the pools of K and V must be alike, got {got}")
    if k_pool.shape[3] != dim or heads % k_pool.shape[1]:
        expected = f"[pages, kv_heads, page, {dim}] with kv_heads dividing {heads}"
        raise ValueError(f"pools must be {expected}, got {k_pool.shape}")
    if page_table.shape[0] != batch or lengths.shape != (batch,):
        got = f"{page_table.shape} and {lengths.shape}"
        raise ValueError(f"page_table must be [{batch}, P] and lengths [{batch}], got {got}")
    if bits is not None and bits.shape != (batch, queries, num_words(new_rows)):
        raise ValueError(f"bits must be {(batch, queries, num_words(new_rows))}, got {bits.shape}")
    if bits is None and new_rows != queries:
        raise ValueError(f"without bits the {queries} queries are the new rows, got new_rows={new_rows}")
    if window is not None and window < 1:
        raise ValueError(f"window must be None or at least 1, got {window}")


@functools.partial(jax.jit, static_argnames=("new_rows", "start", "window", "scale", "deterministic", "implementation"))
def paged_attention(
    q: Float[Array, "B T H D"],
    k_pool: Float[Array, "pages KH page D"],
    v_pool: Float[Array, "pages KH page D"],
    page_table: Int32[Array, "B P"],
    lengths: Int32[Array, " B"],
    bits: UInt32[Array, "B T W"] | None,
    *,
    new_rows: int | None = None,
    start: int = 0,
    window: int | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    paths: Int32[Array, "B T depths"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "B T H D"]:
    """Attention of T queries a sequence over its committed rows and over new ones, mostly their own.

    The new rows' K and V are already in the pools, from row lengths[b] on. What a query does not see may hold
    anything, NaN too. A padding node sees its own row, which nobody wrote: its output alone is arbitrary.

    Args:
        page_table: page of every `page` rows; rows past its end do not exist.
        lengths: committed rows.
        bits: the new rows each query sees (`ancestor_bits`, `causal_bits`); None is causal (prefill chunks).
        new_rows: M, where bits name others than the queries' own rows (the levels of a tree, one after the other).
        start: rows below it are hidden.
        window: rows from lengths[b] - window down are hidden, and without bits for each query after the first one row
            more; pages that hold only such are not read. None hides none.
        scale: of the scores; 1 / sqrt(D) if None.
        deterministic: a query's last bits depend on nothing but itself and the keys and values it sees, in their order.
        paths: with `deterministic`, instead of bits: the new row that query t sees at each depth, its own the last; -1
            beyond. None is causal.
        implementation: "auto" is the kernel where the program is compiled for an NVIDIA GPU and the shape is
            supported (prefill too), else the reference; "pallas" on a CPU interprets the kernel.

    Returns:
        In q's dtype, softmax and sums in float32; zeros for a query that sees nothing.

    Raises:
        NotImplementedError: "pallas" with a shape the kernel does not support.
    """
    new_rows = q.shape[1] if new_rows is None else new_rows
    _check(q, k_pool, v_pool, page_table, lengths, bits, new_rows, window)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    if paths is not None and not deterministic:
        raise ValueError("paths: expected deterministic=True, or bits instead")
    if deterministic:
        if bits is not None or window is not None:
            raise ValueError("deterministic: expected neither bits nor a window, which a draft alone has; name paths")
        kernel, reference = (
            functools.partial(run, start=start, scale=scale) for run in (_fixed_pallas, _fixed_reference)
        )
        unsupported, arguments = _unsupported(q, k_pool, None), (q, k_pool, v_pool, page_table, lengths, paths)
        return choose(implementation, unsupported, kernel, reference, *arguments)
    arguments = (q, k_pool, v_pool, page_table, lengths, bits)
    options = {"new_rows": new_rows, "start": start, "window": window, "scale": scale}
    reference, kernel = (functools.partial(run, **options) for run in (_reference, _pallas))
    return choose(implementation, _unsupported(q, k_pool, bits), kernel, reference, *arguments)
