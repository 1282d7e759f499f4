"""What every mixer of a decoder layer states: its options, its weights, its state and its computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp

from convert.huggingface import MapRow
from jspec.core.records import LayerState, TokenBatch
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.param_spec import ParamSpec
from pallas_kernels.layers.weights import Inputs


class Mixer:
    """The part of a decoder layer that mixes tokens, such as attention. Its kinds are frozen, hashable records.

    A new kind is one file of this folder, and an entry of `jspec.models.config.decoder_config.MIXERS`. Its weights are
    fields of `LayerWeights`.

    Attributes:
        source: index of the earlier layer whose state it reads, instead of one of its own; None: it has its own.
    """

    source: int | None = None

    @property
    def row_size(self) -> int:
        """How many values the products compute for a row, without the layer's output."""
        raise NotImplementedError

    @property
    def reach(self) -> int | None:
        """Number of newest tokens whose cache rows a token reads at most; None: all."""
        return None

    @property
    def has_pages(self) -> bool:
        """Whether all that it keeps of tokens is in pages; False: it has a state in each slot."""
        return False

    def check(self) -> None:
        """Check sizes and options.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
        raise NotImplementedError

    def check_after(self, mixers: Sequence[Mixer]) -> None:
        """Check what it reads of earlier layers, whose mixers are given in order; `check` documents errors."""

    def for_length(self, max_len: int) -> Self:
        """Return the mixer for texts of up to ``max_len`` tokens; `DecoderConfig.for_length` documents errors."""
        return self

    def divided(self, devices: int) -> Self:
        """Return the part of one of several devices.

        Raises:
            ValueError: heads or channels cannot be divided by the number of devices.
        """
        raise NotImplementedError

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """Declare the weights, by field name of `LayerWeights`.

        Args:
            hidden: number of channels of the residual stream.
            inputs: number of channels of the mixer's input.
            norm_dtype: dtype of the norms; None: that of the model.
        """
        raise NotImplementedError

    def file_row(self, row: MapRow) -> MapRow:
        """Return the row of a weight map for one of the weights, if a file of Hugging Face stores it in another form.

        Args:
            row: row that takes the tensors of the file as they are.
        """
        return row

    def state(self, pool: PoolShape, dtype: str) -> LayerState:
        """Make the layer's state, of zeros.

        Args:
            pool: numbers of slots and pages.
            dtype: dtype of cached keys and values.

        Raises:
            ValueError: an array would reach 2**31 elements; index arithmetic is verified only below that size.
        """
        raise NotImplementedError

    def mix(
        self,
        layer: LayerWeights,
        x: Inputs,
        state: Any,
        batch: TokenBatch,
        dtype: jnp.dtype,
        *,
        eps: float,
    ) -> tuple[Any, Any]:
        """Mix the tokens of a batch with those before them, and write what the state keeps of them.

        Args:
            layer: weights of the layer.
            x: normed input [batch, tokens, inputs]; packed rows if the batch has a packing.
            state: state of the layer.
            batch: positions, cache rows and mask of the tokens.
            dtype: dtype of the model.
            eps: epsilon of the norms.

        Returns:
            What the layer's output projection multiplies [batch, tokens, channels], and the new state.
        """
        raise NotImplementedError

    def traffic(self, nodes: int, context: int, tokens: float, sizes: tuple[int, int]) -> tuple[float, float]:
        """Return the bytes and flops that a round of one slot needs at least, without those of weights.

        Args:
            nodes: number of tokens that the round computes.
            context: number of committed tokens.
            tokens: number of tokens that a round commits, on average.
            sizes: bytes of a value in pages, and of a value that layers without pages keep of a token.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, str]:
        """Say in words what the mixer computes, by the name of its part, such as "attention" or "rope"."""
        raise NotImplementedError
