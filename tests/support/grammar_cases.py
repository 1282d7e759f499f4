"""Requests with grammars for the engines of `tests.support.lettered`, and the tokens that the engines must emit.

There are two cases: regular expressions, which become tables on the device, and context-free grammars, whose masks the
host computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from jspec import Engine, SamplingParams
from tests.reference import descent, regular
from tests.reference.masking import decoded

LENGTH = 18
LIST = r"\{(1|12|(é))+(,(1|12|(é))+)*\}"
READERS: dict[str, Callable[..., bool]] = {
    descent.LISTS: descent.lists,
    descent.PAIRS: descent.pairs,
    json.dumps(descent.OBJECTS): descent.objects,
}
PROMPTS = [[1, 2, 3], [4] * 6, list(range(1, 12)), [5, 1, 5, 1, 5], [7], [9, 9, 2, 1], [3, 1, 2, 3, 1, 2, 3], [6, 2]]
TABLE_PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, regex=LIST, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=LENGTH, regex="((a|b){2}c)*"),
    SamplingParams(seed=3, max_tokens=LENGTH, regex='"(a|b|ab|(é)){3,20}"', top_k=9, draft=2),
    SamplingParams(seed=4, max_tokens=LENGTH, regex="((a|b){2}c){2,9}", stop_token_ids=(5,)),
    SamplingParams(temperature=0, max_tokens=LENGTH),
    SamplingParams(seed=6, max_tokens=LENGTH, regex=LIST, bad_words=[[8], [7, 7], [7, 9]], temperature=1.7),
    SamplingParams(
        seed=7, max_tokens=LENGTH, regex="(c|(é))*", logit_bias={0: -3.0}, allowed_token_ids=[0, 11, 12, 13]
    ),
    SamplingParams(seed=8, max_tokens=LENGTH, presence_penalty=1.0),
]
MASK_PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, grammar=descent.LISTS, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0, max_tokens=LENGTH, regex="((a|b){2}c)*"),
    SamplingParams(seed=3, max_tokens=LENGTH, grammar=descent.LISTS, top_k=9, draft=2),
    SamplingParams(seed=4, max_tokens=LENGTH, grammar=descent.PAIRS, stop_token_ids=(13,), logit_bias={5: 2.0}),
    SamplingParams(temperature=0, max_tokens=LENGTH),
    SamplingParams(seed=6, max_tokens=LENGTH, grammar=descent.LISTS, bad_words=[[15], [1, 1], [2, 9]], temperature=1.7),
    SamplingParams(temperature=0, max_tokens=LENGTH, grammar=descent.PAIRS, frequency_penalty=0.3),
    SamplingParams(seed=8, max_tokens=LENGTH, presence_penalty=1.0, logprobs=0),
]


@dataclass(frozen=True)
class GrammarCase:
    """Eight requests of one kind of grammar.

    Attributes:
        library: the library that the grammars need.
        field: the field of `SamplingParams` that holds the grammar.
        params: parameters of the requests, one for each of `PROMPTS`.
        min_ended: least number of requests that must reach the end of their grammar.
        stuck: a request whose bad words ban every token that its grammar allows.
        stuck_tokens, stuck_error: its output and a pattern of its error.
        invalid, invalid_error: a grammar that no engine can follow and a pattern of the error.
    """

    library: str
    field: str
    params: Sequence[SamplingParams]
    min_ended: int
    stuck: SamplingParams
    stuck_tokens: Sequence[int]
    stuck_error: str
    invalid: str
    invalid_error: str

    def without_grammar(self) -> list[SamplingParams]:
        changes: dict[str, Any] = {self.field: None}
        return [replace(params, **changes) for params in self.params]

    def has_grammar(self) -> list[bool]:
        return [getattr(params, self.field) is not None for params in self.params]

    def expected(self) -> list[list[int]]:
        """Return each request's tokens, decoded token by token under masks."""
        return _expected(self.field)


@cache
def _expected(field: str) -> list[list[int]]:
    return [masked(*each) for each in zip(PROMPTS, CASES[field].params, strict=True)]


def masked(prompt: list[int], params: SamplingParams, seed: int | None = None, **options: Any) -> list[int]:
    """Decode one request token by token, masking the tokens that the grammar does not allow."""
    readers: Mapping[str, Callable[..., bool]] = READERS
    return decoded(prompt, params, seed, readers=readers, **options)


# After "a" the table's grammar requires the token "b" or "ab"; the bad words ban both after "a".
TABLE = GrammarCase(
    library="outlines_core",
    field="regex",
    params=TABLE_PARAMS,
    min_ended=2,
    stuck=SamplingParams(temperature=0, max_tokens=9, regex="(ca)b+", bad_words=[[1, 2], [13, 3]]),
    stuck_tokens=(13, 1, 0),
    stuck_error=r"regex='\(ca\)b\+': after 2 tokens bad_words=\(\(1, 2\), \(13, 3\)\), a thinking budget or the",
    invalid="x",
    invalid_error="none of its texts can be written",
)
MASKS = GrammarCase(
    library="llguidance",
    field="grammar",
    params=MASK_PARAMS,
    min_ended=1,
    stuck=SamplingParams(
        temperature=0, max_tokens=9, grammar='start: "c" "a" ("b" start)?', bad_words=[[13, 1], [13, 3]]
    ),
    stuck_tokens=(13, 0),
    stuck_error="after 1 tokens no token that the grammar allows was left",
    invalid="start: foo",
    invalid_error='unknown name: "foo"',
)
CASES = {case.field: case for case in (TABLE, MASKS)}


def check_decoding(engine: Engine, case: GrammarCase, order: Sequence[int]) -> None:
    """Run the requests numbered in ``order`` and check their tokens, texts and log-probabilities."""
    done = engine.generate([PROMPTS[i] for i in order], [case.params[i] for i in order])
    expected = case.expected()
    assert [completion.raise_for_error().token_ids for completion in done] == [expected[i] for i in order]
    for completion, index in zip(done, order, strict=True):
        params, is_whole = case.params[index], completion.finish_reason in ("eos", "stop")
        check_text(completion.text or "", params, is_whole=is_whole)
        if params.logprobs is not None:
            assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)


def check_text(text: str, params: SamplingParams, *, is_whole: bool) -> None:
    """Check that a whole text matches the request's grammar and that a cut text is the beginning of a match."""
    if params.regex is not None:
        assert regular.matches(params.regex, text.replace("\ufffd", "").encode(), partial=not is_whole)
    if params.grammar is not None:
        assert descent.fits(READERS[params.grammar], text.encode())[is_whole]
