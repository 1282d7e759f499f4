"""Test `jspec info`: the traits of targets and heads in words, and whether a head fits a target."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jspec.__main__ import main
from jspec.draft.draft_model import MAX_PADDING
from jspec.engine.text.tokenizer import HFTokenizer
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mla import MLA
from jspec.models.mlps.mlp_config import Dense
from jspec.models.parts.rope import Rope
from jspec.tools import convert
from jspec.tools.info import describe
from jspec.tools.traits import describe_layers
from tests.support import folders, tiny, tokenizer_folders
from tests.support.folders import EAGLE, HEAD, TARGET, without

pytestmark = pytest.mark.once

PLAIN = "4 heads, 2 key-value heads, head_dim 16"
NO_SAMPLING = "sampling: generation_config.json recommends none"
NORMS = "norms of q and k (each head), norms of v (each head, without weights)"
TRAITS = {
    "gemma2": [
        f"attention: {PLAIN}, scores times 0.204124, scores limited to 20",
        "window: 16 tokens in 2 of 4 layers; none in 2 of 4 layers",
        "feed-forward: 48 channels, gelu_tanh",
        "norms: before and after attention and feed-forward",
        "factors: embedding 5.65685, logits limited to 15",
        "vocabulary: 128, tied output head",
    ],
    "gemma3_text": [
        f"attention: {PLAIN}, norms of q and k (each head), scores times 0.25",
        "window: 16 tokens in 3 of 4 layers; none in 1 of 4 layers",
        "rope: default, theta 10000 in 3 of 4 layers; linear, theta 1000000, factor 8 in 1 of 4 layers",
        "factors: embedding 5.65685",
    ],
    "nemotron_h": [
        "Mamba 2 mixer: 4 heads of 8 channels in 2 groups, 16 state channels, 4 taps and a bias in 2 of 5 layers",
        f"attention: {PLAIN} in 1 of 5 layers",
        "rope: none in 1 of 5 layers",
        "feed-forward: 6 experts of 24 channels, 2 a token, relu2 without a gate, sigmoid over the chosen, times 2.5, "
        "choice corrected, shared expert of 32 channels in 2 of 5 layers",
        "norms: before the layer's one part",
    ],
    "gemma4_text": [
        f"attention: {PLAIN}, {NORMS}, scores times 1 in 2 of 3 layers; "
        f"4 heads, 1 key-value heads, head_dim 32, {NORMS}, values are keys, scores times 1 in 1 of 3 layers",
        "rope: default, theta 10000 in 2 of 3 layers; "
        "proportional, theta 100000, 0.25 of the channels in 1 of 3 layers",
        "factors: a weight of each layer's output, embedding 5.65685, logits limited to 15",
    ],
    "gemma4_e2b": [
        f"attention: 2 heads, 1 key-value heads, head_dim 16, {NORMS}, scores times 1 in 2 of 6 layers; "
        f"2 heads, 1 key-value heads, head_dim 32, {NORMS}, scores times 1 in 1 of 6 layers; "
        "2 heads, 1 key-value heads, head_dim 16, norms of q (each head), scores times 1, keys and values of layer 1 "
        "in 2 of 6 layers; 2 heads, 1 key-value heads, head_dim 32, norms of q (each head), scores times 1, "
        "keys and values of layer 2 in 1 of 6 layers",
        "feed-forward: 24 channels, gelu_tanh in 3 of 6 layers; 48 channels, gelu_tanh in 3 of 6 layers",
        "embeddings: 8 channels of each token for each layer",
        "factors: a weight of each layer's output, embedding 5.65685, logits limited to 15",
    ],
    "gemma4_26b_a4b": [
        "feed-forward: 5 experts of 16 channels, 2 a token, gelu_tanh, softmax over the chosen, "
        "a factor of each expert, shared expert of 32 channels, norms of the experts and of the shared expert",
        "factors: a weight of each layer's output, embedding 5.65685, logits limited to 15",
    ],
    "granite": [
        f"attention: {PLAIN}, scores times 0.1",
        "factors: residual 0.4, embedding 6, logits 1 / 2",
    ],
    "glm4_moe": [
        f"attention: {PLAIN}, biases of q, k and v, norms of q and k (each head)",
        "feed-forward: 48 channels, silu in 1 of 2 layers; 8 experts of 16 channels, 2 a token, silu, "
        "sigmoid over the chosen, times 2.5, choice corrected, shared expert of 16 channels in 1 of 2 layers",
    ],
    "mistral4": [
        "attention: 4 heads of 16 + 16 rotated channels, latent vector of 16 channels, values of 24, queries from 16 "
        "channels, scores times 0.25794",
        "rope: yarn, theta 10000, factor 8, from 32 tokens, query temperature 0.1",
        "feed-forward: 6 experts of 16 channels, 2 a token, silu, softmax over the chosen, "
        "shared expert of 16 channels",
    ],
    "muse_glimmer": [
        "attention: 4 heads, 1 key-value heads, head_dim 16, norms of q and k (each head, without weights), "
        "scores times 0.5, gates of the output",
        "rope: default, theta 500000 in 3 of 4 layers; none in 1 of 4 layers",
        "factors: embedding normed, logits 1 / 2, logits limited to 15",
    ],
    "laguna": [
        f"attention: {PLAIN}, norms of q and k (each head), gates of the heads' outputs (softplus) in 2 of 4 layers; "
        "6 heads, 2 key-value heads, head_dim 16, norms of q and k (each head), "
        "gates of the heads' outputs (softplus) in 2 of 4 layers",
    ],
    "gpt_oss": [
        "feed-forward: 4 experts of 24 channels, 2 a token, silu, softmax over the chosen, biases, limited to 7, "
        "alpha 1.702",
    ],
    "lfm2_moe": [
        "short convolution: 32 channels, 3 taps in 2 of 4 layers",
        "attention: 4 heads, 2 key-value heads, head_dim 8, norms of q and k (each head) in 2 of 4 layers",
        "rope: default, theta 1000000 in 2 of 4 layers",
        "feed-forward: 48 channels, silu in 2 of 4 layers; 8 experts of 16 channels, 2 a token, silu, "
        "sigmoid over the chosen, choice corrected in 2 of 4 layers",
        "vocabulary: 128, tied output head",
        # Two layers with rows of 32 channels: for the nodes and two tokens before them, and two before a kept state.
        f"states of a model in bfloat16: a slot {2 * 5 * 64} bytes, with a chain of 4 {2 * 9 * 64 / 1024:.2f} KiB, "
        f"with a tree of 64 nodes {2 * 68 * 64 / 1024:.2f} KiB; each of cached_states {2 * 2 * 64} bytes",
    ],
    "qwen3_5_moe_text": [
        "gated delta net: 1 key heads of 16, 2 value heads of 16 channels, 4 taps in 2 of 3 layers",
        f"attention: {PLAIN}, norms of q and k (each head), gates of the output in 1 of 3 layers",
        "window: none in 1 of 3 layers",
        "rope: default, theta 100000, 0.25 of the channels in 1 of 3 layers",
        "feed-forward: 4 experts of 16 channels, 2 a token, silu, softmax over the chosen, "
        "shared expert of 16 channels with a factor",
        # Two layers: two heads with 16 x 16 channels of float32, 104 bytes a record, 128 a row of inputs.
        f"states of a model in bfloat16: a slot {2 * (2048 + 32 * 104 + 7 * 128) / 1024:.2f} KiB, "
        f"with a chain of 4 {2 * (2048 + 64 * 104 + 11 * 128) / 1024:.2f} KiB, "
        f"with a tree of 64 nodes {2 * (2048 + 96 * 104 + 70 * 128) / 1024:.2f} KiB; "
        f"each of cached_states {2 * (2048 + 3 * 128) / 1024:.2f} KiB",
    ],
    "llama": [f"attention: {PLAIN}", "rope: llama3, theta 500000, factor 4, from 64 tokens", "window: none"],
    "llama4_text": [
        f"attention: {PLAIN}, norms of q and k (each head, without weights) in 3 of 4 layers; {PLAIN} in 1 of 4 layers",
        "window: chunks of 16 tokens in 3 of 4 layers; none in 1 of 4 layers",
        "rope: default, theta 500000 in 3 of 4 layers; none, query temperature 0.2 in 1 of 4 layers",
        "feed-forward: 3 experts of 24 channels, 1 a token, silu, sigmoid, weights of the inputs, "
        "shared expert of 24 channels",
    ],
    "mistral": ["window: 24 tokens", "norms: before attention and feed-forward", "vocabulary: 128, own output head"],
    "olmo3": [
        f"attention: {PLAIN}, norms of q and k (all heads together)",
        "rope: default, theta 500000 in 3 of 4 layers; yarn, theta 500000, factor 8, from 64 tokens in 1 of 4 layers",
        "norms: after attention and feed-forward",
    ],
    "phi3": ["window: 24 tokens"],
    "qwen2": [f"attention: {PLAIN}, biases of q, k and v"],
    "qwen3": [f"attention: {PLAIN}, norms of q and k (each head)"],
}


@pytest.mark.parametrize("family", TRAITS)
def test_describe_target_of_each_family_prints_its_traits_and_no_others(golden: Path, family: str) -> None:
    lines = describe(golden / "families" / family).splitlines()
    assert not set(TRAITS[family]) - set(lines)
    has_factors = [any(line.startswith("factors: ") for line in of) for of in (lines, TRAITS[family])]
    assert has_factors[0] == has_factors[1]


def test_describe_head_prints_biases_window_and_partial_rope(tmp_path: Path) -> None:
    options = {"attention_bias": True, "layer_types": ["sliding_attention"], "sliding_window": 8, "head_dim": 8}
    config = {**without(HEAD, "num_hidden_layers"), **options, "partial_rotary_factor": 0.5}
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 16}
    shapes = folders.block_shapes("midlayer", config, 32)
    shapes |= {f"midlayer.self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    tensors = folders.head_tensors() | folders.random_tensors(shapes)
    lines = describe(folders.write(tmp_path, config, tensors)).splitlines()
    for line in (
        "attention: 4 heads, 2 key-value heads, head_dim 8, biases of q, k, v and o",
        "window: 8 tokens",
        "rope: default, theta 10000, 0.5 of the channels",
    ):
        assert line in lines


def test_describe_head_prints_its_version_and_what_sets_it_apart(tmp_path: Path) -> None:
    norms = folders.random_tensors({f"fc_norm.{i}.weight": (16,) for i in range(3)})
    config = {**HEAD, "architectures": ["LlamaEagle3DraftModel"], "fc_norm": True}
    for name, norm_output, version in (("new", True, ".1"), ("old", False, "")):
        folder = folders.write(tmp_path / name, {**config, "norm_output": norm_output}, folders.head_tensors() | norms)
        text = describe(folder)
        assert f"model: EAGLE-3{version} head (automodel format), hidden 16, target hidden 16" in text
        assert f"flags beside plain EAGLE-3: fc_norm{', norm_output' if norm_output else ''}\n" in text


def test_trait_lines_of_sinks_temperature_and_different_layers() -> None:
    config = tiny.config(16)
    other = LayerConfig(GQA(4, 2, 4, sinks=True), Dense(8, "gelu"))
    mixed = type(config)(**{**vars(config), "layers": (config.layers[0], other)})
    lines = describe_layers(mixed)
    attention = "4 heads, 2 key-value heads, head_dim 4"
    assert lines[0] == f"attention: {attention} in 1 of 2 layers; {attention}, sinks in 1 of 2 layers"
    assert "feed-forward: 32 channels, silu in 1 of 2 layers; 8 channels, gelu in 1 of 2 layers" in lines
    latent = MLA(4, 16, 8, 12, 10, 0.25, query_latent=20)
    lines = describe_layers(type(config)(**{**vars(config), "layers": (replace(other, mixer=latent),)}))
    assert lines[0] == (
        "attention: 4 heads of 12 + 8 rotated channels, latent vector of 16 channels, values of 10, queries from 20 "
        "channels, scores times 0.25"
    )
    assert Rope(kind="none").describe() == "none"
    rope = Rope(1e4, original_max_position=16, temperature=0.1)
    assert rope.describe() == "default, theta 10000, from 16 tokens, query temperature 0.1"


# ---- pairs


def pair(folder: Path, head: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """Write an EAGLE-3 head and a target that differ from the fitting ones by the given keys."""
    tensors = folders.head_tensors()
    own = {**HEAD, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, **head}
    config = {**TARGET, **target}
    folders.write(folder / "head", own, tensors)
    folders.write(folder / "target", config, folders.target_tensors(config))
    return [str(folder / "head"), str(folder / "target")]


def fit_lines(paths: list[str], capsys: pytest.CaptureFixture, status: int) -> list[str]:
    assert main(["info", *paths]) == status
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("fits: ", "mismatch: "))]


def test_info_command_of_a_head_and_its_target_prints_that_each_size_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    paths = pair(tmp_path, {}, {})
    expected = [
        "fits: vocabulary: 40",
        "fits: target hidden size: 16",
        "fits: hidden size (it shares the target's embedding): 16",
        "fits: feature layers: states 0, 2, 3 of a target of 3 layers",
        "fits: draft vocabulary: 10 ids up to 39, the target has 40 tokens",
    ]
    assert fit_lines(paths, capsys, 0) == expected
    for path in paths:
        assert convert.main([path, f"{path}_converted"]) == 0
    capsys.readouterr()
    assert fit_lines([f"{path}_converted" for path in paths], capsys, 0) == expected


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "larger vocabulary": ({}, {"vocab_size": 48}, ["vocabulary: the target needs 48, the head has 40"]),
    "smaller vocabulary": (
        {},
        {"vocab_size": 30},
        [
            "vocabulary: the target needs 30, the head has 40",
            "draft vocabulary: 10 ids up to 39, the target has 30 tokens",
        ],
    ),
    "hidden size": (
        {},
        {"hidden_size": 32, "head_dim": 4},
        [
            "target hidden size: the target needs 32, the head has 16",
            "hidden size (it shares the target's embedding): the target needs 32, the head has 16",
        ],
    ),
    "feature layers": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}},
        {},
        ["feature layers (0, 2, 5) do not exist or repeat in a target of 3 layers; pass feature_layers= (the default "
         "2, N//2, N-3 needs at least 7 layers)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_info_command_of_a_head_and_another_target_prints_a_line_with_both_values(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture
) -> None:
    head, target, expected = MISMATCHES[name]
    lines = fit_lines(pair(tmp_path, head, target), capsys, 1)
    assert [line.removeprefix("mismatch: ") for line in lines if line.startswith("mismatch")] == expected


def test_info_command_of_medusa_eagle1_and_draft_model_prints_whether_they_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, target = pair(tmp_path, {}, {})
    folders.write(tmp_path / "eagle", EAGLE, folders.eagle_tensors())
    heads = folders.write(tmp_path / "medusa", {}, folders.medusa_tensors())
    for name, size in (("model", 41), ("other", 40 + MAX_PADDING + 1)):
        config = {**TARGET, "vocab_size": size}
        folders.write(tmp_path / name, config, folders.target_tensors(config))
    assert "fits: feature layers: states 4 of a target of 3 layers" in fit_lines(
        [str(tmp_path / "eagle"), target], capsys, 0
    )
    assert fit_lines([str(heads), target], capsys, 0) == ["fits: hidden size: 16", "fits: vocabulary: 40"]
    lines = fit_lines([str(tmp_path / "model"), target], capsys, 0)
    assert lines == ["fits: vocabulary: the target has 40 tokens, the draft model 41"]
    lines = fit_lines([str(tmp_path / "other"), target], capsys, 1)
    assert lines == ["mismatch: vocabulary: the target has 40 tokens, the draft model 553"]


def test_info_command_of_a_draft_model_with_other_layers_than_attention_says_that_it_does_not_fit(
    golden: Path, capsys: pytest.CaptureFixture
) -> None:
    lines = fit_lines([str(golden / "families" / name) for name in ("lfm2", "llama")], capsys, 1)
    assert lines[1:] == ["mismatch: layers: attention in all of a draft model, got a short convolution"]


def test_info_command_of_two_heads_or_a_folder_that_cannot_be_loaded_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    head, target = pair(tmp_path, {}, {})
    assert main(["info", head, head]) == 2
    assert "expected a target as the second folder, got a checkpoint of kind 'eagle3'; swap" in capsys.readouterr().err
    config = json.loads((Path(head) / "config.json").read_text())
    (Path(head) / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))
    assert main(["info", head, target]) == 1
    out = capsys.readouterr().out
    assert "cannot be loaded: " in out and "fits: " not in out and "model: llama" in out
    assert main(["info", head, target, target]) == 2
    assert "expected a folder, HEAD TARGET, or --check" in capsys.readouterr().err


def test_info_says_where_eos_ids_and_sampling_of_a_target_come_from(tmp_path: Path) -> None:
    folder = tokenizer_folders.write(folders.write(tmp_path, TARGET, folders.target_tensors()), "chat")
    lines = describe(folder).splitlines()
    assert lines[-3:] == ["tokenizer: tokenizer.json", "EOS ids: 2 (config.json); 2 (tokenizer)", NO_SAMPLING]
    file = folder / "generation_config.json"
    file.write_text('{"do_sample": true, "temperature": 0.7, "top_p": 0.8, "eos_token_id": [2, 0]}')
    sampling = (
        "sampling: temperature 0.7, top_p 0.8 (generation_config.json), the default of jspec serve, generate, chat"
    )
    assert describe(folder).splitlines()[-2:] == [
        "EOS ids: 2, 0 (generation_config.json); 2 (config.json); 2 (tokenizer)",
        sampling,
    ]


def test_info_says_what_was_repaired_in_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tokenizer_folders.write(folders.write(tmp_path, TARGET, folders.target_tensors()), "chat")
    monkeypatch.setattr(HFTokenizer, "repairs", ("a regular expression",))
    assert "tokenizer: tokenizer.json, repaired: a regular expression" in describe(folder).splitlines()
