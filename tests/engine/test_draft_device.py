"""Test that a draft model on other devices drafts, and that the engine emits, what they do on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec import (
    Completion,
    DFlash,
    DFlash2,
    DraftModel,
    Eagle,
    Eagle3,
    Engine,
    Gemma4Assistant,
    Medusa,
    Model,
    NGram,
    SamplingParams,
    Suffix,
)
from jspec.engine.schedule.draft_length import DispatchResult, Policy
from jspec.step import memory
from jspec.step.executable_key import ExecutableKey
from pallas_kernels.layers.shard import AXIS
from tests.support import engines, folders, lettered
from tests.support.brittle import Fault
from tests.support.grammar_cases import MASKS, TABLE, GrammarCase, check_decoding

pytestmark = [pytest.mark.once, pytest.mark.slow]
TOLERANCE = 1e-4  # rounding of float32 scores with sums in another order
PROMPTS = [np.random.default_rng(n).integers(0, engines.VOCAB, n).tolist() for n in (5, 17, 11, 2)] + [[7, 8, 9] * 4]
PLAIN = [
    replace(one, max_tokens=14, ignore_eos=True)
    for one in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, seed=2, top_k=7, stop_token_ids=(3,)),
        SamplingParams(temperature=0.9, seed=4, repetition_penalty=1.2, logit_bias={3: 2.0}, bad_words=[[5]]),
        SamplingParams(temperature=0.0, draft=1),
    )
]
SCORED = [replace(one, logprobs=2) for one in PLAIN]
TREE = "topk:6,2,2"
OPTIONS: dict[str, Any] = dict(
    slots=3,
    max_len=engines.MAX_LEN,
    page_size=1,
    pages=60,  # too few for three requests, so some are preempted
    buckets=(3,),
    prefill_buckets=(16,),
    tokenizer=lettered.tokenizer(),
    eos_ids=(lettered.END,),
)


@cache
def draft_model(padding: int = 0) -> Model:
    """Return a model that is similar to the target, so that many of its tokens are accepted.

    Args:
        padding: number of tokens after those of the target.
    """
    rng, own = np.random.default_rng(3), engines.target()
    noisy = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(0, np.std(leaf), leaf.shape).astype(np.float32), own)
    rows = [(0, padding), (0, 0)]
    return noisy.replace(
        config=replace(own.config, vocab_size=engines.VOCAB + padding),
        embed=jnp.pad(noisy.embed, rows),
        head=jnp.pad(noisy.head, rows, constant_values=1.0),
    )


def make(device: Any = None, tree: str = TREE, padding: int = 0, **options: Any) -> Engine:
    drafter = DraftModel(draft_model(padding), tree, device=device)
    return Engine(engines.target(), drafter=drafter, **{**OPTIONS, **options})


@cache
def one_device(tree: str = TREE, **options: Any) -> list[Completion]:
    with make(tree=tree, **options) as engine:
        return run(engine)


def run(engine: Engine) -> list[Completion]:
    """Run all requests at once, and then each alone with few tokens, followed by one whose prompt is its text."""
    done = engine.generate(PROMPTS, SCORED, trace=True)
    for prompt, params in zip(PROMPTS, [replace(one, max_tokens=4) for one in SCORED], strict=True):
        done += engine.generate(prompt, params, trace=True)
        done += engine.generate(prompt + done[-1].token_ids, params, trace=True)
    return [one.raise_for_error() for one in done]


def tokens(engine: Engine, params: Sequence[SamplingParams] = SCORED) -> list[list[int]]:
    return [one.token_ids for one in engine.generate(PROMPTS, params)]


def check_equal(done: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Check tokens, drafts with their scores, accepted paths, log-probabilities and cached tokens."""
    for one, other in zip(done, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.metrics.num_cached_tokens == other.metrics.num_cached_tokens
        assert [own.path for own in one.rounds] == [own.path for own in other.rounds]
        for own, wanted in zip(one.rounds, other.rounds, strict=True):
            np.testing.assert_array_equal((own.tokens, own.parents), (wanted.tokens, wanted.parents))
            np.testing.assert_allclose(own.scores, wanted.scores, atol=TOLERANCE)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=TOLERANCE)


# -- one engine whose draft model has two devices


@pytest.fixture(scope="module")
def apart() -> Engine:
    return make(jax.devices()[1:3])


@pytest.fixture(autouse=True)
def _no_cached_pages(request: pytest.FixtureRequest) -> None:
    if "apart" in request.fixturenames:
        request.getfixturevalue("apart").scheduler.pages.clear()


def test_draft_model_on_two_other_devices_drafts_and_emits_what_it_does_on_the_targets(apart: Engine) -> None:
    """Requests are preempted, and later ones find cached pages of one row."""
    check_equal(run(apart), one_device())
    assert apart.metrics.num_preemptions > 0 and apart.pages_in_use == 0
    assert apart.metrics.num_accepted_tokens > 20 and apart.metrics.num_cached_tokens > 60


def test_weights_pools_and_state_are_on_the_devices_that_were_asked_for(apart: Engine) -> None:
    """What both sides know of the slots is equal after all requests have ended."""
    run(apart)
    target, drafting = apart.core.runner.target_side, apart.core.runner.draft_side
    assert devices_of((target.params, target.state)) == {jax.devices()[0]}
    assert devices_of((drafting.params, drafting.state)) == set(jax.devices()[1:3])
    assert drafting.params.target is None and not drafting.state.target and target.params.draft == ()
    for name in ("root", "lengths", "active", "remaining", "page_table", "sampling"):
        jax.tree.map(np.testing.assert_array_equal, *(getattr(side.state, name) for side in (target, drafting)))


def devices_of(tree: Any) -> set[jax.Device]:
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


@pytest.mark.parametrize("case", [pytest.param(TABLE, marks=pytest.mark.long), MASKS], ids=["table", "masks"])
def test_engine_with_a_draft_model_apart_emits_the_tokens_of_masked_decoding(apart: Engine, case: GrammarCase) -> None:
    """The host computes masks between the two devices."""
    pytest.importorskip(case.library)
    before = apart.metrics
    for order in (range(8), range(7, -1, -1)):
        check_decoding(apart, case, order)
    assert apart.metrics.num_accepted_tokens > before.num_accepted_tokens


@pytest.mark.parametrize("kind", ["draft", "commit", "verify", "draft_prefill"])
def test_step_that_fails_on_one_device_loses_running_requests_and_both_states(
    apart: Engine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The state of both devices is made anew, and later requests have their tokens."""
    expected = tokens(engines.plain(), PLAIN)
    assert tokens(apart) == expected  # compiles the programs
    error, runner = RuntimeError("device lost"), apart.core.runner
    with monkeypatch.context() as patch:
        for side in (runner.target_side, runner.draft_side):
            for key, program in [*side.programs.compiled.items()]:
                if key.kind == kind:
                    patch.setitem(side.programs.compiled, key, Fault(program, 2, error))
        done = apart.generate(PROMPTS * 2, SCORED * 2)
    failed = [one for one in done if one.finish_reason == "error"]
    assert 1 <= len(failed) < len(done) and all(one.error is error for one in failed)
    assert apart.healthy and apart.pages_in_use == 0 and tokens(apart) == expected


def stale(program: Callable[..., Any], params: Any, state: Any, *inputs: Any) -> Any:
    """Run a step and keep the roots from before it."""
    root = jnp.array(state.root)
    return replace(program(params, state, *inputs), root=root)


SPOILT: dict[str, tuple[str, Callable[..., Any]]] = {
    "stale roots": ("commit", stale),
    "no commit": ("commit", lambda program, params, state, *inputs: state),
    "stale first tokens": ("draft_prefill", stale),
    "no pages": ("update_page_table", lambda program, table, updates: table),
    "no pending rows": ("write_pending_rows", lambda program, params, state, packed: state),
}


@pytest.mark.parametrize("spoilt", SPOILT)
def test_comparison_of_drafts_after_a_wrong_value_has_crossed_fails(
    apart: Engine, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    """Negative controls. The tokens are right nevertheless, because no draft changes them."""
    run(apart)  # compiles the programs
    apart.scheduler.pages.clear()
    apart.core.runner.reset_state(RuntimeError("the pools have no rows of the run before"))
    expected, (kind, broken) = one_device(), SPOILT[spoilt]
    compiled = apart.core.runner.draft_side.programs.compiled
    for key, program in [*compiled.items()]:
        if key.kind == kind:
            monkeypatch.setitem(compiled, key, partial(broken, program))
    done = run(apart)
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    with pytest.raises(AssertionError):
        check_equal(done, expected)


# -- other engines

DEFAULT = (("rejection", "chain:2"),)
CASES = [
    (accept, tree)
    for accept in ("coupled", "rejection", "block", "multi_candidate", "typical")
    for tree in ("chain:2", "static:0,1,0.0,0.1", TREE)
    if (accept, tree) not in (("block", "static:0,1,0.0,0.1"), ("block", TREE))
]


@pytest.mark.filterwarnings("ignore:accept=.typical")
@pytest.mark.parametrize(
    ("accept", "tree"),
    [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.matrix) for case in CASES],
)
def test_accept_rule_with_a_draft_model_on_another_device_gives_the_tokens_of_one_device(
    accept: str, tree: str
) -> None:
    """The probabilities of the drafts cross, over a vocabulary with more tokens than the target's."""
    own: dict[str, Any] = dict(tree=tree, accept=accept, padding=2)
    with make(jax.devices()[3], **own) as engine:
        check_equal(run(engine), one_device(**own))
        assert engine.metrics.num_accepted_tokens > 20
        runner = engine.core.runner
        key = ExecutableKey("draft", OPTIONS["slots"], runner.program.drafter.tree.depth)
        crossing = memory.tree_bytes(runner.draft_side.programs.draft_shape(key))
        assert 2 * crossing <= runner.target_side.planner.received(runner.pool) <= 3 * crossing


@pytest.mark.long
@pytest.mark.parametrize(("target_on", "draft_on"), [((0, 1), (2,)), ((3, 0), (2, 1)), ((1,), (0,))])
def test_target_and_draft_model_on_any_numbers_of_devices_give_the_tokens_of_one_device(
    target_on: tuple[int, ...], draft_on: tuple[int, ...]
) -> None:
    targets, drafts = (list(np.array(jax.devices())[list(own)]) for own in (target_on, draft_on))
    with make(drafts, mesh=Mesh(np.array(targets), (AXIS,))) as engine:
        check_equal(run(engine), one_device())
        target, drafting = engine.core.runner.target_side, engine.core.runner.draft_side
        assert devices_of((target.params, target.state)) == set(targets)
        assert devices_of((drafting.params, drafting.state)) == set(drafts)


class TwoDepths(Policy):
    """A policy that chooses two draft depths in turns."""

    def __init__(self) -> None:
        self._next, self.seen = cycle((0, 1)), list[DispatchResult]()

    def choose(self, bucket: int, caps: Sequence[int]) -> int:
        return next(self._next)

    def learn(self, result: DispatchResult) -> None:
        self.seen.append(result)


@pytest.mark.long
def test_adaptive_engine_with_a_draft_model_apart_drafts_at_all_depths_and_learns_their_times() -> None:
    with make(jax.devices()[1], "chain:1", adaptive=True, draft_depths=(0, 1)) as engine:
        engine.policy = policy = TwoDepths()
        assert tokens(engine, PLAIN) == tokens(engines.plain(), PLAIN)
    assert {result.depth for result in policy.seen} == {0, 1}
    assert any(result.seconds is not None for result in policy.seen)


@pytest.mark.long
def test_deterministic_engine_with_a_draft_model_apart_has_the_bits_of_one_without_drafter() -> None:
    options: dict[str, Any] = {**OPTIONS, "deterministic": True, "pages": None}
    plain = Engine(engines.target(), **{**options, "page_size": 4, "prefill_buckets": (8,)})
    one, other = (engine.generate(PROMPTS, SCORED) for engine in (plain, make(jax.devices()[1:3], **options)))
    for wanted, done in zip(one, other, strict=True):
        assert done.token_ids == wanted.token_ids
        assert [own.logprob for own in done.logprobs or []] == [own.logprob for own in wanted.logprobs or []]


# -- memory


def held(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def test_memory_plans_count_the_arrays_of_each_side(apart: Engine) -> None:
    runner, plans = apart.core.runner, (apart.memory_plan, apart.draft_memory_plan)
    for side, plan in zip((runner.target_side, runner.draft_side), plans, strict=True):
        assert plan is not None and plan.pages == apart.scheduler.pages.pages
        assert plan.target_weights == held(side.params.target) and plan.draft_weights == held(side.params.draft)
        assert plan.target_pool == held(side.state.target) and plan.state == held(side.state)
        assert plan.workspace > 0
    assert (runner.target_side.planner.devices, runner.draft_side.planner.devices) == (1, 2)
    assert str(plans[1]).startswith("memory of the draft model's devices: ")
    assert engines.plain().draft_memory_plan is None


@pytest.mark.parametrize("small_side", ["target", "draft"])
def test_number_of_pages_fits_on_the_devices_with_the_least_memory(
    monkeypatch: pytest.MonkeyPatch, small_side: str
) -> None:
    """A device with little memory has fewer pages than all slots can use; the other device gets as many."""
    whole = make(jax.devices()[1], pages=None)
    side = getattr(whole.core.runner, f"{small_side}_side")
    most, planner = whole.memory_plan.pages, side.planner
    limit = planner.plan(replace(whole.core.runner.pool, pages=most // 2)).total / whole.config.memory_fraction

    def device_memory(*devices: jax.Device) -> memory.DeviceMemory:
        is_small = (small_side == "draft") == bool(devices)  # the target is on the default device
        return memory.DeviceMemory(math.ceil(limit) if is_small else 2**40, 0, is_reported=True)

    monkeypatch.setattr(memory, "device_memory", device_memory)
    with make(jax.devices()[1], pages=None) as engine:
        assert engine.draft_memory_plan is not None
        assert engine.memory_plan.pages == engine.draft_memory_plan.pages == most // 2
    with pytest.raises(
        ValueError,
        match=r"out of memory: max_len=48.*draft model's devices" if small_side == "draft" else "out of memory",
    ):
        make(jax.devices()[1], pages=most)


# -- options


def test_draft_model_that_is_loaded_onto_other_devices_is_never_on_the_targets(tmp_path: Path) -> None:
    folder = folders.write(tmp_path / "draft", folders.TARGET, folders.target_tensors())
    devices = jax.devices()[2:]
    drafter = DraftModel.from_pretrained(folder, tree="chain:2", device=devices, quantize="int8")
    assert devices_of(drafter.model) == set(devices)
    assert drafter.with_window(8).mesh == drafter.mesh == Mesh(np.array(devices), (AXIS,))


REFUSED: tuple[tuple[Callable[[], Any], type[Exception], str], ...] = (
    (
        lambda: make("cuda:1"),
        TypeError,
        r"DraftModel: device: expected a device such as jax.devices\(\)\[1\]",
    ),
    (lambda: make(1), TypeError, "DraftModel: device: expected a device .*, got 1"),
    (lambda: make([]), ValueError, "DraftModel: device: expected at least one device, each once"),
    (
        lambda: make(jax.devices()[1:2] * 2),
        ValueError,
        "DraftModel: device: expected at least one device, each",
    ),
    (
        lambda: make(jax.devices()[1:]),
        ValueError,
        "DraftModel: device: tensor_parallel: expected a divisor of 4, the model's num_attention_heads, got 3",
    ),
    (
        lambda: make(Mesh(np.array(jax.devices()[1:2]), ("x",))),
        ValueError,
        r"DraftModel: device: expected a mesh of one axis named .model., got axes",
    ),
    (
        lambda: make(jax.devices()[0]),
        ValueError,
        "DraftModel: device: expected devices that do not run the target",
    ),
    (
        lambda: make(jax.devices()[1], tensor_parallel=2),
        ValueError,
        "DraftModel: device: expected devices that do not run the target, got .*1.*; take others, or leave it out",
    ),
    (
        lambda: make(jax.devices()[1], rounds_per_dispatch=2),
        ValueError,
        "rounds_per_dispatch: expected 1 with a draft model on other devices, got 2",
    ),
)


@pytest.mark.parametrize(("build", "kind", "message"), REFUSED)
def test_impossible_devices_of_a_draft_model_are_refused_by_name(
    build: Callable[[], Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        build()


@pytest.mark.parametrize("method", [Eagle3, Eagle, Medusa, DFlash, DFlash2, Gemma4Assistant, NGram, Suffix])
def test_drafters_without_devices_of_their_own_say_why(method: type[Any]) -> None:
    reason = "it has no weights" if method in (NGram, Suffix) else "it reads the target's hidden states in every round"
    for call in (method, getattr(method, "from_pretrained", method)):
        with pytest.raises(TypeError, match=f"^{method.__name__}: device: expected no such argument, because {reason}"):
            call("path", device=jax.devices()[1])


def test_weights_that_are_divided_over_other_devices_are_refused() -> None:
    elsewhere = DraftModel(draft_model(), device=jax.devices()[2:])
    with pytest.raises(ValueError, match="mesh: expected weights that are on one device or over Mesh"):
        Engine(engines.target(), drafter=DraftModel(elsewhere.model), tensor_parallel=2, **OPTIONS)
