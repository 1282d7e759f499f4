"""Reads the files of assistants of Gemma 4 (`Gemma4AssistantForCausalLM` of transformers)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from convert.fields import CheckpointError, Fields, require
from convert.huggingface import MapRow, renamed, same, selected
from convert.sources import Source
from jspec.draft.gemma4_assistant_head import AssistantConfig, assistant_params
from jspec.models.config.decoder_config import from_json
from jspec.models.config.hf_config import refuse
from jspec.models.families.gemma import Gemma4, Gemma4Unified
from jspec.models.families.gemma4_layers import queries_only, with_unread
from jspec.models.load import Format, check_count, text_model, with_scheme
from jspec.models.mixers.shared_kv import TargetKV
from jspec.models.parts.checks import unsupported
from jspec.models.parts.param_spec import Params
from jspec.models.weights.params import rows
from jspec.models.weights.weight_map import as_computed, layer_tensors

FAMILIES = {"gemma4_text": Gemma4(), "gemma4_unified_text": Gemma4Unified()}
TENSORS = {
    "fc": "pre_projection.weight",
    "norm": "model.norm.weight",
    "project": "post_projection.weight",
    "clusters.centroids": "masked_embedding.centroids.weight",
    "clusters.ids": "masked_embedding.token_ordering",
}
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens."  # prefix; the weight is the output head if both are tied, else nothing reads it
# Options of the layers, each with its only supported value.
FIXED = {"hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False}


def assistant_format() -> Format:
    """Return the format of assistants."""

    def from_hf(fields: Fields, source: Source) -> tuple[AssistantConfig, list[MapRow]]:
        if not fields.flag("tie_word_embeddings", True):  # transformers reads this key, not that of text_config
            source.tensors = {name: tensor for name, tensor in source.tensors.items() if not name.startswith(EMBEDDING)}
        _, names = text_model(fields, source)
        config = read_assistant(fields)
        check_count("num_hidden_layers", config.num_layers, source.tensors)
        return config, renamed(assistant_rows(config, source, names), names)

    def params(config: AssistantConfig, names: Collection[str]) -> Params:
        check_count("num_layers", config.num_layers, names)
        return assistant_params(config)

    return Format(with_scheme(from_hf), lambda fields: from_json(AssistantConfig, fields), params)


def read_assistant(fields: Fields) -> AssistantConfig:
    """Read the config.json of an assistant.

    Raises:
        CheckpointError: keys are missing, a value has another type, or values contradict each other.
        NotImplementedError: an option is not supported.
    """
    require(fields, ("text_config", "backbone_hidden_size"))
    text = fields.object("text_config")
    kind = text.text("model_type", "gemma4_text")
    if kind not in FAMILIES:
        raise unsupported("model_type", kind, " or ".join(map(repr, FAMILIES)) + " for the layers of an assistant")
    refuse(text, FIXED)
    count = text.integer("num_hidden_layers")
    if text.integer("num_kv_shared_layers", count, least=0) not in (0, count):
        raise text.error("num_kv_shared_layers", f"{count}, the number of layers, which all read the target's keys")
    values = {**FIXED, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": text.integer("vocab_size")}
    read = FAMILIES[kind].decoder(Fields({**text, **values}, text.place))
    layers = tuple(
        replace(layer, mixer=queries_only(TargetKV, layer.gqa, of_window=layer.gqa.window is not None))
        for layer in read["layers"]
    )
    clusters: dict[str, Any] = {}
    if fields.flag("use_ordered_embeddings"):
        clusters["clusters"] = fields.integer("num_centroids", 2048)
        clusters["top_clusters"] = fields.integer("centroid_intermediate_top_k", 32)
    width = fields.integer("backbone_hidden_size")
    return AssistantConfig(**{**read, "layers": layers}, target_hidden_size=width, **clusters)


def assistant_rows(config: AssistantConfig, source: Source, names: Collection[str]) -> list[MapRow]:
    """Return the rows of the weight map of an assistant.

    Args:
        config: config of the assistant.
        source: tensors of the folder, from which the order of the tokens by cluster is read.
        names: names of the tensors.
    """
    params = assistant_params(config)
    tensors = {name: [tensor] for name, tensor in TENSORS.items() if name in params}
    for index, layer in enumerate(config.layers):
        layer_names = FAMILIES["gemma4_text"].layer_names(layer, names)  # both families have the same
        tensors |= layer_tensors(params, f"layers.{index}", f"model.layers.{index}", layer_names)
    made = as_computed(rows(params, tensors), config, norms_less_one=False)
    made = [with_unread(row, config, names) if row.parameter.startswith("layers.") else row for row in made]
    head = "clusters.rows" if config.clusters else "head"
    stored = [name for name in (f"{EMBEDDING}weight", HEAD) if name in names] or [HEAD]
    output = same(head, dict.fromkeys(stored, params[head].shape))
    return [*made, selected(output, token_order(source, config.vocab_size)) if config.clusters else output]


def token_order(source: Source, vocab: int) -> Int[np.ndarray, "vocab"]:
    """Read the token ids in the order of their clusters.

    Raises:
        CheckpointError: they are no permutation of all ids, or the file lacks them.
    """
    name = TENSORS["clusters.ids"]
    tensor = source.tensors.get(name)
    if tensor is None:
        raise CheckpointError(
            name, "expected the order of tokens, because config.json has use_ordered_embeddings true, got none; "
            "download the file again, or correct config.json",
        )  # fmt: skip
    ids = np.concatenate([np.asarray(piece) for piece in source.pieces(name)]).reshape(-1)
    if ids.dtype.kind not in "iu" or not np.array_equal(np.sort(ids), np.arange(vocab)):
        raise CheckpointError(
            name, f"expected each of the ids 0..{vocab - 1} once, got {len(ids)} values of dtype {ids.dtype}, "
            f"{len(np.unique(ids))} different; the file is damaged",
        )  # fmt: skip
    return ids
