"""The memory and the arithmetic that an update of an EAGLE-3 head needs, derived from shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.step.memory import tree_bytes
from jspec.train import observe
from jspec.train.config import TrainConfig

MOMENTS = 3  # float32 copies of a weight that a run keeps: the weight and both moments of AdamW
LOGITS = 3  # float32 copies of a block's logits that exist at a time
PASSES = 3  # products of a gradient, and the forward's; a forward that is computed again is one more


def memory_plan(config: TrainConfig, target: Model, head: EagleHead) -> dict[str, int]:
    """Return the bytes of each part of the memory of an update, by name; the largest ones, others are left out.

    Args:
        config: options of the run.
        target: the target.
        head: the head, as `jspec.train.methods.Method.create` makes it.
    """
    head_config, trained = head.config, replace(head, embed=None, draft_to_target=None)
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    width, tokens = target.embed.dtype.itemsize, config.batch * config.length
    layers = [layer.gqa for layer in head_config.layers]
    kept = head_config.hidden_size + sum(2 * layer.kv_size + layer.q_size for layer in layers)
    states = head_config.num_features * head_config.target_hidden_size + 2 * target.config.hidden_size
    activations = 4 * head_config.intermediate_size + 6 * head_config.hidden_size
    cache = sum(layer.attention.cached_heads * sum(layer.attention.pool_dims) for layer in target.config.layers)
    return {
        "target": tree_bytes(target),
        "weights and moments": 4 * MOMENTS * count,
        "weights in the target's dtype": width * count,
        "gradient": 4 * count,
        "states of the target": width * tokens * states,
        "cache of the target": width * tokens * cache,
        "probabilities of the target": width * tokens * head_config.draft_vocab_size,
        "kept between steps": width * tokens * kept * config.ttt,
        "activations": width * tokens * activations * (config.ttt if config.keep_activations else 1),
        "logits": 4 * LOGITS * min(observe.LOGITS, tokens * head_config.draft_vocab_size),
    }


def head_flops(config: TrainConfig, head: EagleHead) -> float:
    """Return the floating-point operations of the head for one token of an update.

    The gradient computes logits again, and all other products of a step unless activations are kept. Of the scores of a
    row, half are visible on average; their gradient computes them again.
    """
    head_config = head.config
    weights: list[Any] = []
    for layer in head.layers:
        weights += [layer.qkv, layer.o, layer.gate_up, layer.down]
    products = sum(2 * weight.size for weight in weights)
    logits = 2 * head_config.draft_vocab_size * head_config.hidden_size
    scores = sum(4 * layer.gqa.q_size * config.length / 2 for layer in head_config.layers)
    fused = 0 if head.fc is None else 2 * head.fc.size  # type: ignore[union-attr]
    step = (PASSES + (not config.keep_activations)) * products + (PASSES + 1) * logits + PASSES * scores + scores / 2
    return config.ttt * step + PASSES * fused


def target_logit_flops(target: Model, head: EagleHead) -> float:
    """Return the operations of the target's logits for one token: all for the argmax, and those of the draft tokens."""
    return 2 * target.config.hidden_size * (target.config.vocab_size + head.config.draft_vocab_size)
