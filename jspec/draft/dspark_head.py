"""The Markov head and the confidence head of DSpark heads (arXiv:2607.05147).

A DSpark head is a DFlash head whose logits at each position of a block are corrected by the token before. The Markov
head embeds this token in a few channels and projects them to the draft vocabulary; the projection is added to the
logits. There are three kinds, with e the embedding, h the head's normed state at the position, and s a state that
starts as zeros at the root:

    vanilla    projects e
    gated      projects sigmoid(gate [h; e]) * e
    rnn        g, c, o = joint [s; e; h];  s = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c);  projects tanh(o)

The confidence head is a linear function of h, or of [h; e]. Its sigmoid estimates the probability that a token drafted
at the position is accepted, if all tokens before it are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from jspec.core.numerics import Numerics
from jspec.draft.dflash_head import BoundDFlash, DFlashHead
from jspec.draft.head_config import DSparkConfig
from jspec.models.parts.layers import logits_of
from jspec.models.parts.param_spec import ParamSpec, prefixed
from pallas_kernels.layers.products import matmul


@struct.dataclass
class Linear:
    """The weights of a linear function."""

    weight: Float[Array, "out inputs"]
    bias: Float[Array, "out"]

    def __call__(self, *inputs: Float[Array, "*rows _"]) -> Float[Array, "*rows out"]:
        """Return the function of the concatenated inputs."""
        return matmul(jnp.concatenate(inputs, axis=-1), self.weight) + self.bias


@struct.dataclass
class MarkovHead:
    """The weights of a Markov head; its kind is the one whose weights it has."""

    embed: Float[Array, "vocab rank"]  # embedding of the token before, by its target id
    project: Float[Array, "draft_vocab rank"]  # projection to the correction of the logits
    gate: Linear | None = None  # of "gated"
    joint: Linear | None = None  # of "rnn", with the rows of g, c and o

    @classmethod
    def from_weights(cls, weights: Mapping[str, Any]) -> MarkovHead:
        linear = {name: Linear(**part) for name, part in weights.items() if isinstance(part, Mapping)}
        parts: dict[str, Any] = {**weights, **linear}
        return cls(**parts)

    def start(self, rows: int) -> Float[Array, "batch 1 rank"] | None:
        """Return the state of the root of each row; None for kinds without a state."""
        return None if self.joint is None else jnp.zeros((rows, 1, self.embed.shape[1]), self.embed.dtype)

    def correct(
        self,
        tokens: Int[Array, "batch nodes"],
        hidden: Float[Array, "batch hidden"],
        state: Float[Array, "batch nodes rank"] | None,
        numerics: Numerics,
    ) -> tuple[Float[Array, "batch nodes draft_vocab"], Float[Array, "batch nodes rank"] | None]:
        """Compute the corrections of the logits after nodes of equal depth.

        Args:
            tokens: target id of each node.
            hidden: the head's normed state at the position of the nodes' children.
            state: state after the nodes' parents, or the start for the root; None for kinds without a state.
            numerics: by which kernels; heads make no promise of bits.

        Returns:
            The corrections in float32, and the state after the nodes.
        """
        embedded = self.embed[tokens]
        hidden = jnp.broadcast_to(hidden[:, None], (*tokens.shape, hidden.shape[-1])).astype(embedded.dtype)
        if self.gate is not None:
            embedded = jax.nn.sigmoid(self.gate(hidden, embedded)) * embedded
        elif self.joint is not None and state is not None:
            gate, new, output = jnp.split(self.joint(state, embedded, hidden), 3, axis=-1)
            gate = jax.nn.sigmoid(gate)
            state, embedded = gate * state + (1 - gate) * jnp.tanh(new), jnp.tanh(output)
        return logits_of(embedded, self.project, numerics.relaxed), state


@struct.dataclass
class ConfidenceHead(Linear):
    """The weights of a confidence head, whose inputs are the head's state, then the Markov embedding if it is read."""

    def logits(
        self,
        hidden: Float[Array, "batch depth hidden"],
        depth: Int[Array, "batch nodes"],
        before: Float[Array, "batch nodes rank"] | None,
    ) -> Float[Array, "batch nodes"]:
        """Compute the logit of each node's confidence, in float32.

        Args:
            hidden: the head's normed states at depths 1, 2, ...
            depth: depth of each node; the root has any logit.
            before: Markov embedding of each node's parent; None: it is not read.
        """
        weight, size = self.weight[0].astype(jnp.float32), hidden.shape[-1]
        of_depth = jnp.sum(hidden * weight[:size], axis=-1, dtype=jnp.float32) + self.bias.astype(jnp.float32)
        logits = jnp.take_along_axis(of_depth, jnp.maximum(depth - 1, 0), axis=1)
        return logits if before is None else logits + jnp.sum(before * weight[size:], axis=-1, dtype=jnp.float32)


@struct.dataclass
class DSparkHead(DFlashHead):
    """The weights and the config of a DSpark head."""

    markov: MarkovHead | None = None  # None: logits are not corrected
    confidence: ConfidenceHead | None = None  # None: confidences are not estimated
    config: DSparkConfig = struct.field(pytree_node=False, kw_only=True)

    @classmethod
    def from_weights(cls, config: DSparkConfig, weights: Mapping[str, Any]) -> DSparkHead:  # type: ignore[override]
        made: dict[str, Any] = {}
        if "markov" in weights:
            made["markov"] = MarkovHead.from_weights(weights["markov"])
        if "confidence" in weights:
            made["confidence"] = ConfidenceHead(**weights["confidence"])
        return super().from_weights(config, {**weights, **made})  # type: ignore[return-value]


@struct.dataclass
class BoundDSpark(BoundDFlash):
    """The weights of a DSpark head that is bound to a target."""

    markov: MarkovHead | None = struct.field(kw_only=True)  # as in `DSparkHead`, like the next field
    confidence: ConfidenceHead | None = struct.field(kw_only=True)


def dspark_params(config: DSparkConfig) -> dict[str, ParamSpec]:
    """Return the `ParamSpec` of each parameter that a DSpark head has beside those of a DFlash head, by name."""
    hidden, rank = config.hidden_size, config.markov_rank
    params: dict[str, ParamSpec] = {}
    if rank:
        params["markov.embed"] = ParamSpec((config.vocab_size, rank), ("tokens", "rank"))
        params["markov.project"] = ParamSpec((config.draft_vocab_size, rank), ("draft_ids", "rank"))
    if rank and config.markov_head_type == "gated":
        params |= prefixed("markov.gate", linear_params(rank, hidden + rank))
    if rank and config.markov_head_type == "rnn":
        params |= prefixed("markov.joint", linear_params(3 * rank, 2 * rank + hidden))
    if config.confidence_head:
        params |= prefixed("confidence", linear_params(1, hidden + rank * config.confidence_head_with_markov))
    return params


def linear_params(out: int, inputs: int) -> dict[str, ParamSpec]:
    """Declare the weights of a `Linear`."""
    return {
        "weight": ParamSpec((out, inputs), ("out", "inputs")),
        "bias": ParamSpec((out,), ("out",), init="zeros"),
    }
