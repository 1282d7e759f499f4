"""The nouns: what lives on the device between and during rounds.

Shape letters: S slots, B rows of this step's bucket, T tokens per row, N draft nodes with the root,
D tree depth, V vocabulary, F feature width, P pages per slot, R rounds per dispatch.

All records are frozen pytrees; a step takes the old state and returns the new one. A padding row of a bucket
carries slot index S: gathers fill it with zeros (so it is inactive and of length 0), scatters drop it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.core.accept_rule import AcceptRule

MAX_STOP_IDS = 8
NO_TOKEN = -1  # before a text's beginning, behind a path's end; in a bad word's beginning: anything
UNLIMITED = 2**30  # more tokens than any row has


@struct.dataclass
class KVCache:
    """One K and one V pool a layer, each ``[pages, kv_heads, page_size, head_dim]``; page 0 is the null page."""

    k: list[Array]
    v: list[Array]


@struct.dataclass
class Sampling:
    """How each row samples. Rows are slots in `SlotState`, bucket rows in `SlotView`."""

    temperature: Float[Array, "rows"]  # 0 is greedy
    top_k: Int[Array, "rows"]  # 0 is off
    top_p: Float[Array, "rows"]  # 1 is off
    min_p: Float[Array, "rows"]  # 0 is off
    seed: UInt32[Array, "rows 2"]  # the 64-bit seed, high word first
    stop_ids: Int[Array, "rows 8"]  # tokens that end the row, -1 where unused
    draft_cap: Int[Array, "rows"]  # draft tokens a round may accept at most

    @classmethod
    def greedy(cls, rows: int) -> Sampling:
        """Controls that choose the likeliest token, end nowhere and cap nothing; every array is its own."""
        return cls(
            temperature=jnp.zeros(rows, jnp.float32),
            top_k=jnp.zeros(rows, jnp.int32),
            top_p=jnp.ones(rows, jnp.float32),
            min_p=jnp.zeros(rows, jnp.float32),
            seed=jnp.zeros((rows, 2), jnp.uint32),
            stop_ids=jnp.full((rows, MAX_STOP_IDS), -1, jnp.int32),
            draft_cap=jnp.full(rows, UNLIMITED, jnp.int32),
        )


@struct.dataclass
class Controls:
    """What `jspec.sampling.penalties` knows of each slot's text and of what may follow it.

    All but ``used`` has meaning only where that is set.
    """

    used: Bool[Array, "slots"]
    repetition: Float[Array, "slots"]  # 1 is off
    presence: Float[Array, "slots"]  # 0 is off
    frequency: Float[Array, "slots"]  # 0 is off
    may_end_at: Int[Array, "slots"]  # the first position at which a stop id may stand
    recent: Int[Array, "slots look_back"]  # the newest tokens, the root last; -1 before the text's beginning
    bad_beginnings: Int[Array, "slots words look_back"]  # of bad words, flush right; -1: any token
    bad_ends: Int[Array, "slots words"]  # the token that must not follow; V where unused
    bias: Float[Array, "slots vocab"]  # -inf: never
    counts: Int[Array, "slots vocab"]  # twice the times a token was generated, the root included; 1 more: in the prompt
    table: Int[Array, "slots"]  # of `Grammars`; without meaning where ``grammar_state`` is -1
    grammar_state: Int[Array, "slots"]  # behind the root; -1: no grammar
    prompt_size: Int[Array, "slots"]  # with the next for a user's processor alone, whatever ``used`` says
    processor_args: Float[Array, "slots args"]


@struct.dataclass
class Grammars:
    """Tables of `jspec.engine.grammar.token_table.Grammar`, which slots share; int16 all."""

    class_of: Int[Array, "tables vocab"]
    next: Int[Array, "tables cells"]  # the state behind a state and a class, -1: none; row by row, a row a state
    classes: Int[Array, "tables"]  # of each table: the length of its rows


@struct.dataclass
class SlotState:
    """Everything a slot carries from round to round. Donated to every step."""

    root: Int[Array, "slots"]  # newest sampled token; its KV is not in the cache yet
    lengths: Int[Array, "slots"]  # committed rows, which is the root's position
    active: Bool[Array, "slots"]  # has a root and has not ended
    remaining: Int[Array, "slots"]  # tokens it may still emit
    page_table: Int[Array, "slots pages"]  # 0 beyond a slot's pages
    sampling: Sampling
    target: KVCache
    draft: Any  # the drafter's own pytree
    text: Int[Array, "pages page_size"] | None = None  # the tokens of all rows, for drafters that read them
    controls: Controls | None = None  # None: the engine serves no request that needs them
    grammars: Grammars | None = None  # likewise


@struct.dataclass
class SlotView:
    """The bucket's rows of `SlotState`, gathered once at the top of a round; never a pool."""

    slots: Int[Array, "batch"]
    root: Int[Array, "batch"]
    lengths: Int[Array, "batch"]
    active: Bool[Array, "batch"]
    remaining: Int[Array, "batch"]
    page_table: Int[Array, "batch pages"]
    sampling: Sampling
    accept: AcceptRule = struct.field(pytree_node=False)  # the accept rule of this program
    all_greedy: bool = struct.field(pytree_node=False)  # this branch of the program serves greedy rows only
    implementation: str = struct.field(pytree_node=False)  # of the kernels
    deterministic: bool = struct.field(pytree_node=False, default=False)  # a row's bits do not depend on the others
    text: Int[Array, "batch positions"] | None = None  # the tokens of all rows, in a prefill or for a processor
    controls: Controls | None = None  # of all slots: rows are taken where they are used, a vocabulary each
    grammars: Grammars | None = None
    masks: UInt32[Array, "batch nodes words"] | None = None  # tokens that may follow each node, as the host says
    processor: Any = struct.field(pytree_node=False, default=None)  # a user's own (`jspec.sampling.logits_processor`)


@struct.dataclass
class TokenBatch:
    """Tokens for one forward pass and where they go.

    Row t of sequence b is written at cache row ``first_row[b] + t``. It sees all rows before ``first_row[b]`` and,
    of the rows written here, those whose bit is set in ``bits`` (None: causal, those up to t).
    A level of a draft tree sees more than its own rows: then ``bits`` count from row ``base[b]``.
    With a ``window`` the rows up to ``base[b] - window`` are hidden; where causal, row t's query misses t rows more.
    """

    tokens: Int[Array, "batch tokens"]
    positions: Int[Array, "batch tokens"]
    valid: Bool[Array, "batch tokens"]  # the others are not written
    first_row: Int[Array, "batch"]
    page_table: Int[Array, "batch pages"]
    bits: UInt32[Array, "batch tokens words"] | None
    implementation: str = struct.field(pytree_node=False)
    base: Int[Array, "batch"] | None = None  # None: first_row
    new_rows: int | None = struct.field(pytree_node=False, default=None)  # that bits name; None: those here
    window: int | None = struct.field(pytree_node=False, default=None)  # None: rows of any age are seen
    deterministic: bool = struct.field(pytree_node=False, default=False)  # a row's bits do not depend on the others
    paths: Int[Array, "batch tokens depths"] | None = None  # where deterministic: what a tree's nodes see, by depth

    def pad(self, more: int) -> TokenBatch:
        """The batch with so many rows more of each sequence, which are not written and which no other sees."""

        def fill(field: Array) -> Array:
            return jnp.pad(field, [(0, 0), (0, more)] + [(0, 0)] * (field.ndim - 2))

        if not more:
            return self
        bits = None if self.bits is None else fill(self.bits)
        return replace(
            self, tokens=fill(self.tokens), positions=fill(self.positions), valid=fill(self.valid), bits=bits
        )


# Who stands on the way to each node (`jspec.core.ancestors.ancestors`); numpy's of trees that are known beforehand.
AncestorMask = Bool[Array | np.ndarray, "batch nodes nodes"]


@struct.dataclass
class Draft:
    """A drafted tree. Node 0 is the root; a padding node is nobody's parent and can never be accepted.

    ``probs[b, n]`` is the law from which the CHILDREN of node n were drawn, over the draft vocabulary, after every
    processing that the drafter applied; None means that the draft is a deterministic function of the committed
    tokens (and, under "coupled", of the target's own noise).
    """

    tokens: Int[Array, "batch nodes"]  # target vocabulary
    parents: Int[Array | np.ndarray, "batch nodes"]  # -1: root and padding; numpy's where known beforehand
    scores: Float[Array, "batch nodes"]  # cumulative untempered draft log-probability; root 0
    valid: Bool[Array, "batch nodes"]  # prefix-closed
    probs: Float[Array, "batch nodes draft_vocab"] | None
    vocab_map: Int[Array, "draft_vocab"] | None  # draft id -> target id; None: the same ids


@struct.dataclass
class Verdict:
    """What the target made of a draft."""

    accept_len: Int[Array, "batch"]  # draft tokens accepted, before any cut
    path: Int[Array, "batch depth1"]  # node ids from the root; -1 beyond accept_len
    tokens: Int[Array, "batch depth1"]  # accepted, then the bonus token, then -1
    counts: Int[Array, "batch"]  # tokens emitted, after the cut at stop ids and at `remaining`
    ended: Bool[Array, "batch"]
    grammar_state: Int[Array, "batch"] | None = None  # behind the last token before any cut; -1: no grammar


@struct.dataclass
class Trace:
    """The drafts of a dispatch, for pictures and tests; compiled in only when asked for."""

    tokens: Int[Array, "rounds batch nodes"]
    parents: Int[Array, "rounds batch nodes"]
    scores: Float[Array, "rounds batch nodes"]
    path: Int[Array, "rounds batch depth1"]


@struct.dataclass
class LogProbs:
    """What the target makes of tokens, each in its place; compiled in only when asked for."""

    chosen: Float[Array, "*places"]  # natural, of the token
    ranks: Int[Array, "*places"]  # tokens that are likelier, and 1
    top: Float[Array, "*places top"]  # of the likeliest tokens, best first
    top_ids: Int[Array, "*places top"]


@struct.dataclass
class StepOutput:
    """The small, undonated result of a dispatch: copied to the host while the next one runs."""

    report: Int[Array, "rounds batch columns"]  # see `StepResult`
    trace: Trace | None
    logprobs: LogProbs | None = None  # of the report's tokens, [rounds, batch, depth + 1]
    prompt: LogProbs | None = None  # of the token behind each of a chunk's, [tokens]


class StepResult(NamedTuple):
    """A `StepOutput.report` as the host reads it; every array is ``[rounds, batch]`` but tokens ``[.., depth + 1]``.

    From `rounds`, of one row's round, the fields are ints, and tokens a list of them; they have no `depth`.
    """

    tokens: Any
    counts: Any
    accept_len: Any
    num_drafted: Any
    ended: Any

    @property
    def depth(self) -> int:
        """Of the tree that was drafted."""
        return self.tokens.shape[-1] - 1

    @classmethod
    def read(cls, report: np.ndarray) -> StepResult:
        """All rounds and rows at once."""
        return cls(report[..., :-4], *(report[..., column] for column in range(-4, 0)))

    @classmethod
    def rounds(cls, report: np.ndarray) -> list[StepResult]:
        """One row's, round by round: with plain ints the host takes a third less time for 64 rows.

        Args:
            report: [rounds, columns].
        """
        return [cls(columns[:-4], *columns[-4:]) for columns in report.tolist()]


def pack_result(verdict: Verdict, num_drafted: Int[Array, "batch"]) -> Int[Array, "batch columns"]:
    """One int32 array for one copy to the host; columns as `StepResult.read` splits them."""
    tail = jnp.stack([verdict.counts, verdict.accept_len, num_drafted, verdict.ended.astype(jnp.int32)], axis=-1)
    return jnp.concatenate([verdict.tokens, tail], axis=-1)


class PrefillInput(NamedTuple):
    """One chunk of one prompt. Host side numpy, sent as a single int32 vector by `pack`."""

    slot: Any  # scalar int32
    start: Any  # position of the chunk's first token
    count: Any  # tokens in the chunk
    last: Any  # 1 for the prompt's last chunk
    write: Any  # 0: the rows are in the cache already, and others may be reading them
    root: Any  # the token behind the chunk, where it is known; -1: it is sampled
    remaining: Any  # tokens it may still emit, that root included
    top_k: Any
    draft_cap: Any
    controlled: Any  # 1: the slot's `Controls` are the request's
    temperature: Any  # float32
    top_p: Any
    min_p: Any
    seed: Any  # uint32 [2]
    stop_ids: Any  # int32 [8]
    page_row: Any  # int32 [P]
    tokens: Any  # int32 [T]

    def pack(self) -> np.ndarray:
        """A fresh int32 vector; floats and seeds travel by their bits."""
        fields = [np.atleast_1d(field) for field in self]
        assert all(field.dtype.itemsize == 4 for field in fields), "every field is int32, uint32 or float32"
        return np.concatenate([field.view(np.int32) for field in fields])

    @classmethod
    def unpack(cls, packed: Int[Array, "packed"], *, pages: int) -> PrefillInput:
        """The inverse of `pack`, on the device; pages is P."""
        count = cls._fields.index("seed")
        scalars = dict(zip(cls._fields[:count], packed[:count], strict=True))
        for name in ("temperature", "top_p", "min_p"):
            scalars[name] = jax.lax.bitcast_convert_type(scalars[name], jnp.float32)
        seed, stop_ids, page_row, tokens = jnp.split(packed[count:], [2, 2 + MAX_STOP_IDS, 2 + MAX_STOP_IDS + pages])
        return cls(
            **scalars,
            seed=jax.lax.bitcast_convert_type(seed, jnp.uint32),
            stop_ids=stop_ids,
            page_row=page_row,
            tokens=tokens,
        )

    def sampling(self) -> Sampling:
        """The chunk's sampling controls as a record of one row."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop_ids", "draft_cap")
        return Sampling(**{name: jnp.asarray(getattr(self, name))[None] for name in names})
