"""Test how model families read config.json and tensor names: older spellings, image encoders, and refused values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.fields import CheckpointError
from jspec import Model
from jspec.models import families
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.exchange import from_names
from jspec.models.parts.rope import Rope
from jspec.tools.testing import last_logits
from tests.support import folders, tiny
from tests.support.folders import TARGET
from tests.support.recordings import recording

pytestmark = pytest.mark.once

DENSE = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "gemma4_text", "olmo3", "granite")
HYBRID = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
GEMMA4 = ("gemma4_e2b", "gemma4_26b_a4b")
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "llama4_text", "minimax_m2", "laguna")
LATENT = ("glm4_moe_lite", "mistral4")
FAMILIES = (*DENSE, *GEMMA4, *EXPERTS, *LATENT, *HYBRID, "nemotron_h")
STORED = (
    *("gemma3_text", "gemma4_text", *GEMMA4, "phi3", "olmo3", "gpt_oss", "glm4_moe", "llama4_text", "mistral4"),
    *(*HYBRID, "nemotron_h"),
)
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + i for i in range(6)]}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", **FACTORS, "rope_theta": 1e4, "partial_rotary_factor": 0.75}

OLD_GEMMA3 = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


def test_config_of_gemma3_in_its_older_spelling_equals_the_new_one(golden: Path) -> None:
    new = json.loads((golden / "families" / "gemma3_text" / "config.json").read_text())
    old = {name: value for name, value in new.items() if name not in ("rope_parameters", "layer_types")} | OLD_GEMMA3
    assert families.read_config({**old, "sliding_window_pattern": 3, "num_hidden_layers": 4}) == families.read_config(
        {**new, "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
    )
    assert families.read_config(old).layers != families.read_config(new).layers, "control: the default pattern is 6"


def test_language_model_of_a_folder_with_an_image_encoder_is_loaded_without_it(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = golden / "families" / "gemma3_text"
    text = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    wrapped = {f"language_model.{name}": value for name, value in tensors.items()}
    wrapped["vision_tower.patch.weight"] = np.zeros((3, 3), np.float32)
    save_file(wrapped, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    )
    got, data = tiny.load_target(tmp_path), recording(source / "expect.npz")
    np.testing.assert_allclose(last_logits(got, data["prompt0"].tolist()), data["logits0"][-1], atol=1e-4)
    assert "1 tensors for images are left out" in caplog.text


def test_folder_of_llama4_with_an_image_encoder_and_older_spellings_is_loaded_without_it(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = golden / "families" / "llama4_text"
    text = json.loads((source / "config.json").read_text())
    derived = ("layer_types", "moe_layers", "no_rope_layers", "rope_parameters")
    old = {name: value for name, value in text.items() if name not in derived}
    old |= {"attn_temperature_tuning": 4, "rope_theta": 5e5, "rope_scaling": None, "no_rope_layers": []}
    tensors = {f"language_model.{name}": value for name, value in load_file(source / "model.safetensors").items()}
    images = ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight")
    save_file(tensors | dict.fromkeys(images, np.zeros((3, 3), np.float32)), tmp_path / "model.safetensors")
    fields = {"model_type": "llama4", "text_config": old, "vision_config": {}, "boi_token_index": 3}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    got, data = tiny.load_target(tmp_path), recording(source / "expect.npz")
    assert got.config == families.read_config(text)
    np.testing.assert_allclose(last_logits(got, data["prompt1"].tolist()), data["logits1"][-1], atol=1e-4)
    assert "2 tensors for images are left out" in caplog.text


def test_folder_of_gemma4_with_an_image_encoder_and_the_spellings_of_its_authors_is_loaded_without_it(
    golden: Path, tmp_path: Path
) -> None:
    source = golden / "families" / "gemma4_text"
    text = json.loads((source / "config.json").read_text())
    old = {name: value for name, value in text.items() if name != "per_layer_config"}
    old |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    tensors = load_file(source / "model.safetensors").items()
    wrapped = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors}
    image = {"model.vision_tower.patch.weight": np.zeros((3, 3), np.float32)}
    save_file(wrapped | image, tmp_path / "model.safetensors")
    fields = {"model_type": "gemma4", "text_config": old, "vision_config": {}, "audio_config": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    got, data = tiny.load_target(tmp_path), recording(source / "expect.npz")
    assert got.config == families.read_config(text)
    np.testing.assert_allclose(last_logits(got, data["prompt1"].tolist()), data["logits1"][-1], atol=1e-4)
    more = {"attention_k_eq_v": False, "num_global_key_value_heads": 1}
    assert families.read_config({**old, **more}).layers[2].attention.kv_heads == 2, "the key counts with shared values"


def test_sizes_of_layers_of_gemma4_are_read_with_zeros_before_their_index(golden: Path) -> None:
    """As transformers 5 names the layers of models with more than ten of them."""
    fields = json.loads((golden / "families" / "gemma4_text" / "config.json").read_text())
    (index,), (sizes,) = zip(*fields["per_layer_config"].items(), strict=True)
    padded = families.read_config({**fields, "per_layer_config": {f"0{index}": sizes}})
    assert padded == families.read_config(fields) != families.read_config({**fields, "per_layer_config": {}})


def test_folder_of_gemma4_with_encoders_and_keys_that_no_layer_reads_is_loaded_without_them(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As published: layers that share keys and values have tensors for keys and values of their own."""
    source = golden / "families" / "gemma4_e2b"
    text = json.loads((source / "config.json").read_text())
    tensors = folders.with_keys_that_no_layer_reads(load_file(source / "model.safetensors"))
    others = ("vision_tower.patch.weight", "embed_vision.norm.weight", "audio_tower.conv.weight", "embed_audio.w")
    wrapped = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    wrapped |= {f"model.{name}": np.zeros((3, 3), np.float32) for name in others}
    save_file(wrapped, tmp_path / "model.safetensors")
    fields = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    got, plain = tiny.load_target(tmp_path), tiny.load_target(source)
    assert got.config == plain.config
    assert all(map(np.array_equal, jax.tree.leaves(got), jax.tree.leaves(plain)))
    assert [f"2 tensors for {kind} are left out" in caplog.text for kind in ("images", "sound")] == [True, True]
    again = from_names({name: jnp.asarray(tensors[name]) for name in tensors}, plain.config, "float32")
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(plain)))
    del wrapped["model.language_model.layers.3.self_attn.q_proj.weight"]
    save_file(wrapped, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*layers\.3\.self_attn\.q_proj"):
        Model.from_pretrained(tmp_path, dtype="float32")


def test_experts_of_llama4_that_are_stored_one_by_one_are_those_stored_together(golden: Path, tmp_path: Path) -> None:
    source = golden / "families" / "llama4_text"
    save_file(folders.experts_one_by_one(load_file(source / "model.safetensors")), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    ids = recording(source / "expect.npz")["prompt1"].tolist()
    found, wanted = (last_logits(tiny.load_target(folder), ids) for folder in (tmp_path, source))
    np.testing.assert_array_equal(found, wanted)


def test_experts_of_gemma4_that_are_stored_one_by_one_are_those_stored_together(golden: Path, tmp_path: Path) -> None:
    source = golden / "families" / "gemma4_26b_a4b"
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        parts, values = ["down_proj"] if "down" in name else ["gate_proj", "up_proj"], tensors.pop(name)
        for index, expert in enumerate(values):
            rows = zip(parts, np.split(expert, len(parts)), strict=True)
            tensors |= {f"{name.rpartition('.')[0]}.{index}.{part}.weight": own.copy() for part, own in rows}
    folders.write(tmp_path, json.loads((source / "config.json").read_text()), tensors)
    found, wanted = (Model.from_pretrained(folder, dtype="float32") for folder in (tmp_path, source))
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(wanted)))


# For each family, changes of its recorded config.json that must be refused, and words of the error.
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "llama": [
        ({"mlp_bias": True}, "mlp_bias: expected False, got True"),
        ({"hidden_act": "relu2"}, "hidden_act: expected 'silu' or .*, got 'relu2'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, got 0.5"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types: expected .*full_attention.*, got"),
    ],
    "qwen2": [
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type: expected 'default' or .*, got 'spiral'"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types: expected .* got .*linear"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a finite number above 0, got 0"),
    ],
    "qwen3": [
        ({"rope_parameters": {"sliding_attention": {}}}, "rope_parameters: expected an object .* full_attention, got"),
        ({"hidden_act": "relu"}, "hidden_act: expected 'silu' or .*, got 'relu'"),
        ({"head_dim": 15}, "head_dim: expected an even number, got 15"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor .* 4, got 3"),
    ],
    "mistral": [
        ({"sliding_window": 0}, "sliding_window: expected an integer from 1 .*, got 0"),
        ({"sliding_window": "24"}, "sliding_window: expected an integer, got '24'"),
        ({"rope_parameters": {"rope_type": "yarn", "beta_fast": -1}}, "beta_fast: expected .*got -1"),
    ],
    "phi3": [
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "missing long_factor"),
        ({"rope_parameters": LONGROPE | {"short_factor": [1.0]}}, "short_factor: expected 6 numbers above 0, got"),
        ({"rope_parameters": LONGROPE | {"partial_rotary_factor": 2}}, "partial_rotary_factor: expected at most 1"),
    ],
    "gemma2": [
        ({"hidden_activation": "silu_and_mul"}, "hidden_activation: expected .*, got 'silu_and_mul'"),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping: expected a finite number above 0, got -1"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: expected False, got True"),
    ],
    "gemma3_text": [
        ({"layer_types": ["sliding_attention"]}, "layer_types: expected 4 types, one for each layer, got"),
        ({"sliding_window": None}, "sliding_window: expected an integer"),
        ({"query_pre_attn_scalar": "16"}, "query_pre_attn_scalar: expected a number, got '16'"),
    ],
    "gemma4_text": [
        ({"enable_moe_block": True}, "num_experts: expected an integer, got None"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers: expected fewer, .* of type full_attention, got 1"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: expected null or 'vision', got 'all'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: expected null or 'vision', got True"),
        ({"per_layer_config": {"3": {"head_dim": 32}}}, "per_layer_config: expected one entry .* below 3, got"),
        ({"per_layer_config": {"full_attention": {}}}, "per_layer_config: expected one entry .* below 3, got"),
        ({"per_layer_config": {"2": {}, "02": {}}}, "per_layer_config: expected one entry a layer, .* below 3, got"),
        ({"per_layer_config": {"0": {"sliding_window": 3}}}, "per_layer_config: 0: expected head_dim and .*, got"),
        ({"per_layer_config": {"2": {"head_dim": 31}}}, "head_dim: expected an even number, got 31"),
        ({"per_layer_config": {"2": {"num_key_value_heads": 3}}}, "num_key_value_heads: expected a divisor .*, got 3"),
        ({"per_layer_config": [32]}, "per_layer_config: expected an object, got"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters: expected an object .* sliding_attention, got"),
        ({"global_head_dim": "32", "per_layer_config": None}, "global_head_dim: expected an integer, got '32'"),
    ],
    "gemma4_e2b": [
        ({"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input: expected vocab_size 128, got 64"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input: expected an integer from 0 .*, got -1"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers: expected fewer, .* of type full_attention, got 4"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers: expected fewer, .* full_attention and sliding_.*, got 6"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers: expected fewer, .*, got 7"),
        ({"per_layer_config": {"5": {"head_dim": 32}}}, "expected 1 key-value heads of 32 .*layer 2, got 1 of 16 cha"),
        ({"use_double_wide_mlp": 1}, "use_double_wide_mlp: expected true or false, got 1"),
    ],
    "gemma4_26b_a4b": [
        ({"top_k_experts": 6}, "num_experts_per_tok: expected at most 5, the experts to choose from, got 6"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size: expected an integer, got None"),
        ({"model_type": "gemma4_unified_text"}, "enable_moe_block: expected False, got True"),
    ],
    "olmo3": [
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types: expected 'full_attention' or .*chunked"),
        ({"rms_norm_eps": None}, "missing rms_norm_eps"),
    ],
    "qwen3_moe": [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most 8, the experts to choose from, got 9"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: expected an integer from 1 .*, got 0"),
        ({"mlp_only_layers": [0.5]}, "mlp_only_layers: expected .*, got"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob: expected .*, got 'yes'"),
        ({"num_experts": "8"}, "num_experts: expected an integer, got '8'"),
    ],
    "mixtral": [
        ({"num_local_experts": 0}, "num_local_experts: expected an integer from 1 .*, got 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most 4, .*, got 5"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
    ],
    "gpt_oss": [
        ({"swiglu_limit": -1.0}, "swiglu_limit: expected a finite number above 0, got -1"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, got 'gelu'"),
        ({"num_experts_per_tok": None, "experts_per_token": 8}, "num_experts_per_tok: expected at most 4, .*, got 8"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected 3 types, one for each layer, got"),
    ],
    "glm4_moe": [
        ({"n_group": 3}, "n_group: expected a divisor of the 8 experts, at least 2 a group, got 3"),
        ({"n_group": 2, "topk_group": 4}, "topk_group: expected at most n_group 2, got 4"),
        ({"scoring_func": "softmax"}, "scoring_func: expected sigmoid, got 'softmax'"),
        ({"routed_scaling_factor": -2}, "routed_scaling_factor: expected a finite number above 0, got -2"),
        ({"n_shared_experts": -1}, "n_shared_experts: expected an integer from 0 .*, got -1"),
    ],
    "glm4_moe_lite": [
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types: expected 3 types, one for each layer, .* got"),
        ({"mlp_layer_types": ["dense", "moe", "moe"]}, "mlp_layer_types: expected .* 'dense' or 'sparse', got"),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace: expected 1, got 2"),
        ({"topk_method": "greedy"}, "topk_method: expected noaux_tc, got 'greedy'"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1.0, got 0.5"),
    ],
    "mistral4": [
        ({"n_group": 2}, "n_group: expected 1, got 2"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope type: expected 'yarn', got 'default'"),
        ({"qk_nope_head_dim": 48}, "partial_rotary_factor: expected 0.25, the part of a head .*, got 0.5"),
        ({"rope_parameters": {**YARN, "llama_4_scaling_beta": "0.1"}}, "llama_4_scaling_beta: expected a number, got"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types: expected .*full_attention.*, got"),
    ],
    "minimax_m2": [
        ({"attn_type_list": [1, 0, 1]}, r"attn_type_list: expected 1 for each layer, got .*\[1, 0, 1\]"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type: expected per_layer, got 'per_head'"),
        ({"use_routing_bias": False}, "use_routing_bias: expected True, got False"),
        ({"rope_parameters": None, "rotary_dim": 15}, "partial_rotary_factor: expected to rotate an even number"),
        ({"shared_intermediate_size": 16}, "shared_intermediate_size: expected 0, got 16"),
    ],
    "muse_glimmer": [
        ({"layer_rope_theta": [5e5, 5e5, 1e4, 0]}, "layer_rope_theta: expected 4 numbers, .* rope_theta 500000 or 0"),
        ({"layer_rope_theta": [5e5, 0]}, "layer_rope_theta: expected 4 numbers, one for each layer, .* got"),
        ({"rope_parameters": {**YARN, "rope_theta": 5e5}}, "attention_factor: expected 1.0 with norms .*, got 1.1"),
        ({"output_multiplier": 0}, "output_multiplier: expected a finite number above 0, got 0"),
        ({"post_norm_eps": "small"}, "post_norm_eps: expected a number, got 'small'"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types: expected .*sliding_attention.*, got"),
    ],
    "laguna": [
        ({"gating": False}, "gating: expected True or 'per-head' or 'per-element', got False"),
        ({"num_attention_heads_per_layer": [4, 6]}, "num_attention_heads_per_layer: expected 4 integers .*, got"),
        ({"num_attention_heads_per_layer": [4, 5, 6, 4]}, "num_key_value_heads: expected a divisor .* 5, got 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected True, got False"),
        ({"swa_attention_sink_enabled": True}, "swa_attention_sink_enabled: expected False, got True"),
        ({"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping: expected 0.0, got 3.0"),
        ({"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input: expected False, got True"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters: expected an object for each layer type, got"),
        ({"rope_scaling": YARN}, "rope_scaling: expected None, got .*yarn"),
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types: expected 4 types"),
    ],
    "llama4_text": [
        ({"attention_chunk_size": 0}, "attention_chunk_size: expected an integer from 1 .*, got 0"),
        ({"attention_chunk_size": None}, "attention_chunk_size: expected an integer"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types: expected .* or 'chunked_attention', got.*sliding"),
        ({"no_rope_layers": [1, 1]}, r"no_rope_layers: expected 4 numbers, .* got \[1, 1\]"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning: expected true, false or an integer, got 'yes'"),
        ({"floor_scale": 0.5}, "floor_scale: expected an integer, got 0.5"),
        ({"attn_scale": -1}, "attn_scale: expected a finite number above 0, got -1"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok: expected at most 3, .*, got 4"),
        ({"moe_layers": "all"}, "moe_layers: expected a list of integers from 0, got 'all'"),
        ({"intermediate_size_mlp": -1}, "intermediate_size_mlp: expected an integer from 1 .*, got -1"),
        ({"rope_scaling": YARN, "rope_parameters": None}, "attention_factor: expected 1.0 with norms .*, got 1.1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor: expected 1.0, got 0.5"),
    ],
    "lfm2": [
        ({"conv_bias": True}, "conv_bias: expected False, got True"),
        ({"conv_L_cache": 0}, "conv_L_cache: expected an integer from 1 .*, got 0"),
        ({"layer_types": ["conv", "sliding_attention"] * 2}, "layer_types: expected 'full_attention' or 'conv', got"),
        ({"layer_types": None, "full_attn_idxs": ["2"]}, "full_attn_idxs: expected a list of integers from 0, got"),
        ({"layer_types": ["conv"] * 4}, "layer_types: expected at least one layer with attention, got 'none with"),
        ({"tie_embedding": "yes"}, "tie_embedding: expected true or false, got 'yes'"),
        ({"block_multiple_of": 0}, "block_multiple_of: expected an integer from 1 .*, got 0"),
        ({"norm_eps": 0}, "norm_eps: expected a finite number above 0, got 0"),
    ],
    "lfm2_moe": [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: expected at most 8, .*, got 9"),
        ({"num_dense_layers": -1}, "num_dense_layers: expected an integer from 0 .*, got -1"),
        ({"conv_bias": True}, "conv_bias: expected False, got True"),
    ],
    "qwen3_5_text": [
        ({"attn_output_gate": False}, "attn_output_gate: expected True, got False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: expected swish, got 'sigmoid'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype: expected float32, got 'bfloat16'"),
        ({"hidden_act": "gelu"}, "hidden_act: expected silu, got 'gelu'"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads: expected a divisor of .* 2, got 3"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: expected an integer from 1 .*, got 0"),
        ({"full_attention_interval": 0, "layer_types": None}, "full_attention_interval: expected an integer from 1"),
        ({"layer_types": ["conv"] * 4}, "layer_types: expected 'full_attention' or 'linear_attention', got"),
    ],
    "qwen3_5_moe_text": [
        ({"norm_topk_prob": False}, "norm_topk_prob: expected True, got False"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most 4, .*, got 5"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size: expected an integer from 1 .*-1"),
    ],
    "qwen3_next": [({"linear_value_head_dim": "16"}, "linear_value_head_dim: expected an integer, got '16'")],
    "nemotron_h": [
        ({"layers_block_type": None}, "layers_block_type: expected a list with the type of each layer, got None"),
        ({"layers_block_type": ["conv", "moe"]}, r"layers_block_type: expected 'linear_attention' .*, got \['conv'\]"),
        ({"layers_block_type": None, "hybrid_override_pattern": "MX"}, r"hybrid_override_pattern: .* or '-', got \['X"),
        ({"num_hidden_layers": 4}, "num_hidden_layers: expected 5, the number of layer types, got 4"),
        ({"layers_block_type": ["linear_attention", "mlp"]}, "layer_types: expected at least one layer with attention"),
        ({"hybrid_override_pattern": "MEM*-"}, "hybrid_override_pattern: .* types of layers_block_type.*'MEM"),
        ({"mamba_n_groups": 4}, "mamba_n_groups: expected the value of n_groups, 2, or one of the two keys .*, got 4"),
        ({"time_step_limit": None, "mamba_dt_limit": [1e-3, 0.1]}, r"time_step_limit: expected \[0, inf.*0.1\]"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit: expected \[0, infinity\], got \[0.001, 0.1\]"),
        ({"n_groups": 3}, "n_groups: expected a divisor of mamba_num_heads 4, got 3"),
        ({"conv_kernel": 0}, "conv_kernel: expected an integer from 1 .*, got 0"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: expected relu2, got 'silu'"),
        ({"n_shared_experts": 2}, "n_shared_experts: expected 1, got 2"),
        ({"use_bias": True}, "use_bias: expected False, got True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: expected False, got True"),
        ({"moe_latent_size": 0}, "moe_latent_size: expected an integer from 1 .*, got 0"),
    ],
    "granite": [
        ({"residual_multiplier": "big"}, "residual_multiplier: expected a number, got 'big'"),
        ({"logits_scaling": 0}, "logits_scaling: expected a finite number above 0, got 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "keys", "words"), [(family, *case) for family, cases in BAD.items() for case in cases], ids=str
)
def test_config_with_an_unsupported_value_is_refused_by_name(
    family: str, keys: dict[str, Any], words: str, golden: Path
) -> None:
    fields = json.loads((golden / "families" / family / "config.json").read_text())
    fields = fields.get("text_config", fields)
    families.read_config(fields)
    with pytest.raises((CheckpointError, NotImplementedError), match=words):
        families.read_config({**fields, **keys})


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_with_a_missing_or_an_unknown_tensor_is_refused_by_name(
    family: str, golden: Path, tmp_path: Path
) -> None:
    folder = golden / "families" / family
    tensors = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for name in (next(iter(sorted(tensors))), next(name for name in tensors if "norm" in name)):
        save_file({other: value for other, value in tensors.items() if other != name}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"missing: .*{name}"):
            Model.from_pretrained(tmp_path, dtype="float32")
    save_file(tensors | {"model.layers.0.extra.weight": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown: model\.layers\.0\.extra\.weight"):
        Model.from_pretrained(tmp_path, dtype="float32")


# Keys of published files, most of them beside those of transformers, that change nothing.
PUBLISHED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {
        "first_k_dense_replace": 1, "topk_method": "noaux_tc", "partial_rotary_factor": 1.0, "rope_scaling": None,
        "rope_theta": 1e6, "num_nextn_predict_layers": 1, "mlp_layer_types": None,
    },
    "minimax_m2": {
        "attn_type_list": [1, 1, 1], "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "rotary_dim": 8, "rope_parameters": None,
        "rope_theta": 5e6,
    },
    "mistral4": {"sliding_window": None, "moe_layer_freq": 1, "scoring_func": None},
    "laguna": {"gating": True, "partial_rotary_factor": 0.5, "rope_theta": 5e5, "mlp_layer_types": None},
}  # fmt: skip


@pytest.mark.parametrize("family", PUBLISHED)
def test_config_with_the_keys_of_published_files_is_the_recorded_one(family: str, golden: Path) -> None:
    fields = json.loads((golden / "families" / family / "config.json").read_text())
    assert families.read_config({**fields, **PUBLISHED[family]}) == families.read_config(fields)


@pytest.mark.parametrize("name", STORED)
def test_config_as_json_gives_the_same_config_again(name: str, golden: Path) -> None:
    made = tiny.load_target(golden / "families" / name).config
    stored = json.loads(json.dumps(made.to_json()))
    assert ModelConfig.from_json(stored) == made
    with pytest.raises(CheckpointError, match=r"expected .*layers, .* got num_heads, num_layers; convert again"):
        ModelConfig.from_json({"family": "llama", "num_layers": 2, "num_heads": 4})
    stored["layers"]["order"][0] = 7
    with pytest.raises(CheckpointError, match=r"order: expected at most .* indices below"):
        ModelConfig.from_json(stored)


def test_layer_behind_the_last_one_that_predicts_no_tokens_is_refused(golden: Path, tmp_path: Path) -> None:
    folder = golden / "families" / "glm4_moe"
    fields, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert any(name.startswith("model.layers.2.") for name in tensors) and fields["num_hidden_layers"] == 2
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file(tensors | {"model.layers.3.enorm.weight": np.ones(32, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unknown: model\.layers\.3\.enorm\.weight"):
        Model.from_pretrained(tmp_path, dtype="float32")


def test_model_of_an_unknown_family_raises_naming_the_known_families() -> None:
    for read in (lambda: families.family_of("gpt2"), lambda: families.read_config({**TARGET, "model_type": "gpt2"})):
        with pytest.raises(NotImplementedError, match=r"model_type: expected .*'llama' or .*'qwen3'.*, got 'gpt2'"):
            read()


@pytest.mark.parametrize("name", HYBRID)
def test_rotary_base_of_a_hybrid_model_is_that_of_its_layers_with_attention(name: str, golden: Path) -> None:
    fields = json.loads((golden / "families" / name / "config.json").read_text())
    other = families.read_config(fields).with_theta(7e3)
    assert other == families.read_config(fields, rope_theta=7e3) and other.rope.theta == 7e3


def test_config_of_nemotron_h_in_its_older_spellings_equals_the_new_one_and_rotates_nothing(golden: Path) -> None:
    fields = json.loads((golden / "families" / "nemotron_h" / "config.json").read_text())
    other = {name: value for name, value in fields.items() if name != "layers_block_type"}
    old = {"num_hidden_layers": 5, "time_step_limit": [0.0, float("inf")], "rope_theta": 10000}
    wanted = families.read_config(fields)
    assert families.read_config({**fields, "hidden_act": "relu2"}) == wanted
    assert families.read_config({**other, **old, "hybrid_override_pattern": "MEM*E"}) == wanted
    assert families.read_config({**other, "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"]}) == wanted
    assert families.read_config({**other, "hybrid_override_pattern": "MEM*-"}) != wanted, "control"
    with pytest.raises(NotImplementedError, match="rope_theta: expected none, because no layer has a rotary embedding"):
        families.read_config(fields, rope_theta=7e3)


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("mamba_n_groups", "n_groups", 1),
        ("mamba_d_conv", "conv_kernel", 3),
        ("mamba_conv_bias", "use_conv_bias", False),
        ("mamba_dt_limit", "time_step_limit", [0.0, float("inf")]),
        ("num_local_experts", "n_routed_experts", 5),
        ("layer_types", "layers_block_type", ["linear_attention", "full_attention", "mlp"]),
        ("attention_head_dim", "head_dim", 8),  # which transformers does not read
    ],
)
def test_older_key_of_nemotron_h_is_read_as_transformers_reads_it(
    old: str, new: str, value: object, golden: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="configs are compared with those of transformers")
    recorded = json.loads((golden / "families" / "nemotron_h" / "config.json").read_text())
    recorded = folders.without(recorded, "time_step_limit")  # infinity, which a file has as an object
    fields = folders.without(recorded, new)
    known = old if old != "attention_head_dim" else new
    theirs = transformers.NemotronHConfig(**{**folders.without(fields, "model_type"), known: value}).to_dict()
    assert theirs[new] == value
    wanted = families.read_config({**theirs, "model_type": "nemotron_h"})
    assert families.read_config({**fields, old: value}) == wanted == families.read_config({**fields, new: value})
    assert (wanted == families.read_config(recorded)) == (new == "time_step_limit"), "control"


def test_config_of_smollm3_has_layers_without_rope_and_refuses_a_wrong_number_of_them() -> None:
    fields = {**TARGET, "model_type": "smollm3", "num_hidden_layers": 5}
    layers = families.read_config(fields).layers
    assert [layer.attention.rope.kind for layer in layers] == ["default"] * 3 + ["none", "default"]
    assert layers[0].attention.rope.theta == 2e6
    with pytest.raises(CheckpointError, match=r"no_rope_layers: expected 5 numbers, .* got \[1, 0\]"):
        families.read_config({**fields, "no_rope_layers": [1, 0]})
    with pytest.raises(NotImplementedError, match=r"rope_theta: expected none, because layers have different"):
        families.read_config(fields).with_theta(1e4)


def test_dynamic_rope_beyond_the_trained_length_is_refused_and_longrope_follows_the_length() -> None:
    made = families.read_config({**TARGET, "max_position_embeddings": 64})
    dynamic = made.resized(rope=Rope(kind="dynamic", factor=2.0, original_max_position=64))
    assert dynamic.for_length(64) == dynamic
    with pytest.raises(NotImplementedError, match=r"max_len: expected at most 64 .*'dynamic', got 65"):
        dynamic.for_length(65)
    long = made.resized(
        rope=Rope(kind="longrope", original_max_position=64, short_factors=(1.0,) * 2, long_factors=(2.0,) * 2)
    )
    assert [long.for_length(n).rope.is_long for n in (64, 65)] == [False, True]
    assert made.for_length(10**6) == made
