"""Tool calls whose arguments are written one by one between tags, as GLM, Seed-OSS and Qwen3-Coder write them.

A text stands between the tags as it is, and every other value as JSON or as Python writes it. The tool's schema tells
which it is: where it allows texts, only what is another value that it allows is no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jspec.engine.grammar import json_schema
from jspec.engine.reading.calls import AnswerCalls
from jspec.engine.reading.json_scanner import BLANKS, JsonScanner, escaped, value_text
from jspec.engine.reading.text_reader import Reader, Reading
from jspec.server.tool_calls import pythonic

NAME, KEY = re.compile(r"[\w.-]*"), re.compile(r"[^<>\n]*")
KINDS = frozenset(json_schema.TYPES)
BY_LETTER = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


@dataclass(frozen=True)
class MarkedCalls:
    """How a model family writes tool calls with tags.

    Attributes:
        start, end: tags around a call.
        function: texts before and after the tool's name, and the tag after its arguments; "": none.
        key: tag before the name of an argument.
        value: tags before the value of an argument.
        value_ends: texts that end a value.
        has_line_end: whether a line end before a value belongs to its tag.
        takes_python: whether values may be written as Python writes them.
    """

    start: str
    end: str
    key: str
    value: tuple[str, ...]
    value_ends: tuple[str, ...]
    function: tuple[str, str, str] = ("", "", "")
    has_line_end: bool = False
    takes_python: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """The tags that may be special tokens."""
        return tuple(text for text in (self.start, self.end, self.key, *self.value, *self.value_ends) if len(text) > 1)


FUNCTION = ("<function=", ">", "</function>")
FORMATS = {
    # <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, with line ends between tags or none
    "glm45": MarkedCalls("<tool_call>", "</tool_call>", "<arg_key>", ("</arg_key>", "<arg_value>"), ("</arg_value>",)),
    # <seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>
    "seed_oss": MarkedCalls(
        "<seed:tool_call>", "</seed:tool_call>", "<parameter=", (">",), ("</parameter>",), FUNCTION, takes_python=True
    ),
    # the same between <tool_call> and </tool_call>, each value on lines of its own
    "qwen3_coder": MarkedCalls(
        *("<tool_call>", "</tool_call>", "<parameter=", (">",), ("\n</parameter>", "</parameter>"), FUNCTION),
        has_line_end=True,
        takes_python=True,
    ),
}


def read(reader: Reader, calls: AnswerCalls, written: MarkedCalls) -> Reading[None]:
    """Read an answer with any number of calls, and text between them."""
    while (yield from reader.pass_until(written.start)):
        name = yield from _read_name(reader, calls, written)
        if name is None:
            continue
        calls.begin(name)
        if (yield from _stream_arguments(reader, calls, written, calls.schemas[name])):
            yield from reader.drop_blanks_at_end()
        else:
            calls.break_off()


def _read_name(reader: Reader, calls: AnswerCalls, written: MarkedCalls) -> Reading[str | None]:
    """Read the name of a tool, up to its first argument or the call's end; return None if no call begins here."""
    before, after, last = written.function
    yield from reader.skip_blanks()
    if not (yield from reader.take(before)):
        return None
    name = yield from reader.take_run(NAME)
    if name not in calls.schemas or not (yield from reader.take(after)):
        return None
    yield from reader.skip_blanks()
    end, is_call = reader.at, (yield from reader.take_one([written.key, *filter(None, (last, written.end))]))
    reader.at = end
    return name if is_call else None


def _stream_arguments(reader: Reader, calls: AnswerCalls, written: MarkedCalls, schema: Any) -> Reading[bool]:
    """Hand on the arguments of a call as a JSON object; return whether they are complete."""
    before = "{"
    while (yield from reader.take(written.key)):
        key, is_named = (yield from reader.take_run(KEY)), True
        for tag in written.value:
            yield from reader.skip_blanks()
            is_named = is_named and (yield from reader.take(tag))
        if not is_named:
            return False
        if written.has_line_end:
            yield from reader.take("\n")
        head = f"{before}{json.dumps(key, ensure_ascii=False)}: "
        if not (yield from _stream_value(reader, calls, written, head, kinds_of(schema, key))):
            return False
        before = ", "
        yield from reader.skip_blanks()
    last = written.function[2]
    has_last, end = last != "" and (yield from reader.take(last)), reader.at
    yield from reader.skip_blanks()
    if not (yield from reader.take(written.end)):
        reader.at = end
        if not has_last:
            return False
    calls.add("}" if before != "{" else "{}")
    reader.commit()
    return True


def _stream_value(
    reader: Reader, calls: AnswerCalls, written: MarkedCalls, before: str, kinds: frozenset[str]
) -> Reading[bool]:
    """Hand on the value of an argument, after its name; return whether it is complete."""
    if kinds == {"string"}:
        reader.commit()
        calls.add(before)
        return (yield from calls.stream_text(*written.value_ends))
    made = yield from _read_json(reader, written, kinds)
    if made is not None:
        reader.commit()
        calls.add(before + made)
        return True
    text = yield from reader.take_until(*written.value_ends)
    if text is None:
        calls.add(before + _begun(reader.text[reader.at :], written))
        return False
    reader.commit()
    calls.add(f"{before}{json_of(text, kinds, takes_python=written.takes_python)}")
    return True


def _read_json(reader: Reader, written: MarkedCalls, kinds: frozenset[str]) -> Reading[str | None]:
    """Read an object or a list as JSON, whose texts may have any tag, and the tag after it; None: no such value."""
    start = reader.at
    yield from reader.skip_blanks()
    if BY_LETTER.get(reader.text[reader.at : reader.at + 1]) in kinds & {"object", "array"}:
        made = yield from reader.json_value()
        yield from reader.skip_blanks()
        if made is not None and (yield from reader.take_one(written.value_ends)):
            return made
    reader.at = start
    return None


def _begun(text: str, written: MarkedCalls) -> str:
    """Return the JSON of a value that the text's end cuts off, in the value or in the tag after it, as far as it came.

    What neither begins as JSON nor is JSON before the beginning of a tag is a text.
    """
    scanner = JsonScanner()
    size = scanner.push(text, 0)
    rest = text[size:].strip(BLANKS)
    is_json = not scanner.has_failed and any(end.lstrip(BLANKS).startswith(rest) for end in written.value_ends)
    return escaped(text[:size], scanner.raw) if is_json else json.dumps(text, ensure_ascii=False)[:-1]


def json_of(text: str, kinds: frozenset[str], *, takes_python: bool) -> str:
    """Return the JSON of a value that is written between tags.

    Args:
        text: what stands between the tags.
        kinds: types of JSON schemas that the value may have.
        takes_python: whether it may be written as Python writes it.
    """
    for made in (value_text(text), pythonic.value_text(text.strip()) if takes_python else None):
        if made is not None and _kinds_of_value(made) & kinds:
            return made
    return json.dumps(text, ensure_ascii=False)


def _kinds_of_value(text: str) -> frozenset[str]:
    """Return the types of JSON schemas that a JSON value has, except that of a text, which has no quotes here."""
    kind = BY_LETTER.get(text[0])
    if kind is None:
        return frozenset({"number", "integer"} if float(text).is_integer() else {"number"})
    return frozenset({kind} - {"string"})


def kinds_of(schema: Any, name: str) -> frozenset[str]:
    """Return the types that the argument ``name`` may have by the schema of a tool, which nobody has checked."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    part = properties.get(name, others) if isinstance(properties, Mapping) else others
    return _kinds(part, schema, {}, 0) or KINDS


def _kinds(schema: Any, root: Any, by_ref: dict[str, frozenset[str]], levels: int) -> frozenset[str]:
    """Return the types that all keywords of a schema allow.

    Args:
        root: the schema that references point into.
        by_ref: the types of the references that were followed; a reference to itself allows no further one.
        levels: number of schemas around this one.
    """
    if not isinstance(schema, Mapping) or levels > json_schema.MAX_LEVELS:
        return KINDS
    kinds = _kinds_beside(schema)
    if isinstance(ref := schema.get("$ref"), str):
        if ref not in by_ref:
            by_ref[ref] = frozenset()
            by_ref[ref] = _kinds(_part(root, ref), root, by_ref, levels + 1)
        kinds &= by_ref[ref]
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(keyword), list):
            each = [_kinds(part, root, by_ref, levels + 1) for part in parts]
            kinds &= KINDS.intersection(*each) if keyword == "allOf" else frozenset().union(*each)
    return kinds


def _kinds_beside(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows by its type and the values that it lists."""
    types = schema.get("type")
    listed = types if isinstance(types, list) else [types]
    kinds = (
        frozenset(name for name in KINDS if name in (*listed, *(["integer"] if "number" in listed else ()))) or KINDS
    )
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds &= {name for value in values for name, has in json_schema.TYPES.items() if has(value)}
    return kinds


def _part(root: Any, ref: str) -> Any:
    """Return the part of a schema that a reference points to; None: there is none, which says nothing."""
    try:
        return json_schema.at(root, ref)
    except ValueError:
        return None
