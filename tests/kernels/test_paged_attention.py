"""paged_attention against the numpy oracle: reference, kernel interpreted on the CPU, kernel on a GPU."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import causal_bits, paged_attention
from pallas_kernels.attention import merge
from pallas_kernels.attention.tiling import choose_tiles
from tests.kernels.problems import FACTORS, ROWS, Case, full_product, make_problem, pairwise_cover
from tests.kernels.test_quantize_rows import off
from tests.support import cover

COVER = pairwise_cover()
FP8 = [
    Case(dtype="bfloat16", pool="float8_e4m3fn"),
    Case(dtype="float32", pool="float8_e4m3fn", tree="causal", page=1, start=1, queries=17, dim=64),
    Case(dtype="bfloat16", pool="float8_e4m3fn", tree="padded", queries=60, dim=128, group=2, lengths="full"),
]
BETWEEN = [
    Case(dim=80),
    Case(dim=96, dtype="bfloat16", tree="causal", queries=17, start=1),
    Case(dim=80, dtype="bfloat16", tree="padded", queries=60, group=2, lengths="full"),
    Case(dim=96, queries=1, tree="causal", lengths="zero"),
    Case(dim=176, window=40, queries=17, tree="random"),
    Case(dim=80, dtype="bfloat16", pool="float8_e4m3fn"),
]
WINDOWS = [
    Case(window=1, queries=1, tree="causal", page=1, start=1),
    Case(window=16, queries=1, tree="causal", group=2),
    Case(window=100, queries=60, tree="causal", start=1),
    Case(window=7, queries=17, tree="causal", lengths="full"),
    Case(window=2, tree="random", page=64, lengths="full"),
    Case(window=129, queries=17, tree="padded", start=1, dtype="bfloat16"),
    Case(window=40, queries=17, tree="random", lengths="zero"),
    Case(window=90, queries=60, tree="chain", dim=64, lengths="full"),
    Case(window=ROWS, tree="random"),
    Case(window=33, tree="random", dtype="bfloat16", pool="float8_e4m3fn"),
]
ROUNDED = [  # three parts of a context
    Case(dtype="bfloat16", dim=64),
    Case(dtype="float32", tree="causal", start=1, queries=17, group=1, dim=16),
    Case(dtype="bfloat16", group=3, dim=80, lengths="zero"),
    Case(dtype="bfloat16", window=33),
    Case(dtype="bfloat16", pool="float8_e4m3fn", tree="padded", dim=128, group=2, lengths="full"),
]
PROBLEMS = functools.lru_cache(maxsize=4)(make_problem)


def check(case: Case, implementation: str) -> None:
    problem = PROBLEMS(case)
    out = paged_attention(*problem.arrays, start=case.start, window=case.window, implementation=implementation)
    assert out.dtype == problem.q.dtype
    assert problem.error(out) <= problem.tolerance


@pytest.mark.parametrize("case", cover.thinned(COVER, every=6, name=str, is_halved=True))
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_it_is_softmax_attention_over_the_rows_seen(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize("case", cover.thinned(FP8, every=3, name=str))
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_pools_of_one_byte(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize("case", cover.thinned(BETWEEN, every=3, name=str, is_halved=True))
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_heads_may_be_as_wide_as_no_power_of_two(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize("case", cover.thinned(WINDOWS, every=5, name=str, is_halved=True))
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_a_window_hides_what_lies_further_back(case, implementation):
    """Where it is NaN, as is every page that holds nothing else."""
    check(case, implementation)


def check_rounded(case: Case, implementation: str) -> None:
    """Half a step of float8 is 2**-4 of a number, or 2**-10 of the scale; the scale is that of a query's largest."""
    problem = PROBLEMS(case)
    rounded = paged_attention(
        *problem.arrays, start=case.start, window=case.window, quantize_output=True, implementation=implementation
    )
    values, scale = (np.asarray(array, np.float64) for array in (rounded.values, rounded.scale))
    assert rounded.values.dtype == jnp.float8_e4m3fn and rounded.dtype == problem.q.dtype
    wanted = problem.expected.reshape(values.shape)
    largest = np.abs(wanted).max(-1)
    assert (np.abs(scale * 448 - largest) <= problem.tolerance)[problem.real].all()
    allowed = problem.tolerance + np.maximum(2**-4 * np.abs(wanted), 2**-10 * scale[..., None])
    assert (np.abs(values * scale[..., None] - wanted) <= allowed)[problem.real].all()
    assert (values[largest == 0] == 0).all()
    assert (np.abs(values[problem.real & (largest > 0)]).max(-1) == 448).all()


@pytest.mark.parametrize("case", cover.thinned(ROUNDED, every=4, name=str))
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_a_query_may_come_back_rounded(case, implementation):
    check_rounded(case, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROUNDED, ids=str)
def test_a_query_may_come_back_rounded_on_a_gpu(case):
    check_rounded(case, "pallas")


@pytest.mark.parametrize("implementation", ["reference", pytest.param("pallas", marks=pytest.mark.once)])
def test_large_scores_overflow_nowhere(implementation):
    """Hundreds of them, in base 2: sums are taken beside their largest term, in each part and in both merges."""
    problem = make_problem(Case(), scale=30.0)
    attend = functools.partial(paged_attention, *problem.arrays, scale=30.0, implementation=implementation)
    out, row = attend(), attend(quantize_output=True)
    assert problem.error(out) <= 100 * problem.tolerance
    real = problem.real
    assert off(row.values[real], row.scale[real], np.asarray(out, np.float64).reshape(row.shape)[real]) < 1.1


@pytest.mark.gpu
def test_a_largest_score_that_stays_changes_no_sum():
    """The first row's, through 1024 tiles; of it times log2(e), rounded, as much is lost as can be below 128.

    Faded by 2**(that loss) at each tile the result would be off by 7e-4.
    """
    sequences, rows, dim = 264, 65536, 16  # so many sequences that each has one part; they share their pages
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
    """A monkeypatch of what is traced: no trace from before or after is kept."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


@pytest.mark.once
def test_many_parts_are_rounded_behind_their_merge(patch):
    patch.setattr(sys.modules[paged_attention.__module__], "MERGED", 2)
    check_rounded(ROUNDED[0], "pallas")


@pytest.mark.once
def test_control_heads_rounded_each_by_itself_are_caught(patch):
    case, real = ROUNDED[0], merge.scaled_rows

    def by_heads(out, dtype, dims):
        return real(out, dtype)[0], real(out, dtype, dims=dims)[1]

    patch.setattr(merge, "scaled_rows", by_heads)
    with pytest.raises(AssertionError):
        check_rounded(case, "pallas")


@pytest.mark.matrix
@pytest.mark.parametrize("group", FACTORS["group"])
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("page", FACTORS["page"])
@pytest.mark.parametrize("queries", FACTORS["queries"])
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_every_combination(implementation, queries, page, dtype, group):
    """The whole product; with JAX_PLATFORMS=cuda it runs the compiled kernel."""
    for case in full_product(queries=queries, page=page, dtype=dtype, group=group, dim=16, lengths="ragged"):
        check(case, implementation)
    jax.clear_caches()  # a process may hold 65530 memory maps, and a compiled CPU program holds dozens


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*COVER, *FP8, *BETWEEN, *WINDOWS], ids=str)
def test_the_compiled_kernel_on_a_gpu(case):
    check(case, "pallas")


@pytest.mark.gpu
def test_auto_is_the_kernel_on_a_gpu():
    problem = make_problem(Case())
    text = jax.jit(paged_attention).lower(*problem.arrays).as_text()
    assert "triton" in text


@pytest.mark.gpu
def test_rows_past_two_to_the_31_elements_of_a_pool():
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
def test_rows_past_the_tables_end_are_seen_by_nobody():
    """Three of six new rows have no page; the last queries see what the third does."""
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.normal(size=(4, 1, 10, 16)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(1, 6, 1, 16)), jnp.float32)
    arguments = q, k, v, jnp.asarray([[1, 2, 3]], jnp.int32), jnp.asarray([27], jnp.int32), None
    got, wanted = (paged_attention(*arguments, implementation=by) for by in ("pallas", "reference"))
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "queries", "dim", "rows", "splits", "warps"),
    [
        (1, 64, 128, 1392, 4, 4),  # 128 programs, of 348 rows
        (1, 64, 128, 4096, 8, 4),  # with half as many, of 1024
        (2, 64, 128, 1392, 4, 4),  # of 696
        (8, 64, 128, 1392, 1, 4),
        (1, 30, 128, 1392, 8, 4),
        (1, 512, 128, 1536, 1, 4),
        (8, 5, 128, 1392, 4, 4),
        (8, 5, 128, 8192, 8, 2),
        (32, 5, 128, 1392, 1, 4),
        (32, 5, 128, 8192, 2, 2),  # 512 programs, four for each multiprocessor
        (32, 5, 64, 8192, 2, 2),
        (32, 5, 256, 8192, 1, 4),  # large ones
        (4, 64, 128, 8192, 2, 4),
        (8, 64, 128, 8192, 1, 4),
        (48, 5, 128, 8192, 1, 2),  # twice as many would not fit at once
        (64, 5, 128, 8192, 1, 2),
        (16, 5, 128, 1392, 2, 4),  # 256 large ones, two for each multiprocessor
        (17, 5, 128, 1392, 3, 2),  # 272 would wait for each other
        (31, 5, 128, 1392, 2, 2),
        (33, 5, 128, 1392, 1, 2),  # 264 take as long either way
        (48, 5, 128, 1392, 1, 2),
    ],
)
def test_there_are_as_few_splits_as_are_enough(batch, queries, dim, rows, splits, warps):
    tiles = tiles_for(batch, queries, dim, rows, jnp.bfloat16)
    assert (tiles.splits, tiles.packed, tiles.warps) == (splits, 32 if queries == 5 else 64, warps)


@pytest.mark.parametrize(("dim", "dtype"), [(64, jnp.bfloat16), (128, jnp.float8_e4m3fn)])
@pytest.mark.parametrize(("batch", "splits", "warps"), [(11, 3, 4), (12, 5, 2), (16, 4, 2), (31, 2, 2), (32, 1, 2)])
def test_short_rows_want_small_programs_sooner(batch, splits, warps, dim, dtype):
    tiles = tiles_for(batch, 5, dim, 1392, dtype)
    assert (tiles.splits, tiles.packed, tiles.warps) == (splits, 32, warps)


def tiles_for(batch, queries, dim, rows, dtype):
    q = jax.ShapeDtypeStruct((batch, queries, 32, dim), jnp.bfloat16)
    pool, table = jax.ShapeDtypeStruct((9, 8, 16, dim), dtype), jax.ShapeDtypeStruct((batch, rows // 16), jnp.int32)
    return choose_tiles(q, pool, table, None, new_rows=queries, start=0, window=None, wide=False)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_the_scale_can_be_given(implementation):
    problem = make_problem(Case(), scale=0.7)
    out = paged_attention(*problem.arrays, scale=0.7, implementation=implementation)
    assert problem.error(out) <= problem.tolerance
    assert problem.error(paged_attention(*problem.arrays, implementation=implementation)) > 0.05


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_a_query_that_sees_nothing_gives_zeros(implementation):
    problem = make_problem(Case(lengths="zero", tree="chain"))
    q, k_pool, _, page_table, lengths, bits = problem.arrays
    nan = jnp.full_like(k_pool, jnp.nan)
    out = paged_attention(q, nan, nan, page_table, lengths * 0, bits * 0, implementation=implementation)
    assert not np.asarray(out).any()


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("queries", [17, 60])
def test_the_last_level_of_a_tree_sees_rows_of_the_levels_before(queries, implementation):
    """Fewer queries than new rows: the bits name rows that other calls have written."""
    problem = make_problem(Case(queries=queries, tree="random"))
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
def test_pages_of_odd_sizes(implementation):
    """Nothing needs the page size to be a power of two."""
    check(Case(page=20), implementation)


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_no_bit_depends_on_the_page_size(implementation):
    """Splits and tiles are cut by rows, so that tokens are the same whatever the page size."""
    outs = []
    for page in FACTORS["page"]:
        problem = make_problem(Case(lengths="full", page=page))  # the same numbers, elsewhere
        outs.append(np.asarray(paged_attention(*problem.arrays, implementation=implementation)))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_no_bit_of_the_kernel_depends_on_the_tables_width_or_on_other_sequences():
    """As long as the split is the same: it grows from four sequences of an 8B model on."""
    problem = make_problem(Case())
    q, k_pool, v_pool, page_table, lengths, bits = problem.arrays
    out = paged_attention(*problem.arrays, implementation="pallas")
    wide = jnp.pad(page_table, ((0, 0), (0, 30)))
    one = slice(2, 3)
    alone = paged_attention(q[one], k_pool, v_pool, wide[one], lengths[one], bits[one], implementation="pallas")
    np.testing.assert_array_equal(out[2:3], alone)


def _causal_instead_of_tree(arrays):
    q, *rest, bits = arrays
    return (q, *rest, jnp.broadcast_to(causal_bits(q.shape[1]), bits.shape))


def _table_off_by_one_page(arrays):
    *rest, table, lengths, bits = arrays
    return (*rest, jnp.roll(table, 1, axis=1), lengths, bits)


def _one_row_too_few(arrays):
    *rest, lengths, bits = arrays
    return (*rest, lengths - 1, bits)


def _heads_interleaved(arrays):
    q, *rest = arrays
    batch, queries, _, dim = q.shape
    return (q.reshape(batch, queries, -1, 2, dim).swapaxes(2, 3).reshape(q.shape), *rest)


def _no_values(arrays):
    q, k_pool, v_pool, *rest = arrays
    return (q, k_pool, jnp.zeros_like(v_pool), *rest)


FAULTS = [_causal_instead_of_tree, _table_off_by_one_page, _one_row_too_few, _heads_interleaved, _no_values]


@pytest.mark.once
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
def test_control_a_fault_is_far_beyond_the_tolerance(fault, dtype):
    """What a loose tolerance would miss. Finite numbers all over: NaN would be too easy."""
    problem = make_problem(Case(dtype=dtype, lengths="full", queries=17))
    finite = [jnp.nan_to_num(pool, nan=0.5) for pool in (problem.k_pool, problem.v_pool)]
    arrays = (problem.q, *finite, *problem.arrays[3:])
    assert problem.error(paged_attention(*arrays)) <= problem.tolerance
    assert problem.error(paged_attention(*fault(arrays))) > 10 * problem.tolerance


@pytest.mark.once
def test_control_hidden_first_rows_matter():
    problem = make_problem(Case(start=1))
    finite = [jnp.nan_to_num(pool, nan=0.5) for pool in (problem.k_pool, problem.v_pool)]
    arrays = (problem.q, *finite, *problem.arrays[3:])
    assert problem.error(paged_attention(*arrays, start=1)) <= problem.tolerance
    assert problem.error(paged_attention(*arrays, start=0)) > 10 * problem.tolerance


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("tree", ["causal", "random"])
def test_control_a_window_off_by_one_matters(tree, implementation):
    problem = make_problem(Case(tree=tree, queries=5, window=12, lengths="full"))
    finite = [jnp.nan_to_num(pool, nan=0.5) for pool in (problem.k_pool, problem.v_pool)]
    arrays = (problem.q, *finite, *problem.arrays[3:])
    errors = [problem.error(paged_attention(*arrays, window=w, implementation=implementation)) for w in (12, 11, 13)]
    assert errors[0] <= problem.tolerance and min(errors[1:]) > 10 * problem.tolerance


@pytest.mark.parametrize("tree", ["causal", "random"])
def test_the_reference_gathers_the_windows_pages_alone(tree):
    """So that its cost does not grow with the context: no array has as many rows as the table can address."""
    problem = make_problem(Case(tree=tree, page=16))
    run = functools.partial(paged_attention, implementation="reference")
    sizes = {w: str(jax.make_jaxpr(functools.partial(run, window=w))(*problem.arrays)) for w in (20, None)}
    assert f",{ROWS}" in sizes[None] and f",{ROWS}" not in sizes[20] and ",48" in sizes[20]


def test_windows_of_nothing_and_scales_float32_cannot_hold_are_refused():
    with pytest.raises(ValueError, match="window must be None or at least 1, got 0"):
        paged_attention(*make_problem(Case()).arrays, window=0)
    for scale in (-1.0, 0.0, 1e-40, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"scale must be None or above 1e-30 and finite, got {scale}"):
            paged_attention(*make_problem(Case()).arrays, scale=scale)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim": 24}, "head_dim must be a multiple of 16"),
        ({"page": 160}, "page size must be at most 128"),
        ({"queries": 300}, "bits can name at most 256 new rows"),
        ({"dtype": "float8_e5m2"}, "dtype must be"),
    ],
)
def test_a_shape_the_kernel_does_not_support_raises_and_auto_takes_the_reference(changed, message):
    sizes = {"dim": 16, "page": 16, "queries": 2, "dtype": "float32"} | changed
    q = jnp.zeros((1, sizes["queries"], 2, sizes["dim"]))
    pool = jnp.zeros((4, 1, sizes["page"], sizes["dim"]), sizes["dtype"])
    bits = jnp.zeros((1, sizes["queries"], -(-sizes["queries"] // 32)), jnp.uint32)
    arrays = (q, pool, pool, jnp.array([[1, 2, 3]]), jnp.array([4]), bits)
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
def test_arrays_that_do_not_fit_are_named(name, bad, message):
    pool = jnp.zeros((4, 2, 16, 16))
    arrays = {"q": jnp.zeros((1, 2, 2, 16)), "k_pool": pool, "v_pool": pool}
    arrays |= {"page_table": jnp.array([[1, 2, 3]]), "lengths": jnp.array([4])}
    arrays["bits"] = jnp.zeros((1, 2, 1), jnp.uint32)
    with pytest.raises(ValueError, match=message):
        paged_attention(**(arrays | {name: bad}))


def test_an_unknown_implementation_raises():
    problem = make_problem(Case(queries=1))
    with pytest.raises(ValueError, match="implementation must be"):
        paged_attention(*problem.arrays, implementation="triton")


@pytest.mark.once
def test_disable_jit_gives_the_same():
    problem = make_problem(Case(lengths="zero"))
    with jax.disable_jit():
        out = paged_attention(*problem.arrays)
    assert problem.error(out) <= problem.tolerance
