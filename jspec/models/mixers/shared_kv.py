"""Attention to the keys and values of another layer (Gemma 4 and its assistant): its queries alone are its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from convert.fields import CheckpointError
from jspec.core.records import TokenBatch
from jspec.models.mixers.attention import Attention, Queries
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.parts.checks import unsupported
from jspec.models.parts.kv_pool import KVPool, NoPool, PoolShape
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.param_spec import ParamSpec
from jspec.models.parts.rope import tables
from pallas_kernels.attention.rope_append import HeadTransform
from pallas_kernels.attention.rotate_queries import rotate_queries
from pallas_kernels.layers.partial_sums import PartialSums


@dataclass(frozen=True)
class QueriesOnly(GQA):
    """Grouped-query attention that reads pools of another layer, in which all rows that it sees are written already."""

    @property
    def row_size(self) -> int:
        """Number of channels of queries; `Mixer.row_size`."""
        return self.q_size

    def check(self) -> None:
        """Check the sizes and options of the attention; `Mixer.check`."""
        super().check()
        others: dict[str, object] = {"attention_bias": self.bias, "attention_k_eq_v": self.values_are_keys}
        others |= {"sinks": self.sinks, "output gates": self.output_gate}
        others |= {"qk_norm": self.qk_norm} if self.qk_norm != "head" else {}
        for name, value in others.items():
            if value is not False:
                raise unsupported(name, value, "none in layers that share keys and values")

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """Declare the weights, of which those of keys and values are missing; `Mixer.params`."""
        params, size = super().params(hidden, inputs, norm_dtype), self.q_size
        params.pop("k_norm", None)
        return params | {"qkv": replace(params["qkv"], shape=(size, inputs), parts=(size,))}

    def _reordered_heads(self, name: str) -> int:
        return self.heads if name == "qkv" else super()._reordered_heads(name)

    def state(self, pool: PoolShape, dtype: str) -> NoPool:  # type: ignore[override]
        """Return the state of a layer that keeps nothing; `Mixer.state`."""
        return NoPool()

    def mix_projected(self, layer: LayerWeights, qkv: PartialSums, pool: KVPool, *rest: Any, **options: Any) -> Any:
        """Attend with the queries to the pools of the source; `Attention.mix_projected`."""
        return Attention.mix_projected(self, layer, qkv, pool, *rest, **options)

    def write(
        self, layer: LayerWeights, qkv: PartialSums, pool: KVPool, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Queries, KVPool]:
        """Rotate queries; the pools of the source stay as they are; `Attention.write`."""
        cos_sin = tables(self.rope, self.head_dim, batch.positions, batch.numerics)
        transform = HeadTransform(cos_sin, q_norm=layer.q_norm, eps=eps)
        options: dict[str, Any] = {"heads": self.heads, "dtype": dtype, **batch.numerics.options}
        return rotate_queries(batch.unpack(qkv), transform, **options), pool

    def describe(self) -> dict[str, str]:
        """Describe heads, window, rotation and source; `Mixer.describe`."""
        words = super().describe()
        attention = words["attention"].replace("norms of q and k", "norms of q")
        return words | {"attention": f"{attention}, keys and values of {self.source_name}"}

    @property
    def source_name(self) -> str:
        """The layer whose keys and values it reads, in words."""
        raise NotImplementedError


@dataclass(frozen=True)
class SharedKV(QueriesOnly):
    """Attention to the keys and values of an earlier layer of the same model (Gemma 4 E2B and E4B).

    Attributes:
        source: index of the layer whose keys and values it reads.
    """

    source: int = field(kw_only=True)

    def check_after(self, mixers: Sequence[Mixer]) -> None:
        """Check that the source is an earlier layer with keys and values of the same form; `Mixer.check_after`."""
        of_source = mixers[self.source] if self.source < len(mixers) else None
        has_pools = not isinstance(of_source, SharedKV)
        sizes = (of_source.kv_heads, of_source.head_dim) if isinstance(of_source, GQA) and has_pools else None
        if sizes != (self.kv_heads, self.head_dim):
            got = "none" if sizes is None else f"{sizes[0]} of {sizes[1]} channels"
            raise CheckpointError(
                "num_kv_shared_layers",
                f"expected {self.kv_heads} key-value heads of {self.head_dim} channels in the earlier layer "
                f"{self.source}, got {got}; correct config.json",
            )

    @property
    def source_name(self) -> str:
        return f"layer {self.source}"


@dataclass(frozen=True)
class TargetKV(QueriesOnly):
    """Attention of a drafter's layer to the keys and values of the target's last layer of the same type.

    Attributes:
        of_window: whether this is the target's last layer with a window, or the last one without.
    """

    of_window: bool = field(kw_only=True)

    def source_in(self, mixers: Sequence[Mixer]) -> int | None:
        """Return the index of the target's layer that has the keys and values; None: the target has none.

        Args:
            mixers: those of the target's layers. If the last of the type shares keys and values, an earlier one has
                them.
        """
        sources = [
            index if mixer.source is None else mixer.source
            for index, mixer in enumerate(mixers)
            if isinstance(mixer, GQA) and (mixer.window is not None) == self.of_window
        ]
        return sources[-1] if sources else None

    @property
    def source_name(self) -> str:
        return f"the target's last layer {'with' if self.of_window else 'without'} a window"
