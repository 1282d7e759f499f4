"""Describes in words what the layers of a model or of a draft head compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from jspec.models.config import DecoderConfig, ModelConfig
from jspec.models.layer_config import GQA, MLA, LayerConfig
from jspec.models.mlp_config import Dense, Experts
from jspec.models.rope import Rope

NORMS = {
    "pre": "before attention and feed-forward",
    "post": "after attention and feed-forward",
    "both": "before and after attention and feed-forward",
}
QK_NORMS = {"head": "each head", "unit": "each head, without weights", "all": "all heads together"}


def describe_layers(config: DecoderConfig) -> list[str]:
    """Return one line for each part of the layers, which says how many layers have each form if layers differ.

    The norms of heads are left out, because those of their first layer depend on the method.
    """
    layers = config.layers
    lines = [
        f"attention: {_forms(layers, lambda layer: _attention(layer.attention))}",
        f"window: {_forms(layers, lambda layer: _window(layer.attention))}",
        f"rope: {_forms(layers, lambda layer: describe_rope(layer.attention.rope))}",
        f"feed-forward: {_forms(layers, lambda layer: _feed_forward(layer.mlp))}",
    ]
    if isinstance(config, ModelConfig):
        lines.append(f"norms: {_forms(layers, lambda layer: NORMS[layer.norms])}")
    factors = _factors(config)
    return [*lines, f"factors: {', '.join(factors)}"] if factors else lines


def _forms(layers: tuple[LayerConfig, ...], form: Callable[[LayerConfig], Hashable]) -> str:
    """Describe the form of a part in each layer, with the number of layers if there are several forms."""
    counts = Counter(map(form, layers))
    if len(counts) == 1:
        return str(next(iter(counts)))
    return "; ".join(f"{text} in {count} of {len(layers)} layers" for text, count in counts.items())


def _attention(config: GQA | MLA) -> str:
    if isinstance(config, MLA):
        return _latent(config)
    parts = [f"{config.heads} heads", f"{config.kv_heads} key-value heads", f"head_dim {config.head_dim}"]
    if config.bias:
        parts.append(f"biases of {'q, k, v and o' if config.output_bias else 'q, k and v'}")
    if config.qk_norm:
        parts.append(f"norms of q and k ({QK_NORMS[config.qk_norm]})")
    if config.v_norm:
        parts.append("norms of v (each head, without weights)")
    if config.values_are_keys:
        parts.append("values are keys")
    if config.scale is not None:
        parts.append(f"scores times {config.scale:g}")
    if config.softcap is not None:
        parts.append(f"scores limited to {config.softcap:g}")
    if config.sinks:
        parts.append("sinks")
    if config.causal:
        parts.append("causal within a block")
    return ", ".join(parts)


def _latent(config: MLA) -> str:
    parts = [f"{config.heads} heads of {config.plain} + {config.rotated} rotated channels"]
    parts.append(f"latent vector of {config.latent} channels, values of {config.value_dim}")
    if config.query_latent is not None:
        parts.append(f"queries from {config.query_latent} channels")
    return ", ".join([*parts, f"scores times {config.scale:g}"])


def _feed_forward(config: Dense | Experts) -> str:
    if isinstance(config, Dense):
        return f"{config.width} channels, {config.activation}"
    router = config.router
    weights = f"{router.scores}{' over the chosen' if router.is_normalised else ''}"
    parts = [f"{router.count} experts of {config.width} channels, {router.chosen} a token", config.activation, weights]
    if router.groups > 1:
        parts.append(f"from {router.chosen_groups} of {router.groups} groups")
    if router.factor != 1:
        parts.append(f"times {router.factor:g}")
    if router.correction:
        parts.append("choice corrected")
    if config.bias:
        parts.append("biases")
    if config.limit is not None:
        parts.append(f"limited to {config.limit:g}, alpha {config.alpha:g}")
    if config.weighs_inputs:
        parts.append("weights of the inputs")
    if config.shared:
        parts.append(f"shared expert of {config.shared} channels")
    return ", ".join(parts)


def _window(config: GQA | MLA) -> str:
    parts = [f"{config.window} tokens"] if config.window is not None else []
    parts += [f"chunks of {config.chunk} tokens"] if config.chunk is not None else []
    return ", ".join(parts) or "none"


def describe_rope(rope: Rope) -> str:
    """Return the kind of a rotary embedding and the values that differ from a plain one's."""
    if rope.kind == "none":
        return f"none, {_temperature(rope)}" if rope.temperature else "none"
    parts = [rope.kind, f"theta {rope.theta:.10g}"]
    if rope.factor != 1:
        parts.append(f"factor {rope.factor:g}")
    if rope.original_max_position:
        parts.append(f"from {rope.original_max_position} tokens")
    if rope.fraction != 1:
        parts.append(f"{rope.fraction:g} of the channels")
    if rope.temperature:
        parts.append(_temperature(rope))
    return ", ".join(parts)


def _temperature(rope: Rope) -> str:
    return f"query temperature {rope.temperature:g}"


def _factors(config: DecoderConfig) -> list[str]:
    scales = Counter(layer.residual_scale for layer in config.layers)
    found = [f"residual {scale:g}" for scale in scales if scale != 1]
    found += ["a weight of each layer's output"] if any(layer.has_scale for layer in config.layers) else []
    if isinstance(config, ModelConfig):
        found += [f"embedding {config.embed_scale:g}"] if config.embed_scale != 1 else []
        found += [f"logits 1 / {config.logit_divisor:g}"] if config.logit_divisor != 1 else []
        found += [f"logits limited to {config.logit_softcap:g}"] if config.logit_softcap is not None else []
    return found
