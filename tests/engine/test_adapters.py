"""Test engines whose requests choose low-rank adapters of the target, with PEFT's recorded tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Completion, DraftModel, Engine, Model, Replicas, SamplingParams
from jspec.engine.input import input_processor
from jspec.models import adapters
from jspec.models.adapter_files import read_adapter
from jspec.models.weights.quantize import quantize_weights
from jspec.step.side import Side
from jspec.tools.bench import random_models
from jspec.tools.replay import run_texts
from tests.support import engines, tiny
from tests.support.low_rank import merged, write
from tests.support.recordings import most_likely, recording

pytestmark = pytest.mark.once

KINDS = ("all", "rslora", "patterns", None)
TREE = "static:0,1,0.0,0.1,1.0,0.0.0"
OPTIONS: dict[str, Any] = dict(
    slots=4, max_len=64, buckets=(4,), prefill_buckets=(16,), page_size=4, controls=False, adapters=3, adapter_rank=6
)


@pytest.fixture(scope="module")
def target(golden: Path) -> Model:
    return tiny.load_target(golden / "families" / "llama")


def loaded(engine: Any, golden: Path, kinds: Sequence[str | None] = KINDS) -> Any:
    for kind in kinds:
        if kind is not None:
            engine.load_adapter(kind, golden / "adapters" / "llama" / kind)
    return engine


def prompt_of(golden: Path) -> list[int]:
    return recording(golden / "adapters" / "expect.npz")["prompt"].tolist()


def recorded(golden: Path, kind: str | None) -> list[int]:
    return recording(golden / "adapters" / "expect.npz")[f"llama.{kind or 'none'}.tokens"].tolist()


def complete(engine: Any, golden: Path, kinds: Sequence[str | None] = KINDS, **more: Any) -> list[Completion]:
    params = [SamplingParams(max_tokens=20, temperature=0, adapter=kind, **more) for kind in kinds]
    return [done.raise_for_error() for done in engine.generate([prompt_of(golden)] * len(kinds), params)]


def are_recorded(done: Sequence[Completion], golden: Path, kinds: Sequence[str | None] = KINDS) -> list[bool]:
    return [one.token_ids == recorded(golden, kind) for one, kind in zip(done, kinds, strict=True)]


def drafter_of(target: Model) -> DraftModel:
    """Return a draft model that is the target without adapters, with the tree of most tests."""
    return DraftModel(target, TREE)


def test_requests_with_several_adapters_and_none_have_the_recorded_tokens(target: Model, golden: Path) -> None:
    """Two tables serve three adapters; too few pages preempt requests, and the prefix cache serves later ones."""
    options = OPTIONS | {"adapters": 2, "pages": 26}
    with loaded(engines.make(target, drafter_of(target), **options), golden) as engine:
        kinds = KINDS * 3
        assert all(are_recorded(complete(engine, golden, kinds), golden, kinds))
        assert engine.metrics.num_preemptions > 0 and engine.metrics.num_cached_tokens > 0
        assert engine.metrics.num_accepted_tokens > 20  # of requests without adapters, whose target is the draft model
        names = {key.name(3) for key in engine.core.runner.programs.compiled}
        assert {"round[4] with adapters", "prefill[16] with adapters", "prefill[16]"} <= names
        engine.core.scheduler.pages.check()


def test_requests_of_other_adapters_share_no_pages(
    target: Model, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(engines.make(target, **OPTIONS), golden) as engine:
        first, again = complete(engine, golden, ["all", "all"]), complete(engine, golden, ["all"])
        assert (first[0].metrics.num_cached_tokens, again[0].metrics.num_cached_tokens) == (0, 11)
        (other,) = complete(engine, golden, ["rslora"])
        assert other.metrics.num_cached_tokens == 0 and other.token_ids == recorded(golden, "rslora")

        class Unsalted(input_processor.Request):
            def __init__(self, **fields: Any) -> None:
                super().__init__(**fields | {"cache_salt": b"equal"})

        monkeypatch.setattr(input_processor, "Request", Unsalted)
        complete(engine, golden, ["all"])
        (shared,) = complete(engine, golden, ["patterns"])
        assert shared.metrics.num_cached_tokens == 11 and shared.token_ids != recorded(golden, "patterns")


def test_rows_that_read_the_tables_of_others_have_other_tokens(
    target: Model, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Side.load_adapter
    monkeypatch.setattr(Side, "load_adapter", lambda side, index, adapter: load(side, (index + 1) % 3, adapter))
    with loaded(engines.make(target, **OPTIONS), golden) as engine:
        assert are_recorded(complete(engine, golden), golden) == [False, False, False, True]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel": 2}, id="2 devices"),
        pytest.param(
            {"tensor_parallel": 4, "deterministic": True}, id="4 devices, deterministic", marks=pytest.mark.long
        ),
        pytest.param({"deterministic": True}, id="deterministic"),
    ],
)
def test_tokens_on_several_devices_and_in_deterministic_mode_are_the_recorded_ones(
    target: Model, golden: Path, options: dict[str, Any]
) -> None:
    with loaded(engines.make(target, drafter_of(target), **OPTIONS | options), golden) as engine:
        assert all(are_recorded(complete(engine, golden), golden))


def test_deterministic_logprobs_depend_on_a_rows_own_adapter_alone_and_are_those_of_scored_texts(
    target: Model, golden: Path
) -> None:
    with loaded(engines.make(target, deterministic=True, **OPTIONS), golden) as engine:
        alone = [complete(engine, golden, [kind], logprobs=0)[0] for kind in KINDS]
        together = complete(engine, golden, logprobs=0)
        for one, other in zip(alone, together, strict=True):
            assert [each.logprob for each in one.logprobs] == [each.logprob for each in other.logprobs]
        texts = [prompt_of(golden) + done.token_ids for done in alone]
        for kind, text, done in zip(KINDS, texts, alone, strict=True):
            of_tokens = [each.logprob for each in done.logprobs]
            (scored,), (of_base,) = (engine.log_probs([text], adapter=name) for name in (kind, None))
            assert scored[-20:].tolist() == of_tokens
            assert (of_base[-20:].tolist() == of_tokens) == (kind is None), "control: without the adapter"
        programs = engine.core.runner.programs
        modes = {
            (key.adapted, programs._program_of(key).compiler_options.get("xla_gpu_command_buffer_scheduling_mode"))
            for key in programs.compiled
            if key.kind in ("round", "prefill")
        }
        assert modes == {(True, "CONCURRENT"), (False, None)}, "launches of programs with adapters run side by side"


@pytest.mark.parametrize("kind", ["int8", pytest.param("int4", marks=pytest.mark.long)])
def test_tokens_with_a_quantised_target_are_its_most_likely_ones(target: Model, golden: Path, kind: str) -> None:
    quantized = quantize_weights(target, kind)
    with loaded(engines.make(quantized, **OPTIONS), golden) as engine:
        done = complete(engine, golden)
    tables = adapters.empty_tables(target, 1, 6)
    table = adapters.as_tables(read_adapter(golden / "adapters" / "llama" / "all"), target, 6)
    tables = tables.with_table(0, adapters.on_devices(table, target))
    adapted = replace(quantized, layers=tables.adapted(quantized.layers, jnp.ones((1, 1), jnp.int32)))
    assert most_likely(adapted, [prompt_of(golden)], [done[0].token_ids]) == [done[0].token_ids]
    assert most_likely(quantized, [prompt_of(golden)], [done[3].token_ids]) == [done[3].token_ids]


def test_draft_model_on_another_device_drafts_for_adapted_targets(target: Model, golden: Path) -> None:
    drafter = DraftModel(target, TREE, device=jax.devices()[1])
    with loaded(engines.make(target, drafter, **OPTIONS), golden) as engine:
        assert all(are_recorded(complete(engine, golden), golden))


def test_adapters_come_back_after_sleep_and_stay_with_new_weights(target: Model, golden: Path) -> None:
    with loaded(engines.make(target, **OPTIONS), golden) as engine:
        complete(engine, golden)
        plan = engine.memory_plan
        assert plan.adapters == engines_tables_bytes(engine) > 0
        engine.sleep(weights="host")
        engine.wake_up()
        assert all(are_recorded(complete(engine, golden), golden))
        engine.update_weights(target)
        assert all(are_recorded(complete(engine, golden), golden))
        engine.update_weights(jax.tree.map(jnp.zeros_like, target))
        assert not any(are_recorded(complete(engine, golden), golden))


def engines_tables_bytes(engine: Engine) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(engine.core.runner.target_side.adapters))


def test_requests_go_on_while_adapters_are_loaded_and_unloaded(target: Model, golden: Path) -> None:
    with loaded(engines.make(target, **OPTIONS), golden, ["all"]) as engine:
        stream = engine.stream(prompt_of(golden), SamplingParams(max_tokens=20, temperature=0, adapter="all"))
        tokens = list(next(stream).token_ids)
        engine.unload_adapter("all")
        thread = threading.Thread(target=loaded, args=(engine, golden, ["rslora"]))
        thread.start()
        tokens += [token for chunk in stream for token in chunk.token_ids]
        thread.join()
        assert tokens == recorded(golden, "all")
        assert list(engine.adapters) == ["rslora"]
        with pytest.raises(
            ValueError, match=r"adapter: expected one that this engine has loaded \('rslora'\), got 'all'"
        ):
            engine.generate([1], adapter="all")


def test_requests_without_adapters_overtake_one_that_waits_for_a_table(target: Model, golden: Path) -> None:
    """The first request has the only table, the second waits for it, and so does the fourth, in order."""
    with loaded(engines.make(target, **OPTIONS | {"adapters": 1}), golden) as engine:
        kinds = ("all", "rslora", None, "all")
        params = [SamplingParams(max_tokens=20, temperature=0, adapter=kind) for kind in kinds]
        done = [engine.result(request) for request in [engine.submit(prompt_of(golden), each) for each in params]]
        assert are_recorded(done, golden, kinds) == [True] * 4
        first, second, third, fourth = (each.metrics.queue_seconds for each in done)
        assert max(first, third) < second < fourth


@pytest.mark.long
def test_replicas_serve_the_adapters_of_all(target: Model, golden: Path) -> None:
    devices = jax.devices()[:2]
    with Replicas(lambda mesh: engines.make(target, mesh=mesh, **OPTIONS), devices) as replicas:
        loaded(replicas, golden)
        assert all(are_recorded(complete(replicas, golden, KINDS * 2), golden, KINDS * 2))


def test_wrong_calls_say_what_was_expected(target: Model, golden: Path, tmp_path: Path) -> None:
    folder = golden / "adapters" / "llama" / "all"
    with (
        engines.make(target, **OPTIONS | {"adapters": 0}) as engine,
        pytest.raises(ValueError, match="expected an engine with adapters, got one without; make it with adapters="),
    ):
        engine.load_adapter("all", folder)
    with loaded(engines.make(target, **OPTIONS), golden, ["all"]) as engine:
        for call, error in {
            (lambda: engine.load_adapter("all", folder)): "expected a new one, got 'all'; unload_adapter it first",
            (lambda: engine.unload_adapter("other")): "expected one of 'all', got 'other'",
            (lambda: engine.load_adapter("x", tmp_path)): "adapter_config.json",
            (lambda: SamplingParams(adapter="")): "SamplingParams.adapter: expected a name or None",
            (lambda: SamplingParams(lora_request=1)): "adapter= of a request",  # type: ignore[call-arg]
            (lambda: Engine(target, max_loras=2)): "adapters=, the number of adapters",  # type: ignore[call-arg]
        }.items():
            with pytest.raises((ValueError, TypeError, FileNotFoundError), match=error):
                call()
        assert list(engine.adapters) == ["all"]


def largest_errors(done: Completion, prompt: list[int], target: Model) -> tuple[float, float]:
    """Return how far the logprobs of tokens are from a target's, and how far tokens are from its most likely ones."""
    tokens, after = np.array(done.token_ids), slice(len(prompt) - 1, -1)
    logits = run_texts(target, jnp.asarray([[*prompt, *tokens]])).logits[0, after]
    right = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32)))
    chosen = right[np.arange(len(tokens)), tokens]
    return float(np.abs(chosen - [each.logprob for each in done.logprobs]).max()), float((right.max(1) - chosen).max())


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [None, "chain:4"])
def test_rows_of_bfloat16_have_the_logprobs_of_merged_weights(tree: str | None, tmp_path: Path) -> None:
    """The weights of a target in float32 contain an adapter; sums in bfloat16 move its logprobs by 0.3."""
    sizes = dict(vocab_size=512, hidden_size=512, intermediate_size=1408, num_layers=2, num_heads=4, num_kv_heads=2)
    target = tiny.random_model(random_models.TARGETS["llama3-8b"].resized(**sizes))
    target = jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), target)
    exact = jax.tree.map(lambda weight: weight.astype(jnp.float32), target)
    files = {f"rank {rank}": tiny.uno_adapter(target, rank=rank, seed=rank) for rank in (8, 16, 64)}
    targets = [*(merged(exact, file) for file in files.values()), exact]
    prompt = np.random.default_rng(0).integers(0, 512, 20).tolist()
    params = [SamplingParams(max_tokens=20, temperature=0, adapter=name, logprobs=0) for name in (*files, None)]
    options: dict[str, Any] = dict(slots=4, max_len=64, buckets=(4,), prefill_buckets=(64,))
    drafter = None if tree is None else DraftModel(target, tree)
    with Engine(target, drafter=drafter, adapters=3, adapter_rank=64, **options) as engine:
        for name, file in files.items():
            engine.load_adapter(name, write(tmp_path / name, file))
        done = engine.generate([prompt] * 4, params)
        assert tree is None or engine.metrics.num_accepted_tokens > 10
        texts = [program.as_text() for program in engine.core.runner.programs.compiled.values()]
    assert sum("low_rank_sum" in text for text in texts) >= 2, "control: kernels of a round and of a prompt"
    for index, each in enumerate(done):
        assert max(largest_errors(each, prompt, targets[index])) < 0.5
        assert min(max(largest_errors(each, prompt, other)) for other in targets[:index] + targets[index + 1 :]) > 3
    with Engine(target, **options) as engine:
        (plain,) = engine.generate([[*prompt, *done[3].token_ids]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    scores = [record.logprob for record in plain.prompt_logprobs[20:]]
    np.testing.assert_allclose(scores, [record.logprob for record in done[3].logprobs], atol=0.05)
