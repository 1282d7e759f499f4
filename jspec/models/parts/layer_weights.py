"""The weights of a decoder layer, those of its mixer and of its feed-forward."""

from __future__ import annotations

from functools import partial

from flax import struct
from jaxtyping import Array, Float

from pallas_kernels.layers.weights import Weight

optional = partial(struct.field, default=None, kw_only=True)  # declares a weight that not every layer has


@struct.dataclass
class LayerWeights:
    """The weights of one decoder layer; linear weights are [out, in].

    ``inputs`` is the number of input channels of the fused QKV projection. It equals the hidden size, except in layer 0
    of an EAGLE-3 head, where it is twice the hidden size.
    """

    # Weights; None: the layer has no such weight. The norms' size is head_dim, or that of all heads.
    qkv: Weight | None = optional()  # fused QKV projection [(heads + 2 kv_heads) * head_dim, inputs]
    o: Weight | None = optional()  # output projection of the attention [hidden, heads * head_dim]
    gate_up: Weight | None = optional()  # fused gate and up projections [2 * intermediate, hidden], or up alone
    down: Weight | None = optional()  # down projection [hidden, intermediate]
    mlp_norm: Float[Array, "hidden"] | None = optional()  # norm before the feed-forward
    attn_post_norm: Float[Array, "hidden"] | None = optional()  # norm of the attention's output
    mlp_post_norm: Float[Array, "hidden"] | None = optional()  # norm of the feed-forward's output
    qkv_bias: Float[Array, "qkv"] | None = optional()  # bias of qkv
    o_bias: Float[Array, "hidden"] | None = optional()  # bias of o
    q_norm: Float[Array, "size"] | None = optional()  # norm of the query heads
    k_norm: Float[Array, "kv_size"] | None = optional()  # norm of the key heads
    embed_gate: Float[Array, "embedded hidden"] | None = optional()  # gate of the layer's own embedding
    embed_out: Float[Array, "hidden embedded"] | None = optional()  # projection of the gated embedding
    embed_post_norm: Float[Array, "hidden"] | None = optional()  # norm of the projected embedding
    # Weights of convolutions over the tokens of a block (`jspec.models.parts.block_conv`).
    attn_taps: Float[Array, "sides taps hidden"] | None = optional()
    attn_taps_project: Float[Array, "kernels hidden"] | None = optional()
    mlp_taps: Float[Array, "sides taps hidden"] | None = optional()
    mlp_taps_project: Float[Array, "kernels hidden"] | None = optional()
    output_scale: Float[Array, "one"] | None = optional()  # factor of the residual stream after the layer
    sinks: Float[Array, "heads"] | None = optional()  # score of each query head's sink
    # Weights of mixers that keep a state by slot, whose qkv and o are the projections before and after them.
    conv: Float[Array, "channels taps"] | None = optional()  # taps of a causal convolution, the token's own last
    conv_bias: Float[Array, "channels"] | None = optional()  # bias of the convolution
    # Rates and log decays of the heads of a gated delta net [2 * heads, inputs], or steps of Mamba 2 [heads, inputs].
    gates: Float[Array, "rows inputs"] | None = optional()
    a_log: Float[Array, "heads"] | None = optional()  # logarithm of the decays' factors
    dt_bias: Float[Array, "heads"] | None = optional()  # bias of the decays, or of the steps
    skip: Float[Array, "heads"] | None = optional()  # factor of each head's values in its output (Mamba 2)
    delta_norm: Float[Array, "channels"] | None = optional()  # norm of each head's output, or of those of all heads
    # Weights of latent attention, whose q_norm and k_norm are those of the latent vectors
    # (`jspec.models.weights.params`).
    q_up: Weight | None = optional()  # queries from their latent vector [heads * (plain + rotated), query_latent]
    k_up: Float[Array, "plain latent"] | None = optional()  # keys from the latent vector [heads * plain, latent]
    v_up: Float[Array, "values latent"] | None = optional()  # values from the latent vector [heads * value_dim, latent]
    # Weights of a mixture of experts; then gate_up and down are those of the shared expert, if there is one. It may be
    # among the experts instead, behind those of the router (`jspec.models.mlps.shared_expert`).
    router: Float[Array, "experts hidden"] | None = optional()
    router_bias: Float[Array, "experts"] | None = optional()  # bias of the router's logits
    router_correction: Float[Array, "experts"] | None = optional()  # correction of the scores, for the choice only
    # Gate and up of each expert [experts, 2 * width, hidden], or up alone.
    experts_gate_up: Weight | None = optional()
    experts_down: Weight | None = optional()  # down projection of each expert [experts, hidden, width]
    # Projections of the experts' inputs and of their summed outputs, if these have channels of their own.
    experts_in: Float[Array, "latent hidden"] | None = optional()
    experts_out: Float[Array, "hidden latent"] | None = optional()
    experts_gate_up_bias: Float[Array, "experts twice"] | None = optional()
    shared_gate: Float[Array, "one hidden"] | None = optional()  # logit of the factor of the shared expert's output
    experts_down_bias: Float[Array, "experts hidden"] | None = optional()
    # Norms of a mixture whose experts and shared expert have norms of their own (Gemma 4); mlp_norm is that before the
    # shared expert.
    router_norm: Float[Array, "hidden"] | None = optional()  # norm before the router
    router_scale: Float[Array, "experts"] | None = optional()  # factor of each expert's weights
    experts_norm: Float[Array, "hidden"] | None = optional()  # norm before the experts
    experts_post_norm: Float[Array, "hidden"] | None = optional()  # norm of the sum of the experts' outputs
    shared_post_norm: Float[Array, "hidden"] | None = optional()  # norm of the shared expert's output

    @property
    def reads_input_once(self) -> bool:
        """Whether the layer's QKV projection is all that reads the normed input of the mixer."""
        return self.gates is None and self.attn_taps is None
