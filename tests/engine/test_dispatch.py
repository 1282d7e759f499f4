"""Test that a dispatch compiles nothing, awaits no result, donates the state and writes no page of other requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from jspec import Engine, SamplingParams
from jspec.core.prefill_input import PrefillInput
from jspec.core.records import SlotState
from jspec.engine.callers.by_hand import ByHand
from tests.support import engines

VOCAB, MAX_LEN = engines.VOCAB, engines.MAX_LEN
PROMPT = [3, 1, 4, 1, 5, 9, 2]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engines.eagle3(rounds=1, page_size=16)


@pytest.fixture(scope="module")
def engine_of_three() -> Engine:
    """Return an engine with three rounds per dispatch and pages of one row."""
    return engines.eagle3(rounds=3, page_size=1)


@pytest.fixture(params=["engine", pytest.param("engine_of_three", marks=pytest.mark.long)])
def either(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


# -- compilation


def varied_work(engine: Engine) -> None:
    """Generate with several lengths, batch sizes and parameters, close a stream early, and send an invalid request."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 3):
        prompts = [rng.integers(0, VOCAB, rng.integers(1, 20)).tolist() for _ in range(count)]
        engine.generate(prompts, [SamplingParams(max_tokens=7, temperature=i % 2, seed=i) for i in range(count)])
    engine.generate(PROMPT, SamplingParams(top_k=3, top_p=0.5, min_p=0.1, draft=2, stop_token_ids=(1, 2)))
    engine.generate(PROMPT[:1], SamplingParams(max_tokens=1, draft=False))
    stream = engine.stream(PROMPT)
    next(stream)
    stream.close()
    with pytest.raises(ValueError):
        engine.generate([VOCAB])


def test_engine_after_warm_up_compiles_nothing(either: Engine, compilations: list[str]) -> None:
    either.warmup()
    either.generate(PROMPT)
    compilations.clear()
    varied_work(either)
    assert compilations == []


def test_check_of_compilations_with_an_eager_operation_in_the_loop_fails(
    engine: Engine, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the host's part of the loop calls one jax.numpy function."""
    engine.generate(PROMPT)
    original = engine.core.runner._pack

    def pack(*args: Any) -> PrefillInput:
        return jax.tree.map(lambda x: np.asarray(jnp.flip(jnp.flip(x))), original(*args))

    monkeypatch.setattr(engine.core.runner, "_pack", pack)
    compilations.clear()
    engine.generate(PROMPT)
    assert any("backend_compile" in event for event in compilations)


# -- waiting for the device


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records each conversion of a device array to a host value, which waits for the device."""
    seen: list[str] = []
    value, as_numpy = ArrayImpl._value.fget, ArrayImpl.__array__

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return original(*args, **options)

        return wrapper

    monkeypatch.setattr(ArrayImpl, "_value", property(counted("_value", value)))
    monkeypatch.setattr(ArrayImpl, "__array__", counted("__array__", as_numpy))
    return seen


def dispatches(engine: Engine, seen: list[str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the number of conversions during each later dispatch."""
    counts: list[int] = []
    original = engine.core._dispatch

    def counting(plan: Any) -> Any:
        before = len(seen)
        output = original(plan)
        counts.append(len(seen) - before)
        return output

    monkeypatch.setattr(engine.core, "_dispatch", counting)
    return counts


def test_engine_dispatch_of_any_request_reads_nothing_from_the_device(
    either: Engine, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dispatches(either, conversions, monkeypatch)
    varied_work(either)
    assert len(counts) > 15
    assert sum(counts) == 0


def test_check_of_device_reads_with_a_read_in_each_dispatch_fails(
    engine: Engine, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: each dispatch reads the first row's newest token."""
    original = engine.core._dispatch

    def reading(plan: Any) -> Any:
        int(engine.core.runner.state.root[0])
        return original(plan)

    monkeypatch.setattr(engine.core, "_dispatch", reading)
    counts = dispatches(engine, conversions, monkeypatch)
    engine.generate(PROMPT)
    assert len(counts) > 3 and all(count >= 1 for count in counts)


# -- transfers

DEVICES = [
    "here",
    pytest.param("gpu", marks=pytest.mark.gpu),
]  # on a CPU, whose memory is the host's, only uploads are detected


def guard_dispatches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Make each implicit transfer in later dispatches an error; return the list of dispatched plans."""
    plans: list[Any] = []
    original, start_copy = engine.core._dispatch, jax.copy_to_host_async

    def copy(output: Any) -> None:  # the guard takes this explicit copy for an implicit transfer
        with jax.transfer_guard_device_to_host("allow"):
            start_copy(output)

    def guarded(plan: Any) -> Any:
        plans.append(plan)
        with jax.transfer_guard("disallow"):
            return original(plan)

    monkeypatch.setattr(engine.core, "_dispatch", guarded)
    monkeypatch.setattr(jax, "copy_to_host_async", copy)
    return plans


@pytest.mark.parametrize("device", DEVICES)
def test_engine_dispatch_of_any_request_makes_no_implicit_transfer(
    either: Engine, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = guard_dispatches(either, monkeypatch)
    varied_work(either)
    assert len(plans) > 15


@pytest.mark.parametrize("device", DEVICES)
def test_check_of_transfers_with_an_implicit_upload_fails(
    engine: Engine, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the packed host array is passed to the executable."""
    engine.generate(PROMPT, SamplingParams(max_tokens=2))
    guard_dispatches(engine, monkeypatch)
    monkeypatch.setattr(engine.core.runner.target_side, "send", lambda packed: packed)
    (done,) = engine.generate(PROMPT, SamplingParams(max_tokens=2))
    assert done.finish_reason == "error" and "Disallowed host-to-device transfer" in str(done.error)


@pytest.mark.gpu
def test_check_of_transfers_with_an_implicit_download_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each dispatch reads the rows' newest tokens."""
    original = engine.core._dispatch

    def reading(plan: Any) -> Any:
        np.asarray(engine.core.runner.state.root)
        return original(plan)

    monkeypatch.setattr(engine.core, "_dispatch", reading)
    guard_dispatches(engine, monkeypatch)
    (done,) = engine.generate(PROMPT)
    assert "Disallowed device-to-host transfer" in str(done.error)


def test_engine_step_of_a_request_donates_the_state_but_not_the_weights(either: Engine) -> None:
    either.generate(PROMPT, SamplingParams(max_tokens=2))
    with ByHand(either) as by_hand:
        request = by_hand.submit(PROMPT, SamplingParams(max_tokens=8))
        while request.finish_reason is None:
            before = jax.tree.leaves(either.core.runner.state)
            planned = len(either.core.in_flight)
            by_hand.step()
            if len(either.core.in_flight) or planned == 0:
                assert all(leaf.is_deleted() for leaf in before)
        by_hand.step()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves([either.core.runner.params, either.core.runner.state]))


def test_engine_with_overlap_has_two_dispatches_in_flight(either: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2 in in_flight_while_reading(either, monkeypatch)


# -- pages


def in_flight_while_reading(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Generate up to max_len; return the numbers of unread dispatches that occur when a result is read."""
    depths: set[int] = set()
    original = engine.core._read

    def reading(*args: Any) -> np.ndarray:
        depths.add(len(engine.core.in_flight) + 1)
        return original(*args)

    monkeypatch.setattr(engine.core, "_read", reading)
    to_the_end(engine)
    return depths


def to_the_end(engine: Engine) -> list[int]:
    """Generate a request that ends exactly at max_len."""
    (done,) = engine.generate(PROMPT, SamplingParams(max_tokens=2**40, temperature=0))
    assert len(PROMPT) + len(done.token_ids) == MAX_LEN and done.finish_reason == "length"
    return done.token_ids


def change_pools(state: SlotState, change: Callable[[jax.Array], jax.Array]) -> SlotState:
    """Return the state after changing every page of the target's and the drafter's pools."""
    target, draft = jax.tree.map(change, (state.target, state.draft.cache))
    return state.replace(target=target, draft=state.draft.replace(cache=draft))


def poisoned(state: SlotState, kept: list[int]) -> SlotState:
    """Return the state with NaN in all pages, also null and free ones, and random values in pages ``kept``."""

    def pour(pool: jax.Array) -> jax.Array:
        new = np.full(pool.shape, np.nan, np.float32)
        new[kept] = np.random.default_rng(0).normal(size=new[kept].shape)
        return jnp.array(new)

    return change_pools(state, pour)


def pages_of(state: SlotState, pages: list[int]) -> list[np.ndarray]:
    pools = jax.tree.leaves([state.target, state.draft.cache])
    return [np.asarray(pool)[pages] for pool in pools]


def test_request_up_to_max_len_writes_no_page_of_other_owners(either: Engine) -> None:
    """The last draft extends beyond max_len, and rounds dispatched ahead still run after the request's end."""
    expected = to_the_end(either)
    either.scheduler.pages.clear()
    others = either.scheduler.pages.reserve(-1, 30)
    either.core.runner.target_side.state = poisoned(either.core.runner.state, others)
    before = pages_of(either.core.runner.state, others)
    assert to_the_end(either) == expected
    for old, new in zip(before, pages_of(either.core.runner.state, others), strict=True):
        np.testing.assert_array_equal(old, new)
        assert np.isfinite(new).all()
    either.scheduler.pages.release(-1)


def test_nan_in_committed_pages_ends_the_request_with_an_error(either: Engine) -> None:
    """Negative control: the same NaN are written after the prompt's rows."""
    expected = to_the_end(either)
    either.scheduler.pages.clear()
    with ByHand(either) as by_hand:
        request = by_hand.submit(PROMPT, SamplingParams(max_tokens=2**40, temperature=0))
        while not request.token_ids:
            by_hand.step()
        either.core.runner.target_side.state = poisoned(either.core.runner.state, [])
        assert "got NaN" in str(by_hand.result(request).error)
    either.scheduler.pages.clear()
    assert to_the_end(either) == expected, "NaN of one request reached the next"
