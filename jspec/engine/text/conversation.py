"""Brings a conversation into the forms in which chat templates read it, and finds what a template leaves out.

Templates differ in what they read. Most take contents as texts, some as lists of parts alone; most take the arguments
of a tool call as an object, some as JSON text; some render tool calls only if the content is none. A template that gets
another form raises an error, leaves a message out or writes Python's notation of a list. So the forms are tried one
after the other, each beside a copy with a mark in every text: what the template leaves out lacks its mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any
from uuid import uuid4

from jspec.core.shorten import short

FAILED = "messages: the chat template failed: "  # beginning of the error of a template that raises one
ROLES = ("system", "developer", "user", "assistant", "tool")  # what the published APIs have; templates name others
Messages = list[dict[str, Any]]


def forms(messages: Sequence[Mapping[str, Any]], template: str) -> Iterator[Messages]:
    """Yield a conversation in each of the forms in which chat templates read it, the most frequent form first.

    Args:
        messages: messages whose contents are texts or None, and whose tool calls have objects or JSON texts as
            arguments.
        template: the chat template; messages of the role developer become system messages unless it names that role.

    Raises:
        TypeError: a role is no text.
        ValueError: a message has a role that is none of `ROLES`, and that the template does not name.
    """
    roles = [_role(message, index, template) for index, message in enumerate(messages)]
    known: list[Messages] = []
    for has_parts, has_objects, empty in product((False, True), (True, False), ("", None)):
        form = []
        for message, role in zip(messages, roles, strict=True):
            made = {key: value for key, value in message.items() if value is not None} | {"role": role}
            if calls := made.pop("tool_calls", None):
                made["tool_calls"] = [_call(call, has_object=has_objects) for call in calls]
                made["content"] = made.get("content") or empty
            if has_parts and isinstance(made.get("content"), str):
                made["content"] = [{"type": "text", "text": made["content"]}]
            form.append(made)
        if form not in known:
            known.append(form)
            yield form


def _role(message: Mapping[str, Any], index: int, template: str) -> str:
    role = message.get("role")
    if not isinstance(role, str):
        raise TypeError(f"messages[{index}].role: expected a text, got {short(role)}")
    is_named = f"'{role}'" in template or f'"{role}"' in template
    if role not in ROLES and not is_named:
        raise ValueError(
            f"messages[{index}].role: expected one of {', '.join(ROLES)}, or a role that the chat template names, got "
            f"{short(role)}"
        )
    return "system" if role == "developer" and not is_named else role


def _call(call: Mapping[str, Any], *, has_object: bool) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, or JSON text; wrong JSON, as models write it, stays text."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    if has_object and isinstance(arguments, str):
        function["arguments"] = arguments if (made := _object(arguments)) is None else made
    elif not has_object and isinstance(arguments, Mapping):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}


def _object(arguments: str) -> dict[str, Any] | None:
    """Return the object that a JSON text holds; None if it holds none."""
    try:
        made = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) else None


def wrong_arguments(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return an error that names the first arguments of a tool call that are no JSON object; "": all are."""
    for index, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str) and _object(arguments) is None:
                name = f"messages[{index}].tool_calls[{number}].function.arguments"
                return f"{name}: expected JSON text of an object, which the template needs, got {short(arguments)}"
    return ""


class MarkedCopy:
    """A copy of a conversation with a mark at the end of every content and in every tool call.

    A mark stands at the end because templates remove reasoning, which comes first. The content beside tool calls has
    none: many templates write the calls alone, whose names and arguments have marks.

    Args:
        form: the conversation in one of its forms.

    Attributes:
        messages: the copy.
    """

    def __init__(self, form: Messages) -> None:
        self._key, self._part = f"mark{uuid4().hex[:16]}", f"part{uuid4().hex[:16]}"
        self._marks: dict[str, tuple[str, str]] = {}  # path of what each mark stands in, and what it is
        self.messages = [self._copy(message, f"messages[{index}]") for index, message in enumerate(form)]

    def fault(self, text: str) -> str:
        """Return why the text of the copy is not that of the whole conversation; "": it is."""
        if f"'{self._key}" in text or self._part in text:
            return f"{FAILED}it writes an object or a list in Python's notation"
        shown = set(re.findall(rf"{self._key}x\d+x", text))
        for mark, (path, what) in self._marks.items():
            if mark not in shown:
                return (
                    f"{path}: expected what the chat template writes into the prompt, got {what}, which it leaves out; "
                    "leave it out, or give its text in another message"
                )
        return ""

    def _copy(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        content, what = message.get("content"), f"a message of the role {message['role']}"
        if calls := message.get("tool_calls"):
            made = [self._copy_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]
            return {**message, "tool_calls": made}
        if isinstance(content, list) and content[0]["text"].strip():
            part = {"type": "text", "text": content[0]["text"] + self._mark(path, what), self._part: ""}
            return {**message, "content": [part]}
        if isinstance(content, str) and content.strip():
            return {**message, "content": content + self._mark(path, what)}
        return message

    def _copy_call(self, call: dict[str, Any], path: str) -> dict[str, Any]:
        function = call["function"]
        name, arguments = f"{function.get('name')}{self._mark(path, 'a tool call')}", function.get("arguments")
        mark = self._mark(f"{path}.function.arguments", "the arguments of a tool call")
        if not isinstance(arguments, str):
            changed: Any = {**(arguments or {}), mark: 1}
        else:
            made = _object(arguments)
            changed = arguments + mark if made is None else json.dumps({**made, mark: 1})
        return {**call, "function": {**function, "name": name, "arguments": changed}}

    def _mark(self, path: str, what: str) -> str:
        mark = f"{self._key}x{len(self._marks)}x"
        self._marks[mark] = path, what
        return mark
