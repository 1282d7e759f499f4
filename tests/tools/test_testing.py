"""`check_lossless` passes what is lossless, a user's own drafter included, and fails what is not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, final

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jspec import Drafter, Engine, Model, SamplingParams, Tree
from jspec.core.records import Draft, SlotView
from jspec.draft.base import DraftState, Params, StatelessDrafter, static_draft
from jspec.tools.testing import Random, Scripted, check_lossless, differences
from jspec.verify import coupled
from tests.support import small

pytestmark = pytest.mark.once

PROMPTS = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3]]
OPTIONS: dict[str, Any] = dict(slots=4, max_len=small.MAX_LEN, buckets=(4,), prefill_buckets=(8,))
TOKENS, LENGTH = 20, 2


@pytest.fixture(scope="module")
def plain() -> Engine:
    return small.plain()


def check(plain: Engine, drafter: Drafter, **options: Any) -> dict[float, list]:
    """`check_lossless` with the plain engine made once."""

    def make_engine(target: Model, **given: Any) -> AbstractContextManager[Engine]:
        return Engine(target, **given) if "drafter" in given else nullcontext(plain)

    merged = OPTIONS | options
    return check_lossless(drafter, small.target(), PROMPTS, max_tokens=TOKENS, make_engine=make_engine, **merged)


@final
class Repeat(StatelessDrafter):
    """A user's drafter: says the root again and again."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def feature_layers(self, target: Model) -> tuple[int, ...]:
        return ()

    def bind(self, target: Model) -> Params:
        return ()

    def draft(self, params: Params, state: DraftState, view: SlotView) -> tuple[Draft, DraftState]:
        root = view.root[:, None]
        certain = jnp.zeros(root.shape)
        return static_draft(self.tree, view, [root] * self.tree.depth, [certain] * self.tree.depth), state


def scripted(plain: Engine) -> Scripted:
    """Right at every token of the very runs that are compared."""
    params = [SamplingParams(max_tokens=TOKENS, temperature=t, seed=1000 + i) for t in (0.0, 1.0) for i in range(4)]
    return Scripted(plain.generate(PROMPTS * 2, params), params, Tree.chain(LENGTH))


@pytest.mark.parametrize("name", ["right", "a user's own"])
def test_a_lossless_drafter_passes(plain: Engine, name: str) -> None:
    tree = Tree.chain(LENGTH)
    drafter = scripted(plain) if name == "right" else Repeat(tree)
    assert check(plain, drafter) == {0.0: [], 1.0: []}


def test_rejection_sampling_passes_where_rows_are_greedy(plain: Engine) -> None:
    """Sampled rows keep their law, not their tokens, and tokens are what is compared: so it is asked greedily."""
    assert check(plain, Random(Tree.chain(LENGTH)), accept="rejection", temperatures=(0.0,)) == {0.0: []}


def test_accepting_everything_is_caught(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the walk takes every valid node."""
    original = coupled.longest_accepted_path

    def credulous(matches: Array, draft: Draft, ancestor_mask: Array) -> Any:
        return original(jnp.ones_like(matches), draft, ancestor_mask)

    monkeypatch.setattr(coupled, "longest_accepted_path", credulous)
    with pytest.raises(AssertionError, match=r"not lossless at temperature 0\.0: Difference\(prompt="):
        check(plain, Random(Tree.chain(LENGTH)), temperatures=(0.0,))


def test_a_difference_says_where_and_how_large(plain: Engine) -> None:
    """Another target's output differs; a gap that is no near tie comes with it."""
    (one,) = plain.generate(PROMPTS[0], SamplingParams(max_tokens=5, temperature=0))
    changed = list(one.token_ids)
    changed[3] = (changed[3] + 1) % small.VOCAB
    (found,) = differences(small.target(), [one], [replace(one, token_ids=changed)], None)
    assert (found.prompt, found.position, found.plain, found.speculative) == (0, 3, one.token_ids[3], changed[3])
    assert found.gap > 1e-5 and np.isfinite(found.gap)
