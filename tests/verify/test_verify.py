"""Test accept rules on batches of trees, the cut where a request ends, and the trees and options a rule allows."""

from __future__ import annotations

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Engine, SamplingParams, verify
from jspec.core.ancestors import ancestors, by_depth, depths
from jspec.core.config import ACCEPT_RULES, EngineConfig
from jspec.core.numerics import REFERENCE
from jspec.core.records import Draft, SlotView, Verdict
from jspec.core.sampling import Sampling
from jspec.core.tree import Tree
from jspec.sampling import sampler
from jspec.tools.testing import Random
from jspec.verify import rules
from jspec.verify.sampled_rule import draw_and_accept
from jspec.verify.tree_walk import AcceptResult
from tests.reference import accept, enumeration
from tests.support import engines
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

PAIRS = Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)])
CHAIN = Tree.chain(3)
ROWS, VOCAB = 64, 5  # equal in all tests, so each rule compiles once


def decide(logits: np.ndarray, draft: Draft, here: SlotView, tree: Tree) -> Verdict:
    """Return the verdict of `verify.accept`, compiled as in a step, as numpy arrays."""
    compiled = jax.jit(verify.accept, static_argnames="tree")
    verdict = compiled(on_device(logits[None]), draft, ancestors(np.asarray(draft.parents)), here, tree=tree)
    return jax.tree.map(np.asarray, verdict)


def view(rows: int, **fields: object) -> SlotView:
    zeros = on_device(np.zeros(rows, jnp.int32))
    controls = Sampling(
        temperature=on_device(np.zeros(rows)),
        top_k=zeros,
        top_p=on_device(np.ones(rows)),
        min_p=on_device(np.zeros(rows)),
        seed=on_device(np.zeros((rows, 2), jnp.uint32)),
        stop_ids=on_device(np.full((rows, 8), -1)),
        draft_cap=on_device(np.full(rows, 99)),
        adapter=zeros,
    )
    record = SlotView(
        slots=on_device(np.arange(rows)),
        root=zeros,
        lengths=on_device(np.full(rows, 7)),
        active=on_device(np.ones(rows, bool)),
        remaining=on_device(np.full(rows, 100)),
        page_table=on_device(np.zeros((rows, 1), jnp.int32)),
        sampling=controls,
        accept=verify.Coupled(),
        all_greedy=False,
        numerics=REFERENCE,
    )
    return record.replace(**fields)


def random_tree(rng: np.random.Generator, nodes: int, padding: int) -> np.ndarray:
    parents = np.array([-1] + [rng.integers(0, i) for i in range(1, nodes)])
    parents[nodes - padding :] = -1
    return parents


@pytest.mark.parametrize("seed", range(20))
def test_coupled_rule_on_random_trees_equals_plain_python_loop(seed: int) -> None:
    """The loop follows children whose tokens equal the target's argmax."""
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
            if not free:  # siblings have distinct tokens: surplus nodes become padding
                parents[row, node] = -1
                continue
            tokens[row, node] = rng.choice(free)
            siblings.append(tokens[row, node])
        for node in range(1, nodes):  # a padding node has no children
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
    draft = Draft(
        tokens=on_device(tokens, jnp.int32),
        parents=on_device(parents, jnp.int32),
        scores=on_device(np.zeros((rows, nodes))),
        valid=on_device((parents >= 0) | (np.arange(nodes) == 0)),
        probs=None,
        vocab_map=None,
    )
    verdict = decide(logits, draft, view(rows), Tree.topk(nodes, nodes - 1, 1))
    for row, (path, emitted) in enumerate(expected):
        assert int(verdict.accept_len[row]) == len(path) - 1
        assert verdict.path[row, : len(path)].tolist() == path
        assert verdict.tokens[row, : len(emitted)].tolist() == emitted
        assert (np.asarray(verdict.tokens[row, len(emitted) :]) == -1).all()


def test_ancestors_of_nodes_in_random_trees_equal_those_found_by_following_parents() -> None:
    parents = np.stack([random_tree(np.random.default_rng(s), 40, s % 5) for s in range(8)])
    ancestor_mask = np.asarray(jax.jit(ancestors)(on_device(parents, jnp.int32)))
    for row, node in itertools.product(range(8), range(40)):
        climbed, at = {node}, int(parents[row, node])
        while at >= 0:
            climbed.add(at)
            at = int(parents[row, at])
        assert set(np.flatnonzero(ancestor_mask[row, node])) == climbed


def test_ancestors_of_constant_parents_are_computed_while_tracing() -> None:
    """The program contains no reduction and no gather; its result equals the one for traced parents."""
    rng = np.random.default_rng(3)
    parents = np.stack([random_tree(rng, 12, padding) for padding in range(4)]).astype(np.int32)

    def geometry(parents: np.ndarray | jax.Array) -> tuple[jax.Array, ...]:
        ancestor_mask = ancestors(parents)
        return jnp.asarray(ancestor_mask), depths(ancestor_mask), by_depth(ancestor_mask, 11)

    known, traced = jax.make_jaxpr(lambda: geometry(parents))(), jax.make_jaxpr(geometry)(parents)
    for array, other in zip(jax.jit(lambda: geometry(parents))(), jax.jit(geometry)(parents), strict=True):
        np.testing.assert_array_equal(array, other)
    operations = ("reduce", "gather", "argmax", "shift")
    assert all(name in str(traced) for name in operations)
    assert not any(name in str(known) for name in operations)


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
def test_accepted_tokens_with_a_stop_id_or_no_tokens_remaining_are_cut_there(
    tokens: list[int], stops: tuple[int, ...], remaining: int, count: int, ended: bool
) -> None:
    here = view(1)
    ids = np.full((1, 8), -1)
    ids[0, : len(stops)] = stops
    here = here.replace(remaining=on_device([remaining]), sampling=here.sampling.replace(stop_ids=on_device(ids)))
    length = sum(token >= 0 for token in tokens)
    verdict = Verdict(
        accept_len=on_device([length - 1]),
        path=on_device(np.zeros((1, 4), jnp.int32)),
        tokens=on_device([tokens]),
        counts=on_device([length]),
        ended=on_device([False]),
    )
    cut = jax.tree.map(np.asarray, jax.jit(verify.cut)(verdict, here))
    assert (int(cut.counts[0]), bool(cut.ended[0])) == (count, ended)
    assert cut.tokens[0].tolist() == [t if i < count else -1 for i, t in enumerate(tokens)]


def sampled_view(
    rule: str | verify.AcceptRule, temperature: np.ndarray | float = 1.0, *, one_seed: int | None = None
) -> SlotView:
    """Return a view of sampled rows with a seed each, or all with one seed (``one_seed``)."""
    here = view(ROWS, accept=verify.resolve(rule))
    low = np.arange(ROWS) if one_seed is None else np.full(ROWS, one_seed)
    controls = here.sampling.replace(
        temperature=on_device(np.broadcast_to(temperature, ROWS), jnp.float32),
        seed=on_device(np.stack([np.zeros_like(low), low], axis=1), jnp.uint32),
    )
    return here.replace(sampling=controls)


def random_tokens(rng: np.random.Generator, tree: Tree) -> np.ndarray:
    """Return the tokens of ROWS drafts; siblings are distinct."""
    tokens = np.zeros((ROWS, tree.nodes), int)
    for row in tokens:
        for parent in tree.fed:
            children = [n for n, p in enumerate(tree.parents) if p == parent]
            row[children] = rng.permutation(VOCAB)[: len(children)]
    return tokens


def test_coupled_rule_with_any_draft_emits_tokens_of_plain_decoding() -> None:
    """The draft decides how many tokens a step emits, never which tokens."""
    rng = np.random.default_rng(0)
    target = enumeration.random_probs(rng, VOCAB, 2, zeros=0)
    tokens, seen = random_tokens(rng, PAIRS), set()
    draft = enumeration.draft_of(PAIRS, tokens, None)
    logits = np.log(enumeration.probs_at_nodes(PAIRS, tokens, target)).astype(np.float32)
    drafted = [{enumeration.prefix(PAIRS, tuple(row), n) for n in range(PAIRS.nodes)} for row in tokens.tolist()]
    for seed in range(12):
        here = sampled_view("coupled", one_seed=seed)
        key = sampler.keys(here.sampling.seed[:1], sampler.Purpose.TOKEN, here.lengths[0] + on_device(np.arange(1, 4)))
        plain: tuple[int, ...] = ()
        for probs, noise in zip(target, np.asarray(sampler.gumbel(key, VOCAB)), strict=True):
            plain = (*plain, int(np.argmax(np.log(probs[plain]) + noise)))
        verdict = decide(logits, draft, here, PAIRS)
        for row, known in enumerate(drafted):
            length = max(d for d in range(3) if plain[:d] in known)
            assert verdict.accept_len[row] == length
            assert verdict.tokens[row].tolist() == [*plain[: length + 1], *[-1] * (2 - length)]
        seen.add(plain)
    assert len(seen) > 5


@pytest.mark.parametrize(
    ("tree", "rule"),
    [
        (CHAIN, "block"),
        *((PAIRS, rule) for rule in ACCEPT_RULES if rule != "block"),
        *(pytest.param(CHAIN, rule, marks=pytest.mark.long) for rule in ACCEPT_RULES if rule != "block"),
    ],
)
def test_accept_rules_on_greedy_rows_in_a_mixed_batch_emit_the_argmax(tree: Tree, rule: str) -> None:
    """The target's probabilities are one-hot at temperature 0, so any draft is accepted only where it is the argmax."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(ROWS, tree.nodes, VOCAB)).astype(np.float32)
    draft = enumeration.draft_of(tree, random_tokens(rng, tree), None)
    draft_probs = on_device(rng.dirichlet(np.ones(VOCAB), draft.tokens.shape), jnp.float32)
    greedy = np.arange(ROWS) % 2 == 0
    alone = decide(logits, draft, view(ROWS), tree)
    drawn = draft.replace(probs=draft_probs) if rule in ("rejection", "block", "traversal") else draft
    own = verify.Typical(2.0, 6.0) if rule == "typical" else rule  # no probability exceeds this threshold
    together = decide(logits, drawn, sampled_view(own, np.where(greedy, 0.0, 1.0)), tree)
    np.testing.assert_array_equal(alone.tokens[greedy], together.tokens[greedy])
    assert (alone.tokens[~greedy] != together.tokens[~greedy]).any()
    assert (alone.accept_len[greedy] > 0).any()


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
def test_rules_for_drawn_drafts_without_draft_probs_equal_multi_candidate(rule: str) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(ROWS, CHAIN.nodes, VOCAB)).astype(np.float32)
    draft = enumeration.draft_of(CHAIN, random_tokens(rng, CHAIN), None)
    draft_probs = on_device(rng.dirichlet(np.ones(VOCAB), draft.tokens.shape), jnp.float32)
    without, other = (decide(logits, draft, sampled_view(name), CHAIN) for name in (rule, "multi_candidate"))
    np.testing.assert_array_equal(without.tokens, other.tokens)
    own = decide(logits, draft.replace(probs=draft_probs), sampled_view(rule), CHAIN)
    assert (own.tokens != other.tokens).any()


def test_multi_candidate_rule_with_one_seed_draws_independently_per_sibling() -> None:
    """With one seed and roots at different positions, three equally likely tokens are emitted equally often.

    If both siblings shared a draw, the second would be emitted with probability 1/2 - 1/3.
    """
    tokens = np.broadcast_to([0, 0, 1, 0, 1, 0, 1], (ROWS, 7))
    draft = enumeration.draft_of(PAIRS, tokens, None)
    logits = np.full((ROWS, 7, VOCAB), -np.inf, np.float32)
    logits[..., :3] = 0
    count = np.zeros(3)
    for repeat in range(10):
        here = sampled_view("multi_candidate", one_seed=0).replace(lengths=repeat * ROWS + on_device(np.arange(ROWS)))
        count += np.bincount(decide(logits, draft, here, PAIRS).tokens[:, 0], minlength=3)
    np.testing.assert_allclose(count / count.sum(), 1 / 3, atol=0.06)


def test_uniforms_of_the_nodes_of_a_tree_are_all_different() -> None:
    """Nodes of one depth and rank have uniforms of their own, because traversal verification tries several of them."""
    drawn, tree = [], Tree.static([(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 1, 0)])

    def note(probs: jax.Array, draft: Draft, ancestor_mask: object, uniforms: jax.Array) -> AcceptResult:
        drawn.append(uniforms)
        return AcceptResult(jnp.zeros(ROWS, jnp.int32), probs[:, 0], uniforms)

    @jax.jit
    def uniforms_of(draft: Draft, here: SlotView) -> jax.Array:
        logits = jnp.zeros((ROWS, tree.nodes, VOCAB))
        draw_and_accept(note, logits, draft, ancestors(draft.parents), here)
        return drawn.pop()

    draft = enumeration.draft_of(tree, np.zeros((ROWS, tree.nodes), int), None)
    assert len(np.unique(uniforms_of(draft, sampled_view("traversal")))) == ROWS * tree.nodes


def test_traversal_rule_whose_trial_reads_nan_emits_no_token_after_the_path() -> None:
    """The first child has NaN probabilities; neither its children nor its sibling is accepted instead."""
    draft = enumeration.draft_of(
        PAIRS, np.broadcast_to([0, 1, 2, 1, 2, 1, 2], (ROWS, 7)), np.full((ROWS, 7, VOCAB), 0.2)
    )
    logits = np.zeros((ROWS, 7, VOCAB), np.float32)
    logits[:, 0, 2] = 2
    clean = decide(logits, draft, sampled_view("traversal"), PAIRS)
    logits[:, 1] = np.nan
    found = decide(logits, draft, sampled_view("traversal"), PAIRS)
    assert (found.accept_len == 1).all() and (found.path[:, 1] == 1).all()
    assert found.tokens[:, :2].tolist() == [[1, -1]] * ROWS
    assert len(set(clean.path[:, 1].tolist())) == 2


def typical_case(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return logits, tokens, valid flags and temperatures; in capped drafts only the first level is valid."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(ROWS, PAIRS.nodes, VOCAB)) * 3).astype(np.float32)
    valid = np.arange(PAIRS.nodes) <= np.where(rng.random(ROWS) < 0.2, 2, 6)[:, None]
    return logits, random_tokens(rng, PAIRS), valid, rng.uniform(0.5, 2, ROWS)


@pytest.mark.parametrize("options", [(0.09, 0.3), (0.3, 0.09), (0.4, 0.9)])
def test_typical_rule_on_random_trees_equals_plain_python_loop(options: tuple[float, float]) -> None:
    """Negative control: with its two options exchanged the rule accepts different tokens."""
    parents, found, exchanged = np.array(PAIRS.parents), set(), 0
    for seed in range(3):
        logits, tokens, valid, temperature = typical_case(seed)
        draft = enumeration.draft_of(PAIRS, tokens, None, valid)
        verdict = decide(logits, draft, sampled_view(verify.Typical(*options), temperature), PAIRS)
        for row in range(ROWS):
            path, last = accept.typical_accept(logits[row], temperature[row], tokens[row], parents, valid[row], options)
            assert verdict.path[row, : len(path)].tolist() == path
            assert verdict.tokens[row, : len(path)].tolist() == [*tokens[row, path[1:]].tolist(), last]
            found.add(tuple(path))
        other = decide(logits, draft, sampled_view(verify.Typical(*options[::-1]), temperature), PAIRS)
        exchanged += (other.accept_len != verdict.accept_len).sum()
    assert len(found) == PAIRS.nodes, "every path must occur"
    assert exchanged > 0


GAP = Tree.static([(0,), (2,)])
DEEP_GAP = Tree.static([(0,), (1,), (1, 1)])


@pytest.mark.parametrize("rule", ACCEPT_RULES[:-1])
@pytest.mark.parametrize("tree", [CHAIN, PAIRS, GAP, DEEP_GAP, Tree.topk(8, 3, 2)], ids=str)
def test_accept_rule_with_an_unsuitable_tree_raises(rule: str, tree: Tree) -> None:
    """With suitable trees the check neither raises nor warns."""
    wanted = None
    if rule == "block" and not tree.is_chain:
        wanted = r'accept="block" expects a chain, got .*; use Tree\.chain\(length\) or accept="traversal"'
    if rule in ("rejection", "traversal") and tree in (GAP, DEEP_GAP):
        wanted = rf'accept="{rule}" expects sibling ranks without gaps, got \(.*\) without \(.*\); add that path or'
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if wanted is None:
            verify.resolve(rule).check(tree)
        else:
            with pytest.raises(ValueError, match=wanted):
                verify.resolve(rule).check(tree)


def test_engine_with_block_rule_and_branching_tree_raises() -> None:
    with pytest.raises(ValueError, match='accept="block" expects a chain'):
        Engine(engines.target(), drafter=Random(PAIRS), accept="block")


def test_engine_with_typical_rule_warns_once_and_greedy_tokens_are_unchanged(request: pytest.FixtureRequest) -> None:
    with pytest.warns(UserWarning, match='"typical" does not keep the target\'s distribution') as caught:
        engine = Engine(
            engines.target(), drafter=Random(PAIRS), accept="typical", slots=2, max_len=engines.MAX_LEN, buckets=(2,)
        )
    assert len(caught) == 1
    if not request.config.getoption("--typecheck"):  # runtime type checking adds frames between the calls
        assert caught[0].filename == __file__
    params = SamplingParams(max_tokens=20, temperature=0)
    own, plain = (one.generate([3, 1, 4], params)[0].token_ids for one in (engine, engines.plain()))
    assert own == plain


@pytest.mark.parametrize("name", ["typical_threshold", "typical_alpha"])
def test_engine_config_with_an_option_of_the_typical_rule_raises_an_error_that_names_the_rule(name: str) -> None:
    with pytest.raises(TypeError, match=r"expected accept=, such as accept=jspec\.verify\.Typical\(0\.09, 0\.3\), got"):
        EngineConfig(accept="typical", **{name: 0.1})


@pytest.mark.parametrize(
    "options", [dict(threshold=0.0), dict(alpha=-1.0), dict(threshold="0.1"), dict(alpha=float("nan"))]
)
def test_typical_rule_with_option_not_positive_raises(options: dict) -> None:
    with pytest.raises(ValueError, match=r"Typical: (threshold|alpha): expected a number > 0, got"):
        verify.Typical(**options)


def test_accept_rule_given_by_name_or_object_is_resolved_to_the_object() -> None:
    assert tuple(rules.RULES) == ACCEPT_RULES
    assert [rule.name for rule in map(verify.resolve, ACCEPT_RULES)] == list(ACCEPT_RULES)
    own = verify.Typical(0.2, 0.5)
    assert verify.resolve(own) is own
    assert verify.resolve("typical") == verify.Typical(0.09, 0.3) != own and hash(own) != hash(verify.Typical())
    assert [name for name in ACCEPT_RULES if not verify.resolve(name).is_lossless] == ["typical"]
    with pytest.raises(ValueError, match=r"accept: expected one of \('coupled', .*'typical'\), got 'greedy'"):
        verify.resolve("greedy")


@pytest.mark.parametrize("rule", [verify.Typical(0.2, 0.5), verify.Block()])
def test_engine_with_a_rule_object_compiles_its_programs_with_this_rule(rule: verify.AcceptRule) -> None:
    engine = engines.make(engines.target(), Random(CHAIN), accept=rule, **engines.PLAIN_OPTIONS)
    assert engine.core.runner.programs._program.accept == rule != verify.Typical()


@pytest.mark.long
def test_engine_with_a_rule_object_emits_the_tokens_of_the_named_rule() -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    options = dict(drafter=Random(CHAIN), slots=2, max_len=engines.MAX_LEN, buckets=(2,))
    by_name, by_object = (
        Engine(engines.target(), accept=accept, **options).generate([3, 1, 4], params)[0].token_ids
        for accept in ("block", verify.Block())
    )
    assert by_name == by_object
