"""Test that regenerated answers are the target's own, and that an interrupted file is completed with the same lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jspec.engine.callers.api import Engine
from jspec.engine.request.request import Completion
from jspec.engine.request.sampling_params import SamplingParams
from jspec.engine.text.tokenizer import ByteTokenizer
from jspec.train import regenerate as module
from jspec.train.config import TrainConfig
from jspec.train.data import read_documents
from jspec.train.regenerate import regenerate
from jspec.train.shapes import DataError
from tests.support import tiny
from tests.train.test_data import ChatBytes

pytestmark = pytest.mark.once

CONFIG = TrainConfig(length=64, max_tokens=6, temperature=0.7)
TARGET = tiny.model(256, sharpness=4.0)
LINES: list[dict[str, Any]] = [
    {"text": "one two"},
    {"prompt": "three", "completion": "left out"},
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "left out"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "left out"},
            {"role": "user", "content": "c"},
        ]
    },
    {"text": "x" * 80},
    {"text": "four five"},
    {"prompt": "no answer", "text": None},
    {"messages": [{"role": "user", "content": "question"}], "text": None},
]


class Chat(ChatBytes):
    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if any("#" in one["content"] for one in messages):
            raise ValueError("no template for #")
        clean = [{**one, "content": one["content"].replace("!", "?")} for one in messages]
        return super().chat(clean, **options)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def run(data: Path, name: str = "out") -> list[dict[str, Any]]:
    out = regenerate(data, data.with_name(name), TARGET, Chat(), (), CONFIG)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_are_those_of_plain_decoding_with_the_seeds_of_the_lines(
    data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOTS", 4)
    found = run(data)
    assert [line["line"] for line in found] == [1, 2, 3, 5, 6, 7]
    assert "1 of 7 lines were left out" in caplog.text
    with Engine(TARGET, tokenizer=Chat(), slots=1, max_len=64, prefill_buckets=(64,), controls=False) as engine:

        def answer(prompt: Any, seed: int) -> Completion:
            (done,) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0.7, seed=seed))
            return done

        def document(prompt: Any, seed: int) -> dict[str, Any]:
            ids = Chat().encode(prompt) if isinstance(prompt, str) else prompt
            made = answer(prompt, seed).token_ids
            return {"token_ids": [*ids, *made], "answers": [[len(ids), len(ids) + len(made)]]}

        assert found[0] == {"line": 1, "documents": [document("one two", 1)], "is_cut": False}
        assert found[1]["documents"] == [document("three", 2)] != [document("three", 3)]
        talk: list[Any] = []
        expected = []
        for message in LINES[2]["messages"][::2]:
            prompt = Chat().chat([*talk, message])
            made = answer(prompt, 3)
            expected.append((prompt, made.token_ids))
            talk += [message, {"role": "assistant", "content": made.text}]
        assert [
            (one["token_ids"][:start], one["token_ids"][start:end])
            for one in found[2]["documents"]
            for start, end in one["answers"]
        ] == expected
        assert found[4] == {"line": 6, "documents": [document("no answer", 6)], "is_cut": False}
        assert found[5]["documents"] == [document(Chat().chat(LINES[6]["messages"]), 7)]


def test_an_interrupted_file_is_completed_with_the_same_lines(
    data: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOTS", 4)
    whole = run(data)
    text = data.with_name("out").read_text()
    data.with_name("cut").write_text(text[: text.rindex("\n", 0, -1) + 9])
    caplog.clear()
    assert run(data, "cut") == whole
    assert "1 of 7 lines were left out" in caplog.text, "also those before the interruption"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ([], "expected one of the shapes"),
        ({"messages": [{"role": "user", "content": "#"}, {"role": "assistant", "content": "a"}]}, "no template for #"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}, "an answer to make"),
    ],
)
def test_bad_lines_are_refused_before_anything_is_generated(data: Path, line: Any, reason: str) -> None:
    data.write_text(data.read_text() + f"{json.dumps(line)}\n")
    with pytest.raises(DataError, match=f"got 1 bad of 8: line 8: .*{reason}"):
        run(data)
    assert not data.with_name("out").exists()


class Channels(ByteTokenizer):
    """Bytes of which the lower half are special, and a chat template that writes roles and contents."""

    hidden_ids = frozenset(range(128))

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode([token for token in ids if token not in self.hidden_ids])

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        return self.encode("".join(f"<{one['role']}>{one['content']}" for one in messages))


def test_generated_ids_are_kept_and_a_talk_ends_where_their_text_lacks_special_tokens(
    data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data.write_text(json.dumps({"messages": turn * 3}) + "\n")
    out = regenerate(data, data.with_name("out"), TARGET, Channels(), (), CONFIG)
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    (document,) = line["documents"]
    ((start, end),) = document["answers"]
    assert start == len("<user>a") and end == start + CONFIG.max_tokens == len(document["token_ids"])
    assert not Channels.hidden_ids.isdisjoint(document["token_ids"][start:]), "the seed of the line makes one"
    ((number, read),) = read_documents(out, Channels(), 256)
    assert (number, read.tokens.tolist()) == (1, document["token_ids"])
    assert np.flatnonzero(read.counted).tolist() == list(range(start, end))
    assert line["is_cut"] and "1 of 1 conversations end before their last answer" in caplog.text
    with pytest.raises(DataError, match="line 1: documents: expected texts or messages, got answers of a target"):
        regenerate(out, data.with_name("again"), TARGET, Channels(), (), CONFIG)


class OneTurn(ByteTokenizer):
    """A byte tokenizer whose chat template refuses a third message, unless the second one is "b"."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if len(messages) > 2 and messages[1]["content"] != "b":
            raise ValueError("no second answer")
        return self.encode("".join(f"<{one['role']}>{one['content']}" for one in messages))


def test_a_talk_whose_template_refuses_an_answer_ends_with_it() -> None:
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for text, is_cut in (("c", True), ("b", False)):
        talk = module._Talk({"messages": turn * 2}, OneTurn())
        done: Any = SimpleNamespace(text=text, token_ids=[ord(text)], finish_reason="length")
        talk.add(done)
        assert (talk.is_cut, talk.prompt is None) == (is_cut, is_cut)
        (document,) = talk.to_json()["documents"]
        assert document["answers"] == [[len("<user>a"), len("<user>ab")]]
