"""Published heads by the exact name of their target: data of published.json, from the sources that it names."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("published.json")
STORED = re.compile(r"(-(FP8|AWQ|NVFP4|BF16))+$", re.IGNORECASE)  # ends of names that say how weights are stored


@dataclass(frozen=True)
class PublishedHead:
    """A head that its source names for a target.

    Attributes:
        target: hub id of the target.
        model_type: the target's `model_type` (`jspec.models.families`).
        head: hub id of the head; for an MTP layer that of the target, whose folder has it.
        method: method of the head, as options of the command line name it.
        source: public document that says so: repository of GitHub, commit, file.
        checked: what was checked here: "names": both names stand in the source.
        note: what else the source says of the head.
    """

    target: str
    model_type: str
    head: str
    method: str
    source: str
    checked: str
    note: str = ""

    @property
    def option(self) -> str:
        """The option of the command line that drafts with the head."""
        return f"--{self.method.replace('_', '-')} {self.head}"


def published_heads() -> list[PublishedHead]:
    """Return all heads of published.json, by target."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return [PublishedHead(**row | {"source": data["sources"][row["source"]]}) for row in data["heads"]]


def heads_of(target: str | os.PathLike[str]) -> list[PublishedHead]:
    """Return the heads of a target whose whole name is the same (`model_name`)."""
    return [head for head in published_heads() if model_name(head.target) == model_name(target)]


def model_name(target: str | os.PathLike[str]) -> str:
    """Return the name of a model in small letters, without owner, folder, revision, and end that says how it is stored.

    Args:
        target: hub id ("owner/name", "owner/name@revision"), folder, or name.
    """
    text = os.fspath(target).rstrip("/")
    revised = re.fullmatch(r"([\w.-]+/[\w.-]+)@.+", text)
    return STORED.sub("", (text if revised is None else revised[1]).rpartition("/")[2]).lower()
