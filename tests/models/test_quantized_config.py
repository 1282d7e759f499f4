"""Test how a config's quantisation is read, and that each option that jspec does not support is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.fields import CheckpointError, Fields
from jspec.models.weights.quantized_config import read_scheme
from jspec.models.weights.scheme import Scheme
from tests.support import quantized_folders as made
from tests.support.int4_folders import AWQ, GPTQ, packed_config

pytestmark = pytest.mark.once

ROWS, BLOCKS = made.FORMATS["compressed-tensors by row"].config, made.FORMATS["fp8 by block"].config
BY_TENSOR = made.FORMATS["compressed-tensors by tensor"].config
PACKED = packed_config()
WEIGHTS = ("config_groups", "group_0", "weights")
INPUTS = ("config_groups", "group_0", "input_activations")


def read(config: Any, folder: Path = Path("/nowhere")) -> Scheme | None:
    return read_scheme(Fields.of({"quantization_config": config}), folder)


def changed(config: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of a config with another value at a path of keys."""
    found = copy.deepcopy(config)
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


SCHEMES = {
    "compressed-tensors by row": Scheme("compressed-tensors", "channel", None, "dynamic", ("lm_head",)),
    "compressed-tensors by tensor": Scheme("compressed-tensors", "tensor", None, "static", ("lm_head",)),
    "compressed-tensors by block": Scheme("compressed-tensors", "block", (32, 16), "dynamic", ("lm_head",)),
    "modelopt": Scheme("modelopt", "tensor", None, "static", ("lm_head",)),
    "fp8 by block": Scheme("fp8", "block", (32, 16), "dynamic"),
    "fp8 by tensor": Scheme("fp8", "tensor", None, "static", ("lm_head",)),
}


@pytest.mark.parametrize("name", made.FORMATS)
def test_config_of_each_format_gives_its_scheme(name: str) -> None:
    assert read(made.FORMATS[name].config) == SCHEMES[name]


def test_fp8_with_the_spellings_of_minimax_m2_excludes_the_router_alone() -> None:
    excluded = ["gate", "e_score_correction_bias", "lm_head"]
    config = changed(changed(BLOCKS, ["fmt"], "float8_e4m3fn"), ["modules_to_not_convert"], excluded)
    scheme = read(config)
    assert scheme == Scheme("fp8", "block", (32, 16), "dynamic", tuple(excluded))
    layer = "model.layers.0.block_sparse_moe"
    assert [scheme.exclusion(f"{layer}.{name}") for name in ("gate", "experts.0.w1")] == ["gate", None]


def test_scheme_as_text_names_what_shares_a_scale_and_what_is_not_used() -> None:
    assert str(SCHEMES["fp8 by block"]) == (
        "fp8, float8 weights with a scale per block of 32 x 16; its dynamic scales of activations are not used"
    )
    assert str(Scheme("fp8", "tensor")) == "fp8, float8 weights with a scale per tensor"


def test_config_without_quantisation_gives_no_scheme() -> None:
    assert read(None) is None
    assert read_scheme(Fields.of({}), Path("/nowhere")) is None
    weights_only = read(changed(ROWS, INPUTS, None))
    assert weights_only is not None and weights_only.activations is None


def test_config_of_each_4_bit_format_gives_its_scheme() -> None:
    groups, rows = {"granularity": "group", "block": (1, 16), "bits": 4}, {"granularity": "channel", "bits": 4}
    assert read(GPTQ) == Scheme("gptq", **groups, has_zeros=True, zero_offset=1, is_symmetric=False)
    assert read(changed(GPTQ, ["checkpoint_format"], "gptq_v2")) == Scheme(
        "gptq", **groups, has_zeros=True, is_symmetric=False
    )
    assert read(changed(GPTQ, ["group_size"], -1)) == Scheme(
        "gptq", **rows, has_zeros=True, zero_offset=1, is_symmetric=False
    )
    rules = read(changed(GPTQ, ["dynamic"], {"lm_head": {}, "-:.*attn.*": {}, "-:.*visual.*": None}))
    assert rules is not None and rules.unquantized == ("re:.*attn.*", "re:.*visual.*")
    assert read(AWQ) == Scheme("awq", **groups, has_zeros=True, unquantized=("lm_head",))
    assert read(PACKED) == Scheme("compressed-tensors", **groups, unquantized=("lm_head",))
    asymmetric = read(changed(PACKED, [*WEIGHTS, "symmetric"], False))
    assert asymmetric is not None and asymmetric.has_zeros and asymmetric.zero_offset == 0
    assert str(read(AWQ)) == "awq, 4-bit weights with a scale and a zero point per block of 1 x 16"
    assert str(Scheme("compressed-tensors", **rows)) == "compressed-tensors, 4-bit weights with a scale per channel"


UNSUPPORTED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantization_config: expected float8 weights of compr"),
    (changed(ROWS, ["format"], "int-quantized"), "format: expected 'float-quantized' or 'pack-quantized', got 'int-q"),
    (changed(PACKED, [*WEIGHTS, "num_bits"], 8), "weights: num_bits: expected 4, got 8"),
    (changed(PACKED, [*WEIGHTS, "type"], "float"), "type: expected 'int', got 'float'"),
    (changed(PACKED, [*WEIGHTS, "strategy"], "block"), "strategy: expected 'group' or 'channel', got 'block'"),
    (changed(PACKED, INPUTS, {"num_bits": 8}), "input_activations: expected none"),
    (changed(GPTQ, ["bits"], 3), "bits: expected 4, got 3"),
    (changed(GPTQ, ["bits"], 8), "bits: expected 4, got 8"),
    (changed(GPTQ, ["checkpoint_format"], "marlin"), "checkpoint_format: expected 'gptq' or 'gptq_v2', got 'marlin'"),
    (changed(GPTQ, ["dynamic"], {"+:.*down.*": {"bits": 8}}), r"dynamic: '\+:\.\*down\.\*': expected none"),
    (changed(GPTQ, ["pack_dtype"], "int64"), "pack_dtype: expected 'int32', got 'int64'"),
    (changed(AWQ, ["bits"], 8), "bits: expected 4, got 8"),
    (changed(AWQ, ["version"], "gemv"), "version: expected 'gemm' or 'GEMM', got 'gemv'"),
    (changed(AWQ, ["zero_point"], False), "zero_point: expected True, got False"),
    (changed(ROWS, [*WEIGHTS, "num_bits"], 4), "num_bits: expected 8, got 4"),
    (changed(ROWS, [*WEIGHTS, "type"], "int"), "type: expected 'float', got 'int'"),
    (changed(ROWS, [*WEIGHTS, "strategy"], "group"), "strategy: expected 'tensor' or 'channel' or 'block', got 'gr"),
    (changed(ROWS, [*WEIGHTS, "group_size"], 128), "group_size: expected none, got 128"),
    (changed(ROWS, [*WEIGHTS, "symmetric"], False), "symmetric: expected True, got False"),
    (changed(ROWS, [*WEIGHTS, "dynamic"], True), "dynamic: expected False, got True"),
    (changed(ROWS, [*INPUTS, "num_bits"], 4), "input_activations: num_bits: expected 8, got 4"),
    (changed(ROWS, [*INPUTS[:2], "output_activations"], {"num_bits": 8}), "output_activations: expected none"),
    (changed(ROWS, ["config_groups", "group_1"], BY_TENSOR["config_groups"]["group_0"]), "expected one group, or sev"),
    (changed(ROWS, ["transform_config"], {"groups": 1}), "transform_config: expected none"),
    (changed(ROWS, ["sparsity_config"], {"format": "sparse-24-bitmask"}), "format: expected 'dense', got 'sparse-24"),
    (changed(made.MODELOPT, ["quant_algo"], "NVFP4"), "quant_algo: expected 'FP8', got 'NVFP4'"),
    (changed(made.MODELOPT, ["config_groups"], ROWS["config_groups"]), "config_groups: expected one scale per tensor"),
    (changed(BLOCKS, ["fmt"], "e5m2"), "fmt: expected 'e4m3' or 'float8_e4m3fn', got 'e5m2'"),
    (changed(BLOCKS, ["expert_dtype"], "fp4"), "expert_dtype: expected 'fp8', got 'fp4'"),
    (changed(BLOCKS, ["modules_to_convert"], ["model.embed_tokens"]), "modules_to_convert: expected none"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), UNSUPPORTED, ids=[message.split(":")[0] for _, message in UNSUPPORTED])
def test_config_with_an_unsupported_option_raises_naming_it(config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        read(config)


WRONG = [
    ("float8", "quantization_config: expected an object"),
    (changed(BLOCKS, ["weight_block_size"], [128]), "weight_block_size: expected two sizes above 0"),
    (changed(BLOCKS, ["weight_block_size"], [128, 0]), "weight_block_size: expected two sizes above 0"),
    (changed(ROWS, [*WEIGHTS, "strategy"], "block"), "block_structure: expected two sizes for the strategy 'block'"),
    (changed(ROWS, ["ignore"], ["re:["]), r"expected a regular expression after 're:', got 're:\['"),
    (changed(ROWS, ["ignore"], "lm_head"), "ignore: expected a list of texts"),
    (changed(BLOCKS, ["weight_block_size"], [10**30, 1]), "weight_block_size: expected a list of integers"),
    (changed(ROWS, ["format"], None), "missing format"),
    (changed(ROWS, WEIGHTS, None), "missing weights"),
    (changed(ROWS, WEIGHTS, {"strategy": "channel"}), "missing num_bits"),
    ({"quant_method": "modelopt"}, "missing quant_algo"),
    ({"quant_method": "gptq"}, "missing bits"),
    (changed(GPTQ, ["dynamic"], {"-:[": {}}), r"dynamic: expected a regular expression after 're:', got 're:\['"),
    (changed(GPTQ, ["group_size"], 0), "group_size: expected a number of columns above 0, or -1"),
    (changed(AWQ, ["group_size"], "all"), "group_size: expected an integer"),
    (changed(PACKED, [*WEIGHTS, "group_size"], None), "missing group_size"),
]


@pytest.mark.parametrize(("config", "message"), WRONG, ids=[message.split(":")[0] for _, message in WRONG])
def test_config_with_an_impossible_value_raises_naming_it(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config)


@pytest.mark.parametrize(
    ("name", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("up_proj", "model.layers.1.mlp.up_proj", True),
        ("p_proj", "model.layers.1.mlp.up_proj", False),
        ("model.layers.*.mlp*", "model.layers.1.mlp.up_proj", True),
        (r"re:.*\.self_attn\..*", "model.layers.1.self_attn.o_proj", True),
        (r"re:self_attn", "model.layers.1.self_attn.o_proj", False),
    ],
)
def test_excluded_name_matches_whole_parts_of_a_module_name(name: str, module: str, excluded: bool) -> None:
    assert (Scheme("fp8", "tensor", unquantized=(name,)).exclusion(module) == name) == excluded


def test_module_is_excluded_among_many_names_as_by_each_of_them_as_a_pattern() -> None:
    """The definition is that of the patterns, which would take minutes for all experts of a large mixture."""
    rng = np.random.default_rng(0)

    def name(most: int) -> str:
        return ".".join(rng.choice(["a", "b", "ab", "c?", "*"], rng.integers(1, most), p=[0.3, 0.3, 0.3, 0.05, 0.05]))

    counts = {True: 0, False: 0}
    for _ in range(200):
        names, module = tuple(name(5) for _ in range(3)), name(6).replace("?", "").replace("*", "a")
        wanted = {
            one for one in names if any(fnmatchcase(module, pattern) for pattern in (one, f"{one}.*", f"*.{one}"))
        }
        got = Scheme("fp8", "tensor", unquantized=names).exclusion(module)
        assert got in wanted if wanted else got is None
        counts[bool(wanted)] += 1
    assert min(counts.values()) > 40, "both outcomes occur"
