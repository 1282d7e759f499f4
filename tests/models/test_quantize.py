"""Test quantisation: products, which weights are quantised, loading, conversion, accuracy and losslessness."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import convert.huggingface
from jspec import DraftModel, Eagle3, Engine, SamplingParams, Tree
from jspec.engine.text.tokenizer import load_tokenizer
from jspec.models.decoder import Model
from jspec.models.weights.quantize import NAMES, check_device, quantize_weights, quantized_as
from jspec.step.memory import tree_bytes
from jspec.tools import check_head
from jspec.tools.bench import random_models as shapes
from jspec.tools.convert import main as convert_main
from jspec.tools.convert_command import STORED
from jspec.tools.info import describe
from jspec.tools.replay import run_texts
from jspec.tools.testing import last_logits
from pallas_kernels import split_matmul
from pallas_kernels.layers.dense.grouped_matmul import widened
from pallas_kernels.layers.experts.expert_reference import widened_expert
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.weights import EXPERT_KINDS, FORMATS, KINDS, Quantized
from tests.reference import int4
from tests.support import byte_pair, folders, tiny
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200
from tests.support.recordings import most_likely

# An input halfway between two float8 numbers may be rounded to either, which changes one product by 1/16.
TOLERANCE = {"int8": 1e-6, "fp8": 1e-6, "fp8_dynamic": 1e-3, "int4": 1e-6}
PROMPT = "class Config:\n    def _interpolate"


@pytest.mark.once
@pytest.mark.parametrize("kind", FORMATS)
def test_kind_of_a_weight_belongs_to_the_structure_of_its_tree(kind: Any) -> None:
    shape = (3, 4, 32) if kind == "mxfp4" else (4, 32)
    weight = quantize(jnp.ones(shape), kind)
    other = replace(weight, kind="fp8" if kind == "int8" else "int8")
    assert jax.tree.structure(weight) != jax.tree.structure(other)
    assert jax.tree.map(jnp.negative, weight).kind == kind and jax.jit(lambda own: own)(weight).kind == kind
    abstract = jax.eval_shape(partial(quantize, kind=kind), jnp.ones(shape))
    assert abstract.kind == kind and abstract.shape == shape
    part = jax.jit(lambda own: own.rows(slice(1, 3)))(weight)
    assert part.kind == kind and part.shape == (2, *shape[1:])


def problem(rows: int, out: int, inner: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Return random x and weight; their rows differ in size by up to a thousand, so a misplaced scale shows."""
    rng = np.random.default_rng(rows + out)
    x = rng.normal(size=(rows, inner)) * 10.0 ** rng.uniform(-1, 2, (rows, 1))
    weight = rng.normal(size=(out, inner)) * 10.0 ** rng.uniform(-2, 1, (out, 1))
    return on_device(x, dtype), on_device(weight, jnp.float32)


def dequantized(weight: Quantized) -> np.ndarray:
    if weight.kind == "int4":
        return int4.device(weight.values, weight.scale, weight.zeros).astype(np.float64)
    return np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)[:, None]


def expected(x: jax.Array, weight: Quantized) -> np.ndarray:
    """Return the float64 product of the quantised values; ml_dtypes rounds inputs that are quantised dynamically."""
    left = np.asarray(x, np.float64)
    if weight.kind == "fp8_dynamic":
        scale = np.abs(left).max(-1, keepdims=True) / 448
        left = scale * (left / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return left @ dequantized(weight).T


def error(got: jax.Array, wanted: np.ndarray, x: jax.Array, weight: jax.Array) -> float:
    """Return the largest error relative to the norms of the multiplied rows."""
    lengths = [np.linalg.norm(np.asarray(side, np.float64), axis=1) for side in (x, weight)]
    return float((np.abs(np.asarray(got, np.float64) - wanted) / np.outer(*lengths)).max())


# ---- the product


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weight_of_each_kind_differs_by_at_most_half_a_step(kind: str) -> None:
    _, weight = problem(7, 40, 96)
    got, wide = quantize(weight, kind), np.asarray(weight, np.float64)
    if kind == "int4":  # 96 columns are three groups of 32
        scale = (np.abs(wide).reshape(40, 3, 32).max(-1) / 7.5).repeat(32, axis=1)
        np.testing.assert_allclose(got.scale, scale[:, ::32], rtol=1e-6)
        error = np.abs(dequantized(got) - wide) / (scale / 2)
        assert 0.5 < error.max() < 1 + 1e-4
        return
    scale = np.abs(wide).max(-1, keepdims=True) / (127 if kind == "int8" else 448)
    np.testing.assert_allclose(got.scale, scale[:, 0], rtol=1e-6)
    # float8_e4m3fn has three bits of mantissa, and steps of 1/512 below 1/64.
    half_step = scale / 2 if kind == "int8" else np.maximum(np.abs(wide) / 16, scale / 1024)
    error = np.abs(dequantized(got) - wide) / half_step
    assert 0.5 < error.max() < 1 + 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_product_with_a_quantised_weight_equals_product_of_rounded_values(kind: str) -> None:
    x, weight = problem(7, 40, 96)
    own = quantize(weight, kind)
    got, wanted = matmul(x, own), expected(x, own)
    assert error(got, wanted, x, weight) < TOLERANCE[kind]
    assert error(got, np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T, x, weight) > 1e-3, (
        "the product equals the unrounded one"
    )
    other = replace(own, scale=jnp.roll(own.scale, 1, axis=0))
    assert error(matmul(x, other), wanted, x, weight) > 0.1, "another row's scale must change the product"


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_product_of_one_row_equals_its_row_in_a_product_of_many(kind: str) -> None:
    x, wide = problem(7, 40, 96)
    weight = quantize(wide, kind)
    product = jax.jit(
        matmul, compiler_options={"xla_backend_optimization_level": 1}
    )  # the level that users compile with
    together = product(x, weight)
    for row in range(7):
        alone = product(x[row : row + 1], weight)
        assert error(alone, np.asarray(together[row : row + 1], np.float64), x[row : row + 1], wide) < TOLERANCE[kind]


@pytest.mark.once
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int4"])
def test_quantised_weight_with_zero_and_largest_values_represents_them_exactly(kind: str) -> None:
    weight = on_device([[0.0, 0.0], [3.0, -3.0], [1e-20, 0.0]])
    got = matmul(on_device(np.eye(2)), quantize(weight, kind))
    np.testing.assert_allclose(got, weight.T, rtol=1e-6)
    assert not matmul(on_device(np.zeros((1, 2))), quantize(weight, kind)).any()
    least = on_device([[1e-36, -3e-37], [1e-38, 0.0]])  # its scale would be below the smallest normal number
    assert jnp.isfinite(matmul(jnp.concatenate([on_device(np.eye(2)), least]), quantize(least, kind))).all()


@pytest.mark.once
def test_weight_of_an_odd_width_cannot_be_int4() -> None:
    with pytest.raises(ValueError, match="int4: expected an even number of input channels, got 15; leave"):
        quantize(on_device(np.ones((4, 15))), "int4")


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_split_product_with_a_quantised_weight_equals_product_of_rounded_values(
    kind: str, rows: int, implementation: str
) -> None:
    x, weight = problem(rows, 1024, 2048, "bfloat16")
    own = quantize(weight, kind)
    parts = split_matmul(x, own, implementation=implementation)
    assert (parts.shape[0], parts.dtype) == (4, jnp.float32)
    wanted = expected(x, own)
    assert error(reduce_partials(parts, jnp.dtype("float32")), wanted, x, weight) < TOLERANCE[kind]
    assert error(reduce_partials(parts[1:], jnp.dtype("float32")), wanted, x, weight) > 0.01, (
        "a missing part must change the sum"
    )


@pytest.mark.parametrize("rows", [1, 5, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_split_product_with_a_quantised_weight_is_one_kernel_without_spills(kind: str, rows: int) -> None:
    x = jax.ShapeDtypeStruct((1, rows, 4096), "bfloat16")
    weight = jax.eval_shape(lambda: quantize(jnp.zeros((6144, 4096)), kind))
    program = compile_for_h200(
        lambda *arrays: split_matmul(*arrays, implementation="pallas"), x, weight, fail_on_spills=True
    )
    # A Hopper GPU widens weights in registers unless activations are quantised too.
    assert program.count("split_matmul" if kind == "fp8_dynamic" else "kCustomCall") == 1
    assert program.temp_bytes < 1 << 20, "the weight must not be written out in another type"


# ---- which weights are quantised


def test_quantised_model_or_head_has_only_its_linear_weights_quantised() -> None:
    model = tiny.model(40)
    got = quantize_weights(model, "int8")
    assert quantized_as(model) is None
    assert quantized_as(got) == "int8"
    assert isinstance(got.head, Quantized)
    head = quantize_weights(tiny.eagle_head(tiny.model(40, layers=6), draft_vocab=12, feature_layers=(1, 2, 4)), "fp8")
    assert isinstance(head.fc, Quantized)
    assert isinstance(head.head, Quantized)
    for layer, own in zip(got.layers, model.layers, strict=True):
        assert all(isinstance(getattr(layer, name), Quantized) for name in ("qkv", "o", "gate_up", "down"))
        assert layer.attn_norm is own.attn_norm
        assert layer.mlp_norm is own.mlp_norm
    assert got.embed is model.embed
    assert quantized_as(quantize_weights(got, "int8")) == "int8"
    dynamic = quantize_weights(quantize_weights(model, "fp8"), "fp8_dynamic")
    assert quantized_as(dynamic) == "fp8_dynamic"
    assert quantized_as(quantize_weights(dynamic, "fp8")) == "fp8"


@pytest.mark.once
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *((kind, "mixtral" if kind == "mxfp4" else "glm4_moe") for kind in EXPERT_KINDS),
        ("int8", "llama4_text"),
        ("fp8", "nemotron_h"),  # without gates
        pytest.param("int8", "nemotron_h", marks=pytest.mark.long),
        pytest.param("int4", "nemotron_h", marks=pytest.mark.long),
        pytest.param("int4", "llama4_text", marks=pytest.mark.long),
        pytest.param("int8", "gemma4_26b_a4b", marks=pytest.mark.long),
    ],
)
def test_quantised_mixture_of_experts_computes_with_the_rounded_weights(kind: str, family: str, golden: Path) -> None:
    """A model whose weights are rounded and then stored in float32 again has the same logits."""
    target = tiny.load_target(golden / "families" / family)
    own = quantize_weights(target, kind)
    assert isinstance(own.layers[1].experts_gate_up, Quantized) and not isinstance(own.layers[1].router, Quantized)

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, Quantized):
            return leaf
        if not leaf.has_groups:
            return leaf.values.astype(jnp.float32) * leaf.scale[..., None]
        if len(leaf.shape) == 2:
            return widened(leaf)
        return jnp.stack([widened_expert(leaf, expert) for expert in range(leaf.shape[0])])

    rounded = jax.tree.map(wide, own, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    ids = list(range(40))
    got, same, other = (last_logits(model, ids) for model in (own, rounded, target))
    np.testing.assert_allclose(got, same, atol=1e-4)
    assert np.abs(got - other).max() > 1e-2, "control: rounding shows"


@pytest.mark.once
def test_activations_of_experts_are_not_quantised(golden: Path) -> None:
    folder = golden / "families" / "qwen3_moe"
    with pytest.raises(ValueError, match=r"expected int8 or .* for the experts .*, got fp8_dynamic"):
        Model.from_pretrained(folder, quantize="fp8_dynamic")
    with pytest.raises(ValueError, match=r"expected int8 or .* for the experts .*, got fp8_dynamic"):
        quantize_weights(quantize_weights(tiny.load_target(folder), "fp8"), "fp8_dynamic")


@pytest.mark.once
def test_quantisation_of_unsupported_kind_or_model_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.model(40)
    with pytest.raises(
        ValueError,
        match=r"quantize: expected one of \(None, 'int8', 'fp8', 'fp8_dynamic', 'int4', 'mxfp4', 'none'\), got 'int3'",
    ):
        Engine(model, quantize="int3", slots=1, max_len=32)
    with pytest.raises(ValueError, match="got 'int3'"):
        Model.from_pretrained(byte_pair.TARGET, quantize="int3")
    with pytest.raises(ValueError, match="expected unquantised weights, got int8"):
        quantize_weights(quantize_weights(model, "int8"), "fp8")
    with pytest.raises(ValueError, match=r"expected weights named qkv, .*got none"):
        quantize_weights(tiny.medusa_heads(model, 2), "int8")
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3, "medusa_num_layers": 1}')
    save_file(folders.medusa_tensors(), tmp_path / "medusa_lm_head.safetensors")
    assert convert_main([str(tmp_path), str(tmp_path / "out"), "--quantize", "int8"]) == 2
    assert "expected a model or an EAGLE head, got Medusa heads" in capsys.readouterr().err


def _quantized_leaves(model: Model) -> list[jax.Array]:
    weights = [getattr(layer, name) for layer in model.layers for name in NAMES if hasattr(layer, name)]
    return jax.tree.leaves([*weights, model.head])


@pytest.mark.once
@pytest.mark.parametrize("batch_bytes", [1, 2**25], ids=["many batches", "one batch"])
@pytest.mark.parametrize("kind", STORED)
def test_convert_command_with_quantize_stores_weights_equal_to_those_when_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batch_bytes: int
) -> None:
    """With small batches, one batch holds the embedding alone and nothing to quantise."""
    monkeypatch.setattr(convert.huggingface, "BATCH_BYTES", batch_bytes)
    source = folders.write(tmp_path / "source", folders.TARGET, folders.target_tensors())
    assert convert_main([str(source), str(tmp_path / "out"), "--quantize", kind]) == 0
    loaded = Model.from_pretrained(source, quantize=kind)
    for dtype in (None, "bfloat16"):
        stored = Model.from_pretrained(tmp_path / "out", dtype=dtype)
        assert quantized_as(stored) == kind
        pairs = zip(_quantized_leaves(stored), _quantized_leaves(loaded), strict=True)
        assert all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    assert quantized_as(Model.from_pretrained(tmp_path / "out", quantize=kind)) == kind
    whole, rounded = (describe(folder).splitlines() for folder in (source, tmp_path / "out"))
    (count,) = (line.split(" (")[0] for line in whole if line.startswith("parameters: "))
    assert any(line.startswith(count) and kind[:3] in line.replace("float8", "fp8") for line in rounded), rounded
    with pytest.raises(ValueError, match=f"expected unquantised weights, got {kind}"):
        Model.from_pretrained(tmp_path / "out", quantize="fp8" if kind == "int8" else "int8")


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_random_target_and_head_with_quantize_have_quantised_weights(kind: str) -> None:
    target, head = shapes.random_target("tiny", "float32", kind), shapes.random_head("tiny", "float32", kind)
    assert quantized_as(target) == quantized_as(head) == kind
    assert isinstance(target.head, Quantized)
    assert target.embed.dtype == jnp.float32


# ---- accuracy and losslessness


def divergence(target: Model, other: Model, texts: np.ndarray) -> tuple[float, float]:
    """Return the mean Kullback-Leibler divergence (nats) of next-token probabilities, and the share of equal maxima."""
    log_probs = jax.jit(lambda model, tokens: jax.nn.log_softmax(run_texts(model, tokens).logits, axis=-1))
    p, q = (np.asarray(log_probs(model, on_device(texts, jnp.int32)), np.float64) for model in (target, other))
    return float((np.exp(p) * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).mean())


@pytest.mark.long
def test_quantised_embedded_target_has_nearly_unchanged_probabilities() -> None:
    target = Model.from_pretrained(byte_pair.TARGET)
    cuts = check_head.windows(check_head.TEXT, load_tokenizer("bytes"), 64)
    kinds = [quantize_weights(target, kind) for kind in ("int8", "fp8", "fp8_dynamic")]
    (int8, int8_same), (fp8, fp8_same), (dynamic, dynamic_same) = (divergence(target, one, cuts) for one in kinds)
    assert divergence(target, target, cuts) == (0.0, 1.0)
    assert 0 < int8 < 2e-3
    assert int8 < fp8 < dynamic < 0.05
    assert int8_same > 0.97
    assert min(fp8_same, dynamic_same) > 0.9
    assert len({tree_bytes(one) for one in kinds}) == 1 and tree_bytes(kinds[0]) < tree_bytes(target) / 3
    spoiled = jax.tree.map(lambda x: x * 1.2 if x.ndim == 1 else x, quantize_weights(target, "int8"))
    assert divergence(target, spoiled, cuts[:2])[0] > 3 * dynamic


@pytest.mark.once
@pytest.mark.parametrize(
    ("kind", "make", "accepted", "has_plain"),
    [
        pytest.param(  # the draft model has the target's weights
            "int8",
            partial(DraftModel.from_pretrained, byte_pair.TARGET, tree=Tree.chain(3)),
            3.7,
            True,
            marks=pytest.mark.long,
        ),
        *(
            pytest.param(
                "fp8",
                partial(Eagle3.from_pretrained, byte_pair.HEAD, tree=Tree.topk(12, 4, 3)),
                1.5,
                has_plain,
                marks=[pytest.mark.long] * has_plain,
            )
            for has_plain in (False, True)
        ),
    ],
)
def test_engine_with_quantised_target_and_drafter_emits_tokens_of_plain_decoding(
    kind: str, make: Callable[..., Any], accepted: float, has_plain: bool
) -> None:
    """Drafters are quantised too; a draft model with the target's weights drafts the target's tokens."""
    options = dict(slots=2, max_len=160, prefill_buckets=(64,), buckets=(2,), tokenizer="bytes", dtype="float32")
    options |= dict(prefix_cache=False, controls=False)
    params = [SamplingParams(max_tokens=64, temperature=t, seed=3) for t in (0.0, 1.0)]
    runs = []
    for drafter in (make(quantize=kind), None) if has_plain else (make(quantize=kind),):
        with Engine.from_pretrained(byte_pair.TARGET, drafter=drafter, quantize=kind, **options) as engine:
            assert quantized_as(engine.core.runner.params.target) == kind
            assert drafter is None or quantized_as(engine.core.runner.params.draft) == kind
            runs.append(engine.generate([PROMPT, PROMPT], params))
            target = engine.core.runner.params.target
    drafted, *plain = runs
    greedy = drafted[0].token_ids
    assert most_likely(target, [list(PROMPT.encode())], [greedy]) == [greedy] != [drafted[1].token_ids]
    assert all([done.token_ids for done in drafted] == [done.token_ids for done in run] for run in plain)
    assert drafted[0].metrics.mean_acceptance_length > accepted


@pytest.mark.once
def test_engine_with_float8_caches_has_mean_acceptance_length_above_1_8() -> None:
    """The pools of target and drafter are float8; tests/kernels check their values."""
    options = dict(slots=1, max_len=160, prefill_buckets=(64,), tokenizer="bytes", dtype="float32")
    options |= dict(prefix_cache=False, controls=False)
    head = Eagle3.from_pretrained(byte_pair.HEAD, tree=Tree.chain(3))
    dtypes = dict(kv_dtype="float8_e4m3fn", draft_kv_dtype="float8_e4m3fn")
    with Engine.from_pretrained(byte_pair.TARGET, drafter=head, **options, **dtypes) as engine:
        pools = jax.tree.leaves((engine.core.runner.state.target, engine.core.runner.state.draft.cache))
        assert {str(pool.dtype) for pool in pools} == {"float8_e4m3fn"}
        (done,) = engine.generate(PROMPT, SamplingParams(max_tokens=64, temperature=0.0))
    assert done.text is not None
    assert done.text.startswith("_some(self, "), done.text
    assert done.metrics.mean_acceptance_length > 1.8
    with pytest.raises(ValueError, match=r"kv_dtype: expected one of .*float8_e4m3fn.*got 'float8_e5m2'"):
        Engine(tiny.model(40), slots=1, max_len=32, kv_dtype="float8_e5m2")


def test_device_check_of_float8_on_compute_capability_below_8_9_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantize_weights(tiny.model(40), "fp8")
    check_device(model, "float8_e4m3fn")  # a CPU reports no compute capability
    for capability, refused in (("8.0", True), ("8.9", False), ("12.0", False)):
        device = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        for tree, dtype in ((model, "bfloat16"), (tiny.model(40), "float8_e4m3fn")):
            with pytest.raises(ValueError, match=r"8\.9 or later, got 8\.0") if refused else nullcontext():
                check_device(tree, dtype)
    check_device(quantize_weights(tiny.model(40), "int8"), "bfloat16")
