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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh

from jspec.core.config import EngineConfig
from jspec.core.records import SlotState
from jspec.draft.base import Drafter
from jspec.draft.elsewhere import Elsewhere
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.step import memory
from jspec.step.executable_key import ExecutableKey, Kind
from jspec.step.executables import Executables
from jspec.step.on_mesh import log_devices, make_state, on_one, sender
from jspec.step.program import Params, Program

logger = logging.getLogger(__name__)

DRAFTERS: tuple[Kind, ...] = ("draft", "commit", "draft_prefill", "write_pending_rows")  # run where the drafter is
BOTH: tuple[Kind, ...] = ("update_page_table",)  # run on every side


@final
class Side:
    """Devices that run target and drafter, or only one of the two.

    Args:
        program: the settings of this side's programs.
        params: the weights, on these devices.
        config: options of the engine.

    Attributes:
        state: the state of all slots and pools; each step takes its buffers and returns a new state.
        programs: the compiled programs.
        planner: the planner of the devices' memory.
        memory_plan: memory of each device, in bytes.
    """

    state: SlotState
    programs: Executables
    memory_plan: memory.MemoryPlan

    def __init__(self, program: Program, params: Params, config: EngineConfig) -> None:
        self.program, self.params, self._config = program, params, config
        self.send = sender(program.mesh)
        log_devices(program.mesh)
        devices = [] if program.mesh is None else list(program.mesh.devices.flat)
        free, count = memory.device_memory(*devices), max(len(devices), 1)
        self.planner = memory.MemoryPlanner(*on_one(program, params), config, free, count)
        self._rows: tuple[int | None, ...] = ()
        self._slots = self.send(np.zeros(0, np.int32))

    def start(self, pool: PoolShape, drafting: Side) -> None:
        """Allocate the state and prepare for compiling programs.

        Args:
            pool: the shapes of the KV pools.
            drafting: the side whose drafts this one verifies.
        """
        self._pool = pool
        self.make_state()
        others = None if drafting is self else drafting.programs
        self.programs = Executables(self.program, self.params, self.state, self._config, others)
        self._update_memory_plan([])

    def make_state(self) -> None:
        """Allocate a state without requests."""
        self.state = make_state(self.program, self.params, self._pool)
        jax.block_until_ready(self.state)

    def drop_state(self, error: BaseException) -> None:
        """Free the buffers of the state after a failed step with the given error."""
        delete_buffers(self.state, error)
        self.close()

    def close(self) -> None:
        """Free the device memory of the state."""
        self.state = None  # type: ignore[assignment]

    # -- programs

    def own(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        """Return those of the keys whose programs run on this side."""
        has_target, has_drafter = self.params.target is not None, not isinstance(self.program.drafter, Elsewhere)
        return [key for key in keys if key.kind in BOTH or (has_drafter if key.kind in DRAFTERS else has_target)]

    def compile(self, keys: Sequence[ExecutableKey]) -> None:
        """Compile this side's programs among those with the given keys, except those that are compiled already.

        Raises:
            ValueError: the programs do not fit into the devices' memory; none is stored then.
        """
        self.programs.compile(self.own(keys), self._update_memory_plan)

    def _update_memory_plan(self, executables: Sequence[Any]) -> None:
        """Replace the memory plan by one with the programs' measured memory; raise an error if it does not fit."""
        self.memory_plan = memory.measured(self.planner, self._pool, executables)
        logger.info("%s", self.memory_plan)

    # -- steps, which are started without waiting for their results

    def run(self, key: ExecutableKey, *inputs: Any) -> Any:
        """Start a step that returns a state and an output, and return the output."""
        self.state, output = self.programs.compiled[key](self.params, self.state, *inputs)
        return output

    def update(self, key: ExecutableKey, *inputs: Any) -> None:
        """Start a step that returns only a state."""
        self.state = self.programs.compiled[key](self.params, self.state, *inputs)

    def receive(self, arrays: Any) -> Any:
        """Copy arrays of any devices to all devices of this side."""
        return jax.device_put(arrays, self.state.root.sharding)

    def slots_of(self, rows: tuple[int | None, ...]) -> jax.Array:
        """Return the slot of each batch row as a device array, kept until it changes because a copy takes 20 us."""
        if rows != self._rows:
            self._rows, self._slots = rows, self.send(np.array(rows, np.int32))
        return self._slots

    def edit(self, key: ExecutableKey, part: str, packed: np.ndarray) -> None:
        """Start a helper program, which changes one part of the state.

        Args:
            part: name of the field of the state.
            packed: input of the program.
        """
        edited = self.programs.compiled[key](getattr(self.state, part), self.send(packed))
        self.state = replace(self.state, **{part: edited})

    def enter_pages(self, new: Sequence[tuple[int, int, int]]) -> None:
        """Write pages into the page table.

        Args:
            new: (slot, column, page) of each entry to write; the page table has one row per slot.
        """
        size = self.programs.page_updates
        for start in range(0, len(new), size):
            packed = np.full((size, 3), self._config.slots, np.int32)  # padding: no slot has this number
            packed[: len(new) - start] = new[start : start + size]
            self.edit(ExecutableKey("update_page_table"), "page_table", packed)


def sides_of(program: Program, params: Params, config: EngineConfig) -> tuple[Side, Side]:
    """Return the side of the target and the side of the drafter, which are the same unless the drafter has devices.

    Args:
        program: the settings of the engine's programs.
        params: the weights of target and drafter.
        config: options of the engine.
    """
    drafter = program.drafter
    if drafter.mesh is None:
        one = Side(program, params, config)
        return one, one
    verifying = replace(program, drafter=Elsewhere(drafter.tree))
    drafting = replace(program, mesh=drafter.mesh, controls=False, grammar_cells=0, processor=None, processor_args=0)
    logger.info("the draft model is on %s", ", ".join(map(str, drafter.mesh.devices.flat)))
    return (
        Side(verifying, Params(target=params.target, draft=()), config),
        Side(drafting, Params(target=None, draft=params.draft), config),
    )


def check_apart(config: EngineConfig, mesh: Mesh | None, target: Model, drafter: Drafter) -> None:
    """Check the devices of a drafter that has its own, and the options that depend on them.

    Raises:
        ValueError: the target is on one of the devices, or a dispatch would have several rounds.
    """
    if drafter.mesh is None:
        return
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


def delete_buffers(state: Any, error: BaseException) -> None:
    """Free the device buffers of a state at once, although the traceback of an error still refers to them.

    Requests keep the error, so without this the old state would stay in memory beside the new one.
    """
    for leaf in jax.tree.leaves(state):
        if not leaf.is_deleted():
            leaf.delete()
    traceback.clear_frames(error.__traceback__)
