"""Growing a target and head to a larger shape with equal logits: configs, layer order, weights padded with zeros.

Hidden channels come first in the larger width D. The mean square over D is d/D of the one over d, so a norm's weight is
scaled by sqrt(d/D) and its eps by d/D. Query head m of the group of kv head k keeps its number and group.
Channel i of each half of a head of e channels rotates with theta^(-2i/e), which in a head of E channels is channel
i*E/e of the half. Scores are divided by sqrt(E) instead of sqrt(e), so queries are scaled by sqrt(E/e).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead, EagleLayer
from jspec.draft.head_config import Eagle3Config, HeadConfig, default_states
from jspec.models.config import ModelConfig
from jspec.models.decoder import Layer, Model
from jspec.models.quantize import quantized_as
from jspec.tools.bench import random_models
from pallas_kernels.layers.quantized import Quantized

LEVEL = 2.0**20  # padded logits are at most -LEVEL / rms of the small model's last state
NEGLIGIBLE = 2.0**-26  # share of a norm's mean square, even of a zero state: below float32's rounding
C = TypeVar("C", ModelConfig, Eagle3Config)


class Factor(NamedTuple):
    """Growth of one factor of an axis from ``old`` to ``new`` entries; zeros follow all or, if ``spaced``, each."""

    old: int
    new: int
    spaced: bool = False

    @property
    def padding(self) -> tuple[int, int, int]:
        """Return the number of zeros before, after and between entries, for `jax.lax.pad`."""
        gap = self.new // self.old - 1
        return (0, gap, gap) if self.spaced else (0, self.new - self.old, 0)


Axis = tuple[Factor, ...]  # outermost first


def pad(x: Array, *axes: Axis, scale: float = 1.0, dtype: str) -> Array:
    """Return a weight padded with zeros along its axes, scaled in float32 and rounded once to ``dtype``."""
    factors = [factor for axis in axes for factor in axis]
    small = (x.astype(jnp.float32) * scale).astype(dtype).reshape([factor.old for factor in factors])
    large = jax.lax.pad(small, jnp.zeros((), dtype), [factor.padding for factor in factors])
    return large.reshape([math.prod(factor.new for factor in axis) for axis in axes])


@dataclass(frozen=True)
class Mask:
    """A hidden channel that keeps logits of padded tokens far below all others; the output head has no bias for it.

    The channel follows the old ones. It holds a constant from the embedding on, which no layer reads or writes; the
    last norm scales it up to 1, and the output head's rows of padded tokens read it.
    """

    channel: int  # index of the hidden channel
    constant: float  # value of the channel in every embedding; power of two, negligible for every norm
    row: float  # weight of the channel in the output head's padded rows; power of two, negative

    @classmethod
    def of(cls, old: ModelConfig | HeadConfig, new: ModelConfig | HeadConfig) -> Mask:
        """Return the mask channel for growing config ``old`` to ``new``."""
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
    """Functions that pad each kind of weight from the sizes of config ``old`` to those of ``new``."""

    old: C
    new: C
    dtype: str  # dtype of the new weights
    mask: Mask | None

    hidden = property(lambda self: Factor(self.old.hidden_size, self.new.hidden_size))
    vocab = property(lambda self: Factor(self.old.vocab_size, self.new.vocab_size))

    def pad(self, x: Array | Quantized, *axes: Axis, scale: float = 1.0) -> Array:
        assert not isinstance(x, Quantized)
        return pad(x, *axes, scale=scale, dtype=self.dtype)

    def embedding(self, weight: Array) -> Array:
        """Return the padded token embedding; every row holds the mask channel's constant."""
        padded = self.pad(weight, (self.vocab,), (self.hidden,))
        return padded if self.mask is None else padded.at[:, self.mask.channel].set(self.mask.constant)

    def norm(self, weight: Array, axis: Axis | None = None) -> Array:
        """Return the padded weight of a norm over hidden channels, or over an axis that grows by the same factor."""
        return self.pad(weight, axis or (self.hidden,), scale=math.sqrt(self.hidden.old / self.hidden.new))

    def last_norm(self, weight: Array) -> Array:
        """Return the padded weight of the final norm, which scales the mask channel up to 1."""
        padded = self.norm(weight)
        return padded if self.mask is None else padded.at[self.mask.channel].set(1 / self.mask.constant)

    def output_head(self, weight: Array | Quantized, rows: Factor) -> Array:
        """Return the padded output head, whose rows of padded tokens read the mask channel."""
        padded = self.pad(weight, (rows,), (self.hidden,))
        return padded if self.mask is None else padded.at[rows.old :, self.mask.channel].set(self.mask.row)

    def block(self, layer: Layer | EagleLayer, inputs: Axis, *, normed: bool = False) -> dict[str, Array]:
        """Return a layer's padded attention (``inputs`` columns) and feed-forward weights; ``normed`` as in `qkv`."""
        inner = Factor(self.old.intermediate_size, self.new.intermediate_size)
        return dict(
            qkv=self.qkv(layer.qkv, inputs, normed=normed),
            o=self.pad(layer.o, (self.hidden,), self._heads(self._group)),
            mlp_norm=self.norm(layer.mlp_norm),
            gate_up=self.pad(layer.gate_up, (Factor(2, 2), inner), (self.hidden,)),
            down=self.pad(layer.down, (self.hidden,), (inner,)),
        )

    def qkv(self, x: Array | Quantized, *inputs: Axis, normed: bool = False) -> Array:
        """Return the padded QKV weight or bias; ``normed``: heads are normed, so scale matters only beside eps."""
        old, scale = self.old, math.sqrt(self.new.head_dim / self.old.head_dim)
        ends = [old.num_heads * old.head_dim, (old.num_heads + old.num_kv_heads) * old.head_dim]
        assert not isinstance(x, Quantized)
        q, k, v = jnp.split(x, ends)
        kept = scale * math.sqrt(self.hidden.old / self.hidden.new)
        queries = self.pad(q, self._heads(self._group), *inputs, scale=kept if normed else scale)
        keys = self.pad(k, self._heads(), *inputs, scale=kept if normed else 1.0)
        return jnp.concatenate([queries, keys, self.pad(v, self._heads(), *inputs)])

    def head_norms(self, q_norm: Array, k_norm: Array) -> dict[str, Array]:
        """Return padded norm weights of query and key heads; the scales of width and scores cancel for queries."""
        shrunk = math.sqrt(self.old.head_dim / self.new.head_dim)
        return dict(q_norm=self.pad(q_norm, self._channels), k_norm=self.pad(k_norm, self._channels, scale=shrunk))

    @property
    def _group(self) -> Factor:
        return Factor(self.old.num_heads // self.old.num_kv_heads, self.new.num_heads // self.new.num_kv_heads)

    @property
    def _channels(self) -> Axis:
        return Factor(2, 2), Factor(self.old.head_dim // 2, self.new.head_dim // 2, spaced=True)

    def _heads(self, *group: Factor) -> Axis:
        return Factor(self.old.num_kv_heads, self.new.num_kv_heads), *group, *self._channels


DTYPES = ("float32", "bfloat16")  # float16 has too few exponents for the padded vocabulary's mask
WIDTHS = ("hidden_size", "intermediate_size", "num_kv_heads", "vocab_size")
LEAST_LAYERS = 7  # least number of layers whose default states differ


@dataclass(frozen=True)
class Sizes:
    """Sizes of the larger target, named as in `ModelConfig`; the head's layers get the same sizes."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int | None = None  # tokens that the head can draft; None: as many as the old head

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if size is not None and size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}; take a larger one")

    @classmethod
    def of(cls, shape: str) -> Sizes:
        """Return the sizes of a named shape in `random_models`, with its head's draft vocabulary."""
        known = random_models.TARGETS
        if shape not in known:
            raise ValueError(f"shape: expected one of {', '.join(known)}, got {shape!r}; pass one of them")
        own = {name: getattr(known[shape], name) for name in NAMES}
        return cls(**own, draft_vocab_size=random_models.DRAFT_VOCAB[shape])

    def of_layers(self) -> dict[str, Any]:
        """Return the sizes that the configs of target and head share: all but the number of layers."""
        return {name: getattr(self, name) for name in NAMES if name != "num_layers"}


NAMES = tuple(field.name for field in dataclasses.fields(Sizes) if field.name != "draft_vocab_size")


@dataclass(frozen=True)
class Plan:
    """Padding of the target's and head's weights, and the order of the new target's layers."""

    target: Padder[ModelConfig]
    head: Padder[Eagle3Config] | None
    layer_at: tuple[int | None, ...]  # old index of each new layer; None: an inserted layer


def plan(
    target: Model, sizes: Sizes, *, head: EagleHead | None, feature_layers: tuple[int, ...] | None, dtype: str
) -> Plan:
    """Check that a target and head can grow and return the plan; arguments as for `convert.pair`.

    Without a head, the new target's states numbered `default_states` equal the old one's, for a head inflated later.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}; pass one of them")
    if kind := quantized_as((target, head)):
        raise ValueError(f"inflate: expected unquantised weights, got {kind}; inflate first, then quantise")
    if head is not None:
        jax.eval_shape(Eagle3(head, Tree.chain(1)).bind, target)  # raises for another target's head
    old = target.config
    grown = dict(num_layers=sizes.num_layers, norm_eps=_eps(old, sizes), tie_word_embeddings=False)
    new = old.resized(**sizes.of_layers(), **grown)
    _check_sizes("target", old, new)
    padder = Padder(old, new, dtype, Mask.of(old, new) if new.vocab_size > old.vocab_size else None)
    usual = default_states(old.num_layers) if old.num_layers >= LEAST_LAYERS else ()
    states = usual if head is None else head.config.states_of(old.num_layers)
    if (wanted := feature_layers) is None:  # the state after the final norm is that of the larger target
        moved = tuple(new.num_layers + 1 if state == old.num_layers + 1 else state for state in states)
        wanted = default_states(new.num_layers) if states and states == usual else moved
    if len(wanted) != len(states):
        raise ValueError(
            f"feature_layers: expected a state for each of {states}, got {wanted}; pass {len(states)} of them"
        )
    layer_at = insert_layers(old.num_layers, new.num_layers, dict(zip(states, wanted, strict=True)))
    return Plan(padder, None if head is None else _plan_head(head, padder, sizes, wanted), layer_at)


def _eps(old: ModelConfig | HeadConfig, sizes: Sizes) -> float:
    return old.norm_eps * old.hidden_size / sizes.hidden_size


def _check_sizes(what: str, old: ModelConfig | HeadConfig, new: ModelConfig | HeadConfig) -> None:
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in WIDTHS]
    pairs.append(("num_heads / num_kv_heads", old.num_heads // old.num_kv_heads, new.num_heads // new.num_kv_heads))
    for name, least, got in pairs:
        if got < least:
            raise ValueError(f"{what}: {name}: expected at least the small one's {least}, got {got}; take a larger one")
    if new.head_dim % old.head_dim:
        raise ValueError(
            f"{what}: head_dim: expected a multiple of {old.head_dim}, in which every channel keeps its rotary speed, "
            f"got {new.head_dim}; take a multiple"
        )


def insert_layers(old: int, new: int, moved: Mapping[int, int]) -> tuple[int | None, ...]:
    """Return the old index of each of ``new`` layers, None for an inserted one; state i becomes ``moved[i]``."""
    # The final norm counts as one more layer: it maps state N to state N + 1.
    layer_at: list[int | None] = []
    fits = True
    for (start, begin), (stop, end) in itertools.pairwise([(0, 0), *sorted(moved.items()), (old + 1, new + 1)]):
        inserted = (end - begin) - (stop - start)
        fits &= inserted >= 0
        layer_at += [*[None] * inserted, *range(start, stop)]
    if not fits or layer_at[-1] != old:
        wanted = ", ".join(f"{state} of {old} -> {place} of {new}" for state, place in sorted(moved.items()))
        raise ValueError(
            "layers: expected room for as many before, between and after the feature layers as in the small target, "
            f"got {old} -> {new} layers with states {wanted or 'none'}; take more layers or other feature layers"
        )
    return tuple(layer_at[:-1])


def _plan_head(
    head: EagleHead, target: Padder[ModelConfig], sizes: Sizes, feature_layers: tuple[int, ...]
) -> Padder[Eagle3Config]:
    old = head.config
    assert isinstance(old, Eagle3Config)  # an `Eagle3` drafter was made of it
    grown = dict(target_hidden_size=sizes.hidden_size, norm_eps=_eps(old, sizes), feature_layers=feature_layers)
    new = old.resized(**sizes.of_layers(), draft_vocab_size=_draft_vocab(head, sizes), **grown)
    _check_sizes("head", old, new)
    if (old.norm_before_fc or old.fc_norm) and old.target_hidden_size != old.hidden_size:  # eps depends on the width
        raise ValueError(
            f"head: expected features that are normed before fc as wide as its own state ({old.hidden_size}), as all "
            f"norms share one eps, got {old.target_hidden_size}; take a head without norm_before_fc and fc_norm"
        )
    if target.mask is not None and target.new.num_layers + 1 in feature_layers:
        raise ValueError(
            "feature_layers: expected states before the final norm, which scales up the padded vocabulary's mask, "
            f"got state {target.old.num_layers + 1} among them; keep the vocabulary of {target.old.vocab_size}"
        )
    if new.draft_vocab_size == old.draft_vocab_size:
        return Padder(old, new, target.dtype, None)
    wrong = [n for n in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm") if getattr(old, n)]
    if wrong:
        raise ValueError(
            f"draft_vocab_size: expected {old.draft_vocab_size} for a head with {', '.join(wrong)}, whose normed "
            "features carry no constant that masks padded draft tokens, got a larger one; pass that"
        )
    mask = Mask.of(old, new) if old.fuse else target.mask  # without fc the feature is the target's state
    return Padder(old, new, target.dtype, mask)


def _draft_vocab(head: EagleHead, sizes: Sizes) -> int:
    """Return the new draft vocabulary's size; its padded tokens map to padded tokens of the target."""
    config, shared = head.config, head.head is None  # shared: the output head is the target's
    most = config.draft_vocab_size + sizes.vocab_size - config.vocab_size
    least = most if shared else config.draft_vocab_size
    wanted = sizes.draft_vocab_size or (sizes.vocab_size if shared else config.draft_vocab_size)
    if not least <= wanted <= most:
        raise ValueError(
            f"draft_vocab_size: expected {least} to {most} for {config.draft_vocab_size} draft tokens and a vocabulary "
            f"of {config.vocab_size} -> {sizes.vocab_size}, got {wanted}; pass another"
        )
    return wanted
