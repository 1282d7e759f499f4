"""Which rows of the cache a query sees, and how it scores them."""

import dataclasses
import math

import jax
from jaxtyping import Array

LEAST_SCALE = 1e-30  # smallest scale; its product with log2(e) is still a normal float32


@dataclasses.dataclass(frozen=True)
class Scores:
    """Which rows of the cache a query sees, and how it scores them; the fields are arguments of `paged_attention`."""

    scale: float = 1.0
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    start: int = 0

    @property
    def most_rows(self) -> list[int]:
        """The limits of the rows that a query sees."""
        return [limit for limit in (self.window, self.chunk) if limit is not None]

    def check(self, heads: int, sinks: Array | jax.ShapeDtypeStruct | None) -> None:
        """Raises ValueError unless the options, and the scores of the sinks of `heads` query heads, are valid."""
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"sinks must be None or [{heads}], one per query head, got {sinks.shape}")
        for name, size in (("window", self.window), ("chunk", self.chunk)):
            if size is not None and size < 1:
                raise ValueError(f"{name} must be None or at least 1, got {size}")
        if not LEAST_SCALE < self.scale < math.inf:
            raise ValueError(f"scale must be None or above {LEAST_SCALE} and finite, got {self.scale}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be None or above 0 and finite, got {self.softcap}")
