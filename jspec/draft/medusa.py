"""Medusa heads (arXiv:2401.10774): every head predicts a later token from the same target state.

Head h reads the target's state after its final norm at the position before the root, and predicts token h + 1 after
the root without seeing the choices of other heads. A node's token therefore depends only on its depth and rank, and
the only state of a slot is that one target state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from convert.detect import MEDUSA_BLOCK, bare_name
from convert.huggingface import Row, Source, Tensor, renamed
from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import Tree
from jspec.draft.base import CHECK_HEAD, CHECK_PROMPT, Drafter, require_static, static_draft
from jspec.models import load
from jspec.models.config import positive
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.models.layers import logits_of
from jspec.models.load import Format
from jspec.models.params import ParamSpec, rows
from jspec.sampling import sampler
from pallas_kernels.layers.quantized import matmul


@dataclass(frozen=True)
class MedusaConfig:
    """Medusa heads: `num_heads` of them, each with `num_layers` residual blocks; sizes are the target's."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_layers: int
    source_format: str = "official"

    def __post_init__(self) -> None:
        positive("heads", self, ("vocab_size", "hidden_size", "num_heads", "num_layers"))

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Builds the config that `to_json` wrote."""
        return cls(**fields)


@struct.dataclass
class MedusaBlock:
    """A residual block: ``x + silu(weight x + bias)``."""

    weight: Float[Array, "hidden hidden"]
    bias: Float[Array, "hidden"]


@struct.dataclass
class MedusaHead:
    """Residual blocks, then logits over the vocabulary."""

    blocks: list[MedusaBlock]
    output: Float[Array, "vocab hidden"]


@struct.dataclass
class MedusaHeads:
    """All heads with their config; head h predicts the token at depth h + 1."""

    heads: list[MedusaHead]
    config: MedusaConfig = struct.field(pytree_node=False)

    @classmethod
    def from_weights(cls, config: MedusaConfig, weights: Mapping[str, Any]) -> MedusaHeads:
        """Build from the tree of arrays that `jspec.models.load.read_checkpoint` returns."""
        heads = [
            MedusaHead([MedusaBlock(**block) for block in head["blocks"]], head["output"]) for head in weights["heads"]
        ]
        return cls(heads, config)


@struct.dataclass
class MedusaState:
    """The target's state, after its final norm, at the position before each slot's root."""

    hidden: Float[Array, "slots hidden"]


@final
class Medusa(Drafter):
    """Medusa heads, under lossless accept rules; the authors' typical acceptance is ``accept="typical"``.

    Args:
        heads: the weights.
        tree: a chain or a static tree no deeper than there are heads.

    Raises:
        NotImplementedError: a dynamic tree.
        ValueError: the tree is deeper than there are heads, or a node has more children than there are tokens.
    """

    def __init__(self, heads: MedusaHeads, tree: Tree) -> None:
        self.heads = heads
        self.tree = require_static("Medusa", tree)
        if tree.depth > len(heads.heads):
            raise ValueError(f"Medusa: {tree} is {tree.depth} deep, there are {len(heads.heads)} heads; cut the tree")
        if tree.branching > heads.config.vocab_size:
            raise ValueError(
                f"Medusa: {tree} needs {tree.branching} children of a node, the vocabulary has "
                f"{heads.config.vocab_size} tokens; take a narrower tree"
            )

    @classmethod
    def from_pretrained(cls, path: str | Path, *, tree: Tree, dtype: str | None = None) -> Self:
        """Load heads from a folder as released, a converted folder or a hub id."""
        checkpoint = load.read_checkpoint(path, head_format, kind="medusa", dtype=dtype)
        return cls(MedusaHeads.from_weights(checkpoint.config, checkpoint.weights), tree)

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT} and that the heads were trained for this target, and {CHECK_HEAD}"

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return (target.config.num_layers + 1,)

    def bind(self, target: Model) -> MedusaHeads:
        own, config = target.config, self.heads.config
        for size, got, expected in (
            ("hidden size", config.hidden_size, own.hidden_size),
            ("vocabulary", config.vocab_size, own.vocab_size),
        ):
            if got != expected:
                raise ValueError(
                    f"Medusa: {size}: the target has {expected}, the heads have {got}; use heads made for this target"
                )
        return self.heads

    def init(self, params: MedusaHeads, pool: PoolShape) -> MedusaState:
        output = params.heads[0].output
        return MedusaState(jnp.zeros((pool.slots, output.shape[1]), output.dtype))

    def prefill(
        self, params: MedusaHeads, state: MedusaState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> MedusaState:
        assert features is not None
        last = jnp.maximum(jnp.sum(batch.valid, axis=1) - 1, 0)
        return _store(state, view, features, last)

    def draft(self, params: MedusaHeads, state: MedusaState, view: SlotView) -> tuple[Draft, MedusaState]:
        hidden = state.hidden.at[view.slots].get(mode="fill", fill_value=0)[:, None]
        choose_children = sampler.child_chooser(view, self.tree.depth, None, params.config.vocab_size)
        tokens, log_probs, fed = [], [], [0]
        laws: dict[int, Array] = {}
        for depth, level in enumerate(self.tree.levels[1:], 1):
            with jax.named_scope(f"head{depth}"):
                logits = head_logits(params.heads[depth - 1], hidden)
                ids, law = choose_children(logits[None], depth, max(level.ranks) + 1)
                ranks = np.array(level.ranks)
                tokens.append(ids[:, 0, ranks])
                log_probs.append(sampler.log_prob(logits, ids)[:, 0, ranks])
                if law is not None:
                    laws |= dict.fromkeys(fed, law[:, 0])
                fed = [level.nodes[place] for place in level.with_children]
        return static_draft(self.tree, view, tokens, log_probs, laws), state

    def commit(
        self,
        params: MedusaHeads,
        state: MedusaState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> MedusaState:
        assert features is not None
        last = jnp.take_along_axis(verdict.path, verdict.accept_len[:, None], axis=1)[:, 0]
        return _store(state, view, features, last)


def head_logits(head: MedusaHead, hidden: Float[Array, "batch rows hidden"]) -> Float[Array, "batch rows vocab"]:
    """A head's logits over the vocabulary, float32."""
    for block in head.blocks:
        hidden = hidden + jax.nn.silu(matmul(hidden, block.weight) + block.bias)
    return logits_of(hidden, head.output)


def _store(state: MedusaState, view: SlotView, features: Array, at: Array) -> MedusaState:
    """Store the feature of each row at index ``at``."""
    newest = jnp.take_along_axis(features, at[:, None, None], axis=1)[:, 0]
    return MedusaState(state.hidden.at[view.slots].set(newest.astype(state.hidden.dtype), mode="drop"))


# ---- files


def head_format(kind: str = "medusa") -> Format:
    """The format of Medusa heads."""
    return Format(_read_heads, MedusaConfig.from_json)


def _read_heads(fields: Mapping[str, Any], source: Source) -> tuple[MedusaConfig, list[Row]]:
    names = {bare_name(name): name for name in source.tensors}
    config = medusa_config({bare: source.tensors[name] for bare, name in names.items()})
    return config, renamed(head_weights(config), names)


def medusa_config(tensors: Mapping[str, Tensor]) -> MedusaConfig:
    """The sizes of Medusa heads from the shapes of their tensors: config.json lacks sizes and misstates the heads.

    Args:
        tensors: by name, without the prefix `model.`.

    Raises:
        ValueError: if there is no vocabulary matrix to read the sizes from.
    """
    layers = 1 + max(int(match[2]) for match in map(MEDUSA_BLOCK.fullmatch, tensors) if match)
    heads = 1 + max(int(name.partition(".")[0]) for name in tensors if name[:1].isdigit())
    output = f"0.{layers}.weight"
    if output not in tensors or len(tensors[output].shape) != 2:
        raise ValueError(
            f"expected {output}, the first head's matrix [vocabulary, hidden], got {', '.join(sorted(tensors))}; "
            "the file is incomplete"
        )
    vocab, hidden = tensors[output].shape
    return MedusaConfig(vocab_size=vocab, hidden_size=hidden, num_heads=heads, num_layers=layers)


def medusa_params(config: MedusaConfig) -> dict[str, ParamSpec]:
    """The parameters of all heads, by name: residual blocks, then a matrix over the vocabulary."""
    hidden, params = config.hidden_size, {}
    for head in range(config.num_heads):
        for index in range(config.num_layers):
            block = f"heads.{head}.blocks.{index}"
            params[f"{block}.weight"] = ParamSpec((hidden, hidden), ("hidden", "hidden"))
            params[f"{block}.bias"] = ParamSpec((hidden,), ("hidden",), init="zeros")
        params[f"heads.{head}.output"] = ParamSpec((config.vocab_size, hidden), ("vocab", "hidden"))
    return params


def head_weights(config: MedusaConfig) -> list[Row]:
    """The rows of the weight map."""
    tensors = {}
    for head in range(config.num_heads):
        for index in range(config.num_layers):
            for name in ("weight", "bias"):
                tensors[f"heads.{head}.blocks.{index}.{name}"] = [f"{head}.{index}.linear.{name}"]
        tensors[f"heads.{head}.output"] = [f"{head}.{config.num_layers}.weight"]
    return rows(medusa_params(config), tensors)
