"""The loss of Medusa heads (arXiv:2401.10774, section 2.2): cross entropy of each head with the text's own token.

    sum_h decay^h * sum_i m_ih * ( - log p_ih(x_{i+2+h}) ) / (rows * size)

over the heads h = 0, 1, ... and the places i of the target's final states, where m_ih is 1 if token i + 2 + h belongs
to the document and counts, else 0.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.draft.medusa import MedusaHead, MedusaHeads, head_state
from jspec.train.losses import in_blocks
from jspec.train.measured import Measured
from jspec.train.observe import Observed
from jspec.train.products import einsum32
from jspec.train.rows import Rows, ahead, cast


def loss(heads: MedusaHeads, seen: Observed, rows: Rows, decay: float) -> tuple[Float[Array, ""], Measured]:
    """Return the loss of a batch times rows * size, and what was measured.

    Args:
        heads, seen, rows: arguments of `predict`.
        decay: factor of the loss of each further head.
    """
    losses, hits, places = predict(heads, seen, rows)
    total = jnp.sum(decay ** jnp.arange(len(losses)) * jnp.sum(losses, axis=(1, 2)))
    return total, Measured.of(losses, hits, places)


def predict(
    heads: MedusaHeads, seen: Observed, rows: Rows
) -> tuple[Float[Array, "heads rows size"], Bool[Array, "heads rows size"], Bool[Array, "heads rows size"]]:
    """Return the loss of each head at each place, whether its argmax is the target's, and whether the token counts.

    Args:
        heads: the heads, in float32; products are of the dtype of the target's states.
        seen: the target's outputs.
        rows: packed rows.
    """
    states = seen.normed.reshape(-1, seen.normed.shape[-1])
    lost, hits, placed = [], [], []
    for index, head in enumerate(heads.heads):
        by = index + 2
        places = rows.reaches(by) & ahead(rows.counted, by)
        asked = states, ahead(rows.tokens, by).reshape(-1), ahead(seen.choices, by - 1).reshape(-1)
        losses, right = in_blocks(partial(_of_block, head), len(head.output), *asked)
        lost.append(losses.reshape(places.shape) * places)
        hits.append(right.reshape(places.shape))
        placed.append(places)
    return jnp.stack(lost), jnp.stack(hits), jnp.stack(placed)


def _of_block(
    head: MedusaHead, states: Float[Array, "tokens hidden"], labels: Array, choices: Array
) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"]]:
    """Return the cross entropy of each token of a block of tokens, and whether the argmax is the target's."""
    logits = einsum32("th,vh->tv", head_state(cast(head, states.dtype), states), head.output)
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1) - of_label, jnp.argmax(logits, axis=-1) == choices
