"""The methods of drafting that can be trained: which head is made, what of it is trained, by which loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from convert.orbax import unflatten
from jspec.draft.dflash import DFlash
from jspec.draft.dflash_head import DFlashHead
from jspec.draft.dspark import DSpark
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.formats.dflash_format import head_params as block_params
from jspec.draft.head_config import LEAST_LAYERS, DFlashConfig, DSparkConfig, Eagle3Config, default_states
from jspec.draft.medusa import Medusa, MedusaConfig, MedusaHeads, medusa_params
from jspec.models.decoder import Model
from jspec.models.parts.rope import Rope
from jspec.train import dflash, dspark, eagle3, medusa, write
from jspec.train.blocks import choose_blocks, spread_states
from jspec.train.copied import copied
from jspec.train.measured import Measured
from jspec.train.method import (
    Files,
    Method,
    at_most,
    in_float32,
    random_weights,
    refuse_quantized,
    target_rows,
    target_sizes,
)
from jspec.train.observe import Observed
from jspec.train.rows import Rows
from pallas_kernels.layers.weights import Quantized

Found = tuple[Float[Array, ""], Measured]
BLOCK_LAYERS, EAGLE_LAYERS, MEDUSA_BLOCKS = 5, 1, 1  # default numbers of layers
MARKOV_RANK = 256  # default channels of a Markov head
ANCHORS = 8  # one anchor for this many tokens of a row, by default
FIXED: dict[str, Any] = {"tree": "chain:1", "dtype": "float32"}  # options that load a head to go on with


def check_depth(drafted: int, ttt: int, source: str = "init") -> None:
    """Raise ValueError if a head to go on with drafts another number of tokens than the loss is to cover.

    Args:
        drafted: number of tokens that the head drafts.
        ttt: number of tokens that the loss covers.
        source: the argument that has the head, for the error.
    """
    if drafted != ttt:
        raise ValueError(f"train: ttt: expected {drafted}, which the head of {source} drafts, got {ttt}")


def fused_states(layers: int) -> tuple[int, ...]:
    """Return the target's states that a new EAGLE-3 head reads by default.

    They are those of the method's authors in targets in which these differ.
    """
    if layers >= LEAST_LAYERS:
        return default_states(layers)
    return layers // 4, max(1, layers // 2), max(2, layers)


class Eagle3Method(Method):
    """EAGLE-3 heads, and those of EAGLE-3.1 (arXiv:2503.01840)."""

    frozen = ("embed", "draft_to_target")
    has_vocabulary = True

    def new_states(self, target: Model) -> tuple[int, ...]:
        return self.config.feature_layers or fused_states(target.config.num_layers)

    def create(self, target: Model, ids: Int[np.ndarray, "draft_vocab"]) -> EagleHead:
        config = self.config
        head_config = Eagle3Config.of_sizes(
            **target_sizes(target, config),
            num_layers=config.layers or EAGLE_LAYERS,
            rope=Rope(theta=config.rope_theta),
            draft_vocab_size=len(ids),
            feature_layers=self.new_states(target),
            fc_norm=config.eagle31,
            norm_output=config.eagle31,
        )
        weights = random_weights(head_params(head_config), config.seed)
        weights = copied(weights, head_config, target) if config.copy_layers else weights
        weights |= {"head": target_rows(target, ids), "draft_to_target": jnp.asarray(ids, jnp.int32)}
        return EagleHead.from_weights(head_config, unflatten({"embed": target.embed, **weights}))

    def load(self, path: str | Path, target: Model) -> EagleHead:
        drafter = Eagle3.from_pretrained(path, **FIXED)
        refuse_quantized("train: init", path, replace(drafter.head, embed=None))
        return self.with_shared(drafter, target)

    @staticmethod
    def with_shared(drafter: Eagle3, target: Model) -> EagleHead:
        head = drafter.with_shared(target)
        return replace(head, head=in_float32(head.head)) if isinstance(head.head, Quantized) else head

    def states(self, head: EagleHead, target: Model) -> tuple[int, ...]:
        return head.config.states_of(target.config.num_layers)

    def loss(self, head: EagleHead, target: Model, seen: Observed, rows: Rows, keys: Array) -> Found:
        config = self.config
        options = eagle3.Eagle3Loss(config.ttt, config.decay, config.loss, config.keep_activations)
        return eagle3.loss(head, target, seen, rows, options)

    def files(self, head: EagleHead, target: Model, tokens: Mapping[str, Any]) -> Files:
        dtype = str(target.embed.dtype)
        return write.eagle3_files(head, target.config, dtype, self.config.length, tokens)


class DFlashMethod(Method):
    """DFlash heads (arXiv:2602.06036), with the target's embedding and output head."""

    frozen = ("embed", "head", "draft_to_target")
    drafter: ClassVar[type[DFlash]] = DFlash

    @property
    def anchors(self) -> int:
        """The number of anchors of a row."""
        return self.config.anchors or max(1, self.config.length // ANCHORS)

    @property
    def gamma(self) -> float:
        """The number of depths over which the weight of a loss falls by e; the paper takes about half a block."""
        return self.config.gamma or (self.config.ttt + 1) / 2

    def columns(self, rows: int) -> int:
        return rows * self.anchors

    def new_states(self, target: Model) -> tuple[int, ...]:
        return self.config.feature_layers or spread_states(target.config.num_layers, BLOCK_LAYERS)

    def check(self, target: Model) -> None:
        super().check(target)
        at_most(self.config, "mask_token", target.config.vocab_size - 1, "the last id of the target's vocabulary")

    def head_config(self, target: Model) -> DFlashConfig:
        """Return the config of a new head."""
        return DFlashConfig.of_sizes(**self._fields(target), block_size=self.config.ttt + 1)

    def _fields(self, target: Model) -> dict[str, Any]:
        config, vocab = self.config, target.config.vocab_size
        return target_sizes(target, config) | dict(
            num_layers=config.layers or BLOCK_LAYERS,
            rope=Rope(theta=config.rope_theta),
            qk_norm="head",
            draft_vocab_size=vocab,
            feature_layers=self.new_states(target),
            mask_token_id=vocab - 1 if config.mask_token is None else config.mask_token,
        )

    def create(self, target: Model, ids: Int[np.ndarray, "draft_vocab"]) -> DFlashHead:
        config = self.head_config(target)
        weights = random_weights(block_params(config), self.config.seed)
        return self.drafter.weights_type.from_weights(config, unflatten(weights))

    def load(self, path: str | Path, target: Model) -> DFlashHead:
        drafter = self.drafter.from_pretrained(path, **FIXED)
        refuse_quantized("train: init", path, drafter.head)
        check_depth(drafter.head.config.max_depth, self.config.ttt)
        return self.with_shared(drafter, target)

    @staticmethod
    def with_shared(drafter: DFlash, target: Model) -> DFlashHead:
        """Return the head, whose loss reads the target's embedding and output head of the target itself."""
        embed = target.embed.astype(drafter.head.hidden_norm.dtype)
        jax.eval_shape(drafter.bind, replace(target, embed=embed))  # raises if they do not fit
        return drafter.head

    def states(self, head: DFlashHead, target: Model) -> tuple[int, ...]:
        return head.config.states_of(target.config.num_layers)

    predict: ClassVar[Callable[..., tuple[Array, Array]]] = staticmethod(dflash.predict)

    def loss(self, head: Any, target: Model, seen: Observed, rows: Rows, keys: Array) -> Found:
        blocks = choose_blocks(rows, seen.choices, keys, self.anchors, self.config.ttt)
        return dflash.weighted(*self.predict(head, target, seen, rows, blocks), blocks, self.gamma)

    def files(self, head: DFlashHead, target: Model, tokens: Mapping[str, Any]) -> Files:
        dtype = str(target.embed.dtype)
        return write.block_files(head, target.config, dtype, self.config.length, tokens)


class DSparkMethod(DFlashMethod):
    """DSpark heads (arXiv:2607.05147), whose anchor drafts too."""

    drafter = DSpark
    predict = staticmethod(dspark.predict)

    @property
    def gamma(self) -> float:
        return self.config.gamma or float(self.config.ttt)

    def check(self, target: Model) -> None:
        super().check(target)
        at_most(self.config, "markov_rank", target.config.hidden_size, "the channels of a hidden state")

    def head_config(self, target: Model) -> DSparkConfig:
        rank = self.config.markov_rank or min(MARKOV_RANK, target.config.hidden_size)
        return DSparkConfig.of_sizes(**self._fields(target), block_size=self.config.ttt, markov_rank=rank)


class MedusaMethod(Method):
    """Medusa heads (arXiv:2401.10774), one for each draft token."""

    field = "heads"
    weights_file = "medusa_lm_head.safetensors"

    def new_states(self, target: Model) -> tuple[int, ...]:
        return ()

    def create(self, target: Model, ids: Int[np.ndarray, "draft_vocab"]) -> MedusaHeads:
        config = MedusaConfig(
            vocab_size=target.config.vocab_size,
            hidden_size=target.config.hidden_size,
            num_heads=self.config.ttt,
            num_layers=self.config.layers or MEDUSA_BLOCKS,
            source_format="jspec",
        )
        weights = {name: jnp.zeros(spec.shape) for name, spec in medusa_params(config).items()}
        output = target_rows(target, ids)  # the heads begin as the target's own prediction
        weights |= {name: jnp.array(output) for name in weights if name.endswith(".output")}
        return MedusaHeads.from_weights(config, unflatten(weights))

    def load(self, path: str | Path, target: Model) -> MedusaHeads:
        heads = self.with_shared(Medusa.from_pretrained(path, **FIXED), target)
        check_depth(heads.config.num_heads, self.config.ttt)
        return heads

    @staticmethod
    def with_shared(drafter: Medusa, target: Model) -> MedusaHeads:
        return drafter.bind(target)

    def states(self, head: MedusaHeads, target: Model) -> tuple[int, ...]:
        return ()

    def loss(self, head: MedusaHeads, target: Model, seen: Observed, rows: Rows, keys: Array) -> Found:
        return medusa.loss(head, seen, rows, self.config.decay)

    def files(self, head: MedusaHeads, target: Model, tokens: Mapping[str, Any]) -> Files:
        return write.medusa_files(head, str(target.embed.dtype))


METHODS: dict[str, type[Method]] = {
    "eagle3": Eagle3Method,
    "dflash": DFlashMethod,
    "dspark": DSparkMethod,
    "medusa": MedusaMethod,
}
