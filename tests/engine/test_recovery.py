"""Test which requests end and which continue after an error or interrupt in a step, tokenizer or device."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Engine, SamplingParams
from jspec.engine.request.metrics import LowAcceptanceWarning
from jspec.engine.run.errors import RESTART
from jspec.step.executable_key import ExecutableKey
from jspec.step.program import init_state
from tests.support import brittle
from tests.support.brittle import PARAMS, PROMPTS, SLOTS, Fault
from tests.support.serving import held

pytestmark = pytest.mark.once


def test_tokenizer_error_in_a_step_ends_only_that_request(engine: Engine, expected: list[list[int]]) -> None:
    bad = next(i for i in (3, 4, 5) if len(set(expected[i][3:])) > 1)
    token = next(t for t in expected[bad][3:] if all(t not in expected[i] + PROMPTS[i] for i in range(6) if i != bad))
    engine.tokenizer.fails = lambda ids: token in ids  # type: ignore[union-attr]
    done = engine.generate(PROMPTS, PARAMS)
    for i, one in enumerate(done):
        if i == bad:
            assert one.finish_reason == "error" and isinstance(one.error, KeyError)
            assert one.token_ids == expected[i][: len(one.token_ids)]
        else:
            assert (one.finish_reason, one.error, one.token_ids) == ("length", None, expected[i])
    with pytest.raises(KeyError, match="no such token"):
        list(engine.stream(PROMPTS[bad], PARAMS[bad]))

    async def main() -> None:
        async for _ in engine.astream(PROMPTS[bad], PARAMS[bad]):
            pass

    with pytest.raises(KeyError, match="no such token"):
        asyncio.run(main())


def test_tokenizer_error_while_finishing_the_text_ends_the_request_with_that_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: Any) -> None:
        raise KeyError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr("jspec.engine.request.request.OutputState.finish_text", finish)
        (done,) = engine.generate(PROMPTS[0], PARAMS[0])
    assert done.finish_reason == "error" and isinstance(done.error, KeyError)


def test_tokenizer_error_before_queueing_leaves_no_request_queued(engine: Engine) -> None:
    engine.tokenizer.fails = lambda ids: 9 in ids  # type: ignore[union-attr]
    with pytest.raises(KeyError, match="no such token"):
        engine.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("where", ["round", "prefill", "read"])
@pytest.mark.parametrize("at", [1, 4])
def test_step_with_an_error_ends_running_requests_but_not_waiting_ones(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    """Waiting requests are served with a new state and without the old prefix cache."""
    error = RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    programs = engine.core.runner.programs
    with monkeypatch.context() as patch:
        if where == "read":
            patch.setattr(engine.core, "_read", Fault(engine.core._read, at, error))
        elif where == "round":
            key = ExecutableKey.round(3, 0)
            patch.setitem(programs.compiled, key, Fault(programs.compiled[key], at, error))
        else:
            key = ExecutableKey("prefill", 16)
            patch.setitem(programs.compiled, key, Fault(programs.compiled[key], at, error))
        done = engine.generate(PROMPTS, PARAMS)
    failed = [one for one in done if one.finish_reason == "error"]
    assert 1 <= len(failed) <= 3 and all(one.error is error for one in failed)
    for one, all_ in zip(done, expected, strict=True):
        assert one.token_ids == (all_[: len(one.token_ids)] if one.error else all_)
    assert engine.healthy
    assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected


def test_low_acceptance_warning_turned_into_an_error_is_raised_to_a_caller(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = LowAcceptanceWarning("the drafts hardly help")
    with monkeypatch.context() as patch:
        patch.setattr(engine.threads, "warn", Fault(lambda: None, 1, warning))
        with pytest.raises(LowAcceptanceWarning):
            engine.generate(PROMPTS[1], PARAMS[1])
    assert engine.generate(PROMPTS[0], PARAMS[0])[0].token_ids == expected[0]


@pytest.fixture
def real_engine() -> Iterator[Engine]:
    """Yield the engine on a real device; after each test check that it holds nothing."""
    brittle.alone(brittle.real_engine())
    yield brittle.real_engine()
    brittle.check_idle(brittle.real_engine())


def test_preempted_request_is_served_again_after_a_read_error(
    engine: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was preempted while the step with the read error was in flight."""
    pages = engine.scheduler.pages
    pages.clear()
    pages.reserve(-1, (pages.num_free - 11) * pages.page_size)
    params = SamplingParams(max_tokens=30, seed=1)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9, 10]]
    read, failed = engine.core._read, []

    def fails(plan: Any, size: Any, output: Any) -> Any:
        if not failed and requests[1].state.slot is None and requests[1].state.steps_in_flight:
            failed.append(plan)
            raise RuntimeError("lost on its way")
        return read(plan, size, output)

    monkeypatch.setattr(engine.core, "_read", fails)
    with held(engine):
        requests = [engine.submit(prompt, params) for prompt in prompts]
    for request in requests:
        engine.result(request)
    pages.release(-1)
    assert failed and [r.finish_reason for r in requests] == ["error", "length"]
    done = [engine.result(request) for request in requests]
    assert done[1].metrics.num_preemptions == 1
    assert done[1].token_ids == engine.generate(prompts[1], params)[0].token_ids


def test_state_reset_after_an_error_frees_old_buffers_before_allocating(
    real_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are freed even if the failed program did not consume them and the traceback refers to them."""
    engine = real_engine
    old, programs, is_gone = jax.tree.leaves(engine.core.runner.state), engine.core.runner.programs, []

    def refuses(params: Any, state: Any, packed: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    def init(*args: Any) -> Any:
        is_gone.extend(leaf.is_deleted() for leaf in old)
        return init_state(*args)

    with monkeypatch.context() as patch:
        patch.setattr("jspec.step.side.make_state", init)
        patch.setitem(programs.compiled, ExecutableKey("prefill", 16), refuses)
        (done,) = engine.generate(PROMPTS[0], PARAMS[0])
    assert done.finish_reason == "error" and is_gone and all(is_gone)
    frames = [frame for frame, _ in traceback.walk_tb(done.error.__traceback__) if frame.f_code.co_name == "refuses"]
    assert frames and "state" not in frames[0].f_locals


def test_engine_whose_state_reset_fails_is_unhealthy(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = brittle.engine.__wrapped__()
    gone = RuntimeError("device lost")
    monkeypatch.setattr(one.core.runner.target_side, "make_state", Fault(np.zeros, 1, gone))
    monkeypatch.setattr(one.core, "_read", Fault(one.core._read, 2, gone))
    done = one.generate(PROMPTS, PARAMS)
    assert [completion.finish_reason for completion in done] == ["error"] * len(PROMPTS)
    assert not one.healthy
    assert done[0].error is gone and done[0].error.__notes__ == [RESTART]
    waited = [completion for completion in done if completion.error is not gone]
    assert len(waited) >= len(PROMPTS) - SLOTS
    for completion in waited:
        assert str(completion.error) == RESTART and completion.error.__cause__ is gone
    for use in (lambda: one.generate([1]), lambda: one.submit([1])):
        with pytest.raises(RuntimeError, match="restart the process"):
            use()
    one.close()
