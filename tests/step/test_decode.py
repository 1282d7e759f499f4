"""Compare the fused round with its five stages, jitted one by one or not jitted at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DraftModel, Eagle3, Tree
from jspec.core.records import SlotState, StepResult
from jspec.models.parts.kv_pool import PoolShape
from jspec.step import decode
from jspec.step.prefill import prefill_step
from jspec.step.program import Params, Program, init_state, view_of
from tests.support import tiny

VOCAB, LENGTH, ROUNDS, PAGE = 8, 2, 4, 4
PROMPTS = ([3, 1, 4, 1, 5], [2, 7, 6])
SLOTS = (1, 0, 3)  # slots of a bucket: 1 and 0 are not in order, 3 marks a padding row
TOLERANCE = 1e-5  # float32 results of differently fused programs
DRAFTERS = ("draft model", "eagle3")
TEMPERATURES = (0.0, 1.0)
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time


@dataclass(frozen=True)
class DecodeCase:
    program: Program
    params: Params
    fused: Callable[..., Any]
    staged: Callable[..., Any]


@cache
def case(drafter: str) -> DecodeCase:
    """Return a case with the draft model and the rejection rule, or with EAGLE-3 and the coupled rule."""
    target = tiny.model(VOCAB, layers=1, sharpness=2.0)
    if drafter == "eagle3":
        head = tiny.eagle_head(target, draft_vocab=6, feature_layers=(0, 1))
        method, rule = Eagle3(head, Tree.chain(LENGTH)), "coupled"
    else:
        method, rule = DraftModel(tiny.model(VOCAB, layers=1, seed=1), Tree.chain(LENGTH)), "rejection"
    program = Program(method, method.feature_layers(target), rule, "reference", trace=True)
    params = Params(target=target, draft=method.bind(target))
    return DecodeCase(program, params, jit(partial(decode.spec_round, program)), stages(program))


def stages(program: Program) -> Callable[..., Any]:
    """Return a function that runs a round's stages, each jitted by itself, and reports as the fused round does."""
    gather_view = jit(lambda state, slots: view_of(state, slots, program))
    draft_stage = jit(partial(decode.draft_stage, program))
    verify_stage = jit(partial(decode.verify_stage, program))
    accept_stage = jit(partial(decode.accept_stage, program))
    commit_stage = jit(partial(decode.commit_stage, program))

    def one_round(params: Params, state: SlotState, slots: Any) -> tuple[SlotState, np.ndarray, np.ndarray]:
        view = gather_view(state, slots)
        draft, state = draft_stage(params, state, view)
        out, target = verify_stage(params, state, view, draft)
        verdict = accept_stage(out, view, draft)
        state = state.replace(target=target)
        state = commit_stage(params, state, view, draft, verdict, out)
        drafted = np.where(view.active, LENGTH, 0)
        tail = np.stack([verdict.counts, verdict.accept_len, drafted, verdict.ended], axis=-1)
        return state, np.concatenate([verdict.tokens, tail], axis=-1), draft.scores

    return one_round


@cache
def prefilled(drafter: str, temperature: float) -> SlotState:
    """Return a state in which two of three slots hold a prompt; the shorter request ends after three tokens."""
    one = case(drafter)
    state = init_state(one.program, one.params, PoolShape(3, 20, PAGE, 28, "float32", "float32"))
    width = state.page_table.shape[1]
    prefill = jit(partial(prefill_step, one.program))
    for slot, ids in enumerate(PROMPTS):
        row = np.zeros(width, np.int32)
        row[:8] = np.arange(8) * 2 + 1 + slot  # scattered pages, not shared
        own = dict(temperature=np.float32(temperature), seed=np.array([slot, 7], np.uint32))
        own |= dict(remaining=np.int32(100 if slot == 0 else 3))
        prompt = tiny.prefill_input(ids, size=5, page_row=row, slot=slot, slots=state.root.shape[0], **own)
        state, _ = prefill(one.params, state, prompt)
    return state


def run(
    one_round: Callable[..., Any], drafter: str, temperature: float, rounds: int = ROUNDS
) -> tuple[StepResult, np.ndarray, SlotState]:
    """Run several rounds; return the reports, the draft scores of active rows, and the last state."""
    state, reports, scores = prefilled(drafter, temperature), [], []
    for _ in range(rounds):
        state, report, extra, *_ = one_round(case(drafter).params, state, jnp.asarray(SLOTS))
        reports.append(np.asarray(report))
        row_scores = np.asarray(getattr(extra, "scores", extra))
        scores.append(np.where(reports[-1][:, -4:-3] > 0, row_scores, 0))
    return StepResult.read(np.stack(reports)), np.stack(scores), state


@cache
def fused(drafter: str, temperature: float, rounds: int = ROUNDS) -> tuple[StepResult, np.ndarray, SlotState]:
    return run(case(drafter).fused, drafter, temperature, rounds)


def same(one: tuple[StepResult, np.ndarray, SlotState], other: tuple[StepResult, np.ndarray, SlotState]) -> None:
    for name, a, b in zip(StepResult._fields[:5], one[0][:5], other[0][:5], strict=True):
        np.testing.assert_array_equal(a[:, :2], b[:, :2], err_msg=name)
    np.testing.assert_allclose(one[1], other[1], atol=TOLERANCE)
    for name in ("root", "lengths", "active", "remaining"):
        np.testing.assert_array_equal(getattr(one[2], name), getattr(other[2], name), err_msg=name)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("drafter", [pytest.param(DRAFTERS[0], marks=pytest.mark.long), *DRAFTERS[1:]])
def test_fused_round_of_each_drafter_equals_its_stages_jitted_separately(drafter: str, temperature: float) -> None:
    same(fused(drafter, temperature), run(case(drafter).staged, drafter, temperature))


@pytest.mark.long
@pytest.mark.parametrize(("drafter", "temperature"), [("draft model", 0.0), ("eagle3", 1.0)])
def test_fused_round_without_jit_equals_the_jitted_round(drafter: str, temperature: float) -> None:
    expected = fused(drafter, temperature, rounds=2)
    with jax.disable_jit():
        same(expected, run(partial(decode.spec_round, case(drafter).program), drafter, temperature, rounds=2))


@pytest.mark.once
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fused_round_cases_include_accepted_and_rejected_drafts_and_an_ended_row(drafter: str) -> None:
    """Some drafts are accepted and some rejected, one row ends, and the padding row emits nothing."""
    reports = [fused(drafter, temperature)[0] for temperature in TEMPERATURES]
    for report in reports:
        assert report.ended[-1, 0] == 1 and report.counts[-1, 0] == 0  # the request of three tokens
        assert report.counts[:, 1].all()
        assert not report.counts[:, 2].any() and (report.tokens[:, 2] == -1).all()
    accepted = np.concatenate([report.accept_len[report.counts > 0] for report in reports])
    assert accepted.min() < LENGTH and accepted.max() > 0
    assert not np.array_equal(reports[0].tokens, reports[1].tokens), "greedy and sampled are the same"


@pytest.mark.once
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fused_round_without_its_draft_state_returns_other_results(drafter: str) -> None:
    """Negative control: the cache rows that the drafter wrote are dropped."""
    one = case(drafter)

    def forgetful(params: Params, state: SlotState, slots: Any) -> tuple[SlotState, Any, Any]:
        new, report, trace, _ = one.fused(params, state, slots)
        return new.replace(draft=state.draft), report, trace

    with pytest.raises(AssertionError):
        same(fused(drafter, 0.0), run(forgetful, drafter, 0.0))
