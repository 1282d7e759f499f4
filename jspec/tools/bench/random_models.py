"""Model shapes with random weights, made on the device: speed needs no checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from jspec.draft.dflash2_head import DFlash2Head
from jspec.draft.dflash_head import DFlashHead
from jspec.draft.dspark_head import DSparkHead
from jspec.draft.eagle_head import EagleHead, head_params
from jspec.draft.formats.dflash_format import head_params as block_params
from jspec.draft.gemma4_assistant_head import AssistantConfig, AssistantHead, assistant_params
from jspec.draft.head_config import DFlash2Config, DFlashConfig, DSparkConfig, Eagle3Config, PEagleConfig
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.decoder import Model
from jspec.models.families import read_config
from jspec.models.families.gemma4_layers import queries_only
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mla import MLA
from jspec.models.mixers.shared_kv import TargetKV
from jspec.models.mlps.mlp_config import Dense
from jspec.models.mlps.shared_expert import join_layers
from jspec.models.parts.rope import Rope
from jspec.models.weights.params import model_params, random_weights
from jspec.models.weights.tensor_parallel import put_named


def _published(model_type: str, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **more: Any) -> Any:
    """Return the config of a published model, read from the values in its config.json."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    sizes: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers)
    return read_config({"model_type": model_type, **sizes, **dict(zip(names, heads, strict=True)), **more})


LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3_ROPE |= dict(original_max_position_embeddings=8192)
LLAMA3 = dict(vocab_size=128256, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE, max_position_embeddings=131072)
QWEN3 = dict(vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960)
GPT_OSS = dict(vocab_size=201088, num_local_experts=32, max_position_embeddings=131072)
LITE_YARN = dict(type="yarn", factor=40, mscale=0.707, mscale_all_dim=0.707, original_max_position_embeddings=4096)
LITE = dict(vocab_size=102400, rms_norm_eps=1e-6, max_position_embeddings=163840, rope_scaling=LITE_YARN)
LITE |= dict(q_lora_rank=None, num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1)
GEMMA4 = dict(vocab_size=262144, hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=2)
GEMMA4 |= dict(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704, sliding_window=1024)
TINY, LONG = dict(vocab_size=512, num_experts_per_tok=2), dict(max_position_embeddings=65536)
TINY_MOE = TINY | LONG | dict(num_experts=8, moe_intermediate_size=64, norm_topk_prob=True)
TINY_MLA = TINY | LONG | dict(n_routed_experts=8, moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=32)
TINY_MLA |= dict(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
HYBRID = dict(vocab_size=248320, rope_theta=1e7, max_position_embeddings=262144)
TINY_HYBRID = LONG | dict(vocab_size=512, linear_num_key_heads=2, linear_num_value_heads=4)
TINY_HYBRID |= dict(linear_key_head_dim=16, linear_value_head_dim=16)
NANO = dict(hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba_num_heads=64)
NANO |= dict(n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, routed_scaling_factor=2.5)
NANO |= dict(moe_shared_expert_intermediate_size=3712, vocab_size=131072, max_position_embeddings=262144)
GLM_FLASH: dict[str, Any] = dict(n_routed_experts=64, num_experts_per_tok=4, moe_intermediate_size=1536)
GLM_FLASH |= dict(vocab_size=154880, max_position_embeddings=202752, rope_theta=1e6)
TARGETS = {
    "llama3-8b": _published("llama", 4096, 14336, 32, (32, 8, 128), **LLAMA3),
    "llama3-70b": _published("llama", 8192, 28672, 80, (64, 8, 128), **LLAMA3),
    "qwen3-8b": _published("qwen3", 4096, 12288, 36, (32, 8, 128), **QWEN3),
    "qwen3-30b-a3b": _published("qwen3_moe", 2048, 6144, 48, (32, 4, 128), norm_topk_prob=True, **QWEN3),
    "qwen3.8-27b": _published("qwen3_5_text", 5120, 17408, 64, (24, 4, 256), linear_num_value_heads=48, **HYBRID),
    "qwen3.5-35b-a3b": _published("qwen3_5_moe_text", 2048, 5632, 40, (16, 2, 256), **HYBRID),
    "nemotron3-nano": _published("nemotron_h", 2688, 1856, 52, (32, 2, 128), **NANO),
    "glm4.7-flash": _published("glm4_moe_lite", 2048, 10240, 47, (20, 20, 64), **GLM_FLASH),
    "gpt-oss-20b": _published("gpt_oss", 2880, 2880, 24, (64, 8, 64), **GPT_OSS),
    "gemma3-12b": _published("gemma3_text", 3840, 15360, 48, (16, 8, 256), vocab_size=262208, sliding_window=1024),
    "gemma4-26b-a4b": _published("gemma4_text", 2816, 2112, 30, (16, 8, 256), final_logit_softcapping=30.0, **GEMMA4),
    "deepseek-v2-lite": _published("deepseek_v2", 2048, 10944, 27, (16, 16, 128), **LITE),
    "tiny": _published("llama", 64, 192, 8, (4, 2, 16), vocab_size=512, rms_norm_eps=1e-5, **LONG),
    "tiny-gemma3": _published("gemma3_text", 64, 192, 8, (4, 2, 16), vocab_size=512, sliding_window=64),
    "tiny-moe": _published("qwen3_moe", 64, 192, 8, (4, 2, 16), **TINY_MOE),
    "tiny-mla": _published("deepseek_v2", 64, 192, 4, (4, 4, 16), **TINY_MLA),
    "tiny-hybrid": _published("qwen3_5_text", 64, 192, 8, (4, 2, 16), **TINY_HYBRID),
    # For measurements of the host.
    "least": _published("llama", 16, 16, 1, (1, 1, 8), vocab_size=64, rms_norm_eps=1e-5, **LONG),
}
PEAGLE_LAYERS = 4  # of published P-EAGLE heads
DFLASH_LAYERS = 5  # of published DFlash heads; each reads as many states of the target
DRAFT_VOCAB = {name: 128 if name.startswith("tiny") else 32000 for name in TARGETS} | {"least": 16}
HEADS: dict[str, Any] = {  # record and declarations of the weights of each head
    **dict.fromkeys(("eagle3", "peagle"), (EagleHead, head_params)),
    "dflash": (DFlashHead, block_params),
    "dflash2": (DFlash2Head, block_params),
    "dspark": (DSparkHead, block_params),
    "gemma4_assistant": (AssistantHead, assistant_params),
}
# Intermediate channels of heads for targets with experts.
HEAD_WIDTH = {"qwen3-30b-a3b": 6144, "qwen3.5-35b-a3b": 6144, "gpt-oss-20b": 17280, "gemma4-26b-a4b": 8448}
HEAD_WIDTH |= {"nemotron3-nano": 8064}
HEAD_WIDTH |= {"tiny-moe": 192}


def default_shape() -> str:
    """Return the name of the shape that commands measure by default: a small one on a CPU."""
    return "tiny" if jax.default_backend() == "cpu" else "llama3-8b"


def target_config(shape: str) -> ModelConfig:
    """Return the config of a named shape, such as "llama3-8b"; "llama3-8b:4" has its first four layers alone.

    Raises:
        ValueError: the shape has fewer layers.
    """
    name, _, layers = shape.partition(":")
    config = TARGETS[name]
    count = int(layers or config.num_layers)
    if not 0 < count <= config.num_layers:
        raise ValueError(f"layers: expected 1 to {config.num_layers} layers of {name}, got {count}")
    return replace(config, layers=config.layers[:count])


def head_config(shape: str, method: str = "eagle3") -> Any:
    """Return the config of a head, as published heads of its method have it, for a target's shape."""
    c, name = target_config(shape), shape.partition(":")[0]
    same = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "norm_eps")
    sizes: dict[str, Any] = {size: getattr(c, size) for size in same}
    sizes |= dict(target_hidden_size=c.hidden_size, rope=Rope(), feature_layers=None, source_format="random")
    sizes |= dict(intermediate_size=HEAD_WIDTH.get(name, c.intermediate_size), draft_vocab_size=DRAFT_VOCAB[name])
    if isinstance(attention := c.attention, MLA):  # published heads have key-value heads of their own
        sizes |= dict(num_kv_heads=attention.heads, head_dim=attention.value_dim)
    if method == "gemma4_assistant":
        return _assistant(c)
    if method == "eagle3":
        return Eagle3Config.of_sizes(**sizes)
    if method == "peagle":
        return PEagleConfig.of_sizes(**sizes, num_layers=PEAGLE_LAYERS, mask_token_id=0)
    spread = (c.num_layers - 4) / (DFLASH_LAYERS - 1)  # between the layers whose outputs are read: 1 to N - 3
    layers = tuple(2 + round(index * spread) for index in range(DFLASH_LAYERS))
    sizes |= dict(num_layers=DFLASH_LAYERS, feature_layers=layers, draft_vocab_size=c.vocab_size, qk_norm="head")
    if method == "dflash":
        return DFlashConfig.of_sizes(**sizes, mask_token_id=0, block_size=16)
    if method == "dflash2":
        head = DFlash2Config.of_sizes(**sizes, mask_token_id=0, block_size=8, selector_rank=256, selector_top_k=16)
        return replace(head, layers=tuple(replace(layer, block_taps=2, block_group=16) for layer in head.layers))
    return DSparkConfig.of_sizes(**sizes, mask_token_id=0, block_size=7, markov_rank=min(256, c.hidden_size))


def _assistant(target: ModelConfig) -> AssistantConfig:
    """Return the config of an assistant of four layers, of which the last one has no window."""
    mixers = {layer.mixer.window is not None: layer.mixer for layer in target.layers if isinstance(layer.mixer, GQA)}
    if len(mixers) < 2:
        raise ValueError(f"drafter: expected layers with and without a window for an assistant, got {target.family}")
    layers = tuple(
        LayerConfig(
            queries_only(TargetKV, mixers[of_window], of_window=of_window),
            Dense(8192, "gelu_tanh"),
            norms="both",
            has_scale=True,
        )
        for of_window in (True, True, True, False)
    )
    return AssistantConfig(
        vocab_size=target.vocab_size,
        hidden_size=1024,
        layers=layers,
        norm_eps=target.norm_eps,
        target_hidden_size=target.hidden_size,
    )


def random_target(
    shape: str, dtype: str, quantize: str | None = None, *, seed: int = 0, mesh: Mesh | None = None
) -> Model:
    """Return a target of a named shape with random weights.

    Args:
        shape: name of a shape, as for `target_config`.
        dtype: dtype of the weights.
        quantize: kind of quantisation; None: none.
        seed: seed of the weights.
        mesh: devices that share the weights; one device never holds more than one whole weight. None: one device, with
            shared experts joined to others as `Engine.from_pretrained` does.
    """
    config = target_config(shape)
    params = model_params(config)
    put = {} if mesh is None else {"put": partial(put_named, params=params, mesh=mesh)}
    weights = random_weights(params, dtype, seed, quantize, **put)
    if mesh is None:
        join_layers(config.mlps, weights["layers"])
    return Model.from_weights(config, weights, mesh)


def random_head(shape: str, dtype: str, quantize: str | None = None, *, method: str = "eagle3", seed: int = 1) -> Any:
    """Return a target's head with random weights, whose drafts are practically never accepted."""
    config = head_config(shape, method)
    head, params = HEADS[method]
    return head.from_weights(config, random_weights(params(config), dtype, seed, quantize))
