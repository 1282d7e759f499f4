"""The drafter interface: a draft method is an object with its own options and four device functions.

A drafter holds its weights on the host side only until `bind`; the device functions get them as ``params`` and must
not close over arrays, so that one compiled program serves and no weight becomes a constant of it.
Randomness comes from `jspec.sampling`, never from a key of the drafter's own.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import PoolShape
from jspec.models.decoder import Model
from jspec.records import Draft, SlotView, TokenBatch, Verdict
from jspec.tree import Tree

Params = Any
DraftState = Any


class Drafter(abc.ABC):
    """Proposes a tree of tokens behind the root, once a round.

    Contract of the returned `Draft`: node 0 is the root, ``parents[i] < i``, siblings carry distinct tokens, ``valid``
    is prefix-closed, and ``probs`` is the law the tokens were really drawn from, or None if they were not drawn.
    Any draft that keeps the contract leaves the output's distribution untouched.
    """

    tree: Tree

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
        """Take in one chunk of a prompt: ``batch.valid`` of its tokens, from position ``batch.first_row`` on."""

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
        """Learn what was accepted. ``features`` are the target's, at every node."""


class NoDraft(Drafter):
    """Plain decoding: the tree of the root alone."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def init(self, params: Params, pool: PoolShape) -> DraftState:
        return ()

    def prefill(
        self, params: Params, state: DraftState, view: SlotView, batch: TokenBatch, features: Array | None
    ) -> DraftState:
        return state

    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        return chain_draft(view, [], [], [], None), state

    def commit(
        self,
        params: Params,
        state: DraftState,
        view: SlotView,
        draft: Draft,
        verdict: Verdict,
        features: Array | None,
    ) -> DraftState:
        return state


def require_chain(method: str, tree: Tree) -> Tree:
    """The tree, if it is a chain.

    Raises:
        NotImplementedError: it is not, and the method drafts nothing else.
    """
    if not tree.is_chain:
        raise NotImplementedError(f"{method}: expected a chain, got {tree}; use Tree.chain(length)")
    return tree


def chain_draft(
    view: SlotView,
    tokens: list[Int[Array, "batch"]],
    log_probs: list[Float[Array, "batch"]],
    laws: Sequence[Float[Array, "batch vocab"] | None],
    vocab_map: Int[Array, "vocab"] | None,
) -> Draft:
    """The `Draft` of a chain.

    Args:
        tokens: target-vocabulary ids, level by level.
        log_probs: untempered draft log-probability of each.
        laws: what each was drawn from; None, or nothing at all, if they were not drawn.
    """
    rows, nodes = view.root.shape[0], len(tokens) + 1
    drawn = [law for law in laws if law is not None]
    steps = [jnp.zeros(rows, jnp.float32), *log_probs]
    return Draft(
        tokens=jnp.stack([view.root, *tokens], axis=1),
        parents=jnp.broadcast_to(jnp.arange(-1, nodes - 1, dtype=jnp.int32), (rows, nodes)),
        scores=jnp.cumsum(jnp.stack(steps, axis=1), axis=1),
        valid=jnp.ones((rows, nodes), bool),
        probs=jnp.stack([*drawn, jnp.zeros_like(drawn[0])], axis=1) if drawn else None,
        vocab_map=vocab_map,
    )
