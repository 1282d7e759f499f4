"""`jspec bench offline` and `jspec bench eval gsm8k`: what files they read, how they count and score."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest

from jspec import Metrics, Tree
from jspec.__main__ import main
from jspec.tools.bench import gsm8k, offline, prompts
from jspec.tools.bench.gsm8k import Score, Sum
from tests.support import folders

pytestmark = pytest.mark.once

TOKENS = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options that name a target of one layer over bytes, and who drafts for it."""
    folder = tmp_path_factory.mktemp("pair")
    config = {**folders.TARGET, "num_hidden_layers": 1, "vocab_size": 256, "eos_token_id": None}
    folders.write(folder, config, folders.target_tensors(config))
    return ["--target", str(folder), "--tokenizer", "bytes", "--draft", "ngram", "--slots", "1"]


Lines = Callable[..., Path]


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    """Writes objects, or texts as they are, one a line."""

    def write(*objects: object) -> Path:
        path = tmp_path / "file.jsonl"
        path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in objects))
        return path

    return write


# -- files of prompts


def test_every_file_of_prompts_is_understood(data: Path) -> None:
    """Read line by line with json alone, the first text in each."""
    counts = {}
    for path in sorted((data / "prompts").glob("*.jsonl")):
        found = prompts.read(path)
        objects = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        assert found == [
            next(o[name] for name in ("prompt", "question") if name in o) if "turns" not in o else o["turns"][0]
            for o in objects
        ]
        counts[path.stem] = len(found)
    assert counts["eagle_mt_bench"] == 80 and counts["spec_bench"] == 480 and counts["gsm8k_test"] == 1319
    assert prompts.read(data / "prompts" / "eagle_mt_bench.jsonl", 3)[0].startswith("Compose an engaging travel")


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ([{"text": "a", "id": 1}], r"line 1: expected the field turns \(a list.*prompt.*question.*, got text, id"),
        ([{"prompt": "a"}, {"turns": []}], "line 2: expected the field turns"),
        ([{"prompt": 3}], "line 1: expected the field turns"),
        ([{"prompt": "a"}, "", "{nonsense"], "line 3: expected a JSON object"),
        (["[1]"], "line 1: expected a JSON object"),
        ([""], "got an empty file"),
        ([{"prompt": "a"}], "expected 2 prompts, got 1"),
    ],
)
def test_what_is_not_understood_is_named(lines: Lines, objects: list[object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        prompts.read(lines(*objects), 2)


# -- offline


def test_offline_counts_what_drafting_came_to(pair: list[str], lines: Lines, capsys: pytest.CaptureFixture) -> None:
    """Two rounds of the book-keeping: what was printed, and that rounds and accepted drafts make up the tokens."""
    texts = ["one two one two one", "aaaaaaaa", "x y z"]
    path = lines(
        {"turns": [texts[0], "not read"]}, {"prompt": texts[1]}, {"question": texts[2]}, {"prompt": "left out"}
    )
    out = path.with_suffix(".out")
    words = ["--prompts", str(path), "--num-prompts", "3", "--draft-tokens", "3", "--max-tokens", str(TOKENS)]
    assert main(["bench", "offline", *pair, *words, "--json", str(out)]) == 0
    told = dict(re.findall(r"^([\w ]+): ([\d.]+)$", capsys.readouterr().out, re.MULTILINE))
    (own,) = json.loads(out.read_text())["results"]
    assert own["total_num_output_tokens"] == 3 * TOKENS == int(told["total_num_output_tokens"])
    assert own["total_num_prompt_tokens"] == sum(map(len, texts))
    rounds, accepted = own["num_drafts"], own["num_accepted_tokens"]
    assert accepted > 0 and rounds + accepted - 3 <= 3 * (TOKENS - 1) <= rounds + accepted
    assert accepted <= own["num_draft_tokens"] <= 3 * rounds
    shares = own["acceptance_per_position"]
    assert len(shares) == 3 and shares == sorted(shares, reverse=True)
    assert rounds * sum(shares) >= accepted  # a round that was cut at the end accepted more than it emitted
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert int(told[name]) == own[name]
    assert float(told["mean acceptance length"]) == pytest.approx(1 + accepted / rounds, abs=0.005)
    assert [float(told[f"acceptance at token {i}"]) for i in range(3)] == pytest.approx(shares, abs=0.005)


def test_positions_that_nothing_reached_are_told_too() -> None:
    metrics = Metrics(
        num_drafts=4, num_draft_tokens=20, num_accepted_tokens=3, num_accepted_per_position=[2, 1], num_tokens=8
    )
    result = offline.Offline(Tree.chain(5), 1, 3, 2.0, metrics)
    assert result.per_position == [0.5, 0.25, 0.0, 0.0, 0.0]
    assert "acceptance at token 4: 0.00" in offline.text(result)
    assert "mean acceptance length: 1.75" in offline.text(result)


# -- gsm8k


def test_every_answer_of_the_file_has_its_number(data: Path) -> None:
    sums = gsm8k.read(data / "prompts" / "gsm8k_test.jsonl")
    assert len(sums) == 1319
    expected = [Decimal(one.answer.rsplit("#### ", 1)[1].replace(",", "")) for one in sums]
    assert [gsm8k.result_of(one.answer) for one in sums] == expected
    assert gsm8k.share_correct([one.answer for one in sums], sums) == 1.0
    assert gsm8k.share_correct([one.answer for one in sums[1:]] + ["no number"], sums) < 0.1


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" 3 + 4 = 7\n#### 7", 7),
        ("So she has $1,234.50.", Decimal("1234.5")),
        ("It is 5, then 6.", 6),
        ("#### -12 and 13", -12),
        ("It is 18.00\n\nQuestion: what of 99?", 18),
        ("####", None),
        ("none at all", None),
    ],
)
def test_an_answer_is_its_last_number_or_the_marked_one(answer: str, expected: int | Decimal | None) -> None:
    assert gsm8k.result_of(answer) == expected


def test_examples_stand_before_each_question_and_are_not_asked() -> None:
    sums = [Sum(f"q{i}?", f"a{i} #### {i}") for i in range(4)]
    first, second = gsm8k.prompts_of(sums, 2)
    before = "Question: q0?\nAnswer: a0 #### 0\n\nQuestion: q1?\nAnswer: a1 #### 1\n\n"
    assert (first, second) == (f"{before}Question: q2?\nAnswer:", f"{before}Question: q3?\nAnswer:")


SUMS = [{"question": f"{i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(1, 6)]


def evaluate(pair: list[str], lines: Lines, *words: str) -> int:
    options = ["--shots", "2", "--max-tokens", str(TOKENS), "--tree", "chain:2", *words]
    return main(["bench", "eval", "gsm8k", *pair, "--file", str(lines(*SUMS)), *options])


@pytest.mark.long
def test_the_score_is_the_same_with_drafting(pair: list[str], lines: Lines, capsys: pytest.CaptureFixture) -> None:
    out = lines("").with_suffix(".out")
    assert evaluate(pair, lines, "--json", str(out)) == 0
    (own,) = json.loads(out.read_text())["results"]
    assert (own["questions"], own["shots"], own["differing"]) == (3, 2, 0)
    assert own["plain"]["correct"] == own["drafted"]["correct"]
    assert own["plain"]["length"] == 1.0 and own["plain"]["tokens_per_second"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "0 of 3 texts differ" and [line.split()[0] for line in printed[-3:-1]] == ["none", "chain:2"]


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_texts_that_differ_are_counted(
    pair: list[str],
    lines: Lines,
    dtype: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Negative control: a drafter that changes two of three answers. In float32 the command fails then."""
    answers = {True: [[1, 2], [3], [4]], False: [[1, 2], [3, 3], [5]]}  # by whether nobody drafts
    monkeypatch.setattr(gsm8k, "_answer", lambda pair, drafter, *_: (Score(0.5, 1.0, 1.0), answers[drafter is None]))
    assert evaluate(pair, lines, "--dtype", dtype) == code
    assert "2 of 3 texts differ" in capsys.readouterr().out


def test_what_is_no_sum_is_named(pair: list[str], lines: Lines, capsys: pytest.CaptureFixture) -> None:
    for wrong in ({"question": "2 and 2?"}, {"question": "2 and 2?", "answer": "four"}):
        with pytest.raises(ValueError, match="line 2: expected the fields question and answer"):
            gsm8k.read(lines(SUMS[0], wrong))
    assert evaluate(pair, lines, "--num-questions", "4") == 2
    assert "expected 6 questions, examples included, got 5" in capsys.readouterr().err
    assert evaluate(pair, lines, "--shots", "5") == 2
    assert "more than 5 questions" in capsys.readouterr().err
