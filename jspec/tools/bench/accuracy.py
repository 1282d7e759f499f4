"""What rounding a model's weights costs: its next-token laws beside those of the model as it is, on a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.models.decoder import Model
from jspec.models.quantize import quantize_weights, quantized_as
from jspec.step.memory import tree_bytes
from jspec.tools.replay import run_texts
from jspec.tools.table import table


@dataclass(frozen=True)
class Accuracy:
    """One kind of quantisation.

    Attributes:
        bytes: of all weights.
        divergence: mean over places of the Kullback-Leibler divergence from the model's own law, in nats.
        worst: the largest of them.
        agreement: share of places where the likeliest token is the same.
        places: that were looked at.
    """

    kind: str
    bytes: int
    divergence: float
    worst: float
    agreement: float
    places: int


def measure(target: Model, texts: Int[np.ndarray, "rows size"], kinds: Iterable[str]) -> list[Accuracy]:
    """Runs the model over texts as it is and quantised.

    Args:
        texts: token ids; every one is a place.
        kinds: of `jspec.models.quantize`.
    """
    if stored := quantized_as(target):
        raise ValueError(f"accuracy: expected a target as it was trained, got {stored} weights; give the original")
    results = [compare(str(target.embed.dtype), target, target, texts)]
    return results + [compare(kind, target, quantize_weights(target, kind), texts) for kind in kinds]


def compare(kind: str, target: Model, other: Model, texts: Int[np.ndarray, "rows size"]) -> Accuracy:
    """One model's laws beside another's."""
    divergence, agree = [], []
    for row in texts:
        tokens = jnp.asarray(row[None], jnp.int32)
        p, q = (np.asarray(_laws(model, tokens), np.float64) for model in (target, other))
        divergence.append((np.exp(p) * (p - q)).sum(-1).ravel())
        agree.append((p.argmax(-1) == q.argmax(-1)).ravel())
    gaps, same = np.concatenate(divergence), np.concatenate(agree)
    return Accuracy(kind, tree_bytes(other), float(gaps.mean()), float(gaps.max()), float(same.mean()), same.size)


@jax.jit
def _laws(model: Model, tokens: Int[Array, "rows size"]) -> Float[Array, "rows size vocab"]:
    """Log-probabilities of the next token at every place."""
    logits = run_texts(model, tokens).logits
    assert logits is not None
    return jax.nn.log_softmax(logits, axis=-1)


def text(results: Sequence[Accuracy]) -> str:
    """One line a kind."""
    heading = ["weights", "MB", "mean KL, nats", "largest", "same top token", "places"]
    return table([heading, *(_cells(result) for result in results)])


def _cells(result: Accuracy) -> list[str]:
    return [
        result.kind,
        f"{result.bytes / 1e6:.2f}",
        f"{result.divergence:.5f}",
        f"{result.worst:.4f}",
        f"{result.agreement:.1%}",
        str(result.places),
    ]
