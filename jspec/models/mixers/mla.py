"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), without keys and values of heads.

A token's row of the cache is a normed latent vector c in the value pool, and one rotated key r in the key pool. The
key of head h would be [K_h c, r] and its value V_h c. A query [q, s] of head h has the same scores with [c, r] if it
becomes [K_h^T q, s], and the sum of the values is V_h times the sum of the latent vectors. So all query heads attend to
one key-value head: keys [c, r], values c.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from convert.fields import CheckpointError
from convert.huggingface import MapRow, selected, stacked
from jspec.core.records import TokenBatch
from jspec.models.mixers.attention import Attention, Queries, attend_pages
from jspec.models.parts.checks import check_divided, positive_values, unsupported
from jspec.models.parts.kv_pool import KVPool
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.layers import product
from jspec.models.parts.param_spec import ParamSpec, norm
from jspec.models.parts.rope import PLAIN, Rope, query_factors, tables
from pallas_kernels.attention.head_products import head_products
from pallas_kernels.attention.latent import append_latent
from pallas_kernels.layers.norm_columns import norm_columns
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.weights import Inputs


@dataclass(frozen=True)
class MLA(Attention):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1).

    A token's keys and values of all heads are products of one latent vector. The cache holds the latent vector and one
    rotated key, which all heads share. They are never expanded to keys and values of heads.

    Attributes:
        heads: number of query heads.
        latent: number of channels of the latent vector.
        rotated: number of rotated channels of a query head, and of the shared key.
        plain: number of channels of a query head that are not rotated.
        value_dim: number of channels of a value head.
        scale: factor of the scores.
        query_latent: number of channels of the vector from which all queries are products; None: queries are products
            of the layer's input.
        rope: rotary position embedding of the rotated channels.
        is_interleaved: whether a checkpoint of Hugging Face rotates channels 2i and 2i + 1 together; loading reorders
            them, so that channel i is rotated with channel i + rotated / 2.
        eps: epsilon of the norms of both latent vectors.
    """

    heads: int
    latent: int
    rotated: int
    plain: int
    value_dim: int
    scale: float
    query_latent: int | None = None
    rope: Rope = PLAIN
    is_interleaved: bool = True
    eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Number of channels of a query head."""
        return self.plain + self.rotated

    @property
    def cached_heads(self) -> int:
        return 1

    @property
    def key_dim(self) -> int:
        """Number of channels of a row of the cache; `Attention.key_dim`."""
        return self.latent + self.rotated

    @property
    def pool_dims(self) -> tuple[int, int]:
        """The rotated channels in the key pool, and the latent ones in the value pool; `Attention.pool_dims`."""
        return self.rotated, self.latent

    def divided(self, devices: int) -> MLA:
        """Return the attention of one of several devices, which has some of the query heads, and the whole cache."""
        check_divided("num_attention_heads", self.heads, devices)
        return replace(self, heads=self.heads // devices)

    def check(self) -> None:
        """Check the sizes and options of the attention; `Mixer.check`."""
        sizes: dict[str, float] = {"num_heads": self.heads, "kv_lora_rank": self.latent, "qk_nope_head_dim": self.plain}
        sizes |= {"qk_rope_head_dim": self.rotated, "v_head_dim": self.value_dim, "eps": self.eps}
        inner = {} if self.query_latent is None else {"q_lora_rank": self.query_latent}
        positive_values("config", sizes | {"attention scale": self.scale} | inner)
        if self.rotated % 2:
            raise CheckpointError(
                "qk_rope_head_dim", f"expected an even number, got {self.rotated}; correct config.json"
            )
        if self.rope.fraction != 1.0:
            raise unsupported("partial_rotary_factor", self.rope.fraction, "1.0 with latent attention")
        self.rope.check(self.rotated)

    def params(self, hidden: int, inputs: int, norm_dtype: str | None) -> dict[str, ParamSpec]:
        """Declare the weights; `Mixer.params`.

        `qkv` has the rows of the query's latent vector before those of the cache; without such a vector, the rows of
        the cache before those of the query heads. So the columns of its product that are normed come first.
        """
        heads, cached, inner = self.heads, self.key_dim, self.query_latent
        query, latent = ParamSpec((heads * self.query_dim, inputs), ("heads", "hidden")), ("heads", "latent")
        params = {
            "k_norm": norm(self.latent, "latent", norm_dtype),
            "k_up": ParamSpec((heads * self.plain, self.latent), latent),
            "v_up": ParamSpec((heads * self.value_dim, self.latent), latent),
            "o": ParamSpec((hidden, heads * self.value_dim), ("hidden", "heads")),
        }
        if inner is None:
            rows, units = (cached, query.shape[0]), (cached, self.query_dim)
            return params | {"qkv": ParamSpec((sum(rows), inputs), query.axes, parts=rows, unit=units)}
        return params | {
            "qkv": ParamSpec((inner + cached, inputs), ("latent", "hidden"), parts=(inner, cached)),
            "q_norm": norm(inner, "latent", norm_dtype),
            "q_up": ParamSpec((query.shape[0], inner), latent),
        }

    def file_row(self, row: MapRow) -> MapRow:
        """Take a parameter's rows of a tensor, with rotated channels in the order of kernels; `Mixer.file_row`.

        A head's keys and values are products of successive rows of one tensor. The file may rotate channels 2i and
        2i + 1 together; kernels rotate channel i with channel i + half.
        """
        name, rotated = row.parameter.rpartition(".")[2], self.rotated
        if name in ("k_up", "v_up"):
            whole = self.heads * (self.plain + self.value_dim), self.latent
            by_head = np.split(np.arange(whole[0]).reshape(self.heads, -1), [self.plain], axis=1)
            tensor = stacked(row.parameter, dict.fromkeys(row.sources, whole), row.dtype)
            return selected(tensor, by_head[name == "v_up"].ravel())
        if name not in ("qkv", "q_up") or not self.is_interleaved:
            return row
        index = np.arange(row.shape[0])
        of_heads = self.plain + self.query_dim * np.arange(self.heads)
        if name == "q_up":
            starts = of_heads
        elif self.query_latent is None:
            starts = np.concatenate([[self.latent], self.key_dim + of_heads])
        else:
            starts = np.array([self.query_latent + self.latent])
        order = np.arange(rotated).reshape(-1, 2).T.ravel()
        index[(starts[:, None] + np.arange(rotated)).ravel()] = (starts[:, None] + order).ravel()
        return selected(row, index)

    def write(
        self, layer: LayerWeights, qkv: PartialSums, pool: KVPool, batch: TokenBatch, dtype: jnp.dtype, *, eps: float
    ) -> tuple[Queries, KVPool]:
        """Write latent vectors and rotated keys; the queries are [batch, tokens, heads, latent + rotated].

        The arguments are those of `Attention.write`; norms take the epsilon of the attention.
        """
        assert layer.k_norm is not None and layer.k_up is not None
        cos_sin = tables(replace(self.rope, temperature=0.0), self.rotated, batch.positions, batch.numerics)
        norm = partial(norm_columns, eps=self.eps, dtype=dtype, **batch.numerics.options)
        # Columns of qkv (`params`): latent, rotated, query heads; with a query latent: query latent, latent, rotated.
        # `unpack` takes an axis of parts, which normed columns lack: [None] and [0].
        if self.query_latent is None:
            rows = queries = batch.unpack(norm(qkv, layer.k_norm)[None])[0]
            first, first_query = 0, self.key_dim
        else:
            assert layer.q_norm is not None and layer.q_up is not None
            normed = norm(qkv, layer.q_norm, layer.k_norm)
            sums = product(batch.numerics)(normed[..., : self.query_latent], layer.q_up)
            rows, queries = batch.unpack(normed[None])[0], reduce_partials(batch.unpack(sums), dtype)
            first, first_query = self.query_latent, 0
        if self.rope.temperature:  # of all channels of queries; the tables would multiply the rotated ones alone
            factors = query_factors(self.rope, batch.positions, batch.numerics)
            queries = (queries * factors[..., None]).astype(dtype)
        k_up = layer.k_up.reshape(self.heads, self.plain, self.latent)
        new = queries, k_up, rows, cos_sin, batch.page_table, batch.first_row, batch.valid
        q, k, v = append_latent(pool.k, pool.v, *new, first_query=first_query, first=first, **batch.numerics.options)
        return q, KVPool(k, v)

    def attend(self, layer: LayerWeights, q: Queries, pool: KVPool, batch: TokenBatch, *, start: int = 0) -> Inputs:
        """Attend to latent vectors, and compute the values of all heads from their sums; `Attention.attend`."""
        assert layer.v_up is not None
        scores = {"window": batch.window, "scale": self.scale}
        latents: Any = attend_pages(q, pool, batch, scores, start=start)
        v_up = layer.v_up.reshape(self.heads, self.value_dim, self.latent)
        return head_products(latents, v_up, **batch.numerics.options).reshape(*latents.shape[:2], -1)

    def describe(self) -> dict[str, str]:
        """Describe heads, latent vectors and rotation; `Mixer.describe`."""
        parts = [f"{self.heads} heads of {self.plain} + {self.rotated} rotated channels"]
        parts.append(f"latent vector of {self.latent} channels, values of {self.value_dim}")
        if self.query_latent is not None:
            parts.append(f"queries from {self.query_latent} channels")
        parts.append(f"scores times {self.scale:g}")
        return {"attention": ", ".join(parts), "window": "none", "rope": self.rope.describe()}
