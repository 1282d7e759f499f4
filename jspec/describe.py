"""What a checkpoint folder holds, in words, from its headers (`jspec info`)."""

from collections import Counter
from pathlib import Path

import numpy as np

from jspec import checkpoint, pretrained
from jspec.checkpoint import Header
from jspec.models.config import Eagle3Config, ModelConfig

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def describe(path: str | Path) -> str:
    """Describes a Hugging Face folder, a converted folder or a hub id.

    Args:
        path: as for `pretrained.load`.

    Returns:
        Lines of text: family, sizes, parameters, and for a head its features and vocabulary; or why the
        folder cannot be loaded.

    Raises:
        FileNotFoundError: if there is no such folder.
    """
    folder = pretrained.find(path)
    origin = "converted by jspec" if checkpoint.is_checkpoint(folder) else "Hugging Face folder"
    try:
        contents = _contents(pretrained.header(folder))
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        contents = [f"cannot be loaded: {error}"]
    return "\n".join([f"{folder}: {origin}", *contents, *_companions(folder)])


def _contents(found: Header) -> list[str]:
    config = found.config
    heads, rope = f"{config.num_heads} heads, {config.num_kv_heads} key-value heads", config.rope
    return [
        *(_head(found, config) if isinstance(config, Eagle3Config) else _model(config)),
        f"attention: {heads}, head_dim {config.head_dim}",
        f"rope: {rope.kind}, theta {rope.theta:g}, factor {rope.factor:g}",
        _parameters(found),
    ]


def _model(config: ModelConfig) -> list[str]:
    return [
        f"model: {config.family}, {config.num_layers} layers, hidden {config.hidden_size}, "
        f"intermediate {config.intermediate_size}",
        f"vocabulary: {config.vocab_size}, {'tied' if config.tie_word_embeddings else 'own'} output head",
    ]


def _head(found: Header, config: Eagle3Config) -> list[str]:
    ids = pretrained.draft_to_target(found)
    order = "ascending" if (np.diff(ids) > 0).all() else "not monotone"
    layers = "2, N//2, N-3 (the default)"
    if config.feature_layers is not None:
        layers = ", ".join(map(str, config.feature_layers))
    return [
        f"model: EAGLE-3 head ({config.source_format} format), hidden {config.hidden_size}, "
        f"target hidden {config.target_hidden_size}, intermediate {config.intermediate_size}",
        f"features: target states {layers}",
        f"vocabulary: {len(ids)} of the target's {config.vocab_size} ids, {order} map",
        f"embedding: {'own' if 'embed' in found.parameters else 'shared with the target'}",
    ]


def _parameters(found: Header) -> str:
    counts: Counter[str] = Counter()
    for leaf in found.parameters.values():
        if np.dtype(leaf.dtype).kind != "i":
            counts[str(np.dtype(leaf.dtype))] += int(np.prod(leaf.shape))
    return f"parameters: {counts.total():,} ({', '.join(sorted(counts))})"


def _companions(folder: Path) -> list[str]:
    tokenizer = next((name for name in TOKENIZERS if (folder / name).is_file()), "none: token ids in and out")
    ids = pretrained.eos_ids(folder)
    return [f"tokenizer: {tokenizer}", f"EOS ids: {', '.join(map(str, ids)) or 'none'}"]
