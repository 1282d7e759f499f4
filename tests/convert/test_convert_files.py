"""Test Hugging Face folders with damaged, absent or dangerous files; every error names the file and the fault."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert import hub
from convert.fields import CheckpointError
from jspec.draft import auto
from jspec.models import load
from jspec.tools.convert import main
from tests.support import folders
from tests.support.folders import BFLOAT16, EAGLE, HEAD, TARGET, stored

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


def test_conversion_plan_whole_file_beside_an_index_raises_naming_both(tmp_path):
    """One of the two sets of weights may be out of date, so neither is loaded."""
    folder, _, _ = sharded(tmp_path)
    save_file(stored(folder), folder / "model.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"got model\.safetensors and model\.safetensors\.index\.json.*older"):
            auto.plan(folder)
        for shard in folder.glob("model-*"):  # an index without its shards is ignored
            shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    assert auto.plan(folder).kind == "target"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama.Q4_K_M.gguf", "got GGUF files; take the model's safetensors"),
        ("adapter_config.json", "got a LoRA adapter; merge it into its model"),
        ("README.md", "got README.md; download"),
        (None, "got an empty folder; download"),
    ],
)
def test_conversion_plan_folder_of_another_kind_raises_naming_it(tmp_path, name, message):
    if name:
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=r"expected a folder with config\.json, ") as error:
        auto.plan(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_conversion_plan_git_lfs_pointer_raises_advising_git_lfs_pull(tmp_path, name):
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    if name == "pytorch_model.bin":
        pytest.importorskip("torch", reason="reads .bin files")
        (folder / "model.safetensors").unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12ab\nsize 9876543210\n")
    with pytest.raises(
        CheckpointError, match=rf"{name}: expected the file itself, got a git-lfs pointer.*git lfs pull"
    ):
        auto.plan(folder)


def test_conversion_plan_torch_older_than_2_10_raises(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch", reason="reads .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    torch.save({"a": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    for version, is_old in (("2.9.1+cu128", True), ("1.13.0", True), ("2.10.0", False), ("3.0.0a0+git12", False)):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(ImportError if is_old else CheckpointError) as error:
            auto.plan(tmp_path)
        assert (f"expected torch 2.10 or later, got {version}" in str(error.value)) == is_old


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("kind", ["sparse", "nested", "meta", "conjugate", "quantised", "complex"])
def test_conversion_plan_torch_file_with_an_unsupported_tensor_raises_naming_it(tmp_path, kind):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    values = torch.ones(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that these tensors are prototypes
        odd = {
            "sparse": values.to_sparse,
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "meta": lambda: values.to("meta"),
            "conjugate": lambda: torch.ones(4, dtype=torch.cfloat).conj(),
            "quantised": lambda: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
            "complex": lambda: torch.ones(4, dtype=torch.cfloat),
        }[kind]()
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    torch.save({"a.weight": odd}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: 'a\.weight': expected a plain dense tensor, got"):
        auto.plan(tmp_path)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("form", ["source", "converted", "quantised"])
def test_load_weights_with_nan_or_infinity_warns_once_with_names_and_counts(tmp_path, dtype, form):
    tensors = folders.target_tensors(dtype=dtype)
    tensors[Q_PROJ][0, :3] = np.nan
    tensors["model.norm.weight"][5] = -np.inf
    folder = folders.write(tmp_path / "source", TARGET, tensors)
    if form == "converted":
        with pytest.warns(UserWarning, match="NaN or infinity"):
            assert main([str(folder), str(tmp_path / "out")]) == 0
        folder = tmp_path / "out"
    with pytest.warns(UserWarning, match="finite") as told:
        load.load(folder, dtype="float32", quantize="int8" if form == "quantised" else None)
    (message,) = [str(warning.message) for warning in told]
    names = ("layers.1.qkv", "norm") if form == "converted" else (Q_PROJ, "model.norm.weight")
    assert message.startswith(f"{folder}: expected finite weights, got NaN or infinity in ")
    assert f"{names[0]} (3)" in message and f"{names[1]} (1)" in message and "download" in message


def test_load_target_with_several_wrong_tensors_lists_three_and_a_count(tmp_path):
    folder = folders.write(tmp_path, {**TARGET, "hidden_size": 32, "head_dim": 4}, folders.target_tensors())
    with pytest.raises(CheckpointError, match=r"wrong shape: .*, .*, .* and \d+ more\); check config\.json") as error:
        auto.plan(folder)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("folder", "kind", "named"),
    [("eagle3", "target", "Eagle3.from_pretrained"), ("target", "eagle3", "Engine.from_pretrained")],
)
def test_load_checkpoint_of_another_kind_raises_naming_the_loading_call(tmp_path, folder, kind, named):
    content = {"eagle3": (HEAD, folders.head_tensors()), "target": (TARGET, folders.target_tensors())}[folder]
    with pytest.raises(CheckpointError, match=rf"expected a checkpoint of kind '{kind}', got '{folder}'; .*{named}"):
        auto.load_checkpoint(folders.write(tmp_path, *content), kind=kind)


def test_load_model_of_an_unsupported_type_raises_naming_file_and_supported_types(tmp_path):
    folder = folders.write(tmp_path, {**TARGET, "model_type": "mamba"}, folders.target_tensors())
    with pytest.raises(
        NotImplementedError, match=rf"^{folder}/config\.json: model_type: expected 'llama'.*got 'mamba'"
    ):
        load.load(folder)
    folder = folders.write(tmp_path / "mtp", TARGET, {"mtp.fc.weight": np.zeros(2, np.float32)})
    message = r"config\.json: expected a model \(llama.*\) or an EAGLE, DFlash, DSpark or Medusa head"
    with pytest.raises(NotImplementedError, match=message):
        load.load(folder)


def test_load_checkpoint_quantised_by_another_tool_raises_naming_quantize(tmp_path):
    config = {**TARGET, "quantization_config": {"quant_method": "bitsandbytes", "modules": ["x" * 900] * 50}}
    folder = folders.write(tmp_path, config, folders.target_tensors())
    with pytest.raises(
        NotImplementedError, match=r"quantize='int8', 'fp8' or 'int4' rounds them at load\), got \{"
    ) as error:
        load.load(folder)
    assert len(str(error.value)) < 500


def test_load_eagle3_head_with_eagle1_names_is_recognised_by_its_hidden_norm(tmp_path):
    """The head has layers.0 names, the whole vocabulary, and no EAGLE-3 architecture in its config."""
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in folders.head_tensors().items()}
    tensors["lm_head.weight"] = np.zeros((40, 16), np.float32)
    del tensors["d2t"], tensors["t2d"]
    config = {**TARGET, "num_hidden_layers": 1}
    assert auto.plan(folders.write(tmp_path / "eagle3", config, tensors)).kind == "eagle3"
    assert auto.plan(folders.write(tmp_path / "eagle", EAGLE, folders.eagle_tensors())).kind == "eagle"


@pytest.mark.parametrize("fault", ["fewer layers", "more layers", "other width", "other kind", "method"])
def test_load_converted_folder_with_a_wrong_manifest_raises(tmp_path, fault):
    content = (HEAD, folders.head_tensors()) if fault == "method" else (TARGET, folders.target_tensors())
    assert main([str(folders.write(tmp_path / "source", *content)), str(tmp_path / "out")]) == 0
    file = tmp_path / "out" / "jspec.json"
    manifest = json.loads(file.read_text())
    change = {
        "fewer layers": {"num_layers": 2},
        "more layers": {"num_layers": 4},
        "other width": {"intermediate_size": 48},
        "other kind": {},
        "method": {"method": "eagle"},
    }
    manifest["config"] |= change[fault]
    manifest["kind"] = "medusa" if fault == "other kind" else manifest["kind"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=rf"^{file}: "):
        auto.load_checkpoint(tmp_path / "out")


@pytest.mark.parametrize("value", [True, 97.5, "2", [None], [2, -1.5], {}, 2**40])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_eos_ids_of_a_wrong_type_raise_naming_file_and_remedy(tmp_path, name, value):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{name}: eos_token_id: expected a token id.*pass eos_ids=.*got"):
        hub.eos_ids(tmp_path)


@pytest.mark.parametrize("path", [None, "", 5, b"folder"])
def test_find_checkpoint_path_of_a_wrong_type_raises(path):
    with pytest.raises(TypeError, match=r"path: expected a folder or a hub id \(owner/name\), got"):
        auto.load_checkpoint(path)


def test_load_checkpoint_accepts_dtypes_of_jax_and_numpy(tmp_path):
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    for dtype in ("bfloat16", jnp.bfloat16, np.dtype(BFLOAT16)):
        assert load.load(folder, dtype=dtype).weights["norm"].dtype == jnp.bfloat16
    for dtype in ("half", "fp16", np.float16):
        assert load.load(folder, dtype=dtype).weights["norm"].dtype == jnp.float16
    for dtype in ("auto", "fp32", "float", None):
        assert load.load(folder, dtype=dtype).weights["norm"].dtype == jnp.float32
    for dtype in ("fp64", "fp8", jnp.int8, 5, jnp.float64):
        with pytest.raises(ValueError, match="dtype: expected one of float32, bfloat16, float16, got"):
            load.load(folder, dtype=dtype)
