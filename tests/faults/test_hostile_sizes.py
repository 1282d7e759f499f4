"""Test that checkpoints whose sizes are far larger than their files are refused at once, with little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convert.fields import MAX_JSON_BYTES, CheckpointError
from jspec.draft import auto
from jspec.tools.convert import main
from tests.support import folders
from tests.support.folders import EAGLE, HEAD, TARGET

pytestmark = pytest.mark.once

LAYERS = (4, 2048, 2049, 10**7, 2**31 - 1, 2**31, 10**30)
SECONDS = 0.5  # longest allowed time in seconds; a config of 2048 layers takes 0.02


def refused(folder: Path) -> str:
    """Return the message of the error with which a folder is refused; fail if this takes long."""
    begin = time.perf_counter()
    with pytest.raises(CheckpointError) as error:
        auto.load_checkpoint(folder)
    assert time.perf_counter() - begin < SECONDS
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("kind", ["target", "eagle", "speculators"])
def test_load_config_with_far_too_many_layers_raises_at_once(tmp_path: Path, kind: str, layers: int) -> None:
    config: dict[str, Any] = {"target": TARGET, "eagle": EAGLE, "speculators": HEAD}[kind] | {
        "num_hidden_layers": layers
    }
    tensors = {"target": folders.target_tensors, "eagle": folders.eagle_tensors, "speculators": folders.head_tensors}
    if kind == "speculators":
        config = {"speculators_model_type": "eagle3", "norm_before_residual": False, "transformer_layer_config": config}
        config["draft_vocab_size"] = 10
    assert "layers" in refused(folders.write(tmp_path, config, tensors[kind]()))


@pytest.mark.parametrize(
    "name", ["99999999.0.linear.weight", "999999.0.linear.weight", "0.999999.linear.bias", "9" * 999]
)
def test_load_medusa_heads_named_with_huge_numbers_raises_at_once(tmp_path: Path, name: str) -> None:
    tensors = folders.medusa_tensors()
    refused(folders.write(tmp_path, {"medusa_num_heads": 3}, tensors | {name: tensors["0.0.linear.bias"]}))


@pytest.mark.parametrize("name", ["num_layers", "num_heads", "vocab_size", "hidden_size"])
@pytest.mark.parametrize("kind", ["target", "medusa"])
def test_load_converted_folder_with_a_huge_size_in_its_manifest_raises_at_once(
    tmp_path: Path, kind: str, name: str
) -> None:
    content = {"target": (TARGET, folders.target_tensors()), "medusa": ({}, folders.medusa_tensors())}[kind]
    assert main([str(folders.write(tmp_path / "source", *content)), str(tmp_path / "out")]) == 0
    manifest = json.loads((tmp_path / "out" / "jspec.json").read_text())
    manifest["config"][name] = 10**8
    (tmp_path / "out" / "jspec.json").write_text(json.dumps(manifest))
    refused(tmp_path / "out")


def test_load_config_larger_than_the_limit_raises_without_reading_it(tmp_path: Path) -> None:
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    with (folder / "config.json").open("r+b") as file:
        file.truncate(3 * 2**30)  # a file with a hole, which takes no space on disk
    assert f"at most {MAX_JSON_BYTES:,} bytes, got {3 * 2**30:,}" in refused(folder)


def compressed(file: Path, torch: Any) -> None:
    """Write tensors as a compressed archive of a thousandth of their size."""
    torch.save({"a": torch.zeros(2**24)}, file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


TORCH_FILES: dict[str, Callable[[Path, Any], None]] = {
    "compressed archive": compressed,
    "one value shared": lambda file, torch: torch.save({"a": torch.zeros(1).expand(2**34)}, file),
    "one storage in many tensors": lambda file, torch: torch.save(dict.fromkeys("abcdef", torch.zeros(2**16)), file),
}


@pytest.mark.parametrize("form", TORCH_FILES)
def test_load_torch_file_that_expands_when_read_raises(tmp_path: Path, form: str) -> None:
    torch = pytest.importorskip("torch", reason="writes .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    TORCH_FILES[form](tmp_path / "pytorch_model.bin", torch)
    auto_error = refused(tmp_path)
    assert "the file's size" in auto_error


LIMITED = """
import resource, sys
import jax
from jspec.draft import auto
jax.devices()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 600 * 2**20,) * 2)
for folder in sys.argv[1:]:
    try:
        auto.load_checkpoint(folder)
    except ValueError as error:
        print("refused", str(error)[:400])
"""


def test_load_of_hostile_sizes_under_a_memory_limit_raises_no_memory_error(tmp_path: Path) -> None:
    """The process may use 600 MiB more than at its start."""
    if not Path("/proc/self/statm").is_file():
        pytest.skip("the size of the process is read from /proc")
    wide = folders.write(tmp_path / "wide", {**TARGET, "vocab_size": 2**31 - 1}, folders.target_tensors())
    deep = folders.write(tmp_path / "deep", TARGET, folders.target_tensors())
    (deep / "config.json").write_text("[" * 10**7)
    wrong = folders.write(tmp_path / "wrong", TARGET, {})
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (wrong / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    paths = [str(path) for path in (wide, deep, wrong)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["refused"] * 3, done.stderr[-500:]
