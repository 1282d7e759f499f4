"""Reads conversations and the options of chat templates that callers give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
CALL = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
PARTS = {"text": "text", "refusal": "refusal"}  # for each type of a part of a content, the key of its text
MEDIA = ("image", "audio", "video", "file", "document")  # what a part of a type that has this name is


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
        messages: a conversation or a list of conversations, each as `read_messages` takes it.

    Raises:
        TypeError, ValueError: a value has a wrong type, or a conversation is empty; the error names the wrong part.
    """
    several = _message_list(messages, "messages")
    if isinstance(several[0], Mapping):
        return [read_messages(several, "messages")]
    return [read_messages(_message_list(chat, f"messages[{i}]"), f"messages[{i}]") for i, chat in enumerate(several)]


def _message_list(messages: Any, name: str) -> list[Any]:
    values = read_items(messages)
    if values is None:
        hint = '[{"role": "user", "content": text}]' if isinstance(messages, str) else "the message in a list"
        raise TypeError(f"{name}: expected a list of messages {MESSAGE}, got {short(messages)}; give {hint}")
    if not values:
        raise ValueError(f"{name}: expected at least one message, got none")
    return values


def read_messages(messages: Sequence[Any], name: str, reader: str = "engine") -> list[dict[str, Any]]:
    """Check the messages of a conversation; return them with texts as contents, without keys that are None.

    Args:
        messages: messages. Each is a dict with a text "role" and a "content", which is a text or a list of parts
            {"type": "text", "text": ...}. A message with "tool_calls" may have no content; each call is a dict with
            {"function": {"name": text, "arguments": a dict or JSON text}}. Other keys are passed to the template.
        name: the argument or field that has them, for the errors.
        reader: what reads them, for the errors.

    Raises:
        TypeError, ValueError: a value is wrong; the error names the wrong part.
    """
    return [_message(message, f"{name}[{index}]", reader) for index, message in enumerate(messages)]


def _message(value: Any, name: str, reader: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: expected a dict {MESSAGE}, got {short(value)}")
    message = {key: item for key, item in value.items() if item is not None}
    if not isinstance(message.get("role"), str):
        raise TypeError(f"{name}.role: expected a text, got {short(message.get('role'))}")
    if "function_call" in message:
        raise ValueError(f"{name}.function_call: expected tool_calls instead, by which it was replaced")
    if "audio" in message:
        raise ValueError(f"{name}.audio: expected nothing, because this {reader} has no audio input")
    if "content" not in message and "refusal" in message:
        message["content"] = message.pop("refusal")
    calls = _message_calls(message.pop("tool_calls", ()), f"{name}.tool_calls")
    if "content" in message or not calls:
        message["content"] = join_parts(message.get("content"), f"{name}.content", PARTS, reader)
    return {**message, "tool_calls": calls} if calls else message


def _message_calls(value: Any, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name}: expected a list of tool calls {CALL}, got {short(value)}")
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise TypeError(f"{name}[{index}].function: expected a tool call {CALL}, got {short(call)}")
        if not isinstance(function.get("name"), str):
            raise TypeError(f"{name}[{index}].function.name: expected a text, got {short(function.get('name'))}")
        if not isinstance(function.get("arguments", ""), (str, Mapping)):
            raise TypeError(
                f"{name}[{index}].function.arguments: expected a dict or JSON text, got {short(function['arguments'])}"
            )
    return list(value)


def join_parts(value: Any, name: str, kinds: Mapping[str, str], reader: str) -> str:
    """Return a content that is a text, or the texts of its parts with line ends between them.

    Args:
        value: a text, or a list of parts such as {"type": "text", "text": ...}.
        name: the argument or field that has it, for the errors.
        kinds: for each type of a part, the key under which it has its text.
        reader: what reads it, for the errors.

    Raises:
        TypeError: it is neither, or has a part without text, such as an image.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise TypeError(
            f'{name}: expected a text or a list of parts {{"type": "text", "text": ...}}, got {short(value)}'
        )
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, Mapping):
            raise TypeError(f'{name}[{index}]: expected {{"type": "text", "text": ...}}, got {short(part)}')
        key = kinds[read_kind(part, f"{name}[{index}]", kinds, reader)]
        if not isinstance(text := part.get(key), str):
            raise TypeError(f"{name}[{index}].{key}: expected a text, got {short(text)}")
        texts.append(text)
    return "\n".join(texts)


def read_kind(part: Mapping[str, Any], name: str, kinds: Iterable[str], reader: str) -> str:
    """Return the type of a part of a content; raise TypeError if it is not one of some, as that of an image."""
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        medium = next((medium for medium in MEDIA if medium in str(kind)), None)
        reason = "" if medium is None else f"; this {reader} has no {medium} input"
        raise TypeError(f"{name}.type: expected one of {', '.join(kinds)}, got {short(kind)}{reason}")
    return kind


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
    names = ["messages"] if len(conversations) == 1 else [f"messages[{index}]" for index in range(len(conversations))]
    return [_format(tokenizer, chat, options, name) for chat, name in zip(conversations, names, strict=True)]


def _format(tokenizer: Tokenizer, conversation: Any, options: Mapping[str, Any], name: str) -> list[int]:
    try:
        return tokenizer.chat(conversation, **options)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: expected texts that UTF-8 can represent, got an error: {error}") from None
    except (TypeError, ValueError, NotImplementedError) as error:
        if name == "messages" or not str(error).startswith("messages"):
            raise
        raise ValueError(f"{name}{str(error).removeprefix('messages')}") from error
    except Exception as error:  # of a tokenizer that is not one of jspec's
        raise ValueError(
            f"{name}: expected a conversation that the chat template accepts, got an error: {error!s:.200}"
        ) from error
