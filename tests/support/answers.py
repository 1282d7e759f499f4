"""Answers with tool calls, and what parsers find in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jspec.engine.reading import harmony
from jspec.engine.reading import reasoning as thinking
from jspec.engine.reading.text_reader import AnswerPart, OutputParser
from jspec.server.tool_calls.choose import parser_for
from jspec.server.tool_calls.tools import read_choice


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("f"), tool("get_weather"), tool("get_time")]
MARKERS = {  # of the formats whose text without calls is content
    "hermes": ["<tool_call>", "</tool_call>"],
    "llama3_json": ["<|python_tag|>", ";"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "pythonic": ["<|python_start|>", "<|python_end|>"],
    "glm45": ["<tool_call>", "</tool_call>"],
    "seed_oss": ["<seed:tool_call>", "</seed:tool_call>", "</parameter>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "</parameter>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>'],
}
CALL_SCRAPS = ['{"name": "f", ', '"arguments": ', '"parameters": {', '{"x": 1}}', "[f(x=1", "get_", '"name"', "f"]
CALL_SCRAPS += [
    "",
    '{"name": "f", "arguments": {"x": [1, "a"]}}',
    "[f(x=[1, 'a'])]",
    "f[ARGS]{",
    *"{}[](),:=;'\"\\ \nx1-<|",
]
CALL_SCRAPS += ["<function=f>", "<parameter=x>", "</function>", "<arg_key>x</arg_key>", "<arg_value>1</arg_value>"]
CALL_SCRAPS += ["call:f{", "<tool_call>f<arg_key>", "x:1,", 'x:<|"|>a']
HARMONY_SCRAPS = ["analysis", "final", "commentary", " to=functions.f", "json", '{"x": 1}', "assistant"]


def scraps_of(tools: str, reasoning: str | None = None) -> list[str]:
    """Return what texts of two formats may be drawn from: markers, whole or not, and pieces of calls."""
    format_ = thinking.FORMATS.get(reasoning or "")
    markers = list(format_.markers + (format_.answer or ())) if format_ else []
    is_harmony = "harmony" in (tools, reasoning)
    markers += [*MARKERS.get(tools, ()), *(harmony.MARKERS if is_harmony else ())]
    return [*markers, *(marker[:-2] for marker in markers), *CALL_SCRAPS, *(HARMONY_SCRAPS if is_harmony else ())]


@dataclass
class Joined:
    """All parts of an answer, joined; calls are (name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def joined(parts: Sequence[AnswerPart]) -> Joined:
    """Join parts, after a check that each call begins once, with an id of its own, and has its number."""
    found, ids = Joined(), list[str]()
    for part in parts:
        assert (part.content != "") + (part.reasoning != "") + (part.call is not None) == 1
        found.content += part.content
        found.reasoning += part.reasoning
        if part.call is None:
            continue
        if part.call.id is not None:
            assert part.call.name is not None and part.call.index == len(ids)
            ids.append(part.call.id)
            found.calls.append((part.call.name, ""))
        assert part.call.index == len(ids) - 1
        name, arguments = found.calls[-1]
        found.calls[-1] = name, arguments + part.call.arguments
    assert len(set(ids)) == len(ids)
    return found


def auto(
    format_: str, *, reasoning: str | None = None, prompt: str = "", prefill: str = "", tools: Any = TOOLS
) -> OutputParser:
    choice = read_choice(tools, "auto")
    return parser_for(None, format_, choice, reasoning, prompt=f"{prompt}{prefill}", prefill=prefill)


def parsed(make: Callable[[], OutputParser], pieces: Sequence[str]) -> Joined:
    parser, parts = make(), list[AnswerPart]()
    for piece in pieces:
        parts += parser.push(piece)
    return joined([*parts, *parser.finish()])


def split(text: str, cuts: Sequence[int]) -> list[str]:
    """Return a text in pieces, cut at the given positions, two of which may be equal."""
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def check_every_split(make: Callable[[], OutputParser], text: str) -> Joined:
    """Check that a text gives the same character by character and cut at any one place; return what it gives."""
    whole = parsed(make, [text])
    assert parsed(make, [*text]) == whole
    for cut in range(1, len(text)):
        assert parsed(make, [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])
    return whole
