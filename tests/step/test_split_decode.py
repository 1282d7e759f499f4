"""Rounds in two launches: tokens are those of masking one by one, and only buckets that need them run so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Engine, NGram, SamplingParams, Tree, verify
from jspec.core.ancestors import ancestors
from jspec.core.records import Draft, SlotView
from jspec.engine.draft_length import DispatchResult, Policy
from jspec.engine.grammar.cfg_matcher import Matcher
from jspec.engine.sampling_params import sample_seed
from jspec.sampling import logprobs, penalties
from tests.reference import descent
from tests.reference.masking import decoded
from tests.support import lettered, small
from tests.support.views import view_of_rows

pytestmark = pytest.mark.once
pytest.importorskip("llguidance")

LENGTH = 18
READERS = {
    descent.LISTS: descent.lists,
    descent.PAIRS: descent.pairs,
    json.dumps(descent.OBJECTS): descent.objects,
}
PROMPTS = [[1, 2, 3], [4] * 6, list(range(1, 12)), [5, 1, 5, 1, 5], [7], [9, 9, 2, 1], [3, 1, 2, 3, 1, 2, 3], [6, 2]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, grammar=descent.LISTS, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0, max_tokens=LENGTH, regex="((a|b){2}c)*"),
    SamplingParams(seed=3, max_tokens=LENGTH, grammar=descent.LISTS, top_k=9, draft=2),
    SamplingParams(seed=4, max_tokens=LENGTH, grammar=descent.PAIRS, stop_token_ids=(13,), logit_bias={5: 2.0}),
    SamplingParams(temperature=0, max_tokens=LENGTH),
    SamplingParams(seed=6, max_tokens=LENGTH, grammar=descent.LISTS, bad_words=[[15], [1, 1], [2, 9]], temperature=1.7),
    SamplingParams(temperature=0, max_tokens=LENGTH, grammar=descent.PAIRS, frequency_penalty=0.3),
    SamplingParams(seed=8, max_tokens=LENGTH, presence_penalty=1.0, logprobs=0),
]


by_descent = partial(decoded, readers=READERS)


@cache
def expected() -> list[list[int]]:
    return [by_descent(*each) for each in zip(PROMPTS, PARAMS, strict=True)]


def decodes_as_expected(engine: Engine, order: Any) -> None:
    done = engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    assert [completion.raise_for_error().token_ids for completion in done] == [expected()[i] for i in order]
    for completion, index in zip(done, order, strict=True):
        if PARAMS[index].grammar is not None:
            text = (completion.text or "").encode()
            is_whole = completion.finish_reason in ("eos", "stop")
            assert descent.fits(READERS[PARAMS[index].grammar], text)[is_whole]
        if PARAMS[index].logprobs is not None:
            assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("make", [lettered.chain, lettered.tree])
def test_an_engine_decodes_as_masking_token_by_token(make: Callable[[], Engine]) -> None:
    """A second time the prompts' pages are found, slots held others; preempted where pages are few."""
    engine = make()
    before = engine.metrics
    for order in (range(8), range(7, -1, -1)):
        decodes_as_expected(engine, order)
    if make is lettered.tree:
        assert engine.metrics.num_preemptions > before.num_preemptions
    assert engine.metrics.num_accepted_tokens > before.num_accepted_tokens
    assert engine.metrics.num_cached_tokens > before.num_cached_tokens
    assert engine.pages_in_use == 0


def test_grammars_are_what_makes_the_difference() -> None:
    """Negative control: without them every row but those that have none decodes otherwise. And some of them end."""
    free = [replace(params, grammar=None) for params in PARAMS]
    done = lettered.chain().generate(PROMPTS, free)
    same = [completion.token_ids == tokens for completion, tokens in zip(done, expected(), strict=True)]
    assert same == [params.grammar is None for params in PARAMS]
    ends = [tokens[-1] in (0, 13) for tokens, params in zip(expected(), PARAMS, strict=True) if params.grammar]
    assert 1 <= sum(ends) < len(ends)


def test_a_mask_of_the_parent_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what may follow a node's parent is taken for what may follow the node."""
    masks = Matcher.masks
    monkeypatch.setattr(Matcher, "masks", lambda *a: masks(*a)[np.maximum(a[2], 0)])
    done = lettered.chain().generate(PROMPTS, PARAMS)
    same = [completion.token_ids == tokens for completion, tokens in zip(done, expected(), strict=True)]
    assert not all(same) and all(same[i] for i, params in enumerate(PARAMS) if params.grammar is None)


class Launches:
    """Counts what an engine launches, by name, and notes how many results were under way then."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.names: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
        self._engine = engine
        for name in ("prefill", "rounds", "scored_rounds", "drafts", "verifies", "masked_prefill"):
            programs = getattr(engine.core.runner.programs, name)
            for key in programs:
                patch.setitem(programs, key, self._counted(name, programs[key]))

    def _counted(self, name: str, executable: Any) -> Any:
        def run(*arguments: Any) -> Any:
            self.names[name] += 1
            self.unread[name] += len(self._engine.core.in_flight)
            return executable(*arguments)

        return run


def test_only_buckets_with_such_a_row_run_in_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two launches nothing is under way; the fused rounds overlap."""
    engine = lettered.chain()
    decodes_as_expected(engine, [0, 6, 7])  # all is compiled
    seen = Launches(engine, monkeypatch)
    decodes_as_expected(engine, [1, 4])
    assert seen.names.keys() == {"prefill", "rounds"} and seen.unread["rounds"] > 0
    seen.names.clear()
    decodes_as_expected(engine, [6])
    assert seen.names["drafts"] == seen.names["verifies"] > 0 and seen.names["rounds"] == 0
    assert seen.names["masked_prefill"] == 1 and seen.unread["drafts"] == 0
    request = engine.submit(PROMPTS[0], PARAMS[0])
    engine.step()
    assert request.token_ids == expected()[0][:1]  # read at once
    assert engine.result(request).token_ids == expected()[0]
    seen.names.clear()
    short = replace(PARAMS[6], max_tokens=3)
    done = engine.generate([PROMPTS[6], PROMPTS[4]], [short, PARAMS[4]])
    assert [one.token_ids for one in done] == [expected()[6][:3], expected()[4]]
    assert 0 < seen.names["drafts"] == seen.names["verifies"] < 4 and seen.names["rounds"] > 0


def test_every_completion_of_a_prompt_has_the_grammar() -> None:
    params = replace(PARAMS[2], n=3, draft=True)
    (done,) = lettered.chain().generate([PROMPTS[2]], params)
    seeds = [sample_seed(3, index) for index in range(3)]
    assert [one.token_ids for one in done.samples] == [by_descent(PROMPTS[2], params, seed) for seed in seeds]


def test_requests_end_by_length_stop_string_and_abort() -> None:
    engine, tokens = lettered.tree(), expected()[0]
    one, cut = engine.generate([PROMPTS[0]] * 2, [replace(PARAMS[0], max_tokens=1), replace(PARAMS[0], stop="{{")])
    assert one.token_ids == tokens[:1] and one.finish_reason == "length"
    text = b"".join(lettered.TEXTS[token] or b"" for token in tokens).decode(errors="replace")
    assert cut.text == text.split("{{")[0] and ("{{" in text) == (cut.finish_reason == "stop")
    request = engine.submit(PROMPTS[0], PARAMS[0])
    engine.step()
    engine.step()
    engine.abort(request)
    decodes_as_expected(engine, [4])
    done = engine.result(request)
    assert done.finish_reason == "abort" and done.token_ids == tokens[: len(done.token_ids)]
    assert engine.pages_in_use == 0


@pytest.mark.parametrize("call", [0, 3])
def test_an_error_of_the_matcher_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """At the first token, or in a later round."""
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


def test_bad_words_that_leave_nothing_end_that_request_alone() -> None:
    stuck = SamplingParams(
        temperature=0, max_tokens=9, grammar='start: "c" "a" ("b" start)?', bad_words=[[13, 1], [13, 3]]
    )
    done = lettered.chain().generate([PROMPTS[0], PROMPTS[1]], [stuck, PARAMS[1]])
    assert done[0].finish_reason == "error" and done[0].token_ids == [13, 0]
    with pytest.raises(ValueError, match="behind 1 tokens nothing was left of those that the grammar allows"):
        done[0].raise_for_error()
    assert done[1].token_ids == expected()[1]


class Alternating(Policy):
    """Every depth in turn."""

    def __init__(self, depths: tuple[int, ...]) -> None:
        self._next = cycle(depths)

    def choose(self, bucket: int, caps: Any) -> int:
        return next(self._next)

    def learn(self, reading: DispatchResult) -> None:
        assert reading.seconds is None  # of rounds in two launches nothing is learnt for the others


def test_every_depth_has_its_launches() -> None:
    """An adaptive engine without room for a table, which a schema that holds itself does not need."""
    texts = lettered.JSON_TEXTS[: small.VOCAB]
    engine = Engine(
        small.target(),
        drafter=NGram(Tree.chain(2), max_n=2),
        slots=1,
        max_len=small.MAX_LEN,
        prefill_buckets=(small.MAX_LEN,),
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
        assert done.raise_for_error().token_ids == by_descent(prompt, params, texts=texts)
        if done.finish_reason == "eos":
            whole += 1
            assert set(json.loads(done.text or "")) <= {"a", "b"}
    rounds = engine.metrics.num_rounds_per_depth
    assert rounds[0] > 3 and rounds[2] > 3 and engine.metrics.num_accepted_tokens > 0 and whole > 0
    with pytest.raises(ValueError, match="built with grammar_cells=0"):
        engine.generate([1], SamplingParams(regex="a"))


def test_what_an_interrupt_left_unread_is_read_before_masks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lettered.chain()
    request, reads = engine.submit(PROMPTS[0], PARAMS[0]), engine.core._read_down_to

    def interrupted(count: int) -> Any:
        if engine.core.in_flight:
            raise KeyboardInterrupt
        return reads(count)

    monkeypatch.setattr(engine.core, "_read_down_to", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.core.in_flight
    monkeypatch.setattr(engine.core, "_read_down_to", reads)
    assert engine.result(request).raise_for_error().token_ids == expected()[0]


def test_others_step_on_while_the_programs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, free = lettered.chain(), []
    compiled = engine.core.runner.programs._compile

    def watched(*arguments: Any) -> None:
        free.append(not engine._lock.is_mine)
        compiled(*arguments)

    monkeypatch.setattr(engine.core.runner.programs, "_compile", watched)
    request = engine.submit(PROMPTS[6], PARAMS[6])
    engine.abort(engine.submit(PROMPTS[4], PARAMS[4]))  # nor does it wait for what is compiled elsewhere
    assert free and all(free) and engine.result(request).token_ids == expected()[6]


def test_programs_that_do_not_fit_leave_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a request needs all is kept or nothing; those that need less go on."""
    programs, made, wanted = lettered.chain().core.runner.programs, [], dict(traced=False, scored_prompts=False)
    for name in ("rounds", "scored_rounds", "scored_prefill", "drafts", "verifies", "masked_prefill"):
        monkeypatch.setattr(programs, name, {})
    monkeypatch.setattr(programs, "_timed", lambda name, *_: name)
    monkeypatch.setattr(programs, "_compile_one", lambda name, lowered: made.append(name) or name)

    def nothing_more(executables: Any) -> None:
        if any("verify" in str(name) and "logprobs" in str(name) for name in executables):
            raise ValueError("out of memory")

    def ensure(*, scored: bool, masked: bool) -> None:
        first_tokens = {(False, False)} if masked else set()
        programs.ensure(nothing_more, scored=scored, first_tokens=first_tokens, **wanted)

    ensure(scored=False, masked=True)
    assert programs.verifies and programs.masked_prefill
    with pytest.raises(ValueError, match="out of memory"):
        ensure(scored=True, masked=False)
    assert not programs.scored_rounds and not programs.scored_prefill
    made.clear()
    ensure(scored=False, masked=True)
    assert made == []
    for name in ("drafts", "verifies", "masked_prefill"):
        monkeypatch.setattr(programs, name, {})
    with pytest.raises(ValueError, match="out of memory"):
        ensure(scored=True, masked=True)
    ensure(scored=True, masked=False)  # a grammar that was refused is nobody else's affair
    assert programs.scored_rounds and not programs.verifies


def test_what_the_engine_cannot_follow_is_refused_before_anything_is_queued() -> None:
    engine = lettered.chain()
    with pytest.raises(ValueError, match='unknown name: "foo"'):
        engine.generate([[1], [2]], [SamplingParams(), SamplingParams(grammar="start: foo")])
    assert not engine.scheduler.has_work


def test_processed_logprobs_are_of_what_the_mask_leaves() -> None:
    """Of every token that a round emits: by the mask of the accepted node before it, which is not its place."""
    rng, tree = np.random.default_rng(0), Tree.static([(0,), (1,), (1, 0), (1, 0, 0)])
    logits, parents = rng.normal(0, 3, (2, 5, small.VOCAB)).astype(np.float32), np.array([-1, 0, 0, 2, 3])
    flags = rng.random(logits.shape) < 0.5
    flags[..., 3] = True
    words = (flags * (1 << np.arange(small.VOCAB))).sum(-1).astype(np.uint32)[..., None]
    law = np.where(flags, logits, -np.inf)
    best = law.argmax(-1)
    tokens = np.concatenate([[[1], [1]], best[:, parents[1:]]], axis=1)
    for row, node in ((0, 1), (1, 1), (1, 3)):  # these are wrong
        tokens[row, node] = (tokens[row, node] + 1) % small.VOCAB
    draft = Draft(
        tokens=jnp.asarray(tokens, jnp.int32),
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (2, 5)),
        scores=jnp.zeros((2, 5)),
        valid=jnp.ones((2, 5), bool),
        probs=None,
        vocab_map=None,
    )
    state = penalties.unused(2, small.VOCAB)
    view = view_of_rows([1, 1]).replace(controls=state.replace(used=jnp.ones(2, bool)), masks=jnp.asarray(words))

    def run(logits: jax.Array, draft: Draft, view: SlotView) -> Any:
        verdict = verify.accept(logits[None], draft, ancestors(draft.parents), view, tree, verify.Typical())
        return verdict, logprobs.of_round(logprobs.PROCESSED, logits, draft, verdict, view, tree)

    verdict, scores = jax.jit(run)(jnp.asarray(logits), draft, view)
    for row, path in enumerate([[0, 2, 3, 4], [0, 2]]):
        assert verdict.counts.tolist()[row] == len(path)
        for place, node in enumerate(path):
            likely = np.sort(law[row, node] - np.logaddexp.reduce(law[row, node]))[::-1]
            np.testing.assert_allclose(scores.top[row, place], likely, atol=1e-5)
            assert int(verdict.tokens[row, place]) == best[row, node]
