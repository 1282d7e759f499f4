"""Compare `sampling_threshold` with top-k, top-p and min-p by sorting in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sampling_threshold
from tests.reference.decoder import processed_probs
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

CONTROLS = [
    (t, k, p, m)
    for k in (0, 1, 5, 50, 2999, 4000)
    for p in (1.0, 0.999, 0.5, 0.01)
    for t, m in zip((1.0, 0.7, 1.5), (0.0, 0.1, 0.5), strict=True)
]  # temperature, top_k, top_p, min_p; 4000 exceeds the vocabulary
VOCAB = 3000
KERNEL = "pallas_kernels.sampling.threshold"


LARGE = 20000  # vocabulary of more token groups than a Pallas program holds


def problem(vocab: int = VOCAB, scale: float = 3.0) -> tuple[np.ndarray, list[np.ndarray]]:
    logits = np.random.default_rng(0).normal(0, scale, (len(CONTROLS), vocab)).astype(np.float32)
    types = (np.float32, np.int32, np.float32, np.float32)
    return logits, [np.array(column, dtype) for column, dtype in zip(zip(*CONTROLS, strict=True), types, strict=True)]


def mismatches(bounds: np.ndarray, logits: np.ndarray, cases: Sequence[tuple] = CONTROLS) -> list[tuple]:
    """Return the cases in which threshold and sorting keep different tokens.

    With top-p, tokens at the edge of the nucleus may differ if their probabilities add up to at most 1e-5.
    """
    found = []
    for case, bound, row in zip(cases, bounds, logits, strict=True):
        t, k, p, m = case
        differ = (processed_probs(row, temperature=t, top_k=k, top_p=p, min_p=m) > 0) != (row >= bound)
        if processed_probs(row, temperature=t)[differ].sum() > 1e-5 * (p < 1):
            found.append(case)
    return found


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_sampling_threshold_of_random_logits_keeps_the_tokens_kept_by_sorting(implementation: str) -> None:
    logits, controls = problem()
    assert not mismatches(np.asarray(sampling_threshold(logits, *controls, implementation=implementation)), logits)


@pytest.mark.once
@pytest.mark.parametrize("scale", [0.5, 6.0])
def test_sampling_threshold_of_large_vocabulary_keeps_the_tokens_kept_by_sorting(scale: float) -> None:
    logits, controls = problem(LARGE, scale)
    assert not mismatches(np.asarray(sampling_threshold(logits, *controls, implementation="pallas")), logits)


@pytest.mark.once
def test_sampling_threshold_of_peaked_probabilities_does_not_read_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reading of whole rows broken, only rows of flat probabilities get wrong thresholds."""

    def nothing(*_: Any) -> Any:
        return (lambda _: jnp.float32(0),) * 2

    monkeypatch.setattr(sys.modules[KERNEL], "_weights_of_row", nothing)
    jax.clear_caches()
    for scale, is_right in ((0.5, False), (6.0, True)):
        logits, controls = problem(LARGE, scale)
        t, k, p, m = controls
        controls = [t, np.minimum(k, 50), np.minimum(p, np.float32(0.9)), m]
        cases = list(zip(*controls, strict=True))
        bounds = np.asarray(sampling_threshold(logits, *controls, implementation="pallas"))
        assert (not mismatches(bounds, logits, cases)) == is_right
    jax.clear_caches()


def test_sampling_threshold_without_temperature_keeps_other_tokens() -> None:
    """Negative control of the comparison with sorting."""
    logits, (t, *controls) = problem()
    assert mismatches(np.asarray(sampling_threshold(logits, np.ones_like(t), *controls)), logits)


def test_sampling_threshold_without_renormalisation_after_top_k_keeps_wrong_tokens() -> None:
    """Negative control: top-p is applied to probabilities that are not renormalised after top-k."""
    logits, (t, k, p, m) = problem()
    apart = np.maximum(sampling_threshold(logits, t, k, np.ones_like(p), m), sampling_threshold(logits, t, 0 * k, p, m))
    assert mismatches(np.asarray(apart), logits)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_sampling_threshold_of_tied_logits_keeps_all_tied_tokens(implementation: str) -> None:
    logits = on_device([[2.0, 5.0, 5.0, 5.0, -jnp.inf, 1.0], [0.0] * 6])
    bound = sampling_threshold(
        logits,
        *map(on_device, ([1.0, 1.0], [2, 1], [1.0, 0.1], [0.0, 0.0])),
        implementation=implementation,
    )
    assert bound.tolist() == [5.0, 0.0]


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_sampling_threshold_with_logits_of_minus_infinity_ignores_them(implementation: str) -> None:
    """Two thirds of the logits are -inf, so some values of top-k exceed the number of finite logits."""
    logits, controls = problem()
    left = logits[:, ::3]
    logits[:, 1::3] = logits[:, 2::3] = -np.inf
    bounds = np.asarray(sampling_threshold(logits, *controls, implementation=implementation))
    assert not mismatches(bounds, left)


def test_sampling_threshold_with_all_controls_off_is_minus_infinity() -> None:
    bound = sampling_threshold(
        on_device(np.zeros((2, 9))),
        on_device(np.ones(2)),
        on_device(np.zeros(2, jnp.int32)),
        on_device(np.ones(2)),
        on_device(np.zeros(2)),
    )
    assert bound.tolist() == [-jnp.inf] * 2


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_sampling_threshold_with_controls_per_group_applies_them_to_its_rows(implementation: str) -> None:
    """Rows of a group at temperature 0 have the threshold minus infinity."""
    logits = problem()[0][:12]
    controls = [np.array([0.7, 0.0, 1.5, 1.0], np.float32), np.array([5, 5, 0, 0], np.int32)]
    controls += [np.array([1.0, 0.5, 0.9, 1.0], np.float32), np.array([0.0, 0.1, 0.0, 0.3], np.float32)]
    bounds = np.asarray(sampling_threshold(logits, *controls, implementation=implementation))
    assert (bounds[3:6] == -np.inf).all()
    own = [np.repeat(control, 3) for control in controls]
    own[0][3:6], own[1][3:6], own[2][3:6], own[3][3:6] = 1, 0, 1, 0
    assert not mismatches(bounds, logits, list(zip(*own, strict=True)))
    interleaved = [np.tile(control, 3) for control in controls]  # the negative control
    other = np.asarray(sampling_threshold(logits, *interleaved, implementation=implementation))
    assert mismatches(other, logits, list(zip(*own, strict=True)))


def test_sampling_threshold_of_unequal_groups_raises() -> None:
    logits, controls = problem()
    with pytest.raises(ValueError, match="as many groups each"):
        sampling_threshold(logits[:5], *(control[:2] for control in controls))


def test_sampling_threshold_compiled_for_h200_is_two_kernels() -> None:
    shape, rows = jax.ShapeDtypeStruct, 160
    controls = [shape((rows,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
    program = compile_for_h200(sampling_threshold, shape((rows, 128256), jnp.float32), *controls, fail_on_spills=True)
    names = [launch.name for launch in program.launches]
    assert names == ["sampling_threshold_survey", "sampling_threshold"]
    assert program.temp_bytes < 8 << 20


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "scale"), [(VOCAB, 3.0), (LARGE, 0.5), (LARGE, 6.0), (128256, 1.0)])
def test_sampling_threshold_on_gpu_keeps_the_tokens_kept_by_sorting(vocab: int, scale: float) -> None:
    logits, controls = problem(vocab, scale)
    assert not mismatches(np.asarray(sampling_threshold(logits, *controls, implementation="pallas")), logits)
