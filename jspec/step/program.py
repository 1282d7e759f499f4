"""The settings and weights of a compiled step, and the slot state that the step reads and writes.

A slot has these rows in the KV caches during a step (N: number of nodes of the draft, including the root):

    0                         lengths   lengths + 1             lengths + N     lengths + scratch_rows
    |  committed              |  root   |  drafted nodes        |  scratch      |
    |  written by earlier     |  written by this step's verify, |  written by   |
    |  steps, read by all     |  read through the ancestor      |  drafters of  |
    |  queries of the slot    |  mask                           |  wide trees   |

Target cache and draft cache share the page table, so a row has the same page and offset in both caches. Only the draft
cache uses scratch rows. After the step, the accepted nodes are committed rows; the next step overwrites all other rows.

Invariants:
1. ``root`` is the newest sampled token. Its keys and values are not in the cache yet.
2. Rows ``[0, lengths[s])`` of slot s are committed. Later rows are never read by a later step, so a rejected node needs
   no clean-up.
3. Verify writes the root and the nodes at rows ``[lengths, lengths + N)``. Commit adds the number of emitted tokens to
   ``lengths``; this number is ``1 + accept_len`` unless the request ends. In a chain the accepted rows are in place
   already; in a tree commit moves them.
4. The draft cache lacks the tokens accepted in the last step. The next step writes them first, even if it drafts
   nothing. The draft state has the shapes of the drafter's whole tree, even in a step that cuts the tree.
5. The device checks stop ids and length limits, so that a step can be dispatched before earlier results are read. A
   slot that has ended is inactive in all following steps: its row has length 0 and an empty page table, reads nothing,
   writes nothing and emits nothing.
6. Emitted tokens have the target's distribution for any drafter.
7. A padding row of a batch has the number of slots as its slot index, so gathers fill it with zeros and scatters drop
   it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from jspec import verify
from jspec.core.accept_rule import AcceptRule
from jspec.core.numerics import Numerics
from jspec.core.records import SlotState, SlotView
from jspec.core.sampling import Sampling
from jspec.draft import prediction
from jspec.draft.base import Drafter
from jspec.models import kv_cache
from jspec.models.decoder import Model
from jspec.models.parts.adapter_tables import AdapterTables
from jspec.models.parts.kv_pool import PoolShape
from jspec.sampling import grammar_mask, penalties
from jspec.sampling.logits_processor import LogitsProcessor
from pallas_kernels.state.gather_rows import gather_rows

KERNELS_IN_GRAPHS = 0, 12  # version of jax whose kernels for sums over devices can be part of a CUDA graph
COLLECTIVE_KERNELS = {
    "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE,COLLECTIVE_KERNEL_ALL_GATHER",
    # This option lists all that a CUDA graph may contain.
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,COLLECTIVES,COLLECTIVES_KERNEL"
    ),
}


def is_on_gpus(mesh: Mesh | None) -> bool:
    """Return whether a mesh has several GPUs."""
    return mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform in ("gpu", "cuda")


@dataclass(frozen=True)
class Program:
    """The settings that a compiled step depends on besides the shapes of its arguments.

    Attributes:
        drafter: the draft method, with its tree.
        feature_layers: indices of the target's hidden states that the drafter reads.
        accept: the accept rule, or its name.
        implementation: kernel implementation, by its name in `pallas_kernels.dispatch`.
        rounds: number of rounds in one dispatch.
        trace: whether the result contains the drafts.
        controls: whether the step can apply `jspec.sampling.penalties`.
        grammar_cells: number of cells of one grammar table of `jspec.sampling.grammar_mask`; 0: no grammars.
        processor: the user's logits processor; needs ``controls``.
        processor_args: number of values that a request may pass to the processor.
        logprobs: mode of `jspec.sampling.logprobs` for emitted tokens; None: no log-probabilities.
        prompt_logprobs: whether a prefill returns the log-probabilities of its prompt tokens.
        deterministic: whether every program computes a token's logits with the same bits.
        nodes: number of draft nodes that a round verifies per batch row, on average (`jspec.step.budget`); None: all.
        mesh: mesh over whose devices the weights and the KV pools are divided; None: one device.
        divides_logits: whether each device chooses tokens among its own part of the vocabulary, so that no logits are
            gathered. The rows of such a program need no `SamplingParams` that cut or edit logits, and no probabilities.
        adapted: whether rows may have adapters of the target.
    """

    drafter: Drafter
    feature_layers: tuple[int, ...]
    accept: AcceptRule | str
    implementation: str
    rounds: int = 1
    trace: bool = False
    controls: bool = False
    grammar_cells: int = 0
    processor: LogitsProcessor | None = None
    processor_args: int = 0
    logprobs: str | None = None
    prompt_logprobs: bool = False
    deterministic: bool = False
    nodes: int | None = None
    mesh: Mesh | None = None
    divides_logits: bool = False
    adapted: bool = False

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The XLA options of this program.

        If the draft is a tree, or rows have adapters (of requests or of `UNO`), independent kernels of the CUDA graph
        may run concurrently. Other chains gain nothing from this, because a concurrent graph starts later. XLA may skip
        a rounding to save a conversion, except in a deterministic program. On several GPUs, exchanges are kernels
        within the CUDA graph, from jax 0.12 on.
        """
        options: dict[str, Any] = {"xla_allow_excess_precision": False} if self.deterministic else {}
        is_concurrent = self.adapted or self.drafter.writes_target or not self.drafter.tree.is_chain
        if is_concurrent and jax.default_backend() != "tpu":  # the TPU compiler has no such option
            options["xla_gpu_command_buffer_scheduling_mode"] = "CONCURRENT"
        if is_on_gpus(self.mesh) and jax.__version_info__ >= KERNELS_IN_GRAPHS:
            options |= COLLECTIVE_KERNELS
        return options


@struct.dataclass
class Params:
    """The weights of target and drafter, whose buffers are never donated."""

    target: Model | None  # None: the devices have only the draft model
    draft: Any  # (): the devices have only the target
    adapters: AdapterTables | None = None  # of the target; None: no row of the program has one

    @property
    def main(self) -> Model:
        """The target, or the draft model on devices that have only this."""
        return self.draft.model if self.target is None else self.target


def view_of(state: SlotState, slots: Int[Array, "batch"], program: Program) -> SlotView:
    """Gather the state of a batch of slots; rows that have ended and padding rows are inactive, with zero fields."""
    with jax.named_scope("view"):
        names = ("root", "lengths", "active", "remaining", "page_table", "sampling")
        fields = {name: getattr(state, name) for name in names}
        taken = gather_rows(fields, slots, state.active, implementation=program.implementation)
        return SlotView(
            slots=slots,
            **taken,
            accept=verify.resolve(program.accept),
            all_greedy=False,
            numerics=Numerics(program.implementation, program.deterministic),
            controls=state.controls,
            grammars=state.grammars,
            processor=program.processor,
            predictions=state.predictions,
            token_history=None if program.processor is None else token_history(state, taken["page_table"]),
        )


def token_history(state: SlotState, page_table: Int[Array, "batch pages"]) -> Int[Array, "batch positions"]:
    """Gather the tokens of all cache rows by position, for each row of a page table."""
    assert state.token_history is not None
    return state.token_history[page_table].reshape(page_table.shape[0], -1)


def init_state(program: Program, params: Params, pool: PoolShape) -> SlotState:
    """Make the initial slot state, with empty slots and zeroed pools."""

    def fill(value: float, dtype: jnp.dtype = jnp.int32, *inner: int) -> Array:
        return jnp.full((pool.slots, *inner), value, dtype)  # a new array per field, because each is donated

    vocab_size, cells = params.main.config.vocab_size, program.grammar_cells
    layers = [] if params.target is None else params.target.config.layers
    return SlotState(
        root=fill(0),
        lengths=fill(0),
        active=fill(False, jnp.bool_),
        remaining=fill(0),
        page_table=fill(0, jnp.int32, pool.width(program.drafter.tree)),
        sampling=Sampling.greedy(pool.slots),
        target=kv_cache.create(layers, pool, pool.dtype),
        draft=program.drafter.init(params.draft, pool),
        token_history=jnp.zeros((pool.pages, pool.page_size), jnp.int32)
        if _needs_token_history(program, pool)
        else None,
        controls=penalties.unused(pool.slots, vocab_size, program.processor_args) if program.controls else None,
        grammars=grammar_mask.unused(pool.slots, cells, vocab_size) if cells else None,
        predictions=prediction.unused(pool.slots, pool.predicted_tokens) if pool.predicted_tokens else None,
    )


def _needs_token_history(program: Program, pool: PoolShape) -> bool:
    """Return whether a logits processor reads tokens, or a drafter reads tokens that another request prefilled."""
    return program.processor is not None or (pool.prefix_cache and program.drafter.reads_text)
