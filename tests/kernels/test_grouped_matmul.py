"""Compare products with group scales with float64, and check launches and memory for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.numerics import AUTO
from jspec.models.parts.layers import head_product
from jspec.models.weights.quantize import widened_bytes
from pallas_kernels import gated_matmul, split_matmul
from pallas_kernels.layers.dense.grouped_matmul import grouped_matmul
from pallas_kernels.layers.formats import columns_of, quantize
from pallas_kernels.layers.packed import int4
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.quantize_rows import quantize_activation
from pallas_kernels.layers.weights import Kind, Quantized
from tests.reference import int4 as reference
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.gpus import A100, H100, L40, compile_for
from tests.support.h200 import H200Program

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def problem(rows: int, out: int, inner: int, group: int, dtype: str = "float8_e4m3fn") -> tuple[jax.Array, Quantized]:
    """Return random x and weight; the scales of neighbouring groups differ by up to ten, so a wrong one shows."""
    rng = np.random.default_rng(rows + out)
    values = on_device(rng.normal(size=(out, inner)) * 30, F32).astype(dtype)
    scale = 10.0 ** rng.uniform(-3, -2, (out, inner // group))
    kind: Any = "int8" if dtype == "int8" else "fp8"
    return on_device(rng.normal(size=(rows, inner)), BF16), Quantized(values, on_device(scale, F32), kind)


def wide(weight: Quantized) -> np.ndarray:
    """Return the weight in float64, each value times the scale of its group."""
    found = np.asarray(weight.values, np.float64)
    assert weight.has_groups
    for row, column in np.ndindex(*weight.shape):
        found[row, column] *= float(weight.scale[row, column // weight.group])
    return found


def expected(x: jax.Array, weight: Quantized) -> np.ndarray:
    scale = np.asarray(weight.scale, np.float64).repeat(weight.shape[1] // weight.scale.shape[1], 1)
    return np.asarray(x, np.float64) @ (np.asarray(weight.values, np.float64) * scale).T


def error(got: Any, wanted: np.ndarray) -> float:
    return float(np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize(
    ("rows", "out", "inner", "group", "parts", "dtype", "implementation"),
    cover.with_kernel(
        [
            (70, 130, 512, 128, 2, "float8_e4m3fn"),  # two tiles of rows; the last tile of columns is partial
            (5, 64, 768, 384, 2, "int8"),  # three steps of k in a group
            (1, 70, 512, 128, 1, "float8_e4m3fn"),
            (20, 64, 256, 32, 1, "float8_e4m3fn"),
        ],
        2,
    ),
)
def test_product_in_groups_has_the_sums_of_each_groups_values_times_its_scale(
    rows: int, out: int, inner: int, group: int, parts: int, dtype: str, implementation: str
) -> None:
    x, weight = problem(rows, out, inner, group, dtype)
    run = partial(grouped_matmul, dtype=F32, parts=parts, implementation=implementation)
    got = run(x, weight)
    assert got.shape == (parts, rows, out)
    assert error(got.sum(0), expected(x, weight)) < 1e-6  # float32 sums of exact products
    other = run(x, replace(weight, scale=jnp.roll(weight.scale, 1, axis=1))).sum(0)
    assert error(other, expected(x, weight)) > 0.1, "control: each group has the next one's scale"


def packed_problem(rows: int, out: int, inner: int, group: int, has_zeros: bool) -> tuple[jax.Array, Quantized]:
    """Return random x and packed weight; zero points are up to 16, as in files of GPTQ."""
    x, weight = problem(rows, out, inner, group)
    rng = np.random.default_rng(inner)
    values = int4.pack(on_device(rng.integers(0, 16, (out, inner)), jnp.uint8))
    zeros = on_device(rng.integers(0, 17, weight.scale.shape), jnp.uint8) if has_zeros else None
    return x, Quantized(values, weight.scale, "int4", zeros)


@pytest.mark.parametrize(
    ("rows", "out", "inner", "group", "parts", "has_zeros", "implementation"),
    cover.with_kernel(
        [
            (5, 70, 768, 384, 2, True),  # three steps of k in a group; the last tile of columns is partial
            (20, 64, 256, 32, 1, False),
            (70, 130, 512, 64, 2, True),  # the weight is widened first
            (1, 70, 512, 128, 1, True),
        ],
        3,
    ),
)
def test_product_with_a_packed_weight_has_the_sums_of_each_groups_differences_times_its_scale(
    rows: int, out: int, inner: int, group: int, parts: int, has_zeros: bool, implementation: str
) -> None:
    x, weight = packed_problem(rows, out, inner, group, has_zeros)
    run = partial(grouped_matmul, dtype=F32, parts=parts, implementation=implementation)
    wide = reference.device(weight.values, weight.scale, weight.zeros).astype(np.float64)  # type: ignore[arg-type]
    wanted = exact = np.asarray(x, np.float64) @ wide.T
    if rows > 64 and implementation == "pallas":  # the weight is rounded to the dtype of x
        wanted = np.asarray(x, np.float64) @ wide.astype(BF16).astype(np.float64).T
        assert error(exact, wanted) > 1e-4, "control: the weight is not rounded"
    got = run(x, weight)
    assert got.shape == (parts, rows, out)
    assert error(got.sum(0), wanted) < 1e-6  # float32 sums of exact products
    swapped = replace(weight, values=weight.values << 4 | weight.values >> 4)
    assert error(run(x, swapped).sum(0), wanted) > 0.1, "control: halves swapped"
    zeros = on_device(np.full(weight.scale.shape, 8, jnp.uint8)) if weight.zeros is None else weight.zeros
    other = run(x, replace(weight, zeros=zeros + 1)).sum(0)
    assert error(other, wanted) > 0.01, "control: zero points of one more"


@pytest.mark.once
def test_packed_values_keep_their_columns_in_any_blocks() -> None:
    values = np.random.default_rng(0).integers(0, 16, (3, 96)).astype(np.uint8)
    packed = int4.pack(values)
    assert packed.shape == (3, 3, 16) and int4.reblocked(packed, 3) is packed
    assert packed[1, 2, 6] == values[1, 64 + 3] + 16 * values[1, 64 + 8 + 3]
    for parts in (2, 4, 16):
        assert int4.reblocked(packed, parts).shape[1] % parts == 0
        np.testing.assert_array_equal(int4.unpack(int4.reblocked(packed, parts)), values)
    weight = Quantized(on_device(packed), on_device(np.ones((3, 3))), "int4", on_device(np.zeros((3, 3)), jnp.uint8))
    np.testing.assert_array_equal(matmul(jnp.eye(40), columns_of(weight, 16, 56)), values[:, 16:56].T)
    with pytest.raises(ValueError, match="int4: expected an even number of input channels, got 3"):
        int4.reblocked(packed, 32)


@pytest.mark.once
def test_scales_of_a_weight_belong_to_consecutive_columns_of_a_row() -> None:
    _, weight = problem(1, 3, 12, 4)
    identity = on_device(np.eye(12, dtype=F32))
    np.testing.assert_allclose(matmul(identity, weight), wide(weight).T, rtol=1e-6)
    np.testing.assert_allclose(expected(identity, weight), wide(weight).T, rtol=1e-12)


@pytest.mark.once
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (6, 12), (4, 12), (5, 7)])
def test_columns_of_a_weight_with_group_scales_keep_their_values(start: int, stop: int) -> None:
    """Ranges that cut a group in two get smaller groups."""
    _, weight = problem(1, 3, 12, 4)
    part = columns_of(weight, start, stop)
    assert part.shape == (3, stop - start)
    np.testing.assert_array_equal(wide(part), wide(weight)[:, start:stop])


@pytest.mark.once
def test_every_product_accepts_group_scales() -> None:
    x, weight = problem(5, 1024, 2048, 128)
    wanted = expected(x, weight)
    parts = split_matmul(x, weight, implementation="pallas")
    assert (parts.shape, parts.dtype) == ((4, 5, 1024), F32)
    assert error(reduce_partials(parts, F32), wanted) < 1e-6
    assert error(reduce_partials(parts[1:], F32), wanted) > 0.01, "control: a part is missing"
    assert error(matmul(x, weight), wanted) < 4e-3  # one rounding to bfloat16
    head = head_product(x, weight, AUTO)
    assert head.dtype == F32
    assert error(reduce_partials(head, F32), wanted) < 1e-6
    gate, up = np.split(wanted, 2, axis=1)
    silu = gate / (1 + np.exp(-gate)) * up
    assert error(gated_matmul(x, weight), silu) < 2e-2  # gate and up are rounded before they are multiplied
    both = jnp.concatenate([x, x], axis=1)
    activations = np.asarray(x, np.float64) ** 2 / (1 + np.exp(-np.asarray(x, np.float64)))
    assert error(matmul(both, weight, gate="silu"), expected(on_device(activations, BF16), weight)) < 2e-2


@pytest.mark.once
def test_product_in_groups_outside_of_the_limits_raises() -> None:
    x, weight = problem(5, 64, 256, 16)
    with pytest.raises(NotImplementedError, match="groups must be multiples of 32 columns, got 16"):
        matmul(x, weight, implementation="pallas")
    x, weight = problem(5, 64, 256, 64)
    with pytest.raises(NotImplementedError, match="x must be bfloat16 or float16, got float32"):
        matmul(x.astype(F32), weight, implementation="pallas")
    with pytest.raises(TypeError, match="group scales need activations that are not quantised"):
        matmul(quantize_activation(x), weight)


PRODUCTS: dict[str, tuple[int, int, Callable[..., Any]]] = {  # of Llama-3.1-8B: output and input width, function
    "qkv": (6144, 4096, split_matmul),
    "down": (4096, 14336, split_matmul),
    "gate and up": (28672, 4096, gated_matmul),
    "head": (128256, 4096, partial(head_product, numerics=AUTO)),
}


def abstract(out: int, inner: int) -> Quantized:
    """Return the shapes of a float8 weight with scales for groups of 128 columns."""
    values, scale = (
        jax.ShapeDtypeStruct((out, inner), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((out, inner // 128), F32),
    )
    return Quantized(values, scale, "fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 61, 160])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_in_groups_compiled_for_l40_writes_no_widened_weight(name: str, rows: int) -> None:
    out, inner, function = PRODUCTS[name]
    x = jax.ShapeDtypeStruct((1, rows, inner), BF16)
    weight = abstract(out, inner)
    program = compile_for(L40, function, x, weight, fail_on_spills=True)
    activations = 2 * rows * out if name == "gate and up" else 0  # in bytes, before silu
    assert program.temp_bytes <= activations
    assert [launch.name for launch in program.launches if "fusion" not in launch.name] == ["grouped_matmul"]


def compile_packed(name: str, rows: int, dtype: jnp.dtype = BF16) -> H200Program:
    """Compile a product of Llama-3.1-8B with a packed weight, which has zero points, for a GPU older than Hopper."""
    out, inner, function = PRODUCTS[name]
    x, groups = jax.ShapeDtypeStruct((1, rows, inner), dtype), (out, inner // 128)
    values, zeros = (jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in ((out, inner // 128, 64), groups))
    weight = Quantized(values, jax.ShapeDtypeStruct(groups, F32), "int4", zeros)  # type: ignore[arg-type]
    return compile_for(A100, function, x, weight, fail_on_spills=True)


@pytest.mark.parametrize("rows", [1, 61])
@pytest.mark.parametrize("dtype", [BF16, pytest.param(jnp.dtype("float16"), marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_with_a_packed_weight_compiled_for_a100_writes_no_widened_weight(
    name: str, dtype: jnp.dtype, rows: int
) -> None:
    """One launch more puts x into the order of the weight's bytes."""
    program, (out, inner, _), has_gate = compile_packed(name, rows, dtype), PRODUCTS[name], name == "gate and up"
    activations = 2 * rows * (inner + has_gate * out)  # in bytes: x, and gate and up before silu
    assert program.temp_bytes <= activations + 1024  # arrays are aligned
    assert program.count("grouped_matmul") == 1
    assert len(program.launches) == 2 + has_gate


@pytest.mark.parametrize("rows", [160, pytest.param(2048, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product_of_many_rows_with_a_packed_weight_compiled_for_a100_widens_at_most_2_27_values_at_once(
    name: str, rows: int
) -> None:
    program = compile_packed(name, rows)
    (out, inner, _), pieces = PRODUCTS[name], 4 if name == "head" else 1
    assert sum(launch.name.startswith("gemm") for launch in program.launches) == pieces
    assert program.count("grouped_matmul") == 0
    copy = 2 * out * inner // pieces
    sums = 4 * 4 * rows * out  # bytes of float32 results of up to four parts of k, or of a piece
    assert copy <= program.temp_bytes <= copy + sums
    shape = jax.ShapeDtypeStruct((out, inner // 128, 64), jnp.uint8)
    weight = Quantized(shape, jax.ShapeDtypeStruct((out, inner // 128), F32), "int4")  # type: ignore[arg-type]
    assert widened_bytes({"weight": weight}, rows) == copy
    assert widened_bytes({"weight": weight}, 64) == 0


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_product_of_very_many_float16_rows_with_bytes_is_finite_where_unscaled_sums_exceed_float16(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 512)).astype(np.float16)
    x[:, 3] = 1000
    weight = quantize(jnp.asarray(rng.normal(size=(32, 512)) / 50, F32), kind)
    got = grouped_matmul(jnp.asarray(x), weight, jnp.dtype("float16"), implementation="pallas")[0]
    wanted = x.astype(np.float64) @ np.asarray(weight.values, np.float64).T * np.asarray(weight.scale, np.float64)
    assert np.abs(wanted / np.asarray(weight.scale, np.float64)).max() > 65504
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=2**-9, atol=2**-9 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["down", "head"])
def test_product_of_very_many_rows_with_bytes_compiled_for_l40_widens_at_most_2_27_values_at_once(name: str) -> None:
    rows, (out, inner, function) = 1024, PRODUCTS[name]
    program = compile_for(L40, function, jax.ShapeDtypeStruct((1, rows, inner), BF16), abstract(out, inner))
    copy = widened_bytes({"weight": abstract(out, inner)}, rows)
    assert copy == 2 * out * inner // (4 if name == "head" else 1)
    assert copy <= program.temp_bytes <= copy + 4 * 4 * rows * out and program.count("grouped_matmul") == 0
    assert widened_bytes({"weight": abstract(out, inner)}, 768) == 0


def test_experts_with_packed_weights_are_not_widened() -> None:
    shape, scale = jax.ShapeDtypeStruct((4, 64, 8, 16), jnp.uint8), jax.ShapeDtypeStruct((4, 64, 2), F32)
    assert widened_bytes({"experts": Quantized(shape, scale, "int4")}, 1000) == 0  # type: ignore[arg-type]


def test_reference_of_a_product_in_groups_compiled_for_h100_writes_a_widened_weight() -> None:
    """Negative control of the test of memory."""
    x, weight = jax.ShapeDtypeStruct((61, 4096), BF16), abstract(6144, 4096)
    program = compile_for(H100, partial(grouped_matmul, dtype=F32, implementation="reference"), x, weight)
    assert program.temp_bytes >= 2 * 6144 * 4096
