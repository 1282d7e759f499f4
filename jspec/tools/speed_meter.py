"""Measures the speed of an answer on the command line."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec import Chunk, Engine


LEAST_SECONDS = 0.1  # chunks that waited for their reader come at once, and a shorter time tells no speed


class SpeedMeter:
    """Measures the speed of an answer after its first round, so that loading and compiling do not count."""

    def __init__(self, engine: Engine, max_tokens: int | None) -> None:
        self._engine, self._before, self._max_tokens = engine, engine.metrics, max_tokens
        self._tokens = 0  # number of tokens that came
        self._counts: Counter[int] = Counter()  # the same for each completion
        self._is_cut = False  # whether a completion ended at the engine's `max_len`
        self._first: tuple[int, float] | None = None  # number of tokens and time in seconds after the first round
        self._last = 0.0  # time in seconds of the newest chunk

    def watch(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield an answer's chunks; record when the first one that a round produced came, and the last one."""
        for chunk in chunks:
            self._last = time.perf_counter()
            self._tokens += len(chunk.token_ids)
            if self._first is None and chunk.index in self._counts:
                self._first = self._tokens, self._last
            self._counts[chunk.index] += len(chunk.token_ids)
            has_fewer = self._max_tokens is None or self._counts[chunk.index] < self._max_tokens
            self._is_cut |= chunk.finish_reason == "length" and has_fewer
            yield chunk

    def line(self) -> str:
        """Return a line with tokens, rounds, mean acceptance length and the speed in tokens/s.

        It has no speed if less than `LEAST_SECONDS` are between the first and the last chunk that a round produced. If
        a completion has fewer tokens than was asked for because a request has no room for more, the line says so.
        """
        now, before = self._engine.metrics, self._before
        rounds = now.num_drafts - before.num_drafts
        length = 1 + (now.num_accepted_tokens - before.num_accepted_tokens) / max(rounds, 1)
        text = f"{now.num_tokens - before.num_tokens} tokens, {rounds} rounds, mean acceptance length {length:.2f}"
        tokens, began = self._first or (self._tokens, self._last)
        seconds = self._last - began
        if self._tokens > tokens and seconds >= LEAST_SECONDS:
            text += f", {(self._tokens - tokens) / seconds:.1f} tokens/s"
        return text + (f"; ended by max_len {self._engine.config.max_len}" if self._is_cut else "")
