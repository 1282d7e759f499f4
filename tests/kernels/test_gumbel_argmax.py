"""`gumbel_argmax` against JAX's own noise, added and searched in numpy."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gumbel_argmax
from tests.h200 import compile_for_h200

ROWS = 24


def problem(vocab: int = 3000) -> tuple[np.ndarray, ...]:
    """Logits, keys, temperatures (a third of them 0) and bounds (from none to one that few tokens reach)."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (ROWS, vocab)).astype(np.float32)
    keys = rng.integers(0, 2**32, (ROWS, 2), dtype=np.uint32)
    temperature = np.tile(np.array([0.0, 0.7, 1.6], np.float32), ROWS // 3)
    bound = np.repeat(np.array([-np.inf, 0.0, 6.0, 9.0], np.float32), ROWS // 4)
    return logits, keys, temperature, np.minimum(bound, logits.max(axis=1))


def expected(
    logits: np.ndarray, keys: np.ndarray, temperature: np.ndarray, bound: np.ndarray, ids: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Each row's token, and by how much it wins."""
    tokens, margins = [], []
    ids = np.arange(logits.shape[1]) if ids is None else ids
    for row, words, own, least in zip(logits, keys, temperature, bound, strict=True):
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        noise = np.asarray(jax.random.gumbel(key, (ids.max() + 1,), mode="low"), np.float64)[ids]
        scores = row.astype(np.float64) if own == 0 else np.where(row >= least, row / np.float64(own) + noise, -np.inf)
        tokens.append(scores.argmax())
        margins.append(scores.max() - np.partition(scores, -2)[-2])
    return np.array(tokens), np.array(margins)


@pytest.mark.parametrize("vocab", [7, 3000, 4096])
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_the_tokens_are_those_of_jax_random(vocab: int, implementation: str) -> None:
    rows = problem(vocab)
    tokens, margins = expected(*rows)
    assert margins.min() > 1e-4
    np.testing.assert_array_equal(gumbel_argmax(*rows, implementation=implementation), tokens)


def mapped(vocab: int) -> tuple[np.ndarray, ...]:
    """A draft's vocabulary: places of a larger one, in any order."""
    return *problem(vocab), np.random.default_rng(1).permutation(4 * vocab)[:vocab].astype(np.int32)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_the_noise_of_other_ids_is_added(implementation: str) -> None:
    rows = mapped(3000)
    tokens, margins = expected(*rows)
    assert margins.min() > 1e-4
    np.testing.assert_array_equal(gumbel_argmax(*rows, implementation=implementation), tokens)
    differs = np.asarray(gumbel_argmax(*rows[:-1], implementation=implementation)) != tokens
    assert differs[rows[2] > 0].any() and not differs[rows[2] == 0].any(), "control: noise of its own"


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_neighbouring_rows_share_a_temperature(implementation: str) -> None:
    logits, keys, temperature, bound = problem()
    tokens, margins = expected(logits, keys, np.repeat(temperature[:6], 4), bound)
    assert margins.min() > 1e-4
    found = gumbel_argmax(logits, keys, temperature[:6], bound, implementation=implementation)
    np.testing.assert_array_equal(found, tokens)
    assert (expected(logits, keys, np.tile(temperature[:6], 4), bound)[0] != tokens).any(), "control: dealt out"
    with pytest.raises(ValueError, match="rows must be a multiple of the 7 groups, got 24"):
        gumbel_argmax(logits, keys, temperature[:7], bound)


@pytest.mark.parametrize("part", [1, 2, 3])
def test_another_key_temperature_or_bound_is_caught(part: int) -> None:
    """The negative control."""
    rows = list(problem())
    tokens, _ = expected(*rows)
    rows[part] = (rows[1][:, ::-1], np.full_like(rows[2], 1.0), np.full_like(rows[3], -np.inf))[part - 1]
    assert (np.asarray(gumbel_argmax(*rows, implementation="pallas")) != tokens).any()


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_the_smallest_of_equals_is_taken(implementation: str) -> None:
    logits = np.zeros((1, 3000), np.float32)
    logits[0, [5, 2050]] = 1
    token = gumbel_argmax(logits, jnp.zeros((1, 2), jnp.uint32), *jnp.zeros((2, 1)), implementation=implementation)
    assert token.tolist() == [5]


@pytest.mark.parametrize("has_ids", [False, True])
def test_no_noise_is_written_down_on_an_h200(has_ids: bool) -> None:
    rows, vocab, shape = 160, 128256, jax.ShapeDtypeStruct
    arrays = shape((rows, 2), jnp.uint32), shape((rows,), jnp.float32), shape((rows,), jnp.float32)
    ids = [shape((vocab,), jnp.int32)] * has_ids
    program = compile_for_h200(gumbel_argmax, shape((rows, vocab), jnp.float32), *arrays, *ids, fail_on_spills=True)
    assert program.count("gumbel_argmax") == 1 and len(program.launches) <= 3
    assert program.temp_bytes < 1 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("make", [problem, mapped])
@pytest.mark.parametrize("vocab", [7, 3000, 128256])
def test_on_a_gpu_the_tokens_are_those_of_jax_random(make: Callable[[int], tuple[np.ndarray, ...]], vocab: int) -> None:
    rows = make(vocab)
    with jax.default_device(jax.devices("cpu")[0]):
        tokens, margins = expected(*rows)
    differs = np.asarray(gumbel_argmax(*rows, implementation="pallas")) != tokens
    assert not differs[margins > 1e-4].any()
