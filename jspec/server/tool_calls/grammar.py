"""Writes the grammar of an answer that must be tool calls, as fields of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jspec.engine.grammar import disjoint, json_schema
from jspec.engine.input.grammar_input import forms_of_schema
from jspec.server.tool_calls.tools import ToolChoice


def tool_grammar(choice: ToolChoice, parallel_tool_calls: bool | None = None) -> dict[str, Any] | None:
    """Return the fields of `SamplingParams` that force an answer to be tool calls; None if nothing is forced.

    The answer to a named tool is its arguments. The answer to "required" is ``{"name": ..., "arguments": {...}}``, or
    an array of such calls if there may be several. `jspec.server.tool_calls.forced` reads both.

    Args:
        choice: what the answer may or must call.
        parallel_tool_calls: whether an answer may have several calls; None: yes. A named tool is called once.

    Raises:
        ValueError: a schema is wrong; the message begins with the field.
    """
    if not choice.is_forced:
        return None
    _check({"$defs": choice.schemas}, json_schema.check_size)  # before the slow checks
    for name in choice.schemas:
        choice.made(name, _check_alone)
    if choice.mode == "named":
        (schema,) = choice.schemas.values()
        return {"json_schema": schema}
    calls: dict[str, Any] = {"anyOf": [_call_schema(name) for name in choice.schemas]}
    if parallel_tool_calls is not False:
        calls = {"type": "array", "items": calls, "minItems": 1}
    calls["$defs"] = {name: moved_to(schema, f"#/$defs/{name}") for name, schema in choice.schemas.items()}
    _check(calls)
    return {"json_schema": calls}


def _check(schema: Mapping[str, Any], check: Callable[[Mapping[str, Any]], object] = json_schema.text_of) -> None:
    try:
        check(schema)
    except ValueError as error:
        raise ValueError(f"tools: {error}") from error


def _check_alone(schema: Mapping[str, Any]) -> None:
    """Refuse the schema of one tool if no grammar can follow it."""
    forms_of_schema(disjoint.with_any_of(json_schema.parse(json_schema.text_of(schema))))


def _call_schema(name: str) -> dict[str, Any]:
    """Return the schema of a call of a tool; that of the arguments is in the definitions, under the tool's name."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def moved_to(schema: Any, pointer: str) -> Any:
    """Return a checked schema, without annotations, whose references hold when it stands at ``pointer``."""
    if not isinstance(schema, Mapping):
        return schema
    moved = json_schema.with_subschemas(schema, lambda part, _: moved_to(part, pointer), "")
    if "$ref" in moved:
        moved["$ref"] = pointer + moved["$ref"][1:]
    return {key: value for key, value in moved.items() if key not in ("$id", "id", "$schema")}
