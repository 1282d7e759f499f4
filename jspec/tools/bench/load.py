"""Loads of requests for `jspec bench serve`: lengths and arrivals, and the loop that serves them."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jspec.engine.api import Engine
from jspec.engine.request import Completion, Request
from jspec.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request to come, in seconds from the start."""

    at: float
    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Load:
    """How many requests come, how long and when."""

    num_prompts: int
    input_len: int = 1024  # tokens of a prompt at most
    output_len: int = 1024  # tokens of an answer at most
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
        """The requests, equal for equal seeds; each emits all its tokens, end tokens or not.

        Args:
            text: token ids, of which prompts are parts; None: tokens drawn uniformly from the vocabulary.
        """
        if text is not None and len(text) < self.input_len:
            raise ValueError(f"text: expected at least {self.input_len} tokens, a prompt's, got {len(text)}")
        rng = np.random.default_rng(self.seed)
        inputs, outputs = (
            rng.integers(max(int(self.range_ratio * most), 1), most + 1, self.num_prompts).tolist()
            for most in (self.input_len, self.output_len)
        )
        common = SamplingParams(max_tokens=1, temperature=self.temperature, ignore_eos=True)
        found = []
        for at, size, output in zip(self._times(rng), inputs, outputs, strict=True):
            start = 0 if text is None else int(rng.integers(0, len(text) - size + 1))
            prompt = rng.integers(0, vocab_size, size).tolist() if text is None else list(text[start : start + size])
            found.append(Arrival(at, prompt, replace(common, max_tokens=output)))
        return found

    def arrivals_of(self, prompts: Sequence[list[int]]) -> list[Arrival]:
        """Requests with given prompts, which end as usual and have `output_len` tokens at most."""
        params = SamplingParams(max_tokens=self.output_len, temperature=self.temperature, seed=self.seed)
        times = self._times(np.random.default_rng(self.seed))
        return [Arrival(at, prompt, params) for at, prompt in zip(times, prompts, strict=True)]

    def _times(self, rng: np.random.Generator) -> list[float]:
        if self.rate == math.inf:
            return [0.0] * self.num_prompts
        return [0.0, *np.cumsum(rng.exponential(1 / self.rate, self.num_prompts - 1)).tolist()]


@dataclass
class Served:
    """One request in progress or done."""

    arrival: Arrival
    began: float  # when it was due and there was room for it, seconds from the start
    request: Request
    pieces: list[tuple[float, int]] = field(default_factory=list)  # time and token count of each growth
    completion: Completion | None = None

    def record(self, now: float) -> None:
        count = len(self.request.token_ids)
        if count > (self.pieces[-1][1] if self.pieces else 0):
            self.pieces.append((now, count))

    @property
    def first_token(self) -> float:
        """Seconds to the first token."""
        return self.pieces[0][0] - self.began

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.pieces[-1][0] - self.began

    def count_at(self, when: float) -> int:
        """Tokens at a time."""
        return max((count for at, count in self.pieces if at <= when), default=0)


@dataclass(frozen=True)
class Log:
    """A run: its requests in the order of their ends, and the seconds of each step and of all."""

    served: list[Served]
    steps: list[float]
    seconds: float

    @property
    def full_batch_throughput(self) -> float:
        """Tokens a second while all requests decode: from the last first token to the first end; nan: never."""
        begin = max((one.pieces[0][0] for one in self.served if one.pieces), default=0.0)
        end = min((one.pieces[-1][0] for one in self.served if one.pieces), default=0.0)
        tokens = sum(one.count_at(end) - one.count_at(begin) for one in self.served)
        return tokens / (end - begin) if end > begin else math.nan


def serve(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    max_concurrency: int | None = None,
    now: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> Log:
    """Submit requests when they are due and step the engine until all are answered.

    A request that comes during a step is submitted after it, but its time runs from when it was due.

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
            live.append(Served(arrival, max(arrival.at, full_until), engine.submit(arrival.prompt, arrival.params)))
        if not live:
            wait(due[0].at - passed)
            passed = now() - start
            continue
        is_full, before = len(live) == most, now()
        engine.step()
        passed = now() - start
        log.steps.append(passed + start - before)
        for one in live:
            one.record(passed)
        ended = [one for one in live if one.request.finish_reason is not None]
        for one in ended:
            one.completion = engine.result(one.request)
        if ended:
            live = [one for one in live if one.completion is None]
            full_until = passed if is_full else full_until
        log.served.extend(ended)
    engine.step()  # reads the step in flight, which the next run would otherwise pay for
    return Log(log.served, log.steps, passed)
