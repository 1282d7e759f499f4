"""Test the layers of EAGLE heads: caches of several layers, and the precomputed first layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Eagle3, Engine, SamplingParams, Tree
from jspec.core.numerics import AUTO
from jspec.core.records import TokenBatch
from jspec.draft import eagle_head
from jspec.draft.eagle_head import EagleHead, HeadOut, project_draft_tokens, project_inputs
from jspec.models import block
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.weights.quantize import quantize_weights
from jspec.step import decode
from jspec.step.prefill import prefill_step
from jspec.step.program import Params, Program, init_state
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.residual_norm import add_rms_norm
from tests.support import tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [1]]
TARGET = tiny.model(16, layers=2)


def two_layers() -> EagleHead:
    """Return a random head whose second layer has no embedding input."""
    head = tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0, 2))
    config = head.config.resized(num_layers=2)
    other = tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0,), seed=5).layers[0]
    width = config.hidden_size
    second = other.replace(qkv=other.qkv[:, :width], hidden_norm=None, input_norm=on_device(np.ones(width)))
    return head.replace(layers=[head.layers[0], second], config=config)


def scores(chunk: int, fill: float) -> list[np.ndarray]:
    """Return each round's draft scores, with prompts in chunks of ``chunk`` tokens and caches filled with ``fill``."""
    engine = Engine(
        TARGET,
        drafter=Eagle3(two_layers(), Tree.topk(6, 3, 2)),
        slots=2,
        max_len=40,
        page_size=4,
        buckets=(2,),
        prefill_buckets=(chunk,),
        prefix_cache=False,
        controls=False,
    )
    cache = engine.core.runner.state.draft.cache
    dirty = jax.tree.map(lambda pool: jnp.full_like(pool, fill), cache)
    state = engine.core.runner.state
    engine.core.runner.target_side.state = replace(state, draft=replace(state.draft, cache=dirty))
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0), trace=True)
    return [np.concatenate([one.scores for one in completion.rounds or []]) for completion in done]


def test_two_layer_eagle3_with_other_chunks_and_old_cache_has_equal_scores() -> None:
    for one, other in zip(scores(16, 0.0), scores(3, np.nan), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def projected(
    head: EagleHead, tokens: np.ndarray, features: jnp.ndarray, ids: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the residual and the query-key-value projection of (token, feature) pairs.

    Args:
        ids: draft ids of the tokens, for `project_draft_tokens`; None: `project_inputs`.
    """
    shape = tokens.shape
    pairs = TokenBatch(
        tokens=on_device(tokens),
        positions=on_device(np.zeros(shape, jnp.int32)),
        valid=on_device(np.ones(shape, bool)),
        first_row=on_device(np.zeros(shape[0], jnp.int32)),
        page_table=on_device(np.zeros((shape[0], 1), jnp.int32)),
        bits=None,
        numerics=AUTO,
    )
    if ids is None:
        residual, qkv = project_inputs(head, pairs.tokens, features, pairs.numerics)
    else:
        assert head.precomputed is not None
        normed = features * jax.lax.rsqrt(jnp.mean(features**2, -1, keepdims=True) + head.config.norm_eps)
        projected = reduce_partials(
            matmul(normed * head.layers[0].hidden_norm, head.precomputed.qkv)[None], jnp.float32
        )
        residual, qkv = project_draft_tokens(head, pairs, on_device(ids), HeadOut(features, projected))
    return np.asarray(residual), np.asarray(reduce_partials(qkv, jnp.float32))


@pytest.mark.parametrize("kind", [None, "int8", "fp8_dynamic"])
@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_draft_token_projections_from_the_precomputed_table_equal_computed_ones(
    kind: str | None, norm_before_residual: bool
) -> None:
    head = tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0, 2))
    head = head.replace(config=replace(head.config, norm_before_residual=norm_before_residual))
    head = head if kind is None else quantize_weights(head, kind)
    bound = Eagle3(head, Tree.chain(2)).bind(TARGET)
    assert bound.precomputed is not None and head.precomputed is None
    rng = np.random.default_rng(0)
    ids, features = (
        rng.integers(0, 12, (3, 5)),
        on_device(rng.normal(size=(3, 5, head.config.hidden_size)), "float32"),
    )
    tokens = np.asarray(head.draft_to_target)[ids]
    expected, found = projected(bound, tokens, features), projected(bound, tokens, features, ids)
    np.testing.assert_array_equal(found[0], expected[0])
    size = np.abs(expected[1]).max()
    tolerance = {None: 1e-5, "int8": 1e-5, "fp8_dynamic": 0.1}[kind]  # float8: inputs are quantised with other scales
    np.testing.assert_allclose(found[1], expected[1], atol=tolerance * size)
    others = projected(bound, tokens, features, (ids + 1) % 12)[1]  # the negative control
    assert np.abs(others - expected[1]).max() > 2 * tolerance * size


def drafts(head: EagleHead, tree: Tree, *, table: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and scores of two rounds of two requests; ``table``: with the precomputed first layer."""
    drafter = Eagle3(head, tree)
    program = Program(drafter, drafter.feature_layers(TARGET), "coupled", "reference", trace=True)
    bound = drafter.bind(TARGET)
    params = Params(target=TARGET, draft=bound if table else bound.replace(precomputed=None))
    state = init_state(program, params, PoolShape(2, 20, 4, 28, "float32", "float32"))
    prefill, decode_round = (jax.jit(partial(step, program)) for step in (prefill_step, decode.spec_round))
    for slot, ids in enumerate(PROMPTS[:2]):
        row = np.zeros(state.page_table.shape[1], np.int32)
        row[:8] = np.arange(8) * 2 + 1 + slot
        prompt = tiny.prefill_input(ids, size=11, page_row=row, slot=slot, slots=2)
        state, _ = prefill(params, state, prompt)
    traces = []
    for _ in range(2):
        state, _, trace, _ = decode_round(params, state, on_device(np.arange(2)))
        assert trace is not None
        traces.append(trace)
    tokens, scores = (np.stack([getattr(trace, name) for trace in traces]) for name in ("tokens", "scores"))
    return tokens, scores


@pytest.mark.long
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("norm_output", [False, True])
def test_eagle3_with_precomputed_first_layer_drafts_unchanged_tokens(
    norm_output: bool, norm_before_residual: bool
) -> None:
    head, rng = tiny.eagle_head(TARGET, draft_vocab=12, feature_layers=(0, 2)), np.random.default_rng(3)
    norms = [on_device(rng.uniform(0.5, 1.5, head.config.hidden_size), "float32") for _ in range(3)]
    layer = head.layers[0].replace(input_norm=norms[0], hidden_norm=norms[1])
    config = replace(head.config, norm_output=norm_output, norm_before_residual=norm_before_residual)
    head = head.replace(layers=[layer], norm=norms[2], config=config)
    tree = Tree.topk(6, 3, 2)
    tokens, scores = drafts(head, tree, table=True)
    expected_tokens, expected_scores = drafts(head, tree, table=False)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-5)
    other = head.replace(config=replace(config, norm_output=not norm_output))  # the negative control
    assert np.abs(drafts(other, tree, table=True)[1] - scores).max() > 1e-2


def test_eagle3_head_of_the_whole_vocabulary_is_not_precomputed() -> None:
    """Precomputed projections of the whole vocabulary would be larger than the head."""
    head = tiny.eagle_head(TARGET, draft_vocab=16, feature_layers=(0, 2))
    assert Eagle3(head, Tree.chain(2)).bind(TARGET).precomputed is None


@pytest.mark.parametrize("norm_output", [False, pytest.param(True, marks=pytest.mark.long)])
def test_fp8_head_with_quantisation_in_the_norm_kernel_drafts_unchanged_tokens(
    norm_output: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head has two layers; the norm kernel quantises its output unless the output is fed back as a feature."""
    head = quantize_weights(two_layers(), "fp8_dynamic")
    head = head.replace(config=replace(head.config, norm_output=norm_output))
    tree, seen, in_head = Tree.topk(6, 3, 2), [], []

    def noted(*arrays: Any, quantize_output: bool = False, **options: Any) -> Any:
        if in_head:
            seen.append(quantize_output)
        return add_rms_norm(*arrays, quantize_output=quantize_output, **options)

    def of_head(*arrays: Any, **options: Any) -> Any:
        in_head.append(True)
        out = block.mlp_part(*arrays, **options)
        in_head.pop()
        return out

    monkeypatch.setattr(block, "add_rms_norm", noted)
    monkeypatch.setattr(eagle_head, "mlp_part", of_head)
    found = drafts(head, tree, table=True)
    assert True in seen and (False in seen) == norm_output
    monkeypatch.setattr(block, "has_dynamic_activations", lambda weight: False)
    seen.clear()
    expected = drafts(head, tree, table=True)
    assert seen and True not in seen
    jax.tree.map(np.testing.assert_array_equal, found, expected)
