"""Weight maps of EAGLE, DFlash and DSpark heads of any exporter: from which tensors each parameter is made."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial

import numpy as np
from jaxtyping import Bool, Int

from convert.detect import bare_name
from convert.fields import CheckpointError
from convert.huggingface import MapRow, flat, side_by_side
from convert.sources import Shape, Source
from jspec.draft.eagle_head import head_params
from jspec.draft.formats.head_layers import tensor_names
from jspec.draft.head_config import HeadConfig
from jspec.models.parts.checks import unsupported
from jspec.models.parts.param_spec import Params
from jspec.models.weights.params import rows
from jspec.models.weights.weight_map import in_kernel_order, layer_tensors

TENSORS = {
    "embed": "embed_tokens.weight",
    "input_norm": "input_norm.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    "hidden_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "markov.embed": "markov_head.markov_w1.weight",
    "markov.project": "markov_head.markov_w2.weight",
    "markov.gate.weight": "markov_head.gate_proj.weight",
    "markov.gate.bias": "markov_head.gate_proj.bias",
    "markov.joint.weight": "markov_head.joint_proj.weight",
    "markov.joint.bias": "markov_head.joint_proj.bias",
    "selector.predecessor": "candidate_selector.predecessor_codebook",
    "selector.successor": "candidate_selector.successor_codebook",
    "selector.project": "candidate_selector.hidden_projection.weight",
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
MASK = "mask_hidden"  # target states of P-EAGLE's mask pairs: tensor and parameter


def head_weights(config: HeadConfig, shapes: Mapping[str, Shape]) -> list[MapRow]:
    """Make the rows of the weight map of an EAGLE head, for files of any exporter.

    Args:
        config: config of the head.
        shapes: shape of each tensor in the file, by its name without the prefix `model.`. The first layer is named
            `midlayer` or `layers.0`. `embed_tokens` and `t2d` are optional. `d2t` and `lm_head` are optional if the
            head drafts from the whole vocabulary.

    Raises:
        NotImplementedError: a P-EAGLE head has another number of mask features than one.
    """
    drafts_all = config.draft_vocab_size == config.vocab_size
    has_head = "lm_head.weight" in shapes or not drafts_all
    params = head_params(config, has_embed="embed_tokens.weight" in shapes, has_head=has_head)
    map_rows = weight_rows(config, params, shapes)
    if (mask := params.get(MASK)) is not None:
        first = shapes.get(MASK, (1, 1, 0))[:-1]
        if math.prod(first) != 1:
            raise unsupported(MASK, shapes[MASK], f"one vector of {mask.shape[0]} values for all positions")
        map_rows.append(flat(MASK, MASK, (*first, *mask.shape)))
    return map_rows


def weight_rows(config: HeadConfig, params: Params, names: Collection[str]) -> list[MapRow]:
    """Make the rows of the weight map of a head of any method.

    Args:
        config: config of the head.
        params: declarations of the head's parameters.
        names: names of the tensors in the file, as for `head_weights`.
    """
    drafts_all = config.draft_vocab_size == config.vocab_size
    tensors = {name: [tensor] for name, tensor in TENSORS.items() if name in params}
    layer = tensor_names(names)
    midlayer = any(name.startswith("midlayer.") for name in names)
    for index in range(config.num_layers):
        source = "midlayer" if midlayer and index == 0 else f"layers.{index}"
        tensors |= layer_tensors(params, f"layers.{index}", source, layer)
    map_rows = [in_kernel_order(row, config) for row in rows(params, tensors)]
    if (states := params.get("fc_norm")) is not None:
        map_rows.append(
            side_by_side("fc_norm", {f"fc_norm.{i}.weight": states.shape[1:] for i in range(states.shape[0])})
        )
    if (ids := params.get("draft_to_target")) is not None:
        maps = {"d2t": ids.shape} if "d2t" in names or not drafts_all else {}
        maps |= {"t2d": (config.vocab_size,)} if "t2d" in names else {}
        fill = partial(_fill_vocabulary, config.vocab_size)
        map_rows.append(MapRow("draft_to_target", maps, ids.shape, fill, dtype=ids.dtype))
    return map_rows


def _fill_vocabulary(vocab: int, source: Source, row: MapRow, dtype: str) -> np.ndarray:
    """Fill `draft_to_target` from `d2t`, or with all ids if there is no `d2t`, and check the ids against `t2d`."""
    tables = {bare_name(name): np.concatenate(list(source.pieces(name))) for name in row.sources}
    ids = draft_to_target(tables.get("d2t", np.zeros(row.shape, np.int64)), vocab)
    if "t2d" in tables:
        check_members(ids, tables["t2d"])
    return ids.astype(dtype)


def draft_to_target(offsets: Int[np.ndarray, "draft_vocab"], vocab: int) -> Int[np.ndarray, "draft_vocab"]:
    """Compute the target id of each draft id, ``id + d2t[id]``; target ids need not be ascending.

    Args:
        offsets: the tensor `d2t`.
        vocab: number of tokens of the target's vocabulary.

    Raises:
        ValueError: two draft ids have the same target id, or a target id is outside the target's vocabulary.
    """
    ids = np.arange(len(offsets)) + offsets
    repeated = len(ids) - len(np.unique(ids))
    if repeated or ids.min() < 0 or ids.max() >= vocab:
        raise CheckpointError(
            "d2t", f"expected offsets (target id minus draft id) to distinct ids in 0..{vocab - 1}, "
            f"got {repeated} repeated ids in {ids.min()}..{ids.max()}; the head is damaged",
        )  # fmt: skip
    return ids


def check_members(ids: Int[np.ndarray, "draft_vocab"], member: Bool[np.ndarray, "vocab"]) -> None:
    """Raise ValueError unless the tensor `t2d` marks exactly the target ids of the draft vocabulary.

    Args:
        ids: target id of each draft id.
        member: the tensor `t2d`: whether each target id is in the draft vocabulary.
    """
    expected = np.flatnonzero(member)
    if not np.array_equal(np.sort(ids), expected):
        wrong = np.setxor1d(ids, expected)
        raise CheckpointError(
            "t2d", f"expected to mark the {len(ids)} target ids that d2t gives, got {len(expected)}; "
            f"they differ in {wrong[:8].tolist()}; the file is inconsistent",
        )  # fmt: skip
