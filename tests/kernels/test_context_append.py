"""Compare `append_layers` with the oracle of `rotate_append` for each layer by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.context_append import append_layers, split_layers
from tests.kernels.test_rope_append import arguments, oracle, problem
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

SHAPES = [(2, 16, 4), (1, 80, 16), (3, 64, 16)]  # kv heads, head_dim, page
ROWS = ("page_table", "first_row", "valid")


def layers_of(shape: tuple[int, int, int], dtype: str, count: int, **options: Any) -> list[dict[str, Any]]:
    """Return a problem of `rotate_append` without queries for each layer; all have the same rows."""
    made = [problem((0, *shape), dtype, **options) for _ in range(count)]
    for index, own in enumerate(made):
        rng = np.random.default_rng(index)
        own["qkv"] = on_device(rng.normal(size=own["qkv"].shape), own["qkv"].dtype)
        own["inv_freq"] = own["inv_freq"] * (1 + index)  # each layer has a rotation and norms of its own
        for name in ("bias", "k_norm", "v_norm"):
            if name in own:
                own[name] = own[name] * (1 + index)
    return made


def append_all(layers: list[dict[str, Any]], implementation: str) -> tuple[list[jax.Array], list[jax.Array]]:
    pools = ([own[name] for own in layers] for name in ("k_pool", "v_pool"))
    projected = np.concatenate([np.asarray(own["qkv"])[0] for own in layers], axis=-1)
    transforms, rows = [arguments(own)["transform"] for own in layers], (layers[0][name] for name in ROWS)
    return append_layers(*pools, projected, transforms, *rows, implementation=implementation)


TYPES = ("float32", None), ("bfloat16", "bfloat16"), ("float32", "float32")  # of rows, and of weights of heads


@pytest.mark.parametrize(
    ("shape", "dtype", "weights", "implementation"),
    cover.with_kernel(
        [(SHAPES[(row + first) % 3], *types) for first in (0, 1) for row, types in enumerate(TYPES)],
        2,
        long=[(SHAPES[(row + 2) % 3], *types) for row, types in enumerate(TYPES)],
    ),
)
def test_rows_of_all_layers_equal_those_of_each_layer_by_itself(
    shape: tuple[int, int, int], dtype: str, weights: str | None, implementation: str
) -> None:
    """Ten layers take two kernels; with weights, heads have a bias and norms."""
    layers = layers_of(shape, dtype, 10 if weights is None else 3, weights=weights)
    k_pools, v_pools = append_all(layers, implementation)
    tolerance = 2**-6 if dtype == "bfloat16" else 2e-4
    for own, k_pool, v_pool in zip(layers, k_pools, v_pools, strict=True):
        _, *wanted = oracle(own, 0)
        for got, pool in zip((k_pool, v_pool), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(got, np.float64), pool, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_rows_of_float8_pools_are_rounded_and_clipped(implementation: str) -> None:
    layers = layers_of((2, 16, 4), "float32", 2, pool="float8_e4m3fn")
    layers[1]["qkv"] = layers[1]["qkv"] * 1e4
    _, v_pools = append_all(layers, implementation)
    for own, pool in zip(layers, v_pools, strict=True):
        wanted = np.clip(oracle(own, 0)[2], -448, 448)
        np.testing.assert_allclose(np.asarray(pool, np.float64), wanted, rtol=2**-4, atol=2**-4)


def test_split_layers_equal_the_rows_that_are_written() -> None:
    layers = layers_of((2, 16, 4), "float32", 2, weights="float32")
    projected = on_device(np.concatenate([np.asarray(own["qkv"])[0] for own in layers], axis=-1))
    found = split_layers(projected, [arguments(own)["transform"] for own in layers], 2)
    for own, (k, v), *pools in zip(layers, found, *append_all(layers, "reference"), strict=True):
        row = int(own["first_row"][2]) + int(np.argmax(own["valid"][2]))
        page, place, token = int(own["page_table"][2, row // 4]), row % 4, row - int(own["first_row"][2])
        for heads, pool in zip((k, v), pools, strict=True):
            # Two programs, which may fuse products and sums differently.
            np.testing.assert_allclose(heads[2, token], pool[page, :, place], atol=1e-6)


def test_pools_that_differ_and_a_projection_of_another_width_are_refused() -> None:
    layers = layers_of((2, 16, 4), "float32", 2)
    with pytest.raises(ValueError, match="projected must be 128 wide, got 64"):
        append_all([layers[0], {**layers[1], "qkv": layers[1]["qkv"][..., :0]}], "reference")
    with pytest.raises(ValueError, match="pools of all layers must be alike"):
        append_all([layers[0], {**layers[1], **{name: layers[1][name][:5] for name in ("k_pool", "v_pool")}}], "auto")


@pytest.mark.parametrize(("layers", "launches"), [(5, 1), (9, 2)])
def test_h200_rows_of_five_layers_are_written_in_one_launch_in_place(layers: int, launches: int) -> None:
    def write(pools, projected, transforms, *rows):
        return append_layers(*pools, projected, transforms, *rows, implementation="pallas")

    made = layers_of((8, 128, 16), "bfloat16", layers, weights="bfloat16")
    projected = jnp.concatenate([own["qkv"][0] for own in made], axis=-1)
    pools = [[own[name] for own in made] for name in ("k_pool", "v_pool")]
    transforms = [replace(arguments(own)["transform"], q_norm=None) for own in made]
    arrays = (projected, transforms, *(made[0][name] for name in ROWS))
    program = compile_for_h200(write, pools, *arrays, donate_argnums=0, fail_on_spills=True)
    assert program.count("append_layers") == launches
    assert program.alias_bytes == sum(pool.nbytes for pool in jax.tree.leaves(pools))
    assert not program.copies(1 << 12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_on_a_gpu_writes_the_rows_of_each_layer(dtype: str) -> None:
    layers = layers_of((8, 128, 16), dtype, 5, weights=dtype)
    found = append_all(layers, "pallas")
    tolerance = 2**-6 if dtype == "bfloat16" else 2e-4
    for own, *pools in zip(layers, *found, strict=True):
        for got, wanted in zip(pools, oracle(own, 0)[1:], strict=True):
            np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=tolerance, atol=tolerance)
