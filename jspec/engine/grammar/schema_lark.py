"""Writes a JSON schema as a Lark grammar for llguidance, which enforces or refuses every keyword of JSON Schema.

A schema is rewritten or refused here if llguidance would allow a text that the schema does not. Llguidance reads
patterns in another language than JSON Schema. It compares names of unlisted properties before it resolves escapes, so
it would not take `"\\u0061"` for the property "a". It counts a repeated property twice, rounds large numbers, and
includes some exclusive bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from jspec.engine.grammar import json_schema, schema_regex
from jspec.engine.grammar.expression import NoTable, RegexPart, choice, literal, one_of, repeated, sequence

# At most one blank between JSON tokens, as in `jspec.engine.grammar.schema_regex`.
OPTIONS = {"whitespace_pattern": "[ ]?", "lenient": False, "coerce_one_of": False}
MAX_NUMBER = 2**53
MAX_OPEN_BOUND, LITTLE = 2**20, 1e-9  # doubles distinguish a bound from bound + LITTLE
NUMERIC = {"enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
UNENFORCED = frozenset(  # keywords that llguidance does not follow
    [
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "dependentSchemas", "dependentRequired", "dependencies"),
    ]
)
FORMATS = {*schema_regex.FORMATS, "email", "hostname", "ipv4", "ipv6", "uri", "duration", "unknown"}
CONTROLS = [(0, 0x1F)]
ANY = repeated(one_of(CONTROLS, is_negated=True), 0, None)


def lark_of(schema: Any, rule: str = "start") -> str:
    """Return a checked schema (`jspec.engine.grammar.json_schema.check`) as a rule of a Lark grammar.

    The grammar's texts have their properties in the schema's order, at most one blank between two JSON tokens, and no
    control characters in names that the schema does not list.

    Raises:
        ValueError: a keyword cannot be enforced; the message names the keyword and its location.
    """
    _check_keywords(schema)
    return f"{rule}: %json {json.dumps({**_rewritten({} if schema is True else schema, '#'), 'x-guidance': OPTIONS})}"


def _check_keywords(root: Any) -> None:
    """Refuse keywords and values that llguidance does not follow, because its errors do not say where they stand."""
    waiting, seen = [("#", root)], set[str]()
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, Mapping):
            continue
        keyword = next((keyword for keyword in schema if keyword in UNENFORCED), None)
        if keyword is not None:
            raise ValueError(f"json_schema: {keyword!r} at {path:.100}: no grammar enforces this keyword; leave it out")
        if "string" in schema.get("type", "string") and schema.get("format", "date") not in FORMATS:
            raise ValueError(
                f"json_schema: 'format' at {path:.100}: expected one of {', '.join(sorted(FORMATS))}, got "
                f"{schema['format']!r:.100}; leave it out, or give a pattern instead"
            )
        if "$ref" in schema and (ref := schema["$ref"]) not in seen:
            seen.add(ref)
            waiting.append((ref, json_schema.at(root, ref, path)))
        parts = json_schema.subschemas(schema)
        waiting += [(f"{path}/{name}", part) for name, part in parts if not name.startswith(("$defs/", "definitions/"))]


def _rewritten(schema: Any, path: str) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if "oneOf" in schema:  # `disjoint.with_any_of` has replaced the others
        raise ValueError(
            f"json_schema: 'oneOf' at {path:.100}: expected schemas that exclude one another by their types or values, "
            "or by those of a property that all of them require, and no $ref into them; make them differ, or take anyOf"
        )
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
        changed |= _by_pattern(schema, changed, path)
    elif ("properties" in schema or "additionalProperties" in schema) and schema.get(
        "additionalProperties"
    ) is not False:
        others = changed.get("additionalProperties", True)
        listed = [] if others is True else schema.get("properties", ())
        changed |= {"patternProperties": {_others(listed, (), path): others}, "additionalProperties": False}
    return changed


def _pattern(pattern: str, path: str) -> str:
    return f"^(?:{schema_regex.read_pattern(pattern, path).part.text})$"


def _by_pattern(schema: Mapping[str, Any], changed: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The keywords `patternProperties` and `additionalProperties`, where other names get a pattern of their own."""
    prefix, parts = f"json_schema: 'patternProperties' at {path:.100}: ", changed["patternProperties"]
    pattern_properties = {_pattern(pattern, path): part for pattern, part in parts.items()}
    if len(pattern_properties) < len(parts):
        raise ValueError(f"{prefix}expected patterns that differ")
    others = changed.get("additionalProperties", True)
    starts = [_start(pattern) for pattern in parts]
    if others is not False and None in starts:
        raise ValueError(
            f"{prefix}expected 'additionalProperties': false beside it, or patterns of a beginning such as '^x-', got "
            f"{list(parts)[starts.index(None)]!r:.100}; add it"
        )
    if others is not False and "" not in starts:  # "": every name has a pattern
        pattern_properties[_others(schema.get("properties", ()), [start for start in starts if start], path)] = others
    return {"patternProperties": pattern_properties, "additionalProperties": False}


def _start(pattern: str) -> str | None:
    """The text with which exactly the names of a pattern begin; None if a pattern says anything else."""
    if pattern in ("", ".*"):
        return ""
    match = re.fullmatch(r"\^((?:[^\\^$.*+?()\[\]{}|]|\\\W)*)(?:\.\*)?", pattern)
    return None if match is None else re.sub(r"\\(.)", r"\1", match[1], flags=re.DOTALL)


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
    """Return the exclusive bounds that are integers, moved inwards a little, because llguidance includes some of them.

    For example, it allows 0 where the number must be above 0 and below 0.5.
    """
    moved: dict[str, float] = {}
    for name, sign in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
        bound = schema.get(name)
        if bound is None or bound != int(bound):
            continue
        only_integers = schema.get("type") == "integer"
        if not only_integers and abs(bound) > MAX_OPEN_BOUND:
            raise ValueError(
                f"json_schema: {name!r} at {path:.100}: expected a bound between -{MAX_OPEN_BOUND} and "
                f"{MAX_OPEN_BOUND} for numbers, got {bound}; take 'minimum' or 'maximum', or the type 'integer'"
            )
        moved[name] = bound + sign * (0.5 if only_integers else LITTLE)
    return moved


def _others(names: Collection[str], starts: Collection[str], path: str) -> str:
    """Return a pattern for all names without control characters, except the given names."""
    kept = {name for name in names if (name.isprintable() or min(name) >= " ") and not name.startswith((*starts,))}
    try:
        return f"^{choice([_except(kept, {*starts})]).text}$"
    except (NoTable, RecursionError):
        raise ValueError(f"json_schema: 'properties' at {path:.100}: expected fewer or shorter names") from None


def _except(names: set[str], starts: set[str]) -> RegexPart:
    """The expression of the texts that are none of the names and have none of the starts, which are not empty."""
    letters = {text[0] for text in names | starts if text}
    parts = [sequence(one_of([*CONTROLS, *((ord(letter), ord(letter)) for letter in letters)], is_negated=True), ANY)]
    for letter in sorted(letters - starts):
        rests = ({text[1:] for text in texts if text[:1] == letter} for texts in (names, starts))
        parts.append(sequence(literal(letter), _except(*rests)))
    return choice(parts if "" in names else [*parts, RegexPart("", 0)])
