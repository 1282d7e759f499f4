"""Test that attention kernels compiled for an H200 spill no registers, copy no pool and have the stated launches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import ancestor_bits, append, move_rows, paged_attention
from tests.support.h200 import H200Program, compile_for_h200

HEADS, KV_HEADS, PAGE, PAGES = 32, 8, 16, 2049  # Llama-3.1-8B


def shape(dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def compile_attention(
    batch=1,
    queries=5,
    dim=128,
    context=2048,
    page=PAGE,
    causal=False,
    start=0,
    dtype=jnp.bfloat16,
    pool_dtype=None,
    window=None,
) -> H200Program:
    pool = shape((PAGES, KV_HEADS, page, dim), pool_dtype or dtype)
    q, table = shape((batch, queries, HEADS, dim), dtype), shape((batch, context // page), jnp.int32)
    arrays = [q, pool, pool, table, shape((batch,), jnp.int32)]

    def attend(*arrays):
        own = (None,) if causal else ()
        return paged_attention(*arrays, *own, start=start, window=window, implementation="pallas")

    bits = [] if causal else [shape((batch, queries, -(-queries // 32)), jnp.uint32)]
    return compile_for_h200(attend, *arrays, *bits, fail_on_spills=True)


WIDE = pytest.param(jnp.float32, marks=pytest.mark.matrix, id="float32")


def more(*cases):
    """Mark cases that only -m matrix runs."""
    return [pytest.param(*case, marks=pytest.mark.matrix) for case in cases]


@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, id="bfloat16"), WIDE])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 5, 60])
def test_paged_attention_of_split_contexts_is_two_kernels_without_copies(queries, dim, dtype):
    program = compile_attention(queries=queries, dim=dim, dtype=dtype)
    assert [launch.name for launch in program.launches] == ["paged_attention", "paged_attention_merge"]
    assert not program.copies()
    partial_bytes = queries * HEADS * (2048 // 128) * (dim + 1) * 4
    assert program.temp_bytes <= 1.01 * partial_bytes + 1024


@pytest.mark.parametrize(("queries", "dim"), [(1, 128), (5, 256), (60, 128), (60, 256)])
def test_paged_attention_of_float8_pools_is_two_kernels_without_copies(queries, dim):
    program = compile_attention(queries=queries, dim=dim, pool_dtype=jnp.float8_e4m3fn)
    assert len(program.launches) == 2
    assert not program.copies()


@pytest.mark.parametrize(("queries", "causal"), [(1, True), (2048, True), (60, False), *more((5, True), (10, False))])
def test_paged_attention_with_a_window_copies_no_pool(queries, causal):
    """The numbers of queries are those of a draft: one root, a chunk of the prompt, and a tree."""
    program = compile_attention(queries=queries, causal=causal, context=16384, start=1, window=2048)
    assert len(program.launches) == (1 if queries == 2048 else 2)
    assert not program.copies()


@pytest.mark.parametrize(
    ("page", "start"), [(1, 0), (16, 1), (64, 0), (128, 1), *more((1, 1), (16, 0), (64, 1), (128, 0))]
)
def test_paged_attention_of_every_page_size_is_two_kernels(page, start):
    program = compile_attention(page=page, start=start)
    assert len(program.launches) == 2


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 64},
        {"batch": 32, "queries": 60},
        {"batch": 8, "queries": 60, "context": 32768},
        {"queries": 512, "causal": True, "context": 32768},
        {"queries": 2048, "causal": True, "context": 32768},
        {"batch": 8, "queries": 2048, "causal": True},
    ],
    ids=["batch", "trees", "long trees", "chunk", "prefill", "prefills"],
)
def test_paged_attention_of_many_queries_is_one_kernel(sizes):
    """The queries fill the GPU, so contexts are not split and nothing is merged."""
    program = compile_attention(**sizes)
    assert [launch.name for launch in program.launches] == ["paged_attention"]
    assert program.temp_bytes < 1024


def test_paged_attention_of_long_context_uses_at_most_16_mib_temporary_memory():
    """With a split for every 128 cache rows, 60 queries at 128k rows would need 1 GB for partial results."""
    program = compile_attention(queries=60, context=131072)
    assert 1 << 22 < program.temp_bytes <= 1 << 24


def pools():
    pool = shape((PAGES, KV_HEADS, PAGE, 128))
    return pool, pool, 2 * PAGES * KV_HEADS * PAGE * 128 * 2


def assert_in_place(program: H200Program, pool_bytes: int, name: str) -> None:
    assert [launch.name for launch in program.launches] == [name]
    assert program.alias_bytes == pool_bytes
    assert program.temp_bytes < 1024
    assert not program.copies()


@pytest.mark.parametrize("tokens", [1, 5, 60, 2048])
def test_cache_append_with_donated_pools_is_one_kernel_that_writes_in_place(tokens):
    k_pool, v_pool, pool_bytes = pools()
    new = shape((2, tokens, KV_HEADS, 128))
    arrays = (new, new, shape((2, 512), jnp.int32), shape((2,), jnp.int32), shape((2, tokens), jnp.bool))
    program = compile_for_h200(
        lambda *args: append(*args), k_pool, v_pool, *arrays, donate_argnums=(0, 1), fail_on_spills=True
    )
    assert_in_place(program, pool_bytes, "append_rows")


def test_cache_append_without_donated_pools_copies_them():
    """Negative control of the search for copies."""
    k_pool, v_pool, pool_bytes = pools()
    new = shape((2, 5, KV_HEADS, 128))
    arrays = (new, new, shape((2, 512), jnp.int32), shape((2,), jnp.int32), shape((2, 5), jnp.bool))
    program = compile_for_h200(append, k_pool, v_pool, *arrays)
    assert program.alias_bytes == 0
    assert len(program.copies(pool_bytes // 2)) == 2


def test_kernel_that_spills_registers_raises_when_compiled():
    """Negative control: the kernel needs more registers than one warp has."""

    def kernel(x_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = x / jnp.sum(x, axis=1, keepdims=True) + jnp.max(x, axis=0, keepdims=True)

    x = shape((128, 128), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=x, compiler_params=pltriton.CompilerParams(num_warps=1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="register spilling"):
        compile_for_h200(call, x, fail_on_spills=True)


@pytest.mark.parametrize("rows", [2, 9, 64])
def test_cache_row_move_with_donated_pools_is_one_kernel_that_writes_in_place(rows):
    k_pool, v_pool, pool_bytes = pools()
    arrays = (shape((2, 512), jnp.int32), *[shape((2, rows), jnp.int32)] * 2, shape((2, rows), jnp.bool))
    program = compile_for_h200(
        lambda *args: move_rows(*args), [k_pool], [v_pool], *arrays, donate_argnums=(0, 1), fail_on_spills=True
    )
    assert_in_place(program, pool_bytes, "move_rows")


def test_append_and_attention_and_row_move_of_three_layers_are_one_cuda_graph():
    """Each layer uses pools of its own, none of which is copied; the tree mask is built once for all layers."""
    k_pool, v_pool, pool_bytes = pools()
    layers, nodes = 3, 60

    def forward(caches, q, parents, table, lengths, valid):
        bits, out = ancestor_bits(parents), []
        for k_pool, v_pool in caches:
            k, v = q[:, :, :KV_HEADS], q[:, :, -KV_HEADS:]
            k_pool, v_pool = append(k_pool, v_pool, k, v, table, lengths, valid)
            q = q + paged_attention(q, k_pool, v_pool, table, lengths, bits)
            rows = lengths[:, None] + jnp.arange(8)
            out.append(move_rows([k_pool], [v_pool], table, 2 * rows, rows, valid[:, :8]))
        return q, out

    program = compile_for_h200(
        forward,
        [(k_pool, v_pool)] * layers,
        shape((1, nodes, HEADS, 128)),
        shape((1, nodes), jnp.int32),
        shape((1, 128), jnp.int32),
        shape((1,), jnp.int32),
        shape((1, nodes), jnp.bool),
        donate_argnums=0,
    )
    assert len(program.graphs) == 1
    assert not program.outside_graphs
    assert program.alias_bytes == layers * pool_bytes
    assert not program.copies(1 << 16)
    for name in ("append_rows", "paged_attention_merge", "move_rows"):
        assert program.count(name) == layers
    bits_and_glue = len(program.launches) - 4 * layers
    assert bits_and_glue <= 6 + 3 * layers  # per layer: a slice of K, one of V, and an addition
