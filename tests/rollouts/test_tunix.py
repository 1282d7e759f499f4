"""Test the rollout worker for Tunix: values of its models, runs of GRPO with and without drafts, and its traps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("tunix", reason="needs the extra tunix")

import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.gemma3.model import Gemma3
from tunix.models.gemma3.model import ModelConfig as GemmaConfig
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
DRAWN = 12


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


def two_devices(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:2]).reshape(shape), ("fsdp", "tp"))


def sampled(**changes: Any) -> RolloutConfig:
    fields: dict[str, Any] = dict(
        max_tokens_to_generate=DRAWN, max_prompt_length=8, temperature=1.0, kv_cache_size=64, return_logprobs=True
    )
    return RolloutConfig(**(fields | changes))


def in_rows(completions: list[np.ndarray], pad: int) -> np.ndarray:
    """Return completions as rows of equal length, padded behind."""
    return np.array([np.pad(row, (0, DRAWN - len(row)), constant_values=pad) for row in completions])


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
    """A run of GRPO with a toy reward: rewards of each step, and differences of log-probabilities.

    Attributes:
        mismatch: the largest difference between a rollout and the trainer, which is also about that of the ratio of
            their probabilities from 1.
        stale: for each step but the first, the largest difference from the weights of the step before.
        unequal: number of tokens whose log-probabilities are not the bits of `jspec.train.log_probs`.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        *,
        steps: int = 3,
        trainers: Mesh | None = None,
        mesh: Mesh | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self.rewards: list[float] = []
        self.mismatch, self.stale, self.unequal = 0.0, list[float](), 0
        self._before: Any = None
        trainers, mesh = trainers or one_device(), mesh or one_device()
        config = ClusterConfig(
            role_to_mesh={Role.ACTOR: trainers, Role.REFERENCE: trainers, Role.ROLLOUT: mesh},
            rollout_engine=functools.partial(JspecRollout, drafter=drafter, slots=16, **options),
            training_config=RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2),
                eval_every_n_steps=1000,
                max_steps=steps,
                mini_batch_size=2,
                train_micro_batch_size=2,
            ),
            rollout_config=sampled(seed=seed),
        )
        models = [on_mesh(actor(), trainers) for _ in range(2)]
        cluster = RLCluster(actor=models[0], reference=models[1], tokenizer=Characters(), cluster_config=config)
        self._cluster, self._generate = cluster, cluster.rollout.generate
        cluster.rollout.generate = self._compared  # type: ignore[method-assign]
        method = GRPOConfig(num_generations=4, num_iterations=1, beta=0.04)
        learner = GRPOLearner(rl_cluster=cluster, algo_config=method, reward_fns=self._reward)
        assert learner.should_sync_weights
        learner.train([{"prompts": np.array(["AB", "CDE"])} for _ in range(steps)])
        self.engine = cluster.rollout.engine

    def _reward(self, prompts: Any, completions: list[str], **_: Any) -> list[float]:
        values = [sum(character in "ABCDEFGH" for character in text) / max(len(text), 1) for text in completions]
        self.rewards.append(float(np.mean(values)))
        return values

    def _compared(self, prompts: list[str], config: RolloutConfig, **more: Any) -> RolloutOutput:
        output = self._generate(prompts, config, **more)
        pad, model = self._cluster.rollout.pad_id(), actor()
        state = jax.tree.map(np.array, nnx.state(self._cluster.actor_trainer.model, nnx.Param))
        target = from_names(tensors_of(state), config_of(model), "float32", in_checkpoint)
        stale = []
        drawn = zip(output.left_padded_prompt_tokens[:3], output.tokens, output.logprobs or (), strict=False)
        for prompt, tokens, values in drawn:
            begun = prompt[prompt != pad]
            row, first = np.concatenate([begun, tokens])[None], len(begun)

            def differs(state: Any, row: np.ndarray = row, first: int = first, values: Any = values) -> float:
                nnx.update(model, state)
                return float(np.abs(of_tunix(model, row)[0][first - 1 :] - values).max())

            self.mismatch = max(self.mismatch, differs(state))
            self.unequal += int((np.asarray(log_probs(target, row))[0, first:] != values).sum())
            stale += [] if self._before is None else [differs(self._before)]
        self.stale += [max(stale)] if stale else []
        self._before = state
        return output


def on_mesh(model: Llama3, mesh: Mesh) -> Llama3:
    """Return a model whose arrays are divided over a mesh, as Tunix' own loaders do."""
    state = nnx.state(model)
    specs = nnx.get_named_sharding(state, mesh)
    nnx.update(model, jax.tree.map(jax.device_put, state, specs))
    return model


def head() -> Drafter:
    target = from_names(tensors_of(nnx.state(actor(), nnx.Param)), config_of(actor()), "float32", in_checkpoint)
    return Eagle3(tiny.eagle_head(target, draft_vocab=48, feature_layers=(0, 1, 2)), Tree.chain(3))


@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.long)])
def test_runs_of_grpo_have_equal_rewards_with_and_without_drafts_and_no_mismatch(steps: int) -> None:
    runs = [Run(drafter, steps=steps) for drafter in (None, NGram(Tree.chain(3)), head())]
    for run in runs:
        assert run.rewards == runs[0].rewards and len(run.rewards) == steps
        assert run.mismatch < 1e-5, "so the ratio of probabilities is 1 in the first update of each step"
        assert len(run.stale) == steps - 1 and min(run.stale) > 1e-3, "control: weights of the step before"
        assert run.engine.weight_version == steps
    assert all(run.engine.metrics.num_draft_tokens for run in runs[1:])
    assert sum(run.engine.metrics.num_accepted_tokens for run in runs[1:]) > 0
    assert len(set(runs[0].rewards)) == steps, "control: the weights change"
    assert Run(seed=1).rewards != runs[0].rewards[:3], "control: another seed"


@pytest.mark.long
def test_run_of_a_deterministic_engine_has_the_bits_of_log_probs_at_every_step() -> None:
    runs = [Run(drafter, steps=20, deterministic=True) for drafter in (None, head())]
    assert runs[0].rewards == runs[1].rewards
    assert [run.unequal for run in runs] == [0, 0] and min(runs[1].stale) > 1e-3


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_trainer_on_two_devices_gets_the_rollouts_of_engines_on_one_and_on_two(shape: tuple[int, int]) -> None:
    trainers = two_devices(*shape)
    runs = [Run(NGram(Tree.chain(3)), trainers=trainers, mesh=mesh) for mesh in (one_device(), trainers)]
    assert runs[0].rewards == runs[1].rewards
    assert [len(run.engine.core.runner.params.main.embed.devices()) for run in runs] == [1, 2]
    for run in runs:
        assert run.mismatch < 1e-5 < 1e-3 < min(run.stale)


def test_scores_of_a_deterministic_engine_are_the_bits_of_its_samples_at_any_temperature() -> None:
    for temperature in (1.0, 0.7):
        config = sampled(temperature=temperature)
        worker = rollout(config, drafter=NGram(Tree.chain(3)), deterministic=True)
        output = worker.generate(["AB", "CDEFGHI"], config)
        rows = in_rows(output.tokens, worker.pad_id())
        scores = np.asarray(worker.get_per_token_logps(output.left_padded_prompt_tokens, rows))
        for row, values in zip(scores, output.logprobs or (), strict=True):
            np.testing.assert_array_equal(row[: len(values)], values)
            assert not row[len(values) :].any()
        worker.update_params(nnx.state(actor(1), nnx.Param))
        other = np.asarray(worker.get_per_token_logps(output.left_padded_prompt_tokens, rows))
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


def test_threads_that_call_at_once_draw_what_one_after_another_draws() -> None:
    prompts = ["AB", "CDE", "AB", "FG"]

    def drawn(workers: int, prompts: list[str] = prompts) -> list[tuple[int, ...]]:
        worker = rollout()
        with ThreadPoolExecutor(workers) as pool:
            outputs = list(pool.map(lambda prompt: worker.generate([prompt], sampled()), prompts))
        return sorted(tuple(output.tokens[0].tolist()) for output in outputs)

    wanted = drawn(1)
    assert [drawn(4), drawn(4), drawn(1, prompts[::-1])] == [wanted] * 3
    assert len(set(wanted)) == 4


def test_worker_on_two_devices_scores_at_temperature_1_alone() -> None:
    """Rows of matrices are in another order there, so its weights are no model of one device."""
    worker, mesh = rollout(), two_devices(1, 2)
    divided = JspecRollout(actor(), Characters(), mesh, sampled(), slots=16)
    outputs = [each.generate(["AB", "CDEFGHI"], sampled()) for each in (worker, divided)]
    rows = [in_rows(output.tokens, worker.pad_id()) for output in outputs]
    np.testing.assert_array_equal(*rows)
    scores = [
        np.asarray(each.get_per_token_logps(outputs[0].left_padded_prompt_tokens, rows[0]))
        for each in (worker, divided)
    ]
    np.testing.assert_allclose(*scores, atol=1e-5)
    for row, values in zip(scores[1], outputs[1].logprobs or (), strict=True):
        np.testing.assert_allclose(row[: len(values)], values, atol=1e-5)
    divided.generate(["AB"], sampled(temperature=0.7))
    with pytest.raises(NotImplementedError, match="get_per_token_logps: expected temperature 1 with 2 devices"):
        divided.get_per_token_logps(outputs[0].left_padded_prompt_tokens, rows[0])


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
    sizes = dict(num_layers=1, num_embed=16, embed_dim=8, hidden_dim=8, num_heads=1, head_dim=8, num_kv_heads=1)
    gemma = Gemma3(GemmaConfig(**sizes, sliding_window_size=8), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="expected a Tunix model of the kinds Llama3, Qwen2, Qwen3, got Gemma3"):
        config_of(gemma)
