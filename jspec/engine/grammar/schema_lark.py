"""Writes a JSON schema as a Lark grammar for llguidance, which enforces or refuses every keyword of JSON Schema.

A schema is rewritten or refused here if llguidance would allow a text that the schema does not. Llguidance reads
patterns in another language than JSON Schema. It compares names of unlisted properties before it resolves escapes, so
it would not take `"\\u0061"` for the property "a". It counts a repeated property twice, rounds large numbers, and
includes some exclusive bounds.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from jspec.engine.grammar import json_schema, schema_regex
from jspec.engine.grammar.expression import NoTable, Part, choice, literal, one_of, repeated, sequence

# At most one blank between JSON tokens, as in `jspec.engine.grammar.schema_regex`.
OPTIONS = {"whitespace_pattern": "[ ]?", "lenient": False, "coerce_one_of": False}
MAX_NUMBER = 2**53
MAX_OPEN_BOUND, LITTLE = 2**20, 1e-9  # doubles distinguish a bound from bound + LITTLE
NUMERIC = {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
CONTROLS = [(0, 0x1F)]
ANY = repeated(one_of(CONTROLS, is_negated=True), 0, None)


def lark_of(schema: Any) -> str:
    """Return a checked schema (`jspec.engine.grammar.json_schema.check`) as a Lark grammar.

    The grammar's texts have their properties in the schema's order, at most one blank between two JSON tokens, and no
    control characters in names that the schema does not list.

    Raises:
        ValueError: a keyword cannot be enforced; the message names the keyword and its location.
    """
    return f"start: %json {json.dumps({**_rewritten({} if schema is True else schema, '#'), 'x-guidance': OPTIONS})}"


def _rewritten(schema: Any, path: str) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    changed = json_schema.with_subschemas(schema, _rewritten, path)
    by_format = schema_regex.FORMATS.get(schema.get("format", ""))
    if by_format is not None and "pattern" not in schema:
        del changed["format"]
        changed["pattern"] = f"^(?:{by_format})$"
    if "pattern" in schema:
        changed["pattern"] = _pattern(schema["pattern"], path)
    _check_count(schema, path)
    _check_numbers(schema, path)
    changed |= _open_bounds(schema, path)
    if "patternProperties" in schema:
        changed["patternProperties"] = _by_pattern(schema, changed["patternProperties"], path)
    elif ("properties" in schema or "additionalProperties" in schema) and schema.get(
        "additionalProperties"
    ) is not False:
        others = changed.get("additionalProperties", True)
        changed["patternProperties"] = {_others([] if others is True else schema.get("properties", ()), path): others}
        changed["additionalProperties"] = False
    return changed


def _pattern(given: str, path: str) -> str:
    return f"^(?:{schema_regex.read_pattern(given, path).part.text})$"


def _by_pattern(schema: Mapping[str, Any], parts: Mapping[str, Any], path: str) -> dict[str, Any]:
    if schema.get("additionalProperties") is not False:
        raise ValueError(
            f"json_schema: 'patternProperties' at {path:.100}: expected 'additionalProperties': false beside it; add it"
        )
    found = {_pattern(given, path): part for given, part in parts.items()}
    if len(found) < len(parts):
        raise ValueError(f"json_schema: 'patternProperties' at {path:.100}: expected patterns that differ")
    return found


def _check_count(schema: Mapping[str, Any], path: str) -> None:
    """Refuse `minProperties` if a text could satisfy it by repeating a property."""
    least, has_others = schema.get("minProperties", 0), schema.get("additionalProperties") is not False
    if least > max(1, len(schema.get("required", ()))) and (has_others or "patternProperties" in schema):
        raise ValueError(
            f"json_schema: 'minProperties' at {path:.100}: expected at most 1, or as many as are 'required', got "
            f"{least}; a property might be repeated. List the properties and set 'additionalProperties': false"
        )


def _check_numbers(schema: Mapping[str, Any], path: str) -> None:
    """Refuse numbers that llguidance rounds."""
    for name in schema.keys() & NUMERIC:
        for value in json_schema.inner_values(schema[name]):
            if isinstance(value, (int, float)) and abs(value) > MAX_NUMBER:
                raise ValueError(
                    f"json_schema: {name!r} at {path:.100}: expected numbers of at most 2**53 beside what no table "
                    f"follows, got {value!r:.40}"
                )


def _open_bounds(schema: Mapping[str, Any], path: str) -> dict[str, float]:
    """Return whole exclusive bounds moved inwards a little, because llguidance includes some of them.

    For example, it allows 0 where the number must be above 0 and below 0.5.
    """
    moved: dict[str, float] = {}
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = schema.get(name)
        if bound is None or bound != int(bound):
            continue
        is_whole = schema.get("type") == "integer"
        if not is_whole and abs(bound) > MAX_OPEN_BOUND:
            raise ValueError(
                f"json_schema: {name!r} at {path:.100}: expected a bound between -{MAX_OPEN_BOUND} and "
                f"{MAX_OPEN_BOUND} for numbers, got {bound}; take 'minimum' or 'maximum', or the type 'integer'"
            )
        moved[name] = bound + sign * (0.5 if is_whole else LITTLE)
    return moved


def _others(names: Collection[str], path: str) -> str:
    """Return a pattern for all names without control characters, except the given names."""
    try:
        return f"^{choice([_except({name for name in names if name.isprintable() or min(name) >= ' '})]).text}$"
    except (NoTable, RecursionError):
        raise ValueError(f"json_schema: 'properties' at {path:.100}: expected fewer or shorter names") from None


def _except(names: set[str]) -> Part:
    by_letter: dict[str, set[str]] = {}
    for name in names - {""}:
        by_letter.setdefault(name[0], set()).add(name[1:])
    letters = [(ord(letter), ord(letter)) for letter in by_letter]
    parts = [sequence(one_of([*CONTROLS, *letters], is_negated=True), ANY)]
    parts += [sequence(literal(letter), _except(rests)) for letter, rests in by_letter.items()]
    return choice(parts if "" in names else [*parts, Part("", 0)])
