"""Attention of many new rows of prompts over a paged KV cache, on Hopper GPUs by a kernel of its own."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.attention.paged_attention import paged_attention, quantize_heads
from pallas_kernels.attention.prompt_kernel import attend_prompts
from pallas_kernels.attention.prompt_steps import ROWS, PromptSizes
from pallas_kernels.attention.scores import Scores
from pallas_kernels.dispatch import HOPPER, Implementation, Kernel, dispatch
from pallas_kernels.layers.weights import QuantizedActivation

LEAST_QUERIES = 512  # of a call; with fewer, too few CTAs run: 128 queries after 8k rows took 152 us instead of 90
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def _is_supported(q: Array, k_pool: Array) -> bool:
    """Returns whether the kernel supports the shapes and dtypes of a call."""
    blocks, tokens, heads, dim = q.shape
    kv_heads, page = k_pool.shape[1:3]
    if ROWS % tokens:
        return False
    sizes = PromptSizes(tokens, heads // kv_heads, page, dim, None)
    is_measured = sizes.joined == 1 and sizes.parts == 1 if dim in (64, 128) else dim == 256
    return (
        is_measured
        and blocks % sizes.blocks == 0
        and dim == k_pool.shape[3]
        and sizes.tile % page == page % 8 == 0
        and q.dtype == k_pool.dtype in DTYPES
    )


@functools.partial(
    jax.jit, static_argnames=("window", "chunk", "scale", "softcap", "quantize_output", "implementation")
)
def prompt_attention(
    q: Float[Array, "B T H D"],
    k_pool: Float[Array, "pages KH page DK"],
    v_pool: Float[Array, "pages KH page DV"],
    page_table: Int32[Array, "B P"],
    first_row: Int32[Array, " B"],
    sequence: Int32[Array, " B"],
    ends: Int32[Array, " B"],
    sinks: Float[Array, " heads"] | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    quantize_output: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "B T H DV"] | QuantizedActivation:
    """Returns the causal attention of blocks of T tokens; a sequence has any number of blocks.

    The result is that of `paged_attention` without bits for ``lengths=first_row``, except that the output of a query
    after its sequence's end is arbitrary. On a Hopper GPU a kernel of its own serves calls of at least
    `LEAST_QUERIES` queries in bfloat16 or float16 without sinks, softcap and chunks: with 64 or 128 channels, 4 or 8
    query heads per KV head (for blocks of 16) and pages of 8 to 128 rows, or with 256 channels, any number of heads and
    pages of up to 64 rows. All other calls run `paged_attention`.

    Args:
        q: queries [B, T, H, D].
        k_pool, v_pool: pages of keys and values, as in `paged_attention`; they hold the rows of all blocks already.
        page_table: page numbers of each block's sequence [B, P].
        first_row: cache row of each block's first query [B].
        sequence: number of each block's sequence [B]; blocks of equal number have equal page tables and ends, and
            follow one another in order of their rows.
        ends: number of cache rows that each block's sequence has [B]; rows from there on may hold any value, even NaN.
        sinks, window, chunk, scale, softcap, quantize_output: as in `paged_attention`.
        implementation: as in `paged_attention`; "pallas" runs `paged_attention`'s kernel on a CPU.

    Returns:
        The attention [B, T, H, DV] in q's dtype, or quantised from q's dtype. Softmax and sums are computed in float32.

    Raises:
        ValueError: shapes do not fit each other, or an option is out of its range.
    """
    scores = Scores(1.0 / math.sqrt(q.shape[-1]) if scale is None else scale, softcap, window, chunk)
    scores.check(q.shape[2], sinks)

    def others(q, k_pool, v_pool, page_table, first_row, sequence, ends):
        options: dict[str, Any] = {"quantize_output": quantize_output, "implementation": implementation}
        arrays = q, k_pool, v_pool, page_table, first_row, None, sinks
        return paged_attention(*arrays, **options, **dataclasses.asdict(scores))

    def kernel(*arrays, interpret):
        out = attend_prompts(*arrays, window=window, scale=scores.scale, interpret=interpret)
        return quantize_heads(out, implementation) if quantize_output else out

    arrays = (q, k_pool, v_pool, page_table, first_row, sequence, ends)
    is_plain = sinks is None and softcap is None and chunk is None
    is_long = q.shape[0] * q.shape[1] >= LEAST_QUERIES
    is_other = not (is_plain and is_long and _is_supported(q, k_pool))
    return dispatch(implementation, [Kernel(HOPPER, kernel, is_other)], others, *arrays)
