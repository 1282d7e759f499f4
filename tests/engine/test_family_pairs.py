"""Families whose attention or experts have traits of their own: cut prompts, preemption, deep paths, new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file

from jspec import Drafter, Eagle3, Engine, Model, SamplingParams, Suffix, Tree
from tests.support import engines, tiny
from tests.support.arrays import on_device
from tests.support.recordings import recording

pytestmark = pytest.mark.once

# A text that an engine has decoded once is drafted right the second time, and other nodes of the tree are wrong.
TREE, CHAIN = Suffix("static:0,1,0.0,0.1,1.0,0.0.0", scope="engine"), Suffix("chain:4", scope="engine")
# Three requests of the recorded prompts need more pages than there are, so one is preempted; prompts are cut.
OPTIONS: dict[str, Any] = dict(slots=3, max_len=240, buckets=(3,), prefill_buckets=(32,), pages=18, page_size=16)
GREEDY = SamplingParams(max_tokens=64, temperature=0)
CASES = [
    ("mistral4", TREE, {}),
    ("nemotron_h", TREE, dict(tensor_parallel=2)),
    *(
        pytest.param(family, drafter, options, marks=pytest.mark.long)
        for family, drafter, options in [
            ("laguna", CHAIN, {}),
            ("glm4_moe_lite", TREE, {}),
            ("glm4_moe_lite", CHAIN, dict(deterministic=True)),
            ("mistral4", CHAIN, dict(tensor_parallel=2)),
            ("mistral4", TREE, dict(deterministic=True)),
            ("minimax_m2", TREE, dict(tensor_parallel=2)),
            ("muse_glimmer", TREE, {}),
            ("muse_glimmer", CHAIN, dict(tensor_parallel=2, deterministic=True)),
            ("laguna", TREE, dict(deterministic=True)),
            ("nemotron_h", CHAIN, {}),
            ("nemotron_h", CHAIN, dict(rounds_per_dispatch=3, overlap=False)),
            ("nemotron_h", TREE, dict(deterministic=True)),
            ("nemotron_h", CHAIN, dict(tensor_parallel=2, deterministic=True)),
        ]
    ),
]


def recorded(golden: Path, family: str) -> tuple[Path, Model, list[list[int]], list[list[int]]]:
    """Return a target and its folder, three prompts, and the greedy tokens after each that transformers computes."""
    folder = golden / "families" / family
    data = recording(folder / "expect.npz")
    prompts, tokens = ([data[f"{name}{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy"))
    return folder, tiny.load_target(folder), prompts, tokens


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [one.raise_for_error().token_ids for one in engine.generate(prompts, GREEDY)]


@pytest.mark.parametrize(("family", "drafter", "options"), CASES, ids=str)
def test_engine_that_preempts_and_accepts_deep_paths_emits_the_recorded_tokens(
    family: str, drafter: Drafter, options: dict[str, Any], golden: Path
) -> None:
    _, target, prompts, expected = recorded(golden, family)
    with engines.make(target, drafter=drafter, controls=False, **OPTIONS | options) as engine:
        assert tokens_of(engine, prompts * 3) == expected * 3  # more requests than slots, which are reused
        assert engine.metrics.num_preemptions > 0 and engine.metrics.num_accepted_tokens > 48


@pytest.mark.parametrize(
    "family",
    [
        "mistral4",
        "nemotron_h",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("laguna", "muse_glimmer", "minimax_m2")),
    ],
)
def test_engine_with_a_head_emits_the_recorded_tokens_after_new_weights_by_name(family: str, golden: Path) -> None:
    """The old weights are other ones, and the head shares the embedding and the output head of the new."""
    folder, target, prompts, expected = recorded(golden, family)
    old = jax.tree.map(lambda weight: weight * 0.7, target)
    drafter = Eagle3(tiny.eagle_head(old, draft_vocab=100, feature_layers=(1, 2, 3)), Tree.topk(12, 3, 4))
    with engines.make(old, drafter=drafter, controls=False, **OPTIONS | {"pages": None}) as engine:
        assert tokens_of(engine, prompts) != expected
        engine.update_weights({name: on_device(v) for name, v in load_file(folder / "model.safetensors").items()})
        assert tokens_of(engine, prompts) == expected


@pytest.mark.long
@pytest.mark.parametrize("family", ["mistral4", "glm4_moe_lite"])
def test_latent_cache_in_float8_has_a_quarter_of_the_bytes_and_drafts_its_own_tokens(family: str, golden: Path) -> None:
    _, target, prompts, expected = recorded(golden, family)
    options: dict[str, Any] = dict(OPTIONS, pages=40, prefix_cache=False, controls=False)
    sizes, found = [], []
    for dtype, drafter in (("float32", CHAIN), ("float8_e4m3fn", None), ("float8_e4m3fn", TREE)):
        with engines.make(target, drafter=drafter, kv_dtype=dtype, **options) as engine:
            sizes.append(engine.memory_plan.target_pool)
            found.append(tokens_of(engine, prompts))
    assert sizes == [40 * 16 * (16 + 16) * 4 * 3, *[40 * 16 * (16 + 16) * 3] * 2]  # latent and rotated channels
    assert found[0] == expected and found[1] == found[2] and found[1] != expected
