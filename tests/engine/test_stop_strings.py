"""Test that text is cut before the first stop string for any tokens, rounds and chunks, as by `str.find`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec import Chunk, Engine, SamplingParams
from jspec.core.records import StepOutput
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.request import OutputState, Request
from jspec.engine.run.output_processor import make_chunk, make_completion, process_step_output
from jspec.engine.text.detokenizer import TextDecoder
from jspec.engine.text.stop_strings import StopStringMatcher
from jspec.engine.text.tokenizer import ByteTokenizer
from tests.support import engines

pytestmark = pytest.mark.once


def first_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, int] | None:
    """Return (end, index of the stop string) of the match that ends first after ``after`` characters."""
    ends = []
    for index, stop in enumerate(stops):
        start = text.find(stop, max(after + 1 - len(stop), 0))
        ends += [(start + len(stop), index)] if start >= 0 else []
    return min(ends, default=None)


# -- text in pieces

STOPS = st.lists(st.text("ab€", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400)
@given(pieces=st.lists(st.text("ab€", max_size=5), max_size=9), stops=STOPS, exempt=st.integers(0, 3))
def test_stop_string_matcher_on_text_in_pieces_cuts_it_like_the_whole_text(
    pieces: list[str], stops: list[str], exempt: int
) -> None:
    """The matcher holds text back exactly as long as it may be part of a stop string."""
    searched, handed = StopStringMatcher(stops), ""
    for index, piece in enumerate(pieces):
        handed += searched.push(piece, may_end=index >= exempt)
        text = "".join(pieces[: index + 1])
        if searched.found is None:
            beginnings = [stop[:size] for stop in stops for size in range(len(stop))]
            held = max(len(beginning) for beginning in beginnings if text.endswith(beginning))
            assert handed == text[: len(text) - held]
    text = "".join(pieces)
    handed += searched.finish()
    match = first_stop(text, stops, after=len("".join(pieces[:exempt])))
    if match is None:
        assert (handed, searched.found) == (text, None)
    else:
        assert searched.found == stops[match[1]]
        assert handed == text[: match[0] - len(searched.found)]


@pytest.mark.parametrize(
    ("stops", "text", "expected", "found"),
    [
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # the first match to end wins, though another one began earlier
        (["b", "ab"], "xab", "xa", "b"),  # of two matches with equal ends the first listed wins
        (["ab", "b"], "xab", "x", "ab"),
        (["aab"], "aaab", "a", "aab"),  # the match begins inside a partial match
        (["\n\n"], "a\n\n\n", "a", "\n\n"),
    ],
)
def test_stop_string_matcher_with_overlapping_stops_cuts_at_the_first_end(
    stops: list[str], text: str, expected: str, found: str
) -> None:
    for cut in range(len(text)):
        searched = StopStringMatcher(stops)
        handed = searched.push(text[:cut]) + searched.push(text[cut:]) + searched.finish()
        assert (handed, searched.found) == (expected, found)


# -- tokens in rounds

CHARACTERS = "aé€\U0001f600"  # of one to four bytes


def report_of(tokens: Sequence[int], rounds: Sequence[int]) -> np.ndarray:
    """Return reports of rounds with the given numbers of tokens, all but one drafted; the last ends the request."""
    width, start, rows = max(rounds), 0, []
    for count in rounds:
        part = [*tokens[start : start + count], *[-1] * (width - count)]
        start += count
        rows.append([*part, count, count - 1, width - 1, int(start == len(tokens))])
    return np.asarray(rows, np.int32)[:, None]


@st.composite
def decoded(draw: Any) -> tuple[list[int], list[int], tuple[str, ...], int]:
    """Draw tokens, tokens per round, stop strings (mostly parts of the text) and min_tokens."""
    text = draw(st.text(CHARACTERS, min_size=1, max_size=12))
    tokens = list(text.encode())[draw(st.integers(0, 1)) :] or [97]
    rounds: list[int] = []
    while sum(rounds) < len(tokens):
        rounds.append(draw(st.integers(1, min(5, len(tokens) - sum(rounds)))))
    cuts = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 4)).map(lambda cut: text[cut[0] : sum(cut)])
    stops = draw(st.lists(cuts | st.text(CHARACTERS + "\ufffd", min_size=1, max_size=3), min_size=1, max_size=3))
    return tokens, rounds, tuple(stops), draw(st.integers(0, min(3, len(tokens))))


@settings(max_examples=300)
@given(case=decoded())
def test_output_processor_with_stop_strings_cuts_at_the_completing_token(
    case: tuple[list[int], list[int], tuple[str, ...], int],
) -> None:
    tokens, rounds, stops, min_tokens = case
    params = SamplingParams(max_tokens=len(tokens), stop=stops, min_tokens=min_tokens)
    output = OutputState(TextDecoder(ByteTokenizer(), [97], stops, (), min_tokens))
    request, chunks = Request(1, (97,), params, 0, (), len(tokens), output=output), list[Chunk]()
    for one in report_of(tokens, rounds):
        step = StepOutput(report=one[None], trace=None)  # type: ignore[arg-type]
        reason = process_step_output(request, step, 0, is_round=True)
        chunks.append(make_chunk(request, len([t for chunk in chunks for t in chunk.token_ids])))
        if reason is not None:
            break
    output.finish_text()
    output.finish_reason = reason if output.stop_string is None else "stop"
    chunks.append(make_chunk(request, len(request.token_ids)))
    done = make_completion(request)
    expected, count, found = by_hand(tokens, stops, min_tokens)
    assert (done.text, done.token_ids, output.stop_string) == (expected, tokens[:count], found)
    assert done.metrics.num_tokens == len(done.from_draft) == count
    assert done.metrics.num_accepted_tokens == sum(done.from_draft) <= count
    assert "".join(chunk.text or "" for chunk in chunks) == expected
    assert [token for chunk in chunks for token in chunk.token_ids] == done.token_ids


def by_hand(tokens: list[int], stops: Sequence[str], min_tokens: int) -> tuple[str, int, str | None]:
    """Return text, number of tokens and stop string, found by decoding the whole text at each token."""
    text, exempt = "", 0
    for count in range(1, len(tokens) + 1):
        text = bytes(tokens[:count]).decode("utf-8", "replace")
        text = text[:-1] if text.endswith("\ufffd") and count < len(tokens) else text
        exempt = len(text) if count <= min_tokens else exempt
        if match := first_stop(text, stops, after=exempt):
            return text[: match[0] - len(stops[match[1]])], count, stops[match[1]]
    return text, len(tokens), None


# -- through the engine: every token is a character

PROMPTS = [[3, 1, 4], [5, 9, 2, 6, 5, 3, 5], [3, 3]]
LENGTH = 20
PARAMS = [SamplingParams(max_tokens=LENGTH, seed=seed, temperature=t) for seed, t in enumerate((0.0, 1.0, 1.0))]


@pytest.fixture(scope="module")
def three_rounds() -> Engine:
    """Return an engine with three rounds per dispatch and pages of one row."""
    return engines.eagle3(rounds=3, page_size=1)


@pytest.fixture
def engine(three_rounds: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Yield the engine with a tokenizer; check after each test that no page or slot is held."""
    engine = three_rounds
    monkeypatch.setattr(engine.input_processor, "tokenizer", ByteTokenizer())
    yield engine
    engine.scheduler.pages.check()
    assert engine.pages_in_use == 0 and not engine.scheduler.has_work


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [done.token_ids for done in engines.plain().generate(PROMPTS, PARAMS)]


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_engine_given_a_stop_string_at_any_place_cuts_tokens_and_text_there(
    engine: Engine, plain: list[list[int]]
) -> None:
    """A cut inside a round drops the round's later tokens; another request in the batch has no stop string."""
    for start in range(LENGTH - 3):
        stops = [text_of(plain[row][start : start + 1 + row]) for row in (0, 1)]
        params = [replace(PARAMS[row], stop=stops[row]) for row in (0, 1)] + [PARAMS[2]]
        done = engine.generate(PROMPTS, params)
        for row in (0, 1):
            match = first_stop(text_of(plain[row]), [stops[row]])
            assert match is not None
            assert done[row].token_ids == plain[row][: match[0]]
            assert done[row].text == text_of(plain[row])[: match[0] - len(stops[row])]
            assert (done[row].finish_reason, done[row].stop_reason) == ("stop", stops[row])
            assert done[row].metrics.num_tokens == len(done[row].from_draft) == match[0]
            assert done[row].metrics.num_accepted_tokens == sum(done[row].from_draft)
        assert (done[2].token_ids, done[2].finish_reason, done[2].stop_reason) == (plain[2], "length", None)


def test_stream_with_stop_strings_never_yields_text_of_a_stop_string(engine: Engine, plain: list[list[int]]) -> None:
    for row, ids in enumerate(plain):
        whole = text_of(ids)
        for stops in ([whole[9:12]], [whole[9:12] + "z", whole[7:14] + "z"], [whole[12:15], whole[10:14]]):
            params, shown = replace(PARAMS[row], stop=stops), ""
            chunks = list(engine.stream(PROMPTS[row], params))
            match = first_stop(whole, stops)
            expected = whole if match is None else whole[: match[0] - len(stops[match[1]])]
            for chunk in chunks:
                shown += chunk.text or ""
                assert expected.startswith(shown)
            assert shown == expected == engine.generate(PROMPTS[row], params)[0].text
            assert chunks[-1].finish_reason == ("length" if match is None else "stop")


def test_request_ended_by_a_stop_string_frees_slot_and_pages_at_once(engine: Engine, plain: list[list[int]]) -> None:
    """It ends while rounds are in flight; other requests that use its cached pages get the right tokens."""
    with ByHand(engine) as by_hand:
        request = by_hand.submit(PROMPTS[0], replace(PARAMS[0], stop=text_of(plain[0][2:4])))
        done = by_hand.result(request)
        assert engine.core.in_flight and engine.scheduler.pages.num_used == 0
        assert len(engine.scheduler._free_slots) == 2
    assert done.token_ids == plain[0][: len(done.token_ids)] and len(done.token_ids) < LENGTH
    (after,) = engine.generate(PROMPTS[0] + done.token_ids, SamplingParams(max_tokens=8, temperature=0))
    assert after.metrics.num_cached_tokens > len(PROMPTS[0])
    assert after.token_ids == plain[0][len(done.token_ids) :][:8]


def test_samples_with_a_stop_string_are_cut_independently(engine: Engine) -> None:
    params = SamplingParams(max_tokens=LENGTH, seed=5, n=4)
    whole = engine.generate(PROMPTS[1], params)[0].samples
    stop = (whole[0].text or "")[4:6]
    done = engine.generate(PROMPTS[1], replace(params, stop=[stop]))[0].samples
    matches = [first_stop(one.text or "", [stop]) for one in whole]
    assert matches[0] is not None and len(set(matches)) > 1
    for one, all_, match in zip(done, whole, matches, strict=True):
        assert one.token_ids == all_.token_ids[: match[0] if match else LENGTH]
        assert one.finish_reason == ("stop" if match else "length")


def test_engine_with_min_tokens_ignores_earlier_stop_strings(engine: Engine, plain: list[list[int]]) -> None:
    ids = plain[1]
    stop = text_of(ids[0:1])
    places = [index for index, token in enumerate(ids) if token == ids[0]]
    (done,) = engine.generate(PROMPTS[1], replace(PARAMS[1], stop=stop, min_tokens=1))
    end = places[1] + 1 if len(places) > 1 else LENGTH
    assert done.token_ids == ids[:end]


def test_engine_given_stop_token_and_stop_string_stops_at_the_first_one(engine: Engine, plain: list[list[int]]) -> None:
    """A stop token's text cannot complete a stop string."""
    ids = plain[0]
    place = next(i for i in range(4, LENGTH) if ids[i] not in ids[:i])
    for stop, reason in ((text_of(ids[place : place + 1]), ids[place]), (text_of(ids[2:4]), text_of(ids[2:4]))):
        (done,) = engine.generate(PROMPTS[0], replace(PARAMS[0], stop=stop, stop_token_ids=(ids[place],)))
        assert (done.finish_reason, done.stop_reason) == ("stop", reason)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], 5, [5], {"a": 1}, ("a", None)])
def test_sampling_params_with_impossible_stop_raise(stop: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"SamplingParams\.stop: expected a text or a list of texts of whole characters, none empty, got",
    ):
        SamplingParams(stop=stop)


def test_sampling_params_with_stop_as_text_or_list_have_a_tuple() -> None:
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop == ("ab",)
    assert SamplingParams(stop=None).stop == SamplingParams().stop == ()  # type: ignore[arg-type]


def test_engine_given_a_stop_string_without_tokenizer_raises(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.input_processor, "tokenizer", None)
    with pytest.raises(
        ValueError, match=r"stop: expected none, because this engine has no tokenizer, got \('a',\); pass tokenizer="
    ):
        engine.generate([1], SamplingParams(stop="a"))
