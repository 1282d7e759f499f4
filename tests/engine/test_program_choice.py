"""Test that programs are compiled when requests first need them, and that larger programs replace missing ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest

from jspec import Engine, NGram, SamplingParams
from jspec.engine.request.request import Request
from jspec.engine.schedule.program_choice import Features, LiveRequests, ProgramChoice, union
from jspec.engine.schedule.sizes import RoundSize
from jspec.step.executable_key import ExecutableKey, covering
from tests.support import engines, lettered, tiny

pytestmark = pytest.mark.once

OPTIONS: dict[str, Any] = dict(slots=4, max_len=engines.MAX_LEN, prefill_buckets=(4, 16))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


def engine(**options: Any) -> Engine:
    return engines.make(engines.target(), **OPTIONS | options)


def names(one: Engine) -> set[str]:
    return {name for name in one.compile_seconds if "[" in name}  # names without those of the small helper programs


def test_engine_on_a_cpu_compiles_only_what_its_requests_need() -> None:
    one = engine()
    assert one.config.buckets == (1, 4) and names(one) == set()
    one.generate([1, 2], GREEDY)
    assert names(one) == {"prefill[4]", "round[1]"}
    one.generate([[1, 2], [3] * 9], GREEDY)
    assert names(one) == {"prefill[4]", "round[1]", "prefill[16]", "round[4]"}
    one.generate([[1, 2], [4] * 30], [SamplingParams(max_tokens=3, logprobs=2), GREEDY])
    more = {"prefill[4] with logprobs", "round[4] with logprobs"}
    assert names(one) == {"prefill[4]", "round[1]", "prefill[16]", "round[4]"} | more


def test_engine_that_compiles_ahead_compiles_all_buckets_at_its_start() -> None:
    one = engine(compile_ahead=True)
    everything = {"prefill[4]", "prefill[16]", "round[1]", "round[2]", "round[4]"}
    assert names(one) == everything
    one.generate([[1, 2], [3] * 9, [5]], GREEDY)
    assert names(one) == everything


def test_engine_warmup_compiles_everything_that_later_requests_need() -> None:
    text: dict[str, Any] = dict(tokenizer=lettered.tokenizer(), eos_ids=(lettered.END,))
    sizes: dict[str, Any] = dict(slots=2, max_len=engines.MAX_LEN, buckets=(2,), prefill_buckets=(6,))
    one = engines.make(tiny.model(engines.VOCAB, layers=1), drafter=NGram("chain:2"), **sizes, **text)
    one.warmup(logprobs=True, prompt_logprobs=True, trace=True, grammar=True)
    before = names(one)
    params = [
        SamplingParams(max_tokens=2, logprobs=tokens, prompt_logprobs=prompt, regex=regex, seed=0)
        for tokens, prompt, regex in product((None, 2), (None, 1), (None, "a+"))
    ]
    for count in range(1, len(params) + 1):
        one.generate([[1, 2, 3]] * count, params[:count], trace=count % 2 == 0)
    assert names(one) == before


def test_engine_compiling_on_demand_emits_the_tokens_of_one_compiling_ahead() -> None:
    """Prompts of several lengths arrive in several orders and numbers, so larger programs replace missing ones."""
    on_demand, ahead = engine(), engine(compile_ahead=True)
    prompts = [[1, 2], [3] * 9, [5, 6, 7] * 5, [8], [2, 9, 4] * 8]
    for count in (1, 3, 5, 2):
        params = [SamplingParams(max_tokens=5 + i, seed=i, temperature=i % 2) for i in range(count)]
        results = [[done.token_ids for done in one.generate(prompts[:count], params)] for one in (on_demand, ahead)]
        assert results[0] == results[1]


def test_stream_yields_the_first_token_before_the_rounds_are_compiled() -> None:
    one = engine()
    stream = one.stream([1, 2], GREEDY)
    first = next(stream)
    assert len(first.token_ids) == 1 and names(one) == {"prefill[4]"}
    rest = [token for chunk in stream for token in chunk.token_ids]
    assert [*first.token_ids, *rest] == engine().generate([1, 2], GREEDY)[0].token_ids
    assert names(one) == {"prefill[4]", "round[1]"}


def test_request_for_one_token_compiles_no_round() -> None:
    one = engine()
    one.generate([1, 2], SamplingParams(max_tokens=1))
    assert names(one) == {"prefill[4]"}
    done = one.generate([[1, 2], [3, 4]], [SamplingParams(max_tokens=1), GREEDY])  # only one request needs rounds
    assert [len(each.token_ids) for each in done] == [1, 6] and "round[1]" in names(one)
    other = engine()
    done = [other.result(other.submit([1, 2], GREEDY))]
    assert names(other) == {"prefill[4]", "round[1]"} and len(done[0].token_ids) == 6


def test_requests_of_two_threads_wait_for_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both requests need one program. A stream in a third thread continues meanwhile."""
    one, compiled, running = engine(), threading.Event(), threading.Event()
    one.generate([7], GREEDY)
    programs, compile_one = one.core.runner.programs, one.core.runner.programs._compile_one
    counts: list[str] = []

    def slow(name: str, lowered: Any) -> Any:
        counts.append(name)
        assert running.wait(60)  # wait until the stream has yielded during this compilation
        compiled.set()
        return compile_one(name, lowered)

    monkeypatch.setattr(programs, "_compile_one", slow)
    stream = one.stream([5, 6], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    next(stream)
    with ThreadPoolExecutor() as pool:
        scored = [pool.submit(one.generate, [token], SamplingParams(max_tokens=3, logprobs=1)) for token in (1, 2)]
        for _ in range(5):
            next(stream)
        assert not compiled.is_set()
        running.set()
        assert all(len(done.result()[0].token_ids) == 3 for done in scored)
    assert sum(len(chunk.token_ids) for chunk in stream) > 0
    assert len(counts) == len(set(counts))


def test_failed_compilation_of_rounds_raises_and_leaves_nothing_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    programs, compile_one = one.core.runner.programs, one.core.runner.programs._compile_one

    def fails(name: str, lowered: Any) -> Any:
        if name.startswith("round"):
            raise RuntimeError("no memory for the compiler")
        return compile_one(name, lowered)

    with monkeypatch.context() as patch:
        patch.setattr(programs, "_compile_one", fails)
        submit = lambda *arguments: one.result(one.submit(*arguments))  # noqa: E731
        for call in (one.generate, submit, lambda *arguments: list(one.stream(*arguments))):
            with pytest.raises(RuntimeError, match="no memory for the compiler"):
                call([1, 2], GREEDY)
            assert not one.scheduler.has_work and one.pages_in_use == 0
    assert len(one.generate([1, 2], GREEDY)[0].token_ids) == 6


def test_preempted_request_is_prefilled_with_already_compiled_programs() -> None:
    """After a preemption the answer is prefilled too. No program for a longer chunk is compiled for this."""
    one, alone = engine(slots=2, pages=10, page_size=4, prefix_cache=False), engine()
    prompts, params = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    done = one.generate(prompts, params)
    assert sum(each.metrics.num_preemptions for each in done) > 0 and "prefill[16]" not in names(one)
    assert [each.token_ids for each in done] == [alone.generate(prompt, params)[0].token_ids for prompt in prompts]


def test_program_that_covers_another_has_the_least_outputs_then_the_fewest_rows() -> None:
    compiled = [ExecutableKey.round(rows, 0, logprobs=logprobs) for rows in (2, 4) for logprobs in (False, True)]
    assert covering(ExecutableKey.round(1, 0), compiled, 0) == ExecutableKey.round(2, 0)
    assert covering(ExecutableKey.round(3, 0), compiled, 0) == ExecutableKey.round(4, 0)
    assert covering(ExecutableKey.round(1, 0, traced=True), compiled, 0) == ExecutableKey.round(2, 0, logprobs=True)
    for key in (ExecutableKey.round(5, 0), ExecutableKey.round(1, 1), ExecutableKey("prefill", 1)):
        with pytest.raises(KeyError, match="no compiled program can run"):
            covering(key, compiled, 0)


def test_engine_on_several_devices_compiles_rounds_with_and_without_gathered_logits() -> None:
    """Prefills always gather; log-probabilities need gathered logits; so do all requests of a logits processor."""
    config = engine(compile_ahead=True).config

    def rounds(*, edits_all: bool = False, is_divided: bool = True, **wanted: bool) -> list[str]:
        features = Features(**wanted)
        choice = ProgramChoice(config, (RoundSize(0),), (), edits_all=edits_all, is_divided=is_divided)
        keys = choice.all_keys(features)
        assert sum(key.kind == "prefill" for key in keys) == (2 + 2 * features.logprobs)
        return [key.name(0) for key in keys if key.kind == "round" and key.size == 4]

    plain, gathered = "round[4]", "round[4] of gathered logits"
    assert rounds() == [plain, gathered]
    assert rounds(logprobs=True) == [plain, gathered, "round[4] with logprobs of gathered logits"]
    assert rounds(edits_all=True) == [gathered]
    assert rounds(is_divided=False) == [plain]


def test_engine_with_a_draft_model_apart_compiles_the_same_programs_on_several_target_devices() -> None:
    """Rounds in several programs always gather logits, so no second kind is compiled."""
    config, wanted = engine(compile_ahead=True).config, Features(logprobs=True, masked=True)

    def keys(*, is_divided: bool, is_split: bool) -> list[ExecutableKey]:
        options = dict(edits_all=False, is_divided=is_divided, is_split=is_split)
        return ProgramChoice(config, (RoundSize(0),), (), **options).all_keys(wanted)

    apart = keys(is_divided=True, is_split=True)
    assert apart == keys(is_divided=False, is_split=True) and not any(key.gathers_logits for key in apart)
    assert keys(is_divided=True, is_split=False) != keys(is_divided=False, is_split=False), "control"


def test_round_that_gathers_logits_replaces_one_that_does_not() -> None:
    plain, gathers = ExecutableKey.round(2, 0), ExecutableKey.round(2, 0, gathers_logits=True)
    assert covering(plain, [gathers], 0) == gathers
    with pytest.raises(KeyError, match=r"no compiled program can run round\[2\] of gathered logits"):
        covering(gathers, [plain], 0)


def request_with(number: int, **params: Any) -> Request:
    return Request(number, (1, 2), SamplingParams(**params), seed=0, stop_ids=(), max_new_tokens=4)


def test_live_requests_have_the_union_of_the_features_of_unfinished_requests() -> None:
    live, scored, plain = LiveRequests(), request_with(0, logprobs=1), request_with(1)
    live.add(scored)
    live.add(plain)
    assert len(live) == 2 and live.features() == Features(logprobs=True)
    live.discard(scored)
    live.discard(scored)
    assert len(live) == 1 and live.features() == Features()
    assert union([Features(traced=True), Features(masked=True)]) == Features(traced=True, masked=True)
