"""Chooses a drafter for a target by what its folder has: `drafter="auto"`, `--draft auto`."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from convert import hub, orbax
from jspec.draft.auto import load_drafter, read_header
from jspec.draft.base import Drafter
from jspec.draft.formats.mtp_format import has_mtp_layer
from jspec.draft.mtp import MTP
from jspec.draft.published import heads_of
from jspec.draft.suffix import Suffix
from jspec.draft.uno import UNO
from jspec.models.adapter_files import is_adapter

logger = logging.getLogger(__name__)
SUBFOLDER = "drafter"  # of a target's folder, with its drafter


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter that was chosen for a target.

    Attributes:
        method: method of the drafter, as the command line names it: "eagle3", "mtp", "suffix", ...
        path: folder of its weights; None: it has none.
    """

    method: str
    path: Path | None

    def __str__(self) -> str:
        flag = f"--{'draft' if self.method == UNO.method else self.method.replace('_', '-')}"  # no flag of its own
        return flag if self.path is None else f"{flag} {self.path}"

    def load(self, *, dtype: str | None = None) -> Drafter:
        """Return the drafter with its default tree."""
        if self.path is None:
            return Suffix()
        load = MTP.from_pretrained if self.method == MTP.method else load_drafter
        return load(self.path, dtype=dtype)


def drafter_of(path: str | os.PathLike[str]) -> DrafterChoice:
    """Return the drafter whose weights a folder has: a head, a draft model, or an adapter for `UNO`.

    Raises: the errors of `jspec.draft.auto.read_header`.
    """
    folder = hub.find(path)
    if is_adapter(folder):
        return DrafterChoice(UNO.method, folder)
    kind = read_header(folder).kind
    return DrafterChoice("draft_model" if kind == "target" else kind, folder)


def choose_drafter(target: str | os.PathLike[str]) -> DrafterChoice:
    """Choose a drafter: the folder `drafter` in the target's folder, else its MTP layer if we read it, else a `Suffix`.

    Published heads of the target (`jspec.draft.published`) are logged, but never downloaded.

    Args:
        target: folder or hub id ("owner/name") of the target.

    Raises: the errors of `jspec.draft.auto.read_header` for the folder `drafter`.
    """
    folder = hub.find(target)
    beside = folder / SUBFOLDER
    if beside.is_dir():
        choice = drafter_of(beside)
    elif not orbax.is_checkpoint(folder) and has_mtp_layer(folder):
        choice = DrafterChoice(MTP.method, folder)
    else:
        choice = DrafterChoice("suffix", None)
    logger.info("the drafter is chosen by what the folder of the target has: %s", choice)
    heads = [head.option for head in heads_of(target) if head.method != choice.method]
    if heads:
        logger.info("published for this target, not loaded by us and never downloaded unasked: %s", ", ".join(heads))
    return choice
