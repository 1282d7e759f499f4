"""From logits to tokens: the processed probabilities of each row, and noise that depends on seed and position alone.

Noise for the target's token is keyed (seed, TOKEN, position); every other draw is keyed (seed, purpose, root position,
depth). A root position occurs in one step only, while a position may be drafted in several steps, and keys that repeat
between steps bias the accept rules.
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

from jspec.core.accept_rule import DraftSampling
from jspec.core.records import Sampling, SlotView
from pallas_kernels.layers.quantized import PartialSums, reduce_partials
from pallas_kernels.layers.row_blocks import in_row_blocks_off_gpu
from pallas_kernels.sampling.sample_tokens import sample_tokens
from pallas_kernels.sampling.threshold import sampling_threshold
from pallas_kernels.sampling.top_log_probs import top_log_probs


class Purpose(enum.IntEnum):
    """Purpose of a draw; part of its random key."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def by_temperature(view: SlotView, run: Callable[[SlotView], Any]) -> Any:
    """Run one of two branches: a batch with greedy rows only computes no noise and no probabilities.

    Args:
        run: function of the view, with `SlotView.all_greedy` set for its branch. No pool may pass through it: a
            conditional copies what both branches return.
    """
    return jax.lax.cond(
        jnp.any(view.sampling.temperature > 0),
        lambda: run(replace(view, all_greedy=False)),
        lambda: run(replace(view, all_greedy=True)),
    )


def keys(seed: UInt32[Array, "... 2"], purpose: Purpose, *coordinates: Int[Array, "..."]) -> Array:
    """One random key for each element of the broadcast of seed and coordinates."""
    shape = jnp.broadcast_shapes(seed.shape[:-1], *(c.shape for c in coordinates))
    flat_seed = jnp.broadcast_to(seed, (*shape, 2)).reshape(-1, 2)
    flat_coordinates = [jnp.broadcast_to(c, shape).reshape(-1) for c in coordinates]

    def one_key(words: Array, *coordinates: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), int(purpose))
        for coordinate in coordinates:
            key = jax.random.fold_in(key, coordinate)
        return key

    return jax.vmap(one_key)(flat_seed, *flat_coordinates).reshape(shape)


def gumbel(key: Array, vocab: int) -> Float[Array, "... vocab"]:
    """Gumbel noise over a vocabulary for each key: ``argmax(logits + noise)`` is a draw from softmax(logits)."""
    draw = jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32, mode="low"))
    with jax.threefry_partitionable(True):  # as in `sample_tokens`, whatever the process has configured
        return draw(key.reshape(-1)).reshape(*key.shape, vocab)


def uniform(key: Array) -> Float[Array, "..."]:
    """A uniform number in [0, 1) for each key."""
    draw = jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32))
    return draw(key.reshape(-1)).reshape(key.shape)


def process(
    logits: Float[Array, "batch nodes vocab"], sampling: Sampling, implementation: str = "auto"
) -> Float[Array, "batch nodes vocab"]:
    """Logits after temperature, top-k, top-p and min-p, in this order; excluded tokens get -inf.

    Greedy rows are returned unchanged. As in transformers' warpers, each filter sees the tokens that the one before
    kept, renormalised. Tokens that tie with the last kept token are kept too.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    bound = sampling_threshold(rows, *_filters(sampling), implementation=implementation).reshape(logits.shape[:2])
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    return jnp.where(logits >= bound[..., None], logits / temperature[:, None, None], -jnp.inf)


def _filters(sampling: Sampling) -> tuple[Array, ...]:
    """The fields of each row that decide which tokens it may sample."""
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def target_tokens(logits: PartialSums, view: SlotView, offset: Int[Array, "batch nodes"]) -> Int[Array, "batch nodes"]:
    """The token plain decoding would emit at each position: argmax for greedy rows, else drawn.

    Args:
        logits: edited logits of the node before each position, [1, batch, nodes, vocab]
            (`jspec.sampling.penalties`). Scales may still be unapplied: applying them in a kernel of its own would
            read and write the logits once more.
        offset: number of tokens between the root and the emitted token, 1 for the token right after the root.
    """
    if not view.deterministic:
        return _draw(logits, view.lengths, offset, view.sampling, None, view.implementation)

    def draw(logits: Array, root: Array, offset: Array, sampling: Sampling) -> Array:
        return _draw(logits[None], root, offset, sampling, None, view.implementation)

    # Each row is a batch of its own: no bit of its probabilities or noise depends on the number of rows.
    rows, each = reduce_partials(logits, jnp.float32).reshape(offset.size, -1), offset.shape[1]
    shared = jax.tree.map(lambda field: jnp.repeat(field, each, axis=0), (view.lengths, view.sampling))
    arguments = rows, shared[0], offset.reshape(-1), shared[1]
    return in_row_blocks_off_gpu(draw, *arguments, implementation=view.implementation).reshape(offset.shape)


def _draw(
    logits: PartialSums,
    root: Int[Array, "batch"],
    offset: Int[Array, "*rows"],
    sampling: Sampling,
    ids: Array | None,
    implementation: str,
) -> Int[Array, "*rows"]:
    """One token for each row, with the noise of its target id; neighbouring rows share a root and its sampling."""
    place, options = (sampling.seed, root, offset), {"purpose": int(Purpose.TOKEN), "implementation": implementation}
    return sample_tokens(logits, *place, *_filters(sampling), ids, **options)


def processed_probs(
    logits: Float[Array, "batch nodes vocab"], sampling: Sampling, implementation: str = "auto"
) -> Float[Array, "batch nodes vocab"]:
    """The processed probabilities of each row; greedy rows are one-hot at the argmax."""
    probs = jax.nn.softmax(process(logits, sampling, implementation), axis=-1)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=probs.dtype)
    return jnp.where(sampling.temperature[:, None, None] > 0, probs, one_hot)


ChildChooser = Callable[[PartialSums, int, int], tuple[Array, Array | None]]


def child_chooser(
    view: SlotView, depth: int, vocab_map: Int[Array, "draft_vocab"] | None, target_vocab: int
) -> ChildChooser:
    """How the program's accept rule (`AcceptRule.draft_sampling`) wants the children of drafted nodes to be chosen.

    TARGET_NOISE: a sampled row adds the noise that the target will use at that position, which makes close
    distributions choose the same tokens. OWN_DISTRIBUTION: children are drawn from the draft's processed
    probabilities without replacement, in draw order (Gumbel top-k, arXiv:1903.06059). MOST_LIKELY: the largest logits.

    Args:
        depth: depth of the deepest nodes to be chosen.
        vocab_map: target-vocabulary id of each draft-vocabulary id; None: they are the same.

    Returns:
        A function of the logits ``[1, batch, fed, draft_vocab]`` (perhaps still to be scaled), the depth of the nodes
        to choose (1 below the root) and their number. It returns the chosen draft-vocabulary ids
        ``[batch, fed, count]``, best first, and the probabilities ``[batch, fed, draft_vocab]`` they were drawn from
        (None if they were not drawn).
    """
    noise = functools.cache(lambda: _target_noise(view, depth, vocab_map, target_vocab))
    draft_sampling = view.accept.draft_sampling

    def choose(partial_logits: PartialSums, level: int, count: int) -> tuple[Array, Array | None]:
        if draft_sampling is DraftSampling.TARGET_NOISE and count == 1:
            offset = jnp.full(partial_logits.shape[1:3], level, jnp.int32)
            drawn = _draw(partial_logits, view.lengths, offset, view.sampling, vocab_map, view.implementation)
            return drawn[..., None], None
        logits = reduce_partials(partial_logits, jnp.float32)
        if draft_sampling is DraftSampling.OWN_DISTRIBUTION:
            return by_temperature(view, lambda branch: _draw_children(logits, branch, level, count))
        if draft_sampling is DraftSampling.TARGET_NOISE:
            noisy = process(logits, view.sampling, view.implementation) + noise()[:, level - 1, None]
            logits = jnp.where(view.sampling.temperature[:, None, None] > 0, noisy, logits)
        return _largest(logits, count, view), None

    return choose


def _target_noise(
    view: SlotView, depth: int, vocab_map: Array | None, target_vocab: int
) -> Float[Array, "batch depth draft_vocab"]:
    """The target's noise at the positions of all levels, in one conditional: each conditional costs a GPU time."""
    positions = view.lengths[:, None] + jnp.arange(1, depth + 1)
    size = target_vocab if vocab_map is None else vocab_map.shape[0]

    def noise(branch: SlotView) -> Array:
        if branch.all_greedy:
            return jnp.zeros((*positions.shape, size), jnp.float32)
        drawn = gumbel(keys(view.sampling.seed[:, None], Purpose.TOKEN, positions), target_vocab)
        return drawn if vocab_map is None else drawn[..., vocab_map]

    return by_temperature(view, noise)


def _draw_children(
    logits: Float[Array, "batch fed vocab"], view: SlotView, depth: int, count: int
) -> tuple[Array, Array]:
    """Children drawn without replacement, and the probabilities they were drawn from; greedy rows: one-hot."""
    if view.all_greedy:
        one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
        return _largest(logits, count, view), one_hot
    probs = processed_probs(logits, view.sampling, view.implementation)
    place = (view.lengths[:, None], jnp.asarray([[depth]]), jnp.arange(logits.shape[1])[None])
    noise = gumbel(keys(view.sampling.seed[:, None], Purpose.DRAFT, *place), logits.shape[-1])
    is_sampled = view.sampling.temperature[:, None, None] > 0
    return _largest(jnp.where(is_sampled, jnp.log(probs) + noise, logits), count, view), probs


def _largest(scores: Float[Array, "batch fed vocab"], count: int, view: SlotView) -> Int[Array, "batch fed count"]:
    """The ids of the ``count`` largest scores, largest first; of equal scores the smaller id first."""
    if count == 1:
        return jnp.argmax(scores, axis=-1, keepdims=True).astype(jnp.int32)
    rows, fed, vocab = scores.shape
    _, ids = top_log_probs(scores.reshape(rows * fed, vocab), count, implementation=view.implementation)
    return ids.reshape(rows, fed, count)


def log_prob(
    logits: Float[Array, "batch fed vocab"], ids: Int[Array, "batch fed count"]
) -> Float[Array, "batch fed count"]:
    """Natural log-probabilities without temperature, never above 0."""
    picked = jnp.take_along_axis(logits, ids, axis=-1)
    return jnp.minimum(picked - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
