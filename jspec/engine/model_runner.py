"""Runs the compiled programs on the device, and stores weights, KV pools and slot state.

This is the only file of `jspec.engine` that imports jax. It also packs requests into the arrays that programs read.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jspec.core.config import EngineConfig
from jspec.core.records import PrefillInput, StepOutput
from jspec.engine.grammar.token_table import TablePool
from jspec.engine.penalty_input import pack_controls
from jspec.engine.program_choice import ProgramChoice, prefill_key, round_keys
from jspec.engine.prompt_input import pack_pending_rows, pack_piece
from jspec.engine.request import Request
from jspec.engine.scheduler import Plan, PrefillPlan, RoundPlan
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.models.quantize import check_device, quantized_as
from jspec.sampling import grammar_mask
from jspec.step import memory
from jspec.step.across_processes import calls_on
from jspec.step.executable_key import ExecutableKey
from jspec.step.executables import Executables
from jspec.step.on_mesh import log_devices, make_state, on_one, sender
from jspec.step.program import Params, Program
from jspec.step.split_decode import draft_masks, prompt_masks
from pallas_kernels.layers.deterministic_matmul import unsupported_weight

# The part of the state that each small program changes.
HELPERS = {"update_page_table": "page_table", "controls": "controls", "grammar": "grammars"}

logger = logging.getLogger(__name__)


@final
class ModelRunner:
    """Plans the device memory, compiles programs, and dispatches the scheduler's plans.

    Args:
        depths: draft depths for which rounds are compiled, ascending.

    Attributes:
        memory_plan: device memory of weights, KV pools and programs, in bytes; ``str(plan)`` is a readable summary.
        planner: the planner that made ``memory_plan``.
        pool: the shapes of the KV pools.
        state: the device's state of all slots and pools; each step takes its buffers and returns a new state.
        programs: the compiled programs.
        choice: chooses the programs to compile.

    Raises:
        ValueError: the engine does not fit into memory; the message names settings to lower.
    """

    def __init__(self, program: Program, params: Params, config: EngineConfig, depths: Sequence[int]) -> None:
        self.program, self.params, self._config = program, params, config
        target = params.target
        self._vocab_size = target.config.vocab_size
        pool = PoolShape.of(config, program.drafter.tree, str(target.embed.dtype))
        check_device(params, pool.dtype, pool.draft_dtype)
        self._send = sender(program.mesh)
        log_devices(program.mesh)
        self._calls = calls_on(program.mesh)
        self._calls.check_same(program, params, config)
        devices = () if program.mesh is None else program.mesh.local_devices
        available = self._calls.least(memory.device_memory(*devices))
        self.planner = memory.MemoryPlanner(*on_one(program, params), config, available)
        self.pool, _ = memory.fit(self.planner, pool)
        with memory.explain_oom(self.planner, self.pool):
            self.state = make_state(program, params, self.pool)
            jax.block_until_ready(self.state)
            self.programs = Executables(program, params, self.state, config, depths)
            self.choice = ProgramChoice(config, depths, self.programs.helpers, edits_all=program.processor is not None)
            self._update_memory_plan([])
            if config.compile_ahead:
                self.compile(self.choice.all_keys())
        self._tables = TablePool(config.slots)
        self._rows, self._slots, self._draft = np.zeros(0, np.int32), None, None
        self._calls.open()

    def _update_memory_plan(self, executables: Sequence[Any]) -> None:
        """Replace the memory plan by one with the programs' measured memory; raise an error if it does not fit."""
        self.memory_plan = memory.measured(self.planner, self.pool, executables)
        logger.info("%s", self.memory_plan)

    def compile(self, keys: Sequence[ExecutableKey]) -> None:
        """Compile the programs with the given keys, except those that are compiled already.

        Other threads may step the engine meanwhile.

        Raises:
            ValueError: the programs do not fit into the device's memory; none is stored then.
        """
        if self.missing(keys):
            self._calls.compile(keys, self.programs, self._update_memory_plan)

    def missing(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        """Return those of the keys whose programs are not compiled yet."""
        return [key for key in keys if key not in self.programs.compiled]

    def dispatch(self, plan: Plan, depth: int, running: Collection[Request]) -> StepOutput:
        """Start a plan's step and the copy of its result to the host; return the result without waiting for it.

        Args:
            depth: draft depth of the round.
            running: requests whose grammars must keep their device tables.
        """
        if isinstance(plan, RoundPlan):
            self._enter_pages(plan.new_pages)
            return self._run_round(plan, depth)
        for piece in plan.pieces:
            if piece.is_last and self.edits(piece.request):  # now all tokens that penalties count are known
                self._admit_controls(piece.request, running)
        key = self.programs.cover(prefill_key(plan))
        packed = self._pack(plan, key.size)
        return self.run(key, *packed, *([self._prompt_masks(plan, len(packed.pieces))] if key.masked else []))

    def _prompt_masks(self, plan: PrefillPlan, pieces: int) -> np.ndarray:
        matchers = [piece.request.matcher if piece.emits else None for piece in plan.pieces]
        return prompt_masks(pieces, [None if one is None else one.first for one in matchers], self._vocab_size)

    def _run_round(self, plan: RoundPlan, depth: int) -> StepOutput:
        """Run a round; a round with token masks of the host runs as two programs."""
        *drafts, key = round_keys(plan, depth)
        key = self.programs.cover(key)
        slots = self._slots_of(plan, key.size)
        if not drafts:
            return self.run(key, slots)
        draft = self.run(replace(drafts[0], size=key.size), slots)
        nodes = self._calls.wait(partial(jax.device_get, (draft.tokens, draft.parents, draft.valid)))
        mask_functions = [None if request.matcher is None else request.matcher.masks for request in plan.requests]
        return self.run(key, draft_masks(nodes, mask_functions, self._vocab_size))

    def run(self, key: ExecutableKey, *inputs: np.ndarray) -> Any:
        """Run a compiled program on the state, in all processes; return its output without waiting for it.

        This is the only way in which the loop changes the state, except `reset_state`.

        Args:
            inputs: the program's inputs beside weights and state, as arrays of the host. "verify" takes the slots and
                the draft of the last "draft".
        """
        return self._calls.run(self.run_here, key, inputs)

    def run_here(self, key: ExecutableKey, *inputs: np.ndarray) -> Any:
        """Run a compiled program on the devices of this process alone; the other processes must run it too."""
        program = self.programs.compiled[key]
        if key.kind in HELPERS:
            part = HELPERS[key.kind]
            changed = program(getattr(self.state, part), self._send(*inputs))
            self.state = replace(self.state, **{part: changed})
            return None
        if key.kind == "write_pending_rows":
            self.state = program(self.params, self.state, self._send(*inputs))
            return None
        self.state, output = program(self.params, self.state, *self._sent(key, inputs))
        if key.kind == "draft":
            self._draft = output
        else:
            jax.copy_to_host_async(output)
        return output

    def _sent(self, key: ExecutableKey, inputs: Sequence[np.ndarray]) -> list[Any]:
        """Send the inputs of a step to the devices. Slots stay there until they change, because a copy takes 20 us."""
        if key.kind == "prefill":
            pieces, tokens, *masks = inputs
            return [self._send(PrefillInput(pieces, tokens)), *map(self._send, masks)]
        if key.kind == "verify":
            return [self._slots, self._draft, self._send(*inputs)]
        (slots,) = inputs
        if not np.array_equal(slots, self._rows):
            self._rows, self._slots = slots, self._send(slots)
        return [self._slots]

    def wait(self, output: StepOutput) -> None:
        """Wait for a step; an interrupt loses nothing."""
        self._calls.wait(output.report.block_until_ready)

    def to_host(self, output: StepOutput) -> StepOutput:
        """Wait for a step and return its result as numpy arrays."""
        return jax.tree.map(np.asarray, output)

    def edits(self, request: Request) -> bool:
        """Return whether penalties, a grammar or a logits processor edit a request's logits."""
        return bool(request.params.controls_used) or self.program.processor is not None

    def _admit_controls(self, request: Request, running: Collection[Request]) -> None:
        """Load a request's logit edits into its slot, and its grammar into a device table if no table has it."""
        table = 0
        if request.grammar is not None:
            in_use = {other.grammar for other in running if other.grammar is not None}
            table, is_new = self._tables.place(request.grammar, in_use)
            if is_new:
                self._load_table(table, request.grammar.class_of, request.grammar.next)
        packed = pack_controls(request, self._vocab_size, table, self._config.processor_args)
        self.run(ExecutableKey("controls"), packed)

    def _load_table(self, table: int, class_of: np.ndarray, next_state: np.ndarray) -> None:
        """Replace one of the device's grammar tables.

        Args:
            table: index of the table.
            class_of: class of each token id, [vocab] int16; the grammar treats tokens of one class alike.
            next_state: next state of the grammar's automaton, [states, classes] int16.
        """
        assert self.state.grammars is not None
        packed = grammar_mask.pack(table, class_of, next_state, self.state.grammars.next.shape[1])
        self.run(ExecutableKey("grammar"), packed)

    def _enter_pages(self, new: Sequence[tuple[int, int, int]]) -> None:
        """Write pages into the device's page table.

        Args:
            new: (slot, column, page) of each entry to write; the page table has one row per slot.
        """
        size = self.programs.page_updates
        for start in range(0, len(new), size):
            packed = np.full((size, 3), self._config.slots, np.int32)  # padding: no slot has this number
            packed[: len(new) - start] = new[start : start + size]
            self.run(ExecutableKey("update_page_table"), packed)

    def _pack(self, plan: PrefillPlan, size: int) -> PrefillInput:
        tree = self.program.drafter.tree
        sizes = dict(width=self.pool.width(tree), depth=tree.depth, vocab_size=self._vocab_size)
        pieces = [pack_piece(piece, **sizes) for piece in plan.pieces]
        tokens = [piece.request.tokens_between(piece.start, piece.start + piece.count) for piece in plan.pieces]
        return PrefillInput.pack(pieces, tokens, size, slots=self._config.slots)

    def _slots_of(self, plan: RoundPlan, size: int) -> np.ndarray:
        """Return the slot of each batch row; a padding row has the number of slots."""
        padding = [self._config.slots] * (size - len(plan.requests))
        return np.array([*(request.state.slot for request in plan.requests), *padding], np.int32)

    def write_pending_rows(self, request: Request, pages: Sequence[int]) -> None:
        """Write the missing draft cache rows of a request that has ended, if they complete one of its pages.

        The rows are missing because the next round would have written them.

        Args:
            pages: pages of the request, in the order of their rows.
        """
        lengths, page_size = (request.state.num_draft_cached_tokens, request.rows_committed), self._config.page_size
        key = ExecutableKey("write_pending_rows")
        if key in self.programs.compiled and lengths[0] // page_size < lengths[1] // page_size:
            self.run(key, pack_pending_rows(request, pages, width=self.state.page_table.shape[1]))

    def clear(self) -> None:
        """Mark all grammar tables as empty, because the device's state was lost."""
        self._tables.clear()

    def reset_state(self, error: BaseException) -> None:
        """Replace the device's state by a new one after a failed step with the given error; weights are kept."""
        self._calls.reset(partial(self.reset_here, error))

    def reset_here(self, error: BaseException | None) -> None:
        """Replace the state on the devices of this process alone; the other processes must do it too."""
        delete_buffers(self.state, error)
        self.state = None  # type: ignore[assignment]
        self.state = make_state(self.program, self.params, self.pool)
        jax.block_until_ready(self.state)

    def close(self) -> None:
        """Free the device memory of the state, in all processes."""
        self._calls.close()
        self.state = None  # type: ignore[assignment]

    # -- several processes

    @property
    def is_whole(self) -> bool:
        """Return whether all processes are there."""
        return self._calls.is_whole

    def check_serves(self) -> None:
        """Raise RuntimeError if another process decides what this one runs, or a process is lost."""
        self._calls.check_serves()

    def follow(self) -> None:
        """Run what process 0 runs, until its engine is closed."""
        self._calls.follow(self)
        self.state = None  # type: ignore[assignment]


def delete_buffers(state: Any, error: BaseException | None) -> None:
    """Free the device buffers of a state at once, although the traceback of an error still refers to them.

    Requests keep the error, so without this the old state would stay in memory beside the new one.
    """
    for leaf in jax.tree.leaves(state):
        if not leaf.is_deleted():
            leaf.delete()
    if error is not None:
        traceback.clear_frames(error.__traceback__)


def check_deterministic(target: Model, implementation: str) -> None:
    """Refuse a target for which two programs may compute different bits for the same row.

    Raises:
        ValueError: a matrix product uses a kernel that is not deterministic; the message names weights or kernel.
    """
    if kind := quantized_as(target):
        raise ValueError(f"deterministic: expected a target whose weights are not quantised, got {kind}")
    if implementation == "reference" or jax.default_backend() != "gpu":
        return
    weights = [leaf for leaf in jax.tree.leaves([target.layers, target.output_head]) if leaf.ndim == 2]
    for reason in filter(None, map(unsupported_weight, weights)):
        raise ValueError(f"deterministic: on a GPU {reason}; leave it off")
