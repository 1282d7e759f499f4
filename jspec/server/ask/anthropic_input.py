"""Translates requests of Anthropic's Messages API into those of chat completions."""

from __future__ import annotations

import json
import re
from typing import Any

from jspec.core.shorten import short
from jspec.engine.reading import reasoning
from jspec.engine.request.sampling_params import is_int_from
from jspec.server.ask.messages import MAX_MESSAGES, Translation, join_texts, kind_of_part
from jspec.server.ask.values import listing, mapping, one_of, text
from jspec.server.http.errors import invalid

SWITCHES = {  # the variable by which chat templates turn reasoning on or off, and how they read it
    "enable_thinking": r"enable_thinking",
    "thinking": r"""{%-?\s*(el)?if [^%]*(?<![.'"\w])thinking\b(?!['"])""",
}
MIN_BUDGET = 1024  # tokens, the least that the API takes
TEXT = {"text": "text"}
TOOL_KEYS = ("name", "description", "input_schema", "strict")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {  # the field of a request for each field of chat completions, or part of one, whose name differs
    "tools[].function": "tools[]",
    "tools[].function.parameters": "tools[].input_schema",
    "tool_choice.function": "tool_choice",
}


def read_messages(name: str, value: Any, system: Any) -> Translation:
    """Return the messages of chat completions that a request's messages and system prompt make.

    Args:
        name: the field's name.
        value: messages of user and assistant, whose contents are texts or lists of blocks.
        system: a text, or a list of text blocks; None: there is no system message.
    """
    made = Translation()
    if system is not None:
        made.add("system", role="system", content=join_texts("system", system, TEXT))
    for index, message in enumerate(listing(MAX_MESSAGES)(name, value)):
        field = f"{name}[{index}]"
        role = one_of("user", "assistant")(f"{field}.role", mapping(field, message).get("role"))
        content = message.get("content")
        if isinstance(content, str):
            made.add(field, role=role, content=content)
            continue
        blocks = listing(MAX_MESSAGES)(f"{field}.content", content)
        named = [(f"{field}.content[{i}]", mapping(f"{field}.content[{i}]", block)) for i, block in enumerate(blocks)]
        if role == "user":
            _add_user(made, named)
        else:
            _add_assistant(made, field, named)
    return made


def _add_user(made: Translation, blocks: list[tuple[str, dict[str, Any]]]) -> None:
    """Add the messages of the blocks of a user's message: results of tools, and texts between them."""
    is_begun = False
    for name, block in blocks:
        if kind_of_part(name, block, ("text", "tool_result")) == "tool_result":
            call = text(f"{name}.tool_use_id", block.get("tool_use_id"))
            content = join_texts(f"{name}.content", block.get("content") or "", TEXT)
            made.add(name, role="tool", tool_call_id=call, content=content)
        elif is_begun:
            made.last["content"] += f"\n{text(f'{name}.text', block.get('text'))}"
        else:
            made.add(name, role="user", content=text(f"{name}.text", block.get("text")))
        is_begun = made.last["role"] == "user"


def _add_assistant(made: Translation, field: str, blocks: list[tuple[str, dict[str, Any]]]) -> None:
    """Add the message of the blocks of an assistant's message."""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    made.add(field, role="assistant")
    for name, block in blocks:
        kind = kind_of_part(name, block, (*texts, "tool_use"))
        if kind == "tool_use":
            call, function = (text(f"{name}.{key}", block.get(key)) for key in ("id", "name"))
            arguments = json.dumps(mapping(f"{name}.input", block.get("input")), ensure_ascii=False)
            made.add_call(name, call, function, arguments, key="input")
        else:
            texts[kind].append(text(f"{name}.{kind}", block.get(kind)))
    made.last["content"] = "\n".join(texts["text"])
    if texts["thinking"]:
        made.last["reasoning_content"] = "\n".join(texts["thinking"])


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


def read_budget(name: str, value: Any, max_tokens: Any) -> int | None:
    """Return the budget of the field thinking; None: it has none.

    Args:
        name: the field's name.
        value: {"type": "enabled", "budget_tokens": 1024}, or what has no budget.
        max_tokens: largest number of tokens of the answer, as the request has it.
    """
    field, budget = f"{name}.budget_tokens", mapping(name, value).get("budget_tokens")
    if value.get("type") != "enabled":
        if budget is not None:
            raise invalid(
                field, f'expected nothing beside the type {short(value.get("type"))}; give the type "enabled"'
            )
        return None
    if not is_int_from(MIN_BUDGET, budget):
        remedy = 'give one, or the type "adaptive", which has none'
        raise invalid(field, f"expected an int >= {MIN_BUDGET}, got {short(budget)}; {remedy}")
    if is_int_from(0, max_tokens) and budget >= max_tokens:
        raise invalid(
            field, f"expected less than max_tokens ({max_tokens}), got {budget}; lower it, or raise max_tokens"
        )
    return budget


def read_thinking(name: str, value: Any, template: str) -> dict[str, Any]:
    """Return the variables of a chat template that let the model reason, or do not.

    Args:
        name: the field's name.
        value: a mapping with the "type" "disabled", "adaptive" or "enabled".
        template: the chat template.
    """
    kind = one_of("disabled", "adaptive", "enabled")(f"{name}.type", mapping(name, value).get("type"))
    for switch, pattern in SWITCHES.items():
        if re.search(pattern, template):
            return {switch: kind != "disabled"}
    if kind == "disabled" and reasoning.is_used_by(template):
        raise invalid(f"{name}.type", "expected adaptive, because the model's chat template cannot turn reasoning off")
    return {}
