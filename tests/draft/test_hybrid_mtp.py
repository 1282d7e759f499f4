"""Compare the layer of hybrid Qwen models that predicts further tokens with a numpy reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import MTP, Beside, Engine, SamplingParams, Tree
from jspec.draft.eagle_head import EagleHead
from jspec.models.weights.quantize import quantized_as
from tests.draft.test_mtp import drafted, halves_swapped, score_errors
from tests.draft.test_mtp import run as run_layer
from tests.models.test_hybrid_files import FOLDERS, WIDE, recorded, together, with_images
from tests.support import block_rounds, folders, tiny
from tests.support.beside import Known
from tests.support.quantized_folders import FORMATS, quantised
from tests.support.recordings import recording

pytestmark = pytest.mark.once

FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
TOLERANCE = 2e-4  # float32 beside float64
LEAST = 1e-2  # a wrong reading moves some logit by more
CHAIN, DYNAMIC = Tree.chain(3), Tree.topk(8, 3, 3)
Tensors = Mapping[str, np.ndarray]


def layer_tensors(tensors: Tensors) -> dict[str, np.ndarray]:
    """Return random tensors of the layer, with the shapes of a model's layer with attention."""
    rng = np.random.default_rng(5)
    prefix = next(name for name in tensors if name.endswith("self_attn.q_proj.weight")).partition("self_attn")[0]
    hidden = tensors["model.norm.weight"].size
    shapes = {f"mtp.layers.0.{n.removeprefix(prefix)}": t.shape for n, t in tensors.items() if n.startswith(prefix)}
    shapes |= {f"mtp.{name}.weight": (hidden,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    shapes["mtp.fc.weight"] = hidden, 2 * hidden
    drawn = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    return {
        name: (values * (0.3 if values.ndim == 1 else 1.5 / values.shape[1] ** 0.5)).astype(np.float32)
        for name, values in drawn.items()
    }


# ---- the reference: what the published layer computes, in float64


def norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Norm the last axis; files store weights minus 1."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * (1 + weight.astype(np.float64))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def rotated(x: np.ndarray, rope: Mapping[str, Any]) -> np.ndarray:
    """Rotate the first channels of heads [tokens, heads, channels] by positions 0, 1, ...: channel i with i + half."""
    size = int(x.shape[-1] * rope["partial_rotary_factor"])
    angles = np.arange(len(x))[:, None] * rope["rope_theta"] ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., : size // 2], x[..., size // 2 : size]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., size:]], axis=-1)


def attention(x: np.ndarray, config: Mapping[str, Any], weight: Callable[[str], np.ndarray]) -> np.ndarray:
    heads, dim = config["num_attention_heads"], config["head_dim"]
    q, gate = np.split((x @ weight("q_proj").T).reshape(len(x), heads, 2 * dim), 2, axis=-1)
    k, v = ((x @ weight(f"{name}_proj").T).reshape(len(x), -1, dim) for name in "kv")
    q, k = norm(q, weight("q_norm")), norm(k, weight("k_norm"))
    q, k = (rotated(part, config["rope_parameters"]) for part in (q, k))
    k, v = (part.repeat(heads // part.shape[1], axis=1) for part in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / dim**0.5
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    mixed = np.einsum("hqk,khd->qhd", softmax(scores), v) * sigmoid(gate)
    return mixed.reshape(len(x), -1) @ weight("o_proj").T


def dense(x: np.ndarray, weight: Callable[[str], np.ndarray]) -> np.ndarray:
    gate, up = x @ weight("gate_proj").T, x @ weight("up_proj").T
    return (gate * sigmoid(gate) * up) @ weight("down_proj").T


def feed_forward(x: np.ndarray, config: Mapping[str, Any], weight: Callable[[str], np.ndarray]) -> np.ndarray:
    if "num_experts" not in config:
        return dense(x, weight)
    shares = softmax(x @ weight("gate").T)
    chosen = np.argsort(-shares, axis=-1)[:, : config["num_experts_per_tok"]]
    out = dense(x, lambda name: weight(f"shared_expert.{name}")) * sigmoid(x @ weight("shared_expert_gate").T)
    for row, experts in enumerate(chosen):
        for expert in experts:
            part = dense(x[row], lambda name, expert=expert: weight(f"experts.{expert}.{name}"))
            out[row] += shares[row, expert] / shares[row, experts].sum() * part
    return out


def reference(
    config: Mapping[str, Any], tensors: Tensors, tokens: list[int], features: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of pairs of a token and the feature before it, and the states behind the last norm."""

    def weight(prefix: str, name: str) -> np.ndarray:
        return tensors[f"{prefix}{name}.weight"].astype(np.float64)

    embedded = norm(weight("model.", "embed_tokens")[tokens], weight("mtp.", "pre_fc_norm_embedding"))
    both = np.concatenate([embedded, norm(features, weight("mtp.", "pre_fc_norm_hidden"))], axis=-1)
    layer = "mtp.layers.0."
    x = both @ weight("mtp.", "fc").T
    x = x + attention(norm(x, weight(layer, "input_layernorm")), config, partial(weight, f"{layer}self_attn."))
    x = x + feed_forward(norm(x, weight(layer, "post_attention_layernorm")), config, partial(weight, f"{layer}mlp."))
    out = norm(x, weight("mtp.", "norm"))
    return out @ weight("", "lm_head").T, out


@cache
def written(family: str, folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Write a recorded model with a random layer, and return its config and tensors."""
    config, tensors = recorded(family)
    tensors |= layer_tensors(tensors)
    folders.write(folder, {**config, "mtp_num_hidden_layers": 1}, tensors)
    return config, tensors


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.getbasetemp() / request.param
    written(request.param, folder)
    return request.param, folder


def bound(folder: Path, **options: Any) -> EagleHead:
    return MTP.from_pretrained(folder, dtype="float32", **options).bind(tiny.load_target(folder))


def errors(
    head: EagleHead, config: Mapping[str, Any], tensors: Tensors, compute: Any = reference
) -> tuple[float, float]:
    """Return the largest difference from a reference's logits, and that of the layer used again, twice."""
    rng = np.random.default_rng(3)
    tokens, features = rng.integers(0, 128, 20).tolist(), rng.standard_normal((20, config["hidden_size"]))
    wanted, out = compute(config, tensors, tokens, features)
    path = rng.integers(0, 128, 2).tolist()
    texts, states, again = list(tokens), features, []
    for token in path:
        texts, states = [*texts, token], np.concatenate([states, out[-1:]])
        logits, out = compute(config, tensors, texts, states)
        again.append(logits[-1])
    first = np.abs(run_layer(head, tokens, features)[0] - wanted).max()
    return float(first), float(np.abs(drafted(head, tokens, features, path)[1:] - np.stack(again)).max())


def test_layer_used_once_and_again_has_the_logits_of_the_reference(model: tuple[str, Path]) -> None:
    assert max(errors(bound(model[1]), *written(*model))) < TOLERANCE


def gates_first(head: EagleHead) -> EagleHead:
    """Take the gates of the outputs for queries, and queries for gates."""
    size = head.config.layers[0].gqa.q_size
    qkv: Any = head.layers[0].qkv
    swapped = jnp.concatenate([qkv[-size:], qkv[size:-size], qkv[:size]])
    return head.replace(layers=[head.layers[0].replace(qkv=swapped)])


WRONG: dict[str, Callable[[EagleHead], EagleHead]] = {
    "feature first": halves_swapped,
    "query and gate swapped": gates_first,
    "norms without their 1": lambda head: head.replace(embed_norm=head.embed_norm - 1),
    "head norms without their 1": lambda head: head.replace(
        layers=[head.layers[0].replace(q_norm=head.layers[0].q_norm - 1)]
    ),
    "last norm without its 1": lambda head: head.replace(norm=head.norm - 1),
    "norms swapped": lambda head: head.replace(embed_norm=head.feature_norm, feature_norm=head.embed_norm),
}


@pytest.mark.parametrize("name", WRONG)
def test_layer_with_a_wrong_reading_differs_from_the_reference(name: str, tmp_path: Path) -> None:
    model = written("qwen3_5_text", tmp_path)
    assert errors(WRONG[name](bound(tmp_path)), *model)[0] > LEAST


def test_layer_that_reads_its_output_before_the_norm_differs_when_it_is_used_again(tmp_path: Path) -> None:
    model = written("qwen3_5_text", tmp_path)
    first, again = errors(bound(tmp_path, norm_output=False), *model)
    assert first < TOLERANCE and again > LEAST


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_quantised_layer_whose_first_projection_is_not_has_the_logits_of_its_weights(
    family: str, tmp_path: Path
) -> None:
    config, plain = written(family, tmp_path / "plain")
    form = FORMATS["fp8 by block"]
    stored, wide = quantised(form, (*WIDE, "mtp.fc"), plain)
    scheme = {**form.config, "modules_to_not_convert": ["mtp.fc"]}
    folders.write(tmp_path, {**config, "quantization_config": scheme}, stored)
    head = MTP.from_pretrained(tmp_path, dtype="float32").bind(tiny.load_target(tmp_path / "plain"))
    assert quantized_as(head) == "fp8" and isinstance(head.fc, jnp.ndarray)
    assert max(errors(head, config, wide)) < TOLERANCE < errors(head, config, plain)[0]


CASES = [("qwen3_5_text", CHAIN, 1), ("qwen3_5_moe_text", DYNAMIC, 1), ("qwen3_next", CHAIN, 2)]


@pytest.mark.parametrize(("family", "tree", "devices"), CASES, ids=str)
def test_engine_with_the_layer_emits_the_recorded_tokens_and_drafts_as_the_layer_without_a_cache(
    family: str, tree: Tree, devices: int, tmp_path: Path
) -> None:
    written(family, tmp_path)
    target, data = tiny.load_target(tmp_path), recording(FOLDERS / family / "expect.npz")
    prompts = [data[f"prompt{i}"].tolist() for i in range(3)]
    drafter = MTP.from_pretrained(tmp_path, tree=tree, dtype="float32")
    options: dict[str, Any] = dict(slots=3, max_len=176, buckets=(3,), prefill_buckets=(48,), prefix_cache=False)
    with Engine(target, drafter=drafter, controls=False, tensor_parallel=devices, **options) as engine:
        done = engine.generate(prompts, SamplingParams(max_tokens=48, temperature=0), trace=True)
    assert [each.token_ids for each in done] == [data[f"greedy{i}"].tolist()[:48] for i in range(3)]
    states = block_rounds.states_of(target, [*prompts[1], *done[1].token_ids], (target.config.num_layers + 1,))
    differences = score_errors(drafter.bind(target), states, done[1], prompts[1])
    assert len(differences) >= 12 and max(differences) < 1e-3


@pytest.mark.parametrize("join", ["beside", pytest.param("replace", marks=pytest.mark.long)])
def test_engine_with_a_look_up_beside_the_layer_emits_the_recorded_tokens(join: str, tmp_path: Path) -> None:
    """Paths of five nodes are accepted. The second time, prompts begin from copies of the recurrent states."""
    written("qwen3_5_text", tmp_path)
    target, data = tiny.load_target(tmp_path), recording(FOLDERS / "qwen3_5_text" / "expect.npz")
    prompts, outputs = ([data[f"{name}{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy"))
    lookup = Known(np.array([tokens[:48] for tokens in outputs]), prompts, Tree.chain(4), target.config.vocab_size)
    drafter = Beside(MTP.from_pretrained(tmp_path, tree=CHAIN, dtype="float32"), lookup, join)
    options: dict[str, Any] = dict(slots=3, max_len=176, buckets=(3,), prefill_buckets=(48,), controls=False)
    with Engine(target, drafter=drafter, **options) as engine:
        for time in range(2):
            done = engine.generate(prompts, SamplingParams(max_tokens=48, temperature=0))
            assert [each.token_ids for each in done] == [tokens[:48] for tokens in outputs]
            assert time == 0 or sum(each.metrics.num_cached_tokens for each in done) >= 32
        assert engine.metrics.mean_acceptance_length > 4


# ---- files


def same(head: EagleHead, other: EagleHead) -> bool:
    parts = ("fc", "norm", "embed_norm", "feature_norm")
    return head.config == other.config and all(
        np.array_equal(ours, theirs)
        for ours, theirs in [
            *((getattr(head, name), getattr(other, name)) for name in parts),
            *zip(vars(head.layers[0]).values(), vars(other.layers[0]).values(), strict=True),
        ]
        if ours is not None
    )


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_layer_of_a_folder_with_an_image_encoder_and_experts_together_is_the_same(family: str, tmp_path: Path) -> None:
    config, tensors = written(family, tmp_path / "plain")
    wrapped, stored = with_images(config, tensors)
    second = {name.replace("layers.0", "layers.1"): 0 * t for name, t in tensors.items() if "mtp.layers" in name}
    wrapped["text_config"]["mtp_num_hidden_layers"] = 2
    later = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    folders.write(tmp_path, wrapped, together({**stored, **later, **second}))
    head, other = (MTP.from_pretrained(folder, dtype="float32").head for folder in (tmp_path, tmp_path / "plain"))
    assert same(head, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers: expected at least 1"),
        ({"mtp_num_hidden_layers": 1}, r"missing: .*mtp\.fc\.weight"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings: expected False, got True"),
    ],
    ids=str,
)
def test_folder_without_the_layer_or_with_an_unsupported_one_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config, tensors = recorded("qwen3_5_text")
    folders.write(tmp_path, {**config, **changes}, tensors)
    with pytest.raises((ValueError, NotImplementedError), match=words):
        MTP.from_pretrained(tmp_path)
