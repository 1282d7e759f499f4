"""Which of the compiled programs serves a plan."""

from __future__ import annotations

from collections.abc import Sequence

from jspec.engine.request import Request
from jspec.engine.scheduler import PrefillPlan, RoundPlan
from jspec.step.executables import Executables
from jspec.step.split_decode import Step, first_token, split_step


def prefill_program(programs: Executables, plan: PrefillPlan) -> Step:
    """For a chunk; with a mask where it gives the first token of a grammar that the host follows."""
    scored = scores(plan.request)
    if plan.emits and plan.request.matcher is not None:
        return first_token(programs.masked_prefill[plan.bucket, *scored], plan.request.matcher)
    is_scored, scores_prompt = scored
    if is_scored:
        return programs.scored_prefill[plan.bucket, scores_prompt]
    return programs.prefill[plan.bucket]


def round_program(programs: Executables, plan: RoundPlan, depth: int) -> Step:
    """For rounds of some depth; in two launches where the host follows the grammar of any row."""
    is_scored = any(request.params.logprobs is not None for request in plan.requests)
    if wants_newest(plan.requests):
        draft, verify = programs.drafts[plan.bucket, depth], programs.verifies[plan.bucket, depth, is_scored]
        return split_step(draft, verify, [request.matcher for request in plan.requests])
    if is_scored:
        return programs.scored_rounds[plan.bucket, depth]
    return programs.rounds[plan.bucket, depth, any(request.trace for request in plan.requests)]


def wants_newest(requests: Sequence[Request]) -> bool:
    """Whether a round of these needs the newest tokens on the host, which makes masks of them."""
    return any(request.matcher is not None and request.is_prefilled for request in requests)


def scores(request: Request) -> tuple[bool, bool]:
    """Whether a request's chunks are to tell log-probabilities, and those of the prompt."""
    return request.scores_prompt or request.params.logprobs is not None, request.scores_prompt
