"""Describes in words what the layers of a model or of a draft head compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from jspec.models.config.decoder_config import DecoderConfig, ModelConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mlps.mlp_config import Dense, Experts, NoMlp
from jspec.models.parts.kv_pool import PoolShape
from jspec.step.memory import size, tree_bytes

NORMS = {
    "pre": "before attention and feed-forward",
    "post": "after attention and feed-forward",
    "both": "before and after attention and feed-forward",
}


def describe_layers(config: DecoderConfig) -> list[str]:
    """Return one line for each part of the layers, which says how many layers have each form if layers differ.

    The last line has the factors that scale embeddings, residuals or logits, if there are any. Norms are left out for a
    draft head, because those of its first layer depend on the method (EAGLE-1, EAGLE-3, DFlash).
    """
    layers = config.layers
    mixers = [layer.mixer.describe() for layer in layers]  # words by the name of a part
    parts = dict.fromkeys(part for words in mixers for part in words)
    mlps = [layer.mlp for layer in layers if not isinstance(layer.mlp, NoMlp)]
    lines = [
        *(f"{part}: {_forms([words[part] for words in mixers if part in words], len(layers))}" for part in parts),
        f"feed-forward: {_forms([_feed_forward(mlp) for mlp in mlps], len(layers))}",
    ]
    if isinstance(config, ModelConfig):
        if config.has_slot_states:
            lines.append(f"states of a model in bfloat16: {_states(config)}")
        if channels := layers[0].embedded:
            lines.append(f"embeddings: {channels} channels of each token for each layer")
        lines.append(f"norms: {_forms([_norms(layer) for layer in layers], len(layers))}")
    factors = _factors(config)
    return [*lines, f"factors: {', '.join(factors)}"] if factors else lines


def _states(config: ModelConfig) -> str:
    """Say how many bytes a slot needs in layers without pages, by the nodes of a round, and a text in the cache."""
    mixers = [layer.mixer for layer in config.layers if not layer.mixer.has_pages]

    def bytes_of(nodes: int, copies: int) -> int:
        pool = PoolShape(1, 1, 1, 1, "bfloat16", "bfloat16", round_rows=nodes, state_dtype="bfloat16", copies=copies)
        return tree_bytes(jax.eval_shape(lambda: [mixer.state(pool, "bfloat16") for mixer in mixers]))

    copy = bytes_of(1, 2) - bytes_of(1, 1)
    plain, chain, tree = (size(bytes_of(nodes, 1) - copy) for nodes in (1, 5, 64))
    return (
        f"a slot {plain}, with a chain of 4 {chain}, with a tree of 64 nodes {tree}; each of cached_states {size(copy)}"
    )


def _norms(layer: LayerConfig) -> str:
    return NORMS[layer.norms] if layer.has_mixer and layer.has_mlp else "before the layer's one part"


def _forms(forms: Sequence[str], layers: int) -> str:
    """Describe the form that a part has in each layer that has it, with the number of layers unless all are alike."""
    counts = Counter(forms)
    if counts == {forms[0]: layers}:
        return forms[0]
    return "; ".join(f"{text} in {count} of {layers} layers" for text, count in counts.items())


def _feed_forward(config: Dense | Experts) -> str:
    if isinstance(config, Dense):
        return f"{config.width} channels, {config.activation}{_gate(config)}"
    router = config.router
    weights = f"{router.scores}{' over the chosen' if router.is_normalised else ''}"
    parts = [f"{router.count} experts of {config.width} channels, {router.chosen} a token"]
    parts += [f"{config.activation}{_gate(config)}", weights]
    if router.groups > 1:
        parts.append(f"from {router.chosen_groups} of {router.groups} groups")
    if router.factor != 1:
        parts.append(f"times {router.factor:g}")
    if router.correction:
        parts.append("choice corrected")
    if router.scaled:
        parts.append("a factor of each expert")
    if config.bias:
        parts.append("biases")
    if config.limit is not None:
        parts.append(f"limited to {config.limit:g}, alpha {config.alpha:g}")
    if config.weighs_inputs:
        parts.append("weights of the inputs")
    if config.shared:
        parts.append(f"shared expert of {config.shared} channels{' with a factor' if config.gates_shared else ''}")
    if config.latent is not None:
        parts.append(f"inputs and outputs of experts of {config.latent} channels")
    if config.has_norms:
        parts.append("norms of the experts and of the shared expert")
    return ", ".join(parts)


def _gate(config: Dense | Experts) -> str:
    return "" if config.is_gated else " without a gate"


def _factors(config: DecoderConfig) -> list[str]:
    scales = Counter(layer.residual_scale for layer in config.layers)
    factors = [f"residual {scale:g}" for scale in scales if scale != 1]
    factors += ["a weight of each layer's output"] if any(layer.has_scale for layer in config.layers) else []
    if isinstance(config, ModelConfig):
        factors += ["embedding normed"] if config.norms_embedding else []
        factors += [f"embedding {config.embed_scale:g}"] if config.embed_scale != 1 else []
        factors += [f"logits 1 / {config.logit_divisor:g}"] if config.logit_divisor != 1 else []
        factors += [f"logits limited to {config.logit_softcap:g}"] if config.logit_softcap is not None else []
    return factors
