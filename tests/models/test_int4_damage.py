"""Test that damaged 4-bit checkpoints, and those that contradict their config, raise errors that name the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.fields import CheckpointError
from jspec import Model
from tests.support import folders
from tests.support import int4_folders as made
from tests.support.int4_folders import CONFIG, FORMATS

pytestmark = pytest.mark.once

O_PROJ = "model.layers.1.self_attn.o_proj"


def _with(array: np.ndarray, value: float) -> np.ndarray:
    wrong = array.copy()
    wrong.reshape(-1)[-1] = value
    return wrong


# format, end of the tensor's name, function of its values (None: the tensor is missing), message
DAMAGES: dict[str, tuple[str, str, Any, str]] = {
    "no zero points": ("gptq", "qzeros", None, rf"missing: {O_PROJ}\.qzeros"),
    "no scales": ("awq", "scales", None, rf"missing: {O_PROJ}\.scales"),
    "no packed values": ("compressed-tensors", "weight_packed", None, rf"missing: {O_PROJ}\.weight_packed"),
    "values of another width": (
        "gptq", "qweight", lambda a: a[:-1], rf"{O_PROJ}\.qweight \(expected \(8, 64\), got \(7, 64\)\)",
    ),
    "values of another dtype": (
        "awq", "qweight", lambda a: a.astype(np.int64), rf"{O_PROJ}\.qweight': expected int32, got int64",
    ),
    "values as floats": (
        "awq", "qzeros", lambda a: a.astype(np.float32), rf"not integers: {O_PROJ}\.qzeros \(float32\)",
    ),
    "scales of another grid": (
        "gptq", "scales", lambda a: a.T.copy(), rf"{O_PROJ}\.scales \(expected \(4, 64\), got \(64, 4\)\)",
    ),
    "scales of whole numbers": (
        "gptq", "scales", lambda a: a.astype(np.int32), rf"not floating point: {O_PROJ}\.scales \(int32\)",
    ),
    "NaN": (
        "awq", "scales", lambda a: _with(a, np.nan),
        rf"model\.safetensors: '{O_PROJ}\.scales': expected finite scales, got nan \(.*: 1\)",
    ),
    "negative infinity": (
        "compressed-tensors", "weight_scale", lambda a: _with(a, -np.inf),
        r"expected finite scales, got -inf \(.*: 1\)",
    ),
    "a group that does not exist": (
        "gptq", "g_idx", lambda a: _with(a, 4), rf"{O_PROJ}\.g_idx': expected groups from 0 to 3, got 4; download",
    ),
    "another shape": (
        "compressed-tensors", "weight_shape", lambda a: a + 8,
        rf"{O_PROJ}\.weight_shape': expected the shape \[64, 64\], got \[72, 72\]; download",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_4_bit_checkpoint_raises_naming_folder_and_tensor(damage: str, tmp_path: Path) -> None:
    name, end, change, message = DAMAGES[damage]
    stored, _ = made.quantised(FORMATS[name])
    tensor = f"{O_PROJ}.{end}"
    stored = folders.without(stored, tensor) if change is None else {**stored, tensor: change(stored[tensor])}
    folder = made.write(tmp_path / "int4", FORMATS[name], stored)
    for quantize in (None, "none"):
        with pytest.raises((CheckpointError, NotImplementedError), match=message) as error:
            Model.from_pretrained(folder, quantize=quantize)
        assert str(folder) in str(error.value)


def test_4_bit_checkpoint_whose_tensors_contradict_its_config_raises_naming_them(tmp_path: Path) -> None:
    stored, wide = made.quantised(FORMATS["awq"])
    with pytest.raises(ValueError, match=r"wrong shape: .*qweight \(expected \(12, 64\), got \(96, 8\)\)"):
        Model.from_pretrained(made.write(tmp_path / "gptq", FORMATS["gptq"], stored))
    with pytest.raises(NotImplementedError, match="group_size: expected a divisor of its 64 input channels, got 24"):
        Model.from_pretrained(made.write(tmp_path / "size", FORMATS["awq"], stored, group_size=24))
    with pytest.raises(ValueError, match=r"wrong shape: .*scales \(expected \(3, 64\), got \(6, 64\)\)"):
        Model.from_pretrained(made.write(tmp_path / "group", FORMATS["awq"], stored, group_size=32))
    with pytest.raises(
        CheckpointError, match=r"'model.layers.0.self_attn.q_proj.weight': expected an unquantised weight"
    ):
        Model.from_pretrained(
            made.write(tmp_path / "excluded", FORMATS["awq"], stored, modules_to_not_convert=["model.layers"])
        )
    with pytest.raises(CheckpointError, match=r"expected 4-bit weights \(awq\), got none; delete quantization_config"):
        Model.from_pretrained(made.write(tmp_path / "none", FORMATS["awq"], wide))
    q = "model.layers.0.self_attn.q_proj"
    mixed = {name: tensor for name, tensor in stored.items() if not name.startswith(q)}
    mixed[f"{q}.weight"] = wide[f"{q}.weight"]
    with pytest.raises(NotImplementedError, match=rf"layers\.0\.qkv: expected all .* or none, got '{q}\.weight unquan"):
        Model.from_pretrained(made.write(tmp_path / "mixed", FORMATS["awq"], mixed))
    with pytest.raises(ValueError, match=r"unknown: .*qweight"):
        Model.from_pretrained(folders.write(tmp_path / "silent", CONFIG, stored))
