"""Test tokenizers, and compare the incremental detokenizer with decoding all ids at once."""

from __future__ import annotations

import json
import os
import re
import time
import unicodedata
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import SamplingParams
from jspec.core.config import EngineConfig
from jspec.engine.input.input_processor import InputProcessor
from jspec.engine.text.detokenizer import IncrementalDetokenizer
from jspec.engine.text.token_texts import TokenTexts
from jspec.engine.text.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer
from tests.support.tokenizer_folders import KINDS, PUBLISHED

pytestmark = pytest.mark.once

TEXTS = [
    "Once upon a time, there was a little girl.",
    "  leading blanks\n\n\tand a tab ",
    "naïve café, Ünïcode",
    "你好，世界。人工智能",
    "한국어 텍스트와 かな",
    "🎉👩‍👩‍👧‍👦🏳️‍🌈 emoji 🇫🇷!",
    "don 't stop . really ?",
    "a\u0301 combining, \u202eright to left\u202c, \ufffd itself",
    "x",
    "",
]

_loaded: dict[str, Tokenizer] = {}


def each(*kinds: str) -> list[Any]:
    """The kinds built by `tokenizer_folders`; of the published tokenizers, those of these kinds, marked `long`."""
    published = [PUBLISHED[kind] for kind in kinds if kind in PUBLISHED]
    return [*kinds, *(pytest.param(name, marks=pytest.mark.long) for name in published)]


EVERY = each("bytes", *KINDS)


@pytest.fixture(params=EVERY)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load(request.param, request)


def load(name: str, request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer by its kind, or a published one by its folder."""
    if name not in _loaded:
        if name in KINDS:
            source = request.getfixturevalue("tokenizer_folder")(name)
        else:
            source = name if name == "bytes" else request.getfixturevalue("data") / name
        loaded = load_tokenizer(source)
        assert loaded is not None
        _loaded[name] = loaded
    return _loaded[name]


def whole(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of ids after a prompt, decoded at once."""
    before, everything = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    return everything[len(os.path.commonprefix([before, everything])) :]  # noqa: RUF071


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


def streamed_by_token(tokenizer: Tokenizer, prompt: Sequence[int], pieces: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each token, and the text after the last one."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    return [*(text for piece in pieces for text in detokenizer.pieces(piece)), detokenizer.finish()]


def always_decoding(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer without the texts of single tokens, so that a detokenizer decodes its window each time."""
    other = copy(tokenizer)
    other.__dict__["token_texts"] = None
    return other


def check_pieces(tokenizer: Tokenizer, prompt: Sequence[int], pieces: Sequence[Sequence[int]]) -> None:
    ids = [token for piece in pieces for token in piece]
    for one in (tokenizer, tokenizer.with_special_tokens()):
        assert "".join(streamed(one, prompt, pieces)) == whole(one, prompt, ids)
        by_token = streamed(always_decoding(one), prompt, [[token] for token in ids])
        assert streamed_by_token(one, prompt, pieces) == by_token


@pytest.mark.parametrize("name", each("bytes", "sentencepiece", "chat", "byte_level"))
@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_that_encodes_and_decodes_a_text_returns_it(
    name: str, text: str, request: pytest.FixtureRequest
) -> None:
    """The test omits a tokenizer without byte fallback and one that drops a leading blank."""
    tokenizer = load(name, request)
    text = unicodedata.normalize("NFC", text) if name in ("chat", PUBLISHED["chat"]) else text
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_token_by_token_equals_decoding_at_once(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    check_pieces(tokenizer, [], [[token] for token in ids])
    for cut in range(0, len(ids), max(1, len(ids) // 7)):
        check_pieces(tokenizer, ids[:cut], [[token] for token in ids[cut:]])


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_after_a_long_prompt_equals_decoding_at_once(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode("A long beginning. " * 20 + "世界\n")
    ids = tokenizer.encode(text)
    check_pieces(tokenizer, prompt, [[token] for token in ids])


def test_detokenizer_given_split_characters_returns_only_whole_ones(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🎉 naïve 你好，世界 👩‍👩‍👧‍👦")
    pieces = streamed(tokenizer, [], [[token] for token in ids])
    assert all("\ufffd" not in piece for piece in pieces)


def test_detokenizer_given_plain_english_returns_text_with_each_token(request: pytest.FixtureRequest) -> None:
    """No text is held back."""
    tokenizer = load("byte_level", request)
    ids = tokenizer.encode("Once upon a time")
    assert streamed(tokenizer, [], [[token] for token in ids]) == ["Once", " upon", " a", " time", ""]


def test_detokenizer_after_visible_prompt_text_keeps_a_leading_blank(request: pytest.FixtureRequest) -> None:
    tokenizer = load("sentencepiece", request)
    ids = tokenizer.encode("Once upon")
    after_bos = streamed(tokenizer, ids[:1], [ids[1:]])
    after_text = streamed(tokenizer, ids, [ids[1:]])
    assert ("".join(after_bos), "".join(after_text)) == ("Once upon", " Once upon")


@pytest.mark.parametrize("name", each("sentencepiece", "many_words", "byte_level"))
def test_text_decoder_with_a_grammar_keeps_the_leading_blank(name: str, request: pytest.FixtureRequest) -> None:
    """After a prompt without text the first blank is part of the grammar's text; without a grammar it is dropped."""
    tokenizer = load(name, request)
    processor = InputProcessor(tokenizer, tokenizer.vocab_size, (), EngineConfig())
    spelled, front = tokenizer.token_bytes(), next(iter(tokenizer.hidden_ids))
    blank = next(i for i, text in enumerate(spelled) if text is not None and re.fullmatch(rb" [a-z]+", text))
    for prompt in ([front], [front, blank], [blank]):
        texts = []
        for params in (SamplingParams(regex=".*"), SamplingParams(json_schema={}), SamplingParams()):
            decoder = processor._text_decoder(tuple(prompt), params, ())
            pieces = decoder.push([blank, blank], 0)
            texts.append("".join(pieces) + decoder.finish(2))
        expected = 2 * (spelled[blank] or b"").decode()
        assert texts[0] == texts[1] == expected
        is_lost = prompt == [front] and name not in ("byte_level", PUBLISHED["byte_level"])
        assert texts[2] == (expected[1:] if is_lost else expected)


def test_detokenizer_after_ids_without_text_keeps_the_next_blank(request: pytest.FixtureRequest) -> None:
    """The prompt's ids are outside the tokenizer's vocabulary, as in models with padded vocabularies."""
    tokenizer = load("sentencepiece", request)
    ids = tokenizer.encode("Once")
    padding = [tokenizer.vocab_size + 7] * 30
    assert "".join(streamed(tokenizer, ids + padding, [ids[1:]])) == " Once"
    assert "".join(streamed(tokenizer, ids, [padding, ids[1:]])) == " Once"


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=60)
@given(data=st.data())
def test_detokenizer_of_random_ids_equals_decoding_at_once(
    name: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    """Random ids are mostly broken UTF-8, broken byte runs and special tokens."""
    tokenizer = load(name, request)
    odd = sorted(tokenizer.hidden_ids | tokenizer.byte_ids)
    token = st.integers(0, tokenizer.vocab_size - 1)
    token = token | st.sampled_from(odd) if odd else token
    text = st.text(max_size=8).map(tokenizer.encode)
    pieces = st.lists(st.lists(token, max_size=5) | text, max_size=24)
    prompt = st.lists(token, max_size=30) | text
    check_pieces(tokenizer, data.draw(prompt), data.draw(pieces))


@pytest.mark.parametrize("name", each("sentencepiece", "metaspace"))
def test_detokenizer_given_an_invalid_byte_replaces_the_whole_byte_run(
    name: str, request: pytest.FixtureRequest
) -> None:
    """A run of byte tokens decodes as a whole to text or to replacement characters, so it must be held back."""
    tokenizer = load(name, request)
    by_byte = sorted(tokenizer.byte_ids)
    good = [by_byte[byte] for byte in "你".encode()]
    word = tokenizer.encode("x")[-1:]
    assert streamed(tokenizer, word, [good, word]) == ["", "你x", ""]
    assert streamed(tokenizer, word, [good, [by_byte[0xFF]], word]) == ["", "", "\ufffd" * 4 + "x", ""]


@pytest.mark.parametrize("name", each("sentencepiece", "chat"))
def test_detokenizer_of_ordinary_text_decodes_no_token_twice(name: str, request: pytest.FixtureRequest) -> None:
    """The second time, all texts of tokens are known; without them every token is decoded again, with its window."""
    ids = load(name, request).encode("Once upon a time, there was a little girl. " * 20)
    counts = []
    for one in (copy(load(name, request)), always_decoding(load(name, request))):
        calls = 0
        decode = type(one).decode

        def counted(ids: Sequence[int]) -> str:
            nonlocal calls
            calls += 1
            return decode(one, ids)  # noqa: B023

        one.decode = counted  # type: ignore[method-assign]
        one.__dict__.setdefault("token_texts", TokenTexts(one))
        first = streamed_by_token(one, ids, [ids])
        calls = 0
        assert streamed_by_token(one, ids, [ids[i : i + 3] for i in range(0, len(ids), 3)]) == first
        counts.append(calls)
    assert counts[0] < len(ids) / 10 < len(ids) < counts[1]


def test_token_text_that_depends_on_its_neighbours_is_none(request: pytest.FixtureRequest) -> None:
    sentencepiece, chat = load("sentencepiece", request), load("chat", request)
    for one in (sentencepiece, chat):
        assert one.token_texts is not None  # type: ignore[attr-defined]
    texts = sentencepiece.token_texts  # type: ignore[attr-defined]
    assert all(texts[token] is None for token in sentencepiece.byte_ids)
    assert texts[sentencepiece.encode("Once")[-1]] == " Once" and texts[1] == ""
    texts = chat.token_texts  # type: ignore[attr-defined]
    (first, *_) = chat.encode("🎉")
    assert texts[first] is None and texts[chat.encode(" a")[0]] == " a"


def test_tokenizer_whose_decoder_reads_neighbours_has_no_token_texts(tmp_path: Path) -> None:
    """WordPiece joins words with blanks, and drops them before punctuation."""
    pairs = [("a", 0), ("##b", 1), (".", 2), ("[UNK]", 3)]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(dict(pairs), unk_token="[UNK]"))
    made.decoder = tokenizers.decoders.WordPiece()
    made.save(str(tmp_path / "tokenizer.json"))
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    words = HFTokenizer(tmp_path)
    assert words.token_texts is None
    assert words.decode([0, 1, 2]) != "".join(words.decode([token]) for token in (0, 1, 2))
    assert "".join(streamed_by_token(words, [], [[0, 1], [2, 0]])) == words.decode([0, 1, 2, 0])


def test_text_of_tokens_decoded_one_by_one_differs_from_decoding_at_once(request: pytest.FixtureRequest) -> None:
    """Negative control of the incremental detokenizer."""
    tokenizer = load("chat", request)
    ids = tokenizer.encode("🎉👩‍👩‍👧‍👦")
    assert "".join(tokenizer.decode([token]) for token in ids) != tokenizer.decode(ids)


@pytest.mark.parametrize("name", each("bytes", "byte_level", "sentencepiece"))
@pytest.mark.parametrize("kind", ["text", "broken", "hidden"])
def test_detokenizer_on_a_long_text_has_a_constant_cost_per_token(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """The cost is the number of ids that are decoded for each new token."""
    tokenizer = load(name, request)
    broken = tokenizer.token_bytes().index(b"\xff")
    ids = {
        "text": tokenizer.encode("Once upon a time 世界 " * 200)[:2000],
        "broken": [broken] * 2000,
        "hidden": [min(tokenizer.hidden_ids, default=broken)] * 2000,
    }[kind]

    class Counting:
        vocab_size, hidden_ids, byte_ids = tokenizer.vocab_size, tokenizer.hidden_ids, tokenizer.byte_ids
        encode, chat = tokenizer.encode, tokenizer.chat
        decoded = 0

        def decode(self, ids: Sequence[int]) -> str:
            Counting.decoded += len(ids)
            return tokenizer.decode(ids)

    begin = time.perf_counter()
    pieces = streamed(Counting(), ids, [[token] for token in ids])
    assert Counting.decoded < 80 * len(ids)
    assert time.perf_counter() - begin < 10
    assert "".join(pieces) == whole(tokenizer, ids, ids)


def test_byte_tokenizer_given_a_text_returns_its_utf8_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer is not None
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.decode([97, 0xC3, 0xA9, 0xC3]) == "aé\ufffd"
    assert tokenizer.decode([97, 300, 98]) == "a\ufffdb"
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", each("sentencepiece"))
def test_tokenizer_with_special_tokens_adds_and_hides_them(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load(name, request)
    assert tokenizer.vocab_size == 512
    assert tokenizer.encode("Once")[0] == 1
    assert tokenizer.hidden_ids == {0, 1, 2}
    assert len(tokenizer.byte_ids) == 256


@pytest.mark.parametrize("name", each("chat", "sentencepiece"))
def test_request_with_skip_special_tokens_false_shows_them_except_stop_tokens(
    name: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = load(name, request)
    texts: dict[str, int] = tokenizer.special_texts  # type: ignore[attr-defined]
    (first, second), word = list(texts)[:2], tokenizer.encode("Once")[-1]
    processor = InputProcessor(tokenizer, tokenizer.vocab_size, (texts[second],), EngineConfig())
    shown = {}
    for skips in (True, False):
        decoder = processor.request([word], SamplingParams(skip_special_tokens=skips)).output.decoder
        shown[skips] = "".join(decoder.push([word, texts[first], word, texts[second]], 0)) + decoder.finish(4)
    plain = tokenizer.decode([word])
    assert shown[False].replace(" ", "") == f"{plain}{first}{plain}" and first not in shown[True]
    assert shown[True].split() == shown[False].replace(first, "").split()
    params = SamplingParams(skip_special_tokens=False, stop=f"{first}{plain}"[:-1])
    stopped = processor.request([word], params).output.decoder
    if " " not in shown[False]:  # else a word has a blank before it
        assert "".join(stopped.push([word, texts[first], word], 0)) == plain and stopped.stop_string


@pytest.mark.parametrize("name", each("chat", "sentencepiece"))
def test_request_with_visible_special_tokens_shows_these_alone(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load(name, request)
    texts: dict[str, int] = tokenizer.special_texts  # type: ignore[attr-defined]
    (first, second), word = list(texts)[:2], tokenizer.encode("Once")[-1]
    processor = InputProcessor(tokenizer, tokenizer.vocab_size, (), EngineConfig())
    params = SamplingParams(visible_special_tokens=(second, "no token"), stop=f"x{second}")
    decoder = processor.request([word], params).output.decoder
    shown = "".join(decoder.push([word, texts[first], texts[second], word], 0)) + decoder.finish(4)
    plain = tokenizer.decode([word])
    assert shown.replace(" ", "") == f"{plain}{second}{plain}"
    with pytest.raises(ValueError, match=r"^stop: .*can never match"):
        processor.request([word], SamplingParams(visible_special_tokens=(second,), stop=f"x{first}"))


def test_request_for_special_tokens_of_a_tokenizer_that_cannot_show_them_raises() -> None:
    class Hiding(ByteTokenizer):
        hidden_ids = frozenset({7})
        with_special_tokens = property()  # type: ignore[assignment]  # raises AttributeError, as if it were absent

    processor = InputProcessor(Hiding(), 256, (), EngineConfig())
    with pytest.raises(ValueError, match=r"skip_special_tokens: expected True, and .*Hiding\) cannot show"):
        processor.request([1], SamplingParams(skip_special_tokens=False))
    processor.request([1])


QWEN_SYSTEM = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"


@pytest.mark.parametrize("name", each("chat"))
def test_tokenizer_given_chat_messages_applies_the_chat_template(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load(name, request)
    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])
    system = "" if name == "chat" else QWEN_SYSTEM
    assert ids == tokenizer.encode(f"{system}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_tokenizer_without_chat_template_given_messages_raises(request: pytest.FixtureRequest) -> None:
    tokenizer = load("sentencepiece", request)
    with pytest.raises(ValueError, match=r"sentencepiece.*no chat template"):
        tokenizer.chat([{"role": "user", "content": "Hi"}])


def test_tokenizer_loaded_from_an_empty_folder_is_none(tmp_path: Path) -> None:
    """A missing folder raises."""
    assert load_tokenizer(None) is None
    assert load_tokenizer(tmp_path) is None
    with pytest.raises(ValueError, match=r"expected a folder, \"bytes\" or None, got .*absent"):
        load_tokenizer(tmp_path / "absent")


def test_tokenizer_loaded_from_invalid_files_raises(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"expected tokenizer files that transformers can read"):
        load_tokenizer(tmp_path)
