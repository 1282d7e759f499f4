"""Reads conversations and the options of chat templates that callers give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import isfunction, ismethod
from typing import Any, TypedDict

from convert.fields import cut
from jspec.core.shorten import short
from jspec.engine.input.caller_input import read_items
from jspec.engine.request.sampling_fields import SamplingFields
from jspec.engine.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Conversation = Sequence[Message]
Tool = Mapping[str, Any] | Callable[..., Any]

MESSAGE = '{"role": ..., "content": ...}'


class TemplateFields(TypedDict, total=False):
    """The options of a chat template, which mean the same as in transformers' `apply_chat_template`.

    A template that never reads an option is an error, because the option would have no effect.
    """

    tools: Sequence[Tool] | None  # JSON schemas {"type": "function", "function": ...}, or functions with docstrings
    documents: Sequence[Mapping[str, Any]] | None  # documents, mostly {"title": ..., "text": ...}
    chat_template: str | None  # name of one of the tokenizer's templates, or a template; None: "tool_use" with tools
    add_generation_prompt: bool  # whether the assistant's next message begins; by default True
    continue_final_message: bool | str  # whether the last message's content (or this key) goes on instead of a new one
    chat_template_kwargs: Mapping[str, Any] | None  # the template's own variables, such as {"enable_thinking": False}


class ChatFields(TemplateFields, SamplingFields, total=False):
    """The keyword arguments of `Engine.chat_stream`, and some of those of `Engine.chat`."""


TEMPLATE_FIELDS = tuple(TemplateFields.__annotations__)
RESERVED = {  # parameters of the function that renders a template
    *("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "return_assistant_tokens_mask"),
}


def read_conversations(messages: Any) -> list[list[dict[str, Any]]]:
    """Check one conversation or several, and return them as a list of conversations.

    Args:
        messages: a conversation or a list of conversations. A conversation is a list of messages, and each message is a
            dict with a text "role" and a "content". The content is a text, or a list of parts {"type": "text", "text":
            ...}; a message with "tool_calls" may have none. Other keys are passed to the template.

    Raises:
        TypeError, ValueError: a value has a wrong type, or a conversation is empty; the error names the index of the
            wrong message.
    """
    several = _message_list(messages, "messages")
    if isinstance(several[0], Mapping):
        return [_conversation(several, "messages")]
    return [_conversation(_message_list(chat, f"messages[{i}]"), f"messages[{i}]") for i, chat in enumerate(several)]


def _message_list(messages: Any, name: str) -> list[Any]:
    values = read_items(messages)
    if values is None:
        hint = '[{"role": "user", "content": text}]' if isinstance(messages, str) else "the message in a list"
        raise TypeError(f"{name}: expected a list of messages {MESSAGE}, got {short(messages)}; give {hint}")
    if not values:
        raise ValueError(f"{name}: expected at least one message, got none")
    return values


def _conversation(messages: Sequence[Any], name: str) -> list[dict[str, Any]]:
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"{name}[{index}]: expected a dict {MESSAGE}, got {short(message)}")
        if not isinstance(message.get("role"), str):
            raise TypeError(f"{name}[{index}]: expected a text under 'role', got {short(message)}")
        _check_content(message, f"{name}[{index}]")
    return [dict(message) for message in messages]


def _check_content(message: Message, name: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, (list, tuple)):
        raise TypeError(
            f"{name}: expected a text under 'content' or a list of parts "
            f'{{"type": "text", "text": ...}}, got {short(message)}'
        )
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise TypeError(
                f'{name}: content[{index}]: expected {{"type": "text", "text": ...}}, got {short(part)}; models of '
                "texts alone are supported"
            )


def read_template_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options of a chat template, and return those that are given; functions in ``tools`` become schemas.

    Args:
        fields: a `TemplateFields`.

    Raises:
        TypeError, ValueError: a value has a wrong type, or two options contradict each other.
    """
    options = {name: value for name, value in fields.items() if value is not None}
    if "tools" in options:
        options["tools"] = [_schema(tool, f"tools[{i}]") for i, tool in enumerate(_list("tools", options["tools"]))]
    if "documents" in options:
        options["documents"] = [_document(item, i) for i, item in enumerate(_list("documents", options["documents"]))]
    for name, types, wanted in (
        ("chat_template", str, "a text"),
        ("add_generation_prompt", bool, "a bool"),
        ("continue_final_message", (bool, str), "a bool or the key of a message"),
        ("chat_template_kwargs", Mapping, "a dict of the template's variables"),
    ):
        if name in options and not isinstance(options[name], types):
            raise TypeError(f"{name}: expected {wanted}, got {short(options[name])}")
    if options.get("continue_final_message") and options.get("add_generation_prompt"):
        raise ValueError(
            "continue_final_message: expected False with add_generation_prompt=True, got "
            f"{short(options['continue_final_message'])}; the final message goes on, or a new one begins"
        )
    for name in options.get("chat_template_kwargs", ()):
        if not isinstance(name, str) or name in RESERVED:
            raise TypeError(
                f"chat_template_kwargs: expected names of the template's own variables, got {short(name)}"
                + (f"; pass {name}= to chat" if name in TEMPLATE_FIELDS else "")
            )
    return options


def _list(name: str, value: Any) -> list[Any]:
    items = read_items(value)
    if items is None:
        raise TypeError(f"{name}: expected a list, got {short(value)}; give one of the {name} in a list")
    return items


def _document(document: Any, index: int) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise TypeError(
            f'documents[{index}]: expected a dict such as {{"title": ..., "text": ...}}, got {short(document)}'
        )
    return dict(document)


def _schema(tool: Any, name: str) -> dict[str, Any]:
    """Return the JSON schema of a tool; transformers makes that of a function from its annotations and docstring."""
    if isinstance(tool, Mapping):
        return dict(tool)
    if not (isfunction(tool) or ismethod(tool)):
        raise TypeError(f"{name}: expected a JSON schema as a dict, or a Python function, got {short(tool)}")
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers has several kinds
        raise ValueError(
            f"{name}: expected a function with annotated arguments and a docstring in Google's format, got an error: "
            f"{cut(str(error), 200)}; mend the docstring or give a JSON schema"
        ) from error


def format_conversations(tokenizer: Tokenizer | None, messages: Any, fields: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of each conversation, formatted with the tokenizer's chat template.

    Args:
        tokenizer: tokenizer of the engine; None: it has none, which is an error.
        messages: one conversation or several, in any form that `read_conversations` reads.
        fields: a `TemplateFields`; other keys are ignored.

    Raises:
        TypeError, ValueError: a message or an option is wrong, or there is no tokenizer or no chat template.
    """
    conversations = read_conversations(messages)
    options = read_template_fields({name: fields[name] for name in TEMPLATE_FIELDS if name in fields})
    if tokenizer is None:
        raise ValueError(
            "chat: expected an engine with a tokenizer, got none; pass tokenizer= or call generate with token ids"
        )
    try:
        return [tokenizer.chat(conversation, **options) for conversation in conversations]
    except (TypeError, ValueError, NotImplementedError):
        raise
    except Exception as error:  # a template raises errors of the library that runs it
        raise ValueError(
            f"messages: expected a conversation that the chat template accepts, got an error: {error!s:.200}"
        ) from error
