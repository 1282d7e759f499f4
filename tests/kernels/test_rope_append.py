"""Compare `rotate_append` with rotation by complex numbers in float64 and a loop that writes row by row."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import HeadTransform, rotate_append
from pallas_kernels.layers.partial_sums import Scaled
from tests.support import cover
from tests.support.arrays import on_device

SHAPES = [
    (8, 2, 16, 4),
    (4, 2, 80, 16),
    (6, 2, 32, 1),
    (4, 4, 64, 16),
    (3, 3, 128, 64),
]  # heads, kv heads, head_dim, page
BATCH, TOKENS, COLUMNS, EPS = 3, 5, 24, 0.1


def problem(
    shape: tuple[int, int, int, int],
    dtype: str,
    parts: int = 1,
    pool: str | None = None,
    weights: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of `rotated`; ``weights`` is the dtype of a bias and of the norms' weights, None: none."""
    heads, kv_heads, dim, page = shape
    rng = np.random.default_rng(0)
    pools = {
        name: on_device(rng.normal(size=(BATCH * COLUMNS + 1, kv_heads, page, dim)), pool or dtype)
        for name in ("k_pool", "v_pool")
    }
    first = np.array([0, 1, 13])
    return pools | dict(
        qkv=on_device(
            rng.normal(size=(parts, BATCH, TOKENS, (heads + 2 * kv_heads) * dim)), dtype if parts == 1 else "float32"
        ),
        dtype=jnp.dtype(dtype),
        **rotation(first[:, None] + np.arange(TOKENS) + 100, dim),
        **(head_weights(heads, kv_heads, dim, weights) if weights else {}),
        page_table=on_device(rng.permutation(np.arange(1, BATCH * COLUMNS + 1)).reshape(BATCH, COLUMNS), jnp.int32),
        first_row=on_device(first, jnp.int32),
        valid=on_device(rng.random((BATCH, TOKENS)) < 0.7),
    )


def rotation(positions: np.ndarray, dim: int) -> dict[str, Any]:
    """Return positions and frequencies, from which `transform` and `oracle` compute the rotation."""
    frequencies = 1e4 ** (-np.arange(dim // 2) / (dim // 2))
    return dict(positions=on_device(positions, jnp.int32), inv_freq=on_device(frequencies, jnp.float32))


def head_weights(heads: int, kv_heads: int, dim: int, dtype: str) -> dict[str, Any]:
    """Return a bias, weights of the norms, and the growth of the factor of rotated queries by position."""
    rng = np.random.default_rng(1)
    width = (heads + 2 * kv_heads) * dim
    sizes = {"bias": width, "q_norm": dim, "k_norm": dim, "v_norm": dim}
    return {name: on_device(rng.normal(size=size), dtype) for name, size in sizes.items()} | {"slope": 0.01}


def transform(p: dict[str, Any]) -> HeadTransform:
    """Return the transform of a problem; its "slope" is the growth of the queries' factor by position."""
    positions = np.asarray(p["positions"], np.float32)[..., None]
    angles = positions * np.asarray(p["inv_freq"])
    tables = np.stack([np.cos(angles), np.sin(angles)])
    if p.get("slope"):
        tables = np.concatenate([tables, tables * (1 + p["slope"] * positions)])
    return HeadTransform(
        on_device(tables, np.float32), *(p.get(name) for name in ("bias", "q_norm", "k_norm", "v_norm")), EPS
    )


def arguments(p: dict[str, Any]) -> dict[str, Any]:
    """Return the problem's arguments of a kernel: the transform replaces what it is computed from."""
    parts = ("positions", "inv_freq", "bias", "q_norm", "k_norm", "v_norm", "slope")
    return {name: value for name, value in p.items() if name not in parts} | {"transform": transform(p)}


def normed(heads: np.ndarray, weight: Any, dtype: Any) -> np.ndarray:
    """Norm heads [..., D] in float64, and round as the model does: before the product with a weight of two bytes."""
    quotient = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + EPS)
    if weight.dtype != jnp.float32:
        quotient = np.asarray(on_device(quotient, dtype), np.float64)
    return np.asarray(on_device(quotient * np.asarray(weight, np.float64), dtype), np.float64)


def oracle(p: dict[str, Any], heads: int, *, norms_last: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the expected queries [B, T, heads, D] and pools, in float64.

    Args:
        p: problem.
        heads: number of query heads.
        norms_last: norm heads after the rotation instead of before it, which is wrong.
    """
    k_pool, v_pool = (np.asarray(p[name], np.float64).copy() for name in ("k_pool", "v_pool"))
    _, kv_heads, page, dim = k_pool.shape
    total = np.asarray(p["qkv"], np.float64).sum(0)
    if p.get("bias") is not None:
        total += np.asarray(p["bias"], np.float64)
    batch, tokens = p["valid"].shape
    parts = np.asarray(on_device(total, p["dtype"]), np.float64).reshape(batch, tokens, -1, dim)
    norms = [(p.get("q_norm"), slice(heads)), (p.get("k_norm"), slice(heads, heads + kv_heads))]
    norms = [(weight, own) for weight, own in norms if weight is not None]
    if p.get("v_norm") is not None:
        values = slice(heads + kv_heads, None)
        parts[:, :, values] = normed(parts[:, :, values], p["v_norm"], p["dtype"])
    for weight, own in [] if norms_last else norms:
        parts[:, :, own] = normed(parts[:, :, own], weight, p["dtype"])
    angles = np.asarray(p["positions"])[..., None] * np.asarray(p["inv_freq"], np.float64)
    turned = (parts[..., : dim // 2] + 1j * parts[..., dim // 2 :]) * np.exp(1j * angles)[:, :, None]
    rotated = np.concatenate([turned.real, turned.imag], axis=-1)
    for weight, own in norms if norms_last else []:
        rotated[:, :, own] = normed(rotated[:, :, own], weight, p["dtype"])
    rotated[:, :, :heads] *= 1 + p.get("slope", 0) * np.asarray(p["positions"])[..., None, None]
    for b in range(batch):
        for t in range(tokens):
            if p["valid"][b, t]:
                row = int(p["first_row"][b]) + t
                target = int(p["page_table"][b, row // page])
                k_pool[target, :, row % page] = rotated[b, t, heads : heads + kv_heads]
                v_pool[target, :, row % page] = parts[b, t, heads + kv_heads :]
    return rotated[:, :, :heads], k_pool, v_pool


def check(shape: tuple[int, int, int, int], dtype: str, implementation: str, **options: Any) -> None:
    p, heads = problem(shape, dtype, **options), shape[0]
    got = rotate_append(**arguments(p), heads=heads, implementation=implementation)
    # Angles reach 120 rad in float32 (errors of 2**-18 of a full circle); bfloat16 rounds the result once more.
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-4
    for one, wanted in zip(got, oracle(p, heads), strict=True):
        if one.dtype == "float8_e4m3fn":  # three bits of mantissa; below 2**-6 values are 2**-9 apart
            tolerance = 2**-4
        np.testing.assert_allclose(np.asarray(one, np.float64), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "dtype", "implementation"),
    cover.with_kernel(list(zip(SHAPES * 2, ["bfloat16", "float32"] * 5, strict=True)), 3),
)
def test_rotate_append_kernel_of_random_rows_matches_float64(
    shape: tuple[int, int, int, int], dtype: str, implementation: str
) -> None:
    check(shape, dtype, implementation)


@pytest.mark.parametrize(("dtype", "implementation"), cover.with_kernel(("float32", "bfloat16"), 1))
def test_rotate_append_kernel_of_four_partial_sums_matches_float64(dtype: str, implementation: str) -> None:
    check(SHAPES[1], dtype, implementation, parts=4)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_rotate_append_kernel_of_bfloat16_partial_sums_adds_them_in_float32(implementation: str) -> None:
    p, heads = problem(SHAPES[1], "bfloat16", 4), SHAPES[1][0]
    p = p | {"qkv": p["qkv"].astype(p["dtype"]), "valid": jnp.ones_like(p["valid"])}
    *_, values = rotate_append(
        **arguments(p), heads=heads, implementation=implementation
    )  # the V pool: values are not rotated
    first, *others = p["qkv"]
    *_, wanted = oracle(p, heads)
    np.testing.assert_array_equal(np.asarray(values, np.float64), wanted)
    assert np.any(oracle(p | {"qkv": sum(others, first)[None]}, heads)[2] != wanted), "control: a sum in bfloat16"


@pytest.mark.parametrize(("parts", "implementation"), cover.with_kernel((2, 1), 1))
def test_rotate_append_kernel_of_scaled_projection_applies_row_and_column_scales(
    parts: int, implementation: str
) -> None:
    p, heads = problem(SHAPES[1], "float32", parts), SHAPES[1][0]
    row_scale = on_device(np.arange(1, 1 + BATCH * TOKENS, dtype=jnp.float32)).reshape(BATCH, TOKENS) / 8
    scale = on_device(np.arange(p["qkv"].shape[-1], dtype=jnp.float32)) / 64
    scaled = Scaled(p["qkv"], row_scale, scale)

    def errors(qkv: Scaled) -> list[float]:
        got = rotate_append(**arguments(p | {"qkv": qkv}), heads=heads, implementation=implementation)
        wanted = oracle(p | {"qkv": p["qkv"] * row_scale[..., None] * scale}, heads)
        return [np.abs(np.asarray(a, np.float64) - b).max() for a, b in zip(got, wanted, strict=True)]

    assert max(errors(scaled)) < 1e-3
    assert min(errors(dataclasses.replace(scaled, scale=scale[::-1]))) > 0.1
    assert min(errors(dataclasses.replace(scaled, row_scale=row_scale[::-1]))) > 0.1


@pytest.mark.parametrize(("dtype", "implementation"), cover.with_kernel(("bfloat16", "float32"), 1))
def test_rotate_append_kernel_with_float8_pools_matches_float64(dtype: str, implementation: str) -> None:
    check(SHAPES[2], dtype, implementation, pool="float8_e4m3fn")


@pytest.mark.parametrize("fault", ["positions", "first_row", "valid"])
def test_rotate_append_kernel_with_one_changed_argument_has_a_large_error(fault: str) -> None:
    """Negative control: the tolerance detects each changed argument."""
    p = problem(SHAPES[0], "float32")
    wrong = p | {fault: ~p[fault] if fault == "valid" else p[fault] + 1}
    got, wanted = rotate_append(**arguments(wrong), heads=8), oracle(p, 8)
    assert max(np.abs(np.asarray(a, np.float64) - b).max() for a, b in zip(got, wanted, strict=True)) > 0.1


def test_rotate_append_kernel_of_wrong_projection_width_raises() -> None:
    p = problem(SHAPES[0], "float32")
    with pytest.raises(ValueError, match="qkv must be 192 wide, got 176"):
        rotate_append(**arguments(p | {"qkv": p["qkv"][..., :176]}), heads=8)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("bias", (96,), r"bias must be None or \(192,\), got \(96,\)"),
        ("k_norm", (2, 16), r"k_norm must be None or \(16,\), got \(2, 16\)"),
        ("cos_sin", (3, 3, 5, 8), r"cos_sin must be \(2, 3, 5, 8\), or 4 tables, got \(3, 3, 5, 8\)"),
        ("cos_sin", (2, 3, 5, 16), r"cos_sin must be \(2, 3, 5, 8\), or 4 tables, got \(2, 3, 5, 16\)"),
    ],
)
def test_rotate_append_kernel_of_wrong_transform_raises(name: str, shape: tuple[int, ...], message: str) -> None:
    p = arguments(problem(SHAPES[0], "float32", weights="float32"))
    wrong = dataclasses.replace(p["transform"], **{name: on_device(np.zeros(shape))})
    with pytest.raises(ValueError, match=message):
        rotate_append(**p | {"transform": wrong}, heads=8)


def largest_errors(got: Any, wanted: Any) -> list[float]:
    """Return the largest error of the queries and of each pool."""
    return [float(np.abs(np.asarray(a, np.float64) - b).max()) for a, b in zip(got, wanted, strict=True)]


def check_transform(shape: tuple[int, int, int, int], dtype: str, weights: str, implementation: str) -> None:
    """Assert that bias, norms and separate tables match float64, and that leaving one out does not."""
    p, heads = problem(shape, dtype, parts=2, weights=weights), shape[0]
    got = rotate_append(**arguments(p), heads=heads, implementation=implementation)
    tolerance = 2**-4 if dtype == "bfloat16" else 2e-4  # values reach 12; the other dtype's last bit may differ twice
    assert max(largest_errors(got, oracle(p, heads))) < tolerance
    for name, wrong in {"bias": None, "q_norm": None, "k_norm": None, "slope": 0}.items():
        assert max(largest_errors(got, oracle(p | {name: wrong}, heads))) > 0.3, name
    assert max(largest_errors(got, oracle(p, heads, norms_last=True))) > 0.3


TRANSFORMS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]  # of values, of weights
TRANSFORMED = [(SHAPES[(first + row) % 2], *types) for first in (0, 1) for row, types in enumerate(TRANSFORMS)]


@pytest.mark.parametrize(("shape", "dtype", "weights", "implementation"), cover.with_kernel(TRANSFORMED, 3))
def test_rotate_append_kernel_with_bias_and_norms_and_tables_of_queries_matches_float64(
    shape: tuple[int, int, int, int], dtype: str, weights: str, implementation: str
) -> None:
    check_transform(shape, dtype, weights, implementation)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_rotate_append_kernel_of_scaled_projection_adds_the_bias_after_the_scales(implementation: str) -> None:
    p, heads = problem(SHAPES[1], "float32", weights="float32"), SHAPES[1][0]
    row_scale = on_device(np.arange(1, 1 + BATCH * TOKENS, dtype=jnp.float32)).reshape(BATCH, TOKENS) / 8
    scale = on_device(np.arange(p["qkv"].shape[-1], dtype=jnp.float32)) / 64
    scaled = Scaled(p["qkv"], row_scale, scale)
    got = rotate_append(**arguments(p | {"qkv": scaled}), heads=heads, implementation=implementation)
    factor = row_scale[..., None] * scale
    assert max(largest_errors(got, oracle(p | {"qkv": p["qkv"] * factor}, heads))) < 1e-3
    assert max(largest_errors(got, oracle(p | {"qkv": (p["qkv"] + p["bias"]) * factor, "bias": None}, heads))) > 0.1


def test_rotate_append_kernel_rounds_before_the_product_with_a_norm_weight_of_two_bytes() -> None:
    """Kernel and reference round alike, so nearly all values are equal; with a float32 weight, many differ."""
    p = problem(SHAPES[0], "bfloat16", weights="bfloat16")
    run = partial(rotate_append, heads=8)
    found = [run(**arguments(p), implementation=implementation) for implementation in ("reference", "pallas")]
    wide = {name: p[name].astype(jnp.float32) for name in ("q_norm", "k_norm")}
    other = run(**arguments(p | wide), implementation="pallas")
    for one, same, different in list(zip(*found, other, strict=True))[:2]:
        assert (np.asarray(one, np.float32) == np.asarray(same, np.float32)).mean() > 0.999
        assert (np.asarray(one, np.float32) == np.asarray(different, np.float32)).mean() < 0.99


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate_append_kernel_on_gpu_matches_float64(shape: tuple[int, int, int, int], dtype: str) -> None:
    check(shape, dtype, "pallas")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "weights"), TRANSFORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotate_append_kernel_on_gpu_with_bias_and_norms_and_tables_of_queries_matches_float64(
    shape: tuple[int, int, int, int], dtype: str, weights: str
) -> None:
    check_transform(shape, dtype, weights, "pallas")
