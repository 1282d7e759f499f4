"""What the tests of training share: packed rows of given documents, and a small pair."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.draft.eagle_head import EagleHead
from jspec.models.decoder import Model
from jspec.tools.replay import run_texts
from jspec.train.config import TrainConfig
from jspec.train.methods import Eagle3Method
from jspec.train.pack import first_fit
from jspec.train.rows import Rows
from tests.support import tiny
from tests.support.arrays import on_device

STATES = (0, 2, 3)
LONGEST = 48  # tokens of a document


@cache
def target() -> Model:
    return tiny.model(40, layers=2, hidden=16, sharpness=2.0)


def head(drafted: int = 16, seed: int = 3, **options: Any) -> EagleHead:
    """Return a head of the small target with larger random weights than a new one's, norms too."""
    ids = np.sort(np.random.default_rng(seed).choice(40, drafted, replace=False)).astype(np.int32)
    made = Eagle3Method(TrainConfig(feature_layers=STATES, **options)).create(target(), ids)
    rng = np.random.default_rng(seed)

    def draw(x: Any) -> Any:
        scale = rng.uniform(0.5, 1.5, x.shape) if x.ndim == 1 or x.shape == (3, 16) else rng.normal(0, 0.4, x.shape)
        return on_device(scale, jnp.float32)

    layer = made.layers[0]
    names = [name for name, value in vars(layer).items() if value is not None]
    layers = [layer.replace(**{name: draw(getattr(layer, name)) for name in names})]
    fc_norm = None if made.fc_norm is None else draw(made.fc_norm)
    return made.replace(layers=layers, fc=draw(made.fc), norm=draw(made.norm), head=draw(made.head), fc_norm=fc_norm)


def documents(sizes: Sequence[int], vocab: int = 40, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return random documents, each with a mask of the tokens that count: about two of three."""
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, vocab, size), rng.random(size) < 0.67) for size in sizes]


def outputs(tokens: np.ndarray, states: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the target's states [n, channels of all] and logits [n, vocab] of a document, in float64.

    Tokens after the document, which none of it sees, make all documents equally long.
    """
    padded = np.pad(tokens, (0, LONGEST - len(tokens)))[None]
    out = run_texts(target(), on_device(padded, jnp.int32), tuple(states))
    features, logits = (np.asarray(x, np.float64)[0, : len(tokens)] for x in (out.features, out.logits))
    return features, logits


def packed(found: Sequence[tuple[np.ndarray, np.ndarray]], length: int) -> Rows:
    """Return documents as packed rows."""
    rows, places = first_fit([len(tokens) for tokens, _ in found], length)
    fields = {name: np.zeros((max(rows) + 1, length), np.int32) for name in ("tokens", "segments", "counted")}
    for row, place, (tokens, counted) in zip(rows, places, found, strict=True):
        own = (row, slice(place, place + len(tokens)))
        fields["segments"][own] = fields["segments"][row].max() + 1
        fields["tokens"][own], fields["counted"][own] = tokens, counted
    return Rows(*(on_device(fields[name]) for name in ("tokens", "segments")), on_device(fields["counted"], bool))
