"""Compare the accept functions with exact enumeration, loops from the papers, and recordings of the authors' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Tree
from jspec.core.ancestors import ancestors, longest_accepted_path
from jspec.core.records import Draft
from jspec.draft.beside import joined, replaced
from jspec.verify import rejection
from jspec.verify.multi_candidate import multi_candidate, multi_candidate_accept
from jspec.verify.traversal import traversal_accept
from tests.reference import accept, enumeration
from tests.reference.enumeration import distance, emitted, joint, most_likely_draft, random_probs, sampled_drafts
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

ACCEPT = {
    "rejection": jax.jit(rejection.rejection_accept),
    "traversal": jax.jit(traversal_accept),
    "multi_candidate": jax.jit(multi_candidate_accept),
}

CHAIN = Tree.chain(3)
PAIRS = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
STAR = Tree.static([(0,), (1,), (2,)])
UNEVEN = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
SMALL = Tree.static([(0,), (1,), (0, 0), (1, 0)])
SIZES = {"chain": (CHAIN, 5), "pairs": (PAIRS, 3), "star": (STAR, 5), "uneven": (UNEVEN, 3), "small": (SMALL, 3)}
ALMOST_ONE = np.float32(1 - 2**-24)  # the largest uniform


def case(name: str, seed: int, **options: float) -> tuple[Tree, list[np.ndarray], list[np.ndarray]]:
    """Return a tree with random target and draft probabilities."""
    (tree, vocab), rng = SIZES[name], np.random.default_rng(seed)
    return tree, random_probs(rng, vocab, tree.depth), random_probs(rng, vocab, tree.depth - 1, **options)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_rule_for_drawn_siblings_emits_the_target_distribution(rule: str, name: str, seed: int) -> None:
    """With seed 0 the root's first child has draft probability 1, so its siblings are the smallest remaining ids."""
    tree, target, draft_probs = case(name, seed)
    if seed == 0:
        draft_probs[0] = np.eye(len(draft_probs[0]))[-1]
    drafts, all_at_once = sampled_drafts(tree, draft_probs), rule == "traversal"
    output = emitted(ACCEPT[rule], tree, drafts, target, draft_probs, all_at_once=all_at_once)
    np.testing.assert_allclose(output, joint(target), atol=1e-6)


def traversal_law(draft_probs: list[np.ndarray], target: list[np.ndarray], drafts: Any, **wrong: Any) -> np.ndarray:
    """Return the joint probabilities of the tokens that the loop of the paper emits, on the tree `SMALL`."""
    tree, rows = SMALL, []
    p, q = (enumeration.probs_at_nodes(tree, drafts[0], probs) for probs in (target, draft_probs))
    for tokens, weight, *probs in zip(*drafts, p, q, strict=True):
        trials = accept.traversal_trials(*probs, tokens, np.array(tree.parents), np.ones(tree.nodes, bool), **wrong)
        for node, accepted, residual in trials:
            rows.append((tokens, node, residual / max(residual.sum(), 1e-30), weight * accepted))
            weight *= 1 - accepted
    return enumeration.law(tree, target, enumeration.Outcomes(*map(np.array, zip(*rows, strict=True))))


WRONG: dict[str, dict[str, Any]] = {
    "residual not normalised": dict(new_weight=lambda mass, weight: mass),
    "weight kept after a rejection": dict(new_weight=lambda mass, weight: weight),
    "rejected siblings keep their draft probability": dict(is_removed=False),
    "from the root to the leaves": dict(from_root=True),
}


@pytest.mark.parametrize("name", WRONG)
def test_traversal_rule_read_wrongly_is_lossy(name: str) -> None:
    """Negative controls; read rightly, the same loop emits the target distribution."""
    distances = []
    for seed in range(4):
        _, target, draft_probs = case("small", seed, zeros=0)
        drafts = sampled_drafts(SMALL, draft_probs)
        np.testing.assert_allclose(traversal_law(draft_probs, target, drafts), joint(target), atol=1e-9)
        distances.append(distance(traversal_law(draft_probs, target, drafts, **WRONG[name]), joint(target)))
    assert max(distances) > 0.02


def test_traversal_rule_with_children_of_different_nodes_drawn_together_is_lossy() -> None:
    """Negative control: both nodes of the first level have the same child, while the rejection rule allows this."""
    tree, distances, draft_probs = SMALL, [], [np.full(3, 1 / 3), np.full((3, 3), 1 / 3)]
    for seed in range(4):
        target = random_probs(np.random.default_rng(seed), 3, 2)
        tokens, weight = sampled_drafts(tree, draft_probs)
        shared = tokens[:, 3] == tokens[:, 4]
        drafts = tokens[shared], 3 * weight[shared]
        assert drafts[1].sum() == pytest.approx(1)
        own = [
            emitted(ACCEPT[rule], tree, drafts, target, draft_probs, all_at_once=rule == "traversal")
            for rule in ("rejection", "traversal")
        ]
        np.testing.assert_allclose(own[0], joint(target), atol=1e-6)
        distances.append(distance(own[1], joint(target)))
    assert max(distances) > 0.01


@pytest.mark.parametrize("name", SIZES)
def test_multi_candidate_rule_with_any_fixed_draft_emits_the_target_distribution(name: str) -> None:
    """A rule that is lossless for each fixed draft is lossless for any way of drafting."""
    tree, target, draft_probs = case(name, 7, zeros=0)
    tokens, _ = sampled_drafts(tree, draft_probs)
    for row in range(0, len(tokens), 13):
        output = emitted(ACCEPT["multi_candidate"], tree, (tokens[row : row + 1], np.ones(1)), target, None)
        np.testing.assert_allclose(output, joint(target), atol=1e-6)


@pytest.mark.parametrize("cap", [0, 1, 2])
@pytest.mark.parametrize("name", ["multi_candidate", "rejection", "traversal"])
def test_accept_rules_with_a_capped_draft_emit_the_target_distribution(name: str, cap: int) -> None:
    """Nodes deeper than the cap are drawn too, and the rules must ignore them."""
    tree, target, draft_probs = case("pairs", 5)
    drafts = sampled_drafts(tree, draft_probs)
    output = emitted(ACCEPT[name], tree, drafts, target, draft_probs, all_at_once=name == "traversal", cap=cap)
    np.testing.assert_allclose(output, joint(target), atol=1e-6)


@pytest.mark.parametrize("name", ["chain", pytest.param("pairs", marks=pytest.mark.long), "uneven"])
def test_traversal_rule_on_random_trees_accepts_at_least_as_many_tokens_as_rejection(name: str) -> None:
    """On a chain this is a theorem (arXiv:2403.10444); in some cases the difference is large."""
    gains = []
    for seed in range(3, 9):
        tree, target, draft_probs = case(name, seed)
        given = tree, sampled_drafts(tree, draft_probs), target, draft_probs
        by_path = enumeration.outcomes(ACCEPT["traversal"], *given, all_at_once=True)
        by_token = enumeration.outcomes(ACCEPT["rejection"], *given)
        gains.append(enumeration.accepted_length(tree, by_path) - enumeration.accepted_length(tree, by_token))
    assert min(gains) > -1e-5
    assert max(gains) > 0.05


def test_traversal_rule_with_certain_draft_probabilities_accepts_as_the_multi_candidate_rule() -> None:
    """Each child is a point mass, in trees of random shapes. Both rules accept a node's path with equal probability."""
    draft, p, _ = random_draft(8, rows=300, nodes=9, vocab=5)
    parents, valid = np.asarray(draft.parents), np.asarray(draft.valid)
    first = np.zeros(
        p.shape, np.float32
    )  # all probability on the first child's token, so that siblings are point masses
    for row, node in np.argwhere(valid & (parents >= 0))[::-1]:
        first[row, parents[row, node]] = np.eye(5)[draft.tokens[row, node]]
    given = on_device(p, jnp.float32), draft.replace(probs=on_device(first)), ancestors(np.asarray(draft.parents))
    half = on_device(np.full(parents.shape, 0.5))
    mine, other = (np.asarray(ACCEPT[name](*given, half).accept_probs) for name in ("traversal", "multi_candidate"))
    for row, own in enumerate(valid):
        tree = parents[row], np.asarray(draft.tokens[row]), own
        np.testing.assert_allclose(leaf_to_root(mine[row], *tree), root_to_leaf(other[row], *tree), atol=1e-5)


def leaf_to_root(probs: np.ndarray, parents: np.ndarray, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return the probability that each node is the last accepted one, from those of trials in leaf-to-root order."""
    found, left = np.zeros(len(probs)), 1.0

    def visit(node: int) -> None:
        nonlocal left
        for child in accept.children(parents, valid, node):
            visit(child)
        own = 1.0 if node == 0 else min(probs[node], 1.0)
        found[node], left = left * own, left * (1 - own)

    visit(0)
    return found


def root_to_leaf(probs: np.ndarray, parents: np.ndarray, tokens: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Return the probability that each node is the last accepted one, from those of trials from the root down."""
    found = np.zeros(len(probs))

    def visit(node: int, left: float) -> None:
        for child in accept.children(parents, valid, node):
            visit(child, left * probs[child])
            left *= 1 - probs[child]
        found[node] = left

    visit(0, 1.0)
    return found


def test_rejection_rule_with_most_likely_instead_of_drawn_siblings_is_lossy() -> None:
    """Negative control: a deterministic top-k tree, with its softmax as the draft probabilities."""
    distances = []
    for seed in range(6):
        tree, target, draft_probs = case("pairs", seed)
        output = emitted(ACCEPT["rejection"], tree, most_likely_draft(tree, draft_probs), target, draft_probs)
        distances.append(distance(output, joint(target)))
    assert max(distances) > 0.25


def sorted_by(probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return drafts of a root and its children, the children sorted by descending draft probability."""
    order = np.argsort(-probs[tokens[:, 1:]], axis=1, kind="stable")
    return np.concatenate([tokens[:, :1], np.take_along_axis(tokens[:, 1:], order, axis=1)], axis=1)


def test_rejection_rule_with_siblings_sorted_by_probability_is_lossy() -> None:
    """Negative control: the siblings are no longer in the order in which they were drawn."""
    tree, target, draft_probs = case("star", 0)
    tokens, weight = sampled_drafts(tree, draft_probs)
    drafts = sorted_by(draft_probs[0], tokens), weight
    assert distance(emitted(ACCEPT["rejection"], tree, drafts, target, draft_probs), joint(target)) > 0.05


def test_rejection_rule_without_the_least_likely_sibling_is_lossy() -> None:
    """Negative control: only the two most likely of three drawn siblings are kept, in the order of drawing."""
    tree, target, draft_probs = case("star", 0)
    tokens, weight = sampled_drafts(tree, draft_probs)
    worst = np.argmin(draft_probs[0][tokens[:, 1:]], axis=1) + 1
    kept = tokens[np.arange(4) != worst[:, None]].reshape(-1, 3)
    output = emitted(ACCEPT["rejection"], Tree.static([(0,), (1,)]), (kept, weight), target, draft_probs)
    assert distance(output, joint(target)) > 0.05


def test_accept_rule_chosen_by_the_drafted_token_is_lossy() -> None:
    """Negative control: whether the first sibling is more likely in the draft selects multi-candidate or rejection."""
    tree, target, draft_probs = case("star", 0)
    tokens, weight = sampled_drafts(tree, draft_probs)
    is_overrated = target[0][tokens[:, 1]] < draft_probs[0][tokens[:, 1]]
    output = emitted(ACCEPT["rejection"], tree, (tokens, weight * ~is_overrated), target, draft_probs)
    output = output + emitted(ACCEPT["multi_candidate"], tree, (tokens, weight * is_overrated), target, None)
    assert distance(output, joint(target)) > 0.02


def test_rejection_rule_with_rejected_tokens_left_in_draft_probs_is_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a rejected token keeps its draft probability."""
    tree, target, draft_probs = case("star", 0)
    right = rejection.try_token
    monkeypatch.setattr(rejection, "try_token", lambda p, q, token: right(p, q, token)._replace(residual_q=q))
    output = emitted(
        jax.jit(lambda *given: rejection.rejection_accept(*given)),
        tree,
        sampled_drafts(tree, draft_probs),
        target,
        draft_probs,
    )
    assert distance(output, joint(target)) > 0.1


def random_draft(seed: int, *, rows: int, nodes: int, vocab: int) -> tuple[Draft, np.ndarray, np.ndarray]:
    """Return random trees with padding and invalid nodes, and target and draft probabilities at all nodes."""
    rng = np.random.default_rng(seed)
    parents, tokens, valid = np.full((rows, nodes), -1), np.zeros((rows, nodes), int), np.ones((rows, nodes), bool)
    for row in range(rows):
        for node in range(1, nodes - rng.integers(0, 4)):
            parent = rng.integers(max(0, node - 3), node)
            taken = tokens[row, parents[row] == parent]
            if len(taken) < vocab - 1:
                parents[row, node] = parent
                tokens[row, node] = rng.choice(np.setdiff1d(np.arange(vocab), taken))
        valid[row] = (parents[row] >= 0) | (np.arange(nodes) == 0)
        for node in range(1, nodes):
            valid[row, node] &= valid[row, parents[row, node]] & (rng.random() < 0.9)
    p, q = rng.dirichlet(np.ones(vocab), (2, rows, nodes))
    record = Draft(
        tokens=on_device(tokens, jnp.int32),
        parents=on_device(parents, jnp.int32),
        scores=on_device(np.zeros((rows, nodes))),
        valid=on_device(valid),
        probs=on_device(q, jnp.float32),
        vocab_map=None,
    )
    return record, p, q


@pytest.mark.parametrize("name", ["multi_candidate", "rejection", "traversal", "block"])
def test_accept_rules_on_random_trees_equal_plain_python_loops(name: str) -> None:
    """The test compares the path and the probabilities of the token after it; "block" is traversal of a chain."""
    draft, p, q = random_draft(3, rows=400, nodes=10, vocab=6)
    if name == "block":
        chain = on_device(np.broadcast_to(np.arange(-1, 9), draft.parents.shape))
        draft = draft.replace(parents=chain, valid=on_device(np.logical_and.accumulate(draft.valid, axis=1)))
    ancestor_mask = ancestors(np.asarray(draft.parents))
    u = np.random.default_rng(4).random(draft.tokens.shape)
    rule = ACCEPT["traversal" if name == "block" else name]
    result = rule(on_device(p, jnp.float32), draft, ancestor_mask, on_device(u, jnp.float32))
    tokens, parents, valid = (np.asarray(x) for x in (draft.tokens, draft.parents, draft.valid))
    last_node, residual_probs = np.asarray(result.last_node), np.asarray(result.residual_probs)
    lengths = set()
    for row in range(len(u)):
        here = p[row], q[row], tokens[row], parents[row], valid[row], u[row]
        if name == "block":
            path, residual = accept.block_accept(p[row], q[row], tokens[row], int(valid[row].sum()) - 1, u[row])
        elif name == "traversal":
            trials = accept.traversal_trials(*here[:-1])
            last, _, residual = next(trial for trial in trials if trial[0] == 0 or u[row, trial[0]] < trial[1])
            path = np.flatnonzero(ancestor_mask[row, last]).tolist()
        elif name == "multi_candidate":
            path, residual = accept.multi_candidate_accept(here[0], *here[2:])
        else:
            path, residual = accept.rejection_accept(*here)
        assert np.flatnonzero(ancestor_mask[row, last_node[row]]).tolist() == path
        np.testing.assert_allclose(residual_probs[row], residual, atol=1e-5)
        lengths.add(len(path))
    assert len(lengths) > 3, "the cases must reach different depths"


@pytest.mark.parametrize("sharpness", [1, 10, 40])
def test_traversal_rule_with_peaked_probabilities_equals_the_loop_in_float64(sharpness: float) -> None:
    """As at a low temperature: most draft probabilities are tiny, and some are 0, so that drawn tokens have none."""
    rng, rows, vocab = np.random.default_rng(1), 100, 40
    logits = rng.normal(size=(rows, UNEVEN.nodes, vocab))
    q, p = (softmax(sharpness * x).astype(np.float32) for x in (logits, logits + 0.3 * rng.normal(size=logits.shape)))
    q[q < np.finfo(np.float32).tiny] = 0  # XLA may do so with denormal numbers
    with np.errstate(divide="ignore"):
        drawn = np.argsort(-np.log(q) - rng.gumbel(size=q.shape), axis=-1)
    tokens = np.zeros(q.shape[:2], int)
    tokens[:, 1:] = drawn[:, np.array(UNEVEN.parents[1:]), np.array(UNEVEN.ranks[1:])]
    draft = enumeration.draft_of(UNEVEN, tokens, q)
    given = on_device(p), draft, ancestors(np.asarray(draft.parents)), on_device(np.full(tokens.shape, 0.5))
    found = np.asarray(ACCEPT["traversal"](*given).accept_probs)
    shape, p = (np.array(UNEVEN.parents), np.ones(UNEVEN.nodes, bool)), p.astype(np.float64)
    p /= p.sum(axis=-1, keepdims=True)
    for row, own in enumerate(found):
        with np.errstate(all="ignore"):  # of trials after a node that is almost certainly accepted
            *trials, _ = accept.traversal_trials(p[row], q[row], tokens[row], *shape)
        reached = 1.0
        for node, accepted, _ in trials:
            if reached < 1e-6:
                break
            assert abs(own[node] - accepted) * reached < 1e-4
            reached *= 1 - accepted


def test_accept_rules_with_vocabulary_map_equal_those_with_full_draft_probs() -> None:
    """The draft vocabulary is tokens 1, 3 and 4; the full draft probabilities of other tokens are 0."""
    rng, ids = np.random.default_rng(0), np.array([1, 3, 4])
    own = rng.dirichlet(np.ones(3), (64, 4)).astype(np.float32)
    wide = np.zeros((64, 4, 5), np.float32)
    wide[..., ids] = own
    tokens = ids[rng.integers(0, 3, (64, 4))]
    p, u = on_device(rng.dirichlet(np.ones(5), (64, 4)), jnp.float32), on_device(rng.random((64, 4)), jnp.float32)
    full = enumeration.draft_of(CHAIN, tokens, wide)
    narrow = full.replace(probs=on_device(own), vocab_map=on_device(ids))
    for name in ("rejection", "traversal"):
        one, two = (ACCEPT[name](p, draft, ancestors(np.asarray(draft.parents)), u) for draft in (full, narrow))
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("join", [joined, replaced])
@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_accept_rules_take_tokens_of_a_look_up_outside_the_vocabulary_of_the_draft(name: str, join: Any) -> None:
    """As above; the look-up's chains have any of the five tokens."""
    rng, ids = np.random.default_rng(0), np.array([1, 3, 4])
    own = rng.dirichlet(np.ones(3), (64, 4)).astype(np.float32)
    wide = np.zeros((64, 4, 5), np.float32)
    wide[..., ids] = own
    full = enumeration.draft_of(CHAIN, ids[rng.integers(0, 3, (64, 4))], wide)
    narrow = full.replace(probs=on_device(own), vocab_map=on_device(ids))
    chain = enumeration.draft_of(CHAIN, rng.integers(0, 5, (64, 4)), None)
    is_used = on_device(rng.random(64) < 0.8)
    one, two = (join(draft, chain, is_used) for draft in (full, narrow))
    nodes = one.tokens.shape[1]
    p = on_device(rng.dirichlet(np.ones(5), (64, nodes)), jnp.float32)
    u = on_device(rng.random((64, nodes)), jnp.float32)
    results = [ACCEPT[name](p, draft, ancestors(np.asarray(draft.parents)), u) for draft in (one, two)]
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_accept_rules_with_draft_probs_equal_to_target_probs_accept_all_tokens(name: str) -> None:
    """No residual probability is left; even the largest uniform number must lead to no NaN."""
    tree, target, _ = case("chain", 2)
    tokens, weight = sampled_drafts(tree, target[:-1])
    tokens = tokens[weight > 0]
    p = enumeration.probs_at_nodes(tree, tokens, target)
    draft = enumeration.draft_of(tree, tokens, p)
    u = on_device(np.full(tokens.shape, ALMOST_ONE))
    result = ACCEPT[name](on_device(p, jnp.float32), draft, ancestors(np.asarray(draft.parents)), u)
    np.testing.assert_array_equal(result.last_node, 3)
    np.testing.assert_allclose(result.residual_probs, p[:, 3], atol=1e-6)


@pytest.mark.parametrize("draw", [0, ALMOST_ONE])
@pytest.mark.parametrize("name", ["multi_candidate", "rejection", "traversal"])
def test_accept_rules_with_a_one_hot_target_accept_exactly_the_certain_token(name: str, draw: float) -> None:
    """A uniform number of 0 must not accept probability 0; the largest one must not reject probability 1."""
    tree, rng = PAIRS, np.random.default_rng(0)
    tokens, _ = sampled_drafts(tree, random_probs(rng, 3, tree.depth - 1, zeros=0))
    p = np.zeros((*tokens.shape, 3), np.float32)
    p[..., 2] = 1
    q = np.full_like(p, 1 / 3)
    draft = enumeration.draft_of(tree, tokens, q)
    u = on_device(np.full(tokens.shape, draw, jnp.float32))
    result = ACCEPT[name](on_device(p), draft, ancestors(np.asarray(draft.parents)), u)
    _, deepest = longest_accepted_path(on_device(tokens == 2), draft, ancestors(np.asarray(draft.parents)))
    np.testing.assert_array_equal(result.last_node, deepest)
    np.testing.assert_allclose(result.residual_probs, p[:, 0], atol=1e-6)


def test_multi_candidate_rule_with_all_target_mass_on_children_accepts_one() -> None:
    """The remaining mass is summed over children, so no rounding error can reject the last one."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=(500, 3)).astype(np.float32) ** 6
    p = np.zeros((500, 4, 5), np.float32)
    p[..., 1:4] = (weights / weights.sum(1, keepdims=True))[:, None]
    draft = enumeration.draft_of(STAR, np.broadcast_to(np.arange(4), (500, 4)), None)
    u = on_device(np.full((500, 4), ALMOST_ONE))
    result = ACCEPT["multi_candidate"](on_device(p), draft, ancestors(np.asarray(draft.parents)), u)
    assert (np.asarray(result.last_node) > 0).all()
    assert np.isfinite(np.asarray(result.residual_probs)).all()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def recorded(golden: Path) -> list[dict[str, np.ndarray]]:
    with np.load(golden / "sampling_T1_d3_k4_t16.npz") as arrays:
        names = ("node_logits", "tree_tokens", "parent", "draws", "retrieve", "best", "accept_len", "sample_p")
        return [dict(zip(names, row, strict=True)) for row in zip(*(arrays[name] for name in names), strict=True)]


def test_multi_candidate_rule_with_recorded_draws_has_the_recorded_results(
    recorded: list[dict[str, np.ndarray]],
) -> None:
    for r in recorded:
        result = multi_candidate(softmax(r["node_logits"]), r["tree_tokens"], r["parent"], r["draws"])
        assert result.accept_len == r["accept_len"]
        assert result.path.tolist() == r["retrieve"][r["best"]][: result.accept_len + 1].tolist()
        np.testing.assert_allclose(result.bonus_probs, r["sample_p"], atol=1e-5)


def test_multi_candidate_rule_with_shifted_draws_has_other_results(
    recorded: list[dict[str, np.ndarray]],
) -> None:
    """Negative control: the recorded results depend on which child uses which draw."""
    same = 0
    for r in recorded:
        draws = np.append(np.nan_to_num(r["draws"][1:], nan=0.5), [0.5] * 9)
        result = multi_candidate(softmax(r["node_logits"]), r["tree_tokens"], r["parent"], draws)
        same += result.accept_len == r["accept_len"] and np.allclose(result.bonus_probs, r["sample_p"], atol=1e-5)
    assert same < 0.9 * len(recorded)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(uniforms=[0.9]), "uniforms: expected one for each of 2 tried children, got"),
        (dict(uniforms=[0.9, np.nan]), "uniforms: expected one for each of 2 tried children"),
        (dict(tokens=[0, 1, 1]), "tokens: expected siblings to differ"),
        (dict(tokens=[0, 1, 4]), "tokens: expected ids from 0 to 3"),
        (dict(tokens=[0, 1]), r"expected p \[nodes, vocab\], tokens \[nodes\] and parents \[nodes\]"),
        (dict(parents=[-1, 0, 2]), r"parents: expected -1 for the root, then -1 <= parents\[i\] < i"),
        (dict(parents=[0, 0, 0]), "parents: expected -1 for the root"),
        (dict(p=np.ones((0, 4)), tokens=[], parents=[]), "expected p"),
    ],
)
def test_multi_candidate_rule_with_invalid_arguments_raises(changed: dict, message: str) -> None:
    given = dict(p=np.full((3, 4), 0.25), tokens=[0, 1, 2], parents=[-1, 0, 0], uniforms=[0.9, 0.9])
    assert multi_candidate(**given).accept_len == 0
    with pytest.raises(ValueError, match=message):
        multi_candidate(**given | changed)
