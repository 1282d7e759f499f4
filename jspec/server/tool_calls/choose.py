"""Chooses how an answer is read: by the request, by the chat template, or by a format's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jspec.core.shorten import short
from jspec.engine.reading import answers, harmony
from jspec.engine.reading import reasoning as thinking
from jspec.engine.reading.calls import AnswerCalls, make_id
from jspec.engine.reading.reasoning import HARMONY
from jspec.engine.reading.text_reader import OutputParser, Reader, Reading, TextParser
from jspec.server.http.settings import Settings
from jspec.server.tool_calls import forced, gemma, hermes, llama3_json, markup, mistral, pythonic
from jspec.server.tool_calls.tools import ToolChoice

FORMATS: dict[str, Callable[[Reader, AnswerCalls], Reading[None]]] = {
    "hermes": hermes.read,
    "llama3_json": llama3_json.read,
    "mistral": mistral.read,
    "pythonic": pythonic.read,
    HARMONY: harmony.read,
    "gemma4": gemma.read,
    **{name: partial(markup.read, written=written) for name, written in markup.FORMATS.items()},
}
MARKERS = (  # texts of the formats that may be special tokens
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *(pythonic.START, pythonic.END, *gemma.MARKERS, *answers.MARKERS),
    *(marker for written in markup.FORMATS.values() for marker in written.markers),
)
SIGNS: tuple[tuple[str, str], ...] = (  # a text in a chat template, and its format; the first one found counts
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<parameter=", "qwen3_coder"),
    ("<function=", ""),  # other calls with tags, which no format here reads
    ("<|tool_call>call:", "gemma4"),
    ("<|channel|>", HARMONY),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('Respond in the format {"name": function name', "llama3_json"),
)


def parser_for(
    chat_template: str | None,
    name: str | None,
    choice: ToolChoice,
    reasoning: str | None,
    *,
    prompt: str = "",
    prefill: str = "",
    grammar_waits: bool = False,
) -> OutputParser:
    """Return the parser of one answer.

    Args:
        chat_template: the tokenizer's chat template, if it has one.
        name: the format of tool calls; None: that of the chat template.
        choice: what the answer may or must call.
        reasoning: the format of reasoning that is split off; None: none is. An answer that must be tool calls has none,
            unless its grammar waits for the reasoning's end.
        prompt: the rendered prompt or its end, which tells whether the answer begins inside reasoning.
        prefill: the beginning of the answer, with which the prompt ends.
        grammar_waits: whether the grammar of the answer begins after the reasoning.

    Raises:
        ValueError: the format is unknown, or the answer may have calls and the template has none of the formats.
    """
    read, new_id = _reader_of(choice, chat_template, name)
    thought = None if choice.is_forced and not grammar_waits else reasoning

    def read_answer(reader: Reader) -> Reading[None]:
        calls = AnswerCalls(reader, choice.schemas, new_id)
        yield from answers.read(reader, calls, thought, read, prompt=prompt, prefill=prefill)

    return TextParser(read_answer)


def check_name(name: str | None) -> None:
    """Raise ValueError if there is no format of tool calls with this name."""
    if name is not None and name not in FORMATS:
        raise ValueError(f"tool_parser: expected one of {', '.join(FORMATS)}, got {short(name)}")


def check_formats(chat_template: str | None, settings: Settings) -> None:
    """Check how a server's answers with calls and reasoning are read.

    Raises:
        ValueError: there is no such format, or reasoning in this format cannot be left in the content.
    """
    check_name(settings.tool_parser)
    names = settings.tool_parser, thinking.format_name(chat_template, settings.reasoning_parser)
    if HARMONY in names and not settings.reasoning:
        raise ValueError(
            "reasoning: expected True, got False (--no-reasoning), because in this model's format the reasoning is a "
            "message of its own, which cannot be left in the content; leave it out"
        )


def format_of(chat_template: str | None, name: str | None) -> str:
    """Return the name of the format of tool calls that a chat template has, or ``name``; "": none that is read here."""
    check_name(name)
    return name or next((format_ for sign, format_ in SIGNS if sign in (chat_template or "")), "")


def _reader_of(
    choice: ToolChoice, chat_template: str | None, name: str | None
) -> tuple[Callable[[Reader, AnswerCalls], Reading[None]], Callable[[], str]]:
    """Return what reads an answer, and what makes the ids of its calls."""
    format_name = format_of(chat_template, name)
    new_id = mistral.make_id if format_name == "mistral" else make_id
    if choice.mode == "none":
        return lambda reader, calls: reader.pass_all(), new_id
    if choice.mode == "named":
        (tool,) = choice.schemas
        return lambda reader, calls: forced.read_named(reader, calls, tool), new_id
    if choice.mode == "required":
        return forced.read_required, new_id
    if not format_name:
        raise ValueError(
            f"tools: expected a chat template with tool calls in one of the formats {', '.join(FORMATS)}, got "
            f"{'none' if chat_template is None else 'another'}; name the format (tool_parser), or set tool_choice to "
            '"required" or a tool, which needs no format'
        )
    return FORMATS[format_name], new_id
