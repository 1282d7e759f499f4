"""Writes small files whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file that replaces an earlier one when it is whole and on the disk.

    Raises:
        OSError: the folder cannot be written, or the disk is full; an earlier file is unchanged.
    """
    work = path.with_name(f".{path.name}.new")
    try:
        with work.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
