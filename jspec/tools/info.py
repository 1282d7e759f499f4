"""Runs `jspec info`, which describes a checkpoint folder from its headers."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert import hub, orbax
from convert.orbax import Header
from jspec.draft import auto
from jspec.draft.gemma4_assistant_head import AssistantConfig
from jspec.draft.head_config import (
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    PEagleConfig,
)
from jspec.draft.medusa import MedusaConfig
from jspec.draft.verifier import target_name
from jspec.engine.request.model_sampling import AUTO, FILE, model_sampling
from jspec.engine.text.tokenizer import load_tokenizer
from jspec.engine.text.tokenizer_files import TOKENIZER_FILES, eos_sources
from jspec.models.config.decoder_config import ModelConfig
from jspec.tools import fit
from jspec.tools.traits import describe_layers
from pallas_kernels.layers.weights import Quantized

METHODS = {  # names of methods
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "eagle": "EAGLE-1/2",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "dflash2": "DFlash2",
}


def describe(path: str | Path) -> str:
    """Return the text that `inspect` returns, without its flag."""
    return inspect(path)[0]


def inspect(path: str | Path) -> tuple[str, bool]:
    """Describe a checkpoint from its headers, without reading its weights.

    Args:
        path: Hugging Face folder, converted folder or hub id ("owner/name").

    Returns:
        A text, and whether the folder can be loaded. The text has lines for the model's family, sizes and parameters,
        and for a head's features and vocabulary. If the folder cannot be loaded, the text says why.

    Raises:
        FileNotFoundError: there is no such folder, and the hub has no such model.
    """
    folder = hub.find(path)
    text, header = _describe(folder)
    return text, header is not None


def inspect_pair(drafters: Sequence[str | Path], target: str | Path) -> tuple[str, bool]:
    """Describe draft heads or draft models, a target, and whether each of the former fits the target.

    Args:
        drafters: folder or hub id of each draft head or draft model.
        target: folder or hub id of the target.

    Returns:
        A text, and whether all folders can be loaded and fit the target.

    Raises:
        FileNotFoundError: there is no such folder, and the hub has no such model.
        ValueError: the last folder holds no target.
    """
    folders = [hub.find(path) for path in (*drafters, target)]
    *descriptions, (target_text, model) = map(_describe, folders)
    texts, fits = [*(text for text, _ in descriptions), target_text], model is not None
    for folder, (_, header) in zip(folders, descriptions, strict=False):
        if header is None or model is None:
            fits = False
            continue
        lines, is_fit = fit.compare(header, model)
        texts.append("\n".join(lines if len(descriptions) == 1 else [f"{folder}:", *lines]))
        fits = fits and is_fit
    return "\n\n".join(texts), fits


def _describe(folder: Path) -> tuple[str, Header | None]:
    """Return the description of a folder, and its header if the folder can be loaded."""
    if orbax.is_checkpoint(folder):
        origin = "converted by jspec"
    else:
        origin = "Hugging Face folder" if (folder / "config.json").is_file() else "no model in this folder"
    header: Header | None = None
    try:
        header = auto.read_header(folder)
        contents = _contents(header)
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        header, contents = None, [f"cannot be loaded: {error}"]
    is_head = header is not None and not isinstance(header.config, ModelConfig)
    contents += [f"names its target: {name}"] if is_head and (name := target_name(folder)) else []
    return "\n".join([f"{folder}: {origin}", *contents, *_companions(folder, is_head=is_head)]), header


def _contents(header: Header) -> list[str]:
    match header.config:
        case ModelConfig() as model:
            lines = [*_model(model), *describe_layers(model)]
        case HeadConfig() as head:
            lines = [*_head(header, head), *describe_layers(head)]
        case AssistantConfig() as assistant:
            lines = [*_assistant(assistant), *describe_layers(assistant)]
        case MedusaConfig() as heads:
            lines = _medusa(heads)
    return [*lines, _parameters(header), *_quantization(header)]


def _model(config: ModelConfig) -> list[str]:
    return [
        f"model: {config.family}, {config.num_layers} layers, hidden {config.hidden_size}",
        f"vocabulary: {config.vocab_size}, {'tied' if config.tie_word_embeddings else 'own'} output head",
    ]


def _head(header: Header, config: HeadConfig) -> list[str]:
    method = METHODS[config.method]
    version = ".1" if isinstance(config, Eagle3Config) and config.norm_output else ""
    block = _block(config) if isinstance(config, DFlashConfig | PEagleConfig) else []
    return [
        f"model: {method}{version} head ({config.source_format} format), hidden {config.hidden_size}, "
        f"target hidden {config.target_hidden_size}",
        f"flags beside plain {method}: {_flags(config)}",
        *block,
        f"features: {_features(config)}",
        f"vocabulary: {_vocabulary(header, config)}",
        f"embedding: {_origin(header, 'embed')}",
        f"output head: {_origin(header, 'head')}",
    ]


def _block(config: DFlashConfig | PEagleConfig) -> list[str]:
    size = "any number of tokens in one pass"
    if isinstance(config, DFlashConfig):
        size = f"{config.block_size} tokens with the root, of which {config.max_depth} draft"
    lines = [f"block: {size}, mask token {config.mask_token_id}"]
    if isinstance(config, DFlash2Config):
        layer = config.layers[0]
        lines.append(f"convolutions: {layer.block_taps} taps, groups of {layer.block_group} channels")
        lines.append(f"selector: rank {config.selector_rank}, {config.selector_top_k} candidates")
    if isinstance(config, DSparkConfig):
        kind, rank = config.markov_head_type, config.markov_rank
        inputs = "state and Markov embedding" if config.confidence_head_with_markov else "state"
        lines.append(f"Markov head: {f'{kind}, rank {rank}' if rank else 'none'}")
        lines.append(f"confidence head: {f'reads {inputs}' if config.confidence_head else 'none'}")
    return lines


def _flags(config: HeadConfig) -> str:
    """List the options in which a head's forward pass differs from its method's default."""
    plain = {field.name: field.default for field in fields(config) if isinstance(field.default, bool)}
    plain["fc_bias"] = isinstance(config, EagleConfig)  # by default EAGLE-1 heads have this bias
    named = [f"{'' if value else 'no '}{flag}" for flag in plain if (value := getattr(config, flag)) != plain[flag]]
    layers = [f"{config.num_layers} layers"] if config.num_layers > 1 and not isinstance(config, DFlashConfig) else []
    return ", ".join([*named, *layers]) or "none"


def _features(config: HeadConfig) -> str:
    if config.feature_layers is not None:
        return f"target states {', '.join(map(str, config.feature_layers))}"
    if config.num_features == 1:
        return "target state N+1, after the final norm"
    return "target states 2, N//2, N-3 (the default)"


def _vocabulary(header: Header, config: HeadConfig) -> str:
    if not fit.owns(header, "draft_to_target"):
        return f"the target's {config.vocab_size} ids"
    ids = auto.read_draft_to_target(header)
    order = "ascending" if (np.diff(ids) > 0).all() else "not monotone"
    return f"{len(ids)} of the target's {config.vocab_size} ids, {order} map"


def _origin(header: Header, parameter: str) -> str:
    return "own" if fit.owns(header, parameter) else "shared with the target"


def _medusa(config: MedusaConfig) -> list[str]:
    return [
        f"model: Medusa, {config.num_heads} heads, residual blocks in each: {config.num_layers}, "
        f"hidden {config.hidden_size}",
        "features: target state N+1, after the final norm",
        f"vocabulary: the target's {config.vocab_size} ids",
    ]


def _assistant(config: AssistantConfig) -> list[str]:
    head = "own"
    if config.clusters:
        head += f", {config.clusters} clusters, of which {config.top_clusters} have logits ({config.candidates} tokens)"
    return [
        f"model: assistant of Gemma 4, {config.num_layers} layers, hidden {config.hidden_size}, "
        f"target hidden {config.target_hidden_size}",
        "features: target state N+1, after the final norm",
        f"vocabulary: the target's {config.vocab_size} ids",
        "embedding: shared with the target",
        f"output head: {head}",
    ]


def _leaves(header: Header) -> dict[str, Any]:
    """Return the shapes of all weights, by name; those of quantised ones as `Quantized`."""
    tree = orbax.unflatten(header.parameters, header.quantized)
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Quantized))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _parameters(header: Header) -> str:
    counts: Counter[str] = Counter()
    for leaf in _leaves(header).values():
        if isinstance(leaf, Quantized):
            counts[leaf.kind if leaf.is_packed else leaf.values.dtype.name] += math.prod(leaf.shape)
        elif jnp.issubdtype(leaf.dtype, jnp.floating):
            counts[leaf.dtype.name] += math.prod(leaf.shape)
    return f"parameters: {counts.total():,} ({', '.join(sorted(counts))})"


def _quantization(header: Header) -> list[str]:
    """Return a line with the kinds of the quantised weights, and how many input channels share a scale if not all."""
    kinds = sorted({_kind(leaf) for leaf in _leaves(header).values() if isinstance(leaf, Quantized)})
    return [f"quantised: {' or '.join(kinds)}"] if kinds else []


def _kind(weight: Quantized) -> str:
    group = f" in groups of {weight.group}" if weight.has_groups else ""
    return f"{weight.kind}{group}{'' if weight.zeros is None else ' with zero points'}"


def _companions(folder: Path, *, is_head: bool) -> list[str]:
    """Return lines with what a folder says beside its weights; of a head nothing, because the target's counts."""
    if is_head:
        return []
    words, eos_id = _tokenizer(folder)
    return [
        f"tokenizer: {words}",
        f"EOS ids: {_told(lambda: _by_source(eos_sources(folder, eos_id)))}",
        f"sampling: {_told(lambda: _sampling(folder))}",
    ]


def _told(words: Callable[[], str]) -> str:
    """Return words, or why they cannot be had."""
    try:
        return words()
    except ValueError as error:
        return f"cannot be read: {error}"


def _tokenizer(folder: Path) -> tuple[str, int | None]:
    """Return a tokenizer in words, with what was repaired in it, and its EOS id."""
    name = next((name for name in TOKENIZER_FILES if (folder / name).is_file()), None)
    if name is None:
        return "none: token ids in and out", None
    try:
        tokenizer = load_tokenizer(folder)
    except ValueError as error:
        return f"cannot be read: {error}", None
    repaired = "".join(f", repaired: {repair}" for repair in getattr(tokenizer, "repairs", ()))
    return f"{name}{repaired}", getattr(tokenizer, "eos_id", None)


def _by_source(sources: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"{', '.join(map(str, ids))} ({source})" for source, ids in sources.items()) or "none"


def _sampling(folder: Path) -> str:
    fields = model_sampling(AUTO, folder)
    values = ", ".join(f"{name} {value:g}" for name, value in fields.items())
    return f"{values} ({FILE}), the default of jspec serve, generate, chat" if values else f"{FILE} recommends none"
