"""Test split decode steps: when they run, what is compiled for them, and how a failing mask ends a request."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import cycle
from typing import Any

import jax
import numpy as np
import pytest

from jspec import Engine, NGram, SamplingParams, Tree, verify
from jspec.core.ancestors import ancestors
from jspec.core.records import Draft, SlotView
from jspec.engine.callers.by_hand import ByHand
from jspec.engine.grammar.cfg_matcher import Matcher
from jspec.engine.schedule.draft_length import DispatchResult, Policy
from jspec.engine.schedule.sizes import RoundSize
from jspec.sampling import logprobs, penalties
from jspec.step.executable_key import ExecutableKey
from tests.reference import descent
from tests.support import engines, lettered
from tests.support.arrays import on_device
from tests.support.grammar_cases import MASKS, PROMPTS, check_decoding, masked
from tests.support.views import draft_of_rows, view_of_rows

pytestmark = pytest.mark.once
pytest.importorskip("llguidance")

PARAMS = MASKS.params
expected = MASKS.expected


def test_engine_with_the_mask_of_the_parent_at_each_node_emits_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: every node gets the mask of its parent."""
    masks = Matcher.masks
    monkeypatch.setattr(Matcher, "masks", lambda *a: masks(*a)[np.maximum(a[2], 0)])
    done = lettered.chain().generate(PROMPTS, PARAMS)
    same = [completion.token_ids == tokens for completion, tokens in zip(done, expected(), strict=True)]
    assert not all(same) and all(same[i] for i, params in enumerate(PARAMS) if params.grammar is None)


class Launches:
    """A counter of an engine's launches, and of the unread results at each launch, by name of the program."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.names: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self._engine = engine
        compiled = engine.core.runner.programs.compiled
        for key in [key for key in compiled if key.kind in ("prefill", "round", "draft", "verify")]:
            patch.setitem(compiled, key, self._counted(key, compiled[key]))

    def _counted(self, key: ExecutableKey, executable: Any) -> Any:
        name = f"masked {key.kind}" if key.kind == "prefill" and key.masked else key.kind

        def run(*arguments: Any) -> Any:
            self.names[name] += 1
            self.unread[name] += len(self._engine.core.in_flight)
            return executable(*arguments)

        return run


def test_engine_without_a_host_grammar_runs_no_split_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A split step starts when no result is unread; fused steps overlap."""
    engine = lettered.chain()
    engine.warmup(logprobs=True, grammar=True)
    seen = Launches(engine, monkeypatch)
    check_decoding(engine, MASKS, [1, 4])
    assert seen.names.keys() == {"prefill", "round"} and seen.unread["round"] > 0
    seen.names.clear()
    check_decoding(engine, MASKS, [6])
    assert seen.names["draft"] == seen.names["verify"] > 0 and seen.names["round"] == 0
    assert seen.names["masked prefill"] == 1 and seen.unread["draft"] == 0
    with ByHand(engine) as by_hand:
        request = by_hand.submit(PROMPTS[0], PARAMS[0])
        by_hand.step()
        assert request.token_ids == expected()[0][:1]  # its result is read before the next launch
        assert by_hand.result(request).token_ids == expected()[0]
    seen.names.clear()
    short = replace(PARAMS[6], max_tokens=3)
    done = engine.generate([PROMPTS[6], PROMPTS[4]], [short, PARAMS[4]])
    assert [one.token_ids for one in done] == [expected()[6][:3], expected()[4]]
    assert 0 < seen.names["draft"] == seen.names["verify"] < 4 and seen.names["round"] > 0


def test_request_with_a_host_grammar_ends_at_length_stop_string_or_abort() -> None:
    engine, tokens = lettered.tree(), expected()[0]
    one, cut = engine.generate([PROMPTS[0]] * 2, [replace(PARAMS[0], max_tokens=1), replace(PARAMS[0], stop="{{")])
    assert one.token_ids == tokens[:1] and one.finish_reason == "length"
    text = b"".join(lettered.TEXTS[token] or b"" for token in tokens).decode(errors="replace")
    assert cut.text == text.split("{{")[0] and ("{{" in text) == (cut.finish_reason == "stop")
    with ByHand(engine) as by_hand:
        request = by_hand.submit(PROMPTS[0], PARAMS[0])
        by_hand.step()
        by_hand.step()
        by_hand.abort(request)
        done = by_hand.result(request)
    check_decoding(engine, MASKS, [4])
    assert done.finish_reason == "abort" and done.token_ids == tokens[: len(done.token_ids)]
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("call", [0, 3])
def test_grammar_matcher_that_raises_ends_only_that_request(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The error is raised at the first token or in a later round."""
    engine, count, fill = lettered.chain(), [0], Matcher._fill

    def fails(matcher: Matcher, *arguments: Any) -> None:
        if matcher.grammar.source.startswith("grammar='start: pair"):
            count[0] += 1
            if count[0] > call:
                raise MemoryError("the parser is too large")
        fill(matcher, *arguments)

    monkeypatch.setattr(Matcher, "_fill", fails)
    done = engine.generate([PROMPTS[i] for i in (6, 0, 4)], [PARAMS[i] for i in (6, 0, 4)])
    assert done[0].finish_reason == "error" and isinstance(done[0].error, MemoryError)
    assert done[0].token_ids[:-1] == expected()[6][: len(done[0].token_ids) - 1] and done[0].token_ids[-1] == 0
    assert [one.token_ids for one in done[1:]] == [expected()[0], expected()[4]]
    assert engine.pages_in_use == 0


class Alternating(Policy):
    """A policy that chooses all draft depths in rotation."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        self._next = cycle(depths)

    def choose(self, bucket: int, caps: Any) -> RoundSize:
        return RoundSize(next(self._next))

    def learn(self, result: DispatchResult) -> None:
        assert result.seconds is None  # the timing of a split step says nothing about fused steps


def test_adaptive_engine_with_a_recursive_schema_runs_split_steps_of_all_depths() -> None:
    """A recursive schema needs no grammar tables, so the engine has none."""
    texts = lettered.JSON_TEXTS[: engines.VOCAB]
    engine = Engine(
        engines.target(),
        drafter=NGram(Tree.chain(2), max_n=2),
        slots=1,
        max_len=engines.MAX_LEN,
        prefill_buckets=(engines.MAX_LEN,),
        adaptive=True,
        draft_depths=(0, 2),
        grammar_cells=0,
        tokenizer=lettered.Lettered(texts),
        eos_ids=(lettered.END,),
    )
    engine.policy, whole = Alternating((0, 2)), 0
    for index, prompt in enumerate(PROMPTS):
        params = SamplingParams(seed=index, temperature=index % 3, max_tokens=32, json_schema=descent.OBJECTS)
        params = replace(params, logit_bias={1: -9, 10: -2, 5: 3, 15: 2}, min_p=0.01)
        (done,) = engine.generate(prompt, params)
        assert done.raise_for_error().token_ids == masked(prompt, params, texts=texts)
        if done.finish_reason == "eos":
            whole += 1
            assert set(json.loads(done.text or "")) <= {"a", "b"}
    rounds = engine.metrics.num_rounds_per_depth
    assert rounds[0] > 3 and rounds[2] > 3 and engine.metrics.num_accepted_tokens > 0 and whole > 0
    with pytest.raises(ValueError, match="built with grammar_cells=0"):
        engine.generate([1], SamplingParams(regex="a"))


def test_executables_that_run_out_of_memory_store_no_new_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs that a request needs are stored, or none; other requests are still served."""
    programs, made = lettered.chain().core.runner.programs, []
    monkeypatch.setattr(programs, "compiled", {})
    monkeypatch.setattr(programs, "_lower", programs._name)
    monkeypatch.setattr(programs, "_compile_one", lambda name, lowered: made.append(name) or (name, name))
    plain, scored, masked = (
        ExecutableKey.round(1, 2),
        ExecutableKey.round(1, 2, logprobs=True),
        ExecutableKey.split(1, 2),
    )

    monkeypatch.setattr(programs, "memory", {})

    def refuses_logprobs(memory: Any) -> None:
        if any("logprobs" in str(name) for name in memory):
            raise ValueError("out of memory")

    programs.compile([plain, *masked], refuses_logprobs)
    with pytest.raises(ValueError, match="out of memory"):
        programs.compile([scored, ExecutableKey("prefill", 16)], refuses_logprobs)
    assert programs.compiled.keys() == {plain, *masked}
    made.clear()
    programs.compile([plain, *masked], refuses_logprobs)
    assert made == []
    programs.compile([scored])
    assert programs.compiled.keys() == {plain, scored, *masked}


def test_processed_logprobs_with_host_masks_are_those_of_the_masked_logits() -> None:
    """Each emitted token is scored under the mask of the accepted node before it."""
    rng, tree = np.random.default_rng(0), Tree.static([(0,), (1,), (1, 0), (1, 0, 0)])
    logits, parents = rng.normal(0, 3, (2, 5, engines.VOCAB)).astype(np.float32), np.array([-1, 0, 0, 2, 3])
    flags = rng.random(logits.shape) < 0.5
    flags[..., 3] = True
    words = (flags * (1 << np.arange(engines.VOCAB))).sum(-1).astype(np.uint32)[..., None]
    allowed = np.where(flags, logits, -np.inf)
    best = allowed.argmax(-1)
    tokens = np.concatenate([[[1], [1]], best[:, parents[1:]]], axis=1)
    for row, node in ((0, 1), (1, 1), (1, 3)):  # drafts of wrong tokens, which are rejected
        tokens[row, node] = (tokens[row, node] + 1) % engines.VOCAB
    draft = draft_of_rows(tokens, np.broadcast_to(parents, (2, 5)))
    state = penalties.unused(2, engines.VOCAB).replace(used=on_device(np.ones(2, bool)))
    view = view_of_rows([1, 1]).replace(controls=state, masks=on_device(words))

    def run(logits: jax.Array, draft: Draft, view: SlotView) -> Any:
        verdict = verify.accept(logits[None], draft, ancestors(draft.parents), view, tree)
        return verdict, logprobs.of_round(logprobs.PROCESSED, logits, draft, verdict, view, tree)

    verdict, scores = jax.jit(run)(on_device(logits), draft, view)
    for row, path in enumerate([[0, 2, 3, 4], [0, 2]]):
        assert verdict.counts.tolist()[row] == len(path)
        for place, node in enumerate(path):
            likely = np.sort(allowed[row, node] - np.logaddexp.reduce(allowed[row, node]))[::-1]
            np.testing.assert_allclose(scores.top[row, place], likely, atol=1e-5)
            assert int(verdict.tokens[row, place]) == best[row, node]
