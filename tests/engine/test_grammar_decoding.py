"""Test grammars in the engine: with any drafter the output equals that of masked decoding without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import pytest

from jspec import Engine, SamplingParams
from jspec.engine.request.sampling_params import sample_seed
from tests.support import engines, lettered
from tests.support.grammar_cases import MASKS, PROMPTS, TABLE, GrammarCase, check_decoding, masked

pytestmark = pytest.mark.once
pytest.importorskip("outlines_core")


@pytest.fixture(params=[TABLE, MASKS], ids=["table", "masks"])
def case(request: pytest.FixtureRequest) -> GrammarCase:
    pytest.importorskip(request.param.library)
    return request.param


@pytest.mark.parametrize(
    ("case", "make"),
    [
        pytest.param(TABLE, lettered.chain, id="table-chain"),
        pytest.param(TABLE, lettered.tree, id="table-tree", marks=pytest.mark.long),
        pytest.param(MASKS, lettered.chain, id="masks-chain", marks=pytest.mark.long),
        pytest.param(MASKS, lettered.tree, id="masks-tree", marks=pytest.mark.long),
    ],
)
def test_engine_with_grammars_emits_the_tokens_of_masked_decoding(
    case: GrammarCase, make: Callable[[], Engine]
) -> None:
    """The second run reuses cached prompts, slots and tables. Pages are few, so requests are preempted."""
    pytest.importorskip(case.library)
    engine = make()
    before = engine.metrics
    for order in (range(8), range(7, -1, -1)):
        check_decoding(engine, case, order)
    if make is lettered.tree:
        assert engine.metrics.num_preemptions > before.num_preemptions
    assert engine.metrics.num_accepted_tokens > before.num_accepted_tokens
    assert engine.metrics.num_cached_tokens > before.num_cached_tokens
    assert engine.pages_in_use == 0


def test_engine_without_the_grammars_emits_other_tokens(case: GrammarCase) -> None:
    """Negative control: without its grammar, every request has other tokens. Some texts end before max_tokens."""
    done = lettered.chain().generate(PROMPTS, case.without_grammar())
    same = [completion.token_ids == tokens for completion, tokens in zip(done, case.expected(), strict=True)]
    assert same == [not has_grammar for has_grammar in case.has_grammar()]
    ends = {lettered.END, *(token for params in case.params for token in params.stop_token_ids)}
    ended = [tokens[-1] in ends for tokens, has in zip(case.expected(), case.has_grammar(), strict=True) if has]
    assert case.min_ended <= sum(ended) < len(ended)


def test_request_with_grammar_and_several_samples_constrains_every_sample(case: GrammarCase) -> None:
    params = replace(case.params[2], n=3, draft=True)
    (done,) = lettered.chain().generate([PROMPTS[2]], params)
    seeds = [sample_seed(3, index) for index in range(3)]
    assert [one.token_ids for one in done.samples] == [masked(PROMPTS[2], params, seed) for seed in seeds]


def test_grammar_request_with_all_allowed_tokens_banned_fails_alone(case: GrammarCase) -> None:
    done = lettered.chain().generate([PROMPTS[0], PROMPTS[1]], [case.stuck, case.params[1]])
    assert done[0].finish_reason == "error" and done[0].token_ids == [*case.stuck_tokens]
    with pytest.raises(ValueError, match=case.stuck_error):
        done[0].raise_for_error()
    assert done[1].token_ids == case.expected()[1]


def test_engine_with_an_invalid_grammar_raises_before_queueing(case: GrammarCase) -> None:
    engine = lettered.chain()
    with pytest.raises(ValueError, match=case.invalid_error):
        engine.generate([[1], [2]], [SamplingParams(), replace(SamplingParams(), **{case.field: case.invalid})])
    assert not engine.scheduler.has_work


def test_memory_plan_includes_the_grammar_tables() -> None:
    """Every slot has a table, which takes 2 bytes for each cell and for each token of the vocabulary."""
    state, plan = lettered.chain().core.runner.state, lettered.chain().memory_plan
    bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves(state.grammars))
    assert bytes_ == 2 * 2 * (2**18 + engines.VOCAB + 1) and plan.slots > bytes_
