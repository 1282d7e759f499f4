"""The compiled ladder: one program per bucket of rows and per bucket of prompt tokens, all compiled before any runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

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
        self.catch_up: Any = None  # where the drafter lags and pages are kept
        self.seconds: dict[str, float] = {}
        self._compile(state, trace=False)

    def ensure_trace(self, state: SlotState) -> None:
        """Compile the ladder that also returns its drafts, if it is not there yet."""
        if (self._config.slots, True) not in self.rounds:
            self._compile(state, trace=True)

    def _compile(self, state: SlotState, *, trace: bool) -> None:
        assert self._config.buckets is not None and self._config.prefill_buckets is not None
        program = replace(self._program, rounds=self._config.rounds_per_dispatch, trace=trace)
        compiled: list[Future[None]] = []
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # one is lowered while others compile
            for rows in self._config.buckets:
                lowered = self._lower(partial(spec_step, program), state, rows)
                name = f"round[{rows}]" + (" traced" if trace else "")
                keep: Callable[[Any], None] = partial(self.rounds.__setitem__, (rows, trace))
                compiled.append(pool.submit(self._compile_one, name, keep, lowered))
            for tokens in () if trace else self._config.prefill_buckets:
                lowered = self._lower(partial(prefill_step, self._program), state, PREFILL_HEAD + self._pages + tokens)
                keep = partial(self.prefill.__setitem__, tokens)
                compiled.append(pool.submit(self._compile_one, f"prefill[{tokens}]", keep, lowered))
            if self._program.drafter.lags and self._config.prefix_cache and not trace:
                lowered = self._lower(partial(catch_up_step, self._program), state, CATCH_UP_HEAD + self._pages)
                keep = partial(setattr, self, "catch_up")
                compiled.append(pool.submit(self._compile_one, "catch_up", keep, lowered))
        for one in compiled:
            one.result()

    def _lower(self, step: Callable[..., Any], state: SlotState, words: int) -> Any:
        packed = jax.ShapeDtypeStruct((words,), jnp.int32)
        return jax.jit(step, donate_argnums=(1,)).lower(self._params, state, packed)

    def _compile_one(self, name: str, keep: Callable[[Any], None], lowered: Any) -> None:
        start = time.perf_counter()
        keep(lowered.compile())
        self.seconds[name] = time.perf_counter() - start
        logger.info("compiled %s in %.1f s", name, self.seconds[name])
