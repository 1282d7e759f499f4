"""Test the memory plan against real allocations, the number of pages, and the errors when memory runs out."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jspec import DraftModel, Eagle3, Engine, SamplingParams, Tree
from jspec.core.config import EngineConfig
from jspec.draft.base import Drafter, NoDraft
from jspec.models.parts.kv_pool import PoolShape
from jspec.step import executables, memory
from jspec.step.executables import Executables
from jspec.step.memory import DeviceMemory, MemoryPlanner, fit
from jspec.step.program import Params, Program, init_state
from jspec.step.program_memory import ProgramMemory, exchange_bytes, program_memory
from tests.support import engines, tiny

pytestmark = pytest.mark.once

OPTIONS: dict[str, Any] = dict(slots=3, max_len=100, page_size=4, buckets=(3,), prefill_buckets=(16,))
PLENTY = 2**40


def eagle3() -> Eagle3:
    return Eagle3(tiny.eagle_head(engines.target(), draft_vocab=12, feature_layers=(0, 1)), Tree.chain(3))


def planner_of(device: DeviceMemory, drafter: Drafter | None = None, **options: Any) -> tuple[MemoryPlanner, PoolShape]:
    """Return the memory planner and the shape of the pools of an engine that has allocated nothing yet."""
    target, config = engines.target(), EngineConfig(**OPTIONS | options)
    drafter = NoDraft() if drafter is None else drafter
    layers = drafter.feature_layers(target)
    program = Program(drafter, layers, config.accept, "reference", controls=config.controls)
    planner = MemoryPlanner(program, Params(target=target, draft=drafter.bind(target)), config, device)
    return planner, PoolShape.of(config, drafter.tree, "float32")


def device(limit: int, in_use: int = 0, *, is_reported: bool = True) -> DeviceMemory:
    return DeviceMemory(limit, in_use, is_reported)


def held(tree: Any) -> int:
    """Return the size of a tree's buffers in bytes; a buffer that several arrays share counts once."""
    return sum({leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(tree)}.values())


def state_of(planner: MemoryPlanner, pool: PoolShape) -> Any:
    return init_state(planner.program, planner.params, pool)


def test_memory_plan_of_an_engine_equals_the_bytes_it_allocates(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="jspec.step.side"):
        engine = Engine(engines.target(), drafter=eagle3(), compile_ahead=True, **OPTIONS)
    plan, state, params = engine.memory_plan, engine.core.runner.state, engine.core.runner.params
    assert (plan.target_pool, plan.draft_pool) == tuple(map(held, (state.target, state.draft.cache)))
    assert plan.target_weights == held(params.target)
    assert (
        plan.target_weights + plan.draft_weights == held(params) < memory.tree_bytes(params)
    )  # target and drafter share some weights
    rest = [state.draft.features, state.draft.tokens, state.draft.count, state.draft.page_end_features]
    assert plan.features == held(rest)
    assert plan.state == held(state)
    rounds = [program for key, program in engine.core.runner.programs.compiled.items() if key.kind == "round"]
    sizes = [program.memory_analysis().temp_size_in_bytes for program in rounds]
    assert plan.is_measured and plan.workspace >= max(sizes) > 0
    parts = [getattr(plan, field.name) for field in fields(plan)]
    assert plan.total == sum(parts[:8]) and plan.pages == engine.scheduler.pages.pages
    assert str(plan) in caplog.messages
    for words in ("target weights", "draft pool", "features", "noise and workspace", memory.size(plan.total)):
        assert words in str(plan)
    engine.close()


@pytest.mark.parametrize("drafter", [None, eagle3(), DraftModel(tiny.model(16, layers=2), Tree.topk(6, 3, 2))])
def test_page_count_on_a_device_that_reports_memory_fills_the_memory(drafter: Drafter | None) -> None:
    """Allocated arrays give the true sizes; in the second case other arrays use memory too."""
    planner, pool = planner_of(device(PLENTY), drafter)
    base = planner.plan(replace(pool, pages=2))
    page = held(state_of(planner, replace(pool, pages=3))) - held(state_of(planner, replace(pool, pages=2)))
    for pages, others in ((40, 0), (70, 12_345)):
        available = base.total + (pages - 2) * page + page // 2 + others
        in_use = held(planner.params) + others
        found, plan = fit(replace(planner, device=device(int(available / 0.9) + 1, in_use)), pool)
        assert (found.pages, plan.pages, plan.other) == (pages, pages, others)
        assert held(planner.params) + held(state_of(planner, found)) + plan.workspace + others == plan.total
        assert plan.total <= plan.limit < plan.total + page


def test_page_count_with_plenty_of_memory_is_the_largest_useful_one() -> None:
    """It is enough for max_len tokens in every slot, or four times as many pages with a prefix cache."""
    planner, pool = planner_of(device(PLENTY))
    assert fit(planner, pool)[0].pages == 4 * 3 * 26 + 1
    planner, pool = planner_of(device(PLENTY), prefix_cache=False)
    assert fit(planner, pool)[0].pages == 3 * 26 + 1
    assert fit(*planner_of(device(PLENTY, is_reported=False)))[0].pages == 3 * 26 + 1
    assert fit(*planner_of(device(PLENTY), pages=17))[0].pages == 17


def limit_for(planner: MemoryPlanner, pool: PoolShape, pages: int) -> DeviceMemory:
    """Return a device on which exactly ``pages`` pages fit."""
    total = planner.plan(replace(pool, pages=pages)).total
    return replace(planner.device, limit=int(total / 0.9) + 1)


NAMED = re.compile(r"lower (max_len|slots) to at most (\d+)|pass (pages)=(\d+)")


def named(message: str) -> dict[str, int]:
    """Return the values of settings that an error's text proposes."""
    return {a or c: int(b or d) for a, b, c, d in NAMED.findall(message)}


@pytest.mark.parametrize("is_reported", [True, False])
def test_page_count_of_too_large_pools_raises_naming_settings_that_fit(is_reported: bool) -> None:
    """Each named value fits, and a value larger by one does not."""
    planner, pool = planner_of(device(PLENTY, is_reported=is_reported), eagle3())
    planner = replace(planner, device=limit_for(planner, pool, 20))
    with pytest.raises(
        ValueError, match=r"out of memory: max_len=100, slots=3 and \d+ pages need .* available"
    ) as error:
        fit(planner, pool)
    found = named(str(error.value))
    assert {"max_len", "pages"} <= set(found) and found["pages"] == 20
    assert ("slots" in found) == (found.get("slots", 0) >= 1)
    for name, value in found.items():
        fits, one_more = (planner_of(planner.device, eagle3(), **_options(name, value + more)) for more in (0, 1))
        fit(*fits)
        with pytest.raises(ValueError, match="out of memory"):
            fit(*one_more)


def _options(name: str, value: int) -> dict[str, Any]:
    return {name: value, "buckets": (value,)} if name == "slots" else {name: value}


def test_page_count_without_memory_for_a_page_beside_the_weights_raises() -> None:
    with pytest.raises(ValueError, match="not one page is left beside the weights; take quantize="):
        fit(*planner_of(device(1000)))


def test_engine_with_limited_device_memory_allocates_as_many_pages_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With enough memory the engine goes on to compile; with less it raises before compiling."""
    planner, pool = planner_of(device(PLENTY))
    made: list[int] = []

    def compiled(self: Any, program: Any, params: Any, state: Any, *others: Any) -> None:
        made.append(state.target[0].k.shape[0])
        raise RuntimeError("enough")

    monkeypatch.setattr(Executables, "__init__", compiled)
    for pages in (27, 33):
        monkeypatch.setattr(memory, "device_memory", lambda pages=pages: limit_for(planner, pool, pages))
        with pytest.raises(RuntimeError, match="enough"):
            Engine(engines.target(), **OPTIONS)
    assert made == [27, 33]
    monkeypatch.setattr(memory, "device_memory", lambda: limit_for(planner, pool, 26))
    with pytest.raises(ValueError, match="lower max_len to at most 99"):  # 25 pages, as the root needs a row too
        Engine(engines.target(), **OPTIONS)


def out_of_memory() -> None:
    """Raise the error that the device raises when memory runs out."""
    jnp.zeros(2**44).block_until_ready()


@pytest.mark.parametrize("where", ["pools", "compiler"])
def test_engine_out_of_memory_at_start_raises_naming_settings_that_fit(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    planner, full = planner_of(device(PLENTY), eagle3())
    planner = replace(planner, device=limit_for(planner, full, 60))
    pool, plan = fit(planner, full)
    missing = plan.state // 4
    error = RuntimeError(f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {missing} bytes.")

    def fails(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(
        *(("jspec.step.side.make_state", fails) if where == "pools" else (Executables, "__init__", fails))
    )
    monkeypatch.setattr(memory, "device_memory", lambda: planner.device)
    with pytest.raises(
        ValueError, match=f"out of memory at start: missing are {memory.size(missing)} or more"
    ) as found:
        Engine(engines.target(), drafter=eagle3(), **OPTIONS)
    assert found.value.__cause__ is error
    assert set(named(str(found.value))) == {
        "pages"
    }  # at the next start pages would fill the memory that a lower max_len frees
    pages, share = (
        named(str(found.value))["pages"],
        re.search(r"memory_fraction=0.9 to at most ([\d.]+)", str(found.value)),
    )
    freed = [plan.total - planner.plan(replace(pool, pages=count)).total for count in (pages, pages + 1)]
    assert freed[0] >= missing > freed[1]
    assert share is not None
    config = replace(planner.config, memory_fraction=float(share[1]))
    assert fit(replace(planner, config=config), full)[1].total <= plan.total - missing


def test_out_of_memory_error_when_explained_names_the_size_the_device_reported() -> None:
    """The messages are a real one and one without a number; other errors stay unchanged."""
    planner, pool = planner_of(device(PLENTY, is_reported=False))
    with pytest.raises(ValueError, match=r"missing are 64\.00 TiB or more"), memory.explain_oom(planner, pool):
        out_of_memory()
    for text, asked in (("allocate 16.50GiB (rounded)", 16.5 * 2**30), ("allocating 12 bytes", 12), ("none", None)):
        assert memory._bytes_asked(text) == asked
    with pytest.raises(ValueError, match="for instance, as the device does not say"), memory.explain_oom(planner, pool):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    for other in ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded", "INTERNAL: something else"):
        with pytest.raises(RuntimeError, match=other), memory.explain_oom(planner, pool):
            raise RuntimeError(other)


@pytest.mark.parametrize("stats", [None, {}, {"bytes_limit": 0}, {"bytes_limit": None}, {"bytes_limit": 7}])
def test_device_memory_with_a_positive_limit_counts_as_reported(
    monkeypatch: pytest.MonkeyPatch, stats: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    found = memory.device_memory()
    assert (found.limit == 7, found.is_reported) == ((True, True) if stats == {"bytes_limit": 7} else (False, False))


def program(**sizes: int) -> Any:
    """Return a stand-in for a compiled program with this memory analysis."""
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": count for name, count in sizes.items()})
    return SimpleNamespace(memory_analysis=lambda: analysis)


def needs(**sizes: int) -> ProgramMemory:
    return program_memory(program(**sizes), devices=1)


KERNEL = 'backend_config={"kernel_strategy":"KERNEL_STRATEGY_TRITON_ONE_SHOT"}'
EXCHANGES = (
    # text of an operation, and how many bytes each of two devices sends
    (f"  ROOT %a.2 = f32[8,4096]{{1,0}} all-gather(%p), channel_id=1, {KERNEL}", 4 * 4 * 4096),
    (f"  %b = bf16[3,100]{{1,0}} all-reduce(%p), channel_id=1, {KERNEL}", 2 * 300),
    (f"  %c = (s32[6]{{0}}, f8e4m3fn[10]{{0}}) all-gather(%p, %q), {KERNEL}", (4 * 6 + 10) // 2),
    (f"  %d = f32[] all-reduce(%p), {KERNEL}", 4),
    ('  %e = f32[128256]{0} all-gather(%p), backend_config={"kernel_strategy":"KERNEL_STRATEGY_DEFAULT"}', 0),
    (f"  %f = f32[8]{{0}} fusion(%p), calls=%all-gather.1, {KERNEL}", 0),
)


@pytest.mark.parametrize(("text", "sent"), EXCHANGES)
def test_kernel_that_exchanges_arrays_keeps_two_buffers_for_what_a_device_sends(text: str, sent: int) -> None:
    assert exchange_bytes(text, devices=2) == 2 * sent


def test_memory_plan_counts_the_buffers_of_the_exchanges_of_all_programs() -> None:
    planner, pool = planner_of(device(PLENTY))
    programs = [program(temp=10, output=0, alias=0) for _ in range(2)]
    for one, (text, _) in zip(programs, EXCHANGES, strict=False):
        one.as_text = lambda text=text: text
    plain, plan = (
        memory.measured(planner, pool, [program_memory(one, devices) for one in programs]) for devices in (1, 2)
    )
    assert plan.exchanges == 2 * sum(sent for _, sent in EXCHANGES[:2]) and plan.total == plain.total + plan.exchanges
    assert "exchanges 129.17 KiB" in str(plan) and "exchanges" not in str(plain)


def test_engine_when_deleted_frees_device_memory_without_garbage_collection() -> None:
    """The next engine's plan depends on the free memory, so freeing must not wait for garbage collection."""
    engine = Engine(engines.target(), prefix_cache=False, controls=False, **OPTIONS)
    engine.generate([1, 2])
    root = weakref.ref(engine.core.runner.state.root)
    gc.disable()
    try:
        del engine
        assert root() is None
    finally:
        gc.enable()


def test_programs_compiled_for_a_later_request_update_the_memory_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the programs need too much memory, their request is refused before queueing and no program is stored.

    The memory of each program is read once.
    """
    read, own = [], program_memory
    monkeypatch.setattr(executables, "program_memory", lambda one, count: read.append(one) or own(one, count))
    engine = Engine(engines.target(), compile_ahead=True, controls=False, **OPTIONS)
    scored = SamplingParams(logprobs=3)
    side, plan = engine.core.runner.target_side, engine.memory_plan
    count, planner = len(side.programs.compiled), side.planner
    monkeypatch.setattr(side, "planner", replace(planner, device=device(plan.total + 10)))
    with pytest.raises(ValueError, match=r"out of memory: the compiled programs need .* more than the device has"):
        engine.generate([1, 2], scored)
    assert len(engine.core.runner.programs.compiled) == count and engine.memory_plan == plan
    assert engine.generate([1, 2])[0].error is None
    monkeypatch.setattr(side, "planner", planner)
    assert engine.generate([1, 2], scored)[0].error is None
    assert set(read) >= set(side.programs.compiled.values()) and len(read) == len(set(read))
    found = [program_memory(one, devices=1) for one in side.programs.compiled.values()]
    assert len(found) > count and engine.memory_plan == memory.measured(planner, engine.core.runner.pool, found)
    assert engine.memory_plan.workspace > plan.workspace


def test_memory_plan_after_compilation_has_the_workspace_of_the_largest_program() -> None:
    planner, pool = planner_of(device(PLENTY))
    estimate = planner.plan(pool)
    programs = [needs(temp=10, output=500, alias=450), needs(temp=70, output=100, alias=100)]
    plan = memory.measured(planner, pool, programs)
    assert (plan.workspace, plan.is_measured, plan.state) == (70, True, estimate.state)
    unknown = memory.measured(planner, pool, [program_memory(SimpleNamespace(memory_analysis=lambda: None), 1)])
    assert unknown == estimate and "noise and workspace (estimate)" in str(unknown)
    with pytest.raises(ValueError, match=r"the compiled programs need .* more than the device has"):
        memory.measured(planner, pool, [needs(temp=PLENTY, output=0, alias=0)])


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.50 KiB"), (2**31, "2.00 GiB")]
)
def test_memory_size_of_any_magnitude_is_written_in_a_readable_unit(count: int, words: str) -> None:
    assert memory.size(count) == words
