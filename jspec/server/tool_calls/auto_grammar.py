"""Writes the grammar of an answer that may call tools, whose calls must then have arguments that follow their schemas.

The text of the answer is free up to what announces a call in a format. The grammar is in Lark's form, as llguidance
reads it: ``/.../`` is a regular expression, ``"..."`` a text, ``<[5]>`` the token 5, and ``[lazy]`` ends an expression
as early as it matches. A marker that is a special token can only be written as its id, and no expression matches it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from jspec.engine.grammar import json_schema
from jspec.engine.reading import harmony
from jspec.engine.reading.reasoning import HARMONY, ReasoningFormat
from jspec.server.tool_calls import gemma, gemma_grammar, markup, markup_grammar
from jspec.server.tool_calls.markup import MarkedCalls
from jspec.server.tool_calls.schema_rules import json_rule
from jspec.server.tool_calls.tools import ToolChoice

SP = r"[ \t\r\n]*"
CALL_HEAD = rf'{SP}\{{{SP}"name"{SP}:{SP}"NAME"{SP},{SP}"(arguments|parameters)"{SP}:'
# How Llama's calls begin an answer, or what follows its reasoning.
BARE_CALL = rf'(?s:(.*<.think>)?{SP}\{{{SP}"(name|arguments|parameters|type|id)".*)'
MESSAGE_PARTS = "|".join(re.escape(marker) for marker in (*harmony.ENDS, harmony.MESSAGE))


class AutoGrammar:
    """The parts that the grammars of all formats share.

    Args:
        choice: what the answer may call.
        specials: ids of special tokens that the answer may have, by text.
        is_parallel: whether an answer may have several calls.
        reasoning: the format of reasoning that is split off; None: none is.
        has_begun: whether the prompt has begun reasoning.
        write_calls: returns the rules of calls, of which "call" is one call.

    Attributes:
        choice: what the answer may call.
        names: the names of the tools.
        is_parallel: whether an answer may have several calls; after a single one nothing follows.
    """

    def __init__(
        self,
        choice: ToolChoice,
        specials: Mapping[str, int],
        *,
        is_parallel: bool,
        reasoning: ReasoningFormat | None = None,
        has_begun: bool = False,
        write_calls: Callable[[AutoGrammar], list[str]],
    ) -> None:
        self.choice, self.names, self.specials, self.is_parallel = choice, list(choice.schemas), specials, is_parallel
        self._reasoning, self._has_begun = reasoning, has_begun
        self._calls = write_calls(self)

    def marker(self, text: str) -> str:
        """Return a marker as its token, if it is a special one, or as text."""
        return f"<[{self.specials[text]}]>" if text in self.specials else json.dumps(text)

    def _first(self, text: str) -> str:
        """Return the special token with which a marker of reasoning begins; "": it begins with none."""
        special = max((each for each in self.specials if text.startswith(each)), key=len, default="")
        return self.marker(special) if special else ""

    def listed(self, separator: str) -> str:
        """Return a list of calls, or one call, with a separator between them."""
        return f'call (SP "{separator}" SP call)*' if self.is_parallel else "call"

    def of(self, trigger: str, calls: str, *, bare: str = "") -> str:
        """Return the grammar of answers with free text, in which a marker announces calls.

        Args:
            trigger: the marker.
            calls: what follows it.
            bare: the calls with which an answer may begin instead; no text begins as they do, and none follows calls.
        """
        if not (bare or self.specials) and self._reasoning is not None:
            return self._after_reasoning(re.escape(trigger), calls, self._reasoning)
        others = [f"<[{token}]>" for text, token in self.specials.items() if text != trigger]
        inside = f"(TEXT? ({' | '.join(others)}))* " if others else ""
        if trigger in self.specials:
            before = f"free {self.marker(trigger)}"
        else:
            before = f"{inside}trigger\ntrigger[lazy]: /(?s:.*){re.escape(trigger)}/"
        called = f"({bare} | before SP {calls}) SP" if bare else f"before SP {calls} SP"
        start = f"({called})* free" if self.is_parallel and not bare else f"{called} | free"
        text = _text(f"(?s:.*{re.escape(trigger)}.*)", *([BARE_CALL] if bare else []))
        starts = [f"start: {start}"]
        markers = self._reasoning.markers if self._reasoning is not None else ()
        if self._reasoning is not None and trigger in self.specials and all(map(self._first, markers)):
            starts = self._after_special_reasoning(start, self._reasoning)
        return self.whole(*starts, f"before: {before}", f"free: {inside}TEXT?", text)

    def _after_special_reasoning(self, answer: str, reasoning: ReasoningFormat) -> list[str]:
        """Return the rules of answers that may begin with reasoning between special tokens, in which all is free."""
        inside = " | ".join(self.marker(text) for text in self.specials if text not in reasoning.closings)
        opening = "" if self._has_begun else f"SP ({' | '.join(map(self._first, reasoning.openings))}) "
        closed = f"(thought ({' | '.join(map(self.marker, reasoning.closings))}))"
        return [
            f"start: {closed}{'' if self._has_begun else '?'} answer | thought",
            f"answer: {answer}",
            f"thought: {opening}(THOUGHT? ({inside}))* THOUGHT?",
            "THOUGHT: /(?s:.+)/",
        ]

    def _after_reasoning(self, trigger: str, calls: str, reasoning: ReasoningFormat) -> str:
        """Return the grammar of answers that may begin with reasoning between texts, in which the trigger is text."""
        opening, closing = SP + _any_of(reasoning.openings), _any_of(reasoning.closings)
        if self._has_begun:
            opening = ""
        called = f"SP {calls} SP" + (f" (before SP {calls} SP)* free" if self.is_parallel else "")
        return self.whole(
            f"start: first {called} | FIRST_TEXT?",
            "first[lazy]: OUTSIDE | AFTER",
            f"OUTSIDE: /(?s:.*){trigger}/ & ~/(?s:{opening}.*)/",
            f"AFTER: /(?s:{opening}.*{closing}.*){trigger}/",
            f"FIRST_TEXT: /(?s:.+)/ & (/(?s:{opening}.*)/ | ~/(?s:.*{trigger}.*)/) "
            f"& ~/(?s:{opening}.*{closing}.*{trigger}.*)/",
            f"before[lazy]: /(?s:.*){trigger}/",
            "free: TEXT?",
            _text(f"(?s:.*{trigger}.*)"),
        )

    def whole(self, *rules: str) -> str:
        """Return a grammar of some rules and those of the calls."""
        return "\n".join([*rules, *self._calls, f"SP: /{SP}/"])


def _text(*banned: str) -> str:
    """Return the terminal of free text, which none of some regular expressions matches."""
    return f"TEXT: {' & '.join(['/(?s:.+)/', *(f'~/{each}/' for each in banned)])}"


def _json_calls(grammar: AutoGrammar) -> list[str]:
    """Return the rules of calls in JSON."""
    names, choice = list(enumerate(grammar.names)), grammar.choice
    calls = [f'head{i} SP args{i} SP "}}"' for i, _ in names]
    heads = [f"head{i}[lazy]: /{CALL_HEAD.replace('NAME', re.escape(name))}/" for i, name in names]
    arguments = [
        choice.made(name, partial(json_rule, f"args{i}"))
        if name in choice.strict
        else json_rule(f"args{i}", {"type": "object"})
        for i, name in names
    ]
    return [f"call: {' | '.join(calls)}", *heads, *arguments]


def _hermes(grammar: AutoGrammar) -> str:
    return grammar.of("<tool_call>", f"call SP {grammar.marker('</tool_call>')}")


def _llama3_json(grammar: AutoGrammar) -> str:
    calls = grammar.listed(";")
    return grammar.of("<|python_tag|>", calls, bare=calls)


def _mistral(grammar: AutoGrammar) -> str:
    call_id = f"({grammar.marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"
    named = [f'"{name}" {call_id} {grammar.marker("[ARGS]")}? SP args{i}' for i, name in enumerate(grammar.names)]
    array = f'"[" SP {grammar.listed(",")} SP "]"'
    return grammar.of("[TOOL_CALLS]", f"({' | '.join([array, *named])})")


def _harmony(grammar: AutoGrammar) -> str | None:
    """Return the grammar of messages in harmony, whose headers are texts between special tokens."""
    if not set(harmony.MARKERS) <= grammar.specials.keys():
        return None
    channel, constrain, message = map(grammar.marker, (harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE))
    calls = []
    for i, name in enumerate(grammar.names):
        to = rf"to=functions\.{re.escape(name)}"
        in_role = f"/(assistant)?[ ]?{to}[ ]?/ ({channel} HEADER?)?"
        in_channel = f"HEADER? {channel} /[a-z]+[ ]{to}([ ][a-z]*)?/"
        calls += [f"{header} ({constrain} HEADER?)? {message} SP args{i} SP" for header in (in_role, in_channel)]
    after = "(separator+ text?)*)*" if grammar.is_parallel else "end?)?"
    return grammar.whole(
        f"start: (text | TEXT)? (separator+ text?)* (separator* tool {after}",
        f"separator: end | {grammar.marker(harmony.START)}",
        f"end: {' | '.join(grammar.marker(marker) for marker in harmony.ENDS if marker != harmony.START)}",
        f"text: HEADER? ({channel} HEADER?)? ({constrain} HEADER?)? {message} TEXT?",
        f"tool: {' | '.join(calls)}",
        "HEADER: /[^=]+/",  # and so without a recipient
        _text(f"(?s:.*({MESSAGE_PARTS}).*)"),
    )


def _marked_calls(written: MarkedCalls, grammar: AutoGrammar) -> list[str]:
    return markup_grammar.rules(grammar.choice, grammar.marker, written)


def _marked(start: str, grammar: AutoGrammar) -> str:
    """Return the grammar of answers whose calls begin after a marker and have one at their end."""
    return grammar.of(start, "call")


CALLS: dict[str, Callable[[AutoGrammar], list[str]]] = {  # what writes the rules of calls that are not JSON
    "gemma4": lambda grammar: gemma_grammar.rules(grammar.choice, grammar.marker),
    **{name: partial(_marked_calls, written) for name, written in markup.FORMATS.items()},
}
GRAMMARS: dict[str, Callable[[AutoGrammar], str | None]] = {
    "gemma4": partial(_marked, gemma.START),
    **{name: partial(_marked, written.start) for name, written in markup.FORMATS.items()},
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    HARMONY: _harmony,
}


def is_needed(choice: ToolChoice, parallel_tool_calls: bool | None) -> bool:
    """Return whether a grammar must keep what the request asks of calls that the model need not make."""
    return choice.mode == "auto" and (bool(choice.strict) or parallel_tool_calls is False)


def _any_of(markers: Sequence[str]) -> str:
    """Return a regular expression of some markers, as it stands between slashes."""
    return f"({'|'.join(re.escape(marker) for marker in markers)})".replace("/", r"\/")


def auto_grammar(
    choice: ToolChoice,
    format_name: str,
    specials: Mapping[str, int],
    parallel_tool_calls: bool | None,
    reasoning: ReasoningFormat | None = None,
    *,
    has_begun: bool = False,
) -> str | None:
    """Return the grammar, in Lark's form, that an answer needs to keep what the request asks of calls; None: none.

    Args:
        choice: what the answer may call.
        format_name: the format of tool calls.
        specials: ids of special tokens that the answer may have, by text.
        parallel_tool_calls: whether an answer may have several calls; None: yes.
        reasoning: the format of reasoning that is split off; None: none is.
        has_begun: whether the prompt has begun reasoning.

    Raises:
        ValueError: calls in this format are nothing that a grammar can force, a schema is wrong, or the grammar is too
            long.
    """
    if not is_needed(choice, parallel_tool_calls):
        return None
    write = GRAMMARS.get(format_name, lambda grammar: None)
    is_parallel = parallel_tool_calls is not False
    calls = CALLS.get(format_name, _json_calls)
    grammar = AutoGrammar(
        choice, specials, is_parallel=is_parallel, reasoning=reasoning, has_begun=has_begun, write_calls=calls
    )
    lark = write(grammar)
    _check(lark, choice, format_name)
    return lark


def _check(lark: str | None, choice: ToolChoice, format_name: str) -> None:
    """Refuse a format without a grammar, and a grammar that is too long."""
    if lark is None:
        field = "tools: expected strict false" if choice.strict else "parallel_tool_calls: expected true"
        raise ValueError(
            f'{field} with tool_choice "auto", because no grammar can force calls in the format {format_name} of the '
            'model; change it, or set tool_choice to "required" or a tool'
        )
    if len(lark) > json_schema.MAX_GRAMMAR:
        raise ValueError(
            f"tools: expected tools whose grammar has at most {json_schema.MAX_GRAMMAR} characters, got {len(lark)}; "
            "give fewer or smaller strict tools"
        )
