"""Test that experts in mxfp4 stay packed, and have the values that the format defines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.fields import CheckpointError, Fields
from convert.huggingface import MapRow, batches, check, mapped, stacked
from convert.sources import open_source
from jspec import Drafter, DraftModel, Engine, Model, NGram, SamplingParams, Tree
from jspec.models.weights.mxfp4_rows import mxfp4_rows, widened
from jspec.models.weights.quantize import quantize_weights, quantized_as
from jspec.models.weights.quantized_config import read_scheme
from jspec.models.weights.scheme import Scheme
from jspec.tools.convert import main as convert_main
from jspec.tools.info import describe
from jspec.tools.replay import run_texts
from pallas_kernels.layers.experts import mxfp4
from pallas_kernels.layers.weights import Quantized
from tests.support import folders, recordings
from tests.support.arrays import on_device

pytestmark = pytest.mark.once

NAME = "model.layers.0.mlp.experts.down_proj"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
EXPERTS, OUT, INNER = 3, 5, 64


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (EXPERTS, OUT, INNER // 32, 16), np.uint8)
    return {f"{NAME}_blocks": blocks, f"{NAME}_scales": rng.integers(120, 130, blocks.shape[:-1], np.uint8)}


def expected(stored: dict[str, np.ndarray]) -> np.ndarray:
    """Widen value by value with the dtypes of ml_dtypes, to [experts, in, out]."""
    blocks, scales = stored[f"{NAME}_blocks"], stored[f"{NAME}_scales"]
    wide = np.empty((EXPERTS, INNER, OUT), np.float32)
    for expert, column, row in np.ndindex(*wide.shape):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        bits = np.array(byte >> 4 * (column % 2) & 15, np.uint8).view(ml_dtypes.float4_e2m1fn)
        factor = scales[expert, row, column // 32].view(ml_dtypes.float8_e8m0fnu)
        wide[expert, column, row] = np.float32(bits) * np.float32(factor)
    return wide


def read(values: np.ndarray) -> np.ndarray:
    """Do what a family may do with an unquantised tensor [experts, in, out]: transpose it and reorder rows."""
    return values.swapaxes(1, 2)[:, ::-1]


def rows() -> list[MapRow]:
    return [mapped(stacked("experts", {NAME: (EXPERTS, OUT, INNER)}), read, (EXPERTS, INNER, OUT))]


def filled(folder: Path, *, dequantize: bool) -> np.ndarray:
    """Return the experts as they are read, widened at load or on the device."""
    source = open_source(folder)
    found = mxfp4_rows(rows(), source.tensors, dequantize=dequantize)
    check(found, source.tensors)
    (batch,) = batches(source, found, "float32")
    if dequantize:
        return batch["experts"]
    assert all(array.dtype == np.uint8 for array in batch.values())
    assert sum(array.nbytes for array in batch.values()) == EXPERTS * OUT * INNER * 17 // 32
    return np.asarray(mxfp4.widened(on_device(batch["experts.values"]), on_device(batch["experts.scale"])))


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "widened at load"])
def test_experts_have_the_values_of_each_block_times_its_scale(tmp_path: Path, dequantize: bool) -> None:
    stored = tensors()
    wanted = read(expected(stored))
    np.testing.assert_array_equal(
        filled(folders.write(tmp_path / "own", {}, stored), dequantize=dequantize), wanted, strict=True
    )
    blocks, scales = stored[f"{NAME}_blocks"], stored[f"{NAME}_scales"]
    for name, wrong in (
        ("blocks", blocks << 4 | blocks >> 4),
        ("scales", scales + 1),
        ("scales", np.roll(scales, 1, -1)),
    ):
        folder = folders.write(tmp_path / "other", {}, {**stored, f"{NAME}_{name}": wrong})
        assert np.abs(filled(folder, dequantize=dequantize) - wanted).max() > 0.1, "control"


def test_rounded_weight_has_the_nearest_numbers_times_the_scale_of_the_specification() -> None:
    weight = np.random.default_rng(2).normal(size=(3, 4, 96)).astype(np.float32)
    weight[0, 0, :32] = 0
    weight[0, 1, :8] = [-4, 0.25, -0.75, 1.25, -1.75, 2.5, 3.5, 5][:8]  # with a scale of 1 halfway between two numbers
    weight[0, 1, 8:32] = 0
    got = np.asarray(mxfp4.widened(*mxfp4.round_to_mxfp4(on_device(weight))))
    numbers = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    for place in np.ndindex(3, 4, 3):
        group = weight[place[:2]][32 * place[2] : 32 * (place[2] + 1)].astype(np.float64)
        most = np.abs(group).max()
        scale = 2.0 ** (np.floor(np.log2(most)) - 2) if most else 1.0
        distance = np.abs(np.abs(group)[:, None] / scale - numbers)
        even = np.where(np.isclose(distance, distance.min(1, keepdims=True)), np.arange(8) % 2, 2)
        wanted = np.sign(group) * numbers[even.argmin(1)] * scale
        np.testing.assert_array_equal(got[place[:2]][32 * place[2] : 32 * (place[2] + 1)], wanted)
    with pytest.raises(ValueError, match="mxfp4: expected a multiple of 32 input channels, got 48"):
        mxfp4.round_to_mxfp4(on_device(np.zeros((2, 48))))


def test_extreme_scales_are_powers_of_two_and_255_is_nan() -> None:
    blocks, scales = np.full((4, 1, 16), 0x22, np.uint8), np.array([[0], [1], [254], [255]], np.uint8)
    found = widened(blocks, scales)
    np.testing.assert_array_equal(found[:3, 0], np.ldexp(np.float32(1), [-127, -126, 127]))
    assert np.isnan(found[3]).all()


def test_scales_on_the_device_are_powers_of_two_and_255_is_nan() -> None:
    found = np.asarray(mxfp4.factors(on_device([0, 1, 127, 254, 255], jnp.uint8)).astype(jnp.bfloat16))
    wanted = np.array([0, 1, 127, 254, 255], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


@pytest.mark.parametrize("dequantize", [False, True], ids=["packed", "widened at load"])
def test_damaged_mxfp4_is_named(tmp_path: Path, dequantize: bool) -> None:
    stored = tensors()
    with pytest.raises(CheckpointError, match="expected experts in mxfp4, got none"):
        mxfp4_rows(rows(), {}, dequantize=dequantize)
    blocks = stored[f"{NAME}_blocks"]
    damages = {
        rf"missing: {NAME}_scales": folders.without(stored, f"{NAME}_scales"),
        rf"not uint8: {NAME}_scales \(int32\)": stored | {f"{NAME}_scales": np.ones((3, 5, 2), np.int32)},
        r"wrong shape: .*_blocks .*got \(2, 5, 2, 16\)": stored | {f"{NAME}_blocks": blocks[:2]},
    }
    if not dequantize:
        scales = np.where(np.arange(2) == 1, 255, stored[f"{NAME}_scales"]).astype(np.uint8)
        message = rf"model.safetensors: .{NAME}_scales.: expected scales below 255, got 255, which is NaN \(.*: 15\)"
        damages[message] = stored | {f"{NAME}_scales": scales}
    for index, (message, wrong) in enumerate(damages.items()):
        folder = folders.write(tmp_path / str(index), {}, wrong)
        with pytest.raises(ValueError, match=message):
            filled(folder, dequantize=dequantize)


@pytest.mark.parametrize("quantize", [None, "none"])
def test_gpt_oss_in_mxfp4_has_the_logits_of_its_widened_experts(quantize: str | None, golden: Path) -> None:
    folder = golden / "families" / "quantized" / "gpt_oss_mxfp4"
    recorded = recordings.recording(folder / "expect.npz")
    target = Model.from_pretrained(folder, dtype="float32", quantize=quantize)
    assert quantized_as(target) == (None if quantize else "mxfp4")
    for i in range(2):
        wanted = recorded[f"logits{i}"]
        np.testing.assert_allclose(last_logits(target, recorded[f"prompt{i}"].tolist(), len(wanted)), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("quantize", "draft"),
    [
        (None, "n-grams"),
        *(
            pytest.param(quantize, draft, marks=pytest.mark.long)
            for quantize, draft in ((None, "tree"), ("none", "chain"), ("none", "nothing"))
        ),
    ],
)
def test_gpt_oss_in_mxfp4_has_the_greedy_tokens_of_its_widened_experts(
    quantize: str | None, draft: str, golden: Path
) -> None:
    folder = golden / "families" / "quantized" / "gpt_oss_mxfp4"
    recorded = recordings.recording(folder / "expect.npz")
    target = Model.from_pretrained(folder, dtype="float32", quantize=quantize)
    prompts = [recorded[f"prompt{i}"].tolist() for i in range(2)]
    sizes = dict(slots=2, max_len=128, buckets=(2,), prefill_buckets=(48,), prefix_cache=False, controls=False)
    drafters: dict[str, Drafter | None] = {
        "n-grams": NGram(Tree.chain(3)),
        "tree": DraftModel(target, Tree.topk(nodes=6, depth=3, k=2)),
        "chain": DraftModel(target, Tree.chain(3)),
        "nothing": None,
    }
    with Engine(target, drafter=drafters[draft], **sizes) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
    answers = [one.token_ids for one in done]
    assert [ids[:32] for ids in answers] == [recorded[f"greedy{i}"].tolist() for i in range(2)]
    assert recordings.most_likely(target, prompts, answers) == answers and len(answers[0]) == 64
    assert draft == "nothing" or engine.metrics.num_accepted_tokens > 0


def test_gpt_oss_with_wrong_bytes_of_its_experts_has_other_logits(golden: Path) -> None:
    folder = golden / "families" / "quantized" / "gpt_oss_mxfp4"
    recorded = recordings.recording(folder / "expect.npz")
    target = Model.from_pretrained(folder, dtype="float32")
    layer = target.layers[1]
    assert isinstance(layer.experts_down, Quantized)
    own = layer.experts_down
    prompt, wanted = recorded["prompt0"].tolist(), recorded["logits0"]
    for down in (
        replace(own, values=own.values << 4 | own.values >> 4),
        replace(own, scale=jnp.roll(own.scale, 1, axis=1)),
    ):
        other = target.replace(layers=[target.layers[0], layer.replace(experts_down=down)])
        assert np.abs(last_logits(other, prompt, len(wanted)) - wanted).max() > 1e-2


def last_logits(model: Model, prompt: list[int], count: int) -> np.ndarray:
    logits = run_texts(model, on_device([prompt])).logits
    assert logits is not None
    return np.asarray(logits[0, -count:])


def test_experts_alone_are_rounded_to_mxfp4_and_a_model_without_any_is_refused(golden: Path, tmp_path: Path) -> None:
    target = Model.from_pretrained(golden / "families" / "mixtral", quantize="mxfp4")
    assert quantized_as(target.layers[0].experts_down) == "mxfp4" and not isinstance(target.layers[0].qkv, Quantized)
    with pytest.raises(ValueError, match="expected weights named experts_gate_up, experts_down, got none"):
        Model.from_pretrained(golden / "families" / "llama", quantize="mxfp4")
    with pytest.raises(ValueError, match="expected unquantised weights, got mxfp4"):
        quantize_weights(target, "int8")
    assert convert_main([str(golden / "families" / "quantized" / "gpt_oss_mxfp4"), str(tmp_path / "out")]) == 0
    again = Model.from_pretrained(tmp_path / "out")
    own = Model.from_pretrained(golden / "families" / "quantized" / "gpt_oss_mxfp4")
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(own)))
    for folder in (tmp_path / "out", golden / "families" / "quantized" / "gpt_oss_mxfp4"):
        assert "(float32, mxfp4)" in describe(folder) and "quantised: mxfp4 in groups of 32" in describe(folder)


def test_config_of_mxfp4_gives_its_scheme() -> None:
    scheme = read_scheme(Fields.of({"quantization_config": CONFIG}), Path("/nowhere"))
    assert scheme == Scheme("mxfp4", "group", (1, 32), bits=4, unquantized=("model.layers.*.self_attn", "lm_head"))
