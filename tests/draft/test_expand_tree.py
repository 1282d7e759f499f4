"""Compare expanded trees with the methods' definitions in plain Python; the model is a hash table."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Tree
from jspec.core.numerics import AUTO, REFERENCE, Numerics
from jspec.core.records import SlotView
from jspec.draft.expand_tree import ExpandedTree, Level, Vocabulary, expand_tree
from jspec.sampling import sampler
from jspec.verify import Typical
from tests.support.arrays import on_device
from tests.support.views import view_of_rows

pytestmark = pytest.mark.once

VOCAB, ROWS = 13, 3
PATHS = [(0,), (1,), (3,), (0, 0), (0, 2), (3, 1), (0, 2, 0), (0, 2, 1), (3, 1, 2)]
TREES = [Tree.chain(1), Tree.chain(4), Tree.static(PATHS), Tree.topk(16, 4, 4), Tree.topk(9, 8, 2), Tree.topk(5, 1, 6)]
MOST_BRANCHES = TREES[2:4]
PRIME = 100003


def table(kind: str) -> np.ndarray:
    """Return logits [512, vocab], one row for each hash of a text."""
    rng = np.random.default_rng(0)
    if kind == "equal":
        return np.zeros((512, VOCAB), np.float32)
    if kind == "one-hot":  # log-probabilities of exactly 0 and practically minus infinity
        return np.eye(VOCAB, dtype=np.float32)[rng.integers(0, VOCAB, 512)] * 1000
    logits = rng.normal(0, 2, (512, VOCAB)).astype(np.float32)
    return np.asarray(logits, jnp.bfloat16).astype(np.float32).round(0) if kind == "coarse" else logits


def place(text: tuple[int, ...]) -> int:
    """Return the hash of a text; a further token updates it."""
    value = 7
    for token in text:
        value = (value * 31 + token + 1) % PRIME
    return value


def run(tree: Tree, logits: np.ndarray, roots: list[int]) -> ExpandedTree:
    """Expand a tree per root with a model whose state is the hash of each node's text."""
    view = view_of_rows(roots)
    start = on_device([[place((root,))] for root in roots])

    def feed(hashes: jax.Array, level: Level) -> tuple[jax.Array, jax.Array]:
        parent = jnp.take_along_axis(hashes, level.parents, axis=1)
        hashes = (parent * 31 + level.tokens + 1) % PRIME
        return jnp.asarray(logits)[None, hashes % 512], hashes

    @jax.jit
    def expanded(start: jax.Array) -> ExpandedTree:
        first = jnp.asarray(logits)[None, start % 512]
        return expand_tree(tree, view, Vocabulary(None, VOCAB), first, start, feed)[0]

    return expanded(start)


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64) - row.max()
    return wide - np.log(np.exp(wide).sum())


def children(text: tuple[int, ...], logits: np.ndarray) -> list[tuple[float, int]]:
    """Return (log-probability, token) of all next tokens, most likely first, smaller ids first among equals."""
    row = log_softmax(logits[place(text) % 512])
    return [(row[token], token) for token in sorted(range(VOCAB), key=lambda token: (-row[token], token))]


def dynamic(tree: Tree, logits: np.ndarray, root: int) -> list[tuple[tuple[int, ...], float]]:
    """Build a dynamic tree as the EAGLE-2 paper defines it: (text, score) of the chosen nodes in candidate order."""
    beam, candidates = [((root,), 0.0)], []
    for _ in range(tree.depth):
        level = [((*text, t), s + p) for text, s in beam for p, t in children(text, logits)[: tree.k]]
        candidates += level
        beam = [level[i] for i in sorted(range(len(level)), key=lambda i: (-round(level[i][1], 4), i))[: tree.k]]
    best = sorted(range(len(candidates)), key=lambda i: (-round(candidates[i][1], 4), i))[: tree.nodes - 1]
    return [candidates[i] for i in sorted(best)]


def static(tree: Tree, logits: np.ndarray, root: int) -> list[tuple[tuple[int, ...], float]]:
    known: dict[tuple, tuple] = {(): ((root,), 0.0)}
    for path in tree.paths or ():
        text, score = known[path[:-1]]
        p, token = children(text, logits)[path[-1]]
        known[path] = ((*text, token), score + p)
    return [known[path] for path in tree.paths or ()]


# Only dynamic trees choose nodes by score, where ties matter.
KINDS = [(tree, kind) for tree in TREES for kind in ("random", "coarse", "equal", "one-hot")[: 1 if tree.paths else 4]]


@pytest.mark.parametrize(("tree", "kind"), KINDS, ids=str)
def test_expanded_tree_of_random_or_tied_logits_equals_plain_python(tree: Tree, kind: str) -> None:
    logits, roots = table(kind), [3, 5, 11]
    expanded = run(tree, logits, roots)
    for row, root in enumerate(roots):
        expected = (dynamic if tree.paths is None else static)(tree, logits, root)
        texts = read(expanded, row)
        assert texts == [text for text, _ in expected]
        np.testing.assert_allclose(
            expanded.draft.scores[row, 1:], [score for _, score in expected], rtol=1e-4, atol=1e-4
        )


def read(expanded: ExpandedTree, row: int) -> list[tuple[int, ...]]:
    """Return the text of every node after checking that parents come first and that siblings differ."""
    tokens, parents = np.asarray(expanded.draft.tokens[row]), np.asarray(expanded.draft.parents[row])
    assert parents[0] == -1
    assert (parents[1:] < np.arange(1, len(parents))).all()
    assert (parents[1:] >= 0).all()
    texts: list[tuple[int, ...]] = [(int(tokens[0]),)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append((*texts[parent], int(token)))
    assert len(set(texts)) == len(texts), "siblings have distinct tokens"
    return texts[1:]


@pytest.mark.parametrize(
    "tree", [pytest.param(tree, marks=[pytest.mark.long] * (tree not in MOST_BRANCHES)) for tree in TREES], ids=str
)
def test_expanded_tree_mask_bits_of_each_node_mark_its_ancestors(tree: Tree) -> None:
    """Each node's bits name the cache rows of its ancestors; the returned row of a node is the row it was fed at."""
    logits, seen, texts_of_row = table("random"), [], {}

    def feed(texts: Any, level: Level) -> tuple[jax.Array, Any]:
        own = []
        for index in range(level.tokens.shape[1]):
            text = (*texts[int(level.parents[0, index])], int(level.tokens[0, index]))
            row = level.first + index
            texts_of_row[text] = row
            if level.bits is None:
                assert row == len(text) - 1
            else:
                words = np.asarray(level.bits[0, index])
                seen.append(({b for b in range(len(words) * 32) if words[b // 32] >> (b % 32) & 1}, text))
            own.append(text)
        hashes = np.array([[place(text) % 512 for text in own]])
        return jnp.asarray(logits)[None, hashes], own

    root = (4,)
    texts_of_row[root] = 0
    start = on_device(logits)[None, np.array([[place(root) % 512]])]
    expanded, _ = expand_tree(tree, view_of_rows([4]), Vocabulary(None, VOCAB), start, [root], feed)
    for rows, text in seen:
        assert rows == {texts_of_row[text[:length]] for length in range(1, len(text) + 1)}
    for node, text in enumerate([root, *read(expanded, 0)]):
        assert int(expanded.rows[0, node]) == texts_of_row.get(text, -1)
    assert max(texts_of_row.values()) < tree.draft_rows


@pytest.mark.parametrize("accept", ["rejection", "block"])
def test_child_chooser_under_rejection_or_block_draws_siblings_without_replacement(accept: str) -> None:
    """The first draw follows the returned probabilities; the second draw follows them without the first token."""
    rows = 4000
    logits = jnp.broadcast_to(jnp.log(on_device([0.5, 0.3, 0.15, 0.05])), (rows, 1, 4))
    view = view_of_rows([0] * rows, temperature=1.0, accept=accept)
    ids, probs = sampler.child_chooser(view, 1, None, 4)(logits[None], 1, 2)
    assert probs is not None
    np.testing.assert_allclose(probs[0, 0], [0.5, 0.3, 0.15, 0.05], rtol=1e-5)
    pairs = np.asarray(ids[:, 0])
    q = np.asarray(probs[0, 0], np.float64)
    for a, b in itertools.permutations(range(4), 2):
        expected = q[a] * q[b] / (1 - q[a])
        got = np.mean((pairs[:, 0] == a) & (pairs[:, 1] == b))
        assert abs(got - expected) < 5 * np.sqrt(expected * (1 - expected) / rows)
    assert (pairs[:, 0] != pairs[:, 1]).all()


def test_child_chooser_under_coupled_rule_returns_the_target_token_first() -> None:
    """The draft's and the target's distributions are equal; each row has a seed of its own."""
    rows, vocab = 64, 9
    logits = jax.random.normal(jax.random.key(0), (rows, 1, vocab))
    view = view_of_rows([0] * rows, temperature=1.0)
    ids, probs = sampler.child_chooser(view, 3, None, vocab)(logits[None], 3, 4)
    assert probs is None
    target = sampler.target_tokens(logits[None], view, on_device(np.full((rows, 1), 3)))
    np.testing.assert_array_equal(ids[:, 0, 0], target[:, 0])
    deterministic, _ = sampler.child_chooser(view.replace(accept=Typical()), 3, None, vocab)(logits[None], 3, 4)
    np.testing.assert_array_equal(deterministic, jax.lax.top_k(logits, 4)[1])


@pytest.mark.parametrize("has_map", [False, True])
def test_tokens_drawn_with_the_noise_of_the_round_equal_tokens_drawn_without(has_map: bool) -> None:
    """A chain's drafts and the target's tokens after the nodes of a tree; half of the rows are greedy."""
    rows, vocab, size = 16, 9, 18 if has_map else 9
    logits = jax.random.normal(jax.random.key(0), (rows, 3, vocab))
    target_logits = jax.random.normal(jax.random.key(2), (1, rows, 3, size))
    temperature = jnp.where(on_device(np.arange(rows)) < rows // 2, 0.0, 1.0)
    view = view_of_rows([0] * rows, temperature=1.0)
    view = view.replace(sampling=view.sampling.replace(temperature=temperature), numerics=REFERENCE)
    ids = jax.random.permutation(jax.random.key(1), size)[:vocab] if has_map else None
    offset = jnp.tile(on_device([1, 2, 2]), (rows, 1))

    def draw(view: SlotView) -> np.ndarray:
        drafts, _ = sampler.child_chooser(view, 2, ids, size)(logits[None], np.array([1, 2, 2]), 1)
        siblings, _ = sampler.child_chooser(view, 2, ids, size)(logits[None], np.array([1, 2, 2]), 3)
        tokens = sampler.target_tokens(target_logits, view, offset)
        return np.concatenate([drafts, siblings, tokens[..., None]], axis=-1)

    held = sampler.with_noise(view, 3, size)
    np.testing.assert_array_equal(draw(held), draw(view))
    assert held.noise is not None
    other = draw(held.replace(noise=held.noise[:, ::-1]))
    assert (other[rows // 2 :] != draw(view)[rows // 2 :]).any(axis=(0, 1)).all(), "control: noise of other positions"
    for view_without in (view.replace(numerics=AUTO), view.replace(numerics=Numerics("reference", True))):
        assert sampler.with_noise(view_without, 3, size).noise is None


@pytest.mark.parametrize("has_map", [False, True])
def test_child_chooser_for_one_child_returns_the_first_of_three(has_map: bool) -> None:
    """Another kernel draws a single child; the batch has greedy and sampled rows."""
    rows, fed, vocab = 32, 2, 50
    to_target = jax.random.permutation(jax.random.key(1), 4 * vocab)[:vocab].astype(jnp.int32) if has_map else None
    logits = jax.random.normal(jax.random.key(0), (rows, fed, vocab))
    view = view_of_rows([0] * rows, temperature=1.0)
    temperature = jnp.where(on_device(np.arange(rows)) % 2 == 0, 0.0, 1.3)
    view = view.replace(sampling=view.sampling.replace(temperature=temperature, top_k=view.sampling.top_k + 20))
    choose = sampler.child_chooser(view, 3, to_target, 4 * vocab if has_map else vocab)
    (one, probs), (several, _) = choose(logits[None], 2, 1), choose(logits[None], 2, 3)
    assert probs is None and one.shape == (rows, fed, 1)
    np.testing.assert_array_equal(one[..., 0], several[..., 0])
    np.testing.assert_array_equal(one[::2, :, 0], logits.argmax(axis=-1)[::2])
    another = np.asarray(choose(logits[None], 3, 1)[0])
    assert (np.asarray(one) != another)[1::2].any(), "control: noise of another position"


def test_expanded_tree_with_vocabulary_map_contains_target_ids() -> None:
    to_target = on_device([3, 6, 7])
    logits = on_device([[[[0.0, 5.0, 3.0]]]])

    def feed(state: Any, level: Level) -> tuple[jax.Array, Any]:
        assert level.tokens.tolist() == [[6]] and level.ids.tolist() == [[1]]
        return logits, state

    expanded, _ = expand_tree(Tree.chain(2), view_of_rows([2]), Vocabulary(to_target, 9), logits, None, feed)
    assert expanded.draft.tokens.tolist() == [[2, 6, 6]]
    assert expanded.draft.vocab_map is to_target
