"""Test context-free grammars on the host: the mask of every draft node, against a recursive-descent parser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jspec import SamplingParams
from jspec.engine.grammar.cfg_matcher import GuidanceVocabulary, LarkGrammar, Matcher, compile_lark
from jspec.engine.grammar.regex_dfa import try_lark
from jspec.engine.input.grammar_input import GrammarInput
from tests.reference import descent
from tests.support import lettered

pytestmark = pytest.mark.once
pytest.importorskip("llguidance")

ENDS = (0, 19)


def compiled(texts: Sequence[bytes | None], stop_ids: tuple[int, ...], vocab_size: int = 0, **fields: Any) -> Any:
    """Compile the grammar of a request with the sampling parameters ``fields``."""
    return GrammarInput(lettered.Lettered(texts), vocab_size or len(texts), 2**18).of(
        SamplingParams(**fields), stop_ids, ()
    )


CASES = {
    "lists": (descent.lists, lettered.TEXTS, (0, 14), dict(grammar=descent.LISTS)),
    "pairs": (descent.pairs, lettered.TEXTS, (0, 13), dict(grammar=descent.PAIRS)),  # one stop id has a text
    "objects": (descent.objects, lettered.JSON_TEXTS, ENDS, dict(json_schema=descent.OBJECTS)),
}


def tokens_of(mask: np.ndarray, vocab_size: int) -> set[int]:
    return {token for token in range(vocab_size) if mask[token // 32] >> np.uint32(token % 32) & 1}


@pytest.mark.parametrize("name", CASES)
def test_grammar_matcher_allows_the_tokens_that_recursive_descent_allows(name: str) -> None:
    """Random texts include texts with two tokenisations, and tokens whose bytes belong to several grammar rules."""
    read, texts, ends, fields = CASES[name]
    grammar, rng, whole = compiled(texts, ends, **fields), np.random.default_rng(1), 0
    assert isinstance(grammar, LarkGrammar)
    for _ in range(40):
        matcher, output = Matcher(grammar), list[int]()
        for _ in range(30):
            allowed = tokens_of(matcher.first()[0], len(texts))
            written = b"".join(texts[token] or b"" for token in output)
            assert allowed == descent.allowed(read, texts, written, ends), written
            output.append(int(rng.choice(sorted(allowed))))
            matcher.follow(output)
            if output[-1] in ends:
                whole += 1
                break
    assert whole > 5


def random_tree(matcher: Matcher, vocab_size: int, rng: np.random.Generator, *, chain: bool) -> Any:
    """Return a random draft tree in which the grammar allows most nodes after their parents."""
    size = 10
    parents = np.array([-1, *(n if chain else rng.integers(0, n + 1) for n in range(size - 1))])
    tokens, valid = rng.integers(0, vocab_size, size), np.ones(size, bool)
    for node in range(1, size):
        allowed = sorted(
            tokens_of(matcher.masks(tokens[:node], parents[:node], valid[:node])[parents[node]], vocab_size)
        )
        if rng.random() < 0.8:
            tokens[node] = rng.choice(allowed)
    valid[rng.integers(size // 2, size) :] = chain
    return tokens, parents, valid


def check_tree(name: str, *, chain: bool, masks_of: Any = Matcher.masks) -> None:
    """Compare the masks of random draft trees with a recursive-descent parser."""
    read, texts, ends, fields = CASES[name]
    grammar, rng, cases = compiled(texts, ends, **fields), np.random.default_rng(2), [0, 0]
    for _ in range(25):
        matcher, output = Matcher(grammar), list[int]()
        for _ in range(rng.integers(0, 8)):
            allowed = tokens_of(matcher.first()[0], len(texts)) - set(ends)
            output += [int(rng.choice(sorted(allowed)))] if allowed else []
            matcher.follow(output)
        tokens, parents, valid = random_tree(matcher, len(texts), rng, chain=chain)
        masks = masks_of(matcher, tokens, parents, valid)
        assert masks.any(axis=1).all()
        for node in range(len(tokens)):
            path, ancestor = list[int](), node
            while ancestor > 0:
                path, ancestor = [int(tokens[ancestor]), *path], int(parents[ancestor])
            written = b"".join(texts[token] or b"" for token in [*output, *path])
            is_reached = valid[node] and not set(path) & set(ends) and descent.fits(read, written)[0]
            is_reached &= all(texts[token] for token in path)
            cases[int(is_reached)] += 1
            if is_reached:
                assert tokens_of(masks[node], len(texts)) == descent.allowed(read, texts, written, ends), written
    assert min(cases) > 10


@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("name", CASES)
def test_grammar_matcher_mask_of_each_node_follows_the_path_to_that_node(name: str, chain: bool) -> None:
    check_tree(name, chain=chain)


def test_grammar_matcher_masks_of_parents_instead_of_nodes_fail_the_comparison() -> None:
    """Negative control: every node gets the mask of its parent."""

    def parents_mask(matcher: Matcher, tokens: Any, parents: Any, valid: Any) -> Any:
        return matcher.masks(tokens, parents, valid)[np.maximum(parents, 0)]

    with pytest.raises(AssertionError):
        check_tree("lists", chain=False, masks_of=parents_mask)


def test_grammar_matcher_masks_of_a_draft_leave_the_matcher_unchanged() -> None:
    matcher = Matcher(compiled(lettered.TEXTS, (0,), grammar=descent.LISTS))
    matcher.follow([5, 1])
    before = matcher.first()
    matcher.masks(np.array([1, 9, 5, 6]), np.array([-1, 0, 1, 2]), np.ones(4, bool))
    np.testing.assert_array_equal(matcher.first(), before)
    assert matcher.count == 2


def test_grammar_matcher_node_without_a_continuation_allows_only_the_stop_id() -> None:
    """No token spells "x", so no token may follow "b"; sibling nodes and outputs without "b" are not affected."""
    matcher = Matcher(compiled(lettered.TEXTS, (0,), grammar='start: "a" ("b" "x" | "a" "1")'))
    matcher.follow([1])
    masks = matcher.masks(np.array([1, 2, 1, 7]), np.array([-1, 0, 0, 2]), np.ones(4, bool))
    assert [tokens_of(mask, 16) for mask in masks] == [{1, 2}, {0}, {7}, {0}]
    other = Matcher(matcher.grammar)
    other.follow([1, 2])
    with pytest.raises(ValueError, match=r"after 2 tokens no token .* was left: .* in the tokenizer's tokens"):
        other.follow([1, 2, 0])
    matcher.follow([1, 1, 7, 0])
    assert matcher.count == 4


def test_grammar_matcher_masks_have_the_size_of_the_models_vocabulary() -> None:
    for size in (12, 70):
        matcher = Matcher(compiled(lettered.TEXTS, (0,), size, grammar=descent.LISTS))
        assert matcher.grammar.words == -(-size // 32) and tokens_of(matcher.first()[0], size) == {5}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: "{" foo', 'unknown name: "foo"'),
        ("start: (", "expected a grammar that llguidance reads"),
        ('start: "x" start | "y"', r"none of its texts can be written .*NoExtension"),
        ("start: <think> /a/", "unknown special token"),
        ("start: x /b/\nx[temperature=0.5]: /a+/", "no rule with temperature="),
        ('start: x "b"\nx[max_tokens=3]: /a+/', "rollback not supported with max_tokens"),
        ('start: x "b"\nx[stop="b"]: /a+/', "rollback not supported"),
        ("start: " + '"a"? ' * 3000, "max is 2000; .*; take fewer optional parts"),
        ('start: %json {"type": "string", "not": {"const": "a"}}', r"Unimplemented keys: \[\"not\"\]"),
    ],
)
def test_compile_lark_with_an_unsupported_grammar_raises(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"grammar='(?s:.*){message}"):
        compiled(lettered.TEXTS, (0,), grammar=grammar)


def test_compile_lark_with_token_ids_of_the_vocabulary_allows_these_tokens() -> None:
    """The trial in another process knows as many ids as the model, although it has bytes as tokens."""
    texts = [*(bytes([byte]) for byte in range(256)), None, *(b"%x" % token for token in range(257, 1200))]
    grammar = compiled(texts, (256,), grammar='start: <[1000-1002]> "a"')
    assert grammar.first_tokens() == {1000, 1001, 1002}
    with pytest.raises(ValueError, match="Token range end too large: 1300"):
        compiled(texts, (256,), grammar="start: <[1300]>")


def test_compile_lark_with_too_many_rules_raises() -> None:
    rules = [f'r{index}: r{index + 1} "a"' for index in range(3000)]
    with pytest.raises(ValueError, match="expected at most 1000 rules and terminals, got 3002; take fewer"):
        compiled(lettered.TEXTS, (0,), grammar="\n".join(["start: r0", *rules, 'r3000: "a"']))


def test_compile_lark_with_40000_blank_lines_takes_under_10_seconds() -> None:
    start = time.perf_counter()
    assert isinstance(compiled(lettered.TEXTS, (0,), grammar="\n" * 40000 + 'start: "a"'), LarkGrammar)
    assert time.perf_counter() - start < 10  # a regular expression that restarts at each line takes over a minute


def test_grammar_input_when_allowed_token_ids_exclude_every_first_token_raises() -> None:
    maker = GrammarInput(lettered.tokenizer(), 16, 400)
    first = sorted(maker.of(SamplingParams(grammar='start: "a" "b"'), (0,), ()).first_tokens())
    others = tuple(token for token in range(16) if token not in first)
    with pytest.raises(ValueError, match=rf"allowed_token_ids: .* one of {re.escape(str(first))}, got"):
        maker.of(SamplingParams(grammar='start: "a" "b"', allowed_token_ids=others), (0,), ())
    assert maker.of(SamplingParams(grammar='start: "a" "b"', allowed_token_ids=(0, first[0])), (0,), ())


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"not":' * 7000 + "{}" + "}" * 7000, "nested so deep"),
        ('{"not":' * 100 + "{}" + "}" * 100, "at most 50 schemas inside one another"),
        ({"$ref": "#/$defs/0", "$defs": {"0": {"$ref": "#/$defs/1"}, "1": {"$ref": "#/$defs/0"}}}, "it has no text"),
        ({"$defs": [], "type": "string"}, r"'\$defs' at #: expected schemas by name, got \[\]"),
    ],
    ids=["levels", "schemas", "references", "no names"],
)
def test_grammar_input_with_a_schema_nested_too_deep_or_invalid_defs_raises(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrammarInput(lettered.tokenizer(), 16, 400).of(SamplingParams(json_schema=schema), (0,), ())


def test_compile_lark_with_an_option_name_inside_a_string_is_accepted() -> None:
    text = compiled(lettered.TEXTS, (0,), grammar='start: "a" | x\nx[suffix="temperature=]"]: /ab*/')
    assert isinstance(text, LarkGrammar)


# For each keyword, a value that it excludes according to jsonschema; an accepted grammar must exclude the value too.
KEYWORDS: list[tuple[dict[str, Any], Any, bool]] = [  # keywords, a value, whether the schema is accepted
    ({"minLength": 3}, "ab", True),
    ({"maxLength": 1}, "ab", True),
    ({"pattern": "b"}, "aa", True),
    ({"minimum": 3}, 2, True),
    ({"maximum": 3}, 4, True),
    ({"exclusiveMinimum": 3}, 3, True),
    ({"exclusiveMaximum": 3}, 3, True),
    ({"multipleOf": 2}, 3, True),
    ({"minItems": 1}, [], True),
    ({"maxItems": 0}, [[]], True),
    ({"prefixItems": [{"const": 1}]}, [2], True),
    ({"items": False}, [1], True),
    ({"minProperties": 1}, {}, True),
    ({"minProperties": 2}, {"a": 1}, False),
    ({"maxProperties": 0}, {"a": 1}, True),
    ({"required": ["a"]}, {}, True),
    ({"patternProperties": {"^a": {"type": "null"}}}, {"ab": 1}, True),
    ({"patternProperties": {"a$": {"type": "null"}}}, {"a": 1}, False),
    ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, {"ab": 1}, True),
    ({"additionalProperties": False, "properties": {"a": True}}, {"b": 1}, True),
    ({"allOf": [{"type": "integer"}, {"minimum": 4}]}, 3, True),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}], "minimum": 4}, 3, True),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, None, True),
    ({"enum": [1, 2]}, 3, True),
    ({"const": 1}, 2, True),
    ({"$ref": "#/$defs/n", "minLength": 3, "$defs": {"n": {"type": "string"}}}, "a", True),
    ({"oneOf": [{"type": "integer"}, {"minimum": 4}]}, 5, False),
    ({"uniqueItems": True}, [1, 1], False),
    ({"contains": {"const": 3}}, [1], False),
    ({"minContains": 2, "contains": {"const": 1}}, [1], False),
    ({"unevaluatedItems": False}, [1], False),
    ({"propertyNames": {"maxLength": 1}}, {"ab": 1}, False),
    ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, False),
    ({"dependencies": {"a": ["b"]}}, {"a": 1}, False),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}, False),
    ({"unevaluatedProperties": False}, {"a": 1}, False),
    ({"not": {"type": "integer"}}, 3, False),
    ({"if": {"type": "integer"}, "then": {"minimum": 4}}, 3, False),
    ({"type": "string", "format": "iri"}, "a b", False),
    ({"minLenght": 3}, "a", False),
    ({"$ref": "http://example.com/x"}, 1, False),
]


@pytest.mark.parametrize(("schema", "value", "is_accepted"), KEYWORDS, ids=[json.dumps(s) for s, *_ in KEYWORDS])
def test_recursive_schema_keyword_is_enforced_or_raises(schema: dict[str, Any], value: Any, is_accepted: bool) -> None:
    bytes_ = [None, *[bytes([byte]) for byte in range(256)]]

    def recursive(own: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"own": own, "more": {"$ref": "#"}},
            "required": ["own"],
            "$defs": schema.get("$defs", {}),
        }

    if not is_accepted:
        with pytest.raises(ValueError, match="json_schema"):
            compiled(bytes_, (0,), json_schema=recursive(schema))
        return
    jsonschema, whole = pytest.importorskip("jsonschema"), {"own": value}
    assert not jsonschema.Draft202012Validator(recursive(schema)).is_valid(whole)
    output = [byte + 1 for byte in json.dumps(whole).encode()]
    Matcher(compiled(bytes_, (0,), json_schema=recursive({}))).follow([*output, 0])
    with pytest.raises(ValueError, match="no token that the grammar allows was left"):
        Matcher(compiled(bytes_, (0,), json_schema=recursive(schema))).follow([*output, 0])


def test_grammar_input_logs_whether_a_grammar_uses_a_table(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("outlines_core")
    with caplog.at_level("INFO", logger="jspec.engine.input.grammar_input"):
        compiled(lettered.JSON_TEXTS, ENDS, json_schema=descent.OBJECTS)
        compiled(lettered.TEXTS, (0,), regex="a+")
    assert [("two launches" in line, "a table of" in line) for line in caplog.messages] == [
        (True, False),
        (False, True),
    ]


def test_grammar_with_unsupported_options_or_without_stop_id_raises() -> None:
    with pytest.raises(ValueError, match="json_schema: 'x-guidance' at #"):
        compiled(lettered.JSON_TEXTS, ENDS, json_schema={**descent.OBJECTS, "x-guidance": {"lenient": True}})
    with pytest.raises(ValueError, match=r"SamplingParams.grammar: expected only one of .* got regex too"):
        SamplingParams(regex="a", grammar=descent.LISTS)
    with pytest.raises(ValueError, match="grammar: needs a token that ends the request"):
        compiled(lettered.TEXTS, (), grammar=descent.LISTS)


def test_compile_lark_without_llguidance_raises_naming_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[grammar\]'"):
        compile_lark(
            "grammar", descent.LISTS, GuidanceVocabulary(lettered.TEXTS, 16), (0,), lambda name, lark: try_lark(lark)
        )
