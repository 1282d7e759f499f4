"""Compare `rotate_append` with rotation by complex numbers in float64 and a loop that writes row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rotate_append
from pallas_kernels.layers.quantized import Scaled

SHAPES = [
    (8, 2, 16, 4),
    (4, 2, 80, 16),
    (6, 2, 32, 1),
    (4, 4, 64, 16),
    (3, 3, 128, 64),
]  # heads, kv heads, head_dim, page
BATCH, TOKENS, COLUMNS = 3, 5, 24


def problem(shape: tuple[int, int, int, int], dtype: str, parts: int = 1, pool: str | None = None) -> dict[str, Any]:
    heads, kv_heads, dim, page = shape
    rng = np.random.default_rng(0)
    pools = {
        name: jnp.asarray(rng.normal(size=(BATCH * COLUMNS + 1, kv_heads, page, dim)), pool or dtype)
        for name in ("k_pool", "v_pool")
    }
    first = np.array([0, 1, 13])
    return pools | dict(
        qkv=jnp.asarray(
            rng.normal(size=(parts, BATCH, TOKENS, (heads + 2 * kv_heads) * dim)), dtype if parts == 1 else "float32"
        ),
        dtype=jnp.dtype(dtype),
        positions=jnp.asarray(first[:, None] + np.arange(TOKENS) + 100, jnp.int32),
        inv_freq=jnp.asarray(1e4 ** (-np.arange(dim // 2) / (dim // 2)), jnp.float32),
        page_table=jnp.asarray(rng.permutation(np.arange(1, BATCH * COLUMNS + 1)).reshape(BATCH, COLUMNS), jnp.int32),
        first_row=jnp.asarray(first, jnp.int32),
        valid=jnp.asarray(rng.random((BATCH, TOKENS)) < 0.7),
    )


def oracle(p: dict[str, Any], heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the expected queries [B, T, heads, D] and pools, in float64."""
    k_pool, v_pool = (np.asarray(p[name], np.float64).copy() for name in ("k_pool", "v_pool"))
    _, kv_heads, page, dim = k_pool.shape
    rounded = jnp.asarray(np.asarray(p["qkv"], np.float64).sum(0), p["dtype"])
    batch, tokens = p["valid"].shape
    parts = np.asarray(rounded, np.float64).reshape(batch, tokens, -1, dim)
    angles = np.asarray(p["positions"])[..., None] * np.asarray(p["inv_freq"], np.float64)
    rotated = (parts[..., : dim // 2] + 1j * parts[..., dim // 2 :]) * np.exp(1j * angles)[:, :, None]
    rotated = np.concatenate([rotated.real, rotated.imag], axis=-1)
    for b in range(batch):
        for t in range(tokens):
            if p["valid"][b, t]:
                row = int(p["first_row"][b]) + t
                target = int(p["page_table"][b, row // page])
                k_pool[target, :, row % page] = rotated[b, t, heads : heads + kv_heads]
                v_pool[target, :, row % page] = parts[b, t, heads + kv_heads :]
    return rotated[:, :, :heads], k_pool, v_pool


def check(
    shape: tuple[int, int, int, int], dtype: str, implementation: str, parts: int = 1, pool: str | None = None
) -> None:
    p, heads = problem(shape, dtype, parts, pool), shape[0]
    got = rotate_append(**p, heads=heads, implementation=implementation)
    # Angles reach 120 rad in float32 (errors of 2**-18 of a full circle); bfloat16 rounds the result once more.
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-4
    for one, wanted in zip(got, oracle(p, heads), strict=True):
        if one.dtype == "float8_e4m3fn":  # three bits of mantissa; below 2**-6 values are 2**-9 apart
            tolerance = 2**-4
        np.testing.assert_allclose(np.asarray(one, np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate_append_kernel_of_random_rows_matches_float64(
    shape: tuple[int, int, int, int], dtype: str, implementation: str
) -> None:
    check(shape, dtype, implementation)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotate_append_kernel_of_four_partial_sums_matches_float64(dtype: str, implementation: str) -> None:
    check(SHAPES[1], dtype, implementation, parts=4)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_rotate_append_kernel_of_bfloat16_partial_sums_adds_them_in_float32(implementation: str) -> None:
    p, heads = problem(SHAPES[1], "bfloat16", 4), SHAPES[1][0]
    p = p | {"qkv": p["qkv"].astype(p["dtype"]), "valid": jnp.ones_like(p["valid"])}
    *_, values = rotate_append(**p, heads=heads, implementation=implementation)  # the V pool: values are not rotated
    first, *others = p["qkv"]
    *_, wanted = oracle(p, heads)
    np.testing.assert_array_equal(np.asarray(values, np.float64), wanted)
    assert np.any(oracle(p | {"qkv": sum(others, first)[None]}, heads)[2] != wanted), "control: a sum in bfloat16"


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("parts", [1, 2])
def test_rotate_append_kernel_of_scaled_projection_applies_row_and_column_scales(
    parts: int, implementation: str
) -> None:
    p, heads = problem(SHAPES[1], "float32", parts), SHAPES[1][0]
    row_scale = jnp.arange(1, 1 + BATCH * TOKENS, dtype=jnp.float32).reshape(BATCH, TOKENS) / 8
    scale = jnp.arange(p["qkv"].shape[-1], dtype=jnp.float32) / 64
    scaled = Scaled(p["qkv"], row_scale, scale)

    def errors(qkv: Scaled) -> list[float]:
        got = rotate_append(**(p | {"qkv": qkv}), heads=heads, implementation=implementation)
        wanted = oracle(p | {"qkv": p["qkv"] * row_scale[..., None] * scale}, heads)
        return [np.abs(np.asarray(a, np.float64) - b).max() for a, b in zip(got, wanted, strict=True)]

    assert max(errors(scaled)) < 1e-3
    assert min(errors(dataclasses.replace(scaled, scale=scale[::-1]))) > 0.1
    assert min(errors(dataclasses.replace(scaled, row_scale=row_scale[::-1]))) > 0.1


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotate_append_kernel_with_float8_pools_matches_float64(dtype: str, implementation: str) -> None:
    check(SHAPES[2], dtype, implementation, pool="float8_e4m3fn")


@pytest.mark.parametrize("fault", ["positions", "first_row", "valid"])
def test_rotate_append_kernel_with_one_changed_argument_has_a_large_error(fault: str) -> None:
    """Negative control: the tolerance detects each changed argument."""
    p = problem(SHAPES[0], "float32")
    wrong = p | {fault: ~p[fault] if fault == "valid" else p[fault] + 1}
    got, wanted = rotate_append(**wrong, heads=8), oracle(p, 8)
    assert max(np.abs(np.asarray(a, np.float64) - b).max() for a, b in zip(got, wanted, strict=True)) > 0.1


def test_rotate_append_kernel_of_wrong_projection_width_raises() -> None:
    p = problem(SHAPES[0], "float32")
    with pytest.raises(ValueError, match="qkv must be 192 wide, got 176"):
        rotate_append(**(p | {"qkv": p["qkv"][..., :176]}), heads=8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate_append_kernel_on_gpu_matches_float64(shape: tuple[int, int, int, int], dtype: str) -> None:
    check(shape, dtype, "pallas")
