"""Weight maps of draft heads, and how a folder tells which kind it holds."""

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from convert.hf import Row, Source, stacked
from convert.targets import block
from jspec.models.config import Eagle3Config


def refuse_unbuilt(config: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for head formats that are not read yet, as far as config.json tells."""
    if "speculators_model_type" in config:
        raise _unbuilt(f"speculators format ({config['speculators_model_type']})")
    if "medusa_num_heads" in config:
        raise _unbuilt("Medusa heads")


def detect(config: Mapping[str, Any], names: Collection[str]) -> str:
    """The kind of a folder by its tensors: "target" or "eagle3".

    Raises:
        NotImplementedError: naming a format that is not read yet.
    """
    bare = {bare_name(name) for name in names}
    architectures = " ".join(config.get("architectures") or ())
    if any(name.startswith("midlayer.") for name in bare) or "d2t" in bare or "Eagle3" in architectures:
        return "eagle3"
    if any(re.fullmatch(r"\d+\.\d+\.linear\.weight", name) for name in bare):
        raise _unbuilt("Medusa heads")
    if "fc.weight" in bare:
        raise _unbuilt("an EAGLE-1/2 head")
    return "target"


def bare_name(name: str) -> str:
    """A head's tensor name without the `model.` that some exporters put before it."""
    return name.removeprefix("model.")


def eagle3(config: Eagle3Config, names: Collection[str]) -> list[Row]:
    """An EAGLE-3 head as its authors save it, and SpecForge and ModelOpt after them.

    Args:
        config: of the head.
        names: the tensors that the file holds: `embed_tokens`, `d2t` and `t2d` may be absent.

    Returns:
        The rows of the weight map.
    """
    vocab, hidden, drafted = config.vocab_size, config.hidden_size, config.draft_vocab_size
    rows = []
    if "embed_tokens.weight" in names:
        rows.append(stacked("embed", {"embed_tokens.weight": (vocab, hidden)}))
    rows += [
        stacked("fc", {"fc.weight": (hidden, config.num_features * config.target_hidden_size)}),
        stacked("layer.input_norm", {"midlayer.input_layernorm.weight": (hidden,)}),
        stacked("layer.hidden_norm", {"midlayer.hidden_norm.weight": (hidden,)}),
        *block("layer", "midlayer", config, width=2 * hidden),
        stacked("norm", {"norm.weight": (hidden,)}),
        stacked("head", {"lm_head.weight": (drafted, hidden)}),
    ]
    maps = {"d2t": (drafted,)} if "d2t" in names or drafted < vocab else {}
    maps |= {"t2d": (vocab,)} if "t2d" in names else {}
    rows.append(Row("draft_to_target", maps, (drafted,), partial(_vocabulary, vocab), dtype="int32"))
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


def _unbuilt(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"expected a Llama model or an EAGLE-3 head in its authors' format, got {what}; not read yet"
    )
