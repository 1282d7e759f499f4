"""Attention over the paged KV cache, for targets, draft models and draft heads.

Attention splits the fused QKV projection, rotates queries and keys, writes keys and values to the cache, and attends.
"""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jspec.core.records import TokenBatch
from jspec.models.config import GQA, Rope
from pallas_kernels.attention.append_attention import append_attention
from pallas_kernels.attention.paged_attention import paged_attention
from pallas_kernels.attention.rope_append import rotate_append
from pallas_kernels.layers.quantized import Inputs, PartialSums, QuantizedActivation


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Return the rotary frequency of each pair of channels in radians per position, float32 [head_dim / 2].

    Kind "llama3" changes each frequency by its wavelength in positions, as Llama 3.1 does:
    - wavelengths above ``original_max_position / low_freq_factor``: the frequency is divided by ``factor``;
    - wavelengths below ``original_max_position / high_freq_factor``: the frequency is kept;
    - wavelengths between these two limits: the frequency is interpolated.

    Source: RoFormer (arXiv:2104.09864) section 3.4.2.
    """
    inv_freq = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "llama3":
        periods = rope.original_max_position * inv_freq / (2 * math.pi)  # rotations per original context
        kept = (periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        inv_freq = kept * inv_freq + (1 - kept) * inv_freq / rope.factor
    return inv_freq.astype(np.float32)


def project(
    qkv: PartialSums,
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    config: GQA,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "batch tokens heads head_dim"], Array, Array]:
    """Split a fused QKV projection, rotate queries and keys, and write the batch's keys and values into the pools.

    Args:
        qkv: partial sums of the QKV projection, [parts, batch, tokens, width].
        k_pool, v_pool: key and value pools of the layer, [pages, kv_heads, page_size, head_dim].
        batch: positions and cache rows of the tokens.
        config: attention config of the layer.
        dtype: dtype of the model.

    Returns:
        The rotated queries, the key pool and the value pool.
    """
    rows = _rows(batch, config)
    options = {"heads": config.heads, "dtype": dtype, "implementation": batch.implementation}
    return rotate_append(k_pool, v_pool, qkv, *rows, deterministic=batch.deterministic, **options)


def _rows(batch: TokenBatch, config: GQA) -> tuple[Array, ...]:
    """Return the batch's positions, rotary frequencies, page table, first rows and validity, in the kernels' order."""
    inv_freq = jnp.asarray(inverse_frequencies(config.rope, config.head_dim))
    return batch.positions, inv_freq, batch.page_table, batch.first_row, batch.valid


def project_and_attend(
    qkv: PartialSums,
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    config: GQA,
    dtype: jnp.dtype,
    *,
    start: int = 0,
    quantize_output: bool = False,
) -> tuple[Inputs, Array, Array]:
    """Run `project`, then `attend`.

    One kernel does both if ``batch`` has no ``base`` and no ``window``, and if ``batch.deterministic`` is False.

    Args:
        qkv, k_pool, v_pool, batch, config, dtype: arguments of `project`.
        start, quantize_output: arguments of `attend`.

    Returns:
        The attended values [batch, tokens, heads * head_dim], the key pool and the value pool.
    """
    if batch.base is not None or batch.deterministic or batch.window is not None:
        q, k_pool, v_pool = project(qkv, k_pool, v_pool, batch, config, dtype)
        return attend(q, k_pool, v_pool, batch, start=start, quantize_output=quantize_output), k_pool, v_pool
    run = partial(append_attention, heads=config.heads, dtype=dtype, implementation=batch.implementation)
    rows = _rows(batch, config)
    out, *pools = run(k_pool, v_pool, qkv, *rows, batch.bits, start=start, quantize_output=quantize_output)
    return _concat_heads(out), *pools


def _concat_heads(out: Array | QuantizedActivation) -> Inputs:
    return out if isinstance(out, QuantizedActivation) else out.reshape(*out.shape[:2], -1)


def attend(
    q: Float[Array, "batch tokens heads head_dim"],
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    *,
    start: int = 0,
    quantize_output: bool = False,
) -> Inputs:
    """Attend to the cache rows that the batch's mask allows.

    Args:
        q: rotated queries.
        k_pool, v_pool: key and value pools of the layer, [pages, kv_heads, page_size, head_dim].
        batch: page table, first rows and ancestor mask of the tokens.
        start: first cache row that exists; 1 for EAGLE heads, which have no row 0.
        quantize_output: return a `QuantizedActivation`, for an output projection that quantises its inputs.

    Returns:
        The attended values with their heads concatenated, [batch, tokens, heads * head_dim].
    """
    out = paged_attention(
        q,
        k_pool,
        v_pool,
        batch.page_table,
        batch.first_row if batch.base is None else batch.base,
        batch.bits,
        new_rows=batch.new_rows,
        start=start,
        window=batch.window,
        quantize_output=quantize_output,
        deterministic=batch.deterministic,
        paths=batch.paths,
        implementation=batch.implementation,
    )
    return _concat_heads(out)
