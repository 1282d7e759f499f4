"""Readers of JSON values: each checks the value of one field, and returns it in the form that its user needs.

A reader takes the field's name and its value, and raises an `ApiError` with status 400 that names the field. Values
that become fields of `SamplingParams` unchanged are checked there, by `given`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from jspec.core.shorten import short
from jspec.engine.request.sampling_params import is_int
from jspec.server.http.errors import invalid

Reader = Callable[[str, Any], Any]


def given(name: str, value: Any) -> Any:
    """Return a value as it is; what takes it checks it."""
    return value


def boolean(name: str, value: Any) -> bool:
    return _checked(name, value, isinstance(value, bool), "true or false")


def text(name: str, value: Any) -> str:
    return _checked(name, value, isinstance(value, str), "a text")


def mapping(name: str, value: Any) -> dict[str, Any]:
    return _checked(name, value, isinstance(value, dict), "an object")


def integer(least: int, most: int) -> Reader:
    """Return a reader of integers from ``least`` to ``most``."""

    def read(name: str, value: Any) -> int:
        return _checked(name, value, is_int(value) and least <= value <= most, f"an integer from {least} to {most}")

    return read


def listing(most: int) -> Reader:
    """Return a reader of lists with 1 to ``most`` entries."""

    def read(name: str, value: Any) -> list[Any]:
        is_right = isinstance(value, list) and 1 <= len(value) <= most
        return _checked(name, value, is_right, f"a list with 1 to {most} entries")

    return read


def one_of(*values: str) -> Reader:
    """Return a reader that accepts a few texts."""

    def read(name: str, value: Any) -> str:
        return _checked(name, value, isinstance(value, str) and value in values, f"one of {', '.join(values)}")

    return read


def only(neutral: Any, reason: str) -> Reader:
    """Return a reader that accepts the one value that asks for nothing, and refuses others for a reason."""

    def read(name: str, value: Any) -> Any:
        is_neutral = type(value) is type(neutral) and value == neutral
        return _checked(name, value, is_neutral, f"{_json(neutral)} or nothing, because {reason}")

    return read


def never(reason: str) -> Reader:
    """Return a reader that refuses all values except null for a reason."""

    def read(name: str, value: Any) -> Any:
        raise invalid(name, f"expected nothing, because {reason}, got {short(value)}")

    return read


def check_keys(name: str, value: dict[str, Any], known: Collection[str]) -> None:
    """Refuse an object with keys that are not known."""
    unknown = next((key for key in value if key not in known), None)
    if unknown is not None:
        raise invalid(f"{name}.{unknown:.40}", f"expected one of the keys {', '.join(known)}; correct or leave it out")


def _checked(name: str, value: Any, is_right: bool, expected: str) -> Any:
    if not is_right:
        raise invalid(name, f"expected {expected}, got {short(value)}")
    return value


def _json(value: Any) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def count_characters(value: Any) -> int:
    """Return the number of characters of all texts in a JSON value, names among them."""
    left, count = [value], 0
    while left:
        match left.pop():
            case str() as text:
                count += len(text)
            case dict() as fields:
                left += [*fields, *fields.values()]
            case list() as values:
                left += values
    return count
