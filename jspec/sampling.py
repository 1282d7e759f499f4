"""From logits to tokens: the processed distribution of each row, and noise that depends on seed and place alone.

Noise for the target's token is keyed (seed, TOKEN, position); every other draw (seed, purpose, root position, depth):
a root position occurs in one round only, while a position may be drafted in several, and keys that repeat between
rounds bias the accept rules over several rounds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.records import Sampling, SlotView
from pallas_kernels.keep_bound import keep_bound


class Purpose(enum.IntEnum):
    """What a draw is for; part of its key."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def by_temperature(view: SlotView, run: Callable[[SlotView], Any]) -> Any:
    """Run one of two branches: a batch of greedy rows alone computes no noise and nothing else over the vocabulary.

    Args:
        run: takes the view, with `SlotView.all_greedy` set for its branch. No pool may pass through it: a conditional
            copies what both branches return.
    """
    return jax.lax.cond(
        jnp.any(view.sampling.temperature > 0),
        lambda: run(replace(view, all_greedy=False)),
        lambda: run(replace(view, all_greedy=True)),
    )


def keys(seed: UInt32[Array, "... 2"], purpose: Purpose, *place: Int[Array, "..."]) -> Array:
    """One random key per element of the broadcast of seed and place."""
    shape = jnp.broadcast_shapes(seed.shape[:-1], *(p.shape for p in place))
    flat_seed = jnp.broadcast_to(seed, (*shape, 2)).reshape(-1, 2)
    flat_place = [jnp.broadcast_to(p, shape).reshape(-1) for p in place]

    def one(words: Array, *coordinates: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), int(purpose))
        for coordinate in coordinates:
            key = jax.random.fold_in(key, coordinate)
        return key

    return jax.vmap(one)(flat_seed, *flat_place).reshape(shape)


def gumbel(key: Array, vocab: int) -> Float[Array, "... vocab"]:
    """Gumbel noise over a vocabulary for each key: ``argmax(logits + noise)`` is a draw from softmax(logits)."""
    draw = jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32))
    return draw(key.reshape(-1)).reshape(*key.shape, vocab)


def uniform(key: Array) -> Float[Array, "..."]:
    """One uniform number in [0, 1) for each key."""
    draw = jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32))
    return draw(key.reshape(-1)).reshape(key.shape)


def token_noise(view: SlotView, positions: Int[Array, "batch nodes"], vocab: int) -> Float[Array, "batch nodes vocab"]:
    """The noise with which the target's token at each position is drawn, whoever drafts."""
    return gumbel(keys(view.sampling.seed[:, None], Purpose.TOKEN, positions), vocab)


def process(logits: Float[Array, "batch nodes vocab"], sampling: Sampling) -> Float[Array, "batch nodes vocab"]:
    """Temperature, top-k, top-p, min-p, in this order; excluded tokens get -inf. Greedy rows pass unchanged.

    As in transformers' warpers, each control sees what the one before left, renormalised. Tokens that tie with the
    last one kept are kept too.
    """
    rows, nodes, vocab = logits.shape
    temperature = sampling.temperature[:, None, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    is_sampled = sampling.temperature > 0
    controls = (
        jnp.where(is_sampled, sampling.top_k, 0),
        jnp.where(is_sampled, sampling.top_p, 1.0),
        jnp.where(is_sampled, sampling.min_p, 0.0),
    )
    per_node = [jnp.repeat(control, nodes) for control in controls]
    bound = keep_bound(scaled.reshape(-1, vocab), *per_node).reshape(rows, nodes, 1)
    return jnp.where(scaled >= bound, scaled, -jnp.inf)


def target_tokens(
    logits: Float[Array, "batch nodes vocab"], view: SlotView, positions: Int[Array, "batch nodes"]
) -> Int[Array, "batch nodes"]:
    """The token plain decoding would emit at each position: argmax for greedy rows, else by `token_noise`.

    Args:
        logits: raw logits of the node before each position.
        positions: the position the token will stand at.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if view.all_greedy:
        return greedy
    noisy = process(logits, view.sampling) + token_noise(view, positions, logits.shape[-1])
    drawn = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
    return jnp.where(view.sampling.temperature[:, None] > 0, drawn, greedy)


def law(logits: Float[Array, "batch nodes vocab"], sampling: Sampling) -> Float[Array, "batch nodes vocab"]:
    """The processed distribution of each row; greedy rows are one-hot at the argmax."""
    probs = jax.nn.softmax(process(logits, sampling), axis=-1)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=probs.dtype)
    return jnp.where(sampling.temperature[:, None, None] > 0, probs, one_hot)


def draft_token(
    logits: Float[Array, "batch vocab"],
    view: SlotView,
    depth: int,
    vocab_map: Int[Array, "vocab"] | None,
    target_vocab: int,
) -> tuple[Int[Array, "batch"], Float[Array, "batch vocab"] | None]:
    """Choose one draft token a row, as the program's accept rule wants it.

    Under "coupled" a sampled row uses the very noise that the target will use at that position, so that close
    distributions choose the same token; otherwise it is drawn from the draft's own processed law.

    Args:
        logits: over the draft vocabulary, which ``vocab_map`` carries to the target's.
        depth: of the node to be chosen, 1 below the root.

    Returns:
        Draft-vocabulary ids, and the law they were drawn from (None under "coupled").
    """
    choose = _coupled_token if view.accept == "coupled" else _drawn_token
    return by_temperature(view, lambda branch: choose(logits, branch, depth, vocab_map, target_vocab))


def _coupled_token(logits: Array, view: SlotView, depth: int, vocab_map: Array | None, target_vocab: int) -> Any:
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if view.all_greedy:
        return greedy, None
    noise = token_noise(view, (view.lengths + depth)[:, None], target_vocab)
    noise = noise if vocab_map is None else noise[..., vocab_map]
    drawn = jnp.argmax(process(logits[:, None], view.sampling) + noise, axis=-1).astype(jnp.int32)[:, 0]
    return jnp.where(view.sampling.temperature > 0, drawn, greedy), None


def _drawn_token(logits: Array, view: SlotView, depth: int, vocab_map: Array | None, target_vocab: int) -> Any:
    if view.all_greedy:
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return greedy, jax.nn.one_hot(greedy, logits.shape[-1], dtype=jnp.float32)
    probs = law(logits[:, None], view.sampling)[:, 0]
    key = keys(view.sampling.seed, Purpose.DRAFT, view.lengths, jnp.full_like(view.lengths, depth))
    drawn = jnp.argmax(jnp.log(probs) + gumbel(key, logits.shape[-1]), axis=-1)
    return drawn.astype(jnp.int32), probs


def log_prob(logits: Float[Array, "batch vocab"], token: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """Untempered log-probability (natural) of one token a row."""
    picked = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)
