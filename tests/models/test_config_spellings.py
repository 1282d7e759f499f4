"""Every spelling of a config.json that is read has the values that transformers resolves; others are refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.fields import CheckpointError
from jspec.draft.formats.eagle_formats import read_head
from jspec.models.config.decoder_config import DecoderConfig
from jspec.models.families import model_types, read_config
from jspec.models.mixers.attention import Attention
from jspec.models.mixers.mla import MLA
from jspec.models.parts.rope import inverse_frequencies
from tests.support.folders import HEAD, TARGET, without

pytestmark = pytest.mark.once
transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHORT = without(LLAMA3, "original_max_position_embeddings")
ROPES: list[Any] = [
    None, {}, {"rope_theta": 5e5}, {"rope_theta": 10000}, {"rope_type": "default"}, {"type": "default"}, LLAMA3,
    {**LLAMA3, "rope_theta": 5e5}, {**without(LLAMA3, "rope_type"), "type": "llama3"}, {**SHORT, "rope_theta": 5e5},
    {**LLAMA3, "factor": 4.0}, {"partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2.0},
]  # fmt: skip
THETAS = (None, 5e5, 10000)
LENGTHS = (None, 64, 32)
SIZES: list[dict[str, Any]] = [
    {}, {"head_dim": 8}, {"head_dim": None}, {"num_key_value_heads": None}, {"num_key_value_heads": 4},
    {"tie_word_embeddings": True}, {"max_position_embeddings": 4096}, {"rms_norm_eps": 1e-6},
    {"attention_bias": False, "mlp_bias": False}, {"attention_bias": True}, {"hidden_act": "gelu"},
    {"partial_rotary_factor": 0.5}, {"sliding_window": 4}, {"pretraining_tp": 2}, {"rope_theta": 1e6},
    {"rope_scaling": LLAMA3, "rope_theta": 5e5}, {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
]  # fmt: skip


# Families whose config transformers knows, with keys that ours needs or without which transformers' is another model.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128},
    "gemma4_unified_text": {},
    "gpt_oss": {},
    "granite": {},
    "laguna": {},
    "llama4_text": {},
    "minimax_m2": {},
    "ministral": {},
    "mistral": {},
    "mistral4": {},
    "mixtral": {},
    "muse_glimmer_text": {"num_key_value_heads": 8},
    "olmo2": {},
    "olmo3": {"rope_theta": 500000.0},
    "phi3": {},
    "qwen2": {"num_key_value_heads": 8},
    "qwen3": {"num_key_value_heads": 8},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
}


def spelled(theta: Any, parameters: Any, scaling: Any, length: Any) -> dict[str, Any]:
    """The keys of a rotary embedding in a config.json; None: absent."""
    keys = {"rope_theta": theta, "rope_parameters": parameters, "rope_scaling": scaling}
    keys["original_max_position_embeddings"] = length
    return {name: value for name, value in keys.items() if value is not None}


def resolved(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """The values of transformers' config object for a config.json."""
    (folder / "config.json").write_text(json.dumps(fields))
    config = transformers.AutoConfig.from_pretrained(folder)
    return {
        "sizes": [getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size")],
        "heads": [config.num_attention_heads, config.num_key_value_heads, config.head_dim],
        "eps": config.rms_norm_eps,
        "rope": rope_values(config.rope_parameters),
        "bias": config.attention_bias or config.mlp_bias,
        "activation": config.hidden_act,
    }


def rope_values(rope: dict[str, Any]) -> list[Any]:
    """Rotary base, kind and scaling, with `partial_rotary_factor`."""
    scaled = [rope[name] for name in LLAMA3 if name != "rope_type"] if rope["rope_type"] == "llama3" else []
    return [rope["rope_theta"], rope["rope_type"], *scaled, rope.get("partial_rotary_factor") or 1.0]


def ours(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope
    scaled = [rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position]
    return {
        "sizes": [config.vocab_size, config.hidden_size, config.intermediate_size],
        "heads": [config.num_heads, config.num_kv_heads, config.head_dim],
        "eps": config.norm_eps,
        "rope": [rope.theta, rope.kind, *(scaled if rope.kind == "llama3" else []), rope.fraction],
        "bias": config.qkv_bias,
        "activation": config.layers[0].mlp.activation,
    }


def readings(fields: dict[str, Any]) -> list[DecoderConfig]:
    """A config as that of a target and as that of an EAGLE-3 head, in two layouts; [] if it is refused."""
    head = {**HEAD, **fields}
    outer = {"speculators_model_type": "eagle3", "norm_before_residual": False, "transformer_layer_config": fields}
    try:
        return [read_config(fields), read_head(head, "eagle3"), read_head(outer, "eagle3")]
    except (ValueError, NotImplementedError):
        return []


def test_config_with_any_spelling_of_the_rope_equals_transformers_or_is_refused(tmp_path: Path) -> None:
    accepted = 0
    for keys in itertools.product(THETAS, ROPES, ROPES, LENGTHS):
        fields = {**TARGET, **spelled(*keys)}
        for config in readings(fields):
            accepted += 1
            assert ours(config) == resolved(tmp_path, fields), fields
    assert accepted > 300


@pytest.mark.parametrize("keys", SIZES, ids=str)
def test_config_with_any_spelling_of_the_sizes_equals_transformers_or_is_refused(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    fields = {**TARGET, "max_position_embeddings": 512, **keys}
    expected = resolved(tmp_path, fields)
    for config in readings(fields):
        assert ours(config) == expected
    if not expected["bias"] and expected["activation"] == "silu" and expected["rope"][-1] == 1:
        target = read_config(fields)
        assert (target.num_layers, target.tie_word_embeddings) == (3, keys.get("tie_word_embeddings", False))
        assert target.max_position == keys.get("max_position_embeddings", 512)


LINEAR = {"rope_type": "linear", "factor": 2.0}
ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
# Transformers refuses, ignores or cannot run other ropes of these.
UNSCALED = ("phi3", "gemma4_text", "gemma4_unified_text", "mistral4", "laguna")


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        (model_type, keys)
        for model_type in sorted({*model_types()} - {"kimi_k2", "nemotron_h"})  # not in transformers; without rope
        for keys in ({}, {"rope_scaling": LINEAR}, {"rope_theta": 5e5, "rope_scaling": LINEAR})
        if not keys or model_type not in UNSCALED
    ],
    ids=str,
)
def test_rope_of_a_family_that_leaves_keys_out_is_that_which_transformers_resolves(
    golden: Path, tmp_path: Path, model_type: str, keys: dict[str, Any]
) -> None:
    file = golden / "families" / model_type / "config.json"
    fields = json.loads(file.read_text()) if file.is_file() else {**TARGET, "model_type": model_type}
    fields = without(fields, *ROPE_KEYS)
    (tmp_path / "config.json").write_text(json.dumps(fields | keys))
    written_out = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert read_config(fields | keys).layers == read_config({**fields, "rope_parameters": written_out}).layers


REAL: dict[str, tuple[dict[str, Any], float]] = {
    "Llama 2": ({"rope_scaling": None}, 1e4),
    "Llama 3": ({"rope_theta": 500000.0, "rope_scaling": None}, 5e5),
    "Llama 3.1": ({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, 5e5),
    "transformers 5": ({"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}, 5e5),
    "transformers 5, plain": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, 5e5),
    "base within the scaling": ({"rope_scaling": {"rope_type": "default", "rope_theta": 500000.0}}, 5e5),
    "all three": ({"rope_theta": 5e5, "rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 5e5),
}


@pytest.mark.parametrize("name", REAL)
def test_config_with_a_rope_as_files_in_use_spell_it_is_accepted(tmp_path: Path, name: str) -> None:
    keys, theta = REAL[name]
    fields = {**TARGET, **keys}
    configs = readings(fields)
    assert [config.rope.theta for config in configs] == [theta] * 3
    assert ours(configs[0]) == resolved(tmp_path, fields)


def of_family(name: str, **keys: Any) -> dict[str, Any]:
    """The least config.json of a model of five layers."""
    sizes = {**TARGET, "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 8}
    fields = {**without(sizes, "num_key_value_heads"), "max_position_embeddings": 512, **FAMILIES[name], **keys}
    return fields | {"model_type": name}


@pytest.mark.parametrize("name", FAMILIES)
def test_config_that_leaves_keys_out_is_the_one_with_all_values_of_transformers(tmp_path: Path, name: str) -> None:
    fields = of_family(name)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(fields) == read_config(transformers.AutoConfig.from_pretrained(tmp_path).to_dict())


def test_config_of_llama4_without_a_size_of_chunks_has_none_in_any_layer() -> None:
    for size, found in ((16, {16, None}), (None, {None})):
        layers = read_config(of_family("llama4_text", attention_chunk_size=size)).layers
        assert {layer.attention.chunk for layer in layers} == found


def test_base_given_for_olmo3_is_that_of_all_its_layers_and_their_scaling_stays() -> None:
    fields = of_family("olmo3", rope_scaling={"rope_type": "yarn", "factor": 8.0}, rope_theta=5e5)
    ropes = {layer.attention.rope for layer in read_config(fields, rope_theta=1e6).layers}
    assert {(rope.kind, rope.theta) for rope in ropes} == {("default", 1e6), ("yarn", 1e6)}


EXTREMES = (1e308, 5e-324, 1e30, 1e-30, 0.5, 1.0)
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SCALED = [LLAMA3, LINEAR, {"rope_type": "dynamic", "factor": 2.0}]
SCALED += [{**rope, "original_max_position_embeddings": 64} for rope in (YARN, LONGROPE)]


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The path of every number in a config.json."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:1]):
            yield from ((key, *rest) for rest in places(inner))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield ()


def replaced(value: Any, path: tuple[Any, ...], number: float) -> Any:
    if not path:
        return number
    copied = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    copied[path[0]] = replaced(copied[path[0]], path[1:], number)
    return copied if isinstance(value, dict) else list(copied.values())


def check_frequencies(fields: dict[str, Any]) -> str | None:
    """Check that all rotary frequencies of a config are finite; return the message if it is refused."""
    try:
        mixers = [layer.mixer for layer in read_config(fields).layers if isinstance(layer.mixer, Attention)]
    except (CheckpointError, NotImplementedError) as error:
        return str(error)
    for mixer in mixers:
        size = mixer.rotated if isinstance(mixer, MLA) else mixer.head_dim
        assert np.isfinite(inverse_frequencies(mixer.rope, size)).all(), fields
    return None


@pytest.mark.parametrize("model_type", sorted(model_types()))
def test_config_with_an_extreme_number_is_read_or_refused_by_its_key(golden: Path, model_type: str) -> None:
    """Rotary frequencies of what is read are finite; an error of Python's arithmetic fails the test."""
    file = golden / "families" / model_type / "config.json"
    fields = json.loads(file.read_text()) if file.is_file() else {**TARGET, "model_type": model_type}
    plain = {**without(fields, *ROPE_KEYS), "rope_theta": 1e4, "max_position_embeddings": 512}
    scaled = [{**plain, "rope_scaling": rope} for rope in SCALED]
    for config in (config for config in (fields, *scaled) if check_frequencies(config) is None):
        for path in places(config):
            name = next(key for key in reversed(path) if isinstance(key, str))
            for number in (*EXTREMES, 1) if name == "original_max_position_embeddings" else EXTREMES:
                refusal = check_frequencies(replaced(config, path, number))
                assert name in (refusal or name), (path, number, refusal)
