"""Test that an engine with any drafter emits the tokens of plain decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from jspec import (
    MTP,
    Completion,
    DFlash,
    DFlash2,
    Drafter,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    Engine,
    Medusa,
    Model,
    NGram,
    PEagle,
    SamplingParams,
    Suffix,
    Tree,
)
from jspec.draft.eagle_head import EagleHead
from jspec.tools.testing import NEAR_TIE, Random, Scripted, differences
from tests.support import byte_pair, cover, engines, tiny

pytestmark = pytest.mark.slow
LONGEST_PROMPT = 250
STATIC = "static:0,1,2,0.0,0.1,1.0,2.0,2.1,2.1.0"  # at every level the last sibling leads to the deepest path
DYNAMIC = "topk:12,4,3"
TREES = ("chain:1", "chain:2", "chain:5", STATIC, DYNAMIC)
DRAFTERS = (
    *("eagle3", "peagle", "eagle", "mtp", "dflash", "dflash2", "dspark", "medusa", "small", "ngram", "suffix"),
    *("right", "wrong", "random"),
)
FAKES = ("right", "wrong", "random")
FACTORS: dict[str, tuple[Any, ...]] = {
    "pair": ("trained", "random"),
    "drafter": DRAFTERS,
    "tree": TREES,
    "page": (1, 64),  # other tests run with 16, the default
    "buckets": ((20,), (1, 20)),
}
ROUNDS = {"chain:2": 3, STATIC: 2}  # rounds per dispatch for each tree


@dataclass(frozen=True)
class ProblemPair:
    """A target with prompts, a head and a small draft model."""

    target: Model
    head: EagleHead | None
    small: Model
    prompts: list[list[int]]


@cache
def pair(name: str) -> ProblemPair:
    """The trained byte pair, or one with random weights; the prompts are bytes of English text."""
    prompts = [list(cut.encode())[:LONGEST_PROMPT] for cut in tiny.text_cuts(100, longest=LONGEST_PROMPT)]
    if name == "trained":
        target = tiny.load_target(byte_pair.TARGET)
        return ProblemPair(target, tiny.load_head(byte_pair.HEAD), tiny.one_layer(target), prompts)
    target = tiny.model(512, layers=5, hidden=64, sharpness=4)
    head = tiny.eagle_head(target, draft_vocab=200, feature_layers=(1, 3, 4))
    return ProblemPair(target, head, tiny.model(512, layers=1, seed=3), prompts)


def is_long(case: dict[str, Any]) -> bool:
    """Return whether a drafter runs on the embedded pair, whose trained head drafts many long texts."""
    return case["pair"] == "trained" and case["drafter"] not in FAKES


def make_drafter(
    name: str, tree: Tree, pair: ProblemPair, known: list[Completion], params: list[SamplingParams]
) -> Drafter:
    """Return a drafter; fake drafters know the plain output, so they are right or wrong at every token."""
    target = pair.target
    makers: dict[str, Callable[[], Drafter]] = {
        "eagle3": lambda: Eagle3(pair.head, tree),
        "peagle": lambda: PEagle(tiny.peagle_head(target, draft_vocab=200, feature_layers=(1, 3, 4)), tree),
        "eagle": lambda: Eagle(tiny.eagle1_head(target), tree),
        "mtp": lambda: MTP(tiny.mtp_head(target), tree),
        "dflash": lambda: DFlash(tiny.dflash_head(target, block_size=6, feature_layers=(1, 3, 4)), tree),
        "dflash2": lambda: DFlash2(tiny.dflash2_head(target, block_size=6, feature_layers=(1, 3, 4)), tree),
        "dspark": lambda: DSpark(tiny.dspark_head(target, block_size=5, feature_layers=(1, 3, 4)), tree),
        "medusa": lambda: Medusa(tiny.medusa_heads(target, heads=5), tree),
        "small": lambda: DraftModel(pair.small, tree),
        "ngram": lambda: NGram(tree),
        "suffix": lambda: Suffix(tree, scope="engine", corpus_tokens=2048),
        "right": lambda: Scripted(known, params, tree),
        "wrong": lambda: Scripted(known, params, tree, shift=3),
        "random": lambda: Random(tree),
    }
    return makers[name]()


CONTROLS: dict[str, Any] = dict(  # ids that both vocabularies have
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={101: 2.0, 116: -1.0},
    bad_words=[[115], [101, 32], [32, 116, 104]],
    stop_token_ids=(97, 105),
    min_tokens=40,
)


def parameters(count: int, tokens: int, temperature: float) -> list[SamplingParams]:
    """Return greedy parameters, or sampled ones with one seed per prompt and every fourth row greedy.

    One request in five has top-k and top-p; another has penalties, bias, bad words and min_tokens.
    """
    return [
        SamplingParams(
            max_tokens=tokens,
            temperature=0 if temperature == 0 or index % 4 == 3 else temperature,
            seed=index,
            top_k=7 if temperature and index % 5 == 0 else 0,
            top_p=0.9 if temperature and index % 5 == 0 else 1.0,
            **CONTROLS if index % 5 == 1 else {},
        )
        for index in range(count)
    ]


@dataclass(frozen=True)
class ProblemSize:
    """The number of prompts, and the lengths of prompts and outputs."""

    prompts: int
    longest: int  # prompt tokens
    tokens: int

    @property
    def max_len(self) -> int:
        return self.longest + self.tokens + 1


FULL = ProblemSize(prompts=100, longest=LONGEST_PROMPT, tokens=200)
LONG = ProblemSize(prompts=40, longest=120, tokens=200)
SHORT = ProblemSize(prompts=20, longest=120, tokens=48)


Sizes = dict[float, ProblemSize]  # for each temperature


def undrafted(target: Model, longest: int) -> Engine:
    options: dict[str, Any] = dict(slots=20, max_len=longest + FULL.tokens + 1, buckets=(20,))
    return engines.make(target, prefill_buckets=(longest,), **options)


@cache
def plain(name: str, longest: int) -> Engine:
    return undrafted(pair(name).target, longest)


@cache
def baseline(name: str, size: ProblemSize, temperature: float) -> list[Completion]:
    prompts = [prompt[: size.longest] for prompt in pair(name).prompts[: size.prompts]]
    params = parameters(size.prompts, size.tokens, temperature)
    return plain(name, size.longest).generate(prompts, params)


def check(case: dict[str, Any], sizes: Sizes) -> None:
    """Compare each bucket, greedy and sampled: the largest serves all prompts, each other one a batch of its size."""
    one = pair(case["pair"])
    expected = {t: baseline(case["pair"], size, t) for t, size in sizes.items()}
    params = {t: parameters(size.prompts, size.tokens, t) for t, size in sizes.items()}
    known, made_with = distinct(expected, params)
    drafter, tree = case["drafter"], case["tree"]
    largest = max(sizes.values(), key=lambda size: size.max_len)
    engine = Engine(
        one.target,
        drafter=make_drafter(drafter, Tree.parse(tree), one, known, made_with),
        slots=case["buckets"][-1],
        max_len=largest.max_len,
        page_size=case["page"],
        buckets=case["buckets"],
        prefill_buckets=(largest.longest,),
        rounds_per_dispatch=ROUNDS.get(tree, 1),
    )
    for temperature, rows in itertools.product(sizes, case["buckets"]):
        used = len(params[temperature]) if rows == case["buckets"][-1] else rows
        prompts = [completion.prompt_token_ids for completion in expected[temperature][:used]]
        done = engine.generate(prompts, params[temperature][:used])
        same_tokens(one.target, expected[temperature][:used], done, params[temperature][:used])
    assert engine.pages_in_use == 0
    engine.scheduler.pages.check()
    check_acceptance(case, engine)


def distinct(
    completions: dict[float, list[Completion]], params: dict[float, list[SamplingParams]]
) -> tuple[list[Completion], list[SamplingParams]]:
    """Return the prompts to compare; greedy rows that both temperatures have are compared once."""
    kept: dict[tuple, tuple[Completion, SamplingParams]] = {}
    for temperature in completions:
        for completion, p in zip(completions[temperature], params[temperature], strict=True):
            seed = None if p.temperature == 0 else p.seed
            kept.setdefault((tuple(completion.prompt_token_ids), seed), (completion, p))
    known, made_with = zip(*kept.values(), strict=True)
    return list(known), list(made_with)


def check_acceptance(case: dict[str, Any], engine: Engine) -> None:
    """Check that the fake drafters were right or wrong throughout."""
    metrics = engine.metrics
    drafter, tree = case["drafter"], case["tree"]
    if drafter == "wrong":
        assert metrics.num_accepted_tokens == 0
    if drafter == "right":  # the last round is cut at the request's end
        assert metrics.acceptance_per_position[-1] > 0.9
        assert len(metrics.acceptance_per_position) == Tree.parse(tree).depth


def same_tokens(
    target: Model, expected: list[Completion], done: list[Completion], params: list[SamplingParams]
) -> None:
    """Check that every token is equal, except near ties in float32."""
    for a, b, p in zip(expected, done, params, strict=True):
        if a.token_ids == b.token_ids and a.finish_reason == b.finish_reason:
            continue
        assert p.top_k == 0 and not p.controls_used, "a row with controls differs"
        seeds = None if p.temperature == 0 else (p.temperature, [p.seed])
        (found,) = differences(target, [a], [b], seeds)
        assert found.gap < NEAR_TIE, found


# The tokens of other drafters are compared by default in tests/engine/test_adaptive_engine.py, test_budget_engine.py,
# test_packed_prompts.py and tests/draft/test_lookup.py.
COVER = (("random", "eagle3", DYNAMIC, 64, (20,)),)
MORE = (  # -m long; the whole product: -m matrix
    ("trained", "small", "chain:2", 1, (20,)),
    ("random", "eagle", DYNAMIC, 1, (20,)),
    ("random", "wrong", "chain:1", 64, (1, 20)),
    ("random", "medusa", STATIC, 64, (20,)),
    ("random", "dflash", DYNAMIC, 64, (20,)),
    ("random", "dflash", STATIC, 1, (20,)),
    ("trained", "dflash", "chain:5", 64, (1, 20)),
    ("random", "peagle", STATIC, 1, (1, 20)),
    ("trained", "peagle", "chain:5", 64, (20,)),
    ("random", "mtp", DYNAMIC, 64, (1, 20)),
    ("random", "dflash2", DYNAMIC, 64, (20,)),
    ("random", "dflash2", STATIC, 1, (1, 20)),
    ("random", "dspark", DYNAMIC, 64, (20,)),
    ("random", "dspark", STATIC, 1, (1, 20)),
    ("trained", "dspark", "chain:5", 1, (20,)),
    ("random", "ngram", STATIC, 64, (20,)),
    ("trained", "eagle3", "chain:2", 64, (20,)),
    ("trained", "suffix", "chain:2", 64, (20,)),
    ("trained", "right", "chain:5", 1, (1, 20)),
    ("random", "eagle3", "chain:5", 1, (20,)),
    ("random", "small", STATIC, 1, (1, 20)),
    ("random", "suffix", DYNAMIC, 64, (20,)),
    ("random", "right", STATIC, 1, (1, 20)),
    ("random", "random", "chain:2", 1, (20,)),
)


def cases(chosen: tuple[tuple[Any, ...], ...]) -> list[Any]:
    named = [dict(zip(FACTORS, case, strict=True)) for case in chosen]
    return [pytest.param(case, id=cover.label(case)) for case in named]


@pytest.mark.parametrize("case", cases(COVER))
def test_engine_with_a_drafter_emits_tokens_of_plain_decoding(case: dict[str, Any]) -> None:
    """This test runs in both environments."""
    check(case, {0.0: SHORT, 1.0: SHORT})


@pytest.mark.long
@pytest.mark.usefixtures("runs_long")
@pytest.mark.parametrize("case", cases(MORE))
def test_engine_with_any_drafter_emits_tokens_of_plain_decoding(case: dict[str, Any]) -> None:
    check(case, {0.0: LONG if is_long(case) else SHORT, 1.0: SHORT})


@pytest.mark.once
def test_draft_model_equal_to_the_target_has_every_draft_accepted() -> None:
    """In 100 rounds acceptance stays complete only if each round writes the bonus token's draft cache row."""
    one = pair("trained")
    drafter = DraftModel(one.target, Tree.chain(2))
    engine = Engine(one.target, drafter=drafter, slots=1, max_len=400, prefill_buckets=(64,), controls=False)
    (done,) = engine.generate(one.prompts[3][:60], SamplingParams(max_tokens=301, temperature=0))
    assert done.metrics.num_drafts == 100
    assert done.metrics.mean_acceptance_length == 3.0


@pytest.mark.once
def test_lossless_comparison_with_a_changed_target_fails() -> None:
    """Negative control: the target differs in one weight."""
    one = pair("random")
    other = one.target.replace(norm=one.target.norm.at[0].mul(1.5))
    engine, expected = undrafted(other, SHORT.longest), baseline("random", SHORT, 0.0)
    done = engine.generate([c.prompt_token_ids for c in expected], parameters(20, 64, 0.0))
    with pytest.raises(AssertionError):
        same_tokens(one.target, expected, done, parameters(20, 64, 0.0))
