"""`jspec bench eval gsm8k`: grade-school sums, answered with and without drafting, must come to the same."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from jspec.core.tree import Tree
from jspec.draft.base import Drafter
from jspec.engine.sampling_params import SamplingParams
from jspec.tools.bench import report
from jspec.tools.bench.pair import Pair
from jspec.tools.bench.prompts import records
from jspec.tools.table import table

NEXT = "Question:"  # a model that goes on with another question has given its answer
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Sum:
    """A question with its worked answer, which ends with ``#### number``."""

    question: str
    answer: str


@dataclass(frozen=True)
class Score:
    """One way of decoding.

    Attributes:
        correct: share of the questions.
        tokens_per_second: of all answers.
        length: mean acceptance length.
    """

    correct: float
    tokens_per_second: float
    length: float


@dataclass(frozen=True)
class Evaluation:
    """Both ways; ``differing`` answers have other tokens with drafting than without."""

    tree: str
    questions: int
    shots: int
    plain: Score
    drafted: Score
    differing: int


def read(path: Path) -> list[Sum]:
    """All questions of a file.

    Raises:
        ValueError: a line without the texts question and answer, or an answer without a number.
    """
    found = []
    for where, record in records(path):
        match record:
            case {"question": str(question), "answer": str(answer)} if result_of(answer) is not None:
                found.append(Sum(question, answer))
            case _:
                raise ValueError(
                    f"{where}: expected the fields question and answer, the latter with a number behind ####, "
                    f"got {', '.join(record) or 'no field'}"
                )
    return found


def prompts_of(sums: Sequence[Sum], shots: int) -> list[str]:
    """For each question but the first ``shots``: these with their answers, and the question."""
    before = "".join(f"{NEXT} {one.question}\nAnswer: {one.answer}\n\n" for one in sums[:shots])
    return [f"{before}{NEXT} {one.question}\nAnswer:" for one in sums[shots:]]


def result_of(answer: str) -> Decimal | None:
    """The number behind ``####``, or else the last one of the answer; None: there is none."""
    answer = answer.split(NEXT)[0]
    _, mark, behind = answer.partition("####")
    numbers = NUMBER.findall(behind if mark else answer)
    return Decimal(numbers[0 if mark else -1].replace(",", "")) if numbers else None


def run(pair: Pair, sums: Sequence[Sum], tree: Tree, *, shots: int, max_tokens: int, **options: Any) -> Evaluation:
    """Answer greedily, first without and then with drafting; the first sums are the examples of the others.

    Raises:
        ValueError: no sum is left.
    """
    asked = sums[shots:]
    if not asked:
        raise ValueError(f"gsm8k: expected more than {shots} questions, which are the examples, got {len(sums)}")
    prompts = [pair.tokenizer.encode(prompt) for prompt in prompts_of(sums, shots)]
    options["max_len"] = max(map(len, prompts)) + max_tokens
    drafters = pair.drafters((None, tree)).values()
    (plain, own), (drafted, other) = (_answer(pair, one, asked, prompts, max_tokens, options) for one in drafters)
    differing = sum(a != b for a, b in zip(own, other, strict=True))
    return Evaluation(str(tree), len(asked), shots, plain, drafted, differing)


def _answer(
    pair: Pair,
    drafter: Drafter | None,
    sums: Sequence[Sum],
    prompts: Sequence[list[int]],
    max_tokens: int,
    options: dict[str, Any],
) -> tuple[Score, list[list[int]]]:
    """The score, and the tokens of every answer."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    with pair.engine(drafter, **options) as engine:
        began = time.perf_counter()
        done = [one.raise_for_error() for one in engine.generate(prompts, params)]
        seconds, metrics = time.perf_counter() - began, engine.metrics
    correct = share_correct([one.text or "" for one in done], sums)
    score = Score(correct, metrics.num_tokens / seconds, metrics.mean_acceptance_length)
    return score, [one.token_ids for one in done]


def share_correct(answers: Sequence[str], sums: Sequence[Sum]) -> float:
    """Of the answers that come to the sum's number."""
    pairs = zip(answers, sums, strict=True)
    return sum(result_of(answer) == result_of(own.answer) for answer, own in pairs) / len(sums)


def text(result: Evaluation) -> str:
    """Both scores, tokens a second, and how many answers differ."""
    rows = [["", "score", "tokens/s", "tokens a round"]]
    for name, one in (("none", result.plain), (result.tree, result.drafted)):
        rows.append([name, f"{one.correct:.2%}", f"{one.tokens_per_second:.1f}", f"{one.length:.2f}"])
    about = f"gsm8k, {result.questions} questions, {result.shots} examples before each, greedy"
    return f"{about}\n{table(rows)}\n{result.differing} of {result.questions} texts differ"


def write_json(path: Path, result: Evaluation) -> None:
    """Environment and result as one JSON object."""
    report.write(path, [asdict(result)])
