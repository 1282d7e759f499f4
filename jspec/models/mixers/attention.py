"""What the kinds of attention have in common: pages of keys and values, and queries that attend to them.

Attention takes the fused QKV projection, rotates queries and keys, writes keys and values to the cache, and attends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.core.records import PromptBatch, TokenBatch
from jspec.models.mixers.mixer import Mixer
from jspec.models.parts.kv_pool import KVPool, PoolShape, check_size
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import product
from jspec.models.parts.rope import PLAIN, Rope
from pallas_kernels.attention.paged_attention import paged_attention
from pallas_kernels.attention.prompt_attention import prompt_attention
from pallas_kernels.layers.partial_sums import PartialSums
from pallas_kernels.layers.weights import Inputs, QuantizedActivation

Queries = Float[Array, "batch tokens heads head_dim"]


class Attention(Mixer):
    """A mixer whose tokens attend to pages of keys and values.

    Attributes:
        heads: number of query heads.
        rope: rotary position embedding.
    """

    heads: int
    rope: Rope = PLAIN

    @property
    def cached_heads(self) -> int:
        """Number of heads of the pools."""
        raise NotImplementedError

    @property
    def pool_dims(self) -> tuple[int, int]:
        """Number of channels of a row in the key pool and in the value pool, for each head of the pools."""
        raise NotImplementedError

    @property
    def key_dim(self) -> int:
        """Number of channels that a score multiplies."""
        raise NotImplementedError

    @property
    def has_pages(self) -> bool:
        return True

    @property
    def row_size(self) -> int:
        """Number of channels of queries, keys and values; `Mixer.row_size`."""
        return (self.heads + 2 * self.cached_heads) * self.key_dim

    def for_length(self, max_len: int) -> Self:
        """Return the attention with the rotary embedding for ``max_len`` tokens; `Mixer.for_length`."""
        return self.replaced(rope=self.rope.for_length(max_len))

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields."""
        return replace(self, **changes)  # type: ignore[type-var]

    def state(self, pool: PoolShape, dtype: str) -> KVPool:
        """Make pools of zeros; `Mixer.state`."""
        shapes = [(pool.pages, self.cached_heads, pool.page_size, channels) for channels in self.pool_dims]
        check_size(pool, *shapes)
        return KVPool(*(jnp.zeros(shape, dtype) for shape in shapes))

    def traffic(self, nodes: int, context: int, tokens: float, sizes: tuple[int, int]) -> tuple[float, float]:
        """Count one read of the visible keys and values, and the products with them; `Mixer.traffic`."""
        rows = min(context, self.reach or context)
        products = self.heads * (self.key_dim + self.pool_dims[1])
        return rows * self.cached_heads * sum(self.pool_dims) * sizes[0], 2 * nodes * products * rows

    def mix(
        self, layer: LayerWeights, x: Inputs, state: KVPool, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Any, KVPool]:
        """Project, write keys and values, and attend; `Mixer.mix`."""
        return self.mix_projected(layer, product(batch.numerics)(x, layer.qkv), state, batch, dtype, eps=eps)

    def mix_projected(
        self,
        layer: LayerWeights,
        qkv: PartialSums,
        pool: KVPool,
        batch: TokenBatch,
        dtype: jnp.dtype,
        *,
        eps: float,
        start: int = 0,
    ) -> tuple[Inputs, KVPool]:
        """Write the batch's keys and values into the pools, and attend to the visible cache rows.

        Args:
            layer, batch, dtype, eps: as for `Mixer.mix`.
            qkv: partial sums of the fused QKV projection, [parts, batch, tokens, width]; of the packed rows if the
                batch has a packing.
            pool: pools of the layer.
            start: first cache row that exists; 1 for EAGLE heads, which have no row 0.

        Returns:
            The attended values [batch, tokens, values of all heads], and the new pools.
        """
        q, pool = self.write(layer, qkv, pool, batch, dtype, eps=eps)
        return batch.pack(self.attend(layer, q, pool, batch, start=start)), pool

    def write(
        self, layer: LayerWeights, qkv: PartialSums, pool: KVPool, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Queries, KVPool]:
        """Write the batch's keys and values into the pools, and return the queries that attend to them.

        The arguments are those of `mix_projected`. The queries are not packed.
        """
        raise NotImplementedError

    def attend(self, layer: LayerWeights, q: Queries, pool: KVPool, batch: TokenBatch, *, start: int = 0) -> Inputs:
        """Attend to the visible cache rows with queries that `write` returned; the pools have the batch's rows.

        Returns:
            The attended values [batch, tokens, values of all heads].
        """
        raise NotImplementedError


def attend_pages(
    q: Queries,
    pool: KVPool,
    batch: TokenBatch,
    scores: dict[str, Any],
    *,
    sinks: Float[Array, "heads"] | None = None,
    start: int = 0,
    quantize_output: bool = False,
) -> Inputs:
    """Attend to the cache rows that the batch's mask allows.

    Args:
        q: rotated queries.
        pool: pools of the layer.
        batch: page table, first rows and ancestor mask of the tokens.
        scores: `window`, `chunk`, `scale` and `softcap` of `paged_attention`.
        sinks: score of each query head's sink; None: no sinks.
        start: first cache row that exists; 1 for EAGLE heads, which have no row 0.
        quantize_output: return a `QuantizedActivation`, for an output projection that quantises its inputs.

    Returns:
        The attended values of all heads, concatenated.
    """
    options: dict[str, Any] = {**scores, "quantize_output": quantize_output, "implementation": batch.implementation}
    if isinstance(batch, PromptBatch) and not batch.deterministic and not start:
        pieces = batch.page_table, batch.first_row, batch.piece, batch.of_piece(batch.ends)
        return concat_heads(prompt_attention(q, pool.k, pool.v, *pieces, sinks, **options))
    first_row = batch.first_row if batch.base is None else batch.base
    options |= {"new_rows": batch.new_rows, "deterministic": batch.deterministic, "paths": batch.paths}
    pages = pool.k, pool.v, batch.page_table, first_row
    return concat_heads(paged_attention(q, *pages, batch.bits, sinks, start=start, **options))


def concat_heads(out: Array | QuantizedActivation) -> Inputs:
    """Return values [batch, tokens, heads, channels] as [batch, tokens, channels of all heads]."""
    return out if isinstance(out, QuantizedActivation) else out.reshape(*out.shape[:2], -1)
