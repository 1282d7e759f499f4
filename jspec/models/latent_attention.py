"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), without keys and values of heads.

A token's row of the cache is a normed latent vector c in the value pool, and one rotated key r in the key pool. The
key of head h would be [K_h c, r] and its value V_h c. A query [q, s] of head h has the same scores with [c, r] if it
becomes [K_h^T q, s], and the sum of the values is V_h times the sum of the latent vectors. So all query heads attend to
one key-value head: keys [c, r], values c.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.records import TokenBatch
from jspec.models.layer_config import MLA
from jspec.models.layers import product
from jspec.models.rope import tables
from pallas_kernels.attention.kv_pages import append
from pallas_kernels.attention.rope_append import KEYS, QUERIES, rotate
from pallas_kernels.layers.norm_columns import norm_columns
from pallas_kernels.layers.quantized import PartialSums, reduce_partials
from pallas_kernels.layers.row_blocks import in_row_blocks

if TYPE_CHECKING:
    from jspec.models.block import LayerWeights

EXACT: dict[str, Any] = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}


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
    q, cached = _project(layer, config, qkv, batch, dtype)
    fixed: dict[str, Any] = {"deterministic": batch.deterministic, "implementation": batch.implementation}
    cos_sin = tables(config.rope, config.rotated, batch.positions, **fixed)
    latent, key = jnp.split(cached, [config.latent], axis=-1)
    flat = [array.reshape(-1, *array.shape[2:]) for array in (q, key)]
    flat.append(cos_sin.reshape(cos_sin.shape[0], -1, cos_sin.shape[-1]).swapaxes(0, 1))
    compute = partial(_absorb_and_rotate, layer, config)
    q, key = in_row_blocks(compute, *flat) if batch.deterministic else compute(*flat)
    q, key = q.reshape(*latent.shape[:2], *q.shape[1:]), key.reshape(*latent.shape[:2], *key.shape[1:])
    rows = batch.page_table, batch.first_row, batch.valid
    return q, *append(k_pool, v_pool, key, latent[:, :, None], *rows, implementation=batch.implementation)


def _project(
    layer: LayerWeights, config: MLA, qkv: PartialSums, batch: TokenBatch, dtype: jnp.dtype
) -> tuple[Float[Array, "batch tokens heads query_dim"], Float[Array, "batch tokens head_dim"]]:
    """Norm the latent vectors, and return the queries and the cache rows of all tokens before their rotation."""
    assert layer.k_norm is not None
    fixed: dict[str, Any] = {"deterministic": batch.deterministic, "implementation": batch.implementation}
    q: PartialSums
    if config.query_latent is None:
        normed = norm_columns(qkv, layer.k_norm, eps=config.eps, dtype=dtype, **fixed)
        cached, heads = jnp.split(normed, [config.head_dim], axis=-1)
        q = heads[None]
    else:
        assert layer.q_norm is not None and layer.q_up is not None
        normed = norm_columns(qkv, layer.q_norm, layer.k_norm, eps=config.eps, dtype=dtype, **fixed)
        inner, cached = jnp.split(normed, [config.query_latent], axis=-1)
        q = product(batch)(inner, layer.q_up)
    heads = reduce_partials(batch.unpack(q), dtype)
    return heads.reshape(*heads.shape[:2], config.heads, config.query_dim), batch.unpack(cached[None])[0]


def _absorb_and_rotate(
    layer: LayerWeights,
    config: MLA,
    q: Float[Array, "rows heads query_dim"],
    key: Float[Array, "rows rotated"],
    cos_sin: Float[Array, "rows tables half"],
) -> tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows 1 rotated"]]:
    """Return queries that attend to rows of the cache, and the rotated keys of these rows."""
    assert layer.k_up is not None
    plain, rotated = jnp.split(q, [config.plain], axis=-1)
    weight = layer.k_up.reshape(config.heads, config.plain, config.latent)
    absorbed = jnp.einsum("thn,hnl->thl", plain, weight, **EXACT).astype(q.dtype)
    by_table = cos_sin.swapaxes(0, 1)[:, None]
    (rotated,), (key,) = rotate(rotated[None], by_table[QUERIES]), rotate(key[None, :, None], by_table[KEYS])
    return jnp.concatenate([absorbed, rotated], axis=-1), key


def expand_values(
    layer: LayerWeights, config: MLA, attended: Any, batch: TokenBatch
) -> Float[Array, "batch tokens values"]:
    """Compute the attended values of all heads from the attended latent vectors [batch, tokens, heads * latent]."""
    assert layer.v_up is not None
    weight = layer.v_up.reshape(config.heads, config.value_dim, config.latent)

    def expand(rows: Float[Array, "rows heads latent"]) -> Float[Array, "rows heads value_dim"]:
        return jnp.einsum("thl,hvl->thv", rows, weight, **EXACT).astype(rows.dtype)

    flat = attended.reshape(-1, config.heads, config.latent)
    values = in_row_blocks(expand, flat) if batch.deterministic else expand(flat)
    return values.reshape(*attended.shape[:2], -1)
