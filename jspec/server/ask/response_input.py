"""Translates requests of OpenAI's Responses API into those of chat completions."""

from __future__ import annotations

from typing import Any

from jspec.core.shorten import short
from jspec.server.ask.messages import MAX_MESSAGES, Translation, join_texts
from jspec.server.ask.structured import SCHEMA_KEYS
from jspec.server.ask.values import check_keys, listing, mapping, one_of, text
from jspec.server.http.errors import invalid

SYSTEM = ("system", "developer")
ROLES = ("user", "assistant", *SYSTEM)
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "reasoning_text": "text", "refusal": "refusal"}
THOUGHT = {"role", "reasoning_content"}  # keys of the assistant's message until its text or its calls come
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
INCLUDED = ("reasoning.encrypted_content",)  # what may be asked for without effect
NAMES = {  # the field of a request for each field of chat completions, or part of one, whose name differs
    "tools[].function": "tools[]",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
    "tool_choice.allowed_tools.tools[].function": "tool_choice.tools[]",
    "reasoning_effort": "reasoning.effort",
}
TOOL_KEYS = ("type", "name", "description", "parameters", "strict")


def read_input(name: str, value: Any, instructions: str | None) -> Translation:
    """Return the messages that the input and the instructions of a request make.

    Instructions and the system messages at the beginning become one system message, because most chat templates take
    one. Reasoning, text and calls of the assistant that follow one another become one message.

    Args:
        name: the field's name.
        value: a text, or a list of messages, calls, results of calls, and reasoning.
        instructions: a system message before the others.
    """
    made = Translation()
    if instructions:
        made.add("instructions", role="system", content=instructions)
    if isinstance(value, str):
        made.add(name, role="user", content=value)
        return made
    for index, item in enumerate(listing(MAX_MESSAGES)(name, value)):
        _add(made, f"{name}[{index}]", mapping(f"{name}[{index}]", item))
    for message in made.messages:
        if "tool_calls" not in message:
            message.setdefault("content", "")
    return made


def _add(made: Translation, name: str, item: dict[str, Any]) -> None:
    """Add an item to the messages before it."""
    kind = item.get("type", "message")
    if kind not in ITEMS:
        raise invalid(f"{name}.type", f"expected one of {', '.join(ITEMS)}, got {short(kind)}; leave the item out")
    if kind == "message":
        role = one_of(*ROLES)(f"{name}.role", item.get("role"))
        content = join_texts(f"{name}.content", item.get("content"), TEXTS)
        if role in SYSTEM and len(made.messages) == 1 and made.last["role"] in SYSTEM:
            made.last["content"] += f"\n\n{content}"
        elif role == "assistant" and made.last.keys() == THOUGHT:
            made.last["content"] = content
        else:
            made.add(name, role=role, content=content)
    elif kind == "function_call_output":
        answered = text(f"{name}.call_id", item.get("call_id"))
        content = join_texts(f"{name}.output", item.get("output"), TEXTS)
        made.add(name, role="tool", tool_call_id=answered, content=content)
    elif kind == "function_call":
        _begin_calls(made, name)
        call, function, arguments = (text(f"{name}.{key}", item.get(key)) for key in ("call_id", "name", "arguments"))
        made.add_call(name, call, function, arguments, key="arguments")
    elif item.get("content"):
        reasoning = join_texts(f"{name}.content", item["content"], TEXTS)
        if made.last.keys() == THOUGHT:
            made.last["reasoning_content"] += f"\n{reasoning}"
        else:
            made.add(name, role="assistant", reasoning_content=reasoning)


def _begin_calls(made: Translation, name: str) -> None:
    """Make the last message the assistant's, with the text before its reasoning if there is any."""
    if made.last.get("role") != "assistant":
        made.add(name, role="assistant")
    elif made.last.keys() == THOUGHT and len(made.messages) > 1 and _is_answer(made.messages[-2]):
        reasoning = made.messages.pop()
        made.last.update(reasoning)


def _is_answer(message: dict[str, Any]) -> bool:
    """Return whether a message is a text of the assistant's without reasoning or calls."""
    return message.keys() == {"role", "content"} and message["role"] == "assistant"


def read_tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Return tools in the form of chat completions."""
    return [_tool(f"{name}[{i}]", tool) for i, tool in enumerate(listing(MAX_MESSAGES)(name, value))]


def _tool(name: str, tool: Any) -> dict[str, Any]:
    kind = mapping(name, tool).get("type")
    if kind != "function":
        raise invalid(
            f"{name}.type", f"expected function, because the server has no tools of its own, got {short(kind)}"
        )
    check_keys(name, tool, TOOL_KEYS)
    return {"type": "function", "function": {key: tool[key] for key in TOOL_KEYS[1:] if tool.get(key) is not None}}


def read_tool_choice(name: str, value: Any) -> Any:
    """Return the choice among the tools in the form of chat completions."""
    if not isinstance(value, dict):
        return value
    if value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if value.get("type") == "allowed_tools":
        tools = [read_tool_choice(name, tool) for tool in listing(MAX_MESSAGES)(f"{name}.tools", value.get("tools"))]
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}
    return value


def read_text(name: str, value: Any) -> dict[str, Any] | None:
    """Return the response_format of chat completions that the field text asks for, if any."""
    check_keys(name, mapping(name, value), ("format", "verbosity"))
    if value.get("format") is None:
        return None
    text_format = mapping(f"{name}.format", value["format"])
    if text_format.get("type") != "json_schema":
        return text_format
    schema = {key: item for key, item in text_format.items() if key != "type"}
    check_keys(f"{name}.format", schema, SCHEMA_KEYS)
    mapping(f"{name}.format.schema", schema.get("schema"))
    return {"type": "json_schema", "json_schema": schema}


def read_reasoning(name: str, value: Any) -> dict[str, Any]:
    """Check the field reasoning; return its effort, if any, for the chat template."""
    check_keys(name, mapping(name, value), ("effort", "summary", "generate_summary"))
    for key in ("summary", "generate_summary"):
        if value.get(key) not in (None, "auto"):
            raise invalid(f"{name}.{key}", 'expected "auto" or null, because reasoning is returned whole')
    return {} if value.get("effort") is None else {"reasoning_effort": text(f"{name}.effort", value["effort"])}


def included(name: str, value: Any) -> list[str]:
    """Check what the response shall include."""
    for index, item in enumerate(listing(MAX_MESSAGES)(name, value) if value else ()):
        one_of(*INCLUDED)(f"{name}[{index}]", item)
    return value
