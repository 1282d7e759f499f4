"""The drafter interface: a draft method is an object with its own options and four device functions.

A drafter holds its weights on the host only until `bind`; the device functions get them as ``params`` and must not
close over arrays: weights are arguments of the compiled program, never constants in it.
Randomness comes from `jspec.sampling`, never from a key of the drafter's own.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from itertools import chain
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
    """Proposes a tree of tokens after the root, once a step.

    Contract of the returned `Draft`: node 0 is the root, ``parents[i] < i``, siblings have distinct tokens, a valid
    node's ancestors are valid, and ``probs`` are the probabilities the tokens were really drawn from, or None if they
    were not drawn. Any draft that keeps the contract leaves the output's distribution unchanged.
    """

    tree: Tree
    # Whether `prefill` reads ``view.token_history``, because a prompt's cached pages are not in the batch.
    reads_text: ClassVar[bool] = False
    # Whether the draft cache misses the tokens accepted in the last step until `draft` or `write_pending_rows` runs.
    has_pending_rows: ClassVar[bool] = False
    draft_window: int | None = None  # tokens back that the draft attends to, the newest included; None: all

    @property
    def advice(self) -> str | None:
        """What to check if few drafts are accepted; None: acceptance depends on the text alone, or is not known."""
        return None

    @abc.abstractmethod
    def feature_layers(self, target: Model) -> tuple[int, ...]:
        """Indices of the target's hidden states that `prefill` and `commit` read; () for none."""

    @abc.abstractmethod
    def bind(self, target: Model) -> Params:
        """The drafter's weights, with those shared with the target by reference. Every mismatch raises here."""

    @abc.abstractmethod
    def init(self, params: Params, pool: PoolShape) -> DraftState:
        """A new state for ``pool.slots`` slots."""

    @abc.abstractmethod
    def prefill(
        self,
        params: Params,
        state: DraftState,
        view: SlotView,
        batch: TokenBatch,
        features: Float[Array, "batch tokens features"] | None,
    ) -> DraftState:
        """Process one chunk of a prompt: its ``batch.valid`` tokens, from position ``batch.first_row`` on.

        The first chunk starts after the rows that are in the cache already. If all of the prompt's rows are, the batch
        is its last token, which is not ``valid``: nothing may be written for it.
        """

    @abc.abstractmethod
    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        """Propose a tree after each row's root."""

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
        """Update the state with the accepted tokens. Rows that are not active must stay unchanged.

        Args:
            features: the target's features at every node.
        """

    def with_window(self, draft_window: int) -> Drafter:
        """The same drafter with a window.

        Raises:
            ValueError: the drafter does not attend to a cache.
        """
        name = type(self).__name__
        raise ValueError(
            f"draft_window: expected a drafter with a window (EAGLE, DraftModel), got {name}; leave it out"
        )

    def write_pending_rows(self, params: Params, state: DraftState, view: SlotView) -> DraftState:
        """Write the rows that `draft` would write for committed tokens, the root's included, without drafting.

        A step that does not draft calls it instead of `draft`; later steps can then draft again.
        """
        return state

    @final
    def cut(self, depth: int) -> Self:
        """The same drafter with its tree cut at a depth; it uses the uncut drafter's states."""
        if depth == self.tree.depth:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "tree", self.tree.cut(depth))  # a user's drafter may be frozen
        return other


class StatelessDrafter(Drafter):
    """A drafter without state: only `feature_layers`, `bind` and `draft` are to be implemented."""

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
    """Slot of each active row; ``slots`` (which scatters drop) for rows that have ended, whose slots stay unchanged."""
    return jnp.where(view.active, view.slots, slots)


def check_window(method: str, draft_window: int | None, tree: Tree) -> int | None:
    """The window, if it lets all nodes of a tree attend to their ancestors.

    Raises:
        ValueError: it is not an int, or too small.
    """
    is_int = isinstance(draft_window, int) and not isinstance(draft_window, bool)
    if draft_window is not None and not (is_int and draft_window > tree.depth):
        raise ValueError(
            f"{method}: draft_window: expected None or an int >= {tree.depth + 1}, the depth of {tree} + 1, "
            f"got {draft_window!r}"
        )
    return draft_window


def require_static(method: str, tree: Tree) -> Tree:
    """The tree, if it is a chain or static.

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
    probs: Sequence[Sequence[Float[Array, "batch vocab"]]] = (),
    vocab_map: Int[Array, "vocab"] | None = None,
) -> Draft:
    """The `Draft` of a chain or another static tree; its parents are a numpy array.

    Args:
        tokens: target-vocabulary ids of each level, in the order of the tree's nodes.
        log_probs: untempered draft log-probability of each token, given its parent.
        probs: for each level, the probabilities its nodes were drawn from, one array for each parent (the nodes with
            children of the level above); empty if they were not drawn.
        vocab_map: target id of each id that ``probs`` are over; None: the same ids.
    """
    rows = view.root.shape[0]
    scores = [jnp.zeros((rows, 1), jnp.float32)]
    for level, own in zip(tree.levels[1:], log_probs, strict=True):
        scores.append(scores[-1][:, np.array(level.parents)] + own)
    node_probs = None
    if probs:
        of_node = dict(zip(tree.fed, chain.from_iterable(probs), strict=True))
        zeros = jnp.zeros_like(probs[0][0])
        node_probs = jnp.stack([of_node.get(node, zeros) for node in range(tree.nodes)], axis=1)
    return Draft(
        tokens=jnp.concatenate([view.root[:, None], *tokens], axis=1),
        parents=np.tile(np.array(tree.parents, np.int32), (rows, 1)),
        scores=jnp.concatenate(scores, axis=1),
        valid=jnp.ones((rows, tree.nodes), bool),
        probs=node_probs,
        vocab_map=vocab_map,
    )
