"""Runs the compiled programs on the device, and stores weights, KV pools and slot state.

This is the only file of `jspec.engine` that imports jax. It also packs requests into the arrays that programs read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, final

import jax
import numpy as np

from jspec.core.config import EngineConfig
from jspec.core.records import MAX_STOP_IDS, PrefillInput, PromptPiece, SlotState, StepOutput
from jspec.engine.draft_length import RoundSize
from jspec.engine.grammar.token_table import TablePool
from jspec.engine.input_processor import draft_cap
from jspec.engine.penalty_input import pack_controls
from jspec.engine.program_choice import ProgramChoice, prefill_key
from jspec.engine.request import Request
from jspec.engine.scheduler import Piece, Plan, PrefillPlan, RoundPlan
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.models.quantize import check_device, quantized_as
from jspec.sampling import grammar_mask
from jspec.step import memory
from jspec.step.executable_key import ExecutableKey
from jspec.step.executables import Executables
from jspec.step.program import Params, Program
from jspec.step.side import sides_of
from jspec.step.split_decode import draft_masks, first_masks
from pallas_kernels.layers.deterministic_matmul import unsupported_weight
from pallas_kernels.layers.expert_matmul import unsupported_experts


@final
class ModelRunner:
    """Plans the device memory, compiles programs, and dispatches the scheduler's plans.

    Args:
        sizes: sizes for which rounds are compiled, the depths ascending.

    Attributes:
        pool: the shapes of the KV pools.
        target_side: the devices that run the target.
        draft_side: the devices that run the drafter, the same object unless the draft model is on other devices.
        choice: chooses the programs to compile.

    Raises:
        ValueError: the engine does not fit into memory; the message names settings to lower.
    """

    def __init__(self, program: Program, params: Params, config: EngineConfig, sizes: Sequence[RoundSize]) -> None:
        self.program, self.params, self._config = program, params, config
        target = params.main
        self._vocab_size = target.config.vocab_size
        pool = PoolShape.of(config, program.drafter.tree, str(target.embed.dtype))
        devices = () if program.mesh is None else program.mesh.devices.flat
        check_device(params, pool.dtype, pool.draft_dtype, device=next(iter(devices), None))
        self.target_side, self.draft_side = sides_of(program, params, config)
        self._sides = list(dict.fromkeys((self.draft_side, self.target_side)))  # the one that drafts is the first
        fitting = [memory.fit(side.planner, pool)[0] for side in self._sides]
        self.pool = min(fitting, key=lambda own: own.pages)
        for side in self._sides:
            with memory.explain_oom(side.planner, self.pool):
                side.start(self.pool, self.draft_side)
        self.choice = ProgramChoice(
            config,
            sizes,
            tuple(dict.fromkeys(kind for side in self._sides for kind in side.programs.helpers)),
            edits_all=program.processor is not None,
            is_divided=program.mesh is not None and program.mesh.size > 1,
            is_split=len(self._sides) > 1,
        )
        if config.compile_ahead:
            for side in self._sides:
                with memory.explain_oom(side.planner, self.pool):
                    side.compile(self.choice.all_keys())
        self._tables = TablePool(config.slots)

    @property
    def state(self) -> SlotState:
        """The state of the target's side, which is the whole state unless the draft model is on other devices."""
        return self.target_side.state

    @state.setter
    def state(self, state: SlotState) -> None:
        self.target_side.state = state

    @property
    def programs(self) -> Executables:
        """The programs of the target's side."""
        return self.target_side.programs

    @property
    def memory_plans(self) -> tuple[memory.MemoryPlan, ...]:
        """The memory of each of the target's devices and, if the draft model is on others, of each of those."""
        return tuple(side.memory_plan for side in reversed(self._sides))

    def seconds(self, name: str) -> dict[str, float]:
        """Return the attribute ``seconds`` or ``lower_seconds`` of `Executables`, added up over all sides."""
        return dict(sum((Counter(getattr(side.programs, name)) for side in self._sides), Counter()))

    def compile(self, keys: Sequence[ExecutableKey]) -> None:
        """Compile the programs with the given keys, except those that are compiled already.

        Other threads may step the engine meanwhile.

        Raises:
            ValueError: the programs do not fit into the memory of the devices; a side stores none of its own then.
        """
        for side in self._sides:
            side.compile(keys)

    def missing(self, keys: Sequence[ExecutableKey]) -> list[ExecutableKey]:
        """Return those of the keys whose programs are not compiled yet."""
        lacking = {key for side in self._sides for key in side.own(keys) if key not in side.programs.compiled}
        return [key for key in keys if key in lacking]

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
            output = self._prefill(plan)
        else:
            for side in self._sides:
                side.enter_pages(plan.new_pages)
            output = self._round(plan, size)
        jax.copy_to_host_async(output)
        return output

    def _prefill(self, plan: PrefillPlan) -> StepOutput:
        """Start a prefill of pieces of prompts."""
        target, drafting = self.target_side, self.draft_side
        key = target.programs.cover(prefill_key(plan))
        packed, masks = self._pack(plan, key.size), []
        if key.masked:
            matchers = [piece.request.matcher if piece.emits else None for piece in plan.pieces]
            functions = [None if one is None else one.first for one in matchers]
            masks = [target.send(first_masks(packed.pieces.shape[0], functions, self._vocab_size))]
        output = target.run(key, target.send(packed), *masks)
        if drafting is not target:
            first_tokens = drafting.receive(output.report)
            drafting.update(ExecutableKey("draft_prefill", key.size), drafting.send(packed), first_tokens)
        return output

    def _round(self, plan: RoundPlan, size: RoundSize) -> StepOutput:
        """Start the programs of a round."""
        target, drafting = self.target_side, self.draft_side
        *others, key = self.choice.keys_of(plan, size)
        key = target.programs.cover(key)
        padding = [self._config.slots] * (key.size - len(plan.requests))
        rows = (*(request.state.slot for request in plan.requests), *padding)
        if not others:
            return target.run(key, target.slots_of(rows))
        draft_key, *commits = (replace(other, size=key.size) for other in others)
        draft, masks = drafting.run(draft_key, drafting.slots_of(rows)), []
        if key.masked:
            matchers = [request.matcher for request in plan.requests]
            functions = [None if one is None else one.masks for one in matchers]
            masks = [target.send(draft_masks(draft, functions, self._vocab_size))]
        output = target.run(key, target.slots_of(rows), target.receive(draft), *masks)
        for commit in commits:
            verdict = drafting.receive((output.report, output.path))
            drafting.update(commit, drafting.slots_of(rows), draft, *verdict)
        return replace(output, path=None)

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
        self.target_side.edit(ExecutableKey("controls"), "controls", packed)

    def _load_table(self, table: int, class_of: np.ndarray, next_state: np.ndarray) -> None:
        """Replace one of the device's grammar tables.

        Args:
            table: index of the table.
            class_of: class of each token id, [vocab] int16; the grammar treats tokens of one class alike.
            next_state: next state of the grammar's automaton, [states, classes] int16.
        """
        assert self.state.grammars is not None
        packed = grammar_mask.pack(table, class_of, next_state, self.state.grammars.next.shape[1])
        self.target_side.edit(ExecutableKey("grammar"), "grammars", packed)

    def _pack(self, plan: PrefillPlan, size: int) -> PrefillInput:
        tree = self.program.drafter.tree
        sizes = dict(width=self.pool.width(tree), depth=tree.depth, vocab_size=self._vocab_size)
        pieces = [pack_piece(piece, **sizes) for piece in plan.pieces]
        tokens = [piece.request.tokens_between(piece.start, piece.start + piece.count) for piece in plan.pieces]
        return PrefillInput.pack(pieces, tokens, size, slots=self._config.slots)

    def write_pending_rows(self, request: Request, pages: Sequence[int]) -> None:
        """Write the missing draft cache rows of a request that has ended, if they complete one of its pages.

        The rows are missing because the next round would have written them.

        Args:
            pages: pages of the request, in the order of their rows.
        """
        lengths, page_size = (request.state.num_draft_cached_tokens, request.rows_committed), self._config.page_size
        key, side = ExecutableKey("write_pending_rows"), self.draft_side
        if key in side.programs.compiled and lengths[0] // page_size < lengths[1] // page_size:
            packed = pack_pending_rows(request, pages, width=side.state.page_table.shape[1])
            side.update(key, side.send(packed))

    def clear(self) -> None:
        """Mark all grammar tables as empty, because the device's state was lost."""
        self._tables.clear()

    def reset_state(self, error: BaseException) -> None:
        """Replace the device's state by a new one after a failed step with the given error; weights are kept."""
        for side in self._sides:
            side.drop_state(error)
        for side in self._sides:
            side.make_state()

    def close(self) -> None:
        """Free the device memory of the state."""
        for side in self._sides:
            side.close()


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
