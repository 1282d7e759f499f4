"""A mixture of experts beside a shared expert, each with norms of its own before and after it (Gemma 4)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.core.numerics import Numerics
from jspec.models.mlps.experts import chosen_sums, joined
from jspec.models.mlps.mlp_config import Experts
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import mlp, small_product
from pallas_kernels.layers.residual_norm import add_rms_norm


def mix_normed_experts(
    inputs: Sequence[Float[Array, "batch tokens hidden"]],
    layer: LayerWeights,
    config: Experts,
    used: Bool[Array, "batch tokens"] | None,
    *,
    eps: float,
    numerics: Numerics,
) -> Float[Array, "one batch tokens hidden"]:
    """Return the sum of the shared expert's normed output and of the experts' normed output.

    Args:
        inputs: three norms of the residual stream: those before the shared expert, the experts and the router.
        layer: weights of the layer.
        config: config of the mixture.
        used, numerics: as for `jspec.models.mlps.experts.mix_experts`.
        eps: epsilon of the norms.
    """
    of_shared, of_experts, of_router = inputs
    assert layer.router is not None and layer.gate_up is not None and layer.down is not None
    add_norm = partial(add_rms_norm, eps=eps, **numerics.options)
    shared = mlp(of_shared, layer.gate_up, layer.down, numerics, activation=config.activation)
    (total,) = add_norm(jnp.zeros_like(of_shared), shared, post_norm=layer.shared_post_norm)
    flat, routed = (rows.reshape(-1, rows.shape[-1]) for rows in (of_experts, of_router))
    logits = small_product(routed, layer.router, numerics)
    sums = chosen_sums(flat, logits, layer, config, used, numerics).reshape(-1, *of_experts.shape)
    (total,) = add_norm(total, joined((sums,), layer, total.dtype, numerics), post_norm=layer.experts_post_norm)
    return total[None]
