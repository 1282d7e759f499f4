"""Compare `append` and `move_rows` of a paged cache with loops over rows in numpy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import append, move_rows
from pallas_kernels.attention.kv_pages import LAYERS
from tests.support import cover
from tests.support.arrays import on_device

ROWS = 128
IMPLEMENTATIONS = ["reference", "pallas"]


@dataclasses.dataclass(frozen=True)
class PageCase:
    page: int = 16
    tokens: int = 5
    kv_heads: int = 2
    dim: int = 16
    dtype: str = "float32"
    value_dim: int | None = None  # channels of a row of V; None: `dim`

    def __str__(self) -> str:
        return "-".join(str(value) for value in dataclasses.astuple(self))


CASES = [
    PageCase(page=20, tokens=17, kv_heads=3, dim=24),
    PageCase(page=1, dtype="bfloat16"),
    PageCase(page=16, tokens=5, dtype="float8_e4m3fn"),
    PageCase(page=16, tokens=9, kv_heads=1, dim=16, value_dim=48),
    PageCase(),
    PageCase(page=64, tokens=1, kv_heads=8, dim=128),
    PageCase(page=16, tokens=60, kv_heads=1, dim=64, dtype="bfloat16"),
    PageCase(page=1, tokens=33, kv_heads=4, dim=128, dtype="float16"),
    PageCase(page=4, kv_heads=1, dim=64, value_dim=512, dtype="bfloat16"),
]


def make_cache(case: PageCase, generator: np.random.Generator):
    """Return random pools of K and V, a page table of three sequences, and the number of rows it has per sequence."""
    columns = -(-ROWS // case.page)
    shapes = [(3 * columns + 1, case.kv_heads, case.page, dim) for dim in (case.dim, case.value_dim or case.dim)]
    pools = [on_device(generator.standard_normal(shape), case.dtype) for shape in shapes]
    pages = generator.permutation(np.arange(1, 3 * columns + 1)).reshape(3, columns).astype(np.int32)
    return *pools, pages, columns * case.page


def expect_rows(pool, page_table: np.ndarray, targets: np.ndarray, values: np.ndarray, valid: np.ndarray):
    """Return the pool after writing each valid values[b, t], in order, to row targets[b, t] of sequence b."""
    pool = np.array(pool)
    rows = page_table.shape[1] * pool.shape[2]
    for b, t in np.ndindex(targets.shape):
        row = targets[b, t]
        if valid[b, t] and 0 <= row < rows:
            pool[page_table[b, row // pool.shape[2]], :, row % pool.shape[2]] = values[b, t]
    return pool


def read_rows(pool, page_table: np.ndarray, rows: np.ndarray) -> np.ndarray:
    pool = np.asarray(pool)
    values = np.zeros((*rows.shape, pool.shape[1], pool.shape[3]), pool.dtype)
    for b, t in np.ndindex(rows.shape):
        row = max(rows[b, t], 0) % (page_table.shape[1] * pool.shape[2])
        values[b, t] = pool[page_table[b, row // pool.shape[2]], :, row % pool.shape[2]]
    return values


def assert_same_but_null(pool, expected: np.ndarray) -> None:
    """Assert that all pages except page 0, the null page, have the expected bits."""
    pool = np.asarray(pool)
    np.testing.assert_array_equal(pool[1:].view(np.uint8), expected[1:].view(np.uint8))


def check_append(case: PageCase, implementation: str) -> None:
    generator = np.random.default_rng(0)
    k_pool, v_pool, page_table, rows = make_cache(case, generator)
    first_row = np.array([0, 31, rows - 2], np.int32)  # the last sequence's rows go past the table's end
    valid = generator.random((3, case.tokens)) < 0.7
    shapes = [(3, case.tokens, case.kv_heads, pool.shape[3]) for pool in (k_pool, v_pool)]
    k, v = (generator.standard_normal(shape).astype(np.float32) for shape in shapes)
    out = append(k_pool, v_pool, *map(on_device, (k, v, page_table, first_row, valid)), implementation=implementation)
    targets = first_row[:, None] + np.arange(case.tokens)
    for pool, old, new in zip(out, (k_pool, v_pool), (k, v), strict=True):
        expected = expect_rows(old, page_table, targets, np.asarray(on_device(new, case.dtype)), valid)
        assert_same_but_null(pool, expected)
        assert (np.asarray(pool) != np.asarray(old)).any()


def check_move(case: PageCase, implementation: str, pairs: int = 1) -> None:
    """Move the rows of an accepted path to rows from 7 on; rows that are read overlap those that are written.

    Args:
        pairs: number of pairs of layers.
    """
    generator = np.random.default_rng(1)
    k_pool, v_pool, page_table, rows = make_cache(case, generator)
    steps = generator.integers(1, 3, (3, case.tokens))
    sources = (6 + np.cumsum(steps, axis=1)).astype(np.int32)
    targets = np.broadcast_to(7 + np.arange(case.tokens, dtype=np.int32), sources.shape).copy()
    sources[1], targets[1] = targets[1].copy(), sources[1].copy()  # one sequence moves rows upwards
    targets[2, -1], valid = rows, generator.random(sources.shape) < 0.8
    arguments = map(on_device, (page_table, sources, targets, valid))
    pools = [k_pool, k_pool[::-1]] * pairs, [v_pool, v_pool[::-1]] * pairs
    out = move_rows(*pools, *arguments, implementation=implementation)
    valid = valid & (sources < rows)
    for pool, old in zip(out[0] + out[1], pools[0] + pools[1], strict=True):
        moved = read_rows(old, page_table, sources)
        assert_same_but_null(pool, expect_rows(old, page_table, targets, moved, valid))


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(CASES, 4))
def test_cache_append_with_some_invalid_rows_writes_only_the_valid_ones(case, implementation):
    check_append(case, implementation)


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(CASES, 4))
def test_cache_row_move_of_overlapping_ranges_reads_all_rows_before_writing(case, implementation):
    check_move(case, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cache_row_move_of_more_layers_than_a_kernel_supports_moves_all(implementation):
    check_move(PageCase(), implementation, pairs=LAYERS // 2 + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cache_append_and_row_move_on_gpu_equal_numpy(case):
    check_append(case, "pallas")
    check_move(case, "pallas", pairs=LAYERS // 2 + 1)


def test_overlapping_rows_moved_one_by_one_differ_from_rows_moved_together():
    """Negative control: a row that is written before it is read changes the result."""
    case = PageCase()
    k_pool, _, page_table, _ = make_cache(case, np.random.default_rng(1))
    sources, targets = np.array([[0, 1, 2]] * 3), np.array([[1, 2, 3]] * 3)
    valid = np.ones(sources.shape, bool)
    together = expect_rows(k_pool, page_table, targets, read_rows(k_pool, page_table, sources), valid)
    one_by_one = np.array(k_pool)
    for t in range(3):
        cut = slice(t, t + 1)
        moved = read_rows(one_by_one, page_table, sources[:, cut])
        one_by_one = expect_rows(one_by_one, page_table, targets[:, cut], moved, valid[:, cut])
    assert (together != one_by_one).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cache_append_and_row_move_without_valid_rows_change_no_page(implementation):
    k_pool, v_pool, page_table, _ = make_cache(PageCase(), np.random.default_rng(2))
    rows, none = on_device(np.zeros((3, 4), jnp.int32)), on_device(np.zeros((3, 4), bool))
    new = on_device(np.full((3, 4, 2, 16), jnp.nan))
    table = on_device(page_table)
    out = append(k_pool, v_pool, new, new, table, rows[:, 0], none, implementation=implementation)
    assert_same_but_null(out[0], np.asarray(k_pool))
    out = move_rows([k_pool], [v_pool], table, rows, rows + 1, none, implementation=implementation)
    assert_same_but_null(out[1][0], np.asarray(v_pool))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_cache_append_to_float8_pool_clips_large_values(implementation):
    pool = on_device(np.zeros((2, 1, 4, 16), "float8_e4m3fn"))
    values = jnp.tile(on_device([1e6, -1e6, 449.0, 1.0]), 4)[None, None, None]
    k_pool, _ = append(
        pool, pool, values, values, *map(on_device, ([[1]], [2], [[True]])), implementation=implementation
    )
    assert np.asarray(k_pool[1, 0, 2, :4], np.float32).tolist() == [448.0, -448.0, 448.0, 1.0]
    assert np.isnan(np.asarray(values.astype("float8_e4m3fn"), np.float32)).any(), "a plain conversion gives NaN"


@pytest.mark.parametrize("operation", [append, move_rows], ids=lambda operation: operation.__name__)
def test_cache_append_and_row_move_with_donated_pools_write_in_place(operation):
    k_pool, v_pool, page_table, _ = make_cache(PageCase(), np.random.default_rng(3))
    new, rows, valid = (
        on_device(np.ones((3, 4, 2, 16))),
        on_device(np.ones((3, 4), jnp.int32)),
        on_device(np.ones((3, 4), bool)),
    )
    k_pool, v_pool = jnp.copy(k_pool), jnp.copy(v_pool)
    before = [pool.unsafe_buffer_pointer() for pool in (k_pool, v_pool)]
    arguments = (new, new, page_table, rows[:, 0]) if operation is append else (page_table, rows, rows + 1)
    step = jax.jit(functools.partial(operation), donate_argnums=(0, 1))
    pools = (k_pool, v_pool) if operation is append else ([k_pool], [v_pool])
    out = jax.tree.leaves(step(*pools, *arguments, valid))
    assert [pool.unsafe_buffer_pointer() for pool in out] == before


def test_cache_row_move_of_too_many_rows_raises():
    k_pool, v_pool, page_table, _ = make_cache(PageCase(dim=128), np.random.default_rng(4))
    rows = on_device(np.zeros((3, 129), jnp.int32))
    with pytest.raises(NotImplementedError, match="at most 128 rows"):
        move_rows([k_pool], [v_pool], on_device(page_table), rows, rows, rows == 0, implementation="pallas")


def test_cache_append_of_mismatched_arrays_raises():
    k_pool, v_pool, page_table, _ = make_cache(PageCase(), np.random.default_rng(5))
    new, rows, valid = (
        on_device(np.ones((3, 4, 2, 16))),
        on_device(np.ones((3, 4), jnp.int32)),
        on_device(np.ones((3, 4), bool)),
    )
    with pytest.raises(ValueError, match="pools of K and V must be alike"):
        append(k_pool, v_pool.astype(jnp.bfloat16), new, new, on_device(page_table), rows[:, 0], valid)
    with pytest.raises(ValueError, match="k and v must be of one dtype"):
        append(k_pool, v_pool, new, new.astype(jnp.bfloat16), on_device(page_table), rows[:, 0], valid)
    other = [pool[:, :, :8] for pool in (k_pool, v_pool)]
    with pytest.raises(ValueError, match="pages of all layers must be alike"):
        move_rows([k_pool, other[0]], [v_pool, other[1]], on_device(page_table), rows, rows, valid)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_cache_row_move_in_layers_of_different_shapes_moves_each_as_if_alone(implementation):
    caches = [
        make_cache(PageCase(dim=dim, kv_heads=heads), np.random.default_rng(dim)) for dim, heads in ((16, 2), (32, 1))
    ]
    (small, wide), table = caches, on_device(caches[0][2])
    rows = on_device([[3, 5], [0, 2], [1, 4]], jnp.int32)
    run = functools.partial(move_rows, implementation=implementation)
    layers = [small[:2], wide[:2], small[:2]]
    k, v = run([one[0] for one in layers], [one[1] for one in layers], table, rows, rows - 1 + (rows == 0), rows > 0)
    for index, own in enumerate(layers):
        alone = run([own[0]], [own[1]], table, rows, rows - 1 + (rows == 0), rows > 0)
        np.testing.assert_array_equal(k[index], alone[0][0])
        np.testing.assert_array_equal(v[index], alone[1][0])
        assert not np.array_equal(np.nan_to_num(k[index]), np.nan_to_num(own[0])), "control: rows were moved"
