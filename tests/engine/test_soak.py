"""Test that requests of all kinds, some aborted or failing, emit the tokens of a run alone while pages are few."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Beside, Drafter, DraftModel, Eagle3, Engine, SamplingParams, Suffix, Tree
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.request import Request
from jspec.models.decoder import Model
from tests.support import engines, paper, tiny

pytestmark = pytest.mark.once

MAX_LEN, PAGE, LENGTH = 48, 4, 3
FULL = 2000  # number of requests in the long runs
NESTED = 'start: "a" (start | /[c-f]/)* "b"'


class Letters:
    """A tokenizer with one letter per token that fails once when asked to."""

    vocab_size = engines.VOCAB
    hidden_ids: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()
    fails = False

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        if self.fails:
            self.fails = False
            raise KeyError("no such token")
        return "".join(chr(97 + token) for token in ids)

    def token_bytes(self) -> list[bytes | None]:
        return [bytes([97 + token]) for token in range(self.vocab_size)]

    def chat(self, messages: Any) -> list[int]:
        raise ValueError("no chat template")


@dataclass
class Submission:
    """A prompt with its parameters, the step in which it arrives, and the step in which it is aborted."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted_at: int | None


def make_submissions(count: int, rng: np.random.Generator) -> Iterator[Submission]:
    """Return submissions whose prompts share prefixes in groups and whose other fields are random."""
    bases = rng.integers(0, engines.VOCAB, (5, 24)).tolist()
    step = 0
    for index in range(count):
        base = bases[rng.integers(0, len(bases))][: rng.integers(1, 25)]
        prompt = [*base, *rng.integers(0, engines.VOCAB, rng.integers(0, 6)).tolist()]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 25)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([0, 5])),
            seed=int(rng.integers(0, 3)),
            stop_token_ids=(int(rng.integers(0, engines.VOCAB)),) if rng.random() < 0.2 else (),
            draft=[True, False, 1, 2][rng.integers(0, 4)],
            priority=int(rng.integers(-1, 2)),
        )
        own = np.random.default_rng(index)
        limit = min(params.max_tokens, MAX_LEN - len(prompt))
        edits = some_grammar(own, nested=count >= FULL) or some_controls(own, limit)
        params = replace(params, **edits, **some_output(own))
        step += int(rng.integers(0, 5))
        yield Submission(prompt, params, step, step + int(rng.integers(0, 30)) if rng.random() < 0.15 else None)


def some_grammar(rng: np.random.Generator, *, nested: bool) -> dict[str, Any]:
    """Return a grammar for one request in ten; the vocabulary's last letter ends its texts.

    Args:
        nested: whether every second grammar is recursive, which needs split steps.
    """
    if rng.random() < 0.9:
        return {}
    if nested and rng.random() < 0.5:
        return dict(grammar=NESTED, stop_token_ids=(engines.VOCAB - 1,), presence_penalty=0.4)
    regex = str(rng.choice(["(ab|c[d-g]*h)+", "[a-h]{2,12}", "(a|bc){3}(d[e-o]){0,4}"]))
    return dict(regex=regex, stop_token_ids=(engines.VOCAB - 1,), frequency_penalty=0.4)


def some_output(rng: np.random.Generator) -> dict[str, Any]:
    """Return a stop string for one request in seven, and n=2 for another one in seven."""
    letters = "".join(chr(97 + token) for token in rng.integers(0, engines.VOCAB, 3))
    stops = dict(stop=(letters[:1] * 2, letters[1:])) if rng.random() < 0.15 else {}
    return stops | (dict(n=2) if rng.random() < 0.15 else {})


def some_controls(rng: np.random.Generator, limit: int) -> dict[str, Any]:
    """Return penalties or other edits of logits for two requests in five."""
    if rng.random() < 0.6:
        return {}
    words = [rng.integers(0, engines.VOCAB, size).tolist() for size in (1, 2, 2, 3)]
    every = dict(
        repetition_penalty=1.5,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        logit_bias={int(rng.integers(0, engines.VOCAB)): 2.5},
        bad_words=words,
        allowed_token_ids=rng.choice(engines.VOCAB, 10, replace=False).tolist(),
        min_tokens=limit,
    )
    return {name: value for name, value in every.items() if rng.random() < 0.4}


def head(target: Model) -> Any:
    return tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1))


DRAFTERS: dict[str, Callable[[Model], Drafter | None]] = {
    "eagle3": lambda target: Eagle3(head(target), Tree.chain(LENGTH)),
    "tree": lambda target: Eagle3(head(target), Tree.topk(6, 2, 3)),
    "draft model": lambda _: DraftModel(tiny.model(engines.VOCAB, layers=1, seed=1), Tree.chain(LENGTH)),
    "beside": lambda target: Beside(Eagle3(head(target), Tree.chain(LENGTH)), Suffix(Tree.chain(4)), "beside"),
    "suffix": lambda _: Suffix(Tree.chain(LENGTH), max_n=3),
}


@cache
def engine_with(
    name: str, rounds: int, make: Callable[..., Engine] = engines.make, kind: engines.TargetKind = engines.ATTENTION
) -> Engine:
    """Return an engine with four slots and pages for little more than two long requests."""
    return make(
        kind.make(),
        drafter=DRAFTERS[name](kind.make()),
        tokenizer=Letters(),
        slots=4,
        max_len=MAX_LEN + kind.header,
        page_size=PAGE,
        pages=31 + 2 * kind.header // PAGE,
        buckets=(2, 4),
        prefill_buckets=(8, 32),
        prefill_budget=16,
        rounds_per_dispatch=rounds,
        log_interval=None,
    )


def alone(
    submissions: list[Submission],
    make: Callable[..., Engine] = engines.make,
    kind: engines.TargetKind = engines.ATTENTION,
) -> list[list[list[int]]]:
    """Return each request's tokens when it runs alone, by plain decoding without prefix cache."""
    plain = make(
        kind.make(),
        tokenizer=Letters(),
        slots=1,
        max_len=MAX_LEN + kind.header,
        buckets=(1,),
        prefill_buckets=(MAX_LEN + kind.header,),
        prefix_cache=False,
    )
    done = [plain.generate(submission.prompt, submission.params)[0] for submission in submissions]
    return [[sample.token_ids for sample in one.samples] for one in done]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Return a list that collects the names of jax's monitoring events while the test runs."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


class LostResult:
    """A result that never arrives."""

    def block_until_ready(self) -> None:
        raise RuntimeError("device lost")


class Faults:
    """A source of faults that makes each stage of a step fail in turn, at random times, and sometimes the tokenizer."""

    STAGES = ("dispatch", "block", "read")

    def __init__(self, engine: Engine, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
        self.engine, self.rng, self.due, self.count = engine, rng, "", 0
        dispatch, read = engine.core._dispatch, engine.core._read

        def dispatches(plan: Any) -> Any:
            if self.is_due("dispatch"):
                raise RuntimeError("RESOURCE_EXHAUSTED")
            size, output = dispatch(plan)
            return size, replace(output, report=LostResult()) if self.is_due("block") else output

        def reads(*step: Any) -> Any:
            if self.is_due("read"):
                raise RuntimeError("lost on its way")
            return read(*step)

        patch.setattr(engine.core, "_dispatch", dispatches)
        patch.setattr(engine.core, "_read", reads)

    def is_due(self, stage: str) -> bool:
        if self.due != stage:
            return False
        self.due, self.count = "", self.count + 1
        return True

    def maybe(self) -> None:
        if not self.due and self.rng.random() < 0.015:
            self.due = self.STAGES[self.count % len(self.STAGES)]
        if self.rng.random() < 0.012:
            self.engine.tokenizer.fails = True  # type: ignore[union-attr]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


def full(name: str, rounds: int) -> Any:
    return pytest.param(engines.make, name, rounds, FULL, marks=pytest.mark.matrix)


@pytest.mark.parametrize(
    ("make", "name", "rounds", "count"),
    [
        (paper.make, "eagle3", 1, 120),
        pytest.param(engines.make, "eagle3", 1, 120, marks=pytest.mark.long),
        *(full(name, 1) for name in DRAFTERS),
        full("eagle3", 3),
    ],
)
def test_engine_under_random_faults_returns_right_tokens_or_an_error_per_request(
    monkeypatch: pytest.MonkeyPatch,
    compiled: list[str],
    make: Callable[..., Engine],
    name: str,
    rounds: int,
    count: int,
    stack: ExitStack,
) -> None:
    engine = engine_with(name, rounds, make)
    rng = np.random.default_rng(count)
    submissions = list(make_submissions(count, rng))
    expected = alone(submissions, make)
    faults = Faults(engine, rng, monkeypatch)
    engine.warmup(grammar=count >= FULL)
    compiled.clear()
    requests: dict[int, Request] = {}
    step, waits, by_hand = 0, list(range(count)), stack.enter_context(ByHand(engine))
    while waits or engine.scheduler.has_work:
        while waits and submissions[waits[0]].arrives <= step:
            submission = submissions[waits.pop(0)]
            requests[len(requests)] = by_hand.submit(submission.prompt, submission.params)
        for index, request in requests.items():
            if submissions[index].aborted_at == step:
                by_hand.abort(request)
        faults.maybe()
        by_hand.step()
        engine.tokenizer.fails = False  # type: ignore[union-attr]
        step += 1
        engine.scheduler.pages.check()
        held = {page for r in engine.scheduler.running for page in engine.scheduler.pages.pages_of(r.id)}
        assert engine.scheduler.pages.num_used == len(held), "a page leaked"
    by_hand.step()
    assert not any("/compile/" in event for event in compiled), "something was compiled after the warm-up"
    reasons: dict[str, int] = {}
    for index, request in requests.items():
        for done, tokens in zip(by_hand.result(request).samples, expected[index], strict=True):
            reasons[done.finish_reason] = reasons.get(done.finish_reason, 0) + 1
            assert (done.error is not None) == (done.finish_reason == "error")
            is_whole = done.finish_reason not in ("abort", "error")
            assert done.token_ids == (tokens if is_whole else tokens[: len(done.token_ids)]), index
    assert faults.count >= len(Faults.STAGES)
    assert set(reasons) >= {"length", "stop", "abort", "error"}, reasons
    metrics = engine.core.metrics()
    assert metrics.num_preemptions > 0 and metrics.num_cached_tokens > 0 and metrics.num_accepted_tokens > 0
    assert metrics.pages_in_use == 0
    print(f"{step} steps, {reasons}, {metrics}")
