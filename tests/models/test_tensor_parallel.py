"""Test how weights are divided over devices, in memory and while a checkpoint is read."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from convert.orbax import Header
from jspec import Model, distributed
from jspec.draft.auto import load_drafter
from jspec.draft.eagle import Eagle3
from jspec.models import load
from jspec.models.parts.param_spec import ParamSpec
from jspec.models.weights.params import model_params
from jspec.models.weights.quantize import quantize_weights
from jspec.models.weights.tensor_parallel import (
    compare_folder,
    device_rows,
    layout,
    local_shapes,
    mesh_of,
    place,
    spec_of,
)
from jspec.tools.convert import main
from pallas_kernels.layers.partial_sums import reduce_partials
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.shard import AXIS, Shard, look_up
from pallas_kernels.layers.split_matmul import split_matmul
from tests.support import byte_pair, tiny
from tests.support.arrays import on_device


def test_rows_of_fused_parameters_are_ordered_by_device() -> None:
    """Four query heads and two key-value heads of two rows each; four devices share the key-value heads in pairs."""
    qkv = ParamSpec((16, 3), ("heads", "hidden"), parts=(8, 4, 4), unit=2)
    two, four = device_rows(qkv, 2), device_rows(qkv, 4)
    assert two is not None and two.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    assert four is not None and four.reshape(4, 6).tolist() == [
        [0, 1, 8, 9, 12, 13],
        [2, 3, 8, 9, 12, 13],
        [4, 5, 10, 11, 14, 15],
        [6, 7, 10, 11, 14, 15],
    ]
    gate_up = device_rows(ParamSpec((8, 3), ("mlp", "hidden"), parts=(4, 4)), 2)
    assert gate_up is not None and gate_up.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert device_rows(ParamSpec((8, 3), ("vocab", "hidden")), 2) is None


def test_part_that_is_one_unit_is_on_every_device() -> None:
    """The first part is the projection to a latent cache, which all devices have; heads have two rows."""
    mixed = device_rows(ParamSpec((11, 4), ("heads", "hidden"), parts=(3, 8), unit=(3, 2)), 2)
    assert mixed is not None and mixed.reshape(2, 7).tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 7, 8, 9, 10]]
    assert device_rows(ParamSpec((11, 4), ("latent", "hidden"), parts=(3, 8)), 2) is None, "it is not divided"


def test_each_weight_of_a_target_is_divided_by_its_declared_axes() -> None:
    specs = {name: spec_of(param) for name, param in model_params(tiny.config(64, layers=1)).items()}
    rows, columns, whole = P(AXIS, None), P(None, AXIS), P(None)
    assert specs == {
        "embed": P(None, None),
        "layers.0.qkv": rows,
        "layers.0.o": columns,
        "layers.0.gate_up": rows,
        "layers.0.down": columns,
        "layers.0.mlp_norm": whole,
        "layers.0.attn_norm": whole,
        "norm": whole,
        "head": rows,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 200])  # devices exchange parts, or sums
@pytest.mark.parametrize("kind", [None, "int8", "fp8_dynamic"])
def test_products_and_look_ups_on_four_devices_are_those_of_one(rows: int, kind: str | None, dtype: str) -> None:
    rng, mesh = np.random.default_rng(0), mesh_of(4)
    x, weight = (on_device(rng.normal(size=shape), dtype) for shape in ((rows, 32), (24, 32)))
    weight = weight.at[22:].set(0)  # padding, so that four devices can divide 22 rows
    ids = on_device(rng.integers(0, 22, rows))
    whole: Any = weight if kind is None else quantize_weights({"o": weight}, kind)["o"]

    def local(x: Any, by_rows: Any, by_columns: Any, table: Any) -> Any:
        start = jax.lax.axis_index(AXIS) * 8
        columns = jax.lax.dynamic_slice_in_dim(x, start, 8, axis=1)
        summed = reduce_partials(split_matmul(columns, Shard(by_columns, "columns", 24)), x.dtype)
        return matmul(x, Shard(by_rows, "rows", 22)), summed, look_up(Shard(table, "rows", 22), ids)

    def spec(axis: int) -> Any:
        if kind is None:
            return P(AXIS) if axis == 0 else P(None, AXIS)
        values, scale = (P(AXIS), P(AXIS)) if axis == 0 else (P(None, AXIS), P())
        return jax.tree.unflatten(jax.tree.structure(whole), [values, scale])

    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), spec(0), spec(1), P(AXIS)), out_specs=P(), check_vma=False)
    by_rows, summed, looked_up = jax.jit(run)(x, whole, whole, weight)
    expected = np.asarray(matmul(x, whole), np.float32)
    largest, exact = np.abs(expected).max(), 1e-6 if dtype == "float32" else 0.02
    rounded = 0.05 if kind == "fp8_dynamic" else exact  # inputs have scales for each device's columns
    np.testing.assert_allclose(np.asarray(by_rows, np.float32), expected[:, :22], rtol=0, atol=exact * largest)
    np.testing.assert_allclose(np.asarray(summed, np.float32), expected, rtol=0, atol=rounded * largest)
    np.testing.assert_array_equal(looked_up, weight[ids])


def leaves(tree: Any) -> dict[str, jax.Array]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}


CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gemma4_text", {}),
    ("gemma4_e2b", {}),
    ("qwen2", dict(quantize="int8")),
    ("glm4_moe", dict(quantize="fp8")),
    ("quantized/qwen3_fp8_block", {}),  # scales of blocks
    ("deepseek_v2", {}),
    ("deepseek_v3", dict(quantize="int8")),
    ("quantized/gpt_oss_mxfp4", {}),  # packed experts
    ("quantized/deepseek_v3_fp8_block", {}),  # experts with scales of blocks
)


ON_FOUR = ("qwen2", "quantized/qwen3_fp8_block")  # by default; the others are on two devices


@pytest.mark.parametrize("is_converted", [False, True], ids=["hugging face", "converted"])
@pytest.mark.parametrize(
    ("family", "options", "devices"),
    [
        pytest.param(
            family,
            options,
            devices,
            id=f"{family}-{devices}",
            marks=[pytest.mark.long] * ((devices == 4) != (family in ON_FOUR)),
        )
        for family, options in CASES
        for devices in (2, 4)
        if devices == 2 or not family.startswith(("deepseek", "gemma4_e2b"))  # six experts, and two query heads
    ],
)
def test_checkpoint_read_for_a_mesh_has_the_weights_that_division_in_memory_gives(
    family: str, options: dict[str, Any], is_converted: bool, devices: int, golden: Path, tmp_path: Path
) -> None:
    folder, mesh = golden / "families" / family, mesh_of(devices)
    if is_converted:
        assert main([str(folder), str(tmp_path / "out")]) == 0
        folder = tmp_path / "out"
    whole, divided = (load.load(folder, dtype="float32", mesh=at, **options) for at in (None, mesh))
    wanted = leaves(place(Model.from_weights(whole.config, whole.weights), mesh))
    got = leaves(Model.from_weights(divided.config, divided.weights, mesh))
    assert wanted.keys() == got.keys()
    for name, array in got.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(wanted[name]), err_msg=name)
        assert array.sharding.is_equivalent_to(wanted[name].sharding, array.ndim), name
    layer = 0 if family.startswith("deepseek") else 1
    queries = "q_up" if "deepseek_v3" in family else "qkv"  # qkv of the former is not divided
    names = [queries, "o", "gate_up", "down", "experts_gate_up", "experts_down"]
    names = [f"layers.{layer}.{name}" for name in names]
    arrays = [got[full] for name in names for full in (name, f"{name}.values") if full in got]
    assert len(arrays) == {"glm4_moe": 6, "quantized/deepseek_v3_fp8_block": 6}.get(family, 4)
    for array in arrays:
        assert {shard.data.size for shard in array.addressable_shards} == {array.size // devices}


def test_head_read_for_a_mesh_is_divided_before_an_engine_has_it() -> None:
    drafter = load_drafter(byte_pair.HEAD, dtype="float32", mesh=mesh_of(2))
    assert isinstance(drafter, Eagle3) and drafter.head.mesh == mesh_of(2)
    specs = layout(drafter.head)
    assert specs.layers[0].o == P(None, AXIS) and specs.head == P(AXIS, None) and specs.fc == P(AXIS, None)


def test_no_array_is_sent_to_one_device_alone_while_a_checkpoint_is_read(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, sent, put = mesh_of(2), [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda array, place=None: (sent.append(place), put(array, place))[1])
    load.load(golden / "families" / "llama", dtype="float32", mesh=mesh)
    assert len(sent) > 10 and all(getattr(place, "mesh", None) == mesh for place in sent)


def test_checkpoint_whose_sizes_cannot_be_divided_is_refused_before_weights_are_read(
    golden: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(golden / "families" / "llama", tmp_path / "copy")
    with pytest.raises(ValueError, match="expected a divisor of 4, the model's num_attention_heads, got 3"):
        load.load(folder, mesh=mesh_of(3))


def test_weights_of_one_device_share_what_the_records_share() -> None:
    target = place(tiny.model(64, layers=1), mesh_of(2))
    one, other = local_shapes((target, target.embed), target.mesh)
    assert one.embed is other and one.config.num_heads == 2 and one.mesh is None
    assert isinstance(one.head, Shard) and one.head.shape == (32, 16)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (3, "expected a multiple of 2, the number of processes, got 3"),
        (4, "expected at most 2, as process 1 has 1 devices, got 4"),
        (6, "expected at most 4, the number of cpu devices, got 6"),
    ],
)
def test_mesh_that_processes_cannot_share_equally_is_refused(
    devices: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [SimpleNamespace(platform="cpu", process_index=index) for index in (0, 0, 0, 1)]
    monkeypatch.setattr(jax, "devices", lambda: found)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=f"tensor_parallel: {expected}"):
        mesh_of(devices)


def test_processes_compare_the_samples_of_a_converted_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job: Any = SimpleNamespace(weights=hashlib.sha256())
    monkeypatch.setattr(distributed, "_job", job)
    header = Header("target", {}, {}, tmp_path, samples="0a")
    for is_multi_process, expected in ((False, b""), (True, b"0a")):
        compare_folder(header, SimpleNamespace(is_multi_process=is_multi_process))  # type: ignore[arg-type]
        assert job.weights.hexdigest() == hashlib.sha256(expected).hexdigest()
    with pytest.raises(ValueError, match=r"expected samples of the weights, .* got none; convert the model again"):
        compare_folder(replace(header, samples=""), SimpleNamespace(is_multi_process=True))  # type: ignore[arg-type]
