"""Test finding a model's folder on disk or on the hub, and reading a folder's EOS ids."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest

from convert import hub
from jspec import UNO
from jspec.draft import auto
from jspec.draft.named import make_drafter
from jspec.models.adapter_files import read_adapter
from tests.support import folders
from tests.support.folders import TARGET

pytestmark = pytest.mark.once


@pytest.fixture
def target(tmp_path) -> Path:
    return folders.write(tmp_path / "target", TARGET, folders.target_tensors())


@pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_find_checkpoint_missing_local_path_raises_file_not_found(path):
    with pytest.raises(FileNotFoundError, match=r"nowhere|a/b/c"):
        auto.load_checkpoint(path)


def test_find_checkpoint_file_instead_of_folder_raises(target):
    with pytest.raises(FileNotFoundError, match="got a file"):
        auto.load_checkpoint(target / "config.json")


def test_find_checkpoint_hub_id_downloads_bin_files_only_if_there_are_no_safetensors(target, monkeypatch):
    asked = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, [pattern for pattern in allow_patterns if "bin" in pattern]))
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert auto.load_checkpoint("owner/name").folder == target
    assert asked == [("owner/name", [])]
    (target / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="pytorch_model"):
        auto.load_checkpoint("owner/name")
    assert asked[-1] == ("owner/name", ["pytorch_model*.bin"])


@pytest.mark.parametrize(
    ("files", "fetched"),
    [
        (["medusa_lm_head.safetensors", "medusa_lm_head.pt"], ["medusa_lm_head.safetensors"]),
        (["medusa_lm_head.pt"], ["medusa_lm_head.pt"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
    ],
)
def test_find_checkpoint_hub_id_downloads_only_one_format_of_the_weights(tmp_path, monkeypatch, files, fetched):
    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for file in files:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.find("owner/name") == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == fetched


@pytest.mark.parametrize("tokenizer", [False, True])
def test_find_checkpoint_hub_id_downloads_no_subfolder_except_its_chat_templates(tmp_path, monkeypatch, tokenizer):
    templates = ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    others = ["onnx/config.json", "original/tokenizer.model", "model/model.safetensors", "a/b/pytorch_model.bin"]
    fetched = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        (tmp_path / "model.safetensors").touch()
        wanted = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        fetched.extend(huggingface_hub.utils.filter_repo_objects(["config.json", *templates, *others], **wanted))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub.find("owner/name", tokenizer=tokenizer)
    assert fetched == ["config.json", *templates]


def test_adapter_of_the_hub_is_downloaded_without_other_weights_and_drafts_by_its_id(golden, tmp_path, monkeypatch):
    folder, asked = golden / "adapters" / "llama" / "all", []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_adapter("owner/name").rank == 4
    assert asked == [["adapter_config.json", "adapter_model.safetensors"]]
    assert isinstance(make_drafter("owner/name"), UNO)


@pytest.mark.parametrize(("path", "pinned"), [("owner/name", {}), ("owner/name@v1.0", {"revision": "v1.0"})])
def test_find_checkpoint_hub_id_with_a_revision_downloads_that_revision(tmp_path, monkeypatch, path, pinned):
    (tmp_path / "model.safetensors").touch()
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(tmp_path)
    )
    assert hub.find(path) == tmp_path
    ((name, options),) = asked
    assert name == "owner/name" and {key: options[key] for key in options.keys() & {"revision"}} == pinned


def test_find_checkpoint_hub_error_raises_naming_the_hub_id(monkeypatch):
    def download(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=r"owner/name.*offline.*`hf auth login`"):
        auto.load_checkpoint("owner/name")


GENERATION, CONFIG = "generation_config.json", "config.json"


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [5, 7]}, {"eos_token_id": 2}, {GENERATION: (5, 7), CONFIG: (2,)}),
        ({"eos_token_id": None}, {"eos_token_id": 2}, {CONFIG: (2,)}),
        (None, {"eos_token_id": [0], "text_config": {"eos_token_id": [0, 3]}}, {CONFIG: (0, 3)}),
        ({}, {}, {}),
        (None, None, {}),
    ],
)
def test_eos_ids_of_a_folder_are_read_from_each_file(tmp_path, generation, config, ids):
    for name, content in ((GENERATION, generation), (CONFIG, config)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    assert hub.eos_ids(tmp_path) == ids
