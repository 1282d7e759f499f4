"""Test that a look-up beside any head emits the tokens of plain decoding, and is accepted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest

from jspec import (
    MTP,
    Beside,
    DFlash,
    Drafter,
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
from jspec.tools.testing import Random, check_lossless
from tests.support import engines, tiny
from tests.support.beside import Known, KnownModel, check_rounds, check_sources, prompt_of

pytestmark = pytest.mark.once

STATIC = Tree.static([(0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0)])
CHAIN, DYNAMIC = Tree.chain(3), Tree.topk(9, 3, 3)
HEADS: dict[str, Callable[[Model, Tree], Drafter]] = {
    "eagle3": lambda target, tree: Eagle3(tiny.eagle_head(target, draft_vocab=12, feature_layers=(0, 1)), tree),
    "eagle": lambda target, tree: Eagle(tiny.eagle1_head(target), tree),
    "mtp": lambda target, tree: MTP(tiny.mtp_head(target), tree),
    "peagle": lambda target, tree: PEagle(tiny.peagle_head(target, draft_vocab=12, feature_layers=(0, 1)), tree),
    "dflash": lambda target, tree: DFlash(tiny.dflash_head(target, block_size=4, feature_layers=(0, 1)), tree),
    "dspark": lambda target, tree: DSpark(tiny.dspark_head(target, block_size=4, feature_layers=(0, 1)), tree),
    "medusa": lambda target, tree: Medusa(tiny.medusa_heads(target, 3), tree),
    "random": lambda _, tree: Random(tree),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1], [1, 5], [9, 2, 6, 5, 9, 2, 6, 5, 9, 2], [3], [7, 7, 7]]
OPTIONS: dict[str, Any] = dict(slots=2, max_len=engines.MAX_LEN, buckets=(2,), prefill_buckets=(16,), controls=False)
DEFAULT = {  # of each head one case, and of each join each kind of tree; the others: -m long
    ("eagle3", "beside", DYNAMIC),
    ("eagle3", "replace", CHAIN),
    ("mtp", "beside", CHAIN),
    ("peagle", "replace", CHAIN),
    ("dflash", "beside", STATIC),
    ("dspark", "beside", CHAIN),
    ("medusa", "beside", STATIC),
}


def cases() -> list[Any]:
    every = [
        (head, join, tree)
        for head in HEADS
        for join, tree in (("replace", CHAIN), ("beside", CHAIN), ("beside", STATIC), ("beside", DYNAMIC))
        if tree != DYNAMIC or head not in ("medusa", "random")
    ]
    return [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.long, id="-".join(map(str, case)))
        for case in every
    ]


@pytest.mark.parametrize(("head", "join", "tree"), cases())
def test_engine_with_a_look_up_beside_a_head_is_lossless_and_accepts_its_tokens(
    head: str, join: str, tree: Tree
) -> None:
    """Paths through tokens of the look-up are deeper than the head's tree, and the next round reads their features."""
    lookup = NGram("chain:5") if join == "replace" else Suffix("chain:5")
    limit = 12 if tree == DYNAMIC else None
    drafter = Beside(HEADS[head](engines.target(), tree), lookup, join, nodes=limit)
    engine = engines.make(engines.target(), drafter=drafter, **OPTIONS)

    def make_engine(target: Model, **given: Any) -> AbstractContextManager[Engine]:
        return nullcontext(engine if "drafter" in given else engines.plain())

    check_lossless(drafter, engines.target(), PROMPTS, max_tokens=24, make_engine=make_engine)
    check_sources(engine.metrics)
    lengths = engine.metrics.acceptance_per_position
    assert engine.metrics.num_accepted_tokens > 20 and lengths[3] > 0, "no path is deeper than the head's"


LINES = [prompt_of(line, engines.VOCAB) for line in range(6)]
GREEDY = SamplingParams(max_tokens=40, temperature=0)


@cache
def right_look_up() -> Known:
    """Return a look-up whose every token is right for `LINES`."""
    outputs = np.array([done.token_ids for done in engines.plain().generate(LINES, GREEDY)])
    return Known(outputs, LINES, Tree.chain(5), engines.VOCAB)


def drafts_of(drafter: Drafter, nodes: int) -> dict[tuple[int, int], list[int]]:
    """Return the first nodes of each draft by line, and by the number of output tokens before the round."""
    engine = engines.make(engines.target(), drafter=drafter, **OPTIONS)
    done = engine.generate(LINES, GREEDY, trace=True)
    for one in done if isinstance(drafter, Beside) else ():
        check_rounds(one, nodes)
    return {(line, r.start): r.tokens[:nodes].tolist() for line, one in enumerate(done) for r in one.rounds}


@pytest.mark.parametrize(
    ("head", "tree"),
    [
        ("eagle3", DYNAMIC),
        ("dflash", STATIC),
        pytest.param("medusa", CHAIN, marks=pytest.mark.long),
        pytest.param("peagle", DYNAMIC, marks=pytest.mark.long),
        pytest.param("mtp", CHAIN, marks=pytest.mark.long),
        pytest.param("dspark", CHAIN, marks=pytest.mark.long),
    ],
)
def test_head_behind_accepted_tokens_of_a_look_up_drafts_as_it_does_alone(head: str, tree: Tree) -> None:
    """Its cache has the rows of paths that are deeper than its own tree, of which each round commits one."""
    alone = drafts_of(HEADS[head](engines.target(), tree), tree.nodes)
    beside = drafts_of(Beside(HEADS[head](engines.target(), tree), right_look_up(), "beside"), tree.nodes)
    common = alone.keys() & beside.keys()
    assert len(beside) < len(LINES) * 9 < len(alone), "each round accepts five tokens"
    assert len(common) > 20
    assert {place: beside[place] for place in common} == {place: alone[place] for place in common}


@pytest.mark.long
@pytest.mark.parametrize("join", ["replace", "beside"])
def test_preempted_requests_with_a_look_up_beside_a_head_emit_tokens_of_plain_decoding(join: str) -> None:
    """There are pages for half of the requests, and a request that comes back learns its rates again."""
    prompts = [np.random.default_rng(seed).integers(0, engines.VOCAB, 4 + seed).tolist() for seed in range(6)]
    params = [SamplingParams(max_tokens=30, temperature=seed % 2, seed=seed) for seed in range(6)]
    drafter = Beside(HEADS["eagle3"](engines.target(), CHAIN), NGram("chain:4"), join)
    options = OPTIONS | dict(slots=4, page_size=4, pages=22, buckets=(4,), prefill_buckets=(8, 32))
    engine = engines.make(engines.target(), drafter=drafter, **options)
    done = engine.generate(prompts, params)
    plain = engines.plain().generate(prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain]
    assert engine.metrics.num_preemptions > 3 and engine.pages_in_use == 0


@pytest.mark.parametrize("join", ["beside", pytest.param("replace", marks=pytest.mark.long)])
def test_preempted_requests_keep_the_acceptance_of_a_look_up_beside_a_head(join: str) -> None:
    """The look-up is right everywhere and the head nowhere; with few pages requests run again from where they were."""
    known, wrong = right_look_up(), np.ones((len(LINES), CHAIN.depth), int)
    head = KnownModel(Known(known.outputs[:, : GREEDY.max_tokens], LINES, CHAIN, engines.VOCAB, wrong))
    options = OPTIONS | dict(slots=4, page_size=4, pages=22, buckets=(4,), prefill_buckets=(engines.MAX_LEN,))
    engine = engines.make(engines.target(), drafter=Beside(head, known, join, threshold=1), **options)
    done = engine.generate(LINES, GREEDY)
    assert [one.token_ids for one in done] == known.outputs[:, : GREEDY.max_tokens].tolist()
    assert engine.metrics.num_preemptions > 2 and engine.pages_in_use == 0
    for metrics in (one.metrics for one in done):
        assert metrics.num_drafts == 7  # each emits five draft tokens and the target's own, the last one three
        assert metrics.num_draft_tokens_per_source == {"head": 7 * 3 * (join == "beside"), "lookup": 7 * 5}
        assert metrics.num_accepted_tokens_per_source == {"head": 0, "lookup": 6 * 5 + 3}
        check_sources(metrics)
