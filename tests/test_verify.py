"""The accept rules against exact enumeration: whatever is drafted, the joint law is the target's."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import verify
from jspec.records import Draft, Sampling, SlotView
from jspec.tree import Tree

VOCAB, LENGTH = 5, 3
CHAINS = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)))  # every draft


def random_law(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Laws with some exact zeros, as top-k leaves them."""
    weights = rng.exponential(size=(*shape, VOCAB)) ** 3
    weights[rng.random(weights.shape) < 0.2] = 0
    weights[..., 0] += 1e-3
    return weights / weights.sum(-1, keepdims=True)


def laws_by_prefix(rng: np.random.Generator) -> list[np.ndarray]:
    """A law for every prefix: ``[d]`` has shape [V] * d + [V]."""
    return [random_law(rng, *([VOCAB] * d)) for d in range(LENGTH + 1)]


def joint(laws: list[np.ndarray]) -> np.ndarray:
    """The law of LENGTH + 1 tokens in float64, [V] * (LENGTH + 1): the oracle."""
    out = np.ones(())
    for law in laws:
        out = out[..., None] * law
    return out


def chain(probs: np.ndarray | None, valid: int = LENGTH) -> Draft:
    rows, nodes = len(CHAINS), LENGTH + 1
    return Draft(
        tokens=jnp.asarray(np.concatenate([np.zeros((rows, 1), int), CHAINS], 1), jnp.int32),
        parents=jnp.broadcast_to(jnp.arange(-1, nodes - 1), (rows, nodes)),
        scores=jnp.zeros((rows, nodes)),
        valid=jnp.broadcast_to(jnp.arange(nodes) <= valid, (rows, nodes)),
        probs=None if probs is None else jnp.asarray(probs, jnp.float32),
        vocab_map=None,
    )


def along(laws: list[np.ndarray]) -> np.ndarray:
    """The law behind each node of every draft, [drafts, LENGTH + 1, V]."""
    return np.stack([[laws[d][tuple(c[:d])] for d in range(LENGTH + 1)] for c in CHAINS])


def emitted_law(draft: Draft, target: list[np.ndarray], draft_weight: np.ndarray, valid: int = LENGTH) -> np.ndarray:
    """The joint law of LENGTH + 1 tokens that the rule's parts produce, summed over all drafts and outcomes.

    The parts are the production code's: acceptance probabilities, residual, and how the walk puts them together is
    spelled out here; tokens behind the round's last one follow the target.
    """
    p = jnp.asarray(along(target), jnp.float32)
    stands = np.minimum(np.asarray(verify.accept_probs(p, draft), np.float64), 1.0)
    out = np.zeros([VOCAB] * (LENGTH + 1))
    reached = draft_weight.copy()
    for accepted in range(valid + 1):
        best = jnp.full(len(CHAINS), accepted)
        final = np.asarray(verify.final_law(p, draft, best), np.float64)
        stop = reached * (1 - stands[:, accepted]) if accepted < valid else reached
        for row, tokens in enumerate(CHAINS):
            for token in range(VOCAB):
                prefix = (*tokens[:accepted], token)
                out[prefix] += stop[row] * final[row, token] * tail(target, prefix)
        if accepted < valid:
            reached = reached * stands[:, accepted]
    return out


def tail(target: list[np.ndarray], prefix: tuple[int, ...]) -> np.ndarray:
    """The target's law of the tokens that are still missing behind a prefix."""
    out = np.ones(())
    for law in target[len(prefix) :]:
        out = out[..., None] * law[prefix]
    return out


@pytest.mark.parametrize("seed", range(4))
def test_rejection_gives_the_targets_joint_law_for_every_draft_law(seed: int) -> None:
    rng = np.random.default_rng(seed)
    target, drafted = laws_by_prefix(rng), laws_by_prefix(rng)
    q = along(drafted)
    weight = np.prod([q[np.arange(len(CHAINS)), d, CHAINS[:, d]] for d in range(LENGTH)], axis=0)
    np.testing.assert_allclose(emitted_law(chain(q), target, weight), joint(target), atol=1e-6)


@pytest.mark.parametrize("valid", range(LENGTH + 1))
def test_rejection_of_an_undrawn_draft_gives_the_targets_joint_law(valid: int) -> None:
    target = laws_by_prefix(np.random.default_rng(9))
    for row in range(0, len(CHAINS), 7):
        weight = np.eye(len(CHAINS))[row]
        np.testing.assert_allclose(emitted_law(chain(None, valid), target, weight, valid), joint(target), atol=1e-6)


def test_taking_an_undrawn_draft_for_drawn_is_caught_by_the_enumeration() -> None:
    """The classic mistake: an argmax draft judged as if it had been drawn from its softmax."""
    distances = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        target, drafted = laws_by_prefix(rng), laws_by_prefix(rng)
        best: tuple[int, ...] = ()
        for law in drafted[:LENGTH]:
            best = (*best, int(np.argmax(law[best])))
        weight = np.all(np.array(best) == CHAINS, axis=1).astype(float)
        distances.append(np.abs(emitted_law(chain(along(drafted)), target, weight) - joint(target)).sum() / 2)
    assert max(distances) > 0.1


def test_an_empty_residual_falls_back_on_the_target_and_makes_no_nan() -> None:
    target = laws_by_prefix(np.random.default_rng(3))
    p = jnp.asarray(along(target), jnp.float32)
    final = verify.final_law(p, chain(along(target)), jnp.zeros(len(CHAINS), jnp.int32))
    np.testing.assert_allclose(np.asarray(final), np.asarray(p[:, 0]), atol=1e-6)


def test_the_walk_accepts_strictly_below_the_probability() -> None:
    """A uniform of exactly 0 must not accept a token of probability 0."""
    law = np.zeros((len(CHAINS), LENGTH + 1, VOCAB), np.float32)
    law[..., 4] = 1
    draws = jnp.zeros((len(CHAINS), LENGTH)), jnp.zeros((len(CHAINS), VOCAB))
    accepted, best, bonus = verify.rejection_chain(jnp.asarray(law), chain(None), draws)
    run = np.cumprod(CHAINS == 4, axis=1).sum(1)
    np.testing.assert_array_equal(np.asarray(best), run)
    np.testing.assert_array_equal(np.asarray(accepted).sum(1), run + 1)
    assert (np.asarray(bonus) == 4).all()


def view(rows: int, **fields: object) -> SlotView:
    zeros = jnp.zeros(rows, jnp.int32)
    controls = Sampling(
        temperature=jnp.zeros(rows),
        top_k=zeros,
        top_p=jnp.ones(rows),
        min_p=jnp.zeros(rows),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        stop_ids=jnp.full((rows, 8), -1),
        draft_cap=zeros + 99,
    )
    record = SlotView(
        slots=jnp.arange(rows),
        root=zeros,
        lengths=zeros + 7,
        active=jnp.ones(rows, bool),
        remaining=zeros + 100,
        page_table=jnp.zeros((rows, 1), jnp.int32),
        sampling=controls,
        accept="coupled",
        all_greedy=False,
        implementation="reference",
    )
    return record.replace(**fields)


def random_tree(rng: np.random.Generator, nodes: int, padding: int) -> np.ndarray:
    parents = np.array([-1] + [rng.integers(0, i) for i in range(1, nodes)])
    parents[nodes - padding :] = -1
    return parents


@pytest.mark.parametrize("seed", range(20))
def test_coupled_walks_every_tree_as_a_plain_loop_does(seed: int) -> None:
    """Against a loop over dictionaries: the deepest chain of children that equal the target's argmax."""
    rng = np.random.default_rng(seed)
    nodes, rows, vocab = 12, 16, 3
    parents = np.stack([random_tree(rng, nodes, rng.integers(0, 4)) for _ in range(rows)])
    tokens, expected = np.zeros((rows, nodes), int), []
    logits = rng.normal(size=(rows, nodes, vocab)).astype(np.float32)
    for row in range(rows):
        taken: dict[int, list[int]] = {}
        for node in range(1, nodes):
            siblings = taken.setdefault(int(parents[row, node]), [])
            free = [t for t in range(vocab) if t not in siblings]
            if not free:  # siblings carry distinct tokens: the surplus becomes padding
                parents[row, node] = -1
                continue
            tokens[row, node] = rng.choice(free)
            siblings.append(tokens[row, node])
        for node in range(1, nodes):  # nobody hangs under padding
            if parents[row, node] > 0 and parents[row, parents[row, node]] == -1:
                parents[row, node] = -1
        node, path = 0, [0]
        while True:
            wanted = int(np.argmax(logits[row, node]))
            match = [n for n in range(1, nodes) if parents[row, n] == node and tokens[row, n] == wanted]
            if not match:
                break
            node = match[0]
            path.append(node)
        expected.append((path, [*tokens[row, path[1:]], wanted]))
    depth = nodes - 1
    draft = Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        scores=jnp.zeros((rows, nodes)),
        valid=jnp.asarray((parents >= 0) | (np.arange(nodes) == 0)),
        probs=None,
        vocab_map=None,
    )
    reach = verify.ancestors(draft.parents)
    verdict = verify.accept(jnp.asarray(logits), draft, reach, view(rows), Tree(nodes, depth, is_chain=False))
    for row, (path, emitted) in enumerate(expected):
        assert int(verdict.accept_len[row]) == len(path) - 1
        assert verdict.path[row, : len(path)].tolist() == path
        assert verdict.tokens[row, : len(emitted)].tolist() == emitted
        assert (np.asarray(verdict.tokens[row, len(emitted) :]) == -1).all()


def test_ancestors_agree_with_climbing_the_parents() -> None:
    parents = np.stack([random_tree(np.random.default_rng(s), 40, s % 5) for s in range(8)])
    reach = np.asarray(verify.ancestors(jnp.asarray(parents, jnp.int32)))
    for row, node in itertools.product(range(8), range(40)):
        climbed, at = {node}, int(parents[row, node])
        while at >= 0:
            climbed.add(at)
            at = int(parents[row, at])
        assert set(np.flatnonzero(reach[row, node])) == climbed


@pytest.mark.parametrize(
    ("tokens", "stops", "remaining", "count", "ended"),
    [
        ([3, 4, 2, 9], (), 100, 4, False),
        ([3, 4, 2, 9], (2,), 100, 3, True),
        ([2, 4, 2, 9], (2,), 100, 1, True),
        ([3, 4, 2, 9], (), 4, 4, True),
        ([3, 4, 2, 9], (), 2, 2, True),
        ([3, 4, 2, 9], (2,), 2, 2, True),
        ([3, 4, 2, 9], (9, 4), 100, 2, True),
        ([3, 4, -1, -1], (), 2, 2, True),
        ([3, 4, -1, -1], (9,), 3, 2, False),
    ],
)
def test_rows_are_cut_at_the_first_stop_id_then_at_what_remains(
    tokens: list[int], stops: tuple[int, ...], remaining: int, count: int, ended: bool
) -> None:
    here = view(1)
    ids = np.full((1, 8), -1)
    ids[0, : len(stops)] = stops
    here = here.replace(remaining=jnp.asarray([remaining]), sampling=here.sampling.replace(stop_ids=jnp.asarray(ids)))
    length = sum(token >= 0 for token in tokens)
    verdict = verify.Verdict(
        accept_len=jnp.asarray([length - 1]),
        path=jnp.zeros((1, 4), jnp.int32),
        tokens=jnp.asarray([tokens]),
        counts=jnp.asarray([length]),
        ended=jnp.asarray([False]),
    )
    cut = verify.cut(verdict, here)
    assert (int(cut.counts[0]), bool(cut.ended[0])) == (count, ended)
    assert cut.tokens[0].tolist() == [t if i < count else -1 for i, t in enumerate(tokens)]


def test_a_vocabulary_map_spreads_the_draft_law() -> None:
    rng = np.random.default_rng(0)
    ids = np.array([1, 3, 4])
    own = rng.dirichlet(np.ones(3), (2, 4)).astype(np.float32)
    wide = np.zeros((2, 4, VOCAB), np.float32)
    wide[..., ids] = own
    tokens = jnp.asarray([[0, 1, 3, 4], [0, 4, 4, 2]], jnp.int32)
    narrow = Draft(
        tokens=tokens,
        parents=jnp.broadcast_to(jnp.arange(-1, 3), (2, 4)),
        scores=jnp.zeros((2, 4)),
        valid=jnp.ones((2, 4), bool),
        probs=jnp.asarray(own),
        vocab_map=jnp.asarray(ids),
    )
    full = narrow.replace(probs=jnp.asarray(wide), vocab_map=None)
    p = jnp.asarray(random_law(rng, 2, 4), jnp.float32)
    in_map = jnp.asarray([[True, True, True], [True, True, False]])  # a token outside could not have been drawn
    a, b = (jnp.where(in_map, verify.accept_probs(p, d), 0) for d in (narrow, full))
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
    for best in range(4):
        at = jnp.full(2, best)
        np.testing.assert_allclose(verify.final_law(p, narrow, at), verify.final_law(p, full, at), atol=1e-6)


def test_a_mixed_batch_leaves_greedy_rows_alone() -> None:
    rng = np.random.default_rng(5)
    rows, nodes, vocab = 64, 4, 11
    logits = jnp.asarray(rng.normal(size=(rows, nodes, vocab)), jnp.float32)
    q = jax.nn.softmax(jnp.asarray(rng.normal(size=(rows, nodes, vocab)), jnp.float32), -1)
    tokens = jnp.asarray(rng.integers(0, vocab, (rows, nodes)), jnp.int32)
    greedy = np.arange(rows) % 2 == 0
    one_hot = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), vocab)
    draft = Draft(
        tokens=tokens,
        parents=jnp.broadcast_to(jnp.arange(-1, nodes - 1), (rows, nodes)),
        scores=jnp.zeros((rows, nodes)),
        valid=jnp.ones((rows, nodes), bool),
        probs=jnp.where(greedy[:, None, None], one_hot, q),
        vocab_map=None,
    )
    reach, tree = verify.ancestors(draft.parents), Tree.chain(nodes - 1)
    here = view(rows, accept="rejection")
    mixed = here.replace(
        sampling=here.sampling.replace(temperature=jnp.asarray(np.where(greedy, 0.0, 1.0), jnp.float32))
    )
    alone = verify.accept(logits, draft, reach, here.replace(all_greedy=True), tree)
    together = verify.accept(logits, draft, reach, mixed, tree)
    np.testing.assert_array_equal(np.asarray(alone.tokens)[greedy], np.asarray(together.tokens)[greedy])
    assert (np.asarray(alone.tokens)[~greedy] != np.asarray(together.tokens)[~greedy]).any()
