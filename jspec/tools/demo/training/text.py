"""Gathers the text of the embedded target: Python sources and documentation, of which it holds out a tenth."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".py", ".rst")
# Folders of installed packages, of generated tables of characters, and of sources that are wrong on purpose.
SKIPPED = {"site-packages", "encodings", "pydoc_data", "__pycache__", "data", "cjkencodings", "build"}
TESTS = {"test", "tests", "idle_test"}
SHARED_HELD = 0.3  # share of lines in common with held-out files above which a file is left out
SHARED_KEPT = 0.7  # share of lines in common with earlier files above which a file is left out
LONG = 20  # characters of a line that counts for these shares


@dataclass(frozen=True)
class Document:
    """A file of text.

    Attributes:
        name: path in its folder, with slashes.
        text: contents.
    """

    name: str
    text: str

    @property
    def group(self) -> str:
        """Return "documentation", "tests" or "modules"."""
        if self.name.endswith(".rst"):
            return "documentation"
        *folders, file = self.name.split("/")
        return "tests" if TESTS & set(folders) or file.startswith("test_") else "modules"

    @property
    def is_held_out(self) -> bool:
        """Return whether the file belongs to the tenth that is not trained on, by the hash of its name."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 10 == 0

    def lines(self) -> set[str]:
        """Return the different lines that are long enough to be compared with other files."""
        return {line for line in map(str.strip, self.text.splitlines()) if len(line) >= LONG}


def documents(folders: Iterable[Path]) -> Iterator[Document]:
    """Read the Python sources that parse and the reStructuredText of some folders, in the order of their names."""
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.suffix in SUFFIXES and not SKIPPED & set(name.parts) and path.is_file():
                text = _read(path)
                if text:
                    yield Document(name.as_posix(), text)


def split(found: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Divide documents into those to train on and those held out, and leave out copies.

    A file that shares lines with held-out ones (an earlier version, a moved file) is in neither list. A name that comes
    again, and a file that repeats earlier ones, is left out too.

    Returns:
        The documents to train on, and those held out.
    """
    first: dict[str, Document] = {}
    for document in found:
        first.setdefault(document.name, document)
    held = [document for document in first.values() if document.is_held_out]
    held_lines = set().union(*(document.lines() for document in held))
    kept, seen = [], set[str]()
    for document in first.values():
        lines = document.lines()
        if document.is_held_out or not lines:
            continue
        if len(lines & held_lines) <= SHARED_HELD * len(lines) and len(lines & seen) <= SHARED_KEPT * len(lines):
            kept.append(document)
            seen |= lines
    return kept, held


def bytes_of(found: Sequence[Document]) -> dict[str, int]:
    """Return the bytes of the documents by group."""
    groups = sorted({document.group for document in found})
    return {group: sum(len(one.text.encode()) for one in found if one.group == group) for group in groups}


def _read(path: Path) -> str | None:
    """Return the contents of a file; None if it is no UTF-8 or no Python that parses."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                warnings.simplefilter("ignore", DeprecationWarning)
                ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return text
