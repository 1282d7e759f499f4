"""How the linear weights of a checkpoint are quantised, and the checks that readers of its config share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from convert.fields import CheckpointError, Fields
from jspec.models.parts.checks import unsupported

CONFIG = "quantization_config"  # key of config.json
REGEX = "re:"  # prefix of regular expressions among module names


@dataclass(frozen=True)
class Scheme:
    """How the linear weights of a checkpoint are quantised.

    Attributes:
        method: name of the format, the `quant_method` of config.json.
        granularity: values that share a scale, "tensor" (all values of a tensor), "channel" (a row), "block", or
            "group" (a block of one row).
        block: rows and columns of a block; None: no blocks.
        activations: how the format's own kernels round activations to float8, with "dynamic" or "static" scales; None:
            not at all.
        unquantized: names of modules whose weights are not quantised. A name may be the beginning or the end of a
            module's dotted name, may have wildcards, and is a regular expression after the prefix "re:".
        bits: bits of a value, 8 (float8_e4m3fn) or 4 (whole numbers).
        has_zeros: whether groups have zero points.
        zero_offset: number that is added to stored zero points.
        is_symmetric: whether the file says that all zero points are 8; None: it does not say.
        subtracts_words: whether `zero_offset` was subtracted from whole words, so that a zero point of 0 took 1 from
            the next one.
    """

    method: str
    granularity: str
    block: tuple[int, int] | None = None
    activations: str | None = None
    unquantized: tuple[str, ...] = ()
    bits: int = 8
    has_zeros: bool = False
    zero_offset: int = 0
    is_symmetric: bool | None = None
    subtracts_words: bool = False

    @cached_property
    def _patterns(self) -> tuple[frozenset[str], list[str]]:
        """The names without wildcards, of which files list hundreds beside thousands of experts; and the others."""
        patterns = [name for name in self.unquantized if name.startswith(REGEX) or any(sign in name for sign in "*?[")]
        return frozenset(self.unquantized) - frozenset(patterns), patterns

    def exclusion(self, module: str) -> str | None:
        """Return a name in `unquantized` that excludes a module, or None."""
        names, patterns = self._patterns
        dots = [index for index, sign in enumerate(module) if sign == "."]
        parts = [module, *(part for dot in dots for part in (module[:dot], module[dot + 1 :]))]
        found = next((part for part in parts if part in names), None)
        return found or next((name for name in patterns if _matches(name, module)), None)

    def __str__(self) -> str:
        shared = self.granularity if self.block is None else f"block of {self.block[0]} x {self.block[1]}"
        if self.bits == 4:
            zeros = " and a zero point" if self.has_zeros else ""
            return f"{self.method}, 4-bit weights with a scale{zeros} per {shared}"
        used = "" if self.activations is None else f"; its {self.activations} scales of activations are not used"
        return f"{self.method}, float8 weights with a scale per {shared}{used}"


def _matches(name: str, module: str) -> bool:
    if name.startswith(REGEX):
        return re.match(name.removeprefix(REGEX), module) is not None
    return any(fnmatchcase(module, pattern) for pattern in (name, f"{name}.*", f"*.{name}"))


def refuse_others(fields: Fields, *known: str) -> None:
    """Raise NotImplementedError if a key that is not known has a value that is not null, false or empty."""
    for name in fields:
        if name not in known and fields[name]:
            raise unsupported(f"{fields.place}: {name}", fields[name], "none")


def expect(fields: Fields, name: str, *values: str) -> None:
    """Raise NotImplementedError if a text is given and is not one of the supported values."""
    if fields.get(name) is not None and fields.text(name) not in values:
        raise unsupported(f"{fields.place}: {name}", fields[name], " or ".join(map(repr, values)))


def block_sizes(fields: Fields, name: str) -> tuple[int, int] | None:
    """Read the rows and columns of a block; return None if there are none."""
    if fields.get(name) is None:
        return None
    match fields.integers(name):
        case [rows, columns] if rows and columns:
            return rows, columns
    raise fields.error(name, "two sizes above 0, of rows and of columns")


def module_names(fields: Fields, *keys: str) -> tuple[str, ...]:
    names = tuple(name for key in keys for name in fields.texts(key))
    check_patterns(fields, names)
    return names


def check_patterns(fields: Fields, names: Iterable[str]) -> None:
    """Raise CheckpointError if the name of a module is a regular expression that has a fault."""
    for name in names:
        try:
            re.compile(name.removeprefix(REGEX) if name.startswith(REGEX) else "")
        except re.error as error:
            raise CheckpointError(
                fields.place, f"expected a regular expression after {REGEX!r}, got {name!r} ({error}); correct it"
            ) from None
