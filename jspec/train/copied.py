"""Initial weights of an EAGLE-3 head's layers that are copies of its target's last layers."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from jspec.draft.head_config import Eagle3Config
from jspec.models.config.layer_config import LayerConfig
from jspec.models.decoder import Layer, Model
from jspec.models.mlps.mlp_config import Dense
from jspec.train.method import in_float32


def copied(weights: dict[str, Array], config: Eagle3Config, target: Model) -> dict[str, Array]:
    """Return the weights of a new head, of which those that the target's last layers have too are theirs.

    The feature begins as the last of the target's states that the head reads, beside the small random part of the
    others. Layer 0 has the weights of a layer of the target for the feature, and random ones for the embedding. Further
    channels of a feed-forward that is wider than the target's begin at random.

    Args:
        weights: random weights in float32, by name.
        config: config of the head.
        target: the target.

    Raises:
        ValueError: the target's layers are of another kind.
    """
    count, hidden = config.num_layers, config.hidden_size
    if count > len(target.layers):
        raise ValueError(f"train: layers: expected at most {len(target.layers)}, those of the target, got {count}")
    layers, configs = target.layers[-count:], target.config.layers[-count:]
    for ours, theirs in zip(config.layers, configs, strict=True):
        _check(ours, theirs)
    begun = weights | {"norm": in_float32(target.norm), "fc": weights["fc"].at[:, -hidden:].add(jnp.eye(hidden))}
    for index, layer in enumerate(layers):
        begun |= {f"layers.{index}.{name}": value for name, value in _layer(weights, index, layer).items()}
    return begun


def _layer(weights: dict[str, Array], index: int, layer: Layer) -> dict[str, Array]:
    """Return the weights of a layer of the head, by field name."""
    random = {name: weights[f"layers.{index}.{name}"] for name in ("qkv", "gate_up", "down")}
    qkv, gate_up, down = (in_float32(value) for value in (layer.qkv, layer.gate_up, layer.down))
    width, own_width = down.shape[1], random["down"].shape[1]
    gate, up = (random["gate_up"][own_width * part :][:own_width] for part in range(2))
    halves = (gate.at[:width].set(gate_up[:width]), up.at[:width].set(gate_up[width:]))
    copies = {
        "o": in_float32(layer.o),
        "mlp_norm": in_float32(layer.mlp_norm),
        "gate_up": jnp.concatenate(halves),
        "down": random["down"].at[:, :width].set(down),
    }
    norm = in_float32(layer.attn_norm)
    if index:
        return copies | {"qkv": qkv, "input_norm": norm}
    return copies | {"qkv": random["qkv"].at[:, -qkv.shape[1] :].set(qkv), "hidden_norm": norm}


def _check(ours: LayerConfig, theirs: LayerConfig) -> None:
    """Raise ValueError if the weights of a target's layer do not fit a layer of the head."""
    is_wide = isinstance(ours.mlp, Dense) and isinstance(theirs.mlp, Dense) and ours.mlp.width >= theirs.mlp.width
    fits = ours.mixer == theirs.mixer and is_wide and ours.norms == theirs.norms
    if not fits:
        raise ValueError(
            f"train: copy_layers: expected layers of the target like the head's, {ours}, at most as wide, got "
            f"{theirs}; give rope_theta and intermediate_size that fit, or leave it out, so that the head begins at "
            "random"
        )
