"""Test files of Medusa heads in both formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.draft import auto
from jspec.draft.medusa import MedusaConfig
from tests.support import folders
from tests.support.folders import TARGET, assert_same, loaded, stored, without

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("heads", "layers"), [(1, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_medusa_heads_with_a_wrong_config_have_the_counts_of_the_tensors(tmp_path, heads, layers, form):
    tensors = folders.medusa_tensors(heads, layers)
    write_medusa(tmp_path, tensors, form)
    expected = {f"heads.{h}.output": tensors[f"{h}.{layers}.weight"] for h in range(heads)}
    for h in range(heads):
        for i in range(layers):
            expected[f"heads.{h}.blocks.{i}.weight"] = tensors[f"{h}.{i}.linear.weight"]
            expected[f"heads.{h}.blocks.{i}.bias"] = tensors[f"{h}.{i}.linear.bias"]
    assert_same(loaded(tmp_path), expected)
    plan = auto.plan(tmp_path)
    assert (plan.kind, plan.config) == ("medusa", MedusaConfig(40, 16, heads, layers, "official"))


def write_medusa(folder: Path, tensors: dict[str, np.ndarray], form: str) -> None:
    (folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    if form == "safetensors":
        save_file(tensors, folder / "medusa_lm_head.safetensors")
        return
    torch = pytest.importorskip("torch", reason="writes a .pt file")
    torch.save({name: torch.tensor(t) for name, t in tensors.items()}, folder / "medusa_lm_head.pt")


def test_medusa_heads_of_the_recordings_load_the_stored_tensors(golden):
    tensors, arrays = stored(golden / "medusa" / "heads"), loaded(golden / "medusa" / "heads")
    assert auto.plan(golden / "medusa" / "heads").config == MedusaConfig(256, 64, 3, 1)
    assert len(arrays) == len(tensors) == 9
    for h in range(3):
        assert arrays[f"heads.{h}.blocks.0.weight"].tobytes() == tensors[f"{h}.0.linear.weight"].tobytes()
        assert arrays[f"heads.{h}.blocks.0.bias"].tobytes() == tensors[f"{h}.0.linear.bias"].tobytes()
        assert arrays[f"heads.{h}.output"].tobytes() == tensors[f"{h}.1.weight"].tobytes()


def test_medusa_blocks_with_shared_memory_load_equal_tensors(tmp_path):
    torch = pytest.importorskip("torch", reason="writes a .pt file")
    state = {name: torch.tensor(t) for name, t in folders.medusa_tensors(1, 2).items()}
    state |= {f"0.1.linear.{part}": state[f"0.0.linear.{part}"] for part in ("weight", "bias")}
    (tmp_path / "config.json").write_text("{}")
    torch.save(state, tmp_path / "medusa_lm_head.pt")
    arrays = loaded(tmp_path)
    assert arrays["heads.0.blocks.0.weight"].tobytes() == arrays["heads.0.blocks.1.weight"].tobytes()


def test_medusa_heads_without_vocabulary_matrix_raise_naming_the_tensor(tmp_path):
    write_medusa(tmp_path, without(folders.medusa_tensors(), "0.1.weight"), "safetensors")
    with pytest.raises(ValueError, match=r"expected 0\.1\.weight.*incomplete"):
        auto.plan(tmp_path)


@pytest.mark.parametrize("about", [{"medusa_num_heads": 3}, TARGET], ids=["heads", "target"])
def test_conversion_plan_of_model_and_medusa_heads_takes_the_kind_from_config(tmp_path, about):
    folders.write(tmp_path, about, folders.target_tensors())
    save_file(folders.medusa_tensors(), tmp_path / "medusa_lm_head.safetensors")
    assert auto.plan(tmp_path).kind == ("target" if about is TARGET else "medusa")
