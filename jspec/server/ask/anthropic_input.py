"""Translates requests of Anthropic's Messages API into those of chat completions."""

from __future__ import annotations

import json
from typing import Any

from jspec.core.shorten import short
from jspec.server.ask.messages import MAX_MESSAGES
from jspec.server.ask.response_input import join_texts
from jspec.server.ask.values import listing, mapping, one_of, text
from jspec.server.http.errors import invalid
from jspec.server.reading import reasoning

SWITCH = "enable_thinking"  # the variable by which chat templates turn reasoning on or off
TEXT = {"text": "text"}
TOOL_KEYS = ("name", "description", "input_schema", "strict")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read_messages(name: str, value: Any, system: Any) -> list[dict[str, Any]]:
    """Return the messages of chat completions that a request's messages and system prompt make.

    Args:
        name: the field's name.
        value: messages of user and assistant, whose contents are texts or lists of blocks.
        system: a text, or a list of text blocks; None: there is no system message.
    """
    made = [] if system is None else [{"role": "system", "content": join_texts("system", system, TEXT)}]
    for index, message in enumerate(listing(MAX_MESSAGES)(name, value)):
        field = f"{name}[{index}]"
        role = one_of("user", "assistant")(f"{field}.role", mapping(field, message).get("role"))
        content = message.get("content")
        if isinstance(content, str):
            made.append({"role": role, "content": content})
            continue
        blocks = listing(MAX_MESSAGES)(f"{field}.content", content)
        named = [(f"{field}.content[{i}]", mapping(f"{field}.content[{i}]", block)) for i, block in enumerate(blocks)]
        made += [_assistant(named)] if role == "assistant" else _user(named)
    return made


def _user(blocks: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the messages of the blocks of a user's message: results of tools, and texts between them."""
    made: list[dict[str, Any]] = []
    for name, block in blocks:
        if one_of("text", "tool_result")(f"{name}.type", block.get("type")) == "tool_result":
            call = text(f"{name}.tool_use_id", block.get("tool_use_id"))
            content = join_texts(f"{name}.content", block.get("content") or "", TEXT)
            made.append({"role": "tool", "tool_call_id": call, "content": content})
            continue
        block_text = text(f"{name}.text", block.get("text"))
        if made and made[-1]["role"] == "user":
            made[-1]["content"] += f"\n{block_text}"
        else:
            made.append({"role": "user", "content": block_text})
    return made


def _assistant(blocks: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the message of the blocks of an assistant's message."""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls = []
    for name, block in blocks:
        kind = one_of("text", "thinking", "tool_use")(f"{name}.type", block.get("type"))
        if kind == "tool_use":
            arguments = json.dumps(mapping(f"{name}.input", block.get("input")), ensure_ascii=False)
            function = {"name": text(f"{name}.name", block.get("name")), "arguments": arguments}
            calls.append({"id": text(f"{name}.id", block.get("id")), "type": "function", "function": function})
        else:
            texts[kind].append(text(f"{name}.{kind}", block.get(kind)))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts["text"])}
    message |= {"reasoning_content": "\n".join(texts["thinking"])} if texts["thinking"] else {}
    return message | ({"tool_calls": calls} if calls else {})


def read_tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Return tools in the form of chat completions."""
    return [_tool(f"{name}[{i}]", tool) for i, tool in enumerate(listing(MAX_MESSAGES)(name, value))]


def _tool(name: str, tool: Any) -> dict[str, Any]:
    kind = mapping(name, tool).get("type", "custom")
    if kind != "custom":
        reason = "because the server has no tools of its own"
        raise invalid(f"{name}.type", f"expected custom or nothing, {reason}, got {short(kind)}")
    function = {key: tool[key] for key in TOOL_KEYS if tool.get(key) is not None}
    function["parameters"] = mapping(f"{name}.input_schema", function.pop("input_schema", None))
    return {"type": "function", "function": function}


def read_tool_choice(name: str, value: Any) -> dict[str, Any]:
    """Return the fields tool_choice and parallel_tool_calls of chat completions."""
    kind = one_of(*CHOICES, "tool")(f"{name}.type", mapping(name, value).get("type"))
    choice: Any = CHOICES.get(kind) or {"type": "function", "function": {"name": value.get("name")}}
    return {"tool_choice": choice, "parallel_tool_calls": not value.get("disable_parallel_tool_use", False)}


def read_format(name: str, value: Any) -> dict[str, Any] | None:
    """Return the schema of the field output_config, if it has one."""
    output_format = mapping(name, value).get("format")
    if output_format is None:
        return None
    one_of("json_schema")(f"{name}.format.type", mapping(f"{name}.format", output_format).get("type"))
    return mapping(f"{name}.format.schema", output_format.get("schema"))


def read_thinking(name: str, value: Any, template: str) -> dict[str, Any]:
    """Return the variables of a chat template that let the model reason, or do not.

    Args:
        name: the field's name.
        value: {"type": "disabled"} or {"type": "adaptive"}.
        template: the chat template.
    """
    kind = mapping(name, value).get("type")
    if kind not in ("disabled", "adaptive"):
        raise invalid(
            f"{name}.type", f"expected disabled or adaptive, because no budget of tokens is kept, got {short(kind)}"
        )
    if SWITCH in template:
        return {SWITCH: kind == "adaptive"}
    if kind == "disabled" and reasoning.is_used_by(template):
        raise invalid(f"{name}.type", "expected adaptive, because the model's chat template cannot turn reasoning off")
    return {}
