"""Model families, one per file. A family reads a model's config.json and names the model's tensors.

Each file registers its family under values of `model_type` in config.json. `family_of` imports all files of this
folder, so a new family needs only a new file.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from convert.fields import Fields
from convert.huggingface import MapRow
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.parts.checks import unsupported


class Family(Protocol):
    """The interface of a model family, which reads config.json and maps a checkpoint's tensors to parameters.

    Attributes:
        published: names of published models, for the list of supported targets.
    """

    published: ClassVar[str]

    def config(self, fields: Mapping[str, Any], *, rope_theta: float | None = None) -> ModelConfig:
        """Read the config.json of a model.

        Args:
            fields: parsed config.json.
            rope_theta: rotary base; None: as in config.json.

        Raises:
            CheckpointError: keys are missing, or a value is impossible or of another type; the message names them.
            NotImplementedError: an option is not supported.
        """

    def weights(self, config: ModelConfig, names: Collection[str]) -> list[MapRow]:
        """Return the rows of the weight map, one per parameter.

        Args:
            config: config of the model.
            names: names of all tensors in the checkpoint.
        """


FAMILIES: dict[str, Family] = {}
DEFAULT = "llama"  # family that reads a config.json without a model_type, and raises the error for the missing key

F = TypeVar("F", bound=type[Family])


def register(*model_types: str) -> Callable[[F], F]:
    """Return a class decorator that registers a family under the given values of `model_type`."""

    def add(family: F) -> F:
        FAMILIES.update(dict.fromkeys(model_types, family()))
        return family

    return add


def model_types() -> list[str]:
    """Return all registered values of `model_type`."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return list(FAMILIES)


def table() -> str:
    """Return a Markdown table of the supported models: for each file of this folder the names of published models."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for model_type in model_types():
        family = type(FAMILIES[model_type])
        if family.__module__.startswith(f"{__name__}."):  # not a family that a user registered
            types, published = rows.setdefault(family.__module__, ([], []))
            types.append(f"`{model_type}`")
            published.append(family.published)
    lines = [f"| {'; '.join(published)} | {', '.join(types)} |" for _, (types, published) in sorted(rows.items())]
    return "\n".join(["| target | `model_type` |", "|---|---|", *lines])


def family_of(model_type: str) -> Family:
    """Return the family that is registered under a `model_type`.

    Raises:
        NotImplementedError: no family has this `model_type`; the message names the registered values.
    """
    if model_type not in model_types():
        raise unsupported("model_type", model_type, " or ".join(map(repr, FAMILIES)))
    return FAMILIES[model_type]


def read_config(fields: Mapping[str, Any], *, rope_theta: float | None = None) -> ModelConfig:
    """Read the config.json of a model of any family; `Family.config` documents the arguments and errors."""
    fields = Fields.of(fields)
    return family_of(fields.text("model_type", DEFAULT)).config(fields, rope_theta=rope_theta)
