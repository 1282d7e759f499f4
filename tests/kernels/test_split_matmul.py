"""Compare the partial sums of `split_matmul` with float64, and check their number and the launches on an H200."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, quantize_rows, split_matmul
from pallas_kernels.dispatch import TracedGPU
from pallas_kernels.layers.dense import split_kernel
from pallas_kernels.layers.dense.split_kernel import MOST_ROWS, parts_of
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.partial_sums import Scaled, reduce_partials
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.quantize_rows import Activation
from pallas_kernels.layers.weights import Quantized, QuantizedActivation
from tests.reference.activations import ACTIVATIONS
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

BF16, FP8 = jnp.dtype("bfloat16"), jnp.dtype("float8_e4m3fn")

mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")


def problem(rows: int, out: int, inner: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    x = on_device(rng.normal(size=(1, rows, inner)), dtype)
    return x, on_device(rng.normal(size=(out, inner)) / np.sqrt(inner), dtype)


def error(parts: jax.Array, x: jax.Array, weight: jax.Array) -> float:
    """Return the largest difference between the added-up partial sums and x @ weight.T in float64."""
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return float(np.abs(np.asarray(reduce_partials(parts, jnp.float32), np.float64) - wanted).max())


@pytest.mark.parametrize(
    ("rows", "out", "inner", "parts", "implementation"),
    cover.with_kernel(
        [(5, 1024, 2112, 11), (60, 1024, 2048, 4), (5, 1088, 2048, 4), (1, 1024, 2048, 4), (64, 6144, 2048, 2)], 2
    ),
)
def test_split_product_of_random_matrices_has_partial_sums_of_the_product(
    rows: int, out: int, inner: int, parts: int, implementation: str
) -> None:
    x, weight = problem(rows, out, inner, "bfloat16")
    got = split_matmul(x, weight, implementation=implementation)
    assert got.shape == (parts, 1, rows, out)
    assert got.dtype == jnp.float32
    assert error(got, x, weight) < 1e-5  # float32 sums of 2048 products of exact bfloat16 factors
    assert error(got[1:], x, weight) > 0.1, "control: without the first partial sum"


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
def test_split_product_of_many_tiles_has_one_part_in_the_dtype_of_x(
    implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_kernel, "LEAST_UNDIVIDED", 18)
    x, weight = problem(7, 18 * 64, 2176, "bfloat16")
    got = split_matmul(x, weight, implementation=implementation)
    assert (got.shape, got.dtype) == ((1, 1, 7, 18 * 64), BF16)
    assert error(got, x, weight) < 0.02  # one rounding to eight bits
    last = split_matmul(x, jnp.concatenate([weight[::-1], weight]), first=18 * 64, implementation=implementation)
    np.testing.assert_array_equal(last, got)
    assert error(got, x, weight[::-1]) > 1, "control: another weight"


@pytest.mark.parametrize(("rows", "out", "implementation"), cover.with_kernel([(5, 1024), (72, 1024), (5, 512)], 1))
def test_split_product_of_the_last_rows_of_a_weight_is_that_of_a_weight_with_only_these(
    rows: int, out: int, implementation: str
) -> None:
    x, weight = problem(rows, 192 + out, 2048, "bfloat16")
    got = split_matmul(x, weight, first=192, implementation=implementation)
    alone = split_matmul(x, weight[192:], implementation=implementation)
    assert got.shape == alone.shape and got.dtype == alone.dtype
    np.testing.assert_array_equal(got, alone)
    exact = error(got, x, weight[192:])
    assert exact < (0.05 if rows > MOST_ROWS or len(got) == 1 else 1e-5)
    assert error(got, x, weight[:-192]) > 0.1, "control: the first rows"


@pytest.mark.parametrize(("kind", "implementation"), cover.with_kernel((None, "fp8_dynamic"), 1))
def test_split_product_in_bfloat16_rounds_each_partial_sum_once(kind: Any, implementation: str) -> None:
    x, weight = problem(5, 1024, 2048, "bfloat16")
    stored = quantize(weight, kind) if kind else weight
    wide, narrow = (split_matmul(x, stored, dtype=dtype, implementation=implementation) for dtype in (None, BF16))
    assert narrow.dtype == BF16 and narrow.shape == wide.shape == (4, 1, 5, 1024)
    assert np.array_equal(narrow, wide.astype(BF16)) and not np.array_equal(narrow, wide)


@pytest.mark.parametrize(("gate", "kind"), [("silu", None), ("gelu_tanh", "fp8_dynamic")])
def test_product_of_gate_and_up_multiplies_activation_of_gate_by_up(gate: Activation, kind: Any) -> None:
    x, weight = problem(5, 1024, 2048, "bfloat16")
    both, stored = jnp.concatenate([x, x[:, ::-1]], axis=-1), quantize(weight, kind) if kind else weight
    own, up = np.asarray(x, np.float64), np.asarray(x[:, ::-1], np.float64)
    most = 0.25 if kind else 0.03  # two roundings to four bits; rounding of the gated values to eight bits
    for product in (split_matmul(both, stored, gate=gate), matmul(both, stored, gate=gate, dtype=jnp.float32)[None]):
        errors = {name: error(product, function(own) * up, weight) for name, function in ACTIVATIONS.items()}
        assert errors[gate] < most
        assert errors["gelu" if gate == "silu" else "silu"] > 2 * most, "control: another function"


@pytest.mark.parametrize(("inner", "parts"), [(2048, 2), (4096, 4), (8192, 8)])
def test_split_product_of_many_bfloat16_rows_has_the_error_of_one_rounding(inner: int, parts: int) -> None:
    """The rounding errors of all partial sums together are as large as the error of rounding their total once."""
    x, weight = problem(72, 1024, inner, "bfloat16")
    got = split_matmul(x, weight)
    assert (got.shape, got.dtype) == ((parts, 1, 72, 1024), BF16)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T

    def spread(values: Any) -> float:
        return float(np.std(np.asarray(values, np.float64) - exact))

    once = spread(on_device(exact, BF16))
    assert 0.5 * once < spread(reduce_partials(got, jnp.float32)) < 1.2 * once
    assert spread(reduce_partials(got[1:], jnp.float32)) > 100 * once, "control: without the first partial sum"


@pytest.mark.parametrize("implementation", ["pallas", "reference"])
def test_only_part_of_a_float16_product_may_exceed_the_largest_float16(
    implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_kernel, "LEAST_UNDIVIDED", 20)
    x, weight = on_device(np.full((1, 3, 2048), 8, np.float16)), on_device(np.full((20 * 64, 2048), 8, np.float16))
    got = split_matmul(x, weight, implementation=implementation)
    np.testing.assert_array_equal(got, np.full((1, 1, 3, 20 * 64), 2**17, np.float32))


@pytest.mark.parametrize("rows", [60, 72])
def test_split_product_of_float16_returns_partial_sums_above_the_largest_float16(rows: int) -> None:
    """The partial sums over the two halves of the inner axis are 2**16 and -2**16, which exceed float16 and cancel."""
    sign = jnp.where(on_device(np.arange(2048)) < 1024, 8, -8).astype(jnp.float16)
    x, weight = jnp.broadcast_to(sign, (1, rows, 2048)), on_device(np.full((1024, 2048), 8, jnp.float16))
    got = split_matmul(x, weight)
    assert got.shape[0] > 1
    assert np.abs(np.asarray(got)).max() * got.shape[0] == 2**17
    np.testing.assert_array_equal(reduce_partials(got, jnp.float32), 0)


@pytest.mark.once
def test_split_product_told_to_wait_for_an_array_returns_an_unchanged_result() -> None:
    x, weight = problem(5, 1024, 2048, "bfloat16")
    without, awaited = (split_matmul(x, weight, after=after, implementation="pallas") for after in (None, x[..., :8]))
    np.testing.assert_array_equal(without, awaited)


@pytest.mark.parametrize("waits", [True, False])
def test_split_product_told_to_wait_for_an_array_has_it_as_kernel_operand(waits: bool) -> None:
    """The argument `after` names the array; without it (negative control) both products may run side by side."""

    def both(x: jax.Array, weight: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = x @ head.T
        return logits, split_matmul(x, weight, after=logits if waits else None)  # type: ignore[return-value]

    shape = jax.ShapeDtypeStruct
    program = compile_for_h200(both, shape((5, 4096), BF16), shape((4096, 4096), BF16), shape((32000, 4096), BF16))
    text = program.compiled.as_text() or ""
    (call,) = re.findall(r"custom-call\((.*?)\), custom_call_target=.__gpu.xla.gpu.triton", text)
    assert len(call.split(", ")) == 2 + waits


@pytest.mark.parametrize(
    ("rows", "out", "inner", "dtype", "parts"),
    [
        (1, 4096, 4096, BF16, 2),
        (60, 4096, 14336, BF16, 2),
        (1, 2880, 4096, BF16, 4),  # two parts would be 90 programs of 64 columns
        (1, 2912, 4096, BF16, 1),  # no multiple of 64 columns
        (60, 6144, 4096, BF16, 2),
        (5, 6144, 4096, BF16, 2),
        (65, 4096, 4096, BF16, 4),  # by XLA, like all products of more than 64 rows
        (80, 4096, 14336, BF16, 8),
        (80, 6144, 4096, BF16, 4),
        (96, 4096, 14336, BF16, 4),
        (96, 6144, 4096, BF16, 2),
        (136, 4096, 14336, BF16, 2),
        (80, 4096, 14080, BF16, 4),  # 8 equal parts of the inner axis would not be multiples of 64 values
        (80, 10240, 8192, BF16, 2),
        (80, 8192, 28672, BF16, 4),
        (80, 1024, 2048, BF16, 2),  # more parts would be too short
        (512, 4096, 4096, BF16, 2),
        (513, 4096, 4096, BF16, 1),  # enough output tiles
        (160, 6144, 4096, BF16, 2),
        (320, 6144, 4096, BF16, 1),
        (5, 4096, 11008, BF16, 2),
        (5, 28672, 4096, BF16, 1),  # enough columns
        (5, 16384, 5120, BF16, 1),
        (40, 5120, 17408, BF16, 2),
        (5, 4096, 4096, jnp.dtype("float32"), 1),
        (1, 2048, 10944, BF16, 9),  # 171 steps of 64 values, which are no multiple of 4
        (5, 5120, 2880, BF16, 3),  # 45 steps
        (5, 4096, 3392, BF16, 1),  # 53 steps
        (80, 2048, 10944, BF16, 1),
        (5, 4096, 4100, BF16, 1),  # the inner axis cannot be divided into equal parts
        (5, 64, 4096, BF16, 1),  # small weight
    ],
)
def test_number_of_parts_of_large_weights_and_few_rows(
    rows: int, out: int, inner: int, dtype: jnp.dtype, parts: int
) -> None:
    """For small weights, many rows, many tiles or unequal parts it is one."""
    assert parts_of(rows, out, inner, dtype) == parts


def test_split_product_of_bfloat16_rows_by_a_float32_weight_matches_float64() -> None:
    rng = np.random.default_rng(0)
    x, weight = on_device(rng.normal(size=(3, 2048)), BF16), on_device(rng.normal(size=(1024, 2048)), jnp.float32)
    got = split_matmul(x, weight, implementation="pallas").astype(jnp.float32).sum(0)
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(got, wanted, atol=0.01 * np.abs(wanted).max())


@pytest.mark.parametrize(
    ("rows", "out", "inner"),
    [(65, 4096, 4096), (72, 4096, 14336), (88, 6144, 4096), (96, 6144, 4096), (128, 4096, 14336), (136, 4096, 4096)],
)
def test_split_product_of_many_rows_is_one_launch_by_xla(rows: int, out: int, inner: int) -> None:
    """If XLA divided the inner axis again, a second launch would add up its parts; the negative control has one."""

    def launches(multiply: Any, x: jax.Array, weight: jax.Array) -> int:
        return len(compile_for_h200(multiply, x, weight).launches)

    arrays = jax.ShapeDtypeStruct((rows, inner), BF16), jax.ShapeDtypeStruct((out, inner), BF16)
    assert launches(split_matmul, *arrays) == 1
    if (parts := parts_of(rows, out, inner, BF16)) > 2:

        def fewer(*arrays: jax.Array) -> jax.Array:
            return jnp.einsum("tsk,nsk->stn", *(array.reshape(array.shape[0], parts // 2, -1) for array in arrays))

        assert launches(fewer, *arrays) == 2


def test_split_product_of_small_weight_returns_one_partial_sum_in_x_dtype() -> None:
    x, weight = problem(5, 32, 64, "float32")
    got = split_matmul(x, weight)
    assert (got.shape, got.dtype) == ((1, 1, 5, 32), jnp.float32)
    assert error(got, x, weight) < 1e-5
    assert split_matmul(*problem(5, 32, 64, "bfloat16")).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 5, 20, 60])
@pytest.mark.parametrize(("out", "inner"), [(4096, 4096), (5120, 17408), (16384, 5120), (5120, 2880), (2048, 10944)])
def test_split_product_compiled_for_h200_is_one_launch_without_spills(rows: int, out: int, inner: int) -> None:
    x, weight = jax.ShapeDtypeStruct((1, rows, inner), BF16), jax.ShapeDtypeStruct((out, inner), BF16)
    program = compile_for_h200(
        lambda *arrays: split_matmul(*arrays, implementation="pallas"), x, weight, fail_on_spills=True
    )
    assert [launch.name for launch in program.launches] == ["split_matmul"]


@mosaic
@pytest.mark.parametrize(("rows", "hopper"), [(16, 0), (24, 1), (40, 1), (60, 0), (64, 1), (72, 0)])
def test_split_product_of_fp8_runs_the_hopper_kernel_only_for_some_row_counts(
    rows: int, hopper: int, compile_with_ptxas_output: Any
) -> None:
    """The row counts are the multiples of 8 from 24 to 64."""
    shape = jax.ShapeDtypeStruct
    x = QuantizedActivation(shape((1, rows, 4096), FP8), shape((1, rows), jnp.float32), BF16)
    weight = Quantized(shape((6144, 4096), FP8), shape((6144,), jnp.float32), "fp8_dynamic")
    program, printed = compile_with_ptxas_output(split_matmul, x, weight)
    assert program.count("kCustomCall") == hopper
    assert re.findall(r"\b(\d+) bytes spill stores, (\d+) bytes spill loads", printed) == [("0", "0")] * hopper
    assert sum(launch.kind != "kCopy" for launch in program.launches) == 1  # no launch of its own applies the scales


@mosaic
@pytest.mark.parametrize("implementation", ["reference", "pallas", "auto"])
def test_split_product_on_cpu_beside_a_hopper_gpu_returns_two_partial_sums(
    implementation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "traced_gpu", lambda: TracedGPU((9, 0), 132))
    x, weight = problem(40, 4096, 2048, "bfloat16")
    got = split_matmul(x, quantize(weight, "fp8_dynamic"), implementation=implementation)
    assert got.shape == (2, 1, 40, 4096)
    assert error(got, x, weight) < 0.3  # two roundings to four bits
    assert error(got[:1], x, weight) > 0.5


@pytest.mark.parametrize(
    ("rows", "dtype", "parts"), [(72, "bfloat16", 2), (264, "float16", 2), (2120, "float16", 1), (2120, "bfloat16", 1)]
)
def test_split_product_of_fp8_with_many_rows_returns_scaled_partial_sums(rows: int, dtype: str, parts: int) -> None:
    """The partial sums are scaled because unscaled ones, of values up to 448, would exceed float16."""
    x, weight = problem(rows, 1024, 2048, dtype)
    x, quantized = jnp.abs(x), quantize(jnp.abs(weight), "fp8_dynamic")
    got = split_matmul(x, quantized)
    assert got.shape == (parts, 1, rows, 1024)
    factors = (quantize_rows(x), (quantized.values, quantized.scale))
    exact = [np.asarray(values, np.float64) * np.asarray(scale, np.float64)[..., None] for values, scale in factors]
    right = exact[0] @ exact[1].T

    def largest_error(product: Any) -> float:
        return float((np.abs(np.asarray(reduce_partials(product, jnp.float32)) - right) / right).max())

    assert largest_error(got) < 1e-2
    assert isinstance(got, Scaled)
    assert largest_error(dataclasses.replace(got, scale=got.scale[::-1])) > 0.05
    assert largest_error(dataclasses.replace(got, row_scale=got.row_scale[:, ::-1])) > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [24, 40, 64])
def test_split_product_of_fp8_on_hopper_has_partial_sums_of_the_product(rows: int) -> None:
    for out, inner in ((6144, 4096), (4096, 14336)):
        x, weight = problem(rows, out, inner, "bfloat16")
        quantized, x8 = quantize(weight, "fp8_dynamic"), quantize_rows(x)
        exact = [
            np.asarray(v, np.float32) * np.asarray(s)[..., None] for v, s in (x8, (quantized.values, quantized.scale))
        ]
        got = split_matmul(QuantizedActivation(*x8, BF16), quantized)
        assert got.shape[0] == 2
        assert error(got, *exact) < 5e-2  # the tensor core adds up 7168 products with some 14 bits
        assert error(got[1:], *exact) > 0.5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "out", "inner"),
    [
        (1, 4096, 4096),
        (5, 6144, 4096),
        (60, 4096, 14336),
        (60, 6144, 8192),
        (32, 16384, 5120),
        (80, 4096, 14336),
        (160, 6144, 4096),
        (320, 4096, 14336),
    ],
)
def test_split_product_on_gpu_has_partial_sums_of_the_product(rows: int, out: int, inner: int) -> None:
    x, weight = problem(rows, out, inner, "bfloat16")
    got = split_matmul(x, weight, implementation="pallas")
    assert error(got, x, weight) < (1e-4 if got.dtype == jnp.float32 else 0.03)  # rounded sums of up to 4
    assert error(got[1:] if len(got) > 1 else got[..., ::-1], x, weight) > 1, "control: not all of the sum"
