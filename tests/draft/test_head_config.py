"""Test how the config.json of EAGLE heads is read: meaning, contradictions and unsupported options."""

from __future__ import annotations

from typing import Any

import pytest

from jspec.draft.formats.eagle_formats import read_head
from jspec.draft.head_config import HeadConfig, Overrides
from jspec.models.parts.rope import Rope
from tests.support.folders import EAGLE, HEAD, TARGET, without

pytestmark = pytest.mark.once

IDS = "eagle_aux_hidden_state_layer_ids"
MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
LAYER = {**TARGET, "num_hidden_layers": 1}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 10,
    "norm_before_residual": False,
    "transformer_layer_config": LAYER,
}
WRAPPED = {"model_type": "eagle", "model": EAGLE, "eagle_fc_bias": True}  # EAGLE-1 as vLLM's converters write it


def read(config: dict[str, Any], method: str = "eagle3", **overrides: Any) -> HeadConfig:
    return read_head(config, method, Overrides(**overrides))


def modelopt(**options: Any) -> dict[str, Any]:
    return {**HEAD, "eagle_config": {**MODELOPT, **options}}


def specforge(**options: Any) -> dict[str, Any]:
    return {**HEAD, "eagle_config": {"use_aux_hidden_state": True}, **options}


# ---- sizes and formats


@pytest.mark.parametrize(
    ("config", "method", "name"),
    [
        (HEAD, "eagle3", "official"),
        (specforge(), "eagle3", "specforge"),
        ({**HEAD, "fc_norm": True}, "eagle3", "specforge"),
        (modelopt(), "eagle3", "modelopt"),
        (SPECULATORS, "eagle3", "speculators"),
        (EAGLE, "eagle", "official"),
        (WRAPPED, "eagle", "vllm"),
    ],
)
def test_head_config_of_every_exporter_has_equal_sizes(config, method, name):
    head = read(config, method)
    assert head.source_format == name
    drafted = 10 if method == "eagle3" else 40
    assert (head.vocab_size, head.draft_vocab_size, head.hidden_size, head.target_hidden_size) == (40, drafted, 16, 16)
    assert (head.intermediate_size, head.num_heads, head.num_kv_heads, head.head_dim) == (24, 4, 2, 4)
    assert (head.method, head.num_layers, head.norm_eps, head.rope) == (method, 1, 1e-5, Rope(10000.0))


def test_head_config_without_draft_vocab_or_target_width_uses_its_own_sizes():
    head = read(without(HEAD, "draft_vocab_size"))
    assert (head.draft_vocab_size, head.target_hidden_size, head.num_features) == (40, 16, 3)
    assert read({**HEAD, "target_hidden_size": 20, "head_dim": 8}).target_hidden_size == 20


@pytest.mark.parametrize("count", [1, 2])
def test_head_config_of_each_format_has_the_layer_count_in_the_file(count):
    """An official EAGLE-3 file states the target's layer count; its head has one layer."""
    assert read({**HEAD, "num_hidden_layers": 40}).num_layers == 1
    assert read({**EAGLE, "num_hidden_layers": count}, "eagle").num_layers == count
    layer = {**LAYER, "num_hidden_layers": count}
    assert read({**SPECULATORS, "transformer_layer_config": layer}).num_layers == count


@pytest.mark.parametrize(
    ("file", "override", "theta"),
    [({}, None, 10000.0), ({"rope_theta": 1e6}, None, 1e6), ({"rope_theta": 1e6}, 10000.0, 10000.0)],
)
def test_head_config_with_or_without_override_has_the_documented_rope_theta(file, override, theta):
    """The override comes first, then the file, then 10000."""
    for config, method in (
        ({**HEAD, **file}, "eagle3"),
        ({**SPECULATORS, "transformer_layer_config": {**LAYER, **file}}, "eagle3"),
        ({**EAGLE, **file}, "eagle"),
    ):
        assert read(config, method, rope_theta=override).rope == Rope(theta)


def test_head_config_of_modelopt_keeps_rope_scaling_and_head_dim():
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    head = read({**modelopt(), "rope_theta": 5e5, "rope_scaling": scaling, "head_dim": 32})
    expected = Rope(5e5, "llama3", factor=8.0, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert (head.head_dim, head.rope) == (32, expected)


@pytest.mark.parametrize(
    ("config", "biased"),
    [
        (EAGLE, True),
        ({**EAGLE, "bias": True}, True),
        ({**EAGLE, "bias": False}, False),
        (WRAPPED, True),
        ({**WRAPPED, "eagle_fc_bias": False}, False),
        (without(WRAPPED, "eagle_fc_bias"), False),
    ],
)
def test_eagle1_head_config_without_bias_option_has_the_default_of_the_exporter(config, biased):
    assert read(config, "eagle").fc_bias is biased
    assert not read(HEAD).fc_bias


def test_head_config_of_a_file_with_qkv_bias_has_qkv_bias():
    assert read({**EAGLE, "model_type": "llama", "qkv_bias": True}, "eagle").qkv_bias
    assert not read(EAGLE, "eagle").qkv_bias


def test_head_config_of_a_qwen3_layer_has_qk_norm():
    """Other exporters than speculators may write the target's `model_type`; there the tensors decide."""
    qwen = {**SPECULATORS, "transformer_layer_config": {**LAYER, "model_type": "qwen3"}}
    assert read(qwen).qk_norm == "head"
    assert read(SPECULATORS).qk_norm is None
    assert read({**HEAD, "model_type": "qwen3"}).qk_norm is None
    names = ["midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight"]
    assert read_head({**HEAD, "model_type": "qwen3"}, "eagle3", names=names).qk_norm == "head"
    assert read_head(HEAD, "eagle3", names=names).qk_norm is None


# ---- options of the forward pass


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"])
@pytest.mark.parametrize("value", [True, False])
def test_head_config_of_speculators_has_each_norm_flag_of_the_file(flag, value):
    head = read({**SPECULATORS, flag: value})
    assert getattr(head, flag) is value
    assert head == HeadConfig.from_json({**read(SPECULATORS).to_json(), flag: value})


@pytest.mark.parametrize("name", ["norm_output", "return_hidden_post_norm"])
def test_head_config_of_modelopt_reads_both_names_of_norm_output(name):
    assert read(modelopt(**{name: True})).norm_output
    assert not read(modelopt(**{name: False})).norm_output
    assert read({**modelopt(norm_output=True, return_hidden_post_norm=True), "norm_output": True}).norm_output
    assert read(modelopt(norm_before_fc=True)).norm_before_fc


def test_head_config_without_fusion_has_one_feature():
    head = read(modelopt(use_aux_hidden_state=False, **{IDS: []}))
    assert (head.fuse, head.feature_layers, head.num_features) == (False, None, 1)
    eagle = read(EAGLE, "eagle")
    assert (eagle.fuses_states, eagle.feature_layers, eagle.num_features) == (False, None, 1)
    assert read(modelopt(use_aux_hidden_state=False), feature_layers=(3,)).feature_layers == (3,)


def test_head_config_of_specforge_with_norm_output_raises_unless_overridden():
    for config in (specforge(norm_output=True), {**HEAD, "norm_output": True}):
        with pytest.raises(ValueError, match=r"norm_output: .*SpecForge.*pass norm_output=True"):
            read(config)
        assert read(config, norm_output=True).norm_output
        assert not read(config, norm_output=False).norm_output
    assert not read(specforge(norm_output=False)).norm_output
    automodel = {**HEAD, "architectures": ["LlamaEagle3DraftModel"], "fc_norm": True, "norm_output": True}
    assert read(automodel).norm_output and read(automodel).source_format == "automodel"
    assert not read(specforge()).norm_output


def test_head_config_of_speculators_with_raw_residual_raises_unless_overridden():
    silent = without(SPECULATORS, "norm_before_residual")
    with pytest.raises(ValueError, match=r"norm_before_residual: .*got none; pass norm_before_residual="):
        read(silent)
    assert read(silent, norm_before_residual=True).norm_before_residual
    assert not read(silent, norm_before_residual=False).norm_before_residual
    for config in (HEAD, specforge(), modelopt()):  # the default of other exporters: the raw hidden state
        assert not read(config).norm_before_residual


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_head_config_with_an_override_ignores_the_flag_in_the_file(flag):
    assert getattr(read({**SPECULATORS, flag: False}, **{flag: True}), flag)
    assert not getattr(read({**SPECULATORS, flag: True}, **{flag: False}), flag)


# ---- feature states


@pytest.mark.parametrize(
    ("file", "states"),
    [
        ({}, None),
        ({"eagle_config": {"use_aux_hidden_state": True}}, None),
        ({"eagle_config": {IDS: [1, 15, 28]}}, (2, 16, 29)),
        ({"eagle_config": {IDS: [1, 28, 15]}}, (2, 16, 29)),
        ({"eagle_config": {IDS: [32, 1, 17]}}, (2, 18, 33)),
        ({"eagle_config": {IDS: [2, 16, 29]}}, (2, 16, 29)),
        ({"eagle_config": {IDS: [0, 36]}}, (0, 36)),
        ({"eagle_config": {IDS: [1, 17, 32]}, "num_target_layers": 33}, (2, 18, 33)),
        ({"eagle_config": {IDS: [1, 17, 32]}, "num_target_layers": 32}, (1, 17, 32)),
        ({IDS: [1, 15, 28]}, (1, 15, 28)),
    ],
)
def test_head_config_with_auxiliary_layer_ids_has_target_state_indices(file, states):
    assert read({**HEAD, **file}).feature_layers == states


def test_head_config_of_speculators_has_layer_ids_as_target_state_indices():
    assert read({**SPECULATORS, IDS: [1, 15, 28]}).feature_layers == (1, 15, 28)
    assert read({**SPECULATORS, IDS: None}).feature_layers is None


CONTRADICTIONS = {
    "two lists of ids": (
        {**HEAD, "eagle_config": {IDS: [1, 15, 28]}, IDS: [1, 15, 28]},
        {"feature_layers": (2, 16, 29)},
    ),
    "ids without fusion": (modelopt(use_aux_hidden_state=False, **{IDS: [1, 15, 28]}), {"feature_layers": (3,)}),
    "two rotary bases": ({**HEAD, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 1e4}),
    "two residuals": (
        {**modelopt(norm_before_residual=True), "norm_before_residual": False},
        {"norm_before_residual": True},
    ),
    "two feedbacks": (
        {**modelopt(return_hidden_post_norm=True), "norm_output": False},
        {"norm_output": False},
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_head_config_of_a_contradictory_file_raises_naming_the_override(case):
    config, decision = CONTRADICTIONS[case]
    ((name, value),) = decision.items()
    with pytest.raises(ValueError, match=f"pass {name}="):
        read(config)
    got = read(config, **decision)
    assert (got.rope.theta if name == "rope_theta" else getattr(got, name)) == value


def test_head_config_with_two_norms_before_fc_raises():
    with pytest.raises(ValueError, match="norm_before_fc, fc_norm: expected at most one"):
        read({**SPECULATORS, "norm_before_fc": True, "fc_norm": True})


def test_head_config_with_two_values_of_a_flag_raises():
    with pytest.raises(ValueError, match=r"fc_norm: expected one value.*correct config\.json"):
        read({**specforge(fc_norm=True), "eagle_config": {"fc_norm": False}})


# ---- refusals


@pytest.mark.parametrize("layers", [(), (2, 2, 5), (-1, 4, 5)])
def test_head_config_with_impossible_feature_layers_raises(layers):
    with pytest.raises(ValueError, match="feature_layers"):
        read(HEAD, feature_layers=layers)


@pytest.mark.parametrize(
    ("config", "method", "named"),
    [
        ({**HEAD, "draft_vocab_size": 41}, "eagle3", "draft_vocab_size"),
        (without(EAGLE, "num_hidden_layers"), "eagle", "num_hidden_layers"),
        (without(SPECULATORS, "transformer_layer_config"), "eagle3", "transformer_layer_config"),
        ({**SPECULATORS, "transformer_layer_config": without(LAYER, "rms_norm_eps")}, "eagle3", "rms_norm_eps"),
        (without(WRAPPED, "model"), "eagle", "model"),
        ({**EAGLE, "target_hidden_size": 20}, "eagle", "target_hidden_size"),
        ({**modelopt(use_aux_hidden_state=False), "target_hidden_size": 20}, "eagle3", "target_hidden_size"),
    ],
)
def test_head_config_with_impossible_or_missing_size_raises_naming_the_field(config, method, named):
    with pytest.raises(ValueError, match=named):
        read(config, method)


@pytest.mark.parametrize("states", [(1, 2, 3), (1, 2)])
def test_head_config_without_fusion_but_several_feature_layers_raises(states):
    with pytest.raises(ValueError, match="feature_layers: expected one target state"):
        read(modelopt(use_aux_hidden_state=False), feature_layers=states)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("use_input_layernorm_in_first_layer", False),
        ("use_last_layernorm", False),
        ("use_mtp_layernorm", True),
        ("next_layer_regular", False),
        ("eh_proj_before_attn", True),
        ("parallel_draft_step", 4),
        ("parallel_drafting", True),
        ("mask_token_id", 7),
        ("ptd_token_id", 7),
        ("pard_token", 7),
        ("dflash_config", {"mask_token_id": 7}),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_head_config_with_unsupported_option_raises_naming_the_option(flag, value, nested):
    config = modelopt(**{flag: value}) if nested else {**HEAD, flag: value}
    with pytest.raises(NotImplementedError, match=f"^{flag}: expected"):
        read(config)
    read(modelopt(**{flag: None}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": {**EAGLE, "add_para_norm": True}}, "add_para_norm"),
        ({"model": {**EAGLE, "skip_prenorm": False}}, "skip_prenorm"),
        ({"model": {**EAGLE, "skip_output_norm": False}}, "skip_output_norm"),
        ({"truncated_vocab_size": 10}, "draft_vocab_size"),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": True}}, "use_input_layernorm_in_first_layer"),
        ({"eagle_config": {"use_last_layernorm": True}}, "use_last_layernorm"),
        ({"eagle_config": {"use_aux_hidden_state": True}}, "use_aux_hidden_state"),
        ({"norm_output": True}, "norm_output"),
        ({"fc_norm": True}, "fc_norm"),
    ],
)
def test_eagle1_head_config_with_unsupported_option_raises_naming_the_option(change, named):
    with pytest.raises(NotImplementedError, match=named):
        read({**WRAPPED, **change}, "eagle")
    read({**WRAPPED, "truncated_vocab_size": 40}, "eagle")


def test_head_config_from_json_with_unknown_method_raises():
    with pytest.raises(
        ValueError, match="method: expected one of eagle3, peagle, eagle, mtp, dflash, dspark, dflash2, got 'eagle4'"
    ):
        HeadConfig.from_json({**read(HEAD).to_json(), "method": "eagle4"})
