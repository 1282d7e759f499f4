"""Test that a draft model on other devices drafts, and that the engine emits, what they do on one device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jspec import Completion, DraftModel, Engine, Model, SamplingParams
from pallas_kernels.layers.shard import AXIS
from tests.support import lettered, small, tiny

pytestmark = pytest.mark.once
TOLERANCE = 1e-4  # rounding of float32 scores with sums in another order
PROMPTS = [np.random.default_rng(n).integers(0, small.VOCAB, n).tolist() for n in (5, 17, 11, 2)] + [[7, 8, 9] * 4]
PARAMS = [
    SamplingParams(max_tokens=14, temperature=0.0),
    SamplingParams(max_tokens=14, temperature=1.0, seed=1),
    SamplingParams(max_tokens=14, temperature=0.8, seed=2, top_k=7, stop_token_ids=(3,)),
    SamplingParams(
        max_tokens=14, temperature=0.9, seed=4, repetition_penalty=1.2, logit_bias={3: 2.0}, bad_words=[[5]]
    ),
    SamplingParams(max_tokens=14, temperature=0.0, draft=1, logprobs=2, prompt_logprobs=1),
]
OPTIONS: dict[str, Any] = dict(slots=3, max_len=small.MAX_LEN, buckets=(3,), prefill_buckets=(16,))
FEW_PAGES: dict[str, Any] = dict(page_size=1, pages=60)  # too few for three requests, so some are preempted


@cache
def draft_model(vocab: int = small.VOCAB) -> Model:
    """Return a model that is similar to the target, so that many of its tokens are accepted."""
    own = tiny.model(vocab, layers=1)
    rng = np.random.default_rng(3)
    noisy = [leaf + 0.1 * rng.normal(0, np.std(leaf), leaf.shape) for leaf in jax.tree.leaves(own)]
    return jax.tree.unflatten(jax.tree.structure(own), [jnp.asarray(leaf, jnp.float32) for leaf in noisy])


def make(tree: str, device: Any = None, **options: Any) -> Engine:
    return Engine(small.target(), drafter=DraftModel(draft_model(), tree, device=device), **{**OPTIONS, **options})


@cache
def one_device(tree: str, **options: Any) -> list[Completion]:
    with make(tree, **options) as engine:
        return run(engine)


def run(engine: Engine) -> list[Completion]:
    """Run all requests, and then one whose prompt has cached pages and one that another ended request continues."""
    done = engine.generate(PROMPTS, PARAMS, trace=True)
    more = [PROMPTS[1], PROMPTS[4] + done[4].token_ids]
    done += [engine.generate(prompt, params, trace=True)[0] for prompt, params in zip(more, PARAMS, strict=False)]
    return [one.raise_for_error() for one in done]


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
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


DEFAULT = (("coupled", "topk:6,2,2"), ("rejection", "static:0,1,0.0,0.1"))
CASES = [
    (accept, tree)
    for accept in ("coupled", "rejection", "block", "multi_candidate", "typical")
    for tree in ("chain:3", "static:0,1,0.0,0.1", "topk:6,2,2")
    if (accept, tree) not in (("block", "static:0,1,0.0,0.1"), ("block", "topk:6,2,2"), ("rejection", "topk:6,2,2"))
]


@pytest.mark.filterwarnings("ignore:accept=.typical")
@pytest.mark.parametrize(
    ("accept", "tree"),
    [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.matrix) for case in CASES],
)
def test_draft_model_on_another_device_drafts_and_emits_what_it_does_on_the_targets(accept: str, tree: str) -> None:
    """With pages of one row, requests are preempted and later find cached pages."""
    expected = one_device(tree, accept=accept, **FEW_PAGES)
    with make(tree, jax.devices()[1], accept=accept, **FEW_PAGES) as engine:
        check_equal(run(engine), expected)
        assert engine.metrics.num_preemptions > 0 and engine.pages_in_use == 0
        assert engine.metrics.num_accepted_tokens > 20
    assert expected[-1].metrics.num_cached_tokens > len(PROMPTS[4])


def leaves_on(tree: Any) -> set[jax.Device]:
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


@pytest.mark.parametrize(
    ("target_on", "draft_on"),
    [
        pytest.param(0, (1, 2), marks=pytest.mark.long),
        ((0, 1), (2,)),
        pytest.param((3, 0), (2, 1), marks=pytest.mark.long),
    ],
)
def test_target_and_draft_model_on_different_numbers_of_devices_emit_the_tokens_of_one_device(
    target_on: Any, draft_on: tuple[int, ...]
) -> None:
    """Weights, pools and state are on the devices that were asked for."""
    devices = np.array(jax.devices())
    mesh = None if target_on == 0 else Mesh(devices[list(target_on)], (AXIS,))
    with make("chain:3", list(devices[list(draft_on)]), mesh=mesh) as engine:
        check_equal(run(engine), one_device("chain:3"))
        target, drafting = engine.core.runner.target_side, engine.core.runner.draft_side
        assert leaves_on((target.params, target.state)) == set(np.atleast_1d(devices[list(np.atleast_1d(target_on))]))
        assert leaves_on((drafting.params, drafting.state)) == set(devices[list(draft_on)])
        assert drafting.params.target is None and not drafting.state.target.k and target.params.draft == ()
        for name in ("root", "lengths", "active", "remaining", "page_table"):
            both = (getattr(side.state, name) for side in (target, drafting))
            np.testing.assert_array_equal(*both)


@pytest.fixture(scope="module")
def apart() -> Engine:
    """Engine with a draft model on the second device, adaptive depths and a tokenizer."""
    return make(
        "chain:3",
        jax.devices()[1],
        adaptive=True,
        draft_depths=(0, 3),
        page_size=4,
        tokenizer=lettered.tokenizer(),
        eos_ids=(lettered.END,),
    )
