"""What the splits of a context left in `paged_attention`'s first kernel, merged; the merge may round its rows."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.tiling import Tiles, own_tiles
from pallas_kernels.layers.quantize_rows import FP8, scaled_rows

MERGED = 16  # splits that the merge reads at once, at most


def merge_kernel(parts_ref, weights_ref, lengths_ref, out_ref, *, tiles):
    """One program: the splits of one query head, weighted by 2**weights; only those that were written."""
    head, query, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    dims = jnp.arange(pl.next_power_of_2(out_ref.shape[-1]))
    is_channel, is_written = dims < out_ref.shape[-1], _written(tiles, query, lengths_ref[batch])
    at_once = min(pl.next_power_of_2(tiles.splits), MERGED)

    def step(index, carry):
        acc, top, total = carry
        piece = index * at_once + jnp.arange(at_once)
        written = (piece < tiles.splits) & is_written(piece)
        weight = pltriton.load(weights_ref.at[batch, query, head, piece], mask=written, other=-jnp.inf)
        at = (batch, query, head, piece[:, None], dims[None, :])
        part = pltriton.load(parts_ref.at[at], mask=written[:, None] & is_channel[None, :], other=0)
        new_top = jnp.maximum(top, jnp.max(weight))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, fade = jnp.exp2(weight - base), jnp.exp2(top - base)
        acc = acc * fade + jnp.sum(part * weight[:, None], axis=0)
        return acc, new_top, total * fade + jnp.sum(weight)

    empty = (jnp.zeros(dims.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0))
    acc, _, total = jax.lax.fori_loop(0, pl.cdiv(tiles.splits, at_once), step, empty)
    out = (acc * (1.0 / jnp.where(total == 0, 1.0, total))).astype(out_ref.dtype)
    pltriton.store(out_ref.at[batch, query, head, dims], out, mask=is_channel)


def merge_and_round_kernel(parts_ref, weights_ref, lengths_ref, values_ref, scale_ref, *, tiles, dtype):
    """One program: all heads of a query, merged and then, in the model's dtype, rounded to float8 as one row."""
    query, batch, (heads, dim) = pl.program_id(0), pl.program_id(1), values_ref.shape[2:]
    head, channel = jnp.arange(pl.next_power_of_2(heads)), jnp.arange(pl.next_power_of_2(dim))[None, :]
    is_head, is_written = head < heads, _written(tiles, query, lengths_ref[batch])
    inside = is_head[:, None] & (channel < dim)
    parts, weights = [], []
    for piece in range(tiles.splits):
        written, weight = is_written(piece), weights_ref.at[batch, query, head, piece]
        part = parts_ref.at[batch, query, head[:, None], piece, channel]
        weights.append(pltriton.load(weight, mask=is_head & written, other=-jnp.inf))
        parts.append(pltriton.load(part, mask=inside & written, other=0))
    top = functools.reduce(jnp.maximum, weights)
    weights = [jnp.exp2(weight - jnp.where(top == -jnp.inf, 0.0, top)) for weight in weights]
    acc = sum(part * weight[:, None] for part, weight in zip(parts, weights, strict=True))
    total = sum(weights)
    out = (acc * (1.0 / jnp.where(total == 0, 1.0, total))[:, None]).astype(dtype)
    values, scale_ref[batch, query] = scaled_rows(out, FP8, dims=2)
    pltriton.store(values_ref.at[batch, query, head[:, None], channel], values, mask=inside)


def _written(tiles: Tiles, query: Array, length: Array) -> Callable[[Array | int], Array]:
    """Returns what tells of a piece whether the first kernel wrote a query's part of it."""
    new_rows = tiles.new if tiles.words or tiles.depths else query + 1
    first = jnp.minimum(tiles.start, length)
    if tiles.window:
        first = jnp.maximum(first, length - tiles.window + 1 + (0 if tiles.words else query))
    last = jnp.minimum(length + new_rows, tiles.capacity)
    begin, end = first // tiles.tile, pl.cdiv(last, tiles.tile)
    return lambda piece: own_tiles(begin, piece, tiles.splits) < own_tiles(end, piece, tiles.splits)
