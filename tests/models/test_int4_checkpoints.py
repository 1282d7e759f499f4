"""Test that published 4-bit checkpoints are read as they are, stay packed, and have the logits of their weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import DraftModel, Eagle3, Engine, Model, SamplingParams, Tree
from jspec.models.weights.quantize import check_device, quantize_weights, quantized_as
from jspec.tools.convert import main as convert_main
from jspec.tools.info import describe
from jspec.tools.replay import run_texts
from pallas_kernels.layers.weights import Quantized
from tests.reference import int4 as reference
from tests.support import byte_pair, folders, recordings, tiny
from tests.support import int4_folders as made
from tests.support.arrays import on_device
from tests.support.int4_folders import CONFIG, FORMATS

pytestmark = pytest.mark.once

Decoder = Callable[[made.Tensors], np.ndarray]
TOLERANCE = 1e-4  # both sides use float32 but add up in different orders
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9]
GOLDEN = {
    "qwen2_gptq": ("gptq in groups of 16 with zero points", reference.gptq),
    "qwen2_awq": ("awq in groups of 16 with zero points", reference.awq),
    "qwen2_ct_int4": ("compressed-tensors in groups of 16", reference.compressed_tensors),
}
O_PROJ = "model.layers.1.self_attn.o_proj"
WEIGHTS = ("qkv", "o", "gate_up", "down")
SIZES = dict(slots=2, max_len=96, buckets=(2,), prefill_buckets=(48,), prefix_cache=False, controls=False)


def logits(model: Model, ids: list[int]) -> np.ndarray:
    """Compute the logits of all tokens [tokens, vocab]."""
    found = run_texts(model, on_device([ids], jnp.int32)).logits
    assert found is not None
    return np.asarray(found[0])


def device_weight(weight: object) -> np.ndarray:
    """Decode a weight as it is on the device, after checks of its kind and size."""
    assert isinstance(weight, Quantized) and weight.kind == "int4"
    assert weight.values.nbytes == weight.shape[0] * weight.shape[1] / 2
    return reference.device(np.asarray(weight.values), np.asarray(weight.scale), weight.zeros)


@cache
def quantised(name: str) -> tuple[made.Tensors, made.Tensors]:
    return made.quantised(FORMATS[name])


@cache
def plain_logits(name: str, folder: Path) -> np.ndarray:
    """Return the logits of the unquantised checkpoint that one of a format stands for."""
    return logits(Model.from_pretrained(folders.write(folder, CONFIG, quantised(name)[1])), IDS)


# ---- checkpoints of other libraries


@pytest.mark.parametrize("name", GOLDEN)
def test_4_bit_checkpoint_has_the_logits_and_greedy_tokens_of_its_widened_weights(name: str, golden: Path) -> None:
    folder = golden / "families" / "quantized" / name
    recorded = recordings.recording(folder / "expect.npz")
    target = Model.from_pretrained(folder, dtype="float32")
    assert quantized_as(target) == "int4"
    prompts = [recorded[f"prompt{i}"].tolist() for i in range(2)]
    for i in range(2):
        wanted = recorded[f"logits{i}"]
        np.testing.assert_allclose(logits(target, prompts[i])[-len(wanted) :], wanted, atol=TOLERANCE)
    drafter = DraftModel(target, Tree.chain(3))  # it has the target's weights, so its tokens are accepted
    with Engine(target, drafter=drafter, **SIZES) as engine:
        assert engine.memory_plan.target_weights == sum(leaf.nbytes for leaf in jax.tree.leaves(target))
        done = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0))
    assert [one.token_ids for one in done] == [recorded[f"greedy{i}"].tolist() for i in range(2)]
    assert done[0].metrics.mean_acceptance_length > 3


@pytest.mark.parametrize("name", GOLDEN)
def test_weights_of_a_4_bit_checkpoint_equal_an_independent_decoder_bit_for_bit(name: str, golden: Path) -> None:
    folder = golden / "families" / "quantized" / name
    kind, decode = GOLDEN[name]
    assert f"quantised: int4{kind[kind.index(' in') :]}" in describe(folder).splitlines()
    stored = folders.stored(folder)
    model = Model.from_pretrained(folder)
    for part, modules in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up")), ("o", ("o",)), ("down", ("down",))):
        prefix = f"model.layers.1.{'self_attn' if part in ('qkv', 'o') else 'mlp'}"
        own = [
            {end: stored[f"{prefix}.{m}_proj.{end}"] for end in _ends(stored, f"{prefix}.{m}_proj.")} for m in modules
        ]
        wanted = np.concatenate([decode(tensors) for tensors in own])
        np.testing.assert_array_equal(device_weight(getattr(model.layers[1], part)), wanted, err_msg=part)


def _ends(stored: made.Tensors, prefix: str) -> list[str]:
    return [name.removeprefix(prefix) for name in stored if name.startswith(prefix)]


# ---- each format


@pytest.mark.parametrize("name", FORMATS)
def test_4_bit_checkpoint_of_each_format_stays_packed_and_has_the_logits_of_its_weights(
    name: str, tmp_path: Path
) -> None:
    stored, wide = quantised(name)
    folder = made.write(tmp_path / "int4", FORMATS[name], stored)
    model = Model.from_pretrained(folder, dtype="float32")
    expected = folders.expected_target(wide, CONFIG["num_hidden_layers"])
    for part in WEIGHTS:
        np.testing.assert_array_equal(device_weight(getattr(model.layers[1], part)), expected[f"layers.1.{part}"])
    np.testing.assert_allclose(logits(model, IDS), plain_logits(name, tmp_path / "wide"), atol=TOLERANCE)
    widened = Model.from_pretrained(folder, dtype="float32", quantize="none")
    for part in WEIGHTS:
        np.testing.assert_array_equal(getattr(widened.layers[1], part), expected[f"layers.1.{part}"])


@pytest.mark.parametrize(
    ("name", "decode", "end"),
    [
        ("gptq", reference.gptq, "scales"),
        ("awq", reference.awq, "scales"),
        ("compressed-tensors", reference.compressed_tensors, "weight_scale"),
    ],
)
def test_negative_scales_of_a_4_bit_checkpoint_are_multiplied_as_they_are(
    name: str, decode: Decoder, end: str, tmp_path: Path
) -> None:
    """Exporters that scale a group by its value of the largest magnitude write negative ones."""
    stored = dict(quantised(name)[0])
    scales = stored[f"{O_PROJ}.{end}"].copy()
    scales[::2] *= -1
    stored[f"{O_PROJ}.{end}"] = scales
    wanted = decode({part: stored[f"{O_PROJ}.{part}"] for part in _ends(stored, f"{O_PROJ}.")})
    folder = made.write(tmp_path / "int4", FORMATS[name], stored)
    model, widened = (Model.from_pretrained(folder, dtype="float32", quantize=kind) for kind in (None, "none"))
    np.testing.assert_array_equal(device_weight(model.layers[1].o), wanted)
    np.testing.assert_array_equal(widened.layers[1].o, wanted)
    np.testing.assert_allclose(logits(model, IDS), logits(widened, IDS), atol=TOLERANCE)
    positive = Model.from_pretrained(made.write(tmp_path / "positive", FORMATS[name], quantised(name)[0]))
    assert np.abs(logits(positive, IDS) - logits(model, IDS)).max() > 10 * TOLERANCE, "control: signs are read"


def _swapped(array: np.ndarray) -> np.ndarray:
    """Swap the two halves of each byte."""
    found = array.view(np.uint32)
    return ((found & 0x0F0F0F0F) << 4 | (found >> 4) & 0x0F0F0F0F).view(np.int32)


CONTROLS = {
    "values in another order": ("qweight", _swapped),
    "zero points one less": ("qzeros", lambda a: (a.view(np.uint32) - np.uint32(0x00000001)).view(np.int32)),
    "scales of the next group": ("scales", lambda a: np.roll(a, 1, 0)),
}


@pytest.mark.parametrize("name", ["gptq v2", "awq"])
@pytest.mark.parametrize("change", CONTROLS)
def test_logits_of_4_bit_weights_with_a_wrong_reading_differ(change: str, name: str, tmp_path: Path) -> None:
    """Negative control of the comparison of logits; one output projection alone is wrong."""
    stored, _ = quantised(name)
    end, wrong = CONTROLS[change]
    tensor = f"{O_PROJ}.{end}"
    changed = {**stored, tensor: np.ascontiguousarray(wrong(stored[tensor]))}
    model = Model.from_pretrained(made.write(tmp_path / "int4", FORMATS[name], changed))
    assert np.abs(logits(model, IDS) - plain_logits(name, tmp_path / "wide")).max() > 10 * TOLERANCE


def test_gptq_with_groups_in_another_order_is_refused_unless_it_is_widened(tmp_path: Path) -> None:
    stored, _ = quantised("gptq")
    order = np.random.default_rng(0).permutation(64)
    changed = {**stored, f"{O_PROJ}.g_idx": stored[f"{O_PROJ}.g_idx"][order]}
    folder = made.write(tmp_path / "int4", FORMATS["gptq"], changed, desc_act=True)
    with pytest.raises(NotImplementedError, match=rf"{O_PROJ}\.g_idx.*: expected groups of consecutive columns .*none"):
        Model.from_pretrained(folder)
    own = {end: changed[f"{O_PROJ}.{end}"] for end in _ends(changed, f"{O_PROJ}.")}
    widened = Model.from_pretrained(folder, dtype="float32", quantize="none")
    np.testing.assert_array_equal(widened.layers[1].o, reference.gptq(own))
    sorted_own = {**own, "g_idx": stored[f"{O_PROJ}.g_idx"]}
    assert not np.array_equal(reference.gptq(own), reference.gptq(sorted_own)), "control: the order matters"


def test_biases_of_zero_that_the_model_lacks_are_left_out_and_others_refused(tmp_path: Path) -> None:
    """Older versions of AutoGPTQ store a bias for every layer."""
    stored, _ = quantised("gptq")
    bias = {f"{O_PROJ}.bias": np.zeros(64, np.float16)}
    model = Model.from_pretrained(made.write(tmp_path / "zero", FORMATS["gptq"], stored | bias))
    np.testing.assert_allclose(logits(model, IDS), plain_logits("gptq", tmp_path / "wide"), atol=TOLERANCE)
    with pytest.raises(ValueError, match=rf"{O_PROJ}\.bias.*: expected zeros, as the model has no such bias"):
        Model.from_pretrained(
            made.write(tmp_path / "one", FORMATS["gptq"], stored | {f"{O_PROJ}.bias": np.ones(64, np.float16)})
        )


# ---- other kinds, conversion, devices


def test_kinds_over_a_4_bit_checkpoint_raise(tmp_path: Path) -> None:
    folder = made.write(tmp_path, FORMATS["awq"], quantised("awq")[0])
    with pytest.raises(ValueError, match="quantize: expected unquantised weights, got int4; start from the original"):
        Model.from_pretrained(folder, quantize="fp8")
    model = Model.from_pretrained(folder, quantize="int4")
    assert isinstance(model.head, Quantized) and model.head.zeros is None and model.layers[0].o.zeros is not None
    with pytest.raises(ValueError, match="deterministic: expected a target whose weights are not quantised, got int4"):
        Engine(model, deterministic=True, slots=1, max_len=32)
    with pytest.raises(ValueError, match=r"expected a target or a draft model for 'none', got a head \(eagle3\)"):
        Eagle3.from_pretrained(byte_pair.HEAD, quantize="none")
    with pytest.raises(ValueError, match="expected unquantised weights for 'none', got int4; load the folder with it"):
        Engine(model, quantize="none", slots=1, max_len=32)


@pytest.mark.parametrize("name", ["gptq", "compressed-tensors"])
def test_converted_4_bit_checkpoint_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", FORMATS[name], quantised(name)[0])
    assert convert_main([str(source), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    models = [Model.from_pretrained(folder, dtype="float32") for folder in (source, tmp_path / "out")]
    first, second = (jax.tree.leaves(model) for model in models)
    assert len(first) == len(second) and all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    zeros = " with zero points" if name == "gptq" else ""
    plain = describe(folders.write(tmp_path / "wide", CONFIG, quantised(name)[1])).splitlines()
    (count,) = (line.split(" (")[0] for line in plain if line.startswith("parameters: "))
    wanted = [f"{count} (float32, int4)", f"quantised: int4 in groups of 16{zeros}"]
    for folder in (source, tmp_path / "out"):
        lines = describe(folder).splitlines()
        assert [line for line in lines if line.startswith(("parameters", "quantised"))] == wanted
    with pytest.raises(ValueError, match="expected a Hugging Face folder for 'none', got the converted"):
        Model.from_pretrained(tmp_path / "out", quantize="none")


def test_4_bit_checkpoint_on_four_devices_has_the_tokens_of_one(tmp_path: Path) -> None:
    """Each device has 24 columns of down: neither blocks of 32 columns nor groups of 16 may be cut."""
    folder = made.write(tmp_path, FORMATS["gptq"], quantised("gptq")[0])
    with Engine.from_pretrained(folder, tensor_parallel=4, dtype="float32", **SIZES) as engine:
        (done,) = engine.generate([IDS], SamplingParams(max_tokens=12, temperature=0))
        down = engine.core.runner.params.target.layers[0].down
    target = Model.from_pretrained(folder, dtype="float32")
    assert recordings.most_likely(target, [IDS], [done.token_ids]) == [done.token_ids]
    np.testing.assert_array_equal(device_weight(down), device_weight(Model.from_pretrained(folder).layers[0].down))
    assert isinstance(down, Quantized) and down.zeros is not None
    assert (down.values.shape, down.scale.shape, down.zeros.shape) == ((64, 12, 4), (64, 12), (64, 12))
    assert {shard.data.shape for shard in down.values.addressable_shards} == {(64, 3, 4)}


def test_engine_with_weights_rounded_to_int4_emits_the_greedy_tokens_of_the_rounded_model() -> None:
    target = tiny.model(40)
    with Engine(target, drafter=DraftModel(target, Tree.chain(3)), quantize="int4", **SIZES) as engine:
        rounded = engine.core.runner.params.target
        (done,) = engine.generate([IDS], SamplingParams(max_tokens=32, temperature=0))
    assert quantized_as(rounded) == "int4"
    ids = [*IDS, *done.token_ids]
    assert logits(rounded, ids)[len(IDS) - 1 : -1].argmax(-1).tolist() == done.token_ids
    assert np.abs(logits(rounded, IDS) - logits(target, IDS)).max() > 100 * TOLERANCE, "control: weights are rounded"


def test_gpu_that_would_widen_packed_weights_in_memory_is_refused(tmp_path: Path) -> None:
    device = SimpleNamespace(compute_capability="9.0")
    model = Model.from_pretrained(made.write(tmp_path, FORMATS["gptq"], quantised("gptq")[0]), dtype="bfloat16")
    with pytest.raises(
        ValueError, match="int4: on a GPU groups must be multiples of 32 columns, got 16; quantize='none'"
    ):
        check_device(model, "bfloat16", device=device)  # type: ignore[arg-type]
    rows = Model.from_pretrained(
        made.write(tmp_path / "rows", FORMATS["compressed-tensors by row"], quantised("compressed-tensors by row")[0]),
        dtype="bfloat16",
    )
    check_device(rows, "bfloat16", device=device)  # type: ignore[arg-type]
    wide = rows.replace(embed=rows.embed.astype(jnp.float32))
    with pytest.raises(ValueError, match="int4: on a GPU x must be bfloat16 or float16, got float32"):
        check_device(wide, "bfloat16", device=device)  # type: ignore[arg-type]


def test_each_models_packed_weights_are_checked_for_its_own_activations(tmp_path: Path) -> None:
    """The matrices of another model, or of a router in float32, say nothing of a model's activations."""
    device: Any = SimpleNamespace(compute_capability="9.0")
    form = "compressed-tensors by row"
    packed = Model.from_pretrained(made.write(tmp_path, FORMATS[form], quantised(form)[0]), dtype="bfloat16")
    wide = tiny.model(40)
    assert (packed.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
    check_device([wide, packed], "bfloat16", device=device)
    own = packed.replace(embed=packed.embed.astype(jnp.float32))
    for other in (packed, quantize_weights(wide, "int8")):
        with pytest.raises(ValueError, match="int4: on a GPU x must be bfloat16 or float16, got float32"):
            check_device([other, own], "bfloat16", device=device)
