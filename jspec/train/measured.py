"""What is measured of a batch, by draft position, and the figures that follow."""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import struct
from jaxtyping import Array, Float


@struct.dataclass
class Measured:
    """Sums over the columns of a batch, by draft position; they can be added up over batches and devices.

    Attributes:
        loss: sum of the losses.
        places: number of columns that predict a token that counts.
        hits: number of these where the head's argmax is the target's.
        chained: number of columns of which all draft positions predict tokens that count.
        accepted: number of these where the head's argmax is the target's at this and at all earlier positions.
    """

    loss: Float[Array, "depth"]
    places: Float[Array, "depth"]
    hits: Float[Array, "depth"]
    chained: Float[Array, "depth"]
    accepted: Float[Array, "depth"]

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
        acceptance: predicted mean acceptance length of greedy chains of all draft positions, if every place is as
            often a root as any other.
    """

    loss: float
    hits: tuple[float, ...]
    acceptance: float

    def to_json(self) -> dict[str, Any]:
        return {"loss": self.loss, "hits": list(self.hits), "acceptance": self.acceptance}

    def __str__(self) -> str:
        hits = " ".join(f"{share:.2f}" for share in self.hits)
        return f"loss {self.loss:.3f}, acceptance {self.acceptance:.2f} (hits {hits})"
