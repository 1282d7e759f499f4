"""Small engines with a tokenizer that can be made to fail, for the tests of the API and of failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from jspec import Engine, SamplingParams
from jspec.engine.text.tokenizer import ByteTokenizer
from tests.support import costs, engines, paper, tiny

VOCAB = 256
SLOTS = 3
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [3, 8, 4, 6, 2, 6, 4], [3, 3], [7, 7, 7, 7]]
PARAMS = [SamplingParams(max_tokens=6 + 3 * seed, seed=seed, temperature=0.9) for seed in range(len(PROMPTS))]
PATIENCE = 60.0  # seconds after which a thread counts as hanging


class BrittleTokenizer(ByteTokenizer):
    """A byte tokenizer whose `decode` raises if ``fails`` returns True for the ids."""

    def __init__(self) -> None:
        self.fails: Callable[[Sequence[int]], bool] = lambda ids: False

    def decode(self, ids: Sequence[int]) -> str:
        if self.fails(ids):
            raise KeyError("no such token")
        return super().decode(ids)


class Fault:
    """A callable that raises at its n-th call and calls the original at all others."""

    def __init__(self, original: Callable[..., Any], at: int, error: BaseException) -> None:
        self.original, self.left, self.error = original, at, error

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.original(*args)


OPTIONS: dict[str, Any] = dict(
    slots=SLOTS, max_len=64, page_size=4, buckets=(SLOTS,), prefill_buckets=(16,), log_interval=None
)


@cache
def engine() -> Engine:
    """Return an engine for plain decoding in three slots of a device of paper."""
    return paper.make(tiny.model(VOCAB, layers=1), tokenizer=BrittleTokenizer(), **OPTIONS)


@cache
@costs.shared()
def real_engine() -> Engine:
    """Return such an engine on a real device."""
    return engines.make(tiny.model(VOCAB, layers=1), tokenizer=BrittleTokenizer(), **OPTIONS)


@cache
def alone(one: Engine) -> list[list[int]]:
    """Return the tokens of each prompt when an engine decodes it alone."""
    return [one.generate(prompt, p)[0].token_ids for prompt, p in zip(PROMPTS, PARAMS, strict=True)]


def expected() -> list[list[int]]:
    return alone(engine())


def check_idle(one: Engine) -> None:
    """Check that no page or slot is held and that the engine works."""
    one.tokenizer.fails = lambda ids: False  # type: ignore[union-attr]
    one.threads.do(one.scheduler.pages.check)
    assert one.pages_in_use == 0 and not one.scheduler.has_work
    assert sorted(one.scheduler._free_slots) == list(range(SLOTS))
    assert [done.token_ids for done in one.generate(PROMPTS[:2], PARAMS[:2])] == alone(one)[:2]


def make_events(count: int) -> list[threading.Event]:
    return [threading.Event() for _ in range(count)]


def run_together(works: Sequence[Callable[[], None]]) -> None:
    """Run all functions at the same time, each in a thread, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]
