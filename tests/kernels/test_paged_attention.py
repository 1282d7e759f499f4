"""Compare `paged_attention` with numpy: the reference, the kernel interpreted on a CPU, and the kernel on a GPU."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.attention import merge
from tests.conftest import MANY_MAPS, free_programs
from tests.kernels.problems import FACTORS, ROWS, AttentionCase, full_product, make_problem, pairwise_cover
from tests.kernels.test_quantize_rows import half_step_error
from tests.support import cover
from tests.support.arrays import on_device

COVER = pairwise_cover()
FP8 = [
    AttentionCase(dtype="bfloat16", pool="float8_e4m3fn"),
    AttentionCase(dtype="float32", pool="float8_e4m3fn", tree="causal", page=1, start=1, queries=17, dim=64),
    AttentionCase(dtype="bfloat16", pool="float8_e4m3fn", tree="padded", queries=60, dim=128, group=2, lengths="full"),
]
BETWEEN = [
    AttentionCase(dim=80),
    AttentionCase(dim=400, dtype="bfloat16", tree="padded", queries=5, group=8, lengths="full"),
    AttentionCase(dim=80, dtype="bfloat16", tree="padded", queries=60, group=2, lengths="full"),
    AttentionCase(dim=96, dtype="bfloat16", tree="causal", queries=17, start=1),
    AttentionCase(dim=176, window=40, queries=17, tree="random"),
    AttentionCase(dim=80, dtype="bfloat16", pool="float8_e4m3fn"),
    AttentionCase(dim=96, queries=1, tree="causal", lengths="zero"),
    AttentionCase(dim=400, dtype="bfloat16", tree="padded", queries=17, group=8, lengths="full"),
]
WINDOWS = [
    AttentionCase(window=1, queries=1, tree="causal", page=1, start=1),
    AttentionCase(window=129, queries=17, tree="padded", start=1, dtype="bfloat16"),
    AttentionCase(window=17, queries=17, tree="block"),
    AttentionCase(window=16, queries=1, tree="causal", group=2),
    AttentionCase(window=ROWS, tree="random"),
    AttentionCase(window=7, queries=17, tree="causal", lengths="full"),
    AttentionCase(window=100, queries=60, tree="causal", start=1),
    AttentionCase(window=90, queries=60, tree="chain", dim=64, lengths="full"),
    AttentionCase(window=5, tree="random", page=64, lengths="full"),
    AttentionCase(window=70, queries=60, tree="block", start=1, dtype="bfloat16", lengths="full"),
    AttentionCase(window=40, queries=17, tree="random", lengths="zero"),
    AttentionCase(window=33, tree="random", dtype="bfloat16", pool="float8_e4m3fn"),
]
QUANTIZED_OUTPUT = [  # contexts have three splits
    AttentionCase(dtype="bfloat16", dim=64),
    AttentionCase(dtype="float32", tree="causal", start=1, queries=17, group=1, dim=16),
    AttentionCase(dtype="bfloat16", group=3, dim=80, lengths="zero"),
    AttentionCase(dtype="bfloat16", window=33, softcap=2.0, sinks=True),
    AttentionCase(dtype="bfloat16", pool="float8_e4m3fn", tree="padded", dim=128, group=2, lengths="full"),
]
PROBLEMS = functools.lru_cache(maxsize=4)(make_problem)


def check(case: AttentionCase, implementation: str) -> None:
    problem = PROBLEMS(case)
    out = paged_attention(*problem.arrays, **problem.options, implementation=implementation)
    assert out.dtype == problem.q.dtype
    assert problem.error(out) <= problem.tolerance


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(COVER, 4, is_thinned=True))
def test_paged_attention_of_random_trees_matches_float64(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(FP8, 1))
def test_paged_attention_of_float8_pools_matches_float64(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(BETWEEN, 2, is_thinned=True))
def test_paged_attention_of_head_dim_between_powers_of_two_matches_float64(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(WINDOWS, 3, is_thinned=True))
def test_paged_attention_with_a_window_ignores_older_rows(case, implementation):
    """Cache rows outside the window hold NaN."""
    check(case, implementation)


def check_quantized_output(case: AttentionCase, implementation: str) -> None:
    """Assert that quantised attention is off by at most half a float8 step: 2**-4 of a value or 2**-10 of its scale."""
    problem = PROBLEMS(case)
    quantized = paged_attention(*problem.arrays, **problem.options, quantize_output=True, implementation=implementation)
    values, scale = (np.asarray(array, np.float64) for array in (quantized.values, quantized.scale))
    assert quantized.values.dtype == jnp.float8_e4m3fn and quantized.dtype == problem.q.dtype
    wanted = problem.expected.reshape(values.shape)
    largest = np.abs(wanted).max(-1)
    assert (np.abs(scale * 448 - largest) <= problem.tolerance)[problem.real].all()
    allowed = problem.tolerance + np.maximum(2**-4 * np.abs(wanted), 2**-10 * scale[..., None])
    assert (np.abs(values * scale[..., None] - wanted) <= allowed)[problem.real].all()
    assert (values[largest == 0] == 0).all()
    assert (np.abs(values[problem.real & (largest > 0)]).max(-1) == 448).all()


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(QUANTIZED_OUTPUT, 2))
def test_paged_attention_with_quantize_output_matches_float64(case, implementation):
    check_quantized_output(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", QUANTIZED_OUTPUT, ids=str)
def test_paged_attention_on_gpu_with_quantize_output_matches_float64(case):
    check_quantized_output(case, "pallas")


@pytest.mark.parametrize("implementation", ["reference", pytest.param("pallas", marks=pytest.mark.once)])
def test_paged_attention_of_large_scores_does_not_overflow(implementation):
    """Base-2 scores reach several hundred: every split and both merge kernels must subtract the maximum."""
    problem = make_problem(AttentionCase(scale=30.0))
    attend = functools.partial(paged_attention, *problem.arrays, **problem.options, implementation=implementation)
    out, row = attend(), attend(quantize_output=True)
    assert problem.error(out) <= 100 * problem.tolerance
    real = problem.real
    assert (
        half_step_error(row.values[real], row.scale[real], np.asarray(out, np.float64).reshape(row.shape)[real]) < 1.1
    )


@pytest.mark.gpu
def test_paged_attention_on_gpu_with_constant_maximum_does_not_scale_sums():
    """The first row's score is the maximum of all 1024 tiles; its product with log2(e) has a large rounding error.

    If each tile scaled the running sums by 2**(rounding error), the result would be wrong by 7e-4.
    """
    sequences, rows, dim = 264, 65536, 16  # so many sequences that contexts are not split; all have the same pages
    tops = np.arange(65, 88, 0.125)
    factor = np.float64(np.float32(np.log2(np.e)))
    top = tops[np.argmax(np.abs(tops * factor - (tops * factor).astype(np.float32)))]
    scores = np.where(np.arange(rows) == 0, top, top - 1)
    k, v = np.zeros((2, rows, dim), np.float32)
    k[:, 0], v[: rows // 2] = scores, 1
    pools = [jnp.asarray(pool.reshape(-1, 1, 64, dim)) for pool in (k, v)]
    q = jnp.zeros((sequences, 1, 1, dim)).at[..., 0].set(1)
    table = jnp.broadcast_to(jnp.arange(rows // 64, dtype=jnp.int32), (sequences, rows // 64))
    lengths = jnp.full(sequences, rows - 1, jnp.int32)
    out = paged_attention(q, *pools, table, lengths, None, scale=1.0, implementation="pallas")
    weights = np.exp(scores - top)
    wanted = weights[: rows // 2].sum() / weights.sum()
    np.testing.assert_allclose(np.asarray(out[:, 0, 0, 0]), wanted, rtol=1.5e-4)


@pytest.fixture
def patch(monkeypatch):
    """Yield a monkeypatch; clear jax's caches before and after the test."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


@pytest.mark.once
def test_paged_attention_quantised_by_a_separate_kernel_matches_float64(patch):
    patch.setattr(sys.modules[paged_attention.__module__], "MERGED", 2)
    check_quantized_output(QUANTIZED_OUTPUT[0], "pallas")


@pytest.mark.once
def test_paged_attention_with_heads_quantised_separately_fails_the_comparison(patch):
    """Negative control: each head gets a scale of its own instead of one scale per row."""
    case, real = QUANTIZED_OUTPUT[0], merge.scaled_rows

    def by_heads(out, dtype, dims):
        return real(out, dtype)[0], real(out, dtype, dims=dims)[1]

    patch.setattr(merge, "scaled_rows", by_heads)
    with pytest.raises(AssertionError):
        check_quantized_output(case, "pallas")


@pytest.mark.matrix
@pytest.mark.parametrize("group", FACTORS["group"])
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("page", FACTORS["page"])
@pytest.mark.parametrize("queries", FACTORS["queries"])
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_paged_attention_of_every_combination_matches_float64(implementation, queries, page, dtype, group):
    """With JAX_PLATFORMS=cuda the compiled kernel runs, else the interpreted one."""
    for case in full_product(queries=queries, page=page, dtype=dtype, group=group, dim=16, lengths="ragged"):
        check(case, implementation)
    free_programs(MANY_MAPS)  # a file of so many cases cannot wait for its end


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*COVER, *FP8, *BETWEEN, *WINDOWS], ids=str)
def test_paged_attention_on_gpu_matches_float64(case):
    check(case, "pallas")


@pytest.mark.gpu
def test_paged_attention_on_gpu_with_auto_implementation_runs_the_kernel():
    problem = make_problem(AttentionCase())
    text = jax.jit(paged_attention).lower(*problem.arrays).as_text()
    assert "triton" in text


@pytest.mark.gpu
def test_paged_attention_on_gpu_of_a_huge_pool_reads_its_last_page():
    """The pool has more than 2**31 elements."""
    page, kv_heads, dim, pages = 16, 8, 128, 2**18 + 3
    pool = jax.jit(lambda: jnp.full((pages, kv_heads, page, dim), jnp.nan, jnp.bfloat16))()
    keys = jax.random.normal(jax.random.key(0), (2, page, kv_heads, dim), jnp.bfloat16)
    pool = jax.jit(lambda pool: pool.at[-1].set(keys[0].swapaxes(0, 1)), donate_argnums=0)(pool)
    q = jax.random.normal(jax.random.key(1), (1, 1, 32, dim), jnp.bfloat16)
    table, lengths = jnp.full((1, 1), pages - 1, jnp.int32), jnp.full((1,), page - 1, jnp.int32)
    near = keys[:1].swapaxes(1, 2)
    expected = paged_attention(q, near, near, table * 0, lengths, None, implementation="reference")
    out = paged_attention(q, pool, pool, table, lengths, None, implementation="pallas")
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=0.03)


@pytest.mark.once
def test_paged_attention_of_rows_beyond_the_page_table_ignores_them():
    """Three of six new rows have no page, so the last three queries see the same rows as the third query."""
    rng = np.random.default_rng(0)
    k, v = (on_device(rng.normal(size=(4, 1, 10, 16)), jnp.float32) for _ in range(2))
    q = on_device(rng.normal(size=(1, 6, 1, 16)), jnp.float32)
    arguments = q, k, v, on_device([[1, 2, 3]], jnp.int32), on_device([27], jnp.int32), None
    got, wanted = (paged_attention(*arguments, implementation=by) for by in ("pallas", "reference"))
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_paged_attention_of_query_that_sees_no_row_returns_zeros(implementation):
    problem = make_problem(AttentionCase(lengths="zero", tree="chain"))
    q, k_pool, _, page_table, lengths, bits = problem.arrays
    nan = jnp.full_like(k_pool, jnp.nan)
    arrays = (q, nan, nan, page_table, lengths * 0, bits * 0)
    assert not np.asarray(paged_attention(*arrays, implementation=implementation)).any()
    out = paged_attention(*arrays, on_device(np.zeros(q.shape[2])), quantize_output=True, implementation=implementation)
    assert not np.asarray(out.values, np.float32).any()


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("queries", [17, 60])
def test_paged_attention_of_the_last_tree_level_sees_rows_of_earlier_levels(queries, implementation):
    """The queries are the last tree level; their bits also name new rows that earlier calls wrote."""
    problem = make_problem(AttentionCase(queries=queries, tree="random"))
    q, k_pool, v_pool, page_table, lengths, bits = problem.arrays
    last = slice(queries - 5, None)
    out = paged_attention(
        q[:, last], k_pool, v_pool, page_table, lengths, bits[:, last], new_rows=queries, implementation=implementation
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), problem.expected[:, last], atol=problem.tolerance)
    with pytest.raises(ValueError, match="bits must be"):
        paged_attention(q[:, last], k_pool, v_pool, page_table, lengths, bits[:, last], new_rows=queries + 32)
    with pytest.raises(ValueError, match="without bits the 5 queries are the new rows"):
        paged_attention(q[:, last], k_pool, v_pool, page_table, lengths, None, new_rows=queries)


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_paged_attention_of_page_size_20_matches_float64(implementation):
    """The page size need not be a power of two."""
    check(AttentionCase(page=20), implementation)


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_paged_attention_with_any_page_size_returns_equal_bits(implementation):
    """Contexts are divided into splits and tiles by rows, not by pages."""
    outs = []
    for page in FACTORS["page"]:
        problem = make_problem(AttentionCase(lengths="full", page=page))  # the same values, at other places
        outs.append(np.asarray(paged_attention(*problem.arrays, implementation=implementation)))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_paged_attention_kernel_on_one_sequence_of_a_batch_has_unchanged_bits():
    """The sequence alone has a wider page table; both calls divide contexts into equally many splits."""
    problem = make_problem(AttentionCase())
    q, k_pool, v_pool, page_table, lengths, bits = problem.arrays
    out = paged_attention(*problem.arrays, implementation="pallas")
    wide = jnp.pad(page_table, ((0, 0), (0, 30)))
    one = slice(2, 3)
    alone = paged_attention(q[one], k_pool, v_pool, wide[one], lengths[one], bits[one], implementation="pallas")
    np.testing.assert_array_equal(out[2:3], alone)


@pytest.mark.parametrize("tree", ["causal", "random"])
def test_paged_attention_reference_with_a_window_reads_only_its_pages(tree):
    """No array has as many rows as the page table addresses, so the cost does not grow with the context."""
    problem = make_problem(AttentionCase(tree=tree, page=16))
    run = functools.partial(paged_attention, implementation="reference")
    sizes = {w: str(jax.make_jaxpr(functools.partial(run, window=w))(*problem.arrays)) for w in (20, None)}
    assert f",{ROWS}" in sizes[None] and f",{ROWS}" not in sizes[20] and ",48" in sizes[20]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": 24}, "head_dim must be a multiple of 16"),
        ({"page": 160}, "page size must be at most 128"),
        ({"queries": 300}, "bits can name at most 256 new rows"),
        ({"dtype": "float8_e5m2"}, "dtype must be"),
    ],
)
def test_paged_attention_of_unsupported_shape_raises_only_with_pallas(changed, message):
    """With "auto" the reference runs."""
    sizes = {"dim": 16, "page": 16, "queries": 2, "dtype": "float32"} | changed
    q = on_device(np.zeros((1, sizes["queries"], 2, sizes["dim"])))
    pool = on_device(np.zeros((4, 1, sizes["page"], sizes["dim"]), sizes["dtype"]))
    bits = on_device(np.zeros((1, sizes["queries"], -(-sizes["queries"] // 32)), jnp.uint32))
    arrays = (q, pool, pool, on_device([[1, 2, 3]]), on_device([4]), bits)
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(*arrays, implementation="pallas")
    if sizes["dtype"] == "float32":
        assert paged_attention(*arrays).shape == q.shape


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("v_pool", np.zeros((4, 2, 16, 16), np.float16), "pools of K and V must be alike"),
        ("q", np.zeros((1, 2, 3, 16), np.float32), "kv_heads dividing 3"),
        ("bits", np.zeros((1, 2, 2), np.uint32), r"bits must be \(1, 2, 1\)"),
    ],
)
def test_paged_attention_of_mismatched_arrays_raises(name, bad, message):
    pool = on_device(np.zeros((4, 2, 16, 16)))
    arrays = {"q": on_device(np.zeros((1, 2, 2, 16))), "k_pool": pool, "v_pool": pool}
    arrays |= {"page_table": on_device([[1, 2, 3]]), "lengths": on_device([4])}
    arrays["bits"] = on_device(np.zeros((1, 2, 1), jnp.uint32))
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arrays | {name: bad}))


def test_paged_attention_with_unknown_implementation_raises():
    problem = make_problem(AttentionCase(queries=1))
    with pytest.raises(ValueError, match="implementation must be"):
        paged_attention(*problem.arrays, implementation="triton")


@pytest.mark.once
def test_paged_attention_without_jit_matches_float64():
    problem = make_problem(AttentionCase(lengths="zero"))
    with jax.disable_jit():
        out = paged_attention(*problem.arrays)
    assert problem.error(out) <= problem.tolerance
