"""Grouped-query attention: its config, weights, computation and description."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from convert.fields import CheckpointError
from convert.huggingface import MapRow, selected, stacked
from jspec.core.numerics import Numerics
from jspec.core.records import PromptBatch, TokenBatch
from jspec.models.mixers.attention import Attention, Queries, attend_pages, concat_heads
from jspec.models.parts.checks import check_divided, positive_values, unsupported
from jspec.models.parts.kv_pool import KVPool
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.param_spec import ParamSpec, norm
from jspec.models.parts.rope import PLAIN, Rope, tables
from pallas_kernels.attention.append_attention import append_attention
from pallas_kernels.attention.rope_append import HeadTransform, rotate_append
from pallas_kernels.layers.norm_columns import norm_columns
from pallas_kernels.layers.partial_sums import PartialSums, columns, reduce_partials
from pallas_kernels.layers.shard import AXIS, Shard, gather_columns, own_columns
from pallas_kernels.layers.weights import Inputs, QuantizedActivation, has_dynamic_activations

# Norms of queries and keys, in words.
QK_NORMS = {"head": "each head", "unit": "each head, without weights", "all": "all heads together"}

GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}


@dataclass(frozen=True)
class GQA(Attention):
    """Grouped-query attention (arXiv:2305.13245).

    Attributes:
        heads: number of query heads.
        kv_heads: number of key heads, which is also the number of value heads.
        head_dim: number of channels of a head.
        bias: whether the query, key and value projections have a bias.
        output_bias: whether the output projection has a bias.
        qk_norm: norm of queries and keys before the rotation: "head": of each head; "unit": of each head, without a
            weight, which is the same before and after a rotation; "all": of all heads together; None: none.
        v_norm: whether each value head is divided by its root mean square (Gemma 4).
        values_are_keys: whether values are the products of the key projection, before norm and rotation. A checkpoint
            of Hugging Face then has no value projection; loading copies the rows of the key projection.
        window: number of newest tokens that a query attends to, its own included; None: all.
        chunk: number of tokens of a chunk; a query attends to tokens of its own chunk only, which begins at a multiple
            of this number (Llama 4); None: no chunks.
        rope: rotary position embedding.
        is_interleaved: whether a checkpoint of Hugging Face rotates channels 2i and 2i + 1 together; loading reorders
            them, so that channel i is rotated with channel i + head_dim / 2.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: limit c of the scores x, which become c * tanh(x / c) (Gemma 2, arXiv:2408.00118); None: no limit.
        sinks: whether each query head has a sink, a score without a value (gpt-oss, arXiv:2508.10925).
        output_gate: whether each head's output is multiplied by a function of further products of the layer's input.
            A checkpoint of Hugging Face stores their rows behind those of each query head.
        gates_apart: whether it stores these rows in a tensor of their own instead, after that of values (Muse).
        head_gates: whether all channels of a head have one gate (Laguna).
        gate_function: function of the gates, "sigmoid" or "softplus".
        causal: whether a query attends to no later token, whatever the batch's mask says, which lets the tokens of a
            DFlash block attend to each other.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    qk_norm: str | None = None
    v_norm: bool = False
    values_are_keys: bool = False
    window: int | None = None
    chunk: int | None = None
    rope: Rope = PLAIN
    is_interleaved: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    gates_apart: bool = False
    head_gates: bool = False
    gate_function: str = "sigmoid"
    causal: bool = False

    @property
    def q_size(self) -> int:
        """Number of channels of all query heads in total."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Number of channels of all key heads in total; all value heads have as many."""
        return self.kv_heads * self.head_dim

    @property
    def gate_size(self) -> int:
        """Number of gates of all query heads in total."""
        return (self.heads if self.head_gates else self.q_size) if self.output_gate else 0

    @property
    def cached_heads(self) -> int:
        return self.kv_heads

    @property
    def pool_dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim

    @property
    def key_dim(self) -> int:
        return self.head_dim

    @property
    def reach(self) -> int | None:
        """The smaller one of window and chunk; `Mixer.reach`."""
        return min((size for size in (self.window, self.chunk) if size is not None), default=None)

    def divided(self, devices: int) -> GQA:
        """Return the attention of one of several devices, which has some of the heads; `Mixer.divided`."""
        check_divided("num_attention_heads", self.heads, devices)
        if devices % self.kv_heads:
            check_divided("num_key_value_heads", self.kv_heads, devices, "divisor or a multiple")
        return replace(self, heads=self.heads // devices, kv_heads=max(self.kv_heads // devices, 1))

    def check(self) -> None:
        """Check the sizes and options of the attention; `Mixer.check`."""
        named = {"num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim}
        limits = {"sliding_window": self.window, "attention_chunk_size": self.chunk, "attention scale": self.scale}
        limits |= {"attn_logit_softcapping": self.softcap}
        positive_values("config", named | {name: limit for name, limit in limits.items() if limit is not None})
        if self.heads % self.kv_heads:
            raise CheckpointError(
                "num_key_value_heads",
                f"expected a divisor of num_attention_heads {self.heads}, got {self.kv_heads}; correct config.json",
            )
        if self.head_dim % 2:
            raise CheckpointError("head_dim", f"expected an even number, got {self.head_dim}; correct config.json")
        if self.qk_norm not in (None, *QK_NORMS):
            raise unsupported("qk_norm", self.qk_norm, " or ".join(map(repr, (None, *QK_NORMS))))
        if self.gate_function not in GATES:
            raise unsupported("gating", self.gate_function, " or ".join(map(repr, GATES)))
        if self.v_norm and self.qk_norm == "all":
            raise unsupported("v_norm", True, "False with norms of all heads together")
        if self.qk_norm == "unit" and self.rope.attention_factor != 1.0:  # a norm after the rotation would remove it
            raise unsupported(
                "attention_factor", self.rope.attention_factor, "1.0 with norms of q and k without weights"
            )
        self.rope.check(self.head_dim)

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """Declare the weights; `Mixer.params`."""
        q, kv, dim = self.q_size, self.kv_size, self.head_dim
        parts = (q, kv, kv, self.gate_size) if self.output_gate else (q, kv, kv)
        stored = (2 * q, kv, kv) if self.output_gate and not self.gates_apart else ()
        unit = (dim, dim, dim, 1) if self.head_gates else dim
        params = {
            "qkv": ParamSpec((sum(parts), inputs), ("heads", "hidden"), parts=parts, stored=stored, unit=unit),
            "o": ParamSpec((hidden, q), ("hidden", "heads")),
        }
        if self.bias:
            params["qkv_bias"] = ParamSpec((q + 2 * kv,), ("heads",), init="zeros", parts=(q, kv, kv), unit=dim)
        if self.output_bias:
            params["o_bias"] = ParamSpec((hidden,), ("hidden",), init="zeros")
        if self.qk_norm in ("head", "all"):
            sizes = (q, kv) if self.qk_norm == "all" else (dim, dim)
            axis = "channels" if self.qk_norm == "all" else "head_dim"
            params["q_norm"], params["k_norm"] = (norm(size, axis, norm_dtype) for size in sizes)
        if self.sinks:
            params["sinks"] = ParamSpec((self.heads,), ("heads",), dtype="float32")
        return params

    def file_row(self, row: MapRow) -> MapRow:
        """Return rows in the order of the kernels' rotation, and values that are keys; `Mixer.file_row`.

        A file rotates channel i of the first r channels with channel i + r / 2, or channel 2i with channel 2i + 1.
        Kernels rotate channel i of a head of d channels with channel i + d / 2. Scores do not depend on the order of
        the channels, if queries and keys have the same order.
        """
        name = row.parameter.rpartition(".")[2]
        if name == "qkv" and self.values_are_keys:
            row = self._without_values(row)
        if name == "qkv" and self.output_gate and not self.gates_apart:
            row = self._gates_last(row)
        rotated, dim = self.rope.rotated(self.head_dim), self.head_dim
        is_kept = rotated == dim and not self.is_interleaved
        if is_kept or name not in ("qkv", "qkv_bias", "q_norm", "k_norm"):
            return row
        pairs = np.arange(rotated).reshape(-1, 2).T if self.is_interleaved else np.arange(rotated).reshape(2, -1)
        order = np.concatenate([pairs, np.arange(rotated, dim).reshape(2, -1)], axis=1).ravel()
        index, heads = np.arange(row.shape[0]), self._reordered_heads(name)
        index[: heads * dim] = (np.arange(heads)[:, None] * dim + order).ravel()
        return selected(row, index)

    def _without_values(self, row: MapRow) -> MapRow:
        """Make the fused projection of a layer whose values are keys from the tensors of queries and keys."""
        queries_and_keys = stacked(row.parameter, dict(list(row.sources.items())[:2]), row.dtype)
        keys = np.arange(self.q_size, self.q_size + self.kv_size)
        return selected(queries_and_keys, np.concatenate([np.arange(self.q_size), keys, keys]))

    def _gates_last(self, row: MapRow) -> MapRow:
        """Make the fused projection from tensors of queries with gates, keys and values: gates come last."""
        both = np.arange(2 * self.q_size).reshape(self.heads, 2, self.head_dim)
        keys_and_values = both.size + np.arange(2 * self.kv_size)
        return selected(row, np.concatenate([both[:, 0].ravel(), keys_and_values, both[:, 1].ravel()]))

    def _reordered_heads(self, name: str) -> int:
        """Return how many heads, from the first row of a parameter on, are reordered."""
        if name in ("qkv", "qkv_bias"):
            return self.heads + self.kv_heads
        count = self.heads if name == "q_norm" else self.kv_heads
        return count if self.qk_norm == "all" else 1

    def mix_projected(
        self,
        layer: LayerWeights,
        qkv: PartialSums,
        pool: KVPool,
        batch: TokenBatch,
        dtype: jnp.dtype,
        *,
        eps: float,
        start: int = 0,
    ) -> tuple[Inputs, KVPool]:
        """Write keys and values, and attend; `Attention.mix_projected`.

        One kernel does both for the nodes of draft trees, if ``batch`` has no ``base`` and is not deterministic.
        """
        if batch.base is not None or batch.deterministic or isinstance(batch, PromptBatch):
            out, pool = super().mix_projected(layer, qkv, pool, batch, dtype, eps=eps, start=start)
            return self._gated(out, qkv, dtype), pool
        heads, transform = self._transform(layer, qkv, batch, dtype, eps)
        rows = batch.page_table, batch.first_row, batch.valid, None if self.causal else batch.bits, layer.sinks
        options: dict[str, Any] = {"heads": self.heads, "dtype": dtype, "implementation": batch.implementation}
        options |= {"start": start, "quantize_output": self._quantizes(layer), **self._scores(batch)}
        out, k, v = append_attention(pool.k, pool.v, heads, transform, *rows, **options)
        return self._gated(batch.pack(concat_heads(out)), qkv, dtype), KVPool(k, v)

    def _gated(self, out: Inputs, qkv: PartialSums, dtype: jnp.dtype) -> Inputs:
        """Multiply the output of all heads by its gates, the last columns of the projection, if it has any."""
        if not self.output_gate:
            return out
        assert not isinstance(out, QuantizedActivation)
        gates = GATES[self.gate_function](reduce_partials(columns(qkv, self.q_size + 2 * self.kv_size), jnp.float32))
        gates = jnp.repeat(gates, self.head_dim, axis=-1) if self.head_gates else gates
        return (out * gates).astype(dtype)

    def write(
        self, layer: LayerWeights, qkv: PartialSums, pool: KVPool, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Queries, KVPool]:
        """Rotate queries and keys, and write keys and values; `Attention.write`."""
        qkv, transform = self._transform(layer, qkv, batch, dtype, eps)
        rows = batch.page_table, batch.first_row, batch.valid
        options = {"heads": self.heads, "dtype": dtype, **batch.numerics.options}
        q, k, v = rotate_append(pool.k, pool.v, qkv, transform, *rows, **options)
        return q, KVPool(k, v)

    def attend(self, layer: LayerWeights, q: Queries, pool: KVPool, batch: TokenBatch, *, start: int = 0) -> Inputs:
        """Attend with all heads; `Attention.attend`."""
        batch = replace(batch, bits=None) if self.causal else batch
        options: dict[str, Any] = {"start": start, "quantize_output": self._quantizes(layer)}
        return attend_pages(q, pool, batch, self._scores(batch), sinks=layer.sinks, **options)

    def _transform(
        self, layer: LayerWeights, qkv: PartialSums, batch: TokenBatch, dtype: jnp.dtype, eps: float
    ) -> tuple[Any, HeadTransform]:
        """Return the fused projection, not packed, and the bias, norms and rotation that it still needs."""
        qkv = batch.unpack(columns(qkv, 0, self.q_size + 2 * self.kv_size) if self.output_gate else qkv)
        cos_sin = tables(self.rope, self.head_dim, batch.positions, batch.numerics)
        if self.qk_norm == "all":
            normed = norm_all_heads(layer, self, qkv, eps=eps, dtype=dtype, numerics=batch.numerics)
            return normed[None], HeadTransform(cos_sin)
        ones = jnp.ones(self.head_dim, dtype)
        q_norm, k_norm = (ones, ones) if self.qk_norm == "unit" else (layer.q_norm, layer.k_norm)
        return qkv, HeadTransform(cos_sin, layer.qkv_bias, q_norm, k_norm, ones if self.v_norm else None, eps)

    def _quantizes(self, layer: LayerWeights) -> bool:
        """Return whether the kernel of attention rounds its output for the output projection."""
        return has_dynamic_activations(layer.o) and not self.output_gate

    def _scores(self, batch: TokenBatch) -> dict[str, Any]:
        """Return how scores are computed: the smaller window of batch and layer, chunk, factor and limit."""
        window = min((size for size in (batch.window, self.window) if size is not None), default=None)
        return {"window": window, "chunk": self.chunk, "scale": self.scale, "softcap": self.softcap}

    def describe(self) -> dict[str, str]:
        """Describe heads, window and rotation; `Mixer.describe`."""
        parts = [f"{self.heads} heads", f"{self.kv_heads} key-value heads", f"head_dim {self.head_dim}"]
        if self.bias:
            parts.append(f"biases of {'q, k, v and o' if self.output_bias else 'q, k and v'}")
        if self.qk_norm:
            parts.append(f"norms of q and k ({QK_NORMS[self.qk_norm]})")
        if self.v_norm:
            parts.append("norms of v (each head, without weights)")
        if self.values_are_keys:
            parts.append("values are keys")
        if self.scale is not None:
            parts.append(f"scores times {self.scale:g}")
        if self.softcap is not None:
            parts.append(f"scores limited to {self.softcap:g}")
        if self.sinks:
            parts.append("sinks")
        if self.output_gate:
            gated = "heads' outputs" if self.head_gates else "output"
            parts.append(f"gates of the {gated}{'' if self.gate_function == 'sigmoid' else f' ({self.gate_function})'}")
        if self.causal:
            parts.append("causal within a block")
        limits = [f"{self.window} tokens"] if self.window is not None else []
        limits += [f"chunks of {self.chunk} tokens"] if self.chunk is not None else []
        return {"attention": ", ".join(parts), "window": ", ".join(limits) or "none", "rope": self.rope.describe()}


def norm_all_heads(
    layer: LayerWeights, config: GQA, qkv: PartialSums, *, eps: float, dtype: jnp.dtype, numerics: Numerics
) -> Float[Array, "batch tokens width"]:
    """Norm the queries of all heads together, and so the keys; devices that share the heads gather them for this.

    Args:
        layer, qkv, eps, dtype: as for `GQA.write`.
        config: the attention, with the heads of this device.
        numerics: as for `norm_columns`.
    """
    assert layer.q_norm is not None and layer.k_norm is not None
    norm = partial(norm_columns, eps=eps, dtype=dtype, **numerics.options)
    if not isinstance(layer.o, Shard):
        return norm(qkv, layer.q_norm, layer.k_norm, bias=layer.qkv_bias)
    total = reduce_partials(qkv, jnp.float32)
    total = total if layer.qkv_bias is None else total + layer.qkv_bias
    sizes = config.q_size, config.kv_size
    q, k, v = jnp.split(total, (sizes[0], sum(sizes)), axis=-1)
    copies = jax.lax.axis_size(AXIS) * k.shape[-1] // layer.k_norm.shape[0]  # devices with the same keys
    queries, keys = gather_columns(q), gather_columns(k, copies)
    normed = norm(jnp.concatenate([queries, keys, v], axis=-1)[None], layer.q_norm, layer.k_norm)
    queries, keys, v = jnp.split(normed, (queries.shape[-1], queries.shape[-1] + keys.shape[-1]), axis=-1)
    return jnp.concatenate([own_columns(queries, sizes[0]), own_columns(keys, sizes[1], copies), v], axis=-1)
