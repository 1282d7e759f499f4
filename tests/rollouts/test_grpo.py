"""Test the small GRPO against its equations in numpy, and its run with and without drafts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jspec import Completion, Drafter, Eagle3, Engine, Tree
from jspec.rollouts import grpo
from jspec.train import OPTIONS, log_probs
from tests.support import tiny
from tests.support.engines import make

pytestmark = pytest.mark.once

VOCAB, GROUP, SIZE, STEPS = 16, 4, 32, 3
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def engine(drafter: Drafter | None = None) -> Engine:
    options: dict[str, Any] = dict(slots=8, max_len=64, page_size=4, buckets=(8,), prefill_buckets=(16,))
    return make(tiny.model(VOCAB), drafter, deterministic=True, controls=False, **options)


def eagle3() -> Drafter:
    return Eagle3(tiny.eagle_head(tiny.model(VOCAB), draft_vocab=12, feature_layers=(0, 1, 2)), Tree.chain(3))


def rollouts(engine: Engine, seed: int) -> list[Completion]:
    prompts = [prompt for prompt in PROMPTS for _ in range(GROUP)]
    params = [dict(max_tokens=20, temperature=1.0, seed=seed + row, logprobs=0) for row in range(len(prompts))]
    return engine.generate(prompts, params)


def rewards_of(done: list[Completion]) -> list[float]:
    """Return the share of tokens below 4 of each completion."""
    return [float(np.mean(np.array(c.token_ids) < 4)) for c in done]


def test_loss_is_that_of_the_equations_in_numpy_and_needs_log_probabilities() -> None:
    model, other = tiny.model(VOCAB), tiny.model(VOCAB, seed=1)
    with engine() as made:
        done = rollouts(made, 0)
    unscored = [replace(c, logprobs=None) for c in done]
    for completions, size in ((unscored, SIZE), (done, 20)):
        with pytest.raises(
            ValueError, match=re.escape("grpo: expected completions with log-probabilities (logprobs=0)")
        ):
            grpo.Rollouts.of(completions, [0.0] * len(completions), 1, size)
    rewards = rewards_of(done)
    for completions, group in ((done[:1], GROUP), (done, 3)):
        with pytest.raises(ValueError, match=f"expected a reward of each completion and groups of {group}, got"):
            grpo.Rollouts.of(completions, rewards, group, SIZE)
    batch = grpo.Rollouts.of(done, rewards, GROUP, SIZE)
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    optimizer = optax.adam(1e-2, mu_dtype=jnp.float32)  # whose changes are float32
    after = jax.eval_shape(partial(grpo.step, optimizer), halves, optimizer.init(halves), batch)[0]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(after)} == {"bfloat16"}
    means, spreads = (getattr(np.reshape(rewards, (2, GROUP)), name)(axis=1) for name in ("mean", "std"))
    gains = [(reward - means[i // GROUP]) / spreads[i // GROUP] for i, reward in enumerate(rewards)]
    np.testing.assert_allclose(batch.advantages, gains, atol=1e-4)
    for policy in (model, other):
        scores = np.asarray(log_probs(policy, batch.tokens, batch.lengths), np.float64)
        terms, largest = [], 0.0
        for row, (c, gain) in enumerate(zip(done, gains, strict=True)):
            start = len(c.prompt_token_ids)
            drawn = np.array([record.logprob for record in c.logprobs or ()])
            differences = scores[row, start : start + len(drawn)] - drawn
            ratio, largest = np.exp(differences), max(largest, np.abs(differences).max())
            terms.append(np.mean(np.minimum(ratio * gain, np.clip(ratio, 0.8, 1.2) * gain)))
        value, mismatch = grpo.loss(policy, batch)
        assert float(value) == pytest.approx(-np.mean(terms), abs=1e-5)
        assert float(mismatch) == pytest.approx(largest)
        assert (float(mismatch) == 0) == (policy is model), "control: another policy"


def test_rewards_rise_and_are_the_same_with_drafts() -> None:
    optimizer, lines = optax.adam(2e-2), []
    step = jax.jit(partial(grpo.step, optimizer), compiler_options=OPTIONS)
    for drafter in (None, eagle3()):
        policy, line = tiny.model(VOCAB), []
        state = optimizer.init(policy)
        with engine(drafter) as made:
            for number in range(STEPS):
                done = rollouts(made, 100 * number)
                line.append(rewards_of(done))
                policy, state, mismatch = step(policy, state, grpo.Rollouts.of(done, line[-1], GROUP, SIZE))
                assert float(mismatch) == 0
                made.update_weights(policy)
        lines.append(line)
    assert lines[0] == lines[1]
    assert np.mean(lines[0][-1]) > np.mean(lines[0][0]) + 0.05
