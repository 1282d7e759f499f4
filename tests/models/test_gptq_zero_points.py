"""Test that the zero points of GPTQ are read as the file decides, whichever format it names, or refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.fields import CheckpointError
from jspec import Model
from tests.reference import int4 as reference
from tests.support import int4_folders as made
from tests.support.int4_folders import FORMATS

pytestmark = pytest.mark.once

O_PROJ = "model.layers.1.self_attn.o_proj"


@cache
def quantised(name: str) -> tuple[made.Tensors, made.Tensors]:
    return made.quantised(FORMATS[name])


def weight_of(stored: made.Tensors) -> made.Tensors:
    """The tensors of O_PROJ by the last part of their names."""
    return {end: stored[f"{O_PROJ}.{end}"] for end in ("qweight", "qzeros", "scales", "g_idx")}


@pytest.mark.parametrize("sym", [True, None])
@pytest.mark.parametrize("stored", [7, 8])
@pytest.mark.parametrize("label", [None, "gptq", "gptq_v2"])
def test_symmetric_gptq_has_zero_points_8_whatever_its_files_call_them(
    label: str | None, stored: int, sym: bool | None, tmp_path: Path
) -> None:
    """Published files name gptq beside words of gptq_v2; by both formats a symmetric zero point is 8."""
    tensors = dict(quantised("gptq")[0])
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = np.full_like(tensors[name], stored * 0x11111111 - (stored == 8) * 2**32)
    folder = made.write(tmp_path, FORMATS["gptq"], tensors, sym=sym, checkpoint_format=label)
    widened = Model.from_pretrained(folder, dtype="float32", quantize="none")
    weight = weight_of(tensors)
    np.testing.assert_array_equal(widened.layers[1].o, reference.gptq(weight, offset=8 - stored))


def test_symmetric_gptq_with_other_zero_points_is_refused_by_sym(tmp_path: Path) -> None:
    folder = made.write(tmp_path, FORMATS["gptq"], quantised("gptq")[0], sym=True)
    with pytest.raises(NotImplementedError, match=r"qzeros.*: expected zero points 7 or 8 throughout, as sym"):
        Model.from_pretrained(folder, dtype="float32")


def with_zeros_of_0(seed: int) -> tuple[made.Tensors, np.ndarray]:
    """Return a checkpoint whose words are those of gptq_v2 less 0x11111111, and the weight O_PROJ by gptq_v2."""
    tensors = dict(quantised("gptq v2")[0])
    for name in [name for name in tensors if name.endswith("qzeros")]:
        words = np.random.default_rng(seed).integers(0, 2**32, tensors[name].shape, np.uint32)
        tensors[name] = words.view(np.int32)
    wanted = reference.gptq(weight_of(tensors), offset=0)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        tensors[name] = (tensors[name].view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    return tensors, wanted


def test_zero_points_of_0_are_read_as_the_quantizer_wrote_them_or_refused(tmp_path: Path) -> None:
    """GPTQModel makes the first format from the second by one subtraction a word, which borrows from the next value."""
    tensors, wanted = with_zeros_of_0(0)
    meta = {"quantizer": ["optimum:1.24.0", "gptqmodel:1.4.0"]}
    folder = made.write(tmp_path / "known", FORMATS["gptq"], tensors, meta=meta)
    np.testing.assert_array_equal(Model.from_pretrained(folder, dtype="float32", quantize="none").layers[1].o, wanted)
    for name, about in (("none", {}), ("other", {"meta": {"quantizer": "auto_gptq:0.7.1"}})):
        folder = made.write(tmp_path / name, FORMATS["gptq"], tensors, **about)
        with pytest.raises(NotImplementedError, match=r"qzeros.*: expected gptq_v2 as checkpoint_format, or "):
            Model.from_pretrained(folder, dtype="float32")


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize("has_config", [True, False])
def test_gptq_v2_named_in_quantize_config_alone_is_read(key: str, has_config: bool, tmp_path: Path) -> None:
    stored, wide = quantised("gptq v2")
    folder = made.write(tmp_path, FORMATS["gptq"], stored)
    (folder / "quantize_config.json").write_text(json.dumps({**made.GPTQ, key: "gptq_v2"}))
    if not has_config:
        (folder / "config.json").write_text(json.dumps(made.CONFIG))
    widened = Model.from_pretrained(folder, dtype="float32", quantize="none")
    np.testing.assert_array_equal(widened.layers[1].o, wide[f"{O_PROJ}.weight"])


@pytest.mark.parametrize(
    ("changes", "other", "name"),
    [
        ({"format": "gptq"}, {"checkpoint_format": "gptq_v2"}, "checkpoint_format: expected 'gptq', .*got 'gptq_v2'"),
        ({}, {"sym": True}, "sym: expected False, .*got True"),
        ({}, {"bits": 8}, "bits: expected 4, .*got 8"),
    ],
)
def test_two_configs_of_gptq_that_differ_are_refused(
    changes: dict[str, Any], other: dict[str, Any], name: str, tmp_path: Path
) -> None:
    folder = made.write(tmp_path, FORMATS["gptq"], quantised("gptq")[0], **changes)
    (folder / "quantize_config.json").write_text(json.dumps(made.GPTQ | other))
    with pytest.raises(CheckpointError, match=rf"quantize_config\.json: {name}; correct the wrong one"):
        Model.from_pretrained(folder)
