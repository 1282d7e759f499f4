"""Test grammar tables against the library regex on small vocabularies, and against outlines_core on whole ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import SamplingParams
from jspec.engine.grammar.regex_dfa import TooLarge, check_size
from jspec.engine.grammar.schema_regex import regex_of
from jspec.engine.grammar.token_table import Grammar, TablePool
from jspec.engine.input.grammar_input import GrammarInput
from jspec.engine.text.tokenizer import ByteTokenizer, load_tokenizer
from tests.reference import regular
from tests.support import lettered
from tests.support.tables import table
from tests.support.tokenizer_folders import PUBLISHED

pytestmark = pytest.mark.once
outlines_core = pytest.importorskip("outlines_core")

Folder = Callable[[str], Path]  # type of the fixture tokenizer_folder
SIZE = len(lettered.TEXTS)
EXPRESSIONS = [
    "a",
    "a(b|ab)*c",
    r"\{(1|12|(é))+(,1)*\}",
    '"[abc]{0,4}"',
    "(ab|a)(a|ba)?",
    "[ac1]{2,3}",
    "((a|b){2}c)*",
    "(é)*1?",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
}


def compiled(regex: str, texts: Sequence[bytes | None] = lettered.TEXTS, **options: Any) -> Grammar:
    size = options.pop("size", len(texts))
    return table(regex, texts, size, **{"stop_ids": (0,)} | options)


def allowed(grammar: Grammar, state: int) -> set[int]:
    return set(np.flatnonzero(grammar.next[state, grammar.class_of] >= 0).tolist())


@pytest.mark.parametrize("regex", EXPRESSIONS)
@pytest.mark.parametrize("stops", [(0,), (0, 14, 15)], ids=str)
def test_grammar_table_allows_the_tokens_that_the_regex_library_allows(regex: str, stops: tuple[int, ...]) -> None:
    """The allowed tokens are compared after every text of up to five tokens.

    A stop id that has a text is allowed only if the output may end.
    """
    texts = [None if token in stops else text for token, text in enumerate(lettered.TEXTS)]
    grammar, frontier = compiled(regex, lettered.TEXTS, stop_ids=stops), {b"": 0}
    for _ in range(5):
        following: dict[bytes, int] = {}
        for text, state in frontier.items():
            found = allowed(grammar, state)
            assert found == regular.allowed(regex, texts, text, stops), text
            following |= {text + (texts[t] or b""): grammar.follow([t], state) for t in found - set(stops)}
        frontier = following
    assert grammar.follow([0, 0, 1, 1, 1, 1, 1, 1]) < 0


def test_grammar_table_bans_tokens_that_lead_to_no_complete_text() -> None:
    """The three cases: no token spells "x", only half of a letter has a token, or a token is banned."""
    assert allowed(compiled("ax|b"), 0) == {2}
    halves = compiled("a(é|b)", [None, b"a", b"b", b"\xc3"])
    assert allowed(halves, halves.follow([1])) == {2}
    assert allowed(compiled("ab|b", banned=(3,)), 0) == {1, 2}


def test_compile_grammar_whose_texts_the_allowed_tokens_cannot_write_raises() -> None:
    for regex, options in (("x", {}), ("ab|b", dict(banned=(3, 2))), ("[abc]c", dict(banned=(13,)))):
        with pytest.raises(ValueError, match="none of its texts can be written in the allowed tokens"):
            compiled(regex, **options)


def test_grammar_table_never_allows_ids_without_a_token() -> None:
    grammar = compiled("[a-c]*", size=20)
    assert allowed(grammar, 0) == {0, 1, 2, 3, 4, 13, 15}


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level"])
def test_grammar_table_allows_the_tokens_that_the_outlines_library_allows(tokenizer_folder: Folder, kind: str) -> None:
    """Both libraries allow equal sets of tokens at every step of random walks of 40 tokens.

    In a state where a text may both end and continue, outlines_core omits tokens. These expressions have no such state.
    """
    tokenizer = load_tokenizer(tokenizer_folder(kind))
    assert tokenizer is not None
    texts, end = tokenizer.token_bytes(), max(tokenizer.hidden_ids)
    by_text: dict[bytes, list[int]] = {}
    for token, text in enumerate(texts):
        if text:
            by_text.setdefault(text, []).append(token)
    vocabulary = outlines_core.Vocabulary(end, by_text)
    for regex in (regex_of(SCHEMA), r"[A-Z][a-zé]{1,9}( [a-z]+){0,4}[.!]"):
        grammar, index = compiled(regex, texts, stop_ids=(end,)), outlines_core.Index(regex, vocabulary)
        rng, sizes = np.random.default_rng(0), set()
        for _ in range(4):
            state, other = 0, index.get_initial_state()
            for _ in range(40):
                expected = set(index.get_allowed_tokens(other))
                assert allowed(grammar, state) == expected
                sizes.add(len(expected))
                token = int(rng.choice(sorted(expected)))
                if token == end:
                    break
                state, other = grammar.follow([token], state), index.get_next_state(other, token)
        assert len(sizes) > 5


def test_grammar_table_of_a_json_schema_yields_valid_texts(tokenizer_folder: Folder) -> None:
    tokenizer = load_tokenizer(tokenizer_folder("byte_level"))
    assert tokenizer is not None
    (end,) = tokenizer.hidden_ids
    grammar = compiled(regex_of(SCHEMA), tokenizer.token_bytes(), stop_ids=(end,))
    rng = np.random.default_rng(1)
    for _ in range(20):
        ids: list[int] = []
        while ids[-1:] != [end]:
            ids.append(int(rng.choice(sorted(allowed(grammar, grammar.follow(ids))))))
        value = json.loads(tokenizer.decode(ids))
        assert list(value) == SCHEMA["required"] and set(value["tags"]) <= {"x", "yy"} and len(value["tags"]) <= 2
        assert len(value["name"]) <= 12 and isinstance(value["age"], int) and isinstance(value["ok"], bool)


@pytest.mark.parametrize("kind", ["sentencepiece", "many_words", "byte_level", "chat"])
def test_token_bytes_of_each_token_equal_the_text_that_decoding_appends(tokenizer_folder: Folder, kind: str) -> None:
    check_token_bytes(tokenizer_folder(kind))


@pytest.mark.parametrize("name", PUBLISHED.values())
def test_token_bytes_of_published_tokenizers_equal_the_text_that_decoding_appends(data: Path, name: str) -> None:
    check_token_bytes(data / name)


def check_token_bytes(folder: Path) -> None:
    """Compare each token's bytes with the text that decoding appends for it.

    The token is decoded after another token, which keeps its leading blank. Tokens that are half of a letter are
    skipped.
    """
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    texts, front = tokenizer.token_bytes(), tokenizer.encode("so")
    before, checked = tokenizer.decode(front), 0
    assert len(texts) == tokenizer.vocab_size
    for token in range(0, len(texts), max(1, len(texts) // 3000)):
        text, found = texts[token], tokenizer.decode([*front, token])
        if token in tokenizer.hidden_ids:
            assert text is None
        elif text is not None and "\ufffd" not in found:
            assert found == before + text.decode()
            checked += 1
    assert checked > 0.5 * min(len(texts), 3000) - 256
    assert ByteTokenizer().token_bytes()[65] == b"A"


BAD: list[tuple[dict[str, Any], str]] = [
    (dict(regex="("), r"regex='\(': expected a regular expression without look-around"),
    (dict(regex="(?=a)b"), "without look-around"),
    (dict(regex="ab(c"), "unterminated subpattern at position 2$"),
    (dict(regex="[z-a]"), "bad character range z-a at position 1$"),
    (dict(regex="x"), "regex='x': none of its texts can be written"),
    (dict(regex="a)(b"), "unbalanced parenthesis at position 1$"),
    (dict(json_schema={"type": "integer", "not": {}}), "json_schema: 'not' at #: no grammar enforces this"),
    (
        dict(json_schema={"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}),
        "json_schema='.*none of its texts can be written",  # no token spells "["
    ),
    (dict(regex="[abc]{999}"), "table takes 1000 states x .* allowed are 400"),
    (
        dict(regex="[abc]", allowed_token_ids=[1, 2]),
        r"allowed_token_ids: expected at least one of \(0,\) beside regex",
    ),
    (dict(regex="[abc]", bad_words=[[1, 0]]), r"bad_words: expected none beside regex that ends with"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=str)
def test_grammar_input_with_an_unsupported_request_raises(given: dict[str, Any], message: str) -> None:
    params = SamplingParams(**given)
    words = tuple(word for word in params.bad_words if not isinstance(word, str))
    with pytest.raises(ValueError, match=message):
        GrammarInput(lettered.tokenizer(), SIZE, 400).of(params, (0,), words)


def test_grammar_input_without_tokenizer_tables_or_stop_ids_raises_naming_the_cause() -> None:
    params, tokenizer = SamplingParams(regex="a"), lettered.tokenizer()
    for engine, stops, message in (
        (GrammarInput(None, SIZE, 100), (0,), r"regex: needs a tokenizer; pass tokenizer="),
        (GrammarInput(tokenizer, SIZE, 0), (0,), "built with grammar_cells=0"),
        (GrammarInput(tokenizer, SIZE, 100), (), "needs a token that ends the request; pass eos_ids="),
        (GrammarInput(object(), SIZE, 100), (0,), "tokenizer: a grammar needs its token_bytes"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=message):
            engine.of(params, stops, ())
        assert engine.of(SamplingParams(), stops, ()) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(regex=""), "regex: expected None or a text"),
        (dict(json_schema=[1]), "json_schema: expected a schema as a dict, its text, or a pydantic class, got"),
        (dict(json_schema={1: {2}}), "json_schema: expected values that can be written as JSON"),
        (dict(json_schema={"type": "foo"}), "json_schema: 'type' at #: expected one of string, .*, got 'foo'"),
        (dict(json_schema="{"), "json_schema: expected JSON, got '{'"),
        (dict(regex="\ud800"), r"regex: expected whole characters, got half of a surrogate pair, '\\ud800'"),
        (dict(grammar='start: "\ud800"'), "grammar: expected whole characters"),
        (dict(regex="a" * 70000), "regex: expected at most 65536 characters, got 70000"),
        (dict(grammar="a" * 270000), "grammar: expected at most 262144 characters, got 270000"),
        (
            dict(regex="a", json_schema={}),
            "json_schema: expected only one of .* got regex too",
        ),
        (dict(grammar=""), "grammar: expected None or a text"),
        (
            dict(json_schema={}, grammar="start: /a/"),
            "grammar: expected only one of .* got json_schema too",
        ),
        (dict(grammar="start: /a/", ignore_eos=True), "ignore_eos: expected its default beside grammar"),
        (dict(regex="a", ignore_eos=True), "ignore_eos: expected its default beside regex, .* got True"),
        (dict(json_schema={}, min_tokens=2), "min_tokens: expected its default beside json_schema"),
    ],
    ids=str,
)
def test_sampling_params_invalid_grammar_or_combination_raises_naming_the_field(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_compile_grammar_without_outlines_core_raises_naming_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "outlines_core", None)
    with pytest.raises(ImportError, match=r"outlines_core, which is not installed; pip install -e '\.\[grammar\]' in"):
        compiled("a")


def test_table_whose_states_or_classes_are_no_int16_is_too_large_for_any_number_of_cells() -> None:
    check_size(2**15 - 1, 2, 2**30)
    for states, classes in ((2**15, 1), (1, 2**15)):
        with pytest.raises(TooLarge, match=f"{states} states x {classes} classes .* 32767 states"):
            check_size(states, classes, 2**30)


def test_equal_grammars_are_compiled_once_and_share_one_device_table() -> None:
    maker = GrammarInput(lettered.tokenizer(), SIZE, 400)
    one, same, other, banned = (
        maker.of(SamplingParams(**given), (0,), ())
        for given in (
            dict(regex="a+"),
            dict(regex="a+", seed=3),
            dict(regex="b+"),
            dict(regex="a+", allowed_token_ids=[0, 1]),
        )
    )
    assert one is not None and one is same and other is not None and banned is not None and banned is not one
    check_size(*one.next.shape, 100)
    pool = TablePool(2)
    assert pool.place(one, {one}) == (0, True)
    assert pool.place(other, {one, other}) == (1, True)
    assert pool.place(one, {one}) == (0, False)
    assert pool.place(banned, {one, banned}) == (1, True)  # this grammar replaces the least recently used one
    assert pool.place(other, {banned, other}) == (0, True)  # the grammar in use stays
    pool.clear()
    assert pool.place(one, {one}) == (0, True)
