"""Test that experts in mxfp4 are widened as the format defines, and only if that is asked for."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.fields import CheckpointError, Fields
from convert.huggingface import Row, batches, check, mapped, stacked
from convert.sources import open_source
from jspec import DraftModel, Engine, Model, SamplingParams, Tree
from jspec.models import families
from jspec.models.mxfp4_rows import mxfp4_rows, widened
from jspec.models.quantized_config import Scheme, read_scheme
from jspec.tools.replay import run_texts
from tests.support import folders, recordings

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


def rows() -> list[Row]:
    return [mapped(stacked("experts", {NAME: (EXPERTS, INNER, OUT)}), np.negative)]


def filled(folder: Path) -> np.ndarray:
    source = open_source(folder)
    found = mxfp4_rows(rows(), source.tensors, dequantize=True)
    check(found, source.tensors)
    (batch,) = batches(source, found, "float32")
    return batch["experts"]


def test_experts_have_the_values_of_each_block_times_its_scale(tmp_path: Path) -> None:
    """What a family does with the unquantised tensor, here a change of sign, is done with the widened one."""
    stored = tensors()
    np.testing.assert_array_equal(filled(folders.write(tmp_path / "own", {}, stored)), -expected(stored))
    blocks, scales = stored[f"{NAME}_blocks"], stored[f"{NAME}_scales"]
    for name, wrong in (
        ("blocks", blocks << 4 | blocks >> 4),
        ("scales", scales + 1),
        ("scales", np.roll(scales, 1, -1)),
    ):
        other = filled(folders.write(tmp_path / "other", {}, {**stored, f"{NAME}_{name}": wrong}))
        assert np.abs(other + expected(stored)).max() > 0.1, "control"


def test_extreme_scales_are_powers_of_two_and_255_is_nan() -> None:
    blocks, scales = np.full((4, 1, 16), 0x22, np.uint8), np.array([[0], [1], [254], [255]], np.uint8)
    found = widened(blocks, scales)
    np.testing.assert_array_equal(found[:3, 0], np.ldexp(np.float32(1), [-127, -126, 127]))
    assert np.isnan(found[3]).all()


def test_mxfp4_is_refused_unless_it_is_widened_and_damage_is_named(tmp_path: Path) -> None:
    stored = tensors()
    source = open_source(folders.write(tmp_path / "own", {}, stored))
    with pytest.raises(NotImplementedError, match=rf"mxfp4: expected quantize='none', .*got .*{NAME}_blocks"):
        mxfp4_rows(rows(), source.tensors, dequantize=False)
    with pytest.raises(CheckpointError, match="expected experts in mxfp4, got none"):
        mxfp4_rows(rows(), {}, dequantize=True)
    blocks = stored[f"{NAME}_blocks"]
    damages = {
        rf"missing: {NAME}_scales": folders.without(stored, f"{NAME}_scales"),
        rf"not uint8: {NAME}_scales \(int32\)": stored | {f"{NAME}_scales": np.ones((3, 5, 2), np.int32)},
        r"wrong shape: .*_blocks .*got \(2, 5, 2, 16\)": stored | {f"{NAME}_blocks": blocks[:2]},
    }
    for index, (message, wrong) in enumerate(damages.items()):
        folder = folders.write(tmp_path / str(index), {}, wrong)
        with pytest.raises(ValueError, match=message):
            filled(folder)


def test_gpt_oss_in_mxfp4_has_the_logits_and_greedy_tokens_of_its_widened_experts(golden: Path) -> None:
    if "gpt_oss" not in families.model_types():
        pytest.skip("the model family gpt_oss is not supported yet")
    folder = golden / "families" / "quantized" / "gpt_oss_mxfp4"
    recorded = recordings.recording(folder / "expect.npz")
    with pytest.raises(NotImplementedError, match=r"mxfp4: expected quantize='none', which widens them at load"):
        Model.from_pretrained(folder)
    target = Model.from_pretrained(folder, dtype="float32", quantize="none")
    prompts = [recorded[f"prompt{i}"].tolist() for i in range(2)]
    for i, prompt in enumerate(prompts):
        logits, wanted = run_texts(target, jnp.asarray([prompt])).logits, recorded[f"logits{i}"]
        assert logits is not None
        np.testing.assert_allclose(logits[0, -len(wanted) :], wanted, atol=1e-4)
    sizes = dict(slots=2, max_len=96, buckets=(2,), prefill_buckets=(48,), prefix_cache=False, controls=False)
    for drafter in (None, DraftModel(target, Tree.chain(3))):
        with Engine(target, drafter=drafter, **sizes) as engine:
            done = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0))
        assert [one.token_ids for one in done] == [recorded[f"greedy{i}"].tolist() for i in range(2)]


def test_config_of_mxfp4_gives_its_scheme() -> None:
    scheme = read_scheme(Fields.of({"quantization_config": CONFIG}), Path("/nowhere"))
    assert scheme == Scheme("mxfp4", "group", (1, 32), bits=4, unquantized=("model.layers.*.self_attn", "lm_head"))
