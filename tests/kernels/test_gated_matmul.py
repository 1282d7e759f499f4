"""Compare `gated_matmul` by XLA and by the Hopper kernel with float64, and check their launches on an H200."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, gated_matmul, quantize_rows
from pallas_kernels.dispatch import TracedGPU
from pallas_kernels.layers.dense.gated_kernel import multiply as multiply_few
from pallas_kernels.layers.dense.hopper_kernel import multiply
from pallas_kernels.layers.dense.hopper_tiling import HopperTiles, choose_tiles
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.gated_matmul import has_few_rows, kernel_padding, tiles_for
from pallas_kernels.layers.quantize_rows import Activation
from pallas_kernels.layers.weights import Quantized, QuantizedActivation
from tests.reference.activations import ACTIVATIONS
from tests.support.arrays import on_device
from tests.support.gpus import GPUS, compile_for
from tests.support.h200 import compile_for_h200
from tests.support.mosaic import interpreted as run_interpreted

BF16, F16, F32, FP8 = (jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn"))
mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")


def problem(rows: int, out: int, inner: int, dtype: Any = BF16) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    x = on_device(rng.normal(size=(rows, inner)), dtype)
    return x, on_device(rng.normal(size=(2 * out, inner)) / np.sqrt(inner), dtype)


def wanted(x: Any, weight: Any, activation: str = "silu") -> np.ndarray:
    """Return activation(x @ gate.T) * (x @ up.T) in float64 [rows, out]."""
    gate, up = np.split(np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T, 2, axis=-1)
    return ACTIVATIONS[activation](gate) * up


def exact(quantized: QuantizedActivation | Quantized) -> np.ndarray:
    """Return the float64 values of a quantised matrix."""
    return np.asarray(quantized.values, np.float64) * np.asarray(quantized.scale, np.float64)[:, None]


def error(got: jax.Array, x: Any, weight: Any, activation: str = "silu") -> float:
    """Return the largest error of a product relative to 1 + |expected value|."""
    right = wanted(x, weight, activation)
    return float((np.abs(np.asarray(got, np.float64) - right) / (1 + np.abs(right))).max())


@pytest.mark.parametrize(("dtype", "most"), [(F32, 1e-5), (BF16, 2e-2)], ids=str)
def test_gated_matmul_by_xla_matches_float64(dtype: Any, most: float) -> None:
    x, weight = problem(40, 96, 128, dtype)
    got = gated_matmul(x.reshape(4, 10, -1), weight)
    assert (got.shape, got.dtype) == ((4, 10, 96), dtype)
    assert error(got.reshape(40, -1), x, weight) < most
    assert error(got.reshape(40, -1), x, jnp.roll(weight, 96, axis=0)) > 0.5, "control: gate and up swapped"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_matmul_by_xla_applies_the_activation_function_that_is_given(activation: Activation) -> None:
    x, weight = problem(5, 96, 128, F32)
    errors = {name: error(gated_matmul(x, weight, activation=activation), x, weight, name) for name in ACTIVATIONS}
    assert errors.pop(activation) < 1e-5
    assert min(errors.values()) > 1e-4, "control: the other functions"


def interpreted(
    *arrays: jax.Array, tiles: HopperTiles, dtype: Any = BF16, activation: Activation = "silu"
) -> jax.Array:
    """Run the Hopper kernel in jax's interpreter and return the sum of its parts; fail if races are detected."""
    got = run_interpreted(multiply, *arrays, tiles=tiles, dtype=dtype, activation=activation)
    assert got.shape[0] == tiles.parts
    return got.sum(axis=0)


@mosaic
@pytest.mark.parametrize(
    ("rows", "tiles"),
    [
        (
            5,
            HopperTiles(groups=1, columns=48, inner=64, stages=2, store=16, programs=4, halves=2),
        ),  # less than a TMA tile
        (
            40,
            HopperTiles(groups=1, columns=48, inner=64, stages=2, store=16, programs=3, halves=2),
        ),  # less than a warpgroup
        (72, HopperTiles(groups=2, columns=96, inner=64, stages=3, store=16, programs=1, halves=2)),  # 1 CTA, 2 tiles
        (
            128,
            HopperTiles(groups=2, columns=48, inner=64, stages=4, store=16, programs=3, halves=2),
        ),  # 4 tiles for 3 CTAs
        (40, HopperTiles(groups=1, columns=64, inner=64, stages=2, store=8, programs=2, halves=2, transposed=40)),
        (80, HopperTiles(groups=3, columns=192, inner=64, stages=3, store=16, programs=1, halves=2, transposed=80)),
        (72, HopperTiles(groups=2, columns=56, inner=64, stages=2, store=56, programs=2, halves=2)),  # stored at once
        (40, HopperTiles(groups=1, columns=136, inner=64, stages=2, store=8, programs=2, halves=2)),  # two operands
    ],
)
def test_hopper_kernel_interpreted_with_gate_and_up_weights_matches_float64(rows: int, tiles: HopperTiles) -> None:
    """The interpreter also fails if a barrier is passed too early or has arrivals left at the end."""
    out = 4 * tiles.columns if 192 % tiles.columns else 192
    x, weight = problem(rows, out, 320)
    got = interpreted(x, weight, tiles=tiles)
    assert (got.shape, got.dtype) == ((rows, out), BF16)
    assert error(got, x, weight) < 4e-3  # one rounding to eight bits
    assert error(got, x, jnp.roll(weight, out, axis=0)) > 0.5
    assert error(got, x.at[rows - 1].set(0), weight) > 0.1, "control: last row zero"


@mosaic
def test_hopper_kernel_interpreted_with_gelu_by_tanh_matches_float64() -> None:
    x, weight = problem(8, 192, 128)
    tiles = HopperTiles(groups=1, columns=48, inner=64, stages=2, store=16, programs=4, halves=2)
    got = interpreted(x, weight, tiles=tiles, dtype=F32, activation="gelu_tanh")
    errors = {name: error(got, x, weight, name) for name in ACTIVATIONS}
    assert errors.pop("gelu_tanh") < 1e-5
    assert min(errors.values()) > 1e-4, "control: the other functions"


def test_hopper_tiles_of_float8_leave_shared_memory_for_scales_and_4_stages() -> None:
    kept = {rows: choose_tiles(rows, 4096, 14336, FP8, 132, halves=2) for rows in (5, 40, 160, 264, 320)}
    assert [tiles.scale_tiles for tiles in kept.values() if tiles] == [1, 1, 1, 2, 2]
    assert [tiles.stages for tiles in kept.values() if tiles] == [6, 6, 4, 4, 4]
    assert [tiles.stores_in_x for tiles in kept.values() if tiles] == [False, False, False, True, True]
    for rows in (40, 320):
        tiles = choose_tiles(rows, 4096, 14336, BF16, 132, halves=2)
        assert tiles and tiles.scale_tiles == 0
    wide = [choose_tiles(rows, 8192, 28672, FP8, 132, halves=2) for rows in (312, 320)]  # four tiles per CTA
    assert [(tiles.scale_tiles, tiles.stages) for tiles in wide if tiles] == [(4, 4), (4, 4)]


@pytest.mark.parametrize(
    ("rows", "out", "columns"),
    [
        (32, 14336, 112),  # 128 tiles
        (32, 17408, 136),  # 128 tiles of gate and of up, each an operand
        (128, 17408, 136),
        (160, 17408, None),  # with three warpgroups, registers suffice for 128 columns
        (72, 14336, 128),  # transposed
        (112, 14336, 112),
        (136, 14336, 128),
        (160, 14336, 128),
        (168, 14336, 112),
        (160, 12288, 96),
        (96, 28736, None),
        (192, 14336, 112),
        (200, 14336, 56),  # with four warpgroups, registers suffice for 88 columns at most
        (320, 14336, 56),
        (64, 12288, 96),
        (64, 8192, 64),
        (64, 28672, 112),  # 256 tiles
        (5, 14336, 112),
        (36, 14336, None),  # not a multiple of 8 rows
        (328, 14336, None),  # would need more than five warpgroups
        (64, 18944, None),  # 296 tiles of 64 columns would take as long as 396
        (64, 14340, None),
    ],
)
def test_hopper_tiles_of_each_shape_leave_few_multiprocessors_idle(rows: int, out: int, columns: int | None) -> None:
    tiles = choose_tiles(rows, 4096, out, BF16, 132, halves=2)
    assert (tiles and tiles.columns) == columns
    if tiles:
        assert tiles.stages >= 3
        assert tiles.transposed == (rows if columns == 128 else 0)
        assert tiles.transposed or tiles.groups * 64 >= rows > tiles.groups * 64 - 64


@pytest.mark.parametrize(("inner", "dtype"), [(4096, F32), (4000, BF16)], ids=str)
def test_hopper_tiles_of_unsupported_inner_size_or_dtype_are_none(inner: int, dtype: Any) -> None:
    assert choose_tiles(64, inner, 14336, dtype, 132) is None


@mosaic
@pytest.mark.parametrize(
    ("rows", "columns", "programs"),
    [pytest.param(40, 96, 3, marks=pytest.mark.long), pytest.param(64, 96, 8, marks=pytest.mark.matrix), (8, 48, 16)],
)
def test_hopper_kernel_interpreted_with_two_parts_sums_them_to_the_product(
    rows: int, columns: int, programs: int
) -> None:
    x, weight = problem(rows, 192, 512)
    tiles = HopperTiles(groups=1, columns=columns, inner=64, stages=3, store=16, programs=programs, parts=2)
    right = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    got, wrong = (np.asarray(interpreted(*pair, tiles=tiles, dtype=F32)) for pair in ((x, weight), (x[::-1], weight)))
    assert np.abs(got - right).max() < 1e-5
    assert np.abs(wrong - right).max() > 0.5, "control: rows reversed"
    half = np.asarray(interpreted(x[:, :256], weight[:, :256], tiles=tiles, dtype=F32))
    assert np.abs(half - right).max() > 0.5, "control: half of k"


@pytest.mark.once
@mosaic
def test_hopper_kernel_interpreted_with_scales_applies_them_to_both_parts() -> None:
    x, weight = problem(40, 192, 1024)
    rows, quantized = quantize_rows(x), quantize(weight, "fp8_dynamic")
    right = exact(QuantizedActivation(*rows, BF16)) @ exact(quantized).T
    tiles = HopperTiles(groups=1, columns=96, inner=128, stages=3, store=16, programs=5, parts=2, scale_tiles=2)

    def largest_error(row_scale: jax.Array, scale: jax.Array) -> float:
        got = interpreted(rows[0], quantized.values, row_scale, scale, tiles=tiles, dtype=F32)
        return float(np.abs(np.asarray(got) - right).max())

    assert largest_error(rows[1], quantized.scale) < 1e-4
    assert largest_error(rows[1], jnp.roll(quantized.scale, 96)) > 0.1
    assert largest_error(rows[1][::-1], quantized.scale) > 0.1


@mosaic
@pytest.mark.parametrize(
    ("many", "tiles"),
    [
        pytest.param(
            72,
            HopperTiles(groups=2, columns=96, inner=128, stages=3, store=16, programs=1, halves=2, scale_tiles=2),
            marks=pytest.mark.matrix,
        ),
        (5, HopperTiles(groups=1, columns=48, inner=128, stages=3, store=16, programs=3, halves=2, scale_tiles=2)),
        (16, HopperTiles(groups=1, columns=136, inner=128, stages=2, store=8, programs=1, halves=2, scale_tiles=4)),
        pytest.param(
            128,
            HopperTiles(groups=2, columns=96, inner=128, stages=3, store=16, programs=2, halves=2),
            marks=pytest.mark.long,
        ),
        pytest.param(
            128,
            HopperTiles(groups=2, columns=56, inner=128, stages=2, store=56, programs=1, halves=2, scale_tiles=4),
            marks=pytest.mark.long,
        ),
        pytest.param(
            72,
            HopperTiles(
                groups=2, columns=128, inner=128, stages=2, store=8, programs=1, halves=2, scale_tiles=2, transposed=72
            ),
            marks=pytest.mark.long,
        ),
        (48, HopperTiles(groups=2, columns=128, inner=128, stages=2, store=16, programs=2, halves=2, transposed=48)),
    ],
)
def test_hopper_kernel_interpreted_with_fp8_gate_and_up_applies_their_scales(many: int, tiles: HopperTiles) -> None:
    out = 256 if tiles.transposed else 4 * tiles.columns if 192 % tiles.columns else 192
    x, weight = problem(many, out, 640)
    rows, quantized = QuantizedActivation(*quantize_rows(x), BF16), quantize(weight, "fp8_dynamic")
    call = partial(interpreted, tiles=tiles)
    factors = exact(rows), exact(quantized)
    assert error(call(rows.values, quantized.values, rows.scale, quantized.scale), *factors) < 4e-3
    assert error(call(rows.values, quantized.values, rows.scale[::-1], quantized.scale), *factors) > 0.05
    assert error(call(rows.values, quantized.values, rows.scale, jnp.roll(quantized.scale, out)), *factors) > 0.05


@mosaic
@pytest.mark.parametrize(
    ("rows", "out", "inner", "dtype", "activation"),
    [
        *((rows, 14336, 4096, BF16, "silu") for rows in (72, 160, 192, 320)),
        (64, 6144, 4096, BF16, "silu"),
        (320, 6144, 2048, F16, "silu"),
        (128, 8192, 2048, BF16, "silu"),
        *((rows, 17408, 5120, dtype, "silu") for rows, dtype in ((32, BF16), (128, BF16), (64, FP8))),
        (72, 28672, 8192, BF16, "silu"),
        *((rows, 14336, 4096, FP8, "silu") for rows in (2, 64, 160, 256, 320)),
        *((rows, 14336, 3584, BF16, "gelu_tanh") for rows in (64, 160, 192)),  # Gemma 2 9B
        (320, 14336, 3584, FP8, "gelu_tanh"),
        *(
            pytest.param(rows, 14336, 4096, dtype, activation, marks=pytest.mark.matrix)
            for dtype, many in ((BF16, (96, 136, 256)), (FP8, (8, 40, 128)))
            for rows in many
            for activation in ("silu", "gelu_tanh")
        ),
        pytest.param(128, 17408, 5120, BF16, "gelu_tanh", marks=pytest.mark.matrix),
    ],
)
def test_gated_matmul_compiled_for_h200_is_one_launch_without_spills(
    rows: int, out: int, inner: int, dtype: Any, activation: Activation, compile_with_ptxas_output: Any
) -> None:
    shape = jax.ShapeDtypeStruct
    x, weight = shape((2, rows // 2, inner), dtype), shape((2 * out, inner), dtype)
    if dtype == FP8:
        x = QuantizedActivation(x, shape((2, rows // 2), F32), BF16)
        weight = Quantized(weight, shape((2 * out,), F32), "fp8_dynamic")
    program, printed = compile_with_ptxas_output(gated_matmul, x, weight, activation=activation)
    assert [launch.name for launch in program.launches] == ["kCustomCall"]
    assert re.findall(r"\b(\d+) bytes spill stores, (\d+) bytes spill loads", printed) == [("0", "0")]


@mosaic
def test_hopper_kernel_has_tiles_only_for_supported_dtypes_and_enough_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "traced_gpu", lambda: TracedGPU((9, 0), 132))
    out, inner = 132 * 48, 128
    bf16, int8, fp8 = (on_device(np.zeros((2 * out, inner), dtype)) for dtype in (BF16, jnp.int8, FP8))
    scale = on_device(np.ones(2 * out, F32))
    weights = {
        "bf16": bf16,
        "int8": Quantized(int8, scale, "int8"),
        "fp8": Quantized(fp8, scale, "fp8"),
        "fp8_dynamic": Quantized(fp8, scale, "fp8_dynamic"),
    }
    rows = {dtype: on_device(np.zeros((320, inner), dtype)) for dtype in (BF16, F16, F32)}
    supported = {(str(dtype), name) for dtype in rows for name in weights if tiles_for(rows[dtype], weights[name])}
    assert supported == {("bfloat16", "bf16"), ("bfloat16", "fp8_dynamic"), ("float16", "fp8_dynamic")}
    x8 = QuantizedActivation(on_device(np.zeros((320, inner), FP8)), on_device(np.ones(320, F32)), F32)
    assert tiles_for(dataclasses.replace(x8, dtype=BF16), weights["fp8_dynamic"])
    few = {dtype: on_device(np.zeros((24, inner), dtype)) for dtype in (BF16, FP8)}
    assert not tiles_for(few[BF16], weights["bf16"]), "XLA is as fast"
    assert tiles_for(QuantizedActivation(few[FP8], on_device(np.ones(24, F32)), BF16), weights["fp8_dynamic"])
    assert not tiles_for(x8, weights["fp8_dynamic"])
    assert tiles_for(rows[BF16], bf16, "gelu_tanh")
    assert not tiles_for(rows[BF16], bf16, "gelu"), "the kernel has no erf"


@mosaic
def test_kernel_padding_of_unsupported_row_count_reaches_the_next_supported_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = on_device(np.zeros((2 * 6144, 1024), BF16))
    wanted = {
        (1, 60): 4,
        (1, 64): 0,
        (2, 30): 2,
        (4, 9): 1,
        (1, 5): 0,
        (1, 30): 0,
        (1, 318): 2,
        (1, 321): 0,
        (33, 1): 0,
    }
    assert not any(kernel_padding(*shape, weight, BF16) for shape in wanted), "XLA needs no padding"
    monkeypatch.setattr(dispatch, "traced_gpu", lambda: TracedGPU((9, 0), 132))
    assert {shape: kernel_padding(*shape, weight, BF16) for shape in wanted} == wanted
    assert kernel_padding(1, 60, weight, F32) == 0
    assert kernel_padding(1, 60, weight, BF16, "gelu_tanh") == 4
    assert kernel_padding(1, 60, weight, BF16, "gelu") == 0, "XLA needs no padding"
    wide = jax.ShapeDtypeStruct((2 * 14336, 1024), BF16)
    assert [kernel_padding(1, rows, wide, BF16) for rows in (60, 68)] == [0, 4], "60 rows are few"


@mosaic
@pytest.mark.parametrize(("activation", "runs_kernel"), [("gelu_tanh", True), ("gelu", False)])
def test_gated_matmul_on_h200_runs_the_kernel_for_gelu_by_tanh_alone(activation: Activation, runs_kernel: bool) -> None:
    x, weight = jax.ShapeDtypeStruct((64, 1024), BF16), jax.ShapeDtypeStruct((2 * 6144, 1024), BF16)
    program = compile_for_h200(partial(gated_matmul, activation=activation), x, weight)
    assert program.count("kCustomCall") == runs_kernel


@mosaic
@pytest.mark.parametrize(("implementation", "runs_kernel"), [("auto", True), ("pallas", True), ("reference", False)])
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_gated_matmul_on_h200_runs_the_kernel_unless_reference_is_chosen(
    implementation: Any, runs_kernel: bool, dtype: Any
) -> None:
    x, weight = jax.ShapeDtypeStruct((64, 1024), BF16), jax.ShapeDtypeStruct((2 * 6144, 1024), dtype)
    if dtype == FP8:
        weight = Quantized(weight, jax.ShapeDtypeStruct((2 * 6144,), F32), "fp8_dynamic")
    program = compile_for_h200(partial(gated_matmul, implementation=implementation), x, weight)
    assert program.count("kCustomCall") == runs_kernel


@mosaic
def test_gated_matmul_on_cpu_beside_a_hopper_gpu_matches_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "traced_gpu", lambda: TracedGPU((9, 0), 4))
    x, weight = problem(80, 192, 256)
    assert tiles_for(x, weight)
    for implementation in ("auto", "pallas", "reference"):
        assert error(gated_matmul(x, weight, implementation=implementation), x, weight) < 2e-2


@mosaic
@pytest.mark.parametrize(("gpu", "runs_kernel"), [("A100", False), ("L40", False), ("H100", True), ("B200", False)])
def test_gated_matmul_on_other_gpus_does_not_run_the_hopper_kernel(gpu: str, runs_kernel: bool) -> None:
    x, weight = jax.ShapeDtypeStruct((64, 1024), BF16), jax.ShapeDtypeStruct((2 * 6144, 1024), BF16)
    launches = compile_for(GPUS[gpu], lambda *arrays: gated_matmul(*arrays), x, weight).launches
    assert ([launch.kind for launch in launches] == ["kCustomCall"]) == runs_kernel


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        *((11, BF16), (64, F16)),
        *(pytest.param(*case, marks=pytest.mark.newest) for case in ((8, BF16), (48, BF16), (64, BF16))),
        *(pytest.param(*case, marks=pytest.mark.newest) for case in ((8, F16), (11, F16), (48, F16))),
    ],
)
def test_kernel_of_a_few_rows_interpreted_matches_float64(rows: int, dtype: Any) -> None:
    x, weight = problem(rows, 192, 384, dtype)
    got = multiply_few(x, weight, interpret=True)
    assert error(got, x, weight) < 4e-3
    assert error(got, x.at[rows - 1].set(0), weight) > 0.1


@mosaic
@pytest.mark.parametrize(("rows", "out", "inner"), [(8, 14336, 4096), (48, 14336, 4096), (64, 28672, 8192)])
def test_kernel_of_a_few_rows_compiled_for_h200_is_one_launch_without_spills(rows: int, out: int, inner: int) -> None:
    x, weight = jax.ShapeDtypeStruct((1, rows, inner), BF16), jax.ShapeDtypeStruct((2 * out, inner), BF16)
    program = compile_for_h200(lambda *arrays: gated_matmul(*arrays), x, weight, fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["gated_matmul"]


@mosaic
@pytest.mark.parametrize("gpu", ["A100", "L40", "H100", "B200"])
def test_kernel_of_a_few_rows_runs_on_hopper_alone_for_wide_weights_of_two_bytes(gpu: str) -> None:
    def count(rows: int, out: int = 14336, dtype: Any = BF16, **options: Any) -> int:
        x, weight = jax.ShapeDtypeStruct((1, rows, 1024), dtype), jax.ShapeDtypeStruct((2 * out, 1024), dtype)
        return compile_for(GPUS[gpu], lambda *arrays: gated_matmul(*arrays, **options), x, weight).count("gated_matmul")

    is_hopper = gpu == "H100"
    assert [count(rows) for rows in (8, 64)] == [is_hopper, is_hopper]
    if is_hopper:
        others: list[dict[str, Any]] = [
            {"rows": 7},
            {"rows": 65},
            {"rows": 48, "out": 6144},
            {"rows": 48, "out": 12288},  # 192 tiles for 132 multiprocessors
            {"rows": 48, "dtype": F32},
            {"rows": 48, "activation": "gelu_tanh"},
            {"rows": 48, "implementation": "reference"},
        ]
        assert not any(count(**case) for case in others)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 11, 32, 40, 64, 72, 128, 160, 192, 200, 256, 264, 320])
def test_gated_matmul_on_gpu_matches_float64(rows: int) -> None:
    for out, inner, dtype in ((14336, 4096, BF16), (6144, 1024, F16), (17408, 1024, BF16)):
        x, weight = problem(rows, out, inner, dtype)
        got = gated_matmul(x, weight)
        has_kernel = has_few_rows(x, weight, "silu") or tiles_for(x, weight, "silu") is not None
        assert error(got, x, weight) < (4e-3 if has_kernel else 2e-2)  # XLA also rounds gate and up
        assert error(got, x.at[rows - 1].set(0), weight) > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 40, 72, 160, 192, 320])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
def test_gated_matmul_on_gpu_of_gelu_matches_float64(activation: Activation, rows: int) -> None:
    x, weight = problem(rows, 14336, 3584)
    got = gated_matmul(x, weight, activation=activation)
    most = 4e-3 if tiles_for(x, weight, activation) else 2e-2  # XLA also rounds gate and up
    assert error(got, x, weight, activation) < most
    assert error(got, x, weight, "silu") > 0.1, "control: another function"
    quantized, x8 = quantize(weight, "fp8_dynamic"), QuantizedActivation(*quantize_rows(x), BF16)
    got, factors = gated_matmul(x8, quantized, activation=activation), (exact(x8), exact(quantized))
    assert error(got, *factors, activation) < 2e-2
    assert error(got, *factors, "silu") > 0.1, "control: another function"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 8, 32, 72, 160, 264, 320])
def test_gated_matmul_on_gpu_of_fp8_weights_applies_their_scales(rows: int) -> None:
    """The tolerance is large because tensor cores add up products of float8 with some 14 bits."""
    x, weight = problem(rows, 17408 if rows == 32 else 14336, 4096)
    quantized = quantize(weight, "fp8_dynamic")
    x8 = QuantizedActivation(*quantize_rows(x), BF16)
    factors = exact(x8), exact(quantized)
    assert error(gated_matmul(x8, quantized), *factors) < 2e-2
    assert error(gated_matmul(x, quantized), *factors) < 2e-2
    assert error(gated_matmul(x8, quantized), factors[0][::-1], factors[1]) > 0.5
