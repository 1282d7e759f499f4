"""Files of prompts, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FIELDS = "turns (a list of texts, of which the first is taken), prompt (a text) or question (a text)"


def read(path: Path, count: int | None = None) -> list[str]:
    """The first prompts of a file.

    Args:
        count: how many; None: all.

    Raises:
        ValueError: naming the line and what was expected in it, or a file that holds fewer.
    """
    found = [prompt_of(record, where) for where, record in records(path)]
    if count is not None and len(found) < count:
        raise ValueError(f"{path}: expected {count} prompts, got {len(found)}; ask for no more")
    return found[:count]


def records(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object with the words that name its line.

    Raises:
        ValueError: a line that is no JSON object, or a file without any.
    """
    is_empty = True
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        where, is_empty = f"{path}, line {number}", False
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r} ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r}")
        yield where, record
    if is_empty:
        raise ValueError(f"{path}: expected a JSON object a line, got an empty file")


def prompt_of(record: Mapping[str, Any], where: str) -> str:
    """The prompt of one object."""
    match record:
        case {"turns": [str(text), *_]} | {"prompt": str(text)} | {"question": str(text)}:
            return text
    raise ValueError(f"{where}: expected the field {FIELDS}, got {', '.join(record) or 'no field'}")
