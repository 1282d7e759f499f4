"""Parts of tools' schemas as rules of Lark grammars, for calls whose arguments are not one JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from jspec.engine.grammar import disjoint, json_schema, schema_lark
from jspec.engine.grammar.schema_regex import IGNORED

MEMBER_KEYWORDS = {"type", "properties", "required", "additionalProperties"}


class SchemaMember(NamedTuple):
    """A property of an object: its schema, where that stands, and whether every object has the property."""

    name: str
    schema: Any
    path: str
    is_required: bool


def json_rule(rule: str, schema: Any, root: Any = None) -> str:
    """Return a schema as a rule whose texts are JSON.

    Args:
        rule: name of the rule.
        schema: the schema.
        root: the schema that its references point into; None: itself.

    Raises:
        ValueError: the schema is wrong, or has a keyword that no grammar enforces; the message says where.
    """
    if root is not None and '"$ref"' in json.dumps(schema):
        parts = {"root": moved_to(root, "#/$defs/root"), "part": moved_to(schema, "#/$defs/root")}
        schema = {"$ref": "#/$defs/part", "$defs": parts}
    return schema_lark.lark_of(parsed(schema), rule)


def parsed(schema: Any) -> Any:
    """Return a checked schema with `anyOf` for `oneOf` where they agree; raise ValueError if it is wrong."""
    return disjoint.with_any_of(json_schema.parse(json_schema.text_of(schema)))


def checked(schema: Any) -> Any:
    """Return a schema as `parsed` does; raise ValueError if it has a keyword that no grammar enforces."""
    made = parsed(schema)
    schema_lark.lark_of(made)
    return made


def moved_to(schema: Any, pointer: str) -> Any:
    """Return a checked schema, without annotations, whose references hold when it stands at ``pointer``."""
    if not isinstance(schema, Mapping):
        return schema
    moved = json_schema.with_subschemas(schema, lambda part, _: moved_to(part, pointer), "")
    if "$ref" in moved:
        moved["$ref"] = pointer + moved["$ref"][1:]
    return {key: value for key, value in moved.items() if key not in ("$id", "id", "$schema")}


def values_of(schema: Mapping[str, Any], path: str) -> list[Any] | None:
    """Return the values that a schema lists, without those of another type than it says; None: it lists none."""
    key = "enum" if "enum" in schema else "const"
    if key not in schema:
        return None
    values = schema["enum"] if key == "enum" else [schema["const"]]
    made = [value for value in values if any(json_schema.TYPES[name](value) for name in types_of(schema))]
    if not made:
        raise ValueError(f"json_schema: {key!r} at {path}: expected a value of a type that stands beside it")
    return made


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema says; all, if it says none."""
    types = schema.get("type", [*json_schema.TYPES])
    return [types] if isinstance(types, str) else types


def check_keywords(schema: Mapping[str, Any], known: set[str], path: str, where: str) -> None:
    """Refuse a schema with keywords that the grammar of a format does not follow.

    Args:
        known: the keywords that it follows.
        path: location of the schema.
        where: what has the schema, for the error.
    """
    for keyword in schema.keys() - IGNORED - known:
        refuse(keyword, path, where)


def refuse(keyword: str, path: str, where: str) -> NoReturn:
    """Raise the error that says that the grammar of a format does not follow a keyword."""
    raise ValueError(
        f"json_schema: {keyword!r} at {path}: expected no such keyword in {where} of a strict tool, because this model "
        'writes calls in another form than JSON; leave it out, or set tool_choice to "required" or a tool'
    )


def members_of(schema: Mapping[str, Any], path: str) -> list[SchemaMember]:
    """Return the properties of a schema of objects, which has no others."""
    check_keywords(schema, MEMBER_KEYWORDS, path, "an object")
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if schema.get("additionalProperties", True) is not False:
        refuse("additionalProperties", path, "an object")
    if not {*required} <= properties.keys():
        refuse("required", path, "an object that does not list such a property")
    return [
        SchemaMember(name, part, f"{path}/properties/{name}", name in required) for name, part in properties.items()
    ]
