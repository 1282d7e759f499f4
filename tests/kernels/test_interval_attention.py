"""Compare the attention to intervals and its gradient, as kernels and as references, with dense attention in jax."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import interval_reference as module
from pallas_kernels.attention.interval_attention import interval_attention, interval_attention_gradient
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

# batch, size, heads, kv_heads, head_dim, length of the documents
CASES = [
    (2, 80, 4, 2, 16, (33, 47)),
    (1, 176, 2, 2, 32, (5, 100, 71)),
    (1, 96, 4, 1, 48, (96,)),
    (1, 16, 2, 1, 16, (16,)),
]
PARAMETERS = [
    pytest.param(case, implementation, id=f"{case}-{implementation}", marks=marks)
    for index, case in enumerate(CASES)
    for implementation, marks in (("reference", ()), ("pallas", pytest.mark.long if index > 1 else ()))
]


def problem(case: tuple[Any, ...], dtype: Any = jnp.float32) -> tuple[list[jax.Array], jax.Array, jax.Array, float]:
    """Return queries, keys and values, the first place that each query sees, a place after each key's last query."""
    batch, size, heads, kv_heads, dim, lengths = case
    rng = np.random.default_rng(size)
    shapes = [(batch, size, count, dim) for count in (heads, kv_heads, kv_heads)]
    arrays = [on_device(rng.normal(size=shape), dtype) for shape in shapes]
    first = np.repeat(np.cumsum((0, *lengths[:-1])), lengths)
    starts = np.tile(np.maximum(first, np.arange(size) - 39), (batch, 1))  # a window too
    starts[:, 3] = size  # a query that sees nothing
    ends = np.tile(first + np.repeat(lengths, lengths), (batch, 1))
    return arrays, on_device(starts, jnp.int32), on_device(ends, jnp.int32), dim**-0.5


@jax.jit
def dense(q: Any, k: Any, v: Any, starts: Any, scale: float) -> tuple[Any, Any]:
    group, place = q.shape[2] // k.shape[2], jnp.arange(q.shape[1])
    k, v = (jnp.repeat(x, group, axis=2).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q.astype(jnp.float32), k, precision="highest") * scale
    seen = (place >= starts[..., None]) & (place <= place[:, None])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
    return jnp.einsum("bhts,bshd->bthd", p, v, precision="highest"), lse


@jax.jit
def dense_gradient(arrays: list[Any], starts: Any, scale: float, dout: Any) -> Any:
    return jax.vjp(lambda *own: dense(*own, starts, scale)[0], *arrays)[1](dout)


def delta_of(out: Any, dout: Any) -> np.ndarray:
    return np.einsum("bthd,bthd->bht", np.asarray(out, np.float32), np.asarray(dout, np.float32))


@pytest.mark.parametrize(("case", "implementation"), PARAMETERS)
def test_output_and_log_sum_exp_equal_dense_attention(case: tuple[Any, ...], implementation: str) -> None:
    arrays, starts, _, scale = problem(case)
    found = interval_attention(*arrays, starts, scale=scale, implementation=implementation)  # type: ignore[arg-type]
    for own, expected in zip(found, dense(*arrays, starts, scale), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)
    out, lse = map(np.asarray, found)
    assert not np.any(out[:, 3]) and np.all(np.isneginf(lse[..., 3]))
    other = dense(*arrays, np.zeros_like(starts), scale)[0]
    assert np.abs(np.asarray(other) - out).max() > 0.1  # queries that see all before them differ


@pytest.mark.parametrize(("case", "implementation"), PARAMETERS)
def test_gradient_equals_that_of_dense_attention(case: tuple[Any, ...], implementation: str) -> None:
    arrays, starts, ends, scale = problem(case)
    dout = on_device(np.random.default_rng(1).normal(size=arrays[0].shape), jnp.float32)
    out, lse = dense(*arrays, starts, scale)
    delta = delta_of(out, dout)
    options: dict[str, Any] = {"scale": scale, "implementation": implementation}
    found = interval_attention_gradient(*arrays, dout, starts, ends, lse, delta, **options)
    expected = dense_gradient(arrays, starts, scale, dout)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=2e-5)
    wrong = interval_attention_gradient(*arrays, dout, starts, ends, lse, 0 * delta, **options)
    assert np.abs(np.asarray(wrong[0]) - np.asarray(expected[0])).max() > 0.1  # without delta


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_bfloat16_differs_from_float32_by_rounding_alone(implementation: str) -> None:
    arrays, starts, ends, scale = problem(CASES[0], jnp.bfloat16)
    out, lse = interval_attention(*arrays, starts, scale=scale, implementation=implementation)  # type: ignore[arg-type]
    expected = dense(*arrays, starts, scale)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected[0], atol=0.03)
    np.testing.assert_allclose(lse, expected[1], atol=1e-2)
    dout = on_device(np.ones(arrays[0].shape, jnp.bfloat16))
    delta = delta_of(expected[0], dout)
    options: dict[str, Any] = {"scale": scale, "implementation": implementation}
    found = interval_attention_gradient(*arrays, dout, starts, ends, expected[1], delta, **options)
    own = dense_gradient([on_device(x, np.float32) for x in arrays], starts, scale, on_device(dout, np.float32))
    for one, other in zip(found, map(np.asarray, own), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), other, atol=0.05 * float(np.abs(other).max()))


@pytest.mark.parametrize("tile", [8, 24, 512])
def test_tiles_of_the_reference_change_nothing(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, starts, ends, scale = problem(CASES[0])
    dout = on_device(np.ones(arrays[0].shape))

    def both(arrays: Any) -> Any:
        out, lse = module.attend(*arrays, starts, scale=scale)
        delta = jnp.moveaxis(jnp.sum(out, axis=-1), 2, 1)
        return out, lse, *module.gradient(*arrays, dout, starts, lse, delta, ends, scale=scale)

    whole = jax.jit(both)(arrays)
    monkeypatch.setattr(module, "TILE", tile)
    for own, other in zip(jax.jit(lambda own: both(own))(arrays), whole, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_reference_of_wide_heads_equals_dense_attention() -> None:
    arrays, starts, _, scale = problem((1, module.WIDE_TILE + 20, 2, 1, module.WIDE + 16, (50, module.WIDE_TILE - 30)))
    attend = jax.jit(partial(module.attend, scale=scale))
    for own, expected in zip(attend(*arrays, starts), dense(*arrays, starts, scale), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)


def test_reference_leaves_out_tiles_of_other_documents() -> None:
    size = 2 * module.TILE
    (q, k, v), starts, ends, scale = problem((1, 2 * size, 2, 1, 16, (size, size)))

    @jax.jit
    def run(q: Any, k: Any, v: Any) -> Any:
        k, v = (of.at[:, :size].set(jnp.nan) for of in (k, v))
        out, lse = module.attend(q, k, v, starts, scale=scale)
        delta = jnp.moveaxis(jnp.sum(out, axis=-1), 2, 1)
        found = module.gradient(q, k, v, jnp.ones_like(q), starts, lse, delta, ends, scale=scale)
        return out, jnp.moveaxis(lse, 1, 2), *found

    for own in map(np.asarray, run(q, k, v)):
        assert np.isnan(own[:, :size]).any() and np.isfinite(own[:, size:]).all()


def test_kernel_of_wide_heads_is_refused() -> None:
    arrays, starts, _, scale = problem((1, 16, 2, 1, 256, (16,)))
    with pytest.raises(NotImplementedError, match="head_dim must be a multiple of 16 up to 128, got 256"):
        interval_attention(*arrays, starts, scale=scale, implementation="pallas")
