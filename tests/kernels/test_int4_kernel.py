"""Compare the Hopper kernel of packed weights with float64 in jax's interpreter, and compile it for an H200."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layers.dense.grouped_matmul import grouped_matmul
from pallas_kernels.layers.gated_matmul import gated_matmul
from pallas_kernels.layers.packed import int4
from pallas_kernels.layers.packed.byte_cta import ByteCta
from pallas_kernels.layers.packed.int4_kernel import multiply
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles, choose_tiles, copied_groups
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.quantize_rows import Activation
from pallas_kernels.layers.weights import Kind, Quantized
from tests.reference import int4 as reference
from tests.reference.activations import ACTIVATIONS
from tests.support.arrays import on_device
from tests.support.mosaic import interpreted as run_interpreted

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")
SPILLS = {("qkv", 512, 32): 8, ("o", 512, 32): 24, ("gate_up", 512, 32): 8, ("down", 512, 32): 24}  # bytes, if not 0
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # Llama-3.1-8B


@pytest.mark.once
def test_bytes_of_128_columns_are_the_registers_of_wgmma_in_their_order() -> None:
    """A thread's word holds eight values of a row: pairs 16 bits apart, which become registers of two values.

    For k from 0 to 15, PTX's fragment of the first operand gives thread t of four columns 2t and 2t + 1 in a register,
    and 2t + 8 and 2t + 9 in the next one of the row.
    """
    values = np.random.default_rng(0).integers(0, 16, (1, 128)).astype(np.uint8)
    words = int4.pack(values).reshape(4, 4, 4).view(np.uint32)[..., 0]  # [thread, word]
    for thread, word, register in np.ndindex(4, 4, 4):
        first = 32 * word + 16 * (register // 2) + 8 * (register % 2) + 2 * thread
        pair = words[thread, word] >> (4 * register) & 0x000F000F
        assert (pair & 0xFFFF, pair >> 16) == (values[0, first], values[0, first + 1])


def interpreted(x: jax.Array, *weight: jax.Array, tiles: Int4Tiles, **more: Any) -> np.ndarray:
    """Run the kernel in jax's interpreter and return the sum of its parts; fail if races are detected."""
    got = run_interpreted(multiply, x, *weight, tiles=tiles, dtype=F32, **more)
    assert got.shape == (tiles.parts, len(x), len(weight[0]) // (2 if "activation" in more else 1))
    return np.asarray(got, np.float64).sum(axis=0)


@mosaic
@pytest.mark.parametrize(
    ("rows", "inner", "group", "has_zeros", "tiles"),
    [
        (
            5,
            512,
            128,
            True,
            Int4Tiles(height=8, channels=1, splits=2, stages=2, parts=1, programs=1),
        ),  # 2 items, joined
        (
            20,
            256,
            64,
            False,
            Int4Tiles(height=16, channels=2, splits=1, stages=2, parts=1, programs=2),
        ),  # 2 tiles of rows
        (8, 512, 32, True, Int4Tiles(height=8, channels=1, splits=1, stages=3, parts=2, programs=3)),  # 4 items, 3 CTAs
        (3, 768, 384, True, Int4Tiles(height=8, channels=2, splits=1, stages=2, parts=2, programs=1)),
        (
            3,
            2048,
            128,
            True,
            Int4Tiles(height=8, channels=1, splits=4, stages=2, parts=2, programs=2, width=32),
        ),  # boxes
        (
            3,
            2048,
            128,
            True,
            Int4Tiles(height=8, channels=1, splits=2, stages=2, parts=2, programs=2, depth=2, width=48),
        ),
        (
            20,
            1024,
            128,
            True,
            Int4Tiles(height=16, channels=1, splits=2, stages=2, parts=1, programs=3, has_loader=True),
        ),
    ],
)
def test_hopper_kernel_of_packed_weights_interpreted_matches_float64(
    rows: int, inner: int, group: int, has_zeros: bool, tiles: Int4Tiles
) -> None:
    """The interpreter also fails if a barrier is passed too early or has arrivals left at the end."""
    rng, out = np.random.default_rng(rows), 384 if tiles.width == 48 else 128
    x = on_device(rng.normal(size=(rows, inner)), BF16)
    packed = int4.pack(rng.integers(0, 16, (out, inner)).astype(np.uint8))
    scale = (10.0 ** rng.uniform(-3, -2, (out, inner // group))).astype(np.float32)
    zeros = rng.integers(0, 17, scale.shape).astype(np.uint8) if has_zeros else None
    given = [on_device(array) for array in (packed, scale, zeros) if array is not None]
    got = interpreted(x, *given, tiles=tiles)

    def error(*weight: Any) -> float:
        wanted = np.asarray(x, np.float64) @ reference.device(*weight).astype(np.float64).T
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    assert error(packed, scale, zeros) < 1e-6  # float32 sums of exact products
    assert error(packed << 4 | packed >> 4, scale, zeros) > 0.1, "control: halves swapped"
    assert error(packed, np.roll(scale, 1, axis=0), zeros) > 0.1, "control: scales of the row before"


@mosaic
@pytest.mark.parametrize(
    ("rows", "has_zeros", "activation", "tiles"),
    [
        (5, False, "silu", Int4Tiles(height=8, channels=1, splits=4, stages=2, parts=1, programs=2, width=48)),
        (12, True, "gelu_tanh", Int4Tiles(height=8, channels=2, splits=1, stages=2, parts=1, programs=2)),
    ],
)
def test_gate_and_up_interpreted_match_float64(rows: int, has_zeros: bool, activation: str, tiles: Int4Tiles) -> None:
    rng, (out, inner) = np.random.default_rng(rows), (192, 1024)
    x = on_device(rng.normal(size=(rows, inner)), BF16)
    packed = int4.pack(rng.integers(0, 16, (2 * out, inner)).astype(np.uint8))
    scale = (10.0 ** rng.uniform(-3, -2, (2 * out, inner // 64))).astype(np.float32)
    zeros = rng.integers(0, 17, scale.shape).astype(np.uint8) if has_zeros else None
    given = [on_device(array) for array in (packed, scale, zeros) if array is not None]
    got = interpreted(x, *given, tiles=tiles, activation=activation)
    both = np.asarray(x, np.float64) @ reference.device(packed, scale, zeros).astype(np.float64).T
    (gate, up), function = np.split(both, 2, axis=1), ACTIVATIONS[activation]
    other = ACTIVATIONS["silu" if activation == "gelu_tanh" else "gelu_tanh"]

    def error(wanted: np.ndarray) -> float:
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    assert error(function(gate) * up) < 1e-6
    assert error(function(up) * gate) > 0.1, "control: gate and up exchanged"
    assert error(other(gate) * up) > 1e-3, "control: the other activation function"


KINDS_OF_BYTES: dict[Kind, np.dtype] = {"int8": np.dtype("int8"), "fp8": np.dtype(jnp.float8_e4m3fn)}


def weight_of_bytes(kind: Kind, out: int, inner: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random bytes of all values but NaN, their scales, and the weight in float64 by the table of ml_dtypes."""
    rng = np.random.default_rng(inner)
    every = np.arange(256, dtype=np.uint8).view(KINDS_OF_BYTES[kind])
    values = rng.choice(every[np.isfinite(every.astype(np.float32))], (out, inner))
    scale = (10.0 ** rng.uniform(-3, -2, (out, groups))).astype(np.float32)
    return values, scale, values.astype(np.float64) * np.repeat(scale.astype(np.float64), inner // groups, axis=1)


def gate_times_up(both: np.ndarray) -> np.ndarray:
    gate, up = np.split(both, 2, axis=1)
    return ACTIVATIONS["silu"](gate) * up


@mosaic
@pytest.mark.parametrize("kind", KINDS_OF_BYTES)
@pytest.mark.parametrize(
    ("rows", "groups", "activation", "tiles"),
    [
        (5, 1, None, Int4Tiles(height=8, channels=1, splits=2, stages=2, parts=1, programs=1)),
        (20, 1, None, Int4Tiles(height=16, channels=2, splits=1, stages=3, parts=2, programs=2)),
        (5, 4, None, Int4Tiles(height=8, channels=1, splits=4, stages=2, parts=1, programs=2)),
        (5, 1, "silu", Int4Tiles(height=8, channels=2, splits=1, stages=2, parts=1, programs=1)),
        (
            40,
            1,
            None,
            Int4Tiles(
                height=16, channels=1, splits=1, stages=3, parts=1, programs=4, has_loader=True, has_many_rows=True
            ),
        ),
        (
            20,
            4,
            "silu",
            Int4Tiles(
                height=16, channels=2, splits=1, stages=3, parts=1, programs=2, has_loader=True, has_many_rows=True
            ),
        ),
    ],
)
def test_hopper_kernel_of_bytes_interpreted_matches_float64(
    kind: Kind, rows: int, groups: int, activation: Activation | None, tiles: Int4Tiles
) -> None:
    values, scale, weight = weight_of_bytes(kind, 128, 512, groups)
    x = on_device(np.random.default_rng(rows).normal(size=(rows, 512)) / (100 if activation else 1), BF16)
    more = {"activation": activation} if activation else {}
    got = interpreted(x, on_device(values), on_device(scale), tiles=tiles, kind=kind, **more)

    def error(weight: np.ndarray) -> float:
        wanted = np.asarray(x, np.float64) @ weight.T
        wanted = gate_times_up(wanted) if activation else wanted
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    assert error(weight) < (2**-8 if tiles.has_many_rows and groups > 1 else 1e-6)  # scaled values are rounded then
    assert error(np.roll(weight, 1, axis=0)) > 0.1, "control: the weights of the row before"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS_OF_BYTES)
def test_bytes_widened_on_a_gpu_have_exactly_the_values_of_their_dtype(kind: Kind, dtype: str) -> None:
    """Each row of x selects a column; the kernel's registers exist on a GPU alone."""
    values, _, _ = weight_of_bytes(kind, 256, 512, 1)
    weight = Quantized(on_device(values), jnp.ones(256), kind)
    got = grouped_matmul(jnp.eye(512, dtype=dtype), weight, F32, implementation="pallas")
    np.testing.assert_array_equal(np.asarray(got).sum(axis=0), values.astype(np.float32).T)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS_OF_BYTES)
@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("rows", [1, 5, 33, 170, 400, 800, 2500])
def test_product_with_bytes_on_a_gpu_matches_float64(kind: Kind, groups: int, rows: int) -> None:
    values, scale, weight = weight_of_bytes(kind, 1024, 2048, groups)
    x = on_device(np.random.default_rng(rows).normal(size=(rows, 2048)), BF16)
    operand = Quantized(on_device(values), on_device(scale if groups > 1 else scale[:, 0]), kind)
    wanted = np.asarray(x, np.float64) @ weight.T
    got = [matmul(x, operand, F32), gated_matmul(x / 100, operand)]
    for result, right in zip(got, (wanted, gate_times_up(np.asarray(x / 100, np.float64) @ weight.T)), strict=True):
        error = np.abs(np.asarray(result, np.float64) - right).max() / np.abs(right).max()
        is_exact = result.dtype == F32 and (rows <= 64 or groups == 1)  # else scaled values are rounded
        # More rows are multiplied by a copy in bfloat16, which rounds gate, up and the activation too.
        assert error < (1e-5 if is_exact else 2**-7 if rows <= 2048 else 2**-6)
    assert np.abs(np.asarray(got[0]) - np.roll(wanted, 1, axis=1)).max() > 0.1 * np.abs(wanted).max(), "control"


def packed_weight(packed: np.ndarray, scale: np.ndarray, zeros: np.ndarray | None) -> Quantized:
    return Quantized(on_device(packed), on_device(scale), "int4", None if zeros is None else on_device(zeros))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("inner", "group", "has_zeros"),
    [
        *((2048, group, has_zeros) for group, has_zeros in ((128, False), (128, True), (64, True), (32, False))),
        (1536, 128, True),  # zero points are loaded into registers
        (1792, 128, True),  # and scales too
    ],
)
@pytest.mark.parametrize("rows", [1, 5, 20, 33, 170])
def test_product_with_a_packed_weight_on_a_gpu_matches_float64(
    rows: int, inner: int, group: int, has_zeros: bool, dtype: str
) -> None:
    """On a Hopper GPU this is the kernel itself, of which the interpreter replaces what works on registers."""
    rng, out = np.random.default_rng(rows), 768
    x = jnp.asarray(rng.normal(size=(rows, inner)), dtype)
    packed = int4.pack(rng.integers(0, 16, (out, inner)).astype(np.uint8))
    scale = (10.0 ** rng.uniform(-3, -2, (out, inner // group))).astype(np.float32)
    zeros = rng.integers(0, 17, scale.shape).astype(np.uint8) if has_zeros else None
    own = packed_weight(packed, scale, zeros)
    got = np.asarray(grouped_matmul(x, own, F32, implementation="pallas"), np.float64).sum(axis=0)

    def error(*weight: Any) -> float:
        wanted = np.asarray(x, np.float64) @ reference.device(*weight).astype(np.float64).T
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    assert error(packed, scale, zeros) < 1e-6
    assert error(packed << 4 | packed >> 4, scale, zeros) > 0.1, "control: halves swapped"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("inner", "group", "has_zeros", "activation"),
    [
        (2048, 128, False, "silu"),
        (2048, 128, True, "gelu_tanh"),
        (2048, 32, True, "silu"),
        (1792, 128, True, "silu"),  # scales and zero points are loaded into registers
    ],
)
@pytest.mark.parametrize("rows", [1, 5, 20, 33, 170])
def test_gate_and_up_of_a_packed_weight_on_a_gpu_match_float64(
    rows: int, inner: int, group: int, has_zeros: bool, activation: Activation
) -> None:
    rng, out = np.random.default_rng(rows), 1792  # up to 32 rows tiles of 28 of gate, 28 of up, if scales are copied
    x = jnp.asarray(rng.normal(size=(rows, inner)), BF16)
    packed = int4.pack(rng.integers(0, 16, (2 * out, inner)).astype(np.uint8))
    scale = (10.0 ** rng.uniform(-3, -2, (2 * out, inner // group))).astype(np.float32)
    zeros = rng.integers(0, 17, scale.shape).astype(np.uint8) if has_zeros else None
    weight = packed_weight(packed, scale, zeros)
    got, again = (
        np.asarray(gated_matmul(x, weight, activation=activation, implementation="pallas"), np.float64)
        for _ in range(2)
    )
    gate, up = np.split(np.asarray(x, np.float64) @ reference.device(packed, scale, zeros).astype(np.float64).T, 2, 1)
    wanted = ACTIVATIONS[activation](gate) * up
    np.testing.assert_array_equal(got, again)
    assert np.abs(got - wanted).max() / np.abs(wanted).max() < 2**-8  # rounded once to bfloat16


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "rows", "height", "width", "parts", "programs"),
    [
        ("qkv", 5, 8, 48, 1, 128),
        ("o", 8, 8, 64, 2, 128),
        ("o", 33, 40, 64, 4, 128),
        ("down", 32, 32, 64, 2, 128),
        ("down", 64, 64, 64, 4, 128),
        ("down", 160, 160, 64, 4, 128),
        ("down", 512, 128, 64, 1, 128),
        ("gate_up", 8, 8, 56, 1, 132),  # 512 tiles, of which most multiprocessors have four
        ("gate_up", 160, 160, 64, 1, 132),
    ],
)
def test_hopper_tiles_of_packed_weights_keep_an_h100_busy(
    name: str, rows: int, height: int, width: int, parts: int, programs: int
) -> None:
    out, inner = SHAPES[name]
    gated = name == "gate_up"
    tiles = choose_tiles(rows, (out, inner // 128, 64), inner // 128, BF16, 132, gated=gated)
    assert tiles and (tiles.height, tiles.width, tiles.parts, tiles.programs) == (height, width, parts, programs)
    assert tiles.stages >= 3 and tiles.groups == (4 if rows <= 64 else tiles.channels)


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "rows", "groups", "height", "parts", "columns"),
    [
        ("gate_up", 96, 1, 96, 1, 128),
        ("down", 160, 1, 160, 4, 128),
        ("down", 320, 112, 160, 2, 128),
        ("gate_up", 320, 1, 160, 1, 128),  # 448 tiles: three for each of 132 multiprocessors, and 52 that are halved
        ("qkv", 1024, 1, 256, 1, 64),
        ("gate_up", 1024, 32, 256, 1, 64),
    ],
)
def test_hopper_tiles_of_many_rows_and_bytes_leave_few_multiprocessors_idle(
    name: str, rows: int, groups: int, height: int, parts: int, columns: int
) -> None:
    (out, inner), gated = SHAPES[name], name == "gate_up"
    tiles = choose_tiles(rows, (out, inner // 128, 128), groups, BF16, 132, gated=gated, kind="fp8")
    assert tiles and tiles.has_many_rows and tiles.has_loader and tiles.stages >= 3
    assert (tiles.height, tiles.parts, tiles.columns, tiles.programs) == (height, parts, columns, 132)


@pytest.mark.once
@mosaic
@pytest.mark.parametrize(("row_tiles", "programs"), [(11, 7), (3, 4), (9, 60), (2, 132)])
def test_work_items_of_many_rows_cover_each_tile_of_the_result_once(row_tiles: int, programs: int) -> None:
    """Rows are counted in eights; a tile of 16 rows may be halved."""
    cta = object.__new__(ByteCta)
    cta.tiles = Int4Tiles(16, channels=2, splits=1, stages=3, parts=2, programs=programs, has_many_rows=True)
    cta.row_tiles, cta.channel_tiles, cta.own_channels = row_tiles, 3, 64
    cta.all_items = row_tiles * 3 * 2
    cta.halve_items()
    covered: list[tuple[int, ...]] = []
    for index in range(programs):
        cta.index = jnp.int32(index)
        for item in range(int(cta.own_items(cta.all_items + cta.halved_items))):
            origin = cta.place_of(jnp.int32(item))
            eights = 1 if origin.is_half else 2
            place = int(origin.channel) // 128, int(origin.part)
            covered += [(*place, int(origin.row) // 8 + number) for number in range(eights)]
    assert sorted(covered) == list(np.ndindex(3, 2, 2 * row_tiles))


@pytest.mark.once
def test_scales_and_zero_points_are_copied_with_a_slot_if_a_row_has_multiples_of_16_bytes_of_them() -> None:
    """A slot of 1024 columns has 8 groups of 128; a copy of at least 16 bytes may have more groups than its slot."""
    assert (copied_groups(16, 2048, 4, 1024), copied_groups(16, 2048, 1, 1024)) == (8, 16)
    assert (copied_groups(12, 1536, 4, 256), copied_groups(12, 1536, 1, 256)) == (4, 0)
    assert (copied_groups(14, 1792, 4, 256), copied_groups(14, 1792, 1, 256)) == (0, 0)


@pytest.mark.once
def test_several_parts_of_k_of_gate_and_up_are_refused() -> None:
    assert choose_tiles(8, (256, 16, 64), 16, BF16, 132, parts=1, gated=True)
    with pytest.raises(ValueError, match="parts: expected 1 or None with gate and up, whose sums are joined, got 2"):
        choose_tiles(8, (256, 16, 64), 16, BF16, 132, parts=2, gated=True)


@pytest.mark.once
def test_hopper_tiles_of_unsupported_packed_weights_are_none() -> None:
    assert choose_tiles(8, (256, 16, 64), 16, BF16, 132)
    assert choose_tiles(8, (256, 16, 64), 128, BF16, 132) is None, "groups of 16 columns"
    assert choose_tiles(8, (256, 16, 64), 16, F32, 132) is None
    assert choose_tiles(8, (256, 32, 32), 16, BF16, 132) is None, "blocks of 64 columns"
    assert choose_tiles(8, (72, 16, 64), 16, BF16, 132) is None, "not a multiple of 64, 56 or 48 channels"
    assert choose_tiles(8, (2 * 32, 16, 64), 16, BF16, 132, gated=True)
    assert choose_tiles(8, (2 * 36, 16, 64), 16, BF16, 132, gated=True) is None, "36 channels of gate"
    assert choose_tiles(8, (96, 24, 64), 48, BF16, 132)
    assert choose_tiles(8, (96, 24, 64), 24, BF16, 132) is None, "tiles of 48 channels, zero points that are not copied"
    assert choose_tiles(8, (96, 24, 64), 6, BF16, 132) is None, "tiles of 48 channels, scales that are not copied"
    assert choose_tiles(8, (256, 15, 64), 15, BF16, 132, parts=2) is None, "15 slices of k in two parts"


@mosaic
@pytest.mark.parametrize(
    ("name", "rows", "groups"),
    [("gate_up", 1, 1), ("gate_up", 160, 1), ("down", 33, 112), ("qkv", 160, 32), ("o", 320, 1)],
)
def test_product_with_bytes_compiled_for_h200_spills_no_registers(
    name: str, rows: int, groups: int, compile_with_ptxas_output: Any
) -> None:
    """Products that wait for each other, of which ptxas tells, would leave the tensor cores idle."""
    (out, inner), shape = SHAPES[name], jax.ShapeDtypeStruct

    @jax.jit
    def product(x: jax.Array, values: jax.Array, scale: jax.Array) -> jax.Array:
        weight = Quantized(values, scale, "fp8")
        multiply = gated_matmul if name == "gate_up" else matmul
        return (multiply.__wrapped__ if name == "gate_up" else multiply)(x, weight)  # type: ignore[attr-defined]

    arrays = shape((rows, inner), BF16), shape((out, inner), jnp.float8_e4m3fn)
    scale = shape((out, groups) if groups > 1 else (out,), F32)
    program, printed = compile_with_ptxas_output(product, *arrays, scale)
    assert "kCustomCall" in [launch.kind for launch in program.launches]
    reports = re.findall(r"\b(\d+) bytes spill stores", printed)
    assert reports and set(reports) == {"0"} and "serialized" not in printed


@mosaic
@pytest.mark.parametrize(
    ("name", "rows", "group", "has_zeros"),
    [
        ("gate_up", 1, 128, False),
        ("down", 33, 128, True),
        ("qkv", 64, 64, True),
        ("o", 160, 128, True),
        *(
            pytest.param(name, rows, group, has_zeros, marks=pytest.mark.matrix)
            for name in SHAPES
            for rows in (1, 5, 8, 9, 33, 61, 64, 160, 512)
            for group, has_zeros in ((128, False), (128, True), (64, True), (32, False))
        ),
    ],
)
def test_product_with_a_packed_weight_compiled_for_h200_spills_registers_only_if_listed(
    name: str, rows: int, group: int, has_zeros: bool, compile_with_ptxas_output: Any
) -> None:
    """x is padded by a launch of its own if it has more than 8 rows, and not a multiple of 8."""
    (out, inner), shape = SHAPES[name], jax.ShapeDtypeStruct
    groups = out, inner // group
    weight = [shape((out, inner // 128, 64), jnp.uint8), shape(groups, F32)]
    weight += [shape(groups, jnp.uint8)] if has_zeros else []

    @jax.jit
    def product(x: jax.Array, values: jax.Array, scale: jax.Array, *zeros: jax.Array) -> jax.Array:
        if name == "gate_up":
            return gated_matmul.__wrapped__(x, Quantized(values, scale, "int4", *zeros))  # type: ignore[attr-defined]
        return grouped_matmul.__wrapped__(x, Quantized(values, scale, "int4", *zeros), BF16)  # type: ignore[attr-defined]

    program, printed = compile_with_ptxas_output(product, shape((rows, inner), BF16), *weight)
    pads = rows > 8 and rows % 8 > 0
    assert [launch.kind for launch in program.launches][-1] == "kCustomCall"
    assert len(program.launches) == 1 + pads
    bytes_spilled = str(SPILLS.get((name, rows, group), 0))
    reports = re.findall(r"\b(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    assert reports and set(reports) == {(bytes_spilled, bytes_spilled)}  # XLA compiles a kernel that spills twice
