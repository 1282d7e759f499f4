"""The target that a draft head names in its config.json, so that one name is enough for both.

The exporter speculators writes it as `speculators_config.verifier.name_or_path`, with the number of tokens that the
head was trained to draft in `speculators_config.proposal_methods`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from convert import hub
from convert.detect import KINDS
from convert.fields import CheckpointError, Fields, read_json, short
from jspec.core.tree import DEFAULT_TREE

logger = logging.getLogger(__name__)
KEY = "speculators_config.verifier.name_or_path"


@dataclass(frozen=True)
class NamedTarget:
    """The target that a head names.

    Attributes:
        path: the target's folder or hub id.
        kind: kind of the head, one of `convert.detect.KINDS`.
        length: number of tokens to draft: those that the head was trained for, at most those of the default tree.
    """

    path: str
    kind: str
    length: int


def named_target(path: str | os.PathLike[str]) -> NamedTarget | None:
    """Return the target that a checkpoint names in its config.json; None: the checkpoint is no such head.

    Neither weights are read nor, of a hub id, downloaded; of the target its config.json is.

    Args:
        path: folder or hub id ("owner/name").

    Raises:
        FileNotFoundError: there is no such checkpoint, or no such target.
        CheckpointError: the head names no target, one that is a head, or one of another architecture or vocabulary.
    """
    folder = hub.find(path, tokenizer=True)
    fields = _config(folder)
    kind = fields.text("speculators_model_type", "")
    if "speculators_config" not in fields or kind not in KINDS:
        return None
    options = fields.object("speculators_config")
    verifier = options.object("verifier")
    target = verifier.get("name_or_path")
    if not isinstance(target, str) or not target:
        raise CheckpointError(
            folder, f"expected a head that names its target in {KEY}, got {short(target)}; give the target, and this "
            "head as the drafter",
        )  # fmt: skip
    _check(fields, verifier, target)
    methods = options.objects("proposal_methods")
    _warn_if_lossy(methods)
    trained = [method.integer("speculative_tokens", DEFAULT_TREE.depth, least=1) for method in methods]
    return NamedTarget(target, kind, min([DEFAULT_TREE.depth, *trained[:1]]))


def target_name(folder: Path) -> str | None:
    """Return what a head's folder gives as the name of its target; None: nothing."""
    name = _config(folder).object("speculators_config").object("verifier").get("name_or_path")
    return name if isinstance(name, str) else None


def _config(folder: Path) -> Fields:
    """Return the parsed config.json of a folder; empty: there is none."""
    file = folder / "config.json"
    return read_json(file) if file.is_file() else Fields({})


def _check(head: Fields, verifier: Fields, target: str) -> None:
    """Raise a CheckpointError if the target's config.json is not that of the model that the head names."""
    try:
        found = hub.find(target, tokenizer=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{KEY}: {error}; or give the target, and the head as the drafter") from error
    config = read_json(found / "config.json")
    if "speculators_model_type" in config:
        raise CheckpointError(found, f"expected a target, which {KEY} of the head names, got a head; give the target")
    named, stored = verifier.texts("architectures"), config.texts("architectures")
    if named and stored and not set(named) & set(stored):
        raise CheckpointError(found, f"expected the architecture {named[0]}, which the head names, got {stored[0]}")
    sizes = [
        (part.object(key) or part).get("vocab_size")
        for part, key in ((head, "transformer_layer_config"), (config, "text_config"))
    ]
    if None not in sizes and sizes[0] != sizes[1]:
        raise CheckpointError(found, f"expected a vocabulary of {sizes[0]} tokens, which the head has, got {sizes[1]}")


def _warn_if_lossy(methods: list[Fields]) -> None:
    for method in methods:
        if method.get("accept_tolerance") not in (None, 0) or method.get("verifier_accept_k") not in (None, 1):
            logger.warning(
                "the head's config.json asks for a rule that accepts tokens the target would not choose "
                "(accept_tolerance, verifier_accept_k); it is ignored, and outputs are the target's"
            )
