"""Reads the JSON value of a line of data in any of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convert.fields import cut
from jspec.core.shorten import short
from jspec.engine.input.chat_input import read_messages

SHAPES = (
    '{"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [{"role": ..., "content": ...}, ...]} or '
    '{"conversations": [{"from": ..., "value": ...}, ...]}'
)
SPEAKERS = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's names that differ from the roles
SPEAKERS |= {role: role for role in ("system", "user", "assistant", "tool")}


class DataError(ValueError):
    """Lines of a data file that cannot be read; the message names the file and the lines."""


def parse(value: Any, *, is_answered: bool = True) -> dict[str, Any]:
    """Return the keys of a line's JSON value that make up its shape; conversations become messages.

    Args:
        value: the value, or the error that reading it raised.
        is_answered: whether the line must have an answer; if not, ``prompt`` may stand alone, and ``messages`` need
            none of the assistant.

    Raises:
        DataError: it has none of the shapes.
    """
    match value:
        case DataError():
            raise value
        case {"line": int(), "documents": list(documents)} if all(map(_is_document, documents)):
            return {"documents": documents}  # of `jspec.train.regenerate`
        case {"messages": list(messages)}:
            return _conversation("messages", messages, value, "assistant" if is_answered else "user")
        case {"conversations": list(turns)}:
            messages = [_turn(turn, f"conversations[{index}]") for index, turn in enumerate(turns)]
            return _conversation("conversations", messages, value, "assistant" if is_answered else "user")
        case {"prompt": str(prompt), "completion": str(completion)}:
            return {"prompt": prompt, "completion": completion}
        case {"text": str(text)}:
            return {"text": text}
        case {"prompt": str(prompt)} if not is_answered:
            return {"prompt": prompt}
        case _:
            keys = f"the keys {', '.join(map(short, value))}" if isinstance(value, dict) else type(value).__name__
            raise DataError(f"expected one of the shapes, got {cut(keys, 80)}")


def _is_document(value: Any) -> bool:
    """Return whether a value has token ids, and the spans of answers among them."""
    match value:
        case {"token_ids": [*ids], "answers": [*spans]} if all(
            type(token) is int and 0 <= token < 2**31 for token in ids
        ):
            ends = [end for span in spans if isinstance(span, list) and len(span) == 2 for end in span]
            is_sound = len(ends) == 2 * len(spans) and all(type(end) is int and 0 <= end <= len(ids) for end in ends)
            return is_sound and ends == sorted(ends)
    return False


def _turn(turn: Any, name: str) -> Any:
    """Return ShareGPT's form of a message as a message; other values are returned as they are."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if str(turn["from"]) not in SPEAKERS:
        raise DataError(f"{name}.from: expected one of {', '.join(SPEAKERS)}, got {short(turn['from'])}")
    if not isinstance(turn.get("value"), str):
        raise DataError(f"{name}.value: expected a text, got {short(turn.get('value'))}")
    return {"role": SPEAKERS[turn["from"]], "content": turn["value"]}


def _conversation(name: str, messages: Sequence[Any], line: dict[str, Any], needed: str) -> dict[str, Any]:
    """Check a conversation, which needs a message of a role; return it with the line's tools."""
    try:
        made = read_messages(messages, name)
    except (TypeError, ValueError) as error:
        raise DataError(str(error)) from None
    if all(message["role"] != needed for message in made):
        raise DataError(f"{name}: expected one of the role {needed}, got none")
    if made[0]["role"] == "assistant":
        raise DataError(f"{name}: expected a message before the first answer, got none; begin with the user's")
    for index, message in enumerate(made):
        if message.get("weight", 1) not in (0, 1):
            raise DataError(f"{name}[{index}].weight: expected 0 or 1, got {short(message['weight'])}")
    if line.get("functions"):
        raise DataError("functions: expected tools instead, by which they were replaced")
    return {"messages": made, "tools": line.get("tools")}
