"""Test n-gram and suffix drafting: drafts and matches equal the oracle's, and decoding is lossless."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Drafter, Engine, Model, Tree
from jspec.draft import lookup, matches, prediction, suffix
from jspec.draft.lookup import build_trie, write_emitted, write_pieces
from jspec.draft.matches import GAP, continuations, find_ngram_matches
from jspec.draft.ngram import NGram
from jspec.draft.prediction import load
from jspec.draft.suffix import Suffix, append_to_corpus, search_text
from jspec.tools.testing import check_lossless
from tests.reference.lookup import length_at
from tests.support import engines
from tests.support.arrays import on_device
from tests.support.lookup_runs import CORPUS, MAX_LEN, POOL, SLOTS, run_random_requests, view_of

pytestmark = pytest.mark.once

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


CASES = [
    *(("ngram", tree) for tree in TREES),
    ("ngram, two agree", "chain"),
    *(("suffix", tree) for tree in ("second best", "static", "topk")),
    *(("engine", tree) for tree in ("chain", "static", "wide")),
]


@pytest.mark.parametrize(("method", "tree"), CASES)
def test_lookup_drafts_of_random_requests_equal_those_of_the_oracle(method: str, tree: str) -> None:
    assert run_random_requests(DRAFTERS[method](TREES[tree])) > 60


@pytest.mark.parametrize(
    ("method", "tree"),
    [("ngram", "chain"), ("ngram, two agree", "static"), ("suffix", "topk"), ("engine", "chain"), ("engine", "wide")],
)
def test_lookup_drafts_of_random_requests_with_predictions_equal_those_of_the_oracle(method: str, tree: str) -> None:
    assert run_random_requests(DRAFTERS[method](TREES[tree]), predicted=12) > 60


# -- negative controls: each wrong part makes the run fail


def one_token_late(text: Any, ends: Any, depth: int) -> Any:
    return continuations(text, jnp.where(ends >= 0, ends + 1, ends), depth)


def worst_first(text: Any, query: Any, **options: Any) -> Any:
    matches = find_ngram_matches(text, query, **options)
    return matches._replace(ends=matches.ends[:, ::-1])


def unmerged(tokens: Any, *, by_count: bool, weights: Any) -> Any:
    trie = build_trie(tokens, by_count=by_count)
    own = jnp.broadcast_to(on_device(np.arange(tokens.shape[2])), tokens.shape)
    return trie._replace(leader=own, leads=tokens >= 0, rank=own)


def other_order(tokens: Any, *, by_count: bool, weights: Any) -> Any:
    return build_trie(tokens, by_count=not by_count)


def without_gaps(history: Any, view: Any, batch: Any) -> Any:
    """Keep the tokens of the slot's previous request after the piece."""
    slots = jnp.broadcast_to(batch.of_piece(view.slots, padding=SLOTS)[:, None], batch.tokens.shape)
    places = jnp.where(batch.valid, batch.positions, history.shape[1])
    return history.at[slots, places].set(batch.tokens, mode="drop")


def with_padding(history: Any, view: Any, batch: Any) -> Any:
    return write_pieces(history, view, batch.replace(valid=jnp.ones_like(batch.valid)))


def inactive_rows_too(history: Any, view: Any, verdict: Any) -> Any:
    return write_emitted(history, view.replace(active=jnp.ones_like(view.active)), verdict)


def never_appended(corpus: Any, history: Any, view: Any, batch: Any) -> Any:
    return corpus


def texts_joined(corpus: Any, history: Any, view: Any, batch: Any) -> Any:
    """Append each text to the corpus without a gap after it."""
    appended = append_to_corpus(corpus, history, view, batch)
    return jnp.where(jnp.any(appended != corpus), jnp.roll(appended, 1), appended)


def appended_every_piece(corpus: Any, history: Any, view: Any, batch: Any) -> Any:
    return append_to_corpus(corpus, history, view, batch.replace(starts=jnp.zeros_like(batch.starts)))


def no_preference(history: Any, corpus: Any, view: Any) -> Any:
    text, own = search_text(history, corpus, view)
    return text, jnp.zeros_like(own)


@pytest.mark.parametrize(
    ("method", "module", "name", "wrong"),
    [
        ("ngram", lookup, "continuations", one_token_late),
        ("ngram", lookup, "find_ngram_matches", worst_first),
        ("ngram", lookup, "build_trie", unmerged),
        ("ngram", lookup, "build_trie", other_order),
        ("suffix", lookup, "build_trie", other_order),
        ("ngram", lookup, "write_pieces", without_gaps),
        ("ngram", lookup, "write_pieces", with_padding),
        ("engine", lookup, "write_emitted", inactive_rows_too),
        ("engine", suffix, "append_to_corpus", never_appended),
        ("engine", suffix, "append_to_corpus", texts_joined),
        ("engine", suffix, "append_to_corpus", appended_every_piece),
        ("engine", suffix, "search_text", no_preference),
    ],
)
def test_lookup_drafter_with_a_fault_drafts_other_tokens_than_the_oracle(
    method: str, module: Any, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DRAFTERS[method](GAPS)
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        run_random_requests(drafter)


# -- those of predictions


def over_the_end(text: Any, ends: Any, depth: int) -> Any:
    """Go on after a prediction's end as if another text followed without a gap."""
    return continuations(jnp.where(text == GAP, 1, text), ends, depth)


def from_the_prompt(text: Any, query: Any, **options: Any) -> Any:
    """Take what precedes a prediction for something else than what precedes the output."""
    return find_ngram_matches(jnp.where(text == prediction.START, GAP, text), query, **options)


def last_first(text: Any, query: Any, *, place: Any, **options: Any) -> Any:
    return find_ngram_matches(text, query, **options)


def stale(predictions: Any, packed: Any) -> Any:
    """Keep the prediction of the slot's previous request if the new one has none."""
    loaded = load(predictions, packed)
    return jax.tree.map(lambda old, new: jnp.where(packed[2] >= 0, new, old), predictions, loaded)


def unweighted(tokens: Any, *, by_count: bool, weights: Any) -> Any:
    return build_trie(tokens, by_count=by_count)


def kept(places: Any, slots: Any) -> Any:
    return places


@pytest.mark.parametrize(
    ("method", "module", "name", "wrong"),
    [
        ("ngram", prediction, "continuations", over_the_end),
        ("ngram", prediction, "find_ngram_matches", from_the_prompt),
        ("ngram", prediction, "find_ngram_matches", last_first),
        ("ngram", prediction, "load", stale),
        ("suffix", lookup, "build_trie", unweighted),
        ("ngram", prediction.Places, "forget", kept),
        ("ngram", prediction.Places, "follow", lambda places, view, verdict: places),
    ],
)
def test_lookup_drafter_with_a_fault_in_predictions_drafts_other_tokens_than_the_oracle(
    method: str, module: Any, name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = DRAFTERS[method](GAPS)
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        run_random_requests(drafter, predicted=12)


@pytest.mark.parametrize("places", [None, (0, 20, 52)])
@pytest.mark.parametrize("groups", [None, 8])
@pytest.mark.parametrize("texts", [1, 3])
def test_ngram_search_on_random_texts_finds_the_best_match_of_each_group(
    texts: int, groups: int | None, places: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if groups is not None:
        monkeypatch.setattr(matches, "GROUPS", groups)
    rng = np.random.default_rng(texts)
    text, query = rng.integers(0, 2, (texts, 53)), rng.integers(0, 2, (3, 4))
    text[rng.random(text.shape) < 0.05] = lookup.GAP
    query[0, 2] = lookup.UNKNOWN
    lost = 0
    preferred = np.array([[10, 20], [0, 53], [40, 44]])
    options = dict(
        min_n=2, count=7, preferred=on_device(preferred), place=None if places is None else on_device(places)
    )
    ends, longest, lengths = lookup.find_ngram_matches(on_device(text), on_device(query), **options)

    def order(end: int, row: int) -> int:
        if places is None:
            return end
        return places[row] - end - 1000 * (end < places[row])  # at the place first, then those after it

    for row in range(3):
        line, asked = text[row % texts].tolist(), query[row].tolist()
        scored = sorted(
            (length, preferred[row, 0] <= end < preferred[row, 1], order(end, row), end)
            for end in range(52)
            if (length := length_at(line, end, asked)) >= 2 and line[end + 1] >= 0
        )
        kept = {match[-1] % (groups or 53): match for match in scored}  # the last one wins
        kept_best = sorted(kept.values(), reverse=True)[:7]
        best = [end for *_, end in kept_best]
        assert ends[row].tolist() == best + [-1] * (7 - len(best))
        assert longest[row] == max((length for length, *_ in scored), default=0)
        assert lengths[row].tolist() == [length for length, *_ in kept_best] + [0] * (7 - len(best))
        lost += len(scored) - len(kept)
    assert (lost > 0) == (groups is not None)


# -- programs and engines


def constants(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the number of elements in the constants of a function's program."""
    return sum(np.size(constant) for constant in jax.make_jaxpr(function)(*arguments).consts)


@pytest.mark.parametrize("method", DRAFTERS)
def test_lookup_draft_program_with_state_as_argument_has_no_large_constant(method: str) -> None:
    drafter, view = DRAFTERS[method](GAPS), view_of([0], [5], [1], [True])
    state = drafter.init((), POOL)
    assert constants(lambda s: drafter.draft((), s, view_of([0], [5], [1], [True])), state) < 5 * GAPS.nodes
    assert constants(lambda v: drafter.draft((), state, v), view) >= SLOTS * MAX_LEN  # negative control


PROMPTS = [[3, 1, 4, 3, 1], [1, 5], [9, 2, 6, 5, 9, 2, 6, 5, 9, 2], [3]]
OPTIONS: dict[str, Any] = dict(slots=2, max_len=engines.MAX_LEN, buckets=(2,), prefill_buckets=(8,), controls=False)
TOKENS = 20


@pytest.fixture(scope="module")
def plain() -> Engine:
    return engines.plain()


ENGINES: dict[str, tuple[Drafter, dict[str, Any]]] = {
    "chain": (NGram(Tree.chain(4)), {}),
    "static": (Suffix(GAPS, scope="engine", corpus_tokens=64), dict(page_size=4)),
    "topk": (Suffix(Tree.topk(9, 3, 3)), dict(rounds_per_dispatch=2)),
}


@cache
def engine_of(name: str) -> Engine:
    drafter, options = ENGINES[name]
    return Engine(engines.target(), drafter=drafter, **(OPTIONS | options))


@pytest.mark.parametrize("name", ["chain", pytest.param("static", marks=pytest.mark.long), "topk"])
def test_engine_with_lookup_drafter_is_lossless_and_accepts_drafts(name: str, plain: Engine) -> None:
    """Slots are reused because there are more prompts than slots; every prompt is decoded greedily and sampled."""
    engine = engine_of(name)
    before = engine.metrics.num_accepted_tokens

    def make_engine(target: Model, **given: Any) -> AbstractContextManager[Engine]:
        return nullcontext(engine if "drafter" in given else plain)

    check_lossless(ENGINES[name][0], engines.target(), PROMPTS, max_tokens=TOKENS, make_engine=make_engine)
    assert engine.metrics.num_accepted_tokens > before + 20
