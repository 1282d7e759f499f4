"""The loss of EAGLE-3 heads, with the training-time test (arXiv:2503.01840).

Column i of a row is the pair (feature of position i, token i + 1). At step j it predicts token i + 2 + j, from the
feature that the head itself put out at step j - 1, and from the text's own token i + 1 + j. So the head learns on what
it will be fed. With the target's probabilities q behind token i + 1 + j, restricted to the draft vocabulary, and the
head's p, the loss is

    sum_j decay^j * sum_i m_ij * loss(p_ij, q_ij) / (rows * size)

where m_ij is 1 if token i + 1 + j belongs to the document and counts, and the token that the target holds most probable
after it is in the draft vocabulary; else 0. The target, its embedding and the vocabulary map have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.core.numerics import REFERENCE
from jspec.draft.eagle_head import EagleHead, finish_layers, fuse, project_inputs, run_layers
from jspec.models.decoder import Model
from jspec.models.parts.layers import limited
from jspec.train.attention import ATTENDED, Keys, attend, split_heads
from jspec.train.losses import LOSSES, in_blocks, is_drafted, teacher_of
from jspec.train.measured import Measured
from jspec.train.observe import Observed
from jspec.train.products import einsum32
from jspec.train.rows import Rows, ahead, behind, cast
from pallas_kernels.layers.partial_sums import PartialSums, reduce_partials

KEPT = jax.checkpoint_policies.save_only_these_names(ATTENDED)


@dataclass(frozen=True)
class Eagle3Loss:
    """The options of the loss.

    Attributes:
        steps: number of steps; a head drafts chains of this length as it was trained.
        decay: factor of the loss of each further step.
        kind: one of `LOSSES`.
        keeps: whether what all steps compute is kept for the gradient; if not, the gradient computes a step again.
    """

    steps: int = 7
    decay: float = 0.8
    kind: str = "soft"
    keeps: bool = False


def loss(
    head: EagleHead, target: Model, seen: Observed, rows: Rows, options: Eagle3Loss
) -> tuple[Float[Array, ""], Measured]:
    """Return the loss of a batch times its number of places, rows * size, and what was measured.

    Args:
        head: the head, with its embedding; it is cast to the dtype of the target's states where it is used.
        target: the target.
        seen: the target's outputs.
        rows: packed rows.
        options: options of the loss.
    """
    loss, hits, places = unroll(head, target, seen, rows, options)
    weights = options.decay ** jnp.arange(options.steps)
    return jnp.sum(weights * jnp.sum(loss, axis=(1, 2))), Measured.of(loss, hits, places)


def unroll(
    head: EagleHead, target: Model, seen: Observed, rows: Rows, options: Eagle3Loss
) -> tuple[Float[Array, "steps rows size"], Bool[Array, "steps rows size"], Bool[Array, "steps rows size"]]:
    """Run all steps.

    Args:
        head, target, seen, rows, options: arguments of `loss`.

    Returns:
        The loss of each step and column, with its mask; whether the head's argmax is the target's; and whether the
        token behind which the target's probabilities are taken belongs to the document and counts.
    """
    ids, vocab = head.draft_to_target, target.config.vocab_size
    ids = None if len(head.head) == vocab else ids  # type: ignore[arg-type]
    teacher = teacher_of(target, seen.normed, ids)
    drafted = is_drafted(seen.choices, ids, vocab)
    features = fuse(cast(head, seen.features.dtype), seen.features)
    before: list[list[Keys]] = []  # keys and values of each layer, by step
    outputs = []
    for step in range(options.steps):
        by = step + 1
        places = rows.reaches(by) & ahead(rows.counted, by)
        weights = behind((places & ahead(drafted, by)).astype(jnp.float32), by)
        run: Callable[..., Any] = partial(_run_step, step=step, kind=options.kind)
        run = run if options.keeps else jax.checkpoint(run, policy=KEPT)
        features, keys, *results = run(head, features, before, rows, (teacher, seen.choices, weights))
        before.append(keys)
        outputs.append((*(ahead(of, by) for of in results), places))
    lost, hits, placed = zip(*outputs, strict=True)
    return jnp.stack(lost), jnp.stack(hits), jnp.stack(placed)


def _run_step(
    head: EagleHead,
    features: Float[Array, "rows size hidden"],
    before: list[list[Keys]],
    rows: Rows,
    teacher: tuple[Array, Array, Array],
    *,
    step: int,
    kind: str,
) -> tuple[Array, list[Keys], Array, Array]:
    """Run one step.

    Args:
        head: the head.
        features: feature of each column.
        before: keys and values of the earlier steps, and of each layer of a step.
        rows: packed rows.
        teacher: at each place, the target's probabilities and argmax behind its token, and the weight of the loss of
            the column that predicts them.
        step: number of the step, from 0.
        kind: one of `LOSSES`.

    Returns:
        The features of the next step; the keys and values of each layer; at the place of each teacher, the loss, and
        whether the head's argmax is the target's.
    """
    cast_head, keys, by = cast(head, features.dtype), list[Keys](), step + 1
    positions = rows.positions + step

    def attend_rows(index: int, qkv: PartialSums) -> Array:
        layer, config = cast_head.layers[index], cast_head.config.layers[index]
        q, new = split_heads(layer, config, qkv, positions, head.config.norm_eps, features.dtype)
        keys.append(new)
        return attend(config, q, [*(earlier[index] for earlier in before), new], rows)

    residual, qkv = project_inputs(cast_head, ahead(rows.tokens, by), features, REFERENCE)
    attended, residual = run_layers(cast_head, residual, qkv, attend_rows, REFERENCE)
    assert cast_head.norm is not None
    features, normed = finish_layers(cast_head, attended, residual, [(cast_head.norm, None)], REFERENCE)
    # States move to the places of their teachers, because probabilities are wider.
    flat = [of.reshape(-1, *of.shape[2:]) for of in (behind(normed[0], by), *teacher)]
    lost, hits = in_blocks(partial(_of_block, head, kind), teacher[0].shape[-1], *flat)
    return features, keys, lost.reshape(rows.tokens.shape), hits.reshape(rows.tokens.shape)


def _of_block(
    head: EagleHead, kind: str, normed: Array, teacher: Array, choices: Array, weights: Array
) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"]]:
    """Return the loss of each token of a block, and whether its argmax is the target's."""
    product = einsum32("th,vh->tv", normed, head.head)
    logits = reduce_partials(limited(product[None], *head.logit_limits), jnp.float32)
    chosen = jnp.argmax(logits, axis=-1)
    chosen = chosen if head.draft_to_target is None else head.draft_to_target[chosen]
    return weights * LOSSES[kind](logits, teacher.astype(jnp.float32)), chosen == choices
