"""The drafter interface: a draft method is an object with its own options and four device functions.

A drafter holds its weights on the host side only until `bind`; the device functions get them as ``params`` and must
not close over arrays, so that one compiled program serves and no weight becomes a constant of it.
Randomness comes from `jspec.sampling`, never from a key of the drafter's own.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.core.tree import ROOT_ONLY, Tree
from jspec.models.decoder import Model
from jspec.models.kv_cache import PoolShape

Params = Any
DraftState = Any

CHECK_PROMPT = "check the prompt template (raw text where a chat is expected, or the reverse)"
CHECK_HEAD = "run: jspec info --check HEAD TARGET"


class Drafter(abc.ABC):
    """Proposes a tree of tokens behind the root, once a round.

    Contract of the returned `Draft`: node 0 is the root, ``parents[i] < i``, siblings carry distinct tokens, ``valid``
    is prefix-closed, and ``probs`` is the law the tokens were really drawn from, or None if they were not drawn.
    Any draft that keeps the contract leaves the output's distribution untouched.
    """

    tree: Tree
    reads_text: ClassVar[bool] = False  # `prefill` wants ``view.text``, for a prompt may begin with cached pages
    has_pending_rows: ClassVar[bool] = (
        False  # the draft's cache lags behind the target's, and `write_pending_rows` makes it good
    )
    draft_window: int | None = None  # tokens back that the draft attends to, the newest included; None: all

    @property
    def advice(self) -> str | None:
        """What to check if few drafts are accepted; None: acceptance depends on the text alone, or is not known."""
        return None

    @abc.abstractmethod
    def feature_layers(self, target: Model) -> tuple[int, ...]:
        """State indices of the target that `prefill` and `commit` want; () for none."""

    @abc.abstractmethod
    def bind(self, target: Model) -> Params:
        """Own weights and what is shared with the target, by reference. Every mismatch raises here."""

    @abc.abstractmethod
    def init(self, params: Params, pool: PoolShape) -> DraftState:
        """A fresh state for ``pool.slots`` slots."""

    @abc.abstractmethod
    def prefill(
        self,
        params: Params,
        state: DraftState,
        view: SlotView,
        batch: TokenBatch,
        features: Float[Array, "batch tokens features"] | None,
    ) -> DraftState:
        """Take in one chunk of a prompt: ``batch.valid`` of its tokens, from position ``batch.first_row`` on.

        A first chunk begins behind the rows that the cache holds already. If those are all of the prompt's, its last
        token comes alone and is not ``valid``: nothing may be written for it.
        """

    @abc.abstractmethod
    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        """Propose a tree behind each row's root."""

    @abc.abstractmethod
    def commit(
        self,
        params: Params,
        state: DraftState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Float[Array, "batch nodes features"] | None,
    ) -> DraftState:
        """Learn what was accepted. ``features`` are the target's, at every node.

        Of a row that is not active anymore nothing may be changed.
        """

    def with_window(self, draft_window: int) -> Drafter:
        """The same with a window.

        Raises:
            ValueError: the drafter does not attend to a cache.
        """
        name = type(self).__name__
        raise ValueError(
            f"draft_window: expected a drafter with a window (EAGLE, DraftModel), got {name}; leave it out"
        )

    def write_pending_rows(self, params: Params, state: DraftState, view: SlotView) -> DraftState:
        """Write what `draft` would write for committed tokens, the root's included, and draft nothing.

        A round that does not draft calls it instead of `draft`, so that any later round may.
        """
        return state

    @final
    def cut(self, depth: int) -> Self:
        """The same drafter with its tree cut at a depth; it works on the states of the whole one."""
        if depth == self.tree.depth:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "tree", self.tree.cut(depth))  # a user's may be frozen
        return other


class StatelessDrafter(Drafter):
    """A drafter that remembers nothing: only `feature_layers`, `bind` and `draft` are its own."""

    def init(self, params: Params, pool: PoolShape) -> DraftState:
        return ()

    def prefill(
        self, params: Params, state: DraftState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> DraftState:
        return state

    def commit(
        self, params: Params, state: DraftState, view: SlotView, draft: Draft, verdict: Verdict, features: Array | None
    ) -> DraftState:
        return state


@final
class NoDraft(StatelessDrafter):
    """Plain decoding: the tree of the root alone."""

    def __init__(self) -> None:
        self.tree = ROOT_ONLY

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        return static_draft(self.tree, view, [], []), state


def active_slots(view: SlotView, slots: int) -> Int[Array, "batch"]:
    """Slots to write to, `slots` in all: a row that has ended still names its own, which must stay as it is."""
    return jnp.where(view.active, view.slots, slots)


def check_window(method: str, draft_window: int | None, tree: Tree) -> int | None:
    """The window, if a tree's nodes can all see their ancestors.

    Raises:
        ValueError: it is no int, or smaller than that.
    """
    is_int = isinstance(draft_window, int) and not isinstance(draft_window, bool)
    if draft_window is not None and not (is_int and draft_window > tree.depth):
        raise ValueError(
            f"{method}: draft_window: expected None or an int >= {tree.depth + 1}, the depth of {tree} + 1, "
            f"got {draft_window!r}"
        )
    return draft_window


def require_static(method: str, tree: Tree) -> Tree:
    """The tree, if its shape is known beforehand.

    Raises:
        NotImplementedError: it is dynamic, and the method has no scores to choose nodes by.
    """
    if tree.paths is None:
        raise NotImplementedError(f"{method}: expected a chain or a static tree, got {tree}; use Tree.static(paths)")
    return tree


def static_draft(
    tree: Tree,
    view: SlotView,
    tokens: Sequence[Int[Array, "batch _"]],
    log_probs: Sequence[Float[Array, "batch _"]],
    laws: Mapping[int, Float[Array, "batch vocab"]] | None = None,
    vocab_map: Int[Array, "vocab"] | None = None,
) -> Draft:
    """The `Draft` of a chain or another static tree; its parents are a numpy array.

    Args:
        tokens: target-vocabulary ids, level by level in the order of the tree's nodes.
        log_probs: untempered draft log-probability of each, given its parent.
        laws: what the children of each node with children were drawn from; None if they were not drawn.
    """
    rows = view.root.shape[0]
    scores = [jnp.zeros((rows, 1), jnp.float32)]
    for level, own in zip(tree.levels[1:], log_probs, strict=True):
        scores.append(scores[-1][:, np.array(level.parents)] + own)
    probs = None
    if laws:
        nothing = jnp.zeros_like(laws[0])
        probs = jnp.stack([laws.get(node, nothing) for node in range(tree.nodes)], axis=1)
    return Draft(
        tokens=jnp.concatenate([view.root[:, None], *tokens], axis=1),
        parents=np.tile(np.array(tree.parents, np.int32), (rows, 1)),
        scores=jnp.concatenate(scores, axis=1),
        valid=jnp.ones((rows, tree.nodes), bool),
        probs=probs,
        vocab_map=vocab_map,
    )
