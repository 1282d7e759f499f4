"""Runs the compiled programs on the device, and stores weights, KV pools and slot state.

This is the only file of `jspec.engine` that imports jax. It also packs requests into the arrays that programs read.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import jax
import numpy as np

from jspec.core.config import EngineConfig
from jspec.core.prefill_input import PrefillInput
from jspec.core.records import StepOutput
from jspec.draft import prediction
from jspec.draft.base import Drafter
from jspec.engine.grammar.token_table import Grammar, TablePool
from jspec.engine.input.penalty_input import pack_controls
from jspec.engine.input.prompt_input import pack_pending_rows, pack_piece
from jspec.engine.request.request import Adapter, Request
from jspec.engine.schedule.program_choice import ProgramChoice, prefill_key
from jspec.engine.schedule.scheduler import Plan, PrefillPlan, RoundPlan
from jspec.engine.schedule.sizes import RoundSize, sizes_of
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.parts.kv_pool import PoolShape
from jspec.sampling import grammar_mask
from jspec.step.across_processes import Calls
from jspec.step.device import Device, DevicePrograms
from jspec.step.executable_key import ExecutableKey, covering, page_updates
from jspec.step.memory import MemoryPlan
from jspec.step.program import Params, Program
from jspec.step.side import Side
from jspec.step.split_decode import draft_masks, first_masks
from jspec.step.weights_off_devices import back_on_devices, off_devices

TIMINGS = 5  # number of intervals between the ends of rounds whose median is taken


@final
class ModelRunner:
    """Plans the device memory, compiles programs, and dispatches the scheduler's plans.

    Args:
        program: the settings of the programs.
        params: the weights of target and drafter.
        config: options of the engine.
        sizes: sizes for which rounds are compiled, the depths ascending.
        devices: those of the target and those of the drafter, the same object unless the drafter has devices.
        calls: makes the calls of these devices in all processes that have some of them.

    Attributes:
        pool: the shapes of the KV pools.
        target_side: the devices that run the target.
        draft_side: the devices that run the drafter, the same object unless the draft model is on other devices.
        choice: chooses the programs to compile.
        round_seconds: with ``compile_ahead`` and several sizes, seconds of a dispatch whose rows are all empty, by
            bucket and size. It reads no keys and values, so others usually take longer.

    Raises:
        ValueError: the engine does not fit into memory; the message names settings to lower.
    """

    def __init__(
        self,
        program: Program,
        params: Params,
        config: EngineConfig,
        sizes: Sequence[RoundSize],
        devices: tuple[Device, Device],
        calls: Calls,
    ) -> None:
        self.program, self.params, self._config, self.calls = program, params, config, calls
        self._vocab_size = params.main.config.vocab_size
        self.target_side, self.draft_side = devices
        self._sides = list(dict.fromkeys((self.draft_side, self.target_side)))  # the one that drafts is the first
        pool = PoolShape.of(config, program.drafter.tree, str(params.main.embed.dtype))
        pool = replace(pool, copies=num_copies(config, params.main.config))
        self.pool = min((side.fit(pool) for side in self._sides), key=lambda shape: shape.pages)
        self.calls.make(partial(self._start, sizes))
        self._tables: TablePool[Grammar] = TablePool(config.slots)
        self._adapters: TablePool[bytes] = TablePool(config.adapters)
        self._predicted_slots: set[int] = set()  # slots in which a prediction was written
        self.calls.open()

    def _start(self, sizes: Sequence[RoundSize]) -> dict[str, str]:
        """Allocate the state and, with ``compile_ahead``, compile all programs; return the digests of these."""
        program, config = self.program, self._config
        for side in self._sides:
            with side.explain_oom(self.pool):
                side.start(self.pool, self.draft_side)
        self.choice = ProgramChoice(
            config,
            sizes,
            tuple(dict.fromkeys(kind for side in self._sides for kind in side.programs.helpers)),
            edits_all=program.processor is not None,
            is_divided=program.mesh is not None and program.mesh.size > 1,
            is_split=len(self._sides) > 1,
        )
        self.round_seconds: dict[tuple[int, RoundSize], float] = {}
        if config.compile_ahead:
            for side in self._sides:
                with side.explain_oom(self.pool):
                    side.compile(self.choice.all_keys())
            with self.target_side.explain_oom(self.pool):
                self.round_seconds = self._time_rounds(sizes) if len(sizes) > 1 else {}
        return self.programs.digests

    @property
    def state(self) -> Any:
        """The state of the target's side, which is the whole state unless the draft model is on other devices."""
        return self.target_side.state

    @property
    def programs(self) -> DevicePrograms:
        """The programs of the target's side."""
        return self.target_side.programs

    @property
    def memory_plans(self) -> tuple[MemoryPlan, ...]:
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
        lacking = {key for side in self._sides for key in side.missing(keys)}
        return [key for key in keys if key in lacking]

    def dispatch(self, plan: Plan, size: RoundSize, running: Collection[Request]) -> StepOutput:
        """Start a plan's step and the copy of its result to the host; return the result without waiting for it.

        Args:
            size: draft depth and number of verified nodes of a plan's rounds.
            running: requests whose grammars and adapters must keep their device tables.
        """
        for copy in plan.copies:
            key = ExecutableKey("load_state" if copy.is_load else "save_state")
            self.target_side.run(key, np.array([copy.slot, copy.entry, copy.position], np.int32))
        if isinstance(plan, PrefillPlan):
            for piece in plan.pieces:
                if piece.is_last and self.edits(piece.request):  # now all tokens that penalties count are known
                    self._admit_controls(piece.request, running)
                if piece.is_last:
                    self._enter_prediction(piece.request)
            return self._prefill(plan, running)
        self._enter_pages(plan.new_pages)
        return self._round(plan, size)

    def _enter_pages(self, new: Sequence[tuple[int, int, int]]) -> None:
        """Write (slot, column, page) entries into the page table, which has one row per slot, of every side."""
        size = page_updates(self._config.slots)
        for start in range(0, len(new), size):
            packed = np.full((size, 3), self._config.slots, np.int32)  # padding: no slot has this number
            packed[: len(new) - start] = new[start : start + size]
            for side in self._sides:
                side.run(ExecutableKey("update_page_table"), packed)

    def _prefill(self, plan: PrefillPlan, running: Collection[Request]) -> StepOutput:
        """Start a prefill of pieces of prompts."""
        target, drafting = self.target_side, self.draft_side
        key = self._covering(prefill_key(plan))
        packed, masks = self._pack(plan, key.size, running), []
        if key.masked:
            matchers = [piece.request.matcher if piece.emits else None for piece in plan.pieces]
            functions = [None if matcher is None else matcher.first for matcher in matchers]
            masks = [first_masks(len(packed.pieces), functions, self._vocab_size)]
        output = target.run(key, *packed, *masks)
        if drafting is not target:
            drafting.run(ExecutableKey("draft_prefill", key.size), *packed, drafting.receive(output.report))
        return output

    def _round(self, plan: RoundPlan, size: RoundSize) -> StepOutput:
        """Start the programs of a round."""
        target, drafting = self.target_side, self.draft_side
        *others, key = self.choice.keys_of(plan, size)
        key = self._covering(key)
        padding = [self._config.slots] * (key.size - len(plan.requests))
        rows = np.array([*(request.state.slot for request in plan.requests), *padding], np.int32)
        if not others:
            return target.run(key, rows)
        draft_key, *commits = (replace(other, size=key.size) for other in others)
        draft, masks = drafting.run(draft_key, rows), []
        if key.masked:
            matchers = [request.matcher for request in plan.requests]
            functions = [None if matcher is None else matcher.masks for matcher in matchers]
            nodes = drafting.wait(partial(jax.device_get, (draft.tokens, draft.parents, draft.valid)))
            masks = [draft_masks(nodes, functions, self._vocab_size)]
        if drafting is not target:
            target.draft = target.receive(draft)
        output = target.run(key, rows, *masks)
        for commit in commits:
            drafting.run(commit, rows, *drafting.receive((output.report, output.path)))
        return replace(output, path=None)

    def _covering(self, key: ExecutableKey) -> ExecutableKey:
        """Return the key of a compiled program of the target's side that can do the work of the given one."""
        return covering(key, self.programs.compiled, self.program.drafter.tree.depth)

    def _time_rounds(self, sizes: Sequence[RoundSize]) -> dict[tuple[int, RoundSize], float]:
        """Return `round_seconds` of some sizes; the dispatches change nothing."""
        assert self._config.buckets is not None
        return {
            (bucket, size): self._time_round(partial(self._round, RoundPlan([], bucket, []), size))
            for bucket in self._config.buckets
            for size in sizes_of(bucket, sizes)
        }

    def _time_round(self, start: Callable[[], StepOutput]) -> float:
        """Return the median seconds between the ends of rounds; as in the engine, the host dispatches one ahead."""
        self.wait(start())  # the first dispatch also loads the program
        newest, ends = start(), []
        for _ in range(TIMINGS + 1):
            oldest, newest = newest, start()
            self.wait(oldest)
            ends.append(time.perf_counter())
        self.wait(newest)
        return float(np.median(np.diff(ends)))

    def wait(self, output: StepOutput) -> None:
        """Wait for a step."""
        self.target_side.wait(partial(jax.block_until_ready, output.report))

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
        self.target_side.run(ExecutableKey("controls"), packed)

    def _enter_prediction(self, request: Request) -> None:
        """Write a request's prediction into its slot; an empty one if the slot has that of an earlier request."""
        slot = request.state.slot
        assert slot is not None
        if request.prediction or slot in self._predicted_slots:
            self._predicted_slots.add(slot)
            packed = prediction.pack(
                slot, len(request.prompt_token_ids), request.prediction, self._config.predicted_tokens
            )
            self.draft_side.run(ExecutableKey("prediction"), packed)

    def _load_table(self, table: int, class_of: np.ndarray, next_state: np.ndarray) -> None:
        """Replace one of the device's grammar tables.

        Args:
            table: index of the table.
            class_of: class of each token id, [vocab] int16; the grammar treats tokens of one class alike.
            next_state: next state of the grammar's automaton, [states, classes] int16.
        """
        packed = grammar_mask.pack(table, class_of, next_state, self.program.grammar_cells)
        self.target_side.run(ExecutableKey("grammar"), packed)

    def _table_of(self, adapter: Adapter | None, running: Collection[Request]) -> int:
        """Return the table of an adapter, counted from 1, after loading it if no table has it; 0: no adapter."""
        if adapter is None:
            return 0
        in_use = {other.adapter.digest for other in running if other.adapter is not None}
        table, is_new = self._adapters.place(adapter.digest, in_use)
        if is_new:
            self.target_side.load_adapter(table, adapter.layers)
        return 1 + table

    def _pack(self, plan: PrefillPlan, size: int, running: Collection[Request]) -> PrefillInput:
        tree = self.program.drafter.tree
        sizes = dict(width=self.pool.width(tree), depth=tree.depth, vocab_size=self._vocab_size)
        tables = [self._table_of(piece.request.adapter, running) for piece in plan.pieces]
        pieces = [pack_piece(piece, **sizes, adapter=table) for piece, table in zip(plan.pieces, tables, strict=True)]
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
            side.run(key, pack_pending_rows(request, pages, width=self.pool.width(self.program.drafter.tree)))

    def clear(self) -> None:
        """Mark the tables of grammars and adapters as empty, because the device's state was lost."""
        self._tables.clear()
        self._adapters.clear()

    def reset_state(self, error: BaseException) -> None:
        """Replace the device's state by a new one after a failed step with the given error; weights are kept."""
        for side in self._sides:
            side.reset(error)

    @property
    def has_deleted_weights(self) -> bool:
        """Return whether arrays of the weights were deleted, which only their owner may do who shares them."""
        return any(leaf.is_deleted() for leaf in jax.tree.leaves(self.params) if isinstance(leaf, jax.Array))

    def use(self, drafter: Drafter, params: Params) -> None:
        """Run later steps with other weights of the same shapes, and with the drafter that was bound to them."""
        self.program, self.params = replace(self.program, drafter=drafter), params
        if self.target_side is self.draft_side:
            self.target_side.use(drafter, params)
        else:
            self.target_side.use(drafter, replace(params, draft=()))
            self.draft_side.use(drafter, replace(params, target=None))

    def drop_state(self) -> None:
        """Free the device memory of the state."""
        for side in self._sides:
            side.sleep()
        self.clear()

    def release(self, weights: str) -> None:
        """Free the device memory of the weights, unless they are to "keep".

        Args:
            weights: "keep", "host" (they come back in `wake`) or "drop".
        """
        if weights != "keep":
            self.use(*off_devices(self.program.drafter, self.params, weights))

    def wake(self) -> None:
        """Bring the weights back and allocate the state again.

        Raises:
            RuntimeError: the weights were dropped.
            ValueError: the memory does not suffice; neither the weights nor a state are on the devices then.
        """
        asleep, awake = (self.program.drafter, self.params), list[Device]()
        try:
            with self.target_side.explain_oom(self.pool):
                self.use(*back_on_devices(*asleep))
            for side in self._sides:
                with side.explain_oom(self.pool):
                    side.wake()
                awake.append(side)
        except BaseException:
            for side in awake:
                side.sleep()
            self.use(*asleep)
            raise

    def close(self) -> None:
        """Free the device memory of the state, in all processes."""
        for side in self._sides:
            side.close()

    # -- several processes

    def follow(self) -> None:
        """Run what process 0 runs, until its engine is closed."""
        assert isinstance(self.target_side, Side)
        self.calls.follow(self.target_side)
        self.close()


def num_copies(config: EngineConfig, target: ModelConfig) -> int:
    """Return the number of copies of slots' states that the prefix cache keeps."""
    if not (config.prefix_cache and target.has_slot_states):
        return 0
    return 2 * config.slots if config.cached_states is None else config.cached_states
