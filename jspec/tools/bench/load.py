"""The requests of `jspec bench serve`: their prompts, lengths and the times at which they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jspec.engine.sampling_params import SamplingParams


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
    scrambled: float = 0.0  # share of the prompts whose tokens are put into a random order, so that drafts are poor

    def __post_init__(self) -> None:
        least = dict(num_prompts=1, input_len=1, output_len=1, range_ratio=0, rate=math.ulp(0), seed=0, scrambled=0)
        for name, low in least.items():
            value, high = getattr(self, name), 1 if name in ("range_ratio", "scrambled") else math.inf
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
        found = []
        for at, size, output in zip(self._times(rng), inputs, outputs, strict=True):
            start = 0 if text is None else int(rng.integers(0, len(text) - size + 1))
            prompt = rng.integers(0, vocab_size, size).tolist() if text is None else list(text[start : start + size])
            found.append(Arrival(at, prompt, replace(common, max_tokens=output)))
        return self._scramble(found)

    def arrivals_of(self, prompts: Sequence[list[int]]) -> list[Arrival]:
        """Return requests with given prompts, which end at an end token or after `output_len` tokens."""
        params = SamplingParams(max_tokens=self.output_len, temperature=self.temperature, seed=self.seed)
        times = self._times(np.random.default_rng(self.seed))
        return self._scramble([Arrival(at, prompt, params) for at, prompt in zip(times, prompts, strict=True)])

    def _scramble(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Put the tokens of some prompts, `scrambled` of all, into a random order."""
        rng = np.random.default_rng((self.seed, 1))
        chosen = set(rng.permutation(len(arrivals))[: round(self.scrambled * len(arrivals))].tolist())
        return [
            one._replace(prompt=rng.permutation(one.prompt).tolist()) if index in chosen else one
            for index, one in enumerate(arrivals)
        ]

    def _times(self, rng: np.random.Generator) -> list[float]:
        return [0.0, *np.cumsum(rng.exponential(1 / self.rate, self.num_prompts - 1)).tolist()]
