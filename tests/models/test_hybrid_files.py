"""Test files of hybrid models as they are published: image encoders, experts stored together, quantised weights."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec import Model
from jspec.models import families
from jspec.models.weights.quantize import quantized_as
from jspec.tools.convert import main
from jspec.tools.testing import last_logits
from tests.support import folders, int4_folders, quantized_folders, tiny
from tests.support.recordings import recording

pytestmark = pytest.mark.once

FOLDERS = Path(__file__).parents[1] / "data" / "golden" / "families"
HYBRID = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h")
TOLERANCE = 2e-4  # both sides use float32 but add up in different orders
IMAGES = {"model.visual.patch_embed.proj.weight": np.zeros((3, 3), np.float32)}
LATER = {"mtp.fc.weight": np.zeros((2, 4), np.float32), "mtp.norm.weight": np.zeros(2, np.float32)}
Tensors = dict[str, np.ndarray]


def recorded(family: str) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors of a recorded model, of a language model alone."""
    folder = FOLDERS / family
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if family == "gemma4_e2b":
        return config, folders.with_keys_that_no_layer_reads(tensors)
    if "text_config" not in config:
        return config, tensors
    bare = {name.replace("language_model.", "", 1): v for name, v in tensors.items() if "model.vision" not in name}
    return config["text_config"], bare


def logit_error(model: Model, family: str) -> float:
    """Return the largest difference from the recorded logits after two prompts."""
    data = recording(FOLDERS / family / "expect.npz")
    pairs = [(last_logits(model, data[f"prompt{i}"].tolist()), data[f"logits{i}"][-1]) for i in (1, 2)]
    return float(max(np.abs(ours - wanted).max() for ours, wanted in pairs))


def together(tensors: Tensors) -> Tensors:
    """Return tensors with the weights of all experts of a layer together, gates above ups."""
    joined = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in sorted({name.partition(".experts.")[0] for name in tensors.keys() - joined.keys()}):
        count = len({name for name in tensors if name.startswith(f"{layer}.experts.") and "down" in name})
        gate, up, down = (
            np.stack([tensors[f"{layer}.experts.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        joined |= {f"{layer}.experts.gate_up_proj": np.concatenate([gate, up], axis=1)}
        joined |= {f"{layer}.experts.down_proj": down}
    return joined


def with_images(config: dict[str, Any], tensors: Tensors, **outer: Any) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors of a model with an image encoder and a layer that predicts further tokens."""
    named = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    kind = config["model_type"].removesuffix("_text")
    text = {**config, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    return {"model_type": kind, "text_config": text, "vision_config": {}, **outer}, named | IMAGES | LATER


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_published_folder_with_an_image_encoder_and_experts_together_has_the_recorded_logits(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, tensors = recorded(family)
    rope = config.pop("rope_parameters")
    interval = len(config.pop("layer_types"))  # the last layer has attention
    config |= {"full_attention_interval": interval, "rope_theta": rope["rope_theta"], "mamba_ssm_dtype": "float32"}
    config |= {"attn_output_gate": True, "rope_scaling": None}
    del config["linear_conv_kernel_dim"]  # 4 is the default
    folders.write(tmp_path, *with_images(config, together(tensors), image_token_id=3, tie_word_embeddings=False))
    with caplog.at_level("INFO"):
        model = tiny.load_target(tmp_path)
    left_out = [record.message for record in caplog.records if "left out" in record.message]
    assert ["1 tensors for images" in left_out[0], "2 tensors that predict" in left_out[1], len(left_out)] == [1, 1, 2]
    assert logit_error(model, family) < TOLERANCE


def test_experts_of_qwen3_next_stored_together_are_those_stored_one_by_one(tmp_path: Path) -> None:
    config, tensors = recorded("qwen3_next")
    folders.write(tmp_path, config, together(tensors) | LATER)
    loaded, wanted = (jax.tree.leaves(tiny.load_target(folder)) for folder in (tmp_path, FOLDERS / "qwen3_next"))
    assert all(np.array_equal(ours, other) for ours, other in zip(loaded, wanted, strict=True))


@pytest.mark.parametrize(("inner", "outer"), [(True, None), (None, True), (False, True), (True, False)])
def test_embedding_is_tied_if_either_part_of_a_config_ties_it(
    inner: bool | None, outer: bool | None, tmp_path: Path
) -> None:
    config, tensors = recorded("qwen3_5_text")
    head = tensors.pop("lm_head.weight")
    config["tie_word_embeddings"] = inner
    folders.write(tmp_path, *with_images(config, tensors, tie_word_embeddings=outer))
    model = Model.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings and model.head is None
    folders.write(tmp_path, *with_images(config, tensors | {"lm_head.weight": head}, tie_word_embeddings=outer))
    with pytest.raises(ValueError, match=r"expected the values of .*embed_tokens\.weight, to which it is tied"):
        Model.from_pretrained(tmp_path)


@pytest.mark.parametrize("family", HYBRID)
def test_keys_that_a_config_leaves_out_have_the_values_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the defaults are those of its classes")
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8}
    fields = {**sizes, "num_attention_heads": 8, "rms_norm_eps": 1e-6, "model_type": family}
    fields |= {"layer_types": ["conv", "full_attention"] * 4} if family == "lfm2_moe" else {}
    if family == "nemotron_h":
        fields |= {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2}
    theirs = transformers.CONFIG_MAPPING[family](**folders.without(fields, "model_type")).to_dict()
    assert families.read_config(fields) == families.read_config({**theirs, "model_type": family})
    assert families.read_config(fields) != families.read_config({**theirs, "max_position_embeddings": 7})


# ---- quantised weights

WIDE = (
    "in_proj_a.",
    "in_proj_b.",
    "in_proj_ba.",
    "mlp.gate.",
    "shared_expert_gate",
    "feed_forward.gate.",
    "block_sparse_moe.gate.",
    "mixer.gate.",
)
FLOAT8 = [
    ("qwen3_5_text", "fp8 by block", ()),
    ("qwen3_5_text", "compressed-tensors by row", ()),
    ("qwen3_5_moe_text", "compressed-tensors by row", ()),
    ("qwen3_5_moe_text", "fp8 by block", ()),
    ("qwen3_next", "fp8 by block", ()),
    ("qwen3_next", "modelopt", ()),
    ("lfm2", "fp8 by tensor", ()),
    ("gemma4_text", "compressed-tensors by row", ()),  # rows of keys are those of values, and are reordered
    ("gemma4_e2b", "compressed-tensors by row", ("embed_tokens",)),  # layers with queries alone
    ("gemma4_26b_a4b", "compressed-tensors by row", ("router",)),  # experts beside a dense path
    ("glm4_moe", "compressed-tensors by row", ("layers.2.",)),  # a shared expert without a gate
    ("glm4_moe_lite", "fp8 by block", ()),
    pytest.param("minimax_m2", "fp8 by block", (), marks=pytest.mark.long),
    pytest.param("muse_glimmer", "fp8 by block", (), marks=pytest.mark.long),
    ("laguna", "fp8 by block", ()),
    ("nemotron_h", "modelopt", ()),
    pytest.param("nemotron_h", "fp8 by block", (), marks=pytest.mark.long),
]
INT4 = [
    ("qwen3_5_text", "awq", ()),
    ("qwen3_5_moe_text", "gptq", ()),
    ("qwen3_next", "compressed-tensors with zero points", ()),
    ("lfm2_moe", "awq", ()),
    pytest.param("glm4_moe_lite", "awq", (), marks=pytest.mark.long),
    ("muse_glimmer", "gptq", ()),
    ("nemotron_h", "awq", ("in_proj", "down_proj")),  # whose rows or columns are no multiple of a word or a group
    pytest.param("laguna", "compressed-tensors", (), marks=pytest.mark.long),
    ("gemma4_e2b", "awq", ("embed_tokens", "down_proj", "per_layer_projection")),
]
GATES = [("qwen3_5_text", "fp8 by block"), ("qwen3_next", "fp8 by tensor"), ("qwen3_5_text", "compressed-tensors")]


def quantised(
    family: str, form: str, kept: Collection[str], folder: Path, *, has_images: bool = False
) -> tuple[Path, Path]:
    """Write a quantised model, and the one with the weights that it stands for, to two folders."""
    config, plain = recorded(family)
    support: Any = quantized_folders if form in quantized_folders.FORMATS else int4_folders
    stored, wide = support.quantised(support.FORMATS[form], kept, plain)
    scheme = dict(support.FORMATS[form].config)
    modules = [name.removesuffix(".weight") for name in stored if stored[name] is plain.get(name)]
    if has_images:
        modules = [name.replace("model.", "model.language_model.", 1) for name in modules]
    modules += ["model.visual.patch_embed.proj", "mtp.fc"]
    if form.startswith("gptq"):
        scheme |= {"dynamic": {"lm_head": {}, **{f"-:.*{part.rstrip('.')}$": {} for part in kept}, "-:.*visual.*": {}}}
    else:
        scheme |= {"ignore" if "ignore" in scheme else "modules_to_not_convert": modules}
    written = with_images(config, stored, quantization_config=scheme) if has_images else None
    folders.write(folder / "wide", config, wide)
    return folders.write(folder, *(written or ({**config, "quantization_config": scheme}, stored))), folder / "wide"


def assert_widened(stored: Path, wide: Path, kind: str) -> None:
    """Assert that a quantised folder has the logits of the wide one, and its weights bit by bit if they are widened."""
    ids = recording(FOLDERS / "llama" / "expect.npz")["prompt1"].tolist()
    plain, model = tiny.load_target(wide), Model.from_pretrained(stored, dtype="float32")
    assert quantized_as(model) in (("int4",) if kind == "int4" else ("fp8", "fp8_dynamic"))
    exact, wanted = model if kind == "int4" else quantized_folders.unrounded(model), last_logits(plain, ids)
    np.testing.assert_allclose(last_logits(exact, ids), wanted, atol=TOLERANCE)
    if quantized_as(model) == "fp8_dynamic":
        assert 100 * TOLERANCE < np.abs(last_logits(model, ids) - wanted).max() < 5, "activations are rounded"
    leaves = (jax.tree.leaves(Model.from_pretrained(stored, dtype="float32", quantize="none")), jax.tree.leaves(plain))
    assert all(np.array_equal(ours, other) for ours, other in zip(*leaves, strict=True))


@pytest.mark.parametrize(("family", "form", "kept"), [*FLOAT8, *INT4])
def test_quantised_folder_has_the_logits_of_the_weights_that_it_stands_for(
    family: str, form: str, kept: tuple[str, ...], tmp_path: Path
) -> None:
    kind = "fp8" if form in quantized_folders.FORMATS else "int4"
    folders_ = quantised(family, form, (*WIDE, *kept), tmp_path, has_images=family.endswith("_text"))
    assert_widened(*folders_, kind)
    assert logit_error(tiny.load_target(folders_[1]), family) > 100 * TOLERANCE, "control: the weights are rounded"


@pytest.mark.parametrize(("family", "form"), GATES)
def test_quantised_rates_and_decays_are_widened_also_when_the_folder_is_converted(
    family: str, form: str, tmp_path: Path
) -> None:
    stored, wide = quantised(family, form, ("mlp.gate.", "shared_expert_gate", ".experts."), tmp_path)
    assert_widened(stored, wide, "fp8" if form in quantized_folders.FORMATS else "int4")
    assert main([str(stored), str(tmp_path / "converted")]) == 0
    leaves = (
        jax.tree.leaves(Model.from_pretrained(path, dtype="float32")) for path in (stored, tmp_path / "converted")
    )
    assert all(np.array_equal(ours, other) for ours, other in zip(*leaves, strict=True))


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ("in_proj_z.", r"qkv: expected all of its parts quantised, or none, got '.*in_proj_z.weight unquantised"),
        ("in_proj_a.", r"gates: expected all of its parts quantised, or none, got '.*in_proj_a.weight unquantised"),
        ("k_proj.", r"qkv: expected all of its parts quantised, or none, got '.*k_proj.weight unquantised"),
    ],
)
def test_projection_of_which_a_part_is_quantised_is_refused_by_name(kept: str, words: str, tmp_path: Path) -> None:
    folder, _ = quantised("qwen3_5_text", "fp8 by block", (kept,), tmp_path)
    with pytest.raises(NotImplementedError, match=words):
        Model.from_pretrained(folder)


@pytest.mark.parametrize("gate", ["mlp.gate.weight", "mlp.shared_expert_gate.weight"])
def test_quantised_gate_of_experts_is_refused_by_name(gate: str, tmp_path: Path) -> None:
    kept = [part for part in WIDE if part.rstrip(".") not in gate]
    folder, _ = quantised("qwen3_5_moe_text", "compressed-tensors by row", kept, tmp_path)
    with pytest.raises(NotImplementedError, match=f"{gate}"):
        Model.from_pretrained(folder)
