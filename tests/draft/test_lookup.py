"""N-gram and suffix drafting draw the trees that a search by hand finds, and decode losslessly."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Drafter, Engine, Model, SamplingParams, Tree
from jspec.core.records import Draft, SlotView, TokenBatch, Verdict
from jspec.draft import lookup, ngram, suffix
from jspec.draft.ngram import NGram
from jspec.draft.suffix import Suffix, keep_old, searched
from jspec.models.kv_cache import PoolShape
from jspec.tools.testing import check_lossless
from jspec.verify import Coupled
from tests.support import small
from tests.support.h200 import compile_for_h200

pytestmark = pytest.mark.once

SLOTS, MAX_LEN, BUCKET, CHUNK = 3, 40, 5, 6
POOL = PoolShape(slots=SLOTS, pages=9, page_size=16, max_len=MAX_LEN, dtype="float32", draft_dtype="float32")
CORPUS = 30
GAPS = Tree.static([(0,), (2,), (0, 1), (2, 0), (2, 0, 1), (1,), (1, 0), (0, 3)])
TREES = {
    "chain": Tree.chain(5),
    "second best": Tree.static([(1,), (1, 0)]),  # a chain too
    "static": GAPS,
    "topk": Tree.topk(9, 3, 2),
    "wide": Tree.topk(24, 3, 5),
}
DRAFTERS: dict[str, Callable[[Tree], NGram | Suffix]] = {
    "ngram": lambda tree: NGram(tree, max_n=3),
    "ngram, two agree": lambda tree: NGram(tree, max_n=4, min_n=2),
    "suffix": lambda tree: Suffix(tree, max_n=6),
    "engine": lambda tree: Suffix(tree, max_n=5, scope="engine", corpus_tokens=CORPUS),
}


# -- the oracle, on lists of tokens

Tail = tuple[int, list[int]]  # number of a match, the best being 0, and what is left of its continuation
Node = tuple[int, int, int]  # parent, token, matches through it


def length_at(text: list[int], end: int, query: list[int]) -> int:
    """How many tokens of the query, newest first, equal those of the text from ``end`` backwards."""
    length = 0
    while length < len(query) and end >= length and text[end - length] == query[length]:
        length += 1
    return length


def tails(texts: list[list[int]], own: int, drafter: NGram | Suffix, count: int) -> list[Tail]:
    """Continuations of the best matches of the end of ``texts[own]``; texts stand from the oldest to the newest."""
    query = texts[own][::-1][: drafter.max_n]
    found = [
        (length, number == own, number, end)
        for number, text in enumerate(texts)
        for end in range(len(text) - 1)
        if (length := length_at(text, end, query)) >= drafter.min_n
    ]
    best = sorted(found, reverse=True)[:count]
    return [(place, texts[number][end + 1 :]) for place, (_, _, number, end) in enumerate(best)]


def children(group: list[Tail], *, by_count: bool) -> list[tuple[int, list[Tail]]]:
    """The distinct next tokens, best first, each with the matches that go on with it."""
    groups: dict[int, list[Tail]] = {}
    for number, tail in group:
        if tail:
            groups.setdefault(tail[0], []).append((number, tail[1:]))
    return sorted(groups.items(), key=lambda item: -len(item[1]) if by_count else 0)


def static_nodes(group: list[Tail], tree: Tree, *, by_count: bool) -> list[Node]:
    nodes: list[Node] = []
    places: dict[tuple[int, ...], tuple[int, list[Tail]]] = {(): (0, group)}
    assert tree.paths is not None
    for path in tree.paths:
        if path[:-1] in places:
            parent, passing = places[path[:-1]]
            options = children(passing, by_count=by_count)
            if path[-1] < len(options):
                token, inner = options[path[-1]]
                nodes.append((parent, token, len(inner)))
                places[path] = len(nodes), inner
    return nodes


def dynamic_nodes(group: list[Tail], tree: Tree, *, by_count: bool) -> list[Node]:
    """Of all nodes of the trie, with k children each at most, those that most matches pass through."""
    all_nodes: list[tuple[tuple[int, int, int], tuple[int, ...]]] = []

    def visit(text: tuple[int, ...], passing: list[Tail]) -> None:
        if len(text) < tree.depth:
            for token, inner in children(passing, by_count=by_count)[: tree.k]:
                all_nodes.append(((-len(inner), len(text), inner[0][0]), (*text, token)))
                visit((*text, token), inner)

    visit((), group)
    kept = sorted(all_nodes)[: tree.nodes - 1]
    index = {(): 0} | {text: number for number, (_, text) in enumerate(kept, 1)}
    return [(index[text[:-1]], text[-1], -passing) for (passing, _, _), text in kept]


def expected_nodes(texts: list[list[int]], own: int, drafter: NGram | Suffix) -> tuple[list[Node], list[float]]:
    """Nodes behind the root, and their scores."""
    tree, by_count = drafter.tree, isinstance(drafter, Suffix)
    leaves = 0 if tree.paths is None else len(set(tree.paths) - {path[:-1] for path in tree.paths})
    count = max(4 * (leaves + tree.k), tree.depth, -(-(tree.nodes - 1) // tree.depth))
    group = tails(texts, own, drafter, count)
    nodes = (dynamic_nodes if tree.paths is None else static_nodes)(group, tree, by_count=by_count)
    certain = tree.is_chain and not by_count
    return nodes, [0.0 if certain else float(np.log(passing / len(group))) for _, _, passing in nodes]


# -- a drafter at work, without a target


class Play:
    """Moves a drafter's state as an engine would, and keeps what it must know in lists."""

    def __init__(self, drafter: NGram | Suffix) -> None:
        self.drafter = drafter
        self.state = drafter.init((), POOL)
        self.texts: list[list[int]] = [[] for _ in range(SLOTS)]  # by slot
        self.lengths, self.roots, self.active = [0] * SLOTS, [0] * SLOTS, [False] * SLOTS
        self.corpus: list[int] = []
        self._prefill = jax.jit(lambda s, v, b: drafter.prefill((), s, v, b, None), donate_argnums=0)
        self._draft = jax.jit(lambda s, v: drafter.draft((), s, v), donate_argnums=0)
        self._commit = jax.jit(lambda s, v, d, t: drafter.commit((), s, v, d, t, None), donate_argnums=0)

    def prompt(self, slot: int, tokens: list[int], root: int) -> None:
        """A new request, in chunks that are padded with tokens."""
        if self.texts[slot]:
            self.corpus = (self.corpus + self.texts[slot] + [-1])[-CORPUS:]
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            batch = TokenBatch(
                tokens=jnp.array([chunk + [1] * (CHUNK - len(chunk))]),
                positions=jnp.arange(start, start + CHUNK)[None],
                valid=jnp.arange(CHUNK)[None] < len(chunk),
                first_row=jnp.array([start]),
                page_table=None,
                bits=None,
                implementation="reference",
            )
            self.state = self._prefill(self.state, view_of([slot], [start], [0], [True]), batch)
        self.texts[slot], self.lengths[slot], self.roots[slot] = list(tokens), len(tokens), root
        self.active[slot] = True

    def draft(self, slots: list[int]) -> tuple[Draft, SlotView]:
        """Draft for some slots (`SLOTS`: padding) and check every row."""
        live = [slot < SLOTS and self.active[slot] for slot in slots]
        lengths = [self.lengths[s] if on else 0 for s, on in zip(slots, live, strict=True)]
        roots = [self.roots[s] if s < SLOTS else 0 for s in slots]
        view = view_of(slots, lengths, roots, live)
        for slot, on in zip(slots, live, strict=True):
            if on:
                self.texts[slot] = [*self.texts[slot][: self.lengths[slot]], self.roots[slot]]
        draft, self.state = self._draft(self.state, view)
        for row, (slot, on) in enumerate(zip(slots, live, strict=True)):
            nodes, scores = self.expected(slot) if on else ([], [])
            check_row(draft, row, roots[row], nodes, scores)
        return draft, view

    def expected(self, slot: int) -> tuple[list[Node], list[float]]:
        if getattr(self.drafter, "scope", "request") == "request":
            return expected_nodes([self.texts[slot]], 0, self.drafter)
        old, text = [], []
        for token in self.corpus:
            if token < 0:
                old.append(text)
                text = []
            else:
                text.append(token)
        return expected_nodes(old + self.texts, len(old) + slot, self.drafter)

    def round(self, slots: list[int], emitted: list[list[int]]) -> Draft:
        """Draft and commit; rows that are not active emit tokens too, which nobody may keep."""
        draft, view = self.draft(slots)
        tokens = np.full((len(slots), self.drafter.tree.depth + 1), -1, np.int32)
        for row, (slot, new) in enumerate(zip(slots, emitted, strict=True)):
            tokens[row, : len(new)] = new
            if view.active[row]:
                self.texts[slot] += new
                self.lengths[slot] += len(new)
                self.roots[slot] = new[-1]
        verdict = Verdict(accept_len=None, path=None, tokens=jnp.array(tokens), counts=None, ended=None)
        self.state = self._commit(self.state, view, draft, verdict)
        return draft


def view_of(slots: list[int], lengths: list[int], roots: list[int], active: list[bool]) -> SlotView:
    return SlotView(
        slots=jnp.array(slots, jnp.int32),
        root=jnp.array(roots, jnp.int32),
        lengths=jnp.array(lengths, jnp.int32),
        active=jnp.array(active),
        remaining=None,
        page_table=None,
        sampling=None,
        accept=Coupled(),
        all_greedy=False,
        implementation="reference",
    )


def check_row(draft: Draft, row: int, root: int, nodes: list[Node], scores: list[float]) -> None:
    """The root, the nodes in their order, then padding."""
    padding = draft.tokens.shape[1] - 1 - len(nodes)
    assert draft.probs is None and draft.vocab_map is None
    assert draft.valid[row].tolist() == [True] * (1 + len(nodes)) + [False] * padding
    assert draft.parents[row].tolist() == [-1, *(parent for parent, _, _ in nodes)] + [-1] * padding
    assert draft.tokens[row].tolist() == [root, *(token for _, token, _ in nodes)] + [0] * padding
    np.testing.assert_allclose(draft.scores[row], [0.0, *scores] + [0.0] * padding, atol=1e-6)


def play(drafter: NGram | Suffix, *, seed: int = 0, steps: int = 60) -> int:
    """Requests of random tokens from small alphabets come, go on, end and give their slots away.

    Returns:
        Tokens drafted.
    """
    rng, at_work = np.random.default_rng(seed), Play(drafter)
    drafted = 0

    def tokens(count: int) -> list[int]:
        return rng.integers(0, alphabet, count).tolist()

    for step in range(steps):
        alphabet = int(rng.integers(2, 5))
        slot = step if step < SLOTS else int(rng.integers(0, SLOTS))
        if step < SLOTS or rng.random() < 0.3:
            at_work.prompt(slot, tokens(int(rng.integers(1, 16))), tokens(1)[0])
        elif rng.random() < 0.1:
            at_work.active[slot] = False
        most = drafter.tree.depth + 1
        full = [s for s in range(SLOTS) if at_work.lengths[s] + most >= MAX_LEN]
        slots = [s for s in rng.permutation(SLOTS).tolist() if s not in full] + [SLOTS] * (BUCKET - SLOTS + len(full))
        draft = at_work.round(slots, [tokens(int(rng.integers(1, most + 1))) for _ in slots])
        drafted += int(draft.valid[:, 1:].sum())
    return drafted


CASES = [
    *(("ngram", tree) for tree in TREES),
    ("ngram, two agree", "chain"),
    *(("suffix", tree) for tree in ("second best", "static", "topk")),
    *(("engine", tree) for tree in ("chain", "static", "wide")),
]


@pytest.mark.parametrize(("method", "tree"), CASES)
def test_every_draft_is_the_tree_found_by_hand(method: str, tree: str) -> None:
    assert play(DRAFTERS[method](TREES[tree])) > 60


# -- negative controls: each wrong part fails the play


def late(text: Any, ends: Any, depth: int) -> Any:
    return lookup.continuations(text, jnp.where(ends >= 0, ends + 1, ends), depth)


def oldest_first(text: Any, query: Any, **options: Any) -> Any:
    return lookup.find(text, query, **options)[:, ::-1]


def unmerged(tokens: Any, *, by_count: bool) -> Any:
    trie = lookup.merge(tokens, by_count=by_count)
    own = jnp.broadcast_to(jnp.arange(tokens.shape[2]), tokens.shape)
    return trie._replace(leader=own, leads=tokens >= 0, rank=own)


def by_best(tokens: Any, *, by_count: bool) -> Any:
    return lookup.merge(tokens, by_count=not by_count)


def stale(history: Any, view: Any, batch: Any) -> Any:
    slots = jnp.broadcast_to(view.slots[:, None], batch.tokens.shape)
    places = jnp.where(batch.valid, batch.positions, history.shape[1])
    return history.at[slots, places].set(batch.tokens, mode="drop")


def padded(history: Any, view: Any, batch: Any) -> Any:
    return lookup.take_chunk(history, view, batch.replace(valid=jnp.ones_like(batch.valid)))


def ended_too(history: Any, view: Any, verdict: Any) -> Any:
    return lookup.take_verdict(history, view.replace(active=jnp.ones_like(view.active)), verdict)


def forgotten(corpus: Any, history: Any, view: Any, batch: Any) -> Any:
    return corpus


def joined(corpus: Any, history: Any, view: Any, batch: Any) -> Any:
    """Without the gap behind each text."""
    kept = keep_old(corpus, history, view, batch)
    return jnp.where(jnp.any(kept != corpus), jnp.roll(kept, 1), kept)


def always(corpus: Any, history: Any, view: Any, batch: Any) -> Any:
    return keep_old(corpus, history, view, batch.replace(first_row=jnp.zeros_like(batch.first_row)))


def nobodys(history: Any, corpus: Any, view: Any) -> Any:
    text, own = searched(history, corpus, view)
    return text, jnp.zeros_like(own)


@pytest.mark.parametrize(
    ("method", "name", "wrong"),
    [
        ("ngram", "continuations", late),
        ("ngram", "find", oldest_first),
        ("ngram", "merge", unmerged),
        ("ngram", "merge", by_best),
        ("suffix", "merge", by_best),
        ("ngram", "take_chunk", stale),
        ("ngram", "take_chunk", padded),
        ("engine", "take_verdict", ended_too),
        ("engine", "keep_old", forgotten),
        ("engine", "keep_old", joined),
        ("engine", "keep_old", always),
        ("engine", "searched", nobodys),
    ],
)
def test_a_wrong_part_is_noticed(
    method: str, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DRAFTERS[method](GAPS)
    monkeypatch.setattr(ngram if method == "ngram" else suffix, name, wrong)
    with pytest.raises(AssertionError):
        play(drafter)


# -- single claims


def test_a_reused_slot_knows_nothing_of_its_last_request() -> None:
    at_work = Play(NGram(Tree.chain(3), max_n=2))
    at_work.prompt(0, [1, 2, 3, 1, 2, 3, 1, 2], 3)
    assert at_work.draft([0])[0].tokens.tolist() == [[3, 1, 2, 3]]
    at_work.prompt(0, [5, 1], 2)
    assert at_work.draft([0])[0].valid.tolist() == [[True, False, False, False]]


def test_without_a_match_nothing_is_drafted() -> None:
    at_work = Play(Suffix(GAPS))
    at_work.prompt(1, [1, 2, 3, 4], 5)
    draft, _ = at_work.draft([1])
    assert draft.valid.sum() == 1 and draft.parents.tolist() == [[-1] * GAPS.nodes]


def test_a_continuation_ends_at_the_root_and_the_next_match_takes_over() -> None:
    at_work = Play(NGram(Tree.chain(5), max_n=4))
    at_work.prompt(0, [7, 8], 7)
    assert at_work.draft([0])[0].tokens.tolist() == [[7, 8, 7, 0, 0, 0]]
    at_work.prompt(0, [4] * 9, 4)
    assert at_work.draft([0])[0].tokens.tolist() == [[4] * 6]


def test_the_corpus_forgets_its_oldest_tokens_and_crosses_no_border() -> None:
    at_work = Play(Suffix(Tree.chain(3), max_n=2, min_n=2, scope="engine", corpus_tokens=8))
    for first in (10, 20, 30, 40):
        at_work.prompt(0, [first, first + 1, first + 2], first + 3)
        at_work.draft([0])
    assert at_work.state.corpus.tolist() == [22, 23, -1, 30, 31, 32, 33, -1]
    at_work.prompt(1, [31], 32)
    at_work.prompt(2, [22], 23)
    assert at_work.draft([1, 2])[0].tokens[:, 1:].tolist() == [[33, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("groups", [None, 8])
@pytest.mark.parametrize("texts", [1, 3])
def test_matches_are_the_best_of_their_groups(texts: int, groups: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if groups is not None:
        monkeypatch.setattr(lookup, "GROUPS", groups)
    rng = np.random.default_rng(texts)
    text, query = rng.integers(0, 2, (texts, 53)), rng.integers(0, 2, (3, 4))
    text[rng.random(text.shape) < 0.05] = lookup.GAP
    query[0, 2] = lookup.UNKNOWN
    lost = 0
    preferred = np.array([[10, 20], [0, 53], [40, 44]])
    ends = lookup.find(jnp.array(text), jnp.array(query), min_n=2, count=7, preferred=jnp.array(preferred))
    for row in range(3):
        line, asked = text[row % texts].tolist(), query[row].tolist()
        scored = sorted(
            (length, preferred[row, 0] <= end < preferred[row, 1], end)
            for end in range(52)
            if (length := length_at(line, end, asked)) >= 2 and line[end + 1] >= 0
        )
        kept = {end % (groups or 53): (length, own, end) for length, own, end in scored}  # the last one wins
        best = [end for _, _, end in sorted(kept.values(), reverse=True)][:7]
        assert ends[row].tolist() == best + [-1] * (7 - len(best))
        lost += len(scored) - len(kept)
    assert (lost > 0) == (groups is not None)


# -- as a part of the program, and of an engine


def constants(function: Callable[..., Any], *arguments: Any) -> int:
    """Elements that the program of a function holds as constants."""
    return sum(np.size(constant) for constant in jax.make_jaxpr(function)(*arguments).consts)


@pytest.mark.parametrize("method", DRAFTERS)
def test_no_text_is_a_constant_of_the_program(method: str) -> None:
    drafter, view = DRAFTERS[method](GAPS), view_of([0], [5], [1], [True])
    state = drafter.init((), POOL)
    assert constants(lambda s: drafter.draft((), s, view_of([0], [5], [1], [True])), state) < 5 * GAPS.nodes
    assert constants(lambda v: drafter.draft((), state, v), view) >= SLOTS * MAX_LEN  # the negative control


@pytest.mark.parametrize("grouped", [True, False])
def test_a_large_search_takes_few_kernels_and_one_score_a_position(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for an H200: one graph, in place. A full sort, the control, takes more kernels and more memory."""
    monkeypatch.setattr(lookup, "GROUPS", lookup.GROUPS if grouped else 2**20)
    drafter, rows = Suffix(TREES["topk"], scope="engine", corpus_tokens=2**18), [0] * 8
    state = jax.eval_shape(lambda: drafter.init((), POOL))
    view = jax.eval_shape(lambda: view_of(rows, rows, rows, [True] * 8))
    program = compile_for_h200(lambda s, v: drafter.draft((), s, v), state, view, donate_argnums=0)
    text = 4 * (state.corpus.size + state.history.size)
    assert len(program.graphs) == 1 and not program.outside_graphs
    assert program.alias_bytes >= text and not program.copies(1 << 16)
    assert (len(program.launches) < 30) == grouped
    assert (program.temp_bytes < (8 + 1.5) * text) == grouped


PROMPTS = [[3, 1, 4, 3, 1], [1, 5], [9, 2, 6, 5, 9, 2, 6, 5, 9, 2], [3]]
OPTIONS: dict[str, Any] = dict(slots=2, max_len=small.MAX_LEN, buckets=(2,), prefill_buckets=(8,))
TOKENS = 20


@pytest.fixture(scope="module")
def plain() -> Engine:
    return small.plain()


ENGINES: dict[str, tuple[Drafter, dict[str, Any]]] = {
    "chain": (NGram(Tree.chain(4)), {}),
    "static": (Suffix(GAPS, scope="engine", corpus_tokens=64), dict(page_size=4)),
    "topk": (Suffix(Tree.topk(9, 3, 3)), dict(rounds_per_dispatch=2)),
}


@cache
def engine_of(name: str) -> Engine:
    drafter, options = ENGINES[name]
    return Engine(small.target(), drafter=drafter, **(OPTIONS | options))


@pytest.mark.parametrize("name", ["chain", "static", "topk"])
def test_decoding_is_lossless_and_drafts_are_accepted(name: str, plain: Engine) -> None:
    """More prompts than slots, so slots are reused; all of them twice, greedy and sampled."""
    engine = engine_of(name)
    before = engine.metrics.num_accepted_tokens

    def make_engine(target: Model, **given: Any) -> AbstractContextManager[Engine]:
        return nullcontext(engine if "drafter" in given else plain)

    check_lossless(ENGINES[name][0], small.target(), PROMPTS, max_tokens=TOKENS, make_engine=make_engine)
    assert engine.metrics.num_accepted_tokens > before + 20


@pytest.mark.parametrize("draft", [True, False])
def test_a_repetitive_text_is_drafted_well(draft: bool) -> None:
    """Decoding the same prompt without drafting is the control."""
    params = SamplingParams(max_tokens=30, temperature=0, draft=draft)
    (done,) = engine_of("chain").generate(PROMPTS[2], params)
    assert (done.metrics.mean_acceptance_length > 1.5) == draft


# -- options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGram(max_n=2, min_n=3), "1 <= min_n <= max_n"),
        (lambda: NGram(min_n=0), "min_n=0"),
        (lambda: NGram(max_n=2.0), "max_n=2.0"),  # type: ignore[arg-type]
        (lambda: Suffix(min_n=True), "min_n=True"),
        (lambda: Suffix(scope="user"), "expected one of ('request', 'engine'), got 'user'"),
        (lambda: Suffix(corpus_tokens=0), "corpus_tokens: expected an int >= 1, got 0"),
        (lambda: Suffix(scope="engine", corpus_tokens=2**26).init((), POOL), "lower max_n or corpus_tokens"),
        (lambda: NGram(max_n=2**25).init((), POOL), "lower max_n or max_len"),
    ],
)
def test_wrong_options_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
