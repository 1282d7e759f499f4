"""Compare the products of experts with a loop over rows in float64, on a CPU and, compiled only, for an H200."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.layers.experts.expert_blocks import FEW_ROWS, MANY_ROWS, MOST_CHOICES, blocks_of
from pallas_kernels.layers.experts.expert_bytes import pack
from pallas_kernels.layers.experts.expert_matmul import Gate, expert_matmul, unsupported_experts
from pallas_kernels.layers.experts.expert_reference import REFERENCE_ROWS
from pallas_kernels.layers.experts.expert_rows import MOST_LISTED
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.weights import Quantized
from tests.reference.activations import ACTIVATIONS
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

LIMITED, UNGATED = Gate("silu", 0.5, 1.7), Gate("relu2", exists=False)
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


def choices(kind: str, experts: int, chosen: int, rows: int) -> np.ndarray:
    """Return experts [chosen, rows]: different ones for each row, or all alike, or none for some."""
    rng = np.random.default_rng(rows)
    found = np.stack([rng.permutation(experts)[:chosen] for _ in range(rows)], axis=1).astype(np.int32)
    if kind == "all rows to the same experts":
        found[:] = np.arange(chosen)[:, None] + 1
    elif kind == "an expert without rows":
        found = np.where(found == 2, experts - 1, found).astype(np.int32)
    elif kind == "rows without experts":
        found[:, ::2], found[0, -1] = -1, experts + 3
    elif kind == "one row with experts":
        found[:, 1:] = -1
    return found


KINDS = (
    "any",
    "all rows to the same experts",
    "an expert without rows",
    "rows without experts",
    "one row with experts",
)


def joined(gate: np.ndarray, up: np.ndarray | float = 1.0, *, how: Gate) -> np.ndarray:
    if how.activation == "relu2":
        return np.where(gate > 0, gate, 0) ** 2 * up
    if how.limit is None:
        return ACTIVATIONS[how.activation](gate) * up
    gate, up = np.minimum(gate, how.limit), np.clip(up, -how.limit, how.limit)
    return gate / (1 + np.exp(-how.alpha * gate)) * (up + 1)


def loop(x: Any, weight: Any, chosen: Any, gate: Gate | None = None, bias: Any = None, factors: Any = None) -> Any:
    """Return the products of all rows and choices in float64, one after another."""
    x, weight = (np.asarray(array, np.float64) for array in (x, weight))
    width = weight.shape[1] // (gate.halves if gate else 1)
    out = np.zeros((*chosen.shape, width))
    for j, t in np.ndindex(*chosen.shape):
        if 0 <= (expert := chosen[j, t]) < len(weight):
            own = weight[expert] @ (x[t] if x.ndim == 2 else x[j, t])
            own = own if bias is None else own + np.asarray(bias, np.float64)[expert]
            own = joined(*np.split(own, gate.halves), how=gate) if gate else own
            out[j, t] = own if factors is None else own * np.asarray(factors, np.float64)[j, t]
    return out


def problem(rows: int, *, experts: int = 5, chosen: int = 2, out: int = 128, inner: int = 64) -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    x = on_device(rng.normal(size=(rows, inner)), jnp.float32)
    weight = on_device(rng.normal(size=(experts, out, inner)) / np.sqrt(inner), jnp.float32)
    bias = on_device(rng.normal(size=(experts, out)), jnp.float32)
    return x, weight, bias, on_device(rng.uniform(size=(chosen, rows)), jnp.float32)


@pytest.mark.parametrize(
    ("rows", "shared", "deterministic", "implementation"),
    cover.with_kernel(
        [(1, 3, False), (20, 1, True), (20, 3, False), (1, 1, False)],
        2,
        long=[(1, 2, False), (3, 1, False), (3, 2, True), (3, 3, True), (20, 2, True)],
    ),
)
def test_last_experts_may_be_one_dense_weight(rows: int, shared: int, deterministic: bool, implementation: Any) -> None:
    """The dense weight [2 shared width, inner], or [width, shared inner], is cut into experts by numpy."""
    x, weight, _, _ = problem(rows, experts=6, out=192)
    first, chosen = 6 - shared, choices("any", 6, 2, rows)
    chosen[1] = 5  # every row has the last one
    fixed: dict[str, Any] = {"implementation": implementation, "deterministic": deterministic, "shared": shared}
    dense = np.asarray(weight)[first:].reshape(192, shared, 64).swapaxes(0, 1)
    down = np.concatenate([np.asarray(weight)[:first], dense])
    np.testing.assert_allclose(expert_matmul(x, weight, on_device(chosen), **fixed), loop(x, down, chosen), atol=1e-5)
    x, weight, _, _ = problem(rows, experts=6, out=128)
    gates, ups = np.split(np.asarray(weight)[first:].reshape(-1, 64), 2)
    dense = np.concatenate([gates.reshape(shared, 64, 64), ups.reshape(shared, 64, 64)], axis=1)
    both = loop(x, np.concatenate([np.asarray(weight)[:first], dense]), chosen)
    gate, up = np.split(both, 2, axis=-1)
    got = expert_matmul(x, weight, on_device(chosen), gate=Gate(), **fixed)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, atol=1e-5)


FEW = [(20, kind, False) for kind in KINDS]
FEW += [(3, KINDS[0], True), (1, KINDS[0], False), (20, KINDS[3], True)]
FEW += [(3, kind, True) for kind in KINDS[1:]]


@pytest.mark.parametrize(("rows", "kind", "deterministic", "implementation"), cover.with_kernel(FEW, 7))
def test_product_of_few_rows_equals_a_loop_over_rows(
    rows: int, kind: str, deterministic: bool, implementation: Any
) -> None:
    x, weight, bias, factors = problem(rows)
    chosen = choices(kind, 5, 2, rows)
    fixed: dict[str, Any] = {"implementation": implementation, "deterministic": deterministic}
    got = expert_matmul(x, weight, on_device(chosen), bias=bias, factors=factors, **fixed)
    np.testing.assert_allclose(got, loop(x, weight, chosen, bias=bias, factors=factors), atol=1e-5)
    if (chosen == 1).any():
        other = loop(x, weight, np.where(chosen == 1, 0, chosen), bias=bias, factors=factors)
        assert np.abs(got - other).max() > 0.1, "control: another expert gives another product"


@pytest.mark.parametrize("experts", [40, 3])
def test_row_that_chooses_an_expert_more_often_than_a_block_has_places_gets_each_product(experts: int) -> None:
    x, weight, *_ = problem(1, experts=experts)
    each = jnp.stack([x * (1 + j) for j in range(2 * FEW_ROWS + 1)])
    chosen = np.full((len(each), 1), 2, np.int32)
    chosen[5], chosen[7] = 1, -1
    got = expert_matmul(each, weight, on_device(chosen), implementation="pallas")
    np.testing.assert_allclose(got, loop(each, weight, chosen), atol=1e-4)


@pytest.mark.parametrize(("rows", "programs"), [(1, 8), (8, 64), (33, 129), (64, 129)])
def test_few_rows_start_a_program_for_each_expert_or_choice(rows: int, programs: int) -> None:
    """A program compares all choices before it can end, so those without rows take time."""
    shapes = [((rows, 2048), jnp.bfloat16), ((128, 1536, 2048), jnp.bfloat16), ((8, rows), jnp.int32)]
    product = functools.partial(expert_matmul, gate=Gate(), implementation="pallas")
    text = str(jax.make_jaxpr(product)(*[jax.ShapeDtypeStruct(*one) for one in shapes]))
    assert set(re.findall(r"grid=\((.*?)\)", text)) == {f"12, {programs}"}


@pytest.mark.parametrize(
    ("gate", "implementation"), cover.with_kernel([LIMITED, UNGATED, Gate(), Gate("gelu_tanh")], 2)
)
def test_gated_product_joins_gate_and_up_of_each_expert(gate: Gate, implementation: Any) -> None:
    x, weight, bias, _ = problem(7)
    chosen = choices("any", 5, 3, 7)
    got = expert_matmul(x, weight, on_device(chosen), gate=gate, bias=bias, implementation=implementation)
    np.testing.assert_allclose(got, loop(x, weight, chosen, gate, bias), atol=1e-5)
    wrong = gate._replace(activation="gelu") if gate.limit is None else Gate()
    other = loop(x, weight, chosen, wrong, bias)
    assert np.abs(got - other).max() > 1e-4, "control: another way to join them"


@pytest.mark.parametrize(("kind", "implementation"), cover.with_kernel(KINDS[::-1], 2))
def test_product_of_many_rows_equals_a_loop_over_rows(kind: str, implementation: Any) -> None:
    rows = MOST_CHOICES // 2 + 3
    x, weight, *_ = problem(rows)
    each = jnp.stack([x, 2 * x])  # other activations for each choice
    chosen = choices(kind, 5, 2, rows)
    got = expert_matmul(each, weight, on_device(chosen), implementation=implementation)
    np.testing.assert_allclose(got, loop(each, weight, chosen), atol=2e-5)


@pytest.mark.parametrize("size", [REFERENCE_ROWS, FEW_ROWS, MANY_ROWS])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_each_choice_once_with_those_of_its_expert_only(kind: str, size: int) -> None:
    chosen = choices(kind, 5, 2, 37).ravel()
    expert, rows = (np.asarray(array) for array in blocks_of(on_device(chosen), 5, size))
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(chosen)))
    known = np.where((chosen >= 0) & (chosen < 5), chosen, 5)
    for own, listed in zip(expert, rows, strict=True):
        assert set(known[listed[listed >= 0]].tolist()) <= {own}
        assert (listed >= 0).any() == (own <= 5)


@pytest.mark.parametrize(("kind", "implementation"), cover.with_kernel(["fp8", "int8"], 1))
def test_quantised_experts_have_a_scale_for_each_channel(kind: Any, implementation: Any) -> None:
    x, weight, bias, _ = problem(6, inner=128)
    stored = quantize(weight, kind)
    assert stored.scale.shape == weight.shape[:2] and not stored.has_groups
    chosen = choices("any", 5, 2, 6)
    got = expert_matmul(x, stored, on_device(chosen), gate=Gate(), bias=bias, implementation=implementation)
    wide = np.asarray(stored.values, np.float64) * np.asarray(stored.scale, np.float64)[..., None]
    np.testing.assert_allclose(got, loop(x, wide, chosen, Gate(), bias), atol=1e-5)
    unscaled = replace(stored, scale=jnp.ones_like(stored.scale))
    other = expert_matmul(x, unscaled, on_device(chosen), gate=Gate(), bias=bias, implementation=implementation)
    assert np.abs(got - other).max() > 0.1, "control: the scales count"


def narrow(kind: Any, inner: int, group: int, out: int = 128) -> tuple[Quantized, np.ndarray]:
    """Return random experts with scales of groups, and the weights that they stand for, computed value by value."""
    rng = np.random.default_rng(inner)
    values, groups = rng.integers(0, 16, (5, out, inner), np.uint8), (5, out, inner // group)
    if kind == "fp8":
        eighths, factor = rng.normal(size=values.shape).astype(FLOAT8), rng.uniform(0.1, 1, groups).astype(np.float32)
        wide = eighths.astype(np.float64) * factor.astype(np.float64).repeat(group, -1)
        return Quantized(on_device(eighths), on_device(factor), kind), wide
    if kind == "mxfp4":
        scale, zeros = rng.integers(120, 130, groups, np.uint8), None
        numbers, factor = values.view(ml_dtypes.float4_e2m1fn).astype(np.float64), 2.0 ** (scale.astype(int) - 127)
    else:
        scale, zeros = (rng.normal(size=groups) / 20).astype(np.float32), rng.integers(0, 16, groups, np.uint8)
        numbers, factor = values.astype(np.float64) - zeros.repeat(group, -1), scale.astype(np.float64)
    arrays = [None if array is None else on_device(array) for array in (pack(values), scale, zeros)]
    return Quantized(arrays[0], arrays[1], kind, arrays[2]), numbers * factor.repeat(group, -1)  # type: ignore[arg-type]


NARROW = [("mxfp4", 96, 32, 20), ("int4", 384, 64, 1), ("fp8", 384, 128, 20), ("mxfp4", 384, 32, 1)]
NARROW += [("mxfp4", 96, 32, 1), ("int4", 384, 64, 20), ("fp8", 192, 64, 1), ("mxfp4", 384, 32, 20)]


@pytest.mark.parametrize(("kind", "inner", "group", "rows", "implementation"), cover.with_kernel(NARROW, 3))
def test_experts_with_scales_of_groups_have_the_products_of_their_values(
    kind: str, inner: int, group: int, rows: int, implementation: Any
) -> None:
    weight, wide = narrow(kind, inner, group)
    assert weight.kind == kind and weight.group == group and weight.shape == wide.shape
    x = on_device(np.random.default_rng(0).normal(size=(rows, inner)), jnp.bfloat16)
    chosen = choices("rows without experts" if rows > 1 else "any", 5, 2, rows)
    product = functools.partial(expert_matmul, dtype=jnp.float32, implementation=implementation)
    got, wanted = product(x, weight, on_device(chosen)), loop(x, wide, chosen)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    gated = product(x, weight, on_device(chosen), gate=LIMITED)
    np.testing.assert_allclose(gated, loop(x, wide, chosen, LIMITED), atol=1e-4)
    is_packed = weight.values.dtype == np.uint8
    swapped = weight.values << 4 | weight.values >> 4 if is_packed else jnp.roll(weight.values, 1, -1)
    wrong = [replace(weight, values=swapped)]
    wrong += [replace(weight, scale=jnp.roll(weight.scale, 1, axis)) for axis in (1, 2)]
    wrong += [] if weight.zeros is None else [replace(weight, zeros=None)]
    for other in wrong:
        found = product(x, other, on_device(chosen))
        assert np.abs(found - wanted).max() > 0.05 * np.abs(wanted).max(), "control"


def test_packed_experts_that_the_kernel_does_not_support_are_named() -> None:
    (weight, _), (fine, _) = narrow("mxfp4", 96, 32), narrow("int4", 96, 16)
    chosen, shape = on_device(np.zeros((1, 1), jnp.int32)), (1, 96)
    with pytest.raises(NotImplementedError, match="x must be bfloat16 for experts in mxfp4, got float16"):
        expert_matmul(on_device(np.zeros(shape, jnp.float16)), weight, chosen, implementation="pallas")
    with pytest.raises(NotImplementedError, match="groups must be multiples of 32 columns, got 16"):
        expert_matmul(on_device(np.zeros(shape, jnp.bfloat16)), fine, chosen, implementation="pallas")


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_deterministic_product_of_a_row_has_the_same_bits_among_any_other_rows(implementation: Any) -> None:
    x, weight, bias, factors = problem(150)
    chosen = on_device(choices("any", 5, 2, 150))
    options: dict[str, Any] = {"bias": bias, "deterministic": True, "implementation": implementation}
    whole = np.asarray(expert_matmul(x, weight, chosen, factors=factors, **options))
    x, chosen, factors = map(np.asarray, (x, chosen, factors))
    for rows in ([7], [149, 3], list(range(40, 110))):
        own = expert_matmul(x[rows], weight, chosen[:, rows], factors=factors[:, rows], **options)
        np.testing.assert_array_equal(own, whole[:, rows])


# ---- on GPUs

BLOCKS = "fp8 by block"  # float8 with scales of 128 columns
STORED = [(None, "bfloat16"), ("int8", "bfloat16"), ("int8", "float32"), ("mxfp4", "bfloat16"), ("int4", "bfloat16")]
STORED += [(BLOCKS, "bfloat16"), (BLOCKS, "float32")]
SHAPES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "gpt-oss-20b": (32, 4, 2880, 2880)}  # experts, chosen, hidden, width


def by_block(weight: jax.Array) -> Quantized:
    """Return experts in float8 with a scale for each 128 columns of a row."""
    stored = quantize(weight.reshape(*weight.shape[:-1], -1, 128), "fp8")
    return replace(stored, values=stored.values.reshape(weight.shape))


def quantized(kind: Any, weights: Any) -> Any:
    if kind == BLOCKS:
        return [by_block(weight) for weight in weights]
    return [quantize(weight, kind) if kind else weight for weight in weights]


def both_products(deterministic: bool, x: Any, weights: Any, chosen: Any) -> Any:
    inner = expert_matmul(x, weights[0], chosen, gate=Gate(), deterministic=deterministic)
    return expert_matmul(inner, weights[1], chosen, deterministic=deterministic)


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        *((shape, *stored) for shape in SHAPES for stored in STORED[:3]),
        ("gpt-oss-20b", *STORED[3]),
        *(("qwen3-30b-a3b", *stored) for stored in STORED[4:]),
    ],
)
@pytest.mark.parametrize(("rows", "deterministic"), [(1, False), (40, False), (320, False), (5, True)])
def test_products_compiled_for_an_h200_spill_no_registers_and_copy_no_weights(
    shape: str, kind: Any, dtype: Any, rows: int, deterministic: bool
) -> None:
    experts, chosen, hidden, width = SHAPES[shape]
    sizes = ((rows, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    x, *weights = [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
    weights = jax.eval_shape(functools.partial(quantized, kind), weights)
    indices = jax.ShapeDtypeStruct((chosen, rows), jnp.int32)
    program = compile_for_h200(
        functools.partial(both_products, deterministic), x, weights, indices, fail_on_spills=True
    )
    is_packed, has_groups = kind in ("int4", "mxfp4"), kind in ("int4", "mxfp4", BLOCKS) and dtype == "bfloat16"
    is_hopper = has_groups and not deterministic and rows * chosen <= MOST_LISTED and jax.__version_info__ >= (0, 11)
    own = sum(launch.kind == "kCustomCall" for launch in program.launches)
    assert (own, program.count("expert_matmul")) == ((2, 0) if is_hopper else (0, 2))
    is_listed = deterministic or rows * chosen > MOST_CHOICES
    products = 4 if is_packed or is_hopper else 2  # activations are put into another order, or gathered
    count = len(program.launches)
    if is_hopper:
        assert count == products and program.count("gather_blocks") == 2
    else:
        assert count == products if not is_listed else products < count <= products + 10
    assert program.temp_bytes < 64 * rows * chosen * hidden + (1 << 20)
    assert not program.copies(1 << 20)


def test_ragged_dot_compiled_for_an_h200_multiplies_all_rows_by_all_experts() -> None:
    """The reason not to use it: its inputs are as large as the rows repeated for each expert."""
    experts, chosen, hidden, width = SHAPES["qwen3-30b-a3b"]
    shapes = ((320 * chosen, hidden), (experts, hidden, 2 * width))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    program = compile_for_h200(jax.lax.ragged_dot, *arrays, jax.ShapeDtypeStruct((experts,), jnp.int32))
    assert program.temp_bytes >= 2 * 320 * chosen * experts * hidden


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), STORED)
@pytest.mark.parametrize("rows", [1, 5, 60, 320])
def test_products_on_a_gpu_equal_those_of_the_reference(
    rows: int, kind: str | None, dtype: Any, deterministic: bool
) -> None:
    experts, (_, chosen, hidden, width) = 32, SHAPES["qwen3-30b-a3b"]
    rng = np.random.default_rng(rows)
    x, gate_up, down = (
        jnp.asarray(rng.standard_normal(size, np.float32) / np.sqrt(size[-1]), dtype)
        for size in ((rows, hidden), (experts, 2 * width, hidden), (experts, hidden, width))
    )
    x, indices = x * float(np.sqrt(hidden)), jnp.asarray(choices("rows without experts", experts, chosen, rows))
    weights = quantized(kind, (gate_up, down))
    got = np.asarray(both_products(deterministic, x, weights, indices), np.float32)
    inner = expert_matmul(x, weights[0], indices, gate=Gate(), implementation="reference")
    wanted = np.asarray(expert_matmul(inner, weights[1], indices, implementation="reference"), np.float32)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    if rows > 1:
        assert np.abs(got - wanted[:, ::-1]).max() > 0.2 * np.abs(wanted).max(), "control: the rows reversed"


def test_weights_that_the_kernel_does_not_support_are_named() -> None:
    x, weight, *_ = problem(3, out=96)
    wide: Any = jax.ShapeDtypeStruct((8, 1536, 2048), jnp.bfloat16)
    assert unsupported_experts(wide, jnp.bfloat16, gated=True) is None
    for gate in (None, Gate()):
        with pytest.raises(NotImplementedError, match=r"multiple of .*, multiple of .*got \(5, 96, 64\)"):
            expert_matmul(x, weight, on_device(np.zeros((2, 3), jnp.int32)), gate=gate, implementation="pallas")
    huge: Any = jax.ShapeDtypeStruct((128, 16384, 5120), jnp.bfloat16)
    assert "at most 2147483648" in str(unsupported_experts(huge, jnp.bfloat16, gated=True))
    largest: Any = jax.ShapeDtypeStruct((128, 4096, 4096), jnp.bfloat16)  # Mistral Small 4; its last address fits
    assert unsupported_experts(largest, jnp.bfloat16, gated=True) is None
