"""From logits to tokens: the processed distribution of each row, and noise that depends on seed and place alone.

Noise for the target's token is keyed (seed, TOKEN, position); every other draw (seed, purpose, root position, depth):
a root position occurs in one round only, while a position may be drafted in several, and keys that repeat between
rounds bias the accept rules over several rounds.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jspec.core.records import Sampling, SlotView
from pallas_kernels.layers.quantized import PartialSums, reduce_partials
from pallas_kernels.layers.row_blocks import in_row_blocks_off_gpu
from pallas_kernels.sampling.sample_tokens import sample_tokens
from pallas_kernels.sampling.threshold import sampling_threshold
from pallas_kernels.sampling.top_log_probs import top_log_probs


class Purpose(enum.IntEnum):
    """What a draw is for; part of its key."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def by_temperature(view: SlotView, run: Callable[[SlotView], Any]) -> Any:
    """Run one of two branches: a batch of greedy rows alone computes no noise and no law.

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
    draw = jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32, mode="low"))
    with jax.threefry_partitionable(True):  # as in `sample_tokens`, whatever the process is set to
        return draw(key.reshape(-1)).reshape(*key.shape, vocab)


def uniform(key: Array) -> Float[Array, "..."]:
    """One uniform number in [0, 1) for each key."""
    draw = jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32))
    return draw(key.reshape(-1)).reshape(key.shape)


def process(
    logits: Float[Array, "batch nodes vocab"], sampling: Sampling, implementation: str = "auto"
) -> Float[Array, "batch nodes vocab"]:
    """Temperature, top-k, top-p, min-p, in this order; excluded tokens get -inf. Greedy rows pass unchanged.

    As in transformers' warpers, each control sees what the one before left, renormalised. Tokens that tie with the
    last one kept are kept too.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    bound = sampling_threshold(rows, *_controls(sampling), implementation=implementation).reshape(logits.shape[:2])
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    return jnp.where(logits >= bound[..., None], logits / temperature[:, None, None], -jnp.inf)


def _controls(sampling: Sampling) -> tuple[Array, ...]:
    """What bounds the tokens of a row."""
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def target_tokens(product: PartialSums, view: SlotView, behind: Int[Array, "batch nodes"]) -> Int[Array, "batch nodes"]:
    """The token plain decoding would emit at each position: argmax for greedy rows, else drawn.

    Args:
        product: the logits of the node before each position, [1, batch, nodes, vocab], as `jspec.sampling.penalties`
        leaves
            them, perhaps to be scaled: a kernel of its own for that would read and write them once more.
        behind: how far behind the root the token will stand.
    """
    if not view.deterministic:
        return _draw(product, view.lengths, behind, view.sampling, None, view.implementation)

    def draw(logits: Array, first: Array, behind: Array, sampling: Sampling) -> Array:
        return _draw(logits[None], first, behind, sampling, None, view.implementation)

    # No bit of a law or of its noise depends on how many there are: each row is a batch.
    rows, each = reduce_partials(product, jnp.float32).reshape(behind.size, -1), behind.shape[1]
    shared = jax.tree.map(lambda field: jnp.repeat(field, each, axis=0), (view.lengths, view.sampling))
    arguments = rows, shared[0], behind.reshape(-1), shared[1]
    return in_row_blocks_off_gpu(draw, *arguments, implementation=view.implementation).reshape(behind.shape)


def _draw(
    product: PartialSums,
    root: Int[Array, "batch"],
    behind: Int[Array, "*rows"],
    sampling: Sampling,
    ids: Array | None,
    implementation: str,
) -> Int[Array, "*rows"]:
    """One of the tokens for each row, by the noise of their ids; neighbouring rows are of one root and sampling."""
    where, options = (sampling.seed, root, behind), {"purpose": int(Purpose.TOKEN), "implementation": implementation}
    return sample_tokens(product, *where, *_controls(sampling), ids, **options)


def law(
    logits: Float[Array, "batch nodes vocab"], sampling: Sampling, implementation: str = "auto"
) -> Float[Array, "batch nodes vocab"]:
    """The processed distribution of each row; greedy rows are one-hot at the argmax."""
    probs = jax.nn.softmax(process(logits, sampling, implementation), axis=-1)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=probs.dtype)
    return jnp.where(sampling.temperature[:, None, None] > 0, probs, one_hot)


RULES_WITH_LAW = ("rejection", "block")  # accept rules that want drafts drawn from a law that they are told
Chooser = Callable[[PartialSums, int, int], tuple[Array, Array | None]]


def child_chooser(
    view: SlotView, depth: int, vocab_map: Int[Array, "draft_vocab"] | None, target_vocab: int
) -> Chooser:
    """How the program's accept rule wants the followers of drafted nodes to be chosen.

    Under "coupled" a sampled row adds the very noise that the target will use at that position, so that close
    distributions choose the same tokens. The rules that need the draft's law get followers drawn from its processed
    law without replacement, in draw order (Gumbel top-k, arXiv:1903.06059). Else they are the likeliest ones.

    Args:
        depth: of the deepest nodes to be chosen.
        vocab_map: carries draft-vocabulary ids to the target's; None: they are the same.

    Returns:
        A function of logits ``[1, batch, fed, draft_vocab]``, perhaps to be scaled, the depth of the nodes to be chosen
        (1 below the root) and how many, to their ids ``[batch, fed, count]`` over the draft vocabulary, best first, and
        the law ``[batch, fed, draft_vocab]`` they were drawn from (None if they were not drawn).
    """
    noise = functools.cache(lambda: _draft_noise(view, depth, vocab_map, target_vocab))

    def dispatch(product: PartialSums, level: int, count: int) -> tuple[Array, Array | None]:
        if view.accept == "coupled" and count == 1:
            behind = jnp.full(product.shape[1:3], level, jnp.int32)
            drawn = _draw(product, view.lengths, behind, view.sampling, vocab_map, view.implementation)
            return drawn[..., None], None
        logits = reduce_partials(product, jnp.float32)
        if view.accept in RULES_WITH_LAW:
            return by_temperature(view, lambda branch: _drawn(logits, branch, level, count))
        if view.accept == "coupled":
            noisy = process(logits, view.sampling, view.implementation) + noise()[:, level - 1, None]
            logits = jnp.where(view.sampling.temperature[:, None, None] > 0, noisy, logits)
        return _largest(logits, count, view), None

    return dispatch


def _draft_noise(
    view: SlotView, depth: int, vocab_map: Array | None, target_vocab: int
) -> Float[Array, "batch depth draft_vocab"]:
    """The target's noise at all levels, each at one position, in one conditional: each costs a GPU program time."""
    positions = view.lengths[:, None] + jnp.arange(1, depth + 1)
    size = target_vocab if vocab_map is None else vocab_map.shape[0]

    def noise(branch: SlotView) -> Array:
        if branch.all_greedy:
            return jnp.zeros((*positions.shape, size), jnp.float32)
        drawn = gumbel(keys(view.sampling.seed[:, None], Purpose.TOKEN, positions), target_vocab)
        return drawn if vocab_map is None else drawn[..., vocab_map]

    return by_temperature(view, noise)


def _drawn(logits: Float[Array, "batch fed vocab"], view: SlotView, depth: int, count: int) -> tuple[Array, Array]:
    if view.all_greedy:
        certain = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
        return _largest(logits, count, view), certain
    probs = law(logits, view.sampling, view.implementation)
    place = (view.lengths[:, None], jnp.asarray([[depth]]), jnp.arange(logits.shape[1])[None])
    noise = gumbel(keys(view.sampling.seed[:, None], Purpose.DRAFT, *place), logits.shape[-1])
    is_sampled = view.sampling.temperature[:, None, None] > 0
    return _largest(jnp.where(is_sampled, jnp.log(probs) + noise, logits), count, view), probs


def _largest(scores: Float[Array, "batch fed vocab"], count: int, view: SlotView) -> Int[Array, "batch fed count"]:
    """The ids of the ``count`` largest scores, largest first, the smaller id among equals."""
    if count == 1:
        return jnp.argmax(scores, axis=-1, keepdims=True).astype(jnp.int32)
    rows, fed, vocab = scores.shape
    _, ids = top_log_probs(scores.reshape(rows * fed, vocab), count, implementation=view.implementation)
    return ids.reshape(rows, fed, count)


def log_prob(
    logits: Float[Array, "batch fed vocab"], ids: Int[Array, "batch fed count"]
) -> Float[Array, "batch fed count"]:
    """Untempered log-probabilities (natural), never above 0."""
    picked = jnp.take_along_axis(logits, ids, axis=-1)
    return jnp.minimum(picked - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
