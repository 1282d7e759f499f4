"""A decoder layer's weights padded with zeros to a larger layer that computes the same.

Hidden channels come first in the larger width D. The mean square over D is d/D of that over d, so a norm's weight is
scaled by sqrt(d/D) and its eps by d/D. Query head m of the group of kv head k stays that. Channel i of each half of a
head of e channels rotates with theta^(-2i/e), which in a head of E channels is channel i*E/e of the half. Scores are
divided by sqrt(E) instead of sqrt(e), so queries are scaled by sqrt(E/e).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.draft.eagle_head import EagleLayer
from jspec.draft.head_config import Eagle3Config, HeadConfig
from jspec.models.config import ModelConfig
from jspec.models.decoder import Layer
from pallas_kernels.layers.quantized import Quantized

LEVEL = 2.0**20  # padded logits are at most -LEVEL / rms of the small model's last state
NEGLIGIBLE = 2.0**-26  # share of a norm's mean square, even of a zero state: below float32's rounding
C = TypeVar("C", ModelConfig, Eagle3Config)


class Factor(NamedTuple):
    """A factor of an axis: ``old`` entries become ``new``, with zeros after all of them or, if spaced, after each."""

    old: int
    new: int
    spaced: bool = False

    @property
    def padding(self) -> tuple[int, int, int]:
        """Zeros before, after and between, as `jax.lax.pad` takes them."""
        gap = self.new // self.old - 1
        return (0, gap, gap) if self.spaced else (0, self.new - self.old, 0)


Axis = tuple[Factor, ...]  # outermost first


def pad(x: Array, *axes: Axis, scale: float = 1.0, dtype: str) -> Array:
    """The weight with zeros along its axes, scaled in float32 and rounded once."""
    factors = [factor for axis in axes for factor in axis]
    small = (x.astype(jnp.float32) * scale).astype(dtype).reshape([factor.old for factor in factors])
    large = jax.lax.pad(small, jnp.zeros((), dtype), [factor.padding for factor in factors])
    return large.reshape([math.prod(factor.new for factor in axis) for axis in axes])


@dataclass(frozen=True)
class Mask:
    """A channel that keeps the logits of padded tokens far below all others, as the output head has no bias.

    The channel follows the old ones. It holds a constant from the embedding on, which no layer reads or writes; the
    last norm scales it up to 1, and the output head's rows of padded tokens read it.
    """

    channel: int
    constant: float  # power of two, negligible for every norm
    row: float  # power of two, entry of the output head's padded rows

    @classmethod
    def of(cls, old: ModelConfig | HeadConfig, new: ModelConfig | HeadConfig) -> Mask:
        """The mask between two hidden sizes."""
        if new.hidden_size == old.hidden_size:
            raise ValueError(
                f"hidden_size: expected more than {old.hidden_size}, of which a channel masks the padded vocabulary, "
                f"got {new.hidden_size}; take a larger one, or keep the vocabulary"
            )
        largest = math.sqrt(old.hidden_size * old.norm_eps * NEGLIGIBLE)
        row = LEVEL * math.sqrt(old.hidden_size / new.hidden_size)
        return cls(old.hidden_size, 2.0 ** math.floor(math.log2(largest)), -(2.0 ** math.ceil(math.log2(row))))


@dataclass(frozen=True)
class Padder(Generic[C]):
    """Pads weights from the sizes of one config to those of another."""

    old: C
    new: C
    dtype: str  # dtype of the new weights
    mask: Mask | None

    @property
    def hidden(self) -> Factor:
        return Factor(self.old.hidden_size, self.new.hidden_size)

    @property
    def vocab(self) -> Factor:
        return Factor(self.old.vocab_size, self.new.vocab_size)

    def pad(self, x: Array | Quantized, *axes: Axis, scale: float = 1.0) -> Array:
        assert not isinstance(x, Quantized)
        return pad(x, *axes, scale=scale, dtype=self.dtype)

    def embedding(self, weight: Array) -> Array:
        """The target's embedding; every row holds the masking constant."""
        padded = self.pad(weight, (self.vocab,), (self.hidden,))
        return padded if self.mask is None else padded.at[:, self.mask.channel].set(self.mask.constant)

    def norm(self, weight: Array, axis: Axis | None = None) -> Array:
        """The weight of a norm over hidden channels, or over another axis that grows by the same factor."""
        old, new = self.hidden.old, self.hidden.new
        return self.pad(weight, axis or (self.hidden,), scale=math.sqrt(old / new))

    def last_norm(self, weight: Array) -> Array:
        """The weight of the norm before the output head."""
        padded = self.norm(weight)
        return padded if self.mask is None else padded.at[self.mask.channel].set(1 / self.mask.constant)

    def output_head(self, weight: Array | Quantized, rows: Factor) -> Array:
        """The output head over a larger vocabulary."""
        padded = self.pad(weight, (rows,), (self.hidden,))
        return padded if self.mask is None else padded.at[rows.old :, self.mask.channel].set(self.mask.row)

    def block(self, layer: Layer | EagleLayer, inputs: Axis, *, normed: bool = False) -> dict[str, Array]:
        """Attention with these inputs, and feed-forward; ``normed`` as for `qkv`."""
        inner = Factor(self.old.intermediate_size, self.new.intermediate_size)
        return dict(
            qkv=self.qkv(layer.qkv, inputs, normed=normed),
            o=self.pad(layer.o, (self.hidden,), self._heads(self._group)),
            mlp_norm=self.norm(layer.mlp_norm),
            gate_up=self.pad(layer.gate_up, (Factor(2, 2), inner), (self.hidden,)),
            down=self.pad(layer.down, (self.hidden,), (inner,)),
        )

    def qkv(self, x: Array | Quantized, *inputs: Axis, normed: bool = False) -> Array:
        """The fused projection, or its bias; ``normed``: heads are normed, their scale matters only relative to eps."""
        old, scale = self.old, math.sqrt(self.new.head_dim / self.old.head_dim)
        ends = [old.num_heads * old.head_dim, (old.num_heads + old.num_kv_heads) * old.head_dim]
        assert not isinstance(x, Quantized)
        q, k, v = jnp.split(x, ends)
        kept = scale * math.sqrt(self.hidden.old / self.hidden.new)
        queries = self.pad(q, self._heads(self._group), *inputs, scale=kept if normed else scale)
        keys = self.pad(k, self._heads(), *inputs, scale=kept if normed else 1.0)
        return jnp.concatenate([queries, keys, self.pad(v, self._heads(), *inputs)])

    def head_norms(self, q_norm: Array, k_norm: Array) -> dict[str, Array]:
        """The weights of the norms of query and key heads; the queries' include the scale of the scores."""
        shrunk = math.sqrt(self.old.head_dim / self.new.head_dim)
        return dict(q_norm=self.pad(q_norm, self._channels), k_norm=self.pad(k_norm, self._channels, scale=shrunk))

    @property
    def _group(self) -> Factor:
        old, new = (c.num_heads // c.num_kv_heads for c in (self.old, self.new))
        return Factor(old, new)

    @property
    def _channels(self) -> Axis:
        return Factor(2, 2), Factor(self.old.head_dim // 2, self.new.head_dim // 2, spaced=True)

    def _heads(self, *group: Factor) -> Axis:
        return Factor(self.old.num_kv_heads, self.new.num_kv_heads), *group, *self._channels
