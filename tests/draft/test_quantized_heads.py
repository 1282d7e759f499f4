"""Compare heads whose files have float8 weights with the formulas on the weights that these stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import DFlash, Eagle3, PEagle
from jspec.models.weights.quantize import quantized_as
from jspec.tools import info
from jspec.tools.convert import main
from tests.draft import test_dflash, test_head_options, test_peagle
from tests.reference import dflash, head
from tests.support import folders, quantized_folders
from tests.support.quantized_folders import FORMATS, Tensors
from tests.support.recordings import TOLERANCE, recording

pytestmark = pytest.mark.once


def eagle3(golden: Path) -> tuple[dict[str, Any], Tensors, Callable[[Path], Any], Callable[[Tensors], np.ndarray]]:
    config, text = test_head_options.SIZES, test_head_options.material(48)
    return (
        config,
        test_head_options.tensors_of(config, set()),
        lambda folder: test_head_options.computed(Eagle3.from_pretrained(folder).head, *text),
        lambda tensors: test_head_options.expected(config, tensors, *text),
    )


def peagle(golden: Path) -> tuple[dict[str, Any], Tensors, Callable[[Path], Any], Callable[[Tensors], np.ndarray]]:
    folder, recorded = golden / "peagle/specforge/draft", recording(golden / "peagle/specforge/block5.npz")
    config = {**json.loads((folder / "config.json").read_text()), "mask_token_id": 39, "rope_theta": 1e6}
    text = recorded["tokens"], recorded["features"], 5
    return (
        config,
        folders.stored(folder),
        lambda folder: test_peagle.computed(PEagle.from_pretrained(folder), *text),
        lambda tensors: head.peagle(config, tensors, *text, 39),
    )


def dflash_head(golden: Path) -> tuple[dict[str, Any], Tensors, Callable[[Path], Any], Callable[[Tensors], np.ndarray]]:
    config, states, model = test_dflash.CONFIG, test_dflash.states(), test_dflash.target()
    embed, output = np.asarray(model.embed), np.asarray(model.output_head, np.float64)
    return (
        config,
        test_dflash.tensors_of(),
        lambda folder: test_dflash.computed(DFlash.from_pretrained(folder, tree="chain:5"), model, states),
        lambda tensors: dflash.block_logits(config, tensors, embed, states, test_dflash.ROOT, 5, output=output),
    )


HEADS = {"eagle3": eagle3, "peagle": peagle, "dflash": dflash_head}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("eagle3", "modelopt"),
        ("eagle3", "compressed-tensors by row"),
        ("peagle", "compressed-tensors by tensor"),
        ("peagle", "fp8 by block"),
        ("dflash", "modelopt"),
        ("dflash", "fp8 by block"),
    ],
)
def test_head_with_stored_float8_weights_computes_with_the_weights_that_they_stand_for(
    tmp_path: Path, golden: Path, name: str, form: str
) -> None:
    """The converted folder computes the same. Negative control: the weights before they were rounded to float8.

    No file asks for dynamic activations, which would be rounded (`tests/models/test_fp8_checkpoints.py`).
    """
    config, plain, computed, expected = HEADS[name](golden)
    stored, wide = quantized_folders.quantised(FORMATS[form], plain=plain)
    scheme = json.loads(json.dumps(FORMATS[form].config).replace('"dynamic": true', '"dynamic": false'))
    folder = folders.write(tmp_path / "file", {**config, "quantization_config": scheme}, stored)
    found, right = computed(folder), expected(wide)
    largest = np.abs(right).max()
    np.testing.assert_allclose(found, right, atol=TOLERANCE * largest)
    assert np.abs(found - expected(plain)).max() > 20 * TOLERANCE * largest
    assert "quantised: fp8" in info.describe(folder)
    assert main([str(folder), str(tmp_path / "converted")]) == 0
    np.testing.assert_array_equal(computed(tmp_path / "converted"), found)


def test_head_with_an_unsupported_quantisation_raises_naming_what_is_supported(tmp_path: Path) -> None:
    config = {**test_head_options.SIZES, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    folder = folders.write(tmp_path, config, test_head_options.tensors_of(config, set()))
    with pytest.raises(
        NotImplementedError, match=r"quantization_config: expected float8 weights of .*, got .*bitsandbytes"
    ):
        Eagle3.from_pretrained(folder)


def test_head_with_stored_float8_weights_keeps_them_unless_another_kind_is_asked_for(tmp_path: Path) -> None:
    form, config = FORMATS["modelopt"], test_head_options.SIZES
    stored, _ = quantized_folders.quantised(form, plain=test_head_options.tensors_of(config, set()))
    folder = folders.write(tmp_path, {**config, "quantization_config": form.config}, stored)
    assert quantized_as(Eagle3.from_pretrained(folder).head) == "fp8"
    assert quantized_as(Eagle3.from_pretrained(folder, quantize="fp8_dynamic").head) == "fp8_dynamic"
    with pytest.raises(ValueError, match="quantize"):
        Eagle3.from_pretrained(folder, quantize="int8")
