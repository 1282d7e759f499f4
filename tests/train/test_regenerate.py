"""Test that regenerated answers are the target's own, and that an interrupted file is completed with the same lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jspec.engine.callers.api import Engine
from jspec.engine.request.sampling_params import SamplingParams
from jspec.train import regenerate as module
from jspec.train.config import TrainConfig
from jspec.train.data import DataError
from jspec.train.regenerate import regenerate
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

        def answer(prompt: Any, seed: int) -> str:
            (done,) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0.7, seed=seed))
            return done.text

        assert found[0] == {"line": 1, "prompt": "one two", "completion": answer("one two", 1)}
        assert found[1]["completion"] == answer("three", 2) != answer("three", 3)
        talk = found[2]["messages"]
        assert [one["role"] for one in talk] == ["user", "assistant"] * 3
        for index in (1, 3, 5):
            assert talk[index]["content"] == answer(Chat().chat(talk[:index]), 3)
        assert found[4] == {"line": 6, "prompt": "no answer", "completion": answer("no answer", 6)}
        asked = LINES[6]["messages"]
        assert found[5]["messages"] == [*asked, {"role": "assistant", "content": answer(Chat().chat(asked), 7)}]


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


def test_bad_lines_are_refused_before_anything_is_generated(data: Path) -> None:
    data.write_text(data.read_text() + "[]\n")
    with pytest.raises(DataError, match="line 8: "):
        run(data)
    assert not data.with_name("out").exists()
