"""`jspec bench eval gsm8k`: numbers in answers, scores, and answers that drafting changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from jspec.__main__ import main
from jspec.tools.bench import eval as bench
from jspec.tools.bench.eval import Problem, Score
from tests.support import folders

pytestmark = pytest.mark.once

TOKENS = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command-line options that name a target of one layer over bytes, and its drafter."""
    folder = tmp_path_factory.mktemp("pair")
    config = {**folders.TARGET, "num_hidden_layers": 1, "vocab_size": 256, "eos_token_id": None}
    folders.write(folder, config, folders.target_tensors(config))
    return ["--target", str(folder), "--tokenizer", "bytes", "--draft", "ngram", "--slots", "1"]


Lines = Callable[..., Path]


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    """Function that writes a file of JSON objects, or of given texts, one a line."""

    def write(*objects: object) -> Path:
        path = tmp_path / "file.jsonl"
        path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in objects))
        return path

    return write


def test_gsm8k_answer_number_of_every_problem_in_the_file_is_found(data: Path) -> None:
    problems = bench.read_problems(data / "prompts" / "gsm8k_test.jsonl")
    assert len(problems) == 1319
    expected = [Decimal(one.answer.rsplit("#### ", 1)[1].replace(",", "")) for one in problems]
    assert [bench.number_of(one.answer) for one in problems] == expected
    assert bench.share_correct([one.answer for one in problems], problems) == 1.0
    assert bench.share_correct([one.answer for one in problems[1:]] + ["no number"], problems) < 0.1


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
def test_gsm8k_number_of_an_answer_is_the_marked_or_else_the_last_number(
    answer: str, expected: int | Decimal | None
) -> None:
    assert bench.number_of(answer) == expected


def test_gsm8k_prompts_contain_worked_examples_before_each_question() -> None:
    problems = [Problem(f"q{i}?", f"a{i} #### {i}") for i in range(4)]
    first, second = bench.prompts_of(problems, 2)
    before = "Question: q0?\nAnswer: a0 #### 0\n\nQuestion: q1?\nAnswer: a1 #### 1\n\n"
    assert (first, second) == (f"{before}Question: q2?\nAnswer:", f"{before}Question: q3?\nAnswer:")


PROBLEMS = [{"question": f"{i} and {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(1, 6)]


def evaluate(pair: list[str], lines: Lines, *words: str) -> int:
    options = ["--shots", "2", "--max-tokens", str(TOKENS), "--tree", "chain:2", *words]
    return main(["bench", "eval", "gsm8k", *pair, "--file", str(lines(*PROBLEMS)), *options])


@pytest.mark.long
def test_gsm8k_command_with_drafting_prints_the_score_of_plain_decoding(
    pair: list[str], lines: Lines, capsys: pytest.CaptureFixture
) -> None:
    out = lines("").with_suffix(".out")
    assert evaluate(pair, lines, "--json", str(out)) == 0
    own = json.loads(out.read_text())
    assert (own["questions"], own["shots"], own["differing"]) == (3, 2, 0)
    plain, drafted = own["results"]
    assert plain["correct"] == drafted["correct"]
    assert plain["length"] == 1.0 and plain["tokens_per_second"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "0 of 3 texts differ" and [line.split()[0] for line in printed[-3:-1]] == ["none", "chain:2"]


@pytest.mark.parametrize(("dtype", "code"), [("float32", 1), ("bfloat16", 0)])
def test_gsm8k_command_with_a_lossy_drafter_counts_changed_answers_and_fails(
    pair: list[str],
    lines: Lines,
    dtype: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    """Negative control: a drafter that changes two of three answers; in float32 the exit code is then 1."""
    answers = {True: [[1, 2], [3], [4]], False: [[1, 2], [3, 3], [5]]}  # by whether decoding is plain

    def answer(pair: Any, tree: Any, *_: Any, **__: Any) -> Any:
        return Score(tree, 0.5, 1.0, 1.0), answers[tree is None]

    monkeypatch.setattr(bench, "answer", answer)
    assert evaluate(pair, lines, "--dtype", dtype) == code
    assert "2 of 3 texts differ" in capsys.readouterr().out


def test_gsm8k_command_with_a_wrong_problem_file_prints_an_error_naming_the_line(
    pair: list[str], lines: Lines, capsys: pytest.CaptureFixture
) -> None:
    for wrong in ({"question": "2 and 2?"}, {"question": "2 and 2?", "answer": "four"}):
        with pytest.raises(ValueError, match="line 2: expected the fields question and answer"):
            bench.read_problems(lines(PROBLEMS[0], wrong))
    assert evaluate(pair, lines, "--num-questions", "4") == 2
    assert "expected 6 questions, examples included, got 5" in capsys.readouterr().err
    assert evaluate(pair, lines, "--shots", "5") == 2
    assert "expected 6 questions" in capsys.readouterr().err
