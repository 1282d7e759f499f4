"""Refuses JSON schemas that would not be followed completely, because libraries ignore keywords they do not know.

A schema of bounded depth becomes a regular expression if `check` accepts it. A recursive schema goes to the library
llguidance, which follows or refuses every keyword of JSON Schema; `check_keywords` refuses all other keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

ANNOTATIONS = frozenset(
    [
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions"),
    ]
)
# The first of these keywords that a schema contains decides its form; the values are keywords that may accompany it.
FORMS = {
    "anyOf": frozenset[str](),
    "$ref": frozenset[str](),
    "enum": frozenset({"type"}),
    "const": frozenset({"type"}),
    "prefixItems": frozenset({"type"}),
    "properties": frozenset({"type", "required", "additionalProperties"}),
}
TYPE_KEYWORDS = {  # keywords that may accompany "type" if no other keyword decides the form
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"additionalProperties"}),
}
KEYWORDS = ANNOTATIONS | frozenset(  # all keywords of any draft of JSON Schema
    [
        *("$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "id"),
        *("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("items", "prefixItems", "additionalItems", "contains", "minContains", "maxContains"),
        *("minItems", "maxItems", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType", "contentSchema"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ]
)
NO_SUBSCHEMAS = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired"})
SUBSCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
)
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def check(schema: Any, is_plain: Callable[[str], bool], path: str = "#") -> None:
    """Refuse a schema if a part of it would be ignored.

    Args:
        is_plain: tells whether every text that a regular expression matches can stand in a JSON string unescaped.
        path: location of ``schema`` in the whole schema.

    Raises:
        ValueError: the schema is refused; the message names the keyword and its location.
    """
    if not isinstance(schema, Mapping):
        return
    keywords = [key for key in schema if key not in ANNOTATIONS]
    form = next((key for key in FORMS if key in schema), "type")
    type_ = schema.get("type")
    followed = FORMS.get(form, TYPE_KEYWORDS.get(type_, frozenset()) if isinstance(type_, str) else frozenset())
    wrong = next((key for key in keywords if key != form and key not in followed), None)
    if wrong is not None:
        raise ValueError(
            f"json_schema: {wrong!r} at {path} cannot be followed beside {form!r}, expected "
            f"{sorted(followed) or 'nothing'}; leave it out, or express it otherwise (anyOf, enum, properties, a regex)"
        )
    _check_values(schema, form, is_plain, path)
    inner = {name: schema.get(name) for name in ("items", "additionalProperties")}
    for name in ("properties", "$defs", "definitions"):
        if not isinstance(schema.get(name, {}), Mapping):
            raise ValueError(f"json_schema: {name!r} at {path}: expected schemas by name, got {schema[name]!r}")
        inner |= {f"{name}/{key}": part for key, part in schema.get(name, {}).items()}
    for name in ("anyOf", "prefixItems"):
        inner |= {f"{name}/{index}": part for index, part in enumerate(schema.get(name, []))}
    for name, part in inner.items():
        check(part, is_plain, f"{path}/{name}")


def _check_values(schema: Mapping[str, Any], form: str, is_plain: Callable[[str], bool], path: str) -> None:
    """Refuse unsupported values of supported keywords."""
    type_, pattern = schema.get("type"), schema.get("pattern")
    unlisted = sorted(set(schema.get("required", [])) - set(schema.get("properties", [])))
    if unlisted:
        raise ValueError(f"json_schema: 'required' at {path} names {unlisted}, expected names in 'properties'")
    if form in ("properties", "prefixItems") and type_ not in (None, {"properties": "object"}.get(form, "array")):
        raise ValueError(f"json_schema: 'type' at {path}: {form!r} belongs to another type, got {type_!r}")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    types = [type_] if isinstance(type_, str) else type_ or list(TYPES)
    wrong = [value for value in values if not any(TYPES.get(name, lambda _: True)(value) for name in types)]
    if wrong:
        raise ValueError(f"json_schema: {form!r} at {path}: expected values of type {type_!r}, got {wrong[0]!r}")
    if pattern is None:
        return
    others = sorted({"minLength", "maxLength", "format"} & set(schema))
    if others:
        raise ValueError(
            f"json_schema: {others[0]!r} at {path} cannot be followed beside 'pattern'; put it into the pattern"
        )
    if not (isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$") and is_plain(pattern[1:-1])):
        raise ValueError(
            f"json_schema: 'pattern' at {path}: expected '^...$' around a pattern that matches no text with a quote, a "
            f"backslash or a control character, got {pattern!r}; rewrite it"
        )


def is_recursive(schema: Any) -> bool:
    """Whether a `$ref` points to a schema that contains this `$ref`, so the texts may nest to any depth."""
    done: set[str] = set()

    def leads_back(part: Any, open_refs: frozenset[str]) -> bool:
        if not isinstance(part, Mapping):
            return False
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in done:
            if ref in open_refs or leads_back(_at(schema, ref), open_refs | {ref}):
                return True
            done.add(ref)
        inner = (one for name, one in _subschemas(part) if name.split("/")[0] not in ("$defs", "definitions"))
        return any(leads_back(one, open_refs) for one in inner)

    return leads_back(schema, frozenset({"#"}))


def check_keywords(schema: Any, path: str = "#") -> None:
    """Refuse keywords outside JSON Schema, which the standard ignores, because most are spelling mistakes.

    Raises:
        ValueError: the schema is refused; the message names the keyword and its location.
    """
    if not isinstance(schema, Mapping):
        return
    wrong = next((key for key in schema if key not in KEYWORDS), None)
    if wrong is not None:
        raise ValueError(
            f"json_schema: {wrong!r} at {path}: expected keywords of JSON Schema; leave it out or correct it"
        )
    for name, part in _subschemas(schema):
        check_keywords(part, f"{path}/{name}")


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, as (location, schema)."""
    for key, value in schema.items():
        if key in NO_SUBSCHEMAS:
            continue
        if key in SUBSCHEMAS_BY_NAME and isinstance(value, Mapping):
            yield from ((f"{key}/{name}", part) for name, part in value.items())
        elif isinstance(value, list):
            yield from ((f"{key}/{index}", part) for index, part in enumerate(value))
        else:
            yield key, value


def _at(schema: Any, ref: str) -> Any:
    """The part of a schema that a `$ref` points to; None if that part does not exist."""
    found, (start, *names) = schema, ref.split("/")
    for name in names:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if start == "#" else None
