"""Drafters of known tokens for tests of `Beside`, right or wrong at each depth as a table says."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Int

from jspec.core.records import Draft, SlotView
from jspec.core.tree import Tree
from jspec.draft.base import StatelessDrafter, static_draft
from jspec.draft.lookup import Found, LookupDrafter

LENGTH = 4  # match length of every look-up


@struct.dataclass
class Line:
    """The line of the table of each slot's request."""

    of_slot: Int[Array, "slots"]


class Known(LookupDrafter):
    """A look-up that drafts the token that is known at each position, plus a number of a table for each depth.

    A node of rank r has r more. The first two tokens of a prompt are the number of its line, as `prompt_of` makes it.

    Args:
        outputs: tokens of each line's request after its prompt, [lines, tokens].
        prompt_size: tokens of each prompt.
        wrong: what is added at each depth from 1 on, [lines, depth].
        tree: static tree.
        vocab: number of tokens.
    """

    def __init__(self, outputs: np.ndarray, prompt_size: int, wrong: np.ndarray, tree: Tree, vocab: int) -> None:
        super().__init__(tree, max_n=LENGTH, min_n=1)
        self.outputs = np.pad(outputs, ((0, 0), (0, tree.depth)))
        self.prompt_size, self.wrong, self.vocab = prompt_size, wrong, vocab

    def init(self, params: Any, pool: Any) -> Any:
        return Line(jnp.zeros(pool.slots, jnp.int32))

    def prefill(self, params: Any, state: Any, view: Any, batch: Any, features: Any) -> Any:
        tokens = batch.tokens.reshape(-1)
        lines = tokens[batch.first] + self.vocab * tokens[batch.first + 1]
        return Line(state.of_slot.at[view.slots].set(lines, mode="drop"))

    def commit(self, params: Any, state: Any, *rest: Any) -> Any:
        return state

    def write_pending_rows(self, params: Any, state: Any, view: Any) -> Any:
        return state

    def look_up(self, state: Any, view: SlotView) -> tuple[Found, Any]:
        line = state.of_slot.at[view.slots].get(mode="fill", fill_value=0)
        tokens = []
        for depth, level in enumerate(self.tree.levels[1:], 1):
            at = jnp.clip(view.lengths - self.prompt_size + depth, 0, self.outputs.shape[1] - 1)
            known = jnp.asarray(self.outputs)[line, at] + jnp.asarray(self.wrong)[line, depth - 1]
            tokens.append((known[:, None] + np.array(level.ranks)) % self.vocab)
        draft = static_draft(self.tree, view, tokens, [jnp.zeros(level.shape) for level in tokens])
        return Found(draft, jnp.full(line.shape, LENGTH)), state


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
    """Return the prompt of a line of the tables."""
    return [line % vocab, line // vocab, 9]


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
