"""The sampling rules: exact enumeration of what they emit, loops from the papers, recordings of the authors' code."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Tree
from jspec.core.ancestors import ancestors
from jspec.core.records import Draft
from jspec.verify import rejection, tree_walk
from jspec.verify.block import block_verification
from jspec.verify.multi_candidate import multi_candidate, multi_candidate_accept
from tests.reference import accept, enumeration
from tests.reference.enumeration import distance, emitted, joint, likeliest, random_laws

pytestmark = pytest.mark.once

drawn, block, point = (
    jax.jit(rejection.without_replacement),
    jax.jit(block_verification),
    jax.jit(multi_candidate_accept),
)

CHAIN = Tree.chain(3)
PAIRS = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
STAR = Tree.static([(0,), (1,), (2,)])
SIZES = {"chain": (CHAIN, 5), "pairs": (PAIRS, 3), "star": (STAR, 5)}
ALMOST_ONE = np.float32(1 - 2**-24)  # the largest uniform


def case(name: str, seed: int, **options: float) -> tuple[Tree, list[np.ndarray], list[np.ndarray]]:
    """A tree with random target and draft laws."""
    (tree, vocab), rng = SIZES[name], np.random.default_rng(seed)
    return tree, random_laws(rng, vocab, tree.depth), random_laws(rng, vocab, tree.depth - 1, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SIZES)
def test_drawn_siblings_give_the_targets_joint_law(name: str, seed: int) -> None:
    """The root's first child is the only one to be drawn in one of the cases: the next ones follow without choice."""
    tree, target, drafted = case(name, seed)
    if seed == 0:
        drafted[0] = np.eye(len(drafted[0]))[-1]
    law = emitted(drawn, tree, enumeration.drawn(tree, drafted), target, drafted)
    np.testing.assert_allclose(law, joint(target), atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_block_verification_gives_the_targets_joint_law(seed: int) -> None:
    tree, target, drafted = case("chain", seed)
    law = emitted(block, tree, enumeration.drawn(tree, drafted), target, drafted, all_at_once=True)
    np.testing.assert_allclose(law, joint(target), atol=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_point_masses_give_the_targets_joint_law_for_every_single_draft(name: str) -> None:
    """Lossless for each draft alone, so for any way to come by it."""
    tree, target, drafted = case(name, 7, zeros=0)
    tokens, _ = enumeration.drawn(tree, drafted)
    for row in range(0, len(tokens), 13):
        law = emitted(point, tree, (tokens[row : row + 1], np.ones(1)), target, None)
        np.testing.assert_allclose(law, joint(target), atol=1e-6)


@pytest.mark.parametrize("cap", [0, 1, 2])
@pytest.mark.parametrize("rule", [point, drawn, block])
def test_a_capped_draft_gives_the_targets_joint_law(rule, cap: int) -> None:
    """What is cut off was drawn like the rest: the rules must not look at it."""
    tree, target, drafted = case("chain" if rule is block else "pairs", 5)
    law = emitted(rule, tree, enumeration.drawn(tree, drafted), target, drafted, all_at_once=rule is block, cap=cap)
    np.testing.assert_allclose(law, joint(target), atol=1e-6)


def test_block_verification_accepts_more_than_token_by_token() -> None:
    """Never less on average, by its optimality; here clearly more."""
    gains = []
    for seed in range(6):
        tree, target, drafted = case("chain", seed)
        drafts, weight = enumeration.drawn(tree, drafted)
        laws = (enumeration.along(tree, drafts, laws) for laws in (target, drafted))
        tokens, weight, p, q = (np.repeat(x, 300, axis=0) for x in (drafts, weight, *laws))
        draft = enumeration.record(tree, tokens, q)
        u = jnp.asarray(np.random.default_rng(seed).random(tokens.shape), jnp.float32)
        given = jnp.asarray(p, jnp.float32), draft, ancestors(draft.parents), u
        by_block, by_token = (weight @ np.asarray(rule(*given).best) / 300 for rule in (block, drawn))
        gains.append(by_block - by_token)
    assert min(gains) > -0.01
    assert max(gains) > 0.03


def test_taking_the_likeliest_for_drawn_is_caught() -> None:
    """Negative control: a deterministic top-k tree with its softmax for q."""
    distances = []
    for seed in range(6):
        tree, target, drafted = case("pairs", seed)
        law = emitted(drawn, tree, likeliest(tree, drafted), target, drafted)
        distances.append(distance(law, joint(target)))
    assert max(distances) > 0.25


def sorted_by(law: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Drafts of a star with their siblings by descending probability."""
    order = np.argsort(-law[tokens[:, 1:]], axis=1, kind="stable")
    return np.concatenate([tokens[:, :1], np.take_along_axis(tokens[:, 1:], order, axis=1)], axis=1)


def test_sorting_drawn_siblings_is_caught() -> None:
    """Negative control."""
    tree, target, drafted = case("star", 0)
    tokens, weight = enumeration.drawn(tree, drafted)
    drafts = sorted_by(drafted[0], tokens), weight
    assert distance(emitted(drawn, tree, drafts, target, drafted), joint(target)) > 0.05


def test_pruning_drawn_siblings_by_score_is_caught() -> None:
    """Negative control: of three that were drawn the best two, in the order in which they were drawn."""
    tree, target, drafted = case("star", 0)
    tokens, weight = enumeration.drawn(tree, drafted)
    worst = np.argmin(drafted[0][tokens[:, 1:]], axis=1) + 1
    kept = tokens[np.arange(4) != worst[:, None]].reshape(-1, 3)
    law = emitted(drawn, Tree.static([(0,), (1,)]), (kept, weight), target, drafted)
    assert distance(law, joint(target)) > 0.05


def test_choosing_between_lossless_rules_by_the_draws_is_caught() -> None:
    """Negative control: the point rule where q thinks more of the first sibling than p does, else the drawn one."""
    tree, target, drafted = case("star", 0)
    tokens, weight = enumeration.drawn(tree, drafted)
    dear = target[0][tokens[:, 1]] < drafted[0][tokens[:, 1]]
    law = emitted(drawn, tree, (tokens, weight * ~dear), target, drafted)
    law = law + emitted(point, tree, (tokens, weight * dear), target, None)
    assert distance(law, joint(target)) > 0.02


def test_siblings_tried_as_if_drawn_with_replacement_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the rejected token keeps its mass in q."""
    tree, target, drafted = case("star", 0)
    right = rejection.try_token
    monkeypatch.setattr(rejection, "try_token", lambda p, q, token: right(p, q, token)._replace(q_left=q))
    law = emitted(rejection.without_replacement, tree, enumeration.drawn(tree, drafted), target, drafted)
    assert distance(law, joint(target)) > 0.1


def random_draft(seed: int, *, rows: int, nodes: int, vocab: int) -> tuple[Draft, np.ndarray, np.ndarray]:
    """Random trees of distinct siblings with padding at the end and nodes cut off; laws p and q of all nodes."""
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
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        scores=jnp.zeros((rows, nodes)),
        valid=jnp.asarray(valid),
        probs=jnp.asarray(q, jnp.float32),
        vocab_map=None,
    )
    return record, p, q


@pytest.mark.parametrize("name", ["multi_candidate_accept", "without_replacement", "block"])
def test_rulings_are_those_of_a_plain_loop(name: str) -> None:
    """Random trees, uniforms and laws; compared are the path and the law behind it."""
    draft, p, q = random_draft(3, rows=400, nodes=10, vocab=6)
    if name == "block":
        chain = jnp.broadcast_to(jnp.arange(-1, 9, dtype=jnp.int32), draft.parents.shape)
        draft = draft.replace(parents=chain, valid=jnp.cumprod(draft.valid, axis=1).astype(bool))
    ancestor_mask = ancestors(draft.parents)
    u = np.random.default_rng(4).random(draft.tokens.shape)
    rule = {"multi_candidate_accept": point, "without_replacement": drawn, "block": block}[name]
    ruling = rule(jnp.asarray(p, jnp.float32), draft, ancestor_mask, jnp.asarray(u, jnp.float32))
    tokens, parents, valid = (np.asarray(x) for x in (draft.tokens, draft.parents, draft.valid))
    lengths = set()
    for row in range(len(u)):
        here = p[row], q[row], tokens[row], parents[row], valid[row], u[row]
        if name == "block":
            path, law = accept.block(p[row], q[row], tokens[row], int(valid[row].sum()) - 1, u[row])
        elif name == "multi_candidate_accept":
            path, law = accept.multi_candidate_accept(here[0], *here[2:])
        else:
            path, law = accept.without_replacement(*here)
        assert np.flatnonzero(ancestor_mask[row, ruling.best[row]]).tolist() == path
        np.testing.assert_allclose(ruling.last_law[row], law, atol=1e-5)
        lengths.add(len(path))
    assert len(lengths) > 3, "the cases must reach different depths"


def test_a_vocabulary_map_changes_nothing_but_the_ids() -> None:
    """The draft speaks tokens 1, 3 and 4 only; on the wide vocabulary the others have probability 0."""
    rng, ids = np.random.default_rng(0), np.array([1, 3, 4])
    own = rng.dirichlet(np.ones(3), (64, 4)).astype(np.float32)
    wide = np.zeros((64, 4, 5), np.float32)
    wide[..., ids] = own
    tokens = ids[rng.integers(0, 3, (64, 4))]
    p, u = jnp.asarray(rng.dirichlet(np.ones(5), (64, 4)), jnp.float32), jnp.asarray(rng.random((64, 4)), jnp.float32)
    full = enumeration.record(CHAIN, tokens, wide)
    narrow = full.replace(probs=jnp.asarray(own), vocab_map=jnp.asarray(ids))
    for rule in (drawn, block):
        one, two = (rule(p, draft, ancestors(draft.parents), u) for draft in (full, narrow))
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("rule", [drawn, block])
def test_a_draft_that_equals_the_target_is_accepted_whole(rule) -> None:
    """No residual mass is left: the tried token stands, and nothing becomes NaN, also with the largest uniform."""
    tree, target, _ = case("chain", 2)
    tokens, _ = enumeration.drawn(tree, target[:-1])
    p = enumeration.along(tree, tokens, target)
    draft = enumeration.record(tree, tokens, p)
    u = jnp.full(tokens.shape, ALMOST_ONE)
    ruling = rule(jnp.asarray(p, jnp.float32), draft, ancestors(draft.parents), u)
    np.testing.assert_array_equal(ruling.best, 3)
    np.testing.assert_allclose(ruling.last_law, p[:, 3], atol=1e-6)


@pytest.mark.parametrize("draw", [0, ALMOST_ONE])
@pytest.mark.parametrize("rule", [point, drawn, block])
def test_a_certain_target_is_followed_whatever_the_draws(rule, draw: float) -> None:
    """A uniform of exactly 0 must not accept a token of probability 0, the largest one must not refuse the certain."""
    tree = CHAIN if rule is block else PAIRS
    rng = np.random.default_rng(0)
    tokens, _ = enumeration.drawn(tree, random_laws(rng, 3, tree.depth - 1, zeros=0))
    p = np.zeros((*tokens.shape, 3), np.float32)
    p[..., 2] = 1
    q = np.full_like(p, 1 / 3)
    draft = enumeration.record(tree, tokens, q)
    ruling = rule(jnp.asarray(p), draft, ancestors(draft.parents), jnp.full(tokens.shape, draw, jnp.float32))
    _, best = tree_walk.longest_accepted_path(jnp.asarray(tokens == 2), draft, ancestors(draft.parents))
    np.testing.assert_array_equal(ruling.best, best)
    np.testing.assert_allclose(ruling.last_law, p[:, 0], atol=1e-6)


def test_children_that_hold_all_mass_are_never_all_rejected() -> None:
    """The mass left behind a child is added up, not subtracted from 1, so the last one stands if no other does."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=(500, 3)).astype(np.float32) ** 6
    p = np.zeros((500, 4, 5), np.float32)
    p[..., 1:4] = (weights / weights.sum(1, keepdims=True))[:, None]
    draft = enumeration.record(STAR, np.broadcast_to(np.arange(4), (500, 4)), None)
    ruling = point(jnp.asarray(p), draft, ancestors(draft.parents), jnp.full((500, 4), ALMOST_ONE))
    assert (np.asarray(ruling.best) > 0).all()
    assert np.isfinite(np.asarray(ruling.last_law)).all()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def recorded(golden: Path) -> list[dict[str, np.ndarray]]:
    with np.load(golden / "sampling_T1_d3_k4_t16.npz") as arrays:
        names = ("node_logits", "tree_tokens", "parent", "draws", "retrieve", "best", "accept_len", "sample_p")
        return [dict(zip(names, row, strict=True)) for row in zip(*(arrays[name] for name in names), strict=True)]


def test_multi_candidate_rules_as_the_authors_recordings(recorded: list[dict[str, np.ndarray]]) -> None:
    for r in recorded:
        ruling = multi_candidate(softmax(r["node_logits"]), r["tree_tokens"], r["parent"], r["draws"])
        assert ruling.accept_len == r["accept_len"]
        assert ruling.path.tolist() == r["retrieve"][r["best"]][: ruling.accept_len + 1].tolist()
        np.testing.assert_allclose(ruling.bonus_probs, r["sample_p"], atol=1e-5)


def test_draws_taken_one_too_late_are_caught(recorded: list[dict[str, np.ndarray]]) -> None:
    """Negative control: the recordings tell which child had which draw."""
    same = 0
    for r in recorded:
        draws = np.append(np.nan_to_num(r["draws"][1:], nan=0.5), [0.5] * 9)
        ruling = multi_candidate(softmax(r["node_logits"]), r["tree_tokens"], r["parent"], draws)
        same += ruling.accept_len == r["accept_len"] and np.allclose(ruling.bonus_probs, r["sample_p"], atol=1e-5)
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
def test_multi_candidate_refuses_what_is_no_tree(changed: dict, message: str) -> None:
    given = dict(p=np.full((3, 4), 0.25), tokens=[0, 1, 2], parents=[-1, 0, 0], uniforms=[0.9, 0.9])
    assert multi_candidate(**given).accept_len == 0
    with pytest.raises(ValueError, match=message):
        multi_candidate(**given | changed)
