"""From logits to tokens: the processed distribution of each row, and noise that depends on seed and place alone.

Noise for the target's token is keyed (seed, TOKEN, position); every other draw (seed, purpose, root position, depth):
a root position occurs in one round only, while a position may be drafted in several, and keys that repeat between
rounds bias the accept rules over several rounds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.records import Sampling, SlotView


class Purpose(enum.IntEnum):
    """What a draw is for; part of its key."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def by_temperature(view: SlotView, run: Callable[[SlotView], Any]) -> Any:
    """Run one of two branches: a batch of greedy rows alone computes no noise and nothing else over the vocabulary.

    Args:
        run: takes the view, with `SlotView.all_greedy` set for its branch.
    """
    return jax.lax.cond(
        jnp.any(view.sampling.temperature > 0),
        lambda: run(view.replace(all_greedy=False)),
        lambda: run(view.replace(all_greedy=True)),
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
    temperature = sampling.temperature[:, None, None]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    restricted = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return jax.lax.cond(
        jnp.any(restricted & (sampling.temperature > 0)), lambda x: _restrict(x, sampling), lambda x: x, scaled
    )


def _restrict(logits: Float[Array, "batch nodes vocab"], sampling: Sampling) -> Float[Array, "batch nodes vocab"]:
    top_k, top_p, min_p = (field[:, None, None] for field in (sampling.top_k, sampling.top_p, sampling.min_p))
    order = _ordered_bits(logits)
    kth = _largest_bound(order, jnp.ones_like(logits), top_k.astype(jnp.float32))
    logits = jnp.where((top_k <= 0) | (order >= kth), logits, -jnp.inf)
    nucleus = _largest_bound(order, jax.nn.softmax(logits, axis=-1), top_p)
    top = jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where((top_p >= 1) | (order >= nucleus) | (logits == top), logits, -jnp.inf)
    return jnp.where((min_p <= 0) | (logits >= top + jnp.log(min_p)), logits, -jnp.inf)


def _ordered_bits(x: Float[Array, "... vocab"]) -> UInt32[Array, "... vocab"]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _largest_bound(
    order: UInt32[Array, "batch nodes vocab"], weight: Float[Array, "batch nodes vocab"], goal: Float[Array, "batch 1 1"]
) -> UInt32[Array, "batch nodes 1"]:
    """The largest bound such that the entries at or above it weigh at least ``goal`` (0 if all together do not).

    Found four bits at a time: eight passes over the vocabulary instead of a sort.
    """

    def four_bits(index: Any, bound: Array) -> Array:
        shift = jnp.uint32(28) - jnp.uint32(4) * jnp.uint32(index)
        tries = bound + (jnp.arange(1, 16, dtype=jnp.uint32) << shift)
        above = order[..., None] >= tries[..., None, :]
        mass = jnp.sum(jnp.where(above, weight[..., None], 0.0), axis=-2)
        steps = jnp.sum(mass >= goal, axis=-1, keepdims=True).astype(jnp.uint32)
        return bound + (steps << shift)

    def unrolled(bound: Array) -> Array:
        for index in range(8):
            bound = four_bits(index, bound)
        return bound

    # A loop would break the one graph of a round on a GPU; elsewhere it compiles in an eighth of the time.
    return jax.lax.platform_dependent(
        jnp.zeros((*order.shape[:-1], 1), jnp.uint32),
        cuda=unrolled,
        default=lambda bound: jax.lax.fori_loop(0, 8, four_bits, bound),
    )


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
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if view.accept == "coupled":
        if view.all_greedy:
            return greedy, None
        noise = token_noise(view, (view.lengths + depth)[:, None], target_vocab)
        noise = noise if vocab_map is None else noise[..., vocab_map]
        drawn = jnp.argmax(process(logits[:, None], view.sampling) + noise, axis=-1).astype(jnp.int32)[:, 0]
        return jnp.where(view.sampling.temperature > 0, drawn, greedy), None
    if view.all_greedy:
        return greedy, jax.nn.one_hot(greedy, logits.shape[-1], dtype=jnp.float32)
    probs = law(logits[:, None], view.sampling)[:, 0]
    key = keys(view.sampling.seed, Purpose.DRAFT, view.lengths, jnp.full_like(view.lengths, depth))
    drawn = jnp.argmax(jnp.log(probs) + gumbel(key, logits.shape[-1]), axis=-1)
    return drawn.astype(jnp.int32), probs


def log_prob(logits: Float[Array, "batch vocab"], token: Int[Array, "batch"]) -> Float[Array, "batch"]:
    """Untempered log-probability (natural) of one token a row."""
    picked = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)
