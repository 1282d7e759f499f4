"""Model families: one file each, with the reader of its config.json and the names of its tensors.

A file registers its family under the values of `model_type` that it reads; nothing else has to name it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeVar

from convert.huggingface import Row
from jspec.models.config import ModelConfig, unsupported


class Family(Protocol):
    """A family of models."""

    def config(self, fields: Mapping[str, Any], *, rope_theta: float | None = None) -> ModelConfig:
        """Reads a parsed config.json; `rope_theta` replaces the rotary base in it.

        Raises: ValueError listing missing keys; NotImplementedError naming an option that is not supported.
        """

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[Row]:
        """The rows of the weight map; `names` are those of the tensors in the folder."""


FAMILIES: dict[str, Family] = {}
DEFAULT = "llama"  # reads a config.json without a model_type, and names the missing key

F = TypeVar("F", bound=type[Family])


def register(*model_types: str) -> Callable[[F], F]:
    """Registers a family under the values of `model_type` that it reads."""

    def add(family: F) -> F:
        FAMILIES.update(dict.fromkeys(model_types, family()))
        return family

    return add


def family_of(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises: NotImplementedError naming the known values.
    """
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    if model_type not in FAMILIES:
        raise unsupported("model_type", model_type, " or ".join(map(repr, FAMILIES)))
    return FAMILIES[model_type]


def read_config(fields: Mapping[str, Any], *, rope_theta: float | None = None) -> ModelConfig:
    """Reads the parsed config.json of a model of any family; arguments and errors as `Family.config`."""
    return family_of(fields.get("model_type") or DEFAULT).config(fields, rope_theta=rope_theta)
