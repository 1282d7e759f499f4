"""Errors of the gated delta rule in float32 and bfloat16 beside float64, and those of the forms that it does not use.

Repeated keys make powers of the weights between tokens grow like binomials, decays near 0 lose the digits of sums whose
difference is taken, and a value that is rounded only when it is stored differs between the rounds that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.ancestors import ancestors
from pallas_kernels.recurrent import gated_delta
from pallas_kernels.recurrent.gated_delta import pairs_of, verify
from pallas_kernels.recurrent.records import EVERY, DeltaTokens, Records

DIM = 16  # channels of the one key head and of the one value head
CHAIN = list(range(-1, 63))
TREE = [-1, 0, 0, *(node // 2 + node % 3 for node in range(3, 48))]  # an ancestor has a smaller index


def tokens(count: int, **fields: np.ndarray) -> DeltaTokens:
    """Draw tokens whose decays are those of usual texts; fields are [count, ...]."""
    rng = np.random.default_rng(0)
    keys, queries = (rng.standard_normal((count, DIM)) for _ in range(2))
    drawn = dict(keys=keys, queries=queries, values=rng.standard_normal((count, DIM)))
    drawn |= dict(decays=-rng.exponential(0.1, count), rates=rng.random(count)) | fields
    for name in ("keys", "queries"):
        drawn[name] = drawn[name] / np.linalg.norm(drawn[name], axis=-1, keepdims=True)
    return DeltaTokens(**{name: jnp.asarray(rows[None, None], jnp.float32) for name, rows in drawn.items()})


def seen_of(parents: list[int]) -> Any:
    return jnp.asarray(np.asarray(ancestors(np.array([parents], np.int32))))


def zeros() -> Any:
    return jnp.zeros((1, 1, DIM, DIM), jnp.float32)


def recurrence(new: DeltaTokens, parents: list[int]) -> np.ndarray:
    """Return the outputs of all nodes in float64, each by the rule along its path."""
    rows = {name: np.asarray(of[0, 0], np.float64) for name, of in new._asdict().items()}
    states, outputs = {-1: np.zeros((DIM, DIM))}, []
    for node, parent in enumerate(parents):
        key, state = rows["keys"][node], states[parent] * np.exp(rows["decays"][node])
        value = rows["rates"][node] * (rows["values"][node] - state @ key)
        states[node] = state + np.outer(value, key)
        outputs.append(states[node] @ rows["queries"][node])
    return np.stack(outputs)


def by_doubling(new: DeltaTokens, seen: Any) -> np.ndarray:
    """Return the outputs if values are solved by (I - A)(I + A^2)(I + A^4)..., without a state before."""
    weights, scores = (np.asarray(of[0, 0]) for of in pairs_of(new, seen))
    inverse, power = np.eye(len(weights), dtype=np.float32) - weights, weights @ weights
    for _ in range(5):
        inverse, power = inverse + inverse @ power, power @ power
    return scores @ (inverse @ np.asarray(new.rates[0, 0, :, None] * new.values[0, 0]))


@pytest.mark.parametrize("parents", [CHAIN[:16], CHAIN, TREE], ids=["chain of 16", "chain of 64", "tree of 48"])
def test_values_of_nearly_equal_keys_are_solved_without_loss(parents: list[int]) -> None:
    rng, count = np.random.default_rng(1), len(parents)
    keys = np.eye(DIM)[0] + 1e-3 * rng.standard_normal((count, DIM))
    new, seen = tokens(count, keys=keys, decays=np.zeros(count), rates=np.ones(count)), seen_of(parents)
    wanted = recurrence(new, parents)
    outputs, _ = verify(zeros(), None, new, seen)
    assert np.abs(np.asarray(outputs[0, 0]) - wanted).max() < 2e-6 * np.abs(wanted).max()
    if parents == CHAIN:
        assert not np.abs(by_doubling(new, seen) - wanted).max() < 1.0, "control"


def test_decays_between_tokens_are_no_differences_of_sums() -> None:
    """All keys are one, so the weight between two tokens is the decay between them."""
    rng, count = np.random.default_rng(2), len(CHAIN)
    decays = np.where(rng.random(count) < 0.1, -320.0, -rng.exponential(0.1, count))
    new = tokens(count, keys=np.tile(np.eye(DIM)[0], (count, 1)), decays=decays, rates=np.ones(count))
    weights = np.asarray(pairs_of(new, seen_of(CHAIN))[0][0, 0])
    decays, sums = np.asarray(new.decays[0, 0]), np.cumsum(np.asarray(new.decays[0, 0]))  # float32
    errors, controls = [], []
    for i, j in zip(*np.tril_indices(count, -1), strict=True):
        exact = np.exp(decays[j + 1 : i + 1].astype(np.float64).sum())
        if exact > 1e-30:
            errors.append(abs(weights[i, j] / exact - 1))
            controls.append(abs(np.exp(sums[i] - sums[j]) / exact - 1))
    assert len(errors) > 100
    assert max(errors) < 1e-6 and max(controls) > 1e-5


def in_rounds(new: DeltaTokens, size: int) -> np.ndarray:
    """Return the outputs of tokens in bfloat16 if rounds of some size follow the records of those before them."""
    window = Records(*(jnp.zeros((1, 1, EVERY, *of.shape[3:]), of.dtype) for of in (new.keys, new.values, new.decays)))
    outputs = []
    for first in range(0, EVERY, size):
        part = DeltaTokens(*(of[:, :, first : first + size] for of in new))
        found, records = verify(zeros(), window, part, seen_of(CHAIN[: part.decays.shape[2]]))
        outputs.append(np.asarray(found[0, 0]))
        kept = (of.astype(rows.dtype) for rows, of in zip(window, records, strict=True))
        window = Records(*(rows.at[:, :, first : first + size].set(of) for rows, of in zip(window, kept, strict=True)))
    return np.concatenate(outputs)


def test_values_are_rounded_before_their_own_round_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    new = tokens(EVERY, decays=np.full(EVERY, -1e-4))
    new = new._replace(**{name: getattr(new, name).astype(jnp.bfloat16) for name in ("keys", "queries", "values")})

    def difference(solve: Callable[..., Any] = gated_delta._solve) -> float:
        monkeypatch.setattr(gated_delta, "_solve", solve)
        plain, drafted = in_rounds(new, 1), in_rounds(new, 5)
        return float(np.sqrt(((drafted - plain) ** 2).mean() / (plain**2).mean()))

    solve = gated_delta._solve
    assert difference() < 1e-4
    assert difference(lambda weights, wanted, dtype: solve(weights, wanted, jnp.float32)) > 3e-4, "control"
