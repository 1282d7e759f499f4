"""Test converted folders: round trips, placement, atomic writes, damage, loading, descriptions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from convert import hub, orbax
from convert.fields import CheckpointError
from jspec.draft import auto
from jspec.draft.head_config import HeadConfig, Overrides
from jspec.models import load
from jspec.models.config.decoder_config import ModelConfig
from jspec.models.families import read_config
from jspec.tools.convert import main
from jspec.tools.info import describe
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.weights import FORMATS
from tests.support import byte_pair, folders, tokenizer_folders
from tests.support.folders import BFLOAT16, DRAFT_IDS, EAGLE, HEAD, TARGET, assert_same

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("small_heap")]  # damage makes the loader collect garbage

CONFIG = read_config(TARGET)
DTYPES = ["float32", "bfloat16", "float16"]


def parameters(dtype: str = "float32") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    names = ["embed", "norm", *(f"layers.{i}.{part}" for i in range(12) for part in ("qkv", "o"))]
    arrays = {name: rng.standard_normal((6, 4)).astype(jnp.dtype(dtype)) for name in names}
    return arrays | {"draft_to_target": np.arange(5, dtype=np.int32)}


@pytest.fixture
def target(tmp_path) -> Path:
    return folders.write(tmp_path / "target", TARGET, folders.target_tensors())


@pytest.fixture
def head(tmp_path) -> Path:
    return folders.write(tmp_path / "head", HEAD, folders.head_tensors())


@pytest.fixture
def eagle(tmp_path) -> Path:
    return folders.write(tmp_path / "eagle", EAGLE, folders.eagle_tensors())


@pytest.fixture
def medusa(tmp_path) -> Path:
    folder = folders.write(tmp_path / "medusa", {"medusa_num_heads": 2}, folders.medusa_tensors())
    return (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors").parent


@pytest.fixture
def converted(tmp_path, target) -> Path:
    assert main([str(target), str(tmp_path / "converted")]) == 0
    return tmp_path / "converted"


@pytest.fixture
def converted_head(tmp_path, head) -> Path:
    assert main([str(head), str(tmp_path / "converted_head")]) == 0
    return tmp_path / "converted_head"


# ---- round trips


def test_samples_of_a_folder_depend_on_values_and_names_but_not_on_the_order_of_batches(tmp_path: Path) -> None:
    def samples(name: str, *batches: dict[str, np.ndarray]) -> str:
        orbax.save(tmp_path / name, "target", CONFIG, batches)
        return orbax.read_header(tmp_path / name).samples

    arrays = parameters()
    pairs = list(arrays.items())
    whole = samples("whole", arrays)
    assert len(whole) == 64 and samples("parts", dict(pairs[5:]), dict(pairs[:5])) == whole
    other = arrays["layers.3.o"].copy()
    other[-1, -1] += 1
    renamed = arrays | {"layers.3.o": arrays["layers.4.o"], "layers.4.o": arrays["layers.3.o"]}
    assert len({whole, samples("other", arrays | {"layers.3.o": other}), samples("renamed", renamed)}) == 3


def test_unflatten_inverts_flatten():
    tree = {"embed": 0, "layers": [{"o": i, "qkv": -i} for i in range(12)], "layer": {"o": 1}}
    flat = orbax.flatten(tree)
    assert flat["layers.11.qkv"] == -11
    assert orbax.unflatten(dict(sorted(flat.items()))) == tree


@pytest.mark.parametrize("kind", FORMATS)
def test_kind_of_a_stored_weight_is_that_of_the_manifest(tmp_path: Path, kind: Any) -> None:
    tree = {
        "layers": [{"o": quantize(jnp.ones((3, 4, 32) if kind == "mxfp4" else (4, 32)), kind)}],
        "norm": jnp.ones(2),
    }
    arrays = {name: np.asarray(leaf) for name, leaf in orbax.flatten(tree).items()}
    orbax.save(tmp_path / "c", "target", CONFIG, [arrays], quantized=orbax.kinds_of(tree))
    header = orbax.read_header(tmp_path / "c")
    assert header.quantized == {"layers.0.o": kind}
    again = orbax.unflatten(orbax.read_arrays(header), header.quantized)
    assert jax.tree.structure(again) == jax.tree.structure(tree)


def test_kind_of_a_stored_weight_without_one_in_the_manifest_is_told_by_dtypes(tmp_path: Path) -> None:
    arrays = {f"o.{name}": np.asarray(array) for name, array in quantize(jnp.ones((4, 32)), "fp8").arrays.items()}
    orbax.save(tmp_path / "c", "target", CONFIG, [arrays])
    assert orbax.read_header(tmp_path / "c").quantized == {"o": "fp8"}
    for name, wrong in (("o", "int8"), ("o", "int3"), ("norm", "fp8")):
        file = tmp_path / "c" / "jspec.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantized": {name: wrong}}))
        with pytest.raises(CheckpointError, match=f"{name}: expected .*, got {wrong}"):
            orbax.read_header(tmp_path / "c")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batches", [1, 5])
def test_converted_arrays_after_save_and_read_have_equal_bits(tmp_path, dtype, batches):
    arrays = parameters(dtype)
    parts = [dict(list(arrays.items())[i::batches]) for i in range(batches)]
    orbax.save(tmp_path / "c", "target", CONFIG, parts)
    header = orbax.read_header(tmp_path / "c")
    assert (header.kind, ModelConfig.from_json(header.config)) == ("target", CONFIG)
    assert {n: (p.shape, p.dtype) for n, p in header.parameters.items()} == {
        n: (a.shape, a.dtype) for n, a in arrays.items()
    }
    assert_same(orbax.read_arrays(header), arrays)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_read_arrays_with_a_dtype_casts_floats_and_keeps_integers(tmp_path, monkeypatch, stored, wanted):
    monkeypatch.setattr(orbax, "READ_AHEAD", 1)  # orbax reads one array at a time, as for a model of many gigabytes
    arrays = parameters(stored)
    orbax.save(tmp_path / "c", "target", CONFIG, [arrays])
    expected = {
        name: array if array.dtype == np.int32 else array.astype(np.float32).astype(jnp.dtype(wanted))
        for name, array in arrays.items()
    }
    assert_same(orbax.read_arrays(orbax.read_header(tmp_path / "c"), dtype=wanted), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["target", "head", "eagle", "medusa"])
def test_load_checkpoint_of_a_converted_folder_equals_that_of_the_source_folder(tmp_path, request, dtype, kind):
    source, out = request.getfixturevalue(kind), tmp_path / "out"
    assert main([str(source), str(out)]) == 0
    direct, converted = auto.load_checkpoint(source, dtype=dtype), auto.load_checkpoint(out, dtype=dtype)
    assert (converted.kind, converted.config) == (direct.kind, direct.config)
    assert_same(orbax.flatten(converted.weights), orbax.flatten(direct.weights))
    assert jax.tree.structure(converted.weights) == jax.tree.structure(direct.weights)


def test_load_checkpoint_of_converted_demo_models_equals_that_of_the_source_folders(tmp_path):
    for source in (byte_pair.TARGET, byte_pair.HEAD):
        out = tmp_path / source.name
        assert main([str(source), str(out)]) == 0
        direct, converted = auto.load_checkpoint(source), auto.load_checkpoint(out)
        assert_same(orbax.flatten(converted.weights), orbax.flatten(direct.weights))


def test_convert_command_with_dtype_option_stores_weights_of_that_dtype(tmp_path, target):
    assert main([str(target), str(tmp_path / "c"), "--dtype", "bfloat16"]) == 0
    dtypes = {p.dtype for p in orbax.read_header(tmp_path / "c").parameters.values()}
    assert dtypes == {BFLOAT16}


@pytest.mark.parametrize("form", ["source", "converted"])
def test_load_checkpoint_with_placement_puts_weights_in_the_given_sharding(target, converted, form):
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("model",)), jax.sharding.PartitionSpec("model"))
    folder = target if form == "source" else converted
    loaded = auto.load_checkpoint(folder, placement=lambda name: sharding)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(loaded.weights))
    default = auto.load_checkpoint(folder)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert all(leaf.sharding == device for leaf in jax.tree.leaves(default.weights))


@pytest.mark.parametrize("form", ["source", "converted"])
@pytest.mark.parametrize("fault", ["no sharding", "too many axes"])
def test_load_checkpoint_with_a_wrong_placement_raises_naming_it_and_the_parameter(target, converted, form, fault):
    axes = jax.sharding.PartitionSpec(None, None, "model")
    deep = jax.sharding.NamedSharding(jax.make_mesh((1,), ("model",)), axes)
    given = deep if fault == "too many axes" else "cpu"
    with pytest.raises(ValueError, match=r"placement: expected a .*sharding.* (embed|norm|head|layers\.)") as error:
        auto.load_checkpoint(target if form == "source" else converted, placement=lambda name: given)
    assert "damaged" not in str(error.value)


def test_sharding_of_a_shape_that_the_devices_do_not_divide_raises():
    mesh = jax.sharding.AbstractMesh((3,), ("model",))
    thirds = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    with pytest.raises(ValueError, match=r"placement: expected a sharding for norm that divides its shape \(16,\)"):
        orbax.sharding_of("norm", (16,), lambda name: thirds)


def test_load_checkpoint_default_dtype_is_float32_on_cpu(target):
    if jax.default_backend() != "cpu":
        pytest.skip("the default dtype is float32 on CPU only")
    folder = target
    assert {leaf.dtype for leaf in jax.tree.leaves(auto.load_checkpoint(folder).weights)} == {jnp.dtype("float32")}


def test_convert_command_copies_tokenizer_and_generation_config(target, tmp_path):
    source, out = tokenizer_folders.write(target, "many_words"), tmp_path / "out"
    transformers.GenerationConfig(eos_token_id=[2, 3]).save_pretrained(source)
    (source / "additional_chat_templates").mkdir()
    (source / "chat_template.jinja").write_text("{{ 1 }}")
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert main([str(source), str(out)]) == 0
    text = "Once upon a time there was a dog. "
    before = transformers.AutoTokenizer.from_pretrained(source)
    after = transformers.AutoTokenizer.from_pretrained(out)
    assert before(text).input_ids == after(text).input_ids
    assert after.chat_template == before.chat_template == {"default": "{{ 1 }}", "tool_use": "{{ tools }}"}
    assert hub.eos_ids(out) == hub.eos_ids(source) == (2, 3)


# ---- writing all or nothing


def failing():
    yield parameters()
    raise RuntimeError("disk on fire")


@pytest.mark.parametrize("existing", [False, True])
def test_failed_save_of_a_checkpoint_leaves_the_previous_files_unchanged(tmp_path, existing):
    folder = tmp_path / "c"
    if existing:
        orbax.save(folder, "target", CONFIG, [parameters()])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RuntimeError, match="fire"):
        orbax.save(folder, "target", CONFIG, failing(), overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    if existing:
        assert_same(orbax.read_arrays(orbax.read_header(folder)), parameters())


def test_checkpoint_save_with_overwrite_replaces_the_whole_checkpoint(tmp_path):
    folder = tmp_path / "c"
    orbax.save(folder, "target", CONFIG, [parameters()])
    with pytest.raises(FileExistsError, match="--overwrite"):
        orbax.save(folder, "target", CONFIG, [{"a": np.ones(3)}])
    orbax.save(folder, "target", CONFIG, [{"a": np.ones(3, np.float32)}], overwrite=True)
    assert set(orbax.read_header(folder).parameters) == {"a"}
    assert list(tmp_path.iterdir()) == [folder]


def test_checkpoint_save_with_overwrite_over_a_folder_of_other_files_raises(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").touch()
    with pytest.raises(FileExistsError, match="something else"):
        orbax.save(tmp_path / "home", "target", CONFIG, [parameters()], overwrite=True)
    assert (tmp_path / "home" / "letters").exists()


# ---- damage


def test_read_header_manifest_of_another_version_raises(converted):
    manifest = json.loads((converted / "jspec.json").read_text())
    (converted / "jspec.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ValueError, match=f"version {orbax.VERSION}, got 99"):
        auto.load_checkpoint(converted)


@pytest.mark.parametrize("is_packed", [False, True])
def test_folder_of_version_two_is_read_unless_it_has_packed_weights(tmp_path, is_packed):
    packed = {"layers.0.qkv.values": np.zeros((4, 2, 16), np.uint8)} if is_packed else {}
    orbax.save(tmp_path / "old", "target", CONFIG, [parameters() | packed])
    manifest = json.loads((tmp_path / "old" / "jspec.json").read_text())
    (tmp_path / "old" / "jspec.json").write_text(json.dumps({**manifest, "version": 2}))
    if not is_packed:
        assert orbax.read_header(tmp_path / "old").parameters.keys() == parameters().keys()
        return
    with pytest.raises(ValueError, match=f"version {orbax.VERSION}, got 2; convert the model again"):
        orbax.read_header(tmp_path / "old")


@pytest.mark.parametrize("content", ["", "{}", "this version", "another kind"])
def test_read_header_damaged_manifest_raises(converted, content):
    own = {"version": orbax.VERSION}
    content = {"this version": json.dumps(own), "another kind": json.dumps({**own, "kind": "x", "config": {}})}.get(
        content, content
    )
    (converted / "jspec.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged checkpoint.*convert the model again"):
        auto.load_checkpoint(converted)


@pytest.mark.parametrize("how", ["absent", "truncated", "emptied"])
def test_load_checkpoint_converted_folder_with_damaged_weights_raises(converted, how):
    if how == "absent":
        shutil.rmtree(converted / "weights")
    else:
        largest = max((f for f in (converted / "weights").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        content = largest.read_bytes()
        largest.write_bytes(content[: len(content) // 2] if how == "truncated" else b"")
    with pytest.raises(ValueError, match=r"damaged checkpoint.*convert the model again"):
        auto.load_checkpoint(converted)


def test_read_arrays_value_too_large_for_float16_raises_naming_the_array(tmp_path):
    orbax.save(tmp_path / "c", "target", CONFIG, [{"big": np.full(3, 1e5, np.float32), "ok": np.ones(3)}])
    header = orbax.read_header(tmp_path / "c")
    with pytest.raises(ValueError, match=r"65504.* big;"):
        orbax.read_arrays(header, dtype="float16")


# ---- loading


@pytest.mark.parametrize("form", ["source", "converted"])
def test_load_model_from_a_draft_head_folder_raises(head, converted_head, form):
    with pytest.raises(ValueError, match="kind 'target', got 'eagle3'"):
        load.load(head if form == "source" else converted_head)


@pytest.mark.parametrize("form", ["source", "converted"])
def test_load_checkpoint_applies_overrides_to_source_and_converted_folders(head, converted_head, form):
    folder = head if form == "source" else converted_head
    options = dict(feature_layers=(1, 2, 3), norm_before_residual=True, norm_output=True)
    got = auto.load_checkpoint(folder, Overrides(rope_theta=5e5, **options))
    plain = auto.load_checkpoint(folder)
    assert isinstance(got.config, HeadConfig)
    assert (got.config.rope.theta, got.config.feature_layers) == (5e5, (1, 2, 3))
    assert got.config.norm_before_residual and got.config.norm_output
    assert not (plain.config.norm_before_residual or plain.config.norm_output or plain.config.feature_layers)
    assert_same(orbax.flatten(got.weights), orbax.flatten(plain.weights))
    with pytest.raises(ValueError, match=r"feature_layers|fc"):
        auto.load_checkpoint(folder, Overrides(feature_layers=(1, 2)))


def test_load_checkpoint_override_false_replaces_a_stored_true(tmp_path, head):
    out = tmp_path / "out"
    assert main([str(head), str(out), "--norm-output"]) == 0
    assert auto.load_checkpoint(out).config.norm_output
    assert not auto.load_checkpoint(out, Overrides(norm_output=False)).config.norm_output


def test_load_checkpoint_override_of_a_field_that_the_kind_lacks_raises(tmp_path, eagle, medusa):
    for name, source in (("eagle", eagle), ("medusa", medusa)):
        assert main([str(source), str(tmp_path / "out" / name)]) == 0
        with pytest.raises(ValueError, match=f"norm_output: .*'{name}'"):
            auto.load_checkpoint(tmp_path / "out" / name, Overrides(norm_output=True))
    assert auto.load_checkpoint(tmp_path / "out" / "eagle", Overrides(rope_theta=5e5)).config.rope.theta == 5e5


def test_load_checkpoint_feature_layers_override_for_a_target_raises(converted):
    with pytest.raises(ValueError, match=r"feature_layers.*target"):
        auto.load_checkpoint(converted, Overrides(feature_layers=(1, 2, 3)))


def test_load_checkpoint_unknown_dtype_raises_before_reading_files():
    with pytest.raises(ValueError, match=r"dtype.*float32, bfloat16, float16.*int8"):
        auto.load_checkpoint("/nowhere", dtype="int8")


# ---- descriptions


@pytest.mark.parametrize("form", ["source", "converted"])
def test_describe_eagle3_head_prints_format_features_vocabulary_and_size(head, converted_head, form):
    text = describe(head if form == "source" else converted_head)
    count = sum(t.size for t in folders.head_tensors().values()) - DRAFT_IDS.size - HEAD["vocab_size"]
    for words in (
        "EAGLE-3 head (official format), hidden 16",
        "flags beside plain EAGLE-3: none",
        "target states 2, N//2, N-3 (the default)",
        "10 of the target's 40 ids, ascending map",
        "embedding: shared with the target",
        "output head: own",
        "theta 10000",
        f"parameters: {count:,} (float32)",
    ):
        assert words in text


def test_describe_head_with_flags_prints_the_flag_names(tmp_path):
    flags = {"norm_before_residual": True, "norm_output": True, "speculators_model_type": "eagle3"}
    config = {**flags, "draft_vocab_size": 10, "transformer_layer_config": {**TARGET, "num_hidden_layers": 1}}
    text = describe(folders.write(tmp_path, config, folders.head_tensors()))
    assert "EAGLE-3.1 head (speculators format)" in text
    assert "flags beside plain EAGLE-3: norm_before_residual, norm_output" in text


def test_describe_head_without_fusion_prints_the_single_target_hidden_state(tmp_path):
    tensors = folders.head_tensors()
    del tensors["fc.weight"]
    options = {"use_aux_hidden_state": False, "use_last_layernorm": True}
    text = describe(folders.write(tmp_path, {**HEAD, "eagle_config": options}, tensors))
    assert "EAGLE-3 head (modelopt format)" in text
    assert "flags beside plain EAGLE-3: no fuse" in text
    assert "features: target state N+1, after the final norm" in text


@pytest.mark.parametrize("form", ["source", "converted"])
def test_describe_eagle1_or_medusa_head_prints_format_and_target_hidden_state(tmp_path, eagle, medusa, form):
    folder = {"eagle": eagle, "medusa": medusa}
    if form == "converted":
        for name, source in folder.items():
            folder[name] = tmp_path / "out" / name
            assert main([str(source), str(folder[name])]) == 0
    text = {name: describe(path) for name, path in folder.items()}
    for words in (
        "EAGLE-1/2 head (official format)",
        "flags beside plain EAGLE-1/2: none",
        "target state N+1, after the final norm",
        "vocabulary: the target's 40 ids",
        "output head: shared with the target",
    ):
        assert words in text["eagle"]
    assert "Medusa, 3 heads, residual blocks in each: 1, hidden 16" in text["medusa"]
    assert "target state N+1, after the final norm" in text["medusa"]


def test_describe_ambiguous_config_prints_the_override_to_pass(tmp_path):
    text = describe(folders.write(tmp_path, {**HEAD, "norm_output": True}, folders.head_tensors()))
    assert "cannot be loaded: " in text
    assert "config.json: norm_output: expected" in text
    assert "pass norm_output=True" in text


def test_describe_head_with_unordered_vocabulary_map_prints_that_it_is_not_monotone(tmp_path):
    tensors = folders.head_tensors() | folders.vocabulary(DRAFT_IDS[::-1])
    assert "not monotone map" in describe(folders.write(tmp_path, HEAD, tensors))


def test_describe_converted_folder_reads_no_weights(converted):
    for file in (converted / "weights").rglob("ocdbt.process_*/d/*"):
        file.write_bytes(bytes(file.stat().st_size))
    text = describe(converted)
    assert "converted by jspec" in text
    assert "llama, 3 layers, hidden 16" in text
    assert "cannot be loaded" not in text


def test_describe_folder_with_damaged_eos_ids_prints_the_rest_and_the_error(tmp_path):
    text = describe(folders.write(tmp_path, {**TARGET, "eos_token_id": 97.5}, folders.target_tensors()))
    assert "llama, 3 layers, hidden 16" in text
    assert "EOS ids: cannot be read: " in text and "got 97.5" in text


def test_describe_unloadable_folder_prints_the_reason(tmp_path):
    tensors = folders.target_tensors()
    del tensors["model.norm.weight"]
    text = describe(folders.write(tmp_path, TARGET, tensors))
    assert "cannot be loaded" in text
    assert "missing: model.norm.weight" in text
