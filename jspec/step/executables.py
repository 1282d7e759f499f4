"""Compiles all programs of an engine and stores them by key.

There is one decode step for each batch size (bucket) and draft depth, one prefill for each chunk length, and a few
helpers. The programs that every engine needs are compiled before any of them runs. Variants with log-probabilities,
traces or host masks are compiled when a request first needs them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from jspec.core.config import EngineConfig
from jspec.core.records import MAX_STOP_IDS, PrefillInput, SlotState
from jspec.models.kv_cache import update_page_table
from jspec.sampling import grammar_mask, penalties
from jspec.step.decode import spec_step
from jspec.step.executable_key import ExecutableKey
from jspec.step.prefill import prefill_step, write_pending_rows_step
from jspec.step.program import Params, Program
from jspec.step.split_decode import draft_step, mask_shape, verify_step
from pallas_kernels.dispatch import describe, resolve

logger = logging.getLogger(__name__)

PREFILL_HEAD = PrefillInput._fields.index("seed") + 2 + MAX_STOP_IDS  # int32 values before page row and tokens
PENDING_ROWS_HEAD = 3  # number of int32 values before the page row: slot, root, committed rows

Check = Callable[[Sequence[Any]], None]


def keep_compiled(folder: str | Path | None) -> None:
    """Make this process store compiled programs in a folder and read them from it.

    XLA also stores its results of autotuning GPU kernels there.

    Args:
        folder: the folder; None changes nothing.

    Raises:
        OSError: the folder cannot be created.
    """
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # also store programs that compile quickly
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    compilation_cache.reset_cache()  # without this, jax goes on using the folder of the first compilation


class Executables:
    """Compiles and stores the executables of an engine. A call of an executable never traces or compiles.

    Args:
        program: the settings that all executables share.
        params: the weights; only their shapes are used.
        state: the slot state; only its shapes are used.
        config: the engine's options.
        depths: draft depths for which decode steps are compiled, ascending.

    Attributes:
        compiled: the executables by key.
        page_updates: number of page table entries that one call of "update_page_table" writes.
        seconds: compilation time of each executable in seconds, by name.
        lower_seconds: time in seconds for tracing and lowering each executable, by name.
    """

    def __init__(
        self, program: Program, params: Params, state: SlotState, config: EngineConfig, depths: Sequence[int]
    ) -> None:
        (device, *_) = state.root.devices()
        self._program = replace(program, implementation=resolve(program.implementation, device))
        self._depths = depths
        self._params = params
        self._config = config
        self._pages = state.page_table.shape[1]
        self.page_updates = config.slots * 2
        self._shapes = jax.eval_shape(lambda: state)
        self._ensuring = threading.Lock()
        self.compiled: dict[ExecutableKey, Any] = {}
        self.seconds: dict[str, float] = {}
        self.lower_seconds: dict[str, float] = {}
        logger.info("%s", describe(program.implementation, device))
        self._compile(map(self._lower, self._initial_keys()))

    def ensure(
        self,
        check: Check,
        *,
        traced: bool,
        logprobs: bool,
        prompt_logprobs: bool,
        masked_prefills: Collection[tuple[bool, bool]],
    ) -> None:
        """Compile the missing executables that some requests need, while other threads may step the engine.

        Args:
            check: function that gets all executables, including the new ones. If it raises an error, no new executable
                is stored.
            traced: whether any request wants its drafts recorded.
            logprobs: whether any request wants log-probabilities of its tokens.
            prompt_logprobs: whether any request wants log-probabilities of its prompt.
            masked_prefills: for each request whose first token the host masks, the fields ``logprobs`` and
                ``prompt_logprobs`` of its prefill's `ExecutableKey`.
        """
        with self._ensuring:
            keys = self._round_keys(traced=True) if traced else []
            for prompt, is_wanted in ((False, logprobs), (True, prompt_logprobs)):
                keys += self._prefill_keys(logprobs=True, prompt_logprobs=prompt) if is_wanted else []
            keys += self._round_keys(logprobs=True) if logprobs else []
            # One batch may contain masked requests and requests that want log-probabilities.
            if masked_prefills or (logprobs and any(key.kind == "verify" for key in self.compiled)):
                is_scored = logprobs or any(key.kind == "round" and key.logprobs for key in self.compiled)
                keys += self._split_keys([False, True] if is_scored else [False])
                for tokens, prompt in masked_prefills:
                    keys += self._prefill_keys(logprobs=tokens, prompt_logprobs=prompt, masked=True)
            self._compile(map(self._lower, [key for key in keys if key not in self.compiled]), check)

    def _initial_keys(self) -> Iterator[ExecutableKey]:
        """Yield the keys of the executables that the engine always needs."""
        yield from self._round_keys()
        yield from self._prefill_keys()
        yield ExecutableKey("update_page_table")
        if self._shapes.controls is not None:
            yield ExecutableKey("controls")
        if self._shapes.grammars is not None:
            yield ExecutableKey("grammar")
        if self._program.drafter.has_pending_rows and self._config.prefix_cache:
            yield ExecutableKey("write_pending_rows")

    def _round_keys(self, *, logprobs: bool = False, traced: bool = False) -> list[ExecutableKey]:
        return [ExecutableKey.round(*bucket, logprobs=logprobs, traced=traced) for bucket in self._buckets()]

    def _split_keys(self, modes: Sequence[bool]) -> list[ExecutableKey]:
        keys = (ExecutableKey.split(*bucket, logprobs=mode) for bucket in self._buckets() for mode in modes)
        return list(dict.fromkeys(key for pair in keys for key in pair))

    def _prefill_keys(self, **fields: bool) -> list[ExecutableKey]:
        assert self._config.prefill_buckets is not None
        return [ExecutableKey("prefill", tokens, **fields) for tokens in self._config.prefill_buckets]

    def _buckets(self) -> Iterator[tuple[int, int]]:
        """Yield (number of batch rows, draft depth) of every decode step, with descending depth for each number."""
        assert self._config.buckets is not None
        return product(self._config.buckets, reversed(self._depths))

    def _program_of(self, key: ExecutableKey) -> Program:
        drafter = self._program.drafter
        return replace(
            self._program,
            drafter=drafter.cut(key.depth) if key.kind in ("round", "draft", "verify") else drafter,
            rounds=self._config.rounds_per_dispatch if key.kind == "round" else 1,
            trace=key.traced,
            logprobs=self._config.logprobs_mode if key.logprobs else None,
            prompt_logprobs=key.prompt_logprobs,
        )

    def _lower(self, key: ExecutableKey) -> tuple[ExecutableKey, Any]:
        """Trace and lower one program; return its key and the lowered program."""
        start = time.perf_counter()
        function, donated, arguments = self._call(key)
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
        self.lower_seconds[self._name(key)] = time.perf_counter() - start
        return key, lowered

    def _call(self, key: ExecutableKey) -> tuple[Callable[..., Any], int, tuple[Any, ...]]:
        """Return the function to compile, the index of the donated argument, and the shapes of all arguments.

        A step donates the whole state; a helper donates only the part of the state that it changes.
        """
        state, vocab = self._shapes, self._params.target.config.vocab_size
        match key.kind:
            case "update_page_table":
                return update_page_table, 0, (state.page_table, _int32(self.page_updates, 3))
            case "controls":
                return penalties.admit, 0, (state.controls, _int32(penalties.packed_size(state.controls)))
            case "grammar":
                packed = jax.ShapeDtypeStruct((grammar_mask.packed_size(state.grammars),), jnp.int16)
                return grammar_mask.load, 0, (state.grammars, packed)
        step: Callable[..., Any]
        program, slots = self._program_of(key), _int32(key.size)
        match key.kind:
            case "round":
                step, inputs = spec_step, [slots]
            case "draft":
                step, inputs = draft_step, [slots]
            case "verify":
                _, draft = jax.eval_shape(partial(draft_step, program), self._params, state, slots)
                step, inputs = verify_step, [slots, draft, mask_shape(key.size, draft.tokens.shape[1], vocab)]
            case "prefill":
                masks = [mask_shape(1, 1, vocab)] if key.masked else []
                step, inputs = prefill_step, [_int32(PREFILL_HEAD + self._pages + key.size), *masks]
            case "write_pending_rows":
                step, inputs = write_pending_rows_step, [_int32(PENDING_ROWS_HEAD + self._pages)]
        return partial(step, program), 1, (self._params, state, *inputs)

    def _compile(self, lowered: Iterable[tuple[ExecutableKey, Any]], check: Check = lambda executables: None) -> None:
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:  # lowers the next program while others compile
            futures = {key: pool.submit(self._compile_one, self._name(key), program) for key, program in lowered}
        new = {key: future.result() for key, future in futures.items()}  # if one fails, none is stored
        if new:
            check([*self.compiled.values(), *new.values()])
        self.compiled.update(new)

    def _compile_one(self, name: str, lowered: Any) -> Any:
        start = time.perf_counter()
        executable = lowered.compile(compiler_options=self._program.compiler_options)
        self.seconds[name] = time.perf_counter() - start
        logger.info("compiled %s in %.1f s", name, self.seconds[name])
        return executable

    def _name(self, key: ExecutableKey) -> str:
        return key.name(self._depths[-1])


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
