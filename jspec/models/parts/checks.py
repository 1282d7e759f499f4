"""Checks of config records, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from convert.fields import CheckpointError, short


def positive(where: str, record: Any, names: Iterable[str]) -> None:
    """Raise CheckpointError if one of the named attributes of a record is not above 0.

    Args:
        where: beginning of the error message.
        record: object with the attributes.
        names: names of the attributes to check.
    """
    positive_values(where, {name: getattr(record, name) for name in names})


def positive_values(where: str, values: Mapping[str, float]) -> None:
    """Raise CheckpointError if one of some values, given by name, is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise CheckpointError(where, f"expected {name} > 0, got {short(value)}; correct config.json")


def unsupported(name: str, got: Any, expected: str) -> NotImplementedError:
    """Return the error for a checkpoint option whose value jspec does not support.

    Args:
        name: name of the option.
        got: value of the option in the checkpoint.
        expected: supported values, as text.
    """
    return NotImplementedError(f"{name}: expected {expected}, got {short(got)}; this checkpoint is not supported yet")


def check_divided(name: str, size: int, devices: int, expected: str = "divisor") -> None:
    """Raise ValueError unless a number of heads or channels can be divided by the number of devices."""
    if size % devices:
        raise ValueError(
            f"tensor_parallel: expected a {expected} of {size}, the model's {name}, got {devices}; take another number "
            "of devices"
        )
