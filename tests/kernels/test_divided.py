"""Compare the choice of tokens from logits that are divided over devices with that from all logits on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jspec.models.weights.tensor_parallel import mesh_of
from pallas_kernels import sample_tokens, top_log_probs
from pallas_kernels.layers.partial_sums import Scaled, reduce_partials
from pallas_kernels.layers.shard import AXIS, OwnColumns
from pallas_kernels.sampling import divided
from pallas_kernels.sampling.sample_tokens import NO_TOKEN
from pallas_kernels.sampling.threshold import SLICE
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200, h200_mesh

ROWS = 12
TEMPERATURES = [0.0, 1.0, 0.7]  # of the groups of rows
OFF = [np.zeros(3, np.int32), np.ones(3, np.float32), np.zeros(3, np.float32)]  # top-k, top-p, min-p
PURPOSE = 3


def rows_of(vocab: int) -> np.ndarray:
    return np.random.default_rng(vocab).normal(0, 3, (1, ROWS, vocab)).astype(np.float32)


def place(temperatures: list[float] = TEMPERATURES) -> tuple[np.ndarray, ...]:
    """Return seeds, first positions, offsets and controls."""
    rng = np.random.default_rng(1)
    seed = rng.integers(0, 2**32, (3, 2), dtype=np.uint32)
    first, offsets = (rng.integers(0, 99, count).astype(np.int32) for count in (3, ROWS))
    return seed, first, offsets, np.array(temperatures, np.float32), *OFF


def on_devices(devices: int, run: Callable[[OwnColumns], Any], logits: np.ndarray, *, split: Any = jnp.asarray) -> Any:
    """Return what every device returns for its columns; columns of padding are large, and no device may choose them.

    Args:
        split: function that makes partial sums from the padded logits of one device.
    """
    size = logits.shape[-1]
    padded = np.pad(logits, ((0, 0), (0, 0), (0, -size % devices)), constant_values=1e3)
    spec = P(None, None, AXIS)

    def one(own: jax.Array) -> Any:
        return jax.tree.map(lambda result: result[None], run(OwnColumns(split(own), size)))

    mapped = jax.shard_map(one, mesh=mesh_of(devices), in_specs=spec, out_specs=P(AXIS), check_vma=False)
    each = jax.tree.map(np.asarray, jax.jit(mapped)(padded))
    for result in jax.tree.leaves(each):
        assert (result == result[:1]).all(), "devices differ"
    return jax.tree.map(lambda result: result[0], each)


def draw(logits: np.ndarray, devices: int, implementation: str, **options: Any) -> np.ndarray:
    run = partial(divided.sample_tokens_of_devices, implementation=implementation, purpose=PURPOSE)
    ids, temperatures = options.pop("ids", None), options.pop("temperatures", TEMPERATURES)
    return on_devices(devices, lambda own: run(own, *place(temperatures), ids=ids), logits, **options)


def expected(logits: np.ndarray, ids: np.ndarray | None = None) -> np.ndarray:
    return np.array(sample_tokens(logits, *place(), ids, purpose=PURPOSE, implementation="reference"))


@pytest.mark.parametrize(
    ("vocab", "devices", "implementation"), cover.with_kernel([(2 * SLICE + 9, 2), (5, 4), (61, 2), (61, 4)], 2)
)
def test_devices_draw_the_tokens_of_one_device(vocab: int, devices: int, implementation: str) -> None:
    """Of five tokens, the last of four devices has none."""
    logits = rows_of(vocab)
    np.testing.assert_array_equal(draw(logits, devices, implementation), expected(logits))


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_devices_draw_with_the_noise_of_given_token_ids(implementation: str) -> None:
    logits, ids = rows_of(61), np.random.default_rng(2).permutation(500)[:61].astype(np.int32)
    drawn = draw(logits, 4, implementation, ids=ids)
    np.testing.assert_array_equal(drawn, expected(logits, ids))
    assert (drawn != expected(logits)).any(), "control: the ids matter"


def test_device_that_draws_with_the_noise_of_its_own_columns_is_caught() -> None:
    """Negative control: a column's index on its device takes the place of its index among all columns."""
    logits = rows_of(61)
    drawn = draw(logits, 2, "reference", ids=np.tile(np.arange(31, dtype=np.int32), 2))
    assert (drawn[:4] == expected(logits)[:4]).all() and (drawn != expected(logits)).any()


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_equal_logits_on_several_devices_give_the_smallest_token(implementation: str) -> None:
    logits = rows_of(61)
    logits[..., [17, 40, 58]] = 50.0
    drawn = draw(logits, 4, implementation, temperatures=[0.0] * 3)
    np.testing.assert_array_equal(drawn, np.full(ROWS, 17))
    logits[..., 17] = 49.0
    np.testing.assert_array_equal(draw(logits, 4, implementation, temperatures=[0.0] * 3), np.full(ROWS, 40))


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("column", [2, 60])
def test_nan_of_one_device_gives_no_token_on_all_devices_and_in_its_row_alone(column: int, implementation: str) -> None:
    logits = rows_of(61)
    wanted = expected(logits)
    logits[0, ::3, column] = np.nan
    wanted[::3] = NO_TOKEN
    np.testing.assert_array_equal(draw(logits, 4, implementation), wanted)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_infinite_logits_are_drawn_as_on_one_device(implementation: str) -> None:
    logits = rows_of(61)
    logits[0, 0, 30], logits[0, 1] = np.inf, -np.inf
    drawn = draw(logits, 4, implementation)
    np.testing.assert_array_equal(drawn, expected(logits))
    assert drawn[:2].tolist() == [30, 0]


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_devices_apply_the_scales_of_their_columns(implementation: str) -> None:
    """Without the scales another token would have the largest logit."""
    rng, logits = np.random.default_rng(3), rows_of(64)
    row_scale, scale = rng.uniform(0.5, 2, (1, ROWS)).astype(np.float32), rng.uniform(0.2, 3, 64).astype(np.float32)

    def split(own: jax.Array) -> Scaled:
        start = jax.lax.axis_index(AXIS) * own.shape[-1]
        own_scale = jax.lax.dynamic_slice_in_dim(jnp.asarray(scale), start, own.shape[-1])
        return Scaled(own, jnp.asarray(row_scale[0]), own_scale)

    wanted = expected(logits * row_scale[..., None] * scale)
    np.testing.assert_array_equal(draw(logits, 4, implementation, split=split), wanted)
    assert (wanted != expected(logits)).any(), "control"


@pytest.mark.parametrize(
    ("vocab", "k", "devices", "implementation"),
    cover.with_kernel([(5000, 10, 2), (5, 5, 4), (61, 20, 4), (61, 3, 2)], 2),
)
def test_devices_find_the_most_likely_tokens_of_one_device(
    vocab: int, k: int, devices: int, implementation: str
) -> None:
    """Rounded logits have ties within a device and between devices; k may be more columns than a device has."""
    logits, base = rows_of(vocab).round(0), on_device(np.arange(ROWS, dtype=jnp.float32))
    run = partial(divided.top_log_probs_of_devices, k=k, base=base, implementation=implementation)
    log_probs, ids = on_devices(devices, run, logits)
    wanted, wanted_ids = top_log_probs(on_device(logits[0]), k, base=base, implementation="reference")
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(log_probs, wanted, atol=2e-6, rtol=2e-6)


def test_whole_logits_are_gathered_without_padding() -> None:
    logits = rows_of(61)
    gathered = on_devices(4, partial(reduce_partials, dtype=jnp.dtype("float32")), logits)
    np.testing.assert_array_equal(gathered, logits[0])


def test_devices_draw_in_two_kernels_around_one_exchange_on_an_h200() -> None:
    mesh = jax.sharding.Mesh(h200_mesh(2).devices, (AXIS,))

    def one(own: jax.Array, *arguments: Any) -> Any:
        return divided.sample_tokens_of_devices(OwnColumns(own, 2 * own.shape[-1] - 1), *arguments)

    specs = (P(None, None, AXIS), *[P()] * 7)
    mapped = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    logits = jax.ShapeDtypeStruct((1, ROWS, 20000), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, specs[0]))
    program = compile_for_h200(mapped, logits, *place(), fail_on_spills=True, mesh=mesh)
    assert program.count("sample_own_tokens") == program.count("sample_tokens_of_devices") == 1
    assert sum(line.count("all-gather") for line in program.compiled.as_text().splitlines() if "f32[" in line) == 0
