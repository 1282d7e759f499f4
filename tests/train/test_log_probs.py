"""Test log-probabilities for trainers: values of transformers, bits of a deterministic engine, and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import MTP, Completion, DFlash, Drafter, DraftModel, Eagle3, Engine, Medusa, Model, NGram, Tree
from jspec.draft.beside import Beside
from jspec.models.weights.quantize import quantize_weights
from jspec.tools import demo
from jspec.train import OPTIONS, log_probs
from tests.models.test_families import HYBRID, LONGEST, RECORDED
from tests.support import tiny
from tests.support.arrays import on_device
from tests.support.engines import make
from tests.support.recordings import recording

pytestmark = pytest.mark.once

VOCAB = 16
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3] * 11]


def target(dtype: str = "float32", seed: int = 0) -> Model:
    return jax.tree.map(lambda values: values.astype(dtype), tiny.model(VOCAB, seed=seed))


def in_dtype(head: Any, model: Model) -> Any:
    return jax.tree.map(lambda x: x.astype(model.dtype) if x.dtype == jnp.float32 else x, head)


def eagle3(model: Model, tree: Tree | None = None) -> Drafter:
    head = tiny.eagle_head(model, draft_vocab=12, feature_layers=(0, 1, 2))
    return Eagle3(in_dtype(head, model), tree or Tree.chain(3))


DRAFTERS: dict[str, Callable[[Model], Drafter | None]] = {
    "none": lambda model: None,
    "eagle3": eagle3,
    "tree": lambda model: eagle3(model, Tree.topk(8, 3, 3)),
    "ngram": lambda model: NGram(Tree.chain(3)),
    "beside": lambda model: Beside(eagle3(model), NGram(Tree.chain(3)), "beside"),
    "medusa": lambda model: Medusa(in_dtype(tiny.medusa_heads(model, 2), model), Tree.chain(2)),
    "mtp": lambda model: MTP(in_dtype(tiny.mtp_head(model), model), Tree.chain(2)),
    "dflash": lambda model: DFlash(
        in_dtype(tiny.dflash_head(model, block_size=4, feature_layers=(0, 1)), model), Tree.chain(3)
    ),
    "draft model": lambda model: DraftModel(target(str(model.dtype), seed=4), Tree.chain(2)),
}


def padded(completions: list[Completion]) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts with their completions as rows of equal length, and the lengths."""
    texts = [c.prompt_token_ids + c.token_ids for c in completions]
    lengths = np.array([len(text) for text in texts])
    return np.array([text + [VOCAB - 1] * (max(lengths) - len(text)) for text in texts]), lengths


def sampled(engine: Engine, temperature: float = 1.0) -> tuple[list[Completion], list[np.ndarray]]:
    """Return completions of all prompts, and the log-probabilities with which their tokens were sampled."""
    done = engine.generate(PROMPTS, max_tokens=20, temperature=temperature, seed=3, logprobs=0)
    return done, [np.array([record.logprob for record in c.logprobs or ()], np.float32) for c in done]


ENGINE: dict[str, Any] = dict(slots=4, max_len=64, page_size=4, logprobs_mode="processed_logprobs")
SHORT = {("float32", "eagle3", 1.0), ("bfloat16", "eagle3", 1.0), ("bfloat16", "ngram", 0.7)}
CASES = [(dtype, drafts, t) for dtype in ("float32", "bfloat16") for drafts in DRAFTERS for t in (1.0, 0.7)]


@pytest.mark.parametrize(
    ("dtype", "drafts", "temperature"),
    [case if case in SHORT else pytest.param(*case, marks=pytest.mark.long) for case in CASES],
)
def test_values_have_the_bits_that_a_deterministic_engine_sampled_from(
    dtype: str, drafts: str, temperature: float
) -> None:
    model = target(dtype)
    with make(model, DRAFTERS[drafts](model), deterministic=True, **ENGINE) as engine:
        done, wanted = sampled(engine, temperature)
        tokens, lengths = padded(done)
        prompts = [len(c.prompt_token_ids) for c in done]
        of_engine = engine.log_probs([row[:n] for row, n in zip(tokens.tolist(), lengths, strict=True)])
    for row, scored in zip(np.asarray(log_probs(model, tokens, lengths)), of_engine, strict=True):
        np.testing.assert_array_equal(row[1 : len(scored) + 1], scored)
    score = partial(log_probs, temperature=temperature)
    jitted = jax.jit(score, compiler_options=OPTIONS)(model, tokens, lengths)
    for values in (np.asarray(score(model, tokens, lengths)), np.asarray(jitted)):
        for row, first, end, scores in zip(values, prompts, lengths, wanted, strict=True):
            np.testing.assert_array_equal(row[first:end], scores)
            assert row[0] == 0 and not row[end:].any()
    other = np.asarray(score(target(dtype, seed=1), tokens, lengths))
    assert np.abs(other - values).max() > 1e-3, "control: another model"


@pytest.mark.parametrize(
    ("drafts", "temperature"),
    [
        case if case == ("eagle3", 0.7) else pytest.param(*case, marks=pytest.mark.long)
        for case in [(drafts, t) for drafts in DRAFTERS for t in (1.0, 0.7)]
    ],
)
def test_values_of_an_engine_that_is_not_deterministic_are_near(drafts: str, temperature: float) -> None:
    with make(target(), DRAFTERS[drafts](target()), **ENGINE) as engine:
        done, wanted = sampled(engine, temperature)
        engine.update_weights(target(seed=1), drafter="keep")
        later, now = sampled(engine, temperature)
    for completions, scores, model, before in ((done, wanted, target(), 1), (later, now, target(seed=1), 0)):
        tokens, lengths = padded(completions)
        values, stale = (
            np.asarray(log_probs(weights, tokens, lengths, temperature=temperature))
            for weights in (model, target(seed=before))
        )
        for row, old, c, drawn in zip(values, stale, completions, scores, strict=True):
            first = len(c.prompt_token_ids)
            np.testing.assert_allclose(row[first : first + 20], drawn, atol=5e-5)
            assert np.abs(old[first : first + 20] - drawn).max() > 1e-3, "control: weights of before the update"


def test_program_that_leaves_out_roundings_gives_nan() -> None:
    tokens = np.array(PROMPTS[1:2])
    assert np.isnan(jax.jit(log_probs)(target("bfloat16"), tokens)).all()

    def mean(weights: Model) -> jax.Array:
        return jnp.mean(log_probs(weights, tokens))

    scored = jax.value_and_grad(mean)(target("bfloat16"))
    with_options = jax.jit(jax.value_and_grad(mean), compiler_options=OPTIONS)(target("bfloat16"))
    assert jnp.isnan(jax.jit(jax.grad(mean))(target("bfloat16")).norm).all()
    np.testing.assert_allclose(*(float(value) for value, _ in (scored, with_options)), rtol=1e-6)
    norms = [np.asarray(gradient.norm, np.float32) for _, gradient in (scored, with_options)]
    np.testing.assert_allclose(*norms, rtol=0.05, atol=1e-3)
    for dtype, options in (("bfloat16", OPTIONS), ("float32", None)):
        values = jax.jit(log_probs, compiler_options=options)(target(dtype), tokens)
        np.testing.assert_array_equal(values, log_probs(target(dtype), tokens))


@pytest.mark.gpu
def test_program_that_leaves_out_roundings_gives_nan_on_gpu() -> None:
    model, tokens = Model.from_pretrained(demo.TARGET, dtype="bfloat16"), np.array(PROMPTS[1:2])
    assert np.isnan(jax.jit(log_probs)(model, tokens)).all()
    values = jax.jit(log_probs, compiler_options=OPTIONS)(model, tokens)
    np.testing.assert_array_equal(values, log_probs(model, tokens))


FAMILIES = sorted(set(RECORDED) - set(HYBRID))
DIFFERENT = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [name if name in DIFFERENT else pytest.param(name, marks=pytest.mark.long) for name in FAMILIES]
)
def test_values_and_gradients_of_every_family(family: str, golden: Path) -> None:
    """Values are those of transformers' recorded logits; a gradient predicts the change along a direction."""
    folder = golden / "families" / family
    model, data = tiny.load_target(folder), recording(folder / "expect.npz")
    ids = data["prompt0"]
    rows = data["logits0"].astype(np.float64)
    every = (
        rows - np.log(np.exp(rows - rows.max(-1, keepdims=True)).sum(-1, keepdims=True)) - rows.max(-1, keepdims=True)
    )
    wanted = every[np.arange(len(rows) - 1), ids[-len(rows) + 1 :]]
    values = np.asarray(log_probs(model, ids[None]))[0]
    np.testing.assert_allclose(values[-len(wanted) :], wanted, atol=5e-4)

    def mean(weights: Model) -> jax.Array:
        return jnp.mean(log_probs(weights, ids[None, :LONGEST]))

    gradient = jax.grad(mean)(model)
    leaves, structure = jax.tree.flatten(model)
    rng = np.random.default_rng(2 if family == "mistral4" else 0)  # a direction in which no choice of experts changes
    signs = [on_device(rng.choice([-1.0, 1.0], leaf.shape), leaf.dtype) for leaf in leaves]
    step = jax.tree.unflatten(structure, [leaf * sign * 1e-3 for leaf, sign in zip(leaves, signs, strict=True)])
    ahead, behind = (jax.tree.map(lambda w, s: w + f * s, model, step) for f in (1, -1))  # noqa: B023
    change = float(mean(ahead) - mean(behind)) / 2
    predicted = float(
        sum(jnp.vdot(g, s) for g, s in zip(jax.tree.leaves(gradient), jax.tree.leaves(step), strict=True))
    )
    assert abs(change - predicted) < 0.05 * abs(predicted) + 3e-6
    assert abs(predicted) > 2e-5, "control"


def test_models_that_cannot_be_scored_are_refused() -> None:
    tokens = np.array(PROMPTS[:1])
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            quantize_weights(target(), "int8"),
            ValueError,
            "deterministic: expected a target whose weights are not quant",
        ),
        (tiny.hybrid(VOCAB), NotImplementedError, "log_probs: expected a target of attention layers"),
    ]
    for model, kind, message in cases:
        with pytest.raises(kind, match=message):
            log_probs(model, tokens)
    for wrong in (np.zeros(3, int), np.zeros((0, 3), int), np.zeros((1, 2))):
        with pytest.raises(ValueError, match=r"log_probs: tokens: expected ids \[rows, size\]"):
            log_probs(target(), wrong)
    with pytest.raises(ValueError, match="log_probs: lengths: expected one a row, 1, got shape"):
        log_probs(target(), tokens, np.array([1, 2]))
