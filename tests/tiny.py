"""Small models with random weights, and the real small pairs, loaded once a run."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec import pretrained
from jspec.cache import PoolShape, create
from jspec.draft.heads import EagleHead
from jspec.draft.medusa import MedusaHeads
from jspec.models.config import HeadConfig, ModelConfig, Rope
from jspec.models.decoder import Layer, Model, forward
from jspec.records import MAX_STOP_IDS, PrefillInput, TokenBatch


def config(vocab: int, *, layers: int = 2, hidden: int = 16) -> ModelConfig:
    return ModelConfig(
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
    rng, own = np.random.default_rng(seed), target.config
    hidden, heads, head_dim = own.hidden_size, own.num_heads, own.head_dim
    c = HeadConfig(
        method="eagle3",
        vocab_size=own.vocab_size,
        draft_vocab_size=draft_vocab,
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=own.intermediate_size,
        num_heads=heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=head_dim,
        norm_eps=1e-5,
        rope=Rope(),
        feature_layers=feature_layers,
        source_format="random",
    )

    def weight(out: int, inner: int) -> np.ndarray:
        return jnp.asarray(rng.normal(0, 1 / np.sqrt(inner), (out, inner)), jnp.float32)

    ones = jnp.ones(hidden)
    layer = dict(
        input_norm=ones,
        hidden_norm=ones,
        qkv=weight((heads + 2 * own.num_kv_heads) * head_dim, 2 * hidden),
        o=weight(hidden, heads * head_dim),
        mlp_norm=ones,
        gate_up=weight(2 * own.intermediate_size, hidden),
        down=weight(hidden, own.intermediate_size),
    )
    ids = np.sort(rng.choice(own.vocab_size, draft_vocab, replace=False)).astype(np.int32)
    weights = dict(
        fc=weight(hidden, len(feature_layers) * hidden),
        layers=[layer],
        norm=ones,
        head=weight(draft_vocab, hidden),
        draft_to_target=jnp.asarray(ids),
    )
    return EagleHead.from_weights(c, weights)


@cache
def load_target(folder: Path) -> Model:
    checkpoint = pretrained.load(folder, dtype="float32", kind="target")
    return Model.from_weights(checkpoint.config, checkpoint.weights)


@cache
def load_head(folder: Path) -> EagleHead:
    """An EAGLE head of any version."""
    checkpoint = pretrained.load(folder, dtype="float32")
    return EagleHead.from_weights(checkpoint.config, checkpoint.weights)


@cache
def load_medusa(folder: Path) -> MedusaHeads:
    checkpoint = pretrained.load(folder, dtype="float32", kind="medusa")
    return MedusaHeads.from_weights(checkpoint.config, checkpoint.weights)


def prefill_input(ids: list[int], *, page_row: list[int], slot: int = 0, remaining: int = 1000) -> PrefillInput:
    """A whole prompt as one greedy chunk."""
    return PrefillInput(
        slot=np.int32(slot),
        start=np.int32(0),
        count=np.int32(len(ids)),
        last=np.int32(1),
        remaining=np.int32(remaining),
        top_k=np.int32(0),
        draft_cap=np.int32(1000),
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
    return target.replace(layers=target.layers[:1], config=replace(target.config, num_layers=1))


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


def state(target: Model, ids: list[int], index: int) -> jnp.ndarray:
    """A hidden state of the target at every token of a text, [1, tokens, hidden]; indices as in `forward`."""
    size = len(ids)
    cache = create(
        target.config.num_layers, target.config, PoolShape(1, 2, size, size, "float32", "float32"), "float32"
    )
    batch = TokenBatch(
        tokens=jnp.asarray([ids], jnp.int32),
        positions=jnp.arange(size)[None],
        valid=jnp.ones((1, size), bool),
        first_row=jnp.zeros(1, jnp.int32),
        page_table=jnp.ones((1, 1), jnp.int32),
        bits=None,
        implementation="reference",
    )
    out, _ = forward(target, cache, batch, feature_layers=(index,), with_logits=False)
    assert out.features is not None
    return out.features


def greedy_cases(folder: Path) -> list[dict]:
    return json.loads((folder / "golden_greedy.json").read_text())["cases"]
