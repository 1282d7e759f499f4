"""Test that experts of published float8 checkpoints keep their bytes, and compute with what these stand for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jspec import DraftModel, Engine, Model, SamplingParams, Tree
from jspec.models.weights.quantize import check_device
from jspec.tools.convert import main as convert_main
from jspec.tools.info import describe
from pallas_kernels.layers.experts.expert_matmul import Gate
from pallas_kernels.layers.experts.expert_mlp import ExpertMlp, expert_mlp
from pallas_kernels.layers.weights import Quantized
from tests.kernels.test_expert_matmul import choices, loop
from tests.models.test_fp8_checkpoints import BLOCKS, IDS, TOLERANCE, logits
from tests.models.test_hybrid_files import together
from tests.support import folders
from tests.support import quantized_folders as made
from tests.support.arrays import on_device
from tests.support.quantized_folders import BLOCK, FORMATS

pytestmark = pytest.mark.once

SCALE = "weight_scale_inv"
WIDTH = 40  # channels of an expert, cut by the last block of rows, and by that of columns
FAMILIES = ("qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_5_moe_text")
Tensors = made.Tensors


def recorded(folder: Path, width: int | None = None) -> tuple[dict[str, Any], Tensors]:
    """Return config and tensors of a recorded mixture; with a width, of random experts of as many channels."""
    config, tensors = json.loads((folder / "config.json").read_text()), folders.stored(folder)
    if width is None:
        return config, tensors
    rng, old = np.random.default_rng(0), config["moe_intermediate_size"]
    for name in [name for name in tensors if "experts." in name]:
        out, inner = (width if size == old else size for size in tensors[name].shape)
        sizes = 10.0 ** rng.uniform(-0.5, 0.5, (out // 8, inner // 8)).repeat(8, 0).repeat(8, 1)
        tensors[name] = (rng.standard_normal((out, inner)) * sizes / inner**0.5).astype(np.float32)
    return {**config, "moe_intermediate_size": width}, tensors


def with_float8_experts(
    folder: Path, form: made.QuantizedFormat, width: int | None = None
) -> tuple[dict[str, Any], Tensors, Tensors]:
    """Return the config and the tensors of a mixture of experts with float8 experts, and with their widened weights."""
    config, own = recorded(folder, width)
    stored = wide = folders.experts_one_by_one(own) if "llama4" in config["model_type"] else own
    for name in [name for name in wide if "experts." in name]:
        values, beside, widened_weight = form.quantise(wide[name].astype(np.float32))
        ends = {f"{name.removesuffix('weight')}{end}": scale for end, scale in beside.items()}
        stored, wide = {**stored, name: values, **ends}, {**wide, name: widened_weight}
    return {**config, "quantization_config": form.config}, stored, wide


def write_both(folder: Path, config: dict[str, Any], stored: Tensors, wide: Tensors) -> tuple[Path, Path]:
    """Write a quantised folder, and one with the weights that it stands for."""
    plain = folders.without(config, "quantization_config")
    return folders.write(folder / "fp8", config, stored), folders.write(folder / "wide", plain, wide)


def widened(values: np.ndarray, scale: np.ndarray, block: tuple[int, int] = BLOCK) -> np.ndarray:
    """Multiply each value by the scale of its block, in float64."""
    row, column = (np.arange(size) // each for size, each in zip(values.shape[-2:], block, strict=True))
    return values.astype(np.float64) * scale.astype(np.float64)[..., row[:, None], column]


def experts_of(stored: Tensors, layer: int, **wrong: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return gate above up, and down, of all experts of a layer in float64, from the bytes and scales of a file."""
    prefix = f"model.layers.{layer}.mlp.experts"
    count = sum(name.startswith(prefix) and name.endswith("down_proj.weight") for name in stored)

    def one(index: int, part: str) -> np.ndarray:
        base = f"{prefix}.{index}.{part}_proj"
        scale = wrong.get("changed", lambda scale: scale)(stored[f"{base}.{SCALE}"])
        return widened(stored[f"{base}.weight"], scale, wrong.get("block", BLOCK))

    gate_up = [np.concatenate([one(index, part) for part in ("gate", "up")]) for index in range(count)]
    return np.stack(gate_up), np.stack([one(index, "down") for index in range(count)])


def device_weights(weight: Any) -> np.ndarray:
    """Return float8 experts as they are on the device in float64, after checks of their kind and size."""
    assert isinstance(weight, Quantized) and weight.kind == "fp8" and weight.values.nbytes == np.prod(weight.shape)
    values, scale = np.asarray(weight.values).astype(np.float64), np.asarray(weight.scale, np.float64)
    return values * scale.repeat(weight.group, axis=-1)


# Other readings of the same file.
WRONG: dict[str, dict[str, Any]] = {
    "transposed": {"changed": lambda scale: np.ascontiguousarray(scale.T).reshape(scale.shape)},
    "larger blocks": {"block": (2 * BLOCK[0], 2 * BLOCK[1])},
    "inverse": {"changed": lambda scale: 1 / scale},
}


def test_experts_with_scales_of_blocks_have_the_products_of_the_bytes_and_scales_of_the_file(
    tmp_path: Path, golden: Path
) -> None:
    config, stored, wide = with_float8_experts(golden / "families" / "qwen3_moe", BLOCKS, WIDTH)
    own, _ = write_both(tmp_path, config, stored, wide)
    layer = Model.from_pretrained(own, dtype="float32").layers[1]
    weights: Any = ExpertMlp(layer.experts_gate_up, layer.experts_down)
    expected = experts_of(stored, 1)
    for weight, right in zip(weights[:2], expected, strict=True):
        np.testing.assert_array_equal(device_weights(weight), right)
    x, chosen = np.random.default_rng(1).standard_normal((20, 32)).astype(np.float32), choices("any", 8, 2, 20)
    got = np.asarray(expert_mlp(on_device(x), weights, on_device(chosen), gate=Gate()))

    def products(gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return loop(loop(x, gate_up, chosen, Gate()), down, chosen)

    size = np.abs(got).max()
    np.testing.assert_allclose(got, products(*expected), atol=1e-5 * size)
    for name, wrong in WRONG.items():
        assert np.abs(got - products(*experts_of(stored, 1, **wrong))).max() > 0.02 * size, f"control: {name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_float8_experts_with_scales_of_blocks_have_the_logits_of_their_widened_weights(
    family: str, tmp_path: Path, golden: Path
) -> None:
    """deepseek_v3 and glm4_moe have shared experts in float8, too, and a dense layer before."""
    config, stored, wide = with_float8_experts(golden / "families" / family, BLOCKS, WIDTH)
    paths = write_both(tmp_path, config, stored, wide)
    own, plain = (Model.from_pretrained(path, dtype="float32") for path in paths)
    for index, layer in enumerate(own.layers):
        if layer.experts_down is not None:
            expected = experts_of(stored, index)
            for weight, right in zip((layer.experts_gate_up, layer.experts_down), expected, strict=True):
                np.testing.assert_array_equal(device_weights(weight), right)
    np.testing.assert_allclose(logits(own, IDS), logits(plain, IDS), atol=TOLERANCE)
    dequantized = Model.from_pretrained(paths[0], dtype="float32", quantize="none")
    assert all(map(np.array_equal, jax.tree.leaves(dequantized), jax.tree.leaves(plain)))
    unrounded = Model.from_pretrained(
        folders.write(tmp_path / "float", *recorded(golden / "families" / family, WIDTH)), dtype="float32"
    )
    assert np.abs(logits(own, IDS) - logits(unrounded, IDS)).max() > 10 * TOLERANCE, "control: weights before rounding"


def test_float8_experts_of_a_layer_in_one_tensor_have_scales_of_blocks_of_its_rows(
    tmp_path: Path, golden: Path
) -> None:
    """A block has the 16 rows of an expert's gate and the 16 of its up; transformers names the tensors like this."""
    config, tensors = recorded(golden / "families" / "qwen3_5_moe_text")
    stored = wide = together(tensors)
    for name in [name for name in wide if ".experts." in name]:
        values, beside, widened_weights = zip(*map(made.by_block, wide[name].astype(np.float32)), strict=True)
        scales = np.stack([one[SCALE] for one in beside])
        stored = {**stored, name: np.stack(values), f"{name}_scale_inv": scales}
        wide = {**wide, name: np.stack(widened_weights)}
    assert stored["model.layers.1.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 1, 2)
    quantized = {**config, "quantization_config": BLOCKS.config}
    own, plain = (
        Model.from_pretrained(path, dtype="float32") for path in write_both(tmp_path, quantized, stored, wide)
    )
    for part in ("gate_up", "down"):
        name = f"model.layers.1.mlp.experts.{part}_proj"
        expected = widened(stored[name], stored[f"{name}_scale_inv"])
        np.testing.assert_array_equal(device_weights(getattr(own.layers[1], f"experts_{part}")), expected)
    np.testing.assert_allclose(logits(own, IDS), logits(plain, IDS), atol=TOLERANCE)
    swapped = {
        name: np.roll(scale, 1, 0) if name.endswith("gate_up_proj_scale_inv") else scale
        for name, scale in stored.items()
    }
    other = Model.from_pretrained(folders.write(tmp_path / "other", quantized, swapped), dtype="float32")
    assert np.abs(logits(other, IDS) - logits(plain, IDS)).max() > 10 * TOLERANCE, "control: scales of other experts"


@pytest.mark.parametrize(
    ("family", "is_drafted", "devices"),
    [
        ("qwen3_moe", False, 2),
        ("qwen3_5_moe_text", False, 1),
        pytest.param("deepseek_v3", True, 1, marks=pytest.mark.long),
    ],
)
def test_float8_experts_have_the_tokens_of_their_widened_weights_converted_drafted_and_divided(
    family: str, is_drafted: bool, devices: int, tmp_path: Path, golden: Path
) -> None:
    config, stored, wide = with_float8_experts(golden / "families" / family, BLOCKS, WIDTH)
    paths = write_both(tmp_path, config, stored, wide)
    assert convert_main([str(paths[0]), str(tmp_path / "out")]) == 0
    own, converted, plain = (
        Model.from_pretrained(path, dtype="float32") for path in (paths[0], tmp_path / "out", paths[1])
    )
    assert all(map(np.array_equal, jax.tree.leaves(converted), jax.tree.leaves(own)))
    assert "quantised: fp8 in groups of 16 or fp8 in groups of 8" in describe(tmp_path / "out").splitlines()
    sizes = dict(slots=1, max_len=64, buckets=(1,), prefill_buckets=(16,), prefix_cache=False, controls=False)
    tokens = []
    for target in (converted, plain):
        drafter = DraftModel(own, Tree.chain(2)) if is_drafted else None
        with Engine(target, drafter=drafter, tensor_parallel=devices, **sizes) as engine:
            (done,) = engine.generate([IDS], SamplingParams(max_tokens=32, temperature=0))
            if devices == 1:
                assert engine.memory_plan.target_weights == sum(leaf.nbytes for leaf in jax.tree.leaves(target))
        tokens.append(done.token_ids)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 32 and len(set(tokens[0])) > 4


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_moe", "compressed-tensors by row"), ("qwen3_moe", "fp8 by tensor"), ("llama4_text", "fp8 by tensor")],
)
def test_float8_experts_with_a_scale_a_row_or_a_tensor_have_the_logits_of_their_widened_weights(
    family: str, name: str, tmp_path: Path, golden: Path
) -> None:
    config, stored, wide = with_float8_experts(golden / "families" / family, FORMATS[name])
    own, plain = (Model.from_pretrained(path, dtype="float32") for path in write_both(tmp_path, config, stored, wide))
    experts = own.layers[1].experts_gate_up
    assert isinstance(experts, Quantized) and experts.scale.shape == experts.shape[:2] and experts.kind == "fp8"
    np.testing.assert_array_equal(
        np.asarray(experts.values, np.float32) * np.asarray(experts.scale)[..., None],
        np.asarray(plain.layers[1].experts_gate_up),
    )
    np.testing.assert_allclose(logits(own, IDS), logits(plain, IDS), atol=TOLERANCE)
    with pytest.raises(ValueError, match=r"expected int8 or .* for the experts .*, got fp8_dynamic; pass fp8"):
        Model.from_pretrained(tmp_path / "fp8", quantize="fp8_dynamic")


def test_all_experts_in_one_tensor_with_a_scale_a_tensor_are_refused_by_name(tmp_path: Path, golden: Path) -> None:
    config, tensors = recorded(golden / "families" / "qwen3_5_moe_text")
    stored = together(tensors)
    name = "model.layers.0.mlp.experts.down_proj"
    stored = {**stored, name: stored[name].astype(made.FLOAT8)}
    quantized = {**config, "quantization_config": FORMATS["modelopt"].config}
    with pytest.raises(NotImplementedError, match=rf"experts_down: expected an unquantised parameter.*, got .*{name}"):
        Model.from_pretrained(folders.write(tmp_path, quantized, stored))


def test_gpu_is_refused_for_experts_whose_groups_its_kernel_does_not_multiply(tmp_path: Path, golden: Path) -> None:
    config, stored, wide = with_float8_experts(golden / "families" / "qwen3_moe", BLOCKS)
    own, plain = write_both(tmp_path, config, stored, wide)
    gpu: Any = SimpleNamespace(compute_capability="9.0")
    with pytest.raises(
        ValueError, match=r"fp8: on a GPU groups must be multiples of 32 columns, got 16; quantize='none'"
    ):
        check_device(Model.from_pretrained(own, dtype="bfloat16"), device=gpu)
    check_device(Model.from_pretrained(plain, dtype="bfloat16"), device=gpu)
