"""The load of `jspec bench serve`: its requests, the times at which they come, and those at which they are answered."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from jspec.engine.callers.api import Engine
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.request import Completion, Request
from jspec.engine.request.sampling_params import SamplingParams


class Arrival(NamedTuple):
    """A request of the load and the time at which it is due."""

    at: float  # due time, seconds from the start of the run
    prompt: list[int]  # token ids
    params: SamplingParams


@dataclass(frozen=True)
class Load:
    """The number, lengths (tokens) and arrival rate of a load's requests."""

    num_prompts: int  # number of requests
    input_len: int = 1024  # largest number of tokens of a prompt
    output_len: int = 1024  # largest number of tokens of an answer
    range_ratio: float = 0.7  # lengths are uniform from int(range_ratio * len), at least 1, to len
    rate: float = math.inf  # requests a second, a Poisson process that begins with the first request; inf: all at once
    temperature: float = 0.0
    seed: int = 0  # seed of lengths, prompts and arrivals

    def __post_init__(self) -> None:
        least = dict(num_prompts=1, input_len=1, output_len=1, range_ratio=0, rate=math.ulp(0), seed=0)
        for name, low in least.items():
            value, high = getattr(self, name), 1 if name == "range_ratio" else math.inf
            if not low <= value <= high:
                raise ValueError(f"{name}: expected at least {low} and at most {high}, got {value}")

    def arrivals(self, vocab_size: int, text: Sequence[int] | None = None) -> list[Arrival]:
        """Return requests with random prompts, or parts of a text; equal seeds give equal requests."""
        if text is not None and len(text) < self.input_len:
            raise ValueError(f"text: expected at least {self.input_len} tokens, a prompt's, got {len(text)}")
        rng = np.random.default_rng(self.seed)
        inputs, outputs = (
            rng.integers(max(int(self.range_ratio * most), 1), most + 1, self.num_prompts).tolist()
            for most in (self.input_len, self.output_len)
        )
        common = SamplingParams(max_tokens=1, temperature=self.temperature, ignore_eos=True)
        arrivals = []
        for at, size, output in zip(self._times(rng), inputs, outputs, strict=True):
            start = 0 if text is None else int(rng.integers(0, len(text) - size + 1))
            prompt = rng.integers(0, vocab_size, size).tolist() if text is None else list(text[start : start + size])
            arrivals.append(Arrival(at, prompt, replace(common, max_tokens=output)))
        return arrivals

    def arrivals_of(self, prompts: Sequence[list[int]]) -> list[Arrival]:
        """Return requests with given prompts, which end at an end token or after `output_len` tokens."""
        params = SamplingParams(max_tokens=self.output_len, temperature=self.temperature, seed=self.seed)
        times = self._times(np.random.default_rng(self.seed))
        return [Arrival(at, prompt, params) for at, prompt in zip(times, prompts, strict=True)]

    def _times(self, rng: np.random.Generator) -> list[float]:
        return [0.0, *np.cumsum(rng.exponential(1 / self.rate, self.num_prompts - 1)).tolist()]


@dataclass
class Served:
    """A submitted request with the times at which its tokens were read."""

    arrival: Arrival
    began: float  # time when it was due and the concurrency left room for it, seconds from the start
    request: Request
    pieces: list[tuple[float, int]] = field(default_factory=list)  # time and token count of each growth
    completion: Completion | None = None

    def record(self, now: float) -> None:
        count = len(self.request.token_ids)
        if count > (self.pieces[-1][1] if self.pieces else 0):
            self.pieces.append((now, count))

    first_token = property(lambda self: self.pieces[0][0] - self.began)  # seconds to the first token
    latency = property(lambda self: self.pieces[-1][0] - self.began)  # seconds to the last token


class Log(NamedTuple):
    """The requests and step times of one run of a load."""

    served: list[Served]  # the requests, in the order in which they ended
    steps: list[float]  # seconds of each step
    seconds: float  # seconds of the whole run, waiting for arrivals included

    @property
    def good(self) -> list[Served]:
        """The requests that ended without an error."""
        return [served for served in self.served if served.completion is not None and served.completion.error is None]

    @property
    def output_tokens(self) -> int:
        """The number of tokens of the requests that ended without an error."""
        return sum(served.pieces[-1][1] for served in self.good)

    @property
    def rate(self) -> float:
        """The number of these tokens a second."""
        return self.output_tokens / self.seconds


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    max_concurrency: int | None = None,
    now: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> Log:
    """Submit requests at their due times, step the engine until all are answered, and return the times.

    A request that comes during a step is submitted after it, but its time runs from when it was due.
    """
    most = len(arrivals) if max_concurrency is None else max_concurrency
    due, live, log = deque(arrivals), list[Served](), Log([], [], 0.0)
    with ByHand(engine) as by_hand:
        start, full_until, passed = now(), 0.0, 0.0
        while due or live:
            while due and due[0].at <= passed and len(live) < most:
                arrival = due.popleft()
                live.append(
                    Served(arrival, max(arrival.at, full_until), by_hand.submit(arrival.prompt, arrival.params))
                )
            if not live:
                wait(due[0].at - passed)
                passed = now() - start
                continue
            is_full, before = len(live) == most, now()
            by_hand.step()
            passed = now() - start
            log.steps.append(passed + start - before)
            for served in live:
                served.record(passed)
            ended = [served for served in live if served.request.finish_reason is not None]
            for served in ended:
                served.completion = by_hand.result(served.request)
            if ended:
                live = [served for served in live if served.completion is None]
                full_until = passed if is_full else full_until
            log.served.extend(ended)
        by_hand.step()  # reads the step in flight, which the next run would otherwise pay for
    return Log(log.served, log.steps, passed)
