"""Attention over the paged KV cache, for targets, draft models and draft heads.

Attention splits the fused QKV projection, rotates queries and keys, writes keys and values to the cache, and attends.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.records import PromptBatch, TokenBatch
from jspec.models.layer_config import GQA, MLA
from pallas_kernels.attention.append_attention import append_attention
from pallas_kernels.attention.paged_attention import paged_attention
from pallas_kernels.attention.prompt_attention import prompt_attention
from pallas_kernels.attention.rope_append import HeadTransform, rotate_append
from pallas_kernels.layers.partial_sums import PartialSums
from pallas_kernels.layers.weights import Inputs, QuantizedActivation


def project(
    qkv: PartialSums,
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    transform: HeadTransform,
    config: GQA,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "batch tokens heads head_dim"], Array, Array]:
    """Split a fused QKV projection, rotate queries and keys, and write the batch's keys and values into the pools.

    Args:
        qkv: partial sums of the QKV projection, [parts, batch, tokens, width].
        k_pool, v_pool: key and value pools of the layer, [pages, kv_heads, page_size, head_dim].
        batch: cache rows of the tokens.
        transform: bias, norms and rotation of the heads.
        config: attention config of the layer.
        dtype: dtype of the model.

    Returns:
        The rotated queries, the key pool and the value pool.
    """
    rows = batch.page_table, batch.first_row, batch.valid
    options = {"heads": config.heads, "dtype": dtype, "implementation": batch.implementation}
    return rotate_append(k_pool, v_pool, qkv, transform, *rows, deterministic=batch.deterministic, **options)


def project_and_attend(
    qkv: PartialSums,
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    transform: HeadTransform,
    config: GQA,
    dtype: jnp.dtype,
    *,
    sinks: Float[Array, "heads"] | None = None,
    start: int = 0,
    quantize_output: bool = False,
) -> tuple[Inputs, Array, Array]:
    """Run `project`, then `attend`.

    One kernel does both for the nodes of draft trees, if ``batch`` has no ``base`` and is not deterministic.

    Args:
        qkv, k_pool, v_pool, batch, transform, config, dtype: arguments of `project`.
        sinks, start, quantize_output: arguments of `attend`.

    Returns:
        The attended values [batch, tokens, heads * head_dim], the key pool and the value pool.
    """
    options: dict[str, Any] = {"start": start, "quantize_output": quantize_output}
    batch = replace(batch, bits=None) if config.causal else batch
    if batch.base is not None or batch.deterministic or isinstance(batch, PromptBatch):
        q, k_pool, v_pool = project(qkv, k_pool, v_pool, batch, transform, config, dtype)
        return attend(q, k_pool, v_pool, batch, config, sinks=sinks, **options), k_pool, v_pool
    run = partial(append_attention, heads=config.heads, dtype=dtype, implementation=batch.implementation)
    rows = batch.page_table, batch.first_row, batch.valid, batch.bits, sinks
    out, *pools = run(k_pool, v_pool, qkv, transform, *rows, **_scores(batch, config), **options)
    return _concat_heads(out), *pools


def _scores(batch: TokenBatch, config: GQA | MLA) -> dict[str, Any]:
    """Return how scores are computed: the smaller window of batch and layer, chunk, factor and limit."""
    windows = [window for window in (batch.window, config.window) if window is not None]
    scores = {"chunk": config.chunk, "scale": config.scale, "softcap": config.softcap}
    return {"window": min(windows, default=None), **scores}


def _concat_heads(out: Array | QuantizedActivation) -> Inputs:
    return out if isinstance(out, QuantizedActivation) else out.reshape(*out.shape[:2], -1)


def attend(
    q: Float[Array, "batch tokens heads head_dim"],
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    config: GQA | MLA,
    *,
    sinks: Float[Array, "heads"] | None = None,
    start: int = 0,
    quantize_output: bool = False,
) -> Inputs:
    """Attend to the cache rows that the batch's mask allows.

    Args:
        q: rotated queries.
        k_pool, v_pool: key and value pools of the layer, [pages, kv_heads, page_size, head_dim].
        batch: page table, first rows and ancestor mask of the tokens.
        config: attention config of the layer.
        sinks: score of each query head's sink; None: no sinks.
        start: first cache row that exists; 1 for EAGLE heads, which have no row 0.
        quantize_output: return a `QuantizedActivation`, for an output projection that quantises its inputs.

    Returns:
        The attended values with their heads concatenated, [batch, tokens, heads * head_dim]; of latent attention the
        attended latent vectors [batch, tokens, heads * latent].
    """
    if isinstance(batch, PromptBatch) and not batch.deterministic and not start:
        own = batch.page_table, batch.first_row, batch.piece, batch.of_piece(batch.ends)
        options: dict[str, Any] = {"quantize_output": quantize_output, "implementation": batch.implementation}
        return _concat_heads(prompt_attention(q, k_pool, v_pool, *own, sinks, **_scores(batch, config), **options))
    out = paged_attention(
        q,
        k_pool,
        v_pool,
        batch.page_table,
        batch.first_row if batch.base is None else batch.base,
        batch.bits,
        sinks,
        new_rows=batch.new_rows,
        start=start,
        **_scores(batch, config),
        quantize_output=quantize_output,
        deterministic=batch.deterministic,
        paths=batch.paths,
        implementation=batch.implementation,
    )
    return _concat_heads(out)
