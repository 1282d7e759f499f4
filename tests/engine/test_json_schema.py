"""JSON schemas: texts of an accepted schema pass an independent validator; other schemas raise naming a keyword."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jspec import SamplingParams
from jspec.engine.grammar.token_table import Grammar, TokenTexts, compile_grammar, regex_of_schema

pytest.importorskip("outlines_core")
pytestmark = pytest.mark.once

BYTES = [bytes([byte]) for byte in range(256)]
ACCEPTED: list[dict[str, Any]] = [
    {"type": "string", "minLength": 2, "maxLength": 4, "title": "an annotation"},
    {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "integer"},
    {"type": "number"},
    {"type": ["boolean", "null"]},
    {"enum": ["a", 1, None, {"b": [2]}]},
    {"type": "integer", "const": 7},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}]},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}]},
    {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/short"}, "b": {"enum": [1, 2]}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
        "$defs": {"short": {"type": "string", "maxLength": 3}},
    },
]
INTEGER = {"type": "integer"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "integer", "minimum": 10}, r"'minimum' at # cannot be followed beside 'type', expected nothing"),
    ({"type": "number", "multipleOf": 2}, "'multipleOf' at #"),
    ({"type": "array", "items": INTEGER, "uniqueItems": True}, "'uniqueItems' at #"),
    ({"allOf": [INTEGER, {"type": "string"}]}, "'allOf' at #"),
    ({"oneOf": [INTEGER, {"type": "number"}]}, r"'oneOf' at # .*express it otherwise \(anyOf"),
    ({"not": INTEGER}, "'not' at #"),
    ({"anyOf": [INTEGER], "type": "integer"}, "'type' at # cannot be followed beside 'anyOf'"),
    ({"type": "object", "minProperties": 1}, "'minProperties' at #"),
    ({"properties": {"a": INTEGER}, "patternProperties": {}}, "'patternProperties' at #"),
    ({"properties": {"a": INTEGER}, "required": ["b"]}, r"'required' at # names \['b'\]"),
    ({"properties": {"a": {"type": "integer", "maximum": 3}}}, "'maximum' at #/properties/a"),
    ({"type": "array", "items": {"anyOf": [{"type": "string", "maximum": 3}]}}, "'maximum' at #/items/anyOf/0"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer", "maximum": 3}}}, "'maximum' at #/\\$defs/a"),
    ({"type": "string", "enum": ["a", 1]}, "'enum' at #: expected values of type 'string', got 1"),
    ({"type": "string", "pattern": "^a$", "maxLength": 3}, "'maxLength' at # cannot be followed beside 'pattern'"),
    ({"type": "string", "pattern": "a"}, r"'pattern' at #: expected '\^...\$' around"),
    ({"type": "string", "pattern": "^a.b$"}, r"'pattern' at #: .* got '\^a.b\$'"),
    ({"type": "array", "properties": {"a": INTEGER}}, "'type' at #: 'properties' belongs to another type"),
    ({"type": ["string", "null"], "maxLength": 3}, "'maxLength' at #"),
]


def table(schema: dict[str, Any]) -> Grammar:
    return compile_grammar("json_schema", regex_of_schema(schema), TokenTexts([*BYTES, None], 257), stop_ids=(256,))


def texts(grammar: Grammar, count: int) -> list[bytes]:
    """Random texts of a grammar; a text that may end ends with probability 3/4."""
    rng, found = np.random.default_rng(0), []
    while len(found) < count:
        ids: list[int] = []
        state = 0
        while ids[-1:] != [256]:
            allowed = np.flatnonzero(grammar.next[state, grammar.class_of] >= 0)
            ascii_first = allowed[allowed < 128] if np.any(allowed < 128) else allowed
            ids.append(256 if 256 in allowed and rng.random() < 0.75 else int(rng.choice(ascii_first)))
            state = grammar.follow(ids[-1:], state)
        found.append(bytes(ids[:-1]))
    return found


@pytest.mark.parametrize("schema", ACCEPTED, ids=json.dumps)
def test_regex_of_accepted_schema_matches_only_valid_texts(schema: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    found = {bytes(text) for text in texts(table(schema), 40)}
    for text in found:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert len(found) > 1 or "const" in schema


def test_json_schema_validator_rejects_texts_that_ignore_a_keyword() -> None:
    """Negative control: the texts were generated without the bounds in the schema."""
    jsonschema = pytest.importorskip("jsonschema")
    found = [json.loads(text) for text in texts(table(INTEGER), 20)]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, {"items": INTEGER | {"minimum": 10, "maximum": 12}})


def test_sampling_params_json_schema_is_unchanged_by_later_edits_of_the_dict() -> None:
    schema = {"type": "integer"}
    params = SamplingParams(json_schema=schema)
    schema["type"] = "string"
    assert params == SamplingParams(json_schema='{"type": "integer"}') and hash(params)


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda given: json.dumps(given)[:60])
def test_regex_of_schema_with_an_unsupported_keyword_raises_naming_the_keyword(
    schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"json_schema: {message}"):
        regex_of_schema(schema)
