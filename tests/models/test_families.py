"""Test the registry of model families: a small new family loads and computes; unknown families are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jspec import Model
from jspec.models import families
from jspec.models.config import ModelConfig
from jspec.models.families.llama import Llama
from jspec.tools.testing import last_logits
from tests.reference import decoder
from tests.support import folders
from tests.support.folders import TARGET

pytestmark = pytest.mark.once

SIZES = {"q": 16, "k": 8, "v": 8}


class Biased(Llama):
    """A family whose layers have biases and a norm of each query and key head."""

    def config(self, fields: Mapping[str, Any], *, rope_theta: float | None = None, **flags: bool) -> ModelConfig:
        return super().config(fields, rope_theta=rope_theta, qkv_bias=True, qk_norm=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(families.FAMILIES, "biased", Biased())  # removed again after the test
    families.register("biased")(Biased)
    shapes = folders.target_shapes(TARGET)
    for layer in range(TARGET["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        shapes |= {f"{attention}.{part}_proj.bias": (size,) for part, size in SIZES.items()}
        shapes |= {f"{attention}.{part}_norm.weight": (4,) for part in "qk"}
    return folders.write(tmp_path, {**TARGET, "model_type": "biased"}, folders.random_tensors(shapes))


def reference(model: Model, ids: list[int], *, qk_norm: bool = True) -> np.ndarray:
    """Compute the logits of the last token from the formulas in float64 [vocab]."""
    c, x = model.config, np.asarray(model.embed, np.float64)[ids][None]
    norm = decoder._norm
    for layer in model.layers:
        w = {name: np.asarray(value, np.float64) for name, value in vars(layer).items()}
        qkv = norm(x, w["attn_norm"], c.norm_eps) @ w["qkv"].T + w["qkv_bias"]
        q, k, v = np.split(qkv.reshape(*qkv.shape[:-1], -1, c.head_dim), [c.num_heads, c.num_heads + c.num_kv_heads], 2)
        if qk_norm:
            q, k = norm(q, w["q_norm"], c.norm_eps), norm(k, w["k_norm"], c.norm_eps)
        qkv = np.concatenate([q, k, v], 2).reshape(qkv.shape)
        x = x + decoder.attention(qkv, c) @ w["o"].T
        gate, up = np.split(norm(x, w["mlp_norm"], c.norm_eps) @ w["gate_up"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w["down"].T
    return (norm(x, np.asarray(model.norm, np.float64), c.norm_eps) @ np.asarray(model.output_head, np.float64).T)[
        0, -1
    ]


def test_model_with_bias_and_head_norms_has_the_logits_of_the_formulas(folder: Path) -> None:
    model, ids = Model.from_pretrained(folder, dtype="float32"), [3, 1, 4, 1, 5, 9, 2, 6]
    assert (model.config.family, model.config.qkv_bias, model.config.qk_norm) == ("biased", True, True)
    got, expected = last_logits(model, ids), reference(model, ids)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=1e-4 * scale)
    assert np.abs(got - reference(model, ids, qk_norm=False)).max() > 1e-2 * scale, (
        "negative control: logits without head norms must differ"
    )


@pytest.mark.usefixtures("folder")
def test_model_of_an_unknown_family_raises_naming_the_known_families() -> None:
    with pytest.raises(NotImplementedError, match="model_type: expected 'llama' or 'biased', got 'gpt2'"):
        families.family_of("gpt2")
    with pytest.raises(NotImplementedError, match="expected 'llama' or 'biased', got 'gpt2'"):
        families.read_config({**TARGET, "model_type": "gpt2"})
