"""Test models made from arrays with the names of a checkpoint, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.models.exchange import from_names
from tests.models.test_families import RECORDED
from tests.support import tiny
from tests.support.arrays import on_device

pytestmark = pytest.mark.once


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


@pytest.mark.parametrize("family", RECORDED)
def test_model_of_named_arrays_has_the_bits_of_the_model_of_their_files(family: str, golden: Path) -> None:
    folder = golden / "families" / family
    loaded = tiny.load_target(folder)
    arrays = {name: on_device(values) for name, values in tensors_of(folder).items()}
    made = from_names(arrays, loaded.config, "float32")
    assert jax.tree.structure(made) == jax.tree.structure(loaded)
    differing = jax.tree.map(lambda a, b: a.dtype != b.dtype or not np.array_equal(a, b), made, loaded)
    assert not any(jax.tree.leaves(differing))
    changed = {name: values + 1 for name, values in arrays.items()}
    differing = jax.tree.map(
        lambda a, b: not np.array_equal(a, b), from_names(changed, loaded.config, "float32"), loaded
    )
    assert all(jax.tree.leaves(differing)), "control: every parameter is read from the arrays"


def test_named_arrays_that_do_not_fit_are_refused(golden: Path) -> None:
    folder = golden / "families" / "llama"
    config, arrays = tiny.load_target(folder).config, tensors_of(folder)

    def refusal(**changes: Any) -> str:
        with pytest.raises(ValueError, match="the tensors do not match the config") as error:
            from_names({name: a for name, a in {**arrays, **changes}.items() if a is not None}, config, "float32")
        return str(error.value)

    norm = "model.norm.weight"
    assert f"missing: {norm}" in refusal(**{norm: None})
    assert "unknown: extra" in refusal(extra=arrays[norm])
    assert f"wrong shape: {norm}" in refusal(**{norm: arrays[norm][:-1]})
    assert f"not floating point: {norm}" in refusal(**{norm: arrays[norm].astype(np.int32)})
