"""Test reading Hugging Face folders: values, dtypes, and tensors that do not match the config."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from convert import huggingface, sources
from convert.sources import Safetensors
from jspec.draft import auto
from tests.support import byte_pair, folders
from tests.support.folders import BFLOAT16, EAGLE, HEAD, TARGET, assert_same, expected_target, loaded, stored, without

pytestmark = pytest.mark.once

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"

# ---- arrays


def test_conversion_batches_of_the_demo_sharded_target_equal_the_stored_tensors():
    tensors = stored(byte_pair.TARGET)
    expected = expected_target(tensors, layers=8)
    expected |= {"embed": tensors["model.embed_tokens.weight"], "head": tensors["lm_head.weight"]}
    assert_same(loaded(byte_pair.TARGET), expected)


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight"])
def test_conversion_batches_contain_a_tied_embedding_stored_under_either_name(tmp_path, kept):
    tensors = folders.target_tensors()
    names = {"model.embed_tokens.weight", "lm_head.weight"}
    folder = folders.write(tmp_path, {**TARGET, "tie_word_embeddings": True}, without(tensors, *names - {kept}))
    assert_same(loaded(folder), expected_target(tensors, 3) | {"embed": tensors[kept]})


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("piece", [None, 100], ids=["one piece", "many pieces"])
def test_conversion_batches_are_equal_for_any_number_of_shards_and_pieces(tmp_path, monkeypatch, dtype, piece):
    tensors = folders.target_tensors(dtype=dtype)
    single = folders.write(tmp_path / "single", TARGET, tensors)
    sharded = folders.write(tmp_path / "sharded", TARGET, tensors, shards=3)
    if piece:
        monkeypatch.setattr(sources, "PIECE_BYTES", piece)
        monkeypatch.setattr(huggingface, "BATCH_BYTES", 1)
    expected = expected_target(tensors, 3)
    expected |= {"embed": tensors["model.embed_tokens.weight"], "head": tensors["lm_head.weight"]}
    assert_same(loaded(single), expected)
    assert_same(loaded(sharded), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 2])
def test_conversion_batches_from_torch_files_equal_those_from_safetensors(tmp_path, dtype, shards):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    tensors = folders.target_tensors(dtype=np.dtype(dtype) if dtype != "bfloat16" else BFLOAT16)
    safe = folders.write(tmp_path / "safe", TARGET, tensors)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    state = {n: torch.tensor(t.astype(np.float32)).to(getattr(torch, dtype)) for n, t in tensors.items()}
    state["model.norm.weight"] = torch.nn.Parameter(state["model.norm.weight"])
    state[Q_PROJ] = state[Q_PROJ].T.contiguous().T  # values with strides that are not row-major
    names = [f"pytorch_model-{i}.bin" for i in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    index = {}
    for i, name in enumerate(names):
        part = dict(list(state.items())[i::shards])
        torch.save(part, folder / name)
        index |= dict.fromkeys(part, name)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(loaded(folder), loaded(safe))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"])
def test_rows_of_a_safetensors_file_are_those_that_the_library_reads(tmp_path, dtype):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.integers(0, 100, shape).astype(dtype) for name, shape in {"a": (7,), "b": (5, 3, 2), "c": ()}.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = Safetensors([tmp_path / "model.safetensors"])
    with safe_open(tmp_path / "model.safetensors", "numpy") as opened:
        for name in "ab":
            got, wanted = source.read(name, 2, 4), opened.get_slice(name)[2:4]
            assert got.dtype == wanted.dtype == dtype and got.flags.writeable
            np.testing.assert_array_equal(got, wanted)
            assert dtype == "bool" or not np.array_equal(got, opened.get_slice(name)[1:3]), "control: other rows"
        np.testing.assert_array_equal(source.read("c", 0, 1), opened.get_tensor("c")[None])
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-1])
    last = max(tensors, key=lambda name: source.tensors[name].start)
    rows = len(np.atleast_1d(tensors[last]))
    with pytest.raises(OSError, match=f"the file ends within rows 0 to {rows}"):
        source.read(last, 0, rows)


def test_conversion_batches_omit_old_rotary_buffers(tmp_path):
    tensors = folders.target_tensors()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    with_buffer = loaded(folders.write(tmp_path / "a", TARGET, tensors | extra))
    assert_same(with_buffer, loaded(folders.write(tmp_path / "b", TARGET, tensors)))


def test_conversion_batches_have_the_shapes_of_head_dim_and_target_hidden_size(tmp_path):
    config = {**TARGET, "head_dim": 8}
    assert loaded(folders.write(tmp_path / "a", config, folders.target_tensors(config)))["layers.0.qkv"].shape == (
        (4 + 2 + 2) * 8,
        16,
    )
    tensors = folders.head_tensors() | {"fc.weight": np.zeros((16, 2 * 20), np.float32)}
    folder = folders.write(tmp_path / "b", {**HEAD, "target_hidden_size": 20}, tensors)
    assert loaded(folder, feature_layers=(1, 2))["fc"].shape == (16, 40)


# ---- dtypes


def test_dtype_cast_float16_to_bfloat16_rounds_once_to_nearest_even(tmp_path):
    tensors = folders.target_tensors(dtype=np.float16)
    tensors["lm_head.weight"][0, 0] = 6e-8  # a float16 subnormal
    arrays = loaded(folders.write(tmp_path, TARGET, tensors), "bfloat16")
    head = tensors["lm_head.weight"].astype(np.float32)
    bits = head.view(np.uint32)
    nearest_even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert arrays["head"].view(np.uint16).tobytes() == nearest_even.tobytes()


def test_dtype_cast_of_a_value_too_large_for_float16_raises_naming_the_tensor(tmp_path):
    tensors = folders.target_tensors()
    tensors[Q_PROJ][2, 3] = 1e5
    folder = folders.write(tmp_path, TARGET, tensors)
    with pytest.raises(ValueError, match=f"{Q_PROJ}.*65504"):
        loaded(folder, "float16")
    loaded(folder, "bfloat16")


def test_conversion_batches_of_mixed_dtypes_raise_unless_a_dtype_is_given(tmp_path):
    tensors = folders.target_tensors() | {"lm_head.weight": np.zeros((40, 16), np.float16)}
    folder = folders.write(tmp_path, TARGET, tensors)
    with pytest.raises(ValueError, match=r"float16.*float32"):
        loaded(folder)
    assert {array.dtype for array in loaded(folder, "float32").values()} == {np.dtype(np.float32)}


def test_tensor_check_of_integer_weights_raises_naming_the_tensor(tmp_path):
    tensors = folders.target_tensors() | {"lm_head.weight": np.zeros((40, 16), np.int8)}
    with pytest.raises(ValueError, match=r"not floating point: lm_head\.weight"):
        auto.plan(folders.write(tmp_path, TARGET, tensors))


# ---- tensors that do not match


def test_tensor_check_error_lists_every_missing_unknown_and_misshapen_tensor(tmp_path):
    tensors = folders.target_tensors()
    del tensors[Q_PROJ], tensors["model.norm.weight"]
    tensors["model.layers.9.extra.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    tensors["lm_head.weight"] = np.zeros((41, 16), np.float32)
    with pytest.raises(ValueError, match="do not match") as error:
        auto.plan(folders.write(tmp_path, TARGET, tensors))
    message = str(error.value)
    assert f"missing: {Q_PROJ}, model.norm.weight;" in message
    assert "unknown: model.layers.0.self_attn.q_proj.bias, model.layers.9.extra.weight;" in message
    assert "lm_head.weight (expected (40, 16), got (41, 16))" in message


def test_tensor_check_of_a_duplicate_tensor_or_parameter_raises_assertion_error():
    tensors = {name: sources.Tensor((2,), "float32", Path()) for name in "xy"}
    row = huggingface.stacked
    huggingface.check([row("a", {"x": (2,)}), row("b", {"y": (2,)})], tensors)
    with pytest.raises(AssertionError, match="'x'"):
        huggingface.check([row("a", {"x": (2,), "y": (2,)}), row("b", {"x": (2,)})], tensors)
    with pytest.raises(AssertionError, match="'a'"):
        huggingface.check([row("a", {"x": (2,)}), row("a", {"y": (2,)})], tensors)


def every_single_fault() -> list:
    """Return one case for each tensor of a target and of heads, which the test removes, reshapes or copies."""
    wholes = {
        "target": (TARGET, folders.target_tensors()),
        "eagle3": (HEAD, folders.head_tensors()),
        "eagle": (EAGLE, folders.eagle_tensors()),
        "medusa": ({}, folders.medusa_tensors()),
    }
    return [
        pytest.param(config, tensors, name, id=f"{kind}-{name}")
        for kind, (config, tensors) in wholes.items()
        for name in tensors
    ]


@pytest.mark.parametrize(("config", "tensors", "name"), every_single_fault())
def test_tensor_check_of_one_absent_added_or_misshapen_tensor_raises_naming_it(tmp_path, config, tensors, name):
    auto.plan(folders.write(tmp_path / "whole", config, tensors))
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    faults = {"added": tensors | {f"{name}_copy": tensors[name]}}
    if name != "0.1.weight":  # the sizes of Medusa heads are read from this tensor
        faults["misshapen"] = rest | {name: np.concatenate([tensors[name], tensors[name][:1]])}
    if name != "t2d":  # this tensor is optional
        faults["absent"] = rest
    for fault, faulty in faults.items():
        with pytest.raises(ValueError) as error:
            auto.plan(folders.write(tmp_path / fault, config, faulty))
        assert name in str(error.value)


def test_tied_output_head_that_differs_from_the_embedding_raises(tmp_path):
    tensors = folders.target_tensors()
    tied = {**TARGET, "tie_word_embeddings": True}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    arrays = loaded(folders.write(tmp_path / "equal", tied, tensors))
    assert "head" not in arrays
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tied"):
        loaded(folders.write(tmp_path / "other", tied, tensors))
