"""Chooses how an answer is read: by the request, by the chat template, or by a format's name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jspec.core.shorten import short
from jspec.engine.text.tokenizer import Tokenizer
from jspec.server.reading import reasoning as thinking
from jspec.server.reading.reasoning import HARMONY
from jspec.server.reading.text_reader import OutputParser, Reader, Reading, TextParser
from jspec.server.tool_calls import forced, harmony, hermes, llama3_json, mistral, pythonic
from jspec.server.tool_calls.calls import AnswerCalls, make_id
from jspec.server.tool_calls.tools import ToolChoice

FORMATS: dict[str, Callable[[Reader, AnswerCalls], Reading[None]]] = {
    "hermes": hermes.read,
    "llama3_json": llama3_json.read,
    "mistral": mistral.read,
    "pythonic": pythonic.read,
    HARMONY: harmony.read,
}
PROMPT_END = 64  # tokens of a prompt that tell whether it ends inside reasoning
MARKERS = (  # texts of the formats that may be special tokens
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    *(pythonic.START, pythonic.END, *harmony.MARKERS),
    *(marker for format_ in thinking.FORMATS.values() for marker in ("<|channel>", *format_.markers)),
)
SIGNS: tuple[tuple[str, str], ...] = (  # a text in a chat template, and its format; the first one found counts
    ("<function=", ""),  # calls as XML, which no format here reads
    ("<arg_key>", ""),
    ("<|channel|>", HARMONY),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('Respond in the format {"name": function name', "llama3_json"),
)


def template_of(tokenizer: Tokenizer | None) -> str | None:
    """Return the chat template of a tokenizer, or all of several; None: there is none."""
    template = getattr(tokenizer, "chat_template", None)
    return "\n".join(template.values()) if isinstance(template, dict) else template


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int], *, is_whole: bool = False) -> str:
    """Return the text of a prompt with the markers of the formats, or its end, which tells how an answer begins."""
    shown = tokenizer.with_special_tokens(MARKERS) if tokenizer.hidden_ids else tokenizer
    return shown.decode(prompt if is_whole else prompt[-PROMPT_END:])


def parser_for(
    chat_template: str | None,
    name: str | None,
    choice: ToolChoice,
    reasoning: str | None,
    *,
    prompt: str = "",
    prefill: str = "",
) -> OutputParser:
    """Return the parser of one answer.

    Args:
        chat_template: the tokenizer's chat template, if it has one.
        name: the format of tool calls; None: that of the chat template.
        choice: what the answer may or must call.
        reasoning: the format of reasoning that is split off; None: none is. An answer that must be tool calls has none.
        prompt: the rendered prompt or its end, which tells whether the answer begins inside reasoning.
        prefill: the beginning of the answer, with which the prompt ends.

    Raises:
        ValueError: the format is unknown, or the answer may have calls and the template has none of the formats.
    """
    read, new_id = _reader_of(choice, chat_template, name)
    names, is_split = frozenset(choice.schemas), reasoning is not None and not choice.is_forced

    def read_answer(reader: Reader) -> Reading[None]:
        calls = AnswerCalls(reader, names, new_id)
        if read is harmony.read or (is_split and reasoning == HARMONY):
            yield from harmony.read(reader, calls, prompt, splits_reasoning=is_split)
            return
        if is_split:
            assert reasoning is not None
            format_ = thinking.FORMATS[reasoning]
            yield from thinking.read(reader, format_, begun=thinking.begun_in(format_, prompt, prefill))
        yield from read(reader, calls)

    return TextParser(read_answer)


def check_name(name: str | None) -> None:
    """Raise ValueError if there is no format of tool calls with this name."""
    if name is not None and name not in FORMATS:
        raise ValueError(f"tool_parser: expected one of {', '.join(FORMATS)}, got {short(name)}")


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
