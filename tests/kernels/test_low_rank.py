"""Compare products with low-rank adapters by kernels and by XLA with float64, and check launches on an H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gated_matmul, split_matmul
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.low_rank_kernels import MOST_INNER, blocks_of_tables, sizes_of_both
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.gated_matmul import MOST_WIDE
from pallas_kernels.layers.low_rank import MOST_ROWS, add_low_rank, has_kernel
from pallas_kernels.layers.partial_sums import Scaled
from tests.reference.activations import ACTIVATIONS
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.gpus import GPUS, compile_for
from tests.support.h200 import compile_for_h200

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
TABLES, RANK = 3, 4
FUSED, ONE, ODD = (128, 64, 64), (256,), (144, 112)  # rows of the modules of a weight; 144 is no multiple of a tile


def problem(
    shape: tuple[int, ...], modules: tuple[int, ...], inner: int = 192, *, rank: int = RANK, tables: int = TABLES
) -> tuple[jax.Array, Adapted]:
    """Return activations [*shape, inner] and a weight whose rows choose tables at random, some of them none."""
    rng, out, width = np.random.default_rng(0), sum(modules), rank * len(modules)
    columns, starts = -(-tables * width // 64) * 64, np.cumsum([0, *modules])
    b = np.zeros((out, columns))
    for table in range(tables):
        for index, rows in enumerate(modules):
            column = (index * tables + table) * rank
            b[starts[index] : starts[index + 1], column : column + rank] = rng.normal(size=(rows, rank))
    x, a, w = (rng.normal(size=size) for size in ((*shape, inner), (columns, inner), (out, inner)))
    arrays = [on_device(values, BF16) for values in (w / np.sqrt(inner), a / np.sqrt(inner), b)]
    table = on_device(rng.permutation(np.arange(1, 1 + np.prod(shape)) % (tables + 1)).reshape(shape), jnp.int32)
    return on_device(x, BF16), Adapted(*arrays, table, width, rank, tables, modules)


def wide(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def table_columns(weight: Adapted, table: int) -> np.ndarray:
    """Return the columns of a table, counted from 1, of all modules."""
    modules = np.arange(weight.width // weight.rank)[:, None]
    return ((modules * weight.tables + table - 1) * weight.rank + np.arange(weight.rank)).ravel()


def wanted(sums: Any, x: Any, weight: Adapted) -> np.ndarray:
    """Return sums plus the adapter of each row in float64, row by row; A x is rounded as B is."""
    result, tables = wide(sums).copy(), np.asarray(weight.table)
    for row in np.ndindex(tables.shape):
        if table := tables[row]:
            columns = table_columns(weight, table)
            inner = wide(weight.a)[columns] @ wide(x)[row]
            result[row] += wide(weight.b)[:, columns] @ wide(inner.astype(BF16))
    return result


def sums_of(shape: tuple[int, ...], out: int, parts: int = 2) -> jax.Array:
    return on_device(np.random.default_rng(1).normal(size=(parts, *shape, out)), F32)


def error(got: Any, right: np.ndarray) -> float:
    """Return the largest error relative to 1 + |expected value|; A x near a tie may be rounded otherwise."""
    return float((np.abs(wide(got) - right) / (1 + np.abs(right))).max())


@pytest.mark.parametrize(
    ("shape", "modules", "rank", "implementation"),
    cover.with_kernel(
        [((2, 5), FUSED, 4), ((1, 19), ONE, 24), ((3, 1), ODD, 4), ((1, 2, 3), (128, 128), 16), ((7,), FUSED, 4)], 2
    ),
)
def test_rows_of_several_tables_and_of_none_get_their_adapters(
    shape: tuple[int, ...], modules: tuple[int, ...], rank: int, implementation: Any
) -> None:
    x, weight = problem(shape, modules, rank=rank)
    sums = sums_of(shape, weight.shape[0])
    assert has_kernel(x, weight)
    got = add_low_rank(sums, x, weight, F32, implementation=implementation)
    right = wanted(sums.sum(0), x, weight)
    assert error(got, right) < 0.02
    others = replace(weight, table=(weight.table + 1) % (TABLES + 1))
    assert error(add_low_rank(sums, x, others, F32, implementation=implementation), right) > 0.5, (
        "control: other tables"
    )
    assert error(sums.sum(0), right) > 0.5, "control: without adapters"


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
def test_gate_is_applied_to_a_product_with_adapters(implementation: Any) -> None:
    x, weight = problem((2, 5), (128, 128))
    sums = sums_of((2, 5), 256, parts=1)
    gate, up = np.split(wanted(sums[0], x, weight), 2, axis=-1)
    for name in ("silu", "gelu_tanh"):
        got = add_low_rank(sums, x, weight, F32, gate=name, implementation=implementation)
        assert error(got, ACTIVATIONS[name](gate) * up) < 0.03
    assert error(got, ACTIVATIONS["silu"](gate) * up) > 0.05, "control: another activation function"
    assert error(got, ACTIVATIONS["gelu_tanh"](up) * gate) > 0.5, "control: gate and up exchanged"


def test_sums_of_float8_are_scaled_before_adapters_are_added() -> None:
    x, weight = problem((2, 5), FUSED)
    rng, sums = np.random.default_rng(2), sums_of((2, 5), 256)
    rows, columns = (on_device(rng.uniform(1, 3, size), F32) for size in ((2, 5), (256,)))
    scaled = wide(sums).sum(0) * wide(rows)[..., None] * wide(columns)
    got = add_low_rank(Scaled(sums, rows, columns), x, weight, F32, implementation="pallas")
    assert error(got, wanted(scaled, x, weight)) < 0.02
    assert error(got, wanted(sums.sum(0), x, weight)) > 0.5, "control: sums without scales"


def test_kernels_read_the_chosen_tables_alone_and_of_b_the_columns_of_a_module() -> None:
    """NaN in what is not read does not reach the result; XLA reads all of it."""
    x, weight = problem((2, 5), FUSED)
    weight = replace(weight, table=jnp.where(weight.table == 2, 0, weight.table))
    second = table_columns(weight, 2)
    a, b = np.array(weight.a), np.array(weight.b)
    a[second] = b[:, second] = b[:128, table_columns(weight, 1)[RANK:]] = np.nan
    bad = replace(weight, a=on_device(a), b=on_device(b))
    sums = sums_of((2, 5), 256)
    outs = {
        name: [np.asarray(add_low_rank(sums, x, w, F32, implementation=name)) for w in (weight, bad)]
        for name in ("pallas", "reference")
    }
    np.testing.assert_array_equal(*outs["pallas"])
    assert np.isnan(outs["reference"][1]).any(), "control"
    unknown = add_low_rank(sums, x, replace(bad, modules=()), F32, implementation="pallas")
    assert np.isnan(unknown[..., :128]).any(), "control: modules are not known"


def test_bits_of_a_row_do_not_depend_on_the_tables_of_other_rows() -> None:
    x, weight = problem((2, 5), FUSED)
    sums = sums_of((2, 5), 256)
    tables = [weight.table, weight.table.at[0, 1:].set((weight.table[0, 1:] + 1) % (TABLES + 1))]
    outs = [add_low_rank(sums, x, replace(weight, table=t), F32, implementation="pallas") for t in tables]
    np.testing.assert_array_equal(outs[0][0, 0], outs[1][0, 0])
    assert not np.array_equal(outs[0][0, 1:], outs[1][0, 1:]), "control"


@pytest.mark.parametrize(
    ("shape", "modules", "inner", "kind"),
    [((2, 5), (512, 256, 256), 2048, None), ((1, 40), (1024,), 2048, None), ((1, 5), (1024,), 2048, "fp8_dynamic")],
)
def test_split_product_with_adapters_is_that_of_float64(
    shape: tuple[int, ...], modules: tuple[int, ...], inner: int, kind: Any
) -> None:
    """The weight's product and A x come from one kernel, unless there are many rows or the weight is quantised."""
    x, weight = problem(shape, modules, inner)
    weight, w = stored(weight, kind)
    assert (sizes_of_both(weight) is not None) == (kind is None and shape[1] == 5)
    right = wanted(wide(x) @ w.T, x, weight)
    for implementation in ("pallas", "reference"):
        (got,) = split_matmul(x, weight, implementation=implementation)
        assert got.dtype == F32
        assert error(got, right) < (0.1 if kind else 0.02)
        (plain,) = split_matmul(x, replace(weight, table=0 * weight.table), implementation=implementation)
        assert error(plain, wide(x) @ w.T) < (0.1 if kind else 0.02)
        assert error(plain, right) > 0.5, "control: rows without adapters"


def stored(weight: Adapted, kind: Any) -> tuple[Adapted, np.ndarray]:
    """Return a weight quantised as a kind, or as it is, and its values without adapters in float64."""
    if kind is None:
        return weight, wide(weight.weight)
    quantized = quantize(weight.weight, kind)
    return replace(weight, weight=quantized), wide(quantized.values) * wide(quantized.scale)[:, None]


SHAPES, RANKS = ((1, 1), (1, 5), (8, 5), (32, 5)), (8, 16, 64)
CASES = [
    pytest.param((1, 5), 16, 8, None, "pallas"),
    pytest.param((2, 5), 8, 1, "int8", "pallas"),
    *(
        pytest.param(*case, "auto", marks=pytest.mark.gpu)
        for case in [
            *((shape, rank, 8, None) for shape in SHAPES for rank in RANKS),
            *((shape, 16, *more) for shape in SHAPES for more in ((1, None), (8, "int8"))),
        ]
    ),
]


def served(
    shape: tuple[int, ...], modules: tuple[int, ...], rank: int, tables: int, kind: Any
) -> tuple[jax.Array, list[Adapted], list[np.ndarray]]:
    """Return activations, a weight for which there is a kernel, as it is and with other tables, and both products."""
    x, weight = problem(shape, modules, 2048, rank=rank, tables=tables)
    weight, w = stored(weight, kind)
    assert has_kernel(x, weight)
    assert len(np.unique(weight.table)) == min(weight.table.size, tables + 1)
    both = [weight, replace(weight, table=(weight.table + 1) % (tables + 1))]
    return x, both, [wanted(wide(x) @ w.T, x, each) for each in both]


@pytest.mark.parametrize(("shape", "rank", "tables", "kind", "implementation"), CASES)
def test_products_with_adapters_of_each_rank_are_those_of_float64(
    shape: tuple[int, ...], rank: int, tables: int, kind: Any, implementation: Any
) -> None:
    x, (weight, _), (right, other) = served(shape, (1024, 512, 512), rank, tables, kind)
    (got,) = split_matmul(x, weight, implementation=implementation)
    assert error(got, right) < 0.02 and error(got, other) > 0.5
    sums = sums_of(shape, 2048)
    right = wanted(wide(sums).sum(0), x, weight)
    got = add_low_rank(sums, x, weight, F32, implementation=implementation)
    assert error(got, right) < 0.02 and error(got, right[..., ::-1]) > 0.5


@pytest.mark.parametrize(("shape", "rank", "tables", "kind", "implementation"), CASES)
def test_gated_products_with_adapters_of_each_rank_are_those_of_float64(
    shape: tuple[int, ...], rank: int, tables: int, kind: Any, implementation: Any
) -> None:
    """Sums of many rows are rounded before adapters are added, and a gate near 0 is multiplied by an up of dozens."""
    x, (weight, _), products = served(shape, (1024, 1024), rank, tables, kind)
    right, other = (ACTIVATIONS["silu"](gate) * up for gate, up in (np.split(each, 2, axis=-1) for each in products))
    got = gated_matmul(x, weight, implementation=implementation)
    assert (got.shape, got.dtype) == ((*shape, 1024), BF16)
    assert error(got, right) < (0.04 if np.prod(shape) <= MOST_WIDE else 0.2)
    assert error(got, other) > 0.5, "control: other tables"


def adapted(shape: tuple[int, ...], out: int, inner: int, modules: int, tables: int = 8, rank: int = 16) -> Any:
    """Return the shapes of activations and of a weight of modules of equal size."""
    width = rank * modules
    sizes, dtypes = ((out, inner), (tables * width, inner), (out, tables * width), shape), (BF16, BF16, BF16, jnp.int32)
    arrays = [jax.ShapeDtypeStruct(*pair) for pair in zip(sizes, dtypes, strict=True)]
    return jax.ShapeDtypeStruct((*shape, inner), BF16), Adapted(
        *arrays, width, rank, tables, (out // modules,) * modules
    )


@pytest.mark.parametrize(
    ("shape", "multiply", "sizes", "names"),
    [
        ((1, 5), split_matmul, (6144, 4096, 3), ["split_matmul_low_rank", "low_rank_sum"]),
        ((16, 1), split_matmul, (4096, 14336, 1), ["split_matmul_low_rank", "low_rank_sum"]),
        ((1, 60), split_matmul, (4096, 14336, 1), ["low_rank_inner", "split_matmul", "low_rank_sum"]),
        ((32, 5), split_matmul, (4096, 4096, 1), ["low_rank_inner", "gemm", "low_rank_sum"]),
        ((1, 5), gated_matmul, (28672, 4096, 2), ["low_rank_inner", "gemm", "low_rank_sum"]),
    ],
)
def test_products_with_adapters_have_few_launches_on_an_h200(
    shape: tuple[int, ...], multiply: Any, sizes: tuple[int, int, int], names: list[str]
) -> None:
    """The tables that rows chose are computed in a few more launches, once for all products of a program."""

    def products(table: Any, *factors: Any) -> list[Any]:
        return [multiply(x, replace(weight, table=table)) for x, weight in factors]

    (out, inner, modules), pairs = sizes, [adapted(shape, *sizes, tables=5)]
    pairs.append(adapted(shape, out, inner, 4 - modules, tables=5))
    table = pairs[0][1].table
    one, two = (compile_for_h200(products, table, *pairs[:count], fail_on_spills=True) for count in (1, 2))
    assert all(one.count(name) == 1 and two.count(name) == 2 for name in names)
    assert len(two.launches) - len(one.launches) == len(names) and len(one.launches) <= len(names) + 3


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("multiply", "rows", "out", "rank"),
    [
        (split_matmul, 5, 4096, 16),
        (split_matmul, 100, 4096, 256),
        *((gated_matmul, rows, 28672, 256) for rows in (5, 32, 160)),
    ],
)
def test_kernels_compiled_for_each_gpu_spill_nothing(gpu: str, multiply: Any, rows: int, out: int, rank: int) -> None:
    """A rank of 256 is the largest; 100 rows, and rows of gate and up, are multiplied by A in a launch of their own."""
    program = compile_for(GPUS[gpu], multiply, *adapted((1, rows), out, 4096, 1, rank=rank), fail_on_spills=True)
    assert program.count("low_rank_sum") == 1
    assert program.count("split_matmul_low_rank" if rank == 16 else "low_rank_inner") == 1


def test_up_to_32_rows_are_one_block_unless_a_table_is_wide() -> None:
    """Otherwise a block has 16 rows; it can choose as many tables as there are, or as it has rows."""
    sizes = [
        blocks_of_tables(adapted((rows,), 4096, 4096, 1, rank=rank)[1])
        for rows, rank in ((1, 16), (17, 16), (32, 128), (32, 256), (33, 16))
    ]
    assert sizes == [(1, 1), (1, 8), (1, 8), (2, 8), (3, 8)]


def test_kernels_support_two_bytes_a_value_and_tables_that_a_program_can_hold() -> None:
    def has(rows: int = 5, out: int = 128, inner: int = 64, dtype: Any = BF16, **sizes: int) -> bool:
        x, weight = adapted((1, rows), out, inner, 1, **sizes)
        a, b = (jax.ShapeDtypeStruct(array.shape, dtype) for array in (weight.a, weight.b))
        return has_kernel(jax.ShapeDtypeStruct(x.shape, dtype), replace(weight, a=a, b=b))

    assert has() and has(dtype=jnp.float16) and has(rows=MOST_ROWS) and has(rank=MOST_INNER)
    assert not any([has(dtype=F32), has(rows=MOST_ROWS + 1), has(rank=MOST_INNER + 1), has(out=96), has(inner=96)])
    x, weight = adapted((1, 5), 384, 64, 3, rank=MOST_INNER)
    assert has_kernel(x, weight) and not has_kernel(x, replace(weight, modules=())), "columns of each module, of all"
    x, weight = adapted((1, 5), 128, 64, 1)
    assert not has_kernel(jax.ShapeDtypeStruct(x.shape, jnp.float16), weight), "x of another dtype"
    assert not has_kernel(x, replace(weight, table=jax.ShapeDtypeStruct((1, 1), jnp.int32))), "one table for all rows"


def test_more_rows_than_the_kernels_support_are_multiplied_by_xla() -> None:
    few, many = (
        compile_for_h200(split_matmul, *adapted((1, rows), 1024, 2048, 1)) for rows in (MOST_ROWS, MOST_ROWS + 1)
    )
    assert few.count("low_rank") == 2 and many.count("low_rank") == 0
