"""Reads a checkpoint's JSON files, checks their types and sizes, and defines the error for damaged checkpoints."""

from __future__ import annotations

import contextlib
import json
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

MAX_JSON_BYTES = 64 * 2**20  # largest JSON file in bytes; an index of 100,000 tensors has 10 MiB
MAX_DEPTH = 32  # most levels of objects and lists in a JSON file
MAX_SIZE = 2**31 - 1  # largest integer in a config: sizes and ids are int32 on the device
LEAST, MOST = 1e-18, 1e18  # range of other numbers; products of two of them have a place in float32
MAX_MESSAGE = 480  # most characters of an error message
LISTED = 3  # most names that an error lists; it counts the others

T = TypeVar("T")


class CheckpointError(ValueError):
    """The error for a fault in the files of a checkpoint.

    Args:
        place: file or folder with the fault, and where in the file; "" if the message already says this.
        message: what was expected, what was found, and the remedy.
    """

    def __init__(self, place: str | Path, message: str) -> None:
        super().__init__(cut(f"{place}: {message}" if str(place) else message))


def cut(text: str, limit: int = MAX_MESSAGE) -> str:
    """Return a text on one line, without its middle if it has more than ``limit`` characters."""
    text = " ".join(text.split()) if "\n" in text else text
    tail = limit // 3
    return text if len(text) <= limit else f"{text[: limit - tail - 5]} ... {text[-tail:]}"


def short(value: object, limit: int = 100) -> str:
    """Return ``repr(value)``, cut to at most ``limit`` characters."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = limit
    brief.maxlevel, brief.maxlist, brief.maxtuple, brief.maxset, brief.maxdict = 3, 8, 8, 8, 6
    return cut(brief.repr(value), limit)


def listed(names: Iterable[object]) -> str:
    """Return the first names of a list and the number of the others, as in "a, b, c and 7 more"."""
    every = [name if isinstance(name, str) and name.isprintable() else repr(name) for name in names]
    rest = len(every) - LISTED
    return ", ".join(cut(name, 80) for name in every[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


@contextlib.contextmanager
def named(place: str | Path) -> Iterator[None]:
    """Put a place before the message of an error raised in the context; a ValueError becomes a CheckpointError.

    A message that already begins with the place is not changed.
    """
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        if str(error).startswith(str(place)):
            raise
        if isinstance(error, ValueError):
            raise CheckpointError(place, str(error)) from error
        raise NotImplementedError(cut(f"{place}: {error}")) from error


def read_json(file: Path) -> Fields:
    """Read a file that holds a JSON object.

    Args:
        file: the file; at most `MAX_JSON_BYTES` long and `MAX_DEPTH` levels deep.

    Raises:
        CheckpointError: the file is too large, too deeply nested, not UTF-8, or not a JSON object.
    """
    try:
        if (size := file.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(file, f"expected at most {MAX_JSON_BYTES:,} bytes, got {size:,}; download it again")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(file, f"expected a text in UTF-8, got an error ({error}); download it again") from error
    try:
        value = json.loads(text)
    except RecursionError:
        value = None
    except ValueError as error:
        if text.startswith(LFS_POINTER):
            raise CheckpointError(file, LFS_ADVICE) from None
        raise CheckpointError(file, f"expected JSON, got an error ({error}); download it again") from error
    if value is None or _is_deeper(value, MAX_DEPTH):
        raise CheckpointError(file, f"expected an object of at most {MAX_DEPTH} levels, got others; download it again")
    if not isinstance(value, dict):
        raise CheckpointError(file, f"expected a JSON object, got {type(value).__name__}; download it again")
    return Fields(value, str(file))


LFS_POINTER = "version https://git-lfs"
LFS_ADVICE = "expected the file itself, got a git-lfs pointer to it; run `git lfs pull` in its folder, or download it"


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested more than ``levels`` deep."""
    layer = [value]
    for _ in range(levels):
        layer = [child for node in layer for child in _children(node) if isinstance(child, (dict, list))]
        if not layer:
            return False
    return True


def _children(node: Any) -> Iterable[Any]:
    return node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()


class Fields(Mapping[str, Any]):
    """A JSON object that checks the type of each value that is read, and names its file in errors.

    The methods that read a value take its name and a default, which they return if the value is absent or null. They
    raise CheckpointError if there is no default, or if the value has a wrong type or is outside of the limits.

    Args:
        values: the object.
        place: the object's file and, for a nested object, its name in the file.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "config.json") -> None:
        self.place = place
        self._values = values

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Fields:
        """Return a mapping as `Fields` of a "config.json"; return `Fields` unchanged."""
        return values if isinstance(values, Fields) else cls(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def error(self, name: str, expected: str) -> CheckpointError:
        """Return the error for a value that is not as expected.

        Args:
            name: name of the value.
            expected: the expected values, in words.
        """
        got = f"got {short(self[name])}" if name in self else "got none"
        return CheckpointError(self.place, f"{name}: expected {expected}, {got}; correct the file")

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """Read an integer from ``least`` to ``most``."""
        value = self._given(name, default, "an integer", is_int)
        if not least <= value <= most:
            raise self.error(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a number above 0, from `LEAST` to `MOST`."""
        value = self._given(name, default, "a number", lambda v: is_int(v) or isinstance(v, float))
        self._check_range(name, [value], "a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool | None = False) -> bool:
        """Read a boolean."""
        return self._given(name, default, "true or false", lambda v: isinstance(v, bool))

    def text(self, name: str, default: str | None = None) -> str:
        """Read a text."""
        return self._given(name, default, "a text", lambda v: isinstance(v, str))

    def texts(self, name: str) -> list[str]:
        """Read a list of texts; return [] if there is none."""
        return self._given(name, [], "a list of texts", lambda v: _all(v, lambda x: isinstance(x, str)))

    def integers(self, name: str) -> list[int]:
        """Read a list of integers that are at least 0; return [] if there is none."""
        expected = "a list of integers from 0"
        return self._given(name, [], expected, lambda v: _all(v, lambda x: is_int(x) and 0 <= x <= MAX_SIZE))

    def numbers(self, name: str) -> list[float]:
        """Read a list of numbers above 0, from `LEAST` to `MOST`; return [] if there is none."""
        values: list[float] = self._given(
            name, [], "a list of numbers", lambda v: _all(v, lambda x: is_int(x) or isinstance(x, float))
        )
        self._check_range(name, values, "a list of finite numbers above 0")
        return [float(value) for value in values]

    def _check_range(self, name: str, values: Sequence[float], expected: str) -> None:
        if not all(0 < value <= sys.float_info.max for value in values):
            raise self.error(name, expected)
        if not all(LEAST <= value <= MOST for value in values):
            raise self.error(name, f"{expected}, from {LEAST:g} to {MOST:g}")

    def objects(self, name: str) -> list[Fields]:
        """Read a list of nested objects; return [] if there is none."""
        values: list[Any] = self._given(
            name, [], "a list of objects", lambda v: _all(v, lambda x: isinstance(x, (dict, Fields)))
        )
        return [Fields.of(value) for value in values]

    def object(self, name: str) -> Fields:
        """Read a nested object; return an empty one if there is none."""
        value: Any = self._given(name, {}, "an object", lambda v: isinstance(v, (dict, Fields)))
        return value if isinstance(value, Fields) else Fields(value, f"{self.place}: {name}")

    def _given(self, name: str, default: T | None, expected: str, is_right: Callable[[Any], bool]) -> T:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if value is None or not is_right(value):
            raise self.error(name, expected)
        return value


def is_int(value: object) -> bool:
    """Return whether a value is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _all(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(is_right, value))


def require(fields: Fields, names: Iterable[str]) -> None:
    """Raise a CheckpointError that names all required values that are absent or null, if there are any.

    Args:
        fields: a config, or a part of it.
        names: names of the required values.
    """
    missing = [name for name in names if fields.get(name) is None]
    if missing:
        got = listed(sorted(fields))
        raise CheckpointError(fields.place, f"missing {', '.join(missing)}; got {got}; add the keys")
