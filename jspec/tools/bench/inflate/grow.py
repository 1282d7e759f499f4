"""Growing a target and head to a larger shape with equal logits: configs, layer order, weights padded with zeros.

Hidden channels come first in the larger width D. The mean square over D is d/D of the one over d, so a norm's weight is
scaled by sqrt(d/D) and its eps by d/D. Query head m of the group of kv head k keeps its number and group.
Channel i of each half of a head of e channels rotates with theta^(-2i/e), which in a head of E channels is channel
i*E/e of the half. Scores are divided by sqrt(E) instead of sqrt(e), so queries are scaled by sqrt(E/e).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jspec.core.tree import Tree
from jspec.draft.eagle import Eagle3
from jspec.draft.eagle_head import EagleHead, EagleLayer
from jspec.draft.head_config import LEAST_LAYERS, Eagle3Config, HeadConfig, default_states
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.decoder import Layer, Model
from jspec.models.mixers.gqa import GQA
from jspec.models.mlps.mlp_config import Dense
from jspec.models.weights.quantize import quantized_as
from jspec.tools.bench import random_models
from jspec.tools.bench.options import SIZES

LEVEL = 2.0**20  # padded logits are at most -LEVEL / rms of the small model's last state
NEGLIGIBLE = 2.0**-26  # share of a norm's mean square, even of a zero state: below float32's rounding
Config = ModelConfig | HeadConfig


class Factor(NamedTuple):
    """The growth of an axis, or of a factor of its size, from ``old`` to ``new`` entries by zeros.

    The zeros follow the last old entry or, if ``spaced``, each old entry.
    """

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
    def of(cls, old: Config, new: Config) -> Mask:
        """Return the mask channel for growing config ``old`` to ``new``."""
        if new.hidden_size == old.hidden_size:
            raise ValueError(
                f"hidden_size: expected more than the small model's {old.hidden_size}, got {new.hidden_size}: a larger "
                "vocabulary needs one more channel; take a larger shape or --hidden-size, or --vocab-size "
                f"{old.vocab_size}"
            )
        largest = math.sqrt(old.hidden_size * old.norm_eps * NEGLIGIBLE)
        row = LEVEL * math.sqrt(old.hidden_size / new.hidden_size)
        return cls(old.hidden_size, 2.0 ** math.floor(math.log2(largest)), -(2.0 ** math.ceil(math.log2(row))))


@dataclass(frozen=True)
class Padder:
    """A padder of weights, from the sizes of config ``old`` to the sizes of config ``new``."""

    old: Any  # config of the small target or head
    new: Any  # config of the large one
    dtype: str  # dtype of the new weights
    mask: Mask | None

    hidden = property(lambda self: Factor(self.old.hidden_size, self.new.hidden_size))
    vocab = property(lambda self: Factor(self.old.vocab_size, self.new.vocab_size))

    def pad(self, x: Any, *axes: Axis, scale: float = 1.0) -> Array:
        return pad(x, *axes, scale=scale, dtype=self.dtype)

    def embedding(self, weight: Array) -> Array:
        """Return the padded token embedding; every row holds the mask channel's constant."""
        padded = self.pad(weight, (self.vocab,), (self.hidden,))
        return padded if self.mask is None else padded.at[:, self.mask.channel].set(self.mask.constant)

    def norm(self, weight: Array) -> Array:
        """Return the padded weight of a norm over hidden channels."""
        return self.pad(weight, (self.hidden,), scale=math.sqrt(self.hidden.old / self.hidden.new))

    def last_norm(self, weight: Array) -> Array:
        """Return the padded weight of the final norm, which scales the mask channel up to 1."""
        padded = self.norm(weight)
        return padded if self.mask is None else padded.at[self.mask.channel].set(1 / self.mask.constant)

    def output_head(self, weight: Any, rows: Factor) -> Array:
        """Return the padded output head, whose rows of padded tokens read the mask channel."""
        padded = self.pad(weight, (rows,), (self.hidden,))
        return padded if self.mask is None else padded.at[rows.old :, self.mask.channel].set(self.mask.row)

    def block(self, layer: Layer | EagleLayer, inputs: Axis) -> dict[str, Array]:
        """Return a layer's padded attention and feed-forward weights; ``inputs`` is the QKV weight's input axis."""
        inner = Factor(self.old.intermediate_size, self.new.intermediate_size)
        assert layer.mlp_norm is not None
        return dict(
            qkv=self.qkv(layer.qkv, inputs),
            o=self.pad(layer.o, (self.hidden,), self._heads(self._group)),
            mlp_norm=self.norm(layer.mlp_norm),
            gate_up=self.pad(layer.gate_up, (Factor(2, 2), inner), (self.hidden,)),
            down=self.pad(layer.down, (self.hidden,), (inner,)),
        )

    def qkv(self, weight: Any, inputs: Axis) -> Array:
        """Return the padded QKV weight, with queries scaled for the larger head size."""
        old = self.old
        ends = [old.num_heads * old.head_dim, (old.num_heads + old.num_kv_heads) * old.head_dim]
        q, k, v = jnp.split(weight, ends)
        queries = self.pad(q, self._heads(self._group), inputs, scale=math.sqrt(self.new.head_dim / old.head_dim))
        return jnp.concatenate([queries, *(self.pad(part, self._heads(), inputs) for part in (k, v))])

    @property
    def _group(self) -> Factor:
        return Factor(self.old.num_heads // self.old.num_kv_heads, self.new.num_heads // self.new.num_kv_heads)

    def _heads(self, *group: Factor) -> Axis:
        channels = Factor(2, 2), Factor(self.old.head_dim // 2, self.new.head_dim // 2, spaced=True)
        return Factor(self.old.num_kv_heads, self.new.num_kv_heads), *group, *channels


WIDTHS = ("hidden_size", "intermediate_size", "num_kv_heads", "vocab_size")
UNPADDED = ("norm_before_residual", "norm_before_fc", "fc_bias", "qkv_bias", "qk_norm")


# Sizes of the larger target by their names in `ModelConfig`, and ``draft_vocab_size``, how many tokens its head drafts.
# The head's layers get the sizes of the target's; what is not named stays as it is in the small target or head.
Sizes = dict[str, int]


def sizes_of(shape: str) -> dict[str, int]:
    """Return the sizes of a named shape in `random_models`, with its head's draft vocabulary."""
    sizes = {name: getattr(random_models.TARGETS[shape], name) for name in SIZES}
    return sizes | {"draft_vocab_size": random_models.DRAFT_VOCAB[shape]}


@dataclass(frozen=True)
class GrowthPlan:
    """The padders of the target's and head's weights, and the order of the new target's layers."""

    target: Padder
    head: Padder | None
    layer_at: tuple[int | None, ...]  # old index of each new layer; None: an inserted layer


def plan(
    target: Model, sizes: Sizes, *, head: EagleHead | None, feature_layers: tuple[int, ...] | None, dtype: str
) -> GrowthPlan:
    """Check that a target and its head can grow, and return the plan.

    Without a head, the new target's states numbered `default_states` equal the old one's, for a head inflated later.

    Args:
        feature_layers: states of the new target that the new head reads, in the order of the old ones; None: 2, N//2
            and N-3 of N layers if the old head reads these of the old target, else the old numbers.
        dtype: dtype of the new weights, "float32" or "bfloat16".
    """
    if kind := quantized_as((target, head)):
        raise ValueError(f"inflate: expected unquantised weights, got {kind}; inflate first, then quantise")
    old = target.config
    _check_layers(old)
    whole = {name: sizes.get(name, getattr(old, name)) for name in SIZES}
    new = old.resized(**whole, norm_eps=_eps(old, whole), tie_word_embeddings=False)
    _check_sizes("target", old, new)
    padder = Padder(old, new, dtype, Mask.of(old, new) if new.vocab_size > old.vocab_size else None)
    usual = default_states(old.num_layers) if old.num_layers >= LEAST_LAYERS else ()
    if head is not None:
        _check_head(head, target)
    states = usual if head is None else head.config.states_of(old.num_layers)
    wanted = feature_layers or (default_states(new.num_layers) if states and states == usual else states)
    if len(wanted) != len(states):
        raise ValueError(
            f"feature_layers: expected a state for each of {states}, got {wanted}; pass {len(states)} of them"
        )
    layer_at = insert_layers(old.num_layers, new.num_layers, dict(zip(states, wanted, strict=True)))
    if head is None:
        return GrowthPlan(padder, None, layer_at)
    return GrowthPlan(padder, _plan_head(head.config, padder, sizes | whole, wanted), layer_at)


def _check_layers(old: ModelConfig) -> None:
    """Raise ValueError if a layer of the small target computes more than one of Llama, whose weights can be padded."""
    for layer in old.layers:
        heads, kv_heads, dim, rope = old.num_heads, old.num_kv_heads, old.head_dim, old.rope
        mlp = Dense(layer.mlp.width) if isinstance(layer.mlp, Dense) else Dense(old.intermediate_size)
        if layer != LayerConfig(GQA(heads, kv_heads, dim, rope=rope), mlp) or rope.kind not in ("default", "llama3"):
            raise ValueError(
                f"inflate: expected a target with Llama's layers, got {old.family} layers with more; take another"
            )


def _eps(old: Config, sizes: Sizes) -> float:
    return old.norm_eps * old.hidden_size / sizes["hidden_size"]


def _check_sizes(what: str, old: Config, new: Config) -> None:
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
    """Return the old index of each of ``new`` layers, None for an inserted layer; state i becomes ``moved[i]``."""
    # The final norm counts as one more layer: it maps state N to state N + 1.
    layer_at: list[int | None] = []
    fits = True
    for (start, begin), (stop, end) in itertools.pairwise([(0, 0), *sorted(moved.items()), (old + 1, new + 1)]):
        inserted = (end - begin) - (stop - start)
        fits &= inserted >= 0
        layer_at += [*[None] * inserted, *range(start, stop)]
    if not fits or layer_at[-1] != old:
        wanted = ", ".join(f"{state} of {old} -> {new_state} of {new}" for state, new_state in sorted(moved.items()))
        raise ValueError(
            "num_layers: expected room for as many before, between and after the feature layers as in the small one, "
            f"got {old} -> {new} layers with states {wanted or 'none'}; take more layers"
        )
    return tuple(layer_at[:-1])


def _check_head(head: EagleHead, target: Model) -> None:
    """Raise a ValueError unless the head fits the target and has only weights that can be padded."""
    jax.eval_shape(Eagle3(head, Tree.chain(1)).bind, target)  # raises for another target's head
    config = head.config
    assert isinstance(config, Eagle3Config)  # an `Eagle3` drafter was made of it
    has = {name: getattr(config, name) for name in UNPADDED} | {
        "fc_norm with a target of another hidden_size": config.fc_norm
        and config.target_hidden_size != config.hidden_size,  # their norms would need two values of eps
        "no fc": not config.fuse,
        "the target's output head": head.head is None,
        "the state after the final norm": target.config.num_layers + 1 in config.states_of(target.config.num_layers),
    }
    if extras := [name for name, is_there in has.items() if is_there]:
        raise ValueError(
            f"head: expected an EAGLE-3 or 3.1 head with an fc of states before the final norm, an output head and no "
            f"further norms or biases, got {', '.join(extras)}; take a head of that form, as `jspec train` makes it"
        )


def _plan_head(old: HeadConfig, target: Padder, sizes: Sizes, feature_layers: tuple[int, ...]) -> Padder:
    most = old.draft_vocab_size + sizes["vocab_size"] - old.vocab_size  # padded draft tokens are padded target tokens
    drafted = sizes.get("draft_vocab_size") or old.draft_vocab_size
    if not old.draft_vocab_size <= drafted <= most:
        raise ValueError(
            f"draft_vocab_size: expected {old.draft_vocab_size} to {most} for {old.draft_vocab_size} draft tokens and "
            f"a vocabulary of {old.vocab_size} -> {sizes['vocab_size']}, got {drafted}; "
            f"take --draft-vocab-size {old.draft_vocab_size}"
        )
    if drafted > old.draft_vocab_size and isinstance(old, Eagle3Config) and (old.fc_norm or old.norm_output):
        raise ValueError(
            f"draft_vocab_size: expected {old.draft_vocab_size}, as before, for a head that norms its features "
            f"(fc_norm, norm_output), got {drafted}: the norm would scale the mask of padded draft tokens; "
            f"take --draft-vocab-size {old.draft_vocab_size}"
        )
    of_layers = {name: sizes[name] for name in SIZES if name != "num_layers"}
    grown = dict(target_hidden_size=sizes["hidden_size"], norm_eps=_eps(old, sizes), feature_layers=feature_layers)
    new = old.resized(**of_layers, draft_vocab_size=drafted, **grown)
    _check_sizes("head", old, new)
    return Padder(old, new, target.dtype, Mask.of(old, new) if drafted > old.draft_vocab_size else None)
