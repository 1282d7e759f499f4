"""Writes the rules of calls with tags (`jspec.server.tool_calls.markup`) whose arguments follow their schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from jspec.core.shorten import short
from jspec.engine.grammar import json_schema
from jspec.server.tool_calls import schema_rules
from jspec.server.tool_calls.markup import KEY, MarkedCalls, json_of, kinds_of
from jspec.server.tool_calls.schema_rules import SchemaMember
from jspec.server.tool_calls.tools import ToolChoice

LETTERS = {"KEY": r"[^<>\n]", "FREE": "(?s:.)"}  # characters of names of arguments, as in `markup.KEY`, and of texts


def rules(choice: ToolChoice, marker: Callable[[str], str], written: MarkedCalls) -> list[str]:
    """Return rules of which "call" is a call after its first tag.

    Args:
        choice: what the answer may call.
        marker: returns a tag as its token, or as text.
        written: how the model writes calls.

    Raises:
        ValueError: the schema of a strict tool has something that these rules cannot follow.
    """
    return MarkupRules(choice, marker, written).lines()


class MarkupRules:
    """The rules of one request's calls; see `rules`."""

    def __init__(self, choice: ToolChoice, marker: Callable[[str], str], written: MarkedCalls) -> None:
        self._choice, self._marker, self._written = choice, marker, written
        line_end = "LINE_END? " if written.has_line_end else ""
        self._end = f"{line_end}{marker(written.value_ends[-1])}"
        self._tags = "".join(f" SP {marker(tag)}" for tag in written.value[1:]) + f" {line_end}"
        self._lines = [
            f"argument: {marker(written.key)} key{self._tags} value",
            self._up_to("key", "KEY", written.value[0]),
            self._up_to("value", "FREE", written.value_ends[-1]),
            *(f"{name}: /{letters}+/" for name, letters in LETTERS.items()),
            "LINE_END: /\\n/",
        ]

    def lines(self) -> list[str]:
        before, after, last = self._written.function
        end = " SP ".join(self._marker(text) for text in (last, self._written.end) if text)
        calls = []
        for i, name in enumerate(self._choice.schemas):
            arguments = "(argument SP)*"
            if name in self._choice.strict:
                arguments = self._choice.made(name, partial(self._members, f"tool{i}"))
            calls.append(f"{json.dumps(before + name + after)} SP {arguments} {end}")
        return [f"call: {' | '.join(calls)}", *self._lines]

    def _up_to(self, rule: str, letters: str, tag: str) -> str:
        """Return the rule of a text of some of `LETTERS` and the tag after it."""
        written = self._marker(tag)
        if written.startswith("<["):
            return f"{rule}: {letters}? {written}"
        pattern = re.escape(tag).replace("/", r"\/")
        return f"{rule}[lazy]: /{LETTERS[letters]}*{pattern}/"

    def _members(self, rule: str, schema: Any) -> str:
        """Return the arguments of a tool in the schema's order, each with what follows it."""
        root = schema_rules.checked(schema)
        members = schema_rules.members_of(root, "#")
        for j, member in enumerate(members):
            if not KEY.fullmatch(member.name):
                raise ValueError(
                    f"json_schema: 'properties' at #: expected names without <, > and line ends, got "
                    f"{short(member.name)}, because this model writes them between tags; rename it, or set tool_choice "
                    'to "required" or a tool'
                )
            name = f"{json.dumps(member.name, ensure_ascii=False)} {self._marker(self._written.value[0])}{self._tags}"
            self._lines.append(
                f"{rule}_{j}: {self._marker(self._written.key)} {name} {self._value(f'{rule}_{j}', member, root)} SP"
            )
        return " ".join(f"{rule}_{j}{'' if member.is_required else '?'}" for j, member in enumerate(members))

    def _value(self, rule: str, member: SchemaMember, root: Any) -> str:
        """Return a value and the tag after it."""
        leaves = [*_leaves(member.schema, root, member.path)]
        if not any("string" in schema_rules.types_of(leaf) for leaf, _ in leaves):
            self._lines.append(schema_rules.json_rule(f"{rule}_json", member.schema, root))
            return f"SP {rule}_json SP {self._end}"
        listed = [schema_rules.values_of(leaf, path) for leaf, path in leaves]
        texts = ["string" in schema_rules.types_of(leaf) for leaf, _ in leaves]
        is_free = any(is_text and values is None for values, is_text in zip(listed, texts, strict=True))
        for (leaf, path), values in zip(leaves, listed, strict=True):
            if is_free or values is not None:
                schema_rules.check_keywords(leaf, {"type", "enum", "const"}, path, "what may be a text")
        if is_free:
            return "value"
        written = []
        kinds = kinds_of(root, member.name)
        for number, ((leaf, path), values) in enumerate(zip(leaves, listed, strict=True)):
            if values is None:
                written.append(f"{rule}_{number}_json")
                self._lines.append(schema_rules.json_rule(written[-1], leaf, root))
                continue
            plain = [value if isinstance(value, str) else json.dumps(value) for value in values]
            if not all(self._is_read_as(text, kinds, value) for text, value in zip(plain, values, strict=True)):
                schema_rules.refuse("enum" if "enum" in leaf else "const", path, "values that would be read as others")
            written += [json.dumps(text, ensure_ascii=False) for text in plain]
        return f"({' | '.join(written)}) {self._end}"

    def _is_read_as(self, text: str, kinds: frozenset[str], value: Any) -> bool:
        """Return whether a text between the tags of an argument of some types is read as a value."""
        ends = self._written.value_ends
        if ends[-1] in text or (self._written.has_line_end and text != text.strip("\n")):
            return False
        if kinds == {"string"}:
            return text == value
        return json.loads(json_of(text, kinds, takes_python=self._written.takes_python)) == value


def _leaves(schema: Any, root: Any, path: str, levels: int = 0) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the schemas of which a value must satisfy one, and their locations, without `anyOf` and `$ref`."""
    schema = schema if isinstance(schema, Mapping) else {}
    if levels > json_schema.MAX_LEVELS:
        schema_rules.refuse("$ref", path, "a schema that refers to itself")
    if "$ref" in schema:
        schema_rules.check_keywords(schema, {"$ref"}, path, "a reference")
        yield from _leaves(json_schema.at(root, schema["$ref"], path), root, schema["$ref"], levels + 1)
    elif "anyOf" in schema:
        schema_rules.check_keywords(schema, {"anyOf"}, path, "a choice")
        for number, part in enumerate(schema["anyOf"]):
            yield from _leaves(part, root, f"{path}/anyOf/{number}", levels + 1)
    else:
        yield schema, path
