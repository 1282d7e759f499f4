"""Drafters of known tokens for tests of `Beside`, right or wrong at each depth as a table says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from jspec import Completion, Metrics
from jspec.core.records import Draft, SlotView
from jspec.core.tree import Tree
from jspec.draft.base import StatelessDrafter, static_draft
from jspec.draft.lookup import Found, LookupDrafter

LENGTH = 4  # match length of every look-up after an even number of committed tokens; one less after an odd number


@struct.dataclass
class Line:
    """The line of the table of each slot's request."""

    of_slot: Int[Array, "slots"]


class Known(LookupDrafter):
    """A look-up that drafts the token that is known at each position, plus a number of a table for each depth.

    A node of rank r has r more.

    Args:
        outputs: tokens of each line's request after its prompt, [lines, tokens].
        prompts: prompt of each line, which differ in size or in the tokens that the shortest has too; only if they
            differ in these tokens may requests be preempted.
        wrong: what is added at each depth from 1 on, [lines, depth]; None: nothing.
        tree: static tree.
        vocab: number of tokens.
    """

    def __init__(
        self,
        outputs: np.ndarray,
        prompts: Sequence[Sequence[int]],
        tree: Tree,
        vocab: int,
        wrong: np.ndarray | None = None,
    ) -> None:
        super().__init__(tree, max_n=LENGTH, min_n=1)
        self.outputs = np.pad(outputs, ((0, 0), (0, tree.depth)))
        self.sizes = np.array([*map(len, prompts)])
        self.beginnings = np.array([prompt[: self.sizes.min()] for prompt in prompts])
        self.wrong = np.zeros((len(prompts), tree.depth), int) if wrong is None else wrong
        self.vocab = vocab

    def init(self, params: Any, pool: Any) -> Any:
        return Line(jnp.zeros(pool.slots, jnp.int32))

    def prefill(self, params: Any, state: Any, view: Any, batch: Any, features: Any) -> Any:
        tokens, is_known = batch.tokens.reshape(-1), batch.starts == 0
        places = np.arange(self.beginnings.shape[1])
        beginnings = tokens[batch.first[:, None] + places]
        if view.token_history is not None:
            beginnings, is_known = view.token_history[:, places], jnp.ones_like(is_known)
        is_line = jnp.all(beginnings[:, None] == self.beginnings, axis=-1) & (batch.ends[:, None] >= self.sizes)
        lines = jnp.argmax(jnp.where(is_line, self.sizes, 0), axis=1).astype(jnp.int32)  # the longest that fits
        slots = jnp.where(is_known, view.slots, len(state.of_slot))
        return Line(state.of_slot.at[slots].set(lines, mode="drop"))

    def commit(self, params: Any, state: Any, *rest: Any) -> Any:
        return state

    def write_pending_rows(self, params: Any, state: Any, view: Any) -> Any:
        return state

    def look_up(self, state: Any, view: SlotView) -> tuple[Found, Any]:
        line = state.of_slot.at[view.slots].get(mode="fill", fill_value=0)
        tokens = []
        for depth, level in enumerate(self.tree.levels[1:], 1):
            at = jnp.clip(view.lengths - jnp.asarray(self.sizes)[line] + depth, 0, self.outputs.shape[1] - 1)
            known = jnp.asarray(self.outputs)[line, at] + jnp.asarray(self.wrong)[line, depth - 1]
            tokens.append((known[:, None] + np.array(level.ranks)) % self.vocab)
        draft = static_draft(self.tree, view, tokens, [jnp.zeros(level.shape) for level in tokens])
        return Found(draft, LENGTH - view.lengths % 2), state


class KnownModel(StatelessDrafter):
    """A model that drafts as a `Known` look-up does."""

    def __init__(self, known: Known) -> None:
        self.known, self.tree = known, known.tree

    def feature_layers(self, target: Any) -> tuple[int, ...]:
        return ()

    def bind(self, target: Any) -> tuple[()]:
        return ()

    def init(self, params: Any, pool: Any) -> Any:
        return self.known.init((), pool)

    def prefill(self, params: Any, state: Any, view: Any, batch: Any, features: Any) -> Any:
        return self.known.prefill((), state, view, batch, None)

    def draft(self, params: Any, state: Any, view: SlotView) -> tuple[Draft, Any]:
        return self.known.cut(self.tree.depth).draft((), state, view)


def prompt_of(line: int, vocab: int) -> list[int]:
    """Return a prompt that differs from those of other lines in its first two tokens."""
    return [line % vocab, line // vocab, 9]


def check_sources(metrics: Metrics) -> None:
    """Check that both sources together have all draft tokens."""
    for name in ("num_draft_tokens", "num_accepted_tokens"):
        counts = getattr(metrics, f"{name}_per_source")
        assert counts.keys() == {"head", "lookup"} and min(counts.values()) >= 0
        assert sum(counts.values()) == getattr(metrics, name)


def check_rounds(done: Completion, nodes: int) -> None:
    """Check a request's counts of a look-up that joins trees of ``nodes`` nodes by its recorded rounds."""
    verified, emitted = Counter(head=0, lookup=0), Counter(head=0, lookup=0)
    for one in done.rounds or ():
        for node in np.flatnonzero(one.parents >= 0).tolist():
            verified["lookup" if node >= nodes else "head"] += 1
        for node in one.path[1 : 1 + len(one.emitted)]:
            emitted["lookup" if node >= nodes else "head"] += 1
    assert done.metrics.num_draft_tokens_per_source == verified
    assert done.metrics.num_accepted_tokens_per_source == emitted
    check_sources(done.metrics)


def check_contract(draft: Draft) -> None:
    """Check the contract of `jspec.draft.base.Drafter`."""
    tokens, parents, valid = (np.asarray(field) for field in (draft.tokens, draft.parents, draft.valid))
    assert (parents[:, 0] == -1).all() and (parents < np.arange(parents.shape[1])).all()
    for row in range(len(tokens)):
        children = [
            (int(p), int(t)) for p, t, v in zip(parents[row], tokens[row], valid[row], strict=True) if v and p >= 0
        ]
        assert len(set(children)) == len(children), "siblings are equal"
        assert all(valid[row, parent] for parent, _ in children)
