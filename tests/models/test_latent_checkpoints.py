"""Test that checkpoints with latent attention are read as they are when they are quantised, and damage is refused."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from convert.huggingface import _Selection
from jspec import Model
from jspec.models.weights.quantize import quantize_weights, quantized_as
from jspec.tools.replay import run_texts
from pallas_kernels.layers.weights import Quantized
from tests.support import folders, tiny
from tests.support.arrays import on_device
from tests.support.recordings import most_likely, recording

pytestmark = pytest.mark.once

TOLERANCE = 1e-4  # both sides use float32 but add up in different orders
BLOCK = 24  # rows and columns of a scale in the recorded checkpoint
DTYPES: dict[str, Any] = {"F32": np.float32, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def load_file(path: Path) -> dict[str, np.ndarray]:
    """Read a safetensors file, float8 values too."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = {name: part for name, part in json.loads(data[8:end]).items() if name != "__metadata__"}
    return {
        name: np.frombuffer(data[end:][slice(*part["data_offsets"])], DTYPES[part["dtype"]]).reshape(part["shape"])
        for name, part in header.items()
    }


def error(model: Model, folder: Path) -> float:
    """Return the largest difference from the recorded logits of the widened weights."""
    data = recording(folder / "expect.npz")
    prompts, wanted = ([data[f"{name}{i}"] for i in range(2)] for name in ("prompt", "logits"))
    padded = np.array(list(itertools.zip_longest(*prompts, fillvalue=0)), np.int32).T  # no row sees tokens after it
    found = run_texts(model, on_device(padded)).logits
    rows = [own[len(ids) - len(right) : len(ids)] for own, ids, right in zip(found, prompts, wanted, strict=True)]
    return float(max(np.abs(own - right).max() for own, right in zip(rows, wanted, strict=True)))


@pytest.fixture
def source(golden: Path) -> Path:
    return golden / "families" / "quantized" / "deepseek_v3_fp8_block"


@pytest.mark.parametrize("quantize", [None, "none"])
def test_float8_checkpoint_has_the_recorded_logits_and_tokens(quantize: str | None, source: Path) -> None:
    model, data = Model.from_pretrained(source, dtype="float32", quantize=quantize), recording(source / "expect.npz")
    assert quantized_as(model) == (None if quantize else "fp8") and error(model, source) < TOLERANCE
    prompts, tokens = ([data[f"{name}{i}"].tolist() for i in range(2)] for name in ("prompt", "greedy"))
    assert most_likely(model, prompts, tokens) == tokens


def test_float8_projections_of_latent_attention_keep_their_bytes_and_have_the_recorded_logits(source: Path) -> None:
    """The rows of queries and keys are reordered, and their scales with them; small weights are widened."""
    model, stored = Model.from_pretrained(source, dtype="float32"), load_file(source / "model.safetensors")
    for layer in model.layers:
        assert all(isinstance(weight, Quantized) for weight in (layer.qkv, layer.q_up, layer.o, layer.gate_up))
        assert not isinstance(layer.k_up, Quantized) and not isinstance(layer.v_up, Quantized)
    own = model.layers[1].q_up
    assert isinstance(own, Quantized)
    file = stored["model.layers.1.self_attn.q_b_proj.weight"].view(np.uint8)
    assert sorted(map(bytes, np.asarray(own.values).view(np.uint8))) == sorted(map(bytes, file))
    moved = model.replace(layers=[layer.replace(q_up=rolled(layer.q_up)) for layer in model.layers])
    assert error(moved, source) > 10 * TOLERANCE, "control: scales of other rows"
    layer = model.layers[1].replace(experts_down=rolled(model.layers[1].experts_down, 1))
    moved = model.replace(layers=[model.layers[0], layer, *model.layers[2:]])
    assert error(moved, source) > 10 * TOLERANCE, "control: scales of other experts"


def rolled(weight: Any, rows: int = BLOCK) -> Quantized:
    assert isinstance(weight, Quantized)
    return replace(weight, scale=jnp.roll(weight.scale, rows, axis=0))


def test_scales_that_are_not_reordered_with_their_rows_give_other_logits(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the selection of rows is left out where the scales are read."""
    call = _Selection.__call__

    def careless(self: _Selection, source: Any, row: Any, dtype: str) -> np.ndarray:
        found = call(self, source, row, dtype)
        return found if not row.parameter.endswith("q_up.scale") else np.sort(found, axis=0)

    monkeypatch.setattr(_Selection, "__call__", careless)
    assert error(Model.from_pretrained(source, dtype="float32"), source) > 10 * TOLERANCE


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_quantised_latent_attention_computes_with_the_rounded_weights(family: str, kind: str, golden: Path) -> None:
    target = tiny.load_target(golden / "families" / family)
    own = quantize_weights(target, kind)
    is_latent = family == "deepseek_v3"
    assert isinstance(own.layers[0].qkv, Quantized) and isinstance(own.layers[0].q_up, Quantized) == is_latent
    assert not isinstance(own.layers[0].k_up, Quantized)

    def wide(leaf: Any) -> Any:
        return leaf.values.astype(jnp.float32) * leaf.scale[..., None] if isinstance(leaf, Quantized) else leaf

    rounded = jax.tree.map(wide, own, is_leaf=lambda leaf: isinstance(leaf, Quantized))
    got, same, other = (
        run_texts(model, on_device(np.arange(40, dtype=jnp.int32))[None]).logits[0] for model in (own, rounded, target)
    )
    np.testing.assert_allclose(got, same, atol=TOLERANCE)
    assert np.abs(got - other).max() > 1e-2, "control: rounding shows"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim: expected an even number, got 15"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: expected an integer"),
        ({"q_lora_rank": "16"}, "q_lora_rank: expected an integer"),
        ({"v_head_dim": 8}, "wrong shape"),
        ({"q_lora_rank": None}, "missing: model.layers.0.self_attn.q_proj.weight"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"topk_method": "other"}, "topk_method: expected noaux_tc, got 'other'"),
        ({"scoring_func": "softmax"}, "scoring_func: expected sigmoid, got 'softmax'"),
        ({"n_group": 4}, "n_group: expected a divisor of the 6 experts"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_that_does_not_fit_latent_attention_is_refused_by_name(
    changes: dict[str, Any], message: str, golden: Path, tmp_path: Path
) -> None:
    folder = golden / "families" / "deepseek_v3"
    config = json.loads((folder / "config.json").read_text()) | changes
    folders.write(tmp_path, config, load_file(folder / "model.safetensors"))
    with pytest.raises((ValueError, NotImplementedError), match=message):
        Model.from_pretrained(tmp_path, dtype="float32")


def test_router_of_deepseek_v2_that_readers_compute_differently_is_refused(golden: Path, tmp_path: Path) -> None:
    folder = golden / "families" / "deepseek_v2"
    config = json.loads((folder / "config.json").read_text()) | {"norm_topk_prob": True}
    folders.write(tmp_path, config, load_file(folder / "model.safetensors"))
    with pytest.raises(NotImplementedError, match="norm_topk_prob: expected False, got True"):
        Model.from_pretrained(tmp_path, dtype="float32")
