"""Writes a JSON schema as a regular expression, for a table on the device, if every match is an instance.

The expression does not match all instances. Properties are in the schema's order, and an object with `properties` has
no other properties. Tuples of `prefixItems` are complete, values of `enum` and `const` have one spelling, and at most
one blank stands between two JSON tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jspec.engine.grammar import json_schema, pattern
from jspec.engine.grammar.expression import NoTable, RegexPart, choice, literal, one_of, repeated, sequence

IGNORED = json_schema.ANNOTATIONS | {"$defs", "definitions", "$schema", "$id", "id"}
FOLLOWED = {  # keywords that the expression of each type enforces
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "object": {"properties", "required", "additionalProperties"},
}
MAX_REFS = 100  # most levels of references inside references

BLANK, COMMA, COLON = RegexPart(" ?", 1), RegexPart(" ?, ?", 3), RegexPart(" ?: ?", 3)
QUOTE = literal('"')
CHARACTER = choice([one_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)], is_negated=True), RegexPart(r'\\["\\/bfnrt]', 2)])
INTEGER = RegexPart("-?(?:0|[1-9][0-9]*)", 3)
NUMBER = RegexPart(
    r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?", 8
)  # an exponent of two digits fits a double
SCALARS = {
    "boolean": RegexPart("(?:true|false)", 9),
    "null": RegexPart("null", 4),
    "integer": INTEGER,
    "number": NUMBER,
}
LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP}-02-29)"
)
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{CLOCK})"
HEX = "[0-9a-fA-F]"
FORMATS = {  # dates and times of RFC 3339 without leap seconds and the year 0; uuid of RFC 4122
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}",
}


def regex_of(schema: Any) -> str:
    """Return a checked schema (`jspec.engine.grammar.json_schema.check`) as a regular expression.

    Raises:
        NoTable: the schema cannot be written as an expression of bounded size.
        ValueError: the schema is wrong; the message names the keyword and its location.
    """
    return _Translator(schema).part(schema, "#", ()).text


class _Translator:
    """Translates the parts of one schema.

    Args:
        root: the whole schema, which references point into.
    """

    def __init__(self, root: Any) -> None:
        self._root = root

    def part(self, schema: Any, path: str, refs: tuple[str, ...]) -> RegexPart:
        """Return the expression for a schema.

        Args:
            path: location of the schema, for error messages.
            refs: `$ref` texts that were followed to reach the schema.
        """
        if not isinstance(schema, Mapping):
            raise NoTable
        keys = schema.keys() - IGNORED
        if "$ref" in keys:
            self._check_alone(keys, "$ref")
            ref = schema["$ref"]
            if ref in refs or ref == "#" or len(refs) == MAX_REFS:
                raise NoTable
            return self.part(json_schema.at(self._root, ref), ref, (*refs, ref))
        for name in ("anyOf", "allOf", "oneOf"):
            if name in keys:
                self._check_alone(keys, name)
                parts = [self.part(inner, f"{path}/{name}/{i}", refs) for i, inner in enumerate(schema[name])]
                if len(parts) > 1 and name != "anyOf":
                    raise NoTable
                return choice(parts)
        if keys & {"enum", "const"}:
            return _values(schema, keys, path)
        return self._typed(schema, keys, path, refs)

    @staticmethod
    def _check_alone(keys: set[str], name: str) -> None:
        if keys != {name}:
            raise NoTable

    def _typed(self, schema: Mapping[str, Any], keys: set[str], path: str, refs: tuple[str, ...]) -> RegexPart:
        assumed = "object" if "properties" in keys else "array" if "prefixItems" in keys else ()
        declared = schema.get("type", assumed)
        types = [declared] if isinstance(declared, str) else list(declared)
        if not types or keys - {"type"} - set[str]().union(*(FOLLOWED.get(name, ()) for name in types)):
            raise NoTable
        make = {"string": self._string, "array": self._array, "object": self._object}
        return choice([SCALARS[name] if name in SCALARS else make[name](schema, path, refs) for name in types])

    def _string(self, schema: Mapping[str, Any], path: str, refs: tuple[str, ...]) -> RegexPart:
        bounds = schema.keys() & {"minLength", "maxLength"}
        if len(schema.keys() & {"pattern", "format"}) + bool(bounds) > 1:
            raise NoTable
        if "pattern" in schema:
            read = read_pattern(schema["pattern"], path)
            if not read.is_plain:
                raise NoTable
            inner = read.part
        elif "format" in schema:
            if schema["format"] not in FORMATS:
                raise NoTable
            inner = RegexPart(FORMATS[schema["format"]], 100)
        else:
            inner = repeated(CHARACTER, int(schema.get("minLength", 0)), _most(schema, "maxLength"))
        return sequence(QUOTE, choice([inner]), QUOTE)

    def _array(self, schema: Mapping[str, Any], path: str, refs: tuple[str, ...]) -> RegexPart:
        least, most = int(schema.get("minItems", 0)), _most(schema, "maxItems")
        if schema.get("uniqueItems"):
            raise NoTable
        if "prefixItems" in schema:
            first, *rest = [
                self.part(inner, f"{path}/prefixItems/{i}", refs) for i, inner in enumerate(schema["prefixItems"])
            ]
            if not least <= 1 + len(rest) <= (most or 1 + len(rest)) or most == 0:
                raise NoTable
            return _enclosed("[", sequence(first, *(sequence(COMMA, item) for item in rest)), "]")
        if most == 0:
            return _enclosed("[", None, "]")
        if "items" not in schema:
            raise NoTable
        return _listed("[", self.part(schema["items"], f"{path}/items", refs), least, most, "]")

    def _object(self, schema: Mapping[str, Any], path: str, refs: tuple[str, ...]) -> RegexPart:
        others = schema.get("additionalProperties", True)
        if "properties" not in schema:
            if "required" in schema or others is True:
                raise NoTable
            if others is False:
                return _enclosed("{", None, "}")
            member = sequence(QUOTE, repeated(CHARACTER, 0, None), QUOTE, COLON)
            return _listed("{", sequence(member, self.part(others, f"{path}/additionalProperties", refs)), 0, None, "}")
        if not isinstance(others, bool) or not {*schema.get("required", ())} <= schema["properties"].keys():
            raise NoTable
        required = {*schema.get("required", ())}
        members, first = list[tuple[RegexPart, bool]](), None
        for name, value in schema["properties"].items():
            key = literal(json.dumps(name, ensure_ascii=False))
            members.append(
                (sequence(key, COLON, self.part(value, f"{path}/properties/{name}", refs)), name in required)
            )
            first = len(members) - 1 if first is None and name in required else first
        if first is not None:
            before = [repeated(sequence(member, COMMA), 0, 1) for member, _ in members[:first]]
            return _enclosed("{", sequence(*before, members[first][0], _following(members[first + 1 :])), "}")
        if not members:
            return _enclosed("{", None, "}")
        return _enclosed("{", repeated(_some([member for member, _ in members]), 0, 1), "}")


def read_pattern(text: str, path: str) -> pattern.Pattern:
    """Return the translation of a schema's `pattern`.

    Raises:
        ValueError: the pattern cannot be translated; the message names its location.
    """
    try:
        return pattern.read(text)
    except pattern.Unsupported as error:
        raise ValueError(f"json_schema: 'pattern' at {path:.100}: {error}") from None


def _most(schema: Mapping[str, Any], name: str) -> int | None:
    return int(schema[name]) if name in schema else None


def _values(schema: Mapping[str, Any], keys: set[str], path: str) -> RegexPart:
    """Return the expression for the values of `enum` or `const` that have the type `type`."""
    if not (keys <= {"enum", "type"} or keys <= {"const", "type"}):
        raise NoTable
    declared = schema.get("type", [*json_schema.TYPES])
    types = [declared] if isinstance(declared, str) else declared
    values = schema["enum"] if "enum" in keys else [schema["const"]]
    matching = [value for value in values if any(json_schema.TYPES[name](value) for name in types)]
    if not matching:
        key = "enum" if "enum" in keys else "const"
        raise ValueError(
            f"json_schema: {key!r} at {path:.100}: expected a value of type {declared!r}, got {json.dumps(values):.100}"
        )
    return choice([_value(value) for value in matching])


def _value(value: Any) -> RegexPart:
    if isinstance(value, Mapping):
        members = [sequence(_value(name), COLON, _value(inner)) for name, inner in value.items()]
        return _enclosed("{", _joined(members), "}")
    if isinstance(value, list):
        return _enclosed("[", _joined([_value(inner) for inner in value]), "]")
    return literal(json.dumps(value, ensure_ascii=False))


def _joined(parts: list[RegexPart]) -> RegexPart | None:
    return sequence(parts[0], *(sequence(COMMA, part) for part in parts[1:])) if parts else None


def _enclosed(start: str, inner: RegexPart | None, end: str) -> RegexPart:
    if inner is None:
        return sequence(literal(start), BLANK, literal(end))
    return sequence(literal(start), BLANK, inner, BLANK, literal(end))


def _listed(start: str, item: RegexPart, least: int, most: int | None, end: str) -> RegexPart:
    """Return the expression for a list of ``least`` to ``most`` items with commas between them."""
    inner = sequence(item, repeated(sequence(COMMA, item), max(least - 1, 0), None if most is None else most - 1))
    return _enclosed(start, inner if least else repeated(inner, 0, 1), end)


def _following(members: list[tuple[RegexPart, bool]]) -> RegexPart:
    """Return the expression for properties after an earlier one; each is (expression, whether it is required)."""
    after = [(sequence(COMMA, member), is_required) for member, is_required in members]
    return sequence(*(member if is_required else repeated(member, 0, 1) for member, is_required in after))


def _some(members: list[RegexPart]) -> RegexPart:
    """Return the expression for at least one of n optional properties in their order; its size grows as n log n."""
    if len(members) == 1:
        return members[0]
    left, right = members[: len(members) // 2], members[len(members) // 2 :]
    return choice([sequence(_some(left), _following([(member, False) for member in right])), _some(right)])
