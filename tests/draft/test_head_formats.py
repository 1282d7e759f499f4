"""Test files of draft heads: one head in every exporter's layout, each option's tensors, and detection of kinds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jspec.draft import auto
from tests.draft.test_head_options import SIZES, tensors_of
from tests.support import byte_pair, folders
from tests.support.folders import (
    DRAFT_IDS,
    EAGLE,
    HEAD,
    TARGET,
    assert_same,
    block,
    expected_head,
    loaded,
    random_tensors,
    stored,
    without,
)

pytestmark = pytest.mark.once

IDS = "eagle_aux_hidden_state_layer_ids"
Tensors = dict[str, np.ndarray]


def in_layers(tensors: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def wrapped(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return the config.json of a head in the speculators format."""
    outer = {"speculators_model_type": "eagle3", "norm_before_residual": False, **options}
    layer = {**without(config, "draft_vocab_size", "architectures", "eagle_config"), "num_hidden_layers": 1}
    return {**outer, "draft_vocab_size": config["draft_vocab_size"], "transformer_layer_config": layer}


# ---- one head in every layout


def layouts(config: dict[str, Any], tensors: Tensors) -> dict[str, tuple[dict[str, Any], Tensors]]:
    """Return the recorded head's config and tensors as each exporter writes them."""
    bare, nested = without(tensors, "embed_tokens.weight"), {"use_aux_hidden_state": True, IDS: [1, 3, 4]}
    modelopt = {**nested, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    flags = {"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1}
    speculators = wrapped(config, **{IDS: [2, 4, 5]})
    return {
        "specforge": ({**config, "eagle_config": nested}, bare),
        "modelopt": ({**config, "eagle_config": modelopt | flags}, without(bare, "t2d")),
        "speculators": (speculators, in_layers(tensors)),
        "speculators, names as ModelOpt's": (speculators, without(bare, "t2d")),
        "specforge, with a prefix": (config, {n if "lm_head" in n else f"model.{n}": t for n, t in bare.items()}),
    }


LAYOUTS = ["specforge", "modelopt", "speculators", "speculators, names as ModelOpt's", "specforge, with a prefix"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eagle3_head_in_the_layout_of_every_exporter_loads_equal_tensors(tmp_path, layout):
    folder = byte_pair.HEAD
    tensors, original = stored(folder), json.loads((folder / "config.json").read_text())
    config, written = layouts(original, tensors)[layout]
    folders.write(tmp_path, config, written)
    expected = expected_head(tensors)
    if "embed_tokens.weight" in written:
        expected["embed"] = tensors["embed_tokens.weight"]
    assert_same(loaded(tmp_path), expected)
    ours, theirs = (auto.plan(f).config.to_json() for f in (tmp_path, folder))
    assert ours.pop("source_format") == layout.partition(",")[0]
    theirs.pop("source_format")
    assert ours == theirs


def test_deep_eagle3_head_with_the_names_of_modelopt_loads_equal_tensors(tmp_path):
    """Its later layers have a `hidden_norm` in place of an `input_layernorm`."""
    config, tensors = {**SIZES, "num_hidden_layers": 2}, tensors_of(SIZES, {"second"})
    deep = {n.replace("midlayer.", "midlayer.0.").replace("layers.1.", "midlayer.1."): t for n, t in tensors.items()}
    deep["midlayer.1.hidden_norm.weight"] = deep.pop("midlayer.1.input_layernorm.weight")
    expected = loaded(folders.write(tmp_path / "own", config, tensors))
    assert {"layers.0.hidden_norm", "layers.1.input_norm"} <= expected.keys()
    assert_same(loaded(folders.write(tmp_path / "deep", config, deep)), expected)
    with pytest.raises(ValueError, match=r"missing: layers\.1\.input_layernorm\.weight"):
        auto.plan(folders.write(tmp_path / "part", config, without(deep, "midlayer.1.hidden_norm.weight")))


def test_eagle3_recorded_head_in_specforge_layout_equals_the_official_head(golden):
    pytest.importorskip("torch", reason="the official head is a .bin")
    official, other = auto.plan(golden / "draft"), auto.plan(byte_pair.HEAD)
    arrays = loaded(other.folder)
    embedding = arrays.pop("embed")
    assert_same(arrays, loaded(official.folder))
    assert_same(arrays, expected_head(stored(official.folder)))
    assert embedding.tobytes() == stored(byte_pair.TARGET)["model.embed_tokens.weight"].tobytes()
    assert official.config.feature_layers is None
    assert other.config.feature_layers == (2, 8 // 2, 8 - 3)
    assert other.config.rope == official.config.rope


def test_eagle3_head_with_swapped_norm_tensors_loads_other_tensors(tmp_path):
    """Negative control: the first layer's two norms have the same shape and differ only in name."""
    folder = byte_pair.HEAD
    tensors = stored(folder)
    first, second = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    swapped = tensors | {first: tensors[second], second: tensors[first]}
    folders.write(tmp_path, json.loads((folder / "config.json").read_text()), swapped)
    with pytest.raises(AssertionError, match="input_norm"):
        assert_same(without(loaded(tmp_path), "embed"), expected_head(tensors))


def rows_by_target_id(arrays: dict[str, Any]) -> dict[int, bytes]:
    return {int(i): row.tobytes() for i, row in zip(arrays["draft_to_target"], arrays["head"], strict=True)}


def test_modelopt_head_with_permuted_vocabulary_loads_equal_rows_per_target_id(tmp_path):
    folder = byte_pair.HEAD
    tensors, config = stored(folder), json.loads((folder / "config.json").read_text())
    ids = np.arange(72) + tensors["d2t"]
    order = np.random.default_rng(5).permutation(72)
    offsets = ids[order] - np.arange(72)
    assert offsets.min() < 0 and (np.diff(offsets) < 0).any()
    config, written = layouts(config, tensors)["modelopt"]
    moved = written | {"d2t": offsets, "lm_head.weight": written["lm_head.weight"][order]}
    arrays, expected = loaded(folders.write(tmp_path / "moved", config, moved)), expected_head(tensors)
    assert rows_by_target_id(arrays) == rows_by_target_id(expected)
    vocabulary = ("draft_to_target", "head")
    assert_same(without(arrays, *vocabulary), without(expected, *vocabulary))
    # Negative control: ids permuted without their rows lead to another map.
    wrong = loaded(folders.write(tmp_path / "wrong", config, written | {"d2t": offsets}))
    assert rows_by_target_id(wrong) != rows_by_target_id(expected)


# ---- tensors of every option


def test_eagle3_head_with_optional_tensors_loads_them_or_raises_if_one_lacks(tmp_path):
    config = {**TARGET, "model_type": "qwen3", "num_hidden_layers": 2, "draft_vocab_size": 10, "head_dim": 8}
    options = {"target_hidden_size": 20, "fc_norm": True, "norm_output": True, "qkv_bias": True, IDS: [0, 1, 2, 3]}
    outer = wrapped(config, **options)
    outer["transformer_layer_config"]["num_hidden_layers"] = 2
    shapes = folders.block_shapes("layers.0", config, 32) | folders.block_shapes("layers.1", config, 16)
    shapes |= {"fc.weight": (16, 80), "layers.1.input_layernorm.weight": (16,)}
    shapes |= {f"layers.{i}.self_attn.{part}_norm.weight": (8,) for i in range(2) for part in "qk"}
    biases = {"q": 32, "k": 16, "v": 16}
    shapes |= {f"layers.{i}.self_attn.{part}_proj.bias": (biases[part],) for i in range(2) for part in "qkv"}
    shapes |= {f"fc_norm.{i}.weight": (20,) for i in range(4)}
    tensors = in_layers(folders.head_tensors()) | random_tensors(shapes)
    expected = {
        "fc": tensors["fc.weight"],
        "fc_norm": np.stack([tensors[f"fc_norm.{i}.weight"] for i in range(4)]),
        "layers.0.hidden_norm": tensors["layers.0.hidden_norm.weight"],
        "norm": tensors["norm.weight"],
        "head": tensors["lm_head.weight"],
        "draft_to_target": DRAFT_IDS.astype(np.int32),
    }
    for i in range(2):
        to, attention = f"layers.{i}", f"layers.{i}.self_attn"
        expected |= block(tensors, to, to)
        expected[f"{to}.input_norm"] = tensors[f"{to}.input_layernorm.weight"]
        expected[f"{to}.qkv_bias"] = np.concatenate([tensors[f"{attention}.{part}_proj.bias"] for part in "qkv"])
        expected |= {f"{to}.{part}_norm": tensors[f"{attention}.{part}_norm.weight"] for part in "qk"}
    assert_same(loaded(folders.write(tmp_path / "whole", outer, tensors)), expected)
    for name in tensors.keys() - {"t2d"}:
        with pytest.raises(ValueError, match=rf"missing: {name}[;)]"):
            auto.plan(folders.write(tmp_path / "part", outer, without(tensors, name)))


def test_eagle3_head_with_norm_before_fc_loads_the_input_norm(tmp_path):
    tensors = folders.head_tensors() | random_tensors({"input_norm.weight": (48,)})
    arrays = loaded(folders.write(tmp_path, {**HEAD, "eagle_config": {"norm_before_fc": True}}, tensors))
    assert_same(arrays, expected_head(tensors) | {"input_norm": tensors["input_norm.weight"]})


def test_eagle3_head_without_fusion_loads_but_raises_if_fc_is_present(tmp_path):
    config = {**HEAD, "eagle_config": {"use_aux_hidden_state": False}}
    tensors = folders.head_tensors()
    arrays = loaded(folders.write(tmp_path / "a", config, without(tensors, "fc.weight")))
    assert_same(arrays, without(expected_head(tensors), "fc"))
    with pytest.raises(ValueError, match=r"unknown: fc\.weight"):
        auto.plan(folders.write(tmp_path / "b", config, tensors))


@pytest.mark.parametrize("states", [(1, 2), (1, 2, 3, 4)])
def test_eagle3_head_with_wrong_number_of_feature_layers_raises(tmp_path, states):
    folder = folders.write(tmp_path, HEAD, folders.head_tensors())
    with pytest.raises(ValueError, match=r"fc\.weight \(expected \(16, \d+\), got \(16, 48\)\)"):
        loaded(folder, feature_layers=states)


# ---- EAGLE-1 and 2


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"num_hidden_layers": 2}, {"qkv_bias": True}], ids=str)
@pytest.mark.parametrize("form", ["official", "with embedding", "vllm"])
def test_eagle1_head_of_each_format_loads_its_tensors(tmp_path, changes, form):
    config = {**EAGLE, **changes}
    tensors = folders.eagle_tensors(config)
    if changes.get("qkv_bias"):
        widths = zip("qkv", (16, 8, 8), strict=True)
        tensors |= random_tensors({f"layers.0.self_attn.{part}_proj.bias": (width,) for part, width in widths})
    expected = {"fc": tensors["fc.weight"], **block(tensors, "layers.0", "layers.0")}
    if changes.get("bias", True):
        expected["fc_bias"] = tensors["fc.bias"]
    if changes.get("num_hidden_layers"):
        expected |= block(tensors, "layers.1", "layers.1")
        expected["layers.1.input_norm"] = tensors["layers.1.input_layernorm.weight"]
    if changes.get("qkv_bias"):
        biases = [tensors[f"layers.0.self_attn.{part}_proj.bias"] for part in "qkv"]
        expected["layers.0.qkv_bias"] = np.concatenate(biases)
    if form == "with embedding":
        tensors |= random_tensors({"embed_tokens.weight": (40, 16)})
        expected["embed"] = tensors["embed_tokens.weight"]
    if form == "vllm":
        tensors = {name if name.startswith("fc.") else f"model.{name}": t for name, t in tensors.items()}
        config = {"model_type": "eagle", "model": config, "eagle_fc_bias": changes.get("bias", True)}
    folder = folders.write(tmp_path, config, tensors)
    assert auto.plan(folder).kind == "eagle"
    assert_same(loaded(folder), expected)


def test_eagle1_recorded_head_loads_the_stored_tensors(golden):
    tensors = stored(golden / "eagle1" / "draft")
    plan = auto.plan(golden / "eagle1" / "draft")
    expected = {"fc": tensors["fc.weight"], "fc_bias": tensors["fc.bias"], **block(tensors, "layers.0", "layers.0")}
    assert_same(loaded(plan.folder), expected)
    assert (plan.kind, plan.config.feature_layers, plan.config.num_features) == ("eagle", None, 1)


@pytest.mark.parametrize("name", ["lm_head.weight", "layers.0.input_layernorm.weight", "norm.weight"])
def test_eagle1_head_with_extra_tensor_raises_naming_the_tensor(tmp_path, name):
    tensors = folders.eagle_tensors() | random_tensors({name: (40, 16) if "lm_head" in name else (16,)})
    with pytest.raises(ValueError, match=f"unknown: {name}"):
        auto.plan(folders.write(tmp_path, EAGLE, tensors))


# ---- kinds


@pytest.mark.parametrize(
    ("config", "extra", "named"),
    [
        ({"speculators_model_type": "dspine"}, "", "speculators_model_type 'dspine'"),
        ({"pard_token": 7}, "", "PARD"),
        ({"architectures": ["DSpineDraftModel"]}, "", "DSpine"),
        ({"architectures": ["DominoDraftModel"]}, "", "Domino"),
        ({}, "parallel_draft_heads.0.lm_head.weight", "parallel draft heads"),
        ({}, "medusa_head.0.0.linear.weight", "Medusa-2"),
        ({}, "mtp.fc.weight", "MTP"),
        ({}, "model.layers.3.eh_proj.weight", "MTP"),
    ],
)
def test_conversion_plan_of_unsupported_draft_method_raises_naming_the_method(tmp_path, config, extra, named):
    tensors = folders.head_tensors() | ({extra: np.zeros(3, np.float32)} if extra else {})
    with pytest.raises(NotImplementedError, match=named):
        auto.plan(folders.write(tmp_path, {**HEAD, **config}, tensors))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("target", {"feature_layers": (1, 2, 3)}),
        ("target", {"norm_output": False}),
        ("eagle", {"norm_before_residual": True}),
        ("eagle", {"norm_output": True}),
        ("medusa", {"rope_theta": 1e4}),
    ],
)
def test_conversion_plan_with_override_of_an_absent_field_raises(tmp_path, kind, given):
    config, tensors = {
        "target": (TARGET, folders.target_tensors()),
        "eagle": (EAGLE, folders.eagle_tensors()),
        "medusa": ({}, folders.medusa_tensors()),
    }[kind]
    folder = folders.write(tmp_path, config, tensors)
    assert auto.plan(folder).kind == kind
    with pytest.raises(ValueError, match=f"{next(iter(given))}: .*'{kind}'"):
        loaded(folder, **given)


# ---- the vocabulary map


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_vocabulary_map_of_offsets_in_any_order_contains_target_ids(tmp_path, order):
    ids = DRAFT_IDS if order == "ascending" else np.random.default_rng(1).permutation(DRAFT_IDS)
    tensors = folders.head_tensors() | folders.vocabulary(ids)
    assert loaded(folders.write(tmp_path, HEAD, tensors))["draft_to_target"].tolist() == ids.tolist()


@pytest.mark.parametrize("member", [True, False])
def test_whole_vocabulary_head_without_offsets_maps_each_id_to_itself(tmp_path, member):
    config = {**HEAD, "draft_vocab_size": 40}
    tensors = folders.head_tensors() | {"lm_head.weight": np.zeros((40, 16), np.float32)}
    del tensors["d2t"], tensors["t2d"]
    if member:
        tensors["t2d"] = np.ones(40, bool)
    assert loaded(folders.write(tmp_path, config, tensors))["draft_to_target"].tolist() == list(range(40))


def test_whole_vocabulary_head_without_output_head_loads(tmp_path):
    tensors = without(folders.head_tensors(), "lm_head.weight", "d2t", "t2d")
    arrays = loaded(folders.write(tmp_path / "whole", {**HEAD, "draft_vocab_size": 40}, tensors))
    assert "head" not in arrays
    assert arrays["draft_to_target"].tolist() == list(range(40))
    with pytest.raises(ValueError, match=r"missing: d2t, lm_head\.weight"):
        auto.plan(folders.write(tmp_path / "part", HEAD, tensors))


def test_whole_vocabulary_head_with_permuted_ids_keeps_the_permutation(tmp_path):
    ids = np.random.default_rng(2).permutation(40)
    tensors = folders.head_tensors() | {"lm_head.weight": np.zeros((40, 16), np.float32)} | folders.vocabulary(ids)
    arrays = loaded(folders.write(tmp_path, {**HEAD, "draft_vocab_size": 40}, tensors))
    assert arrays["draft_to_target"].tolist() == ids.tolist()


def wrong_vocabularies() -> dict[str, tuple[dict[str, np.ndarray], str]]:
    good = folders.vocabulary(DRAFT_IDS)
    moved = np.roll(good["t2d"], 1)
    return {
        "absolute ids read as offsets": ({"d2t": DRAFT_IDS}, "0..39"),
        "negative": ({"d2t": good["d2t"] - 5}, "-2"),
        "repeated": ({"d2t": good["d2t"] + (np.arange(10) == 3)}, "t2d|repeated"),
        "two to one": ({"d2t": np.where(np.arange(10) == 1, 2, good["d2t"])}, "1 repeated"),
        "another t2d": ({"t2d": moved}, "t2d"),
        "rounded": ({"d2t": good["d2t"].astype(np.float32)}, "integers"),
    }


@pytest.mark.parametrize("case", wrong_vocabularies())
def test_vocabulary_map_with_a_fault_raises_naming_it(tmp_path, case):
    change, named = wrong_vocabularies()[case]
    with pytest.raises(ValueError, match=named):
        loaded(folders.write(tmp_path, HEAD, folders.head_tensors() | change))
