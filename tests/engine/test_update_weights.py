"""Test new weights in a running engine: tokens of a fresh engine, requests under way, prefixes, and refused updates."""

from __future__ import annotations

import gc
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec import MTP, Completion, Eagle3, Engine, Model, NGram, Replicas, Suffix, Tree
from jspec.draft.base import Drafter
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.request.metrics import LowAcceptanceWarning
from jspec.engine.run.weight_update import WeightUpdate
from jspec.engine.schedule.scheduler import Scheduler
from jspec.step import side
from tests.models.test_exchange import tensors_of
from tests.support import tiny
from tests.support.arrays import on_device
from tests.support.brittle import Fault
from tests.support.engines import make

VOCAB = 16
OPTIONS: dict[str, Any] = dict(slots=4, max_len=64, page_size=4, buckets=(4,), prefill_buckets=(16,), controls=False)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 1, 2], [5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]]
SAMPLED: dict[str, Any] = dict(temperature=1.0, seed=5, max_tokens=12)


def old_target() -> Model:
    return tiny.model(VOCAB, layers=1)


def new_target() -> Model:
    return tiny.model(VOCAB, layers=1, seed=7)


def eagle3(seed: int = 1) -> Drafter:
    return Eagle3(tiny.eagle_head(old_target(), draft_vocab=12, feature_layers=(0, 1), seed=seed), Tree.chain(3))


def tokens(engine: Engine | Replicas, **params: Any) -> list[list[int]]:
    """Return the tokens of all prompts, greedy ones and drawn ones."""
    fields = {"max_tokens": 12, "temperature": 0.0, **params}
    greedy = engine.generate(PROMPTS, **fields)
    return [c.token_ids for c in [*greedy, *engine.generate(PROMPTS, **(SAMPLED | params))]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make(old_target(), eagle3(), **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def old() -> Iterator[Engine]:
    with make(old_target(), eagle3(), **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def new() -> Iterator[Engine]:
    with make(new_target(), eagle3(), **OPTIONS) as made:
        yield made


def after(engine: Engine, prompt: list[int], tokens: list[int], params: dict[str, Any]) -> list[int]:
    """Return the tokens of an engine that continues a prompt after some tokens of its answer."""
    rest = params | {"max_tokens": params["max_tokens"] - len(tokens)}
    return tokens + engine.generate([prompt + tokens], **rest)[0].token_ids if rest["max_tokens"] else tokens


PARAMS = ({"max_tokens": 14, "temperature": 0.0}, {"max_tokens": 14, "temperature": 1.0, "seed": 9})
CASES = [(prompt, params) for prompt in PROMPTS for params in PARAMS][:4]


def updated_at(engine: Engine, step: int, requests: str, target: Model) -> list[tuple[int, Completion]]:
    """Run all prompts with an update after some steps; return each one's tokens before it, and its completion."""
    engine.update_weights(old_target())
    with ByHand(engine) as hand:
        asked = [hand.submit(prompt, params) for prompt, params in CASES]
        for _ in range(step):
            hand.step()
        engine.core.read_all()
        before = [len(request.token_ids) for request in asked]
        engine.update_weights(target, requests=requests)
        return list(zip(before, map(hand.result, asked), strict=True))


@pytest.mark.parametrize("step", range(8))
def test_retracted_requests_continue_their_tokens_as_a_fresh_engine_does(
    engine: Engine, old: Engine, new: Engine, step: int
) -> None:
    version = engine.weight_version + 2
    for (prompt, params), (count, done) in zip(CASES, updated_at(engine, step, "retract", new_target()), strict=True):
        start = after(old, prompt, [], params)[:count]
        assert done.token_ids == after(new, prompt, start, params)
        spans = [(0, count, version - 1), (count, len(done.token_ids), version)]
        assert done.weight_versions == tuple(span for span in spans if span[0] < span[1])
        assert done.finish_reason == "length"


def test_retracted_requests_keep_their_tokens_if_the_weights_are_equal(engine: Engine, old: Engine) -> None:
    for step in range(2, 8, 2):
        for (prompt, params), (_, done) in zip(CASES, updated_at(engine, step, "retract", old_target()), strict=True):
            assert done.token_ids == after(old, prompt, [], params)


def test_kept_requests_keep_the_rows_of_the_old_weights(engine: Engine, old: Engine, new: Engine) -> None:
    differing = 0
    for step in range(2, 7):
        for (prompt, params), (count, done) in zip(CASES, updated_at(engine, step, "keep", new_target()), strict=True):
            start = after(old, prompt, [], params)[:count]
            assert done.token_ids[:count] == start and len(done.token_ids) == 14
            differing += done.token_ids != after(new, prompt, start, params)
    assert differing, "control: they are not computed anew"


def test_pages_of_a_kept_request_are_not_shared_with_later_ones(
    engine: Engine, new: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept request caches pages after an update; a later request with its text may not read them."""

    def run() -> bool:
        prompt, params = PROMPTS[0], {"max_tokens": 24, "temperature": 0.0}
        engine.update_weights(old_target())
        with ByHand(engine) as hand:
            kept = hand.submit(prompt, params)
            while len(kept.token_ids) < 5:
                hand.step()
            engine.update_weights(new_target(), requests="keep")
            # A request with the same prompt caches the first pages under the new weights.
            hand.result(hand.submit(prompt, max_tokens=1))
            done = hand.result(kept)
            text = prompt + done.token_ids
            later = hand.result(hand.submit(text, max_tokens=8, temperature=0.0, logprobs=1))
        fresh = new.generate([text], max_tokens=8, temperature=0.0, logprobs=1)[0]
        engine.scheduler.pages.check()
        scores = [[record.logprob for record in completion.logprobs] for completion in (later, fresh)]
        return bool(np.allclose(*scores, atol=1e-5))

    assert run()
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self: self.pages.forget_idle())
    assert not run(), "control: without a salt the kept request's pages continue those of the new weights"


def test_weights_of_another_dtype_or_device_come_to_those_of_the_engine(engine: Engine, new: Engine) -> None:
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), new_target())
    elsewhere = jax.device_put(new_target(), jax.devices()[1])
    wanted = tokens(new)
    for weights in (elsewhere, jax.tree.map(np.asarray, new_target())):
        engine.update_weights(old_target())
        engine.update_weights(weights)
        assert tokens(engine) == wanted
    engine.update_weights(halves)
    norm = engine.core.runner.params.main.norm
    np.testing.assert_array_equal(norm, halves.norm.astype(jnp.float32))
    assert norm.dtype == jnp.float32 and engine.generate(PROMPTS[0], max_tokens=2)


def outcome(call: Callable[[], object]) -> object:
    """Return the result of a call, or its error."""
    try:
        return call()
    except RuntimeError as error:
        return error


def test_update_in_a_callback_of_the_engine_is_refused_and_an_interrupted_one_is_not_made(
    engine: Engine, old: Engine, new: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.update_weights(old_target())
    refused: list[object] = []
    done = threading.Event()
    engine.threads.call(lambda: refused.append(outcome(lambda: engine.update_weights(new_target()))) or done.set())
    assert done.wait(60)
    assert "expected another thread than the engine's own" in str(refused[0])
    may_run = threading.Event()
    engine.threads.call(may_run.wait)
    first = engine.submit(PROMPTS[0], max_tokens=30, temperature=0.0)
    with monkeypatch.context() as patch:

        def interrupted(self: object, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(new_target(), requests="wait")
    may_run.set()
    wanted = after(old, PROMPTS[0], [], {"max_tokens": 30, "temperature": 0.0})
    assert engine.result(first).token_ids == wanted
    assert engine.generate(PROMPTS[0], max_tokens=30, temperature=0.0)[0].token_ids == wanted
    engine.update_weights(new_target(), requests="wait")
    assert tokens(engine) == tokens(new)


def test_sleeping_engine_refuses_to_wait_and_close_ends_an_update_that_waits() -> None:
    with make(old_target(), **OPTIONS) as engine:
        engine.submit(PROMPTS[0], max_tokens=4)
        engine.sleep()
        for call in (
            lambda: engine.update_weights(new_target(), requests="wait"),
            lambda: engine.sleep(requests="wait"),
        ):
            with pytest.raises(RuntimeError, match='requests="wait": expected an engine whose requests can end'):
                call()
        engine.wake_up()
        assert engine.generate(PROMPTS[0], max_tokens=2)
        blocked = threading.Event()
        engine.threads.call(lambda: blocked.wait(60))
        engine.submit(PROMPTS[0], max_tokens=40)
        ended: list[object] = []
        updater = threading.Thread(
            target=lambda: ended.append(outcome(lambda: engine.update_weights(new_target(), requests="wait")))
        )
        updater.start()
        closer = threading.Thread(target=engine.close)
        closer.start()
        blocked.set()
        updater.join(60)
        closer.join(60)
        assert not updater.is_alive() and not closer.is_alive()
        assert isinstance(ended[0], RuntimeError), "it is not said to have been carried out"
    with pytest.raises(RuntimeError, match="this engine is closed; make a new one"):
        engine.update_weights(new_target())


def test_aborting_update_ends_requests_that_are_not_queued_yet(engine: Engine) -> None:
    engine.update_weights(old_target())
    may_run = threading.Event()
    engine.threads.call(may_run.wait)
    asked = [engine.submit([1, number % VOCAB], max_tokens=20) for number in range(300)]
    threading.Timer(0.05, may_run.set).start()
    update = engine.update_weights(new_target(), requests="abort")
    done = [engine.result(request) for request in asked]
    assert {completion.finish_reason for completion in done} == {"abort"} and update.num_aborted == 300


def test_retracted_request_with_prompt_logprobs_has_them_all(engine: Engine, old: Engine) -> None:
    prompt = [number * 5 % VOCAB for number in range(20)]
    params = {"max_tokens": 20, "temperature": 0.0, "prompt_logprobs": 0}
    wanted = old.generate([prompt], params)[0]
    for step in range(1, 9):
        engine.update_weights(old_target())
        with ByHand(engine) as hand:
            request = hand.submit(prompt, params)
            for _ in range(step):
                hand.step()
            engine.update_weights(old_target())
            done = hand.result(request)
        assert done.token_ids == wanted.token_ids and done.error is None
        both = ([record.logprob for record in (c.prompt_logprobs or ())[1:] if record] for c in (done, wanted))
        np.testing.assert_allclose(*both, atol=1e-5)


def test_update_that_waits_ends_earlier_requests_first_and_holds_later_ones(
    engine: Engine, old: Engine, new: Engine
) -> None:
    engine.update_weights(old_target())
    params, may_run = {"max_tokens": 30, "temperature": 0.0}, threading.Event()
    engine.threads.call(may_run.wait)
    first = engine.submit(PROMPTS[0], params)
    updates: list[WeightUpdate] = []
    updater = threading.Thread(target=lambda: updates.append(engine.update_weights(new_target(), requests="wait")))
    updater.start()
    engine.threads.call(lambda: None)
    may_run.set()
    while not engine.core._calls and updater.is_alive():
        time.sleep(0.001)
    later = engine.submit(PROMPTS[0], params)
    assert engine.result(first).token_ids == after(old, PROMPTS[0], [], params)
    assert engine.result(later).token_ids == after(new, PROMPTS[0], [], params)
    updater.join()
    assert (updates[0].num_aborted, updates[0].num_retracted, updates[0].num_kept) == (0, 0, 0)


def test_update_that_aborts_ends_requests_with_their_tokens(engine: Engine, old: Engine) -> None:
    for (prompt, params), (count, done) in zip(CASES, updated_at(engine, 5, "abort", new_target()), strict=True):
        assert done.finish_reason == "abort" and done.token_ids == after(old, prompt, [], params)[:count]


def test_reset_of_the_prefix_cache_lets_no_later_request_find_a_prefix(engine: Engine) -> None:
    engine.generate(PROMPTS, max_tokens=2)
    assert engine.generate(PROMPTS[0], max_tokens=2)[0].metrics.num_cached_tokens > 0
    assert engine.reset_prefix_cache() > 0
    assert engine.generate(PROMPTS[0], max_tokens=2)[0].metrics.num_cached_tokens == 0
    assert engine.generate(PROMPTS[0], max_tokens=2)[0].metrics.num_cached_tokens > 0
    engine.scheduler.pages.check()


def test_refused_updates_change_nothing(engine: Engine, old: Engine) -> None:
    engine.update_weights(old_target())
    version, wanted = engine.weight_version, tokens(old)
    layers = new_target()
    wide = tiny.model(VOCAB, layers=1, hidden=32)
    odd = layers.replace(norm=layers.norm[:-1])
    whole_numbers = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), layers)
    deleted = new_target()
    deleted.norm.delete()
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (wide, {}, ValueError, "update_weights: expected a target of the same config as the engine's"),
        (odd, {}, ValueError, "other: target.norm (float32[15] on [0] for float32[16] on [0])"),
        (layers.replace(layers=[]), {}, ValueError, "update_weights: weights: expected the 1 layers of the model's"),
        (
            whole_numbers,
            {},
            ValueError,
            "update_weights: weights: expected weights in a floating-point dtype, got int32",
        ),
        (deleted, {}, ValueError, "update_weights: weights: expected arrays, got some that were deleted"),
        ({}, {}, ValueError, "the tensors do not match the config (missing:"),
        (5, {}, TypeError, "update_weights: weights: expected a Model, a mapping of arrays"),
        (layers, {"requests": "in_place"}, ValueError, "update_weights: requests: expected one of 'retract', 'keep'"),
        (layers, {"drafter": NGram()}, ValueError, "update_weights: drafter: expected one like the engine's Eagle3("),
    ]
    cases += [
        (layers, {"copy": "no"}, TypeError, "update_weights: copy: expected a bool, got 'no'"),
        (layers, {"clear_cache": True}, TypeError, "Engine.update_weights: expected requests=, "),
        (layers, {"layout": "hf"}, TypeError, "Engine.update_weights: expected one of weights, requests"),
    ]
    for weights, options, kind, message in cases:
        with pytest.raises(kind, match=re.escape(message)):
            engine.update_weights(weights, **options)
    with pytest.raises(TypeError, match=re.escape('Engine.sleep: expected weights=, "keep", "host" or "drop", got')):
        engine.sleep(level=1)
    with pytest.raises(ValueError, match="sleep: requests: expected one of 'retract', 'abort', 'wait', got 'keep'"):
        engine.sleep(requests="keep")
    assert engine.weight_version == version and tokens(engine) == wanted


def test_version_is_an_int_above_the_last(engine: Engine) -> None:
    engine.update_weights(old_target())
    last = engine.weight_version
    for wrong in ("two", True, 2.0, np.zeros(2, int)):
        with pytest.raises(TypeError, match="update_weights: version: expected an int or None"):
            engine.update_weights(old_target(), version=wrong)
    for wrong in (last, last - 1, -1, np.int64(0)):
        with pytest.raises(ValueError, match=f"update_weights: version: expected a number above {last}, that of"):
            engine.update_weights(old_target(), version=wrong)
    assert engine.weight_version == last
    for version in (last + 5, np.int32(last + 7), jnp.int32(last + 9)):
        assert engine.update_weights(old_target(), version=version).version == engine.weight_version == int(version)
        assert type(engine.weight_version) is int


def test_updates_keep_no_old_weights_and_share_no_buffer_with_their_source(engine: Engine, new: Engine) -> None:
    engine.update_weights(new_target(), drafter=eagle3(2))
    gc.collect()
    before = live_bytes()
    for seed in range(3, 23):
        engine.update_weights(tiny.model(VOCAB, layers=1, seed=seed), drafter=eagle3(seed))
    assert live_bytes() == before
    weights, head = new_target(), tiny.eagle_head(old_target(), draft_vocab=12, feature_layers=(0, 1))
    engine.update_weights(weights, drafter=Eagle3(head, Tree.chain(3)))
    for leaf in jax.tree.leaves((weights, head)):
        leaf.delete()  # as a program does to which a trainer donates its weights
    wanted = tokens(new)
    assert tokens(engine) == wanted
    engine.update_weights(new_target())  # binds the copied head again
    assert tokens(engine) == wanted
    weights = new_target()
    engine.update_weights(weights, copy=False)
    weights.norm.delete()
    with pytest.raises(Exception, match="the weights were donated by their owner; call update_weights"):
        engine.generate(PROMPTS[0], max_tokens=2)[0].raise_for_error()
    engine.update_weights(new_target())
    assert tokens(engine) == wanted and engine.healthy


def test_update_by_names_or_by_a_folder_gives_the_tokens_of_a_fresh_engine(golden: Path, tmp_path: Path) -> None:
    folder = golden / "families" / "llama"
    changed = {name: values * 1.1 for name, values in tensors_of(folder).items()}
    shutil.copytree(folder, tmp_path / "new", ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(changed, tmp_path / "new" / "model.safetensors")
    options = OPTIONS | {"tokenizer": None}
    with (
        Engine.from_pretrained(folder, **options) as engine,
        Engine.from_pretrained(tmp_path / "new", **options) as fresh,
    ):
        before, wanted = tokens(engine), tokens(fresh)
        engine.update_weights({name: on_device(values) for name, values in changed.items()})
        assert tokens(engine) == wanted != before
        engine.update_weights(folder)
        assert tokens(engine) == before


def test_update_of_an_mtp_layer_must_be_named() -> None:
    drafter = MTP(tiny.mtp_head(old_target()), Tree.chain(2))
    with make(old_target(), drafter, **OPTIONS) as engine:
        with pytest.raises(ValueError, match="update_weights: drafter: expected the MTP layer that belongs to the new"):
            engine.update_weights(new_target())
        engine.update_weights(new_target(), drafter=MTP(tiny.mtp_head(old_target(), seed=2), Tree.chain(2)))
        assert engine.weight_version == 1


@pytest.mark.parametrize("weights", ["keep", "host", "drop"])
def test_sleeping_engine_frees_its_memory_and_goes_on_with_the_same_tokens(weights: str) -> None:
    params = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    drafter = Suffix(Tree.chain(3), scope="engine", corpus_tokens=256) if weights == "keep" else None
    with make(old_target(), drafter, **OPTIONS) as never, make(old_target(), drafter, **OPTIONS) as engine:
        wanted = [tokens(never), *(never.generate(p, params)[0].token_ids for p in PROMPTS)]
        assert tokens(engine) == wanted[0]
        found = engine.metrics.num_accepted_tokens
        for step in range(5):
            with ByHand(engine) as hand:
                asked = [hand.submit(prompt, params) for prompt in PROMPTS]
                for _ in range(step):
                    hand.step()
                before, live = bytes_of(engine), live_bytes()
                engine.sleep()
                engine.sleep(weights=weights)
                freed = before["state"] + (weights != "keep") * before["weights"]
                assert live - live_bytes() >= 0.99 * freed
                assert engine.is_sleeping and bytes_of(engine)["state"] == 0
                assert 'jspec:is_sleeping{model_name="jspec",engine="0"} 1.0' in engine.prometheus()
                assert (bytes_of(engine)["weights"] == 0) == (weights != "keep")
                with pytest.raises(RuntimeError, match=re.escape("the engine sleeps; call wake_up()")):
                    engine.submit(PROMPTS[0])
                if weights == "drop":
                    with pytest.raises(RuntimeError, match="wake_up: expected weights, but sleep"):
                        engine.wake_up()
                    engine.update_weights(old_target())
                engine.wake_up()
                engine.wake_up()
                assert bytes_of(engine) == before and not engine.is_sleeping
                assert [hand.result(request).token_ids for request in asked] == wanted[1:]
        assert tokens(engine) == wanted[0]
        if drafter is not None:  # texts of requests before it slept are still found
            engine.sleep()
            engine.wake_up()
            again = engine.generate(PROMPTS[0], params)[0].metrics
            assert again.mean_acceptance_length > 2, found


@pytest.mark.parametrize("weights", ["keep", "host", "drop"])
def test_engine_that_is_updated_asleep_wakes_with_the_new_weights(engine: Engine, new: Engine, weights: str) -> None:
    engine.update_weights(old_target())
    before, wanted = tokens(engine), tokens(new)
    with ByHand(engine) as hand:
        prompt, params = CASES[1]
        request = hand.submit(prompt, params)
        while len(request.token_ids) < 4:
            hand.step()
        engine.sleep(weights=weights)
        live = live_bytes()
        for target in (old_target(), new_target()):
            engine.update_weights(target)
        assert engine.is_sleeping
        if weights == "keep":
            del target
            assert live_bytes() == live, "nothing is held twice"
        engine.wake_up()
        done = hand.result(request)
    count = done.weight_versions[0][1]
    assert done.token_ids == after(new, prompt, done.token_ids[:count], params)
    assert [version for *_, version in done.weight_versions] == [engine.weight_version - 2, engine.weight_version]
    assert tokens(engine) == wanted != before


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def bytes_of(engine: Engine) -> dict[str, int]:
    """Return the bytes of device memory of an engine's state and weights."""
    runner = engine.core.runner
    trees = {"state": runner.state, "weights": runner.params}
    return {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
        for name, tree in trees.items()
    }


def test_engine_that_cannot_get_its_memory_back_sleeps_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.update_weights(old_target())
    before = tokens(engine)
    engine.sleep()
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1024 bytes")

        patch.setattr(side, "make_state", fail)
        with pytest.raises(ValueError, match="out of memory at start"):
            engine.wake_up()
    assert engine.is_sleeping
    engine.wake_up()
    assert tokens(engine) == before


@pytest.fixture(scope="module")
def replicas() -> Iterator[Replicas]:
    with Replicas(lambda mesh: make(old_target(), eagle3(), mesh=mesh, **OPTIONS), 2) as made:
        yield made


def test_replicas_get_the_same_weights_and_sleep_together(replicas: Replicas, new: Engine) -> None:
    before, wanted = tokens(replicas), tokens(new)
    update = replicas.update_weights(new_target(), version=5)
    assert tokens(replicas) == wanted != before
    assert update.version == replicas.weight_version == 5
    assert [engine.weight_version for engine in replicas.engines] == [5, 5]
    assert 'jspec:weight_version{model_name="jspec",engine="1"} 5.0' in replicas.prometheus()
    replicas.sleep(weights="host")
    with pytest.raises(RuntimeError, match=re.escape("the engines sleep; call wake_up()")):
        replicas.generate(PROMPTS)
    replicas.wake_up()
    assert tokens(replicas) == wanted
    assert replicas.reset_prefix_cache() > 0


def test_error_tells_versions_of_replicas_that_differ_and_a_failed_one_is_left_out(
    replicas: Replicas, old: Engine, new: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = replicas.engines[1]
    replicas.update_weights(new_target())
    last, may_run = replicas.weight_version, threading.Event()
    results = Fault(Future.result, 2, KeyboardInterrupt())  # interrupts the second wait
    for kind in (KeyboardInterrupt, ValueError):
        with monkeypatch.context() as patch:
            if kind is ValueError:
                patch.setattr(second.core, "use_version", Fault(lambda version: None, 1, ValueError("a fault")))
            else:
                second.threads.call(lambda: may_run.wait(60))
                patch.setattr(Future, "result", lambda done: results(done))
            with pytest.raises(kind) as raised:
                replicas.update_weights(old_target(), version=last + 1)
        may_run.set()
        versions = f"{last + 1}, {last}"
        note = f"update_weights: the engines now have weights of versions {versions}; update them again"
        assert raised.value.__notes__ == [note]
        assert replicas.weight_version == last
        replicas.update_weights(old_target(), version=last + 1)
        assert [engine.weight_version for engine in replicas.engines] == [last + 1] * 2
        assert tokens(replicas) == tokens(old)
        last += 1

    def fail(*_: Any) -> None:
        second.threads.recovery.healthy = False
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(second.threads, "settled", fail)
    assert replicas.update_weights(new_target()).version == replicas.weight_version == last + 1
    assert len(replicas.failed) == 1 and tokens(replicas) == tokens(new)


def test_warning_of_low_acceptance_says_how_many_updates_ago_the_head_was_given(engine: Engine) -> None:
    def advice() -> str:
        prompts = [[number % VOCAB, 1, 2] for number in range(12)]
        with pytest.warns(LowAcceptanceWarning) as warned:
            engine.generate(prompts, max_tokens=20, temperature=0.0)
        return str(warned[0].message)

    engine.update_weights(new_target(), drafter=eagle3())
    assert "updates of the target ago" not in advice()
    engine.update_weights(old_target())
    engine.update_weights(new_target())
    assert "its weights were given 2 updates of the target ago" in advice()
