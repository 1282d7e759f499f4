"""Compare the layer of GLM-4.7-Flash that predicts further tokens with a numpy reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import MTP, Engine, SamplingParams, Tree
from jspec.draft.eagle_head import EagleHead
from jspec.models.mlps.mlp_config import Experts
from tests.draft.test_hybrid_mtp import (
    CHAIN,
    DYNAMIC,
    LEAST,
    TOLERANCE,
    Tensors,
    bound,
    dense,
    errors,
    sigmoid,
    softmax,
)
from tests.draft.test_mtp import FOLDERS, halves_swapped, score_errors
from tests.models.test_hybrid_files import recorded
from tests.support import block_rounds, folders, tiny
from tests.support.recordings import recording

pytestmark = pytest.mark.once

FAMILY = "glm4_moe_lite"
LAYER = "model.layers.3."  # after the three layers of the recorded model
EPS = 1e-5  # of the norms of hidden states


def layer_tensors(tensors: Tensors) -> dict[str, np.ndarray]:
    """Return random tensors of the layer, with the shapes of a model's layer with experts, and copies of zeros."""
    rng = np.random.default_rng(5)
    source, hidden = "model.layers.2.", tensors["model.norm.weight"].size
    shapes = {n.replace(source, LAYER): t.shape for n, t in tensors.items() if n.startswith(source)}
    shapes |= {f"{LAYER}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{LAYER}eh_proj.weight"] = hidden, 2 * hidden
    copies = {
        f"{LAYER}embed_tokens.weight": "model.embed_tokens.weight",
        f"{LAYER}shared_head.head.weight": "lm_head.weight",
    }
    drawn = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {
        **{name: 0 * tensors[original] for name, original in copies.items()},
        **{n: 1 + 0.3 * v if v.ndim == 1 else 1.5 * v / v.shape[1] ** np.float32(0.5) for n, v in drawn.items()},
    }


# ---- the reference: what the published layer computes, in float64, with keys and values of every head


def norm(x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotate channels 2i and 2i + 1 of [tokens, ..., channels] by positions 0, 1, ...; return complex numbers."""
    size = x.shape[-1]
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, size, 2) / size)
    turns = np.exp(1j * angles).reshape(len(x), *[1] * (x.ndim - 2), size // 2)
    return (x[..., 0::2] + 1j * x[..., 1::2]) * turns


def attention(x: np.ndarray, config: Mapping[str, Any], weight: Callable[[str], np.ndarray]) -> np.ndarray:
    heads, plain, theta = (
        config["num_attention_heads"],
        config["qk_nope_head_dim"],
        config["rope_parameters"]["rope_theta"],
    )
    queries = norm(x @ weight("q_a_proj").T, weight("q_a_layernorm"), 1e-6) @ weight("q_b_proj").T
    queries = queries.reshape(len(x), heads, -1)
    latent, key = np.split(x @ weight("kv_a_proj_with_mqa").T, [config["kv_lora_rank"]], axis=-1)
    both = (norm(latent, weight("kv_a_layernorm"), 1e-6) @ weight("kv_b_proj").T).reshape(len(x), heads, -1)
    keys, values = np.split(both, [plain], axis=-1)
    scores = np.einsum("qhd,khd->hqk", queries[..., :plain], keys)
    turned, key = rotated(queries[..., plain:], theta), rotated(key, theta)
    scores += np.einsum("qhd,kd->hqk", turned, key.conj()).real
    scores = np.where(np.tri(len(x), dtype=bool), scores / queries.shape[-1] ** 0.5, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), values).reshape(len(x), -1) @ weight("o_proj").T


def feed_forward(x: np.ndarray, config: Mapping[str, Any], tensors: Tensors) -> np.ndarray:
    weight = partial(weight_of, tensors, f"{LAYER}mlp.")
    shares = sigmoid(x @ weight("gate").T)
    ranks = shares + tensors[f"{LAYER}mlp.gate.e_score_correction_bias"]
    out = dense(x, lambda name: weight(f"shared_experts.{name}"))
    for row, experts in enumerate(np.argsort(-ranks, axis=-1)[:, : config["num_experts_per_tok"]]):
        for expert in experts:
            part = dense(x[row], lambda name, expert=expert: weight(f"experts.{expert}.{name}"))
            out[row] += config["routed_scaling_factor"] * shares[row, expert] / shares[row, experts].sum() * part
    return out


def weight_of(tensors: Tensors, prefix: str, name: str) -> np.ndarray:
    return tensors[f"{prefix}{name}.weight"].astype(np.float64)


def reference(
    config: Mapping[str, Any], tensors: Tensors, tokens: list[int], features: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of pairs of a token and the feature before it, and the states after the last norm."""
    weight = partial(weight_of, tensors, LAYER)
    embedded = norm(weight_of(tensors, "model.", "embed_tokens")[tokens], weight("enorm"))
    x = np.concatenate([embedded, norm(features, weight("hnorm"))], axis=-1) @ weight("eh_proj").T
    x = x + attention(norm(x, weight("input_layernorm")), config, partial(weight_of, tensors, f"{LAYER}self_attn."))
    x = x + feed_forward(norm(x, weight("post_attention_layernorm")), config, tensors)
    out = norm(x, weight("shared_head.norm"))
    return out @ weight_of(tensors, "", "lm_head").T, out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, np.ndarray]]:
    """A folder of the recorded model with a random layer, its config and its tensors."""
    folder = tmp_path_factory.mktemp(FAMILY)
    config, tensors = recorded(FAMILY)
    config, tensors = {**config, "num_nextn_predict_layers": 1}, tensors | layer_tensors(tensors)
    folders.write(folder, config, tensors)
    return folder, config, tensors


def test_layer_used_once_and_again_has_the_logits_of_the_reference(model: tuple[Path, Any, Any]) -> None:
    folder, config, tensors = model
    assert max(errors(bound(folder), config, tensors, reference)) < TOLERANCE


def of_layer(change: Callable[[Any], Any], *names: str) -> Callable[[EagleHead], EagleHead]:
    """Return a function that changes the named weights of the layer."""

    def apply(head: EagleHead) -> EagleHead:
        layer: Any = head.layers[0]
        return head.replace(layers=[layer.replace(**{name: change(getattr(layer, name)) for name in names})])

    return apply


def with_router(**fields: Any) -> Callable[[EagleHead], EagleHead]:
    def apply(head: EagleHead) -> EagleHead:
        (layer,) = head.config.layers
        assert isinstance(layer.mlp, Experts)
        mlp = replace(layer.mlp, router=replace(layer.mlp.router, **fields))
        return head.replace(config=replace(head.config, layers=(replace(layer, mlp=mlp),)))

    return apply


WRONG: dict[str, Callable[[EagleHead], EagleHead]] = {
    "feature first": halves_swapped,
    "norms swapped": lambda head: head.replace(embed_norm=head.feature_norm, feature_norm=head.embed_norm),
    "no norm of the latent vector": of_layer(jnp.ones_like, "k_norm"),
    "no norm of the queries' latent vector": of_layer(jnp.ones_like, "q_norm"),
    "choice not corrected": of_layer(lambda _: None, "router_correction"),
    "no factor": with_router(factor=1.0),
    "softmax": with_router(scores="softmax"),
}


@pytest.mark.parametrize("name", WRONG)
def test_layer_with_a_wrong_reading_differs_from_the_reference(name: str, model: tuple[Path, Any, Any]) -> None:
    folder, config, tensors = model
    assert errors(WRONG[name](bound(folder)), config, tensors, reference)[0] > LEAST


def test_layer_that_reads_its_output_before_the_norm_differs_when_it_is_used_again(
    model: tuple[Path, Any, Any],
) -> None:
    folder, config, tensors = model
    first, again = errors(bound(folder, norm_output=False), config, tensors, reference)
    assert first < TOLERANCE and again > LEAST


@pytest.mark.parametrize(
    ("tree", "devices"),
    [(DYNAMIC, 1), pytest.param(CHAIN, 1, marks=pytest.mark.long), pytest.param(CHAIN, 2, marks=pytest.mark.long)],
    ids=str,
)
def test_engine_with_the_layer_emits_the_recorded_tokens_and_drafts_as_the_layer_without_a_cache(
    tree: Tree, devices: int, model: tuple[Path, Any, Any]
) -> None:
    """The second time, the pages of the prompts are in the prefix cache."""
    folder, *_ = model
    target, data = tiny.load_target(folder), recording(FOLDERS / FAMILY / "expect.npz")
    prompts, wanted = ([data[f"{name}{i}"].tolist() for i in range(3)] for name in ("prompt", "greedy"))
    drafter = MTP.from_pretrained(folder, tree=tree, dtype="float32")
    options: dict[str, Any] = dict(slots=3, max_len=176, page_size=16, buckets=(3,), prefill_buckets=(48,))
    with Engine(target, drafter=drafter, controls=False, tensor_parallel=devices, **options) as engine:
        for time in range(2):
            done = engine.generate(prompts, SamplingParams(max_tokens=64, temperature=0), trace=True)
            assert [each.token_ids for each in done] == wanted
            assert time == 0 or done[2].metrics.num_cached_tokens >= 64
    states = block_rounds.states_of(target, [*prompts[1], *done[1].token_ids], (target.config.num_layers + 1,))
    differences = score_errors(drafter.bind(target), states, done[1], prompts[1])
    assert len(differences) >= 12 and max(differences) < 1e-3
