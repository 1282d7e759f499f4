"""Runs the compiled programs on the device, and stores weights, KV pools and slot state.

This is the only file of `jspec.engine` that imports jax. It also packs requests into the arrays that programs read.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from jspec.core.config import EngineConfig
from jspec.core.records import MAX_STOP_IDS, PrefillInput, PromptPiece, StepOutput
from jspec.engine.draft_length import RoundSize
from jspec.engine.grammar.token_table import TablePool
from jspec.engine.input_processor import draft_cap
from jspec.engine.penalty_input import pack_controls
from jspec.engine.program_choice import ProgramChoice, prefill_key, round_keys
from jspec.engine.request import Request
from jspec.engine.scheduler import Piece, Plan, PrefillPlan, RoundPlan
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.models.quantize import check_device, quantized_as
from jspec.sampling import grammar_mask
from jspec.step import memory
from jspec.step.executable_key import ExecutableKey
from jspec.step.executables import Executables
from jspec.step.on_mesh import log_devices, make_state, on_one, sender
from jspec.step.program import Params, Program
from jspec.step.split_decode import Step, masked_prefill, split_step
from pallas_kernels.layers.deterministic_matmul import unsupported_weight
from pallas_kernels.layers.expert_matmul import unsupported_experts

logger = logging.getLogger(__name__)


@final
class ModelRunner:
    """Plans the device memory, compiles programs, and dispatches the scheduler's plans.

    Args:
        sizes: sizes for which rounds are compiled, the depths ascending.

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

    def __init__(self, program: Program, params: Params, config: EngineConfig, sizes: Sequence[RoundSize]) -> None:
        self.program, self.params, self._config = program, params, config
        target = params.target
        self._vocab_size = target.config.vocab_size
        pool = PoolShape.of(config, program.drafter.tree, str(target.embed.dtype))
        check_device(params, pool.dtype, pool.draft_dtype)
        self._send = sender(program.mesh)
        log_devices(program.mesh)
        devices = () if program.mesh is None else program.mesh.devices.flat
        self.planner = memory.MemoryPlanner(*on_one(program, params), config, memory.device_memory(*devices))
        self.pool, _ = memory.fit(self.planner, pool)
        with memory.explain_oom(self.planner, self.pool):
            self.state = make_state(program, params, self.pool)
            jax.block_until_ready(self.state)
            self.programs = Executables(program, params, self.state, config)
            self.choice = ProgramChoice(config, sizes, self.programs.helpers, edits_all=program.processor is not None)
            self._update_memory_plan([])
            if config.compile_ahead:
                self.compile(self.choice.all_keys())
        self._tables = TablePool(config.slots)
        self._rows: tuple[int | None, ...] = ()
        self._slots = self._send(np.zeros(0, np.int32))

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
        self.programs.compile(keys, self._update_memory_plan)

    def missing(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        """Return those of the keys whose programs are not compiled yet."""
        return [key for key in keys if key not in self.programs.compiled]

    def dispatch(self, plan: Plan, size: RoundSize, running: Collection[Request]) -> StepOutput:
        """Start a plan's step and the copy of its result to the host; return the result without waiting for it.

        Args:
            size: draft depth and number of verified nodes of a plan's rounds.
            running: requests whose grammars must keep their device tables.
        """
        if isinstance(plan, PrefillPlan):
            for piece in plan.pieces:
                if piece.is_last and self.edits(piece.request):  # now all tokens that penalties count are known
                    self._admit_controls(piece.request, running)
            step, rows = self._prefill_of(plan)
            packed = self._send(self._pack(plan, rows))
        else:
            self._enter_pages(plan.new_pages)
            step, rows = self._round_of(plan, size)
            packed = self._slots_of(plan, rows)
        self.state, output = step(self.params, self.state, packed)
        jax.copy_to_host_async(output)
        return output

    def _prefill_of(self, plan: PrefillPlan) -> tuple[Step, int]:
        """Return the compiled program for pieces of prompts, and its number of tokens."""
        key = self.programs.cover(prefill_key(plan))
        prefill = self.programs.compiled[key]
        if key.masked:
            matchers = [piece.request.matcher if piece.emits else None for piece in plan.pieces]
            prefill = masked_prefill(prefill, [None if one is None else one.first for one in matchers], self._send)
        return prefill, key.size

    def _round_of(self, plan: RoundPlan, size: RoundSize) -> tuple[Step, int]:
        """Return the compiled program for a round, and its number of batch rows."""
        *drafts, key = round_keys(plan, size)
        key = self.programs.cover(key)
        if not drafts:
            return self.programs.compiled[key], key.size
        draft = self.programs.compiled[replace(drafts[0], size=key.size)]
        mask_functions = [None if request.matcher is None else request.matcher.masks for request in plan.requests]
        return split_step(draft, self.programs.compiled[key], mask_functions, self._send), key.size

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
        admit = self.programs.compiled[ExecutableKey("controls")]
        self.state = replace(self.state, controls=admit(self.state.controls, self._send(packed)))

    def _load_table(self, table: int, class_of: np.ndarray, next_state: np.ndarray) -> None:
        """Replace one of the device's grammar tables.

        Args:
            table: index of the table.
            class_of: class of each token id, [vocab] int16; the grammar treats tokens of one class alike.
            next_state: next state of the grammar's automaton, [states, classes] int16.
        """
        assert self.state.grammars is not None
        packed = grammar_mask.pack(table, class_of, next_state, self.state.grammars.next.shape[1])
        load = self.programs.compiled[ExecutableKey("grammar")]
        self.state = replace(self.state, grammars=load(self.state.grammars, self._send(packed)))

    def _enter_pages(self, new: Sequence[tuple[int, int, int]]) -> None:
        """Write pages into the device's page table.

        Args:
            new: (slot, column, page) of each entry to write; the page table has one row per slot.
        """
        update, size = self.programs.compiled[ExecutableKey("update_page_table")], self.programs.page_updates
        for start in range(0, len(new), size):
            packed = np.full((size, 3), self._config.slots, np.int32)  # padding: no slot has this number
            packed[: len(new) - start] = new[start : start + size]
            self.state = replace(self.state, page_table=update(self.state.page_table, self._send(packed)))

    def _pack(self, plan: PrefillPlan, size: int) -> PrefillInput:
        tree = self.program.drafter.tree
        sizes = dict(width=self.pool.width(tree), depth=tree.depth, vocab_size=self._vocab_size)
        pieces = [pack_piece(piece, **sizes) for piece in plan.pieces]
        tokens = [piece.request.tokens_between(piece.start, piece.start + piece.count) for piece in plan.pieces]
        return PrefillInput.pack(pieces, tokens, size, slots=self._config.slots)

    def _slots_of(self, plan: RoundPlan, size: int) -> jax.Array:
        """Return the slot of each batch row as a device array, kept until it changes because a copy takes 20 us."""
        slots = self._config.slots
        rows = (*(request.state.slot for request in plan.requests), *[slots] * (size - len(plan.requests)))
        if rows != self._rows:
            self._rows, self._slots = rows, self._send(np.array(rows, np.int32))
        return self._slots

    def write_pending_rows(self, request: Request, pages: Sequence[int]) -> None:
        """Write the missing draft cache rows of a request that has ended, if they complete one of its pages.

        The rows are missing because the next round would have written them.

        Args:
            pages: pages of the request, in the order of their rows.
        """
        lengths, page_size = (request.state.num_draft_cached_tokens, request.rows_committed), self._config.page_size
        write = self.programs.compiled.get(ExecutableKey("write_pending_rows"))
        if write is not None and lengths[0] // page_size < lengths[1] // page_size:
            packed = pack_pending_rows(request, pages, width=self.state.page_table.shape[1])
            self.state = write(self.params, self.state, self._send(packed))

    def clear(self) -> None:
        """Mark all grammar tables as empty, because the device's state was lost."""
        self._tables.clear()

    def reset_state(self, error: BaseException) -> None:
        """Replace the device's state by a new one after a failed step with the given error; weights are kept."""
        delete_buffers(self.state, error)
        self.state = None  # type: ignore[assignment]
        self.state = make_state(self.program, self.params, self.pool)
        jax.block_until_ready(self.state)

    def close(self) -> None:
        """Free the device memory of the state."""
        self.state = None  # type: ignore[assignment]


def delete_buffers(state: Any, error: BaseException) -> None:
    """Free the device buffers of a state at once, although the traceback of an error still refers to them.

    Requests keep the error, so without this the old state would stay in memory beside the new one.
    """
    for leaf in jax.tree.leaves(state):
        if not leaf.is_deleted():
            leaf.delete()
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
    weights: list[Any] = [w for layer in target.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    reasons = [unsupported_weight(weight) for weight in (*weights, target.output_head) if weight is not None]
    experts: list[Any] = [(layer.experts_gate_up, layer.experts_down) for layer in target.layers]
    for gate_up, down in (pair for pair in experts if pair[0] is not None):
        reasons += [unsupported_experts(gate_up, gated=True), unsupported_experts(down, gated=False)]
    for reason in filter(None, reasons):
        raise ValueError(f"deterministic: on a GPU {reason}; leave it off")


def pack_piece(piece: Piece, *, width: int, depth: int, vocab_size: int) -> PromptPiece:
    """Return a piece of a prompt as the record that `jspec.step.prefill.prefill_step` reads.

    Args:
        width: number of columns of the page table.
        depth: depth of the drafter's tree.
    """
    request, params = piece.request, piece.request.params
    assert request.state.slot is not None
    end = piece.start + piece.count
    page_row = np.zeros(width, np.int32)
    page_row[: len(piece.pages)] = piece.pages
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    return PromptPiece(
        slot=np.int32(request.state.slot),
        start=np.int32(piece.start),
        count=np.int32(piece.count),
        last=np.int32(piece.is_last),
        write=np.int32(piece.is_written),
        root=np.int32(next(iter(request.tokens_between(end, end + 1)), -1)),
        remaining=np.int32(request.max_new_tokens - max(len(request.token_ids) - 1, 0)),
        top_k=np.int32(max(min(params.top_k, vocab_size), 0)),
        draft_cap=np.int32(draft_cap(params, depth)),
        controlled=np.int32(bool(params.controls_used)),
        temperature=np.float32(params.temperature),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        seed=np.array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32),
        stop_ids=stop_ids,
        page_row=page_row,
    )


def pack_pending_rows(request: Request, pages: Sequence[int], *, width: int) -> np.ndarray:
    """Pack a request that has ended into the array that `jspec.step.prefill.write_pending_rows_step` takes.

    Args:
        pages: pages of the request, in the order of their rows.
        width: number of columns of the page table.
    """
    padding = [0] * (width - len(pages))
    return np.array([request.state.slot, request.token_ids[-1], request.rows_committed, *pages, *padding], np.int32)
