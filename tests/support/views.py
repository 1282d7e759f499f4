"""Views of a bucket and drafts made by hand, for tests of one stage."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.numerics import REFERENCE
from jspec.core.records import Draft, PromptBatch, SlotView
from jspec.core.sampling import Sampling
from jspec.draft.base import Drafter
from jspec.models.decoder import Model
from jspec.models.parts.kv_pool import PoolShape
from jspec.verify import resolve
from tests.support.arrays import on_device


def view_of_rows(
    roots: list[int], *, temperature: float = 0.0, accept: str = "coupled", length: int = 5, page_size: int = 64
) -> SlotView:
    """Return a view of active rows of equal length, with one page and one seed per row."""
    rows = len(roots)
    controls = Sampling.greedy(rows).replace(
        temperature=on_device(np.full(rows, temperature, jnp.float32)),
        seed=on_device(np.stack([np.zeros(rows), np.arange(rows)], axis=1), jnp.uint32),
    )
    return SlotView(
        slots=on_device(np.arange(rows, dtype=jnp.int32)),
        root=on_device(roots, jnp.int32),
        lengths=on_device(np.full(rows, length, jnp.int32)),
        active=on_device(np.ones(rows, bool)),
        remaining=on_device(np.full(rows, 1000, jnp.int32)),
        page_table=on_device(np.arange(1, rows + 1)[:, None]),
        sampling=controls,
        accept=resolve(accept),
        all_greedy=False,
        numerics=REFERENCE,
    )


def prefilled(
    drafter: Drafter, model: Model, features: np.ndarray, *, root: int = 0, tokens: np.ndarray | None = None
) -> tuple[Any, Any, SlotView]:
    """Prefill one row of a drafter.

    Args:
        drafter: the drafter.
        model: the target that it is bound to.
        features: the target's hidden states of the row's tokens [tokens, features].
        root: token after the row.
        tokens: tokens of the row; None: all 0.

    Returns:
        The drafter's weights, its state and a view of the row.
    """
    size = len(features)
    params, view = drafter.bind(model), view_of_rows([root], length=size)
    state = drafter.init(params, PoolShape(1, 2, 64, 48, "float32", "float32"))
    batch = PromptBatch.whole(
        on_device([size]),
        tokens=on_device([np.zeros(size) if tokens is None else tokens], jnp.int32),
        positions=on_device([np.arange(size)]),
        valid=on_device(np.ones((1, size), bool)),
        first_row=on_device(np.zeros(1, jnp.int32)),
        page_table=view.page_table,
        bits=None,
        numerics=REFERENCE,
    )
    state = jax.jit(drafter.prefill)(params, state, view, batch, on_device([features], jnp.float32))
    return params, state, view


def draft_of_rows(tokens: np.ndarray, parents: np.ndarray) -> Draft:
    """Return a draft of given tokens and parents [rows, nodes] without probabilities; all nodes are valid."""
    return Draft(
        tokens=on_device(tokens, jnp.int32),
        parents=on_device(parents, jnp.int32),
        scores=on_device(np.zeros(tokens.shape)),
        valid=on_device(np.ones(tokens.shape, bool)),
        probs=None,
        vocab_map=None,
    )
