"""Compare trees over a block of independent distributions with all paths, sorted by probability."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from jspec import Tree
from jspec.core.records import Draft, SlotView
from jspec.draft.expand_block import expand_block
from jspec.draft.expand_tree import Vocabulary
from tests.support.arrays import on_device
from tests.support.views import view_of_rows

pytestmark = pytest.mark.once

ROWS, DEPTH, VOCAB = 3, 4, 6


def expanded(tree: Tree, view: SlotView, vocabulary: Vocabulary, logits: np.ndarray) -> Draft:
    """Return the tree over the logits [rows, depth, vocab] of a block, whose program is compiled as a whole."""
    return jax.jit(lambda own: expand_block(tree, view, vocabulary, own))(on_device(logits[None], np.float32))


def block(scale: float) -> np.ndarray:
    return scale * np.random.default_rng(5).normal(size=(ROWS, DEPTH, VOCAB)).astype(np.float32)


def best_paths(logits: np.ndarray, nodes: int, k: int) -> dict[tuple[int, ...], float]:
    """Return the most probable paths of a row [depth, vocab], with their log-probabilities, by trying all."""
    log_probs = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    likeliest = np.argsort(-log_probs, axis=-1)[:, :k]
    every: dict[tuple[int, ...], float] = {}
    for length in range(1, len(logits) + 1):
        for path in itertools.product(*likeliest[:length].tolist()):
            every[path] = sum(log_probs[depth, token] for depth, token in enumerate(path))
    return dict(sorted(every.items(), key=lambda item: -item[1])[: nodes - 1])


def paths_of(tokens: np.ndarray, parents: np.ndarray) -> list[tuple[int, ...]]:
    """Return the tokens on the way to each node of a row's tree, the root's left out."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:].tolist(), parents[1:].tolist(), strict=True):
        assert 0 <= parent < len(paths)
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize(("nodes", "k"), [(2, 1), (12, 3), (30, 6), (40, 4)])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_dynamic_tree_over_a_block_has_the_paths_of_highest_probability(nodes: int, k: int, scale: float) -> None:
    """Flat distributions give wide trees, in which a level has more than k nodes with children."""
    logits, tree = block(scale), Tree.topk(nodes, DEPTH, k)
    draft = expanded(tree, view_of_rows([1, 2, 3]), Vocabulary(None, VOCAB), logits)
    for row in range(ROWS):
        expected = best_paths(logits[row], nodes, k)
        found = paths_of(np.asarray(draft.tokens[row]), np.asarray(draft.parents[row]))
        assert set(found) == set(expected) and len(found) == nodes - 1
        np.testing.assert_allclose(draft.scores[row, 1:], [expected[path] for path in found], atol=1e-5)


@pytest.mark.parametrize("tree", ["chain:4", "static:0,1,2,0.0,0.2,2.1,0.0.0"])
def test_static_tree_over_a_block_has_the_likeliest_tokens_of_each_depth(tree: str) -> None:
    """Ids are those of the draft vocabulary's map; a node's children do not depend on the node."""
    logits, shape = block(1.0), Tree.parse(tree)
    vocabulary = Vocabulary(on_device(np.arange(VOCAB) * 2 + 1), 2 * VOCAB + 1)
    draft = expanded(shape, view_of_rows([1, 2, 3]), vocabulary, logits[:, : shape.depth])
    assert shape.paths is not None
    for row in range(ROWS):
        order = np.argsort(-logits[row], axis=-1)
        for node, ranks in enumerate(shape.paths, 1):
            assert draft.tokens[row, node] == 2 * order[len(ranks) - 1, ranks[-1]] + 1


@pytest.mark.parametrize("accept", ["rejection", "traversal"])
def test_static_tree_over_a_block_draws_the_children_of_each_node_independently(accept: str) -> None:
    """Two nodes of one depth have the same two children, in the same order, as often as by chance."""
    rows, tree = 2000, Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
    probs = np.array([[0.4, 0.3, 0.2, 0.1], [0.1, 0.5, 0.1, 0.3]])
    logits = np.broadcast_to(np.log(probs), (rows, 2, 4))
    view = view_of_rows([0] * rows, temperature=1.0, accept=accept)
    draft = expanded(tree, view, Vocabulary(None, 4), logits)
    assert draft.probs is not None
    np.testing.assert_allclose(draft.probs[0, :3], probs[[0, 1, 1]], rtol=1e-5)
    tokens, q = np.asarray(draft.tokens), probs[1]
    of_pairs = {(a, b): q[a] * q[b] / (1 - q[a]) for a, b in itertools.permutations(range(4), 2)}
    for first in (3, 5):
        drawn = [tuple(pair) for pair in tokens[:, first : first + 2].tolist()]
        for pair, expected in of_pairs.items():
            assert abs(drawn.count(pair) / rows - expected) < 5 * np.sqrt(expected / rows)
    expected = sum(prob**2 for prob in of_pairs.values())
    same = np.mean((tokens[:, 3:5] == tokens[:, 5:7]).all(axis=1))
    assert abs(same - expected) < 5 * np.sqrt(expected / rows) and expected < 0.3


@pytest.mark.parametrize("accept", ["coupled", "multi_candidate"])
def test_static_tree_over_a_block_shares_the_children_of_a_depth_that_are_not_drawn(accept: str) -> None:
    tree, view = Tree.static([(0,), (1,), (0, 0), (1, 0)]), view_of_rows([0, 1, 2], temperature=1.0, accept=accept)
    draft = expanded(tree, view, Vocabulary(None, VOCAB), block(1.0)[:, :2])
    assert draft.probs is None
    np.testing.assert_array_equal(draft.tokens[:, 3], draft.tokens[:, 4])
