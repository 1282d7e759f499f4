"""Gated delta nets (arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have them: config, weights and computation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from convert.fields import CheckpointError
from jspec.core.numerics import Numerics
from jspec.core.records import TokenBatch
from jspec.models.mixers.recurrent import Recurrent, heads_of, is_apart
from jspec.models.parts.checks import check_divided, positive_values
from jspec.models.parts.conv_state import convolved, taps_of
from jspec.models.parts.delta_nodes import run_nodes, takes_kernels
from jspec.models.parts.delta_state import DeltaState, run_tokens
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import by_token, norm_rows
from jspec.models.parts.param_spec import ParamSpec, norm
from pallas_kernels.dispatch import HOPPER, Kernel, dispatch
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

    def _run(
        self, layer: LayerWeights, projected: Array, gates: Array, state: DeltaState, batch: TokenBatch
    ) -> tuple[tuple[Array], DeltaState]:
        """Convolve the projected rows and apply the rule; `Recurrent._run`. The array is that of the outputs."""
        numerics = batch.numerics

        def reference(projected: Array, gates: Array, state: DeltaState, batch: TokenBatch) -> Any:
            taps, inputs = taps_of(state.inputs, projected[..., : self.conv_size], self.taps, batch)
            made = partial(self._tokens, layer, state.records.keys.dtype, numerics, is_apart(batch))
            new = by_token(made, numerics, taps, gates)
            new = jax.tree.map(lambda rows: jnp.swapaxes(rows, 1, 2), new)
            return run_tokens(state._replace(inputs=inputs), new, batch)

        def kernel(projected: Array, gates: Array, state: DeltaState, batch: TokenBatch, *, interpret: Any) -> Any:
            assert layer.conv is not None
            # Sums are added up before they are laid out: else each element of the layout adds up parts by itself.
            rates, decays = self._rates_and_decays(layer, jax.lax.optimization_barrier(gates))
            return run_nodes(state, projected, rates, decays, layer.conv, batch, interpret=interpret)

        kernels = [Kernel(HOPPER, kernel, not takes_kernels(state, projected, self.taps, batch))]
        arguments = projected, gates, state, batch
        outputs, state = dispatch(numerics.options["implementation"], kernels, reference, *arguments)
        return (jnp.swapaxes(outputs, 1, 2),), state

    def _rates_and_decays(self, layer: LayerWeights, gates: Array) -> tuple[Array, Array]:
        """Return the rates and the log decays of the rule from their sums, [*rows, heads]."""
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
    ) -> DeltaTokens:
        """Return the inputs of the rule, [*rows, heads, ...], from inputs of the convolution, and rates and decays.

        Args:
            layer: weights of the layer.
            dtype: dtype of queries, keys and values.
            numerics: whether bits may depend on the batch.
            apart: round the sums of the convolution to ``dtype``, and write them to memory before heads are normed.
            taps: inputs of the convolution.
            gates: sums of rates, then those of decays, [*rows, 2 heads].
        """
        assert layer.conv is not None
        mixed = jax.nn.silu(convolved(taps, layer.conv))
        if apart:
            mixed = jax.lax.optimization_barrier(mixed.astype(dtype)).astype(jnp.float32)
        q, k, v = jnp.split(mixed, (self.key_size, 2 * self.key_size), axis=-1)
        q, k = (_unit(heads_of(rows, self.key_heads), numerics) for rows in (q, k))
        rates, decays = self._rates_and_decays(layer, gates)
        q, k, v = (rows.astype(dtype) for rows in (q * self.key_dim**-0.5, k, heads_of(v, self.value_heads)))
        return DeltaTokens(q, k, v, decays, rates)

    def _gated(
        self, layer: LayerWeights, eps: float, dtype: Any, batch: TokenBatch, gate: Array, *rows: Array
    ) -> Float[Array, "*rows channels"]:
        """Return the normed outputs of all heads times the output gate; `Recurrent._gated`."""
        (outputs,) = rows
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
