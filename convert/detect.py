"""Detects the kind of checkpoint in a Hugging Face folder from config.json and tensor names."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

MEDUSA_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")

# Patterns of tensor names that occur only in unsupported methods, and the name of the method.
OTHER_TENSORS = {
    r"mask_hidden": "P-EAGLE (parallel drafting)",
    r"parallel_draft_heads\..*": "parallel draft heads",
    r"midlayer\.\d+\..*": "an EAGLE-3 head of several midlayers",
    r"medusa_heads?\..*": "Medusa heads within a model (Medusa-2)",
    r"mtp(_layers)?\..*|.*\.eh_proj\..*": "multi-token prediction (MTP) layers",
}
OTHER_ARCHITECTURES = ("PEagle", "DFlash", "DSpark", "Domino")


def bare_name(name: str) -> str:
    """A tensor name without the prefix `model.`, which some exporters of heads add."""
    return name.removeprefix("model.")


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str:
    """The kind of checkpoint in a folder: "target", "eagle3", "eagle" or "medusa".

    Args:
        config: parsed config.json.
        names: names of all tensors in the folder.

    Raises:
        NotImplementedError: the folder holds a head of an unsupported method; the message names the method.
    """
    bare = {bare_name(name) for name in names}
    architectures = " ".join(config.get("architectures") or ())
    speculators = config.get("speculators_model_type")
    others = [f"the architecture {architectures}" for name in OTHER_ARCHITECTURES if name in architectures]
    others += [method for pattern, method in OTHER_TENSORS.items() if any(re.fullmatch(pattern, n) for n in bare)]
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
    has_fc = any(name.startswith("fc.") for name in bare)
    return "eagle" if has_fc or config.get("model_type") == "eagle" else "target"


def check_kind(folder: Path, got: str, expected: str | None) -> None:
    """Raises ValueError if a checkpoint is not of the expected kind.

    Args:
        folder: folder of the checkpoint, for the error.
        got: kind of the checkpoint.
        expected: expected kind; None: any.
    """
    if expected is not None and got != expected:
        raise ValueError(f"{folder}: expected a checkpoint of kind {expected!r}, got {got!r}; give another folder")
