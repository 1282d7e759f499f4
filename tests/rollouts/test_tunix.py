"""Test the rollout worker for Tunix: values of its models, runs of GRPO with and without drafts, and its traps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="needs the extra tunix")

import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.llama3.model import Llama3
from tunix.models.llama3.model import ModelConfig as LlamaConfig
from tunix.models.qwen2.model import ModelConfig as Qwen2Config
from tunix.models.qwen2.model import Qwen2
from tunix.models.qwen3.model import ModelConfig as Qwen3Config
from tunix.models.qwen3.model import Qwen3
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig, RolloutOutput
from tunix.rl.utils import is_sharing_weights

from jspec import Drafter, Eagle3, NGram, Tree
from jspec.models.exchange import from_names
from jspec.rollouts.tunix import JspecRollout
from jspec.rollouts.tunix_models import config_of, in_checkpoint, tensors_of
from jspec.train import log_probs
from tests.support import tiny

SIZES: dict[str, Any] = dict(
    num_layers=2,
    vocab_size=64,
    embed_dim=32,
    hidden_dim=48,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    norm_eps=1e-5,
    rope_theta=1_000_000,
)
STEPS, DRAWN = 3, 12


class Characters:
    """A tokenizer with a token for each character, whose end token is also its padding unless told otherwise."""

    def __init__(self, pad: int = 2) -> None:
        self._pad = pad

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3 + ord(character) % 60 for character in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(64 + (token - 3) % 60) for token in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return self._pad


def actor(seed: int = 0, **changes: Any) -> Llama3:
    return Llama3(LlamaConfig(**(SIZES | changes)), rngs=nnx.Rngs(seed))


def of_tunix(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the log-probability of each token but the first by Tunix' own forward pass."""
    size = tokens.shape[1]
    seen = jnp.tril(jnp.ones((1, size, size), bool))
    logits, _ = model(jnp.asarray(tokens), jnp.arange(size)[None], None, seen)
    every = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return np.asarray(jnp.take_along_axis(every[:, :-1], jnp.asarray(tokens)[:, 1:, None], axis=-1)[..., 0])


def rollout(config: RolloutConfig | None = None, *, pad: int = 2, seed: int = 0, **options: Any) -> JspecRollout:
    return JspecRollout(actor(seed), Characters(pad), one_device(), config or sampled(), slots=16, **options)


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def sampled(**changes: Any) -> RolloutConfig:
    fields: dict[str, Any] = dict(
        max_tokens_to_generate=DRAWN, max_prompt_length=8, temperature=1.0, kv_cache_size=64, return_logprobs=True
    )
    return RolloutConfig(**(fields | changes))


@pytest.mark.parametrize(
    "model",
    [
        lambda: actor(),
        lambda: actor(weight_tying=True),
        lambda: Qwen3(Qwen3Config(**SIZES), rngs=nnx.Rngs(0)),
        lambda: Qwen2(Qwen2Config(**(SIZES | {"rope_theta": 10_000})), rngs=nnx.Rngs(0)),
    ],
    ids=["llama3", "llama3 tied", "qwen3", "qwen2"],
)
def test_target_of_a_tunix_model_has_its_log_probabilities(model: Callable[[], Any]) -> None:
    made, tokens = model(), np.random.default_rng(0).integers(0, 64, (2, 20))
    state = nnx.state(made, nnx.Param)
    target = from_names(tensors_of(state), config_of(made), "float32", in_checkpoint)
    np.testing.assert_allclose(log_probs(target, tokens)[:, 1:], of_tunix(made, tokens), rtol=1e-5, atol=1e-5)


class Run:
    """A run of GRPO with a toy reward: rewards of each step, and the largest mismatch of its rollouts."""

    def __init__(self, drafter: Drafter | None, **options: Any) -> None:
        self.rewards: list[float] = []
        self.mismatch = 0.0
        roles = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)
        config = ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, one_device()),
            rollout_engine=functools.partial(JspecRollout, drafter=drafter, slots=16, **options),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2),
                eval_every_n_steps=1000,
                max_steps=STEPS,
                mini_batch_size=2,
                train_micro_batch_size=2,
            ),
            rollout_config=sampled(),
        )
        cluster = RLCluster(actor=actor(), reference=actor(), tokenizer=Characters(), cluster_config=config)
        self._cluster, self._generate = cluster, cluster.rollout.generate
        cluster.rollout.generate = self._compared  # type: ignore[method-assign]
        method = GRPOConfig(num_generations=4, num_iterations=1, beta=0.04)
        learner = GRPOLearner(rl_cluster=cluster, algo_config=method, reward_fns=self._reward)
        learner.train([{"prompts": np.array(["AB", "CDE"])} for _ in range(STEPS)])
        self.engine = cluster.rollout.engine

    def _reward(self, prompts: Any, completions: list[str], **_: Any) -> list[float]:
        values = [sum(character in "ABCDEFGH" for character in text) / max(len(text), 1) for text in completions]
        self.rewards.append(float(np.mean(values)))
        return values

    def _compared(self, prompts: list[str], config: RolloutConfig, **more: Any) -> RolloutOutput:
        output = self._generate(prompts, config, **more)
        model, pad = self._cluster.actor_trainer.model, self._cluster.rollout.pad_id()
        scores = output.logprobs
        assert scores is not None
        for prompt, drawn, values in zip(output.left_padded_prompt_tokens[:3], output.tokens, scores, strict=False):
            begun = prompt[prompt != pad]
            of_trainer = of_tunix(model, np.concatenate([begun, drawn])[None])[0][len(begun) - 1 :]
            self.mismatch = max(self.mismatch, float(np.abs(of_trainer - values).max()))
        return output


def test_runs_of_grpo_have_equal_rewards_with_and_without_drafts_and_no_mismatch() -> None:
    target = from_names(tensors_of(nnx.state(actor(), nnx.Param)), config_of(actor()), "float32", in_checkpoint)
    head = tiny.eagle_head(target, draft_vocab=48, feature_layers=(0, 1, 2))
    runs = [Run(None), Run(NGram(Tree.chain(3))), Run(Eagle3(head, Tree.chain(3)))]
    for run in runs:
        assert run.rewards == runs[0].rewards and len(run.rewards) == STEPS
        assert run.mismatch < 1e-5
        assert run.engine.weight_version == STEPS
    assert runs[1].engine.metrics.num_accepted_tokens > 0
    assert len(set(runs[0].rewards)) > 1, "control: the weights change"


def test_scores_of_a_deterministic_engine_are_the_bits_of_its_samples_at_any_temperature() -> None:
    for temperature in (1.0, 0.7):
        config = sampled(temperature=temperature)
        worker = rollout(config, drafter=NGram(Tree.chain(3)), deterministic=True)
        output = worker.generate(["AB", "CDEFGHI"], config)
        rows = [np.pad(row, (0, DRAWN - len(row)), constant_values=worker.pad_id()) for row in output.tokens]
        scores = np.asarray(worker.get_per_token_logps(output.left_padded_prompt_tokens, np.array(rows)))
        for row, values in zip(scores, output.logprobs or (), strict=True):
            np.testing.assert_array_equal(row[: len(values)], values)
            assert not row[len(values) :].any()
        worker.update_params(nnx.state(actor(1), nnx.Param))
        other = np.asarray(worker.get_per_token_logps(output.left_padded_prompt_tokens, np.array(rows)))
        assert np.abs(other - scores).max() > 1e-3, "control: other weights"


def test_rows_and_calls_draw_differently_and_a_seed_repeats_them() -> None:
    def drawn(worker: JspecRollout, config: RolloutConfig) -> list[list[int]]:
        return [row.tolist() for row in worker.generate(["AB", "AB"], config).tokens]

    first, again = rollout(), rollout()
    calls = [drawn(first, sampled()) for _ in range(2)]
    assert calls == [drawn(again, sampled()) for _ in range(2)]
    assert len({tuple(row) for call in calls for row in call}) == 4
    for seed in (jax.random.PRNGKey(3), jax.random.key(3)):
        assert drawn(rollout(), sampled(seed=seed)) == drawn(rollout(), sampled(seed=jax.random.PRNGKey(3)))
    assert drawn(rollout(), sampled(seed=jax.random.PRNGKey(3))) != calls[0]


def test_padding_that_ends_no_text_is_never_drawn() -> None:
    worker = rollout(pad=0)
    output = worker.generate(["AB"] * 16, sampled(max_tokens_to_generate=DRAWN))
    assert not any((row == 0).any() for row in output.tokens)
    drawn = rollout().generate(["AB"] * 16, sampled()).tokens
    assert any((row == 0).any() for row in drawn), "control: token 0 is drawn if it is no padding"


def test_worker_keeps_its_model_to_itself() -> None:
    """Tunix never updates a worker whose module has the trainer's arrays."""
    trainers = actor()
    worker = JspecRollout(trainers, Characters(), one_device(), sampled(), slots=2)
    assert not is_sharing_weights(trainers, worker.model())
    assert is_sharing_weights(trainers, trainers), "control"
    before = worker.generate(["AB"], sampled(temperature=0.0)).tokens[0]
    for leaf in jax.tree.leaves(nnx.state(trainers, nnx.Param)):
        leaf.delete()  # as an optimiser does that takes its memory
    np.testing.assert_array_equal(worker.generate(["AB"], sampled(temperature=0.0)).tokens[0], before)


def test_models_and_options_that_would_train_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config\.rope_theta: expected 1000000, the rotary base that Tunix"):
        config_of(actor(rope_theta=500_000))
    with pytest.raises(ValueError, match="rollout_actor: expected a Tunix model of the kinds Llama3, Qwen2, Qwen3"):
        config_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    state = {"layers": {"0": {"attn": {"q_proj": {"w_lora_a": jnp.zeros((2, 2))}}}}}
    with pytest.raises(ValueError, match=r"update_params: expected the weights of a dense model, got .*add the prod"):
        tensors_of(state)
    with pytest.raises(ValueError, match="generate: expected at most 20 tokens with a prompt's completion, got 24"):
        rollout().generate(["AB", "CDEFGHIJKLM"], sampled())
    with pytest.raises(ValueError, match="mesh: expected a mesh of one device for the rollout, got 2"):
        JspecRollout(actor(), Characters(), Mesh(np.array(jax.devices()[:2]), ("tp",)), sampled())
