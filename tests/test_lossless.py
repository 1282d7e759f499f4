"""The claim of the project: with or without drafting, by whatever drafter, the tokens are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jspec import Completion, DraftModel, Drafter, Eagle3, Engine, Model, SamplingParams, Tree
from jspec.draft.eagle import EagleHead
from jspec.testing import NEAR_TIE, AlwaysWrong, Random, always_right, differences
from jspec.tokenizer import load_tokenizer
from tests import cover, tiny

LONGEST_PROMPT = 250
FACTORS: dict[str, tuple[Any, ...]] = {
    "pair": ("golden", "stories"),
    "drafter": ("eagle3", "small", "right", "wrong", "random"),
    "length": (1, 2, 5),
    "page": (1, 16, 64),
    "buckets": ((1,), (1, 4), (1, 2, 8)),
}
ROUNDS = {1: 1, 2: 3, 5: 1}  # rounds per dispatch, by draft length


@dataclass(frozen=True)
class Pair:
    """A target with prompts, a head and a small draft model."""

    target: Model
    head: EagleHead | None
    small: Model
    prompts: list[list[int]]


@cache
def pair(name: str, golden: Path, data: Path) -> Pair:
    cuts = tiny.text_cuts(data, 100, longest=LONGEST_PROMPT)
    if name == "golden":
        target = tiny.load_target(golden / "target")
        head = tiny.load_head(golden / "draft_specforge_like")
        return Pair(target, head, tiny.one_layer(target), [list(cut.encode())[:LONGEST_PROMPT] for cut in cuts])
    target = tiny.load_target(data / "stories260k")
    tokenizer = load_tokenizer(data / "stories260k")
    assert tokenizer is not None
    prompts = [tokenizer.encode(cut)[:LONGEST_PROMPT] for cut in cuts]
    head = tiny.eagle_head(target, draft_vocab=200, feature_layers=(1, 3, 4))
    return Pair(target, head, tiny.model(512, layers=1, seed=3), prompts)


DRAFTERS: dict[str, Callable[[Pair, Tree], Drafter]] = {
    "eagle3": lambda pair, tree: Eagle3(pair.head, tree),
    "small": lambda pair, tree: DraftModel(pair.small, tree),
    "right": lambda pair, tree: always_right(pair.target, tree),
    "wrong": lambda pair, tree: AlwaysWrong(always_right(pair.target, tree)),
    "random": lambda pair, tree: Random(tree),
}


def parameters(count: int, tokens: int, temperature: float) -> list[SamplingParams]:
    """Greedy, or sampled with a seed a prompt and every fourth row greedy; every fifth with the other controls on."""
    if temperature == 0:
        return [SamplingParams(max_tokens=tokens, temperature=0)] * count
    return [
        SamplingParams(
            max_tokens=tokens,
            temperature=0 if index % 4 == 3 else temperature,
            seed=index,
            top_k=7 if index % 5 == 0 else 0,
            top_p=0.9 if index % 5 == 0 else 1.0,
        )
        for index in range(count)
    ]


@cache
def plain(name: str, golden: Path, data: Path) -> Engine:
    return Engine(pair(name, golden, data).target, slots=8, max_len=512, buckets=(8,), prefill_buckets=(256,))


@cache
def baseline(
    name: str, golden: Path, data: Path, count: int, tokens: int, temperature: float
) -> list[Completion]:
    prompts = pair(name, golden, data).prompts[:count]
    return plain(name, golden, data).generate(prompts, parameters(count, tokens, temperature))


def engine_of(case: dict[str, Any], one: Pair) -> Engine:
    drafter = DRAFTERS[case["drafter"]](one, Tree.chain(case["length"]))
    return Engine(
        one.target,
        drafter=drafter,
        slots=case["buckets"][-1],
        max_len=512,
        page_size=case["page"],
        buckets=case["buckets"],
        prefill_buckets=(256,),
        rounds_per_dispatch=ROUNDS[case["length"]],
    )


def check(case: dict[str, Any], golden: Path, data: Path, *, count: int, tokens: int) -> None:
    one = pair(case["pair"], golden, data)
    with engine_of(case, one) as engine:
        for temperature in (0.0, 1.0):
            expected = baseline(case["pair"], golden, data, count, tokens, temperature)
            params = parameters(count, tokens, temperature)
            for rows in case["buckets"]:  # the largest serves all prompts, a smaller one a batch of its size
                size = count if rows == case["buckets"][-1] else rows
                done = engine.generate(one.prompts[:size], params[:size])
                same_tokens(one.target, expected[:size], done, params[:size])
        assert engine.pages_in_use == 0
        engine.scheduler.pages.check()


def same_tokens(
    target: Model, expected: list[Completion], done: list[Completion], params: list[SamplingParams]
) -> None:
    """Every token, but for near ties in float32."""
    for a, b, p in zip(expected, done, params, strict=True):
        if a.token_ids == b.token_ids and a.finish_reason == b.finish_reason:
            continue
        assert p.top_k == 0, "a restricted row differs"
        seeds = None if p.temperature == 0 else (p.temperature, [p.seed])
        (found,) = differences(target, [a], [b], seeds)
        assert found.gap < NEAR_TIE, found


@pytest.mark.parametrize("case", cover.pairwise(FACTORS), ids=cover.label)
def test_tokens_equal_plain_decoding_on_a_pairwise_cover(case: dict[str, Any], golden: Path, data: Path) -> None:
    check(case, golden, data, count=20, tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", FACTORS["drafter"])
def test_tokens_equal_plain_decoding_at_full_length(drafter: str, golden: Path, data: Path) -> None:
    case = dict(pair="golden", drafter=drafter, length=5, page=16, buckets=(8,))
    check(case, golden, data, count=100, tokens=200)


@pytest.mark.matrix
@pytest.mark.parametrize("case", cover.product(FACTORS), ids=cover.label)
def test_tokens_equal_plain_decoding_everywhere(case: dict[str, Any], golden: Path, data: Path) -> None:
    check(case, golden, data, count=100, tokens=200)


@pytest.mark.parametrize(("drafter", "expected"), [("right", 6.0), ("wrong", 1.0)])
def test_acceptance_never_decays(drafter: str, expected: float, golden: Path, data: Path) -> None:
    """200 rounds: the bonus token's missing draft row is made good in every one of them."""
    one = pair("golden", golden, data)
    engine = Engine(
        one.target,
        drafter=DRAFTERS[drafter](one, Tree.chain(5)),
        slots=1,
        max_len=1300,
        prefill_buckets=(64,),
        page_size=64,
    )
    tokens = 200 * int(expected) + 1
    (done,) = engine.generate(one.prompts[3][:60], SamplingParams(max_tokens=tokens, temperature=0))
    assert done.metrics.num_drafts == 200
    assert done.metrics.mean_acceptance_length == expected


def test_a_wrong_token_of_the_target_is_caught(golden: Path, data: Path) -> None:
    """The negative control: a target that differs by one weight fails the comparison."""
    one = pair("golden", golden, data)
    other = one.target.replace(norm=one.target.norm.at[0].mul(1.5))
    engine = Engine(other, slots=8, max_len=512, buckets=(8,), prefill_buckets=(256,))
    expected = baseline("golden", golden, data, 20, 64, 0.0)
    done = engine.generate(one.prompts[:20], parameters(20, 64, 0.0))
    with pytest.raises(AssertionError):
        same_tokens(one.target, expected, done, parameters(20, 64, 0.0))
