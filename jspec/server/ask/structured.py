"""Reads response_format and structured_outputs, which become a grammar of the request."""

from __future__ import annotations

from typing import Any

from jspec.core.shorten import short
from jspec.engine.grammar.closed_schema import closed
from jspec.engine.grammar.expression import NoTable, literal
from jspec.server.ask.values import boolean, check_keys, listing, mapping, one_of
from jspec.server.http.errors import invalid

FORMAT_KEYS = ("type", "json_schema")
SCHEMA_KEYS = ("name", "description", "schema", "strict")
CONSTRAINTS = ("regex", "grammar", "json", "choice")
MAX_CHOICES = 1024
ANY_OBJECT = {"type": "object"}


def response_format(name: str, value: Any) -> dict[str, Any]:
    """Read OpenAI's response_format; return the field of `SamplingParams` that it asks for, or none.

    Args:
        name: the field's name.
        value: {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": ...}}; if
            its "strict" is true, objects have no properties but those that the schema lists or allows.
    """
    check_keys(name, mapping(name, value), FORMAT_KEYS)
    kind = one_of("text", "json_object", "json_schema")(f"{name}.type", value.get("type"))
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    described = mapping(f"{name}.json_schema", value.get("json_schema"))
    check_keys(f"{name}.json_schema", described, SCHEMA_KEYS)
    schema = mapping(f"{name}.json_schema.schema", described.get("schema"))
    is_strict = boolean(f"{name}.json_schema.strict", described.get("strict") or False)
    return {"json_schema": closed(schema) if is_strict else schema}


def structured_outputs(name: str, value: Any) -> dict[str, Any]:
    """Read vLLM's structured_outputs; return the field of `SamplingParams` that it asks for.

    Args:
        name: the field's name.
        value: an object with one of the keys "regex", "grammar", "json" (a schema, or its text) and "choice" (texts).
    """
    check_keys(name, mapping(name, value), CONSTRAINTS)
    asked = {key: item for key, item in value.items() if item is not None}
    if len(asked) != 1:
        raise invalid(name, f"expected one of the keys {', '.join(CONSTRAINTS)}, got {len(asked)} of them")
    ((key, constraint),) = asked.items()
    if key == "choice":
        return {"regex": _choice(f"{name}.choice", constraint)}
    if key == "json":
        return {"json_schema": constraint if isinstance(constraint, str) else mapping(f"{name}.json", constraint)}
    return {key: constraint}


def _choice(name: str, texts: Any) -> str:
    """Return the regular expression that matches one of several texts."""
    listing(MAX_CHOICES)(name, texts)
    if wrong := [text for text in texts if not isinstance(text, str) or not text]:
        raise invalid(name, f"expected texts that are not empty, got {short(wrong[0])}")
    try:
        return "|".join(literal(text).text for text in texts)
    except NoTable:
        raise invalid(name, "expected texts without the code points U+10FFFE and U+10FFFF, of less length") from None
