"""Reads JSON schemas, and refuses schemas with unknown keywords, values of a wrong type, or too large sizes.

Grammar libraries ignore unknown keywords and unexpected values, so every keyword is checked here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

from jspec.core.shorten import short
from jspec.engine.grammar.closed_schema import closed

MAX_CHARACTERS = 2**16  # most characters in the text of a schema or an expression
MAX_GRAMMAR = 2**18  # most characters in the text of a grammar, such as that of many tools
MAX_VALUES = 2000  # most values of one enum, and most properties of one object
MAX_LEVELS = 50  # most levels of schemas inside schemas
MAX_DIGITS = 1000  # most digits of an integer in the text of a schema
ANNOTATIONS = frozenset(  # keywords that do not restrict the valid values
    [
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("discriminator", "contentEncoding", "contentMediaType", "contentSchema"),
    ]
)
UNFOLLOWED = frozenset(  # keywords of JSON Schema that are refused
    ["$anchor", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "additionalItems"]
)
TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
    "number": lambda value: _is_number(value),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value) and len({*value}) == len(value)


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return _is_names(names) and names != [] and set(names) <= set(TYPES)


def _is_count(value: Any) -> bool:
    return TYPES["integer"](value) and value >= 0


def _is_by_name(value: Any) -> bool:
    return isinstance(value, Mapping)


SUBSCHEMAS = frozenset(  # keywords whose value is a schema
    [
        *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
    ]
)
SUBSCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SUBSCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
Rule = tuple[str, Callable[[Any], bool]]
NUMBER: Rule = ("a number", _is_number)
COUNT: Rule = ("an int >= 0", _is_count)
TEXT: Rule = ("a text", TYPES["string"])
SCHEMA: Rule = ("a schema (an object, true or false)", lambda v: isinstance(v, (bool, Mapping)))
VALUES: dict[str, Rule] = {  # what each keyword's value must be, in words and as a test
    **dict.fromkeys(SUBSCHEMAS, SCHEMA),
    **dict.fromkeys(SUBSCHEMA_LISTS, ("a list of schemas, at least one", lambda v: isinstance(v, list) and v != [])),
    **dict.fromkeys(SUBSCHEMAS_BY_NAME, ("schemas by name", _is_by_name)),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), COUNT),
    **dict.fromkeys(("minContains", "maxContains"), COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBER),
    "multipleOf": ("a number > 0", lambda value: _is_number(value) and value > 0),
    "type": (f"one of {', '.join(TYPES)}, or a list of them, at least one", _is_type),
    "enum": ("a list of values, at least one", lambda value: isinstance(value, list) and value != []),
    "const": ("a value", lambda value: True),
    "required": ("a list of different names", _is_names),
    "dependentRequired": ("lists of names by name", lambda v: _is_by_name(v) and all(map(_is_names, v.values()))),
    "dependencies": ("schemas or lists of names by name", _is_by_name),
    "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
    "$ref": ("a place in the same schema, such as '#/$defs/name'", lambda v: isinstance(v, str) and v[:1] == "#"),
    **dict.fromkeys(("pattern", "format", "$id", "id", "$schema"), TEXT),
}
LIMITS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))


def text_of(schema: Any) -> str:
    """Return a schema as JSON, after checking it.

    Args:
        schema: a mapping, its text as JSON, or a class with pydantic's method ``model_json_schema``, whose objects are
            closed.

    Raises:
        ValueError: the schema is too large or wrong; the message names the keyword and its location.
    """
    make = getattr(schema, "model_json_schema", None)
    if callable(make):
        schema = closed(make())
    if not isinstance(schema, (str, Mapping)):
        _refuse("a schema as a dict, its text, or a pydantic class", schema)
    if isinstance(schema, Mapping):
        check_size(schema)
        try:
            schema = json.dumps(schema)
        except (TypeError, ValueError, RecursionError):
            _refuse("values that can be written as JSON", schema)
    check_text("json_schema", schema)
    check(parse(schema))
    return schema


def parse(text: str) -> Any:
    """Parse the JSON text of a schema.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(text, parse_constant=lambda name: _refuse("finite numbers", name), parse_int=_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"json_schema: expected JSON, got {short(text)}: {error}") from error
    except RecursionError:
        raise ValueError("json_schema: expected JSON that is not nested so deep; take fewer levels") from None


def _int(digits: str) -> int:
    return int(digits) if len(digits) <= MAX_DIGITS else _refuse(f"numbers of at most {MAX_DIGITS} digits", digits)


def half_character(text: str) -> str | None:
    """Return the first half of a surrogate pair in a text, which UTF-8 cannot represent; None: there is none."""
    return next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None)


def check_text(field: str, text: str, most: int = MAX_CHARACTERS) -> None:
    """Refuse a text that is too long, or that contains half of a surrogate pair.

    Args:
        field: name of the request's field, for the error message.
        text: the field's value.
        most: most characters that it may have.
    """
    if len(text) > most:
        raise ValueError(f"{field}: expected at most {most} characters, got {len(text)}; make it smaller")
    wrong = half_character(text)
    if wrong is not None:
        raise ValueError(f"{field}: expected whole characters, got half of a surrogate pair, {wrong!r}; leave it out")


def check_size(schema: Mapping[str, Any], most: int = MAX_CHARACTERS) -> None:
    """Refuse a schema whose JSON text is certainly too long, before the text is written.

    A schema with one dict in many places has a very long text. This counts the least that a text needs: a character for
    each key or value, and the characters of strings.

    Raises:
        ValueError: the text would have more than ``most`` characters.
    """
    left, end = most, object()
    parts: list[Iterator[Any]] = [iter([schema])]
    while parts:
        value: Any = next(parts[-1], end)
        if value is end:
            parts.pop()
            continue
        left -= 1 + (len(value) if isinstance(value, str) else 0)
        if left < 0:
            raise ValueError(f"json_schema: expected at most {most} characters, got more; make it smaller")
        if isinstance(value, Mapping):
            parts += [iter(value.values()), iter(value)]
        elif isinstance(value, (list, tuple)):
            parts.append(iter(value))


def check(schema: Any, path: str = "#", levels: int = 0) -> None:
    """Refuse a schema with unknown keywords, values of a wrong type, or too many levels or values.

    Args:
        path: location of ``schema`` in the whole schema.
        levels: number of schemas that enclose ``schema``.

    Raises:
        ValueError: the schema is wrong; the message names the keyword and its location.
    """
    if schema is False and not levels:
        _refuse("a schema that some value satisfies", schema)
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        _refuse(SCHEMA[0], schema, f"{path}: ")
    if levels > MAX_LEVELS:
        _refuse(f"at most {MAX_LEVELS} schemas inside one another", path)
    for key, value in schema.items():
        _check_value(key, value, f"{key!r} at {path}: ", is_root=not levels)
    for least, most in LIMITS:
        if schema.get(least, 0) > schema.get(most, math.inf):
            _refuse(f"at least {schema[least]}, {least!r}", schema[most], f"{most!r} at {path}: ")
    for name, part in subschemas(schema):
        check(part, f"{path}/{name}", levels + 1)


def _check_value(key: str, value: Any, location: str, *, is_root: bool) -> None:
    if key in ANNOTATIONS:
        return
    if key in UNFOLLOWED or (key in ("$id", "id") and not is_root):
        raise ValueError(f"json_schema: {location}this keyword is not followed; leave it out, or express it otherwise")
    if key not in VALUES:
        raise ValueError(f"json_schema: {location}expected keywords of JSON Schema; leave it out or correct it")
    expected, is_right = VALUES[key]
    if not is_right(value):
        _refuse(expected, value, location)
    if isinstance(value, (list, Mapping)) and len(value) > MAX_VALUES:
        _refuse(f"at most {MAX_VALUES} values", len(value), location)
    for part in inner_values(value) if key in ("enum", "const", "required") else (value,):
        if isinstance(part, str):
            check_text(f"json_schema: {location[:-2]:.200}", part)
        elif isinstance(part, float) and not math.isfinite(part):
            _refuse("finite numbers", part, location)
        elif isinstance(part, Mapping):
            for name in part:
                check_text(f"json_schema: {location[:-2]:.200}", name)


def inner_values(value: Any) -> Iterator[Any]:
    """Yield a JSON value and all values nested in it."""
    open_values = [value]
    while open_values:
        yield (part := open_values.pop())
        open_values += part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else []


def _refuse(expected: str, got: Any, location: str = "") -> NoReturn:
    raise ValueError(f"json_schema: {location:.200}expected {expected}, got {short(got)}")


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (location, schema) of each schema directly inside a schema."""
    for key, value in schema.items():
        if key in SUBSCHEMAS:
            yield key, value
        elif key in SUBSCHEMA_LISTS:
            yield from ((f"{key}/{index}", part) for index, part in enumerate(value))
        elif key in SUBSCHEMAS_BY_NAME or key == "dependencies":
            yield from ((f"{key}/{name}", part) for name, part in value.items() if not isinstance(part, list))


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Any, str], Any], path: str) -> dict[str, Any]:
    """Return a copy without annotations, in which ``change`` has replaced each schema directly inside.

    Args:
        schema: the schema to copy.
        change: function (inner schema, its location) that returns the replacement.
        path: location of ``schema``.
    """
    changed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in SUBSCHEMAS:
            changed[key] = change(value, f"{path}/{key}")
        elif key in SUBSCHEMA_LISTS:
            changed[key] = [change(part, f"{path}/{key}/{index}") for index, part in enumerate(value)]
        elif key in SUBSCHEMAS_BY_NAME:
            changed[key] = {name: change(part, f"{path}/{key}/{name}") for name, part in value.items()}
        elif key not in ANNOTATIONS:
            changed[key] = value
    return changed


def at(schema: Any, ref: str, path: str = "#") -> Any:
    """Return the part of a schema that a `$ref`, which stands at ``path``, points to.

    Raises:
        ValueError: the schema has no such part.
    """
    part, (_, *names) = schema, ref.split("/")
    for name in names:
        key = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and key.isdecimal() and int(key[:9]) < len(part):
            part = part[int(key)]
        elif isinstance(part, Mapping) and key in part:
            part = part[key]
        else:
            _refuse("a place in the same schema", ref, f"'$ref' at {path}: ")
    if not isinstance(part, (bool, Mapping)) or (ref != "#" and not names):
        _refuse("a place that has a schema", ref, f"'$ref' at {path}: ")
    return part
