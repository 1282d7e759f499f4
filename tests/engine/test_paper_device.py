"""Test that the device of paper takes the calls of a real device and answers with arrays of equal shapes and types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Engine, SamplingParams
from jspec.core.config import EngineConfig
from jspec.step.executable_key import ExecutableKey
from tests.support import lettered, paper

pytestmark = pytest.mark.once

Call = tuple[ExecutableKey, tuple[Any, ...], Any]  # a program, its inputs and its output
GREEDY = SamplingParams(max_tokens=13, temperature=0)
EDITED = SamplingParams(max_tokens=9, temperature=0.7, top_k=5, repetition_penalty=1.2, draft=1)
SCORED = SamplingParams(max_tokens=14, logprobs=2, prompt_logprobs=1)
REGEX = SamplingParams(max_tokens=9, regex="(ab|c)+")
PARSED = SamplingParams(max_tokens=9, grammar='start: "a" (start | "b")* "c"')
LONG = [5, 1, 2, 6, 5, 3, 5, 8, 9, 7, 1, 3, 2, 7, 7, 1, 1, 2]


def record(engine: Engine) -> list[Call]:
    """Run requests of all kinds; return the calls of the engine's device."""
    calls: list[Call] = []
    device = engine.core.runner.target_side
    run = device.run

    def recorded(key: ExecutableKey, *inputs: Any) -> Any:
        inputs = tuple(np.array(one) for one in inputs)
        calls.append((key, inputs, run(key, *inputs)))
        return calls[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "run", recorded)
        done = engine.generate([[1, 2, 3], LONG, [4], [7, 7]], [GREEDY, GREEDY, EDITED, REGEX])
        done += engine.generate(LONG, SCORED, trace=True) + engine.generate([1], PARSED)
    assert [one.error for one in done] == [None] * len(done)
    return calls


@pytest.fixture(scope="module")
def real() -> Engine:
    return lettered.chain()


@pytest.fixture(scope="module")
def calls(real: Engine) -> list[Call]:
    return record(real)


def device_like(engine: Engine, **changes: Any) -> paper.PaperDevice:
    """Return a device of paper with the sizes of an engine's device, some of which are changed."""
    runner = engine.core.runner
    device = paper.PaperDevice(runner.program, runner.params.main.config.vocab_size, engine.config)
    vars(device).update(changes)
    device.start(runner.pool, device)
    return device


def shapes(output: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), output)


def repeat(calls: list[Call], device: paper.PaperDevice) -> None:
    """Repeat calls on a device of paper, and compare the outputs' structure, shapes and types."""
    for key, inputs, output in calls:
        device.compile([key])
        assert shapes(device.run(key, *inputs)) == shapes(output), key


def test_device_of_paper_answers_the_calls_of_a_real_one_with_equal_shapes(real: Engine, calls: list[Call]) -> None:
    device, helpers = device_like(real), real.core.runner.programs.helpers
    repeat(calls, device)
    assert {key.kind for key, *_ in calls} == {"round", "draft", "verify", "prefill", *helpers}
    assert list(device.programs.helpers) == list(helpers)
    np.testing.assert_array_equal([slot.pages for slot in device.state.slots], real.core.runner.state.page_table)


@pytest.mark.parametrize("changes", [{"vocab": 20}, {"config": EngineConfig(slots=2, max_len=48)}])
def test_device_of_paper_of_other_sizes_answers_with_other_shapes(
    real: Engine, calls: list[Call], changes: dict[str, Any]
) -> None:
    """Negative control: more log-probabilities, or fewer rounds."""
    rounds = [call for call in calls if call[0].kind in ("round", "prefill", "update_page_table")]
    with pytest.raises(AssertionError, match=r"kind='(round|prefill)'"):
        repeat(rounds, device_like(real, **changes))


# -- what its tokens depend on


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6] * 3, [3, 8, 4, 6, 2, 6, 4], [3, 3], [7, 7, 7, 7]]
SEEDED = [SamplingParams(max_tokens=6 + 3 * seed, seed=seed, temperature=0.5 * seed) for seed in range(len(PROMPTS))]


def tokens(one: Engine, params: Any = SEEDED) -> list[list[int]]:
    return [done.token_ids for done in one.generate(PROMPTS, params)]


@pytest.mark.parametrize(
    "options", [dict(slots=1, buckets=(1,)), dict(pages=14), dict(page_size=1), dict(rounds_per_dispatch=3)]
)
def test_tokens_of_paper_do_not_depend_on_slots_pages_or_drafts(
    options: dict[str, Any], compilations: list[str]
) -> None:
    expected = tokens(paper.byte_engine())
    compilations.clear()  # those of the weights
    one = paper.byte_engine(**options)
    assert tokens(one) == expected and ("pages" not in options or one.metrics.num_preemptions > 0)
    assert tokens(one, [replace(params, draft=False) for params in SEEDED]) == expected
    assert 0 < one.metrics.num_accepted_tokens < one.metrics.num_draft_tokens
    assert not any("backend_compile" in event for event in compilations)


@pytest.mark.parametrize(
    "fields", [dict(seed=9), dict(temperature=0.9), dict(top_k=3), dict(top_p=0.3), dict(min_p=0.5)]
)
def test_tokens_of_paper_depend_on_the_parameters(fields: dict[str, float]) -> None:
    one = paper.byte_engine()
    (plain,), (other,) = (one.generate([1, 2], max_tokens=20, **{"seed": 1, **own}) for own in ({}, fields))
    assert plain.token_ids != other.token_ids


def test_pages_that_are_lost_change_tokens_or_make_logits_nan() -> None:
    """Negative control: the host enters no page, or the wrong one."""
    expected = paper.byte_engine().generate([1, 2], max_tokens=20, seed=1)[0]

    def served(change: Callable[[np.ndarray], None]) -> Any:
        one = paper.byte_engine()
        runner, enter = one.core.runner, one.core.runner._enter_pages
        runner._enter_pages = lambda new: enter([change(entry) for entry in new])  # type: ignore[method-assign,func-returns-value]
        return one.generate([1, 2], max_tokens=20, seed=1)[0]

    assert served(lambda entry: entry).token_ids == expected.token_ids  # type: ignore[arg-type,return-value]
    assert served(lambda entry: (entry[0], entry[1], 1)).token_ids != expected.token_ids  # type: ignore[arg-type,return-value]
