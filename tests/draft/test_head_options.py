"""Compare heads whose layers have options beyond Llama's with the formulas, and test their windows under a tree."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Eagle, Eagle3, Engine, Tree
from jspec.core.numerics import REFERENCE
from jspec.core.records import TokenBatch
from jspec.draft import auto
from jspec.draft.base import check_layer_windows
from jspec.draft.eagle_head import FIRST_ROW, EagleHead, fuse, output_logits, project_inputs, run_on_cache
from jspec.models.kv_cache import create
from jspec.models.parts.kv_pool import PoolShape
from jspec.models.parts.rope import Rope
from jspec.models.weights.quantize import quantize_weights
from jspec.tools.convert import main
from pallas_kernels.layers.partial_sums import reduce_partials
from tests.draft.test_head_layers import drafts
from tests.reference import head as reference
from tests.support import folders, tiny
from tests.support.arrays import on_device
from tests.support.folders import EAGLE, HEAD, assert_same, random_tensors, without

pytestmark = pytest.mark.once

# Patterns of the tensors of optional parts.
TENSORS = {"norms": r"[qk]_norm", "qkv_bias": r"[qkv]_proj\.bias", "o_bias": r"o_proj\.bias", "second": r"layers\.1"}
TOLERANCE = 1e-4  # relative to the largest logit; float32 against float64
TOKENS = 20  # of the text on which a head is compared
SIZES = {**without(HEAD, "num_hidden_layers"), "hidden_size": 16, "head_dim": 8}
SLIDING = {"layer_types": ["sliding_attention"] * 40, "sliding_window": 6, "num_hidden_layers": 40}
LONGROPE = {"rope_type": "longrope", "factor": 8.0, "short_factor": [1.0, 1.0], "long_factor": [3.0, 5.0]}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {"partial_rotary_factor": 0.5, "rope_scaling": LONGROPE, "original_max_position_embeddings": 16}
# Name: the config's options, the options that the tensors follow, and those without which a wrong reader would compute.
CASES: dict[str, tuple[dict[str, Any], set[str], dict[str, Any]]] = {
    "norms of q and k": ({"model_type": "qwen3"}, {"norms"}, {"norms": None}),
    "biases of q, k, v and o": ({"attention_bias": True}, {"qkv_bias", "o_bias"}, {"o_bias": None}),
    "biases of Qwen 2": ({"model_type": "qwen2"}, {"qkv_bias"}, {"qkv_bias": None}),
    "yarn": ({"rope_scaling": YARN}, set(), {"rope_scaling": None}),
    "mrope of a text": ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, set(), {"rope_theta": 1e6}),
    "linear": ({"rope_scaling": LINEAR}, set(), {"rope_scaling": None}),
    "partial": ({"partial_rotary_factor": 0.5, "qkv_bias": True}, {"qkv_bias"}, {"partial_rotary_factor": 1.0}),
    "longrope, partial": (LONG, set(), {"rope_scaling": None}),
    "window": (SLIDING, set(), {"sliding_window": 7}),
    "gelu": ({"hidden_act": "gelu_pytorch_tanh"}, set(), {"hidden_act": "silu"}),
    "phi3, fused": ({"model_type": "phi3", "head_dim": 4}, {"fused"}, {"rope_theta": 1e6}),
    "phi3, names of Llama": ({"model_type": "phi3", "head_dim": 4}, set(), {"rope_theta": 1e6}),
    "two layers": ({"num_hidden_layers": 40}, {"second"}, {"second": None}),
    "wider target": ({"target_hidden_size": 24}, set(), {"rope_theta": 1e6}),
}


def config_of(name: str) -> dict[str, Any]:
    return {**SIZES, **CASES[name][0]}


def tensors_of(config: dict[str, Any], parts: set[str]) -> dict[str, np.ndarray]:
    """Return random tensors of an EAGLE-3 head with the given optional parts; weights are scaled by their inputs."""
    hidden, dim, width = config["hidden_size"], config["head_dim"], config.get("target_hidden_size", 16)
    inner, sizes = config["intermediate_size"], {"q": 4 * dim, "k": 2 * dim, "v": 2 * dim}
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, 3 * width), "norm.weight": (hidden,)}
    shapes |= {f"midlayer.{n}.weight": (hidden,) for n in ("input_layernorm", "hidden_norm")}
    shapes |= folders.block_shapes("midlayer", config, 2 * hidden) | {"lm_head.weight": (10, hidden)}
    if "second" in parts:
        shapes |= {"layers.1.input_layernorm.weight": (hidden,)} | folders.block_shapes("layers.1", config, hidden)
    if "norms" in parts:
        shapes |= {f"midlayer.self_attn.{n}_norm.weight": (dim,) for n in "qk"}
    if "qkv_bias" in parts:
        shapes |= {f"midlayer.self_attn.{n}_proj.bias": (size,) for n, size in sizes.items()}
    if "o_bias" in parts:
        shapes["midlayer.self_attn.o_proj.bias"] = (hidden,)
    if "fused" in parts:
        shapes = {n: s for n, s in shapes.items() if not re.search(r"\.(q|k|v|gate|up)_proj", n)}
        shapes["midlayer.self_attn.qkv_proj.weight"] = (8 * dim, 2 * hidden)
        shapes["midlayer.mlp.gate_up_proj.weight"] = (2 * inner, hidden)
    drawn = random_tensors(shapes)
    scaled = {n: t * 1.5 / np.sqrt(t.shape[-1]) if t.ndim == 2 else np.abs(t) + 0.5 for n, t in drawn.items()}
    return {n: t.astype(np.float32) for n, t in scaled.items()} | folders.vocabulary(folders.DRAFT_IDS)


def material(width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return an embedding, the tokens of a text, and the target's concatenated states before each token."""
    rng = np.random.default_rng(7)
    return (
        rng.normal(size=(40, 16)).astype(np.float32),
        rng.integers(0, 40, TOKENS),
        rng.normal(size=(TOKENS, width)).astype(np.float32),
    )


def computed(head: EagleHead, embed: np.ndarray, tokens: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Compute a head's logits after each token of a text in one pass; EAGLE-1 heads must have an output head."""
    config = head.config.for_length(64)
    head = head.replace(embed=on_device(embed), config=config)
    pairs = TokenBatch(
        tokens=on_device(tokens)[None],
        positions=on_device(np.arange(TOKENS))[None],
        valid=on_device(np.ones((1, TOKENS), bool)),
        first_row=on_device(np.full(1, FIRST_ROW)),
        page_table=on_device(np.arange(8))[None],
        bits=None,
        numerics=REFERENCE,
    )
    cache = create(config.layers, PoolShape(1, 8, 4, 28, "float32", "float32"), "float32")
    inputs = project_inputs(head, pairs.tokens, fuse(head, on_device(features)[None]), pairs.numerics)
    attended, residual, _ = run_on_cache(head, cache, pairs, *inputs, attends=True)
    _, product = output_logits(head, attended, residual, REFERENCE)
    return np.asarray(reduce_partials(product, jnp.float32)[0])


def expected(config: dict[str, Any], tensors: dict[str, np.ndarray], *text: np.ndarray) -> np.ndarray:
    embed, tokens, features = text
    named = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    return reference.eagle3(config, named, embed[tokens], features)


def load(folder: Path) -> EagleHead:
    found = auto.load_checkpoint(folder, dtype="float32")
    return EagleHead.from_weights(found.config, found.weights)


@pytest.mark.parametrize("name", CASES)
def test_eagle3_head_with_each_option_has_the_logits_of_the_formulas(tmp_path: Path, name: str) -> None:
    """The negative control is the formula without the option, or with another window or rotary base."""
    config, (_, parts, wrong) = config_of(name), CASES[name]
    tensors = tensors_of(config, parts)
    text = material(3 * config.get("target_hidden_size", 16))
    found = computed(load(folders.write(tmp_path, config, tensors)), *text)
    right = expected(config, tensors, *text)
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    patterns = [TENSORS[part] for part in wrong if part in TENSORS]
    other = {n: t for n, t in tensors.items() if not any(re.search(pattern, n) for pattern in patterns)}
    control = expected({**config, **wrong}, other, *text)
    assert np.abs(found - control).max() > 50 * TOLERANCE * np.abs(right).max()


@pytest.mark.parametrize("name", ["longrope, partial", "window", "phi3, fused", "biases of q, k, v and o"])
def test_converted_eagle3_head_with_options_has_the_config_and_arrays_of_its_source(tmp_path: Path, name: str) -> None:
    config = config_of(name)
    source = folders.write(tmp_path / "source", config, tensors_of(config, CASES[name][1]))
    assert main([str(source), str(tmp_path / "converted")]) == 0
    one, other = (auto.load_checkpoint(folder, dtype="float32") for folder in (source, tmp_path / "converted"))
    assert one.config == other.config
    assert_same(flat(one.weights), flat(other.weights))


def flat(weights: Any, prefix: str = "") -> dict[str, Any]:
    items = weights.items() if isinstance(weights, dict) else enumerate(weights)
    found: dict[str, Any] = {}
    for name, value in items:
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, (dict, list)) else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize("biased", [True, False])
def test_eagle1_head_of_qwen2_in_the_format_of_vllm_has_the_output_of_the_formulas(
    tmp_path: Path, biased: bool
) -> None:
    """The tensors decide whether the layers have the biases of Qwen 2; the negative control drops or adds them."""
    inner = {**EAGLE, "model_type": "qwen2"}
    tensors = {n: t / np.sqrt(t.shape[-1]) * 1.5 if t.ndim == 2 else t for n, t in folders.eagle_tensors().items()}
    sizes = zip("qkv", (16, 8, 8), strict=True)
    biases = random_tensors({f"layers.0.self_attn.{n}_proj.bias": (size,) for n, size in sizes})
    config = {"model_type": "eagle", "model": inner, "eagle_fc_bias": True}
    head = load(folders.write(tmp_path, config, tensors | biases if biased else tensors))
    embed, tokens, features = material(16)
    output = np.eye(16, dtype=np.float32)  # the logits are then the head's output
    found = computed(head.replace(head=on_device(output)), embed, tokens, features)
    both = [reference.eagle1(inner, kept, embed[tokens], features) for kept in (tensors | biases, tensors)]
    right, control = both if biased else both[::-1]
    np.testing.assert_allclose(found, right, atol=TOLERANCE * np.abs(right).max())
    assert np.abs(found - control).max() > 50 * TOLERANCE * np.abs(right).max()


# ---- windows and trees


def test_eagle3_drafter_with_a_tree_deeper_than_a_window_raises_naming_both(tmp_path: Path) -> None:
    config = {**SIZES, **SLIDING, "sliding_window": 4}
    head = load(folders.write(tmp_path, config, tensors_of(config, set())))
    Eagle3(head, Tree.chain(3))
    with pytest.raises(ValueError, match=r"expected at least 5, the depth of chain:4 \+ 1, got 4; take a tree"):
        Eagle3(head, Tree.chain(4))
    with pytest.raises(ValueError, match=r"draft_window: .*got 3"):
        Eagle3(head, Tree.chain(3), draft_window=3)


def test_layer_window_check_takes_the_smallest_window() -> None:
    config = tiny.config(16)
    (layer, _), attention = config.layers, config.layers[0].attention
    layers = tuple(replace(layer, mixer=replace(attention, window=window)) for window in (8, 4))
    check_layer_windows("target", config, Tree.chain(9))
    check_layer_windows("target", replace(config, layers=layers), Tree.chain(3))
    with pytest.raises(ValueError, match=r"target: sliding_window: expected at least 6, .* got 4"):
        check_layer_windows("target", replace(config, layers=layers), Tree.chain(5))


def test_engine_with_a_longrope_or_dynamic_head_rotates_by_the_engine_length(tmp_path: Path) -> None:
    config = {**EAGLE, "rope_scaling": LONGROPE, "original_max_position_embeddings": 16}
    head = load(folders.write(tmp_path, config, folders.eagle_tensors()))
    target, options = tiny.model(40), dict(slots=1, buckets=(1,), prefill_buckets=(8,), compile_ahead=False)

    def rotates_long(length: int) -> bool:
        with Engine(target, drafter=Eagle(head, Tree.chain(2)), max_len=length, **options) as engine:
            return engine.core.runner.params.draft.config.rope.is_long

    assert (rotates_long(17), rotates_long(16)) == (True, False)
    dynamic = head.config.resized(rope=Rope(kind="dynamic", original_max_position=16))
    with pytest.raises(NotImplementedError, match="max_len: expected at most 16 with rotary embeddings"):
        Engine(target, drafter=Eagle(head.replace(config=dynamic), Tree.chain(2)), max_len=17, **options)


# ---- the rounds of a drafter


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantised_head_with_biases_has_nearly_the_logits_of_the_formulas(tmp_path: Path, kind: str) -> None:
    name = "biases of q, k, v and o"
    config, tensors, text = config_of(name), tensors_of(config_of(name), CASES[name][1]), material(48)
    head = quantize_weights(load(folders.write(tmp_path, config, tensors)), kind)
    right = expected(config, tensors, *text)
    assert np.abs(computed(head, *text) - right).max() < 0.1 * np.abs(right).max()


@pytest.mark.long
def test_eagle3_with_the_precomputed_first_layer_and_every_option_drafts_unchanged_scores(tmp_path: Path) -> None:
    """The biases, norms and rotation of the first layer come after the precomputed projection."""
    options = {"model_type": "qwen3", "attention_bias": True, "vocab_size": 16, "rope_scaling": YARN}
    config = {**SIZES, **options, "head_dim": 4, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}
    tensors = tensors_of(config, {"norms", "qkv_bias", "o_bias"})
    ids = np.arange(10) + np.arange(10) // 5
    tensors |= {
        "d2t": ids - np.arange(10),
        "t2d": np.isin(np.arange(16), ids),
        "fc.weight": tensors["fc.weight"][:, :32],
    }
    head, tree = load(folders.write(tmp_path, config, tensors)), Tree.topk(6, 3, 2)
    (tokens, scores), (own_tokens, own_scores) = (drafts(head, tree, table=table) for table in (True, False))
    np.testing.assert_array_equal(tokens, own_tokens)
    np.testing.assert_allclose(scores, own_scores, atol=1e-4)
    layer = head.layers[0].replace(qkv_bias=jnp.zeros_like(head.layers[0].qkv_bias))
    wrong = drafts(head.replace(layers=[layer]), tree, table=True)[1]
    assert np.abs(wrong - scores).max() > 1e-2
