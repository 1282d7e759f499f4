"""Writes `oneOf` in a JSON schema as `anyOf` where no value satisfies two of its schemas.

Tables and parsers follow `anyOf` alone. The schemas of a discriminated union, for instance, are objects with a required
property whose values differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import unquote

from jspec.engine.grammar import json_schema

MAX_PARTS = 100  # most schemas of a `oneOf` that are compared in pairs
KINDS = frozenset(json_schema.TYPES) - {"integer"}  # an integer is a number


def with_any_of(schema: Any) -> Any:
    """Return a checked schema (`jspec.engine.grammar.json_schema.check`) with `anyOf` for `oneOf` where they agree."""
    if "oneOf/" in unquote(json.dumps(schema)):
        return schema  # a `$ref` points into a `oneOf`
    return _Writer(schema).written(schema, "#")


class _Traits(NamedTuple):
    """What all values of a schema have in common: not all that is known, but nothing that is wrong.

    Attributes:
        kinds: the values' types, a subset of `KINDS`.
        values: the JSON texts of all values, with one text for equal values; None: not known.
        tags: traits of a property, by its name, if every value is an object that has the property.
    """

    kinds: frozenset[str] = KINDS
    values: frozenset[str] | None = None
    tags: Mapping[str, _Traits] = {}

    def __or__(self, other: _Traits) -> _Traits:
        """Return the traits of the values of two schemas."""
        values = None if self.values is None or other.values is None else self.values | other.values
        tags = {name: self.tags[name] | other.tags[name] for name in self.tags.keys() & other.tags.keys()}
        return _Traits(self.kinds | other.kinds, values, tags)

    def excludes(self, other: _Traits) -> bool:
        """Return whether no value has the traits of both."""
        if not self.kinds & other.kinds:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        return any(self.tags[name].excludes(other.tags[name]) for name in self.tags.keys() & other.tags.keys())


UNKNOWN = _Traits()


class _Writer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[str, bool], _Traits] = {}  # by `$ref`, and whether they have tags

    def written(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        changed = json_schema.with_subschemas(schema, self.written, path)
        if "oneOf" in schema and "anyOf" not in schema and self._are_disjoint(schema["oneOf"]):
            changed["anyOf"] = changed.pop("oneOf")
        return changed

    def _are_disjoint(self, parts: Sequence[Any]) -> bool:
        if len(parts) > MAX_PARTS:
            return False
        return all(first.excludes(other) for first, other in combinations([self._traits(part) for part in parts], 2))

    def _traits(self, schema: Any, levels: int = 0, *, tags: bool = True) -> _Traits:
        """Return the traits of a schema, from one of its keywords alone, as the others only exclude more values.

        Args:
            levels: number of schemas and references between the schema and the `oneOf`.
            tags: whether to find the traits of properties, too.
        """
        if not isinstance(schema, Mapping) or levels > json_schema.MAX_LEVELS:
            return UNKNOWN
        if "$ref" in schema:
            return self._traits_at(schema["$ref"], levels, tags=tags)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return reduce(_Traits.__or__, (self._traits(part, levels + 1, tags=tags) for part in schema[name]))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            return _Traits(frozenset(map(_kind, values)), frozenset(map(_text, values)))
        declared = schema.get("type", [*KINDS])
        types = [declared] if isinstance(declared, str) else declared
        kinds = frozenset("number" if name == "integer" else name for name in types)
        tag_traits: dict[str, _Traits] = {}
        if tags and kinds == {"object"}:
            properties = schema.get("properties", {})
            required = [name for name in schema.get("required", ()) if name in properties]
            tag_traits = {name: self._traits(properties[name], levels + 1, tags=False) for name in required}
        return _Traits(kinds, tags=tag_traits)

    def _traits_at(self, ref: str, levels: int, *, tags: bool) -> _Traits:
        key = ref, tags
        if key not in self._known:
            self._known[key] = self._traits(json_schema.at(self._root, ref), levels + 1, tags=tags)
        return self._known[key]


def _kind(value: Any) -> str:
    """Return the type of a JSON value, one of `KINDS`."""
    return next(name for name in KINDS if json_schema.TYPES[name](value))


def _text(value: Any) -> str:
    """Return a JSON text that equal values share: JSON Schema does not tell 1 from 1.0, nor the order of properties."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{json.dumps(name)}:{_text(value[name])}' for name in sorted(value))}}}"
    return json.dumps(value)
