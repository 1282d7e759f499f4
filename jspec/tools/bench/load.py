"""Requests that come by a clock, served by an engine: who came when, and when each of its tokens was there."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jspec.engine.api import Engine
from jspec.engine.request import Completion, Request
from jspec.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request to come.

    Attributes:
        at: seconds from the start.
        prompt: token ids.
        output_len: tokens it emits, end tokens or not.
    """

    at: float
    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class Load:
    """How many requests come, how long and when.

    Attributes:
        input_len, output_len: tokens of a prompt and of its answer at most.
        range_ratio: lengths are uniform over the whole numbers from ``int(range_ratio * len)`` (at least 1) to ``len``.
        rate: requests a second, in a Poisson process that begins with the first request; inf: all come at once.
        max_concurrency: requests in the engine at most; the others wait outside and their time does not run.
        seed: of lengths, prompts and arrivals.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    num_prompts: int = 500
    input_len: int = 1024
    output_len: int = 1024
    range_ratio: float = 0.7
    rate: float = math.inf
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        limits = (
            ("num_prompts", self.num_prompts >= 1, "at least 1"),
            ("input_len", self.input_len >= 1, "at least 1"),
            ("output_len", self.output_len >= 1, "at least 1"),
            ("range_ratio", 0 <= self.range_ratio <= 1, "in [0, 1]"),
            ("rate", self.rate > 0, "more than 0, inf included"),
            ("max_concurrency", self.max_concurrency is None or self.max_concurrency >= 1, "at least 1"),
            ("seed", self.seed >= 0, "at least 0"),
        )
        for name, holds, allowed in limits:
            if not holds:
                raise ValueError(f"{name}: expected {allowed}, got {getattr(self, name)}")

    def arrivals(self, vocab_size: int, text: Sequence[int] | None = None) -> list[Arrival]:
        """The requests, the same for the same seed.

        Args:
            text: token ids; prompts are cuts of it. None: tokens drawn uniformly from the vocabulary.

        Raises:
            ValueError: a text that is shorter than a prompt.
        """
        if text is not None and len(text) < self.input_len:
            raise ValueError(f"text: expected at least {self.input_len} tokens, a prompt's, got {len(text)}")
        rng = np.random.default_rng(self.seed)
        inputs, outputs = (
            rng.integers(max(int(self.range_ratio * most), 1), most + 1, self.num_prompts)
            for most in (self.input_len, self.output_len)
        )
        times = np.zeros(self.num_prompts)
        if self.rate < math.inf:
            times[1:] = np.cumsum(rng.exponential(1 / self.rate, self.num_prompts - 1))
        prompts = (_prompt(rng, int(size), vocab_size, text) for size in inputs)
        return [Arrival(float(at), prompt, int(size)) for at, prompt, size in zip(times, prompts, outputs, strict=True)]


def _prompt(rng: np.random.Generator, size: int, vocab_size: int, text: Sequence[int] | None) -> list[int]:
    if text is None:
        return rng.integers(0, vocab_size, size).tolist()
    start = int(rng.integers(0, len(text) - size + 1))
    return list(text[start : start + size])


@dataclass
class Served:
    """One request on its way.

    Attributes:
        began: when it was due and there was room for it, seconds from the start.
        pieces: for every time when it had more tokens than before: that time, and how many.
    """

    arrival: Arrival
    began: float
    request: Request
    pieces: list[tuple[float, int]] = field(default_factory=list)
    completion: Completion | None = None

    def look(self, now: float) -> None:
        """Take note of what it has by now."""
        count = len(self.request.token_ids)
        if count > (self.pieces[-1][1] if self.pieces else 0):
            self.pieces.append((now, count))


@dataclass(frozen=True)
class Log:
    """A run: its requests in the order in which they ended, and the seconds of each step and of all."""

    served: list[Served]
    steps: list[float]
    seconds: float


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    max_concurrency: int | None = None,
    temperature: float = 0.0,
    now: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> Log:
    """Submit requests as they are due and step the engine until all are answered.

    A request that comes in the middle of a step is submitted behind it, but its time runs from when it was due.

    Args:
        arrivals: in the order of their times.
        max_concurrency: requests in the engine at most.
        now, wait: the clock, in seconds.
    """
    most = len(arrivals) if max_concurrency is None else max_concurrency
    due, live, log = deque(arrivals), list[Served](), Log([], [], 0.0)
    start, full_until, passed = now(), 0.0, 0.0
    while due or live:
        while due and due[0].at <= passed and len(live) < most:
            arrival = due.popleft()
            request = engine.submit(arrival.prompt, _params(arrival, temperature))
            live.append(Served(arrival, max(arrival.at, full_until), request))
        if not live:
            wait(due[0].at - passed)
            passed = now() - start
            continue
        is_full, before = len(live) == most, now()
        engine.step()
        passed = now() - start
        log.steps.append(passed + start - before)
        for one in live:
            one.look(passed)
        ended = [one for one in live if one.request.finish_reason is not None]
        for one in ended:
            one.completion = engine.result(one.request)
        if ended:
            live = [one for one in live if one.completion is None]
            full_until = passed if is_full else full_until
        log.served.extend(ended)
    return Log(log.served, log.steps, passed)


def _params(arrival: Arrival, temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=arrival.output_len, temperature=temperature, ignore_eos=True)
