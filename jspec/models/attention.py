"""Attention over the paged cache, shared by target, draft models and draft heads: project, rotate, write, attend."""

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


def project(
    qkv: PartialSums,
    k_pool: Array,
    v_pool: Array,
    batch: TokenBatch,
    config: GQA,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "batch tokens heads head_dim"], Array, Array]:
    """Take a fused projection apart, rotate, and write the batch's keys and values into the pools.

    Args:
        qkv: [parts, batch, tokens, width], as `split_matmul` leaves it.
        dtype: of the model.

    Returns:
        The rotated queries, and both pools.
    """
    rows = _rows(batch, config)
    options = {"heads": config.heads, "dtype": dtype, "implementation": batch.implementation}
    return rotate_append(k_pool, v_pool, qkv, *rows, deterministic=batch.deterministic, **options)


def _rows(batch: TokenBatch, config: GQA) -> tuple[Array, ...]:
    """Where the new rows stand, how they are rotated, and where they go."""
    speeds = jnp.asarray(inverse_frequencies(config.rope, config.head_dim))
    return batch.positions, speeds, batch.page_table, batch.first_row, batch.valid


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
    """`project`, then `attend`; in one kernel where no query sees more than committed rows and those of the batch.

    Args:
        start, is_rounded: as in `attend`.
    """
    if batch.base is not None or batch.deterministic or batch.window is not None:
        q, k_pool, v_pool = project(qkv, k_pool, v_pool, batch, config, dtype)
        return attend(q, k_pool, v_pool, batch, start=start, quantize_output=quantize_output), k_pool, v_pool
    run = partial(append_attention, heads=config.heads, dtype=dtype, implementation=batch.implementation)
    rows = _rows(batch, config)
    out, *pools = run(k_pool, v_pool, qkv, *rows, batch.bits, start=start, quantize_output=quantize_output)
    return _side_by_side(out), *pools


def _side_by_side(out: Array | QuantizedActivation) -> Inputs:
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
    """Let every query see what its `TokenBatch` allows; heads side by side come back, [batch, tokens, width].

    Args:
        start: first cache row that exists (a draft head's row 0 does not).
        quantize_output: they come back as `QuantizedActivation`, for a weight that would round them.
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
    return _side_by_side(out)
