"""Test thinking budgets in the engine: with any drafter the tokens equal those of plain decoding with a host's budget."""

from __future__ import annotations

from functools import cache

import pytest

from jspec import Engine, SamplingParams
from tests.reference import thinking
from tests.reference.masking import decoded
from tests.reference.thinking import END, START
from tests.support import lettered

pytestmark = pytest.mark.once

LENGTH = 18
OPEN = [3, START, 5, 1]  # ends inside reasoning of two tokens
PROMPTS = {
    "open": OPEN,
    "just open": [4] * 9 + [START],
    "waiting": [7, 2, 5],
    "closed": [START, 1, END, 9, 2],
    "long": [START, 2, END, 6, START, *range(1, 9)],
}
ENDS = {"one token": "</think>", "several tokens": "ab1{</think>"}
FORCED = {"one token": [END], "several tokens": [3, 7, 5, END]}
BIAS = {END: 1.5, START: 2.5}


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Budgets around the numbers of thoughts of the prompts, greedy and sampled, alone and with other controls."""
    made = []
    for seed, (budget, prompt) in enumerate((b, p) for b in (0, 1, 2, 3, 5, 8, 30) for p in PROMPTS.values()):
        sampling = dict(temperature=0.0) if seed % 4 == 3 else dict(seed=seed, temperature=1.0)
        more = dict(repetition_penalty=1.2, bad_words=[[END], [3, 7]]) if seed % 5 == 2 else {}
        bias = BIAS if seed % 5 in (0, 1) else {START: 2.5}
        made.append(
            (prompt, SamplingParams(max_tokens=LENGTH, thinking_budget=budget, logit_bias=bias, **sampling, **more))
        )
    return made


def on_host(prompt: list[int], params: SamplingParams, end: str) -> list[int]:
    """Decode token by token with the budget of the reference."""
    return decoded(
        prompt,
        params,
        texts=lettered.THINKING_TEXTS,
        edit=lambda logits, *text: thinking.edited(logits, *text, params.thinking_budget, FORCED[end]),
        answer=thinking.answer,
    )


@cache
def expected(end: str) -> list[list[int]]:
    return [on_host(*request, end) for request in requests()]


@cache
def chain(end: str) -> Engine:
    return lettered.small_chain(lettered.Thoughtful(), thinking_end=ENDS[end])


def check(engine: Engine, end: str) -> None:
    prompts, params = zip(*requests(), strict=True)
    before = engine.metrics
    for order in (1, -1):
        done = engine.generate(prompts[::order], params[::order])
        assert [each.raise_for_error().token_ids for each in done] == expected(end)[::order]
    assert engine.metrics.num_accepted_tokens > before.num_accepted_tokens
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("end", ENDS)
def test_chain_drafting_with_thinking_budgets_emits_the_tokens_of_plain_decoding(end: str) -> None:
    check(chain(end), end)
