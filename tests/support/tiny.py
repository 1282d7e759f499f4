"""Small models with random weights, and the real small pairs, loaded once a run."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec.core.records import MAX_STOP_IDS, PrefillInput
from jspec.draft import auto
from jspec.draft.eagle_head import EagleHead
from jspec.draft.head_config import METHODS, HeadConfig
from jspec.draft.medusa import MedusaConfig, MedusaHeads
from jspec.models import load
from jspec.models.config import ModelConfig, Rope
from jspec.models.decoder import Layer, Model


def config(vocab: int, *, layers: int = 2, hidden: int = 16) -> ModelConfig:
    return ModelConfig.of_sizes(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=hidden // 4,
        norm_eps=1e-5,
        rope=Rope(),
        tie_word_embeddings=False,
        max_position=4096,
    )


def model(vocab: int, *, seed: int = 0, layers: int = 2, hidden: int = 16, sharpness: float = 1.0) -> Model:
    """A random decoder; a larger sharpness makes its distributions more peaked."""
    rng, c = np.random.default_rng(seed), config(vocab, layers=layers, hidden=hidden)

    def weight(out: int, inner: int, gain: float = 1.0) -> jnp.ndarray:
        return jnp.asarray(rng.normal(0, gain / np.sqrt(inner), (out, inner)), jnp.float32)

    def norm() -> jnp.ndarray:
        return jnp.asarray(rng.uniform(0.5, 1.5, hidden), jnp.float32)

    blocks = [
        Layer(
            attn_norm=norm(),
            qkv=weight((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, hidden, 2.0),
            o=weight(hidden, c.num_heads * c.head_dim),
            mlp_norm=norm(),
            gate_up=weight(2 * c.intermediate_size, hidden),
            down=weight(hidden, c.intermediate_size),
        )
        for _ in range(layers)
    ]
    return Model(
        embed=weight(vocab, hidden, 4.0),
        layers=blocks,
        norm=norm(),
        head=weight(vocab, hidden, sharpness),
        config=c,
    )


def eagle_head(target: Model, *, draft_vocab: int, feature_layers: tuple[int, ...], seed: int = 1) -> EagleHead:
    """A random EAGLE-3 head for a target, with a scattered, ascending vocabulary map."""
    rng = np.random.default_rng(seed)
    c = head_config(target, draft_vocab=draft_vocab, feature_layers=feature_layers)
    ones = jnp.ones(c.hidden_size)
    layer = _head_layer(rng, c, 2 * c.hidden_size) | dict(input_norm=ones, hidden_norm=ones)
    ids = np.sort(rng.choice(c.vocab_size, draft_vocab, replace=False)).astype(np.int32)
    weights = dict(
        fc=_weight(rng, c.hidden_size, len(feature_layers) * c.hidden_size),
        layers=[layer],
        norm=ones,
        head=_weight(rng, draft_vocab, c.hidden_size),
        draft_to_target=jnp.asarray(ids),
    )
    return EagleHead.from_weights(c, weights)


def eagle1_head(target: Model, *, seed: int = 1) -> EagleHead:
    """A random EAGLE-1 head: the feature behind the final norm, the target's vocabulary and output head."""
    rng = np.random.default_rng(seed)
    c = head_config(target, draft_vocab=target.config.vocab_size, feature_layers=None, method="eagle")
    fc = _weight(rng, c.hidden_size, 2 * c.hidden_size)
    bias = jnp.asarray(rng.normal(0, 0.1, c.hidden_size), jnp.float32)
    return EagleHead.from_weights(c, dict(fc=fc, fc_bias=bias, layers=[_head_layer(rng, c, c.hidden_size)]))


def medusa_heads(target: Model, heads: int, *, seed: int = 1) -> MedusaHeads:
    """Random Medusa heads of one residual block each."""
    rng, own = np.random.default_rng(seed), target.config
    hidden = own.hidden_size
    config = MedusaConfig(
        vocab_size=own.vocab_size, hidden_size=hidden, num_heads=heads, num_layers=1, source_format="random"
    )
    block = dict(weight=_weight(rng, hidden, hidden), bias=jnp.zeros(hidden))
    own_heads = [dict(blocks=[block], output=_weight(rng, own.vocab_size, hidden)) for _ in range(heads)]
    return MedusaHeads.from_weights(config, dict(heads=own_heads))


def head_config(
    target: Model, *, draft_vocab: int, feature_layers: tuple[int, ...] | None, method: str = "eagle3"
) -> HeadConfig:
    own = target.config
    return METHODS[method].of_sizes(
        vocab_size=own.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=own.hidden_size,
        target_hidden_size=own.hidden_size,
        intermediate_size=own.intermediate_size,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=own.head_dim,
        norm_eps=1e-5,
        rope=Rope(),
        feature_layers=feature_layers,
        source_format="random",
        fc_bias=method == "eagle",
    )


def _weight(rng: np.random.Generator, out: int, inner: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(0, 1 / np.sqrt(inner), (out, inner)), jnp.float32)


def _head_layer(rng: np.random.Generator, c: HeadConfig, inputs: int) -> dict[str, jnp.ndarray]:
    return dict(
        qkv=_weight(rng, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, inputs),
        o=_weight(rng, c.hidden_size, c.num_heads * c.head_dim),
        mlp_norm=jnp.ones(c.hidden_size),
        gate_up=_weight(rng, 2 * c.intermediate_size, c.hidden_size),
        down=_weight(rng, c.hidden_size, c.intermediate_size),
    )


@cache
def load_target(folder: Path) -> Model:
    checkpoint = load.load(folder, dtype="float32")
    return Model.from_weights(checkpoint.config, checkpoint.weights)


@cache
def load_head(folder: Path) -> EagleHead:
    """An EAGLE head of any version."""
    checkpoint = auto.load_checkpoint(folder, dtype="float32")
    return EagleHead.from_weights(checkpoint.config, checkpoint.weights)


@cache
def load_medusa(folder: Path) -> MedusaHeads:
    checkpoint = auto.load_checkpoint(folder, dtype="float32", kind="medusa")
    return MedusaHeads.from_weights(checkpoint.config, checkpoint.weights)


def prefill_input(ids: list[int], *, page_row: list[int], slot: int = 0, remaining: int = 1000) -> PrefillInput:
    """A whole prompt as one greedy chunk."""
    return PrefillInput(
        slot=np.int32(slot),
        start=np.int32(0),
        count=np.int32(len(ids)),
        last=np.int32(1),
        write=np.int32(1),
        root=np.int32(-1),
        remaining=np.int32(remaining),
        top_k=np.int32(0),
        draft_cap=np.int32(1000),
        controlled=np.int32(0),
        temperature=np.float32(0),
        top_p=np.float32(1),
        min_p=np.float32(0),
        seed=np.zeros(2, np.uint32),
        stop_ids=np.full(MAX_STOP_IDS, -1, np.int32),
        page_row=np.asarray(page_row, np.int32),
        tokens=np.asarray(ids, np.int32),
    )


def one_layer(target: Model) -> Model:
    """The target with its first layer only: a draft model that is often wrong."""
    return target.replace(layers=target.layers[:1], config=target.config.resized(num_layers=1))


def recorded_prompts(golden: Path) -> list[list[int]]:
    """The sixteen prompts of the recordings."""
    with np.load(golden / "greedy_ar.npz") as arrays:
        flat, offsets = arrays["prompt"], arrays["prompt_offset"]
    return [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def text_cuts(data: Path, count: int, *, longest: int, seed: int = 0) -> list[str]:
    """Cuts of real text of varied length, each at most ``longest`` characters."""
    text = "".join((data / "text" / name).read_text()[:200_000] for name in TEXTS)
    rng = np.random.default_rng(seed)
    starts, sizes = rng.integers(0, len(text) - longest, count), rng.integers(1, longest + 1, count)
    return [text[a : a + n] for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]


TEXTS = ("tinystories_eval_excerpt.txt", "wikitext2_test.txt")


def greedy_cases(folder: Path) -> list[dict]:
    return json.loads((folder / "golden_greedy.json").read_text())["cases"]
