"""The config of a decoder layer, as a frozen, hashable record that checks its values."""

from __future__ import annotations

from dataclasses import dataclass

from jspec.models.mixers.attention import Attention
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.no_mixer import NoMixer
from jspec.models.mlps.mlp_config import Mlp, NoMlp
from jspec.models.parts.checks import positive_values, unsupported

NORMS = ("pre", "post", "both")


@dataclass(frozen=True)
class LayerConfig:
    """The config of a decoder layer.

    Attributes:
        mixer: the part that mixes tokens, such as attention (`jspec.models.mixers`), or `NoMixer`.
        mlp: config of the feed-forward, which may be a mixture of experts, or `NoMlp`.
        norms: placement of the norms: "pre": before the attention and before the feed-forward; "post": after both;
            "both": before and after both.
        residual_scale: factor of the outputs of attention and feed-forward before they are added to the residual
            stream.
        post_norm_eps: epsilon of the norms after attention and feed-forward; None: that of the other norms.
        has_scale: whether the residual stream is multiplied by a weight of one number after the layer (Gemma 4).
        embedded: number of channels of the embedding that each token has for this layer alone, which is added to the
            residual stream behind a gate (Gemma 4, `jspec.models.parts.layer_embeddings`); 0: none.
        block_taps: number of taps of the convolutions over the tokens of a block around attention and feed-forward
            (DFlash2, `jspec.models.parts.block_conv`); 0: there are none.
        block_group: number of channels that share what a token adds to the taps.
    """

    mixer: Mixer
    mlp: Mlp
    norms: str = "pre"
    residual_scale: float = 1.0
    post_norm_eps: float | None = None
    has_scale: bool = False
    embedded: int = 0
    block_taps: int = 0
    block_group: int = 1

    def check(self) -> None:
        """Check the sizes and options of the layer.

        Raises:
            ValueError: a size is impossible.
            NotImplementedError: an option is not supported.
        """
        self.mixer.check()
        self.mlp.check()
        positive_values("config", {"residual_multiplier": self.residual_scale})
        if self.post_norm_eps is not None:
            positive_values("config", {"post_norm_eps": self.post_norm_eps})
        if not self.has_mixer and not self.has_mlp:
            raise unsupported("layers_block_type", "a layer without a part", "a mixer or a feed-forward in each layer")
        if self.norms != "pre" and not (self.has_mixer and self.has_mlp):
            raise unsupported("norms", self.norms, "'pre' in a layer without a mixer or without a feed-forward")
        if self.norms not in NORMS:
            raise unsupported("norms", self.norms, " or ".join(map(repr, NORMS)))

    @property
    def has_mixer(self) -> bool:
        """Whether the layer mixes tokens."""
        return not isinstance(self.mixer, NoMixer)

    @property
    def has_mlp(self) -> bool:
        """Whether the layer has a feed-forward."""
        return not isinstance(self.mlp, NoMlp)

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that is known to be attention."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    @property
    def gqa(self) -> GQA:
        """The mixer of a layer that is known to be grouped-query attention."""
        assert isinstance(self.mixer, GQA)
        return self.mixer

    @property
    def has_pre_norms(self) -> bool:
        """Whether attention and feed-forward have norms before them."""
        return self.norms != "post"

    @property
    def has_post_norms(self) -> bool:
        """Whether attention and feed-forward have norms after them."""
        return self.norms != "pre"
