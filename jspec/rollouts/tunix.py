"""A rollout worker for Tunix (google-tunix 0.1.7), whose trainers then draw their completions from a jspec engine.

    cluster = ClusterConfig(rollout_engine=functools.partial(JspecRollout, drafter=jspec.Suffix(scope="engine")), ...)

With ``accept="coupled"``, the default, a seed gives the same completions with any drafter, so drafting changes the time
of a run and nothing else.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jspec.core.shorten import short
from jspec.draft.base import Drafter
from jspec.engine.callers.api import Engine
from jspec.models.decoder import Model
from jspec.models.exchange import from_names
from jspec.rollouts.tunix_models import config_of, in_checkpoint, tensors_of
from jspec.train.scoring import log_probs
from pallas_kernels.layers.shard import AXIS

BANNED = -100.0  # bias of a padding token that does not end texts: trainers would take it for padding


class JspecRollout(BaseRollout):
    """Draws completions with an engine, which gets the trainer's weights after each update.

    Args:
        rollout_actor: the trainer's model; its arrays are converted, never shared.
        tokenizer: a tokenizer of Tunix, SentencePiece or transformers.
        mesh: the mesh of the rollout, over all devices of which the engine divides its weights, whatever its axes;
            None: the default device. The trainer may have others.
        rollout_config: its lengths, end tokens and dtype; sampling options are those of each call.
        drafter: as for `jspec.Engine`.
        engine_options: options of `jspec.Engine`, such as ``slots`` or ``deterministic=True``.

    Raises:
        ValueError: the model, the mesh or an option is not supported.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Mesh | None,
        rollout_config: RolloutConfig,
        *,
        drafter: Drafter | None = None,
        **engine_options: Any,
    ) -> None:
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        self._config, state = config_of(rollout_actor), nnx.state(rollout_actor, nnx.Param)
        self._dtype = str(np.dtype(rollout_config.data_type or jax.tree.leaves(state)[0].dtype))
        self._temperature, self._lock = rollout_config.temperature, threading.Lock()
        self._num_drawn = Counter[tuple[int, ...]]()  # of each prompt since the last update
        longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self.engine = Engine(
            self._model_of(state),
            drafter=drafter,
            eos_ids=tuple(rollout_config.eos_tokens or [self.eos_id()]),
            mesh=None if mesh is None else Mesh(mesh.devices.ravel(), (AXIS,)),
            **{"max_len": longest, "logprobs_mode": "processed_logprobs", **engine_options},
        )

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Complete prompts; several threads may call this at once.

        Each completion has a seed of its own, made of the config's, the version of the weights, the prompt, and how
        often the prompt was completed since the last update; so it does not depend on the order of threads.
        Log-probabilities are of the distribution that was sampled from, after the temperature and any top-p and top-k.
        """
        if kwargs:
            raise TypeError(f"generate: expected no other options, got {', '.join(kwargs)}")
        self._temperature = rollout_config.temperature
        ids = [self._encode(prompt) for prompt in prompts]
        needed = max(map(len, ids)) + rollout_config.max_tokens_to_generate
        if needed > self.engine.config.max_len:
            raise ValueError(
                f"generate: expected at most {self.engine.config.max_len} tokens with a prompt's completion, got "
                f"{needed}; raise max_prompt_length of the rollout's config, or pass max_len= to JspecRollout"
            )
        completions = self.engine.generate(ids, [self._params(rollout_config, row) for row in ids])
        for completion in completions:
            completion.raise_for_error()
        size, longest = rollout_config.max_prompt_length, max(map(len, ids))
        if longest > size:  # as Tunix' own sampler does
            size = 1 << (longest - 1).bit_length()
        padded = [[self.pad_id()] * (size - len(row)) + row for row in ids]
        ends = self.engine.eos_ids
        return RolloutOutput(
            text=[self._tokenizer.decode([t for t in c.token_ids if t not in ends]) for c in completions],
            logits=None,
            tokens=[np.array(c.token_ids, np.int32) for c in completions],
            left_padded_prompt_tokens=np.array(padded, np.int32),
            logprobs=[np.array([record.logprob for record in c.logprobs or ()], np.float32) for c in completions],
        )

    def get_per_token_logps(self, prompt_tokens: jax.Array, completion_tokens: jax.Array) -> jax.Array:
        """Return the log-probability of each completion token at the temperature of the last call; 0 for padding.

        Raises:
            NotImplementedError: the engine has several devices, and the temperature is not 1.
        """
        pad, rows = self.pad_id(), []
        for prompt, completion in zip(np.asarray(prompt_tokens), np.asarray(completion_tokens), strict=True):
            begun = prompt[np.argmax(prompt != pad) :] if (prompt != pad).any() else prompt[-1:]
            rows.append((begun, completion[: _length(completion, pad, self.engine.eos_ids)]))
        values = np.zeros(np.shape(completion_tokens), np.float32)
        for row, ((begun, completion), scored) in enumerate(zip(rows, self._scores_of(rows), strict=True)):
            values[row, : len(completion)] = scored[len(begun) : len(begun) + len(completion)]
        return jax.device_put(values)

    def _scores_of(self, rows: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Return the log-probabilities of each row's tokens, a prompt's and a completion's; the first is none."""
        texts = [np.concatenate(row) for row in rows]
        target, temperature = self.engine.core.runner.params.main, self._temperature or 1.0
        if target.mesh is not None and target.mesh.size > 1:
            if temperature != 1:
                raise NotImplementedError(
                    f"get_per_token_logps: expected temperature 1 with {target.mesh.size} devices, got {temperature}"
                )
            return [np.insert(scores, 0, 0.0) for scores in self.engine.log_probs([text.tolist() for text in texts])]
        lengths = np.array([len(text) for text in texts])
        tokens = np.array([np.pad(text, (0, max(lengths) - len(text))) for text in texts], np.int32)
        return list(np.asarray(log_probs(target, jnp.asarray(tokens), jnp.asarray(lengths), temperature=temperature)))

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Give the engine new weights; requests under way go on with them."""
        self.engine.update_weights(self._model_of(params), copy=False, drafter="keep")
        with self._lock:
            self._num_drawn.clear()

    def model(self) -> None:
        """Return None: a trainer that got its own module back would take the weights as shared, and never update."""
        return

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def _model_of(self, state: Any) -> Model:
        return from_names(tensors_of(state), self._config, self._dtype, in_checkpoint)

    def _encode(self, prompt: str) -> list[int]:
        first = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return [int(token) for token in self._tokenizer.dedup_bos_ids(first + list(self._tokenizer.encode(prompt)))]

    def _params(self, config: RolloutConfig, prompt: list[int]) -> dict[str, Any]:
        """Return the fields of the `SamplingParams` of a prompt."""
        with self._lock:
            number = self._num_drawn[tuple(prompt)]
            self._num_drawn[tuple(prompt)] += 1
        seed = [] if config.seed is None else [int(word) for word in _words(config.seed)]
        parts = [*seed, self.engine.weight_version, number, *prompt]
        drawn = np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]
        fields: dict[str, Any] = {
            "max_tokens": config.max_tokens_to_generate,
            "temperature": config.temperature,
            "seed": int(drawn),
            "logprobs": 0,
        }
        if config.top_p is not None:
            fields["top_p"] = config.top_p
        if config.top_k not in (None, -1):
            fields["top_k"] = config.top_k
        if self.pad_id() not in self.engine.eos_ids:
            fields["logit_bias"] = {self.pad_id(): BANNED}
        return fields


def _words(seed: Any) -> np.ndarray:
    """Return the numbers of a seed: an int, or a key of `jax.random` of either kind."""
    if isinstance(seed, jax.Array) and jax.dtypes.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).ravel()
    if words.dtype.kind not in "iu":
        raise TypeError(f"seed: expected an int or a key of jax.random, got {short(seed)}")
    return words.astype(np.uint32)


def _length(completion: np.ndarray, pad: int, ends: tuple[int, ...]) -> int:
    """Return the number of tokens before the padding behind a completion; an end token may be the padding's."""
    is_end = np.isin(completion, ends)
    if is_end.any():
        return int(np.argmax(is_end)) + 1
    is_token = completion != pad
    return int(len(completion) - np.argmax(is_token[::-1])) if is_token.any() else 0
