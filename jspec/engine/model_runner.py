"""What an engine has on its device: weights, pools, the slots' state and the compiled programs that move it on."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Collection, Sequence
from typing import Any, final

import jax
import numpy as np

from jspec.core.config import EngineConfig
from jspec.core.records import StepOutput
from jspec.engine.choice import prefill_program, round_program, scores
from jspec.engine.grammar.token_table import TablePool
from jspec.engine.input_processor import pack_chunk, pack_pending_rows
from jspec.engine.penalty_input import pack_controls
from jspec.engine.request import Request
from jspec.engine.scheduler import Plan, PrefillPlan, RoundPlan
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape
from jspec.models.quantize import check_device, quantized_as
from jspec.step import memory
from jspec.step.decode import Params, Program, init_state
from jspec.step.executables import Executables
from pallas_kernels.layers.deterministic_matmul import unsupported_weight

logger = logging.getLogger(__name__)


@final
class ModelRunner:
    """Plans the memory, compiles everything, then dispatches what it is told to.

    Args:
        depths: at which rounds may cut the drafter's tree.

    Attributes:
        memory_plan: what weights, pools and programs take; `str` says it in words.

    Raises:
        ValueError: it does not fit into memory; naming what to lower.
    """

    def __init__(self, program: Program, params: Params, config: EngineConfig, depths: Sequence[int]) -> None:
        self.program, self.params, self._config = program, params, config
        target = params.target
        self._vocab_size = target.config.vocab_size
        pool = PoolShape.of(config, program.drafter.tree, str(target.embed.dtype))
        check_device(params, pool.dtype, pool.draft_dtype)
        self.room = memory.Room(program, params, config, memory.device_memory())
        self.pool, _ = memory.fit(self.room, pool)
        with memory.explained(self.room, self.pool):
            self.state = init_state(program, params, self.pool)
            jax.block_until_ready(self.state)
            self.programs = Executables(program, params, self.state, config, depths)
        self._measure(self.programs.executables)
        self._tables = TablePool(config.slots)
        self._rows: tuple[int | None, ...] = ()
        self._slots = jax.device_put(np.zeros(0, np.int32))

    def _measure(self, executables: Sequence[Any]) -> None:
        """Plan anew, with what programs take; refuses those with which it is more than there is."""
        self.memory_plan = memory.measured(self.room, self.pool, executables)
        logger.info("%s", self.memory_plan)

    def dispatch(self, plan: Plan, depth: int, running: Collection[Request]) -> StepOutput:
        """Start a step; its result is on its way to the host.

        Args:
            depth: at which a round cuts the drafter's tree.
            running: requests whose grammars stay where they are.
        """
        if isinstance(plan, PrefillPlan):
            if plan.is_last and self.edits(plan.request):  # all of its text is known here
                self._admit_controls(plan.request, running)
            executable, packed = prefill_program(self.programs, plan), jax.device_put(self._pack(plan))
        else:
            executable = round_program(self.programs, plan, depth)
            self.state = self.programs.with_pages(self.state, plan.new_pages)
            packed = self._slots_of(plan)
        self.state, output = executable(self.params, self.state, packed)
        jax.copy_to_host_async(output)
        return output

    def to_host(self, output: StepOutput) -> StepOutput:
        """A step's result as numpy arrays; waits for it."""
        return jax.tree.map(np.asarray, output)

    def edits(self, request: Request) -> bool:
        """Whether a request's logits are edited."""
        return bool(request.params.controls_used) or self.program.processor is not None

    def _admit_controls(self, request: Request, running: Collection[Request]) -> None:
        """Give a request's slot its controls, and its grammar a table."""
        table = 0
        if request.grammar is not None:
            in_use = {other.grammar for other in running if other.grammar is not None}
            table, is_new = self._tables.place(request.grammar, in_use)
            if is_new:
                self.state = self.programs.with_grammar(self.state, table, request.grammar)
        controls = pack_controls(request, self._vocab_size, table, self._config.processor_args)
        self.state = self.programs.with_controls(self.state, controls)

    def _pack(self, plan: PrefillPlan) -> np.ndarray:
        tree = self.program.drafter.tree
        return pack_chunk(plan, width=self.pool.width(tree), depth=tree.depth, vocab_size=self._vocab_size)

    def _slots_of(self, plan: RoundPlan) -> jax.Array:
        """The slot of each row, on the device; kept while the rows stay, for a copy costs a round 20 us."""
        slots = self._config.slots
        rows = (*(request.state.slot for request in plan.requests), *[slots] * (plan.bucket - len(plan.requests)))
        if rows != self._rows:
            self._rows, self._slots = rows, jax.device_put(np.array(rows, np.int32))
        return self._slots

    def write_pending_rows(self, request: Request, pages: Sequence[int]) -> None:
        """Make the pages of a request that ended whole: no round will write what the draft's cache lags by."""
        lengths, page_size = (request.state.num_draft_cached_tokens, request.rows_committed), self._config.page_size
        if self.programs.write_pending_rows is not None and lengths[0] // page_size < lengths[1] // page_size:
            packed = pack_pending_rows(request, pages, width=self.state.page_table.shape[1])
            self.state = self.programs.write_pending_rows(self.params, self.state, jax.device_put(packed))

    def ensure(self, requests: Sequence[Request]) -> None:
        """Compile what nobody asked for before; others step meanwhile, and only who needs it waits."""
        traced = any(request.trace for request in requests)
        scored = any(request.params.logprobs is not None for request in requests)
        scored_prompts = any(request.scores_prompt for request in requests)
        samples = (sample for request in requests for sample in request.samples)
        first_tokens = {scores(sample) for sample in samples if sample.matcher is not None}
        if traced or scored or scored_prompts or first_tokens:
            self.programs.ensure(
                self._measure, traced=traced, scored=scored, scored_prompts=scored_prompts, first_tokens=first_tokens
            )

    def clear(self) -> None:
        """Note that the contents of the state are lost."""
        self._tables.forget()

    def reset_state(self, error: BaseException) -> None:
        """Make the state anew after a failed step, from the weights, which no step consumes."""
        delete_buffers(self.state, error)
        self.state = None  # type: ignore[assignment]
        self.state = init_state(self.program, self.params, self.pool)
        jax.block_until_ready(self.state)

    def close(self) -> None:
        """Let the pools go."""
        self.state = None  # type: ignore[assignment]


def delete_buffers(state: Any, error: BaseException) -> None:
    """Free a state's buffers at once.

    The frames of the error refer to them, and the requests keep the error: without this, new buffers would have to fit
    into memory beside the old ones.
    """
    for leaf in jax.tree.leaves(state):
        if not leaf.is_deleted():
            leaf.delete()
    traceback.clear_frames(error.__traceback__)


def check_deterministic(target: Model, implementation: str) -> None:
    """Refuse a target with a matrix product whose kernel may give a row other bits in another program.

    Raises:
        ValueError: naming the reason.
    """
    if kind := quantized_as(target):
        raise ValueError(f"deterministic: expected a target whose weights are not quantised, got {kind}")
    if implementation == "reference" or jax.default_backend() != "gpu":
        return
    weights = [leaf for leaf in jax.tree.leaves([target.layers, target.output_head]) if leaf.ndim == 2]
    for reason in filter(None, map(unsupported_weight, weights)):
        raise ValueError(f"deterministic: on a GPU {reason}; leave it off")
