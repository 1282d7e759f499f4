"""Small pairs of target and head to inflate, and the comparison of a larger model with the small one."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import Model
from jspec.draft.eagle_head import EagleHead
from jspec.models.parts.rope import Rope
from jspec.tools.bench.inflate import convert as inflate
from jspec.tools.bench.inflate import grow
from jspec.tools.replay import run_texts
from tests.support import byte_pair, tiny
from tests.support.arrays import on_device

VOCAB, DRAFTED, LAYERS = 40, 12, 7
SIZES = dict(
    hidden_size=40,
    intermediate_size=48,
    num_layers=12,
    num_heads=18,
    num_kv_heads=3,
    head_dim=8,
    vocab_size=64,
    draft_vocab_size=16,
)
TOLERANCE = 1e-4  # relative to the largest value
LLAMA3 = Rope(
    theta=500.0, kind="llama3", factor=8.0, original_max_position=64
)  # the scaling changes some of the few channels
# Few layers, to compile quickly; larger in every size.
BYTE_SIZES = dict(zip(SIZES, (96, 208, 9, 9, 3, 32, 300, 100), strict=True))
TEXT = (byte_pair.PROMPT * 3).encode()[:96]


def target(*, kv_heads: int = 2, rope: Rope = LLAMA3, tied: bool = False) -> Model:
    """Return a random target with an eps so large that it changes the norms."""
    model = tiny.model(VOCAB, layers=LAYERS)
    own = model.config.resized(
        num_kv_heads=kv_heads, rope=rope, tie_word_embeddings=tied, norm_eps=0.1, max_position=64
    )
    rows = (own.num_heads + 2 * kv_heads) * own.head_dim
    layers = [layer.replace(qkv=jnp.resize(layer.qkv, (rows, own.hidden_size))) for layer in model.layers]
    return model.replace(layers=layers, head=None if tied else model.head, config=own)


def head_of(model: Model, **changes: Any) -> EagleHead:
    """Return a random EAGLE-3 head that reads the default hidden states; ``changes`` are fields of its config."""
    fields = dict(feature_layers=grow.default_states(LAYERS), norm_eps=0.05) | changes
    head = tiny.eagle_head(model, draft_vocab=DRAFTED, **fields)
    rng = np.random.default_rng(4)  # norms unlike 1
    return jax.tree.map(lambda x: x * rng.uniform(0.5, 1.5, x.shape) if (x == 1).all() else x, head)


def tokens(vocab: int = VOCAB) -> jax.Array:
    return on_device(np.random.default_rng(3).integers(0, vocab, (1, 48)), jnp.int32)


class Match(NamedTuple):
    """The differences between a larger target's values and the small one's, relative to the largest value."""

    logits: float
    margin: float  # least logit of a real token minus the largest logit of a padding token
    features: float

    @property
    def same(self) -> bool:
        return self.logits < TOLERANCE and self.features < TOLERANCE and self.margin > 100


def compare(small: Model, large: Model, states: tuple[int, ...], new_states: tuple[int, ...], text: jax.Array) -> Match:
    vocab, hidden = small.config.vocab_size, small.config.hidden_size
    one, other = run_texts(small, text, states), run_texts(large, text, new_states)
    logits, features = np.asarray(one.logits), np.asarray(one.features).reshape(-1, hidden)
    large_logits = np.asarray(other.logits)
    large_features = np.asarray(other.features).reshape(-1, large.config.hidden_size)[:, :hidden]
    assert np.isfinite(large_logits).all()
    return Match(
        logits=np.abs(large_logits[..., :vocab] - logits).max() / np.abs(logits).max(),
        margin=(logits.min() - large_logits[..., vocab:]).min(initial=np.inf),
        features=np.abs(large_features - features).max() / np.abs(features).max(),
    )


@cache
def byte_models() -> tuple[Model, EagleHead]:
    return tiny.load_target(byte_pair.TARGET), tiny.load_head(byte_pair.HEAD)


@cache
def large_pair() -> tuple[Model, EagleHead]:
    small, head = byte_models()
    large, large_head = inflate.grow_pair(small, BYTE_SIZES, head=head)
    assert large_head is not None
    return large, large_head


def text_tokens() -> jax.Array:
    return on_device(np.frombuffer(TEXT, np.uint8).astype(np.int32))[None]
