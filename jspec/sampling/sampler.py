"""Samples tokens: computes processed probabilities, and random numbers that depend on seed and position alone.

The random key of the target's noise consists of the seed, `Purpose.TOKEN` and the token's position. Every other key
consists of the seed, the purpose, the root's position and the depth. A root has a given position in one step only,
while a position may be drafted in several steps. Keys that repeat between steps would bias the accept rules.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from jspec.core.accept_rule import DraftSampling
from jspec.core.records import SlotView
from jspec.core.sampling import Sampling
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials
from pallas_kernels.layers.row_by_row import row_by_row_off_gpu
from pallas_kernels.layers.shard import OwnColumns
from pallas_kernels.sampling import divided
from pallas_kernels.sampling.sample_tokens import sample_tokens
from pallas_kernels.sampling.threshold import sampling_threshold
from pallas_kernels.sampling.top_log_probs import top_log_probs


class Purpose(enum.IntEnum):
    """The purpose of a random draw, which is part of the draw's random key."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def by_temperature(view: SlotView, run: Callable[[SlotView], Any]) -> Any:
    """Call ``run`` in one of two branches of a conditional, for batches with and without sampled rows.

    The branch for batches with only greedy rows computes no noise and no probabilities.

    Args:
        run: function of the view, in which `SlotView.all_greedy` is True in the greedy branch. The result must not
            contain a KV pool, because a conditional copies the results of its branches.
    """
    return jax.lax.cond(
        jnp.any(view.sampling.temperature > 0),
        lambda: run(replace(view, all_greedy=False)),
        lambda: run(replace(view, all_greedy=True)),
    )


def keys(seed: UInt32[Array, "... 2"], purpose: Purpose, *coordinates: Int[Array, "..."]) -> Array:
    """Make random keys, one for each element of the broadcast of seed and coordinates."""
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
    """Draw Gumbel noise over a vocabulary for each key; ``argmax(logits + noise)`` is a sample from softmax(logits)."""
    draw = jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32, mode="low"))
    with jax.threefry_partitionable(True):  # draw as `sample_tokens` does, whatever jax's setting is
        return draw(key.reshape(-1)).reshape(*key.shape, vocab)


def uniform(key: Array) -> Float[Array, "..."]:
    """Draw a uniform number in [0, 1) for each key."""
    draw = jax.vmap(lambda k: jax.random.uniform(k, (), jnp.float32))
    return draw(key.reshape(-1)).reshape(key.shape)


def process(
    logits: Float[Array, "batch nodes vocab"], sampling: Sampling, implementation: str = "auto"
) -> Float[Array, "batch nodes vocab"]:
    """Apply temperature, top-k, top-p and min-p to the logits, in this order; excluded tokens get -inf.

    Greedy rows are returned unchanged, and NaN stays NaN. As in transformers, each filter reads the renormalised
    probabilities of the tokens that the filter before it has kept. Tokens that are as likely as the last kept token are
    kept too.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    bound = sampling_threshold(rows, *_filters(sampling), implementation=implementation).reshape(logits.shape[:2])
    # A division would be such a factor in some programs and not in others, as XLA decides, and so give other bits.
    factor = 1 / jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    return jnp.where(logits < bound[..., None], -jnp.inf, logits * factor[:, None, None])


def _filters(sampling: Sampling) -> tuple[Array, ...]:
    """Return the temperature, top-k, top-p and min-p of each row."""
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def target_tokens(logits: PartialSums, view: SlotView, offset: Int[Array, "batch nodes"]) -> Int[Array, "batch nodes"]:
    """Return the token that plain decoding would emit after each node: the argmax in greedy rows, else a sample.

    A node whose logits contain NaN gets the token -1, which ends its request with an error on the host.

    Args:
        logits: logits after every node, edited by `jspec.sampling.penalties`, [1, batch, nodes, vocab]. Scales may
            still be unapplied, because a separate kernel for them would read and write the logits once more.
        offset: position of the emitted token minus the root's position; 1 for the token right after the root.
    """
    if not view.deterministic:
        return _draw(logits, view, offset, None)

    def draw(logits: PartialSums, root: Array, offset: Array, sampling: Sampling) -> Array:
        one_part = jax.tree.map(lambda rows: rows[None], logits)
        return _sample(one_part, root, offset, sampling, None, None, view.implementation)

    # Compute each row as a separate batch, so that a row's bits do not depend on the number of rows.
    partials = logits.own if isinstance(logits, OwnColumns) else logits  # `OwnColumns` wrap a device's partial sums
    sums = reduce_partials(partials, jnp.float32).reshape(offset.size, -1)
    rows = replace(logits, own=sums) if isinstance(logits, OwnColumns) else sums
    of_sequences = view.lengths, view.sampling  # a root's position is the sequence's length
    root, sampling = jax.tree.map(lambda field: jnp.repeat(field, offset.shape[1], axis=0), of_sequences)
    arguments = rows, root, offset.reshape(-1), sampling
    return row_by_row_off_gpu(draw, *arguments, implementation=view.implementation).reshape(offset.shape)


def with_noise(view: SlotView, depths: int, vocab: int) -> SlotView:
    """Return a view that holds the target's noise at the first positions after the root, where references read it.

    Without it, the reference of `sample_tokens` computes the noise again at each level of a draft and for each node.
    Kernels compute noise where they use it, and deterministic programs compute it for each row alone.
    """
    if view.implementation != "reference" or view.deterministic:
        return view
    if view.accept.draft_sampling is not DraftSampling.TARGET_NOISE:
        return view
    return replace(view, noise=_target_noise(view, depths, None, vocab))


def _draw(
    logits: PartialSums, view: SlotView, offset: Int[Array, "batch nodes"], ids: Array | None
) -> Int[Array, "batch nodes"]:
    """Sample one token for each node with the target's noise; the arguments are those of `_sample`."""
    noise = view.noise
    if noise is not None:
        noise = jnp.take_along_axis(noise, offset[..., None] - 1, axis=1)
    return _sample(logits, view.lengths, offset, view.sampling, ids, noise, view.implementation)


def _sample(
    logits: PartialSums,
    root: Int[Array, "batch"],
    offset: Int[Array, "*rows"],
    sampling: Sampling,
    ids: Array | None,
    noise: Float[Array, "*rows target_vocab"] | None,
    implementation: str,
) -> Int[Array, "*rows"]:
    """Sample one token for each row with the target's noise; neighbouring rows share a root and sampling parameters.

    Args:
        logits: [1, *rows, vocab]; if they are `OwnColumns`, no row has top-k, top-p or min-p.
        ids: target-vocabulary id of each column of the logits, which selects the column's noise; None: the column's
            index.
        noise: the target's noise for each row; None: it is computed.
    """
    key_fields, options = (
        (sampling.seed, root, offset),
        {"purpose": int(Purpose.TOKEN), "implementation": implementation},
    )
    sample = divided.sample_tokens_of_devices if isinstance(logits, OwnColumns) else sample_tokens
    return sample(logits, *key_fields, *_filters(sampling), ids=ids, noise=noise, **options)


def processed_probs(
    logits: Float[Array, "batch nodes vocab"], sampling: Sampling, implementation: str = "auto"
) -> Float[Array, "batch nodes vocab"]:
    """Return the probabilities after temperature, top-k, top-p and min-p; greedy rows are one-hot at the argmax.

    Probabilities of logits that contain NaN are all NaN.
    """
    probs = jax.nn.softmax(process(logits, sampling, implementation), axis=-1)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=probs.dtype)
    return jnp.where((sampling.temperature[:, None, None] > 0) | jnp.isnan(probs), probs, one_hot)


ChildChooser = Callable[[PartialSums, int | np.ndarray, int], tuple[Array, Array | None]]


def child_chooser(
    view: SlotView, depth: int, vocab_map: Int[Array, "draft_vocab"] | None, target_vocab: int
) -> ChildChooser:
    """Make the function that chooses the children of draft nodes, as the accept rule's ``draft_sampling`` demands.

    TARGET_NOISE: the children are the tokens with the largest sum of processed draft logit and noise. The noise is that
    of the target at the children's position, so draft and target mostly choose equal tokens if their logits are
    similar.
    OWN_DISTRIBUTION: the children are drawn from the draft's processed probabilities without replacement, in draw order
    (Gumbel top-k, arXiv:1903.06059).
    MOST_LIKELY: the children are the tokens with the largest draft logits.

    In greedy rows, the children are always the tokens with the largest draft logits.

    Args:
        depth: depth of the deepest nodes to choose.
        vocab_map: target-vocabulary id of each draft-vocabulary id; None: the ids are equal.
        target_vocab: size of the target's vocabulary.

    Returns:
        A function with three arguments: the parents' draft logits [1, batch, parents, draft_vocab], whose scales may
        still be unapplied; the depth of the children (1 for the root's children), one for all parents or one for each;
        the number ``count`` of children per parent. The function returns the children's draft-vocabulary ids [batch,
        parents, count], best first, and the probabilities [batch, parents, draft_vocab] from which they were drawn
        (None if nothing was drawn).
    """
    noise = functools.cache(lambda: _target_noise(view, depth, vocab_map, target_vocab))
    draft_sampling = view.accept.draft_sampling

    def choose(partial_logits: PartialSums, level: int | np.ndarray, count: int) -> tuple[Array, Array | None]:
        if draft_sampling is DraftSampling.TARGET_NOISE and count == 1:
            offset = jnp.broadcast_to(jnp.asarray(level, jnp.int32), partial_logits.shape[1:3])
            return _draw(partial_logits, view, offset, vocab_map)[..., None], None
        if draft_sampling is DraftSampling.OWN_DISTRIBUTION:
            if isinstance(partial_logits, OwnColumns):  # then every row is greedy (`AcceptRule.reads_probabilities`)
                return _draw_children(partial_logits, replace(view, all_greedy=True), level, count)
            return by_temperature(view, lambda branch: _draw_children(partial_logits, branch, level, count))
        if draft_sampling is DraftSampling.MOST_LIKELY:
            return _largest(partial_logits, count, view), None
        is_sampled, own_noise = view.sampling.temperature[:, None, None] > 0, noise()[:, np.atleast_1d(level) - 1]
        if not isinstance(partial_logits, OwnColumns):
            logits = reduce_partials(partial_logits, jnp.float32)
            noisy = process(logits, view.sampling, view.implementation) + own_noise
            return _largest(jnp.where(is_sampled, noisy, logits)[None], count, view), None
        logits = reduce_partials(divided.own_logits(partial_logits), jnp.float32)
        noisy = process(logits, view.sampling, view.implementation) + divided.own_part(partial_logits, own_noise)
        own = jnp.where(is_sampled, noisy, logits)[None]
        return _largest(replace(partial_logits, own=own), count, view), None

    return choose


def _target_noise(
    view: SlotView, depth: int, vocab_map: Array | None, target_vocab: int
) -> Float[Array, "batch depth draft_vocab"]:
    """Draw the target's noise for all depths of the tree in one conditional; each conditional takes GPU time."""
    if view.noise is not None:
        held = view.noise[:, :depth]
        return held if vocab_map is None else held[..., vocab_map]
    positions = view.lengths[:, None] + jnp.arange(1, depth + 1)
    size = target_vocab if vocab_map is None else vocab_map.shape[0]

    def noise(branch: SlotView) -> Array:
        if branch.all_greedy:
            return jnp.zeros((*positions.shape, size), jnp.float32)
        drawn = gumbel(keys(view.sampling.seed[:, None], Purpose.TOKEN, positions), target_vocab)
        return drawn if vocab_map is None else drawn[..., vocab_map]

    return by_temperature(view, noise)


def _draw_children(
    partial_logits: PartialSums, view: SlotView, depth: int | np.ndarray, count: int
) -> tuple[Array, Array]:
    """Draw children without replacement, and return their ids and the probabilities from which they were drawn.

    Greedy rows take the tokens with the largest logits, and have one-hot probabilities.
    """
    if view.all_greedy:
        ids = _largest(partial_logits, count, view)
        return ids, jax.nn.one_hot(ids[..., 0], partial_logits.shape[-1], dtype=jnp.float32)
    logits = reduce_partials(partial_logits, jnp.float32)
    probs = processed_probs(logits, view.sampling, view.implementation)
    key_fields = (view.lengths[:, None], jnp.atleast_1d(jnp.asarray(depth))[None], jnp.arange(logits.shape[1])[None])
    noise = gumbel(keys(view.sampling.seed[:, None], Purpose.DRAFT, *key_fields), logits.shape[-1])
    is_sampled = view.sampling.temperature[:, None, None] > 0
    return _largest(jnp.where(is_sampled, jnp.log(probs) + noise, logits)[None], count, view), probs


def _largest(scores: PartialSums, count: int, view: SlotView) -> Int[Array, "batch fed count"]:
    """Return the token ids of the ``count`` largest scores, largest first; among equal scores, the smaller id first."""
    if count == 1 and not isinstance(scores, OwnColumns):
        return jnp.argmax(reduce_partials(scores, jnp.float32), axis=-1, keepdims=True).astype(jnp.int32)
    _, ids = most_likely(scores, count, implementation=view.implementation)
    return ids.reshape(*scores.shape[1:-1], count)


@struct.dataclass
class Corrected:
    """Logits of the children of nodes of equal depth: a row's own at this depth, plus corrections of each node."""

    corrections: Float[Array, "batch nodes vocab"]
    logits: Float[Array, "batch depths vocab"]  # of a row at each depth
    depth: int = struct.field(pytree_node=False)  # index of the children's depth among them


def most_likely(
    logits: PartialSums | Corrected, k: int, *, base: Float[Array, "rows"] | None = None, implementation: Any
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Return the k largest natural log-probabilities of each row of logits [1, *rows, vocab], and their token ids.

    Args:
        logits: logits, or logits with corrections, of which each node is a row.
        k, base, implementation: as in `pallas_kernels.sampling.top_log_probs.top_log_probs`.
    """
    if isinstance(logits, OwnColumns):
        return divided.top_log_probs_of_devices(logits, k, base=base, implementation=implementation)
    if isinstance(logits, Corrected):
        (batch, depths, size), nodes = logits.logits.shape, logits.corrections.shape[1]
        places = np.repeat(np.arange(batch, dtype=np.int32) * depths + logits.depth, nodes)
        shared = logits.logits.reshape(-1, size), jnp.asarray(places)
        rows = logits.corrections.reshape(-1, size)
        return top_log_probs(rows, k, base=base, shared=shared, implementation=implementation)
    rows = reduce_partials(logits, jnp.float32).reshape(-1, logits.shape[-1])
    return top_log_probs(rows, k, base=base, implementation=implementation)


def log_prob(
    logits: Float[Array, "batch fed vocab"], ids: Int[Array, "batch fed count"]
) -> Float[Array, "batch fed count"]:
    """Return the natural log-probabilities (at most 0) of the given tokens at temperature 1."""
    picked = jnp.take_along_axis(logits, ids, axis=-1)
    return jnp.minimum(picked - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
