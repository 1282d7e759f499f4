"""Test the conversion command: output, errors, peak memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.draft import auto
from jspec.draft.head_config import HeadConfig
from jspec.tools.convert import main
from tests.support import folders
from tests.support.folders import BFLOAT16, DRAFT_IDS, HEAD, TARGET

pytestmark = pytest.mark.once


def test_convert_command_verbose_prints_shape_dtype_and_parameter_of_every_tensor(tmp_path, capsys):
    tensors = folders.head_tensors()
    source = folders.write(tmp_path / "src", HEAD, tensors)
    assert main([str(source), str(tmp_path / "dst"), "--feature-layers", "2,16,29", "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, tensor in tensors.items():
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert str(list(tensor.shape)) in line
        assert str(tensor.dtype) in line
    assert "midlayer.mlp.up_proj.weight [24, 16] float32 -> layers.0.gate_up" in lines
    assert "MiB" in lines[-1]


def test_convert_command_prints_one_line_before_and_one_after(tmp_path, capsys):
    tensors = folders.target_tensors()
    source = folders.write(tmp_path / "src", TARGET, tensors)
    assert main([str(source), str(tmp_path / "dst")]) == 0
    first, last = capsys.readouterr().out.splitlines()
    values = sum(tensor.size for tensor in tensors.values())
    assert first == f"{source}: target, float32, {len(tensors)} tensors with {values:,} values"
    assert last.startswith(f"{tmp_path / 'dst'}: ") and "MiB" in last


def test_convert_command_existing_destination_is_refused_before_the_source_is_read(tmp_path, capsys):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "precious").touch()
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "dst")]) == 2
    assert capsys.readouterr().err.startswith(f"jspec: {tmp_path / 'dst'}: expected a new folder")


def test_convert_command_relative_paths_give_a_folder_that_loads_by_relative_path(tmp_path, monkeypatch):
    folders.write(tmp_path / "src", TARGET, folders.target_tensors())
    monkeypatch.chdir(tmp_path)
    assert main(["src", "dst"]) == 0
    assert auto.load_checkpoint("dst").folder == tmp_path / "dst"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert auto.load_checkpoint("~/dst").folder == auto.load_checkpoint("./dst").folder == tmp_path / "dst"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in threads of orbax
def test_convert_command_full_disk_prints_one_line_and_leaves_no_file(tmp_path, capfd):
    """A limit of the file size, smaller than the largest tensor, simulates the full disk."""
    config = {**TARGET, "vocab_size": 20_000, "num_hidden_layers": 1}
    source = folders.write(tmp_path / "src", config, folders.target_tensors(config))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        assert main([str(source), str(tmp_path / "out" / "dst")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and error.startswith(
        f"jspec: {tmp_path / 'out'}: expected to write the weights there"
    )
    assert "File too large" in error and "bytes are free" in error
    assert list((tmp_path / "out").iterdir()) == []


def test_convert_command_after_a_killed_overwrite_names_the_hidden_folders(tmp_path, capsys):
    """If --overwrite is killed between its two renames, the old and the new folder have hidden names."""
    source = folders.write(tmp_path / "src", TARGET, folders.target_tensors())
    old, new = (tmp_path / f".dst.ab12_xyz{end}" for end in (".old", ""))
    assert main([str(source), str(old)]) == 0
    new.mkdir()
    (tmp_path / ".dst.other.ab12_xyz").mkdir()  # belongs to another destination
    with pytest.raises(FileNotFoundError, match=rf"interrupted.*{old}; rename that folder to dst"):
        auto.load_checkpoint(tmp_path / "dst")
    capsys.readouterr()
    assert main([str(source), str(tmp_path / "dst")]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [line.split()[1] for line in notes] == [str(new), str(old)]
    old.rename(tmp_path / "back")
    assert auto.load_checkpoint(tmp_path / "back").kind == "target"


def test_convert_command_invalid_ids_print_one_line_and_exit_with_2(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), str(tmp_path / "dst"), "--feature-layers", "2,x"])
    assert "jspec convert: argument --feature-layers: expected ids separated by commas" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["no source", "unknown tensor", "existing destination", "truncated", "bad values"])
def test_convert_command_faulty_source_or_destination_prints_an_error_and_writes_no_file(tmp_path, capsys, fault):
    tensors = folders.head_tensors()
    if fault == "unknown tensor":
        tensors["surprise"] = np.zeros(2, np.float32)
    if fault == "bad values":  # this fault is found only while the destination is being written
        tensors["d2t"] = DRAFT_IDS
    source, target = folders.write(tmp_path / "src", HEAD, tensors), tmp_path / "out" / "dst"
    if fault == "no source":
        source = tmp_path / "nowhere"
    if fault == "truncated":
        file = source / "model.safetensors"
        file.write_bytes(file.read_bytes()[:1000])
    if fault == "existing destination":
        target.mkdir(parents=True)
        (target / "precious").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main([str(source), str(target)]) == 2
    assert capsys.readouterr().err.startswith("jspec: ")
    after = [path for path in sorted(tmp_path.rglob("*")) if path != target.parent]
    assert after == [path for path in before if path != target.parent]


def test_convert_command_with_overrides_stores_them_in_the_config(tmp_path, capsys):
    source = folders.write(tmp_path / "src", {**HEAD, "norm_output": True}, folders.head_tensors())
    assert main([str(source), str(tmp_path / "undecided")]) == 2
    assert "--norm-output" in capsys.readouterr().err
    options = ["--rope-theta", "5e5", "--norm-output", "--norm-before-residual"]
    assert main([str(source), str(tmp_path / "a"), *options]) == 0
    assert main([str(source), str(tmp_path / "b"), "--no-norm-output"]) == 0
    yes, no = (auto.read_header(tmp_path / name).config for name in "ab")
    assert isinstance(yes, HeadConfig) and isinstance(no, HeadConfig)
    assert (yes.norm_output, yes.norm_before_residual, yes.rope.theta) == (True, True, 5e5)
    assert (no.norm_output, no.norm_before_residual, no.rope.theta) == (False, False, 1e4)


# ---- memory

MEASURE = """
import re, sys
from pathlib import Path
from convert import huggingface as hf
from jspec.tools import convert as command

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, large, work, batch = sys.argv[1:]
assert command.main([small, work + "/small"]) == 0
start = memory("VmRSS")
if int(batch):
    hf.BATCH_BYTES = int(batch)
assert command.main([large, work + "/large"]) == 0
print(memory("VmHWM") - start)
"""


@pytest.mark.long
def test_convert_command_large_model_peak_memory_is_about_one_shard_and_one_tensor(tmp_path):
    """The model has 0.6 GB in shards of 70 MB. The peak memory of a tiny conversion is subtracted."""
    if not Path("/proc/self/status").is_file():
        pytest.skip("peak memory is read from /proc")
    config = {
        **TARGET, "vocab_size": 16000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 32,
    }  # fmt: skip
    rng, shard, size, part = np.random.default_rng(0), 0, 0, {}
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(config))
    index, largest_shard, largest_tensor = {}, 0, 0
    shapes = list(folders.target_shapes(config).items())
    for name, shape in shapes:
        count = int(np.prod(shape))
        part[name] = np.frombuffer(rng.bytes(2 * count), np.uint16).view(BFLOAT16).reshape(shape)
        size += 2 * count
        largest_tensor = max(largest_tensor, 2 * count)
        if size > 45e6 or name == shapes[-1][0]:
            file = f"model-{shard}.safetensors"
            save_file(part, tmp_path / "large" / file)
            index |= dict.fromkeys(part, file)
            largest_shard = max(largest_shard, size)
            shard, size, part = shard + 1, 0, {}
    (tmp_path / "large" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    small = folders.write(tmp_path / "small", TARGET, folders.target_tensors(dtype=BFLOAT16))

    def peak(batch: int) -> int:
        command = [
            sys.executable,
            "-c",
            MEASURE,
            small,
            tmp_path / "large",
            tmp_path / f"out{batch}",
            str(batch),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout.splitlines()[-1])

    limit = 1.3 * largest_shard + largest_tensor
    assert peak(0) < limit
    assert peak(2**40) > limit  # negative control: the whole model in one batch exceeds the limit
