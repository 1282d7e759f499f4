"""Model shapes to measure with, filled with random weights on the device: speed needs no checkpoint."""

from __future__ import annotations

from typing import Any

from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.head_config import Eagle3Config, HeadConfig
from jspec.models.config import ModelConfig, Rope
from jspec.models.decoder import Model
from jspec.models.params import abstract_weights, model_params, random_weights

LLAMA3 = Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192)

TARGETS = {
    "llama3-8b": ModelConfig.of_sizes(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=LLAMA3,
        tie_word_embeddings=False,
        max_position=131072,
    ),
    "tiny": ModelConfig.of_sizes(
        family="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=192,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=Rope(),
        tie_word_embeddings=False,
        max_position=2048,
    ),
    "least": ModelConfig.of_sizes(  # where the model does not matter
        family="llama",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-5,
        rope=Rope(),
        tie_word_embeddings=False,
        max_position=65536,
    ),
}
DRAFT_VOCAB = {"llama3-8b": 32000, "tiny": 128, "least": 16}


def target_shapes(name: str, dtype: str) -> Any:
    """The weight tree of a target, as shapes."""
    return abstract_weights(model_params(TARGETS[name]), dtype)


def head_config(name: str) -> HeadConfig:
    """An EAGLE-3 head of the official kind for a target shape."""
    c = TARGETS[name]
    return Eagle3Config.of_sizes(
        vocab_size=c.vocab_size,
        draft_vocab_size=DRAFT_VOCAB[name],
        hidden_size=c.hidden_size,
        target_hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        norm_eps=c.norm_eps,
        rope=Rope(),
        feature_layers=None,
        source_format="random",
    )


def head_shapes(name: str, dtype: str) -> Any:
    """The weight tree of its EAGLE-3 head, as shapes."""
    return abstract_weights(head_params(head_config(name)), dtype)


def random_target(name: str, dtype: str, quantize: str | None = None, *, seed: int = 0) -> Model:
    """A target with random weights."""
    return Model.from_weights(TARGETS[name], random_weights(model_params(TARGETS[name]), dtype, seed, quantize))


def random_head(name: str, dtype: str, quantize: str | None = None, *, seed: int = 1) -> EagleHead:
    """Its EAGLE-3 head with random weights: what it drafts is practically never accepted."""
    return EagleHead.from_weights(
        head_config(name), random_weights(head_params(head_config(name)), dtype, seed, quantize)
    )
