"""Model shapes with random weights, made on the device: speed needs no checkpoint."""

from __future__ import annotations

from typing import Any

import jax

from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.head_config import Eagle3Config
from jspec.models.config import ModelConfig, Rope
from jspec.models.decoder import Model
from jspec.models.params import model_params, random_weights

LLAMA3 = Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192)


def _config(vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **more: Any) -> ModelConfig:
    num_heads, num_kv_heads, head_dim = heads
    sizes: dict[str, Any] = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_layers=layers)
    sizes |= dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    return ModelConfig.of_sizes(family="llama", norm_eps=1e-5, tie_word_embeddings=False, **sizes, **more)


TARGETS = {
    "llama3-8b": _config(128256, 4096, 14336, 32, (32, 8, 128), rope=LLAMA3, max_position=131072),
    "tiny": _config(512, 64, 192, 8, (4, 2, 16), rope=Rope(), max_position=65536),
    "least": _config(64, 16, 16, 1, (1, 1, 8), rope=Rope(), max_position=65536),  # for measurements of the host
}
DEFAULT_SHAPE = "default: tiny on a CPU, llama3-8b elsewhere"  # words of the help
DRAFT_VOCAB = {"llama3-8b": 32000, "tiny": 128, "least": 16}


def default_shape() -> str:
    """Return the name of the shape that commands measure by default: a small one on a CPU."""
    return "tiny" if jax.default_backend() == "cpu" else "llama3-8b"


def head_config(name: str) -> Eagle3Config:
    """Return the config of an EAGLE-3 head, as published heads have it, for a named target shape."""
    c = TARGETS[name]
    same = "vocab_size hidden_size intermediate_size num_heads num_kv_heads head_dim norm_eps"
    return Eagle3Config.of_sizes(
        **{size: getattr(c, size) for size in same.split()},
        target_hidden_size=c.hidden_size,
        draft_vocab_size=DRAFT_VOCAB[name],
        rope=Rope(),
        feature_layers=None,
        source_format="random",
    )


def random_target(name: str, dtype: str, quantize: str | None = None, *, seed: int = 0) -> Model:
    """Return a target of a named shape with random weights, quantised if ``quantize`` names a kind."""
    return Model.from_weights(TARGETS[name], random_weights(model_params(TARGETS[name]), dtype, seed, quantize))


def random_head(name: str, dtype: str, quantize: str | None = None, *, seed: int = 1) -> EagleHead:
    """Return a target's EAGLE-3 head with random weights, whose drafts are practically never accepted."""
    config = head_config(name)
    return EagleHead.from_weights(config, random_weights(head_params(config), dtype, seed, quantize))
