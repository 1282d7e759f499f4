"""Test engines of targets with recurrent states: options, prefix hits and preemption change no token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec import DraftModel, Engine, SamplingParams, Suffix, Tree
from jspec.engine.request.request import Request
from jspec.engine.schedule.scheduler import Piece, Scheduler
from jspec.engine.schedule.sizes import RoundSize
from jspec.models.decoder import Model
from jspec.models.mixers.gated_delta import GatedDelta
from jspec.models.mixers.mamba2 import Mamba2
from jspec.models.mixers.mixer import Mixer
from jspec.models.parts.delta_state import DeltaState
from jspec.models.parts.kv_pool import KVPool, PoolShape
from jspec.models.weights.params import model_params, random_weights
from jspec.step.executables import warn_of_slow_layers
from pallas_kernels.recurrent.records import EVERY
from tests.support import engines, tiny
from tests.support.recordings import recording

# A text that an engine has decoded once is drafted right the second time, and other nodes of the tree are wrong.
CHAIN = Suffix("chain:4", scope="engine")
TREE = Suffix("static:0,1,0.0,0.1,1.0,0.0.0", scope="engine")
# Three requests of the recorded prompts need more pages than there are, so one is preempted.
OPTIONS: dict[str, Any] = dict(
    slots=3, max_len=240, buckets=(3,), prefill_buckets=(32,), pages=18, cached_states=8, controls=False
)
GREEDY = SamplingParams(max_tokens=64, temperature=0)

Recorded = tuple[Model, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def hybrid(golden: Path, request: pytest.FixtureRequest) -> Recorded:
    """Return a recorded model, three prompts, and the greedy tokens after each that transformers computes."""
    folder = golden / "families" / getattr(request, "param", "qwen3_5_text")
    data = recording(folder / "expect.npz")
    prompts, tokens = ([data[f"{name}{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy"))
    return tiny.load_target(folder), prompts, tokens


def tokens_of(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [one.raise_for_error().token_ids for one in engine.generate(prompts, params)]


BOTH = pytest.mark.parametrize(
    "hybrid", ["qwen3_5_text", pytest.param("nemotron_h", marks=pytest.mark.long)], indirect=True
)


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        pytest.param(TREE, {}, id="tree"),
        pytest.param(CHAIN, dict(tensor_parallel=2), id="two devices, chain"),
        *(
            pytest.param(drafter, options, id=name, marks=pytest.mark.long)
            for name, drafter, options in [
                ("plain", None, {}),
                ("two devices, tree", TREE, dict(tensor_parallel=2)),
                ("three rounds a dispatch", TREE, dict(rounds_per_dispatch=3, overlap=False, pages=None)),
                (
                    "budgets of nodes",
                    TREE,
                    dict(adaptive=True, draft_nodes=(2,), slots=8, buckets=(8,), pages=None),
                ),
                ("more nodes than a state waits for", Suffix("chain:40", scope="engine"), dict(pages=None)),
            ]
        ),
    ],
)
def test_engine_emits_the_recorded_tokens_with_every_option(
    hybrid: Recorded, drafter: Suffix | None, options: dict[str, Any]
) -> None:
    target, prompts, expected = hybrid
    with engines.make(target, drafter=drafter, **OPTIONS | options) as engine:
        if "adaptive" in options:
            engine.policy.choose = lambda *_: RoundSize(3, 2)
        assert tokens_of(engine, prompts * 3) == expected * 3  # more requests than slots, which are reused
        assert (engine.metrics.num_preemptions > 0) == (options.get("pages", 18) is not None)
        assert drafter is None or engine.metrics.num_accepted_tokens > 48


def test_requests_begin_at_the_longest_kept_state_of_their_text(hybrid: Recorded) -> None:
    """A prompt of 75 tokens is kept at 64; a text that leaves it at 50 leaves a state where the shared pages end."""
    target, prompts, expected = hybrid
    text, answer = prompts[2], expected[2]
    branches = [[*text[:50], first, *text[:12]] for first in (1, 2)]
    with engines.make(target, drafter=TREE, **OPTIONS) as engine:

        def run(prompt: list[int], **options: Any) -> tuple[list[int], int]:
            (done,) = engine.generate([prompt], SamplingParams(max_tokens=32, temperature=0, **options))
            return done.raise_for_error().token_ids, done.metrics.num_cached_tokens

        assert [run(text), run(text)] == [(answer[:32], 0), (answer[:32], 64)]
        assert run(text + answer[:31])[1] == 96  # the state at the end of the answer
        assert run(branches[0])[1] == 0  # the pages of 48 tokens are shared, and a state at 32 is kept there
        wanted = run(branches[1], prompt_logprobs=0)  # a prompt that is scored shares nothing
        assert run(branches[1]) == (wanted[0], 32)
        # Bytes of float32 in three slots: a state, 64 records, 10 rows of inputs and 3 before the state; and 8 copies.
        slot, copy = 4 * (2 * 16 * 16 + 64 * (16 + 2 * 16 + 2) + (10 + 3) * 64), 4 * (2 * 16 * 16 + 3 * 64)
        assert engine.memory_plan.states == 3 * (3 * slot + 8 * copy)
        metrics = engine.metrics
        assert (metrics.num_state_hits, metrics.num_states_evicted, metrics.states_kept) == (3, 0, 6)
        for name, value in (("state_hits_total", 3), ("states_evicted_total", 0), ("states_kept", 6)):
            assert f'jspec:prefix_cache_{name}{{model_name="jspec",engine="0"}} {value}.0\n' in engine.prometheus()


@pytest.mark.long
def test_requests_begin_at_states_of_their_own_adapter(hybrid: Recorded, golden: Path) -> None:
    prompt = recording(golden / "adapters" / "expect.npz")["prompt"].tolist() * 6
    with engines.make(hybrid[0], drafter=TREE, **OPTIONS | dict(pages=None, adapters=1, adapter_rank=6)) as engine:
        engine.load_adapter("all", golden / "adapters" / "qwen3_5_text" / "all")

        def run(adapter: str | None, **more: Any) -> tuple[Any, int]:
            (done,) = engine.generate([prompt], max_tokens=8, temperature=0, adapter=adapter, logprobs=0, **more)
            return np.array([one.logprob for one in done.raise_for_error().logprobs]), done.metrics.num_cached_tokens

        wanted = {adapter: run(adapter, prompt_logprobs=0)[0] for adapter in ("all", None)}
        for adapter in ("all", None, "all"):
            found, cached = run(adapter)
            assert np.abs(found - wanted[adapter]).max() < 1e-4 and cached == 64


@BOTH
def test_a_preempted_request_goes_on_at_its_newest_state(hybrid: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three answers of 64 tokens need more pages than there are; the tokens that a prefill computes are counted."""
    target, prompts, expected = hybrid
    plan_piece, counts = Scheduler._plan_piece, list[int]()

    def counted(scheduler: Scheduler, request: Request, count: int) -> Piece:
        counts.append(count)
        return plan_piece(scheduler, request, count)

    monkeypatch.setattr(Scheduler, "_plan_piece", counted)
    computed = []
    for keeps in (True, False):
        with monkeypatch.context() as patch, engines.make(target, drafter=TREE, **OPTIONS) as engine:
            if not keeps:
                patch.setattr(Scheduler, "_preempt", without_states(Scheduler._preempt))
            counts.clear()
            assert tokens_of(engine, prompts) == expected
            assert engine.metrics.num_preemptions > 0
        computed.append(sum(counts))
    with_state, without = computed
    print(f"{with_state} tokens computed in prefills, {without} without states of preempted requests")
    least = sum(map(len, prompts))
    assert least < with_state < without - EVERY // 2  # a state has seen 32 tokens; either run may preempt a round later


def without_states(preempt: Callable[[Scheduler, Request], None]) -> Callable[[Scheduler, Request], None]:
    def run(scheduler: Scheduler, request: Request) -> None:
        states, scheduler.states = scheduler.states, None
        preempt(scheduler, request)
        scheduler.states = states

    return run


def test_a_copy_of_another_state_gives_other_tokens(hybrid: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of prefix hits."""
    target, prompts, expected = hybrid
    monkeypatch.setattr(DeltaState, "saved", lambda self, slot, entry: self)
    with Engine(target, **OPTIONS) as engine:
        assert tokens_of(engine, prompts[2:]) == expected[2:]
        assert tokens_of(engine, prompts[2:]) != expected[2:]


def test_a_warning_says_that_layers_are_slow_on_a_device_without_their_kernel(
    hybrid: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    config, pool = hybrid[0].config, PoolShape(1, 1, 16, 16, "bfloat16", "bfloat16")
    layers = [layer.mixer.state(pool, "bfloat16") for layer in config.layers]
    assert {type(layer) for layer in layers} == {DeltaState, KVPool}
    for states in (layers, [layer for layer in layers if isinstance(layer, KVPool)]):
        for platform in ("cpu", "gpu"):
            warn_of_slow_layers(states, platform)
    assert [record.message for record in caplog.records] == [
        "the target's layers with recurrent states have no kernel for this gpu (it needs a Hopper GPU, jax 0.11, "
        "bfloat16, key heads of 128 channels and value heads of a multiple of 64): they are slow"
    ]


@pytest.mark.long
@pytest.mark.parametrize("drafter", [CHAIN, TREE], ids=["chain", "tree"])
def test_slots_that_a_thousand_requests_used_give_the_tokens_of_fresh_ones(drafter: Suffix) -> None:
    target, rng = tiny.hybrid(16), np.random.default_rng(0)
    prompts = [rng.integers(0, 16, rng.integers(1, 45)).tolist() for _ in range(25)]
    params = [
        SamplingParams(max_tokens=int(rng.integers(1, 12)), temperature=seed % 2, seed=seed)
        for seed in range(len(prompts))
    ]
    options = OPTIONS | dict(slots=2, max_len=64, buckets=(2,), pages=None, prefix_cache=False)
    fresh = []
    for prompt, own in zip(prompts, params, strict=True):
        with engines.make(target, **options) as engine:
            fresh.append(engine.generate([prompt], own)[0].raise_for_error().token_ids)
    order = rng.integers(0, len(prompts), 1000)
    with engines.make(target, drafter=drafter, **options) as engine:
        done = engine.generate([prompts[index] for index in order], [params[index] for index in order])
        assert engine.metrics.num_accepted_tokens > 1000
    assert [one.raise_for_error().token_ids for one in done] == [fresh[index] for index in order]


@pytest.mark.long
@pytest.mark.parametrize("hybrid", ["qwen3_5_text", "nemotron_h"], indirect=True)
def test_sampled_tokens_are_the_same_with_and_without_drafts(hybrid: Recorded) -> None:
    target, prompts, _ = hybrid
    params = SamplingParams(max_tokens=48, temperature=1.0, top_p=0.9, seed=5)
    found = []
    for drafter in (None, TREE):
        with engines.make(target, drafter=drafter, **OPTIONS) as engine:
            found += [tokens_of(engine, prompts, params) for _ in range(2)]
            assert drafter is None or engine.metrics.num_accepted_tokens > 48
    assert found[0] == found[1] == found[2] == found[3]


@BOTH
def test_deterministic_log_probabilities_have_the_same_bits_with_any_draft_and_prompt(hybrid: Recorded) -> None:
    """A text is decoded with rejected and with accepted drafts, and scored as a prompt."""
    target, prompts, expected = hybrid
    with engines.make(target, drafter=TREE, **OPTIONS, deterministic=True) as engine:
        params, scores = SamplingParams(max_tokens=64, temperature=0, logprobs=0), []
        for _ in range(2):
            done = engine.generate(prompts[1:], params)
            scores.append([[record.logprob for record in one.logprobs] for one in done])
        assert engine.metrics.num_accepted_tokens > 64
        texts = [prompt + answer for prompt, answer in zip(prompts[1:], expected[1:], strict=True)]
        done = engine.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        of_prompts = [[record.logprob for record in one.prompt_logprobs[-64:]] for one in done]
    assert scores[0] == scores[1]
    np.testing.assert_array_equal(np.array(of_prompts), np.array(scores[0]))


def test_a_request_that_was_stopped_early_or_failed_leaves_no_wrong_state(hybrid: Recorded) -> None:
    """A stream is closed while rounds are in flight, and a step fails with copies of states to make."""
    target, prompts, expected = hybrid
    text, answer = prompts[2], expected[2]
    with engines.make(target, drafter=TREE, **OPTIONS) as engine:
        for count in (3, 30):
            for index, _ in enumerate(engine.stream([*text, *answer[:count]], GREEDY)):
                if index == 5:
                    break
            assert tokens_of(engine, [text]) == [answer]
        run, failures = engine.core.runner.target_side.run, [RuntimeError("a step failed")]

        def fail_once(key: Any, *inputs: Any) -> Any:
            if key.kind == "round" and failures:
                raise failures.pop()
            return run(key, *inputs)

        engine.core.runner.target_side.run = fail_once  # type: ignore[method-assign]
        (failed,) = engine.generate([text], GREEDY)
        assert failed.finish_reason == "error" and not failures
        assert tokens_of(engine, [text]) == [answer]
        assert engine.metrics.states_kept > 0


DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=16, value_dim=8, taps=4)
MAMBA = Mamba2(key_heads=4, value_heads=8, key_dim=16, value_dim=8, taps=4, conv_bias=True)


@pytest.mark.long
@pytest.mark.parametrize(("mixer", "devices"), [(DELTA, 2), (DELTA, 4), (MAMBA, 4)])
def test_devices_with_some_heads_each_emit_the_tokens_of_one(mixer: Mixer, devices: int) -> None:
    """Two key heads and four value heads, on as many devices as key heads and on twice as many; or four groups."""
    layers = tiny.config(64, hidden=64).layers
    mixed = replace(tiny.config(64, hidden=64), layers=(replace(layers[0], mixer=mixer), layers[1]))
    target, found = Model.from_weights(mixed, random_weights(model_params(mixed), "float32", 0)), []
    for count in (1, devices):
        with engines.make(target, drafter=TREE, **OPTIONS, tensor_parallel=count) as engine:
            found.append(tokens_of(engine, [list(range(20)), list(range(40, 0, -1))] * 2))
    assert found[0] == found[1]


def test_layers_that_no_file_of_the_family_has_need_no_names_without_adapters() -> None:
    with engines.make(tiny.hybrid(16), slots=1, max_len=32, buckets=(1,), prefill_buckets=(16,)) as engine:
        assert engine.memory_plan.states > engine.memory_plan.adapters == 0


def test_more_devices_than_groups_of_mamba_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tensor_parallel: expected a divisor of 4, the model's n_groups, got 8"):
        MAMBA.divided(8)


@pytest.mark.long
def test_a_draft_model_on_another_device_changes_no_token(hybrid: Recorded) -> None:
    target, prompts, expected = hybrid
    drafter = DraftModel(tiny.model(target.config.vocab_size), Tree.topk(6, 2, 2), device=jax.devices()[1])
    with engines.make(target, drafter=drafter, **OPTIONS) as engine:
        assert tokens_of(engine, prompts) == expected


def test_states_kept_under_other_weights_are_not_found_after_an_update(
    hybrid: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts, tokens = hybrid
    other = jax.tree.map(lambda leaf: (1.2 * leaf).astype(leaf.dtype), model)
    text = prompts[0] + tokens[0]

    def scores(engine: Engine) -> list[float]:
        (done,) = engine.generate([text], max_tokens=8, temperature=0.0, logprobs=0)
        return [record.logprob for record in done.raise_for_error().logprobs or ()]

    with engines.make(other, TREE, **OPTIONS) as fresh, engines.make(model, TREE, **OPTIONS) as engine:
        wanted = scores(fresh)

        def updated(*, forgets: bool) -> bool:
            engine.update_weights(model)
            for _ in range(2):  # the second one begins with a state that the first one kept
                before = scores(engine)
            assert engine.metrics.num_cached_tokens > 0 and not np.allclose(before, wanted, atol=1e-2)
            if not forgets:
                monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self: 0)
            engine.update_weights(other)
            return np.allclose(scores(engine), wanted, atol=1e-4)

        assert updated(forgets=True)
        engine.scheduler.pages.check()
        assert not updated(forgets=False), "control: states and pages of the old weights"
