"""Test how lines become documents, and how documents become rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.draft.draft_vocab import frequent_tokens
from jspec.engine.tokenizer import ByteTokenizer
from jspec.train import pack
from jspec.train.config import TrainConfig
from jspec.train.data import DataError, read_documents
from jspec.train.material import draft_vocabulary, prepare
from jspec.train.rows import ALIGN


class ChatBytes(ByteTokenizer):
    """Bytes with a chat template of one letter a role; "!" in a message makes the template rewrite the first one."""

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        text = "".join(f"<{one['role'][0]}>{one['content']}\n" for one in messages)
        if any("!" in one["content"] for one in messages):
            text = text.upper()
        return self.encode(text + ("<a>" if options.get("add_generation_prompt", True) else ""))


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path, vocab: int = 256) -> list[tuple[int, str, str]]:
    """Return the line, the text and the counted text of each document."""
    found = []
    for line, (tokens, counted) in read_documents(path, ChatBytes(), vocab):
        found.append((line, bytes(tokens.tolist()).decode(), bytes(tokens[counted].tolist()).decode()))
    return found


def test_lines_of_all_shapes_count_what_the_target_would_generate(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "left out"},
    ]
    file = write(tmp_path / "d", {"text": "abc"}, "", {"prompt": "de", "completion": "fg", "id": 3}, {"messages": chat})
    assert read(file) == [
        (1, "abc", "abc"),
        (3, "defg", "fg"),
        (4, "<u>hi\n<a>yes\n<u>and\n<a>no\n", "yes\nno\n"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "no JSON"),
        ("[1]", "list"),
        ({"txt": "abc"}, "txt"),
        ({"text": 3}, "text"),
        ({"text": "ab"}, "3 tokens or more"),
        ({"prompt": "abc", "completion": ""}, "some count"),
        ({"messages": [{"role": "user", "content": "x"}]}, "assistant"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b!"}]}, "only appends"),
        ({"text": "abcé"}, "below 128"),
    ],
)
def test_bad_lines_are_named_by_number_with_the_reason(tmp_path: Path, line: Any, reason: str) -> None:
    file = write(tmp_path / "d", {"text": "good"}, line, {"text": "good"}, line)
    with pytest.raises(DataError, match=rf"got 2 bad of 4: line 2: .*{reason}.*; line 4: "):
        read(file, vocab=128)


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        read(write(tmp_path / "d", "", ""))
    with pytest.raises(FileNotFoundError, match="no such file"):
        read(tmp_path / "none")


@given(st.lists(st.integers(1, 96), max_size=40))
def test_first_fit_equals_the_plain_search_and_never_overlaps(sizes: list[int]) -> None:
    length, used = 96, list[int]()
    expected = []
    for size in sizes:
        need = -(-size // ALIGN) * ALIGN
        row = next((i for i, held in enumerate(used) if held + need <= length), len(used))
        used += [0] if row == len(used) else []
        expected.append((row, used[row]))
        used[row] += need
    assert list(zip(*pack.first_fit(sizes, length), strict=True)) == expected


def test_packed_rows_hold_every_token_and_name_their_lines(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, size))) for size in rng.integers(3, 150, 30)]
    file = write(tmp_path / "d", *({"text": text} for text in texts))
    config = TrainConfig(length=64, held_out=0.3)
    material = prepare(file, ByteTokenizer(), 256, config, tmp_path / "rows")
    assert material.held_out is not None
    seen: dict[int, list[str]] = {}
    for rows in (material.train, material.held_out):
        for row, line in rows.lines.tolist():
            assert line in rows.lines_of(np.array([row]))
        for row in range(len(rows)):
            documents = rows.lines[rows.lines[:, 0] == row, 1]
            for number, line in enumerate(documents, start=1):
                at = np.flatnonzero(rows.segments[row] == number)
                assert at[0] % ALIGN == 0 and np.array_equal(at, np.arange(at[0], at[0] + len(at)))
                seen.setdefault(line, []).append(bytes(rows.tokens[row, at].tolist()).decode())
    parts = {line: [text[i : i + 64] for i in range(0, len(text), 64)] for line, text in enumerate(texts, start=1)}
    parts = {line: [part for part in own if len(part) >= 3] for line, own in parts.items()}
    assert {line: sorted(own) for line, own in seen.items()} == {line: sorted(own) for line, own in parts.items()}
    again = prepare(file, ByteTokenizer(), 256, config, tmp_path / "rows")
    assert again.describe() == material.describe()
    other = prepare(
        write(tmp_path / "e", {"text": "abcd"}),
        ByteTokenizer(),
        256,
        TrainConfig(length=64, held_out=0),
        tmp_path / "other",
    )
    assert other.describe() != material.describe() and other.held_out is None


def test_order_reads_every_row_once_an_epoch_in_another_order() -> None:
    order = pack.Order(10, seed=1)
    rows = np.concatenate([order.batch(step, 4) for step in range(10)]).reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in rows.tolist())
    assert len({tuple(epoch) for epoch in rows.tolist()}) == 4
    np.testing.assert_array_equal(pack.Order(10, seed=1).batch(7, 4), rows.reshape(10, 4)[7])
    assert not np.array_equal(pack.Order(10, seed=2).batch(7, 4), rows.reshape(10, 4)[7])


def test_draft_vocabulary_is_the_most_frequent_counted_tokens_and_those_that_end_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "d", {"prompt": "zzzzzz", "completion": "aaabbc"}, {"text": "aab"})
    material = prepare(file, ByteTokenizer(), 256, TrainConfig(length=32, held_out=0), tmp_path / "rows")
    ids, coverage = draft_vocabulary(material.train, 2, 256, always=())
    assert (ids.tolist(), coverage) == ([97, 98], 8 / 9)
    assert "88.9 %" in caplog.text
    ids, coverage = draft_vocabulary(material.train, 2, 256, always=(200,))
    assert (ids.tolist(), coverage) == ([97, 200], 5 / 9)
    assert draft_vocabulary(material.train, None, 256, always=())[0].tolist() == list(range(256))
    with pytest.raises(ValueError, match=r"draft_vocab: expected 1 .* to 256, the target's vocabulary, got 257"):
        draft_vocabulary(material.train, 257, 256, always=())


def test_frequent_tokens_with_ids_beyond_the_texts_contain_them() -> None:
    assert frequent_tokens([[1, 1, 2]], 2, always=[9]).tolist() == [1, 9]
