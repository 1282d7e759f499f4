"""Test that damaged float8 checkpoints, and those that contradict their config, raise errors that name the tensor."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from convert.fields import CheckpointError
from jspec import Model
from tests.support import folders
from tests.support import quantized_folders as made
from tests.support.quantized_folders import CONFIG, FORMATS

pytestmark = pytest.mark.once

BLOCKS = FORMATS["fp8 by block"]
O_PROJ = "model.layers.1.self_attn.o_proj"


def _as_e5m2(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).astype(ml_dtypes.float8_e5m2)


def _with_nan(array: np.ndarray) -> np.ndarray:
    wrong = array.copy()
    wrong[-1, 0] = np.nan
    return wrong


DAMAGES = {
    "no scales": ("weight_scale_inv", None, rf"missing: {O_PROJ}\.weight_scale_inv"),
    "scales of another grid": (
        "weight_scale_inv", lambda a: a.T.copy(), rf"{O_PROJ}\.weight_scale_inv \(expected \(2, 3\), got \(3, 2\)\)",
    ),
    "float8_e5m2": ("weight", _as_e5m2, rf"not float8_e4m3fn: {O_PROJ}\.weight \(float8_e5m2\)"),
    "unquantised beside scales": (
        "weight", lambda a: a.astype(np.float32), rf"not float8_e4m3fn: {O_PROJ}\.weight \(float32\)",
    ),
    "scales of whole numbers": (
        "weight_scale_inv", lambda a: a.astype(np.int32), rf"not floating point: {O_PROJ}\.weight_scale_inv \(int32\)",
    ),
    "NaN": (
        "weight_scale_inv", _with_nan,
        rf"model\.safetensors: '{O_PROJ}\.weight_scale_inv': expected finite scales from 0, got nan \(.*: 1\)",
    ),
    "negative": ("weight_scale_inv", lambda a: -a, r"expected finite scales from 0, got -.*\(.*: 6\)"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_float8_checkpoint_raises_naming_folder_and_tensor(damage: str, tmp_path: Path) -> None:
    end, change, message = DAMAGES[damage]
    stored, _ = made.quantised(BLOCKS)
    name = f"{O_PROJ}.{end}"
    stored = folders.without(stored, name) if change is None else {**stored, name: change(stored[name])}
    folder = made.write(tmp_path / "fp8", BLOCKS, stored)
    with pytest.raises(CheckpointError, match=message) as error:
        Model.from_pretrained(folder)
    assert str(folder) in str(error.value)


def test_nan_among_float8_values_warns_with_its_name(tmp_path: Path) -> None:
    stored, _ = made.quantised(BLOCKS)
    stored[f"{O_PROJ}.weight"][3, 4] = np.nan
    with pytest.warns(UserWarning, match=rf"NaN or infinity in {O_PROJ}\.weight \(1\)"):
        Model.from_pretrained(made.write(tmp_path / "fp8", BLOCKS, stored))


def test_checkpoint_whose_tensors_contradict_its_quantisation_raises_naming_them(tmp_path: Path) -> None:
    stored, wide = made.quantised(BLOCKS)
    q = "model.layers.0.self_attn.q_proj"
    mixed = {**folders.without(stored, f"{q}.weight_scale_inv"), f"{q}.weight": wide[f"{q}.weight"]}
    with pytest.raises(NotImplementedError, match=rf"layers\.0\.qkv: expected all .* or none, got '{q}\.weight unquan"):
        Model.from_pretrained(made.write(tmp_path / "mixed", BLOCKS, mixed))
    listed = made.write(tmp_path / "listed", BLOCKS, stored, modules_to_not_convert=["model.layers.0"])
    with pytest.raises(CheckpointError, match=rf"'{q}\.weight': expected an unquantised weight, as 'model\.layers\.0'"):
        Model.from_pretrained(listed)
    with pytest.raises(CheckpointError, match=r"expected float8 weights .*, got none; delete quantization_config"):
        Model.from_pretrained(made.write(tmp_path / "none", BLOCKS, wide))
    with pytest.raises(CheckpointError, match=r"not floating point: .*float8_e4m3fn"):
        Model.from_pretrained(folders.write(tmp_path / "silent", CONFIG, stored))
    embedding = {"model.embed_tokens.weight": stored["model.embed_tokens.weight"].astype(made.FLOAT8)}
    with pytest.raises(NotImplementedError, match="embed: expected an unquantised parameter"):
        Model.from_pretrained(made.write(tmp_path / "embedding", BLOCKS, stored | embedding))
    # The name of a module must match whole parts: layers.1 is not layers.10.
    Model.from_pretrained(made.write(tmp_path / "other", BLOCKS, stored, modules_to_not_convert=["layers.10", "o_pro"]))
