"""Compare the Hopper kernel of packed weights with float64 in jax's interpreter, and compile it for an H200."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layers import int4
from pallas_kernels.layers.grouped_matmul import grouped_matmul
from pallas_kernels.layers.int4_kernel import multiply
from pallas_kernels.layers.int4_tiling import Tiles, choose_tiles
from tests.reference import int4 as reference

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")
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


def interpreted(x: jax.Array, *weight: jax.Array, tiles: Tiles) -> np.ndarray:
    """Run the kernel in jax's interpreter and return the sum of its parts; fail if races are detected."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # no public function returns the races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # With fewer TMA threads two copies could look ordered only because one queue held both.
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)  # type: ignore[attr-defined]
    options: dict[str, Any] = {"tiles": tiles, "dtype": F32, "interpret": params}
    got = jax.block_until_ready(multiply(x, *weight, **options))
    assert not gpu_callbacks.get_races().races_found
    assert got.shape == (tiles.parts, len(x), len(weight[0]))
    return np.asarray(got, np.float64).sum(axis=0)


@mosaic
@pytest.mark.parametrize(
    ("rows", "inner", "group", "has_zeros", "tiles"),
    [
        (5, 512, 128, True, Tiles(height=8, channels=1, splits=2, stages=2, parts=1, programs=1)),  # 2 items, joined
        (20, 256, 64, False, Tiles(height=16, channels=2, splits=1, stages=2, parts=1, programs=2)),  # 2 tiles of rows
        (8, 512, 32, True, Tiles(height=8, channels=1, splits=1, stages=3, parts=2, programs=3)),  # 4 items, 3 CTAs
        (3, 768, 384, True, Tiles(height=8, channels=2, splits=1, stages=2, parts=2, programs=1)),
    ],
)
def test_hopper_kernel_of_packed_weights_interpreted_matches_float64(
    rows: int, inner: int, group: int, has_zeros: bool, tiles: Tiles
) -> None:
    """The interpreter also fails if a barrier is passed too early or has arrivals left at the end."""
    rng, out = np.random.default_rng(rows), 128
    x = jnp.asarray(rng.normal(size=(rows, inner)), BF16)
    packed = int4.pack(rng.integers(0, 16, (out, inner)).astype(np.uint8))
    scale = (10.0 ** rng.uniform(-3, -2, (out, inner // group))).astype(np.float32)
    zeros = rng.integers(0, 17, scale.shape).astype(np.uint8) if has_zeros else None
    given = [jnp.asarray(array) for array in (packed, scale, zeros) if array is not None]
    got = interpreted(x, *given, tiles=tiles)

    def error(*weight: Any) -> float:
        wanted = np.asarray(x, np.float64) @ reference.device(*weight).astype(np.float64).T
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    assert error(packed, scale, zeros) < 1e-6  # float32 sums of exact products
    assert error(packed << 4 | packed >> 4, scale, zeros) > 0.1, "control: halves swapped"
    assert error(packed, np.roll(scale, 1, axis=0), zeros) > 0.1, "control: scales of the row before"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("group", "has_zeros"), [(128, False), (128, True), (64, True), (32, False)])
@pytest.mark.parametrize("rows", [1, 5, 33, 170])
def test_product_with_a_packed_weight_on_a_gpu_matches_float64(
    rows: int, group: int, has_zeros: bool, dtype: str
) -> None:
    """On a Hopper GPU this is the kernel itself, of which the interpreter replaces what works on registers."""
    rng, (out, inner) = np.random.default_rng(rows), (768, 2048)
    x = jnp.asarray(rng.normal(size=(rows, inner)), dtype)
    packed = int4.pack(rng.integers(0, 16, (out, inner)).astype(np.uint8))
    scale = (10.0 ** rng.uniform(-3, -2, (out, inner // group))).astype(np.float32)
    zeros = rng.integers(0, 17, scale.shape).astype(np.uint8) if has_zeros else None
    given = [jnp.asarray(packed), jnp.asarray(scale), F32, *([] if zeros is None else [jnp.asarray(zeros)])]
    got = np.asarray(grouped_matmul(x, *given, implementation="pallas"), np.float64).sum(axis=0)

    def error(*weight: Any) -> float:
        wanted = np.asarray(x, np.float64) @ reference.device(*weight).astype(np.float64).T
        return float(np.abs(got - wanted).max() / np.abs(wanted).max())

    assert error(packed, scale, zeros) < 1e-6
    assert error(packed << 4 | packed >> 4, scale, zeros) > 0.1, "control: halves swapped"


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "rows", "height", "parts", "programs"),
    [
        ("qkv", 5, 8, 4, 132),
        ("o", 33, 40, 4, 128),
        ("down", 64, 64, 4, 128),
        ("down", 160, 160, 4, 128),
        ("down", 512, 128, 1, 128),
        ("gate_up", 8, 8, 2, 132),
    ],
)
def test_hopper_tiles_of_packed_weights_keep_an_h200_busy(
    name: str, rows: int, height: int, parts: int, programs: int
) -> None:
    out, inner = SHAPES[name]
    tiles = choose_tiles(rows, (out, inner // 128, 64), inner // 128, BF16, 132)
    assert tiles and (tiles.height, tiles.parts, tiles.programs) == (height, parts, programs)
    assert tiles.stages >= 3 and tiles.groups == (4 if rows <= 64 else tiles.channels)


@pytest.mark.once
def test_hopper_tiles_of_unsupported_packed_weights_are_none() -> None:
    assert choose_tiles(8, (256, 16, 64), 16, BF16, 132)
    assert choose_tiles(8, (256, 16, 64), 128, BF16, 132) is None, "groups of 16 columns"
    assert choose_tiles(8, (256, 16, 64), 16, F32, 132) is None
    assert choose_tiles(8, (256, 32, 32), 16, BF16, 132) is None, "blocks of 64 columns"
    assert choose_tiles(8, (96, 16, 64), 16, BF16, 132) is None, "not a multiple of 64 channels"
    assert choose_tiles(8, (256, 15, 64), 15, BF16, 132, parts=2) is None, "15 slices of k in two parts"


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
def test_product_with_a_packed_weight_compiled_for_h200_spills_no_registers(
    name: str, rows: int, group: int, has_zeros: bool, compile_with_ptxas_output: Any
) -> None:
    """x is padded by a launch of its own if it has more than 8 rows, and not a multiple of 8."""
    (out, inner), shape = SHAPES[name], jax.ShapeDtypeStruct
    groups = out, inner // group
    weight = [shape((out, inner // 128, 64), jnp.uint8), shape(groups, F32)]
    weight += [shape(groups, jnp.uint8)] if has_zeros else []

    @jax.jit
    def product(x: jax.Array, values: jax.Array, scale: jax.Array, *zeros: jax.Array) -> jax.Array:
        return grouped_matmul.__wrapped__(x, values, scale, BF16, *zeros)  # type: ignore[attr-defined]

    program, printed = compile_with_ptxas_output(product, shape((rows, inner), BF16), *weight)
    pads = rows > 8 and rows % 8 > 0
    assert [launch.kind for launch in program.launches][-1] == "kCustomCall"
    assert len(program.launches) == 1 + pads
    assert re.findall(r"\b(\d+) bytes spill stores, (\d+) bytes spill loads", printed) == [("0", "0")]
