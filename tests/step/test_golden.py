"""Compare the EAGLE-3 chain with recordings of the authors' own code, round by round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Eagle3, Engine, SamplingParams, Tree
from jspec.core.records import SlotView
from jspec.draft import eagle
from jspec.draft.eagle_head import EagleHead
from jspec.draft.expand_tree import Level
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.rope import Rope
from jspec.step.prefill import prefill_step
from jspec.step.program import Params, Program, init_state, view_of
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.support import byte_pair, tiny
from tests.support.arrays import on_device
from tests.support.recordings import TOLERANCE, engine_of, most_likely, recording, replay, same_rounds

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def chain(golden: Path) -> dict[str, np.ndarray]:
    return recording(golden / "chain_d4_k1_t6.npz")


@pytest.fixture(scope="module")
def drafter() -> Eagle3:
    return Eagle3(tiny.load_head(byte_pair.HEAD), Tree.chain(5))


@pytest.fixture(scope="module")
def engine(drafter: Eagle3) -> Engine:
    return engine_of(drafter)


def test_eagle3_chain_on_recorded_prompts_has_the_recorded_rounds_and_acceptance(
    golden: Path, engine: Engine, chain: dict[str, np.ndarray]
) -> None:
    assert same_rounds(replay(engine, golden, chain), chain) == 477
    assert engine.metrics.mean_acceptance_length == pytest.approx(3.327, abs=5e-4)


def test_eagle3_chain_on_recorded_prompts_has_the_recorded_first_draft_logits(
    golden: Path, drafter: Eagle3, chain: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors in rope theta, feature layers, norms or order of concatenation change logits but hardly acceptance."""
    seen: list[np.ndarray] = []
    original = eagle.write_pending_rows

    def spy(params: eagle.EagleHead, state: eagle.EagleState, view: SlotView, window: int | None) -> tuple:
        out, product, cache_ = original(params, state, view, window)
        logits = reduce_partials(product, jnp.float32)[:, 0]
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), logits, ordered=True)
        return out, product, cache_

    monkeypatch.setattr(eagle, "write_pending_rows", spy)
    target = tiny.load_target(byte_pair.TARGET)
    sizes = dict(slots=1, max_len=512, buckets=(1,), prefill_buckets=(128,), prefix_cache=False, controls=False)
    spied = Engine(target, drafter=drafter, overlap=False, **sizes)
    for prompt, ids in enumerate(tiny.recorded_prompts(golden)[:6]):  # these have 157 rounds
        seen.clear()
        tokens = int(np.diff(chain["out_offset"])[prompt]) + 1
        spied.generate(ids, SamplingParams(max_tokens=tokens, temperature=0))
        jax.effects_barrier()
        first, last = chain["iter_offset"][prompt : prompt + 2]
        np.testing.assert_allclose(np.concatenate(seen), chain["first_logits"][first:last], atol=TOLERANCE)


def concatenated_the_other_way_round(head: EagleHead) -> EagleHead:
    """Swap feature and embedding in the first layer's input."""
    (layer,), hidden = head.layers, head.config.hidden_size
    return head.replace(layers=[layer.replace(qkv=jnp.roll(layer.qkv, hidden, axis=1))])


def with_absolute_d2t(head: EagleHead) -> EagleHead:
    """Treat the file's offsets as target ids."""
    assert head.draft_to_target is not None
    return head.replace(draft_to_target=head.draft_to_target - on_device(np.arange(len(head.draft_to_target))))


def with_config(**changes: object) -> Callable[[EagleHead], EagleHead]:
    return lambda head: head.replace(config=head.config.resized(**changes))


MISTAKES: dict[str, Callable[[EagleHead], EagleHead]] = {
    "rope theta of the target": lambda head: head.replace(config=head.config.resized(rope=Rope(500000.0))),
    "feature layers one too low": with_config(feature_layers=(1, 3, 4)),
    "feature layers one too high": with_config(feature_layers=(3, 5, 6)),
    "feature layers in reverse": with_config(feature_layers=(5, 4, 2)),
    "normed feature as residual": with_config(norm_before_residual=True),
    "normed output fed back": with_config(norm_output=True),
    "concat order": concatenated_the_other_way_round,
    "d2t as absolute ids": with_absolute_d2t,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_eagle3_chain_with_a_wrong_head_has_other_scores_than_recorded(
    golden: Path, drafter: Eagle3, chain: dict[str, np.ndarray], mistake: str
) -> None:
    wrong = Eagle3(MISTAKES[mistake](drafter.head), drafter.tree)
    assert score_error(golden, chain, wrong) > 100 * TOLERANCE


def test_eagle3_chain_with_a_gap_in_positions_has_other_scores_than_recorded(
    golden: Path, drafter: Eagle3, chain: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: positions of drafted tokens are one too large, a mistake that a released engine made."""
    original = Level.batch
    assert score_error(golden, chain, drafter) < TOLERANCE
    monkeypatch.setattr(Level, "batch", lambda level, view, at, *more: original(level, view, at + 1, *more))
    assert score_error(golden, chain, drafter) > 100 * TOLERANCE


def score_error(golden: Path, chain: dict[str, np.ndarray], drafter: Eagle3) -> float:
    """Return the largest deviation from the recorded scores in the first round after the second prompt, without jit."""
    target, prompt = tiny.load_target(byte_pair.TARGET), 1
    program = Program(drafter, drafter.feature_layers(target), "coupled", "reference")
    params = Params(target=target, draft=drafter.bind(target))
    ids = tiny.recorded_prompts(golden)[prompt]
    state = init_state(program, params, PoolShape(1, 2, 128, 100, "float32", "float32"))
    own = tiny.prefill_input(ids, page_row=[1])
    state, _ = prefill_step(program, params, state, own)
    view = view_of(state, on_device(np.zeros(1, jnp.int32)), program).replace(all_greedy=True)
    draft, _ = drafter.draft(params.draft, state.draft, view)
    recorded = chain["sel_scores"][chain["iter_offset"][prompt]]
    return float(np.abs(np.asarray(draft.scores)[0, 1:] - recorded).max())


def test_target_after_recorded_prompts_has_the_recorded_tokens(golden: Path) -> None:
    tokens = recording(golden / "greedy_ar.npz")["greedy"][::4].tolist()
    target = tiny.load_target(byte_pair.TARGET)
    assert most_likely(target, [list(ids) for ids in tiny.recorded_prompts(golden)[::4]], tokens) == tokens


@pytest.mark.long
def test_plain_decoding_of_recorded_prompts_emits_the_recorded_tokens(golden: Path) -> None:
    recorded = recording(golden / "greedy_ar.npz")["greedy"]
    target = tiny.load_target(byte_pair.TARGET)
    engine = Engine(target, slots=4, max_len=512, buckets=(4,), prefill_buckets=(128,), controls=False)
    prompts, params = tiny.recorded_prompts(golden)[::2], SamplingParams(max_tokens=recorded.shape[1], temperature=0)
    for completion, expected in zip(engine.generate(prompts, params), recorded[::2], strict=True):
        assert completion.token_ids == expected.tolist()


def test_speculative_decoding_of_recorded_prompts_emits_the_recorded_tokens(golden: Path, engine: Engine) -> None:
    recorded = recording(golden / "greedy_ar.npz")["greedy"]
    prompts, params = tiny.recorded_prompts(golden)[1::4], SamplingParams(max_tokens=recorded.shape[1], temperature=0)
    for completion, expected in zip(engine.generate(prompts, params), recorded[1::4], strict=True):
        assert completion.token_ids == expected.tolist()
