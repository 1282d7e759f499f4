"""The interface of the methods of drafting that can be trained, and what they share."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.draft.draft_vocab import reduced_head
from jspec.draft.head_pair import check_fit
from jspec.models.decoder import Model
from jspec.models.mixers.gqa import GQA
from jspec.models.mlps.mlp_config import Dense, NoMlp
from jspec.models.parts.param_spec import Params
from jspec.train.config import TrainConfig
from jspec.train.measured import Measured
from jspec.train.observe import Observed
from jspec.train.rows import Rows
from pallas_kernels.layers.dense.grouped_matmul import widened
from pallas_kernels.layers.weights import Quantized

INIT = 0.02  # standard deviation of random weights
HEAD_DIM = 128  # channels of a head's attention heads, if the target's are not of grouped-query attention
WIDTH = 3  # channels of the feed-forward for each hidden channel, if the target's is a mixture of experts

Files = tuple[dict[str, Any], dict[str, np.ndarray]]  # config.json, and tensors by name


class Method(abc.ABC):
    """A method of drafting.

    Args:
        config: options of the run.
        shared: further fields of the head that are not trained, because they are the target's.
    """

    field: ClassVar[str] = "head"  # field of a drafter of the method that has the head
    frozen: tuple[str, ...] = ()  # fields of the head that are not trained
    weights_file = "model.safetensors"  # name of the file of the weights
    has_vocabulary = False  # whether a head drafts from a vocabulary of its own, the most frequent tokens

    def __init__(self, config: TrainConfig, shared: Iterable[str] = ()) -> None:
        self.config = config
        self.frozen = tuple(dict.fromkeys((*self.frozen, *shared)))

    @abc.abstractmethod
    def new_states(self, target: Model) -> tuple[int, ...]:
        """Return the indices of the target's states that a new head reads, as in `jspec.models.decoder.forward`."""

    @abc.abstractmethod
    def create(self, target: Model, ids: Int[np.ndarray, "draft_vocab"]) -> Any:
        """Make a head with random weights.

        Args:
            target: the target.
            ids: target ids of the draft vocabulary; all ids for methods without one.
        """

    @abc.abstractmethod
    def load(self, path: str | Path, target: Model) -> Any:
        """Load a head to go on with.

        Raises:
            ValueError: the head does not fit the target, or its weights are quantised.
        """

    @staticmethod
    @abc.abstractmethod
    def with_shared(drafter: Any, target: Model) -> Any:
        """Return the head of a drafter with the parts that its loss reads of the target.

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
        """Return the loss of a batch times its number of `columns`, and what was measured.

        Args:
            head: the head, of which the trained weights are float32.
            target: the target.
            seen: the target's outputs.
            rows: packed rows.
            keys: key of each row's random numbers.
        """

    @abc.abstractmethod
    def files(self, head: Any, target: Model, tokens: Mapping[str, Any]) -> Files:
        """Return config.json and the tensors of a head in the format of the method's authors.

        Args:
            head: the head.
            target: the target.
            tokens: ids of special tokens, as in config.json.
        """

    def columns(self, rows: int) -> int:
        """Return the number of places of some rows whose losses are added up."""
        return rows * self.config.length

    def check(self, target: Model) -> None:
        """Raise ValueError if the options of the run do not fit a target."""
        check_fit("train", self.new_states(target), target.config.num_layers, [])
        at_most(self.config, "draft_vocab", target.config.vocab_size, "the target's vocabulary")

    def split(self, head: Any) -> tuple[Any, dict[str, Any]]:
        """Return the weights to train, in float32, and the other fields."""
        rest = {name: getattr(head, name) for name in self.frozen}
        trained = head.replace(**dict.fromkeys(self.frozen))
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained), rest  # copies, because updates reuse them


def at_most(config: TrainConfig, name: str, most: int, what: str) -> None:
    """Raise ValueError if an option is given and larger than a number, which is described in words."""
    value = getattr(config, name)
    if value is not None and value > most:
        raise ValueError(f"train: {name}: expected at most {most}, {what}, got {value}")


def layer_sizes(target: Model) -> dict[str, Any]:
    """Return the sizes of a head's layers, arguments of `DecoderConfig.of_sizes`.

    The feed-forward and the attention are those of the target's first layers that have one.
    """
    attention, hidden = target.config.attention, target.config.hidden_size
    mlp = next(mlp for mlp in target.config.mlps if not isinstance(mlp, NoMlp))
    width = mlp.width if isinstance(mlp, Dense) else WIDTH * hidden
    if isinstance(attention, GQA):
        heads = dict(num_heads=attention.heads, num_kv_heads=attention.kv_heads, head_dim=attention.head_dim)
    else:
        count = max(1, hidden // HEAD_DIM)
        heads = dict(num_heads=count, num_kv_heads=count, head_dim=HEAD_DIM)
    return heads | dict(intermediate_size=width)


def target_sizes(target: Model, config: TrainConfig) -> dict[str, Any]:
    """Return the values that the config of a head has in common with its target, unless the options have others."""
    target_config = target.config
    sizes = dict(
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        target_hidden_size=target_config.hidden_size,
    )
    sizes |= {} if config.intermediate_size is None else dict(intermediate_size=config.intermediate_size)
    return layer_sizes(target) | sizes | dict(norm_eps=target_config.norm_eps, source_format="jspec")


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
    return in_float32(reduced_head(target.output_head, ids)[0])


def in_float32(weight: Any) -> Array:
    """Return a weight in float32, multiplied by its scales if it is quantised."""
    return widened(weight) if isinstance(weight, Quantized) else weight.astype(jnp.float32)


def refuse_quantized(place: str, head: Any, weights: Any) -> None:
    """Raise ValueError if a weight of a head is quantised.

    Args:
        place: the option that has the head, for the error.
        head: the head's path or drafter, for the error.
        weights: its weights.
    """
    leaves = jax.tree.leaves(weights, is_leaf=lambda node: isinstance(node, Quantized))
    if any(isinstance(leaf, Quantized) for leaf in leaves):
        raise ValueError(f"{place}: expected a head without quantised weights, got {head}; give its original")
