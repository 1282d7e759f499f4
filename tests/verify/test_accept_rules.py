"""Compare the accept functions with exact enumeration, loops from the papers, and recordings of the authors' code."""

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
from jspec.verify.block import block_accept
from jspec.verify.multi_candidate import multi_candidate, multi_candidate_accept
from tests.reference import accept, enumeration
from tests.reference.enumeration import distance, emitted, joint, most_likely_draft, random_probs, sampled_drafts

pytestmark = pytest.mark.once

ACCEPT = {
    "rejection": jax.jit(rejection.rejection_accept),
    "block": jax.jit(block_accept),
    "multi_candidate": jax.jit(multi_candidate_accept),
}

CHAIN = Tree.chain(3)
PAIRS = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
STAR = Tree.static([(0,), (1,), (2,)])
SIZES = {"chain": (CHAIN, 5), "pairs": (PAIRS, 3), "star": (STAR, 5)}
ALMOST_ONE = np.float32(1 - 2**-24)  # the largest uniform


def case(name: str, seed: int, **options: float) -> tuple[Tree, list[np.ndarray], list[np.ndarray]]:
    """Return a tree with random target and draft probabilities."""
    (tree, vocab), rng = SIZES[name], np.random.default_rng(seed)
    return tree, random_probs(rng, vocab, tree.depth), random_probs(rng, vocab, tree.depth - 1, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SIZES)
def test_rejection_rule_with_drawn_siblings_emits_the_target_distribution(name: str, seed: int) -> None:
    """With seed 0 the root's first child has draft probability 1, so its siblings are the smallest remaining ids."""
    tree, target, draft_probs = case(name, seed)
    if seed == 0:
        draft_probs[0] = np.eye(len(draft_probs[0]))[-1]
    output = emitted(ACCEPT["rejection"], tree, sampled_drafts(tree, draft_probs), target, draft_probs)
    np.testing.assert_allclose(output, joint(target), atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_block_rule_with_a_drawn_chain_emits_the_target_distribution(seed: int) -> None:
    tree, target, draft_probs = case("chain", seed)
    drafts = sampled_drafts(tree, draft_probs)
    output = emitted(ACCEPT["block"], tree, drafts, target, draft_probs, all_at_once=True)
    np.testing.assert_allclose(output, joint(target), atol=1e-6)


@pytest.mark.parametrize("name", SIZES)
def test_multi_candidate_rule_with_any_fixed_draft_emits_the_target_distribution(name: str) -> None:
    """A rule that is lossless for each fixed draft is lossless for any way of drafting."""
    tree, target, draft_probs = case(name, 7, zeros=0)
    tokens, _ = sampled_drafts(tree, draft_probs)
    for row in range(0, len(tokens), 13):
        output = emitted(ACCEPT["multi_candidate"], tree, (tokens[row : row + 1], np.ones(1)), target, None)
        np.testing.assert_allclose(output, joint(target), atol=1e-6)


@pytest.mark.parametrize("cap", [0, 1, 2])
@pytest.mark.parametrize("name", ["multi_candidate", "rejection", "block"])
def test_accept_rules_with_a_capped_draft_emit_the_target_distribution(name: str, cap: int) -> None:
    """Nodes deeper than the cap are drawn too, and the rules must ignore them."""
    tree, target, draft_probs = case("chain" if name == "block" else "pairs", 5)
    drafts = sampled_drafts(tree, draft_probs)
    output = emitted(ACCEPT[name], tree, drafts, target, draft_probs, all_at_once=name == "block", cap=cap)
    np.testing.assert_allclose(output, joint(target), atol=1e-6)


def test_block_rule_on_random_chains_accepts_at_least_as_many_tokens_as_rejection() -> None:
    """The paper's optimality theorem is about the mean number of tokens; in some cases the difference is large."""
    gains = []
    for seed in range(6):
        tree, target, draft_probs = case("chain", seed)
        drafts, weight = sampled_drafts(tree, draft_probs)
        at_nodes = (enumeration.probs_at_nodes(tree, drafts, probs) for probs in (target, draft_probs))
        tokens, weight, p, q = (np.repeat(x, 300, axis=0) for x in (drafts, weight, *at_nodes))
        draft = enumeration.draft_of(tree, tokens, q)
        u = jnp.asarray(np.random.default_rng(seed).random(tokens.shape), jnp.float32)
        given = jnp.asarray(p, jnp.float32), draft, ancestors(draft.parents), u
        by_block, by_token = (
            weight @ np.asarray(ACCEPT[name](*given).last_node) / 300 for name in ("block", "rejection")
        )
        gains.append(by_block - by_token)
    assert min(gains) > -0.01
    assert max(gains) > 0.03


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
    output = emitted(rejection.rejection_accept, tree, sampled_drafts(tree, draft_probs), target, draft_probs)
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
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.asarray(parents, jnp.int32),
        scores=jnp.zeros((rows, nodes)),
        valid=jnp.asarray(valid),
        probs=jnp.asarray(q, jnp.float32),
        vocab_map=None,
    )
    return record, p, q


@pytest.mark.parametrize("name", ["multi_candidate", "rejection", "block"])
def test_accept_rules_on_random_trees_equal_plain_python_loops(name: str) -> None:
    """The test compares the accepted path and the probabilities of the token after it."""
    draft, p, q = random_draft(3, rows=400, nodes=10, vocab=6)
    if name == "block":
        chain = jnp.broadcast_to(jnp.arange(-1, 9, dtype=jnp.int32), draft.parents.shape)
        draft = draft.replace(parents=chain, valid=jnp.cumprod(draft.valid, axis=1).astype(bool))
    ancestor_mask = ancestors(draft.parents)
    u = np.random.default_rng(4).random(draft.tokens.shape)
    result = ACCEPT[name](jnp.asarray(p, jnp.float32), draft, ancestor_mask, jnp.asarray(u, jnp.float32))
    tokens, parents, valid = (np.asarray(x) for x in (draft.tokens, draft.parents, draft.valid))
    lengths = set()
    for row in range(len(u)):
        here = p[row], q[row], tokens[row], parents[row], valid[row], u[row]
        if name == "block":
            path, residual = accept.block_accept(p[row], q[row], tokens[row], int(valid[row].sum()) - 1, u[row])
        elif name == "multi_candidate":
            path, residual = accept.multi_candidate_accept(here[0], *here[2:])
        else:
            path, residual = accept.rejection_accept(*here)
        assert np.flatnonzero(ancestor_mask[row, result.last_node[row]]).tolist() == path
        np.testing.assert_allclose(result.residual_probs[row], residual, atol=1e-5)
        lengths.add(len(path))
    assert len(lengths) > 3, "the cases must reach different depths"


def test_accept_rules_with_vocabulary_map_equal_those_with_full_draft_probs() -> None:
    """The draft vocabulary is tokens 1, 3 and 4; the full draft probabilities of other tokens are 0."""
    rng, ids = np.random.default_rng(0), np.array([1, 3, 4])
    own = rng.dirichlet(np.ones(3), (64, 4)).astype(np.float32)
    wide = np.zeros((64, 4, 5), np.float32)
    wide[..., ids] = own
    tokens = ids[rng.integers(0, 3, (64, 4))]
    p, u = jnp.asarray(rng.dirichlet(np.ones(5), (64, 4)), jnp.float32), jnp.asarray(rng.random((64, 4)), jnp.float32)
    full = enumeration.draft_of(CHAIN, tokens, wide)
    narrow = full.replace(probs=jnp.asarray(own), vocab_map=jnp.asarray(ids))
    for name in ("rejection", "block"):
        one, two = (ACCEPT[name](p, draft, ancestors(draft.parents), u) for draft in (full, narrow))
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_accept_rules_with_draft_probs_equal_to_target_probs_accept_all_tokens(name: str) -> None:
    """No residual probability is left; even the largest uniform number must lead to no NaN."""
    tree, target, _ = case("chain", 2)
    tokens, _ = sampled_drafts(tree, target[:-1])
    p = enumeration.probs_at_nodes(tree, tokens, target)
    draft = enumeration.draft_of(tree, tokens, p)
    u = jnp.full(tokens.shape, ALMOST_ONE)
    result = ACCEPT[name](jnp.asarray(p, jnp.float32), draft, ancestors(draft.parents), u)
    np.testing.assert_array_equal(result.last_node, 3)
    np.testing.assert_allclose(result.residual_probs, p[:, 3], atol=1e-6)


@pytest.mark.parametrize("draw", [0, ALMOST_ONE])
@pytest.mark.parametrize("name", ["multi_candidate", "rejection", "block"])
def test_accept_rules_with_a_one_hot_target_accept_exactly_the_certain_token(name: str, draw: float) -> None:
    """A uniform number of 0 must not accept probability 0; the largest one must not reject probability 1."""
    tree = CHAIN if name == "block" else PAIRS
    rng = np.random.default_rng(0)
    tokens, _ = sampled_drafts(tree, random_probs(rng, 3, tree.depth - 1, zeros=0))
    p = np.zeros((*tokens.shape, 3), np.float32)
    p[..., 2] = 1
    q = np.full_like(p, 1 / 3)
    draft = enumeration.draft_of(tree, tokens, q)
    u = jnp.full(tokens.shape, draw, jnp.float32)
    result = ACCEPT[name](jnp.asarray(p), draft, ancestors(draft.parents), u)
    _, deepest = tree_walk.longest_accepted_path(jnp.asarray(tokens == 2), draft, ancestors(draft.parents))
    np.testing.assert_array_equal(result.last_node, deepest)
    np.testing.assert_allclose(result.residual_probs, p[:, 0], atol=1e-6)


def test_multi_candidate_rule_with_all_target_mass_on_children_accepts_one() -> None:
    """The remaining mass is summed over children, so no rounding error can reject the last one."""
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=(500, 3)).astype(np.float32) ** 6
    p = np.zeros((500, 4, 5), np.float32)
    p[..., 1:4] = (weights / weights.sum(1, keepdims=True))[:, None]
    draft = enumeration.draft_of(STAR, np.broadcast_to(np.arange(4), (500, 4)), None)
    u = jnp.full((500, 4), ALMOST_ONE)
    result = ACCEPT["multi_candidate"](jnp.asarray(p), draft, ancestors(draft.parents), u)
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
