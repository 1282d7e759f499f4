"""Test suffix drafting: single cases, the corpus, the program for an H200, and options."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jspec import Tree
from jspec.draft import matches
from jspec.draft.suffix import Suffix
from tests.support.h200 import compile_for_h200
from tests.support.lookup_runs import POOL, LookupRun, view_of

pytestmark = pytest.mark.once


def test_suffix_drafter_without_a_match_drafts_no_token() -> None:
    tree = Tree.static([(0,), (2,), (0, 1), (2, 0), (2, 0, 1), (1,), (1, 0), (0, 3)])
    run = LookupRun(Suffix(tree))
    run.prompt(1, [1, 2, 3, 4], 5)
    draft, _ = run.draft([1])
    assert draft.valid.sum() == 1 and draft.parents.tolist() == [[-1] * tree.nodes]


def test_suffix_drafter_with_a_full_corpus_drops_the_oldest_tokens() -> None:
    """Drafts end where a text of the corpus ends."""
    run = LookupRun(Suffix(Tree.chain(3), max_n=2, min_n=2, scope="engine", corpus_tokens=8))
    for first in (10, 20, 30, 40):
        run.prompt(0, [first, first + 1, first + 2], first + 3)
        run.draft([0])
    assert run.state.corpus.tolist() == [22, 23, -1, 30, 31, 32, 33, -1]
    run.prompt(1, [31], 32)
    run.prompt(2, [22], 23)
    assert run.draft([1, 2])[0].tokens[:, 1:].tolist() == [[33, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("grouped", [True, False])
def test_suffix_program_for_a_large_corpus_has_under_30_kernels(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one CUDA graph that updates its state in place; the negative control, a full sort, has more kernels."""
    monkeypatch.setattr(matches, "GROUPS", matches.GROUPS if grouped else 2**20)
    drafter, rows = Suffix(Tree.topk(9, 3, 2), scope="engine", corpus_tokens=2**18), [0] * 8
    state = jax.eval_shape(lambda: drafter.init((), POOL))
    view = jax.eval_shape(lambda: view_of(rows, rows, rows, [True] * 8))
    program = compile_for_h200(lambda s, v: drafter.draft((), s, v), state, view, donate_argnums=0)
    text = 4 * (state.corpus.size + state.history.size)
    assert len(program.graphs) == 1 and not program.outside_graphs
    assert program.alias_bytes >= text and not program.copies(1 << 16)
    assert (len(program.launches) < 30) == grouped
    assert (program.temp_bytes < (8 + 1.5) * text) == grouped


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Suffix(min_n=True), "min_n=True"),
        (lambda: Suffix(scope="user"), "expected one of ('request', 'engine'), got 'user'"),
        (lambda: Suffix(corpus_tokens=0), "corpus_tokens: expected an int >= 1, got 0"),
        (lambda: Suffix(scope="engine", corpus_tokens=2**26).init((), POOL), "lower max_n or corpus_tokens"),
    ],
)
def test_suffix_drafter_with_invalid_option_raises(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
