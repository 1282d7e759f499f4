"""Test how `choose_tiles` divides attention of an 8B model on an H200; "program" means a Pallas program."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import HeadTransform, append_attention, paged_attention
from pallas_kernels.attention.scores import Scores
from pallas_kernels.attention.tiling import choose_tiles


def tiles_for(batch, queries, dim, rows, dtype):
    q = jax.ShapeDtypeStruct((batch, queries, 32, dim), jnp.bfloat16)
    pool, table = jax.ShapeDtypeStruct((9, 8, 16, dim), dtype), jax.ShapeDtypeStruct((batch, rows // 16), jnp.int32)
    return choose_tiles(q, pool, table, None, Scores(), new_rows=queries, wide=False)


@pytest.mark.parametrize(
    ("batch", "queries", "dim", "rows", "splits", "warps"),
    [
        (1, 64, 128, 1392, 4, 4),  # 128 programs, each of 348 rows of context
        (1, 64, 128, 4096, 8, 4),  # four splits would be 128 programs of 1024 rows
        (2, 64, 128, 1392, 4, 4),  # two splits would be 696 rows each
        (8, 64, 128, 1392, 1, 4),
        (1, 30, 128, 1392, 8, 4),
        (1, 512, 128, 1536, 1, 4),
        (8, 5, 128, 1392, 4, 4),
        (8, 5, 128, 8192, 8, 2),
        (32, 5, 128, 1392, 1, 4),
        (32, 5, 128, 8192, 2, 2),  # 512 programs, four per multiprocessor
        (32, 5, 64, 8192, 2, 2),
        (32, 5, 256, 8192, 1, 4),  # large programs: head_dim 256
        (4, 64, 128, 8192, 2, 4),
        (8, 64, 128, 8192, 1, 4),
        (48, 5, 128, 8192, 1, 2),  # twice as many programs would not run at the same time
        (64, 5, 128, 8192, 1, 2),
        (16, 5, 128, 1392, 2, 4),  # 256 large programs, two per multiprocessor
        (17, 5, 128, 1392, 3, 2),  # 272 large programs would run in two waves
        (31, 5, 128, 1392, 2, 2),
        (33, 5, 128, 1392, 1, 2),  # 264 programs: splitting would not save time
        (48, 5, 128, 1392, 1, 2),
    ],
)
def test_attention_tiling_of_few_sequences_splits_contexts_to_fill_the_gpu(batch, queries, dim, rows, splits, warps):
    tiles = tiles_for(batch, queries, dim, rows, jnp.bfloat16)
    assert (tiles.splits, tiles.packed, tiles.warps) == (splits, 32 if queries == 5 else 64, warps)


@pytest.mark.parametrize(
    ("batch", "queries", "kv_heads", "heads", "sizes"),  # sizes: splits, rows of a tile, warps
    [
        (1, 1, 4, 32, (17, 64, 4)),  # one tile each: 68 programs
        (2, 1, 4, 32, (9, 64, 4)),  # 17 would be 136 programs; 16 would leave one split two tiles, as 9 do
        (3, 1, 4, 32, (9, 64, 4)),
        (4, 1, 4, 32, (9, 32, 2)),  # 144 small programs, more than one per multiprocessor
        (1, 1, 8, 32, (9, 64, 4)),
        (2, 1, 8, 32, (9, 32, 2)),
        (1, 5, 4, 32, (17, 64, 4)),
        (2, 5, 4, 32, (9, 64, 4)),
        (1, 1, None, 16, (67, 16, 4)),  # latent attention of DeepSeek-V2-Lite
        (2, 1, None, 16, (34, 16, 4)),
        (4, 1, None, 16, (23, 16, 4)),
        (8, 1, None, 16, (17, 16, 4)),
        (16, 1, None, 16, (17, 16, 4)),
        (1, 5, None, 16, (34, 32, 8)),
        (16, 5, None, 16, (2, 32, 8)),
    ],
)
def test_attention_tiling_gives_each_multiprocessor_a_program_if_there_are_few(batch, queries, kv_heads, heads, sizes):
    """1072 rows of context, which are 17 tiles of 64 rows or 67 of 16; 132 multiprocessors."""
    dim, shapes = (576, [(1, 64), (1, 512)]) if kv_heads is None else (128, [(kv_heads, 128)] * 2)
    q = jax.ShapeDtypeStruct((batch, queries, heads, dim), jnp.bfloat16)
    k_pool, _ = (jax.ShapeDtypeStruct((9, count, 16, width), jnp.bfloat16) for count, width in shapes)
    table = jax.ShapeDtypeStruct((batch, 67), jnp.int32)
    tiles = choose_tiles(q, k_pool, table, None, Scores(), new_rows=queries, wide=False)
    assert (tiles.splits, tiles.tile, tiles.warps) == sizes


@pytest.mark.parametrize(
    ("queries", "kv_heads", "rows", "splits", "plain"),  # plain: splits of a context if the result is not quantised
    [
        (1, 4, 1072, 9, 17),
        (5, 4, 1072, 9, 17),
        (1, 4, 2048, 16, 32),
        (1, 4, 2064, 33, 33),  # 17 splits of 128 rows are already too many for one kernel
        (1, 8, 1072, 9, 9),
        (1, 8, 2048, 16, 16),
    ],
)
def test_attention_tiling_splits_contexts_for_one_kernel_that_merges_and_quantises(
    queries, kv_heads, rows, splits, plain
):
    """The kernel merges at most 16 splits."""
    q = jax.ShapeDtypeStruct((1, queries, 32, 128), jnp.bfloat16)
    pool, table = jax.ShapeDtypeStruct((9, kv_heads, 16, 128), jnp.bfloat16), jax.ShapeDtypeStruct((1, rows // 16), int)
    options = {"new_rows": queries, "wide": False}
    found = [
        choose_tiles(q, pool, table, None, Scores(), quantized=quantized, **options) for quantized in (True, False)
    ]
    assert [(tiles.splits, tiles.tile, tiles.warps) for tiles in found] == [(splits, 64, 4), (plain, 64, 4)]


@pytest.mark.parametrize("rows", [1072, 2064])
@pytest.mark.parametrize("appends", [False, True])
def test_attention_of_short_contexts_is_quantised_by_the_kernel_that_merges_splits(appends, rows):
    """One sequence, 4 KV heads."""
    shape, floats = jax.ShapeDtypeStruct, jnp.bfloat16
    pool, table, length = shape((9, 4, 16, 128), floats), shape((1, rows // 16), jnp.int32), shape((1,), jnp.int32)
    if appends:
        attend = partial(append_attention, heads=32, dtype=floats)
        new = shape((1, 1, 1, 40 * 128), floats), HeadTransform(shape((2, 1, 1, 64), jnp.float32))
        arguments = (pool, pool, *new, table, length, shape((1, 1), bool), None)
    else:
        attend, arguments = paged_attention, (shape((1, 1, 32, 128), floats), pool, pool, table, length, None)
    program = str(jax.make_jaxpr(partial(attend, quantize_output=True, implementation="pallas"))(*arguments))
    names = "paged_attention_merge_and_round", "quantize_rows"
    assert [name in program for name in names] == [rows < 2048, rows > 2048]


@pytest.mark.parametrize(("dim", "dtype"), [(64, jnp.bfloat16), (128, jnp.float8_e4m3fn)])
@pytest.mark.parametrize(("batch", "splits", "warps"), [(11, 3, 4), (12, 5, 2), (16, 4, 2), (31, 2, 2), (32, 1, 2)])
def test_attention_tiling_of_small_head_dim_uses_two_warps_from_12_sequences(batch, splits, warps, dim, dtype):
    tiles = tiles_for(batch, 5, dim, 1392, dtype)
    assert (tiles.splits, tiles.packed, tiles.warps) == (splits, 32, warps)
