"""The interface of drafters: a drafter is an object with options and with functions that run on the device.

`Drafter.bind` returns the drafter's weights. The device functions get the weights as ``params`` and must not close over
arrays, because weights are arguments of the compiled program and not constants in it.
Random numbers come from `jspec.sampling`; a drafter has no random key of its own.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar, Self, final

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jspec.core.records import Draft, LayerState, PromptBatch, SlotView, Verdict
from jspec.core.shorten import short
from jspec.core.tree import ROOT_ONLY, Tree
from jspec.models.config.decoder_config import DecoderConfig
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape

Params = Any
DraftState = Any

CHECK_PROMPT = "check the prompt template (raw text where a chat is expected, or the reverse)"
CHECK_HEAD = "run: jspec info --check HEAD TARGET"


class Drafter(abc.ABC):
    """Base class of drafters, which propose a tree of tokens after the root (a row's newest token) in every round.

    The `Draft` that `draft` returns must keep a contract: node 0 is the root, ``parents[i] < i``, siblings have
    distinct tokens, and the ancestors of a valid node are valid. ``probs`` are the probabilities from which the tokens
    were drawn, siblings without replacement and the children of different nodes independently, or None if the tokens
    were not drawn. A draft that keeps the contract leaves the output's distribution unchanged.
    """

    tree: Tree  # shape of the tree to draft
    # Whether `prefill` reads ``view.token_history``; the batch lacks the tokens of a prompt's cached pages.
    reads_text: ClassVar[bool] = False
    # Whether `draft` searches ``view.predictions``.
    reads_predictions: ClassVar[bool] = False
    # Whether `draft` reads ``view.target``, the rows of committed tokens in the target's caches.
    reads_target: bool = False
    # Whether it drafts by `draft_with_target`, in rows after the committed ones of the target's caches.
    writes_target: ClassVar[bool] = False
    # Whether accepted tokens enter the draft cache only when `draft` or `write_pending_rows` runs next.
    has_pending_rows: bool = False
    # Whether `commit` reads the tokens of accepted nodes. If not, its state has the tokens that the drafter gave them,
    # and no text that a thinking budget forces is drafted in their place (`jspec.sampling.forced_draft`).
    reads_accepted_tokens: ClassVar[bool] = True
    draft_window: int | None = None  # number of newest tokens that the drafter attends to; None: all
    mesh: Mesh | None = None  # mesh over a `DraftModel`'s own devices; None: the drafter is on the target's devices

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(getattr(self, 'tree', None))!r})"

    @property
    def advice(self) -> str | None:
        """A text that tells the user what to check if few draft tokens are accepted; None: no advice."""
        return None

    @property
    def sources(self) -> dict[str, str]:
        """Class of the drafter of each source whose tokens are counted apart; empty: there is one source."""
        return {}

    @abc.abstractmethod
    def feature_layers(self, target: Model) -> tuple[int, ...]:
        """Return the indices of the target's hidden states to pass to `prefill` and `commit` as features.

        They count as in `jspec.models.decoder.forward`.
        """

    @abc.abstractmethod
    def bind(self, target: Model) -> Params:
        """Return the drafter's weights for a target; weights that both share are the target's own arrays.

        Raises:
            ValueError: the drafter does not match the target.
        """

    @abc.abstractmethod
    def init(self, params: Params, pool: PoolShape) -> DraftState:
        """Make the drafter's initial state for ``pool.slots`` slots.

        Args:
            params: weights that `bind` returned.
            pool: sizes of the KV cache's pools.
        """

    @abc.abstractmethod
    def prefill(
        self,
        params: Params,
        state: DraftState,
        view: SlotView,
        batch: PromptBatch,
        features: Float[Array, "batch tokens features"] | None,
    ) -> DraftState:
        """Process pieces of prompts and return the new state.

        The first piece of a prompt starts after the rows in the prefix cache. If all rows of the prompt are cached, the
        piece is the prompt's last token with ``batch.valid`` False. Nothing may be written for such a token.

        Args:
            params: weights that `bind` returned.
            state: the drafter's state.
            view: the slots of the pieces.
            batch: tokens of the pieces, in blocks.
            features: the target's hidden states at each token, concatenated over `feature_layers`; None if there are
                no feature layers.
        """

    @abc.abstractmethod
    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        """Propose a tree of tokens after each row's root; return the draft and the new state."""

    def draft_with_target(
        self, params: Params, target: Sequence[LayerState], view: SlotView
    ) -> tuple[Draft, list[LayerState]]:
        """Propose a tree by passes through the target; return the draft and the target's states.

        Only rows that the round verifies may be written, because the target's pass overwrites them; only drafters with
        ``writes_target`` implement this, and have no state.
        """
        raise NotImplementedError

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
        """Return the state after the accepted tokens. Slots of inactive rows must stay unchanged.

        Args:
            params: weights that `bind` returned.
            state: the state that `draft` returned.
            view: the slots of the batch.
            draft: the tree that was verified.
            verdict: accepted path and emitted tokens of each row.
            features: the target's hidden states at each node, concatenated over `feature_layers`; None if there are
                no feature layers.
        """

    def with_window(self, draft_window: int) -> Drafter:
        """Return a copy of the drafter that attends only to the ``draft_window`` newest tokens.

        Raises:
            ValueError: the drafter has no attention, or the window is too small for the tree.
        """
        name = type(self).__name__
        raise ValueError(
            f"draft_window: expected a drafter with a window (EAGLE, DFlash, DSpark, DraftModel), got {name}; "
            "leave it out"
        )

    def on_mesh(self, mesh: Mesh) -> Drafter:
        """Return a drafter whose weights are divided over the devices of a mesh, before `bind` joins the target's."""
        return self

    def write_pending_rows(self, params: Params, state: DraftState, view: SlotView) -> DraftState:
        """Write the missing draft cache rows of committed tokens and of the root, and return the new state.

        A step that does not draft calls this method instead of `draft`, so that a later step can draft.
        """
        return state

    @final
    def cut(self, depth: int) -> Self:
        """Return a copy of the drafter whose tree is cut at a depth; both drafters can use the same state."""
        if depth == self.tree.depth:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "tree", self.tree.cut(depth))  # a user's drafter may be a frozen dataclass
        return other


class StatelessDrafter(Drafter):
    """Base class of drafters without state, which implement only `feature_layers`, `bind` and `draft`."""

    def init(self, params: Params, pool: PoolShape) -> DraftState:
        return ()

    def prefill(
        self, params: Params, state: DraftState, view: SlotView, batch: PromptBatch, features: Array | None
    ) -> DraftState:
        return state

    def commit(
        self, params: Params, state: DraftState, view: SlotView, draft: Draft, verdict: Verdict, features: Array | None
    ) -> DraftState:
        return state


@final
class NoDraft(StatelessDrafter):
    """A drafter that proposes no tokens, for plain decoding; its tree has only the root."""

    def __init__(self) -> None:
        self.tree = ROOT_ONLY

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        return static_draft(self.tree, view, [], []), state


def active_slots(view: SlotView, slots: int) -> Int[Array, "batch"]:
    """Return the slot of each active row, and ``slots`` for an inactive row, because scatters drop this index.

    Args:
        view: the slots of the batch.
        slots: number of slots.
    """
    return jnp.where(view.active, view.slots, slots)


def check_window(method: str, draft_window: int | None, tree: Tree | None) -> int | None:
    """Check that a window is large enough for all nodes of a tree to attend to their ancestors; return the window.

    Args:
        method: name of the drafter, for the error.
        draft_window: number of newest tokens that the drafter attends to; None: all.
        tree: shape of the draft tree; None: its nodes attend to committed rows alone.

    Raises:
        ValueError: the window is not an int, or not larger than the tree's depth.
    """
    is_int = isinstance(draft_window, int) and not isinstance(draft_window, bool)
    least = "1" if tree is None else f"{tree.depth + 1}, the depth of {tree} + 1"
    if draft_window is not None and not (is_int and draft_window > (0 if tree is None else tree.depth)):
        raise ValueError(f"{method}: draft_window: expected None or an int >= {least}, got {short(draft_window)}")
    return draft_window


def check_layer_windows(place: str, config: DecoderConfig, tree: Tree) -> None:
    """Check that the windows of a decoder's layers are large enough for a tree's nodes to attend to their ancestors.

    Args:
        place: what has the layers, for the error.
        config: config of the decoder.
        tree: shape of the draft tree.

    Raises:
        ValueError: a window is not larger than the tree's depth.
    """
    if (smallest := min(config.windows, default=tree.depth + 1)) <= tree.depth:
        raise ValueError(
            f"{place}: sliding_window: expected at least {tree.depth + 1}, the depth of {tree} + 1, got {smallest}; "
            f"take a tree of depth {smallest - 1} or less"
        )


def check_part(method: str, name: str, part: object, expected: type, call: str) -> None:
    """Check the type of a drafter's model or head.

    Args:
        method: name of the drafter, for the error.
        name: name of the argument.
        part: value of the argument.
        expected: type of the argument.
        call: the call that loads a drafter from a path, for the error.

    Raises:
        TypeError: the value is of another type.
    """
    if not isinstance(part, expected):
        raise TypeError(
            f"{method}: {name}: expected {expected.__name__}, got {short(part)}; to load a checkpoint call {call}"
        )


def require_static(method: str, tree: Tree) -> Tree:
    """Check that a tree is a chain or static, and return it. Drafters without scores need such a tree.

    Args:
        method: name of the drafter, for the error.
        tree: draft tree.

    Raises:
        NotImplementedError: the tree is dynamic.
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
    """Make the `Draft` of a chain or another static tree; its parents are a numpy array.

    Args:
        tree: chain or static tree.
        view: the slots of the batch.
        tokens: target token ids of each level below the root, in the order of the tree's nodes.
        log_probs: log-probability of each token given its ancestors, by the drafter at temperature 1.
        probs: draft probabilities from which the tokens were drawn, one array per parent as ``probs[level][parent]``;
            parents are the nodes with children. Empty if the tokens were not drawn.
        vocab_map: target id of each draft id, which indexes the arrays of ``probs``; None: ids are equal.
    """
    rows = view.root.shape[0]
    scores = [jnp.zeros((rows, 1), jnp.float32)]
    for level, log_prob in zip(tree.levels[1:], log_probs, strict=True):
        scores.append(scores[-1][:, np.array(level.parents)] + log_prob)
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
