"""Requests of all kinds come, are aborted and fail, where pages are few: each gets the tokens it gets alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Eagle3, Engine, SamplingParams, Tree
from jspec.requests import Request
from tests import small, tiny

pytestmark = pytest.mark.once

MAX_LEN, PAGE, LENGTH = 48, 4, 3
FULL = pytest.param(2000, marks=pytest.mark.matrix)


class Letters:
    """A letter a token; it fails once when told to."""

    vocab_size = small.VOCAB
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

    def chat(self, messages: Any) -> list[int]:
        raise ValueError("no chat template")


@dataclass
class Wish:
    """What a caller wants, when, and what becomes of it."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted_at: int | None


def wishes(count: int, rng: np.random.Generator) -> Iterator[Wish]:
    """Prompts that begin alike, in groups; everything else by lot."""
    bases = rng.integers(0, small.VOCAB, (5, 24)).tolist()
    step = 0
    for _ in range(count):
        base = bases[rng.integers(0, len(bases))][: rng.integers(1, 25)]
        prompt = [*base, *rng.integers(0, small.VOCAB, rng.integers(0, 6)).tolist()]
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 25)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([0, 5])),
            seed=int(rng.integers(0, 3)),
            stop_token_ids=(int(rng.integers(0, small.VOCAB)),) if rng.random() < 0.2 else (),
            draft=[True, False, 1, 2][rng.integers(0, 4)],
            priority=int(rng.integers(-1, 2)),
        )
        step += int(rng.integers(0, 5))
        yield Wish(prompt, params, step, step + int(rng.integers(0, 30)) if rng.random() < 0.15 else None)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Pages for little more than two long requests, and slots for four."""
    head = tiny.eagle_head(small.target(), draft_vocab=12, feature_layers=(0, 1))
    return Engine(
        small.target(),
        drafter=Eagle3(head, Tree.chain(LENGTH)),
        tokenizer=Letters(),
        slots=4,
        max_len=MAX_LEN,
        page_size=PAGE,
        pages=31,
        buckets=(2, 4),
        prefill_buckets=(8, 32),
        log_interval=None,
    )


def alone(all_wishes: list[Wish]) -> list[list[int]]:
    """Plain decoding without a cache of prefixes, every request on its own."""
    expected: dict[int, list[int]] = {}
    plain = Engine(
        small.target(), slots=8, max_len=MAX_LEN, buckets=(8,), prefill_buckets=(MAX_LEN,), prefix_cache=False
    )
    done = plain.generate([wish.prompt for wish in all_wishes], [wish.params for wish in all_wishes])
    for index, completion in enumerate(done):
        expected[index] = completion.token_ids
    return [expected[index] for index in range(len(all_wishes))]


class Faults:
    """Makes some steps fail on the device, and the tokenizer now and then."""

    def __init__(self, engine: Engine, rng: np.random.Generator, patch: pytest.MonkeyPatch) -> None:
        self.engine, self.rng, self.left = engine, rng, 0
        dispatch = engine._dispatch

        def failing(plan: Any) -> Any:
            if self.left == 1:
                self.left = 0
                raise RuntimeError("RESOURCE_EXHAUSTED")
            return dispatch(plan)

        patch.setattr(engine, "_dispatch", failing)

    def maybe(self) -> None:
        if self.rng.random() < 0.004:
            self.left = 1
        if self.rng.random() < 0.012:
            self.engine.tokenizer.fails = True  # type: ignore[union-attr]


@pytest.mark.parametrize("count", [120, FULL])
def test_every_request_is_answered_or_ends_with_its_own_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rng = np.random.default_rng(count)
    all_wishes = list(wishes(count, rng))
    expected = alone(all_wishes)
    faults = Faults(engine, rng, monkeypatch)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    requests: dict[int, Request] = {}
    step, waits = 0, list(range(count))
    while waits or engine.scheduler.has_work:
        while waits and all_wishes[waits[0]].arrives <= step:
            wish = all_wishes[waits.pop(0)]
            requests[len(requests)] = engine.submit(wish.prompt, wish.params)
        for index, request in requests.items():
            if all_wishes[index].aborted_at == step:
                engine.abort(request)
        faults.maybe()
        engine.step()
        engine.tokenizer.fails = False  # type: ignore[union-attr]
        step += 1
        engine.scheduler.pages.check()
        held = {page for r in engine.scheduler.running for page in engine.scheduler.pages.pages_of(r.id)}
        assert engine.pages_in_use == len(held), "a page leaked"
    engine.step()
    assert not any("backend_compile" in event for event in compiled), "something was compiled on the way"
    reasons: dict[str, int] = {}
    for index, request in requests.items():
        done = engine.result(request)
        reasons[done.finish_reason] = reasons.get(done.finish_reason, 0) + 1
        assert (done.error is not None) == (done.finish_reason == "error")
        is_whole = done.finish_reason not in ("abort", "error")
        assert done.token_ids == (expected[index] if is_whole else expected[index][: len(done.token_ids)]), index
    assert set(reasons) >= {"length", "stop", "abort", "error"}, reasons
    metrics = engine.metrics
    assert metrics.num_preemptions > 0 and metrics.num_cached_tokens > 0 and metrics.num_accepted_tokens > 0
    assert engine.pages_in_use == 0 and not engine._texts and not engine._added_at and not engine._orphans
    print(f"{step} steps, {reasons}, {metrics}")
