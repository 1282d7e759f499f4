"""The devices of an engine with their programs, weights and slot state: one side, or two if the draft model is apart.

With a draft model on other devices than the target, a round is three programs, and arrays cross twice:

    draft model's devices    draft_step                     commit_step
                                  \\  draft                   /  report and path of the verdict
    target's devices               `----->  verify_step ---'

Each side has its own `SlotState`. Roots, lengths, page table and sampling parameters are equal on both; the target's
pools, controls and grammars are on the target's side, the draft's pools and state on the draft model's. A prefill runs
on both sides, and the first tokens cross to the draft model's.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, final

import jax
import numpy as np
from jax.sharding import Mesh

from jspec.core.config import EngineConfig
from jspec.core.prefill_input import PrefillInput
from jspec.core.records import Draft, SlotState
from jspec.draft.base import Drafter
from jspec.draft.elsewhere import Elsewhere
from jspec.draft.lookup import LookupState, states_with_corpus, with_corpora
from jspec.models.adapters import empty_tables, no_adapter, on_devices, table_bytes
from jspec.models.decoder import Model
from jspec.models.parts.adapter_tables import AdapterTables, LowRank
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.quantize import check_device
from jspec.step import memory
from jspec.step.across_processes import Calls
from jspec.step.executable_key import CUT, WITHOUT_OUTPUT, ExecutableKey, Kind
from jspec.step.executables import Executables
from jspec.step.on_mesh import log_devices, make_state, on_one, sender, spans_processes
from jspec.step.program import Params, Program
from jspec.step.program_memory import ProgramMemory

logger = logging.getLogger(__name__)

DRAFTERS: tuple[Kind, ...] = ("draft", "commit", "draft_prefill", "write_pending_rows")  # run where the drafter is
BOTH: tuple[Kind, ...] = ("update_page_table",)  # run on every side
# The part of the state that each small program changes.
HELPERS = {
    "update_page_table": "page_table",
    "controls": "controls",
    "grammar": "grammars",
    "prediction": "predictions",
    **dict.fromkeys(("save_state", "load_state"), "target"),
}

T = TypeVar("T")


@final
class Side:
    """Devices that run target and drafter, or only one of the two.

    Everything that changes the state goes through ``calls``, so that all processes with these devices do the same. What
    a method of the name "..._here" does, the other processes must do too.

    Args:
        program: the settings of this side's programs.
        params: the weights, on these devices.
        config: options of the engine.
        calls: makes this side's calls, in all processes that have its devices.

    Attributes:
        adapters: tables of adapters of the target; None: the engine serves none, or the devices lack the target.
        state: the state of all slots and pools; each step takes its buffers and returns a new state.
        draft: what "draft" returned, or other devices drafted, until "verify" or "commit" takes it.
        programs: the compiled programs.
        planner: the planner of the devices' memory.
        memory_plan: memory of each device, in bytes.
    """

    adapters: AdapterTables | None
    state: SlotState
    programs: Executables
    memory_plan: memory.MemoryPlan

    def __init__(self, program: Program, params: Params, config: EngineConfig, calls: Calls) -> None:
        self.program, self.params, self._config, self._calls = program, params, config, calls
        self.send = sender(program.mesh)
        log_devices(program.mesh)
        devices = () if program.mesh is None else program.mesh.local_devices
        free, count = calls.least(memory.device_memory(*devices)), 1 if program.mesh is None else program.mesh.size
        adapters = 0
        if params.target is not None:
            adapters = table_bytes(params.target, config.adapters, config.adapter_rank)
        self.planner = memory.MemoryPlanner(*on_one(program, params), config, free, count, adapters)
        self.draft: Draft | None = None
        self._kept: list[LookupState] = []
        self._rows, self._slots = np.zeros(0, np.int32), self.send(np.zeros(0, np.int32))

    def fit(self, pool: PoolShape) -> PoolShape:
        """Return the pools with as many pages as fit (`jspec.step.memory.fit`).

        Raises:
            ValueError: the devices cannot compute with the weights or pools as they are, or the least do not fit.
        """
        mesh = self.program.mesh
        check_device(self.params, pool.dtype, pool.draft_dtype, device=None if mesh is None else mesh.devices.flat[0])
        return memory.fit(self.planner, pool)[0]

    def explain_oom(self, pool: PoolShape) -> AbstractContextManager[None]:
        return memory.explain_oom(self.planner, pool)

    def start(self, pool: PoolShape, drafting: Side) -> None:
        """Allocate the state and prepare for compiling programs.

        Args:
            pool: the shapes of the KV pools.
            drafting: the side whose drafts this one verifies.
        """
        self._pool = pool
        self._make_state()
        others = None if drafting is self else drafting.programs
        if self.adapters is not None and self._config.compile_ahead:
            assert self.params.target is not None
            self.load_adapter(0, no_adapter(self.params.target, self._config.adapter_rank))  # compiles the load
        self.programs = Executables(self.program, self.params, self.state, self._config, others, self.adapters)
        self._update_memory_plan([])

    def _make_state(self) -> None:
        """Allocate a state without requests, and tables without adapters."""
        self.state, self.adapters = make_state(self.program, self.params, self._pool), None
        if self._config.adapters and self.params.target is not None:
            self.adapters = empty_tables(self.params.target, self._config.adapters, self._config.adapter_rank)
        jax.block_until_ready((self.state, self.adapters))

    def _drop_state(self) -> None:
        self.state, self.draft, self.adapters = None, None, None  # type: ignore[assignment]

    def load_adapter(self, index: int, adapter: Sequence[Mapping[str, LowRank]]) -> None:
        """Load an adapter of `jspec.models.adapters.as_tables` into a table, which no step in flight reads anew."""
        assert self.adapters is not None and self.params.target is not None
        self.adapters = self.adapters.with_table(index, on_devices(adapter, self.params.target))

    def use(self, drafter: Drafter, params: Params) -> None:
        """Run later steps with other weights of the same shapes, and with the drafter that was bound to them."""
        if not isinstance(self.program.drafter, Elsewhere):
            self.program = replace(self.program, drafter=drafter)
            self.planner = replace(self.planner, program=replace(self.planner.program, drafter=drafter))
            self.programs.use_drafter(drafter)
        self.params = params

    def sleep(self) -> None:
        """Free the device memory of the state, except the texts of earlier requests, which come to the host."""
        self._kept = jax.tree.map(np.array, states_with_corpus(self.state.draft))  # copies, also on a CPU
        delete_buffers(self.state, None)
        self._drop_state()

    def wake(self) -> None:
        """Allocate the state again, with the texts that `sleep` kept."""
        self._make_state()
        if self._kept:
            kept = [self.send(state) for state in self._kept]
            self.state = replace(self.state, draft=with_corpora(self.state.draft, kept))

    def reset(self, error: BaseException) -> None:
        """Replace the state by a new one after a failed step with the given error; weights are kept."""
        self._calls.reset(partial(self.reset_here, error))

    def reset_here(self, error: BaseException | None) -> None:
        """Replace the state on the devices of this process; None: the failed step is another process'."""
        delete_buffers(self.state, error)
        self._drop_state()
        self._make_state()

    def close(self) -> None:
        """Free the device memory of the state."""
        self._calls.close()
        self._drop_state()

    # -- programs

    def own(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        """Return those of the keys whose programs run on this side."""
        has_target, has_drafter = self.params.target is not None, not isinstance(self.program.drafter, Elsewhere)
        return [key for key in keys if key.kind in BOTH or (has_drafter if key.kind in DRAFTERS else has_target)]

    def missing(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        """Return those of the keys whose programs run on this side and are not compiled yet."""
        return [key for key in self.own(keys) if key not in self.programs.compiled]

    def compile(self, keys: Sequence[ExecutableKey]) -> None:
        """Compile this side's programs among those with the given keys, except those that are compiled already.

        Raises:
            ValueError: the programs do not fit into the devices' memory; none is stored then.
        """
        if self.missing(keys):
            self._calls.compile(self.own(keys), self.programs, self._update_memory_plan)

    def _update_memory_plan(self, programs: Sequence[ProgramMemory]) -> None:
        """Replace the memory plan by one with the programs' measured memory; raise an error if it does not fit."""
        self.memory_plan = memory.measured(self.planner, self._pool, programs)
        logger.info("%s", self.memory_plan)

    # -- steps, which are started without waiting for their results

    def run(self, key: ExecutableKey, *inputs: Any) -> Any:
        """Start a compiled program on the state, and return its output; None if it has none.

        Args:
            key: the program. "verify" and "commit" take ``draft`` besides the inputs.
            inputs: the program's other inputs beside weights and state: arrays of the host, or of this side's devices
                if no other process has any of these. Those of a prefill are the fields of a `PrefillInput`, and then
                the rest.
        """
        return self._calls.run(self.run_here, key, inputs)

    def run_here(self, key: ExecutableKey, *inputs: Any) -> Any:
        """Start a program on the devices of this process."""
        program, sent = self.programs.compiled[key], self._sent(key, inputs)
        if key.kind in HELPERS:
            part = HELPERS[key.kind]
            self.state = replace(self.state, **{part: program(getattr(self.state, part), *sent)})
            return None
        if key.kind in WITHOUT_OUTPUT:
            self.state = program(self.params, self.state, *sent)
            return None
        params = replace(self.params, adapters=self.adapters) if key.adapted else self.params
        self.state, output = program(params, self.state, *sent)
        if key.kind == "draft":
            self.draft = output
        else:
            jax.copy_to_host_async(replace(output, path=None))
        return output

    def _sent(self, key: ExecutableKey, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs of a program as arrays of the devices."""
        first: list[Any] = []
        if key.kind in ("prefill", "draft_prefill"):
            pieces, tokens, *inputs = inputs
            first = [self.send(PrefillInput(pieces, tokens))]
        elif key.kind in CUT:
            slots, *inputs = inputs
            first = [self._slots_of(slots)]
        if key.kind in ("verify", "commit"):
            first, self.draft = [*first, self.draft], None
        return first + [value if isinstance(value, jax.Array) else self.send(value) for value in inputs]

    def _slots_of(self, rows: np.ndarray) -> jax.Array:
        """Return the slot of each batch row as a device array, kept until it changes because a copy takes 20 us."""
        if not np.array_equal(rows, self._rows):
            self._rows, self._slots = rows, self.send(rows)
        return self._slots

    def receive(self, arrays: Any) -> Any:
        """Copy arrays of any devices to all devices of this side."""
        return jax.device_put(arrays, self.state.root.sharding)

    def wait(self, call: Callable[[], T]) -> T:
        """Return the result of a function that waits for the devices."""
        return self._calls.wait(call)


def sides_of(program: Program, params: Params, config: EngineConfig, calls: Calls) -> tuple[Side, Side]:
    """Return the side of the target and the side of the drafter, which are the same unless the drafter has devices.

    Args:
        program: the settings of the engine's programs.
        params: the weights of target and drafter.
        config: options of the engine.
        calls: makes the calls of all sides, of which there are two in one process only.
    """
    drafter = program.drafter
    if drafter.mesh is None:
        side = Side(program, params, config, calls)
        return side, side
    verifying = replace(program, drafter=Elsewhere(drafter.tree))
    drafting = replace(program, mesh=drafter.mesh, controls=False, grammar_cells=0, processor=None, processor_args=0)
    logger.info("the draft model is on %s", ", ".join(map(str, drafter.mesh.devices.flat)))
    return (
        Side(verifying, Params(target=params.target, draft=()), config, calls),
        Side(drafting, Params(target=None, draft=params.draft), config, calls),
    )


def check_apart(config: EngineConfig, mesh: Mesh | None, target: Model, drafter: Drafter) -> None:
    """Check the devices of a drafter that has its own, and the options that depend on them.

    Raises:
        ValueError: the target is on one of the devices, or several processes have the target's, or a dispatch would
            have several rounds.
    """
    if drafter.mesh is None:
        return
    if drafter.reads_target or drafter.writes_target:
        raise ValueError(
            f"{type(drafter).__name__}: device: expected none, as it reads the target's caches, got "
            f"{', '.join(map(str, drafter.mesh.devices.flat))}; leave it out"
        )
    if spans_processes(mesh):
        raise ValueError(
            f"{type(drafter).__name__}: device: expected none beside tensor_parallel or mesh over devices of several "
            f"processes, got {', '.join(map(str, drafter.mesh.devices.flat))}; leave it out: then the drafter is "
            "divided over the target's devices"
        )
    devices = target.embed.devices() if mesh is None else set(mesh.devices.flat)
    if shared := devices & set(drafter.mesh.devices.flat):
        names = ", ".join(sorted(map(str, shared)))
        raise ValueError(
            f"{type(drafter).__name__}: device: expected devices that do not run the target, got {names}; take others, "
            "or leave it out: then the drafter is on the target's devices"
        )
    if config.rounds_per_dispatch > 1:
        raise ValueError(
            f"rounds_per_dispatch: expected 1 with a draft model on other devices, got {config.rounds_per_dispatch}; "
            "leave it out"
        )


def delete_buffers(state: Any, error: BaseException | None) -> None:
    """Free the device buffers of a state at once, although the traceback of an error still refers to them.

    Requests keep the error, so without this the old state would stay in memory beside the new one.
    """
    for leaf in jax.tree.leaves(state):
        if not leaf.is_deleted():
            leaf.delete()
    if error is not None:
        traceback.clear_frames(error.__traceback__)
