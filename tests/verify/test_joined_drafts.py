"""Enumerate what the accept rules emit for drafts that a look-up replaces or joins."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jspec import Tree
from jspec.core.ancestors import ancestors
from jspec.core.records import Draft
from jspec.draft.beside import joined, replaced
from jspec.draft.best_nodes import keep_best_nodes
from jspec.verify import rejection
from jspec.verify.multi_candidate import multi_candidate_accept
from jspec.verify.rejection import rejection_accept
from jspec.verify.traversal import traversal_accept
from tests.reference import enumeration
from tests.reference.enumeration import distance, joint, random_probs
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

ACCEPT = {
    "rejection": jax.jit(rejection_accept),
    "traversal": jax.jit(traversal_accept),
    "multi_candidate": jax.jit(multi_candidate_accept),
}
VOCAB, LENGTH = 3, 2
TREES = {"chain": Tree.chain(2), "star": Tree.static([(0,), (1,)]), "pairs": Tree.static([(0,), (1,), (0, 0), (1, 0)])}
CONTINUATIONS = list(itertools.product(range(VOCAB), repeat=LENGTH))


def found_of(tokens: tuple[int, ...], rows: int, *, is_used: bool = True) -> tuple[Draft, Array]:
    """Return the chains of a look-up with the same continuation in every row, and whether they are used."""
    chain = enumeration.draft_of(Tree.chain(len(tokens)), np.tile([0, *tokens], (rows, 1)), None)
    return chain, on_device(np.full(rows, is_used))


def drawn_drafts(tree: Tree, draft_probs: list[np.ndarray]) -> tuple[Draft, np.ndarray]:
    """Return every draft of a head, and its probability."""
    tokens, weight = enumeration.sampled_drafts(tree, draft_probs)
    return enumeration.draft_of(tree, tokens, enumeration.probs_at_nodes(tree, tokens, draft_probs)), weight


def paths_of(parents: np.ndarray, tokens: np.ndarray) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each node of one tree; those of padding are ()."""
    paths: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        paths.append(() if node == 0 or parent < 0 else (*paths[parent], int(tokens[node])))
    return paths


def emitted(rule: str, draft: Draft, weight: np.ndarray, target: list[np.ndarray]) -> np.ndarray:
    """Return the joint probabilities of the tokens that a step emits, followed by tokens of the target.

    Args:
        draft: drafts, one a row, of trees of any shape.
        weight: probability of each draft.
    """
    nodes = draft.tokens.shape[1]
    coins = np.array(list(itertools.product([0, 1], repeat=nodes - 1)))
    accepts = np.tile(np.concatenate([np.ones((len(coins), 1), int), coins], axis=1), (len(weight), 1))
    draft = jax.tree.map(lambda field: np.repeat(np.asarray(field), len(coins), axis=0), draft)
    weight = np.repeat(weight, len(coins))
    parents, tokens, valid = draft.parents, draft.tokens, draft.valid & (draft.parents >= 0)
    paths = [paths_of(*row) for row in zip(parents, tokens, strict=True)]
    p = np.array([[target[min(len(path), len(target) - 1)][path[: len(target) - 1]] for path in row] for row in paths])
    mask = np.asarray(ancestors(np.asarray(parents)))
    given = jax.tree.map(on_device, (p.astype(np.float32), draft, mask, (1.0 - accepts).astype(np.float32)))
    result = ACCEPT[rule](*given)
    last, residual = np.asarray(result.last_node), np.asarray(result.residual_probs, np.float64)
    probs = np.minimum(np.asarray(result.accept_probs, np.float64), 1)
    out = np.zeros([VOCAB] * len(target))
    for row, node in enumerate(last):
        tried = [
            m
            for m in np.flatnonzero(valid[row])
            if rule == "traversal" or is_tried(parents[row], valid[row], mask[row, node], m)
        ]
        chance = weight[row] * 0.5 ** (nodes - 1 - len(tried))
        chance *= np.prod([probs[row, m] if accepts[row, m] else 1 - probs[row, m] for m in tried])
        for token in np.flatnonzero(residual[row]) if chance else ():
            before = (*paths[row][node], int(token))
            out[before] += chance * residual[row, token] * enumeration.tail(target, before)
    return out


def is_tried(parents: np.ndarray, valid: np.ndarray, on_path: np.ndarray, node: int) -> bool:
    """Return whether a rule that tries sibling after sibling tries a node, if it accepts a path."""
    earlier = [m for m in range(1, node) if valid[m] and parents[m] == parents[node]]
    return bool(on_path[parents[node]] and not on_path[earlier].any())


def flattened(probs: list[np.ndarray]) -> list[np.ndarray]:
    """Return probabilities that are less sharp, of which zeros stay zeros."""
    return [(weights := each**0.3) / weights.sum(axis=-1, keepdims=True) for each in probs]


@cache
def case(name: str, seed: int, zeros: float = 0) -> Any:
    """Return random target probabilities, and every draft of a head with its probability."""
    tree, rng = TREES[name], np.random.default_rng(seed)
    target, draft_probs = (random_probs(rng, VOCAB, depth, zeros=zeros) for depth in (LENGTH, tree.depth - 1))
    return flattened(target), *drawn_drafts(tree, flattened(draft_probs))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("rule", ACCEPT)
def test_rule_with_a_joined_continuation_emits_the_target_distribution(rule: str, name: str) -> None:
    """Every continuation is joined to every draft: it is on no path, on a part of one, or on a whole one."""
    for seed, zeros in ((1, 0.0), (6, 0.2)):
        target, drafted, weight = case(name, seed, zeros)
        if rule == "multi_candidate":
            drafted = drafted.replace(probs=None)
        for tokens in CONTINUATIONS[seed % 2 :: 2 if name != "pairs" else 4]:
            draft = joined(drafted, *found_of(tokens, len(weight)))
            np.testing.assert_allclose(emitted(rule, draft, weight, target), joint(target), atol=1e-6)


def test_multi_candidate_with_the_best_nodes_of_a_joined_tree_emits_the_target_distribution() -> None:
    """Nothing was drawn, so any choice among nodes is exact. The scores of the nodes differ from draft to draft."""
    for name in ("star", "pairs"):
        target, drafted, weight = case(name, 1)
        drafted, nodes = drafted.replace(probs=None, scores=scores_of(drafted)), TREES[name].nodes
        for tokens in CONTINUATIONS[::3]:
            draft = joined(drafted, *found_of(tokens, len(weight)))
            kept = keep_best_nodes(draft, nodes)
            assert kept.valid.sum() < draft.valid.sum() and (kept.valid[:, 1:].sum(axis=1) >= 1).all()
            np.testing.assert_allclose(emitted("multi_candidate", kept, weight, target), joint(target), atol=1e-6)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
@pytest.mark.parametrize(("head", "tokens"), [(2, (1,)), (1, (2, 0)), (2, (0, 1))])
def test_rule_with_a_replaced_chain_emits_the_target_distribution(
    rule: str, head: int, tokens: tuple[int, ...]
) -> None:
    """Chains of both parts have any lengths; a shorter match leaves the head's chain."""
    rng, tree, longest = np.random.default_rng(1), Tree.chain(head), max(head, len(tokens))
    target, draft_probs = random_probs(rng, VOCAB, longest), random_probs(rng, VOCAB, head - 1)
    drafted, weight = drawn_drafts(tree, draft_probs)
    for is_replaced in (True, False):
        draft = replaced(drafted, *found_of(tokens, len(weight), is_used=is_replaced))
        count = len(tokens) if is_replaced else head
        assert draft.valid.sum(axis=1).tolist() == [1 + count] * len(weight)
        assert not is_replaced or draft.tokens[:, 1 : 1 + count].tolist() == [list(tokens)] * len(weight)
        np.testing.assert_allclose(emitted(rule, draft, weight, target), joint(target), atol=1e-6)


# -- negative controls


def scores_of(drafted: Draft) -> Array:
    """Return the scores of nodes by their own drawn probabilities, as a head gives them."""
    probs, parents, tokens = (np.asarray(field) for field in (drafted.probs, drafted.parents, drafted.tokens))
    scores = np.zeros(tokens.shape, np.float32)
    for row, node in itertools.product(range(len(tokens)), range(1, tokens.shape[1])):
        parent = parents[row, node]
        scores[row, node] = scores[row, parent] + np.log(probs[row, parent, tokens[row, node]])
    return on_device(scores)


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_choice_among_drawn_nodes_by_their_scores_is_lossy(rule: str) -> None:
    """Of a drawn token the likely ones are kept, so the rule accepts them too often. Therefore `Beside` refuses it."""
    target, drafted, weight = case("chain", 1)
    drafted = drafted.replace(scores=scores_of(drafted))
    draft = joined(drafted, *found_of((0, 1), len(weight)))
    with pytest.raises(ValueError, match="a choice among drawn tokens changes the output"):
        keep_best_nodes(draft, 2)
    chosen = keep_best_nodes(draft.replace(probs=None, drawn=None), 2)
    at_node = np.argmax((np.asarray(draft.tokens) == np.asarray(chosen.tokens)[:, 1:]) & (draft.parents == 0), axis=1)
    drawn = on_device(np.stack([np.ones(len(weight), bool), at_node < TREES["chain"].nodes], axis=1))
    kept = chosen.replace(probs=draft.probs[:, :2], drawn=drawn)
    assert distance(emitted(rule, kept, weight, target), joint(target)) > 0.01


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_joined_continuation_taken_as_drawn_is_lossy(rule: str) -> None:
    distances = []
    for name, seed in (("chain", 1), ("star", 2)):
        target, drafted, weight = case(name, seed)
        for tokens in CONTINUATIONS[::4]:
            draft = joined(drafted, *found_of(tokens, len(weight)))
            nodes = TREES[name].nodes
            assert draft.drawn[:, :nodes].all() and not draft.drawn[:, nodes:].any()
            distances.append(distance(emitted(rule, draft.replace(drawn=None), weight, target), joint(target)))
    assert max(distances) > 0.05


def test_replaced_chain_with_the_heads_probabilities_is_lossy() -> None:
    target, drafted, weight = case("chain", 1)
    draft = replaced(drafted, *found_of((0, 1), len(weight))).replace(probs=drafted.probs)
    assert distance(emitted("rejection", draft, weight, target), joint(target)) > 0.05


def star_with(token: int, drawn: np.ndarray, *, is_first: bool) -> Draft:
    """Return drafts whose root has a drawn child and a look-up's, in either order; of equal ones the first alone."""
    children = [np.full(len(drawn), token), drawn]
    first, second = children if is_first else children[::-1]
    valid = np.stack([drawn >= 0, drawn >= 0, first != second], axis=1)
    record = enumeration.draft_of(TREES["star"], np.stack([0 * drawn, first, second], axis=1), None, valid)
    return record.replace(drawn=on_device(np.tile([True, not is_first, is_first], (len(drawn), 1))))


def root_probs(p: np.ndarray, q: np.ndarray, token: np.ndarray) -> Any:
    """Test a token as the rule does, but keep the draft's probabilities after one that was not drawn."""
    trial, was_drawn = TRY(p, q, token), jnp.any(q > 0, axis=-1, keepdims=True)
    return trial._replace(residual_q=jnp.where(was_drawn, trial.residual_q, jnp.asarray(Q)))


TRY = rejection.try_token
P, Q = np.array([0.2, 0.4, 0.4]), np.array([0.5, 0.5, 0])


@pytest.mark.parametrize("is_first", [False, True])
def test_continuation_tried_before_the_drawn_sibling_that_equals_it_is_lossy(
    is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has the probabilities `P`, the head `Q`, and the look-up token 0, which the head may draw too.

    If the rule goes on with `Q` after token 0, then token 1 is accepted too often, because the head's token 0 is not
    tried. The rule takes siblings behind a token that was not drawn as point masses, so it stays exact in any order.
    """
    drawn, weight, target = np.array([0, 1]), np.array([0.5, 0.5]), [P, np.tile(P, (VOCAB, 1))]
    probs = on_device(np.tile(np.stack([Q, 0 * Q, 0 * Q]), (2, 1, 1)), jnp.float32)
    draft = star_with(0, drawn, is_first=is_first).replace(probs=probs)
    for rule in ("rejection", "traversal"):
        np.testing.assert_allclose(emitted(rule, draft, weight, target).sum(axis=1), P, atol=1e-6)
    monkeypatch.setattr(rejection, "try_token", root_probs)
    monkeypatch.setitem(ACCEPT, "rejection", jax.jit(lambda *given: rejection_accept(*given)))
    expected = [0.2, 0.6, 0.2] if is_first else P
    np.testing.assert_allclose(emitted("rejection", draft, weight, target).sum(axis=1), expected, atol=1e-6)
