"""Configs: what is read from a config.json, what is refused, and the messages."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from jspec.draft.eagle_formats import read_head
from jspec.draft.medusa import MedusaConfig
from jspec.models.config import ModelConfig, Rope
from jspec.models.families import read_config
from tests.support.folders import EAGLE, HEAD, TARGET, without

pytestmark = pytest.mark.once

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
READERS = [read_config, partial(read_head, method="eagle3"), partial(read_head, method="eagle")]
SCALED = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_absent_options_take_the_defaults_of_the_llama_format():
    config = read_config(without(TARGET, "num_key_value_heads"))
    assert (config.num_kv_heads, config.head_dim, config.rope) == (4, 4, Rope(10000.0))
    assert not config.tie_word_embeddings


def test_an_explicit_head_dim_is_kept():
    assert read_config({**TARGET, "head_dim": 32}).head_dim == 32


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
@pytest.mark.parametrize("read", READERS)
def test_every_spelling_of_the_rotary_scaling_reads_the_same(spelling, read):
    assert read({**TARGET, **spelling}).rope == SCALED


def test_what_transformers_saves_is_read_back(tmp_path):
    transformers = pytest.importorskip("transformers")
    saved = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0},
    )  # fmt: skip
    saved.save_pretrained(tmp_path)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    assert config == ModelConfig.of_sizes(
        family="llama", vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=4, norm_eps=1e-6, rope=SCALED, tie_word_embeddings=True, max_position=32768,
    )  # fmt: skip


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
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
@pytest.mark.parametrize("read", READERS)
def test_an_option_that_is_not_computed_is_refused_by_name(change, named, read):
    with pytest.raises(NotImplementedError, match=named) as error:
        read({**TARGET, **change})
    assert "expected" in str(error.value)


@pytest.mark.parametrize("read", READERS)
def test_all_missing_keys_are_listed_at_once(read):
    with pytest.raises(ValueError, match="hidden_size, rms_norm_eps"):
        read(without(TARGET, "hidden_size", "rms_norm_eps"))


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
        read_config({**TARGET, **change})


def test_two_rotary_bases_are_an_error_until_one_is_chosen():
    config = {**TARGET, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}}
    with pytest.raises(ValueError, match="rope_theta"):
        read_config(config)
    assert read_config(config, rope_theta=500000.0).rope == Rope(500000.0)


@pytest.mark.parametrize(
    "config",
    [
        read_config({**TARGET, "rope_scaling": LLAMA3}),
        read_head(HEAD, "eagle3"),
        replace(read_head(HEAD, "eagle3"), feature_layers=(2, 4, 5), norm_output=True),
        read_head(EAGLE, "eagle"),
        MedusaConfig(40, 16, 3, 1),
    ],
    ids=["target", "EAGLE-3", "EAGLE-3 with options", "EAGLE-1", "Medusa"],
)
def test_a_config_survives_json(config):
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config
