"""Test how lines become documents, and how documents become rows."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from jspec.draft.draft_vocab import frequent_tokens
from jspec.engine.text.tokenizer import ByteTokenizer, HFTokenizer
from jspec.train import pack
from jspec.train.config import TrainConfig
from jspec.train.data import read_documents, read_lines
from jspec.train.material import draft_vocabulary, prepare
from jspec.train.rows import ALIGN
from jspec.train.shapes import DataError
from tests.faults.test_damaged_checkpoints import change_value
from tests.support import tokenizer_folders

pytestmark = pytest.mark.once


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


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CALLS = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LAST_THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROMPT_THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
FUNCTION = {"name": "weather", "arguments": '{"city": "Oslo"}'}
CALL = {"id": "1", "type": "function", "function": FUNCTION}
FULL: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "no"},
    {"role": "assistant", "content": "Perhaps.", "weight": 0},
]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def templated(folder: Path, template: str) -> tuple[HFTokenizer, Any]:
    """Return a tokenizer with a chat template, and that of transformers."""
    file = tokenizer_folders.write(folder / "tokenizer", "chat") / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return HFTokenizer(file.parent), AutoTokenizer.from_pretrained(file.parent)


def documents_of(folder: Path, tokenizer: HFTokenizer, *lines: Any) -> list[tuple[list[int], str]]:
    """Return the tokens and the counted text of each document."""
    plain = tokenizer.with_special_tokens()
    documents = read_documents(write(folder / "d", *lines), tokenizer, tokenizer.vocab_size)
    return [(one.tokens.tolist(), plain.decode(one.tokens[one.counted].tolist())) for _, one in documents]


def test_fine_tuning_lines_of_openai_are_rendered_as_the_template_renders_its_form(tmp_path: Path) -> None:
    ours, theirs = templated(tmp_path, CALLS)
    messages: list[dict[str, Any]] = [
        *FULL,
        {"role": "user", "content": "So?"},
        {"role": "assistant", "content": "No.", "weight": 1},
    ]
    calls = [{**CALL, "function": {**FUNCTION, "arguments": {"city": "Oslo"}}}]
    form = [
        {"role": "system", "content": "Be\nbrief."},
        messages[1],
        {**messages[2], "content": "", "tool_calls": calls},
    ]
    expected = theirs.apply_chat_template([*form, *messages[3:]], tools=[WEATHER], return_dict=False)
    line = {"messages": messages, "tools": [WEATHER], "parallel_tool_calls": False}
    answers = 'weather{"city": "Oslo"}<|im_end|>No.<|im_end|>'
    assert documents_of(tmp_path, ours, line) == [(expected, answers)]
    assert expected != theirs.apply_chat_template([*form, *messages[3:]], return_dict=False)  # the negative control


def test_answers_that_the_template_later_changes_are_documents_as_it_first_renders_them(tmp_path: Path) -> None:
    ours, theirs = templated(tmp_path, LAST_THINKS)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e", "reasoning_content": "f"},
    ]
    first, second = (theirs.apply_chat_template(messages[:size], return_dict=False) for size in (2, 4))
    counted = ["<think>c</think>b<|im_end|>\n", "<think>f</think>e<|im_end|>\n"]
    assert documents_of(tmp_path, ours, {"messages": messages}) == [(first, counted[0]), (second, counted[1])]


def test_answer_is_counted_where_the_template_renders_it_without_the_end_of_the_prompt(tmp_path: Path) -> None:
    ours, theirs = templated(tmp_path, PROMPT_THINKS)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    expected = theirs.apply_chat_template(messages, return_dict=False)
    assert documents_of(tmp_path, ours, {"messages": messages}) == [(expected, "b<|im_end|>")]
    messages[1] |= {"reasoning_content": "hm"}
    with pytest.raises(DataError, match=r"line 1: messages: .* leaves out reasoning_content of message 2; write its"):
        documents_of(tmp_path, ours, {"messages": messages})


@pytest.mark.parametrize("opens", [True, False])
def test_reasoning_that_the_template_removes_is_trained_on_as_the_target_writes_it(tmp_path: Path, opens: bool) -> None:
    """DeepSeek R1's template removes all reasoning, and some begin it in the prompt; the target writes the rest."""
    template = PROMPT_THINKS if opens else PROMPT_THINKS.replace("<think>\n", "")
    ours, theirs = templated(tmp_path, template)
    thought, second = "<think>\nhm\n</think>\n\nb", "<think>\nso\n</think>\n\ne"
    messages = [USER, {**ANSWER, "content": thought}, {"role": "user", "content": "d"}, {**ANSWER, "content": second}]
    expected = []
    for size, text in ((1, thought), (3, second)):
        prompt = theirs.apply_chat_template(messages[:size], add_generation_prompt=True, return_dict=False)
        answer = f"{text.removeprefix('<think>' + chr(10)) if opens else text}<|im_end|>"
        expected.append((prompt + theirs.encode(answer, add_special_tokens=False), answer))
    assert documents_of(tmp_path, ours, {"messages": messages}) == expected
    for wrong in ({"content": "no </think> answer </think>"}, {"content": thought, "reasoning_content": "other"}):
        with pytest.raises(DataError, match=r"leaves out content of message 2"):
            documents_of(tmp_path, ours, {"messages": [USER, {**ANSWER, **wrong}]})


def test_conversations_are_messages_with_other_names(tmp_path: Path) -> None:
    turns = [("human", "hi"), ("gpt", "yes"), ("user", "and"), ("assistant", "no")]
    shared = [{"from": name, "value": text} for name, text in turns]
    roles = [{"role": role, "content": text} for role, (_, text) in zip(["user", "assistant"] * 2, turns, strict=True)]
    file = write(tmp_path / "d", {"conversations": shared, "id": "x"}, {"conversations": roles}, {"messages": roles})
    assert [line[1:] for line in read(file)] == [("<u>hi\n<a>yes\n<u>and\n<a>no\n", "yes\nno\n")] * 3


def regenerated(**fields: Any) -> dict[str, Any]:
    return {"line": 1, "documents": [{"token_ids": [1, 2, 3], "answers": [[1, 3]], **fields}]}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            {"conversations": [{"from": "bot", "value": "x"}]},
            "conversations.0..from: expected one of human, gpt, .*'bot'",
        ),
        ({"conversations": [{"from": "human", "value": 3}]}, "conversations.0..value: expected a text, got 3"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "a message before the first answer"),
        ({"messages": [USER, {**ANSWER, "weight": 2}]}, "messages.1..weight: expected 0 or 1, got 2"),
        ({"messages": [USER, ANSWER], "functions": [{"name": "f"}]}, "functions: expected tools"),
        ({"messages": [USER, ANSWER], "tools": "f"}, "tools: expected a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]}, "has no image input"),
        ("{", "no JSON"),
        ("[1]", "list"),
        ({"txt": "abc"}, "txt"),
        ({"text": 3}, "text"),
        ({"text": None, "prompt": None, "messages": None}, "text.*prompt.*messages"),
        ({"text": None, "prompt": "abc"}, "text.*prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "assistant"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b!"}]}, "only appends"),
        ({"text": "abcé"}, "below 128"),
        ({"text": "abc\ud800"}, "surrogates not allowed"),
        ({"messages": [USER, {**ANSWER, "content": "\ud800"}]}, "surrogates not allowed"),
        *(
            (regenerated(token_ids=ids), "expected one of the shapes, .*documents")
            for ids in (5, [1, None, 3], [2**32])
        ),
        *((regenerated(answers=[span]), "expected one of the shapes") for span in (1, [1], [1, 9], [2, 1], [0, 1.5])),
    ],
)
def test_bad_lines_are_named_by_number_with_the_reason(tmp_path: Path, line: Any, reason: str) -> None:
    file = write(tmp_path / "d", {"text": "good"}, line, {"text": "good"}, line)
    with pytest.raises(DataError, match=rf"got 2 bad of 4: line 2: .*{reason}.*; line 4: "):
        read(file, vocab=128)


FINE_TUNING = {"messages": [*FULL, USER, {**ANSWER, "weight": 1}], "tools": [WEATHER], "parallel_tool_calls": False}
SHARED = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human"}]}
WHOLE: list[dict[str, Any]] = [FINE_TUNING, FINE_TUNING, SHARED, {"prompt": "a", "completion": "b"}, regenerated()]


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.fuzz)])
def test_damaged_line_is_read_or_refused_in_few_words(tmp_path: Path, count: int) -> None:
    tokenizer, _ = templated(tmp_path, CALLS)
    counts, longest = Counter[str](), 0
    for case in range(count):
        draw = random.Random(case)
        line = json.loads(json.dumps(draw.choice(WHOLE)))
        change_value(line, draw)
        try:
            counts["read"] += len(list(read_documents(write(tmp_path / "d", line), tokenizer, tokenizer.vocab_size)))
        except DataError as error:
            counts["refused"] += 1
            longest = max(longest, len(str(error)))
    assert longest < 700
    assert min(counts["read"], counts["refused"]) > count / 10


def test_columns_of_other_shapes_that_are_null_are_ignored(tmp_path: Path) -> None:
    empty = {"messages": None, "prompt": None, "completion": None, "text": None, "documents": ["de"]}
    pair = {"prompt": "de", "completion": "fg"}
    lines = [{**empty, "text": "abc"}, {"text": "abc", "prompt": "x"}, {**empty, **pair}, {**pair, "text": "abc"}]
    assert [text for _, text, _ in read(write(tmp_path / "d", *lines))] == ["abc", "abc", "defg", "defg"]


def test_lines_that_are_too_short_or_do_not_count_are_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    useless: list[Any] = [{"text": "ab"}, {"text": ""}, {"prompt": "abc", "completion": ""}]
    file = write(tmp_path / "d", *useless, {"text": "good"}, *useless)
    assert read(file) == [(4, "good", "good")]
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: 6 of 7 lines are left out, because they have fewer than 3 tokens or none that counts: "
        "lines 1, 2, 3, 5, 6 and 1 more"
    ]
    with pytest.raises(DataError, match=r"3 tokens or more, of which some count, got none \(lines 1, 2, 3\)"):
        read(write(tmp_path / "d", *useless))
    with pytest.raises(DataError, match="got 1 bad of 2: line 2: "):
        read(write(tmp_path / "d", {"text": "ab"}, {"text": 3}))


def test_the_bar_of_reading_counts_bytes(tmp_path: Path) -> None:
    file, seen = write(tmp_path / "d", {"text": "abc"}, "", {"text": "é" * 9}), list[int]()
    assert len(list(read_lines(file, seen.append))) == 2
    assert sum(seen) == file.stat().st_size and len(seen) == 3


def test_a_document_is_held_out_of_even_a_small_file(tmp_path: Path) -> None:
    file = write(tmp_path / "d", {"text": "first"}, {"text": "second"}, {"text": "third"})
    for seed in range(3):
        config = TrainConfig(length=32, held_out=1e-6, seed=seed)
        material = prepare(file, ByteTokenizer(), 256, config, tmp_path / "rows")
        assert material.held_out is not None
        assert material.held_out.lines[:, 1].tolist() == [3] and sorted(material.train.lines[:, 1]) == [1, 2]
    with pytest.raises(DataError, match="got none of the latter"):
        prepare(write(tmp_path / "d", {"text": "one"}), ByteTokenizer(), 256, config, tmp_path / "rows")


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


def test_documents_that_are_longer_than_a_row_are_told_with_the_tokens_that_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [{"text": "a" * size} for size in (32, 34, 35, 65)]  # parts of 2 and 1 tokens are left out
    pairs = [{"prompt": "b" * 40, "completion": "c" * 8}, {"prompt": "b" * 8, "completion": "c" * 8}]
    config = TrainConfig(length=32, held_out=0.5)
    file = write(tmp_path / "d", *texts, *pairs)
    material = prepare(file, ByteTokenizer(), 256, config, tmp_path / "rows")
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: 4 of 6 documents are longer than a row of 32 tokens and are divided; each part is read without those "
        "before it, and 35 tokens are left out, in parts of fewer than 3 or of none that counts; a larger --length "
        "divides fewer"
    ]
    assert material.held_out is not None
    kept = sum(int((rows.segments > 0).sum()) for rows in (material.train, material.held_out))
    assert kept == 32 + 34 + 35 + 65 + 48 + 16 - 35
    caplog.clear()
    prepare(write(tmp_path / "e", *texts[:1], *pairs[1:]), ByteTokenizer(), 256, config, tmp_path / "short")
    assert not caplog.records


@pytest.mark.parametrize("name", ["tokens", "segments", "counted", "lines"])
def test_fingerprint_covers_each_field_of_packed_rows(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / "d", {"text": "abcd"}, {"text": "efgh"})
    rows = prepare(file, ByteTokenizer(), 256, TrainConfig(length=32, held_out=0), tmp_path / "rows").train
    values = np.array(getattr(rows, name))
    assert pack.fingerprint(replace(rows, **{name: values})) == pack.fingerprint(rows)
    values[0, 1] = not values[0, 1]
    assert pack.fingerprint(replace(rows, **{name: values})) != pack.fingerprint(rows)


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
