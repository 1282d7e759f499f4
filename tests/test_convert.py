"""Reading Hugging Face folders: every array against the file's own, and every kind of damage named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import convert
from convert.__main__ import main
from tests import folders
from tests.folders import BFLOAT16, DRAFT_IDS, HEAD, TARGET

BLOCK = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def loaded(folder: Path, dtype: str | None = None, **overrides) -> dict[str, np.ndarray]:
    plan = convert.plan(folder, **overrides)
    arrays: dict[str, np.ndarray] = {}
    for batch in plan.batches(plan.dtype(dtype)):
        arrays |= batch
    return arrays


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, straight from the library that wrote them."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if (folder / "pytorch_model.bin").is_file():
        torch = pytest.importorskip("torch", reason="the file is a .bin")
        read = torch.load(folder / "pytorch_model.bin", weights_only=True)
        tensors |= {name: tensor.numpy() for name, tensor in read.items()}
    return tensors


def block(tensors: dict[str, np.ndarray], to: str, source: str) -> dict[str, np.ndarray]:
    return {
        f"{to}.{name}": np.concatenate([tensors[f"{source}.{part}.weight"] for part in parts])
        for name, parts in BLOCK.items()
    }


def expected_target(tensors: dict[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The weight tree by its definition: q, k, v rows in this order, gate rows before up rows."""
    tree = {"norm": tensors["model.norm.weight"]}
    for i in range(layers):
        tree[f"layers.{i}.attn_norm"] = tensors[f"model.layers.{i}.input_layernorm.weight"]
        tree |= block(tensors, f"layers.{i}", f"model.layers.{i}")
    return tree


def expected_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        "fc": tensors["fc.weight"],
        "layer.input_norm": tensors["midlayer.input_layernorm.weight"],
        "layer.hidden_norm": tensors["midlayer.hidden_norm.weight"],
        **block(tensors, "layer", "midlayer"),
        "norm": tensors["norm.weight"],
        "head": tensors["lm_head.weight"],
        "draft_to_target": (np.arange(len(tensors["d2t"])) + tensors["d2t"]).astype(np.int32),
    }


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


# ---- what is read


def test_the_sharded_golden_target_is_read_bit_by_bit(golden):
    tensors = stored(golden / "target")
    expected = expected_target(tensors, layers=8)
    expected |= {"embed": tensors["model.embed_tokens.weight"], "head": tensors["lm_head.weight"]}
    assert_same(loaded(golden / "target"), expected)


@pytest.mark.parametrize(
    ("name", "layers", "embedding"),
    [("stories260k", 5, "model.embed_tokens.weight"), ("tinystories656k", 2, "lm_head.weight")],
)
def test_a_tied_embedding_is_found_under_either_name(data, name, layers, embedding):
    tensors = stored(data / name)
    assert_same(loaded(data / name), expected_target(tensors, layers) | {"embed": tensors[embedding]})


def test_the_golden_head_is_read_bit_by_bit(golden):
    tensors = stored(golden / "draft")
    assert_same(loaded(golden / "draft"), expected_head(tensors))
    assert convert.plan(golden / "draft").config.feature_layers is None


def test_the_specforge_layout_is_read_bit_by_bit(golden):
    tensors = stored(golden / "draft_specforge_like")
    expected = expected_head(tensors) | {"embed": tensors["embed_tokens.weight"]}
    assert_same(loaded(golden / "draft_specforge_like"), expected)


def test_the_specforge_layout_gives_the_official_head(golden):
    pytest.importorskip("torch", reason="the official head is a .bin")
    official, other = convert.plan(golden / "draft"), convert.plan(golden / "draft_specforge_like")
    arrays = loaded(other.folder)
    embedding = arrays.pop("embed")
    assert_same(arrays, loaded(official.folder))
    assert embedding.tobytes() == stored(golden / "target")["model.embed_tokens.weight"].tobytes()
    assert other.config.feature_layers == (2, 8 // 2, 8 - 3)
    assert other.config.rope == official.config.rope


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=str)
@pytest.mark.parametrize("piece", [None, 100], ids=["one piece", "many pieces"])
def test_shards_and_pieces_change_nothing(tmp_path, monkeypatch, dtype, piece):
    tensors = folders.target_tensors(dtype=dtype)
    single = folders.write(tmp_path / "single", TARGET, tensors)
    sharded = folders.write(tmp_path / "sharded", TARGET, tensors, shards=3)
    if piece:
        monkeypatch.setattr(convert.hf, "PIECE_BYTES", piece)
        monkeypatch.setattr(convert.hf, "BATCH_BYTES", 1)
    expected = expected_target(tensors, 3)
    expected |= {"embed": tensors["model.embed_tokens.weight"], "head": tensors["lm_head.weight"]}
    assert_same(loaded(single), expected)
    assert_same(loaded(sharded), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 2])
def test_torch_files_are_read_as_safetensors_are(tmp_path, dtype, shards):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    tensors = folders.target_tensors(dtype=np.dtype(dtype) if dtype != "bfloat16" else BFLOAT16)
    safe = folders.write(tmp_path / "safe", TARGET, tensors)
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TARGET))
    state = {n: torch.tensor(t.astype(np.float32)).to(getattr(torch, dtype)) for n, t in tensors.items()}
    state["model.norm.weight"] = torch.nn.Parameter(state["model.norm.weight"])
    state[Q_PROJ] = state[Q_PROJ].T.contiguous().T  # strides other than row by row
    names = [f"pytorch_model-{i}.bin" for i in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    index = {}
    for i, name in enumerate(names):
        part = dict(list(state.items())[i::shards])
        torch.save(part, folder / name)
        index |= dict.fromkeys(part, name)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(loaded(folder), loaded(safe))


def test_a_prefix_before_a_heads_names_is_dropped(tmp_path):
    tensors = folders.head_tensors()
    prefixed = {name if "lm_head" in name else f"model.{name}": t for name, t in tensors.items()}
    assert_same(loaded(folders.write(tmp_path, HEAD, prefixed)), expected_head(tensors))


def test_old_rotary_buffers_are_passed_over(tmp_path):
    tensors = folders.target_tensors()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    with_buffer = loaded(folders.write(tmp_path / "a", TARGET, tensors | extra))
    assert_same(with_buffer, loaded(folders.write(tmp_path / "b", TARGET, tensors)))


def test_an_explicit_head_dim_and_target_width_set_the_shapes(tmp_path):
    config = {**TARGET, "head_dim": 8}
    assert loaded(folders.write(tmp_path / "a", config, folders.target_tensors(config)))["layers.0.qkv"].shape == (
        (4 + 2 + 2) * 8,
        16,
    )
    tensors = folders.head_tensors() | {"fc.weight": np.zeros((16, 2 * 20), np.float32)}
    folder = folders.write(tmp_path / "b", {**HEAD, "target_hidden_size": 20}, tensors)
    assert loaded(folder, feature_layers=(1, 2))["fc"].shape == (16, 40)


# ---- dtypes


def test_float16_becomes_bfloat16_by_one_rounding_from_float32(tmp_path):
    tensors = folders.target_tensors(dtype=np.float16)
    tensors["lm_head.weight"][0, 0] = 6e-8  # a float16 subnormal
    arrays = loaded(folders.write(tmp_path, TARGET, tensors), "bfloat16")
    head = tensors["lm_head.weight"].astype(np.float32)
    bits = head.view(np.uint32)
    nearest_even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert arrays["head"].view(np.uint16).tobytes() == nearest_even.tobytes()


def test_values_beyond_float16_are_refused_and_not_made_infinite(tmp_path):
    tensors = folders.target_tensors()
    tensors[Q_PROJ][2, 3] = 1e5
    folder = folders.write(tmp_path, TARGET, tensors)
    with pytest.raises(ValueError, match=f"{Q_PROJ}.*65504"):
        loaded(folder, "float16")
    loaded(folder, "bfloat16")


def test_a_file_of_mixed_dtypes_needs_an_explicit_one(tmp_path):
    tensors = folders.target_tensors() | {"lm_head.weight": np.zeros((40, 16), np.float16)}
    folder = folders.write(tmp_path, TARGET, tensors)
    with pytest.raises(ValueError, match=r"float16.*float32"):
        loaded(folder)
    assert {array.dtype for array in loaded(folder, "float32").values()} == {np.dtype(np.float32)}


def test_integer_weights_are_refused_as_not_floating_point(tmp_path):
    tensors = folders.target_tensors() | {"lm_head.weight": np.zeros((40, 16), np.int8)}
    with pytest.raises(ValueError, match=r"not floating point: lm_head\.weight"):
        convert.plan(folders.write(tmp_path, TARGET, tensors))


# ---- tensors that do not match


def test_missing_unknown_and_misshapen_tensors_are_all_listed_at_once(tmp_path):
    tensors = folders.target_tensors()
    del tensors[Q_PROJ], tensors["model.norm.weight"]
    tensors["model.layers.9.extra.weight"] = np.zeros(3, np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    tensors["lm_head.weight"] = np.zeros((41, 16), np.float32)
    with pytest.raises(ValueError, match="do not match") as error:
        convert.plan(folders.write(tmp_path, TARGET, tensors))
    message = str(error.value)
    assert f"missing: {Q_PROJ}, model.norm.weight;" in message
    assert "unknown: model.layers.0.self_attn.q_proj.bias, model.layers.9.extra.weight;" in message
    assert "lm_head.weight (expected (40, 16), got (41, 16))" in message


def test_a_weight_map_that_uses_a_tensor_or_fills_a_parameter_twice_is_a_bug():
    tensors = {name: convert.hf.Tensor((2,), "float32", Path()) for name in "xy"}
    row = convert.hf.stacked
    convert.hf.check([row("a", {"x": (2,)}), row("b", {"y": (2,)})], tensors)
    with pytest.raises(AssertionError, match="'x'"):
        convert.hf.check([row("a", {"x": (2,), "y": (2,)}), row("b", {"x": (2,)})], tensors)
    with pytest.raises(AssertionError, match="'a'"):
        convert.hf.check([row("a", {"x": (2,)}), row("a", {"y": (2,)})], tensors)


def every_single_fault() -> list:
    """Each tensor of a target and of a head, removed, misshapen, or doubled under a new name."""
    cases = []
    for config, tensors in ((TARGET, folders.target_tensors()), (HEAD, folders.head_tensors())):
        for name in tensors:
            kind = "target" if config is TARGET else "head"
            cases += [pytest.param(config, tensors, name, id=f"{kind}-{name}")]
    return cases


@pytest.mark.parametrize(("config", "tensors", "name"), every_single_fault())
def test_no_tensor_can_be_absent_added_or_misshapen_unseen(tmp_path, config, tensors, name):
    convert.plan(folders.write(tmp_path / "whole", config, tensors))
    rest = {other: tensor for other, tensor in tensors.items() if other != name}
    faults = {
        "added": tensors | {f"{name}_copy": tensors[name]},
        "misshapen": rest | {name: np.concatenate([tensors[name], tensors[name][:1]])},
    }
    if name != "t2d":  # a head is whole without it
        faults["absent"] = rest
    for fault, faulty in faults.items():
        with pytest.raises(ValueError) as error:
            convert.plan(folders.write(tmp_path / fault, config, faulty))
        assert name in str(error.value)


def test_a_tied_head_in_the_file_must_equal_the_embedding(tmp_path):
    tensors = folders.target_tensors()
    tied = {**TARGET, "tie_word_embeddings": True}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    arrays = loaded(folders.write(tmp_path / "equal", tied, tensors))
    assert "head" not in arrays
    tensors["lm_head.weight"][-1, -1] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight.*tied"):
        loaded(folders.write(tmp_path / "other", tied, tensors))


def test_feature_layers_of_another_number_than_fc_has_are_refused(tmp_path):
    folder = folders.write(tmp_path, HEAD, folders.head_tensors())
    with pytest.raises(ValueError, match=r"fc\.weight \(expected \(16, 64\), got \(16, 48\)\)"):
        convert.plan(folder, feature_layers=(1, 2, 3, 4))


def test_feature_layers_for_a_target_are_refused(tmp_path):
    with pytest.raises(ValueError, match="feature_layers"):
        convert.plan(folders.write(tmp_path, TARGET, folders.target_tensors()), feature_layers=(1, 2, 3))


# ---- the vocabulary map


@pytest.mark.parametrize("order", ["ascending", "shuffled"])
def test_offsets_give_the_target_ids_in_any_order(tmp_path, order):
    ids = DRAFT_IDS if order == "ascending" else np.random.default_rng(1).permutation(DRAFT_IDS)
    tensors = folders.head_tensors() | folders.vocabulary(ids)
    assert loaded(folders.write(tmp_path, HEAD, tensors))["draft_to_target"].tolist() == ids.tolist()


@pytest.mark.parametrize("member", [True, False])
def test_a_head_over_the_whole_vocabulary_needs_no_offsets(tmp_path, member):
    config = {**HEAD, "draft_vocab_size": 40}
    tensors = folders.head_tensors() | {"lm_head.weight": np.zeros((40, 16), np.float32)}
    del tensors["d2t"], tensors["t2d"]
    if member:
        tensors["t2d"] = np.ones(40, bool)
    assert loaded(folders.write(tmp_path, config, tensors))["draft_to_target"].tolist() == list(range(40))


def wrong_vocabularies() -> dict[str, tuple[dict[str, np.ndarray], str]]:
    good = folders.vocabulary(DRAFT_IDS)
    moved = np.roll(good["t2d"], 1)
    return {
        "absolute ids read as offsets": ({"d2t": DRAFT_IDS}, "0..39"),
        "negative": ({"d2t": good["d2t"] - 5}, "-2"),
        "repeated": ({"d2t": good["d2t"] + (np.arange(10) == 3)}, "t2d|repeated"),
        "two to one": ({"d2t": np.where(np.arange(10) == 1, 2, good["d2t"])}, "1 repeated"),
        "another t2d": ({"t2d": moved}, "t2d"),
        "rounded": ({"d2t": good["d2t"].astype(np.float32)}, "integers"),
    }


@pytest.mark.parametrize("case", wrong_vocabularies())
def test_a_wrong_vocabulary_map_is_refused(tmp_path, case):
    change, named = wrong_vocabularies()[case]
    with pytest.raises(ValueError, match=named):
        loaded(folders.write(tmp_path, HEAD, folders.head_tensors() | change))


# ---- files that are damaged, absent, or of another kind


def test_a_truncated_file_is_named(tmp_path):
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 4, 300, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors.*complete.*again"):
            convert.plan(folder)


def test_a_truncated_torch_file_is_named(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*complete.*again"):
        convert.plan(tmp_path)


def test_a_torch_file_of_the_old_format_is_refused_with_what_to_do(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    state = {"a": torch.zeros(3)}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*safetensors"):
        convert.plan(tmp_path)


def test_a_torch_file_cannot_run_code(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")

    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    torch.save({"a": Attack()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected tensors by name"):
        convert.plan(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_torch_file_of_other_things_than_tensors_is_refused(tmp_path):
    torch = pytest.importorskip("torch", reason="writes .bin files")
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    torch.save({"state_dict": {"a": torch.zeros(3)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: expected tensors by name"):
        convert.plan(tmp_path)


def test_without_torch_a_bin_file_names_the_extra_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"jspec\[convert\]"):
        convert.plan(tmp_path)


def sharded(folder: Path) -> tuple[Path, Path, dict]:
    folders.write(folder, TARGET, folders.target_tensors(), shards=3)
    index = folder / "model.safetensors.index.json"
    return folder, index, json.loads(index.read_text())


def test_an_absent_shard_is_named(tmp_path):
    folder, _, _ = sharded(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
        convert.plan(folder)


@pytest.mark.parametrize("fault", ["not in its shard", "in no shard"])
def test_a_tensor_that_is_not_where_the_index_says_is_named(tmp_path, fault):
    folder, index, content = sharded(tmp_path)
    shard = content["weight_map"][Q_PROJ]
    if fault == "in no shard":
        content["weight_map"]["model.ghost.weight"] = shard
    else:
        content["weight_map"][Q_PROJ] = next(s for s in content["weight_map"].values() if s != shard)
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="ghost" if fault == "in no shard" else Q_PROJ):
        convert.plan(folder)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    folder, _, content = sharded(tmp_path)
    other = next(s for s in content["weight_map"].values() if s != content["weight_map"][Q_PROJ])
    save_file(stored(folder), folder / other)
    with pytest.raises(ValueError, match="expected once"):
        convert.plan(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {}}'])
def test_an_unreadable_index_is_named(tmp_path, content):
    folder, index, _ = sharded(tmp_path)
    index.write_text(content)
    with pytest.raises(ValueError, match=r"index\.json"):
        convert.plan(folder)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, missing):
    folder = folders.write(tmp_path, TARGET, folders.target_tensors())
    (folder / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        convert.plan(folder)


@pytest.mark.parametrize(
    ("folder", "named"), [("eagle1/draft", "EAGLE-1"), ("medusa/heads", "Medusa")], ids=["eagle1", "medusa"]
)
def test_a_head_of_another_format_is_refused_by_name(golden, folder, named):
    if named == "EAGLE-1":
        pytest.importorskip("torch", reason="the head is a .bin")
    with pytest.raises(NotImplementedError, match=named):
        convert.plan(golden / folder)


def test_the_speculators_format_is_refused_by_name(tmp_path):
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": TARGET}
    with pytest.raises(NotImplementedError, match="speculators"):
        convert.plan(folders.write(tmp_path, config, folders.head_tensors()))


# ---- the command


def test_the_command_lists_every_tensor_with_its_parameter(tmp_path, capsys):
    tensors = folders.head_tensors()
    source = folders.write(tmp_path / "src", HEAD, tensors)
    assert main([str(source), str(tmp_path / "dst"), "--feature-layers", "2,16,29"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, tensor in tensors.items():
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert str(list(tensor.shape)) in line
        assert str(tensor.dtype) in line
    assert "midlayer.mlp.up_proj.weight [24, 16] float32 -> layer.gate_up" in lines
    assert "MiB" in lines[-1]


@pytest.mark.parametrize("fault", ["no source", "unknown tensor", "existing destination", "truncated", "bad values"])
def test_the_command_fails_with_one_message_and_leaves_nothing(tmp_path, capsys, fault):
    tensors = folders.head_tensors()
    if fault == "unknown tensor":
        tensors["surprise"] = np.zeros(2, np.float32)
    if fault == "bad values":  # found while writing, after the destination was begun
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
    assert capsys.readouterr().err.startswith("error: ")
    after = [path for path in sorted(tmp_path.rglob("*")) if path != target.parent]
    assert after == [path for path in before if path != target.parent]


# ---- memory

MEASURE = """
import re, sys
from pathlib import Path
from convert import __main__ as command, hf

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


def test_conversion_holds_less_than_a_shard_and_a_tensor(tmp_path):
    """0.6 GB in shards of 70 MB; beyond what a tiny conversion takes (imports, first use of orbax)."""
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
    assert peak(2**40) > limit  # the whole model in one batch: the measurement sees it
