"""Compare the choice of experts with a loop over rows in numpy, and its traits with wrong readings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.numerics import REFERENCE
from jspec.core.records import PromptBatch, TokenBatch
from jspec.models.decoder import Model, forward
from jspec.models.mlps import experts as mixtures
from jspec.models.mlps.mlp_config import Experts, Router
from jspec.models.parts.kv_pool import KVPool
from pallas_kernels.layers.experts.routing import route
from tests.support import tiny
from tests.support.arrays import on_device

ROUTERS = {
    "softmax, normalised": Router(8, 3),
    "softmax": Router(8, 3, is_normalised=False),
    "sigmoid": Router(8, 3, scores="sigmoid", is_normalised=False),
    "sigmoid, normalised, corrected": Router(8, 3, scores="sigmoid", factor=2.5, correction=True),
    "groups": Router(12, 4, scores="sigmoid", correction=True, groups=4, chosen_groups=2),
    "groups by their largest": Router(8, 3, groups=4, chosen_groups=2, summed=1),
    "groups of one": Router(4, 2, groups=4, chosen_groups=3, summed=1),
    "one of one": Router(1, 1),
    "all": Router(5, 5, is_normalised=False),
}


def loop(logits: np.ndarray, router: Router, correction: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Choose the experts of each row by sorting, in float64."""
    experts, weights = [], []
    for row in logits.astype(np.float64):
        shifted = np.exp(row - row.max())
        scores = shifted / shifted.sum() if router.scores == "softmax" else 1 / (1 + np.exp(-row))
        keys = scores if correction is None else scores + correction
        groups = keys.reshape(router.groups, -1)
        best = np.argsort(-np.sort(groups, axis=1)[:, -router.summed :].sum(axis=1), kind="stable")[
            : router.chosen_groups
        ]
        allowed = np.isin(np.arange(router.groups), best).repeat(groups.shape[1])
        chosen = np.argsort(-np.where(allowed, keys, -np.inf), kind="stable")[: router.chosen]
        own = scores[chosen]
        own = router.factor * (own / own.sum() if router.is_normalised else own)
        experts.append(chosen)
        weights.append(own)
    return np.stack(experts, axis=1), np.stack(weights, axis=1)


def problem(router: Router, rows: int = 40) -> tuple[np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(rows, router.count)).astype(np.float32)
    return logits, rng.normal(size=router.count).astype(np.float32) if router.correction else None


def choose(logits: np.ndarray, router: Router, correction: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    experts, weights = route(
        on_device(logits), router, correction=None if correction is None else on_device(correction)
    )
    return np.asarray(experts), np.asarray(weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_route_chooses_and_weights_the_experts_of_a_loop_over_rows(name: str) -> None:
    router = ROUTERS[name]
    logits, correction = problem(router)
    for ours, theirs in zip(choose(logits, router, correction), loop(logits, router, correction), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)


WRONG: dict[str, list[dict[str, Any]]] = {
    "softmax, normalised": [{"is_normalised": False}, {"scores": "sigmoid"}],
    "sigmoid, normalised, corrected": [{"factor": 1.0}, {"is_normalised": False}],
    "groups": [{"groups": 1, "chosen_groups": 1}, {"chosen_groups": 3}],
}


@pytest.mark.parametrize(("name", "fields"), [(name, one) for name, all_ in WRONG.items() for one in all_], ids=str)
def test_route_with_another_trait_differs(name: str, fields: dict[str, Any]) -> None:
    """Negative controls of the comparison."""
    logits, correction = problem(ROUTERS[name])
    pairs = zip(
        choose(logits, replace(ROUTERS[name], **fields), correction),
        loop(logits, ROUTERS[name], correction),
        strict=True,
    )
    assert max(np.abs(ours - theirs).max() for ours, theirs in pairs) > 1e-2


def test_correction_counts_for_the_choice_but_not_for_the_weights() -> None:
    router = Router(4, 1, scores="sigmoid", is_normalised=False, correction=True)
    logits = np.asarray([[3.0, 0.0, -1.0, 1.0]], np.float32)
    experts, weights = choose(logits, router, np.asarray([0, 0, 9.0, 0], np.float32))
    assert experts.tolist() == [[2]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp(1.0)), rtol=1e-6)


def test_of_equal_scores_the_expert_with_the_smallest_index_is_chosen() -> None:
    experts, weights = choose(np.zeros((2, 6), np.float32), Router(6, 3))
    assert experts.tolist() == [[0, 0], [1, 1], [2, 2]]
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)
    tied = np.asarray([[0, 5, 1, 5, 1, 1]], np.float32)
    assert choose(tied, Router(6, 3))[0].T.tolist() == [[1, 3, 2]]


def test_sigmoids_that_round_to_one_are_ranked_by_their_logits() -> None:
    logits = np.asarray([[17.5, 20, 3, 1], [18, 19, 30, 2]], np.float32)
    experts, weights = choose(logits, Router(4, 2, scores="sigmoid", is_normalised=False))
    assert experts.T.tolist() == [[1, 0], [2, 1]] and (weights == 1).all()


def test_large_and_infinite_logits_give_finite_weights_and_nan_gives_no_index_out_of_range() -> None:
    logits = np.asarray([[1e30, -1e30, 0, 1], [-np.inf, 2, -np.inf, 1], [np.nan, 1, 2, 3], [np.nan] * 4], np.float32)
    for normalised in (True, False):
        experts, weights = choose(logits, Router(4, 2, is_normalised=normalised))
        assert experts.min() >= 0 and experts.max() < 4
        assert np.isfinite(weights[:, :2]).all()
        assert not np.isfinite(weights[:, 2:]).all(axis=0).any()
    assert experts[:, 1].tolist() == [1, 3]


@pytest.mark.parametrize("name", ["softmax", "groups"])
def test_a_row_has_the_same_bits_among_other_rows(name: str) -> None:
    logits, correction = problem(ROUTERS[name])
    whole = choose(logits, ROUTERS[name], correction)
    for rows in ([3], [39, 5, 17]):
        for own, of_all in zip(choose(logits[rows], ROUTERS[name], correction), whole, strict=True):
            np.testing.assert_array_equal(own, of_all[:, rows])


# ---- the mixture of experts of a layer


def mixture(**options: Any) -> Model:
    """Return a random decoder of one layer with six experts, of which a token chooses two."""
    own = tiny.config(40, layers=1)
    layer = replace(own.layers[0], mlp=Experts(8, Router(6, 2), **options))
    return tiny.random_model(replace(own, layers=(layer,)))


@pytest.mark.parametrize("rows", [3, 70])
def test_mixture_adds_up_the_weighted_outputs_of_a_loop_over_experts(rows: int) -> None:
    model = mixture(shared=12)
    layer, config = model.layers[0], model.config.layers[0].mlp
    assert isinstance(config, Experts)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, rows, 16)).astype(np.float32)
    names = ("router", "experts_gate_up", "experts_down", "gate_up", "down")
    router, gate_up, down, *shared = (np.asarray(getattr(layer, name), np.float64) for name in names)

    def mlp(x: np.ndarray, both: np.ndarray, down: np.ndarray) -> np.ndarray:
        gate, up = np.split(both @ x, 2)
        return down @ (gate / (1 + np.exp(-gate)) * up)

    experts, weights = loop(x[0] @ router.T, config.router, None)
    wanted = np.stack([mlp(row, *shared) for row in x[0]])
    for j, t in np.ndindex(*experts.shape):
        wanted[t] += weights[j, t] * mlp(x[0, t].astype(np.float64), gate_up[experts[j, t]], down[experts[j, t]])

    def mix(used: Any = None) -> np.ndarray:
        several = mixtures.mix_experts(jnp.asarray(x), layer, config, used, REFERENCE)
        return np.asarray(sum(part for parts in several for part in parts))[0]

    got = mix()
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    used = on_device(rng.integers(2, size=(1, rows)), bool)
    some = mix(used)
    np.testing.assert_allclose(some[used[0]], got[used[0]], atol=1e-6)  # other rows move a row in its expert's block
    alone = np.stack([mlp(row, *shared) for row in x[0]])
    np.testing.assert_allclose(some[~used[0]], alone[~used[0]], atol=1e-5)  # no expert


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("nodes", [True, True, True, False, False, False]), ("prompts", [True, True, True, True, False, False])],
)
def test_forward_pass_chooses_no_experts_for_tokens_whose_outputs_are_not_used(
    kind: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second row of nodes is inactive; the second prompt has one token, whose keys are not written again."""
    seen: list[np.ndarray] = []
    multiply = mixtures.expert_mlp

    def watched(x: Any, weights: Any, chosen: Any, **options: Any) -> Any:
        seen.append(np.asarray(chosen))
        return multiply(x, weights, chosen, **options)

    monkeypatch.setattr(mixtures, "expert_mlp", watched)
    fields: dict[str, Any] = dict(
        tokens=on_device([[3, 4, 5], [6, 0, 0]]),
        positions=on_device([[0, 1, 2], [0, 1, 2]]),
        valid=on_device([[True] * 3, [False] * 3]),
        first_row=on_device(np.zeros(2, jnp.int32)),
        page_table=on_device([[1], [2]], jnp.int32),
        bits=None,
        numerics=REFERENCE,
    )
    batch = TokenBatch(**fields) if kind == "nodes" else PromptBatch.whole(on_device([3, 1]), **fields)
    pool = on_device(np.zeros((3, 2, 4, 4)))
    forward(mixture(), [KVPool(pool, pool)], batch)
    (chosen,) = seen
    assert chosen.shape == (2, 6)
    assert [(row >= 0).tolist() for row in chosen] == [expected] * 2


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (
            Router(8, 3, groups=4, chosen_groups=2),
            "expected groups by the largest of softmax scores, got .*sum of the 2",
        ),
        (
            Router(8, 3, scores="sigmoid", groups=4, chosen_groups=2, summed=1),
            "topk_method: expected groups by the sum of the two largest of sigmoid scores, got .*sum of the 1 largest",
        ),
        (Router(4, 3, scores="sigmoid", groups=4, chosen_groups=3), "n_group: .* 4 experts, at least 2 a group, got 4"),
    ],
)
def test_router_with_impossible_numbers_is_refused(router: Router, message: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=message):
        router.check()


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_routers_of_these_tests_are_supported(router: Router) -> None:
    router.check()
