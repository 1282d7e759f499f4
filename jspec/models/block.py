"""The computation of one decoder layer, for targets, draft models and EAGLE heads.

A layer is its mixer (`jspec.models.mixers`) and `mlp_part`, which takes what the mixer returns, and returns the
residual stream and the normed input of the next layer. One kernel computes the last residual sum together with this
norm. Therefore each layer computes the norm before the next layer's first part. A layer may have one part alone.

Layers are kept in a list. A scan over stacked layers would copy each layer's weights and cache on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jaxtyping import Array, Bool, Float

from jspec.core.numerics import Numerics
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mlps.experts import mix_experts
from jspec.models.mlps.mlp_config import Dense, Experts, NoMlp
from jspec.models.mlps.normed_experts import mix_normed_experts
from jspec.models.parts import block_conv
from jspec.models.parts.layer_embeddings import gated_embedding
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import mlp, product
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.partial_sums import PartialSums
from pallas_kernels.layers.residual_norm import add_rms_norm
from pallas_kernels.layers.weights import Inputs, Weight, has_dynamic_activations

# The weight of a norm, and the linear weight that multiplies the norm's output; None: the output has other uses too.
Norm = tuple[Float[Array, "hidden"], Weight | Adapted | None]


def feed_forward(
    inputs: Sequence[Any],
    layer: LayerWeights,
    config: Dense | Experts,
    used: Array | None,
    *,
    eps: float,
    numerics: Numerics,
) -> PartialSums | tuple[Array, ...]:
    """Apply a layer's feed-forward, dense or a mixture of experts.

    Args:
        inputs: normed input [batch, tokens, hidden], or one for each norm before a mixture with several.
        layer: weights of the layer.
        config: config of the feed-forward.
        used, eps, numerics: as for `mlp_part`.

    Returns:
        Partial sums of the output, [parts, batch, tokens, hidden], or several arrays of these.
    """
    if isinstance(config, Experts) and config.has_norms:
        return mix_normed_experts(inputs, layer, config, used, eps=eps, numerics=numerics)
    if isinstance(config, Experts):
        return mix_experts(inputs[0], layer, config, used, numerics)
    assert layer.gate_up is not None and layer.down is not None
    options: dict[str, Any] = {"activation": config.activation, "is_gated": config.is_gated}
    return mlp(inputs[0], layer.gate_up, layer.down, numerics, **options)


def convolved(
    taps: Array | None, project: Array | None, inputs: list[Any], numerics: Numerics
) -> tuple[list[Any], Array | None]:
    """Return the inputs of a part of a layer, convolved if it has taps, and the taps of its output, or None."""
    if taps is None or project is None:
        return inputs, None
    (x,) = inputs
    x, of_output = block_conv.before(x, taps, project, numerics)
    return [x], of_output


def mlp_part(
    layer: LayerWeights,
    config: LayerConfig,
    attended: Inputs,
    residual: Array,
    norms: Sequence[Norm],
    *,
    eps: float,
    numerics: Numerics,
    used: Bool[Array, "batch tokens"] | None = None,
    embedded: Float[Array, "batch tokens embedded"] | None = None,
    taps: Float[Array, "batch tokens taps hidden"] | None = None,
) -> tuple[Any, ...]:
    """Run a layer's attention output projection, its feed-forward, and the norms that read the layer's output.

    Args:
        layer: weights of the layer.
        config: config of the layer.
        attended: what the layer's mixer returned; without a mixer, the input of the feed-forward.
        residual: residual stream before the layer's attention [batch, tokens, hidden].
        norms: one norm for each operation that reads the layer's output.
        eps: epsilon of the norms.
        used: whether each row's result is used; None: all are. Experts that only other rows choose are not read.
        numerics: by which kernels, and with which promise of bits.
        embedded: the tokens' embeddings for this layer; None: it has none.
        taps: taps of the convolution of the attention's output (`jspec.models.parts.block_conv`); None: there is none.

    Returns:
        The residual stream after the layer, then its normed value for each norm. If there are no norms, the residual
        stream twice.
    """
    add_norm = partial(
        add_rms_norm, eps=eps, post_eps=config.post_norm_eps, factor=config.residual_scale, **numerics.options
    )
    last: dict[str, Any] = {}  # options of the layer's last sum
    normed: list[Any] = [attended]
    if config.has_mixer:
        delta = product(numerics)(attended, layer.o)
        delta = delta if taps is None else block_conv.after(delta, taps)
        last = {"bias": layer.o_bias, "post_norm": layer.attn_post_norm}
        if config.has_mlp:
            residual, *normed = _before_mlp(layer, config, residual, delta, partial(add_norm, **last))
    if not isinstance(config.mlp, NoMlp):
        delta, last = _fed(normed or [residual], layer, config.mlp, used, eps=eps, numerics=numerics)
        if embedded is not None:
            (residual,) = add_norm(residual, delta, **last)
            delta = gated_embedding(residual, layer, embedded, config.mlp.activation, numerics)
            last = {"post_norm": layer.embed_post_norm}
    quantize_output = bool(norms) and all(weight is not None and has_dynamic_activations(weight) for _, weight in norms)
    last |= {"scale": layer.output_scale, "quantize_output": quantize_output}
    residual, *normed = add_norm(residual, delta, *(norm for norm, _ in norms), **last)
    return residual, *(normed or [residual])


def _before_mlp(
    layer: LayerWeights, config: LayerConfig, residual: Array, delta: Any, add_norm: Callable[..., Any]
) -> tuple[Any, ...]:
    """Add the output of a layer's mixer, and return the residual stream and its norms before the feed-forward."""
    before = (layer.mlp_norm, layer.experts_norm, layer.router_norm)
    norms = [norm for norm in before if norm is not None]
    is_dense = isinstance(config.mlp, Dense)  # the router of experts reads inputs that are not rounded
    quantize_output = bool(norms) and is_dense and layer.mlp_taps is None and has_dynamic_activations(layer.gate_up)
    return add_norm(residual, delta, *norms, quantize_output=quantize_output)


def _fed(
    normed: list[Any], layer: LayerWeights, mlp: Dense | Experts, used: Array | None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the output of a layer's feed-forward, convolved if it has taps, and the options of its sum."""
    normed, taps = convolved(layer.mlp_taps, layer.mlp_taps_project, normed, options["numerics"])
    delta = feed_forward(normed, layer, mlp, used, **options)
    return delta if taps is None else block_conv.after(delta, taps), {"post_norm": layer.mlp_post_norm}
