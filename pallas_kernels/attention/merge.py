"""The kernels of `paged_attention` that merge the splits of a context; one also quantises the result to float8."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.softmax import sink_weight
from pallas_kernels.attention.tiling import Tiles, own_tiles
from pallas_kernels.layers.quantize_rows import FP8, scaled_rows

MERGED = 16  # largest number of splits that a merging kernel reads at once
CHANNELS = 128  # channels of a program of one warp: with 16 splits, 64 values per thread


def merge_kernel(
    # inputs
    parts_ref,  # [B, T, H, splits, D] float32, attention over each split
    log_sum_exp_ref,  # [B, T, H, splits] float32, base 2
    lengths_ref,  # [B] int32
    sinks_ref,  # [H]; None: no sinks
    # outputs
    out_ref,  # [B, T, H, D] in the model's dtype
    # static parameters
    *,
    tiles,
):
    """Merges the splits of some channels of one head of one query, in one Pallas program.

    Each split has weight 2**log_sum_exp. Splits without rows that the query sees were not written, and are skipped.
    """
    query, batch, dim = pl.program_id(1), pl.program_id(2), out_ref.shape[-1]
    head, block = jax.lax.div(pl.program_id(0), channel_blocks(dim)), jax.lax.rem(pl.program_id(0), channel_blocks(dim))
    channels = block * CHANNELS + jnp.arange(min(pl.next_power_of_2(dim), CHANNELS))
    is_channel, is_written = channels < dim, _is_written(tiles, query, lengths_ref[batch])
    at_once = min(pl.next_power_of_2(tiles.splits), MERGED)

    def step(index, carry):
        # Online softmax over the splits, as in `online_softmax_update`.
        acc, top, total = carry
        split = index * at_once + jnp.arange(at_once)
        written = (split < tiles.splits) & is_written(split)
        weight = pltriton.load(log_sum_exp_ref.at[batch, query, head, split], mask=written, other=-jnp.inf)
        at = (batch, query, head, split[:, None], channels[None, :])
        part = pltriton.load(parts_ref.at[at], mask=written[:, None] & is_channel[None, :], other=0)
        new_top = jnp.maximum(top, jnp.max(weight))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, fade = jnp.exp2(weight - base), jnp.exp2(top - base)
        acc = acc * fade + jnp.sum(part * weight[:, None], axis=0)
        return acc, new_top, total * fade + jnp.sum(weight)

    empty = (jnp.zeros(channels.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0))
    acc, top, total = jax.lax.fori_loop(0, pl.cdiv(tiles.splits, at_once), step, empty)
    if sinks_ref is not None:
        total += sink_weight(sinks_ref[head], top)
    out = (acc * (1.0 / jnp.where(total == 0, 1.0, total))).astype(out_ref.dtype)
    pltriton.store(out_ref.at[batch, query, head, channels], out, mask=is_channel)


def channel_blocks(dim: int) -> int:
    """Returns how many programs merge the channels of a head."""
    return pl.cdiv(dim, CHANNELS)


def merge_and_quantize_kernel(
    # inputs
    parts_ref,  # [B, T, H, splits, D] float32, attention over each split
    log_sum_exp_ref,  # [B, T, H, splits] float32, base 2
    lengths_ref,  # [B] int32
    sinks_ref,  # [H]; None: no sinks
    # outputs
    values_ref,  # [B, T, H, D] float8_e4m3fn
    scale_ref,  # [B, T] float32
    # static parameters
    *,
    tiles,
    dtype,  # the model's dtype, to which the attention is rounded before it is quantised
):
    """Merges the splits of all heads of one query, and quantises the heads as one row, in one Pallas program."""
    query, batch, (heads, dim) = pl.program_id(0), pl.program_id(1), values_ref.shape[2:]
    head, channel = jnp.arange(pl.next_power_of_2(heads)), jnp.arange(pl.next_power_of_2(dim))[None, :]
    is_head, is_written = head < heads, _is_written(tiles, query, lengths_ref[batch])
    mask = is_head[:, None] & (channel < dim)
    # Load every split that was written.
    parts, weights = [], []
    for split in range(tiles.splits):
        written, weight = is_written(split), log_sum_exp_ref.at[batch, query, head, split]
        part = parts_ref.at[batch, query, head[:, None], split, channel]
        weights.append(pltriton.load(weight, mask=is_head & written, other=-jnp.inf))
        parts.append(pltriton.load(part, mask=mask & written, other=0))
    # Merge.
    top = functools.reduce(jnp.maximum, weights)
    weights = [jnp.exp2(weight - jnp.where(top == -jnp.inf, 0.0, top)) for weight in weights]
    acc = sum(part * weight[:, None] for part, weight in zip(parts, weights, strict=True))
    total = sum(weights)
    if sinks_ref is not None:
        total += sink_weight(pltriton.load(sinks_ref.at[head], mask=is_head, other=0), top)
    out = (acc * (1.0 / jnp.where(total == 0, 1.0, total))[:, None]).astype(dtype)
    # Quantise.
    values, scale_ref[batch, query] = scaled_rows(out, FP8, dims=2)
    pltriton.store(values_ref.at[batch, query, head[:, None], channel], values, mask=mask)


def _is_written(tiles: Tiles, query: Array, length: Array) -> Callable[[Array | int], Array]:
    """Returns a function that tells, for a split's index, whether this query's result for the split was written."""
    new_rows = query + 1 if tiles.is_causal else tiles.new
    first = jnp.minimum(tiles.start, length)
    if tiles.window:
        first = jnp.maximum(first, length - tiles.window + 1 + (query if tiles.is_causal else 0))
    end_row = jnp.minimum(length + new_rows, tiles.capacity)
    begin, end = first // tiles.tile, pl.cdiv(end_row, tiles.tile)
    return lambda split: own_tiles(begin, split, tiles.splits) < own_tiles(end, split, tiles.splits)
