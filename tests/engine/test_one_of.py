"""Test that `oneOf` becomes `anyOf` exactly where no value satisfies two of its schemas, with jsonschema as oracle."""

from __future__ import annotations

import json
from itertools import product
from typing import Annotated, Any, Literal

import pytest

from jspec.engine.grammar.cfg_matcher import LarkGrammar
from jspec.engine.grammar.disjoint import with_any_of
from jspec.engine.grammar.token_table import Grammar
from tests.support.byte_grammars import accepts, compiled

pytestmark = pytest.mark.once


def tagged(value: Any, **more: Any) -> dict[str, Any]:
    properties = {"kind": value if isinstance(value, dict) else {"const": value}, **more}
    return {"type": "object", "properties": properties, "required": ["kind"]}


NAMES = {"$defs": {"cat": tagged("cat"), "kinds": {"enum": ["dog", "cow"]}, "own": {"$ref": "#/$defs/own"}}}
DISJOINT: list[list[Any]] = [
    [tagged("cat"), tagged("dog", age={"type": "integer"})],
    [{"$ref": "#/$defs/cat"}, tagged({"$ref": "#/$defs/kinds"})],
    [tagged("cat"), {"oneOf": [tagged("dog"), tagged("cow")]}],
    [{"type": "integer"}, {"type": ["string", "null"]}, {"type": "object"}],
    [{"const": "a"}, {"enum": ["b", "c"]}, {"type": "boolean"}],
    [tagged("cat"), tagged("dog"), {"type": "array"}],
    [{"const": 1}, {"enum": [1.5, "a"]}, {"const": True}],
    [{"const": [1, {}]}, {"const": [2]}, {"const": {"kind": "dog"}}],
    [tagged({"type": "string"}), tagged({"type": "integer"}, age=True)],
]
OVERLAPPING: list[list[Any]] = [
    [{"type": "integer"}, {"type": "number"}],
    [tagged("cat"), tagged({"enum": ["dog", "cat"]})],
    [tagged("cat"), {**tagged("dog"), "required": []}],  # {} is not tagged
    [{key: value for key, value in tagged(tag).items() if key != "type"} for tag in ("cat", "dog")],  # 5 satisfies both
    [tagged("cat"), tagged("cat", age={"type": "integer"})],
    [{"const": 1}, {"const": 1.0}],
    [{"const": 1}, {"enum": ["a", 1]}],
    [{"const": {"a": 1, "b": [2]}}, {"const": {"b": [2.0], "a": 1.0}}],
    [tagged({"type": "integer"}), tagged({"type": ["number", "null"]})],
    [tagged({"$ref": "#/$defs/own"}), tagged("cat")],
    [{"type": "string"}, {"const": "a"}],
    [tagged("cat"), True],
    [{"$ref": "#/$defs/own"}, {"type": "null"}],
]
VALUES: list[Any] = [
    *(None, True, 1, 1.5, "a", "b", "cat", [], {}, 5),
    *({"kind": kind, **more} for kind, more in product(["cat", "dog", "cow", 1], [{}, {"age": 3}, {"age": "x"}])),
]


@pytest.mark.parametrize("parts", DISJOINT, ids=json.dumps)
def test_one_of_disjoint_schemas_becomes_any_of_with_the_same_values(parts: list[Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"oneOf": parts, **NAMES}
    changed = with_any_of(schema)
    assert "oneOf" not in json.dumps(changed)
    given, written = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(changed)
    assert [given.is_valid(value) for value in VALUES] == [written.is_valid(value) for value in VALUES]
    assert any(map(given.is_valid, VALUES)) and not all(map(given.is_valid, VALUES))


@pytest.mark.parametrize("parts", OVERLAPPING, ids=json.dumps)
def test_one_of_schemas_that_may_overlap_stays_and_is_refused(parts: list[Any]) -> None:
    schema = {"oneOf": parts, **NAMES}
    assert "oneOf" in with_any_of(schema)
    with pytest.raises(ValueError, match=r"json_schema: 'oneOf' at #: expected schemas that exclude one another"):
        compiled(schema)


def test_one_of_into_which_a_reference_points_stays() -> None:
    schema = {"oneOf": [{"const": "a"}, {"const": "b"}], "properties": {"x": {"$ref": "#/oneO%66/1"}}}
    assert with_any_of(schema) == schema


def test_one_of_schemas_with_many_references_is_compared_soon() -> None:
    """Each name refers twice to the next or to itself: many paths, and a chain too deep for a recursion."""
    names: dict[str, Any] = {"900": {"type": "null"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}] * 2}}
    for i in range(900):
        following = {"$ref": f"#/$defs/{i + 1}"}
        names[str(i)] = {"anyOf": [following, following], **tagged(following)}
    schema = {"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/self"}, tagged("cat")], "$defs": names}
    assert "oneOf" in with_any_of(schema)


@pytest.mark.parametrize("has_bounds", [False, True], ids=["table", "parser"])
def test_discriminated_union_of_pydantic_is_followed(has_bounds: bool) -> None:
    pydantic = pytest.importorskip("pydantic")
    bounds = {"ge": 1, "le": 9} if has_bounds else {}
    cat = pydantic.create_model("Cat", kind=(Literal["cat"], ...), lives=(int, pydantic.Field(**bounds)))
    dog = pydantic.create_model("Dog", kind=(Literal["dog", "wolf"], ...), name=(str, ...))
    pet = pydantic.create_model("Pet", pet=(Annotated[cat | dog, pydantic.Field(discriminator="kind")], ...))
    schema = pet.model_json_schema()
    assert "oneOf" in schema["properties"]["pet"]
    grammar = compiled(pet)
    assert isinstance(grammar, LarkGrammar if has_bounds else Grammar)
    for text in (
        *('{"pet":{"kind":"cat","lives":9}}', '{"pet":{"kind":"wolf","name":"x"}}'),
        *('{"pet":{"kind":"cat","name":"x"}}', '{"pet":{"kind":"cat","lives":0}}', '{"pet":{"lives":3}}'),
    ):
        try:
            pet.model_validate_json(text)
            is_valid = True
        except pydantic.ValidationError:
            is_valid = False
        assert accepts(grammar, text) == is_valid, text
