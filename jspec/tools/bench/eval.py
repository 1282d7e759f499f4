"""`jspec bench eval`: whether drafting changes a task's answers, and quantisation next-token probabilities.

gsm8k: grade-school problems, answered greedily with and without drafting; the answers must be equal. quantization: a
quantised target's next-token probabilities on a text compared with those of the unquantised target.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.core.tree import TREE_FORMS, Tree
from jspec.engine.sampling_params import SamplingParams
from jspec.models.decoder import Model
from jspec.models.quantize import quantize_weights, quantized_as
from jspec.step.memory import tree_bytes
from jspec.tools import check_head
from jspec.tools.bench.pair import ENGINE_OPTIONS, Pair, engine_options, records
from jspec.tools.bench.report import Column, Report, count, file_option, option, scaled, tree_name, with_message
from jspec.tools.replay import run_texts
from pallas_kernels.layers.quantized import KINDS

NEXT = "Question:"  # a model that continues with another question has given its answer
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class Problem(NamedTuple):
    """A question of GSM8K with its worked answer, which ends with ``#### number``."""

    question: str
    answer: str


@dataclass(frozen=True)
class Score:
    """The score and speed of the answers that were decoded with one draft tree."""

    tree: Annotated[Tree | None, Column("tree", tree_name)]
    correct: Annotated[float, Column("score", ".2%")]  # share of the questions answered correctly
    tokens_per_second: Annotated[float, Column("tokens/s", ".1f")]  # tokens of all answers over the seconds of the run
    length: Annotated[float, Column("tokens a step", ".2f")]  # mean acceptance length


def read_problems(path: Path) -> list[Problem]:
    """Read all problems of a file with one JSON object a line."""
    found = []
    for where, record in records(path):
        match record:
            case {"question": str(question), "answer": str(answer)} if number_of(answer) is not None:
                found.append(Problem(question, answer))
            case _:
                raise ValueError(
                    f"{where}: expected the fields question and answer, the latter with a number after ####, "
                    f"got {', '.join(record) or 'no field'}"
                )
    return found


def prompts_of(problems: Sequence[Problem], shots: int) -> list[str]:
    """Return a prompt for each question but the first ``shots``; these and their answers begin each prompt."""
    examples = "".join(f"{NEXT} {one.question}\nAnswer: {one.answer}\n\n" for one in problems[:shots])
    return [f"{examples}{NEXT} {one.question}\nAnswer:" for one in problems[shots:]]


def number_of(answer: str) -> Decimal | None:
    """Return the number after ``####``, else the last number of the answer, else None."""
    answer = answer.split(NEXT)[0]
    _, mark, result = answer.partition("####")
    numbers = NUMBER.findall(result if mark else answer)
    return Decimal(numbers[0 if mark else -1].replace(",", "")) if numbers else None


def share_correct(answers: Sequence[str], problems: Sequence[Problem]) -> float:
    """Return the share, 0 to 1, of answers that have the same number as the problem's worked answer."""
    pairs = zip(answers, problems, strict=True)
    return sum(number_of(answer) == number_of(own.answer) for answer, own in pairs) / len(problems)


def answer(
    pair: Pair, tree: Tree | None, problems: Sequence[Problem], prompts: Sequence[list[int]], **options: Any
) -> tuple[Score, list[list[int]]]:
    """Answer the prompts greedily; return the score and each answer's token ids (``max_tokens`` at most)."""
    params = SamplingParams(max_tokens=options.pop("max_tokens"), temperature=0.0)
    with pair.engine(pair.drafter(tree), **options) as engine:
        began = time.perf_counter()
        done = [one.raise_for_error() for one in engine.generate(prompts, params)]
        seconds, metrics = time.perf_counter() - began, engine.metrics
    correct = share_correct([one.text or "" for one in done], problems)
    score = Score(tree, correct, metrics.num_tokens / seconds, metrics.mean_acceptance_length)
    return score, [one.token_ids for one in done]


def run_gsm8k(arguments: argparse.Namespace) -> Report:
    """Score answers with and without drafting; the exit code is 1 if float32 answers differ."""
    shots, asked = arguments.shots, arguments.num_questions
    if arguments.file is None or shots < 0:
        raise ValueError("eval gsm8k: expected --file and --shots of at least 0")
    problems = read_problems(arguments.file)
    if len(problems) < (least := shots + (asked or 1)):
        raise ValueError(f"{arguments.file}: expected {least} questions, examples included, got {len(problems)}")
    problems = problems[: None if asked is None else shots + asked]
    pair = Pair.of(arguments)
    pair.drafter(arguments.tree)  # raises before anything runs
    prompts = [pair.tokenizer.encode(prompt) for prompt in prompts_of(problems, shots)]
    options = engine_options(arguments) | dict(max_tokens=arguments.max_tokens)
    options["max_len"] = max(map(len, prompts)) + arguments.max_tokens
    scores, answers = zip(
        *(answer(pair, tree, problems[shots:], prompts, **options) for tree in (None, arguments.tree)), strict=True
    )
    differing = sum(one != other for one, other in zip(*answers, strict=True))
    about = {"questions": len(prompts), "shots": shots, "differing": differing}
    headline = f"gsm8k, {len(prompts)} questions, {shots} examples before each, greedy"
    code = int(differing > 0 and pair.target.embed.dtype == jnp.float32)
    return Report(headline, scores, f"{differing} of {len(prompts)} texts differ", about, code=code)


@dataclass(frozen=True)
class Divergence:
    """The difference between next-token probabilities of a quantised and the unquantised target."""

    kind: Annotated[str, Column("weights")]
    bytes: Annotated[int, Column("MB", scaled(1e-6, ".2f"))]  # bytes of all weights
    divergence: Annotated[float, Column("mean KL, nats", ".5f")]  # mean Kullback-Leibler divergence
    worst: Annotated[float, Column("largest", ".4f")]  # the largest of these divergences
    agreement: Annotated[float, Column("same top token", ".1%")]  # share of positions with the same most probable token
    places: Annotated[int, Column("positions")]  # number of positions


def measure_divergence(target: Model, texts: Int[np.ndarray, "rows size"], kinds: Iterable[str]) -> list[Divergence]:
    """Compare each kind of quantisation with the unquantised target, on given token ids."""
    if stored := quantized_as(target):
        raise ValueError(f"eval quantization: expected a target as it was trained, got {stored}; give the original")
    results = [divergence(str(target.embed.dtype), target, target, texts)]
    return results + [divergence(kind, target, quantize_weights(target, kind), texts) for kind in kinds]


def divergence(kind: str, target: Model, other: Model, texts: Int[np.ndarray, "rows size"]) -> Divergence:
    """Compare the next-token probabilities of ``other`` with those of ``target`` at every position of the texts."""
    found = []
    for row in texts:
        tokens = jnp.asarray(row[None], jnp.int32)
        p, q = (np.asarray(_log_probs(model, tokens)[0], np.float64) for model in (target, other))
        found.append(((np.exp(p) * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)))
    gap, same = map(np.concatenate, zip(*found, strict=True))
    return Divergence(kind, tree_bytes(other), float(gap.mean()), float(gap.max()), float(same.mean()), same.size)


@jax.jit
def _log_probs(model: Model, tokens: Int[Array, "rows size"]) -> Float[Array, "rows size vocab"]:
    logits = run_texts(model, tokens).logits
    assert logits is not None
    return jax.nn.log_softmax(logits, axis=-1)


def run_quantization(arguments: argparse.Namespace) -> Report:
    pair = Pair.of(arguments)
    text = check_head.TEXT if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    windows = check_head.windows(text, pair.tokenizer, arguments.size)
    results = measure_divergence(pair.target, windows, arguments.quantize)
    return Report(f"next-token probabilities over {len(windows)} parts of a text", results)


def run(arguments: argparse.Namespace) -> Report:
    return run_gsm8k(arguments) if arguments.task == "gsm8k" else run_quantization(arguments)


OPTIONS = (
    option("task", choices=("gsm8k", "quantization"), help="answers with and without drafting, or probabilities"),
    file_option("--file", "gsm8k: JSON lines with question and answer; default: none, it must be given"),
    option("--shots", type=int, default=5, help="gsm8k: first questions of the file, with answers, before each"),
    option("--num-questions", type=count, help="gsm8k: number of the following questions; default: all"),
    option("--max-tokens", type=count, default=256, help="gsm8k: tokens of each answer"),
    option("--tree", type=with_message(Tree.parse), default=Tree.chain(4), help=f"gsm8k: {TREE_FORMS}"),
    *ENGINE_OPTIONS,
    option("--quantize", nargs="+", choices=KINDS, default=KINDS, help="quantization: kinds"),
    file_option("--text", "quantization: text that is read; default: an English and Python text"),
    option("--size", type=count, default=128, help="quantization: tokens of a part of the text"),
)
