"""Gated short convolutions (LFM2): their config, weights and computation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from convert.huggingface import MapRow, mapped
from jspec.core.records import TokenBatch
from jspec.models.mixers.mixer import Mixer
from jspec.models.parts.checks import check_divided, positive_values
from jspec.models.parts.conv_state import ConvState, convolved, taps_of
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import by_token, product
from jspec.models.parts.param_spec import ParamSpec
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.weights import Inputs


@dataclass(frozen=True)
class ShortConv(Mixer):
    """A gated causal convolution of few taps (LFM2, arXiv:2511.23404): y = C * conv(B * x), each channel by itself.

    Attributes:
        channels: number of channels of B, of C and of x.
        taps: number of tokens that a sum has, the token's own included.
    """

    channels: int
    taps: int

    @property
    def row_size(self) -> int:
        return 4 * self.channels

    @property
    def reach(self) -> int:
        """No cache rows are read; `Mixer.reach`."""
        return 0

    def check(self) -> None:
        """Check the sizes; `Mixer.check`."""
        positive_values("config", {"hidden_size": self.channels, "conv_L_cache": self.taps})

    def divided(self, devices: int) -> ShortConv:
        """Return the convolution of one of several devices, which has some of the channels; `Mixer.divided`."""
        check_divided("hidden_size", self.channels, devices)
        return replace(self, channels=self.channels // devices)

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """Declare the weights; `Mixer.params`. The rows of ``qkv`` are those of B, of C and of x."""
        size = self.channels
        return {
            "qkv": ParamSpec((3 * size, inputs), ("heads", "hidden"), parts=(size,) * 3),
            "o": ParamSpec((hidden, size), ("hidden", "heads")),
            "conv": ParamSpec((size, self.taps), ("heads", "taps"), parts=(size,)),
        }

    def file_row(self, row: MapRow) -> MapRow:
        """Return the taps without their second axis, which has one channel; `Mixer.file_row`."""
        return squeezed_taps(row)

    def state(self, pool: PoolShape, dtype: str) -> ConvState:
        """Make rows of zeros; `Mixer.state`."""
        return ConvState.zeros(pool, self.channels, self.taps)

    def traffic(self, nodes: int, context: int, tokens: float, sizes: tuple[int, int]) -> tuple[float, float]:
        """Count the inputs of the nodes, and of the tokens before them that they read; `Mixer.traffic`."""
        return (nodes + self.taps - 1) * self.channels * sizes[1], 0

    def mix(
        self, layer: LayerWeights, x: Inputs, state: ConvState, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Any, ConvState]:
        """Project, convolve and gate; `Mixer.mix`."""
        assert layer.conv is not None
        sums = batch.unpack(product(batch.numerics)(x, layer.qkv))
        b, c, x = jnp.split(reduce_partials(sums, dtype), 3, axis=-1)
        inputs, state = taps_of(state, b * x, self.taps, batch)
        return batch.pack(by_token(partial(_gated, layer.conv, dtype), batch.numerics, c, inputs)), state

    def describe(self) -> dict[str, str]:
        """Describe the convolution; `Mixer.describe`."""
        return {"short convolution": f"{self.channels} channels, {self.taps} taps"}


def _gated(weight: Float[Array, "channels taps"], dtype: Any, c: Array, inputs: Array) -> Array:
    return (c * convolved(inputs, weight)).astype(dtype)


def squeezed_taps(row: MapRow) -> MapRow:
    """Return the row of a convolution's weight [channels, taps], which a file stores as [channels, 1, taps]."""
    if row.parameter.rpartition(".")[2] != "conv":
        return row
    channels, taps = row.shape
    return mapped(row, lambda values: values.reshape(channels, taps), (channels, 1, taps))
