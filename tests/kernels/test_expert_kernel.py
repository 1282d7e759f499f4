"""Compare the Hopper kernel of narrow experts with float64 in jax's interpreter, and compile it for an H200."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layers.experts.expert_blocks import blocks_of
from pallas_kernels.layers.experts.expert_boxes import box_of, places
from pallas_kernels.layers.experts.expert_bytes import PACKED, pack, place_of, registered
from pallas_kernels.layers.experts.expert_kernel import multiply_chosen
from pallas_kernels.layers.experts.expert_matmul import Gate
from pallas_kernels.layers.experts.expert_mlp import ExpertMlp, expert_mlp, multiply_packed
from pallas_kernels.layers.experts.expert_registers import NEGATIVE, POSITIVE, UNPACK
from pallas_kernels.layers.experts.expert_rows import MOST_LISTED, gather_blocks
from pallas_kernels.layers.experts.expert_tiling import choose_tiles
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles
from pallas_kernels.layers.weights import Quantized
from tests.kernels.test_expert_matmul import BLOCKS, LIMITED, choices, joined, loop, narrow, quantized
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200
from tests.support.mosaic import interpreted as run_interpreted

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")


@pytest.mark.once
@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_columns_of_x_have_the_order_of_the_values_in_the_registers_of_wgmma(kind: str) -> None:
    """Thread t of four loads bytes 16 t to 16 t + 15 of 128 columns; its pair p of a word is unpacked at once.

    PTX's fragment of the first operand gives thread t columns 2 t and 2 t + 1 of each 8.
    """
    values = np.random.default_rng(0).integers(0, 16, (1, 128)).astype(np.uint8)
    words, x = pack(values).reshape(4, 16).view(np.uint32), registered(values, kind)[0]  # words [thread, word]
    for thread, word, pair in np.ndindex(4, 4, 4):
        shifts = (8 * pair, 8 * pair + 4) if kind == "mxfp4" else (4 * pair, 4 * pair + 16)
        got = [words[thread, word] >> shift & 15 for shift in shifts]
        first = 8 * (4 * word + pair) + 2 * thread
        assert got == list(x[first : first + 2])
    assert not np.array_equal(x, values[0]), "control: another order than that of the columns"


def executed(lines: str, registers: dict[str, int]) -> dict[str, int]:
    """Execute PTX instructions on 32-bit registers, as the PTX ISA describes them."""

    def pair(word: int) -> np.ndarray:
        return np.array([word], np.uint32).view(ml_dtypes.bfloat16).astype(np.float64)

    def prmt(low: int, high: int, selector: int) -> int:
        table, found = low | high << 32, 0
        for place in range(4):
            choice = selector >> (4 * place) & 15
            byte = table >> (8 * (choice & 7)) & 255
            found |= ((255 if byte & 128 else 0) if choice & 8 else byte) << (8 * place)
        return found

    operations: dict[str, Any] = {
        "xor.b32": lambda a, b: a ^ b,
        "or.b32": lambda a, b: a | b,
        "shr.b32": lambda a, b: a >> b,
        "prmt.b32": prmt,
        "fma.rn.bf16x2": lambda a, b, c: int(
            (pair(a) * pair(b) + pair(c)).astype(ml_dtypes.bfloat16).view(np.uint32)[0]
        ),
    }
    for line in filter(None, (line.strip() for line in lines.split(";"))):
        name, arguments = line.split(" ", 1)
        if name != ".reg":
            result, *given = (part.strip() for part in arguments.split(","))
            operands = [registers[one] if one in registers else int(one, 0) for one in given]
            registers[result] = operations[name](*operands)
    return registers


@pytest.mark.once
@pytest.mark.parametrize("scale", [0, 1, 2, 100, 127, 128, 200, 248])
def test_instructions_that_unpack_mxfp4_compute_all_its_numbers_exactly(scale: int) -> None:
    half = np.ldexp(1.0, scale - 128)
    power, product = (
        np.array([value] * 2).astype(ml_dtypes.bfloat16).view(np.uint32)[0] for value in (half, -192 * half)
    )
    for first in (0, 8):
        values = np.arange(first, first + 8, dtype=np.uint8)
        word = int(pack(values.reshape(1, -1)[:, [0, 2, 4, 6, 1, 3, 5, 7]]).view(np.uint32)[0, 0, 0])
        fixed = {"$4": word, "$5": int(power), "$6": int(product), "$7": POSITIVE[0], "$8": NEGATIVE[0]}
        got = executed(UNPACK, fixed)
        found = np.array([got[f"${index}"] for index in range(4)], np.uint32).view(ml_dtypes.bfloat16)
        numbers = values.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * 2 * half
        np.testing.assert_array_equal(found.astype(np.float64), numbers)
        assert len(set(numbers)) == 8 and not np.array_equal(found[::-1].astype(np.float64), numbers), "control"


@pytest.mark.parametrize(
    ("experts", "count", "size", "none"),
    [
        *((3, 33, 8, 0.0), (3, 33, 8, 1.0), (40, 600, 16, 0.4), (300, 2048, 64, 0.4)),
        *(
            pytest.param(*sizes, none, marks=pytest.mark.newest)
            for sizes, shares in (
                ((1, 1, 8), (0.0, 0.4, 1.0)),
                ((3, 33, 8), (0.4,)),
                ((40, 600, 16), (0.0, 1.0)),
                ((300, 2048, 64), (0.0, 1.0)),
            )
            for none in shares
        ),
        *(
            pytest.param(*sizes, none, marks=pytest.mark.long)
            for sizes in ((32, 160, 24), (128, 64, 8))
            for none in (0.0, 0.4, 1.0)
        ),
    ],
)
def test_blocks_and_rows_gathered_by_one_launch_are_those_of_blocks_of(
    experts: int, count: int, size: int, none: float
) -> None:
    """2048 choices are counted in 16 steps, those of one expert in the same byte; other rows have several programs."""
    rng, kind = np.random.default_rng(count), "int4" if size == 16 else "mxfp4"
    outside, least = rng.choice([-1, experts, experts + 5], count), experts - 1 if count == MOST_LISTED else 0
    chosen = on_device(
        np.where(rng.uniform(size=count) < none, outside, rng.integers(least, experts, count)), jnp.int32
    )
    columns = 128 if count == MOST_LISTED else 608 if size == 24 else 640  # the interpreter copies all rows often
    x = on_device(rng.normal(size=(-(-count // 3), columns)), BF16)
    wanted = jax.tree.map(np.asarray, jax.jit(blocks_of, static_argnums=(1, 2))(chosen, experts, size))
    gathered = gather_blocks(x, chosen, experts, size, kind, interpret=True)
    rows, got, counts = jax.tree.map(np.asarray, gathered)
    is_own, is_none = wanted.expert < experts, wanted.expert == experts
    assert counts.tolist() == [is_own.sum(), is_none.sum()]
    for found, right in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(found[: counts.sum()], right[: counts.sum()])
    listed = np.asarray(wanted.choices[: counts[0]]).ravel()
    own = np.asarray(rows.swapaxes(0, 1).reshape(rows.shape[1], -1), np.float32)[: len(listed)]
    right = np.asarray(registered(x, kind), np.float32)[listed % len(x)]
    np.testing.assert_array_equal(own, np.where(listed[:, None] < 0, 0, right))
    assert counts[0] == 0 or not np.array_equal(own[0], np.pad(np.asarray(x)[listed[0] % len(x)], (0, -columns % 128)))


def interpreted(*arguments: Any, function: Any, **options: Any) -> np.ndarray:
    """Run the kernel in jax's interpreter and return the sum of its parts; fail if races are detected."""
    return np.asarray(run_interpreted(function, *arguments, **options), np.float64).sum(axis=0)


@mosaic
@pytest.mark.parametrize(
    ("kind", "inner", "group", "rows", "chosen", "gate", "tiles"),
    [
        ("mxfp4", 320, 32, 3, "any", None, Int4Tiles(8, 1, 2, 2, 2, 3)),  # 2.5 slices in two parts of k
        ("mxfp4", 160, 32, 9, "rows without experts", None, Int4Tiles(8, 2, 1, 2, 1, 2)),  # several blocks of an expert
        ("mxfp4", 320, 32, 4, "rows without experts", LIMITED, Int4Tiles(8, 1, 2, 2, 1, 2)),
        ("mxfp4", 128, 32, 20, "all rows to the same experts", Gate(), Int4Tiles(16, 2, 1, 2, 1, 5)),
        ("mxfp4", 128, 32, 3, "none", None, Int4Tiles(8, 1, 1, 2, 1, 2)),
        ("int4", 384, 128, 9, "an expert without rows", None, Int4Tiles(16, 1, 2, 2, 1, 2)),
        ("int4", 512, 256, 3, "any", LIMITED, Int4Tiles(8, 1, 2, 2, 1, 4)),
        ("mxfp4", 320, 32, 9, "rows without experts", LIMITED, Int4Tiles(16, 1, 2, 2, 1, 2, has_loader=True)),
        ("mxfp4", 160, 32, 3, "any", None, Int4Tiles(8, 1, 1, 2, 1, 2, width=48)),
        # Scales copied with a tile: of a work item of one slot as many tiles' as slots are in flight.
        ("mxfp4", 160, 32, 9, "rows without experts", LIMITED, Int4Tiles(8, 1, 2, 4, 1, 2, copies_scales=True)),
        ("mxfp4", 320, 32, 4, "any", None, Int4Tiles(8, 1, 3, 3, 1, 3, width=48, copies_scales=True)),
        ("mxfp4", 640, 32, 3, "rows without experts", None, Int4Tiles(8, 1, 2, 2, 1, 2, depth=2, copies_scales=True)),
        ("mxfp4", 320, 32, 4, "any", Gate(), Int4Tiles(8, 1, 1, 2, 1, 2, depth=2, copies_scales=True)),
        ("fp8", 384, 128, 9, "an expert without rows", LIMITED, Int4Tiles(8, 1, 2, 2, 1, 2, copies_scales=True)),
        ("fp8", 640, 128, 3, "rows without experts", None, Int4Tiles(8, 1, 4, 2, 1, 2, width=48)),  # a copy of 4 slices
        ("fp8", 512, 256, 20, "all rows to the same experts", Gate(), Int4Tiles(16, 2, 1, 3, 1, 2, has_loader=True)),
        ("int4", 768, 128, 3, "any", None, Int4Tiles(8, 2, 1, 2, 1, 1, depth=2, copies_scales=True)),
        ("int4", 1024, 256, 3, "any", LIMITED, Int4Tiles(8, 1, 4, 2, 1, 2, depth=2, width=48, copies_scales=True)),
        (
            "int4",
            768,
            128,
            9,
            "rows without experts",
            None,
            Int4Tiles(8, 1, 6, 2, 1, 2),
        ),  # two copies of a slot's weights
    ],
)
def test_hopper_kernel_of_narrow_experts_interpreted_matches_a_loop_over_rows(
    kind: str, inner: int, group: int, rows: int, chosen: str, gate: Gate | None, tiles: Int4Tiles
) -> None:
    """The interpreter also fails if a barrier is passed too early or has arrivals left at the end."""
    weight, wide = narrow(kind, inner, group, 96 if tiles.width == 48 else 128)
    rng = np.random.default_rng(rows)
    x = on_device(rng.normal(size=(rows, inner)), BF16)
    own = np.full((2, rows), -1, np.int32) if chosen == "none" else choices(chosen, 5, 2, rows)
    bias = on_device(rng.normal(size=wide.shape[:2]), BF16)
    factors = on_device(rng.uniform(size=own.shape), F32) if gate is None else None
    arguments = x, weight, bias, factors, on_device(own)
    got = interpreted(*arguments, function=multiply_chosen, tiles=tiles, gate=gate, dtype=F32)
    wanted = loop(x, wide, own, gate, bias, factors)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, atol=1e-5 * scale)
    if chosen != "none":
        for other in (np.roll(wide, 1, axis=0), np.roll(wide, 1, axis=2)):
            wrong = loop(x, other, own, gate, bias, factors)
            assert np.abs(got - wrong).max() > 0.05 * scale, "control: another expert's weight, or other columns"


@pytest.mark.once
@pytest.mark.parametrize("kind", PACKED)
def test_place_of_a_column_is_where_it_is_registered(kind: str) -> None:
    columns = np.arange(256, dtype=np.int32)
    (order,) = registered(columns[None], kind)
    np.testing.assert_array_equal(order[columns // 128 * 128 + place_of(columns, kind)], columns)


@mosaic
@pytest.mark.parametrize(
    ("kind", "group", "out", "width", "chosen"),
    [
        ("mxfp4", 32, 192, 48, "rows without experts"),
        ("fp8", 128, 256, 64, "rows without experts"),
        pytest.param("int4", 128, 256, 64, "all rows to the same experts", marks=pytest.mark.matrix),
    ],
)
def test_rows_written_for_the_next_product_interpreted_are_its_x(
    kind: str, group: int, out: int, width: int, chosen: str
) -> None:
    """96 channels of mxfp4 fill three quarters of a slice; the interpreter's memory is NaN where nothing is written."""
    (gate_up, wide), (down, own_wide) = narrow(kind, 128, group, out), narrow(kind, out // 2, group)
    rng = np.random.default_rng(out)
    x, own = on_device(rng.normal(size=(3, 128)), BF16), choices(chosen, 5, 2, 3)
    biases = [on_device(rng.normal(size=one.shape[:2]), BF16) for one in (wide, own_wide)]
    factors = on_device(rng.uniform(size=own.shape), F32)
    tiles = Int4Tiles(8, 1, 1, 2, 1, 2, width=width), Int4Tiles(8, 1, 1, 2, 2, 2)
    arguments = x, ExpertMlp(gate_up, down, *biases), factors, on_device(own)
    got = interpreted(*arguments, function=multiply_packed, tiles=tiles, gate=LIMITED)
    inner = on_device(loop(x, wide, own, LIMITED, biases[0]), BF16)
    wanted = loop(inner, own_wide, own, None, biases[1], factors)
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, atol=0.01 * scale)  # two parts, each in bfloat16; inner may be rounded up
    reversed_channels = loop(inner[..., ::-1], own_wide, own, None, biases[1], factors)
    assert np.abs(got - reversed_channels).max() > 0.1 * scale, "control: channels in another order"


SHAPES = {
    "gpt-oss-20b": (32, 4, 2880, 2880),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3.5-35b-a3b": (256, 8, 2048, 512),
    "deepseek-v2-lite": (64, 6, 2048, 1408),
}  # experts, chosen, hidden, width
KINDS = {"gpt-oss-20b": "mxfp4", "qwen3-30b-a3b": "int4", "qwen3.5-35b-a3b": "fp8", "deepseek-v2-lite": "fp8"}
GROUPS = {"mxfp4": 32, "int4": 128, "fp8": 128}  # columns of a scale


def stored_experts(kind: Any, experts: int, out: int, inner: int) -> Quantized:
    """Return the shapes of experts with scales of groups."""
    new = jax.ShapeDtypeStruct
    scale: Any = new((experts, out, inner // GROUPS[kind]), jnp.uint8 if kind == "mxfp4" else F32)
    values: Any = new((experts, out, inner), jnp.float8_e4m3fn)
    if kind != "fp8":
        values = new((experts, out, inner // 32, 16), jnp.uint8)
    return Quantized(values, scale, kind)


@pytest.mark.once
@pytest.mark.parametrize("shape", ["gpt-oss-20b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("rows", "height"), [(1, 8), (8, 8), (40, 16), (160, 32)])
def test_tiles_of_packed_experts_divide_the_channels_and_hold_the_rows_of_an_expert(
    shape: str, rows: int, height: int
) -> None:
    (experts, chosen, hidden, width), kind = SHAPES[shape], KINDS[shape]
    for out, inner, gated in ((2 * width, hidden, True), (hidden, width, False)):
        own = experts, out, inner
        tiles = choose_tiles((chosen, rows), own, inner // GROUPS[kind], kind, gated=gated, multiprocessors=132)
        assert tiles and tiles.stages >= 3 and out % (tiles.width * tiles.channels) == 0
        assert tiles.height == (height if shape == "gpt-oss-20b" else min(height, 16, 8 if rows <= 40 else 16))
        is_even = gated or shape == "gpt-oss-20b"  # 3 slices of each of two splits are not two slots of two
        assert tiles.depth == (2 if tiles.height == 8 and is_even else 1)
        assert tiles.copies_scales == (tiles.height == (16 if kind == "mxfp4" else 8)), "two slices of mxfp4: registers"
        assert (tiles.width == 48) == (rows == 1 and gated == (shape != "gpt-oss-20b")), "192 or 180 tiles of 64 on 132"
    find = functools.partial(choose_tiles, groups=width // GROUPS[kind], kind=kind, gated=False, multiprocessors=132)
    parts = find((chosen, rows), (experts, hidden, width), parts=(1, 2))
    assert parts and parts.parts == 1, "tiles of 48 rows divide the work as well"
    assert find((chosen, MOST_LISTED // chosen + 1), (experts, hidden, width)) is None
    assert find((chosen, 1), (experts, 96, width)) is None, "96 channels"
    many = find((chosen, 1), (experts, 64, 1 << 20), groups=(1 << 20) // GROUPS[kind])
    assert many and not many.copies_scales, "the scales of a tile are more than a copy has"


@pytest.mark.once
@pytest.mark.parametrize("shape", [shape for shape, kind in KINDS.items() if kind == "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 40, 160, 256])
def test_tiles_of_float8_experts_fit_into_shared_memory_and_registers(shape: str, rows: int) -> None:
    """65,536 registers are divided among the threads; those that each takes are of the programs compiled below."""
    experts, chosen, hidden, width = SHAPES[shape]
    for out, inner, gated in ((2 * width, hidden, True), (hidden, width, False)):
        own = experts, out, inner
        tiles = choose_tiles((chosen, rows), own, inner // 128, "fp8", gated=gated, multiprocessors=132)
        assert tiles and tiles.stages >= 2 and tiles.depth == 1 and out % (tiles.width * tiles.channels) == 0
        slot = tiles.slices * 128 * (2 * tiles.height + 64 * tiles.channels)
        sums = (tiles.splits - 1) * tiles.channels * 64 * tiles.height * 4
        scales = 2 * 64 * tiles.channels * inner // 128 * 4 if tiles.copies_scales else 0
        assert tiles.stages * slot + sums + scales <= 227 * 1024
        assert 65536 // (128 * tiles.warpgroups) >= (120 if tiles.height == 32 else 96 if tiles.height < 32 else 128)


@pytest.mark.once
@pytest.mark.parametrize(("rows", "groups", "size"), [(32, 90, 1), (48, 90, 1), (64, 90, 1), (24, 16, 4), (128, 6, 1)])
def test_scales_of_a_tile_are_an_array_that_the_tma_unit_copies(rows: int, groups: int, size: int) -> None:
    """A box of a copy has at most 256 elements in each direction, and rows that are multiples of 16 bytes."""
    box = box_of(rows, groups, size)
    assert box and box.lines * box.size == rows * groups and box.lines <= 256 and box.size <= 256
    assert box.size * size % 16 == 0 and box.rows * groups * size % 128 == 0 and rows <= box.rows < rows + 128
    assert box_of(8, 1, 1) is None, "control: 8 bytes"


@pytest.mark.once
def test_scales_are_kept_until_the_last_slot_of_their_work_item_is_released() -> None:
    """Slot s is loaded when slot s - stages is released."""

    def are_kept(stages: int, slots: int, count: int) -> bool:
        replaced = range(count, count + 12)  # work items whose scales replace those of `count` work items before
        return all((item - count) * slots + slots - 1 <= item * slots - stages for item in replaced)

    for stages, slots in itertools.product(range(2, 10), range(1, 7)):
        assert are_kept(stages, slots, places(stages, slots))
        assert not are_kept(stages, slots, places(stages, slots) - 1), "control: no more places than needed"


@mosaic
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 8, pytest.param(40, marks=pytest.mark.matrix), 160, 256])
@pytest.mark.parametrize("gated", [False, True])
def test_product_of_narrow_experts_compiled_for_h200_spills_no_registers(
    shape: str, rows: int, gated: bool, compile_with_ptxas_output: Any
) -> None:
    (experts, chosen, hidden, width), kind, new = SHAPES[shape], KINDS[shape], jax.ShapeDtypeStruct
    out, inner = (2 * width, hidden) if gated else (hidden, width)
    own = experts, out, inner
    tiles = choose_tiles((chosen, rows), own, inner // GROUPS[kind], kind, gated=gated, multiprocessors=132)

    @jax.jit
    def product(x: Any, weight: Any, bias: Any, indices: Any) -> jax.Array:
        fixed: dict[str, Any] = {"gate": LIMITED if gated else None, "tiles": tiles, "dtype": BF16}
        return multiply_chosen(x, weight, bias, None, indices, **fixed)

    weight, bias = stored_experts(kind, *own), new((experts, out), BF16)
    x, indices = new((rows, inner), BF16), new((chosen, rows), jnp.int32)
    program, printed = compile_with_ptxas_output(product, x, weight, bias, indices)
    assert [launch.kind for launch in program.launches][-1] == "kCustomCall"
    assert len(program.launches) == 2 and program.count("gather_blocks") == 1
    assert re.findall(r"\b(\d+) bytes spill stores, (\d+) bytes spill loads", printed) == [("0", "0")]
    assert not program.copies(1 << 20)


@mosaic
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 160])
def test_feed_forward_of_narrow_experts_compiled_for_an_h200_takes_three_launches(shape: str, rows: int) -> None:
    (experts, chosen, hidden, width), kind, new = SHAPES[shape], KINDS[shape], jax.ShapeDtypeStruct
    weight, bias = functools.partial(stored_experts, kind, experts), cast(Any, new((experts, hidden), BF16))
    weights = ExpertMlp(weight(2 * width, hidden), weight(hidden, width), None, bias)
    function = functools.partial(expert_mlp.__wrapped__, gate=LIMITED)  # type: ignore[attr-defined]
    arrays = new((rows, hidden), BF16), weights, new((chosen, rows), jnp.int32)
    program = compile_for_h200(function, *arrays, fail_on_spills=True)
    kinds = [launch.kind == "kCustomCall" for launch in program.launches]
    assert kinds == [False, True, True] and program.count("gather_blocks") == 1
    assert program.memory.output_size_in_bytes == 2 * chosen * rows * hidden
    assert not program.copies(1 << 20)


def test_rows_gathered_in_blocks_compiled_for_an_h200_spill_no_registers() -> None:
    for rows, shape, size, kind in (
        (1, "gpt-oss-20b", 8, "mxfp4"),
        (160, "qwen3-30b-a3b", 16, "int4"),
        (512, "gpt-oss-20b", 64, "mxfp4"),
    ):
        experts, chosen, hidden, _ = SHAPES[shape]
        arrays = jax.ShapeDtypeStruct((rows, hidden), BF16), jax.ShapeDtypeStruct((rows * chosen,), jnp.int32)
        fixed = {"experts": experts, "size": size, "kind": kind}
        program = compile_for_h200(functools.partial(gather_blocks, **fixed), *arrays, fail_on_spills=True)
        assert [launch.name for launch in program.launches] == ["gather_blocks"]


def by_expert(x: Any, weight: np.ndarray, chosen: np.ndarray, gate: Gate | None = None) -> np.ndarray:
    """Return the products of `loop`, which takes minutes for sizes of models, expert by expert in float64."""
    x = np.broadcast_to(np.asarray(x, np.float64), (len(chosen), chosen.shape[1], x.shape[-1]))
    out = np.zeros((*chosen.shape, weight.shape[1]))
    for expert, own in enumerate(weight):
        out[chosen == expert] = x[chosen == expert] @ own.T
    return joined(*np.split(out, 2, -1), how=gate) if gate else out


def test_products_expert_by_expert_are_those_of_the_loop_over_rows() -> None:
    _, wide = narrow("fp8", 256, 128)
    x, chosen = np.random.default_rng(0).normal(size=(7, 256)), choices("rows without experts", 5, 2, 7)
    for gate in (None, Gate()):
        np.testing.assert_allclose(by_expert(x, wide, chosen, gate), loop(x, wide, chosen, gate), atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape, kind in KINDS.items() if kind == "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 5, 40, 80, 256])
def test_feed_forward_of_float8_experts_on_a_gpu_equals_its_products_in_float64(
    shape: str, dtype: Any, rows: int
) -> None:
    """Blocks have 8, 16, 32 and 64 rows; 32 experts of the shape's sizes, of which some rows have none."""
    experts, (_, chosen, hidden, width) = 32, SHAPES[shape]
    rng = np.random.default_rng(rows)
    gate_up, down = (
        jnp.asarray(rng.standard_normal(size, np.float32) / np.sqrt(size[-1]))
        for size in ((experts, 2 * width, hidden), (experts, hidden, width))
    )
    gate_up, down = quantized(BLOCKS, (gate_up * jnp.exp2(jnp.arange(hidden) // 128 % 3), down))
    x = jnp.asarray(rng.standard_normal((rows, hidden), np.float32), dtype)
    own = choices("rows without experts" if rows > 1 else "any", experts, chosen, rows)
    factors = jnp.asarray(rng.uniform(size=own.shape), F32)
    parts = expert_mlp(x, ExpertMlp(gate_up, down), jnp.asarray(own), gate=Gate(), factors=factors)
    got = np.asarray(parts, np.float64).reshape(-1, chosen, rows, hidden).sum(0)
    first, second = (np.asarray(one.values, np.float64) for one in (gate_up, down))
    scale, second_scale = (np.asarray(one.scale, np.float64) for one in (gate_up, down))

    def products(scale: np.ndarray) -> np.ndarray:
        inner = jnp.asarray(by_expert(x, first * scale.repeat(128, -1), own, Gate()), dtype)  # the kernel rounds, too
        return by_expert(inner, second * second_scale.repeat(128, -1), own) * np.asarray(factors)[..., None]

    wanted = products(scale)
    size = np.abs(wanted).max()
    np.testing.assert_allclose(got, wanted, atol=0.01 * size)
    assert np.abs(got - products(np.roll(scale, 1, -1))).max() > 0.1 * size, "control: scales of other columns"
