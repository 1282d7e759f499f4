"""Compiles all programs of an engine and stores them by key.

The engine says which programs to compile and when (`jspec.engine.schedule.program_choice`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jspec.core.config import EngineConfig
from jspec.core.prefill_input import PrefillInput
from jspec.core.progress import progress_bar
from jspec.core.records import COLUMNS, Draft, LayerState, SlotState
from jspec.draft import prediction
from jspec.draft.base import Drafter
from jspec.models.kv_cache import copy_state, update_page_table
from jspec.models.parts.adapter_tables import AdapterTables
from jspec.models.weights.tensor_parallel import state_layout
from jspec.sampling import grammar_mask, penalties
from jspec.step.decode import spec_step
from jspec.step.executable_key import CUT, WITHOUT_OUTPUT, ExecutableKey, Kind, page_updates
from jspec.step.on_mesh import helper_on, shapes_of, spans_processes, step_on
from jspec.step.prefill import draft_prefill_step, prefill_step, write_pending_rows_step
from jspec.step.program import Params, Program
from jspec.step.program_memory import ProgramMemory, program_memory
from jspec.step.split_decode import commit_step, draft_step, mask_shape, verify_step
from pallas_kernels.dispatch import describe, resolve

logger = logging.getLogger(__name__)

PENDING_ROWS_HEAD = 3  # number of int32 values before the page row: slot, root, committed rows

Check = Callable[[Sequence[ProgramMemory]], None]


class Executables:
    """Compiles and stores the executables of an engine. A call of an executable never traces or compiles.

    Args:
        program: the settings that all executables share.
        params: the weights; only their shapes and shardings are used.
        state: the slot state; only its shapes and shardings are used.
        config: the engine's options.
        drafting: the executables of the devices that draft, if those are others.
        adapters: tables of adapters of the target, of which only shapes and shardings are used; None: there are none.

    Attributes:
        compiled: the executables by key.
        memory: memory of each executable by key.
        seconds: compilation time of each executable in seconds, by name.
        lower_seconds: time in seconds for tracing and lowering each executable, by name.
        digests: digest of each executable's text before compilation, by name, if several processes run it.
    """

    def __init__(
        self,
        program: Program,
        params: Params,
        state: SlotState,
        config: EngineConfig,
        drafting: Executables | None = None,
        adapters: AdapterTables | None = None,
    ) -> None:
        (device, *_) = state.root.devices()
        self._program = replace(program, implementation=resolve(program.implementation, device))
        self._params = shapes_of(params, program.mesh)  # shapes, so that replaced weights are freed
        self._adapted = self._params
        if adapters is not None:
            self._adapted = replace(self._params, adapters=shapes_of(adapters, program.mesh))
        self._config = config
        self._drafting = drafting
        self._pages = state.page_table.shape[1]
        self._shapes = shapes_of(state, program.mesh)
        self._devices = 1 if program.mesh is None else program.mesh.size
        self._compiling = threading.Lock()
        self.compiled: dict[ExecutableKey, Any] = {}
        self.memory: dict[ExecutableKey, ProgramMemory] = {}
        self.seconds: dict[str, float] = {}
        self.lower_seconds: dict[str, float] = {}
        self.digests: dict[str, str] = {}
        logger.info("kernels: %s", describe(program.implementation, device))
        warn_of_slow_layers(state.target, device.platform)

    def use_drafter(self, drafter: Drafter) -> None:
        """Compile later programs with a drafter of other weights, so that the old ones are freed."""
        self._program = replace(self._program, drafter=drafter)

    @property
    def helpers(self) -> list[Kind]:
        """Return the kinds of the small programs that edit parts of this engine's state."""
        kinds: list[Kind] = ["update_page_table"]
        kinds += ["controls"] if self._shapes.controls is not None else []
        kinds += ["grammar"] if self._shapes.grammars is not None else []
        kinds += ["prediction"] if self._shapes.predictions is not None else []
        kinds += ["save_state", "load_state"] if any(state.num_copies for state in self._shapes.target) else []
        has_pending_rows = self._program.drafter.has_pending_rows and self._config.prefix_cache
        return kinds + (["write_pending_rows"] if has_pending_rows else [])

    def compile(self, keys: Sequence[ExecutableKey], check: Check = lambda memory: None) -> None:
        """Compile the programs with the given keys, except those that are compiled already.

        Only the caller waits; other threads may run programs meanwhile.

        Args:
            check: function that is called with the memory of all executables, old and new; if it raises, no new one
                is stored.
        """
        if all(key in self.compiled for key in keys):
            return  # without waiting for another thread's compilation
        with self._compiling:
            missing = [key for key in keys if key not in self.compiled]
            if not missing:
                return
            logger.info("compiling %s", ", ".join(map(self._name, missing)))
            futures, order = {}, count(1)
            with (
                progress_bar(len(missing), "compiling", "programs") as progress,
                ThreadPoolExecutor(max_workers=os.cpu_count()) as pool,
            ):
                for key in missing:  # the next program is lowered while others compile
                    futures[key] = pool.submit(self._compile_one, self._name(key), self._lower(key))
                    futures[key].add_done_callback(partial(self._note, progress, key, order, len(missing)))
            new = {key: future.result() for key, future in futures.items()}  # if one fails, none is stored
            memory = self.memory | {key: needed for key, (_, needed) in new.items()}
            check(list(memory.values()))
            self.memory = memory
            self.compiled.update((key, executable) for key, (executable, _) in new.items())

    def _note(self, bar: tqdm, key: ExecutableKey, order: Iterator[int], total: int, done: Future[Any]) -> None:
        """Report the end of a compilation."""
        bar.update()
        if done.exception() is None:
            name = self._name(key)
            logger.info("compiled %s in %.1f s, %d of %d", name, self.seconds[name], next(order), total)

    def _program_of(self, key: ExecutableKey) -> Program:
        drafter = self._program.drafter
        return replace(
            self._program,
            drafter=drafter.cut(key.depth) if key.kind in CUT else drafter,
            rounds=self._config.rounds_per_dispatch if key.kind == "round" else 1,
            nodes=key.nodes,
            trace=key.traced,
            logprobs=self._config.logprobs_mode if key.logprobs else None,
            prompt_logprobs=key.prompt_logprobs,
            divides_logits=self._devices > 1 and key.kind == "round" and not key.gathers_logits,
            adapted=key.adapted,
        )

    def _lower(self, key: ExecutableKey) -> Any:
        """Trace and lower one program."""
        start = time.perf_counter()
        function, donated, arguments = self._call(key)
        mesh = self._program.mesh
        arguments = arguments if mesh is None else shapes_of(arguments, mesh)
        options = self._program_of(key).compiler_options
        lowered = jax.jit(function, donate_argnums=donated, compiler_options=options).lower(*arguments)
        self.lower_seconds[self._name(key)] = time.perf_counter() - start
        if spans_processes(mesh):
            self.digests[self._name(key)] = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        return lowered

    def _call(self, key: ExecutableKey) -> tuple[Callable[..., Any], int, tuple[Any, ...]]:
        """Return the function to compile, the index of the donated argument, and the shapes of all arguments.

        A step donates the whole state; a helper donates only the part of the state that it changes.
        """
        state, mesh = self._shapes, self._program.mesh
        match key.kind:
            case "update_page_table":
                entries = _int32(page_updates(self._config.slots), 3)
                return helper_on(mesh, update_page_table), 0, (state.page_table, entries)
            case "controls":
                packed = _int32(penalties.packed_size(state.controls))
                return helper_on(mesh, penalties.admit), 0, (state.controls, packed)
            case "grammar":
                packed = jax.ShapeDtypeStruct((grammar_mask.packed_size(state.grammars),), jnp.int16)
                return helper_on(mesh, grammar_mask.load), 0, (state.grammars, packed)
            case "prediction":
                packed = _int32(prediction.packed_size(state.predictions))
                return helper_on(mesh, prediction.load), 0, (state.predictions, packed)
            case "save_state" | "load_state":
                copy = partial(copy_state, is_load=key.kind == "load_state")
                return helper_on(mesh, copy, state_layout(state.target)), 0, (state.target, _int32(3))
        step: Callable[..., Any]
        inputs: list[Any]
        program, slots = self._program_of(key), _int32(key.size)
        match key.kind:
            case "round":
                step, inputs = spec_step, [slots]
            case "draft":
                step, inputs = draft_step, [slots]
            case "verify":
                draft = (self._drafting or self).draft_shape(key)
                step, inputs = verify_step, [slots, draft, *self._masks(key, *draft.tokens.shape)]
            case "commit":
                outputs = _report(key.size, key.depth), _int32(1, key.size, key.depth + 1)
                step, inputs = commit_step, [slots, self.draft_shape(key), *outputs]
            case "prefill":
                prompts = PrefillInput.shapes(key.size, slots=state.root.shape[0], pages=self._pages)
                step, inputs = prefill_step, [prompts, *self._masks(key, prompts.pieces.shape[0], 1)]
            case "draft_prefill":
                prompts = PrefillInput.shapes(key.size, slots=state.root.shape[0], pages=self._pages)
                step, inputs = draft_prefill_step, [prompts, _report(prompts.pieces.shape[0], 0)]
            case "write_pending_rows":
                step, inputs = write_pending_rows_step, [_int32(PENDING_ROWS_HEAD + self._pages)]
        options = dict(has_output=key.kind not in WITHOUT_OUTPUT, divides_logits=program.divides_logits)
        params = self._adapted if key.adapted else self._params
        step = step_on(mesh, partial(step, program), params, **options)
        return step, 1, (params, state, *inputs)

    def draft_shape(self, key: ExecutableKey) -> Draft:
        """Return the shapes of the draft of a program, which these executables draft."""
        draft = step_on(self._program.mesh, partial(draft_step, self._program_of(key)), self._params)
        _, shapes = jax.eval_shape(draft, self._params, self._shapes, _int32(key.size))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)

    def _masks(self, key: ExecutableKey, rows: int, nodes: int) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of a program's token masks, if it takes any."""
        return [mask_shape(rows, nodes, self._params.main.config.vocab_size)] if key.masked else []

    def _compile_one(self, name: str, lowered: Any) -> tuple[Any, ProgramMemory]:
        start = time.perf_counter()
        executable = lowered.compile()
        self.seconds[name] = time.perf_counter() - start
        return executable, program_memory(executable, self._devices)

    def _name(self, key: ExecutableKey) -> str:
        return key.name(self._program.drafter.tree.depth)


def warn_of_slow_layers(states: Sequence[LayerState], platform: str) -> None:
    """Log a warning if layers of the target have no kernel on the device."""
    if platform != "cpu" and not all(state.has_kernel for state in states):
        logger.warning(
            "the target's layers with recurrent states have no kernel for this %s (it needs a Hopper GPU, jax 0.11, "
            "bfloat16, key heads of 128 channels and value heads of a multiple of 64): they are slow",
            platform,
        )


def _report(rows: int, depth: int) -> jax.ShapeDtypeStruct:
    """Return the shape of the report of a step with one round (`jspec.core.records.pack_result`)."""
    return _int32(1, rows, depth + 1 + COLUMNS)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
