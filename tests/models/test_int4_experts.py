"""Test that experts in published 4-bit formats stay packed, and have the logits of the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DraftModel, Engine, Model, SamplingParams, Tree
from jspec.models.weights.quantize import check_device
from jspec.tools.convert import main as convert_main
from jspec.tools.replay import run_texts
from pallas_kernels.layers.weights import Quantized
from tests.support import folders
from tests.support import int4_folders as made
from tests.support.arrays import on_device
from tests.support.int4_folders import FORMATS
from tests.support.recordings import most_likely

pytestmark = pytest.mark.once

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9]
TOLERANCE = 1e-4  # both sides use float32 but add up in different orders


def with_packed_experts(folder: Path, form: made.Int4Format) -> tuple[dict[str, Any], made.Tensors, made.Tensors]:
    """Return the config and the tensors of a mixture with experts in four bits, and with their widened weights."""
    config = json.loads((folder / "config.json").read_text())
    stored = wide = folders.stored(folder)
    for name in [name for name in wide if ".experts." in name]:
        weight = wide[name].astype(np.float32)
        numbers = made.rounded(weight, form.group or weight.shape[1], is_symmetric=form.is_symmetric)
        values, zeros, scale = numbers
        base = name.removesuffix("weight")
        ends = {f"{base}{end}": np.ascontiguousarray(array) for end, array in form.write(numbers).items()}
        size = weight.shape[1] // scale.shape[1]
        widened = (values - zeros.repeat(size, 1)).astype(np.float32) * scale.repeat(size, 1)
        stored, wide = {**folders.without(stored, name), **ends}, {**wide, name: widened}
    return {**config, "quantization_config": form.config}, stored, wide


def logits(model: Model) -> np.ndarray:
    found = run_texts(model, on_device([IDS], jnp.int32)).logits
    assert found is not None
    return np.asarray(found[0])


def device_weights(weight: Any) -> np.ndarray:
    """Decode experts as they are on the device, after checks of their kind and size."""
    assert isinstance(weight, Quantized) and weight.kind == "int4"
    assert weight.values.nbytes == np.prod(weight.shape) / 2
    count, out, columns = weight.shape
    values, half = np.asarray(weight.values), weight.values.shape[-1]
    scale, zeros = np.asarray(weight.scale), np.full(weight.scale.shape, 8)
    zeros = zeros if weight.zeros is None else np.asarray(weight.zeros).astype(int)
    wide, size = np.empty((count, out, columns), np.float32), columns // scale.shape[-1]
    for column in range(columns):
        block, place = divmod(column, 2 * half)
        number = (values[..., block, place % half] >> (4 * (place // half)) & 15).astype(int)
        wide[..., column] = (number - zeros[..., column // size]).astype(np.float32) * scale[..., column // size]
    return wide


@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_four_bits_have_the_logits_of_their_widened_weights(name: str, tmp_path: Path, golden: Path) -> None:
    config, stored, wide = with_packed_experts(golden / "families" / "qwen3_moe", FORMATS[name])
    own = Model.from_pretrained(folders.write(tmp_path / "own", config, stored))
    plain = Model.from_pretrained(
        folders.write(tmp_path / "wide", {**config, "quantization_config": None}, wide), dtype="float32"
    )
    for part in ("experts_gate_up", "experts_down"):
        wanted = np.asarray(getattr(plain.layers[1], part))
        np.testing.assert_array_equal(device_weights(getattr(own.layers[1], part)), wanted)
    np.testing.assert_allclose(logits(own), logits(plain), atol=TOLERANCE)
    widened = Model.from_pretrained(tmp_path / "own", quantize="none")
    np.testing.assert_allclose(logits(widened), logits(plain), atol=TOLERANCE)
    packed = [key for key in stored if "gate_proj" in key and key.endswith(("qweight", "_packed"))]
    other = {**stored, **{key: np.roll(stored[key], 1, 0) for key in packed}}
    wrong = Model.from_pretrained(folders.write(tmp_path / "other", config, other))
    assert np.abs(logits(wrong) - logits(plain)).max() > 1e-3, "control: the bytes of gates in another order"


@pytest.mark.parametrize(("is_drafted", "devices"), [(False, 2), pytest.param(True, 1, marks=pytest.mark.long)])
def test_experts_in_four_bits_have_the_same_tokens_converted_drafted_and_divided(
    is_drafted: bool, devices: int, tmp_path: Path, golden: Path
) -> None:
    config, stored, _ = with_packed_experts(golden / "families" / "qwen3_moe", FORMATS["gptq"])
    target = Model.from_pretrained(folders.write(tmp_path / "own", config, stored))
    assert convert_main([str(tmp_path / "own"), str(tmp_path / "out")]) == 0
    converted = Model.from_pretrained(tmp_path / "out")
    assert all(map(np.array_equal, jax.tree.leaves(converted), jax.tree.leaves(target)))
    sizes = dict(slots=1, max_len=64, buckets=(1,), prefill_buckets=(16,), prefix_cache=False, controls=False)
    drafter = DraftModel(target, Tree.chain(2)) if is_drafted else None
    with Engine(target, drafter=drafter, tensor_parallel=devices, **sizes) as engine:
        (done,) = engine.generate([IDS], SamplingParams(max_tokens=32, temperature=0))
    assert most_likely(target, [IDS], [done.token_ids]) == [done.token_ids] and len(done.token_ids) == 32


def test_device_that_cannot_multiply_packed_experts_is_refused(golden: Path) -> None:
    """The model's experts have 16 output channels; the kernel needs 64."""

    class Gpu:
        compute_capability = "9.0"

    folder = golden / "families" / "mixtral"
    target, wide = (Model.from_pretrained(folder, dtype=dtype, quantize="mxfp4") for dtype in ("bfloat16", "float32"))
    gpu: Any = Gpu()
    with pytest.raises(ValueError, match=r"mxfp4: on a GPU the experts' weights must be .*quantize='none' widens"):
        check_device(target, device=gpu)
    with pytest.raises(ValueError, match="mxfp4: on a GPU x must be bfloat16 for experts in mxfp4, got float32"):
        check_device(wide, device=gpu)
