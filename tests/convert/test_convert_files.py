"""Hugging Face folders with damaged, absent or dangerous files: every error names the file and the fault."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from jspec.draft import auto
from tests.support import folders
from tests.support.folders import TARGET, stored

pytestmark = pytest.mark.once

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def test_conversion_plan_truncated_safetensors_file_raises_naming_the_file(tmp_path):
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 300, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors.*complete.*again"):
            auto.plan(folder)


def test_conversion_plan_truncated_torch_file_raises_naming_the_file(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*complete.*again"):
        auto.plan(tmp_path)


def test_conversion_plan_old_torch_format_raises_advising_safetensors(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    state = {"a": torch.zeros(3)}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*safetensors"):
        auto.plan(tmp_path)


def test_conversion_plan_torch_file_containing_code_raises_without_running_the_code(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")

    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    torch.save({"a": Attack()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected tensors by name"):
        auto.plan(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_conversion_plan_torch_file_of_nested_dicts_raises(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    torch.save({"state_dict": {"a": torch.zeros(3)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected tensors by name"):
        auto.plan(tmp_path)


def test_conversion_plan_bin_file_when_torch_is_missing_raises_naming_the_convert_extra(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"torch.*\.\[convert\]"):
        auto.plan(tmp_path)


def sharded(folder: Path) -> tuple[Path, Path, dict]:
    folders.write(folder, TARGET, folders.target_tensors(), shards=3)
    index = folder / "model.safetensors.index.json"
    return folder, index, json.loads(index.read_text())


def test_conversion_plan_missing_shard_raises_naming_the_shard(tmp_path):
    folder, _, _ = sharded(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        auto.plan(folder)


@pytest.mark.parametrize("fault", ["not in its shard", "in no shard"])
def test_conversion_plan_index_with_wrong_shard_raises_naming_the_tensor(tmp_path, fault):
    folder, index, content = sharded(tmp_path)
    shard = content["weight_map"][Q_PROJ]
    if fault == "in no shard":
        content["weight_map"]["model.ghost.weight"] = shard
    else:
        content["weight_map"][Q_PROJ] = next(s for s in content["weight_map"].values() if s != shard)
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="ghost" if fault == "in no shard" else Q_PROJ):
        auto.plan(folder)


def test_conversion_plan_tensor_in_two_shards_raises(tmp_path):
    folder, _, content = sharded(tmp_path)
    other = next(s for s in content["weight_map"].values() if s != content["weight_map"][Q_PROJ])
    save_file(stored(folder), folder / other)
    with pytest.raises(ValueError, match="expected once"):
        auto.plan(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}'])
def test_conversion_plan_damaged_index_raises_naming_the_index(tmp_path, content):
    folder, index, _ = sharded(tmp_path)
    index.write_text(content)
    with pytest.raises(ValueError, match=r"index\.json"):
        auto.plan(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_conversion_plan_missing_config_or_weights_raises_naming_the_file(tmp_path, missing):
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        auto.plan(folder)
