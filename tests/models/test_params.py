"""Test declared parameters: folders hold them, and random and abstract weights have their shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.orbax import flatten
from jspec.draft import auto
from jspec.draft.eagle_head import head_params
from jspec.draft.medusa import medusa_params
from jspec.models.families import read_config
from jspec.models.parts.param_spec import Params, ParamSpec
from jspec.models.weights.params import abstract_weights, layer_params, model_params, random_weights
from tests.support import folders
from tests.support.folders import EAGLE, HEAD, TARGET, without

pytestmark = pytest.mark.once

FOLDERS: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "target": (TARGET, folders.target_tensors()),
    "tied": ({**TARGET, "tie_word_embeddings": True}, without(folders.target_tensors(), "lm_head.weight")),
    "eagle3": (HEAD, folders.head_tensors()),
    "eagle": (EAGLE, folders.eagle_tensors()),
    "medusa": ({}, folders.medusa_tensors()),
}


def declared(folder: Path) -> tuple[Params, dict[str, tuple[int, ...]]]:
    """Return the declared parameters of a folder's model, and the shape of each parameter in the folder."""
    plan = auto.plan(folder)
    params = {"target": model_params, "medusa": medusa_params}.get(plan.kind, head_params)(plan.config)
    return params, {row.parameter: row.shape for row in plan.rows}


@pytest.mark.parametrize("name", FOLDERS)
def test_declared_params_of_each_kind_have_the_names_and_shapes_in_its_folder(name: str, tmp_path: Path) -> None:
    params, read = declared(folders.write(tmp_path, *FOLDERS[name]))
    assert {parameter: spec.shape for parameter, spec in params.items()} == read


@pytest.mark.parametrize("name", FOLDERS)
def test_random_weights_of_each_kind_have_the_declared_shapes_and_dtypes(name: str, tmp_path: Path) -> None:
    params, _ = declared(folders.write(tmp_path, *FOLDERS[name]))
    abstract, drawn = abstract_weights(params, "bfloat16"), random_weights(params, "bfloat16", seed=0)
    assert jax.tree.structure(abstract) == jax.tree.structure(drawn)
    for parameter, weight in flatten(drawn).items():
        spec = params[parameter]
        assert (weight.shape, str(weight.dtype)) == (spec.shape, spec.dtype or "bfloat16")
        assert len(spec.axes) == weight.ndim
        if spec.init == "ones":
            assert (weight == 1).all()
        elif spec.init == "range":
            assert weight.tolist() == list(range(spec.shape[0]))
        elif spec.init == "zeros":
            assert not weight.any()
        else:
            assert 0.5 < float(jnp.std(weight.astype("float32"))) * np.sqrt(spec.shape[-1]) < 1.5


def test_layer_params_with_bias_and_head_norms_include_these_weights() -> None:
    plain, rich = _layer(False, None), _layer(True, "head")
    assert rich.keys() - plain.keys() == {"qkv_bias", "q_norm", "k_norm"}
    assert rich["qkv_bias"].part_shapes() == [(16,), (8,), (8,)]
    assert rich["qkv"].part_shapes() == [(16, 16), (8, 16), (8, 16)]


def _layer(bias: bool, qk_norm: str | None) -> dict[str, ParamSpec]:
    layer = read_config(TARGET).resized(qkv_bias=bias, qk_norm=qk_norm).layers[0]
    return layer_params(layer, 16, 16)
