"""Weight maps of draft heads, and how a folder tells which kind it holds."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from convert.huggingface import Plan, Row, Source, Tensor, check, open_source, read_json, side_by_side, stacked
from jspec.draft.eagle_formats import read_head
from jspec.draft.head_config import Config, HeadConfig, MedusaConfig, Overrides
from jspec.models.config import ModelConfig
from jspec.models.families import llama
from jspec.models.families.llama import block

MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")

# Tensor names that only other methods have, and what those are called.
OTHER_TENSORS = {
    r"mask_hidden": "P-EAGLE (parallel drafting)",
    r"parallel_draft_heads\..*": "parallel draft heads",
    r"midlayer\.\d+\..*": "an EAGLE-3 head of several midlayers",
    r"medusa_heads?\..*": "Medusa heads within a model (Medusa-2)",
    r"mtp(_layers)?\..*|.*\.eh_proj\..*": "multi-token prediction (MTP) layers",
}
OTHER_ARCHITECTURES = {
    "PEagle": "P-EAGLE (parallel drafting)",
    "DFlash": "DFlash",
    "DSpark": "DSpark",
    "Domino": "Domino",
}


def detect(config: Mapping[str, Any], names: Collection[str]) -> str:
    """The kind of a folder by its config and tensors: "target", "eagle3", "eagle" or "medusa".

    Raises:
        NotImplementedError: naming a method whose heads are not read.
    """
    bare = {bare_name(name) for name in names}
    architectures = " ".join(config.get("architectures") or ())
    speculators = config.get("speculators_model_type")
    others = [f"the architecture {architectures}" for name in OTHER_ARCHITECTURES if name in architectures]
    others += [what for pattern, what in OTHER_TENSORS.items() if any(re.fullmatch(pattern, n) for n in bare)]
    if speculators not in (None, "eagle3"):
        others.append(f"speculators_model_type {speculators!r}")
    if others:
        raise NotImplementedError(
            f"expected a Llama model or an EAGLE or Medusa head, got {others[0]}; this method is not supported yet"
        )
    if any(MEDUSA_BLOCK.fullmatch(name) for name in bare):
        return "medusa"
    if speculators or "d2t" in bare or "Eagle3" in architectures or any(n.startswith("midlayer.") for n in bare):
        return "eagle3"
    fused = any(name.startswith("fc.") for name in bare)
    return "eagle" if fused or config.get("model_type") == "eagle" else "target"


def bare_name(name: str) -> str:
    """A head's tensor name without the `model.` that some exporters put before it."""
    return name.removeprefix("model.")


def eagle(config: HeadConfig, names: Collection[str]) -> list[Row]:
    """An EAGLE head of any exporter.

    Args:
        config: of the head.
        names: the tensors that the file holds: `embed_tokens`, `t2d`, and `d2t` and `lm_head` of a head over the
            whole vocabulary may be absent; the first layer is `midlayer` or `layers.0`.

    Returns:
        The rows of the weight map.
    """
    vocab, hidden, drafted = config.vocab_size, config.hidden_size, config.draft_vocab_size
    rows = []
    if "embed_tokens.weight" in names:
        rows.append(stacked("embed", {"embed_tokens.weight": (vocab, hidden)}))
    rows += _fusion(config)
    midlayer = any(name.startswith("midlayer.") for name in names)
    for index in range(config.num_layers):
        rows += _layer(config, index, "midlayer" if midlayer and index == 0 else f"layers.{index}")
    if config.method == "eagle":
        return rows
    rows.append(stacked("norm", {"norm.weight": (hidden,)}))
    if "lm_head.weight" in names or drafted < vocab:
        rows.append(stacked("head", {"lm_head.weight": (drafted, hidden)}))
    maps = {"d2t": (drafted,)} if "d2t" in names or drafted < vocab else {}
    maps |= {"t2d": (vocab,)} if "t2d" in names else {}
    rows.append(Row("draft_to_target", maps, (drafted,), partial(_vocabulary, vocab), dtype="int32"))
    return rows


def _fusion(config: HeadConfig) -> list[Row]:
    """What makes a feature of the target's states, or, in EAGLE-1 and 2, joins it with the embedding."""
    hidden, width = config.hidden_size, config.num_features * config.target_hidden_size
    rows = []
    if config.norm_before_fc:
        rows.append(stacked("input_norm", {"input_norm.weight": (width,)}))
    if config.fc_norm:
        norms = [f"fc_norm.{index}.weight" for index in range(config.num_features)]
        rows.append(side_by_side("fc_norm", dict.fromkeys(norms, (config.target_hidden_size,))))
    if config.fuse:
        rows.append(stacked("fc", {"fc.weight": (hidden, 2 * hidden if config.method == "eagle" else width)}))
        if config.fc_bias:
            rows.append(stacked("fc_bias", {"fc.bias": (hidden,)}))
    return rows


def _layer(config: HeadConfig, index: int, source: str) -> list[Row]:
    """A layer of the head. The first one reads embedding and feature side by side, or, in EAGLE-1, what fc made."""
    to, hidden = f"layers.{index}", config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    joined = index == 0 and config.method == "eagle3"
    rows = block(to, source, config, width=2 * hidden if joined else hidden)
    if joined or index > 0:
        rows.append(stacked(f"{to}.input_norm", {f"{source}.input_layernorm.weight": (hidden,)}))
    if joined:
        rows.append(stacked(f"{to}.hidden_norm", {f"{source}.hidden_norm.weight": (hidden,)}))
    if config.qkv_bias:
        biases = {f"{source}.self_attn.{part}_proj.bias": (q if part == "q" else kv,) for part in "qkv"}
        rows.append(stacked(f"{to}.qkv_bias", biases))
    if config.qk_norm:
        rows += [
            stacked(f"{to}.{part}_norm", {f"{source}.self_attn.{part}_norm.weight": (config.head_dim,)})
            for part in "qk"
        ]
    return rows


def medusa_config(tensors: Mapping[str, Tensor]) -> MedusaConfig:
    """Sizes of Medusa heads by their tensors, named without prefix: config.json has few, and a wrong number of heads.

    Raises:
        ValueError: if there is no vocabulary matrix to read the sizes from.
    """
    layers = 1 + max(int(match[2]) for match in map(MEDUSA_BLOCK.fullmatch, tensors) if match)
    heads = 1 + max(int(name.partition(".")[0]) for name in tensors if name[:1].isdigit())
    output = f"0.{layers}.weight"
    if output not in tensors or len(tensors[output].shape) != 2:
        raise ValueError(
            f"expected {output}, the first head's matrix [vocabulary, hidden], got {', '.join(sorted(tensors))}; "
            "the file is incomplete"
        )
    vocab, hidden = tensors[output].shape
    return MedusaConfig(vocab_size=vocab, hidden_size=hidden, num_heads=heads, num_layers=layers)


def medusa(config: MedusaConfig) -> list[Row]:
    """Medusa heads: residual blocks, then a matrix over the vocabulary.

    Args:
        config: of the heads.

    Returns:
        The rows of the weight map.
    """
    hidden, rows = config.hidden_size, []
    for head in range(config.num_heads):
        for index in range(config.num_layers):
            to, source = f"heads.{head}.blocks.{index}", f"{head}.{index}.linear"
            rows.append(stacked(f"{to}.weight", {f"{source}.weight": (hidden, hidden)}))
            rows.append(stacked(f"{to}.bias", {f"{source}.bias": (hidden,)}))
        output = {f"{head}.{config.num_layers}.weight": (config.vocab_size, hidden)}
        rows.append(stacked(f"heads.{head}.output", output))
    return rows


def _vocabulary(vocab: int, source: Source, row: Row, dtype: str) -> np.ndarray:
    tables = {bare_name(name): np.concatenate(list(source.pieces(name))) for name in row.sources}
    if floats := [name for name, table in tables.items() if table.dtype.kind not in "biu"]:
        raise ValueError(f"{floats[0]}: expected integers, got {tables[floats[0]].dtype}; rounding has lost ids")
    ids = draft_to_target(tables.get("d2t", np.zeros(row.shape, np.int64)), vocab)
    if "t2d" in tables:
        check_members(ids, tables["t2d"])
    return ids.astype(dtype)


def draft_to_target(offsets: Int[np.ndarray, "draft_vocab"], vocab: int) -> Int[np.ndarray, "draft_vocab"]:
    """Target ids of draft ids: `d2t` holds offsets, target id = draft id + d2t[draft id], in any order.

    Raises:
        ValueError: if two draft ids share a target id, or one is outside the target's vocabulary.
    """
    ids = np.arange(len(offsets)) + offsets
    repeated = len(ids) - len(np.unique(ids))
    if repeated or ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(
            f"d2t: expected offsets (target id minus draft id) to distinct ids in 0..{vocab - 1}, "
            f"got {repeated} repeated ids in {ids.min()}..{ids.max()}; the head is damaged"
        )
    return ids


def check_members(ids: Int[np.ndarray, "draft_vocab"], member: Bool[np.ndarray, "vocab"]) -> None:
    """Raises ValueError unless `t2d` marks exactly the target ids of the draft vocabulary."""
    expected = np.flatnonzero(member)
    if not np.array_equal(np.sort(ids), expected):
        wrong = np.setxor1d(ids, expected)
        raise ValueError(
            f"t2d: expected to mark the {len(ids)} target ids that d2t gives, got {len(expected)}; "
            f"they differ in {wrong[:8].tolist()}; the file is inconsistent"
        )


def plan(folder: str | Path, overrides: Overrides | None = None) -> Plan:
    """Reads config and tensor headers of a Hugging Face folder and matches them both ways.

    Args:
        folder: with config.json and weights.
        overrides: what replaces the word of config.json.

    Returns:
        The plan; no weight is read yet.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the files are damaged or contradict themselves, or tensors and config do not match: lists
            every name.
        NotImplementedError: naming what is not supported.
    """
    folder, overrides = Path(folder), overrides or Overrides()
    if not (folder / "config.json").is_file():
        got = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else "no such folder"
        raise FileNotFoundError(f"{folder}: expected a folder with config.json, got {got}; give a model's folder")
    fields = read_json(folder / "config.json")
    source = open_source(folder, heads_first="medusa_num_heads" in fields)
    kind = detect(fields, source.tensors)
    overrides.check(kind)
    config, rows = _map(kind, fields, source, overrides)
    try:
        check(rows, source.tensors)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return Plan(folder, kind, config, tuple(rows), source)


def _map(kind: str, fields: Mapping[str, Any], source: Source, overrides: Overrides) -> tuple[Config, list[Row]]:
    """The config of a folder, and the rows that fill its parameters from the file's own tensor names."""
    if kind == "target":
        model = ModelConfig.from_hf(fields, rope_theta=overrides.rope_theta)
        return model, llama.llama(model, source.tensors)
    names = {bare_name(name): name for name in source.tensors}
    config: Config
    if kind == "medusa":
        config = medusa_config({bare: source.tensors[name] for bare, name in names.items()})
        rows = medusa(config)
    else:
        config = read_head(fields, kind, overrides)
        rows = eagle(config, names)
    return config, [
        replace(row, sources={names.get(name, name): shape for name, shape in row.sources.items()}) for row in rows
    ]
