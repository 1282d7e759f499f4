"""Writes `oneOf` in a JSON schema as `anyOf` where no value satisfies two of its schemas.

Tables and parsers follow `anyOf` alone. Discriminated unions, for instance, are such schemas: objects with a required
property whose texts differ.
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
        texts: the texts that a value can be; None: others too, or values of other types.
        tags: the texts that a property can be, by its name, if every value is an object that has the property.
    """

    kinds: frozenset[str] = KINDS
    texts: frozenset[str] | None = None
    tags: Mapping[str, frozenset[str]] = {}

    def __or__(self, other: _Traits) -> _Traits:
        """Return the traits of the values of two schemas."""
        texts = None if self.texts is None or other.texts is None else self.texts | other.texts
        tags = {name: self.tags[name] | other.tags[name] for name in self.tags.keys() & other.tags.keys()}
        return _Traits(self.kinds | other.kinds, texts, tags)

    def excludes(self, other: _Traits) -> bool:
        """Return whether no value has the traits of both."""
        if not self.kinds & other.kinds:
            return True
        if self.texts is not None and other.texts is not None:
            return not self.texts & other.texts
        return any(not self.tags[name] & other.tags[name] for name in self.tags.keys() & other.tags.keys())


class _Writer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._by_ref: dict[str, _Traits] = {}  # traits of what each `$ref` names; before they are known, none

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
        return all(one.excludes(other) for one, other in combinations([self._traits(part) for part in parts], 2))

    def _traits(self, schema: Any, num_refs: int = 0) -> _Traits:
        """Return the traits of a schema, from one of its keywords alone, as the others only exclude more values.

        Args:
            num_refs: number of `$ref` that were followed to reach the schema.
        """
        if not isinstance(schema, Mapping) or num_refs > json_schema.MAX_LEVELS:
            return _Traits()
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref not in self._by_ref:  # each is followed once: there may be 2**n ways to it through n others
                self._by_ref[ref] = _Traits()
                self._by_ref[ref] = self._traits(json_schema.at(self._root, ref), num_refs + 1)
            return self._by_ref[ref]
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return reduce(_Traits.__or__, (self._traits(part, num_refs) for part in schema[name]))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            is_text = all(isinstance(value, str) for value in values)
            return _Traits(frozenset({"string"}), frozenset(values)) if is_text else _Traits()
        given = schema.get("type", [*KINDS])
        types = [given] if isinstance(given, str) else given
        kinds = frozenset("number" if name == "integer" else name for name in types)
        return _Traits(kinds, tags=self._tags(schema, num_refs) if kinds == {"object"} else {})

    def _tags(self, schema: Mapping[str, Any], num_refs: int) -> dict[str, frozenset[str]]:
        properties = schema.get("properties", {})
        known = {name: self._traits(properties.get(name), num_refs).texts for name in schema.get("required", ())}
        return {name: texts for name, texts in known.items() if texts is not None}
