"""Test draft models whose vocabulary differs from the target's by padding: equal output from common ids alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Completion, DraftModel, Engine, Model, SamplingParams, Tree
from jspec.draft.draft_model import MAX_PADDING, BoundModel
from jspec.models.weights.quantize import quantize_weights
from tests.support import engines, tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

SHARP = 3.0  # the padding rows' logits are larger than those of most tokens
SMALLER, LARGER = engines.VOCAB - 4, engines.VOCAB + 5
PROMPTS = [[15, 3, 14], [1, 2, 3, 4], [13], [12, 15, 12, 15, 2]]  # also with ids that the smaller model lacks
PARAMS = [SamplingParams(max_tokens=24, temperature=t, seed=seed) for seed, t in enumerate((0, 0, 1.0, 1.0))]


@cache
def padded(size: int) -> Model:
    """Return a copy of the target with fewer tokens, or with further ones that are as likely as the likeliest."""
    target = engines.target()
    gap = max(size - engines.VOCAB, 0)
    rows = np.random.default_rng(0).normal(0, 1, (gap, target.embed.shape[1]))
    head = jnp.concatenate([target.output_head, SHARP * on_device(rows, jnp.float32)])[:size]
    embed = jnp.concatenate([target.embed, on_device(rows, jnp.float32)])[:size]
    return target.replace(embed=embed, head=head, config=replace(target.config, vocab_size=size))


def run(model: Model, tree: str, accept: str = "coupled") -> list[Completion]:
    engine = Engine(
        engines.target(),
        drafter=DraftModel(model, tree),
        accept=accept,
        slots=4,
        max_len=engines.MAX_LEN,
        page_size=16,
        buckets=(4,),
        prefill_buckets=(6,),
    )
    return engine.generate(PROMPTS, PARAMS, trace=True)


@cache
def plain() -> list[list[int]]:
    return [done.token_ids for done in engines.plain().generate(PROMPTS, PARAMS)]


def drafted(done: list[Completion]) -> set[int]:
    """Return all ids that were drafted."""
    return {int(token) for one in done for r in one.rounds or () for token in r.tokens[1:][r.parents[1:] >= 0]}


def ids(done: list[Completion]) -> list[list[int]]:
    return [one.token_ids for one in done]


CHAIN, STATIC, DYNAMIC = "chain:3", "static:0,1,0.0,0.1", "topk:6,3,2"
RULES = ("rejection", "block", "multi_candidate")


def long(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("size", "tree"),
    [
        *((SMALLER, CHAIN), (LARGER, DYNAMIC)),
        *(long(SMALLER, tree) for tree in (STATIC, DYNAMIC)),
        *(long(LARGER, tree) for tree in (CHAIN, STATIC)),
    ],
)
def test_draft_model_with_padded_vocabulary_gives_tokens_of_plain_decoding_from_common_ids(
    size: int, tree: str
) -> None:
    done = run(padded(size), tree)
    assert ids(done) == plain()
    assert max(map(max, plain())) >= SMALLER, "the texts have ids that the smaller model lacks"
    found = drafted(done)
    assert found and max(found) < min(size, engines.VOCAB)
    assert sum(one.metrics.num_accepted_tokens for one in done) > 10
    if size == LARGER and tree == CHAIN:  # without its padding it is the target
        assert all(r.accept_len == 3 for one in done for r in (one.rounds or ())[:-1])


@pytest.mark.parametrize(
    ("size", "accept"), [(SMALLER, RULES[0]), *(long(size, rule) for size in (SMALLER, LARGER) for rule in RULES[1:])]
)
def test_greedy_rows_under_other_accept_rules_with_padded_vocabulary_are_those_of_plain_decoding(
    size: int, accept: str
) -> None:
    done = run(padded(size), CHAIN, accept)
    assert ids(done)[:2] == plain()[:2]
    assert max(drafted(done)) < min(size, engines.VOCAB)


def test_draft_model_with_more_tokens_than_the_target_whose_padding_is_kept_drafts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: the padding is likely enough to be drafted."""
    monkeypatch.setattr(BoundModel, "common", lambda self, logits: logits)
    assert max(drafted(run(padded(LARGER), CHAIN))) >= engines.VOCAB


def test_bound_model_reads_its_last_row_for_ids_that_it_lacks() -> None:
    tokens = on_device([0, SMALLER - 1, SMALLER, engines.VOCAB - 1])
    smaller, larger = (BoundModel(padded(size), engines.VOCAB) for size in (SMALLER, LARGER))
    assert smaller.known(tokens).tolist() == [0, SMALLER - 1, SMALLER - 1, SMALLER - 1]
    assert larger.known(tokens).tolist() == tokens.tolist()


def test_draft_model_with_a_quantised_head_and_padding_gives_tokens_of_plain_decoding() -> None:
    done = run(quantize_weights(padded(LARGER), "int8"), CHAIN)
    assert ids(done) == plain()
    assert max(drafted(done)) < engines.VOCAB


def test_draft_model_with_another_vocabulary_or_a_tree_wider_than_the_common_ids_raises() -> None:
    target = engines.target()
    for size in (engines.VOCAB + MAX_PADDING, engines.VOCAB - 1):
        DraftModel(tiny.model(size, layers=1)).bind(target)
    with pytest.raises(
        ValueError, match=rf"vocabulary of {engines.VOCAB} tokens, .* at most 512 rows .*, got 529; use"
    ):
        DraftModel(tiny.model(engines.VOCAB + MAX_PADDING + 1, layers=1)).bind(target)
    wide = DraftModel(padded(LARGER), Tree.topk(18, 1, 17))
    with pytest.raises(ValueError, match=r"needs 17 children of a node, the vocabulary has 16 tokens; take a narrower"):
        wide.bind(target)
