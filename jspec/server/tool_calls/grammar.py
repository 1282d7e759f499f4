"""Writes the grammar of an answer that must be tool calls, as fields of `SamplingParams`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jspec.engine.grammar import json_schema
from jspec.engine.input.grammar_input import forms_of_schema
from jspec.server.tool_calls.schema_rules import moved_to, parsed
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
        choice.made(name, lambda schema: forms_of_schema(parsed(schema)))
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


def _call_schema(name: str) -> dict[str, Any]:
    """Return the schema of a call of a tool; that of the arguments is in the definitions, under the tool's name."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
