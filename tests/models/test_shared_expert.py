"""Compare shared experts that are joined to experts with the formula of both in numpy, and with models that are not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.numerics import AUTO, REFERENCE, Numerics
from jspec.models.decoder import Layer, Model
from jspec.models.exchange import joined_like
from jspec.models.mlps import experts as mixtures
from jspec.models.mlps.mlp_config import Experts, Router
from jspec.models.mlps.shared_expert import join_layers
from jspec.models.weights.params import abstract_weights, model_params
from jspec.models.weights.quantize import quantize_weights
from jspec.models.weights.tensor_parallel import mesh_of, place
from jspec.tools.bench import random_models as bench
from pallas_kernels.layers.experts.expert_matmul import MOST_ELEMENTS
from tests.support import tiny
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

WIDTH, HIDDEN, COUNT = 64, 128, 4
UNGATED: dict[str, Any] = {"activation": "relu2", "is_gated": False}


def drawn(shared: int = 2 * WIDTH, *, hidden: int = HIDDEN, **options: Any) -> Model:
    """Return a random decoder of one layer with four experts, of which a token chooses two, and a shared expert."""
    own = tiny.config(40, layers=1, hidden=hidden)
    layer = replace(own.layers[0], mlp=Experts(WIDTH, Router(COUNT, 2, factor=1.5), shared=shared, **options))
    return tiny.random_model(replace(own, layers=(layer,)))


def fields(model: Model) -> list[dict[str, Any]]:
    return [{name: value for name, value in vars(layer).items() if value is not None} for layer in model.layers]


def mixture(*shared: int, **options: Any) -> Model:
    """Return the model of `drawn` with its shared expert joined to its experts, where it can be."""
    model = drawn(*shared, **options)
    layers = fields(model)
    join_layers(model.config.mlps, layers)
    return model.replace(layers=[Layer(**layer) for layer in layers])


def mix(model: Model, x: Any, used: Any = None, numerics: Numerics = REFERENCE) -> np.ndarray:
    layer, config = model.layers[0], model.config.layers[0].mlp
    assert isinstance(config, Experts)
    several = mixtures.mix_experts(on_device(x)[None], layer, config, used, numerics)
    return np.asarray(sum(part for parts in several for part in parts), np.float64)[0]


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, HIDDEN)).astype(np.float32)


def oracle(model: Model, x: np.ndarray) -> np.ndarray:
    """Compute the mixture of a model whose shared expert is apart, row by row, in float64."""
    layer, config = model.layers[0], model.config.layers[0].mlp
    assert isinstance(config, Experts) and layer.gate_up is not None

    def mlp(x: np.ndarray, both: np.ndarray, down: np.ndarray) -> np.ndarray:
        if not config.is_gated:
            return down @ np.maximum(both @ x, 0) ** 2
        gate, up = np.split(both @ x, 2)
        return down @ (gate / (1 + np.exp(-gate)) * up)

    names = ("router", "experts_gate_up", "experts_down", "gate_up", "down")
    router, gate_up, down, *shared = (np.asarray(getattr(layer, name), np.float64) for name in names)
    found, gate = [], None if layer.shared_gate is None else np.asarray(layer.shared_gate, np.float64)
    for row in x.astype(np.float64):
        logits = router @ row
        chosen = np.argsort(-logits)[: config.router.chosen]
        weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum() * config.router.factor
        outer, inner = (np.ones_like(weights), weights) if config.weighs_inputs else (weights, np.ones_like(weights))
        each = zip(chosen, outer, inner, strict=True)
        factor = 1 if gate is None else 1 / (1 + np.exp(-gate @ row))
        found.append(factor * mlp(row, *shared) + sum(a * mlp(b * row, gate_up[e], down[e]) for e, a, b in each))
    return np.stack(found)


@pytest.mark.parametrize(
    "options",
    [{}, {"weighs_inputs": True}, {"gates_shared": True}, UNGATED],
    ids=["plain", "inputs", "gates", "ungated"],
)
@pytest.mark.parametrize("shared", [WIDTH, pytest.param(2 * WIDTH, marks=pytest.mark.long), 4 * WIDTH])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("count", [3, 70, 220])  # 70 rows have a dense product unless they are deterministic
def test_joined_shared_expert_adds_its_output_to_that_of_each_rows_experts(
    count: int, deterministic: bool, shared: int, options: dict[str, Any]
) -> None:
    model, x = mixture(shared, **options), rows(count)
    own = model.layers[0].experts_down
    assert own is not None and own.shape == (COUNT + shared // WIDTH, HIDDEN, WIDTH) and model.layers[0].down is None
    expected = oracle(drawn(shared, **options), x)
    np.testing.assert_allclose(mix(model, x, numerics=Numerics("reference", deterministic)), expected, atol=2e-5)
    if "gates_shared" in options:
        (layer,) = fields(model)
        other = model.replace(layers=[Layer(**layer | {"router": layer["router"].at[-1].multiply(-1)})])
        assert np.abs(mix(other, x) - expected).max() > 1e-3, "control: another factor"


@pytest.mark.parametrize(
    ("count", "options"),
    [(1, {}), (1, {"gates_shared": True}), (16, {"gates_shared": True}), (1, UNGATED), (16, UNGATED)],
)
def test_kernels_of_joined_experts_compute_what_their_references_do(count: int, options: dict[str, Any]) -> None:
    """One row is that of experts, and 16 are those of a dense product whose kernel reads the last rows of an array."""
    x = np.random.default_rng(1).normal(size=(count, 1024)).astype(np.float32)
    model = mixture(32 * WIDTH, hidden=1024, **options)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    own, expected = (mix(narrow, jnp.bfloat16(x), numerics=Numerics(kind)) for kind in ("pallas", "reference"))
    np.testing.assert_allclose(own, expected, atol=0.05)
    assert np.abs(expected).max() > 0.5
    wanted = oracle(drawn(32 * WIDTH, hidden=1024, **options), x)
    assert np.linalg.norm(expected - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("count", "is_among"), [(1, True), (16, True), (17, False), (1025, False)])
def test_shared_expert_is_among_the_experts_of_few_rows(count: int, is_among: bool) -> None:
    """A row has four choices. Deterministic rows have the same products for any number of them."""
    model, x = mixture(), jax.ShapeDtypeStruct((1, count, HIDDEN), "float32")
    layer, config = model.layers[0], model.config.layers[0].mlp
    for deterministic in (False, True):
        numerics = Numerics("reference", deterministic)
        run = partial(mixtures.mix_experts, layer=layer, config=config, used=None, numerics=numerics)
        experts, *others = jax.eval_shape(run, x)
        assert (len(experts), len(others)) == ((4, 0) if is_among or deterministic else (2, 1))


def test_row_that_is_not_used_has_no_shared_expert() -> None:
    model, x = mixture(), rows(6)
    used = on_device([[True, False, True, True, False, True]])
    found, whole = mix(model, x, used), mix(model, x)
    np.testing.assert_array_equal(found[np.asarray(used[0])], whole[np.asarray(used[0])])
    assert not found[~np.asarray(used[0])].any()


@pytest.mark.parametrize(
    "change",
    [lambda model: quantize_weights(model, "int8"), lambda model: place(model, mesh_of(2))],
    ids=["int8", "two"],
)
def test_joined_model_that_is_to_be_quantised_or_divided_is_named(change: Any) -> None:
    change(drawn())
    with pytest.raises(ValueError, match=r"expected shared experts apart .* load it with Model\.from_pretrained"):
        change(mixture())


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "mxfp4"])
def test_quantised_shared_expert_stays_apart(kind: str) -> None:
    model = quantize_weights(drawn(), kind)
    layers = fields(model)
    join_layers(model.config.mlps, layers)
    assert layers == fields(model) and "down" in layers[0]


@pytest.mark.parametrize(
    ("shared", "options"),
    [
        (WIDTH + 8, {}),
        (3 * WIDTH, {"hidden": 80}),
        (2 * WIDTH, {"bias": True}),
        (2 * WIDTH, {"limit": 7.0}),
        (2 * WIDTH, {"latent": HIDDEN, **UNGATED}),
    ],
    ids=["another width", "rows of another length", "biases", "a limit", "inputs of experts"],
)
def test_shared_expert_that_computes_something_else_stays_apart(shared: int, options: dict[str, Any]) -> None:
    layer = mixture(shared, **options).layers[0]
    assert layer.down is not None and layer.experts_down is not None and layer.experts_down.shape[0] == COUNT


@pytest.mark.parametrize("options", [{}, UNGATED], ids=["gated", "ungated"])
def test_weights_that_an_engine_gets_later_are_joined_as_its_own_are(options: dict[str, Any]) -> None:
    apart, joined = drawn(**options), mixture(**options)
    for old, expected in ((joined, joined), (apart, apart)):
        jax.tree.map(np.testing.assert_array_equal, joined_like(drawn(**options), old), expected)


def test_shared_expert_stays_apart_where_the_kernel_could_not_address_all_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert MOST_ELEMENTS == 2**31
    for most, is_joined in ((6 * 2 * WIDTH * HIDDEN - 1, False), (6 * 2 * WIDTH * HIDDEN, True)):
        monkeypatch.setattr("jspec.models.mlps.shared_expert.MOST_ELEMENTS", most)
        assert (mixture().layers[0].down is None) == is_joined


@pytest.mark.parametrize(("parts", "options"), [(3, {}), (2, UNGATED)], ids=["gated", "ungated"])
def test_shared_expert_of_other_dtypes_or_of_many_values_stays_apart(
    parts: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drawn(**options)
    (layer,) = fields(model)
    other = {**layer, "down": layer["down"].astype(jnp.bfloat16)}
    join_layers(model.config.mlps, [other])
    monkeypatch.setattr("jspec.models.mlps.shared_expert.MOST_SHARED", parts * 2 * WIDTH * HIDDEN - 1)
    join_layers(model.config.mlps, [layer])
    assert "down" in other and "down" in layer
    monkeypatch.setattr("jspec.models.mlps.shared_expert.MOST_SHARED", parts * 2 * WIDTH * HIDDEN)
    join_layers(model.config.mlps, [layer])
    assert "down" not in layer


@pytest.mark.parametrize(
    ("shape", "count", "fewer", "copied_mib"),
    [
        ("deepseek-v2-lite", 8, 3, 0),
        ("deepseek-v2-lite", 40, 0, 0),
        ("deepseek-v2-lite", 72, -1, 11),
        ("deepseek-v2-lite", 600, -2, 11),
        ("nemotron3-nano", 40, 0, 0),
    ],
)
def test_joined_experts_compiled_for_h200_copy_at_most_the_down_projection(
    shape: str, count: int, fewer: int, copied_mib: int
) -> None:
    """XLA copies it where it multiplies, more than 64 rows; 3712 columns divide into two parts of k alone.

    600 rows may have one launch more, of a few integers, and spill without a device that chooses their tiles.
    """
    config = bench.TARGETS[shape]
    index, mlp = next((i, mlp) for i, mlp in enumerate(config.mlps) if isinstance(mlp, Experts))
    layer = abstract_weights(model_params(config), "bfloat16")["layers"][index]
    whole = dict(layer)
    join_layers([mlp], [whole])
    assert "down" not in whole
    x = jax.ShapeDtypeStruct((1, count, config.hidden_size), "bfloat16")

    def mixed(weights: Any, x: Any) -> Any:
        several = mixtures.mix_experts(x, Layer(**weights), mlp, None, AUTO)
        return sum(part.astype(jnp.float32) for parts in several for part in parts)

    alone, own = (compile_for_h200(mixed, weights, x, fail_on_spills=count < 600) for weights in (layer, whole))
    assert own.temp_bytes - alone.temp_bytes < (copied_mib + 1) << 20
    assert len(own.launches) <= len(alone.launches) - fewer
