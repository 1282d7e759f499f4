"""The mixer of a layer without one, which has a feed-forward alone (Nemotron-H)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jspec.core.records import TokenBatch
from jspec.models.mixers.mixer import Mixer
from jspec.models.parts.kv_pool import NoPool, PoolShape
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.param_spec import ParamSpec
from pallas_kernels.layers.weights import Inputs


@dataclass(frozen=True)
class NoMixer(Mixer):
    """No mixing of tokens."""

    @property
    def row_size(self) -> int:
        return 0

    @property
    def reach(self) -> int:
        """No cache rows are read; `Mixer.reach`."""
        return 0

    @property
    def has_pages(self) -> bool:
        """It keeps nothing; `Mixer.has_pages`."""
        return True

    def check(self) -> None:
        """It has no sizes; `Mixer.check`."""

    def divided(self, devices: int) -> NoMixer:
        """Every device has all of it; `Mixer.divided`."""
        return self

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """It has no weights; `Mixer.params`."""
        return {}

    def state(self, pool: PoolShape, dtype: str) -> NoPool:
        """Return the state of a layer that keeps nothing; `Mixer.state`."""
        return NoPool()

    def mix(
        self, layer: LayerWeights, x: Inputs, state: NoPool, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Any, NoPool]:
        """Return the input, which is that of the feed-forward; `Mixer.mix`."""
        return x, state

    def traffic(self, nodes: int, context: int, tokens: float, sizes: tuple[int, int]) -> tuple[float, float]:
        """Nothing is read; `Mixer.traffic`."""
        return 0, 0

    def describe(self) -> dict[str, str]:
        """It has no part; `Mixer.describe`."""
        return {}
