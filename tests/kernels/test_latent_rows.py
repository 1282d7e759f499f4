"""Compare the products of heads, and the rows that are written to a latent cache, with numpy in float64."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import append_latent, head_products
from tests.support import cover
from tests.support.arrays import on_device

IMPLEMENTATIONS = ["reference", "pallas"]
START = 3  # columns before the queries, and before the rows of the cache
# Rows, heads, channels of the sum, channels of the product, half of the rotated channels.
SIZES = [(1, 2, 16, 32, 8), (5, 3, 12, 20, 4), (40, 1, 128, 512, 32), (70, 2, 96, 160, 16)]
DTYPES = ("float32", "bfloat16", "float32", "bfloat16")
CASES = [*zip(SIZES[::-1], DTYPES, strict=True), *zip(SIZES, DTYPES, strict=True)]


def named(case: Any) -> str:
    return "-".join(map(str, (*case[0], case[1])))


def arrays(sizes: tuple[int, ...], dtype: str) -> tuple[Any, Any, Any]:
    """Return queries [1, rows, START + heads * (K + 2 * half)], matrices [heads, K, N], tables of keys and queries."""
    rows, heads, inner, out, half = sizes
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, rows, START + heads * (inner + 2 * half)))
    weight = rng.normal(size=(heads, inner, out)) / np.sqrt(inner)
    angles = rng.uniform(0, 6, (2, 1, rows, half))
    tables = np.concatenate([np.stack([np.cos(a), np.sin(a)]) for a in angles])
    return on_device(q, dtype), on_device(weight, dtype), on_device(tables, jnp.float32)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate channel i with channel i + half, in float64."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def expected(q: Any, weight: Any, tables: Any) -> np.ndarray:
    x, w, t = (np.asarray(array, np.float64) for array in (q, weight, tables))
    inner = w.shape[1]
    x = x[..., START:].reshape(*x.shape[:2], len(w), -1)
    product = np.stack([x[:, :, h, :inner] @ w[h] for h in range(len(w))], axis=2)
    return np.concatenate([product, turned(x[..., inner:], *t[2:, :, :, None])], axis=-1)


def tolerance(dtype: str) -> float:
    return 0.03 if dtype == "bfloat16" else 1e-5  # values of up to 4, rounded once


def queries_of(q: Any, weight: Any, tables: Any, **options: Any) -> Any:
    """Return the queries that `append_latent` computes for rows that it writes nowhere."""
    pools = [on_device(np.zeros((2, 1, 4, size), q.dtype)) for size in (2 * tables.shape[-1], weight.shape[2])]
    rows = on_device(np.ones((*q.shape[:2], sum(pool.shape[3] for pool in pools)), q.dtype))
    where = (
        on_device(np.zeros((1, 1), jnp.int32)),
        on_device(np.zeros(1, jnp.int32)),
        on_device(np.zeros(q.shape[:2], bool)),
    )
    out, *after = append_latent(*pools, q, weight, rows, tables, *where, first_query=START, **options)
    assert not any(pool.any() for pool in after)
    return out


def check(sizes: tuple[int, ...], dtype: str, implementation: str) -> None:
    q, weight, tables = arrays(sizes, dtype)
    right = expected(q, weight, tables)
    for deterministic in (False, True):
        options: dict[str, Any] = {"deterministic": deterministic, "implementation": implementation}
        found = np.asarray(queries_of(q, weight, tables, **options), np.float64)
        np.testing.assert_allclose(found, right, atol=tolerance(dtype))
        # The tables of keys are others.
        assert np.abs(found - expected(q, weight, np.roll(tables, 2, axis=0))).max() > 20 * tolerance(dtype)
        out = weight.shape[2]
        x = (
            np.asarray(q)[..., START:]
            .reshape(*q.shape[:2], len(weight), -1)[..., : weight.shape[1]]
            .reshape(*q.shape[:2], -1)
        )
        turned_weight = np.asarray(weight).swapaxes(1, 2)
        plain = head_products(x, turned_weight, **options)
        np.testing.assert_allclose(np.asarray(plain, np.float64), right[..., :out], atol=tolerance(dtype))
        if len(weight) > 1:
            other = head_products(x, turned_weight[::-1], **options)
            assert np.abs(np.asarray(other, np.float64) - right[..., :out]).max() > 20 * tolerance(dtype)


@pytest.mark.parametrize(("sizes", "dtype", "implementation"), cover.with_kernel(CASES, 3, name=named, is_thinned=True))
def test_products_of_heads_and_rotated_channels_match_float64(
    sizes: tuple[int, ...], dtype: str, implementation: str
) -> None:
    check(sizes, dtype, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=named)
def test_products_of_heads_on_a_gpu_match_float64(case: Any) -> None:
    check(*case, "pallas")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_deterministic_products_of_heads_have_equal_bits_for_any_number_of_rows(implementation: str) -> None:
    q, weight, tables = arrays(SIZES[3], "float32")
    options: dict[str, Any] = {"deterministic": True, "implementation": implementation}
    together = queries_of(q, weight, tables, **options)
    for row in (0, 33, 69):
        own = slice(row, row + 1)
        np.testing.assert_array_equal(queries_of(q[:, own], weight, tables[:, :, own], **options), together[:, own])


def test_products_with_matrices_of_another_dtype_are_refused_by_the_kernel() -> None:
    q, weight, tables = arrays(SIZES[0], "float32")
    with pytest.raises(NotImplementedError, match="must be bfloat16, float16 or float32 alike"):
        queries_of(q, weight.astype(jnp.bfloat16), tables, implementation="pallas")


# ---- rows of the cache

PAGE, LATENT, HALF = 4, 48, 8


def cache(dtype: str) -> tuple[Any, Any, Any]:
    """Return pools of 2 sequences with 5 pages each, and the page table."""
    rng = np.random.default_rng(1)
    pools = [on_device(rng.normal(size=(11, 1, PAGE, size)), dtype) for size in (2 * HALF, LATENT)]
    return *pools, rng.permutation(np.arange(1, 11)).reshape(2, 5).astype(np.int32)


def check_append(
    dtype: str, pool_dtype: str, implementation: str, *, deterministic: bool, heads: int = 2, tokens: int = 6
) -> None:
    rng = np.random.default_rng(2)
    k_pool, v_pool, table = cache(pool_dtype)
    rows = on_device(rng.normal(size=(2, tokens, START + LATENT + 2 * HALF + 2)), dtype)
    angles = rng.uniform(0, 6, (2, 2, tokens, HALF))
    tables = np.concatenate([np.stack([np.cos(a), np.sin(a)]) for a in angles]).astype(np.float32)
    first, valid = np.array([2, 16], np.int32), rng.random((2, tokens)) < 0.7  # the second leaves its page table
    queries, weight = (
        on_device(np.ones((2, tokens, heads * (16 + 2 * HALF)), dtype)),
        on_device(np.ones((heads, 16, LATENT), dtype)),
    )
    _, *found = append_latent(
        *(k_pool, v_pool, queries, weight, rows, *(on_device(array) for array in (tables, table, first, valid))),
        first=START,
        deterministic=deterministic,
        implementation=implementation,
    )
    values = np.asarray(rows[..., START:-2], np.float64)
    keys = turned(values[..., LATENT:], *np.asarray(tables[:2], np.float64))
    right = [np.array(pool, np.float64) for pool in (k_pool, v_pool)]
    for b, t in np.argwhere(valid):
        place = first[b] + t
        if place < table.shape[1] * PAGE:
            for pool, new in zip(right, (keys[b, t], values[b, t, :LATENT]), strict=True):
                pool[table[b, place // PAGE], 0, place % PAGE] = new
    limit = {"float8_e4m3fn": 0.15, "bfloat16": 0.02, "float32": 1e-6}[pool_dtype]
    for pool, wanted, old in zip(found, right, (k_pool, v_pool), strict=True):
        got = np.asarray(pool, np.float64)
        np.testing.assert_allclose(got[1:], wanted[1:], atol=limit)  # page 0 is the null page
        assert np.abs(got - np.asarray(old, np.float64)).max() > 0.5
    wrong = turned(values[..., LATENT:], *np.asarray(tables[2:], np.float64))
    assert np.abs(wrong - keys).max() > 0.5, "control: the tables of queries are others"


@pytest.mark.parametrize(
    ("dtype", "pool"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_of_a_latent_cache_are_written_where_they_are_valid(dtype: str, pool: str, implementation: str) -> None:
    check_append(dtype, pool, implementation, deterministic=dtype == "float32")


@pytest.mark.parametrize(("heads", "tokens"), [pytest.param(1, 9, marks=pytest.mark.newest), (3, 7), (24, 2)])
def test_rows_of_a_latent_cache_are_written_by_programs_of_any_number_of_heads(heads: int, tokens: int) -> None:
    """Blocks of 16 and of 64 rows have more rows than heads, a number of rows that heads do not divide, or fewer."""
    for deterministic in (False, True):
        check_append("float32", "float32", "pallas", deterministic=deterministic, heads=heads, tokens=tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["bfloat16", "float8_e4m3fn"])
def test_rows_of_a_latent_cache_on_a_gpu_are_written_where_they_are_valid(pool: str) -> None:
    check_append("bfloat16", pool, "pallas", deterministic=False)


REFUSED: dict[str, Any] = {  # changes of arguments that fit, and the error
    "rows narrower than the pools": ({"rows": (2, 3, 63)}, {}, "of at most 63 channels together"),
    "latent vectors that begin too late": ({}, {"first": 1}, "of at most 63 channels together"),
    "pools of two heads": ({"k_pool": (11, 2, 4, 16), "v_pool": (11, 2, 4, 48)}, {}, r"pools must be \[pages, 1, page"),
    "a matrix of other latent vectors": (
        {"weight": (2, 16, 47)},
        {},
        r"\[H, K, 48\], as wide as v_pool, got \(2, 16, 47",
    ),
    "queries of one head": ({"queries": (2, 3, 32)}, {}, "at least 64 wide, 2 heads of 16 \\+ 16 .* from 0 on, got 32"),
    "queries that begin too late": ({}, {"first_query": 1}, "at least 65 wide, .* from 1 on, got 64"),
    "queries of other sequences": ({"queries": (3, 2, 64)}, {}, r"begin with \(2, 3\), got \(3, 2, 64\)"),
    "rows of other sequences": ({"rows": (1, 3, 64)}, {}, r"begin with \(2, 3\), got .* and \(1, 3, 64\)"),
    "tables of another half": ({"cos_sin": (2, 2, 3, 4)}, {}, r"cos_sin must be \(2, 2, 3, 8\), .* got \(2, 2, 3, 4\)"),
    "three tables": ({"cos_sin": (3, 2, 3, 8)}, {}, r"or 4 tables, got \(3, 2, 3, 8\)"),
    "tables of one row": ({"cos_sin": (2, 2, 1, 8)}, {}, r"cos_sin must be \(2, 2, 3, 8\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sizes_of_latent_rows_that_do_not_fit_each_other_are_refused(request: pytest.FixtureRequest, name: str) -> None:
    shapes: dict[str, tuple[int, ...]] = {"k_pool": (11, 1, 4, 16), "v_pool": (11, 1, 4, 48), "queries": (2, 3, 64)}
    shapes |= {"weight": (2, 16, 48), "rows": (2, 3, 64), "cos_sin": (2, 2, 3, 8)}
    where = on_device(np.zeros((2, 5), jnp.int32)), on_device(np.zeros(2, jnp.int32)), on_device(np.ones((2, 3), bool))

    is_checked = request.config.getoption("--typecheck")  # its checks would raise another error
    append = inspect.unwrap(append_latent) if is_checked else append_latent

    def run(changed: dict[str, tuple[int, ...]], options: dict[str, int]) -> None:
        append(*(jnp.ones(shape) for shape in (shapes | changed).values()), *where, **options)

    run({}, {})
    changed, options, error = REFUSED[name]
    with pytest.raises(ValueError, match=error):
        run(changed, options)


def test_donated_pools_of_a_latent_cache_are_written_in_place() -> None:
    k_pool, v_pool, table = cache("float32")
    rows, tables = on_device(np.ones((2, 3, LATENT + 2 * HALF))), on_device(np.ones((2, 2, 3, HALF)))
    queries = on_device(np.ones((2, 3, 16 + 2 * HALF))), on_device(np.ones((1, 16, LATENT)))
    where = on_device(table), on_device(np.zeros(2, jnp.int32)), on_device(np.ones((2, 3), bool))
    k_pool, v_pool = jnp.copy(k_pool), jnp.copy(v_pool)
    before = [pool.unsafe_buffer_pointer() for pool in (k_pool, v_pool)]
    _, *out = jax.jit(append_latent, donate_argnums=(0, 1))(k_pool, v_pool, *queries, rows, tables, *where)
    assert [pool.unsafe_buffer_pointer() for pool in out] == before
