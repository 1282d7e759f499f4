"""Test which heads are refused: configs that contradict the tensors, impossible values, and unsupported layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jspec.draft import auto
from jspec.draft.head_config import HeadConfig
from tests.draft.test_head_options import LONG, LONGROPE, SIZES, SLIDING, YARN, tensors_of
from tests.support import folders
from tests.support.folders import random_tensors

pytestmark = pytest.mark.once


def read(tmp_path: Path, changes: dict[str, Any], parts: set[str], *add: str) -> HeadConfig:
    config = {**SIZES, **changes}
    tensors = tensors_of(config, parts) | random_tensors(dict.fromkeys(add, (4, 4)))
    return auto.plan(folders.write(tmp_path, config, tensors)).config


@pytest.mark.parametrize(
    ("changes", "parts", "named"),
    [
        ({}, {"norms"}, r"unknown: midlayer\.self_attn\.k_norm\.weight"),
        ({}, {"qkv_bias"}, r"unknown: midlayer\.self_attn\.k_proj\.bias"),
        ({"attention_bias": True}, {"qkv_bias"}, r"missing: midlayer\.self_attn\.o_proj\.bias"),
        ({"qkv_bias": True}, set(), r"missing: midlayer\.self_attn\.k_proj\.bias"),
        ({"num_hidden_layers": 1}, {"second"}, r"unknown: layers\.1\.input_layernorm\.weight"),
        ({"layer_types": ["sliding_attention"]}, set(), r"sliding_window: expected an integer, got none"),
        ({**SLIDING, "sliding_window": 0}, set(), r"sliding_window: expected an integer from 1"),
        ({"rope_scaling": {**YARN, "factor": -1}}, set(), r"factor: expected a finite number above 0, got -1"),
        ({"rope_scaling": {"rope_type": "linear"}}, set(), r"missing factor"),
        ({"partial_rotary_factor": 0.4}, set(), r"expected to rotate an even number of channels, got 3 of 8"),
        ({**LONG, "rope_scaling": {**LONGROPE, "long_factor": [3.0]}}, set(), r"long_factor: expected 2 numbers"),
    ],
    ids=str,
)
def test_eagle3_head_whose_config_contradicts_its_tensors_or_is_impossible_raises(
    tmp_path: Path, changes: dict[str, Any], parts: set[str], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        read(tmp_path, changes, parts)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "phi3"])
def test_eagle3_head_of_llama_layers_with_the_target_model_type_has_no_norms_or_biases(
    tmp_path: Path, kind: str
) -> None:
    config = read(tmp_path, {"model_type": kind}, set())
    assert (config.qk_norm, config.qkv_bias, config.num_layers) == (None, False, 1)


@pytest.mark.parametrize(
    ("changes", "add", "named"),
    [
        (
            {"model_type": "gemma3_text"},
            {},
            "model_type: expected 'llama' or .* of a head, got 'gemma3_text'",
        ),
        ({"model_type": "deepseek_v3"}, [], "model_type: expected 'llama' or .*, got 'deepseek_v3'"),
        ({"hidden_act": "relu"}, [], "hidden_act: expected 'silu' or .*, got 'relu'"),
        ({"mlp_bias": True}, [], "mlp_bias: expected False, got True"),
        ({"layer_types": ["chunked_attention"]}, [], "layer_types: expected 'full_attention' or 'sliding_attention'"),
        ({"rope_scaling": {"rope_type": "ntk"}}, [], "rope type: expected 'default' or .*, got 'ntk'"),
        ({}, ["midlayer.self_attn.kv_b_proj.weight"], r"kv_b_proj\.weight: expected grouped-query .*MLA"),
        ({}, ["midlayer.mlp.experts.0.up_proj.weight"], r"experts.*: expected grouped-query .*MoE"),
    ],
    ids=str,
)
def test_eagle3_head_with_an_unsupported_layer_raises_naming_value_and_support(
    tmp_path: Path, changes: dict[str, Any], add: list[str], named: str
) -> None:
    with pytest.raises(NotImplementedError, match=named):
        read(tmp_path, changes, set(), *add)
