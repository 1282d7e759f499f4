"""Through the whole engine, over several rounds: the tokens have the target's processed joint law."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from jspec import DraftModel, Engine, SamplingParams, Tree, sampling
from jspec.testing import Random
from tests import tiny
from tests.reference import decoder

VOCAB, TOKENS, PROMPT = 5, 5, [1, 3]
CONTROLS = {
    "plain": dict(temperature=1.0),
    "restricted": dict(temperature=0.8, top_k=4, top_p=0.9, min_p=0.02),
}


@pytest.fixture(scope="module")
def target():
    return tiny.model(VOCAB, seed=1, sharpness=1.5)


def deviation(completions: list, expected: np.ndarray) -> float:
    """z of Pearson's chi-square against the exact joint law; cells that expect under 5 are pooled into one."""
    cells = np.array([np.ravel_multi_index(c.token_ids, expected.shape) for c in completions])
    counts = np.bincount(cells, minlength=expected.size)
    wanted = expected.ravel() * len(completions)
    rare = wanted < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] < 5:  # impossible tokens must not occur at all
        assert counts[-1] <= stats.poisson.isf(1e-7, max(wanted[-1], 1e-12))
        counts, wanted = counts[:-1], wanted[:-1]
    df = len(wanted) - 1
    return float((((counts - wanted) ** 2 / wanted).sum() - df) / np.sqrt(2 * df))


def draw(engine: Engine, count: int, controls: dict[str, float]) -> list:
    """Samples of the joint law, greedy rows mixed into the same batches."""
    params = [SamplingParams(max_tokens=TOKENS, seed=seed, **controls) for seed in range(count)]
    greedy = [SamplingParams(max_tokens=TOKENS, temperature=0)] * (count // 20)
    done = engine.generate([PROMPT] * (len(params) + len(greedy)), [*params, *greedy])
    alone = engine.generate([PROMPT], greedy[0])[0].token_ids
    assert all(c.token_ids == alone for c in done[count:]), "greedy rows are touched by sampled ones"
    return done[:count]


def make(target, drafter, accept: str) -> Engine:
    return Engine(
        target,
        drafter=drafter,
        accept=accept,
        slots=64,
        max_len=32,
        page_size=8,
        buckets=(1, 64),
        prefill_buckets=(4,),
    )


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_sampled_chains_have_the_targets_joint_law(target, accept: str) -> None:
    engine = make(target, DraftModel(tiny.model(VOCAB, seed=2), Tree.chain(3)), accept)
    for controls in CONTROLS.values():
        done = draw(engine, 4000, controls)
        expected = decoder.joint_law(target, PROMPT, TOKENS, **controls)
        assert np.mean([c.metrics.num_drafts for c in done]) > 1.5, "the law must span several rounds"
        assert abs(deviation(done, expected)) < 5


@pytest.mark.slow
def test_a_random_draft_with_its_law_leaves_the_joint_law_alone(target) -> None:
    done = draw(make(target, Random(Tree.chain(2)), "rejection"), 4000, CONTROLS["plain"])
    assert abs(deviation(done, decoder.joint_law(target, PROMPT, TOKENS, temperature=1.0))) < 5


@pytest.mark.slow
def test_noise_keyed_by_position_alone_is_caught(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: draft, acceptance and residual share the noise of a position."""
    original = sampling.keys

    def by_position(seed, purpose, *place):
        return original(seed, sampling.Purpose.TOKEN, sum(place[1:], start=place[0]))

    monkeypatch.setattr(sampling, "keys", by_position)
    engine = make(target, DraftModel(tiny.model(VOCAB, seed=2), Tree.chain(3)), "rejection")
    done = draw(engine, 4000, CONTROLS["plain"])
    assert deviation(done, decoder.joint_law(target, PROMPT, TOKENS, temperature=1.0)) > 20
