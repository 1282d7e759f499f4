"""The configs of a decoder layer and of its parts, as frozen, hashable records that check their values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from convert.fields import CheckpointError
from jspec.models.checks import positive_values, unsupported
from jspec.models.mlp_config import Dense, Experts
from jspec.models.rope import PLAIN, Rope

NORMS = ("pre", "post", "both")
QK_NORMS = (None, "head", "unit", "all")


@dataclass(frozen=True)
class GQA:
    """The config of grouped-query attention (arXiv:2305.13245).

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
    def pool_dims(self) -> tuple[int, int]:
        """Number of channels of a row in the key pool and in the value pool, for each key-value head."""
        return self.head_dim, self.head_dim

    def of_devices(self, devices: int) -> GQA:
        """Return the config of one of several devices, which has some of the heads.

        Raises:
            ValueError: the heads cannot be divided by the number of devices.
        """
        check_divided("num_attention_heads", self.heads, devices)
        if devices % self.kv_heads:
            check_divided("num_key_value_heads", self.kv_heads, devices, "divisor or a multiple")
        return replace(self, heads=self.heads // devices, kv_heads=max(self.kv_heads // devices, 1))

    def check(self) -> None:
        """Check the sizes and options of the attention.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
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
        if self.qk_norm not in QK_NORMS:
            raise unsupported("qk_norm", self.qk_norm, " or ".join(map(repr, QK_NORMS)))
        if self.v_norm and self.qk_norm == "all":
            raise unsupported("v_norm", True, "False with norms of all heads together")
        if self.qk_norm == "unit" and self.rope.attention_factor != 1.0:  # a norm after the rotation would remove it
            raise unsupported("rope", f"attention_factor {self.rope.attention_factor}", "1.0 with use_qk_norm")
        self.rope.check(self.head_dim)


@dataclass(frozen=True)
class MLA:
    """The config of multi-head latent attention (arXiv:2405.04434, section 2.1).

    A token's keys and values of all heads are products of one latent vector. The cache holds the latent vector and one
    rotated key, which all heads share. `jspec.models.latent_attention` never expands them to keys and values of heads.

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

    kv_heads: ClassVar[int] = 1  # heads of the cache
    window: ClassVar[None] = None
    chunk: ClassVar[None] = None
    softcap: ClassVar[None] = None
    qk_norm: ClassVar[None] = None
    bias: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    causal: ClassVar[bool] = False

    @property
    def query_dim(self) -> int:
        """Number of channels of a query head."""
        return self.plain + self.rotated

    @property
    def head_dim(self) -> int:
        """Number of channels of a row of the cache."""
        return self.latent + self.rotated

    @property
    def pool_dims(self) -> tuple[int, int]:
        """Number of channels of a row in the key pool, the rotated ones, and in the value pool, the latent ones."""
        return self.rotated, self.latent

    def of_devices(self, devices: int) -> MLA:
        """Return the config of one of several devices, which has some of the query heads, and the whole cache.

        Raises:
            ValueError: the heads cannot be divided by the number of devices.
        """
        check_divided("num_attention_heads", self.heads, devices)
        return replace(self, heads=self.heads // devices)

    def check(self) -> None:
        """Check the sizes and options of the attention.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
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


def check_divided(name: str, size: int, devices: int, expected: str = "divisor") -> None:
    """Raise ValueError unless a number of heads or channels can be divided by the number of devices."""
    if size % devices:
        raise ValueError(
            f"tensor_parallel: expected a {expected} of {size}, the model's {name}, got {devices}; take another number "
            "of devices"
        )


@dataclass(frozen=True)
class LayerConfig:
    """The config of a decoder layer.

    Attributes:
        attention: config of the attention.
        mlp: config of the feed-forward, which may be a mixture of experts.
        norms: placement of the norms: "pre": before the attention and before the feed-forward; "post": after both;
            "both": before and after both.
        residual_scale: factor of the outputs of attention and feed-forward before they are added to the residual
            stream.
        has_scale: whether the residual stream is multiplied by a weight of one number after the layer (Gemma 4).
    """

    attention: GQA | MLA
    mlp: Dense | Experts
    norms: str = "pre"
    residual_scale: float = 1.0
    has_scale: bool = False

    def check(self) -> None:
        """Check the sizes and options of the layer.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
        self.attention.check()
        self.mlp.check()
        positive_values("config", {"residual_multiplier": self.residual_scale})
        if self.norms not in NORMS:
            raise unsupported("norms", self.norms, " or ".join(map(repr, NORMS)))

    @property
    def gqa(self) -> GQA:
        """The attention of a layer that is known to have grouped-query attention."""
        assert isinstance(self.attention, GQA)
        return self.attention

    @property
    def has_pre_norms(self) -> bool:
        """Whether attention and feed-forward have norms before them."""
        return self.norms != "post"

    @property
    def has_post_norms(self) -> bool:
        """Whether attention and feed-forward have norms after them."""
        return self.norms != "pre"
