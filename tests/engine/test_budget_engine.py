"""Test that an engine whose rows share a budget of draft nodes emits the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Beside, DFlash, DraftModel, Eagle3, Engine, Model, NGram, SamplingParams, Tree
from jspec.draft.base import Drafter
from jspec.draft.eagle_head import EagleHead
from jspec.engine.schedule import sizes
from jspec.engine.schedule.draft_length import DispatchResult, Policy
from jspec.engine.schedule.sizes import RoundSize
from tests.support import engines, tiny
from tests.support.beside import check_sources
from tests.support.recordings import recording

pytestmark = pytest.mark.once

SLOTS, MAX_LEN = 4, 48
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3, 5, 8, 13], [6, 6, 6], [9, 8, 7, 6]]


@pytest.fixture(autouse=True)
def budgets_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "BUDGET_ROWS", 2)


class RandomPolicy(Policy):
    """A policy that draws each size at random, and keeps the results."""

    def __init__(self, sizes: Sequence[RoundSize]) -> None:
        self._sizes, self._rng = list(sizes), np.random.default_rng(0)
        self.results: list[DispatchResult] = []

    def choose(self, bucket: int, caps: Sequence[int]) -> RoundSize:
        return self._sizes[self._rng.integers(len(self._sizes))]

    def learn(self, result: DispatchResult) -> None:
        self.results.append(result)


def small_head(target: Model) -> EagleHead:
    return tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1))


DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "draft model, tree": lambda target: DraftModel(tiny.model(engines.VOCAB, layers=1, seed=3), Tree.topk(9, 3, 3)),
    "draft model, chain": lambda target: DraftModel(target, Tree.chain(3)),
    "eagle3": lambda target: Eagle3(small_head(target), Tree.topk(9, 3, 3)),
    "beside": lambda target: Beside(Eagle3(small_head(target), Tree.chain(2)), NGram(Tree.chain(3)), "beside"),
    "replace": lambda target: Beside(Eagle3(small_head(target), Tree.chain(2)), NGram(Tree.chain(3))),
    "dflash": lambda target: DFlash(tiny.dflash_head(target, block_size=4, feature_layers=(0, 1)), Tree.chain(3)),
}
LONG = ("draft model, tree", "replace")  # by default, another drafter has a tree and a draft model has a chain
OPTIONS: dict[str, dict[str, Any]] = {
    "draft model, chain": {"page_size": 1},
    "eagle3": {"deterministic": True, "draft_nodes": (1,)},
    "dflash": {"rounds_per_dispatch": 2, "controls": True, "draft_nodes": (1,)},
}


def make(name: str, **options: Any) -> Engine:
    base = dict(slots=SLOTS, max_len=MAX_LEN, page_size=4, buckets=(SLOTS,), prefill_buckets=(16,), controls=False)
    drafter = DRAFTERS[name](engines.target())
    return engines.make(
        engines.target(), drafter=drafter, **{**base, "adaptive": True, "draft_nodes": (1, 2), **options}
    )


@cache
def made(name: str) -> Engine:
    return make(name, draft_depths=(0, 3), **OPTIONS.get(name, {}))


@cache
def plain(temperature: float, penalty: float) -> list[list[int]]:
    return generate(engines.plain(), temperature, penalty)


def generate(engine: Engine, temperature: float, penalty: float) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=seed, repetition_penalty=penalty)
        for seed in range(len(PROMPTS))
    ]
    return [done.raise_for_error().token_ids for done in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in DRAFTERS]
)
def test_engine_with_random_budgets_emits_the_tokens_of_plain_decoding(name: str) -> None:
    engine = made(name)
    sizes = [*(RoundSize(3, nodes) for nodes in engine.config.draft_nodes or ()), RoundSize(0)]
    sizes += [RoundSize(3)] * name.startswith("draft model")  # whole rounds between the others
    for temperature in (0.0, 1.0):
        engine.policy = policy = RandomPolicy(sizes)
        penalty = 1.3 if engine.config.controls else 1.0
        assert generate(engine, temperature, penalty) == plain(temperature, penalty)
        assert {result.size for result in policy.results} == set(sizes)
        accepted = np.concatenate([r.accepted[r.accepted >= 0] for r in policy.results if r.size.nodes])
        assert name.startswith("eagle") or accepted.sum() > 0
    if name in ("beside", "replace"):
        check_sources(engine.metrics)
        assert engine.metrics.num_accepted_tokens_per_source["lookup"] > 0


@pytest.mark.parametrize("family", ["deepseek_v2", pytest.param("deepseek_v3", marks=pytest.mark.long)])
def test_engine_with_a_latent_cache_and_a_budget_emits_the_tokens_of_transformers(family: str, golden: Path) -> None:
    """Latent vectors of packed rows are unpacked before attention; with and without latent queries."""
    folder, sizes = golden / "families" / family, [RoundSize(2, 1)]
    target, data = tiny.load_target(folder), recording(folder / "expect.npz")
    own: dict[str, Any] = dict(slots=SLOTS, max_len=64, buckets=(SLOTS,), prefill_buckets=(32,), adaptive=True)
    first = replace(target, layers=target.layers[:1], config=replace(target.config, layers=target.config.layers[:1]))
    drafter = DraftModel(first, Tree.chain(2))
    with engines.make(target, drafter=drafter, draft_nodes=(1,), draft_depths=(0, 2), controls=False, **own) as engine:
        engine.policy = policy = RandomPolicy(sizes)
        prompts = [data[f"prompt{i}"].tolist() for i in (0, 1, 0, 1)]
        done = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0))
    assert [one.token_ids for one in done] == [data[f"greedy{i}"].tolist()[:32] for i in (0, 1, 0, 1)]
    assert {result.size for result in policy.results} == set(sizes)
    assert engine.metrics.num_accepted_tokens > 10


def test_rows_with_likely_drafts_get_more_of_the_budget_than_others() -> None:
    """All rows draft with the target itself; one row at temperature 0 is certain, the others draw tokens."""
    engine = made("draft model, chain")
    engine.policy = RandomPolicy([RoundSize(3, 1)])
    params = [SamplingParams(max_tokens=24, temperature=0, draft=cap) for cap in (3, 3, 0, 0)]
    done = engine.generate(PROMPTS[:4], params)
    drafted = [one.metrics.num_draft_tokens / one.metrics.num_drafts for one in done]
    assert drafted[2:] == [0, 0] and min(drafted[:2]) > 1
    assert sum(one.metrics.num_draft_tokens for one in done) <= 4 * max(one.metrics.num_drafts for one in done)


def test_rounds_with_log_probabilities_verify_all_nodes_and_keep_the_tokens() -> None:
    engine = made("draft model, chain")
    engine.policy = policy = RandomPolicy([RoundSize(3, 1)])
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2)
    tokens = [done.raise_for_error().token_ids for done in engine.generate(PROMPTS, params)]
    assert tokens == [own[:12] for own in plain(0.0, 1.0)]
    assert {result.size for result in policy.results} == {RoundSize(3)}


def test_adaptive_engine_compiles_a_half_and_a_quarter_of_the_nodes_by_default() -> None:
    with make("eagle3", draft_nodes=None, draft_depths=(0, 3)) as engine:
        keys = {(key.depth, key.nodes) for key in engine.core.runner.choice.all_keys() if key.kind == "round"}
    assert keys == {(0, None), (3, None), (3, 4), (3, 2)}


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ((3,), "draft_nodes: expected numbers below 3, the draft nodes of chain:3, got (3,)"),
        ((2, 1), "draft_nodes: expected ascending positive sizes"),
        ((0,), "draft_nodes: expected ascending positive sizes"),
        (2, "draft_nodes: expected None or a tuple of ints, got 2"),
    ],
)
def test_engine_with_impossible_draft_nodes_names_the_option(nodes: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        make("draft model, chain", draft_nodes=nodes)
    assert message in str(error.value)
