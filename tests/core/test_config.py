"""Test config records: reading a config.json, error messages, and conversion to and from JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from jspec.draft.formats.eagle_formats import read_head
from jspec.draft.medusa import MedusaConfig
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.config.layer_config import LayerConfig
from jspec.models.families import read_config
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mla import MLA
from jspec.models.mlps.mlp_config import Dense
from jspec.models.parts.rope import Rope
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
SCALED = Rope(500000.0, "llama3", factor=8.0, original_max_position=8192)


def test_model_config_without_optional_fields_has_llama_defaults():
    config = read_config(without(TARGET, "num_key_value_heads"))
    assert (config.num_kv_heads, config.head_dim, config.rope) == (4, 4, Rope(10000.0))
    assert not config.tie_word_embeddings


def test_model_config_with_explicit_head_dim_keeps_it():
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
def test_config_with_any_spelling_of_llama3_rope_has_the_rope_scaling(spelling, read):
    assert read({**TARGET, **spelling}).rope == SCALED


def test_model_config_of_a_file_saved_by_transformers_has_the_saved_sizes(tmp_path):
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
        ({"hidden_act": "relu"}, "relu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "ntk"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        ({"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
    ],
)
@pytest.mark.parametrize("read", READERS)
def test_config_with_unsupported_option_raises_naming_the_option(change, named, read):
    with pytest.raises(NotImplementedError, match=named) as error:
        read({**TARGET, **change})
    assert "expected" in str(error.value)


@pytest.mark.parametrize("read", READERS)
def test_config_with_missing_keys_raises_naming_all_of_them(read):
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
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 4.0}}, "agree"),
    ],
)
def test_model_config_with_impossible_value_raises_naming_the_field(change, named):
    with pytest.raises(ValueError, match=named):
        read_config({**TARGET, **change})


def test_model_config_with_two_rope_bases_raises_unless_overridden():
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
def test_config_written_as_json_and_read_back_is_equal(config):
    assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


LAYER = LayerConfig(GQA(4, 2, 4), Dense(24))


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (replace(LAYER, mlp=Dense(24, activation="relu")), "hidden_act"),  # type: ignore[arg-type]
        (replace(LAYER, norms="sandwich"), "norms"),
        (replace(LAYER, mixer=GQA(4, 2, 4, qk_norm="some")), "qk_norm"),
    ],
)
def test_model_config_with_unsupported_layer_option_raises_naming_the_option(layer, named):
    config = read_config(TARGET)
    with pytest.raises(NotImplementedError, match=f"^{named}: expected"):
        replace(config, layers=(*config.layers, layer))


def test_model_config_with_different_layers_is_hashable_and_written_as_json_once_a_kind():
    config = read_config(TARGET)
    wide = replace(config.layers[0], mlp=Dense(32))
    mixed = replace(config, layers=(*config.layers, wide, config.layers[0]))
    assert hash(mixed) != hash(config) and mixed.num_layers == 5
    written = mixed.to_json()
    assert len(written["layers"]["kinds"]) == 2 and written["layers"]["order"] == [0, 0, 0, 1, 0]
    assert ModelConfig.from_json(written) == mixed


def test_config_without_the_records_of_layers_raises_naming_the_key():
    """Folders that were converted before layers had records of their own lack them."""
    for config in (read_config(TARGET), read_head(HEAD, "eagle3")):
        with pytest.raises(ValueError, match="missing layers"):
            type(config).from_json(without(config.to_json(), "layers"))


def test_latent_attention_takes_another_rotary_base_and_number_of_layers() -> None:
    latent = replace(LAYER, mixer=MLA(4, 48, 16, 16, 32, 0.2, rope=Rope(10000.0)))
    sizes: dict[str, Any] = dict(family="llama", tie_word_embeddings=False, max_position=64)
    config = ModelConfig(vocab_size=8, hidden_size=16, layers=(latent,) * 2, norm_eps=1e-5, **sizes).with_theta(5e5)
    assert [layer.attention.rope.theta for layer in config.layers] == [5e5] * 2
    assert config.resized(num_layers=3).layers == (config.layers[0],) * 3
    with pytest.raises(TypeError, match="kv_heads"):
        config.resized(num_kv_heads=2)
