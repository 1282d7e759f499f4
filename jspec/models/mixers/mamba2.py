"""Mamba 2 (arXiv:2405.21060), as Nemotron-H has it: config, weights and computation.

A token with channels x of a head, a step dt > 0, and rows B and C of the head's group advances the state S of the head:

    S = e^(dt A) S + (dt x) B^T;  y = S C + D x

This is the rule of `pallas_kernels.recurrent.gated_delta` without a correction: keys are B, queries C, values dt x and
log decays dt A. The output is norm(y * silu(z)), with a norm of the channels of each group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from convert.fields import CheckpointError
from convert.huggingface import MapRow, selected, stacked
from jspec.core.numerics import Numerics
from jspec.core.records import TokenBatch
from jspec.models.mixers.recurrent import Recurrent, heads_of
from jspec.models.parts.checks import check_divided, positive_values
from jspec.models.parts.conv_state import convolved
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import norm_rows
from jspec.models.parts.param_spec import ParamSpec
from pallas_kernels.recurrent.records import DeltaTokens


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """A causal convolution of few taps, then a state space model in every head; heads of a group share B and C.

    Attributes:
        conv_bias: whether the convolution has a bias.
    """

    corrects: ClassVar[bool] = False
    conv_bias: bool

    def check(self) -> None:
        """Check the sizes; `Mixer.check`."""
        sizes = {"n_groups": self.key_heads, "mamba_num_heads": self.value_heads, "conv_kernel": self.taps}
        positive_values("config", sizes | {"ssm_state_size": self.key_dim, "mamba_head_dim": self.value_dim})
        if self.value_heads % self.key_heads:
            raise CheckpointError(
                "n_groups",
                f"expected a divisor of mamba_num_heads {self.value_heads}, got {self.key_heads}; correct config.json",
            )

    def divided(self, devices: int) -> Mamba2:
        """Return the groups of one of several devices, which norms them; `Mixer.divided`."""
        check_divided("n_groups", self.key_heads, devices)
        return replace(self, key_heads=self.key_heads // devices, value_heads=self.value_heads // devices)

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """Declare the weights; `Mixer.params`.

        The rows of ``qkv`` are those of C, B, x and z, those of ``gates`` the steps. The latter stay unquantised, as do
        the steps' and decays' parameters, which are in float32.
        """
        keys, values, heads = self.key_size, self.value_size, self.value_heads
        parts, units = (keys, keys, values, values), (self.key_dim,) * 2 + (self.value_dim,) * 2
        conv = parts[:3], units[:3]
        params = {
            "qkv": ParamSpec((sum(parts), inputs), ("heads", "hidden"), parts=parts, unit=units),
            "o": ParamSpec((hidden, values), ("hidden", "heads")),
            "gates": ParamSpec((heads, inputs), ("heads", "hidden"), parts=(heads,)),
            "conv": ParamSpec((self.conv_size, self.taps), ("heads", "taps"), parts=conv[0], unit=conv[1]),
            "a_log": ParamSpec((heads,), ("heads",), init="zeros", dtype="float32"),
            "dt_bias": ParamSpec((heads,), ("heads",), init="ones", dtype="float32"),
            "skip": ParamSpec((heads,), ("heads",), init="ones", dtype="float32"),
            "delta_norm": ParamSpec((values,), ("heads",), init="ones", dtype=norm_dtype),
        }
        if self.conv_bias:
            params["conv_bias"] = ParamSpec((self.conv_size,), ("heads",), "zeros", parts=conv[0], unit=conv[1])
        return params

    def file_row(self, row: MapRow) -> MapRow:
        """Take a parameter's rows of a tensor, whose rows are those of z, x, B, C and dt; `Mixer.file_row`."""
        name, (keys, values) = row.parameter.rpartition(".")[2], (self.key_size, self.value_size)
        row = super().file_row(row)
        if name in ("conv", "conv_bias"):
            x, b, c = np.split(np.arange(self.conv_size), [values, values + keys])
            return selected(row, np.concatenate([c, b, x]))
        if name not in ("qkv", "gates"):
            return row
        whole = values + self.conv_size + self.value_heads, row.shape[1]
        z, x, b, c, dt = np.split(np.arange(whole[0]), np.cumsum([values, values, keys, keys]))
        tensor = stacked(row.parameter, dict.fromkeys(row.sources, whole), row.dtype)
        return selected(tensor, dt if name == "gates" else np.concatenate([c, b, x, z]))

    def _factors_and_decays(self, layer: LayerWeights, gates: Array) -> tuple[Array, Array]:
        """Return the steps and the log decays; `Recurrent._factors_and_decays`."""
        assert layer.dt_bias is not None and layer.a_log is not None
        steps = jax.nn.softplus(gates + layer.dt_bias)
        return steps, steps * -jnp.exp(layer.a_log)

    def _tokens(
        self,
        layer: LayerWeights,
        dtype: Any,
        numerics: Numerics,
        apart: bool,
        taps: Float[Array, "*rows taps channels"],
        gates: Array,
    ) -> tuple[DeltaTokens, Float[Array, "*rows heads value_dim"]]:
        """Return the inputs of the rule, and the channels x of each head; `Recurrent._tokens`."""
        assert layer.conv is not None
        sums = convolved(taps, layer.conv)
        sums = sums if layer.conv_bias is None else sums + layer.conv_bias.astype(jnp.float32)
        mixed = jax.nn.silu(sums).astype(dtype)
        mixed = jax.lax.optimization_barrier(mixed) if apart else mixed
        c, b, x = jnp.split(mixed, (self.key_size, 2 * self.key_size), axis=-1)
        c, b, x = heads_of(c, self.key_heads), heads_of(b, self.key_heads), heads_of(x, self.value_heads)
        steps, decays = self._factors_and_decays(layer, gates)
        values = (steps[..., None] * x.astype(jnp.float32)).astype(dtype)
        return DeltaTokens(c, b, values, decays, None), x

    def _gated(
        self, layer: LayerWeights, eps: float, dtype: Any, batch: TokenBatch, gate: Array, *rows: Array
    ) -> Float[Array, "*rows channels"]:
        """Return the outputs times the gate, normed by groups; `Recurrent._gated`."""
        outputs, x = rows
        assert layer.delta_norm is not None and layer.skip is not None
        skipped = layer.skip[:, None] * x.astype(jnp.float32)
        if batch.deterministic:  # in any program the product is rounded before it is added
            skipped = jax.lax.optimization_barrier(skipped)
        outputs = outputs + skipped
        gated = outputs.reshape(gate.shape) * jax.nn.silu(gate.astype(jnp.float32))
        groups = heads_of(gated, self.key_heads)
        normed = norm_rows(groups, jnp.ones(groups.shape[-1], jnp.float32), eps, batch.numerics)
        return (normed.reshape(gate.shape) * layer.delta_norm.astype(jnp.float32)).astype(dtype)

    def describe(self) -> dict[str, str]:
        """Describe heads and taps; `Mixer.describe`."""
        heads = f"{self.value_heads} heads of {self.value_dim} channels in {self.key_heads} groups"
        bias = " and a bias" if self.conv_bias else ""
        return {"Mamba 2 mixer": f"{heads}, {self.key_dim} state channels, {self.taps} taps{bias}"}
