"""What mixers with a recurrent state in every head have in common: sizes, state and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from convert.huggingface import MapRow
from jspec.core.numerics import Numerics
from jspec.core.records import PromptBatch, TokenBatch
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.short_conv import squeezed_taps
from jspec.models.parts.conv_state import ConvState, taps_of
from jspec.models.parts.delta_nodes import run_nodes, takes_kernels
from jspec.models.parts.delta_state import DeltaState, run_tokens
from jspec.models.parts.kv_pool import MAX_POOL_ELEMENTS, PoolShape
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import by_token, product, small_product
from pallas_kernels.dispatch import HOPPER, Kernel, dispatch
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.weights import Inputs, QuantizedActivation
from pallas_kernels.recurrent.records import EVERY, DeltaTokens


@dataclass(frozen=True)
class Recurrent(Mixer):
    """A causal convolution of few taps, then in every head a state that each token advances.

    Attributes:
        key_heads: number of key heads, which is also the number of query heads.
        value_heads: number of value heads, each with a state; successive ones share a key head.
        key_dim, value_dim: number of channels of a key head and of a value head.
        taps: number of tokens that a sum of the convolution has, the token's own included.
        corrects: whether the rule corrects values by what their keys, of length 1, read of the state.
    """

    corrects: ClassVar[bool] = True
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_size(self) -> int:
        """Number of channels of all key heads in total."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Number of channels of all value heads in total."""
        return self.value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Number of channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def row_size(self) -> int:
        return 4 * self.key_size + 4 * self.value_size + 2 * self.value_heads

    @property
    def reach(self) -> int:
        """No cache rows are read; `Mixer.reach`."""
        return 0

    def file_row(self, row: MapRow) -> MapRow:
        """Return the taps without their second axis, which has one channel; `Mixer.file_row`."""
        return squeezed_taps(row)

    def state(self, pool: PoolShape, dtype: str) -> DeltaState:
        """Make states and records of zeros; `Mixer.state`."""
        heads, dims = (self.key_heads, self.value_heads), (self.key_dim, self.value_dim)
        elements = max(pool.slots, pool.copies) * self.value_heads * self.key_dim * self.value_dim
        if elements >= MAX_POOL_ELEMENTS:
            raise ValueError(
                f"slots: expected states below 2**31 elements, got {elements} (slots={pool.slots}, cached_states="
                f"{pool.copies}); lower both"
            )
        inputs = ConvState.zeros(pool, self.conv_size, self.taps)
        return DeltaState.zeros(pool, heads, dims, inputs)

    def traffic(self, nodes: int, context: int, tokens: float, sizes: tuple[int, int]) -> tuple[float, float]:
        """Count a state, records and inputs; `Mixer.traffic`.

        The state is read once, and written once in `EVERY` tokens. Committed tokens since then have records, on average
        ``(EVERY - 1) / 2``, which are read once. The nodes' records and inputs are written. The flops are those of the
        products of queries, and of keys where values are corrected, with the state.
        """
        state, tail = self.value_size * self.key_dim, min(context, (EVERY - 1) / 2)
        record = (self.key_size + self.value_size) * sizes[1] + 4 * self.value_heads
        inputs = (nodes + self.taps - 1) * self.conv_size * sizes[1]
        flops = 2 * (1 + self.corrects) * nodes * state
        return 4 * state * (1 + tokens / EVERY) + (tail + nodes) * record + inputs, flops

    def mix(
        self, layer: LayerWeights, x: Inputs, state: DeltaState, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Any, DeltaState]:
        """Project, convolve, apply the rule, and norm and gate its outputs; `Mixer.mix`."""
        assert layer.gates is not None and not isinstance(x, QuantizedActivation)
        projected = reduce_partials(batch.unpack(product(batch.numerics)(x, layer.qkv)), dtype)
        gates = batch.unpack(small_product(x, layer.gates, batch.numerics)[None])[0]
        rows, state = self._run(layer, projected, gates, state, batch)
        gated = partial(self._gated, layer, eps, dtype, batch)
        return batch.pack(by_token(gated, batch.numerics, projected[..., self.conv_size :], *rows)), state

    def _run(
        self, layer: LayerWeights, projected: Array, gates: Array, state: DeltaState, batch: TokenBatch
    ) -> tuple[tuple[Array, Array], DeltaState]:
        """Convolve the projected rows and apply the rule.

        Args:
            layer, state, batch: as for `Mixer.mix`.
            projected: queries, keys and values of all heads before the convolution, then the output gate.
            gates: what decays and factors of values are made of, [batch, tokens, ...].

        Returns:
            The outputs and the values before their factors, [batch, tokens, heads, value_dim], and the new state.
        """
        numerics = batch.numerics

        def reference(projected: Array, gates: Array, state: DeltaState, batch: TokenBatch) -> Any:
            taps, inputs = taps_of(state.inputs, projected[..., : self.conv_size], self.taps, batch)
            made = partial(self._tokens, layer, state.records.keys.dtype, numerics, is_apart(batch))
            new, values = by_token(made, numerics, taps, gates)
            new = jax.tree.map(lambda rows: jnp.swapaxes(rows, 1, 2), new)
            outputs, state = run_tokens(state._replace(inputs=inputs), new, batch)
            return (jnp.swapaxes(outputs, 1, 2), values), state

        def kernel(projected: Array, gates: Array, state: DeltaState, batch: TokenBatch, *, interpret: Any) -> Any:
            assert layer.conv is not None
            # Sums are added up before they are laid out: else each element of the layout adds up parts by itself.
            factors = self._factors_and_decays(layer, jax.lax.optimization_barrier(gates))
            options = dict(corrects=self.corrects, interpret=interpret)
            return run_nodes(state, projected, *factors, layer.conv, batch, bias=layer.conv_bias, **options)

        kernels = [Kernel(HOPPER, kernel, not takes_kernels(state, projected, self.taps, batch))]
        arguments = projected, gates, state, batch
        return dispatch(numerics.options["implementation"], kernels, reference, *arguments)

    def _factors_and_decays(self, layer: LayerWeights, gates: Array) -> tuple[Array, Array]:
        """Return the factors of values and the log decays of the rule from their sums, [*rows, heads]."""
        raise NotImplementedError

    def _tokens(
        self,
        layer: LayerWeights,
        dtype: Any,
        numerics: Numerics,
        apart: bool,
        taps: Float[Array, "*rows taps channels"],
        gates: Array,
    ) -> tuple[DeltaTokens, Float[Array, "*rows heads value_dim"]]:
        """Return the inputs of the rule, [*rows, heads, ...], and the values before their factors.

        Args:
            layer: weights of the layer.
            dtype: dtype of queries, keys and values.
            numerics: whether bits may depend on the batch.
            apart: round the sums of the convolution to ``dtype``, and write them to memory before all else.
            taps: inputs of the convolution.
            gates: as for `_run`.
        """
        raise NotImplementedError

    def _gated(
        self, layer: LayerWeights, eps: float, dtype: Any, batch: TokenBatch, gate: Array, *rows: Array
    ) -> Float[Array, "*rows channels"]:
        """Return the normed and gated outputs of all heads.

        Args:
            layer, eps, dtype, batch: as for `Mixer.mix`.
            gate: the output gate.
            rows: what `_run` returned, the outputs and the values before their factors.
        """
        raise NotImplementedError


def is_apart(batch: TokenBatch) -> bool:
    """Return whether arrays are written between steps of many tokens; XLA would write float32, or compute twice."""
    return isinstance(batch, PromptBatch) and not batch.deterministic


def heads_of(rows: Float[Array, "*rows channels"], heads: int) -> Float[Array, "*rows heads dim"]:
    """Return the channels of each head."""
    return rows.reshape(*rows.shape[:-1], heads, -1)
