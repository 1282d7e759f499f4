"""The methods of drafting that can be trained: which head is made, what of it is trained, and by which loss."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from convert.orbax import unflatten
from jspec.draft.draft_vocab import reduced_head
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.head_config import Eagle3Config, default_states
from jspec.draft.head_pair import check_fit
from jspec.models.decoder import Model
from jspec.models.layer_config import GQA, Rope
from jspec.models.mlp_config import Dense
from jspec.models.params import Params
from jspec.train import eagle3, write
from jspec.train.config import TrainConfig
from jspec.train.measured import Measured
from jspec.train.observe import Observed
from jspec.train.rows import Rows
from pallas_kernels.layers.quantized import Quantized

INIT = 0.02  # standard deviation of random weights
HEAD_DIM = 128  # channels of a head's attention heads, if the target's are not of grouped-query attention
WIDTH = 3  # channels of the feed-forward for each hidden channel, if the target's is a mixture of experts


class Method(abc.ABC):
    """A method of drafting.

    Args:
        config: options of the run.
    """

    frozen: tuple[str, ...]  # fields of the head that are not trained

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def new_states(self, target: Model) -> tuple[int, ...]:
        """Return the indices of the target's states that a new head reads, as in `jspec.models.decoder.forward`."""

    def check(self, target: Model) -> None:
        """Raise ValueError if the options of the run do not fit a target."""
        config, vocab = self.config, target.config.vocab_size
        check_fit("train", self.new_states(target), target.config.num_layers, [])
        if config.draft_vocab is not None and config.draft_vocab > vocab:
            raise ValueError(
                f"train: draft_vocab: expected at most {vocab}, the target's vocabulary, got {config.draft_vocab}"
            )

    @abc.abstractmethod
    def create(self, target: Model, ids: Int[np.ndarray, "draft_vocab"]) -> Any:
        """Make a head with random weights, whose output head is the target's for the draft vocabulary."""

    @abc.abstractmethod
    def load(self, path: str | Path, target: Model) -> Any:
        """Load a head to go on with.

        Raises:
            ValueError: the head does not fit the target.
        """

    @abc.abstractmethod
    def states(self, head: Any, target: Model) -> tuple[int, ...]:
        """Return the indices of the target's states that a head reads."""

    @abc.abstractmethod
    def loss(
        self, head: Any, target: Model, seen: Observed, rows: Rows, keys: Array
    ) -> tuple[Float[Array, ""], Measured]:
        """Return the loss of a batch times its number of places, and what was measured.

        Args:
            head: the head, of which the trained weights are float32.
            target: the target.
            seen: the target's outputs.
            rows: packed rows.
            keys: key of each row's random numbers.
        """

    @abc.abstractmethod
    def files(self, head: Any, target: Model, tokens: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return config.json and the tensors of a head in the format of the method's authors.

        Args:
            head: the head.
            target: the target.
            tokens: ids of special tokens, as in config.json.
        """

    def split(self, head: Any) -> tuple[Any, dict[str, Any]]:
        """Return the weights to train, in float32, and the other fields."""
        rest = {name: getattr(head, name) for name in self.frozen}
        trained = head.replace(**dict.fromkeys(self.frozen))
        return jax.tree.map(lambda x: x.astype(jnp.float32), trained), rest


class Eagle3Method(Method):
    """EAGLE-3 heads, and those of EAGLE-3.1 (arXiv:2503.01840)."""

    frozen = ("embed", "draft_to_target")

    def new_states(self, target: Model) -> tuple[int, ...]:
        return self.config.feature_layers or default_states(target.config.num_layers)

    def create(self, target: Model, ids: Int[np.ndarray, "draft_vocab"]) -> EagleHead:
        own, config = target.config, self.config
        head_config = Eagle3Config.of_sizes(
            **layer_sizes(target),
            num_layers=config.layers,
            rope=Rope(theta=config.rope_theta),
            vocab_size=own.vocab_size,
            hidden_size=own.hidden_size,
            target_hidden_size=own.hidden_size,
            norm_eps=own.norm_eps,
            draft_vocab_size=len(ids),
            feature_layers=config.feature_layers,
            source_format="jspec",
            fc_norm=config.eagle31,
            norm_output=config.eagle31,
        )
        weights = random_weights(head_params(head_config), config.seed)
        weights |= {"head": target_rows(target, ids), "draft_to_target": jnp.asarray(ids, jnp.int32)}
        return EagleHead.from_weights(head_config, unflatten({"embed": target.embed, **weights}))

    def load(self, path: str | Path, target: Model) -> EagleHead:
        drafter = Eagle3.from_pretrained(path, tree="chain:1", dtype="float32")
        bound = replace(drafter.bind(target), precomputed=None)
        if isinstance(bound.head, Quantized) or any(isinstance(layer.qkv, Quantized) for layer in bound.layers):
            raise ValueError(f"train: init: expected a head without quantised weights, got {path}; give its original")
        return bound

    def states(self, head: EagleHead, target: Model) -> tuple[int, ...]:
        return head.config.states_of(target.config.num_layers)

    def loss(
        self, head: EagleHead, target: Model, seen: Observed, rows: Rows, keys: Array
    ) -> tuple[Float[Array, ""], Measured]:
        options = eagle3.Eagle3Loss(self.config.ttt, self.config.decay, self.config.loss)
        return eagle3.loss(head, target, seen, rows, options)

    def files(self, head: EagleHead, target: Model, tokens: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        dtype = str(target.embed.dtype)
        return write.eagle3_files(head, target.config, dtype, self.config.length, tokens)


METHODS: dict[str, type[Method]] = {"eagle3": Eagle3Method}


def layer_sizes(target: Model) -> dict[str, Any]:
    """Return the sizes of a head's layers, arguments of `DecoderConfig.of_sizes`: those of the target's first layer."""
    layer, hidden = target.config.layers[0], target.config.hidden_size
    width = layer.mlp.width if isinstance(layer.mlp, Dense) else WIDTH * hidden
    if isinstance(layer.attention, GQA):
        own = layer.attention
        heads = dict(num_heads=own.heads, num_kv_heads=own.kv_heads, head_dim=own.head_dim)
    else:
        count = max(1, hidden // HEAD_DIM)
        heads = dict(num_heads=count, num_kv_heads=count, head_dim=HEAD_DIM)
    return heads | dict(intermediate_size=width)


def random_weights(params: Params, seed: int) -> dict[str, Array]:
    """Draw float32 weights with a standard deviation of `INIT`; norms are 1, and biases 0."""
    fixed = {"ones": jnp.ones, "zeros": jnp.zeros}
    keys = jax.random.split(jax.random.key(seed), len(params))
    return {
        name: fixed[spec.init](spec.shape) if spec.init in fixed else INIT * jax.random.normal(key, spec.shape)
        for key, (name, spec) in zip(keys, params.items(), strict=True)
    }


def target_rows(target: Model, ids: Int[np.ndarray, "draft_vocab"]) -> Float[Array, "draft_vocab hidden"]:
    """Return the rows of the target's output head for some tokens, in float32."""
    rows, _ = reduced_head(target.output_head, ids)
    return rows.widened() if isinstance(rows, Quantized) else rows.astype(jnp.float32)
