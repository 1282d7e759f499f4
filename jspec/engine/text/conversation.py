"""Brings a conversation into the forms in which chat templates read it, and finds what a template leaves out.

Templates differ in what they read. Most take contents as texts, some as lists of parts alone; most take the arguments
of a tool call as an object, some as JSON text; some render tool calls only if the content is none. A template that gets
another form raises an error, leaves a message out or writes Python's notation of a list. Some take no system message,
one tool call a message, or no content beside a call. So the forms are tried one after the other, each beside a copy
with a mark in every text: what the template leaves out lacks its mark. A template that names neither
`tools` nor `tool_calls` gets calls and their results as texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product, takewhile
from typing import Any
from uuid import uuid4

from jspec.core.shorten import short

FAILED = "messages: the chat template failed: "  # beginning of the error of a template that raises one
ROLES = ("system", "developer", "user", "assistant", "tool")  # what the published APIs have; templates name others
NOTHING: Mapping[str, str] = {}
Messages = list[dict[str, Any]]


def forms(messages: Messages, copy: MarkedCopy, faults: Sequence[str]) -> Iterator[tuple[Messages, Messages]]:
    """Yield a conversation, and its marked copy, in each of the forms in which chat templates read it.

    The most frequent form is the first, and forms with other messages than the conversation's are the last.

    Args:
        messages: messages as `read_roles` returns them.
        copy: their copy.
        faults: why the template does not read each form that was yielded; the caller appends to it.
    """
    known: list[Messages] = []
    unchanged: list[str] = []
    for made, marked in _changes(messages, copy.messages):
        for has_parts in (False, True):
            begin = len(faults)
            for has_objects, empty in product((True, False), ("", None)):
                if unchanged and _is_hopeless(unchanged, faults[begin:]):
                    break
                form = _form(made, has_parts, has_objects, empty)
                if form not in known:
                    known.append(form)
                    yield form, _form(marked, has_parts, has_objects, empty, copy.beside)
        unchanged = unchanged or [*faults]


def _changes(messages: Messages, marked: Messages) -> Iterator[tuple[Messages, Messages]]:
    """Yield messages and their copy, first as they are and then with each change that makes a difference."""
    known: list[Messages] = []
    for change in (list, _folded, _apart, lambda messages: _apart(_folded(messages))):
        if (made := change(messages)) not in known:
            known.append(made)
            yield made, change(marked)


def _is_hopeless(unchanged: Sequence[str], changed: Sequence[str]) -> bool:
    """Return whether a template that does not read some changed forms will not read others with the same change.

    Args:
        unchanged: why it does not read the forms without a change.
        changed: why it does not read those with the change.
    """
    missing = [fault for fault in changed if not fault.startswith(FAILED)]
    return len(missing) > len(set(missing)) or {*unchanged} == {*changed}


def _form(
    messages: Messages, has_parts: bool, has_objects: bool, empty: str | None, beside: Mapping[str, str] = NOTHING
) -> Messages:
    """Return messages in one form.

    Args:
        messages: messages whose contents are texts.
        has_parts: whether contents are lists of parts.
        has_objects: whether the arguments of tool calls are objects instead of JSON texts.
        empty: the content of tool calls without content.
        beside: further items of each part.
    """
    form = []
    for message in messages:
        made = dict(message)
        if calls := made.pop("tool_calls", None):
            made["tool_calls"] = [_call(call, has_object=has_objects) for call in calls]
            made["content"] = made.get("content") or empty
        if has_parts and isinstance(made.get("content"), str):
            made["content"] = [{"type": "text", "text": made["content"], **beside}]
        form.append(made)
    return form


def calls_as_texts(messages: Messages, template: str = "") -> Messages:
    """Return messages with calls as texts of the assistant, and their results as texts of the user.

    Results and the user's next message are one message, because many templates want the two roles in turns. Messages
    without calls, and those for a template that names tools, stay as they are.
    """
    if re.search(r"\btool(s|_calls)\b", template) or not any(message.get("tool_calls") for message in messages):
        return messages
    told: Messages = []
    names: dict[Any, str] = {}  # of tools, by the id of the call
    follows_result = False
    for message in messages:
        made, is_result = dict(message), message["role"] == "tool"
        content = message.get("content") or ""
        if calls := made.pop("tool_calls", None):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            made["content"] = f"{content}\n[{', '.join(map(_call_text, calls))}]".lstrip("\n")
        if is_result:
            name = names.get(message.get("tool_call_id"), message.get("name") or "the tool")
            made = {"role": "user", "content": f"Result of {name}:\n{content}"}
        if follows_result and made["role"] == "user":
            told[-1]["content"] += f"\n\n{made.get('content') or ''}"
        else:
            told.append(made)
        follows_result = is_result
    return told


def _call_text(call: Mapping[str, Any]) -> str:
    """Return a call in the form in which `jspec.server.tool_calls.grammar` forces it."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {text}}}'


def _folded(messages: Messages) -> Messages:
    """Return messages with the system's text at the beginning of the user's that follows it."""
    contents = [message["content"] for message in messages[:2] if isinstance(message.get("content"), str)]
    if [message["role"] for message in messages[:2]] != ["system", "user"] or len(contents) < 2:
        return messages
    return [{**messages[1], "content": "\n\n".join(contents)}, *messages[2:]]


def _apart(messages: Messages) -> Messages:
    """Return messages with each tool call in a message of its own, after one with the content beside the calls."""
    made: Messages = []
    index = 0
    while index < len(messages):
        results = list(takewhile(lambda message: message["role"] == "tool", islice(messages, index + 1, None)))
        made += _pieces(messages[index], results)
        index += 1 + len(results)
    return made


def _pieces(message: dict[str, Any], results: Messages) -> Messages:
    """Return a message's content and calls, each in a message of its own, and each call's results after it.

    The message stays as it is if it has several calls and a result that belongs to none of them, or to several.
    """
    calls, content = message.get("tool_calls") or [], message.get("content")
    names = [str(call.get("id")) for call in calls]
    answers: dict[str, Messages] = {name: [] for name in names}
    asked = [str(result.get("tool_call_id")) for result in results] if len(calls) > 1 else names * len(results)
    is_clear = len(answers) == len(calls) and answers.keys() >= set(asked)
    if len(calls) + bool(content) < 2 or (results and not is_clear):
        return [message, *results]
    for name, result in zip(asked, results, strict=True):
        answers[name].append(result)
    first = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    pieces = [{"role": message["role"], "content": content}] if content else []
    for call, name in zip(calls, names, strict=True):
        pieces += [{**first, "tool_calls": [call]}, *answers[name]]
        first = {"role": message["role"]}
    return pieces


def read_roles(messages: Sequence[Mapping[str, Any]], template: str) -> Messages:
    """Return messages without values that are None; those of the role developer become system messages.

    Args:
        messages: messages whose contents are texts or None, and whose tool calls have objects or JSON texts as
            arguments.
        template: the chat template; developer messages stay if it names that role.

    Raises:
        TypeError: a role is no text.
        ValueError: a message has a role that is none of `ROLES`, and that the template does not name.
    """
    roles = [_role(message, index, template) for index, message in enumerate(messages)]
    return [
        {key: value for key, value in message.items() if value is not None} | {"role": role}
        for message, role in zip(messages, roles, strict=True)
    ]


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
    arguments = function.setdefault("arguments", {})
    if has_object and isinstance(arguments, str):
        function["arguments"] = arguments if (made := _object(arguments)) is None else made
    elif not has_object and isinstance(arguments, Mapping):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": function}


def _object(arguments: str) -> dict[str, Any] | None:
    """Return the object that a JSON text holds, with U+FFFD for halves of surrogate pairs; None if it holds none."""
    try:
        made = json.loads(arguments or "{}")
        if "\\ud" in arguments.lower():  # halves, which models write and no tokenizer takes, or whole pairs
            text = json.dumps(made, ensure_ascii=False)
            made = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
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
        messages: messages as `read_roles` returns them.

    Attributes:
        messages: the copy.
        beside: an item that each part of a content must have, if contents become lists of parts.
    """

    def __init__(self, messages: Messages) -> None:
        self._key, self._part = f"mark{uuid4().hex[:16]}", f"part{uuid4().hex[:16]}"
        self.beside = {self._part: ""}
        self._marks: dict[str, tuple[str, str]] = {}  # path of what each mark stands in, and what it is
        self.messages = [self._copy(message, f"messages[{index}]") for index, message in enumerate(messages)]

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
        if isinstance(content, str) and content.strip():
            return {**message, "content": content + self._mark(path, what)}
        return message

    def _copy_call(self, call: dict[str, Any], path: str) -> dict[str, Any]:
        function = call["function"]
        name, arguments = f"{function.get('name')}{self._mark(path, 'a tool call')}", function.get("arguments")
        mark = self._mark(f"{path}.function.arguments", "the arguments of a tool call")
        if not isinstance(arguments, str):
            changed: Any = {**(arguments or {}), mark: "1"}
        else:
            made = _object(arguments)
            changed = arguments + mark if made is None else json.dumps({**made, mark: "1"})
        return {**call, "function": {**function, "name": name, "arguments": changed}}

    def _mark(self, path: str, what: str) -> str:
        mark = f"{self._key}x{len(self._marks)}x"
        self._marks[mark] = path, what
        return mark
