"""What is measured of a batch, by draft position, and the figures that follow."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float


@struct.dataclass
class Measured:
    """Sums over the columns of a batch, by draft position; they can be added up over batches and devices.

    Attributes:
        loss: sum of the losses.
        places: number of columns that predict a token that counts.
        hits: number of these where the head's argmax is the target's.
        chained: number of columns that predict tokens that count at this and at all earlier positions.
        accepted: number of these where the head's argmax is the target's at all of these positions.
    """

    loss: Float[Array, "depth"]
    places: Float[Array, "depth"]
    hits: Float[Array, "depth"]
    chained: Float[Array, "depth"]
    accepted: Float[Array, "depth"]

    @classmethod
    def of(
        cls,
        losses: Float[Array, "depth *columns"],
        hits: Bool[Array, "depth *columns"],
        places: Bool[Array, "depth *columns"],
    ) -> Measured:
        """Measure a batch.

        Args:
            losses: loss of each prediction; 0 where none is made.
            hits: whether the head's argmax is the target's.
            places: whether the predicted token counts.
        """
        axes, whole = tuple(range(1, losses.ndim)), jnp.cumprod(places, axis=0)
        total = partial(jnp.sum, axis=axes, dtype=jnp.float32)
        accepted = total(jnp.cumprod(hits, axis=0) * whole)
        return jax.lax.stop_gradient(cls(total(losses), total(places), total(hits & places), total(whole), accepted))

    def figures(self) -> Figures:
        """Return the figures that follow, on the host."""
        of = {name: np.asarray(value, np.float64) for name, value in vars(self).items()}
        places, chained = np.maximum(of["places"], 1), np.maximum(of["chained"], 1)
        return Figures(
            loss=float(of["loss"].sum() / places.sum()),
            hits=tuple((of["hits"] / places).tolist()),
            acceptance=float(1 + (of["accepted"] / chained).sum()),
        )


@struct.dataclass
class Figures:
    """The figures of one or several batches.

    Attributes:
        loss: mean loss of a prediction.
        hits: share of predictions that are the target's argmax, by draft position.
        acceptance: predicted mean acceptance length of greedy chains, if every place is as often a root as any other,
            and what is before each prediction is the text's own (teacher forcing). Each draft position adds the share
            of the chains up to it that are accepted whole; 0 where a text is never long enough.
    """

    loss: float
    hits: tuple[float, ...]
    acceptance: float

    @property
    def rank(self) -> tuple[float, float]:
        """A larger value is a better head: of equal acceptance, that of the lower loss."""
        return self.acceptance, -self.loss

    def to_json(self) -> dict[str, Any]:
        return {"loss": self.loss, "hits": list(self.hits), "acceptance": self.acceptance}

    def __str__(self) -> str:
        hits = " ".join(f"{share:.2f}" for share in self.hits)
        return f"loss {self.loss:.3f}, predicted acceptance {self.acceptance:.2f} (teacher-forced hits {hits})"
