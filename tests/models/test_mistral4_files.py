"""Test files of Mistral Small 4 as they are published: beside an image encoder, in float8 with a scale a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Engine, Model, NGram, SamplingParams
from jspec.models.weights.quantize import quantized_as
from jspec.tools.convert import main
from jspec.tools.testing import last_logits
from tests.models.test_hybrid_files import FOLDERS, TOLERANCE, Tensors, logit_error, recorded
from tests.support import folders, tiny
from tests.support.quantized_folders import FLOAT8, is_linear
from tests.support.recordings import recording

pytestmark = pytest.mark.once

FAMILY = "mistral4"
WIDE = ("mlp.gate.", "lm_head")
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
SCHEME = {**STATIC, "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}
PROMPT = recording(FOLDERS / FAMILY / "expect.npz")["prompt1"].tolist()
IMAGES = ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight")


def with_images(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors of a folder with an image encoder."""
    named = {f"language_model.{name}": values for name, values in tensors.items()}
    outer = {"model_type": "mistral3", "image_token_index": 10, "vision_config": {"model_type": "pixtral"}}
    return {**outer, "text_config": config}, named | dict.fromkeys(IMAGES, np.zeros((3, 3), np.float32))


def by_part(values: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return float8 values, the scales of ``parts`` parts of the rows of each matrix, and what they stand for."""
    cut = values.reshape(*values.shape[:-2], parts, -1, values.shape[-1])
    scales = (np.abs(cut).max((-2, -1), keepdims=True) / 448).astype(np.float32)
    stored = (cut / scales).astype(FLOAT8)
    wide = (stored.astype(np.float32) * scales).reshape(values.shape)
    return stored.reshape(values.shape), scales[..., 0], wide


def quantised(tensors: Tensors, gate_parts: int) -> tuple[Tensors, Tensors]:
    """Return a file's tensors in float8, and those of the unquantised file that they stand for.

    ``gate_parts`` is 2 if the gate and the up of an expert have scales of their own.
    """
    stored, wide = dict(tensors), dict(tensors)
    for name, values in tensors.items():
        if ".experts." in name:
            stored[name], scales, wide[name] = by_part(values, gate_parts if "gate_up" in name else 1)
            stored |= {f"{name}_scale_inv": scales, f"{name}_activation_scale": np.full(len(values), np.float32(0.37))}
        elif is_linear(name, values, WIDE):
            stored[name], scales, wide[name] = by_part(values, 1)
            module = name.removesuffix(".weight")
            stored |= {f"{module}.weight_scale_inv": scales.reshape(())}
            stored |= {f"{module}.activation_scale": np.full((), np.float32(0.37))}
    return stored, wide


def test_language_model_of_a_folder_with_an_image_encoder_is_loaded_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders.write(tmp_path, *with_images(*recorded(FAMILY)))
    model = tiny.load_target(tmp_path)
    assert "2 tensors for images are left out" in caplog.text
    assert logit_error(model, FAMILY) < TOLERANCE


@pytest.mark.parametrize("gate_parts", [1, 2])
def test_float8_folder_with_a_scale_for_each_expert_has_the_logits_of_its_widened_weights(
    gate_parts: int, tmp_path: Path
) -> None:
    config, tensors = recorded(FAMILY)
    stored, wide = quantised(tensors, gate_parts)
    wanted = last_logits(tiny.load_target(folders.write(tmp_path / "wide", config, wide)), PROMPT)
    nested, named = with_images(config, stored)
    nested["quantization_config"] = SCHEME
    folder = folders.write(tmp_path / "published", nested, named)
    own, dequantized = (Model.from_pretrained(folder, dtype="float32", quantize=kind) for kind in (None, "none"))
    assert quantized_as(own) == "fp8" and quantized_as(dequantized) is None
    for model in (own, dequantized):
        np.testing.assert_allclose(last_logits(model, PROMPT), wanted, atol=TOLERANCE)
    moved = {name: np.roll(v, 1, 0) if name.endswith("experts.down_proj_scale_inv") else v for name, v in named.items()}
    other = Model.from_pretrained(folders.write(tmp_path / "moved", nested, moved), dtype="float32")
    assert np.abs(last_logits(other, PROMPT) - wanted).max() > 10 * TOLERANCE, "control: scales of other experts"
    del named["language_model.model.layers.1.mlp.experts.down_proj_scale_inv"]
    with pytest.raises(ValueError, match=r"missing: .*experts\.down_proj_scale"):
        Model.from_pretrained(folders.write(tmp_path / "missing", nested, named))


@pytest.mark.long
def test_engine_of_a_float8_folder_on_two_devices_drafts_the_tokens_of_one_without_a_drafter(tmp_path: Path) -> None:
    """The cache is float8, too; the converted folder emits the same tokens."""
    config, tensors = recorded(FAMILY)
    nested, named = with_images(config, quantised(tensors, 1)[0])
    folder = folders.write(tmp_path / "own", {**nested, "quantization_config": SCHEME}, named)
    assert main([str(folder), str(tmp_path / "converted")]) == 0
    options: dict[str, Any] = dict(
        slots=1, max_len=96, buckets=(1,), prefill_buckets=(32,), dtype="float32", eos_ids=()
    )
    options |= {"kv_dtype": "float8_e4m3fn"}
    found = []
    for place, drafter, devices in ((folder, None, 1), (tmp_path / "converted", NGram("chain:3"), 2)):
        with Engine.from_pretrained(place, drafter=drafter, tensor_parallel=devices, **options) as engine:
            (done,) = engine.generate(PROMPT, SamplingParams(max_tokens=48, temperature=0))
            found.append(done.token_ids)
    assert found[0] == found[1]
