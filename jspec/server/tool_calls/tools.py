"""Reads the tools of a request and its choice among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from jspec.core.shorten import short
from jspec.engine.grammar import json_schema
from jspec.engine.grammar.closed_schema import closed

MODES = ("none", "auto", "required")
MAX_TOOLS = 128
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
LOCATION = re.compile(r"json_schema: (?:'([\w$-]+)' at #([\w$/-]*): )?")
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

T = TypeVar("T")


@dataclass(frozen=True)
class ToolChoice:
    """What an answer may or must call.

    Attributes:
        mode: "none"; "auto": the model decides; "required": at least one call; "named": a call of the only tool.
        schemas: the JSON schema of the arguments, by name, of the tools that may be called.
        strict: the names of the tools whose arguments must follow their schema.
        fields: the request's field that has the schema, by name.
    """

    mode: str
    schemas: Mapping[str, Any]
    strict: frozenset[str] = frozenset()
    fields: Mapping[str, str] = field(default_factory=dict)

    def made(self, name: str, make: Callable[[Any], T]) -> T:
        """Return what ``make`` makes of the schema of a tool; its ValueError becomes one about the request's field."""
        try:
            return make(self.schemas[name])
        except ValueError as error:
            raise _located(self.fields[name], str(error)) from error

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be tool calls and nothing else."""
        return self.mode in ("required", "named")


def read_choice(tools: Any, tool_choice: Any) -> ToolChoice:
    """Check a request's tools and its choice among them.

    Args:
        tools: a list of ``{"type": "function", "function": {"name": ..., "parameters": schema, "strict": bool}}``, or
            None.
        tool_choice: "none", "auto", "required", ``{"type": "function", "function": {"name": ...}}``, or
            ``{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}``; None: "auto"
            if there are tools, else "none".

    Raises:
        ValueError: one of them is wrong; the message begins with the field.
    """
    schemas = _read_tools(tools)
    fields = {name: f"tools[{index}].function.parameters" for index, name in enumerate(schemas)}
    strict = frozenset(tool["function"]["name"] for tool in tools or () if tool["function"].get("strict"))
    if tool_choice is None:
        return ToolChoice("auto" if schemas else "none", schemas, strict, fields)
    if isinstance(tool_choice, str) and tool_choice in MODES:
        choice = ToolChoice(tool_choice, schemas)
    elif isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        name = _name_of(tool_choice, "tool_choice")
        choice = ToolChoice("named", _chosen(schemas, [name], "tool_choice"))
    elif isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        choice = _read_allowed(schemas, tool_choice.get("allowed_tools"))
    else:
        raise ValueError(
            f"tool_choice: expected one of {', '.join(MODES)}, or a dict of the type function or allowed_tools, got "
            f"{short(tool_choice)}"
        )
    if choice.mode != "none" and not schemas:
        raise ValueError(f"tool_choice: expected tools beside it, got {short(tool_choice)} and none; give tools")
    if choice.mode == "none":
        return replace(choice, schemas={})
    return replace(choice, strict=strict & {*choice.schemas}, fields=fields)


def _located(field: str, message: str) -> ValueError:
    """Return an error of `jspec.engine.grammar.json_schema` about a part of a schema as one about a request's field."""
    match = LOCATION.match(message)
    if match is None:
        return ValueError(f"{field}: {message}")
    path = re.sub(r"/(\d+)(?=/|$)", r"[\1]", match[2] or "").replace("/", ".")
    keyword = "" if match[1] is None else f".{match[1]}"
    return ValueError(f"{field}{path}{keyword}: {message[match.end() :]}")


def _read_allowed(schemas: Mapping[str, Any], allowed: Any) -> ToolChoice:
    field = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping) or allowed.get("mode") not in ("auto", "required"):
        raise ValueError(f'{field}: expected a dict with the mode "auto" or "required", got {short(allowed)}')
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise ValueError(f"{field}.tools: expected a list of tools, at least one, got {short(tools)}")
    names = [_name_of(tool, f"{field}.tools[{index}]") for index, tool in enumerate(tools)]
    return ToolChoice(allowed["mode"], _chosen(schemas, names, f"{field}.tools"))


def _chosen(schemas: Mapping[str, Any], names: list[str], field: str) -> dict[str, Any]:
    wrong = next((name for name in names if name not in schemas), None)
    if wrong is not None:
        raise ValueError(
            f"{field}: expected names of the request's tools ({', '.join(schemas) or 'none'}), got {wrong}"
        )
    return {name: schemas[name] for name in names}


def _read_tools(tools: Any) -> dict[str, Any]:
    """Return the schema of each tool's arguments, by name."""
    if tools is None:
        return {}
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        size = f"{len(tools)} tools" if isinstance(tools, list) else short(tools)
        raise ValueError(f"tools: expected a list of at most {MAX_TOOLS} tools, got {size}")
    _check_size(tools)
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        name = _name_of(tool, f"tools[{index}]")
        if name in schemas:
            raise ValueError(f"tools[{index}].function.name: expected names that differ, got {name} twice; rename one")
        schemas[name] = _schema_of(tool["function"], f"tools[{index}].function.parameters")
        strict = tool["function"].get("strict")
        if strict not in (True, False, None):
            raise ValueError(f"tools[{index}].function.strict: expected true or false, got {short(strict)}")
    return schemas


def _check_size(tools: list[Any]) -> None:
    """Refuse strict tools whose schemas are too large together, before anything reads the schemas."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    strict = [each.get("parameters") for each in functions if isinstance(each, Mapping) and each.get("strict")]
    try:
        json_schema.check_size({"prefixItems": strict}, json_schema.MAX_GRAMMAR)
    except ValueError:
        raise ValueError(
            f"tools: expected strict tools whose schemas have at most {json_schema.MAX_GRAMMAR} characters together, "
            "got more; give fewer or smaller strict tools"
        ) from None


def _name_of(tool: Any, field: str) -> str:
    """Return the name in ``{"type": "function", "function": {"name": ...}}``."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise ValueError(f'{field}: expected {{"type": "function", "function": {{"name": ...}}}}, got {short(tool)}')
    name = tool["function"].get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            f"{field}.function.name: expected 1 to 64 letters, digits, underscores, dots or dashes, got {short(name)}"
        )
    return name


def _schema_of(function: Mapping[str, Any], field: str) -> Any:
    schema = function.get("parameters")
    if schema is None:
        return NO_ARGUMENTS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise ValueError(f'{field}: expected a JSON schema of the type "object", got {short(schema)}')
    return {"type": "object", **(closed(schema) if function.get("strict") is True else schema)}
