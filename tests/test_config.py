"""Configs: what is read from a config.json, what is refused, and the messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jspec.models.config import Eagle3Config, ModelConfig, Rope
from tests.folders import HEAD, TARGET

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALED = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_absent_options_take_the_defaults_of_the_llama_format():
    config = ModelConfig.from_hf(without(TARGET, "num_key_value_heads"))
    assert (config.num_kv_heads, config.head_dim, config.rope) == (4, 4, Rope(10000.0))
    assert not config.tie_word_embeddings


def test_an_explicit_head_dim_is_kept():
    assert ModelConfig.from_hf({**TARGET, "head_dim": 32}).head_dim == 32


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_theta": 500000.0, "rope_scaling": {**without(LLAMA3, "rope_type"), "type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
        {
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3,
            "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
        },
    ],
    ids=["transformers 4", "old type key", "transformers 5", "both"],
)
@pytest.mark.parametrize("reader", [ModelConfig, Eagle3Config])
def test_every_spelling_of_the_rotary_scaling_reads_the_same(spelling, reader):
    assert reader.from_hf({**HEAD, **spelling}).rope == SCALED


def test_what_transformers_saves_is_read_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    saved = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
    )  # fmt: skip
    saved.save_pretrained(tmp_path)
    config = ModelConfig.from_hf(json.loads((tmp_path / "config.json").read_text()))
    assert config == ModelConfig("llama", 40, 16, 24, 3, 4, 2, 4, 1e-6, SCALED, True, 32768)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
@pytest.mark.parametrize(("reader", "base"), [(ModelConfig, TARGET), (Eagle3Config, HEAD)])
def test_an_option_that_is_not_computed_is_refused_by_name(change, named, reader, base):
    with pytest.raises(NotImplementedError, match=named) as error:
        reader.from_hf({**base, **change})
    assert "expected" in str(error.value)


@pytest.mark.parametrize(("reader", "base"), [(ModelConfig, TARGET), (Eagle3Config, HEAD)])
def test_all_missing_keys_are_listed_at_once(reader, base):
    with pytest.raises(ValueError, match="hidden_size, rms_norm_eps"):
        reader.from_hf(without(base, "hidden_size", "rms_norm_eps"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 5}, "head_dim"),
        ({"hidden_size": -16}, "hidden_size"),
        ({"rms_norm_eps": 0}, "norm_eps"),
        ({"rope_scaling": without(LLAMA3, "factor")}, "factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 4.0}}, "agree"),
    ],
)
def test_an_impossible_value_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf({**TARGET, **change})


def test_two_rotary_bases_are_an_error_until_one_is_chosen():
    config = {**TARGET, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}
    with pytest.raises(ValueError, match="rope_theta"):
        ModelConfig.from_hf(config)
    assert ModelConfig.from_hf(config, rope_theta=500000.0).rope == Rope(500000.0)


@pytest.mark.parametrize(
    ("file", "override", "theta"),
    [({}, None, 10000.0), ({"rope_theta": 1e6}, None, 1e6), ({"rope_theta": 1e6}, 10000.0, 10000.0)],
)
def test_a_heads_rotary_base_is_10000_unless_the_file_or_the_caller_says_otherwise(file, override, theta):
    assert Eagle3Config.from_hf({**HEAD, **file}, rope_theta=override).rope == Rope(theta)


@pytest.mark.parametrize(
    ("file", "states"),
    [
        ({}, None),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 36]}}, (0, 36)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, (1, 15, 28)),
    ],
)
def test_feature_ids_become_target_state_indices(file, states):
    assert Eagle3Config.from_hf({**HEAD, **file}).feature_layers == states


@pytest.mark.parametrize(
    "file",
    [
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [28, 15, 1]}},
        {
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]},
            "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
        },
    ],
    ids=["descending", "two conventions"],
)
def test_doubtful_feature_ids_are_an_error_until_the_caller_decides(file):
    with pytest.raises(ValueError, match=r"eagle_aux_hidden_state_layer_ids.*feature_layers="):
        Eagle3Config.from_hf({**HEAD, **file})
    assert Eagle3Config.from_hf({**HEAD, **file}, feature_layers=[2, 16, 29]).feature_layers == (2, 16, 29)


@pytest.mark.parametrize("layers", [(), (2, 2, 5), (-1, 4, 5)])
def test_impossible_feature_layers_are_refused(layers):
    with pytest.raises(ValueError, match="feature_layers"):
        Eagle3Config.from_hf(HEAD, feature_layers=layers)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("norm_output", True),
        ("fc_norm", True),
        ("norm_before_fc", True),
        ("norm_before_residual", True),
        ("use_aux_hidden_state", False),
        ("use_last_layernorm", False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_flag_that_changes_the_heads_forward_is_refused_by_name(flag, value, nested):
    def config(setting: bool) -> dict[str, Any]:
        return {**HEAD, "eagle_config": {flag: setting}} if nested else {**HEAD, flag: setting}

    with pytest.raises(NotImplementedError, match=flag):
        Eagle3Config.from_hf(config(value))
    Eagle3Config.from_hf(config(not value))


def test_the_speculators_format_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="speculators"):
        Eagle3Config.from_hf({**HEAD, "speculators_model_type": "eagle3"})


def test_a_heads_sizes_default_to_its_own():
    config = Eagle3Config.from_hf(without(HEAD, "draft_vocab_size"))
    assert (config.draft_vocab_size, config.target_hidden_size, config.num_features) == (40, 16, 3)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(ValueError, match="draft_vocab_size"):
        Eagle3Config.from_hf({**HEAD, "draft_vocab_size": 41})


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig.from_hf({**TARGET, "rope_scaling": LLAMA3}),
        Eagle3Config.from_hf(HEAD),
        Eagle3Config.from_hf(HEAD, feature_layers=(2, 4, 5)),
    ],
    ids=["target", "head", "head with feature layers"],
)
def test_a_config_survives_json(config):
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config
