"""Compare `plain_product` with float64, and check which operand is first in the programs of each platform."""

from __future__ import annotations

import re
import time
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layers.dense.plain_product import MOST_ROWS, plain_product
from pallas_kernels.layers.products import matmul
from tests.support.arrays import on_device

OUT, INNER = 96, 80
F32 = jnp.dtype("float32")


def problem(*rows: int, dtype: str = "float32", out: int = OUT, inner: int = INNER) -> tuple[jax.Array, jax.Array]:
    """Return x [*rows, inner] and a weight [out, inner]."""
    rng = np.random.default_rng(sum(rows))
    return on_device(rng.normal(size=(*rows, inner)), dtype), on_device(rng.normal(size=(out, inner)), dtype)


@jax.jit
def x_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return x @ weight.T with x as the first operand of the product."""
    terms = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, terms, precision="highest", preferred_element_type=F32)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return plain_product(x, weight, F32)


def product_shape(x: jax.Array, weight: jax.Array) -> tuple[int, ...]:
    """Return the shape of the product that XLA computes for this machine; the rows of its first operand come first."""
    (shape,) = re.findall(r" = \w+\[([\d,]+)\]\S* dot\(", jax.jit(product).lower(x, weight).compile().as_text())
    return tuple(map(int, shape.split(",")))


@pytest.mark.parametrize("rows", [(1,), (2,), (4,), (5,), (2, 4), (1, 9), (MOST_ROWS,), (MOST_ROWS + 1,), (3, 2, 2)])
def test_product_of_each_number_of_rows_matches_float64(rows: tuple[int, ...]) -> None:
    x, weight = problem(*rows)
    found, wanted = jax.jit(product)(x, weight), np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert found.shape == (*rows, OUT) and found.dtype == F32
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    if sum(rows) > 1:
        assert np.abs(np.asarray(found)[..., ::-1, :] - wanted).max() > 1, "control: rows in another order"


@pytest.mark.parametrize("rows", [2, 4, 5, 8, MOST_ROWS])
def test_few_rows_of_float32_on_cpu_are_the_second_operand(rows: int) -> None:
    """The rows are padded to 8 or 16 if there are more than 4."""
    assert product_shape(*problem(rows)) == (OUT, rows if rows <= 4 else -(-rows // 8) * 8)
    assert product_shape(*problem(1, rows)) == product_shape(*problem(rows))


def test_other_rows_on_cpu_are_the_first_operand() -> None:
    """These are more rows, those of bfloat16, and one row, whose products are sums over a vector."""
    assert product_shape(*problem(MOST_ROWS + 1)) == (MOST_ROWS + 1, OUT)
    assert product_shape(*problem(4, dtype="bfloat16")) == (4, OUT)
    assert product_shape(*problem(1))[-1] == OUT


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_few_rows_on_other_platforms_are_the_first_operand(platform: str) -> None:
    def lowered(name: str) -> str:
        return jax.jit(product).trace(*problem(4)).lower(lowering_platforms=(name,)).as_text()

    (found,) = re.findall(r"dot_general (.*?), contracting", lowered(platform))
    assert found == "%arg0, %arg1" and "optimization_barrier" not in lowered(platform)
    (found,) = re.findall(r"dot_general (.*?), contracting", lowered("cpu"))
    assert found.startswith("%arg1, ") and "optimization_barrier" in lowered("cpu"), "control"


def test_product_of_few_rows_has_the_same_gradient_as_the_product_with_x_first() -> None:
    """Training takes gradients of products, whatever the order of their operands."""
    x, weight = problem(4)
    found = jax.grad(lambda x, weight: (matmul(x, weight) ** 2).sum(), argnums=(0, 1))(x, weight)
    wanted = jax.grad(lambda x, weight: (x_first(x, weight) ** 2).sum(), argnums=(0, 1))(x, weight)
    for own, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-3)
        assert np.abs(own).max() > 1, "control"


@pytest.mark.timing
def test_four_rows_with_the_weight_first_take_less_time() -> None:
    """The weights have the size of a feed-forward's of the demo's target; each product waits for the one before."""
    x, _ = problem(4, inner=256)
    weights = [problem(4 + index, out=768, inner=256)[1] for index in range(8)]
    programs = {
        name: jax.jit(lambda x, weights, one=one: reduce(lambda x, weight: one(x, weight)[:, :256] / 16, weights, x))
        for name, one in (("weight first", product), ("x first", x_first))
    }
    seconds = dict.fromkeys(programs, 1.0)
    for name in list(programs) * 300:
        began = time.perf_counter()
        programs[name](x, weights).block_until_ready()
        seconds[name] = min(time.perf_counter() - began, seconds[name])
    assert seconds["weight first"] < 0.9 * seconds["x first"], seconds
