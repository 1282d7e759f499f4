"""How arrays are computed: by which kernels, and whether a row's bits may depend on other rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Numerics:
    """How products, norms and attention are computed.

    Attributes:
        implementation: kernel implementation, by its name in `pallas_kernels.dispatch`.
        deterministic: whether the bits of a row depend neither on the number of rows nor on the other rows.
    """

    implementation: str = "auto"
    deterministic: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Both values, as arguments of kernels that take them."""
        return {"implementation": self.implementation, "deterministic": self.deterministic}

    @property
    def relaxed(self) -> Numerics:
        """The same kernels without the promise of bits, which drafts do not need."""
        return Numerics(self.implementation)


class WithNumerics:
    """A record with a field ``numerics``, whose values it has as attributes too."""

    numerics: Numerics

    @property
    def implementation(self) -> str:
        """The kernel implementation."""
        return self.numerics.implementation

    @property
    def deterministic(self) -> bool:
        """Whether a row's bits depend on no other row."""
        return self.numerics.deterministic


AUTO = Numerics()
REFERENCE = Numerics("reference")  # also for training, because kernels have no gradients
