"""Compare `sample_tokens` with numpy: the argmax of logits plus Gumbel noise over the tokens that sorting keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sample_tokens
from pallas_kernels.layers.partial_sums import Scaled
from pallas_kernels.sampling.sample_tokens import NO_TOKEN
from tests.reference.decoder import processed_probs
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

CASES = [
    (0.0, 5, 0.5, 0.1),  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.6, 0, 0.9, 0.0),
    (1.6, 0, 1.0, 0.2),
    (1.6, 40, 0.8, 0.01),
    (1.3, 1, 1.0, 0.0),
    (0.7, 4000, 0.99, 0.0),
]
EACH = 6  # rows per case
ROWS = EACH * len(CASES)
PURPOSE = 3
LARGE = 20000  # vocabulary of more tokens than a Pallas program holds
Problem = tuple[np.ndarray, ...]
draw = partial(sample_tokens, purpose=PURPOSE)


def problem(vocab: int = 3000, scale: float = 3.0) -> Problem:
    """Return logits, seeds, first positions, offsets and controls; rows of a group differ only in logits and offset."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, scale, (1, ROWS, vocab)).astype(np.float32)
    seed = rng.integers(0, 2**32, (len(CASES), 2), dtype=np.uint32)
    first = rng.integers(0, 2**17, len(CASES)).astype(np.int32)
    offsets = rng.integers(0, 99, ROWS).astype(np.int32)
    types = (np.float32, np.int32, np.float32, np.float32)
    return (
        logits,
        seed,
        first,
        offsets,
        *(np.array(column, dtype) for column, dtype in zip(zip(*CASES, strict=True), types, strict=True)),
    )


def mapped(vocab: int = 3000, scale: float = 3.0) -> Problem:
    """Return a problem whose columns are random tokens of a larger vocabulary, with the ids of these tokens."""
    return *problem(vocab, scale), np.random.default_rng(1).permutation(4 * vocab)[:vocab].astype(np.int32)


def expected(
    logits: np.ndarray, seed: np.ndarray, first: np.ndarray, offsets: np.ndarray, *controls: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected token of each row, and a margin: smaller rounding errors could not change the token.

    The margin is the difference between the token's score and the next one in a slightly larger nucleus. It is 0 if a
    slightly smaller nucleus leaves the token out.
    """
    tokens, margins = [], []
    *controls, ids = controls if len(controls) == 5 else (*controls, np.arange(logits.shape[2]))
    each = len(logits[0]) // len(controls[0])
    for index, (row, offset) in enumerate(zip(logits[0], offsets, strict=True)):
        t, k, p, m = (control[index // each].item() for control in controls)
        scores, edges = row.astype(np.float64), (p, p, p) if p == 1 else (p, p - 1e-4, p + 1e-4)
        own = least = most = np.full(len(row), True)
        if t > 0:
            key = jax.random.wrap_key_data(seed[index // each], impl="threefry2x32")
            key = jax.random.fold_in(jax.random.fold_in(key, PURPOSE), first[index // each] + offset)
            noise = np.asarray(jax.random.gumbel(key, (ids.max() + 1,), mode="low"), np.float64)[ids]
            own, least, most = (processed_probs(row, temperature=t, top_k=k, top_p=edge, min_p=m) > 0 for edge in edges)
            scores = scores / np.float64(t) + noise
        tokens.append(np.where(own, scores, -np.inf).argmax())
        others = np.delete(np.where(most, scores, -np.inf), tokens[-1])
        margins.append(least[tokens[-1]] * min(scores[tokens[-1]] - others.max(), 100))
    return np.array(tokens), np.array(margins)


def check(rows: Problem, implementation: str) -> None:
    tokens, margins = expected(*rows)
    sure = margins > 1e-4
    assert sure.sum() >= ROWS - 4
    found = np.asarray(draw(*rows, implementation=implementation))
    np.testing.assert_array_equal(found[sure], tokens[sure])


@pytest.mark.parametrize(
    ("make", "vocab", "implementation"),
    cover.with_kernel(
        [(mapped, 3000), (problem, 7), (mapped, 7), (problem, 3000)],
        2,
        name=lambda case: f"{case[0].__name__}-{case[1]}",
    ),
)
def test_token_sampling_of_random_logits_equals_argmax_with_noise_of_jax_random(
    make: Callable[[int], Problem], vocab: int, implementation: str
) -> None:
    check(make(vocab), implementation)


@pytest.mark.once
@pytest.mark.parametrize("scale", [0.3, 6.0])
def test_token_sampling_of_large_vocabulary_equals_argmax_with_noise_of_jax_random(scale: float) -> None:
    check(mapped(LARGE, scale), "pallas")


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("vocab", [4100, 7])
@pytest.mark.parametrize("is_whole_row", [True, False])
def test_token_sampling_of_row_with_nan_returns_no_token_in_this_row_alone(
    vocab: int, implementation: str, is_whole_row: bool
) -> None:
    """Infinity is a number: its token is chosen as before, in greedy rows and in rows without filters."""
    logits, *others = problem(vocab)
    clean = np.asarray(draw(logits, *others, implementation=implementation))
    rows = np.arange(0, ROWS, 3)
    logits[0, rows, slice(None) if is_whole_row else vocab - 2] = np.nan
    logits[0, [1, EACH + 1], 3] = np.inf
    found = np.asarray(draw(logits, *others, implementation=implementation))
    np.testing.assert_array_equal(found[rows], NO_TOKEN)
    assert found[1] == found[EACH + 1] == 3
    rest = np.setdiff1d(np.arange(ROWS), [*rows, 1, EACH + 1])
    np.testing.assert_array_equal(found[rest], clean[rest])


@pytest.mark.parametrize("place", [0, 2050, 4099])
def test_token_sampling_of_row_with_nan_beside_infinity_returns_no_token_on_cpu(place: int) -> None:
    """As XLA compiles for a CPU unless the flags of the tests forbid it, a maximum ignores NaN."""
    options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}
    logits, *others = problem(4100)
    logits[0, :, [(place + 1) % 4100, place - 1]] = np.inf
    compiled = jax.jit(partial(draw, implementation="reference")).lower(logits, *others).compile(options)
    assert (np.asarray(compiled(logits, *others))[:EACH] != NO_TOKEN).all(), "control"
    logits[0, :, place] = np.nan
    np.testing.assert_array_equal(compiled(logits, *others), NO_TOKEN)
    greatest = jax.jit(partial(jnp.max, axis=-1)).lower(logits).compile(options)
    assert not np.isnan(greatest(logits)).any(), "control"


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_token_sampling_without_token_ids_uses_other_noise(implementation: str) -> None:
    rows = mapped()
    tokens, _ = expected(*rows)
    differs = np.asarray(draw(*rows[:-1], implementation=implementation)) != tokens
    assert differs[EACH:].any() and not differs[:EACH].any(), "greedy rows have no noise"


@pytest.mark.parametrize(
    "implementation",
    [pytest.param("reference", marks=pytest.mark.once), pytest.param("pallas", marks=pytest.mark.newest)],
)
def test_token_sampling_with_controls_per_group_equals_controls_repeated_per_row(implementation: str) -> None:
    rows = problem()
    own = [*rows[:3], rows[3], *rows[4:]]
    for place in (1, 2, *range(4, 8)):
        own[place] = np.repeat(rows[place], EACH, axis=0)
    found = np.asarray(draw(*rows, implementation=implementation))
    np.testing.assert_array_equal(found, draw(*own, implementation=implementation))
    interleaved = *own[:4], *(np.tile(control, EACH) for control in rows[4:])
    assert (found != draw(*interleaved, implementation=implementation)).any(), "control"
    with pytest.raises(ValueError, match="as many groups each, equal ones of 48 rows"):
        draw(rows[0], rows[1][:7], rows[2][:7], rows[3], *(control[:7] for control in rows[4:]))


@pytest.mark.parametrize("part", range(1, 8))
def test_token_sampling_with_one_changed_argument_returns_other_tokens(part: int) -> None:
    """Negative control: the comparison detects each changed argument."""
    rows = list(problem())
    tokens, margins = expected(*rows)
    others = (
        rows[1][:, ::-1],
        rows[2] + 1,
        rows[3] + 1,
        np.ones_like(rows[4]),
        0 * rows[5],
        np.ones_like(rows[6]),
        0 * rows[7],
    )
    rows[part] = others[part - 1]
    found = np.asarray(draw(*rows, implementation="pallas"))
    assert (found != tokens)[margins > 1e-4].any()


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_token_sampling_of_scaled_logits_equals_sampling_of_logits_scaled_before(implementation: str) -> None:
    logits, *others = mapped()
    rng = np.random.default_rng(5)
    row_scale, scale = rng.uniform(0.5, 2, ROWS).astype(np.float32), rng.uniform(0.5, 2, 3000).astype(np.float32)
    unscaled = Scaled(logits / row_scale[:, None] / scale, row_scale, scale)
    whole = unscaled.values * row_scale[:, None] * scale
    found = np.asarray(draw(unscaled, *others, implementation=implementation))
    np.testing.assert_array_equal(found, draw(whole, *others, implementation=implementation))
    assert (found != draw(unscaled.values, *others)).any(), "control"


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_token_sampling_of_equal_logits_takes_the_first_or_the_larger_noise(
    implementation: str, temperature: float
) -> None:
    """At temperature 0 the first token is taken; above 0 the noise decides."""
    logits = np.zeros((1, 1, 9000), np.float32)
    logits[..., [5, 4101]] = 1
    controls = [
        on_device(np.full(1, temperature)),
        on_device(np.zeros(1, jnp.int32)),
        on_device(np.ones(1)),
        on_device(np.zeros(1)),
    ]
    seed, zero = on_device(np.zeros((1, 2), jnp.uint32)), on_device(np.zeros(1, jnp.int32))
    token = sample_tokens(logits, seed, zero, zero, *controls, implementation=implementation)
    key = jax.random.wrap_key_data(seed[0], impl="threefry2x32")
    noise = jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, 0), 0), (9000,), mode="low")
    assert token.tolist() == [5 if temperature == 0 or noise[5] > noise[4101] else 4101]


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("kept", [0, 3])
def test_token_sampling_with_logits_of_minus_infinity_never_samples_them(kept: int, implementation: str) -> None:
    """Fewer tokens than top-k are finite; if none is finite, the first token is returned, as by argmax."""
    rows = list(problem())
    left = np.array([7, 1999, 2500][:kept], int)
    rows[0] = np.where(np.isin(np.arange(3000), left), rows[0], -np.inf).astype(np.float32)
    found = np.asarray(draw(*rows, implementation=implementation))
    assert np.isin(found, left if kept else [0]).all()
    assert len(np.unique(found)) == max(kept, 1)


@pytest.mark.parametrize(
    ("has_ids", "is_scaled"), [(False, False), pytest.param(True, False, marks=pytest.mark.matrix), (True, True)]
)
def test_token_sampling_compiled_for_h200_is_two_kernels_that_store_no_noise(has_ids: bool, is_scaled: bool) -> None:
    rows, vocab, shape = 160, 128256, jax.ShapeDtypeStruct
    controls = [shape((rows,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
    product = shape((1, rows, vocab), jnp.float32)
    if is_scaled:
        product = Scaled(product, shape((rows,), jnp.float32), shape((vocab,), jnp.float32))
    ids = [shape((vocab,), jnp.int32)] * has_ids
    where = shape((rows, 2), jnp.uint32), shape((rows,), jnp.int32), shape((rows,), jnp.int32)
    program = compile_for_h200(sample_tokens, product, *where, *controls, *ids, fail_on_spills=True)
    assert [launch.name for launch in program.launches] == ["sample_tokens_survey", "sample_tokens"]
    assert program.temp_bytes < 12 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("make", [problem, mapped])
@pytest.mark.parametrize(("vocab", "scale"), [(7, 3.0), (3000, 3.0), (LARGE, 0.3), (128256, 1.0), (128256, 3.0)])
def test_token_sampling_on_gpu_equals_argmax_with_noise_of_jax_random(
    make: Callable[[int, float], Problem], vocab: int, scale: float
) -> None:
    rows = make(vocab, scale)
    with jax.default_device(jax.devices("cpu")[0]):
        tokens, margins = expected(*rows)
    differs = np.asarray(draw(*rows, implementation="pallas")) != tokens
    assert not differs[margins > 1e-4].any()
