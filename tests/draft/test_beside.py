"""Test drafts of a look-up beside a head: which tree they join to, how often they are accepted, and options."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Beside, DraftModel, Eagle3, Engine, Metrics, NGram, SamplingParams, Suffix, Tree
from jspec.core.ancestors import longest_accepted_path
from jspec.core.records import Draft, Verdict
from jspec.draft import beside, match_rates
from jspec.draft.base import NoDraft
from jspec.draft.best_nodes import keep_best_nodes
from jspec.draft.match_rates import LENGTHS, MatchRates, expected_length, kind_of
from tests.reference.enumeration import draft_of
from tests.support import engines, tiny
from tests.support.arrays import on_device
from tests.support.beside import Known, KnownModel, check_contract, prompt_of
from tests.support.lookup_runs import POOL, SLOTS, batch_of, view_of

pytestmark = pytest.mark.once

VOCAB = engines.VOCAB
CHAIN, PAIRS = Tree.chain(3), Tree.static([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)])


# -- the joined tree


def random_trees(rng: np.random.Generator, rows: int, nodes: int, vocab: int) -> Draft:
    """Return random trees of tokens, whose siblings differ."""
    parents, tokens = np.full((rows, nodes), -1), rng.integers(0, vocab, (rows, nodes))
    for row, node in itertools.product(range(rows), range(1, nodes)):
        free = [
            (parent, token)
            for parent, token in itertools.product(range(node), range(vocab))
            if (parent, token) not in zip(parents[row, 1:node], tokens[row, 1:node], strict=True)
        ]
        parents[row, node], tokens[row, node] = free[rng.integers(len(free))]
    record = draft_of(Tree.chain(nodes - 1), tokens, None)
    return record.replace(parents=on_device(parents, jnp.int32), scores=on_device(-rng.random((rows, nodes))))


def random_chains(rng: np.random.Generator, rows: int, length: int, vocab: int) -> Draft:
    chain, ends = (
        draft_of(Tree.chain(length), rng.integers(0, vocab, (rows, length + 1)), None),
        rng.integers(0, length + 1, rows),
    )
    valid = np.arange(length + 1) <= ends[:, None]
    return chain.replace(valid=on_device(valid), scores=on_device(-0.5 * np.tile(np.arange(length + 1), (rows, 1))))


def check_joined(joined: Draft, drafted: Draft, chain: Draft, is_used: np.ndarray) -> int:
    """Check each row's tree: the paths of the model's nodes and that of the chain, each once. Return how many merge."""
    check_contract(joined)
    size, merged = drafted.tokens.shape[1], 0
    for row, used in enumerate(is_used):
        tokens, parents, valid, scores = (
            np.asarray(field)[row] for field in (joined.tokens, joined.parents, joined.valid, joined.scores)
        )
        paths: dict[int, tuple[int, ...]] = {0: ()}
        for node in np.flatnonzero(valid)[1:]:
            paths[node] = (*paths[parents[node]], int(tokens[node]))
        own = {paths[node] for node in range(size)}
        wanted = np.asarray(chain.tokens)[row, 1 : int(np.sum(chain.valid[row]))].tolist() if used else []
        beginnings = {tuple(wanted[:count]) for count in range(len(wanted) + 1)}
        assert set(paths.values()) == own | beginnings and len(paths) == len(own | beginnings)
        assert np.array_equal(tokens[:size], drafted.tokens[row]) and np.array_equal(
            parents[:size], drafted.parents[row]
        )
        for node in range(size, len(tokens)):
            if valid[node]:
                assert scores[node] == pytest.approx(scores[parents[node]] - 0.5, abs=1e-6)
        merged += len(own & beginnings) - 1
    return merged


def random_join() -> tuple[Draft, Draft, np.ndarray]:
    rng = np.random.default_rng(0)
    return random_trees(rng, 60, 7, 3), random_chains(rng, 60, 4, 3), rng.random(60) < 0.8


def test_joined_tree_has_each_path_of_both_parts_once() -> None:
    drafted, chain, is_used = random_join()
    joined = jax.jit(beside.joined)(drafted, chain, on_device(is_used))
    assert check_joined(joined, drafted, chain, is_used) > 30


def any_first_token(matches: Any, draft: Draft, mask: Any) -> Any:
    return longest_accepted_path(matches | (draft.parents == 0), draft, mask)


def only_the_root(matches: Any, draft: Draft, mask: Any) -> Any:
    return longest_accepted_path(jnp.zeros_like(matches), draft, mask)


@pytest.mark.parametrize("wrong", [any_first_token, only_the_root])
def test_continuation_joined_at_another_node_breaks_the_contract(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the path to the node differs in its first token, or a longer one would agree."""
    monkeypatch.setattr(beside, "longest_accepted_path", wrong)
    drafted, chain, is_used = random_join()
    joined = jax.jit(partial(beside.joined))(drafted, chain, on_device(is_used))
    with pytest.raises(AssertionError):
        check_joined(joined, drafted, chain, is_used)


def with_scores_of_paths(record: Draft, rng: np.random.Generator) -> Draft:
    """Return drafts with random scores, of which none is higher than its parent's and a few are equal."""
    parents, steps = np.asarray(record.parents), -rng.integers(0, 4, record.tokens.shape) / 4.0
    scores = np.zeros(parents.shape, np.float32)
    for node in range(1, parents.shape[1]):
        scores[:, node] = np.take_along_axis(scores, parents[:, node, None], axis=1)[:, 0] + steps[:, node]
    return record.replace(scores=on_device(scores))


@pytest.mark.parametrize("count", [2, 5, 9, 10])
def test_kept_nodes_of_a_joined_tree_are_those_of_highest_score_and_their_parents(count: int) -> None:
    rng = np.random.default_rng(0)
    drafted, chain, is_used = random_join()
    joined = beside.joined(with_scores_of_paths(drafted, rng), chain, on_device(is_used))
    confidence = on_device(rng.random(joined.tokens.shape), jnp.float32)
    joined = joined.replace(confidence=confidence)
    kept = jax.jit(keep_best_nodes, static_argnums=1)(joined, count)
    check_contract(kept)
    assert kept.tokens.shape == (60, count)
    for row in range(60):
        scores, valid = np.asarray(joined.scores)[row], np.asarray(joined.valid)[row]
        best = sorted(sorted(np.flatnonzero(valid).tolist(), key=lambda node: (-scores[node], node))[:count])
        nodes = np.flatnonzero(kept.valid[row]).tolist()
        assert len(nodes) == len(best) and np.all(np.asarray(kept.parents)[row][~np.asarray(kept.valid)[row]] == -1)
        for name in ("tokens", "scores", "confidence", "from_lookup"):
            mine, every = (np.asarray(getattr(record, name))[row] for record in (kept, joined))
            assert mine[nodes].tolist() == every[best].tolist(), name
        parents = [nodes[best.index(int(joined.parents[row, node]))] for node in best[1:]]
        assert np.asarray(kept.parents)[row, nodes[1:]].tolist() == parents


@pytest.mark.parametrize(
    ("depth", "text"), [(4, None), (3, "chain:2 beside chain:3"), (1, "chain:1 beside chain:1"), (0, "none")]
)
def test_joined_tree_that_is_cut_is_joined_of_its_cut_parts(depth: int, text: str | None) -> None:
    tree = Tree.chain(2).joined(4)
    assert (tree.nodes, tree.depth, tree.scratch_rows) == (7, 4, 7)
    assert str(tree.cut(depth)) == (text or str(tree))
    assert Tree.topk(12, 3, 4).joined(1).cut(2) == Tree.topk(12, 3, 4).cut(2).joined(1)
    limited = Tree.topk(12, 3, 4).joined(6, 10)
    assert (limited.nodes, limited.depth, str(limited)) == (10, 6, "topk:12,3,4 beside chain:6, 10 nodes")
    assert limited.cut(2).nodes == 10 and limited.cut(1) == Tree.topk(5, 1, 4).joined(1)
    assert Tree.chain(2).joined(6, 4).depth == 3 and Tree.chain(2).joined(2, 9) == Tree.chain(2).joined(2)


# -- rates of matches


def test_match_rates_of_random_rounds_equal_those_of_a_plain_loop() -> None:
    rng, slots, depth, rows_per_round = np.random.default_rng(0), 3, 4, 3
    rates = MatchRates.new(slots, 2, depth)
    first = np.tile(match_rates.FIRST_RATES, (slots, 1, 1)) * match_rates.FIRST_TOKENS
    counts = np.stack([first, np.full_like(first, match_rates.FIRST_TOKENS)], axis=-1)  # right, tried
    keep, learn = (jax.jit(function) for function in (MatchRates.keep, MatchRates.learn))
    for _ in range(60):
        rows = rng.permutation(slots + 1)[:rows_per_round]
        active, kind = (rows < slots) & (rng.random(3) < 0.8), rng.integers(-1, len(LENGTHS), 3)
        deepest = int(rng.integers(2, depth + 1))  # that of a cut tree
        ends, count = rng.integers(0, deepest + 1, (3, 2)), rng.integers(1, deepest + 2, 3)
        chains = np.where(np.arange(depth) < ends[..., None], rng.integers(0, 2, (3, 2, depth)), -1)
        emitted = np.where(np.arange(deepest + 1) < count[:, None], rng.integers(0, 2, (3, deepest + 1)), -1)
        view = view_of(rows.tolist(), [0] * 3, [0] * 3, active.tolist())
        rates = keep(rates, view, on_device(chains, jnp.int32), on_device(kind, jnp.int32))
        rates = learn(rates, view, Verdict(None, None, on_device(emitted, jnp.int32), None, None))
        for row, source in itertools.product(np.flatnonzero(active), range(2)):
            pairs = [(e, c) for e, c in zip(emitted[row], chains[row, source], strict=False) if e >= 0 and c >= 0]
            right = next((at for at, (e, c) in enumerate(pairs) if e != c), len(pairs))
            if pairs and kind[row] >= 0:
                own = counts[rows[row], source, kind[row]]
                own *= match_rates.DECAY
                own += right, right + (right < len(pairs))
    np.testing.assert_allclose(rates.right, counts[..., 0], rtol=1e-5)
    np.testing.assert_allclose(rates.tried, counts[..., 1], rtol=1e-5)
    found = rates.of(on_device([2, 0]), on_device([1, -1]))
    np.testing.assert_allclose(found, (counts[..., 0] / counts[..., 1])[[2, 0], :, [1, 0]], rtol=1e-5)
    new = rates.forget(on_device([1, slots]))
    np.testing.assert_allclose(new.right[1], first[1], rtol=1e-6)
    np.testing.assert_array_equal(new.right[0], rates.right[0])


def test_kinds_of_matches_and_their_lengths() -> None:
    lengths = np.arange(0, 30)
    assert kind_of(on_device(lengths)).tolist() == [sum(n >= least for least in LENGTHS) - 1 for n in lengths]
    found = expected_length(on_device([0.5, 1.0, 0.9], jnp.float32), on_device([2, 3, 0]), 4)
    np.testing.assert_allclose(found, [0.75, 3, 0])


def test_rates_are_forgotten_with_a_new_prompt_and_kept_without_a_draft() -> None:
    outputs, prompts = np.zeros((1, 4), int), [[1, 2, 3]]
    lookup = Known(outputs, prompts, Tree.chain(4), VOCAB)
    drafter = Beside(KnownModel(Known(outputs, prompts, CHAIN, VOCAB)), lookup)
    state = drafter.init((), POOL)
    used = jax.tree.map(lambda field: field + 1, state.rates)
    state = state.replace(rates=used)
    view = view_of([2, SLOTS, SLOTS], [0] * 3, [0] * 3, [True, False, False])
    batch = batch_of([[1, 2, 3]], 0)
    batch = batch.replace(newest=batch.ends - 1)
    made = drafter.prefill((), state, view, batch, None).rates
    first = MatchRates.new(SLOTS, 2, 4)
    for name in ("right", "tried"):
        found = getattr(made, name)
        assert np.array_equal(found[2], getattr(first, name)[2]) and np.array_equal(found[:2], getattr(used, name)[:2])
    chains, kind = jnp.zeros((3, 2, 4), jnp.int32), jnp.zeros(3, jnp.int32)
    kept = state.replace(rates=used.keep(view, chains, kind))
    verdict = Verdict(None, None, on_device(np.zeros((3, 1), np.int32)), None, None)
    draft = draft_of(Tree.chain(1).cut(0), np.zeros((3, 1), int), None)
    drafting, idle = (one.commit((), kept, view, draft, verdict, None).rates for one in (drafter, drafter.cut(0)))
    assert np.array_equal(idle.tried, used.tried)
    assert not np.array_equal(drafting.tried, used.tried), "control"


# -- engines with a known model and a known look-up

RIGHT = (0, 0, 0, 0)
CASES = [  # what is added to the model's tokens and to the look-up's, by depth
    ((0, 0, 0), RIGHT),
    *(
        ((0, 0, 0), wrong)
        for wrong in ((2, 0, 0, 0), (1, 0, 0, 0), (0, 2, 0, 0), (0, 1, 0, 0), (0, 0, 2, 0), (0, 0, 0, 2))
    ),
    *((wrong, RIGHT) for wrong in ((2, 0, 0), (0, 2, 0), (0, 0, 2))),
    ((2, 0, 0), (3, 0, 0, 0)),
    ((2, 0, 0), (2, 0, 0, 0)),
    ((0, 2, 0), (0, 0, 3, 0)),
    ((0, 0, 2), (0, 3, 0, 0)),
    ((0, 2, 0), (0, 2, 0, 0)),
]
TOKENS = 36
PARAMS = [SamplingParams(max_tokens=TOKENS, temperature=heat, seed=1) for heat in (0.0, 1.0) for _ in CASES]
PROMPTS = [prompt_of(line, VOCAB) for line in range(len(PARAMS))]
ENGINES: dict[str, Any] = {
    "replace by length": (CHAIN, dict(join="replace", threshold=4)),
    "replace by rates": (CHAIN, dict(join="replace")),
    "beside a chain": (CHAIN, dict(join="beside")),
    "beside a tree": (PAIRS, dict(join="beside")),
}


@cache
def plain() -> list[Any]:
    return engines.plain().generate(PROMPTS, PARAMS)


@cache
def known(tree: Tree, options: tuple[tuple[str, Any], ...]) -> Beside:
    outputs = np.array([done.token_ids for done in plain()])
    model, lookup = (np.array([case[part] for case in CASES] * 2) for part in (0, 1))
    tables = ((model, tree), (lookup, Tree.chain(4)))
    parts = (Known(outputs, PROMPTS, one, VOCAB, wrong) for wrong, one in tables)
    return Beside(KnownModel(next(parts)), next(parts), **dict(options))


Paths = set[tuple[int, ...]]  # draft tokens from the root to a node, for each node


def drafts_of(name: str, line: int, start: int, cap: int, is_lookup: bool) -> dict[str, Paths]:
    """Return the paths that each source drafts in a round, from the text of plain decoding and the tables.

    Args:
        start: number of output tokens before the round.
        cap: largest depth that the request allows.
        is_lookup: whether the look-up's chain replaces the model's, if one replaces the other.
    """
    text, (of_model, of_lookup) = [*plain()[line].token_ids, *[0] * 4], CASES[line % len(CASES)]
    chain = [(text[start + depth] + shift) % VOCAB for depth, shift in enumerate(of_lookup)]
    lookup = {tuple(chain[:depth]) for depth in range(1, len(chain) + 1)}
    model = {
        tuple((text[start + depth] + of_model[depth] + rank) % VOCAB for depth, rank in enumerate(path))
        for path in ENGINES[name][0].paths or ()
    }
    if "replace" in name:
        model, lookup = (set(), lookup) if is_lookup else (model, set())
    drafts = {"head": model, "lookup": lookup - model}  # a path that both drafted is the head's
    return {source: {path for path in paths if len(path) <= cap} for source, paths in drafts.items()}


def simulated(name: str, line: int, params: SamplingParams, replaced: dict[int, bool]) -> list[dict[str, int]]:
    """Return the numbers of verified and of emitted draft tokens of each source of a request.

    Args:
        replaced: for each number of output tokens whether the look-up's chain replaces the model's.
    """
    text, verified, emitted = plain()[line].token_ids, Counter(head=0, lookup=0), Counter(head=0, lookup=0)
    start = 1
    while start < TOKENS and text[start - 1] not in params.stop_token_ids:
        cap = 4 if params.draft is True else int(params.draft)
        drafts = drafts_of(name, line, start, cap, replaced.get(start, start % 2 == 0))  # even matches are longer
        paths = drafts["head"] | drafts["lookup"]
        accepted = sum(tuple(text[start:end]) in paths for end in range(start + 1, TOKENS + 1))
        stops = [at for at, token in enumerate(text[start : start + accepted + 1]) if token in params.stop_token_ids]
        count = min(accepted + 1, TOKENS - start, *(at + 1 for at in stops))
        for source in drafts:
            verified[source] += len(drafts[source])
            emitted[source] += sum(
                tuple(text[start : start + depth]) in drafts[source] for depth in range(1, count + 1)
            )
        start += count
    return [dict(verified), dict(emitted)]


def check_counts(name: str, line: int, done: Any, params: SamplingParams, replaced: dict[int, bool]) -> None:
    metrics = done.metrics
    found = [metrics.num_draft_tokens_per_source, metrics.num_accepted_tokens_per_source]
    if metrics.num_drafts:
        assert found == simulated(name, line, params, replaced), (name, line)
    assert [sum(of.values()) for of in found] == [metrics.num_draft_tokens, metrics.num_accepted_tokens]


def right(wrong: tuple[int, ...]) -> int:
    """Return how many tokens of a chain are right."""
    return next((depth for depth, shift in enumerate(wrong) if shift), len(wrong))


@pytest.mark.parametrize("name", ENGINES)
def test_engine_with_a_known_model_and_look_up_accepts_what_is_right(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are right, one is, none is, and they differ at each depth; greedy and with a seed."""
    monkeypatch.setattr(match_rates, "FIRST_TOKENS", 2.0)  # so that a request of few tokens learns
    tree, options = ENGINES[name]
    drafter = known(tree, tuple(options.items()))
    more = dict(slots=8, rounds_per_dispatch=1 + (name == "beside a chain"))
    engine = engines.make(engines.target(), drafter=drafter, **engines.PLAIN_OPTIONS | more)
    done = engine.generate(PROMPTS, PARAMS, trace=True)
    for line, (one, expected) in enumerate(zip(done, plain(), strict=True)):
        assert one.token_ids == expected.token_ids
        model, lookup = map(right, CASES[line % len(CASES)])
        first = 16 if name == "replace by rates" else 0  # tokens that the rates take
        for r in one.rounds:
            if first <= r.start < TOKENS - 5:
                by_length = model if r.start % 2 else lookup  # odd matches are shorter than the threshold
                wanted = by_length if name == "replace by length" else max(model, lookup)
                assert r.accept_len == wanted, (name, CASES[line % len(CASES)])
        replaced = {}
        for r in one.rounds:
            paths: dict[int, tuple[int, ...]] = {0: ()}
            for node in np.flatnonzero(r.parents >= 0):
                paths[int(node)] = (*paths[r.parents[node]], int(r.tokens[node]))
            replaced[r.start] = bool(r.from_lookup.any())
            drafts = drafts_of(name, line, r.start, 4, replaced[r.start])
            assert {path for node, path in paths.items() if r.from_lookup[node]} == drafts["lookup"]
            assert {path for node, path in paths.items() if node and not r.from_lookup[node]} == drafts["head"]
            assert r.match_length == 4 - r.start % 2
        check_counts(name, line, one, PARAMS[line], replaced)
    if name == "replace by rates":
        return
    stopped = [
        dataclasses.replace(each, stop_token_ids=(one.token_ids[12 + line % 5],), draft=(True, 1, 2)[line % 3])
        for line, (each, one) in enumerate(zip(PARAMS, plain(), strict=True))
    ]
    cut = engine.generate(PROMPTS, stopped, trace=True)  # with the programs that are compiled
    for line, (one, each) in enumerate(zip(cut, stopped, strict=True)):
        check_counts(name, line, one, each, {})
    assert any(sum(one.metrics.num_accepted_per_position) > one.metrics.num_accepted_tokens for one in cut)
    total = sum((one.metrics for one in (*done, *cut)), Metrics())
    for count in ("num_draft_tokens_per_source", "num_accepted_tokens_per_source"):
        assert getattr(engine.metrics, count) == getattr(total, count) and min(getattr(total, count).values()) > 100


# -- options


def eagle3(tree: Tree) -> Eagle3:
    return Eagle3(tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1)), tree)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beside(DraftModel(engines.target()), NGram()), "got a DraftModel, whose cache would lack the rows"),
        (lambda: Beside(NGram(), NGram()), "model: expected a head (Eagle3, Eagle, PEagle"),
        (lambda: Beside(NoDraft(), NGram()), "model: expected a head"),
        (lambda: Beside("eagle3", NGram()), "model: expected a head"),  # type: ignore[arg-type]
        (lambda: Beside(eagle3(CHAIN), eagle3(CHAIN)), "lookup: expected NGram(tree) or Suffix(tree), got"),  # type: ignore[arg-type]
        (lambda: Beside(eagle3(CHAIN), NGram(PAIRS)), "pass NGram(Tree.chain(3))"),
        (lambda: Beside(eagle3(CHAIN), NGram(), "both"), "join: expected one of ('replace', 'beside'), got 'both'"),
        (lambda: Beside(eagle3(PAIRS), NGram()), 'join="replace" expects a model that drafts a chain'),
        (lambda: Beside(eagle3(Tree.static([(1,)])), NGram()), 'join="replace" expects a model that drafts a chain'),
        (
            lambda: Beside(eagle3(CHAIN), NGram(), threshold=5),
            "None or an int from 1 to 4, the look-up's min_n and max_n",
        ),
        (lambda: Beside(eagle3(CHAIN), NGram(min_n=3), threshold=2), "threshold: expected None or an int from 3 to 4"),
        (lambda: Beside(eagle3(CHAIN), NGram(), "beside", nodes=1), "nodes: expected None, or an int >= 2"),
        (lambda: Beside(eagle3(CHAIN), NGram(), nodes=4), 'got 4 with join="replace"'),
        (lambda: Beside(eagle3(CHAIN), NGram(), threshold=True), "threshold: expected None or an int from 1"),
        (lambda: Beside(Eagle3(eagle3(CHAIN).head, CHAIN, draft_window=4), NGram(Tree.chain(6))), "an int >= 7"),
    ],
)
def test_beside_with_parts_that_do_not_fit_raises(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("drafter", "accept", "message"),
    [
        (lambda: Beside(eagle3(CHAIN), NGram(), "beside"), "block", 'use join="replace" or accept="traversal"'),
        (
            lambda: Beside(eagle3(Tree.static([(1,)])), NGram(), "beside"),
            "rejection",
            "expects sibling ranks without gaps",
        ),
        (lambda: Beside(eagle3(CHAIN), Suffix(CHAIN, scope="engine", corpus_tokens=64)), "rejection", 'scope="engine"'),
        (lambda: Beside(eagle3(PAIRS), NGram(), "beside", nodes=6), "traversal", "a choice among drawn tokens changes"),
    ],
)
def test_engine_with_beside_and_a_rule_that_does_not_fit_raises(drafter: Any, accept: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(engines.target(), drafter=drafter(), accept=accept, compile_ahead=True, **engines.PLAIN_OPTIONS)


def test_beside_is_shown_with_its_parts_and_keeps_them_when_it_is_changed() -> None:
    drafter = Beside(eagle3(CHAIN), NGram(Tree.chain(4)), threshold=2).with_window(8)
    text = "Beside(Eagle3('chain:3'), NGram('chain:4'), 'replace', threshold=2)"
    limited = Beside(eagle3(CHAIN), NGram(), "beside", nodes=6).with_window(8)
    assert limited.tree.nodes == 6 and repr(limited).endswith("'beside', threshold=None, nodes=6)")
    assert repr(drafter) == text and drafter.draft_window == drafter.model.draft_window == 8
    assert (
        drafter.has_pending_rows and drafter.advice == drafter.model.advice and drafter.feature_layers(engines.target())
    )
