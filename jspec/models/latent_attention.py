"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), without keys and values of heads.

A token's row of the cache is a normed latent vector c in the value pool, and one rotated key r in the key pool. The
key of head h would be [K_h c, r] and its value V_h c. A query [q, s] of head h has the same scores with [c, r] if it
becomes [K_h^T q, s], and the sum of the values is V_h times the sum of the latent vectors. So all query heads attend to
one key-value head: keys [c, r], values c.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.records import TokenBatch
from jspec.models.layer_config import MLA
from jspec.models.layers import product
from jspec.models.rope import tables
from pallas_kernels.attention.head_products import head_products
from pallas_kernels.attention.latent import append_latent
from pallas_kernels.layers.norm_columns import norm_columns
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials

if TYPE_CHECKING:
    from jspec.models.block import LayerWeights


def write_latents(
    layer: LayerWeights,
    config: MLA,
    qkv: PartialSums,
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "batch tokens heads head_dim"], Array, Array]:
    """Write the batch's latent vectors and rotated keys into the pools, and compute the queries that attend to them.

    Args:
        layer: weights of the layer.
        config: config of the attention.
        qkv: partial sums of the first projection, [parts, batch, tokens, width]; of the packed rows if the batch has a
            packing.
        k_pool: pool of the rotated keys, [pages, 1, page_size, rotated].
        v_pool: pool of the latent vectors, [pages, 1, page_size, latent].
        batch: positions and cache rows of the tokens.
        dtype: dtype of the model.

    Returns:
        The queries [batch, tokens, heads, latent + rotated], the key pool and the value pool.
    """
    assert layer.k_norm is not None and layer.k_up is not None
    fixed: dict[str, Any] = {"deterministic": batch.deterministic, "implementation": batch.implementation}
    cos_sin = tables(config.rope, config.rotated, batch.positions, **fixed)
    norm = partial(norm_columns, eps=config.eps, dtype=dtype, **fixed)
    if config.query_latent is None:
        rows = queries = batch.unpack(norm(qkv, layer.k_norm)[None])[0]
        first, first_query = 0, config.head_dim
    else:
        assert layer.q_norm is not None and layer.q_up is not None
        normed = norm(qkv, layer.q_norm, layer.k_norm)
        sums = product(batch)(normed[..., : config.query_latent], layer.q_up)
        rows, queries = batch.unpack(normed[None])[0], reduce_partials(batch.unpack(sums), dtype)
        first, first_query = config.query_latent, 0
    k_up = layer.k_up.reshape(config.heads, config.plain, config.latent)
    new = queries, k_up, rows, cos_sin, batch.page_table, batch.first_row, batch.valid
    return append_latent(k_pool, v_pool, *new, first_query=first_query, first=first, **fixed)


def expand_values(
    layer: LayerWeights, config: MLA, attended: Any, batch: TokenBatch
) -> Float[Array, "batch tokens values"]:
    """Compute the attended values of all heads from the attended latent vectors [batch, tokens, heads * latent]."""
    assert layer.v_up is not None
    fixed: dict[str, Any] = {"deterministic": batch.deterministic, "implementation": batch.implementation}
    v_up = layer.v_up.reshape(config.heads, config.value_dim, config.latent)
    return head_products(attended, v_up, **fixed).reshape(*attended.shape[:2], -1)
