"""Test that a drafter given to an engine by its path drafts the same on two devices as on one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jspec import MTP, Engine, Metrics, SamplingParams
from jspec.draft import dflash
from jspec.draft.auto import load_drafter
from jspec.draft.base import Drafter
from jspec.draft.formats.dflash_format import dflash_format, head_params
from jspec.models.load import Format
from jspec.tools.convert import main
from tests.support import byte_pair, cover, folders, tiny

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
OPTIONS: dict[str, Any] = dict(slots=1, max_len=64, buckets=(1,), prefill_buckets=(32,), controls=False)
OPTIONS |= dict(dtype="float32", eos_ids=())
PARAMS = SamplingParams(max_tokens=24, temperature=0.0)
WIDE = {**folders.TARGET, "num_hidden_layers": 8}  # a random target of the size of the recorded P-EAGLE head
# Of each drafter: the folder, and the least mean acceptance length, which heads that are drawn at random lack.
HEADS: dict[str, tuple[Path, float]] = {
    "eagle3": (byte_pair.HEAD, 3.0),
    "eagle": (GOLDEN / "eagle1/draft", 3.0),
    "medusa": (GOLDEN / "medusa/heads", 2.0),
    "dflash": (GOLDEN / "dflash/draft", 2.5),
    "dspark": (GOLDEN / "dspark/draft", 3.0),
    "draft model": (byte_pair.TARGET, 5.0),
    "peagle": (GOLDEN / "peagle/speculators/draft", 1.0),
    "mtp": (GOLDEN / "families/glm4_moe", 1.0),
    "gemma4 assistant": (GOLDEN / "gemma4_assistant/e2b", 1.0),
}
DEFAULT = ("dflash",)


def target_of(kind: str, folder: Path) -> Path:
    """Return the folder of the target of a drafter; ``folder`` is an empty one."""
    if kind in ("eagle", "medusa"):
        pytest.importorskip("torch", reason="reads .bin files")
    if kind == "peagle":
        return folders.write(folder, WIDE, folders.target_tensors(WIDE))
    if kind == "gemma4 assistant":
        return GOLDEN / "families/gemma4_e2b"
    return HEADS["mtp"][0] if kind == "mtp" else byte_pair.TARGET


def drafter_of(kind: str) -> Drafter | Path:
    """Return the path of a drafter, which for MTP is the target's and would name a draft model, so it is loaded."""
    folder = HEADS[kind][0]
    return MTP.from_pretrained(folder, dtype="float32") if kind == "mtp" else folder


def divided_weights(kind: str, target: Path, drafter: Drafter | Path) -> Any:
    """Return the drafter's weights in an engine on two devices, which compiles nothing."""
    with Engine.from_pretrained(target, drafter=drafter, tensor_parallel=2, **OPTIONS) as engine:
        return engine.core.runner.params.draft


def differing(made: Any, wanted: Any) -> list[str]:
    """Return the names of the arrays of two trees that differ in values or are on devices in other ways."""

    def is_equal(array: jax.Array, other: jax.Array) -> bool:
        return array.sharding.is_equivalent_to(other.sharding, array.ndim) and np.array_equal(array, other)

    equal = jax.tree.map(is_equal, made, wanted)
    return [jax.tree_util.keystr(path) for path, same in jax.tree.leaves_with_path(equal) if not same]


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind != "mtp"])
def test_drafter_read_for_two_devices_has_the_weights_of_one_divided_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the negative control each device reads a part of a DFlash head's layers, whose rows `bind` then misplaces."""
    target, folder = target_of(kind, tmp_path), HEADS[kind][0]
    wanted = divided_weights(kind, target, load_drafter(folder, dtype="float32"))
    assert differing(divided_weights(kind, target, folder), wanted) == []
    if kind in ("dflash", "dspark"):

        def divided(*args: Any, **options: Any) -> Format:
            form = dflash_format(*args, **options)
            return replace(form, params=lambda config, names: form.params(config, names) | head_params(config))

        monkeypatch.setattr(dflash, "dflash_format", divided)
        broken = differing(divided_weights(kind, target, folder), wanted)
        assert ".context.kv" in broken and ".model.layers[0].qkv" in broken


def test_converted_quantised_head_read_for_two_devices_has_the_weights_of_one_divided_later(tmp_path: Path) -> None:
    assert main([str(HEADS["dspark"][0]), str(tmp_path / "head"), "--quantize", "int8"]) == 0
    wanted = divided_weights("dspark", byte_pair.TARGET, load_drafter(tmp_path / "head", dtype="float32"))
    assert differing(divided_weights("dspark", byte_pair.TARGET, tmp_path / "head"), wanted) == []


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=cover.marks_of(kind, DEFAULT, HEADS.keys())) for kind in HEADS]
)
def test_drafter_by_its_path_drafts_on_two_devices_as_on_one(kind: str, tmp_path: Path) -> None:
    target, prompt = target_of(kind, tmp_path), tiny.recorded_prompts(GOLDEN)[3]
    prompt = [token % 40 for token in prompt] if kind in ("peagle", "gemma4 assistant") else prompt

    def run(devices: int) -> tuple[Metrics, list[int], list[list[int]]]:
        drafter = drafter_of(kind)
        with Engine.from_pretrained(target, drafter=drafter, tensor_parallel=devices, **OPTIONS) as engine:
            (done,) = engine.generate([prompt], PARAMS, trace=True)
            rounds = done.raise_for_error().rounds or ()
            return engine.metrics, done.token_ids, [each.tokens.tolist() for each in rounds]

    (metrics, *wanted), (divided, *made) = run(1), run(2)
    assert made == wanted
    assert (divided.num_drafts, divided.num_accepted_tokens) == (metrics.num_drafts, metrics.num_accepted_tokens)
    assert divided.mean_acceptance_length >= HEADS[kind][1]
