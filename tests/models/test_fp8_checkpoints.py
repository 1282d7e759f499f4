"""Test that published float8 checkpoints are read as they are: values, scales, logits, and other kinds of weights."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convert.fields import CheckpointError
from jspec import DraftModel, Engine, Model, SamplingParams, Tree
from jspec.draft.auto import load_drafter, read_header
from jspec.models import families
from jspec.models.weights.quantize import quantized_as
from jspec.tools.convert import main as convert_main
from jspec.tools.info import describe
from jspec.tools.replay import run_texts
from pallas_kernels.layers.weights import Quantized
from tests.support import folders, recordings
from tests.support import quantized_folders as made
from tests.support.arrays import on_device
from tests.support.quantized_folders import CONFIG, FORMATS

pytestmark = pytest.mark.once

TOLERANCE = 1e-4  # both sides use float32 but add up in different orders
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9]
GOLDEN = {"llama_ct_fp8": "llama", "qwen3_fp8_block": "qwen3"}
BLOCKS = FORMATS["fp8 by block"]
ROUNDING = ("llama_ct_fp8", "compressed-tensors by row")  # files that ask for dynamic activations and have no blocks


def unrounded(model: Model, name: str) -> Model:
    """Return a model whose activations are not rounded, after a check that its file's config has decided its kind."""
    assert quantized_as(model) == ("fp8_dynamic" if name in ROUNDING else "fp8")
    return made.unrounded(model)


O_PROJ = "model.layers.1.self_attn.o_proj"


def logits(model: Model, ids: list[int]) -> np.ndarray:
    """Compute the logits of all tokens [tokens, vocab]."""
    found = run_texts(model, on_device([ids], jnp.int32)).logits
    assert found is not None
    return np.asarray(found[0])


def widened(weight: Quantized) -> np.ndarray:
    """Multiply each value by its scale, in float32."""
    scale = np.asarray(weight.scale)
    wide = scale[:, None] if scale.ndim == 1 else np.repeat(scale, weight.shape[1] // scale.shape[1], axis=1)
    return np.asarray(weight.values, np.float32) * wide


# ---- checkpoints of other libraries


@pytest.fixture
def published(request: pytest.FixtureRequest, golden: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A float8 checkpoint, and what transformers computes with its widened weights."""
    if GOLDEN[request.param] not in families.model_types():
        pytest.skip(f"the model family {GOLDEN[request.param]} is not supported yet")
    folder = golden / "families" / "quantized" / request.param
    return folder, recordings.recording(folder / "expect.npz")


@pytest.mark.parametrize("published", GOLDEN, indirect=True)
def test_float8_checkpoint_has_the_logits_of_its_widened_weights(
    published: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, recorded = published
    target = unrounded(Model.from_pretrained(folder, dtype="float32"), folder.name)
    for i in range(2):
        wanted = recorded[f"logits{i}"]
        got = logits(target, recorded[f"prompt{i}"].tolist())[-len(wanted) :]
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE)
    prompts, tokens = ([recorded[f"{name}{i}"].tolist() for i in range(2)] for name in ("prompt", "greedy"))
    assert recordings.most_likely(target, prompts, tokens) == tokens


@pytest.mark.parametrize(
    "published",
    [pytest.param(name, marks=[pytest.mark.long] * (name != "qwen3_fp8_block")) for name in GOLDEN],
    indirect=True,
)
def test_engine_with_a_float8_checkpoint_has_the_greedy_tokens_of_its_widened_weights(
    published: tuple[Path, dict[str, np.ndarray]],
) -> None:
    folder, recorded = published
    target = unrounded(Model.from_pretrained(folder, dtype="float32"), folder.name)
    drafter = DraftModel(target, Tree.chain(3))  # it has the target's weights, so its tokens are accepted
    with Engine(target, drafter=drafter, slots=2, max_len=96, buckets=(2,), prefill_buckets=(48,)) as engine:
        assert engine.memory_plan.target_weights == sum(leaf.nbytes for leaf in jax.tree.leaves(target))
        prompts = [recorded[f"prompt{i}"].tolist() for i in range(2)]
        done = engine.generate(prompts, SamplingParams(max_tokens=32, temperature=0))
    assert [one.token_ids for one in done] == [recorded[f"greedy{i}"].tolist() for i in range(2)]
    assert done[0].metrics.mean_acceptance_length > 3


# ---- each format


@pytest.mark.parametrize("name", FORMATS)
def test_float8_checkpoint_of_each_format_keeps_its_bytes_and_has_the_logits_of_its_widened_weights(
    name: str, tmp_path: Path
) -> None:
    stored, wide = made.quantised(FORMATS[name])
    loaded = Model.from_pretrained(made.write(tmp_path / "fp8", FORMATS[name], stored), dtype="float32")
    model = unrounded(loaded, name)
    values, expected = (folders.expected_target(tensors, CONFIG["num_hidden_layers"]) for tensors in (stored, wide))
    for index, layer in enumerate(model.layers):
        for part in ("qkv", "o", "gate_up", "down"):
            weight = getattr(layer, part)
            own = f"layers.{index}.{part}"
            assert isinstance(weight, Quantized) and weight.kind == "fp8"
            assert np.asarray(weight.values).tobytes() == values[own].tobytes(), own
            np.testing.assert_array_equal(widened(weight), expected[own], err_msg=own)
    plain = Model.from_pretrained(folders.write(tmp_path / "wide", CONFIG, wide), dtype="float32")
    np.testing.assert_allclose(logits(model, IDS), logits(plain, IDS), atol=TOLERANCE)
    if name in ROUNDING:
        assert np.abs(logits(loaded, IDS) - logits(plain, IDS)).max() > 100 * TOLERANCE, "activations are rounded"
    dequantized = Model.from_pretrained(tmp_path / "fp8", dtype="float32", quantize="none")
    leaves = zip(jax.tree.leaves(dequantized), jax.tree.leaves(plain), strict=True)
    assert all(np.array_equal(own, other) for own, other in leaves)
    rounded = Model.from_pretrained(folders.write(tmp_path / "float", CONFIG, made.weights()), dtype="float32")
    assert np.abs(logits(model, IDS) - logits(rounded, IDS)).max() > 100 * TOLERANCE, "the weights must be rounded ones"


def test_draft_model_loaded_by_its_path_keeps_its_float8_weights_unless_told_to_widen_them(tmp_path: Path) -> None:
    folder = made.write(tmp_path, BLOCKS, made.quantised(BLOCKS)[0])
    for quantize, kind in ((None, "fp8"), ("none", None)):
        drafter = load_drafter(folder, dtype="float32", quantize=quantize)
        assert isinstance(drafter, DraftModel) and quantized_as(drafter.model) == kind


@pytest.mark.parametrize("change", ["transposed", "of the next block", "inverted"])
def test_logits_of_blocks_with_wrong_scales_differ(change: str, tmp_path: Path) -> None:
    """Negative control of the comparison of logits; the scales of an output projection alone are wrong."""
    stored, wide = made.quantised(BLOCKS)
    name = f"{O_PROJ}.weight_scale_inv"
    scale = stored[name]
    # The shape stays that of the grid of blocks, so that only the values tell.
    wrong = {
        "transposed": scale.T.reshape(scale.shape),
        "of the next block": np.roll(scale, 1, 1),
        "inverted": 1 / scale,
    }
    assert wrong[change].shape == scale.shape == (2, 3)
    model = Model.from_pretrained(
        made.write(tmp_path / "fp8", BLOCKS, {**stored, name: np.ascontiguousarray(wrong[change])})
    )
    plain = Model.from_pretrained(folders.write(tmp_path / "wide", CONFIG, wide))
    assert np.abs(logits(model, IDS) - logits(plain, IDS)).max() > 100 * TOLERANCE


def test_modelopt_checkpoint_described_by_a_file_of_its_own_equals_one_described_in_the_config(tmp_path: Path) -> None:
    """The file excludes modules by wildcards; scales of inputs, keys and values are not used."""
    stored, _ = made.quantised(FORMATS["modelopt"])
    within = Model.from_pretrained(made.write(tmp_path / "within", FORMATS["modelopt"], stored))
    scales = {f"model.layers.0.self_attn.{part}_proj.{part}_scale": np.array(0.5, np.float32) for part in "kv"}
    beside = folders.write(tmp_path / "beside", CONFIG, stored | scales)
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head*"]}
    (beside / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt", "version": "0.23"}, "quantization": quantization})
    )
    assert np.array_equal(logits(within, IDS), logits(Model.from_pretrained(beside), IDS))


def test_checkpoint_with_excluded_layers_has_both_quantised_and_unquantised_weights(tmp_path: Path) -> None:
    form = FORMATS["compressed-tensors by row"]
    stored, wide = made.quantised(form, excluded=("layers.1.self_attn",))
    ignored = ["lm_head", r"re:.*layers\.1\.self_attn\..*"]
    model = Model.from_pretrained(made.write(tmp_path / "fp8", form, stored, ignore=ignored))
    model = unrounded(model, "compressed-tensors by row")
    first, second = model.layers
    assert isinstance(first.qkv, Quantized) and isinstance(second.down, Quantized)
    assert not isinstance(second.qkv, Quantized) and not isinstance(second.o, Quantized)
    plain = Model.from_pretrained(folders.write(tmp_path / "wide", CONFIG, wide))
    np.testing.assert_allclose(logits(model, IDS), logits(plain, IDS), atol=TOLERANCE)


def test_float8_checkpoint_saved_by_torch_equals_one_of_safetensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the file is pytorch_model.bin")
    stored, _ = made.quantised(FORMATS["modelopt"])
    folder = made.write(tmp_path / "safe", FORMATS["modelopt"], stored)
    other = made.write(tmp_path / "torch", FORMATS["modelopt"], stored)
    (other / "model.safetensors").unlink()
    state = {
        name: torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        if array.dtype == made.FLOAT8
        else torch.from_numpy(array)
        for name, array in stored.items()
    }
    torch.save(state, other / "pytorch_model.bin")
    assert np.array_equal(*(logits(Model.from_pretrained(path), IDS) for path in (folder, other)))


@pytest.mark.parametrize("block", [(1, 1), (7, 5), (2**31 - 1, 2**31 - 1)])
def test_blocks_of_any_size_widen_to_the_weights_that_they_stand_for(
    block: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block may be larger than the weight, and as small as a value."""
    monkeypatch.setattr(made, "BLOCK", block)
    stored, wide = made.quantised(BLOCKS)
    model = Model.from_pretrained(made.write(tmp_path, BLOCKS, stored, weight_block_size=list(block)))
    expected = folders.expected_target(wide, CONFIG["num_hidden_layers"])
    for part in ("qkv", "o", "gate_up", "down"):
        np.testing.assert_array_equal(widened(getattr(model.layers[0], part)), expected[f"layers.0.{part}"])


@pytest.mark.parametrize("family", ["phi3", "gemma2", "llama4_text"])
def test_float8_checkpoint_of_other_families_has_the_logits_of_its_widened_weights(
    family: str, tmp_path: Path, golden: Path
) -> None:
    """phi3 stores fused tensors; gemma2 changes norms and ties its output head; llama4_text reorders rows of q, k."""
    config = json.loads((golden / "families" / family / "config.json").read_text())
    stored = wide = folders.stored(golden / "families" / family)
    for name in [name for name in wide if name.endswith("_proj.weight")]:
        values, beside, widened_weight = BLOCKS.quantise(wide[name].astype(np.float32))
        ends = {f"{name.removesuffix('weight')}{end}": scale for end, scale in beside.items()}
        stored, wide = {**stored, name: values, **ends}, {**wide, name: widened_weight}
    quantized = {**config, "quantization_config": BLOCKS.config}
    own = Model.from_pretrained(folders.write(tmp_path / "fp8", quantized, stored))
    plain = Model.from_pretrained(folders.write(tmp_path / "wide", config, wide))
    assert isinstance(own.layers[0].qkv, Quantized) and isinstance(own.layers[1].down, Quantized)
    np.testing.assert_allclose(logits(own, IDS), logits(plain, IDS), atol=TOLERANCE)


# ---- other kinds, conversion, determinism


def test_quantize_over_a_float8_checkpoint_switches_activations_or_raises(tmp_path: Path) -> None:
    rows, blocks = (
        made.write(tmp_path / name, FORMATS[name], made.quantised(FORMATS[name])[0])
        for name in ("compressed-tensors by row", "fp8 by block")
    )
    kinds = [quantized_as(Model.from_pretrained(rows, quantize=kind)) for kind in (None, "fp8", "fp8_dynamic")]
    assert kinds == ["fp8_dynamic", "fp8", "fp8_dynamic"]
    own = Model.from_pretrained(blocks)
    same = Model.from_pretrained(blocks, quantize="fp8")
    assert np.array_equal(own.layers[0].qkv.scale, same.layers[0].qkv.scale)  # type: ignore[union-attr]
    assert isinstance(same.head, Quantized) and not isinstance(own.head, Quantized)
    with pytest.raises(
        ValueError, match="expected one scale per output channel for fp8_dynamic, got a scale for each 8 col"
    ):
        Model.from_pretrained(blocks, quantize="fp8_dynamic")
    with pytest.raises(ValueError, match="fp8_dynamic, got a scale for each 16 col"):
        Engine(own, quantize="fp8_dynamic", slots=1, max_len=32)
    for folder in (rows, blocks):
        with pytest.raises(
            ValueError, match=r"quantize: expected unquantised weights, got fp8(_dynamic)?; start from the original"
        ):
            Model.from_pretrained(folder, quantize="int8")
    with pytest.raises(ValueError, match="deterministic: expected a target whose weights are not quantised, got fp8"):
        Engine(own, deterministic=True, slots=1, max_len=32)


@pytest.mark.parametrize("name", ["compressed-tensors by row", "fp8 by block"])
def test_converted_float8_checkpoint_has_the_same_bytes_and_refuses_other_kinds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made.write(tmp_path / "source", FORMATS[name], made.quantised(FORMATS[name])[0])
    assert convert_main([str(source), str(tmp_path / "out")]) == 0
    own, converted = read_header(source).parameters, read_header(tmp_path / "out").parameters
    assert own == converted
    assert own["layers.0.down.values"].dtype == jnp.float8_e4m3fn
    models = [Model.from_pretrained(folder, dtype="float32") for folder in (source, tmp_path / "out")]
    for part in ("qkv", "o", "gate_up", "down"):
        first, second = (getattr(model.layers[1], part) for model in models)
        assert np.asarray(first.values).tobytes() == np.asarray(second.values).tobytes()
        assert np.asarray(first.scale).tobytes() == np.asarray(second.scale).tobytes()
    line = f"quantised: {'fp8 in groups of 16 or fp8 in groups of 8' if 'block' in name else 'fp8_dynamic'}"
    for folder in (source, tmp_path / "out"):
        assert line in describe(folder).splitlines()
    capsys.readouterr()
    assert convert_main([str(source), str(tmp_path / "other"), "--quantize", "int8"]) == 2
    assert "expected unquantised weights, got fp8" in capsys.readouterr().err


def test_converted_folder_with_scales_of_an_impossible_shape_raises(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", BLOCKS, made.quantised(BLOCKS)[0])
    assert convert_main([str(source), str(tmp_path / "out")]) == 0
    manifest = tmp_path / "out" / "jspec.json"
    text = manifest.read_text()
    assert '"width": 40' in text
    manifest.write_text(text.replace('"width": 40', '"width": 44'))  # the scales of down belong to 5 groups of columns
    with pytest.raises(CheckpointError, match=r"wrong shape: .*down\.scale"):
        Model.from_pretrained(tmp_path / "out")
