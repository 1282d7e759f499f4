"""Compare `deterministic_matmul` with float64, and each row's bits between products of different numbers of rows."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layers.dense.deterministic_matmul import deterministic_matmul, fixed_parts
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.quantize_rows import Activation
from pallas_kernels.layers.row_by_row import row_by_row
from tests.reference.activations import ACTIVATIONS
from tests.support.arrays import on_device

COUNTS = (1, 5, 8, 9, 80)  # numbers of rows


def problem(rows: int, out: int, inner: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x = on_device(rng.normal(size=(rows, inner)), dtype)
    return x, on_device(rng.normal(size=(out, inner)) / np.sqrt(inner), dtype)


def same_bits(one: jax.Array, other: jax.Array) -> bool:
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize(("rows", "out", "inner", "parts"), [(5, 1024, 2048, 4), (70, 128, 192, 1)])
def test_deterministic_matmul_of_random_matrices_matches_float64(
    rows: int, out: int, inner: int, parts: int, implementation: str, dtype: str
) -> None:
    x, weight = problem(rows, out, inner, dtype)
    got = deterministic_matmul(x[None], weight, jnp.dtype("float32"), implementation=implementation)
    assert got.shape == (parts, 1, rows, out)
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert np.abs(np.asarray(reduce_partials(got, jnp.float32)[0], np.float64) - wanted).max() < 2e-5  # float32 sums


@pytest.mark.parametrize(
    ("gate", "implementation"),
    [("silu", "reference"), ("silu", "pallas"), ("gelu_tanh", "pallas"), ("gelu", "reference")],
)
def test_deterministic_matmul_of_gate_and_up_multiplies_activation_of_gate_by_up(
    gate: Activation, implementation: str
) -> None:
    x, weight = problem(3, 64, 64, "float32")
    both = jnp.concatenate([x, x[::-1]], axis=1)
    got = np.asarray(deterministic_matmul(both, weight, gate=gate, implementation=implementation)[0])
    own, up = np.asarray(x, np.float64), np.asarray(x[::-1], np.float64)
    wanted = {name: (f(own) * up) @ np.asarray(weight, np.float64).T for name, f in ACTIVATIONS.items()}
    np.testing.assert_allclose(got, wanted.pop(gate), atol=2e-6)
    assert all(np.abs(got - other).max() > 1e-4 for other in wanted.values()), "control: the other functions"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("implementation", "out", "inner"),
    [("reference", 300, 1024), ("reference", 48, 16), ("pallas", 128, 256)],
)
def test_deterministic_matmul_of_fewer_rows_keeps_the_bits_of_a_row(
    implementation: str, out: int, inner: int, dtype: str
) -> None:
    x, weight = problem(COUNTS[-1], out, inner, dtype)
    product = jax.jit(partial(deterministic_matmul, dtype=jnp.dtype("float32"), implementation=implementation))
    x, everything = np.asarray(x), np.asarray(product(x, weight))
    for count in COUNTS if implementation == "reference" else (1, 9):
        for first in (0, COUNTS[-1] - count):
            own = slice(first, first + count)
            assert same_bits(product(x[own], weight), everything[:, own]), (count, first)


def test_ordinary_matmul_of_fewer_rows_changes_the_bits_of_a_row() -> None:
    """Negative control of the comparison of bits."""
    x, weight = problem(COUNTS[-1], 300, 1024, "float32")
    product = jax.jit(matmul)
    assert not same_bits(product(x[:1], weight), product(x, weight)[:1])


def test_number_of_fixed_parts_of_llama_weights_is_one_two_or_four() -> None:
    llama = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
    parts = {name: fixed_parts(*shape, jnp.dtype("bfloat16")) for name, shape in llama.items()}
    assert parts == {"qkv": 2, "o": 4, "gate_up": 1, "down": 4}


def test_deterministic_matmul_of_unsupported_weight_raises() -> None:
    x, weight = problem(2, 48, 64, "float32")
    with pytest.raises(NotImplementedError, match=r"multiple of 64.*\(48, 64\)"):
        deterministic_matmul(x, weight, implementation="pallas")


def test_rows_processed_one_by_one_keep_their_order() -> None:
    rows = on_device(np.arange(26.0)).reshape(13, 2)
    doubled, sums = row_by_row(lambda x, y: (2 * x, x.sum(-1) + y), rows, on_device(np.arange(13.0)))
    np.testing.assert_array_equal(doubled, 2 * rows)
    np.testing.assert_array_equal(sums, rows.sum(-1) + on_device(np.arange(13.0)))
    np.testing.assert_array_equal(row_by_row(lambda x: x + 1, rows[:1]), rows[:1] + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("out", "inner"), [(6144, 4096), (4096, 14336), (28672, 4096)])
def test_deterministic_matmul_on_gpu_of_fewer_rows_keeps_the_bits_of_a_row(out: int, inner: int, dtype: str) -> None:
    x, weight = problem(320, out, inner, dtype)
    product = jax.jit(partial(deterministic_matmul, implementation="pallas"))
    x, everything = np.asarray(x), np.asarray(product(x, weight))
    for count in (1, 2, 5, 8, 32, 40, 61, 64, 65, 160):
        assert same_bits(product(x[:count], weight), everything[:, :count]), count
