"""Detects the kind of checkpoint in a Hugging Face folder from config.json and tensor names."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from convert.fields import CheckpointError, Fields, short

KINDS = {  # kinds of checkpoints, and the class or function that loads each
    "target": "Engine.from_pretrained, or as a draft model DraftModel.from_pretrained",
    "eagle3": "Eagle3.from_pretrained",
    "peagle": "PEagle.from_pretrained",
    "eagle": "Eagle.from_pretrained",
    "medusa": "Medusa.from_pretrained",
    "dflash": "DFlash.from_pretrained",
    "dspark": "DSpark.from_pretrained",
    "dflash2": "DFlash2.from_pretrained",
    "gemma4_assistant": "Gemma4Assistant.from_pretrained",
}
MEDUSA_BLOCK = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})\.linear\.(weight|bias)")

# Patterns of tensor names that occur in one unsupported method only, with the name of the method.
OTHER_TENSORS = {
    r"parallel_draft_heads\..*": "parallel draft heads",
    r"medusa_heads?\..*": "Medusa heads within a model (Medusa-2)",
}
# Tensors that predict further tokens (MTP), beside a model's layers or in layers after its last one. A model is loaded
# without them.
LATER_TENSORS = re.compile(r"(?:model\.)?mtp(_layers)?\..*")
LATER_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # keys: number of layers with such tensors
LATER_LAYER = re.compile(r"(?!(?:model\.)?mtp\.)(?:.*\.)?layers\.([0-9]{1,6})\.eh_proj\..*")
OTHER_ARCHITECTURES = ("DSpine", "Domino")
MOST_LATER = 2048  # layers that are left out; a config may count more
GEMMA4_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # values of `model_type`
SELECTOR = "candidate_selector."  # prefix of tensors that DFlash2 adds to a DFlash head
DSPARK_HEADS = ("markov_head.", "confidence_head.")  # prefixes of tensors that DSpark adds to a DFlash head


def bare_name(name: str) -> str:
    """Return a tensor name without the prefix `model.`, which some exporters of heads add."""
    return name.removeprefix("model.")


def kind_of(config: Fields, names: Collection[str], families: Iterable[str]) -> str:
    """Return the kind of checkpoint in a folder, one of `KINDS`.

    Args:
        config: parsed config.json.
        names: names of all tensors in the folder.
        families: values of `model_type` that are supported for targets, for the error.

    Raises:
        CheckpointError: a value of the config has a wrong type.
        NotImplementedError: the folder holds a head of an unsupported method; the message names the method.
    """
    bare = {bare_name(name) for name in names}
    architectures = " ".join(config.texts("architectures"))
    speculators = config.text("speculators_model_type", "")
    others = [f"the architecture {name}" for name in OTHER_ARCHITECTURES if name in architectures]
    others += [method for pattern, method in OTHER_TENSORS.items() if any(re.fullmatch(pattern, n) for n in bare)]
    is_peagle = speculators == "peagle" or "mask_hidden" in bare or "peagle" in architectures.lower()
    is_peagle = is_peagle or config.flag("parallel_drafting")
    if "pard_token" in config and not is_peagle:
        others.append("PARD (a draft model that drafts in parallel)")
    if speculators not in ("", "eagle3", "peagle", "dflash", "dspark", "dflash2"):
        others.append(f"speculators_model_type {short(speculators)}")
    kind = _kind(config, bare, is_peagle=is_peagle)
    if _has_later(config, bare, is_model=kind == "target" and any("layers.0." in name for name in bare)):
        others.append("multi-token prediction (MTP) layers")
    if others:
        known = ", ".join(families)
        raise NotImplementedError(
            f"expected a model ({known}) or an EAGLE, DFlash, DSpark or Medusa head, got {others[0]}; this method is "
            "not supported yet"
        )
    return kind


def later_layers(config: Fields, names: Iterable[str]) -> set[int]:
    """Return the indices of a model's layers that predict further tokens, by its config and by its tensors.

    Args:
        config: config of the language model.
        names: names of its tensors.
    """
    if config.get("num_hidden_layers") is None:  # Nemotron-H lists its layers, and has none of these after them
        return set()
    first, more = config.integer("num_hidden_layers"), config.integer("num_nextn_predict_layers", 0, least=0)
    stored = {int(match[1]) for name in names if (match := LATER_LAYER.fullmatch(name))}
    return {*range(first, first + min(more, MOST_LATER)), *(index for index in stored if index >= first)}


def _has_later(config: Fields, bare: Collection[str], *, is_model: bool) -> bool:
    """Return whether tensors that predict further tokens are all that there is, or belong to no model."""
    if not is_model:
        return any(LATER_TENSORS.fullmatch(name) or LATER_LAYER.fullmatch(name) for name in bare)
    first = (config.object("text_config") or config).get("num_hidden_layers")
    stored = [int(match[1]) for name in bare if (match := LATER_LAYER.fullmatch(name))]
    return isinstance(first, int) and any(index < first for index in stored)


def _kind(config: Fields, bare: Collection[str], *, is_peagle: bool) -> str:
    architectures = " ".join(config.texts("architectures"))
    speculators = config.text("speculators_model_type", "")
    if is_peagle:
        return "peagle"
    if config.text("model_type", "") in GEMMA4_ASSISTANTS:
        return "gemma4_assistant"
    if any(MEDUSA_BLOCK.fullmatch(name) for name in bare):
        return "medusa"
    if any(name.startswith(SELECTOR) for name in bare):
        return "dflash2"
    if any(name.startswith(DSPARK_HEADS) for name in bare):
        return "dspark"
    is_block = speculators in ("dflash", "dspark", "dflash2") or "DFlash" in architectures or "DSpark" in architectures
    if is_block or "hidden_norm.weight" in bare:
        return "dflash"
    eagle3 = speculators or "d2t" in bare or "Eagle3" in architectures
    if eagle3 or any(name.startswith("midlayer.") or name.endswith("hidden_norm.weight") for name in bare):
        return "eagle3"
    has_fc = any(name.startswith("fc.") for name in bare)
    return "eagle" if has_fc or config.text("model_type", "") == "eagle" else "target"


def check_kind(folder: Path, got: str, expected: str | None) -> None:
    """Raise CheckpointError if a checkpoint is not of the expected kind.

    Args:
        folder: folder of the checkpoint, for the error.
        got: kind of the checkpoint.
        expected: expected kind; None: any.
    """
    if expected is not None and got != expected:
        raise CheckpointError(
            folder, f"expected a checkpoint of kind {expected!r}, got {got!r}; load it with {KINDS[got]}, or give "
            "another folder",
        )  # fmt: skip
