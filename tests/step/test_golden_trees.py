"""Compare trees of EAGLE-3, EAGLE-1 and Medusa with recordings of their authors' own code, round by round."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from jspec import Drafter, Eagle, Eagle3, Medusa, Tree
from jspec.draft import eagle, medusa
from jspec.draft import expand_tree as growing
from jspec.draft.base import DraftState
from jspec.draft.eagle import EagleDrafter
from jspec.draft.expand_tree import Level
from jspec.models.parts.kv_pool import PoolShape
from jspec.step.prefill import prefill_step
from jspec.step.program import Params, Program, init_state, view_of
from jspec.tools.replay import observe
from tests.support import byte_pair, tiny
from tests.support.arrays import on_device
from tests.support.recordings import TOLERANCE, engine_of, recording, replay, same_rounds

pytestmark = pytest.mark.once

STATIC20 = "medusa/greedy_static20.npz"


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch", reason="the recorded heads are .bin files")


def choices(golden: Path) -> list[tuple[int, ...]]:
    """Return the recorded Medusa tree."""
    return [tuple(rank for rank in path if rank >= 0) for path in recording(golden / STATIC20)["choices"].tolist()]


CASES: dict[str, tuple[Callable[[Path], Drafter], int, float]] = {
    "tree_d3_k4_t16.npz": (lambda g: Eagle3(tiny.load_head(g / "draft"), Tree.topk(16, 4, 4)), 423, 3.742),
    "tree_d7_k10_t60.npz": (lambda g: Eagle3(tiny.load_head(g / "draft"), Tree.topk(60, 8, 10)), 278, 5.681),
    "eagle1/tree_d3_k4_t16.npz": (lambda g: Eagle(tiny.load_head(g / "eagle1/draft"), Tree.topk(16, 4, 4)), 377, 4.196),
    STATIC20: (lambda g: Medusa(tiny.load_medusa(g / "medusa/heads"), Tree.static(choices(g))), 539, 2.928),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != STATIC20)) for name in CASES])
def test_tree_drafters_on_recorded_prompts_have_the_recorded_rounds(golden: Path, name: str) -> None:
    make, compared, mean_acceptance_length = CASES[name]
    recorded = recording(golden / name)
    engine = engine_of(make(golden))
    assert same_rounds(replay(engine, golden, recorded), recorded) == compared
    assert engine.metrics.mean_acceptance_length == pytest.approx(mean_acceptance_length, abs=5e-4)


# -- intermediate values of one round: features, hidden states of every level, all candidates


class Detail:
    """The first round after the first prompt, with its intermediate values."""

    def __init__(self, golden: Path, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.levels: list[tuple[Level, Array]] = []
        self.candidates: list[tuple[Array, Array]] = []
        children = growing._children
        monkeypatch.setattr(growing, "_children", lambda *args: self._kept(children(*args)))
        target = tiny.load_target(byte_pair.TARGET)
        self.program = Program(drafter, drafter.feature_layers(target), "coupled", "reference")
        self.params = Params(target=target, draft=drafter.bind(target))
        ids = tiny.recorded_prompts(golden)[0]
        state = init_state(self.program, self.params, PoolShape(1, 2, 256, 150, "float32", "float32"))
        own = tiny.prefill_input(ids, page_row=[1])
        prefill = jax.jit(partial(prefill_step, self.program))
        self.state, _ = prefill(self.params, state, own)
        view = view_of(self.state, on_device(np.zeros(1, jnp.int32)), self.program).replace(all_greedy=True)
        self._watch_levels(monkeypatch)

        def draft(state: DraftState) -> tuple[Any, ...]:
            return drafter.draft(self.params.draft, state, view)[0], self.levels, self.candidates

        self.draft, self.levels, self.candidates = jax.jit(draft)(self.state.draft)

    def _kept(self, found: growing._Candidates) -> growing._Candidates:
        to_target = self.params.draft.draft_to_target
        self.candidates.append((found.scores[0], found.ids[0] if to_target is None else to_target[found.ids[0]]))
        return found

    def _watch_levels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = eagle.draft_step

        def watched(params, cache, view, level, *more):  # type: ignore[no-untyped-def]
            out, product, cache = original(params, cache, view, level, *more)
            self.levels.append((level, out.hidden[0]))
            return out, product, cache

        monkeypatch.setattr(eagle, "draft_step", watched)


def detail_drafter(golden: Path, folder: str) -> EagleDrafter:
    if folder == "eagle1":
        return Eagle(tiny.load_head(golden / "eagle1/draft"), Tree.topk(60, 6, 10))
    return Eagle3(tiny.load_head(golden / "draft"), Tree.topk(60, 8, 10))


@pytest.mark.parametrize("folder", ["", "eagle1"])
def test_eagle_tree_in_the_first_round_has_the_recorded_intermediate_values(
    golden: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = recording(golden / folder / "prompt0_detail.npz")
    got = Detail(golden, detail_drafter(golden, folder), monkeypatch)
    prompt = recorded["prompt"]
    assert got.state.lengths.tolist() == [len(prompt)]
    assert got.state.root.tolist() == [recorded["first_token"]]
    # Row i of the draft cache belongs to feature i - 1, rotated by position i - 1.
    keys = np.asarray(got.state.draft.cache[0].k[1])[:, 1 : len(prompt)]
    np.testing.assert_allclose(keys, recorded["draft_k"][:, : len(prompt) - 1], atol=TOLERANCE)
    pending = np.asarray(got.state.draft.features[0, 0])
    feature = recorded["fc_out"] if not folder else recorded["target_final_hidden"]
    np.testing.assert_allclose(pending, feature[-1], atol=TOLERANCE)
    assert len(got.levels) == len(recorded["tree_level_hidden"])
    for index, (level, hidden) in enumerate(got.levels[: len(recorded["tree_level_hidden"])]):
        np.testing.assert_array_equal(level.tokens[0], recorded["tree_level_in_tokens"][index])
        np.testing.assert_allclose(hidden, recorded["tree_level_hidden"][index], atol=TOLERANCE)
    scores, tokens = (np.concatenate(parts) for parts in zip(*got.candidates, strict=True))
    np.testing.assert_allclose(scores, recorded["all_scores"], atol=TOLERANCE)
    np.testing.assert_array_equal(tokens, recorded["all_tokens"])
    np.testing.assert_allclose(got.draft.scores[0, 1:], recorded["sel_scores"], atol=TOLERANCE)
    np.testing.assert_array_equal(got.draft.parents[0, 1:], recorded["parent_node"])


# -- values that acceptance hardly depends on


def test_medusa_heads_after_recorded_texts_have_the_recorded_logits(golden: Path) -> None:
    """The texts are those of the first recorded rounds."""
    recorded, heads = recording(golden / STATIC20), tiny.load_medusa(golden / "medusa/heads").heads
    target, prompts = tiny.load_target(byte_pair.TARGET), tiny.recorded_prompts(golden)
    texts = []
    for index in recorded["logits_iter"][:8]:
        prompt = int(np.searchsorted(recorded["iter_offset"], index, side="right") - 1)
        done = int(recorded["prefix_len"][index]) - len(prompts[prompt])
        start = recorded["out_offset"][prompt]
        texts.append(prompts[prompt] + recorded["output"][start : start + done].tolist())
    padded = np.array(list(itertools.zip_longest(*texts, fillvalue=0))).T  # causal attention ignores padding
    last = target.config.num_layers
    seen = observe(target, padded, (last, last + 1)).states
    ends = (np.arange(len(texts)), np.array([len(text) - 1 for text in texts]))
    got = np.stack([medusa.head_logits(head, seen[last + 1][ends][:, None])[:, 0] for head in heads], axis=1)
    np.testing.assert_allclose(got, recorded["medusa_logits"][:8], atol=TOLERANCE)
    wrong = np.asarray(medusa.head_logits(heads[0], seen[last][ends][:, None])[:, 0])
    off = np.abs(wrong - recorded["medusa_logits"][:8, 0]).max(axis=1)
    assert (off > 100 * TOLERANCE).all(), "a state before the final norm gives the same logits"
