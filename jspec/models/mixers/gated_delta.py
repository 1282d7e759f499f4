"""Gated delta nets (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have them: config, weights and computation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from convert.fields import CheckpointError
from jspec.core.numerics import Numerics
from jspec.core.records import TokenBatch
from jspec.models.mixers.recurrent import Recurrent, heads_of, is_apart
from jspec.models.parts.checks import check_divided, positive_values
from jspec.models.parts.conv_state import convolved
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import norm_rows
from jspec.models.parts.param_spec import ParamSpec, norm
from pallas_kernels.recurrent.inputs_kernel import UNIT_EPS
from pallas_kernels.recurrent.records import DeltaTokens


@dataclass(frozen=True)
class GatedDelta(Recurrent):
    """A gated delta net: a causal convolution of few taps, then the gated delta rule in every head."""

    def check(self) -> None:
        """Check the sizes; `Mixer.check`."""
        sizes = {"linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.value_heads}
        sizes |= {"linear_key_head_dim": self.key_dim, "linear_value_head_dim": self.value_dim}
        positive_values("config", sizes | {"linear_conv_kernel_dim": self.taps})
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                "linear_num_key_heads",
                f"expected a divisor of linear_num_value_heads {self.value_heads}, got {self.key_heads}; correct "
                "config.json",
            )

    def divided(self, devices: int) -> GatedDelta:
        """Return the heads of one of several devices, of which several may have the same key head; `Mixer.divided`."""
        check_divided("linear_num_value_heads", self.value_heads, devices)
        if devices % self.key_heads:
            check_divided("linear_num_key_heads", self.key_heads, devices, "divisor or a multiple")
        return replace(self, key_heads=max(self.key_heads // devices, 1), value_heads=self.value_heads // devices)

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """Declare the weights; `Mixer.params`.

        The rows of ``qkv`` are those of queries, keys, values and output gates, those of ``gates`` the rates and the
        decays. The latter stay unquantised, as do the decays' parameters, which are in float32.
        """
        keys, values, heads = self.key_size, self.value_size, self.value_heads
        parts, units = (keys, keys, values, values), (self.key_dim,) * 2 + (self.value_dim,) * 2
        return {
            "qkv": ParamSpec(
                (sum(parts), inputs), ("heads", "hidden"), parts=parts, stored=(sum(parts[:3]), values), unit=units
            ),
            "o": ParamSpec((hidden, values), ("hidden", "heads")),
            "gates": ParamSpec((2 * heads, inputs), ("heads", "hidden"), parts=(heads, heads)),
            "conv": ParamSpec((sum(parts[:3]), self.taps), ("heads", "taps"), parts=parts[:3], unit=units[:3]),
            "a_log": ParamSpec((heads,), ("heads",), init="zeros", dtype="float32"),
            "dt_bias": ParamSpec((heads,), ("heads",), init="ones", dtype="float32"),
            "delta_norm": norm(self.value_dim, "channels", norm_dtype),
        }

    def _factors_and_decays(self, layer: LayerWeights, gates: Array) -> tuple[Array, Array]:
        """Return the rates and the log decays; `Recurrent._factors_and_decays`. The sums of rates come first."""
        assert layer.a_log is not None and layer.dt_bias is not None
        rates, decays = jnp.split(gates, 2, axis=-1)
        return jax.nn.sigmoid(rates), jax.nn.softplus(decays + layer.dt_bias) * -jnp.exp(layer.a_log)

    def _tokens(
        self,
        layer: LayerWeights,
        dtype: Any,
        numerics: Numerics,
        apart: bool,
        taps: Float[Array, "*rows taps channels"],
        gates: Array,
    ) -> tuple[DeltaTokens, Float[Array, "*rows heads value_dim"]]:
        """Return the inputs of the rule, and the values; `Recurrent._tokens`."""
        assert layer.conv is not None
        mixed = jax.nn.silu(convolved(taps, layer.conv))
        if apart:
            mixed = jax.lax.optimization_barrier(mixed.astype(dtype)).astype(jnp.float32)
        q, k, v = jnp.split(mixed, (self.key_size, 2 * self.key_size), axis=-1)
        q, k = (_unit(heads_of(rows, self.key_heads), numerics) for rows in (q, k))
        rates, decays = self._factors_and_decays(layer, gates)
        q, k, v = (rows.astype(dtype) for rows in (q * self.key_dim**-0.5, k, heads_of(v, self.value_heads)))
        return DeltaTokens(q, k, v, decays, rates), v

    def _gated(
        self, layer: LayerWeights, eps: float, dtype: Any, batch: TokenBatch, gate: Array, *rows: Array
    ) -> Float[Array, "*rows channels"]:
        """Return the normed outputs of all heads times the output gate; `Recurrent._gated`."""
        outputs, _ = rows
        assert layer.delta_norm is not None
        if is_apart(batch):  # the factors of the norm are written to memory before all else
            factor = jax.lax.rsqrt(jnp.mean(outputs**2, axis=-1, keepdims=True) + eps)
            normed = outputs * jax.lax.optimization_barrier(factor) * layer.delta_norm
        else:
            normed = norm_rows(outputs, layer.delta_norm.astype(jnp.float32), eps, batch.numerics)
        return (normed.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))).astype(dtype)

    def describe(self) -> dict[str, str]:
        """Describe heads and taps; `Mixer.describe`."""
        heads = f"{self.key_heads} key heads of {self.key_dim}, {self.value_heads} value heads of {self.value_dim}"
        return {"gated delta net": f"{heads} channels, {self.taps} taps"}


def _unit(rows: Float[Array, "*rows dim"], numerics: Numerics) -> Float[Array, "*rows dim"]:
    size = rows.shape[-1]
    return norm_rows(rows, jnp.full(size, size**-0.5, jnp.float32), UNIT_EPS / size, numerics)
