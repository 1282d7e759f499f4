"""Compare every model family with transformers, recorded or computed here; wrong readings must differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import Model
from jspec.models.config.layer_config import LayerConfig
from jspec.models.decoder import TargetOut
from jspec.models.mixers.attention import Attention
from jspec.models.mixers.gated_delta import GatedDelta
from jspec.models.mixers.gqa import GQA
from jspec.models.mixers.mamba2 import Mamba2
from jspec.models.mixers.mixer import Mixer
from jspec.models.mixers.mla import MLA
from jspec.models.mixers.shared_kv import SharedKV
from jspec.models.mixers.short_conv import ShortConv
from jspec.models.mlps.mlp_config import Experts
from jspec.models.parts.kv_pool import KVPool
from jspec.models.parts.layer_weights import LayerWeights
from jspec.models.parts.rope import Rope, query_factors
from jspec.tools.replay import run_texts
from jspec.tools.testing import last_logits
from tests.support import tiny
from tests.support.arrays import on_device
from tests.support.recordings import recording

pytestmark = pytest.mark.once

DENSE = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "gemma4_text", "olmo3", "granite"),
    "muse_glimmer",
)
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "llama4_text", "minimax_m2", "laguna")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
GEMMA4 = ("gemma4_e2b", "gemma4_26b_a4b")
HYBRID = ("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h")
RECORDED = (*DENSE, *EXPERTS, *LATENT, *GEMMA4, *HYBRID)
LONGEST = 100  # tokens of the longest recorded prompt
TOLERANCE = 2e-4  # both sides use float32 but add up in different orders; 1.1e-4 with SSE4.2, at logits up to 19
LEAST = 1e-3  # a wrong reading of a config moves some logit by more


@pytest.fixture
def folder(request: pytest.FixtureRequest, golden: Path) -> Path:
    return golden / "families" / request.param


def run_prompt(target: Model, data: Mapping[str, np.ndarray], prompt: int, layers: Sequence[int] = ()) -> TargetOut:
    """Compute a recorded prompt with tokens after it, which no row of the prompt sees: all prompts are equally long."""
    ids = np.pad(data[f"prompt{prompt}"], (0, LONGEST - len(data[f"prompt{prompt}"])))
    return run_texts(target, on_device(ids)[None], layers)


def logit_error(found: Any, data: Mapping[str, np.ndarray], prompt: int) -> float:
    """Return the largest difference from the recorded logits of a prompt, of its last rows if not all are recorded."""
    own, wanted = found[0, : len(data[f"prompt{prompt}"])], data[f"logits{prompt}"]
    return float(np.abs(own[-len(wanted) :] - wanted).max())


@pytest.mark.parametrize("folder", RECORDED, indirect=True)
def test_forward_of_each_family_has_the_logits_and_hidden_states_of_transformers(folder: Path) -> None:
    target, data = tiny.load_target(folder), recording(folder / "expect.npz")
    states, length = len(data["states"]), len(data["prompt0"])
    outputs = [run_prompt(target, data, prompt, range(states)) for prompt in range(3)]
    assert [logit_error(out.logits, data, prompt) < TOLERANCE for prompt, out in enumerate(outputs)] == [True] * 3
    found = np.stack(np.split(np.asarray(outputs[0].features)[0, :length], states, axis=-1))
    np.testing.assert_allclose(found, data["states"], atol=TOLERANCE)


def each_layer(change: Callable[[LayerConfig], LayerConfig]) -> Callable[[Model], Model]:
    """Return a function that changes the config of every layer of a model."""

    def apply(model: Model) -> Model:
        return model.replace(config=replace(model.config, layers=tuple(map(change, model.config.layers))))

    return apply


def attention(**fields: Any) -> Callable[[Model], Model]:
    """Return a function that sets fields of every layer's attention; a function gets the old value."""

    def change(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.mixer, Attention):
            return layer
        old = {name: getattr(layer.attention, name) for name in fields}
        new = {
            name: value(old[name])
            if callable(value) and old[name] is not None
            else old[name]
            if callable(value)
            else value
            for name, value in fields.items()
        }
        return replace(layer, mixer=replace(layer.attention, **new))

    return each_layer(change)


def rope(**fields: Any) -> Callable[[Model], Model]:
    return attention(rope=lambda old: replace(old, **fields))


def config(**fields: Any) -> Callable[[Model], Model]:
    return lambda model: model.replace(config=replace(model.config, **fields))


def weights(change: Callable[[Any], Any], *names: str) -> Callable[[Model], Model]:
    """Return a function that changes the named weights of every layer that has them."""

    def apply(model: Model) -> Model:
        layers = []
        for layer in model.layers:
            stored = {name: value for name in names if (value := getattr(layer, name)) is not None}
            layers.append(layer.replace(**{name: change(value) for name, value in stored.items()}))
        return model.replace(layers=layers)

    return apply


def experts(**fields: Any) -> Callable[[Model], Model]:
    """Return a function that sets fields of every mixture of experts."""

    def change(layer: LayerConfig) -> LayerConfig:
        return replace(layer, mlp=replace(layer.mlp, **fields)) if isinstance(layer.mlp, Experts) else layer

    return each_layer(change)


def router(**fields: Any) -> Callable[[Model], Model]:
    """Return a function that sets fields of the router of every mixture of experts."""

    def change(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.mlp, Experts):
            return layer
        return replace(layer, mlp=replace(layer.mlp, router=replace(layer.mlp.router, **fields)))

    return each_layer(change)


def halves_swapped(weight: Any) -> Any:
    """Take an expert's gate for its up, and its up for its gate."""
    return jnp.roll(weight, weight.shape[1] // 2, axis=1)


def alternating(weight: Any) -> Any:
    """Take the first half of the gate and up channels for the even ones."""
    return weight.reshape(weight.shape[0], 2, -1, *weight.shape[2:]).swapaxes(1, 2).reshape(weight.shape)


def swapped_ropes(model: Model) -> Model:
    """Give every layer the rotary embedding of the other layer type."""
    ropes = {layer.attention.window is None: layer.attention.rope for layer in model.config.layers}
    return each_layer(
        lambda layer: replace(layer, mixer=replace(layer.attention, rope=ropes[layer.attention.window is not None]))
    )(model)


def shifted_windows(model: Model) -> Model:
    """Move the window of each layer to the next layer."""
    windows = [layer.attention.window for layer in model.config.layers]
    layers = [
        replace(layer, mixer=replace(layer.attention, window=window))
        for layer, window in zip(model.config.layers, windows[-1:] + windows[:-1], strict=True)
    ]
    return model.replace(config=replace(model.config, layers=tuple(layers)))


def of_layers(has_rope: bool, change: Callable[[GQA], GQA]) -> Callable[[Model], Model]:
    """Return a function that changes the attention of the layers with or without a rotary embedding."""
    return each_layer(
        lambda layer: layer if (layer.gqa.rope.kind == "none") == has_rope else replace(layer, mixer=change(layer.gqa))
    )


def of_layers_with_windows(has_window: bool, **fields: Any) -> Callable[[Model], Model]:
    """Return a function that sets fields of the rotary embeddings of the layers with or without a window."""

    def change(layer: LayerConfig) -> LayerConfig:
        own = layer.gqa
        is_other = (own.window is not None) != has_window
        return layer if is_other else replace(layer, mixer=replace(own, rope=replace(own.rope, **fields)))

    return each_layer(change)


def shifted_scales(model: Model) -> Model:
    """Give each layer's output the weight of the next layer's."""
    scales = [layer.output_scale for layer in model.layers]
    pairs = zip(model.layers, scales[1:] + scales[:1], strict=True)
    return model.replace(layers=[layer.replace(output_scale=scale) for layer, scale in pairs])


def own_keys(model: Model) -> Model:
    """Give layers that share keys and values the projections of their source, for their own inputs."""
    layers, configs = list(model.layers), list(model.config.layers)
    for index, config in enumerate(configs):
        if isinstance(config.mixer, SharedKV):
            source, mixer = layers[config.mixer.source], configs[config.mixer.source].gqa
            qkv = jnp.concatenate([layers[index].qkv, source.qkv[mixer.q_size :]])
            layers[index] = layers[index].replace(qkv=qkv, k_norm=source.k_norm)
            configs[index] = replace(config, mixer=mixer)
    return model.replace(layers=layers, config=replace(model.config, layers=tuple(configs)))


def first_source(layer: LayerConfig) -> LayerConfig:
    """Let a layer with a window that shares keys and values read those of the first layer."""
    is_other = not isinstance(layer.mixer, SharedKV) or layer.mixer.window is None
    return layer if is_other else replace(layer, mixer=replace(layer.mixer, source=0))


def embeddings(change: Callable[[Any], Any], *names: str) -> Callable[[Model], Model]:
    """Return a function that changes the named weights of the embeddings for each layer."""

    def apply(model: Model) -> Model:
        old = model.layer_embeddings
        assert old is not None
        return model.replace(layer_embeddings=old.replace(**{name: change(getattr(old, name)) for name in names}))

    return apply


def replaced(**names: str) -> Callable[[Model], Model]:
    """Return a function that gives every layer, for a weight, the weight of another name."""
    return lambda model: model.replace(
        layers=[
            layer.replace(**{name: getattr(layer, other) for name, other in names.items()}) for layer in model.layers
        ]
    )


def halves_paired(model: Model) -> Model:
    """Rotate channels i and i + half of a file that rotates channels 2i and 2i + 1."""
    own = model.config.layers[0].gqa
    half, heads = own.head_dim // 2, own.heads + own.kv_heads
    stored = np.arange(2 * half).reshape(2, half).T.ravel()  # loading took the even channels first
    index = np.arange(heads * own.head_dim).reshape(heads, -1)[:, stored].ravel()

    def reordered(weight: Any) -> Any:
        return jnp.concatenate([weight[index], weight[len(index) :]])

    return weights(reordered, "qkv")(model)


def parts_of(mixer: type[Mixer], order: Sequence[int]) -> Callable[[Model], Model]:
    """Return a function that gives the fused projection of layers with a kind of mixer another order of its parts."""

    def apply(model: Model) -> Model:
        layers = []
        for layer, config in zip(model.layers, model.config.layers, strict=True):
            if isinstance(config.mixer, mixer):
                sizes = config.mixer.params(model.config.hidden_size, model.config.hidden_size, None)["qkv"].parts
                parts = jnp.split(layer.qkv, np.cumsum(sizes)[:-1])
                layer = layer.replace(qkv=jnp.concatenate([parts[part] for part in order]))
            layers.append(layer)
        return model.replace(layers=layers)

    return apply


class Growing(GatedDelta):
    """A gated delta net whose decays have the other sign."""

    def _tokens(self, *inputs: Any) -> Any:
        tokens, values = super()._tokens(*inputs)
        return tokens._replace(decays=-tokens.decays), values


def growing(layer: LayerConfig) -> LayerConfig:
    delta = layer.mixer
    return replace(layer, mixer=Growing(**vars(delta))) if isinstance(delta, GatedDelta) else layer


class GatedAfter(Mamba2):
    """A Mamba 2 mixer that norms its outputs before it gates them."""

    def _gated(self, layer: LayerWeights, eps: float, dtype: Any, batch: Any, gate: Any, *rows: Any) -> Any:
        ones = jnp.full_like(gate, 1.2784645)  # silu of it is 1
        return super()._gated(layer, eps, dtype, batch, ones, *rows) * jax.nn.silu(gate)


class OneGroup(Mamba2):
    """A Mamba 2 mixer that norms the outputs of all groups together."""

    def _gated(self, *inputs: Any) -> Any:
        return Mamba2._gated(replace(Mamba2(**vars(self)), key_heads=1), *inputs)


class ExponentialSteps(Mamba2):
    """A Mamba 2 mixer whose steps are exponentials, without the 1 of the softplus."""

    def _factors_and_decays(self, layer: LayerWeights, gates: Any) -> Any:
        steps = jnp.exp(gates + layer.dt_bias)
        return steps, steps * -jnp.exp(layer.a_log)


class ConstantValues(Mamba2):
    """A Mamba 2 mixer whose steps change the decays alone."""

    def _tokens(self, *inputs: Any) -> Any:
        tokens, x = super()._tokens(*inputs)
        return tokens._replace(values=x), x


def mamba_as(kind: type[Mamba2]) -> Callable[[Model], Model]:
    """Return a function that computes Mamba 2 mixers in another way."""
    return each_layer(
        lambda layer: replace(layer, mixer=kind(**vars(layer.mixer))) if isinstance(layer.mixer, Mamba2) else layer
    )


def ungated_as(activation: str) -> Callable[[Model], Model]:
    """Return a function that gives feed-forwards without gates another activation."""
    return each_layer(
        lambda layer: layer if not layer.has_mlp else replace(layer, mlp=replace(layer.mlp, activation=activation))
    )


class RotatedAlone(MLA):
    """Latent attention with a temperature of the rotated channels of queries, whose factors their tables have."""

    def write(self, layer: LayerWeights, qkv: Any, pool: KVPool, batch: Any, dtype: Any, *, eps: float) -> Any:
        _, pool = super().write(layer, qkv, pool, batch, dtype, eps=eps)
        plain = MLA(**{**vars(self), "rope": replace(self.rope, temperature=0.0)})
        q, _ = plain.write(layer, qkv, pool, batch, dtype, eps=eps)
        factors = query_factors(self.rope, batch.positions)[..., None, None]
        return q.at[..., self.latent :].multiply(factors), pool


def rotated_alone(layer: LayerConfig) -> LayerConfig:
    return replace(layer, mixer=RotatedAlone(**vars(layer.mixer)))


GATED: dict[str, Callable[[Model], Model]] = {  # wrong readings of layers that all hybrid Qwen families have
    "query and gate of attention swapped": parts_of(GQA, (3, 1, 2, 0)),
    "norms without their 1": weights(lambda norm: norm - 1, "attn_norm", "mlp_norm"),
    "head norms without their 1": weights(lambda norm: norm - 1, "q_norm", "k_norm"),
    "norm of the outputs with another 1": weights(lambda norm: norm + 1, "delta_norm"),
    "decays that grow": each_layer(growing),
    "rates and decays swapped": weights(lambda gates: jnp.roll(gates, len(gates) // 2, axis=0), "gates"),
    "no bias of decays": weights(jnp.zeros_like, "dt_bias"),
    "queries and keys swapped": parts_of(GatedDelta, (1, 0, 2, 3)),
    "values and gates swapped": parts_of(GatedDelta, (0, 1, 3, 2)),
    "first tap newest": weights(lambda taps: taps[:, ::-1], "conv"),
    "every channel rotated": rope(fraction=1.0),
}
SHARED: dict[str, Callable[[Model], Model]] = {  # those of their experts
    "shared expert without its gate": experts(gates_shared=False),
    "no shared expert": experts(shared=0, gates_shared=False),
    "scores not normalised": router(is_normalised=False),
    "one expert fewer": router(chosen=1),
    "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
}
CONVOLVED: dict[str, Callable[[Model], Model]] = {  # those of both LFM2 families
    "first tap newest": weights(lambda taps: taps[:, ::-1], "conv"),
    "factors of inputs and outputs swapped": parts_of(ShortConv, (1, 0, 2)),
    "no head norms": weights(jnp.ones_like, "q_norm", "k_norm"),
    "norms swapped": lambda model: model.replace(
        layers=[layer.replace(attn_norm=layer.mlp_norm, mlp_norm=layer.attn_norm) for layer in model.layers]
    ),
    "base 10000": rope(theta=1e4),
}


def pairs_swapped(*names: str) -> Callable[[Model], Model]:
    """Return a function that gives rotated channels 2i and 2i + 1 of a file the places of i and i + half."""
    channels = np.arange(16).reshape(2, -1).T.ravel()

    def apply(model: Model) -> Model:
        own = model.config.layers[0].attention
        assert isinstance(own, MLA) and own.rotated == len(channels)
        starts = {"q_up": own.plain + own.query_dim * np.arange(own.heads)}
        cached = 0 if own.query_latent is None else own.query_latent
        starts["qkv"] = np.array([cached + own.latent])
        if own.query_latent is None:
            starts["qkv"] = np.concatenate([starts["qkv"], own.key_dim + starts["q_up"]])

        def reordered(name: str, weight: Any) -> Any:
            index = np.arange(len(weight))
            for start in starts[name]:
                index[start : start + own.rotated] = start + channels
            return weight[index]

        return model.replace(
            layers=[layer.replace(**{n: reordered(n, getattr(layer, n)) for n in names}) for layer in model.layers]
        )

    return apply


WRONG: dict[str, dict[str, Callable[[Model], Model]]] = {
    "qwen3_5_text": GATED,
    "qwen3_5_moe_text": SHARED,
    "qwen3_next": GATED | SHARED,
    "lfm2": CONVOLVED,
    "lfm2_moe": CONVOLVED | {
        "softmax": router(scores="softmax"),
        "choice not corrected": weights(jnp.zeros_like, "router_correction"),
        "scores not normalised": router(is_normalised=False),
        "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
    },
    "nemotron_h": {
        "norm before the gate": mamba_as(GatedAfter),
        "one group of the norm": mamba_as(OneGroup),
        "steps without a softplus": mamba_as(ExponentialSteps),
        "values not multiplied by steps": mamba_as(ConstantValues),
        "no bias of steps": weights(jnp.zeros_like, "dt_bias"),
        "decays of A instead of exp(A_log)": weights(lambda log: jnp.log(jnp.abs(log) + 1e-3), "a_log"),
        "no skip": weights(jnp.zeros_like, "skip"),
        "B and C swapped": parts_of(Mamba2, (1, 0, 2, 3)),
        "x and z swapped": parts_of(Mamba2, (0, 1, 3, 2)),
        "first tap newest": weights(lambda taps: taps[:, ::-1], "conv"),
        "no bias of the convolution": weights(jnp.zeros_like, "conv_bias"),
        "heads of other groups": weights(lambda gates: jnp.roll(gates, 1, axis=0), "gates"),
        "no weight of the outputs' norm": weights(jnp.ones_like, "delta_norm"),
        "silu in feed-forwards": ungated_as("silu"),
        "choice not corrected": weights(jnp.zeros_like, "router_correction"),
        "softmax": router(scores="softmax"),
        "scores not normalised": router(is_normalised=False),
        "no factor": router(factor=1.0),
        "one expert fewer": router(chosen=1),
        "no shared expert": experts(shared=0),
        "experts in another order": weights(lambda weight: jnp.roll(weight, 1, axis=0), "experts_down"),
        "rotated": attention(rope=Rope()),
    },
    "qwen2": {
        "no bias": weights(jnp.zeros_like, "qkv_bias"),
        "base 10000": rope(theta=1e4),
    },
    "qwen3": {
        "no head norms": weights(lambda _: None, "q_norm", "k_norm"),
        "norm of keys on queries": lambda model: model.replace(
            layers=[layer.replace(q_norm=layer.k_norm, k_norm=layer.q_norm) for layer in model.layers]
        ),
        "base 10000": rope(theta=1e4),
    },
    "mistral": {
        "no window": attention(window=None),
        "window one less": attention(window=lambda old: old - 1),
        "window one more": attention(window=lambda old: old + 1),
    },
    "phi3": {
        "window one less": attention(window=lambda old: old - 1),
        "window one more": attention(window=lambda old: old + 1),
    },
    "gemma2": {
        "window one less": attention(window=lambda old: old - 1),
        "window one more": attention(window=lambda old: old + 1),
        "windows in the other layers": shifted_windows,
        "no cap of scores": attention(softcap=None),
        "no cap of logits": config(logit_softcap=None),
        "scale of head_dim": attention(scale=None),
        "embedding not scaled": config(embed_scale=1.0),
        "norms without their 1": weights(lambda norm: norm - 1, "attn_norm"),
        "post norms without their 1": weights(lambda norm: norm - 1, "mlp_post_norm"),
        "no post norms": weights(lambda _: None, "attn_post_norm", "mlp_post_norm"),
        "silu": each_layer(lambda layer: replace(layer, mlp=replace(layer.mlp, activation="silu"))),
    },
    "gemma3_text": {
        "bases swapped": swapped_ropes,
        "window one more": attention(window=lambda old: old + 1),
        "linear scaling left out": rope(kind="default"),
        "head norms without their 1": weights(lambda norm: norm - 1, "q_norm", "k_norm"),
    },
    "gemma4_text": {
        "bases swapped": swapped_ropes,
        "window one less": attention(window=lambda old: old - 1),
        "window one more": attention(window=lambda old: old + 1),
        "scale of head_dim": attention(scale=None),
        "values not normed": attention(v_norm=False),
        "norms that miss a 1": weights(lambda norm: norm + 1, "attn_norm"),
        "head norms that miss a 1": weights(lambda norm: norm + 1, "q_norm", "k_norm"),
        "no weights of layers' outputs": weights(lambda _: None, "output_scale"),
        "weights of the next layers' outputs": shifted_scales,
        "every channel rotated": of_layers_with_windows(False, fraction=1.0),
        "frequencies of the rotated channels alone": of_layers_with_windows(False, kind="default"),
        "no cap of logits": config(logit_softcap=None),
        "embedding not scaled": config(embed_scale=1.0),
        "no post norms": weights(lambda _: None, "attn_post_norm", "mlp_post_norm"),
    },
    "gemma4_e2b": {
        "own keys in shared layers": own_keys,
        "keys of the first layer": each_layer(first_source),
        "embeddings of tokens not scaled": embeddings(lambda table: table * 8**-0.5, "table"),
        "embeddings of tokens of the next layer": embeddings(lambda table: jnp.roll(table, 8, axis=1), "table"),
        "no embeddings of tokens": embeddings(jnp.zeros_like, "table"),
        "projections of the next layer": embeddings(lambda weight: jnp.roll(weight, 8, axis=0), "projection"),
        "no projections": embeddings(jnp.zeros_like, "norm"),
        "no norm of projections": embeddings(jnp.ones_like, "norm"),
        "embeddings not added": weights(jnp.zeros_like, "embed_post_norm"),
        "no norm of gated embeddings": weights(lambda _: None, "embed_post_norm"),
        "gates of silu": each_layer(lambda layer: replace(layer, mlp=replace(layer.mlp, activation="silu"))),
        "no weights of layers' outputs": weights(lambda _: None, "output_scale"),
        "window one more": attention(window=lambda old: old + 1),
        "bases swapped": swapped_ropes,
    },
    "gemma4_26b_a4b": {
        "router without its factors of experts": weights(lambda _: None, "router_scale"),
        "router without its weight of channels": weights(lambda norm: jnp.full_like(norm, 32**-0.5), "router_norm"),
        "router's input not divided": weights(lambda norm: norm * 32**0.5, "router_norm"),
        "norm of experts before the router": replaced(router_norm="experts_norm"),
        "norm of the dense path before the experts": replaced(experts_norm="mlp_norm"),
        "norm of experts before the dense path": replaced(mlp_norm="experts_norm"),
        "norms after both paths swapped": replaced(
            experts_post_norm="shared_post_norm", shared_post_norm="experts_post_norm"
        ),
        "no norm after experts": weights(lambda _: None, "experts_post_norm"),
        "no norm after the dense path": weights(lambda _: None, "shared_post_norm"),
        "no norm of the sum": weights(lambda _: None, "mlp_post_norm"),
        "one expert fewer": router(chosen=1),
        "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
        "experts in another order": weights(lambda weight: jnp.roll(weight, 1, axis=0), "experts_down"),
        "window one more": attention(window=lambda old: old + 1),
    },
    "olmo3": {
        "bases swapped": swapped_ropes,
        "window one less": attention(window=lambda old: old - 1),
        "yarn left out": rope(kind="default"),
        "yarn's factor of cosines left out": rope(attention_factor=1.0),
        "norms of each head": lambda model: attention(qk_norm="head")(
            weights(lambda norm: norm[: model.config.head_dim], "q_norm", "k_norm")(model)
        ),
    },
    "qwen3_moe": {
        "scores not normalised": router(is_normalised=False),
        "one expert fewer": router(chosen=1),
        "one expert more": router(chosen=3),
        "no head norms": weights(lambda _: None, "q_norm", "k_norm"),
        "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
        "experts in another order": weights(lambda weight: jnp.roll(weight, 1, axis=0), "experts_down"),
    },
    "mixtral": {
        "scores not normalised": router(is_normalised=False),
        "sigmoids": router(scores="sigmoid"),
        "one expert fewer": router(chosen=1),
        "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
        "base 10000": rope(theta=1e4),
    },
    "gpt_oss": {
        "softmax over all experts": router(is_normalised=False),
        "no bias of the router": weights(lambda _: None, "router_bias"),
        "no bias of gate and up": weights(lambda _: None, "experts_gate_up_bias"),
        "no bias of the down projection": weights(lambda _: None, "experts_down_bias"),
        "no limit": experts(limit=1e9),
        "plain silu": experts(limit=None),
        "alpha 1": experts(alpha=1.0),
        "gate first, up second": weights(alternating, "experts_gate_up", "experts_gate_up_bias"),
        "no sinks": weights(lambda _: None, "sinks"),
        "no bias of the attention's output": weights(lambda _: None, "o_bias"),
        "no biases of the attention": weights(lambda _: None, "qkv_bias"),
        "window one more": attention(window=lambda old: old + 1),
        "windows in the other layers": shifted_windows,
        "yarn left out": rope(kind="default"),
        "yarn's limits rounded": rope(truncate=True),
    },
    "glm4_moe": {
        "softmax": router(scores="softmax"),
        "scores not normalised": router(is_normalised=False),
        "no factor": router(factor=1.0),
        "choice not corrected": weights(lambda _: None, "router_correction"),
        "no shared expert": experts(shared=0),
        "no head norms": weights(lambda _: None, "q_norm", "k_norm"),
        "every channel rotated": rope(fraction=1.0),
    },
    "llama4_text": {
        "no chunks": attention(chunk=None),
        "chunks one less": attention(chunk=lambda old: old - 1),
        "chunks one more": attention(chunk=lambda old: old + 1),
        "windows of a chunk's size": of_layers(True, lambda own: replace(own, chunk=None, window=own.chunk)),
        "chunks in every layer": attention(chunk=16),
        "rotated pairs not interleaved": halves_paired,
        "base 10000": of_layers(True, lambda own: replace(own, rope=replace(own.rope, theta=1e4))),
        "every layer rotated": of_layers(False, lambda own: replace(own, rope=Rope(theta=5e5))),
        "no norms of q and k": attention(qk_norm=None),
        "norms of q and k in every layer": attention(qk_norm="unit"),
        "no temperature": rope(temperature=0.0),
        "temperature from the next position on": rope(temperature_offset=0),
        "temperature of longer contexts": of_layers(
            False, lambda own: replace(own, rope=replace(own.rope, original_max_position=32))
        ),
        "weights of the outputs": experts(weighs_inputs=False),
        "softmax": router(scores="softmax"),
        "weights normalised": router(is_normalised=True),
        "no shared expert": experts(shared=0),
        "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
        "experts in another order": weights(lambda weight: jnp.roll(weight, 1, axis=0), "experts_down"),
    },
    "deepseek_v2": {
        "rotated pairs not interleaved": pairs_swapped("qkv"),
        "yarn's factor of scores left out": attention(scale=32**-0.5),
        "yarn's factor of scores not squared": attention(scale=lambda old: (old * 32**-0.5) ** 0.5),
        "yarn left out": rope(kind="default"),
        "no norm of the latent vector": weights(jnp.ones_like, "k_norm"),
        "latent norm with the epsilon 0.01": attention(eps=1e-2),
        "keys and values of heads swapped": lambda model: model.replace(
            layers=[layer.replace(k_up=layer.v_up, v_up=layer.k_up) for layer in model.layers]
        ),
        "keys of the other heads": weights(lambda weight: jnp.roll(weight, 16, axis=0), "k_up"),
        "scores normalised": router(is_normalised=True),
        "sigmoids": router(scores="sigmoid"),
        "one expert fewer": router(chosen=2),
        "no shared expert": experts(shared=0),
    },
    "deepseek_v3": {
        "rotated pairs not interleaved": pairs_swapped("qkv", "q_up"),
        "rotated pairs of queries not interleaved": pairs_swapped("q_up"),
        "yarn's factor of scores left out": attention(scale=32**-0.5),
        "yarn left out": rope(kind="default"),
        "no norm of the latent vector": weights(jnp.ones_like, "k_norm"),
        "no norm of the queries' latent vector": weights(jnp.ones_like, "q_norm"),
        "norms swapped": lambda model: model.replace(
            layers=[layer.replace(q_norm=layer.k_norm, k_norm=layer.q_norm) for layer in model.layers]
        ),
        "softmax": router(scores="softmax", groups=1, chosen_groups=1),
        "scores not normalised": router(is_normalised=False),
        "no factor": router(factor=1.0),
        "choice not corrected": weights(lambda _: None, "router_correction"),
        "no groups": router(groups=1, chosen_groups=1),
        "one group more": router(chosen_groups=3),
        "no shared expert": experts(shared=0),
    },
    "glm4_moe_lite": {
        "rotated pairs not interleaved": pairs_swapped("qkv", "q_up"),
        "no norm of the latent vector": weights(jnp.ones_like, "k_norm"),
        "no norm of the queries' latent vector": weights(jnp.ones_like, "q_norm"),
        "base 10000": rope(theta=1e4),
        "softmax": router(scores="softmax"),
        "scores not normalised": router(is_normalised=False),
        "no factor": router(factor=1.0),
        "choice not corrected": weights(lambda _: None, "router_correction"),
        "no shared expert": experts(shared=0),
    },
    "mistral4": {
        "rotated pairs not interleaved": pairs_swapped("qkv", "q_up"),
        "yarn's factor of scores left out": attention(scale=32**-0.5),
        "yarn left out": rope(kind="default"),
        "no temperature": rope(temperature=0.0),
        "temperature from the next position on": rope(temperature_offset=1),
        "temperature of rotated channels alone": each_layer(rotated_alone),
        "sigmoids": router(scores="sigmoid"),
        "scores not normalised": router(is_normalised=False),
        "one expert fewer": router(chosen=1),
        "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
        "no shared expert": experts(shared=0),
    },
    "minimax_m2": {
        "no norms of queries": weights(jnp.ones_like, "q_norm"),
        "no norms of keys": weights(jnp.ones_like, "k_norm"),
        "every channel rotated": rope(fraction=1.0),
        "base 10000": rope(theta=1e4),
        "softmax": router(scores="softmax"),
        "scores not normalised": router(is_normalised=False),
        "choice not corrected": weights(lambda _: None, "router_correction"),
        "gate and up swapped": weights(halves_swapped, "experts_gate_up"),
    },
    "muse_glimmer": {
        "embedding not normed": config(norms_embedding=False),
        "logits not multiplied": config(logit_divisor=1.0),
        "no limit of logits": config(logit_softcap=None),
        "epsilon 0.001 after layers": each_layer(lambda layer: replace(layer, post_norm_eps=1e-3)),
        "norms without their 1": weights(lambda norm: norm - 1, "attn_norm", "mlp_norm"),
        "norms after layers without their 1": weights(lambda norm: norm - 1, "attn_post_norm", "mlp_post_norm"),
        "last norm with another 1": lambda model: model.replace(norm=model.norm + 1),
        "scale of head_dim": attention(scale=None),
        "no norms of q and k": attention(qk_norm=None),
        "query and gate of attention swapped": parts_of(GQA, (3, 1, 2, 0)),
        "every layer rotated": of_layers(False, lambda own: replace(own, rope=Rope(theta=5e5))),
        "base 10000": of_layers(True, lambda own: replace(own, rope=replace(own.rope, theta=1e4))),
        "window one less": attention(window=lambda old: old - 1),
        "no window": attention(window=None),
    },
    "laguna": {
        "sigmoids of gates": attention(gate_function="sigmoid"),
        "gates of other heads": weights(lambda qkv: jnp.concatenate([qkv[:-2], qkv[:-3:-1]]), "qkv"),
        "no head norms": weights(jnp.ones_like, "q_norm", "k_norm"),
        "every channel rotated": rope(fraction=1.0),
        "ropes of the other layers": swapped_ropes,
        "yarn left out": rope(kind="default"),
        "window one less": attention(window=lambda old: old - 1),
        "windows of the next layers": shifted_windows,
        "softmax": router(scores="softmax"),
        "no factor": router(factor=1.0),
        "choice not corrected": weights(lambda _: None, "router_correction"),
        "no shared expert": experts(shared=0),
    },
    "granite": {
        "scale of head_dim": attention(scale=None),
        "residual factor left out": each_layer(lambda layer: replace(layer, residual_scale=1.0)),
        "embedding factor left out": config(embed_scale=1.0),
        "logit divisor left out": config(logit_divisor=1.0),
        "logits multiplied": lambda model: config(logit_divisor=1 / model.config.logit_divisor)(model),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "change"),
    [
        pytest.param(family, change, id=f"{family}: {name}")
        for family, all_ in WRONG.items()
        for name, change in all_.items()
    ],
    indirect=["folder"],
)
def test_forward_with_a_wrong_reading_of_the_config_differs_from_transformers(
    folder: Path, change: Callable[[Model], Model]
) -> None:
    """Negative controls: a trait that is left out or misread moves logits beyond the tolerance."""
    target, data = tiny.load_target(folder), recording(folder / "expect.npz")
    assert logit_error(run_prompt(change(target), data, 2).logits, data, 2) > LEAST


SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
BASE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + i for i in range(6)]}
LONGROPE = {"rope_type": "longrope", **FACTORS, "rope_theta": 1e4, "partial_rotary_factor": 0.75}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
SCOUT = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
SCOUT |= {"original_max_position_embeddings": 32}
TWO_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}
TWO_KEY_HEADS |= {"linear_key_head_dim": 16, "linear_value_head_dim": 8}
MAMBA: dict[str, Any] = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 3}
MAMBA |= {"conv_kernel": 3, "chunk_size": 16, "time_step_min": 1e-9}  # transformers limits steps of prompts from below
ALTERNATING = ["sliding_attention", "full_attention"] * 2
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
# Configs that the recordings lack: the class in transformers, and its arguments beside the sizes.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama with yarn": ("Llama", {"rope_parameters": YARN}),
    "llama with yarn, mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}}),
    "llama with linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama with dynamic rope": ("Llama", {"rope_parameters": {**DYNAMIC, "rope_theta": 1e4}}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True, "head_dim": 32}),
    "mistral without window": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "ministral": ("Ministral", {"head_dim": 16, "sliding_window": 11, "layer_types": ALTERNATING}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}}),
    "phi3 with short longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "phi3 with long longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    "gemma2 without caps": ("Gemma2", {"head_dim": 16, **UNCAPPED}),
    "gemma4 with the default pattern": ("Gemma4", {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 10, "num_hidden_layers": 7,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97,
    }),
    "gemma4 with keys as values": ("Gemma4", {
        "head_dim": 16, "global_head_dim": 48, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "sliding_window": 10, "layer_types": ALTERNATING, "final_logit_softcapping": 20.0,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 97, "use_bidirectional_attention": "vision",
    }),
    "gemma4 with embeddings of layers": ("Gemma4", {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 10, "layer_types": ALTERNATING,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    }),
    "gemma4 with shared keys, experts and embeddings of layers": ("Gemma4", {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 10, "num_hidden_layers": 12, "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "enable_moe_block": True, "num_experts": 6,
        "top_k_experts": 3, "moe_intermediate_size": 24, "final_logit_softcapping": 20.0,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    }),
    "gemma4_unified": ("Gemma4Unified", {
        "head_dim": 16, "global_head_dim": 32, "sliding_window": 10, "num_hidden_layers": 7,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 20.0,
    }),
    "gemma4_unified with shared keys": ("Gemma4Unified", {
        "head_dim": 16, "global_head_dim": 16, "sliding_window": 10, "layer_types": ALTERNATING,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    }),
    "gemma3 with the default pattern": ("Gemma3", {"head_dim": 16, "sliding_window": 10, "num_hidden_layers": 7}),
    "olmo2": ("Olmo2", {}),
    "olmo2 with biases": ("Olmo2", {"attention_bias": True}),
    "olmo3 with the default pattern": ("Olmo3", {"sliding_window": 10, "num_hidden_layers": 5}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3 with windows and other layers": ("SmolLM3", {
        "use_sliding_window": True, "sliding_window": 10, "no_rope_layers": [0, 1, 1, 0], "num_hidden_layers": 4,
        "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
    }),
    "seed_oss with the other bias": ("SeedOss", {"head_dim": 16, "attention_bias": False, "attention_out_bias": True}),
    "qwen3_moe with dense layers": ("Qwen3Moe", {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [2],
        "decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True, "rope_parameters": BASE,
    }),
    "qwen3_moe with windows": ("Qwen3Moe", {
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "rope_parameters": BASE,
    }),
    "mixtral with windows": ("Mixtral", {"sliding_window": 9, "num_local_experts": 3, "num_experts_per_tok": 3}),
    "gpt_oss with other limits": ("GptOss", {
        "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 0.5, "swiglu_alpha": 1.2,
        "sliding_window": 12, "attention_bias": False,
    }),
    "glm4_moe with groups": ("Glm4Moe", {
        "head_dim": 16, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": False,
        "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 0, "rope_parameters": BASE,
    }),
    "deepseek_v2 with groups": ("DeepseekV2", {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
        "v_head_dim": 20, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 16.0, "rope_parameters": dict(BASE),
    }),
    "deepseek_v3 without latent queries": ("DeepseekV3", {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "qk_nope_head_dim": 20, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "first_k_dense_replace": 1, "rope_interleave": False, "norm_topk_prob": False,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}, "num_mtp_layers": 0,
    }),
    "llama4 with dense layers, two experts a token": ("Llama4", {
        "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48, "intermediate_size": 24, "attention_chunk_size": 11, "no_rope_layer_interval": 2,
        "rope_parameters": {**SCOUT, "rope_theta": 5e5}, "attention_bias": True, "floor_scale": 7, "attn_scale": 0.5,
    }),
    "llama4 as Maverick, without chunks": ("Llama4", {
        "head_dim": 16, "num_local_experts": 4, "moe_layers": [1, 2], "intermediate_size_mlp": 48, "use_qk_norm": False,
        "attention_chunk_size": None, "attn_temperature_tuning": False, "rope_parameters": dict(BASE),
    }),
    "qwen3_5 with two key heads": ("Qwen3_5", {**TWO_KEY_HEADS, "head_dim": 32, "full_attention_interval": 3}),
    "qwen3_5_moe with two key heads": ("Qwen3_5Moe", {
        **TWO_KEY_HEADS, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }),
    "qwen3_next with two key heads and dense layers": ("Qwen3Next", {
        **TWO_KEY_HEADS, "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "norm_topk_prob": False,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    }),
    "lfm2 with its own spellings": ("Lfm2", {
        "full_attn_idxs": [1, 3], "block_ff_dim": 96, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.3,
        "tie_embedding": False, "conv_L_cache": 4,
    }),
    "lfm2 with the width that it states": ("Lfm2", {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe without corrected choices": ("Lfm2Moe", {
        "layer_types": ["full_attention", "conv", "conv", "full_attention"], "num_dense_layers": 1, "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "use_expert_bias": False, "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
    }),
    "glm4_moe_lite without latent queries": ("Glm4MoeLite", {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "qk_nope_head_dim": 20, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "n_shared_experts": 2,
        "rope_parameters": BASE,
    }),
    "mistral4 without latent queries": ("Mistral4", {
        "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 12,
        "qk_nope_head_dim": 24, "n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "first_k_dense_replace": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "n_shared_experts": 2,
        "rope_parameters": {**YARN, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.3},
    }),
    "minimax_m2 with every channel rotated": ("MiniMaxM2", {
        "head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 3, "rope_parameters": BASE,
    }),
    "laguna with gates of channels and biases": ("Laguna", {
        "head_dim": 16, "gating": "per-element", "attention_bias": True, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "sliding_window": 9,
        "layer_types": ALTERNATING, "num_attention_heads_per_layer": [4, 2, 6, 4],
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    }),
    "laguna without lists of layers": ("Laguna", {
        "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }),
    "nemotron_h of dense layers, without a bias of the convolution": ("NemotronH", {
        **MAMBA, "head_dim": 16, "use_conv_bias": False,
        "layers_block_type": ["mlp", "linear_attention", "mlp", "mlp", "full_attention", "linear_attention"],
    }),
    "nemotron_h with groups of experts": ("NemotronH", {
        **MAMBA, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5,
        "norm_topk_prob": False, "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"],
    }),
    "nemotron_h with experts of a latent input": ("NemotronH", {
        **MAMBA, "head_dim": 16, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_latent_size": 20,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    }),
    "granite untied with biases": ("Granite", {"attention_bias": True, "logits_scaling": 4.0}),
}  # fmt: skip


def theirs(name: str, more: Mapping[str, Any], folder: Path) -> Any:
    """Make a random model of transformers, whose norms and biases are not 1 and 0, and save it."""
    torch = pytest.importorskip("torch", reason="transformers' models need torch")
    import transformers

    torch.manual_seed(0)
    kind = f"{name}Text" if name in ("Gemma3", "Gemma4", "Gemma4Unified", "Llama4", "Qwen3_5", "Qwen3_5Moe") else name
    made = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**deepcopy({**SIZES, **more}))  # it changes the objects in place
    ).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter *= 4  # larger scores, on which caps and scales have more effect
        for name, buffer in made.named_buffers():
            if name.endswith("layer_scalar"):
                buffer *= 0.5 + torch.rand(1)
    made.save_pretrained(folder)
    return made


@pytest.mark.parametrize("case", OTHERS)
def test_forward_of_other_configs_of_each_family_has_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    name, more = OTHERS[case]
    model = theirs(name, more, tmp_path)
    import torch

    ids = np.random.default_rng(0).integers(0, 97, 60).tolist()
    ours = Model.from_pretrained(tmp_path, dtype="float32")
    ours = ours.replace(config=ours.config.for_length(len(ids)))
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(last_logits(ours, ids), wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()))
    if ours.config.rope.kind == "longrope":
        other = replace(ours.config.rope, is_long=not ours.config.rope.is_long)
        changed = last_logits(ours.replace(config=ours.config.resized(rope=other)), ids)
        assert np.abs(changed - wanted).max() > LEAST, "control: the other factors give other logits"
