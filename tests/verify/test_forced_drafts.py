"""Enumerate what the accept rules emit for drafts with the text that a thinking budget forces."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Tree
from jspec.core.records import Controls, Draft
from jspec.core.thinking import MAX_FORCED
from jspec.draft.beside import joined
from jspec.sampling import penalties
from jspec.sampling.forced_draft import draft_forced_text
from tests.reference.enumeration import distance, joint, random_probs
from tests.support.arrays import on_device
from tests.verify.test_joined_drafts import ACCEPT, VOCAB, drawn_drafts, emitted, flattened, found_of

pytestmark = pytest.mark.once

END, LEVELS = 2, 3  # the end marker; a target has probabilities behind paths of up to three tokens
TREES = {"chain": Tree.chain(3), "pairs": Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])}


def rows_of(count: int, text: tuple[int, ...], budget: int) -> Controls:
    """Return the controls of requests that reason since the root, with a budget and the text that ends it."""
    values = dict(
        used=np.ones(count, bool),
        thought=np.zeros(count),
        thinking_budget=np.full(count, budget),
        think_markers=np.tile([-1, END], (count, 1)),
        forced=np.tile([*text, *[-1] * (MAX_FORCED - len(text))], (count, 1)),
        forced_size=np.full(count, len(text)),
    )
    unused = penalties.unused(count, VOCAB)
    return unused.replace(**{name: on_device(each, getattr(unused, name).dtype) for name, each in values.items()})


def forced_target(text: tuple[int, ...], budget: int) -> list[np.ndarray]:
    """Return random probabilities, with 1 for each token that the budget forces."""
    probs = flattened(random_probs(np.random.default_rng(1), VOCAB, LEVELS, zeros=0.0))
    for level in range(LEVELS + 1):
        for path in itertools.product(range(VOCAB), repeat=level):
            if END not in path and 0 <= level - budget < len(text):
                probs[level][path] = np.arange(VOCAB) == text[level - budget]
    return probs


def case(rule: str, name: str, text: tuple[int, ...], budget: int, tokens: tuple[int, ...] | None = None) -> Any:
    """Return the target, every draft of a head with the forced text, and the probability of each."""
    tree = TREES[name]
    drafted, weight = drawn_drafts(tree, flattened(random_probs(np.random.default_rng(2), VOCAB, tree.depth - 1)))
    if rule == "multi_candidate":
        drafted = drafted.replace(probs=None)
    if tokens is not None:
        drafted = joined(drafted, *found_of(tokens, len(weight)))
    draft = jax.jit(draft_forced_text)(drafted, rows_of(len(weight), text, budget))
    if tokens is None:
        draft = draft.replace(parents=drafted.parents)  # those of a static tree are known when a rule is traced
    return forced_target(text, budget), drafted, draft, weight


def is_forced(drafted: Draft, draft: Draft) -> np.ndarray:
    return np.asarray((drafted.tokens != draft.tokens) & draft.valid)


@pytest.mark.parametrize("rule", ACCEPT)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("text", "budget"), [((1, END), 0), ((1, END), 1), ((END,), 1), ((0, 1, END), 0)])
def test_rule_with_a_forced_text_in_the_draft_emits_the_target_distribution(
    rule: str, name: str, text: tuple[int, ...], budget: int
) -> None:
    target, drafted, draft, weight = case(rule, name, text, budget)
    assert is_forced(drafted, draft).any()
    np.testing.assert_allclose(emitted(rule, draft, weight, target), joint(target), atol=1e-6)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_rule_with_a_forced_text_in_a_joined_tree_emits_the_target_distribution(rule: str) -> None:
    for tokens in ((0, 0), (1, 1)):
        target, drafted, draft, weight = case(rule, "pairs", (1, END), 1, tokens)
        assert is_forced(drafted, draft).any()
        np.testing.assert_allclose(emitted(rule, draft, weight, target), joint(target), atol=1e-6)


def test_forced_text_taken_as_drawn_is_lossy() -> None:
    """Negative control."""
    target, _, draft, weight = case("traversal", "chain", (1, END), 1)
    assert distance(emitted("traversal", draft.replace(drawn=None), weight, target), joint(target)) > 0.05


def test_forced_text_is_on_the_deepest_path_alone_and_ends_the_tree_there() -> None:
    """The budget is used up at the root, at a node below, or not in the tree; or the reasoning ends before."""
    tree = Tree.static([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 0, 0, 0)])
    tokens = np.array([0, 5, 6, 7, 8, 9, 10, 11])
    draft, _ = drawn_drafts(Tree.chain(1), [np.ones(VOCAB) / VOCAB])
    fields = dict(parents=tree.parents, tokens=tokens, scores=-np.arange(8.0), valid=np.ones(8, bool))
    draft = draft.replace(
        **{name: on_device(np.tile(each, (5, 1)), getattr(draft, name).dtype) for name, each in fields.items()},
        probs=None,
    )
    rows = rows_of(5, (20, 21, END), 0)
    rows = rows.replace(
        thought=on_device([0, 1, 3, 3, 9], jnp.int32), thinking_budget=on_device([0, 0, 4, 9, 10], jnp.int32)
    )
    draft = draft.replace(tokens=draft.tokens.at[4, 2].set(END))
    forced = draft_forced_text(draft, rows)
    changed = [
        {node: int(row[node]) for node in np.flatnonzero(row != old)}
        for row, old in zip(np.asarray(forced.tokens), np.asarray(draft.tokens), strict=True)
    ]
    assert changed == [{2: 20, 4: 21, 6: END}, {2: 21, 4: END}, {4: 20, 6: 21, 7: END}, {}, {}]
    dropped = [np.flatnonzero(~row).tolist() for row in np.asarray(forced.valid)]
    assert dropped == [[1, 3, 5, 7], [1, 3, 5, 6, 7], [5], [], []]
    assert np.asarray(forced.scores)[2].tolist() == [0, -1, -2, -3, -2, -5, -2, -2]
