"""Weight maps of targets and draft models: one function a family, from a config to rows."""

from collections.abc import Collection

from convert.huggingface import Row, same, stacked
from jspec.draft.head_config import HeadConfig
from jspec.models.config import ModelConfig


def llama(config: ModelConfig, names: Collection[str]) -> list[Row]:
    """The Llama family.

    Args:
        config: of the model.
        names: the tensors that the file holds; they decide under which names a tied embedding is looked for.

    Returns:
        The rows of the weight map.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    rows = []
    if config.tie_word_embeddings:
        found = [name for name in (embed, head) if name in names] or [embed]
        rows.append(same("embed", dict.fromkeys(found, (vocab, hidden))))
    else:
        rows.append(stacked("embed", {embed: (vocab, hidden)}))
        rows.append(stacked("head", {head: (vocab, hidden)}))
    for index in range(config.num_layers):
        to, source = f"layers.{index}", f"model.layers.{index}"
        rows.append(stacked(f"{to}.attn_norm", {f"{source}.input_layernorm.weight": (hidden,)}))
        rows += block(to, source, config, width=hidden)
    rows.append(stacked("norm", {"model.norm.weight": (hidden,)}))
    return rows


def block(to: str, source: str, config: ModelConfig | HeadConfig, width: int) -> list[Row]:
    """Attention and feed-forward of one layer, whose attention reads `width` channels."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{source}.self_attn", f"{source}.mlp"
    return [
        stacked(
            f"{to}.qkv",
            {
                f"{attention}.q_proj.weight": (q, width),
                f"{attention}.k_proj.weight": (kv, width),
                f"{attention}.v_proj.weight": (kv, width),
            },
        ),
        stacked(f"{to}.o", {f"{attention}.o_proj.weight": (hidden, q)}),
        stacked(f"{to}.mlp_norm", {f"{source}.post_attention_layernorm.weight": (hidden,)}),
        stacked(
            f"{to}.gate_up",
            {
                f"{mlp}.gate_proj.weight": (inner, hidden),
                f"{mlp}.up_proj.weight": (inner, hidden),
            },
        ),
        stacked(f"{to}.down", {f"{mlp}.down_proj.weight": (hidden, inner)}),
    ]
