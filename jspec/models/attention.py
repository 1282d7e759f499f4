"""Attention over the paged cache, shared by target, draft models and draft heads: project, rotate, write, attend."""

from __future__ import annotations

import math
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.models.config import Rope
from jspec.records import TokenBatch
from pallas_kernels.kv_pages import append
from pallas_kernels.paged_attention import paged_attention


class AttentionShape(Protocol):
    """What attention needs to know of a config."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rope(self) -> Rope: ...


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Rotation speeds per pair of channels, radians per position, float32 [head_dim / 2].

    Source: RoFormer (arXiv:2104.09864) section 3.4.2; "llama3" stretches the slow ones as Llama 3.1's release does:
    wavelengths beyond ``original / low_freq_factor`` are divided by ``factor``, those below
    ``original / high_freq_factor`` kept, linear in between.
    """
    speeds = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "llama3":
        turns = rope.original_max_position * speeds / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        speeds = keep * speeds + (1 - keep) * speeds / rope.factor
    return speeds.astype(np.float32)


def rotate(
    x: Float[Array, "batch tokens heads head_dim"], positions: Int[Array, "batch tokens"], rope: Rope
) -> Float[Array, "batch tokens heads head_dim"]:
    """Rotary embedding, halves layout (channel i pairs with i + head_dim/2); computed in float32, cast back."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, x.shape[-1])
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def project(
    qkv: Float[Array, "batch tokens width"], positions: Int[Array, "batch tokens"], shape: AttentionShape
) -> tuple[Array, Array, Array]:
    """Split a fused projection into rotated q, rotated k, and v, each ``[batch, tokens, heads, head_dim]``."""
    heads = qkv.reshape(*qkv.shape[:2], -1, shape.head_dim)
    q, k, v = jnp.split(heads, [shape.num_heads, shape.num_heads + shape.num_kv_heads], axis=2)
    return rotate(q, positions, shape.rope), rotate(k, positions, shape.rope), v


def attend(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads head_dim"],
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    *,
    start: int = 0,
) -> tuple[Float[Array, "batch tokens width"], Array, Array]:
    """Write the batch's rows into the pools, then let every query see what its `TokenBatch` allows.

    Args:
        start: first cache row that exists (a draft head's row 0 does not).

    Returns:
        The heads side by side ``[batch, tokens, heads * head_dim]``, and both pools.
    """
    k_pool, v_pool = append(
        k_pool, v_pool, k, v, batch.page_table, batch.first_row, batch.valid, implementation=batch.implementation
    )
    out = paged_attention(
        q,
        k_pool,
        v_pool,
        batch.page_table,
        batch.first_row,
        batch.bits,
        start=start,
        implementation=batch.implementation,
    )
    return out.reshape(*out.shape[:2], -1), k_pool, v_pool
