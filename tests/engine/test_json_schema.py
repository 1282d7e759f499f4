"""Test JSON schemas: the library jsonschema accepts every text that the masks allow, and wrong schemas raise."""

from __future__ import annotations

import datetime
import json
import re
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from jspec import SamplingParams
from jspec.engine.grammar import json_schema, pattern
from jspec.engine.grammar.cfg_matcher import LarkGrammar
from jspec.engine.grammar.closed_schema import closed
from jspec.engine.grammar.json_schema import text_of
from jspec.engine.grammar.token_table import Grammar
from jspec.engine.input.grammar_input import GrammarInput
from tests.support import lettered, random_schemas
from tests.support.byte_grammars import accepts, compiled
from tests.support.random_schemas import BYTES, END

pytest.importorskip("outlines_core")
pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.once,
    pytest.mark.filterwarnings("ignore:Possible:FutureWarning"),
]  # Python warns of patterns such as [a&&b]


def validator(schema: Any) -> Any:
    """Return a validator of jsonschema that requires a time's offset, as RFC 3339 does."""
    jsonschema = pytest.importorskip("jsonschema")
    checker = jsonschema.FormatChecker()
    for name, read in (("time", datetime.time.fromisoformat), ("date-time", datetime.datetime.fromisoformat)):

        def is_right(text: Any, read: Any = read) -> bool:
            return not isinstance(text, str) or read(text).tzinfo is not None

        checker.checkers = {**checker.checkers, name: (is_right, ValueError)}
    return jsonschema.Draft202012Validator(schema, format_checker=checker)


class Rounded(Exception):
    """Error: Python's float rounds a number, so the validator would see another number."""


def read_json(text: bytes) -> Any:
    """Parse JSON, without Python's NaN and Infinity.

    Raises:
        ValueError: the text is not JSON.
        Rounded: a number has more than 15 characters, or an exponent of more than two digits.
    """

    def no_constant(name: str) -> float:
        raise ValueError(f"{name} is no JSON")

    def number(digits: str) -> float:
        if len(digits) > 15 or re.search("[eE][+-]?...", digits):
            raise Rounded
        return float(digits)

    return json.loads(text.decode(), parse_constant=no_constant, parse_float=number)


def is_instance(text: bytes, schema: Any) -> bool | None:
    """Return whether a text is JSON and an instance of a schema; None if the validator cannot tell."""
    try:
        return bool(validator(schema).is_valid(read_json(text)))
    except (Rounded, RecursionError):  # or the schema is only a reference to itself
        return None


def drawn(grammar: Grammar | LarkGrammar, rng: np.random.Generator) -> bytes | None:
    """Draw a random text of a grammar; return None if the text does not end soon."""
    try:
        return random_schemas.text(grammar, rng)
    except ValueError as error:  # a parser may reach a text that it cannot complete; a table never does
        if isinstance(grammar, LarkGrammar) and "no token that the grammar allows was left" in str(error):
            return None
        raise


def check_schema(seed: int) -> tuple[str, int]:
    """Draw texts of one random schema and validate them.

    Returns the class name of the grammar ("refused" if there is none), and the number of texts.
    """
    rng = np.random.default_rng(seed)
    schema = random_schemas.with_definitions(rng)
    try:
        grammar = compiled(schema)
    except ValueError as error:
        if "json_schema" not in str(error) or len(str(error)) > 500:
            raise
        return "refused", 0
    texts = [text for _ in range(5) if (text := drawn(grammar, rng)) is not None]
    wrong = [text for text in texts if is_instance(text, schema) is False]
    assert wrong == [], (seed, schema)
    return type(grammar).__name__, len(texts)


def check_schemas(seeds: range) -> None:
    found = [check_schema(seed) for seed in seeds]
    for kind in ("Grammar", "LarkGrammar"):
        counts = [count for name, count in found if name == kind]
        assert len(counts) > len(seeds) / 5 and sum(counts) > 3 * len(counts), kind


def test_texts_of_random_json_schemas_are_instances() -> None:
    check_schemas(range(150))


@pytest.mark.fuzz
@pytest.mark.parametrize("first", range(1000, 13000, 1000))
def test_texts_of_many_random_json_schemas_are_instances(first: int) -> None:
    check_schemas(range(first, first + 1000))


def test_instance_check_of_a_wrongly_translated_pattern_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the grammar allows a letter that the schema's pattern does not."""
    monkeypatch.setattr(random_schemas, "PATTERNS", ["^[a-c]{2}$"])
    read = pattern.read
    monkeypatch.setattr(pattern, "read", lambda given: read("^[a-d]{2}$"))
    with pytest.raises(AssertionError, match="pattern"):
        check_schemas(range(100_000, 100_300))


INTEGER = {"type": "integer"}
# Schema, texts that must be allowed, texts that must be refused, whether the grammar is a table.
CASES: list[tuple[Any, list[str], list[str], bool]] = [
    ({"type": "string", "maxLength": 2}, ['""', '"é\\n"', '"\\""'], ['"abc"', '"\n"', '"\\u00zz"'], True),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"', '"٢024-01-01"'], True),
    ({"type": "string", "format": "time"}, ['"23:59:59.5Z"', '"00:00:00+01:00"'], ['"24:00:00Z"', '"00:00:00"'], True),
    ({"type": "string", "format": "email"}, ['"a@b.c"'], ['"a"', '"a\x01@b.c"'], False),
    ({"type": "string", "pattern": r"^\d{2}$"}, ['"12"'], ['"٢٢"', '"1"'], True),
    ({"type": "string", "pattern": "b"}, ['"abc"', '"\\"b"'], ['"a"'], False),
    ({"type": "string", "pattern": "^[a&&b]$"}, ['"&"', '"a"'], ['"c"'], True),
    (
        {"const": {"a+b": [1, {"c": None}]}},
        ['{"a+b":[1,{"c":null}]}', '{ "a+b" : [ 1 , { "c" : null } ] }'],
        ['{"ab":1}'],
        True,
    ),
    ({"const": 10**30}, ["1" + "0" * 30], ["1e+30", "1e30"], True),
    ({"enum": ['q"\\\t', 1, None], "type": "string"}, ['"q\\"\\\\\\t"'], ["1", "null"], True),
    ({"type": ["boolean", "null"]}, ["true", "null"], ["1"], True),
    ({"type": ["string", "null"], "maxLength": 1}, ['"a"', "null"], ['"ab"'], True),
    (
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1,2,3]", "[1,]"],
        True,
    ),
    ({"type": "array", "prefixItems": [INTEGER, {"const": "x"}]}, ['[1,"x"]'], ["[1]", '["x",1]'], True),
    ({"type": "array", "maxItems": 0}, ["[]", "[ ]"], ["[1]"], True),
    ({"type": "object", "additionalProperties": INTEGER}, ["{}", '{"a":1,"b":2}'], ['{"a":"x"}'], True),
    ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}'], True),
    (
        {"properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER}},
        ["{}", '{"a":1,"c":2}', '{"b":1}'],
        ['{"b":1,"a":1}', "{,}"],
        True,
    ),
    (
        {"properties": {'1"': INTEGER, "n\n": INTEGER}, "required": ["n\n"]},
        ['{"n\\n":1}', '{"1\\"":1,"n\\n":2}'],
        ['{"1\\"":1}'],
        True,
    ),
    ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a~1b"}], "$defs": {"a/b": INTEGER}}, ["null", "-1"], ["01"], True),
    ({"allOf": [{"type": "integer"}]}, ["7"], ["7.5"], True),
    ({"type": "integer", "minimum": 10, "maximum": 12}, ["10", "12"], ["9", "13", "-11"], False),
    ({"type": "number", "multipleOf": 5}, ["15"], ["16"], False),
    ({"type": "object"}, ["{}", '{"a":[1,{}]}'], ["[]", "{,}"], False),
    ({}, ["1", '"a"', "[[]]"], ["[", "nul"], False),
    (True, ["1", "{}"], ["x"], False),
    (
        {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": {"type": "string"}},
        ['{"a":1}', '{"b":"x"}', '{"a":1,"ab":"x"}'],
        ['{"a":"x"}', '{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}'],
        False,
    ),
    (
        {"type": "object", "patternProperties": {"^a": INTEGER}, "additionalProperties": False},
        ['{"a":1}', '{"ab":1}'],
        ['{"a":"x"}', '{"b":1}', '{"\\u0061":"x"}'],
        False,
    ),
    (
        {
            "type": "object",
            "properties": {"y": INTEGER, "x-1": {"minimum": 5}},
            "patternProperties": {"^x-": INTEGER, "^z\\.": True},
            "additionalProperties": {"type": "string"},
        },
        ['{"y":1,"x-2":3}', '{"x":"a","ya":"b"}', '{"z.":[]}', '{"z":"a","":"b","x":"c"}', '{"x-1":5}'],
        ['{"x-2":"a"}', '{"x\\u002d2":"a"}', '{"x":1}', '{"z":[]}', '{"x-1":4}', '{"x-1":"a"}', '{"y":"a"}'],
        False,
    ),
    ({"patternProperties": {"^a": INTEGER}}, ['{"a":1}', '{"b":[]}', "3"], ['{"a":"x"}', '{"\\u0061":"x"}'], False),
    ({"type": "object", "patternProperties": {".*": INTEGER}}, ['{"a":1,"":2}'], ['{"a":"x"}', '{"":"x"}'], False),
]


@pytest.mark.parametrize(
    ("schema", "right", "wrong", "is_table"), CASES, ids=[json.dumps(case[0])[:70] for case in CASES]
)
def test_json_schema_grammar_allows_instances_and_no_other_texts(
    schema: Any, right: list[str], wrong: list[str], is_table: bool
) -> None:
    grammar = compiled(json.dumps(schema))
    assert isinstance(grammar, Grammar) == is_table
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []
    valid = validator(schema)
    assert all(valid.is_valid(json.loads(text)) for text in right)


def test_json_schema_with_a_long_chain_of_references_becomes_a_table() -> None:
    links = {f"n{index}": {"$ref": f"#/$defs/n{index + 1}"} for index in range(40)}
    grammar = compiled({"$ref": "#/$defs/n0", "$defs": {**links, "n40": INTEGER}})
    assert isinstance(grammar, Grammar) and accepts(grammar, "12") and not accepts(grammar, '"a"')


@pytest.mark.parametrize("levels", [3, 26])
def test_json_schema_of_nested_arrays_is_enforced_at_any_depth(levels: int) -> None:
    """A small schema becomes a table, and a large one a parser, because each level doubles the expression."""
    schema: dict[str, Any] = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    grammar = compiled(schema)
    assert isinstance(grammar, Grammar) == (levels == 3)
    assert accepts(grammar, "[" * levels + "1,2" + "]" * levels) and not accepts(grammar, "[" * (levels + 1))


def test_json_schema_whose_table_is_too_large_becomes_a_parser() -> None:
    small = GrammarInput(lettered.Lettered(BYTES), 257, 100)
    grammar = small.of(SamplingParams(json_schema={"type": "string", "maxLength": 9}), (END,), ())
    assert isinstance(grammar, LarkGrammar) and accepts(grammar, '"abc"')
    none = GrammarInput(lettered.Lettered(BYTES), 257, 0)
    assert isinstance(none.of(SamplingParams(json_schema=INTEGER), (END,), ()), LarkGrammar)


class PydanticLike:
    """A class with pydantic's method `model_json_schema`."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"properties": {"a": INTEGER}, "required": ["a"]}


def test_sampling_params_accepts_a_schema_as_dict_text_or_class() -> None:
    schema = PydanticLike.model_json_schema()
    schema["additionalProperties"] = False  # as the class's objects have
    made = [SamplingParams(json_schema=given) for given in (schema, json.dumps(schema), PydanticLike)]
    assert made[0] == made[1] == made[2] and hash(made[0]) == hash(made[2])
    schema["required"].append("b")  # later changes of the caller's dict have no effect
    assert made[0] == SamplingParams(json_schema=PydanticLike)
    pydantic = pytest.importorskip("pydantic")
    own = pydantic.create_model("Own", name=(str, ...), age=(int, pydantic.Field(ge=0)), kind=(str | None, None))
    grammar = compiled(own)
    assert accepts(grammar, '{"name":"x","age":3,"kind":null}') and not accepts(grammar, '{"name":"x","age":-3}')


def test_objects_of_a_pydantic_class_are_those_of_pydantics_own_closed_class() -> None:
    pydantic = pytest.importorskip("pydantic")

    def order(**config: Any) -> Any:
        """A class with nested, recursive, optional and free objects; ``config`` is that of all of its classes."""
        made = partial(pydantic.create_model, __config__=config or None)
        item = made("Item", name=(str, ...), tags=(dict[str, int], {}), free=(dict[str, Any], {}))
        choice = made("Cat", kind=(Literal["cat"], ...)) | made("Dog", kind=(Literal["dog"], ...), name=(str, "a"))
        return made(
            "Order", item=(item | None, None), items=(list[item], []), pet=(choice, ...), none=(made("No"), ...)
        )

    assert json.loads(text_of(order())) == json.loads(text_of(order(extra="forbid"))) != order().model_json_schema()
    assert json.loads(text_of(order(extra="allow"))) == order(extra="allow").model_json_schema()


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {}]},
        {"properties": {"a": {"not": {"properties": {"b": {}}}}}},
        {"$defs": {"a": {"properties": {"a": {}}}}, "$ref": "#/$defs/a", "properties": {"b": {}}},
        {"properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"anyOf": 5},
    ],
)
def test_schema_whose_lists_of_properties_belong_together_stays_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
    named = {"properties": {"not": {"properties": {"a": {}}}, "allOf": {}}}  # properties of these names join nothing
    inner = {"properties": {"a": {}}, "additionalProperties": False}
    assert closed(named) == {"properties": {"not": inner, "allOf": {}}, "additionalProperties": False}


REFUSED: list[tuple[Any, str]] = [
    ({"properties": 5}, "'properties' at #: expected schemas by name, got 5"),
    ({"properties": {"a": 5}}, "#/properties/a: expected a schema .an object, true or false., got 5"),
    ({"required": "ab"}, "'required' at #: expected a list of different names, got 'ab'"),
    ({"required": ["a", "a"]}, "'required' at #: expected a list of different names"),
    ({"required": [[]]}, "'required' at #: expected a list of different names"),
    ({"enum": []}, "'enum' at #: expected a list of values, at least one"),
    ({"anyOf": []}, "'anyOf' at #: expected a list of schemas, at least one"),
    ({"anyOf": {}}, "'anyOf' at #"),
    ({"type": []}, "'type' at #: expected one of"),
    ({"type": "objekt"}, "'type' at #: expected one of string, .* got 'objekt'"),
    ({"type": [["string"]]}, "'type' at #"),
    ({"type": "string", "maxLength": "3"}, "'maxLength' at #: expected an int >= 0"),
    ({"type": "string", "maxLength": -1}, "'maxLength' at #"),
    ({"type": "string", "minLength": float("inf")}, "expected finite numbers, got 'Infinity'"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "'maxLength' at #: expected at least 3, 'minLength', got 2"),
    ({"type": "string", "pattern": 5}, "'pattern' at #: expected a text"),
    ({"type": "string", "pattern": "(?=a)b"}, "'pattern' at #: expected a group without look-around and flags"),
    (
        {"type": "string", "pattern": "a("},
        "'pattern' at #: expected more at character 2|'pattern' at #: expected '\\)'",
    ),
    ({"type": "string", "pattern": "a^b"}, "'pattern' at #: expected a character or its escape"),
    ({"type": "string", "pattern": r"(a)\1"}, "'pattern' at #: expected an escape"),
    ({"type": "string", "pattern": "a{99999}"}, "'pattern' at #: expected fewer repetitions"),
    ({"type": "array", "items": [INTEGER]}, "'items' at #: expected a schema"),
    ({"type": "array", "items": {"minimum": "3"}}, "'minimum' at #/items: expected a number"),
    ({"type": "integer", "multipleOf": 0}, "'multipleOf' at #: expected a number > 0"),
    ({"type": "integer", "minimun": 0}, "'minimun' at #: expected keywords of JSON Schema"),
    ({"$ref": "other.json"}, "'[$]ref' at #: expected a place in the same schema"),
    ({"$ref": "#/$defs/a"}, "'[$]ref' at #: expected a place in the same schema, got '#/[$]defs/a'"),
    ({"properties": {"a": {"$id": "x"}}}, r"'[$]id' at #/properties/a: this keyword is not followed"),
    ({"enum": ["a", 1], "type": "null"}, "'enum' at #: expected a value of type 'null'"),
    ({"const": "\ud800"}, "'const' at #: expected whole characters"),
    ({"properties": {"\ud800": True}}, "'properties' at #: expected whole characters"),
    ({"enum": [{"a": [{"\udfff": 1}]}]}, "'enum' at #: expected whole characters"),
    ('{"const": 1e999}', "'const' at #: expected finite numbers"),
    ('{"const": ' + "1" * 5000 + "}", "expected numbers of at most 1000 digits"),
    ('{"const": NaN}', "expected finite numbers, got 'NaN'"),
    ("[", "expected JSON, got '\\['"),
    ("5", "#: expected a schema"),
    (False, "expected a schema as a dict"),
    ("false", "expected a schema that some value satisfies"),
    ({"enum": list(range(100_000))}, "expected at most 65536 characters, got more"),
    ({"enum": list(range(5000))}, "'enum' at #: expected at most 2000 values, got 5000"),
    ({"properties": {f"p{index}": True for index in range(2001)}}, "'properties' at #: expected at most 2000 values"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems' at #: no grammar enforces this keyword"),
    ({"properties": {"a": {"format": "iri", "type": "string"}}}, "'format' at #/properties/a: expected one of"),
    ({"minProperties": 2}, "'minProperties' at #: expected at most 1"),
    ({"patternProperties": {"a$": True}}, "'patternProperties' at #: expected 'additionalProperties': false .*'a\\$'"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_wrong_json_schema_raises_naming_the_keyword(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"json_schema.*(?:{message})") as error:
        compiled(schema)
    assert len(str(error.value)) < 500


def test_json_schema_that_contains_itself_as_an_object_raises() -> None:
    schema: dict[str, Any] = {"items": None}
    schema["items"] = schema
    with pytest.raises(ValueError, match="expected at most 65536 characters, got more"):
        json_schema.text_of(schema)


@pytest.mark.parametrize("given", [*random_schemas.PATTERNS, r"^\W$", r"^[^\w]$"])
def test_pattern_translation_matches_the_texts_in_which_re_finds_the_pattern(given: str) -> None:
    """All texts of up to two letters are compared. With ASCII classes, `re` reads these patterns as ECMA-262 does."""
    if given == "[]-]$":
        with pytest.raises(pattern.Unsupported):
            pattern.read(given)
        return
    translated, letters = pattern.read(given), 'abc012-_ .*/&~[xyz\t"\\é'
    ours = re.compile(
        re.sub(r"\\x\{([0-9A-F]+)\}", lambda code: re.escape(chr(int(code[1], 16))), translated.part.text)
    )
    for text in ["", *letters, *(a + b for a in letters for b in letters), "ab-12", "a b", "aab", 'b"b']:
        assert (ours.fullmatch(text) is not None) == (re.search(given, text, re.ASCII) is not None), text
        assert (
            ours.fullmatch(text) is None
            or not translated.is_plain
            or json.dumps(text, ensure_ascii=False) == f'"{text}"'
        )
