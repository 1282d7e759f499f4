"""Records of arrays on the device: the state kept between steps, and the values passed inside one step.

Letters in the comments: S slots, T tokens per row, V tokens of the vocabulary, P pages per slot. Axes named "batch" are
the rows of the step's bucket; "nodes" are the nodes of a draft tree with its root; "rounds" are the rounds of one
dispatch (each round drafts and verifies once).

All records are frozen pytrees; a step takes the old state and returns a new state. A padding row of a bucket has slot
index S, which is one past the last slot. A gather fills this row with zeros, so the row is inactive and has length 0. A
scatter drops the row.

`jspec.step.program` shows the cache rows of a slot in a diagram, and lists the invariants between the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jspec.core.accept_rule import AcceptRule
from jspec.core.numerics import Numerics, WithNumerics
from jspec.core.packing import Packing
from jspec.core.sampling import Sampling


class LayerState:
    """What a layer keeps of the tokens of all slots from one step to the next.

    Its kinds are pytrees, such as `jspec.models.parts.kv_pool.KVPool`. The state of a model is a list of them, one a
    layer.
    """

    def specs(self, axis: str) -> Any:
        """Return the `PartitionSpec` of the arrays if the model's heads are divided over a mesh axis, as a prefix."""
        raise NotImplementedError

    @property
    def has_kernel(self) -> bool:
        """Whether the layer is computed by kernels on the present device, or is as fast without."""
        return True

    @property
    def num_copies(self) -> int:
        """Number of copies of slots' states that it keeps for the prefix cache; 0: pages hold all that it keeps."""
        return 0

    def saved(self, slot: Int[Array, ""], entry: Int[Array, ""]) -> Self:
        """Return the state whose copy ``entry`` is that of a slot at its last multiple of `EVERY` tokens.

        `EVERY` is that of `pallas_kernels.recurrent.records`. What is in pages needs no copies.
        """
        return self

    def loaded(self, slot: Int[Array, ""], entry: Int[Array, ""], position: Int[Array, ""]) -> Self:
        """Return the state whose slot has the copy ``entry``, of a text of ``position`` tokens."""
        return self

    @classmethod
    def commit(cls, states: Sequence[Self], view: SlotView, path: AcceptedPath) -> list[Self]:
        """Keep the tokens of an accepted path, and forget all other nodes.

        Args:
            states: states of this kind, of several layers.
            view: the slots of the batch, before their lengths advance.
            path: the tokens to keep, and the rows that they have.
        """
        raise NotImplementedError


@struct.dataclass
class AcceptedPath:
    """The tokens that a round commits, and the rows that they have; rows are counted from a row's root.

    The token at depth d of a path goes to row d. Those of a chain are in their rows already.
    """

    counts: Int[Array, "batch"]  # number of tokens that become committed rows; 0 for an inactive row
    longest: int = struct.field(pytree_node=False)  # largest possible count
    source: Int[Array, "batch depth1"] | None = None  # present row of each token of the path; None: of a chain
    moved: Bool[Array, "batch depth1"] | None = None  # whether each token has to move; None: none has


@struct.dataclass
class Controls:
    """The penalties, bad words, logit bias, grammar and reasoning of each slot (`jspec.sampling.penalties`).

    If a slot's ``used`` is False, its other fields are undefined, except ``prompt_size`` and ``processor_args``.
    """

    used: Bool[Array, "slots"]  # whether the slot's request edits logits, with penalties or a grammar for instance
    repetition: Float[Array, "slots"]  # repetition penalty; 1: off
    presence: Float[Array, "slots"]  # presence penalty; 0: off
    frequency: Float[Array, "slots"]  # frequency penalty; 0: off
    may_end_at: Int[Array, "slots"]  # first token position at which a stop id is allowed
    recent: Int[Array, "slots look_back"]  # newest tokens, the root last; -1 before the prompt's first token
    bad_beginnings: Int[Array, "slots words look_back"]  # bad words without their last tokens, padded with -1 on left
    bad_ends: Int[Array, "slots words"]  # last token of each bad word; V where unused
    bias: Float[Array, "slots vocab"]  # bias added to the logits; -inf: banned for the whole request
    counts: Int[Array, "slots vocab"]  # 2 x (occurrences in the output with the root) + (1 if in the prompt, else 0)
    table: Int[Array, "slots"]  # index into `Grammars`; undefined where ``grammar_state`` is -1
    grammar_state: Int[Array, "slots"]  # grammar state after the root (`jspec.sampling.grammar_mask`); -1: no grammar
    thought: Int[Array, "slots"]  # state of the reasoning after the root (`jspec.sampling.thinking`)
    think_markers: Int[Array, "slots 2"]  # tokens with which reasoning begins and ends
    thinking_budget: Int[Array, "slots"]  # count of reasoning tokens at which its end is forced; -1: never
    forced: Int[Array, "slots text"]  # the forced text, which ends with ``think_end``; then padding
    forced_size: Int[Array, "slots"]  # number of its tokens
    prompt_size: Int[Array, "slots"]  # number of prompt tokens, for a user's logits processor
    processor_args: Float[Array, "slots args"]  # values that the request passes to the logits processor

    def rows(self, slots: Int[Array, "batch"]) -> Controls:
        """Return the controls of each row of a batch; padding rows have zeros."""
        return jax.tree.map(lambda field: field.at[slots].get(mode="fill", fill_value=0), self)


@struct.dataclass
class Grammars:
    """The transition tables of grammars (`jspec.engine.grammar.token_table.Grammar`); all arrays are int16."""

    class_of: Int[Array, "tables vocab"]  # token class of each token
    next: Int[Array, "tables cells"]  # next state for (state, class), at state * classes + class; -1: not allowed
    classes: Int[Array, "tables"]  # number of token classes of each table


@struct.dataclass
class Predictions:
    """Texts that the outputs will probably repeat, from `SamplingParams.prediction`; look-up drafters search them."""

    tokens: Int[Array, "slots predicted"]  # predicted tokens of each slot's request, then -1
    starts: Int[Array, "slots"]  # position of the output's first token, which is the number of the prompt's tokens


@struct.dataclass
class SlotState:
    """The state of every slot between steps; its arrays are donated to every step."""

    root: Int[Array, "slots"]  # newest sampled token; its keys and values are not in the cache yet
    lengths: Int[Array, "slots"]  # number of committed cache rows, which equals the root's position
    active: Bool[Array, "slots"]  # whether the slot's request has a root and has not ended
    remaining: Int[Array, "slots"]  # number of tokens that may still be emitted
    page_table: Int[Array, "slots pages"]  # page number of each block of cache rows; 0 after the slot's last page
    sampling: Sampling
    target: Sequence[LayerState]  # a list: of each layer; empty on devices that have only the draft model
    draft: Any  # the drafter's own pytree; () on devices that have only the target
    token_history: Int[Array, "pages page_size"] | None = None  # token of each cache row, for drafters that read it
    controls: Controls | None = None  # None: the engine serves no request with penalties or grammars
    grammars: Grammars | None = None  # None: the engine serves no request with a grammar
    predictions: Predictions | None = None  # None: the engine serves no request with a prediction


@struct.dataclass
class SlotView(WithNumerics):
    """The state of the slots in a step's batch, gathered from `SlotState` when the step starts."""

    slots: Int[Array, "batch"]  # slot index of each row; S for padding rows
    root: Int[Array, "batch"]
    lengths: Int[Array, "batch"]
    active: Bool[Array, "batch"]
    remaining: Int[Array, "batch"]
    page_table: Int[Array, "batch pages"]
    sampling: Sampling
    accept: AcceptRule = struct.field(pytree_node=False)  # accept rule of this program
    all_greedy: bool = struct.field(pytree_node=False)  # whether this branch of the program handles only greedy rows
    numerics: Numerics = struct.field(pytree_node=False)
    token_history: Int[Array, "batch positions"] | None = None  # token at each position, for prefill or a processor
    controls: Controls | None = None  # controls of all slots; not gathered, because they are as wide as the vocabulary
    grammars: Grammars | None = None
    masks: UInt32[Array, "batch nodes words"] | None = None  # packed masks from the host: tokens allowed after a node
    processor: Any = struct.field(pytree_node=False, default=None)  # user's `jspec.sampling.logits_processor`
    noise: Float[Array, "batch depths vocab"] | None = None  # `jspec.sampling.sampler.with_noise`
    predictions: Predictions | None = None  # those of all slots
    target: Sequence[LayerState] | None = None  # the target's layers, for the draft of a drafter that reads them


@struct.dataclass
class TokenBatch(WithNumerics):
    """Tokens for one forward pass, and the cache rows that receive the tokens' keys and values.

    Token t of sequence b has cache row ``first_row[b] + t``. It attends to all cache rows before ``base[b]``, and to
    the new rows whose bit is set in ``bits``; bit 0 means row ``base[b]``. If ``bits`` is None, attention is causal:
    token t attends to the new rows up to its own. ``base`` differs from ``first_row`` for a level of a draft tree,
    whose new rows include the rows of earlier levels.

    With a ``window``, a token attends to the newest ``window`` of these rows up to its own only, and to the later rows
    of its block. So the window of each node of a tree ends at the node. It must hold all new rows up to the node's that
    the node attends to.
    """

    tokens: Int[Array, "batch tokens"]
    positions: Int[Array, "batch tokens"]
    valid: Bool[Array, "batch tokens"]  # whether the token's keys and values are written
    first_row: Int[Array, "batch"]  # cache row of each sequence's first token
    page_table: Int[Array, "batch pages"]
    bits: UInt32[Array, "batch tokens words"] | None  # visible new rows of each token, one bit per row
    numerics: Numerics = struct.field(pytree_node=False)
    # Slot of each sequence, of prompts that of each piece, for states that are kept by slot; None: nothing is kept.
    slots: Int[Array, "sequences"] | None = None
    base: Int[Array, "batch"] | None = None  # cache row of bit 0; None: first_row
    new_rows: int | None = struct.field(pytree_node=False, default=None)  # number of bits; None: one per token
    window: int | None = struct.field(pytree_node=False, default=None)  # number of newest rows attended to; None: all
    paths: Int[Array, "batch tokens depths"] | None = None  # visible node at each depth, for deterministic attention
    packing: Packing | None = None  # tokens that the matrix products see, as rows of one sequence; None: all tokens
    adapters: Any = None  # `jspec.models.parts.adapter_tables.AdapterTables` of the target; None: no row has an adapter
    # Table of each sequence, or of each token [batch, tokens], counted from 1; 0: none.
    adapter: Int[Array, "batch ..."] | None = None

    def pad(self, more: int) -> TokenBatch:
        """Return this batch with ``more`` padding tokens per sequence, which are neither written nor attended to.

        If the batch has a packing, the packing gets the padding.
        """

        def fill(field: Array) -> Array:
            return jnp.pad(field, [(0, 0), (0, more)] + [(0, 0)] * (field.ndim - 2))

        if not more:
            return self
        if self.packing is not None:
            return replace(self, packing=self.packing.pad(more))
        bits = None if self.bits is None else fill(self.bits)
        of_tokens: dict[str, Any] = {name: fill(getattr(self, name)) for name in ("tokens", "positions", "valid")}
        if self.adapter is not None and self.adapter.ndim == 2:
            of_tokens["adapter"] = fill(self.adapter)
        return replace(self, bits=bits, **of_tokens)

    @property
    def is_used(self) -> Bool[Array, "batch tokens"]:
        """Whether each token's output is used; a mixture of experts does not compute those of other tokens."""
        return self.valid

    def pack(self, values: Any) -> Any:
        """Return of values [batch, tokens, ...] those that the matrix products see."""
        return values if self.packing is None else self.packing.pack(values)

    def unpack(self, sums: Any) -> Any:
        """Return the partial sums of all tokens [parts, batch, tokens, out] from those that a product returned."""
        return sums if self.packing is None else self.packing.unpack(sums)


def of_piece(
    values: Shaped[Array, "pieces ..."], piece: Int[Array, "batch"], padding: int = 0
) -> Shaped[Array, "batch ..."]:
    """Return the values at the given pieces; a piece that does not exist has the value ``padding``."""
    return values.at[piece].get(mode="fill", fill_value=padding)


@struct.dataclass
class PromptBatch(TokenBatch):
    """Pieces of prompts for one prefill, in blocks of tokens; a block is a sequence of the `TokenBatch`.

    Piece p belongs to row p of the step's `SlotView`. The blocks of a piece are consecutive, and all but the last are
    full. ``valid`` is False for a piece whose cache rows exist already.
    """

    piece: Int[Array, "batch"] = struct.field(kw_only=True)  # piece of each block; padding: the number of pieces
    starts: Int[Array, "pieces"] = struct.field(kw_only=True)  # position of each piece's first token
    ends: Int[Array, "pieces"] = struct.field(kw_only=True)  # position after each piece's last token
    newest: Int[Array, "pieces"] = struct.field(kw_only=True)  # index of each piece's last token among all rows

    @property
    def is_used(self) -> Bool[Array, "batch tokens"]:
        return self.positions < self.of_piece(self.ends)[:, None]

    @property
    def first(self) -> Int[Array, "pieces"]:
        """Index of each piece's first token among all rows; undefined for a piece without tokens."""
        return self.newest - (self.ends - self.starts - 1)

    @property
    def is_first(self) -> Bool[Array, "batch"]:
        """Whether each block is the first one of its piece."""
        return self.piece != jnp.concatenate([jnp.full(1, -1, self.piece.dtype), self.piece[:-1]])

    def of_piece(self, values: Shaped[Array, "pieces ..."], padding: int = 0) -> Shaped[Array, "batch ..."]:
        """Return each block's value from the values of the pieces; padding blocks get ``padding``."""
        return of_piece(values, self.piece, padding)

    def newest_of(self, values: Shaped[Array, "batch tokens size"]) -> Shaped[Array, "pieces size"]:
        """Return each piece's value at its last token."""
        return values.reshape(-1, values.shape[-1])[self.newest]

    @classmethod
    def whole(cls, counts: Int[Array, "batch"], **fields: Any) -> PromptBatch:
        """Make a batch in which each block is one whole piece from position ``first_row`` on.

        Args:
            counts: number of tokens of each piece.
            fields: fields of `TokenBatch`.
        """
        batch, tokens = fields["tokens"].shape
        rows = jnp.arange(batch, dtype=jnp.int32)
        starts = fields["first_row"]
        newest = rows * tokens + jnp.maximum(counts, 1) - 1
        return cls(**fields, piece=rows, starts=starts, ends=starts + counts, newest=newest)


# ``[b, n, m]`` is True if node m is n or an ancestor of n (`jspec.core.ancestors.ancestors`); numpy for static trees.
AncestorMask = Bool[Array | np.ndarray, "batch nodes nodes"]


@struct.dataclass
class Draft:
    """A batch of drafted trees. Node 0 is the root; a padding node has no children and is never accepted.

    The children of node n were drawn from ``probs[b, n]``, probabilities over the draft vocabulary after temperature,
    top-k, top-p and min-p. If ``probs`` is None, nothing was drawn: the committed tokens determine the draft (under
    "coupled", together with the target's noise).
    """

    tokens: Int[Array, "batch nodes"]  # target-vocabulary id of each node
    parents: Int[Array | np.ndarray, "batch nodes"]  # parent of each node, -1 for root and padding; numpy if static
    scores: Float[Array, "batch nodes"]  # natural log-probability of the path to the node, at temperature 1; root: 0
    valid: Bool[Array, "batch nodes"]  # whether a node may be accepted; all ancestors of a valid node are valid
    probs: Float[Array, "batch nodes draft_vocab"] | None  # draft probabilities of each node's children
    vocab_map: Int[Array, "draft_vocab"] | None  # target-vocabulary id of each draft-vocabulary id; None: equal ids
    # Estimated probability that a node is accepted if its parent is, the same for siblings but those of a look-up that
    # joins them; root: 1. None: no estimate.
    confidence: Float[Array, "batch nodes"] | None = None
    # Whether a node was drawn from its parent's ``probs``; others, behind drawn siblings, are point masses. None: all.
    drawn: Bool[Array, "batch nodes"] | None = None
    # Of a look-up beside a head. A node below one of the look-up is the look-up's too. None: the draft has one source.
    from_lookup: Bool[Array, "batch nodes"] | None = None  # whether the look-up drafted the node; root: False
    match_length: Int[Array, "batch"] | None = None  # match length of the look-up in tokens; 0: no match


@struct.dataclass
class Verdict:
    """The result of verifying a draft: accepted nodes and emitted tokens of each row."""

    accept_len: Int[Array, "batch"]  # number of accepted draft tokens, even if the row ends at an earlier token
    path: Int[Array, "batch depth1"]  # the root and the accepted nodes, in order of depth; then -1
    tokens: Int[Array, "batch depth1"]  # accepted tokens, then the target's bonus token, then -1
    counts: Int[Array, "batch"]  # number of emitted tokens; the row ends at a stop id or after `remaining` tokens
    ended: Bool[Array, "batch"]  # whether the row emits its last token
    grammar_state: Int[Array, "batch"] | None = None  # grammar state after the bonus token; -1: no grammar

    @classmethod
    def read(cls, report: Int[Array, "batch columns"], path: Int[Array, "batch depth1"]) -> Verdict:
        """Make the verdict of a round, without grammar states, from the round's report (`pack_result`)."""
        result = StepResult.read(report)
        return cls(result.accept_len, path, result.tokens, result.counts, result.ended == 1)


@struct.dataclass
class Trace:
    """The drafts of a dispatch, for plots and tests; a program returns them only if requested."""

    tokens: Int[Array, "rounds batch nodes"]  # as in `Draft`
    parents: Int[Array, "rounds batch nodes"]  # as in `Draft`, -1 for invalid nodes too
    scores: Float[Array, "rounds batch nodes"]  # as in `Draft`
    path: Int[Array, "rounds batch depth1"]  # as in `Verdict`
    confidence: Float[Array, "rounds batch nodes"] | None = None  # as in `Draft`
    from_lookup: Bool[Array, "rounds batch nodes"] | None = None  # as in `Draft`
    match_length: Int[Array, "rounds batch"] | None = None  # as in `Draft`


@struct.dataclass
class LogProbs:
    """Natural log-probabilities at each output position; a program returns them only if requested."""

    chosen: Float[Array, "*places"]  # log-probability of the emitted token
    ranks: Int[Array, "*places"]  # rank of the emitted token, 1 for the most likely
    top: Float[Array, "*places top"]  # log-probabilities of the most likely tokens, largest first
    top_ids: Int[Array, "*places top"]  # ids of the most likely tokens, in the same order

    def part(self, first: int, end: int) -> LogProbs:
        """Return those of the places ``first`` to ``end - 1``, for records with one axis of places."""
        return jax.tree.map(lambda field: field[first:end], self)


@struct.dataclass
class StepOutput:
    """The part of a dispatch's result that is copied to the host while the next dispatch runs."""

    report: Int[Array, "rounds batch columns"]  # packed tokens and counts (`pack_result`)
    trace: Trace | None
    logprobs: LogProbs | None = None  # log-probabilities of the emitted tokens, [rounds, batch, depth + 1]
    prompt: LogProbs | None = None  # those of the token after each token of a prefill, [blocks * rows]
    path: Int[Array, "rounds batch depth1"] | None = None  # as in `Verdict`, for the device that drafted; not copied
    by_source: bool = struct.field(pytree_node=False, default=False)  # whether the report counts a look-up's tokens

    @property
    def result(self) -> StepResult:
        """The fields of the report, with arrays over all rounds and rows."""
        return StepResult.read(self.report, by_source=self.by_source)

    def rounds(self, row: int) -> list[StepResult]:
        """Return the fields of each round of one row of a report on the host, as plain ints.

        This saves a third of the host's time in batches of 64 rows, compared with numbers of numpy.
        """
        return [StepResult.split(columns, self.by_source) for columns in np.asarray(self.report)[:, row].tolist()]


COLUMNS, SOURCE_COLUMNS = 4, 2  # columns of a report after its tokens, and those between if it counts by source


class StepResult(NamedTuple):
    """The fields of a `StepOutput.report`, split on the host.

    `read` makes one result with arrays [rounds, batch]; its ``tokens`` are [rounds, batch, depth + 1]. `split` makes
    one result of one round of one row; its fields are ints, and its ``tokens`` are a list of ints. The last two fields
    are None unless a look-up drafts beside a head.
    """

    tokens: Any  # emitted tokens, -1 after the last
    counts: Any  # number of emitted tokens
    accept_len: Any  # number of accepted draft tokens, even if the row ends at an earlier token
    num_drafted: Any  # number of valid draft nodes, the root excluded
    ended: Any  # whether the row has ended
    lookup_drafted: Any = None  # number of those of ``num_drafted`` that the look-up drafted
    head_accepted: Any = None  # number of those of ``accept_len`` that the head drafted, which come first

    @property
    def depth(self) -> int:
        """Depth of the drafted trees; available only in results of `read`."""
        return self.tokens.shape[-1] - 1

    @classmethod
    def read(cls, report: Any, *, by_source: bool = False) -> StepResult:
        """Split a report, an array of the host or the device, into one result with arrays over all rounds and rows."""
        end = -(COLUMNS + SOURCE_COLUMNS * by_source)
        return cls(report[..., :end], *(report[..., at] for at in (*range(-COLUMNS, 0), *range(end, -COLUMNS))))

    @classmethod
    def split(cls, columns: list[int], by_source: bool) -> StepResult:
        """Split the columns of one round of one row."""
        end = -(COLUMNS + SOURCE_COLUMNS * by_source)
        return cls(columns[:end], *columns[-COLUMNS:], *columns[end:-COLUMNS])


def pack_result(
    verdict: Verdict, num_drafted: Int[Array, "batch"], by_source: Sequence[Int[Array, "batch"]] = ()
) -> Int[Array, "batch columns"]:
    """Pack a round's result into one int32 array, for one copy to the host; `StepOutput.result` splits the array.

    Args:
        num_drafted: as in `StepResult`.
        by_source: ``lookup_drafted`` and ``head_accepted`` of `StepResult`; empty: the draft has one source.
    """
    ended = verdict.ended.astype(jnp.int32)
    tail = jnp.stack([*by_source, verdict.counts, verdict.accept_len, num_drafted, ended], axis=-1)
    return jnp.concatenate([verdict.tokens, tail], axis=-1)
