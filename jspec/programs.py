"""The compiled ladder: one program per bucket of rows and per bucket of prompt tokens, all compiled before any runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jspec.cache import show_pages
from jspec.config import EngineConfig
from jspec.records import MAX_STOP_IDS, PrefillInput, SlotState
from jspec.step import Params, Program, catch_up_step, prefill_step, spec_step

logger = logging.getLogger(__name__)

PREFILL_HEAD = (
    PrefillInput._fields.index("seed") + 2 + MAX_STOP_IDS
)  # int32 words of a packed PrefillInput besides pages and tokens

CATCH_UP_HEAD = 3  # slot, root and committed rows


class Programs:
    """Holds the executables. Calling one never traces or compiles.

    Args:
        program: what all of them have in common.
        state: of the engine, for its shapes.
    """

    def __init__(self, program: Program, params: Params, state: SlotState, config: EngineConfig) -> None:
        self._program = program
        self._params = params
        self._config = config
        self._pages = state.page_table.shape[1]
        self.prefill: dict[int, Any] = {}
        self.rounds: dict[tuple[int, bool], Any] = {}
        self.page_updates = config.slots * 2  # that `show_pages` takes
        self.show_pages: Any = None
        self.catch_up: Any = None  # where the drafter lags and pages are kept
        self.seconds: dict[str, float] = {}
        self._compile(state, trace=False)

    def ensure_trace(self, state: SlotState) -> None:
        """Compile the ladder that also returns its drafts, if it is not there yet."""
        if (self._config.slots, True) not in self.rounds:
            self._compile(state, trace=True)

    def _compile(self, state: SlotState, *, trace: bool) -> None:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # one is lowered while others compile
            compiled = [pool.submit(self._compile_one, *one) for one in self._lowered(state, trace)]
        for one in compiled:
            one.result()

    def _lowered(self, state: SlotState, trace: bool) -> Iterator[tuple[str, Callable[[Any], None], Any]]:
        """Name, where to keep it, and what is to be compiled."""
        config = self._config
        assert config.buckets is not None and config.prefill_buckets is not None
        program = replace(self._program, rounds=config.rounds_per_dispatch, trace=trace)
        for rows in config.buckets:
            keep: Callable[[Any], None] = partial(self.rounds.__setitem__, (rows, trace))
            name = f"round[{rows}]" + (" traced" if trace else "")
            yield name, keep, self._lower(partial(spec_step, program), state, rows)
        if trace:
            return
        for tokens in config.prefill_buckets:
            words = PREFILL_HEAD + self._pages + tokens
            keep = partial(self.prefill.__setitem__, tokens)
            yield f"prefill[{tokens}]", keep, self._lower(partial(prefill_step, self._program), state, words)
        updates = jax.ShapeDtypeStruct((self.page_updates, 3), jnp.int32)
        keep = partial(setattr, self, "show_pages")
        yield "show_pages", keep, jax.jit(show_pages, donate_argnums=0).lower(state.page_table, updates)
        if self._program.drafter.lags and config.prefix_cache:
            words = CATCH_UP_HEAD + self._pages
            keep = partial(setattr, self, "catch_up")
            yield "catch_up", keep, self._lower(partial(catch_up_step, self._program), state, words)

    def _lower(self, step: Callable[..., Any], state: SlotState, words: int) -> Any:
        packed = jax.ShapeDtypeStruct((words,), jnp.int32)
        return jax.jit(step, donate_argnums=(1,)).lower(self._params, state, packed)

    def _compile_one(self, name: str, keep: Callable[[Any], None], lowered: Any) -> None:
        start = time.perf_counter()
        keep(lowered.compile())
        self.seconds[name] = time.perf_counter() - start
        logger.info("compiled %s in %.1f s", name, self.seconds[name])
