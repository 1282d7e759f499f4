"""The kernels of `paged_attention` that merge the splits of a context; one also quantises the result to float8."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention.softmax import sink_weight
from pallas_kernels.layers.quantize_rows import FP8, scaled_rows


class MergeShape(NamedTuple):
    """The static sizes of one call of the merging kernel."""

    at_once: int  # splits that a Pallas program reads at once
    channels: int  # channels of a Pallas program
    warps: int

    @staticmethod
    def of(splits: int, dim: int) -> "MergeShape":
        """Chooses the sizes for this number of splits and of channels."""
        at_once = min(pl.next_power_of_2(splits), 128)
        channels, warps = (128, 1) if at_once <= 16 else (32, 2 if at_once <= 64 else 4)
        return MergeShape(at_once, min(pl.next_power_of_2(dim), channels), warps)

    def blocks(self, dim: int) -> int:
        """Returns how many programs merge the channels of a head."""
        return pl.cdiv(dim, self.channels)


def merge_kernel(
    # inputs
    parts_ref,  # [B, T, H, splits, D] float32, attention over each split
    log_sum_exp_ref,  # [B, T, H, splits] float32, base 2; -inf: the part is arbitrary
    sinks_ref,  # [H]; None: no sinks
    # outputs
    out_ref,  # [B, T, H, D] in the model's dtype
    # static parameters
    *,
    shape,
):
    """Merges the splits of some channels of one head of one query, in one Pallas program.

    Each split has weight 2**log_sum_exp.
    """
    query, batch, dim, splits = pl.program_id(1), pl.program_id(2), out_ref.shape[-1], parts_ref.shape[3]
    program, blocks = pl.program_id(0), shape.blocks(dim)
    head, block = jax.lax.div(program, blocks), jax.lax.rem(program, blocks)
    channels = block * shape.channels + jnp.arange(shape.channels)
    is_channel = channels < dim

    def step(index, carry):
        # Online softmax over the splits, as in `online_softmax_update`.
        acc, top, total = carry
        split = index * shape.at_once + jnp.arange(shape.at_once)
        exists = split < splits
        weight = pltriton.load(log_sum_exp_ref.at[batch, query, head, split], mask=exists, other=-jnp.inf)
        at = (batch, query, head, split[:, None], channels[None, :])
        part = pltriton.load(parts_ref.at[at], mask=exists[:, None] & is_channel[None, :], other=0)
        new_top = jnp.maximum(top, jnp.max(weight))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        weight, fade = jnp.exp2(weight - base), jnp.exp2(top - base)
        acc = acc * fade + jnp.sum(_weighted(part, weight[:, None]), axis=0)
        return acc, new_top, total * fade + jnp.sum(weight)

    empty = (jnp.zeros(channels.shape, jnp.float32), jnp.float32(-jnp.inf), jnp.float32(0))
    acc, top, total = jax.lax.fori_loop(0, pl.cdiv(splits, shape.at_once), step, empty)
    if sinks_ref is not None:
        total += sink_weight(sinks_ref[head], top)
    out = (acc * (1.0 / jnp.where(total == 0, 1.0, total))).astype(out_ref.dtype)
    pltriton.store(out_ref.at[batch, query, head, channels], out, mask=is_channel)


def _weighted(part: Array, weight: Array) -> Array:
    """Returns part * weight; 0 where the weight is 0, since the part may then be NaN."""
    return jnp.where(weight > 0, part * weight, 0.0)


def merge_and_quantize_kernel(
    # inputs
    parts_ref,  # as in `merge_kernel`
    log_sum_exp_ref,
    sinks_ref,
    # outputs
    values_ref,  # [B, T, H, D] float8_e4m3fn
    scale_ref,  # [B, T] float32
    # static parameters
    *,
    dtype,  # the model's dtype, to which the attention is rounded before it is quantised
):
    """Merges the splits of all heads of one query, and quantises the heads as one row, in one Pallas program."""
    query, batch, (heads, dim) = pl.program_id(0), pl.program_id(1), values_ref.shape[2:]
    head, channel = jnp.arange(pl.next_power_of_2(heads)), jnp.arange(pl.next_power_of_2(dim))[None, :]
    is_head = head < heads
    mask = is_head[:, None] & (channel < dim)
    # Load every split.
    parts, weights = [], []
    for split in range(parts_ref.shape[3]):
        weight = log_sum_exp_ref.at[batch, query, head, split]
        part = parts_ref.at[batch, query, head[:, None], split, channel]
        weights.append(pltriton.load(weight, mask=is_head, other=-jnp.inf))
        parts.append(pltriton.load(part, mask=mask, other=0))
    # Merge.
    top = functools.reduce(jnp.maximum, weights)
    weights = [jnp.exp2(weight - jnp.where(top == -jnp.inf, 0.0, top)) for weight in weights]
    acc = sum(_weighted(part, weight[:, None]) for part, weight in zip(parts, weights, strict=True))
    total = sum(weights)
    if sinks_ref is not None:
        total += sink_weight(pltriton.load(sinks_ref.at[head], mask=is_head, other=0), top)
    out = (acc * (1.0 / jnp.where(total == 0, 1.0, total))[:, None]).astype(dtype)
    # Quantise.
    values, scale_ref[batch, query] = scaled_rows(out, FP8, dims=2)
    pltriton.store(values_ref.at[batch, query, head[:, None], channel], values, mask=mask)
