"""Test n-gram drafting: single cases, an engine, and options."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from jspec import Engine, SamplingParams, Tree
from jspec.draft.ngram import NGram
from tests.support import engines
from tests.support.lookup_runs import POOL, LookupRun

pytestmark = pytest.mark.once


def test_ngram_drafter_in_a_reused_slot_ignores_the_previous_request() -> None:
    run = LookupRun(NGram(Tree.chain(3), max_n=2))
    run.prompt(0, [1, 2, 3, 1, 2, 3, 1, 2], 3)
    assert run.draft([0])[0].tokens.tolist() == [[3, 1, 2, 3]]
    run.prompt(0, [5, 1], 2)
    assert run.draft([0])[0].valid.tolist() == [[True, False, False, False]]


def test_ngram_chain_that_reaches_the_root_is_extended_only_by_a_second_match() -> None:
    run = LookupRun(NGram(Tree.chain(5), max_n=4))
    run.prompt(0, [7, 8], 7)
    assert run.draft([0])[0].tokens.tolist() == [[7, 8, 7, 0, 0, 0]]
    run.prompt(0, [4] * 9, 4)
    assert run.draft([0])[0].tokens.tolist() == [[4] * 6]


@cache
def engine() -> Engine:
    options: dict[str, Any] = dict(slots=2, max_len=engines.MAX_LEN, buckets=(2,), prefill_buckets=(8,))
    return Engine(engines.target(), drafter=NGram(Tree.chain(4)), **options)


@pytest.mark.parametrize("draft", [True, False])
def test_ngram_drafter_on_repetitive_prompt_has_mean_acceptance_length_above_1_5(draft: bool) -> None:
    """Negative control: the prompt is decoded without drafting."""
    params = SamplingParams(max_tokens=30, temperature=0, draft=draft)
    (done,) = engine().generate([9, 2, 6, 5, 9, 2, 6, 5, 9, 2], params)
    assert (done.metrics.mean_acceptance_length > 1.5) == draft


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGram(max_n=2, min_n=3), "1 <= min_n <= max_n"),
        (lambda: NGram(min_n=0), "min_n=0"),
        (lambda: NGram(max_n=2.0), "max_n=2.0"),  # type: ignore[arg-type]
        (lambda: NGram(max_n=2**25).init((), POOL), "lower max_n or max_len"),
    ],
)
def test_ngram_drafter_with_invalid_option_raises(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
