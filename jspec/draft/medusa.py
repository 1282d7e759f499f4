"""Drafting with Medusa heads (arXiv:2401.10774).

All heads read one hidden state of the target: the state after the final norm, at the position before the root (the
newest token). Head h predicts token h + 1 after the root. No head sees the choices of other heads, so the distribution
of a node's children depends only on the node's depth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from convert.detect import MEDUSA_BLOCK, bare_name
from convert.fields import CheckpointError, Fields, listed
from convert.huggingface import MapRow, renamed
from convert.sources import Source, Tensor
from jspec.core.records import Draft, SlotView
from jspec.core.tree import Tree, tree_of
from jspec.draft.base import CHECK_HEAD, CHECK_PROMPT, check_part, require_static
from jspec.draft.elsewhere import READS_FEATURES, refuses_device
from jspec.draft.expand_block import expand_block
from jspec.draft.expand_tree import Vocabulary
from jspec.draft.head_config import Overrides
from jspec.draft.newest_state import NewestState, NewestStateDrafter
from jspec.models.config.decoder_config import from_json
from jspec.models.decoder import Model
from jspec.models.load import Format, check_count
from jspec.models.parts.checks import positive
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.layers import logits_of
from jspec.models.parts.param_spec import ParamSpec
from jspec.models.weights.params import rows
from pallas_kernels.layers.products import matmul


@dataclass(frozen=True)
class MedusaConfig:
    """The config of the Medusa heads of a target."""

    vocab_size: int  # number of tokens of the target's vocabulary
    hidden_size: int  # number of channels of the target's hidden states
    num_heads: int  # number of heads
    num_layers: int  # number of residual blocks of each head
    source_format: str = "official"  # name of the exporter, for display

    def __post_init__(self) -> None:
        positive("heads", self, ("vocab_size", "hidden_size", "num_heads", "num_layers"))

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build a config from the JSON values that `to_json` returned."""
        return from_json(cls, Fields.of(fields))


@struct.dataclass
class MedusaBlock:
    """The weights of one residual block, which computes ``x + silu(weight x + bias)``."""

    weight: Float[Array, "hidden hidden"]
    bias: Float[Array, "hidden"]


@struct.dataclass
class MedusaHead:
    """The weights of one head: residual blocks, then a matrix that computes logits over the vocabulary."""

    blocks: list[MedusaBlock]  # residual blocks in order
    output: Float[Array, "vocab hidden"]  # output matrix


@struct.dataclass
class MedusaHeads:
    """The weights and the config of all Medusa heads of a target."""

    heads: list[MedusaHead]  # head h predicts the tokens at depth h + 1 of the tree
    config: MedusaConfig = struct.field(pytree_node=False)

    @classmethod
    def from_weights(cls, config: MedusaConfig, weights: Mapping[str, Any]) -> MedusaHeads:
        """Build heads from the weights that `jspec.models.load.read_checkpoint` returns, a tree of arrays."""
        heads = [
            MedusaHead([MedusaBlock(**block) for block in head["blocks"]], head["output"]) for head in weights["heads"]
        ]
        return cls(heads, config)


@final
class Medusa(NewestStateDrafter):
    """Drafts with Medusa heads.

    Any accept rule can be used; ``accept="typical"`` is the rule of the Medusa authors and not lossless.

    Args:
        heads: weights and config of the heads.
        tree: chain or static tree, or its text such as "chain:4", at most as deep as there are heads; None: a chain of
            5 tokens, or of as many as there are heads if fewer.

    Raises:
        NotImplementedError: the tree is dynamic.
        ValueError: the tree is deeper than the number of heads, or a node has more children than the vocabulary has
            tokens.
    """

    method = "medusa"
    weights_type = MedusaHeads

    @refuses_device(READS_FEATURES)
    def __init__(self, heads: MedusaHeads, tree: Tree | str | None = None) -> None:
        check_part("Medusa", "heads", heads, MedusaHeads, "Medusa.from_pretrained(path)")
        tree = tree_of("Medusa", self.chain(heads) if tree is None else tree)
        self.heads = heads
        self.tree = require_static("Medusa", tree)
        if tree.depth > len(heads.heads):
            raise ValueError(
                f"Medusa: expected a tree at most {len(heads.heads)} deep, because there are {len(heads.heads)} "
                f"heads, got {tree}, which is {tree.depth} deep; cut the tree"
            )
        if tree.branching > heads.config.vocab_size:
            raise ValueError(
                f"Medusa: {tree} needs {tree.branching} children of a node, the vocabulary has "
                f"{heads.config.vocab_size} tokens; take a narrower tree"
            )

    @classmethod
    @refuses_device(READS_FEATURES)
    def from_pretrained(cls, path: str | Path, *, tree: Tree | str | None = None, dtype: str | None = None) -> Self:
        """Load Medusa heads.

        Args:
            path: folder in the format of the Medusa authors, converted folder, or hub id ("owner/name").
            tree: as for `Medusa`.
            dtype: dtype of the weights; None: float32 on CPU, bfloat16 elsewhere.
        """
        heads = cls.read(path, dtype=dtype)
        return cls(heads, tree)

    @classmethod
    def file_format(cls, kind: str, overrides: Overrides, dequantize: bool) -> Format:
        return Format(_read_heads, MedusaConfig.from_json, _params)

    @staticmethod
    def max_depth(weights: MedusaHeads) -> int:
        return len(weights.heads)

    @property
    def advice(self) -> str:
        return f"{CHECK_PROMPT} and that the heads were trained for this target, and {CHECK_HEAD}"

    def bind(self, target: Model) -> MedusaHeads:
        target_config, config = target.config, self.heads.config
        for size, got, expected in (
            ("hidden size", config.hidden_size, target_config.hidden_size),
            ("vocabulary", config.vocab_size, target_config.vocab_size),
        ):
            if got != expected:
                raise ValueError(
                    f"Medusa: {size}: the target has {expected}, the heads have {got}; use heads made for this target"
                )
        return self.heads

    def init(self, params: MedusaHeads, pool: PoolShape) -> NewestState:
        output = params.heads[0].output
        return NewestState.new(pool.slots, output.shape[1], output.dtype)

    def draft(self, params: MedusaHeads, state: NewestState, view: SlotView) -> tuple[Draft, NewestState]:
        hidden = state.of(view)
        logits = []
        for index, head in enumerate(params.heads[: self.tree.depth], 1):
            with jax.named_scope(f"head{index}"):
                logits.append(head_logits(head, hidden))
        vocabulary = Vocabulary(None, params.config.vocab_size)
        return expand_block(self.tree, view, vocabulary, jnp.concatenate(logits, axis=1)[None]), state


def head_logits(head: MedusaHead, hidden: Float[Array, "batch rows hidden"]) -> Float[Array, "batch rows vocab"]:
    """Compute a head's logits over the vocabulary (float32) from the target's hidden states."""
    return logits_of(head_state(head, hidden), head.output)


def head_state(head: MedusaHead, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
    """Run a head's residual blocks on the target's hidden states; the output matrix multiplies their result."""
    for block in head.blocks:
        hidden = hidden + jax.nn.silu(matmul(hidden, block.weight) + block.bias)
    return hidden


# ---- files


def _read_heads(fields: Fields, source: Source) -> tuple[MedusaConfig, list[MapRow]]:
    names = {bare_name(name): name for name in source.tensors}
    config = medusa_config({bare: source.tensors[name] for bare, name in names.items()})
    return config, renamed(head_weights(config), names)


def _params(config: MedusaConfig, names: Collection[str]) -> dict[str, ParamSpec]:
    check_count("num_heads * num_layers", config.num_heads * config.num_layers, names)
    return medusa_params(config)


def medusa_config(tensors: Mapping[str, Tensor]) -> MedusaConfig:
    """Derive the config of Medusa heads from the shapes of their tensors.

    The config.json is not used, because it lacks the sizes and its number of heads is wrong.

    Args:
        tensors: header of each tensor, by its name without the prefix `model.`.

    Raises:
        CheckpointError: the output matrix of the first head is missing, or names count more heads than there are
            tensors.
    """
    blocks = [match for match in map(MEDUSA_BLOCK.fullmatch, tensors) if match]
    layers, heads = (1 + max(int(match[part]) for match in blocks) for part in (2, 1))
    output = f"0.{layers}.weight"
    if output not in tensors or len(tensors[output].shape) != 2:
        raise CheckpointError(
            "", f"expected {output}, the first head's matrix [vocabulary, hidden], got {listed(sorted(tensors))}; "
            "the file is incomplete",
        )  # fmt: skip
    check_count("heads with their blocks", heads * layers, tensors)
    vocab, hidden = tensors[output].shape
    return MedusaConfig(vocab_size=vocab, hidden_size=hidden, num_heads=heads, num_layers=layers)


def medusa_params(config: MedusaConfig) -> dict[str, ParamSpec]:
    """Return the `ParamSpec` of each parameter of all heads, by name."""
    hidden, params = config.hidden_size, {}
    for head in range(config.num_heads):
        for index in range(config.num_layers):
            block = f"heads.{head}.blocks.{index}"
            params[f"{block}.weight"] = ParamSpec((hidden, hidden), ("hidden", "hidden"))
            params[f"{block}.bias"] = ParamSpec((hidden,), ("hidden",), init="zeros")
        params[f"heads.{head}.output"] = ParamSpec((config.vocab_size, hidden), ("tokens", "hidden"))
    return params


def head_weights(config: MedusaConfig) -> list[MapRow]:
    """Return the weight map's rows, each of which maps tensors of a file to one parameter."""
    tensors = {}
    for head in range(config.num_heads):
        for index in range(config.num_layers):
            for name in ("weight", "bias"):
                tensors[f"heads.{head}.blocks.{index}.{name}"] = [f"{head}.{index}.linear.{name}"]
        tensors[f"heads.{head}.output"] = [f"{head}.{config.num_layers}.weight"]
    return rows(medusa_params(config), tensors)
