"""Closes the objects of JSON schemas: they then have no properties but those that the schema lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_LEVELS = 50  # deeper schemas are refused by `jspec.engine.grammar.json_schema.check`
ELSEWHERE = ("items", "additionalProperties")  # keywords whose schema is of other values than the object itself
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
SAID = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
# Keywords that say which properties an object has.
SAME_OBJECT = {"properties", "$ref", "anyOf", "oneOf", "allOf", "not", "if", "dependentSchemas", "dependencies"}
ALONE: tuple[set[str], ...] = ({"properties"}, {"$ref"}, {"anyOf"}, {"oneOf"}, set())


class SeveralLists(Exception):
    """Raised if several keywords say which properties an object has."""


def closed(schema: Any) -> Any:
    """Return a schema with `additionalProperties` false in each object that lists properties and does not say.

    A schema in which several keywords say which properties one object has, such as `allOf` of two lists, stays open:
    closing one list would forbid the other's properties. Wrong values are left to later checks.
    """
    try:
        return _closed(schema, 0)
    except SeveralLists:
        return schema


def _closed(schema: Any, levels: int) -> Any:
    if not isinstance(schema, Mapping) or levels > MAX_LEVELS:
        return schema
    says = SAME_OBJECT & schema.keys()
    is_single = says == {"allOf"} and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1
    if says not in ALONE and not is_single:
        raise SeveralLists
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ELSEWHERE:
            changed[key] = _closed(value, levels + 1)
        elif key in LISTS and isinstance(value, list):
            changed[key] = [_closed(part, levels + 1) for part in value]
        elif key in BY_NAME and isinstance(value, Mapping):
            changed[key] = {name: _closed(part, levels + 1) for name, part in value.items()}
        else:
            changed[key] = value
    return changed if "properties" not in says or SAID & schema.keys() else {**changed, "additionalProperties": False}
