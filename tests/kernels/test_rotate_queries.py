"""Compare `rotate_queries` with rotation by complex numbers in float64, and each row's bits between numbers of rows."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rotate_queries
from pallas_kernels.layers.partial_sums import Scaled
from tests.kernels.test_rope_append import oracle, problem, transform
from tests.support.arrays import on_device

SHAPE = 6, 2, 48, 1  # query heads, key heads, head_dim, rows of a page: the last three only for the oracle
HEADS, WIDTH = SHAPE[0], SHAPE[0] * SHAPE[2]


def queries(dtype: str, parts: int, weights: str | None) -> tuple[dict[str, Any], Any, Any]:
    """Return a problem of `rotate_append`, partial sums of its queries, and their transform."""
    p = problem(SHAPE, dtype, parts, weights=weights)
    whole = transform(p)
    bias = None if whole.bias is None else whole.bias[:WIDTH]
    return p, p["qkv"][..., :WIDTH], dataclasses.replace(whole, bias=bias, k_norm=None, v_norm=None)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize(
    ("dtype", "parts", "weights"), [("float32", 1, None), ("bfloat16", 4, "float32"), ("bfloat16", 1, "bfloat16")]
)
def test_rotated_queries_of_random_rows_match_float64(
    dtype: str, parts: int, weights: str | None, implementation: str
) -> None:
    p, sums, own = queries(dtype, parts, weights)
    run = partial(rotate_queries, heads=HEADS, dtype=jnp.dtype(dtype), implementation=implementation)
    got, tolerance = run(sums, own), 2**-6 if dtype == "bfloat16" else 1e-4
    wanted = oracle(p, HEADS)[0]
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance)
    for other in (run(sums[:, :, ::-1], own), run(sums, dataclasses.replace(own, cos_sin=own.cos_sin[:, :, ::-1]))):
        assert np.abs(np.asarray(other, np.float64) - wanted).max() > 0.1, "control: rows of another order"
    if weights:
        changed = run(sums, dataclasses.replace(own, q_norm=None)), run(sums, dataclasses.replace(own, bias=None))
        assert all(np.abs(np.asarray(other, np.float64) - wanted).max() > 0.1 for other in changed), "control"


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_rotated_queries_of_a_scaled_projection_apply_the_scales(implementation: str) -> None:
    _, sums, own = queries("float32", 2, "float32")
    row_scale, scale = on_device(np.arange(1.0, 16)).reshape(3, 5), on_device(np.arange(1.0, 1 + WIDTH)) / 64
    run = partial(rotate_queries, transform=own, heads=HEADS, dtype=jnp.dtype("float32"), implementation=implementation)
    wanted = run(sums * row_scale[..., None] * scale)
    np.testing.assert_allclose(run(Scaled(sums, row_scale, scale)), wanted, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(run(Scaled(sums, row_scale, scale[::-1])) - wanted)).max() > 0.1, "control"


def test_deterministic_rotated_queries_keep_the_bits_of_a_row() -> None:
    _, sums, own = queries("float32", 1, "float32")
    run = jax.jit(partial(rotate_queries, heads=HEADS, dtype=jnp.dtype("float32"), deterministic=True))
    everything = np.asarray(run(sums, own))
    for count in (1, 2):
        part = dataclasses.replace(own, cos_sin=own.cos_sin[:, :count, :1])
        assert np.asarray(run(sums[:, :count, :1], part)).tobytes() == everything[:count, :1].tobytes()


def test_queries_of_another_width_are_refused() -> None:
    _, sums, own = queries("float32", 1, None)
    with pytest.raises(
        ValueError, match=r"queries must be \[parts, B, T, 5 \* 48\] for cos_sin .*, got \(1, 3, 5, 288"
    ):
        rotate_queries(sums, own, heads=5, dtype=jnp.dtype("float32"))
