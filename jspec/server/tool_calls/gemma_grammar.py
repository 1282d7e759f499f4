"""Writes the rules of Gemma 4's calls (`jspec.server.tool_calls.gemma`) whose arguments follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.engine.grammar import json_schema
from jspec.server.tool_calls import gemma, schema_rules
from jspec.server.tool_calls.schema_rules import SchemaMember
from jspec.server.tool_calls.tools import ToolChoice

COMMA = 'SP "," SP'


def rules(choice: ToolChoice, marker: Callable[[str], str]) -> list[str]:
    """Return rules of which "call" is a call after its first marker, as `jspec.server.tool_calls.markup_grammar` does.

    Raises:
        ValueError: the schema of a strict tool has something that these rules cannot follow.
    """
    quote = marker(gemma.QUOTE)
    text = '[lazy]: /(?s:.*)<\\|"\\|>/' if not quote.startswith("<[") else f": FREE? {quote}"
    lines = [
        f"text: {quote} text_end",
        f"text_end{text}",
        "FREE: /(?s:.+)/",
        'any: text | SCALAR | object | "[" SP (any (SP "," SP any)*)? SP "]"',
        'object: "{" SP (member (SP "," SP member)*)? SP "}"',
        'member: (text | KEY) SP ":" SP any',
        r"KEY: /[^:,{}\[\]\"<\n]+/",
        r"SCALAR: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?|true|false|null|None/",
    ]
    calls = []
    for i, name in enumerate(choice.schemas):
        arguments = "object"
        if name in choice.strict:
            values = GemmaValues(f"tool{i}", quote, lines)
            arguments = choice.made(name, values.root)
        calls.append(f"{json.dumps(f'call:{name}')} {arguments} SP {marker(gemma.END)}")
    return [f"call: {' | '.join(calls)}", *lines]


class GemmaValues:
    """The rules of the values of one tool's arguments.

    Args:
        prefix: beginning of the rules' names.
        quote: the marker around texts.
        lines: the grammar's rules, to which it adds.
    """

    def __init__(self, prefix: str, quote: str, lines: list[str]) -> None:
        self._prefix, self._quote, self._lines = prefix, quote, lines
        self._by_ref: dict[str, str] = {}
        self._root: Any = None

    def root(self, schema: Any) -> str:
        """Return what the arguments of a tool are."""
        self._root = schema_rules.checked(schema)
        return self._value(self._root, "#")

    def _rule(self, content: str) -> str:
        name = f"{self._prefix}_{len(self._lines)}"
        self._lines.append(f"{name}: {content}")
        return name

    def _value(self, schema: Any, path: str) -> str:
        if not isinstance(schema, Mapping) or not schema.keys() - schema_rules.IGNORED:
            return "any"
        if "$ref" in schema:
            schema_rules.check_keywords(schema, {"$ref"}, path, "a reference")
            return self._reference(schema["$ref"], path)
        if "anyOf" in schema:
            schema_rules.check_keywords(schema, {"anyOf"}, path, "a choice")
            parts = [self._value(part, f"{path}/anyOf/{number}") for number, part in enumerate(schema["anyOf"])]
            return f"({' | '.join(parts)})"
        values = schema_rules.values_of(schema, path)
        if values is not None:
            schema_rules.check_keywords(schema, {"type", "enum", "const"}, path, "a list of values")
            return f"({' | '.join(self._literal(value, path) for value in values)})"
        return f"({' | '.join(self._typed(name, schema, path) for name in schema_rules.types_of(schema))})"

    def _reference(self, ref: str, path: str) -> str:
        if ref not in self._by_ref:
            self._by_ref[ref] = f"{self._prefix}_ref{len(self._by_ref)}"
            self._lines.append(f"{self._by_ref[ref]}: {self._value(json_schema.at(self._root, ref, path), ref)}")
        return self._by_ref[ref]

    def _literal(self, value: Any, path: str) -> str:
        if isinstance(value, (list, Mapping)):
            schema_rules.refuse("enum", path, "objects and lists")
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value, ensure_ascii=False)} {self._quote}"
        return json.dumps(json.dumps(value))

    def _typed(self, name: str, schema: Mapping[str, Any], path: str) -> str:
        """Return the values of one type."""
        if name == "string":
            schema_rules.check_keywords(schema, {"type"}, path, "what may be a text")
            return "text"
        if name == "array":
            schema_rules.check_keywords(schema, {"type", "items"}, path, "what may be a list")
            item = self._value(schema.get("items", True), f"{path}/items")
            return self._rule(f'"[" SP ({item} ({COMMA} {item})*)? SP "]"')
        if name == "object":
            if not schema.keys() - schema_rules.IGNORED - {"type"}:
                return "object"
            return self._rule(f'"{{" SP {self._members(schema_rules.members_of(schema, path))} SP "}}"')
        rule = f"{self._prefix}_{len(self._lines)}"
        self._lines.append(schema_rules.json_rule(rule, {**schema, "type": name}))
        return rule

    def _members(self, members: Sequence[SchemaMember]) -> str:
        """Return the properties of an object in their order, with commas between those that are there."""
        parts = [
            self._rule(f'{self._key(member.name)} SP ":" SP {self._value(member.schema, member.path)}')
            for member in members
        ]
        tails = [
            f"{COMMA} {part}" if member.is_required else f"({COMMA} {part})?"
            for part, member in zip(parts, members, strict=True)
        ]
        first = next((number for number, member in enumerate(members) if member.is_required), None)
        if first is not None:
            return " ".join([*(f"({part} {COMMA})?" for part in parts[:first]), parts[first], *tails[first + 1 :]])
        starts = [" ".join([part, *tails[number + 1 :]]) for number, part in enumerate(parts)]
        return f"({' | '.join(starts)})?" if starts else ""

    def _key(self, name: str) -> str:
        plain = json.dumps(name, ensure_ascii=False)
        is_bare = name != "" and name == name.strip() and gemma.KEY.fullmatch(name)
        return plain if is_bare else f"{self._quote} {plain} {self._quote}"
