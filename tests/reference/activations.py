"""The activation functions of a gated feed-forward, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy import special

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x * special.expit(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * special.erfc(-x / np.sqrt(2)),
}
