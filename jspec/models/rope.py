"""The tables of rotary position embeddings (RoFormer, arXiv:2104.09864, section 3.4.2): cosines and sines."""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.models.layer_config import Rope
from pallas_kernels.layers.row_by_row import row_by_row_off_gpu


def tables(
    rope: Rope,
    head_dim: int,
    positions: Int[Array, "batch tokens"],
    *,
    deterministic: bool = False,
    implementation: str = "auto",
) -> Float[Array, "tables batch tokens half"]:
    """Return cosines and sines for each pair of channels (i, i + head_dim / 2), in float32.

    Args:
        rope: the rotary embedding.
        head_dim: number of channels of a head.
        positions: position of each token.
        deterministic: make the bits of a token's tables independent of the number of tokens.
        implementation: kernel implementation (`pallas_kernels.dispatch`).

    Returns:
        Two tables, cosines and sines. With a temperature four: those of keys, then those of queries.
    """
    compute = partial(_tables, rope, head_dim)
    if not deterministic:
        return compute(positions)
    found = row_by_row_off_gpu(
        lambda own: compute(own).swapaxes(0, 1), positions.ravel(), implementation=implementation
    )
    return found.swapaxes(0, 1).reshape(-1, *positions.shape, head_dim // 2)


def _tables(rope: Rope, head_dim: int, positions: Int[Array, "*rows"]) -> Float[Array, "tables *rows half"]:
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(rope, head_dim))
    factor = np.ones(head_dim // 2, np.float32)
    factor[: rope.rotated(head_dim) // 2] = rope.attention_factor
    found = jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    if rope.attention_factor != 1.0:
        found = found * factor
    if not rope.temperature:
        return found
    contexts = (positions + rope.temperature_offset) // rope.original_max_position
    scales = 1 + rope.temperature * jnp.log1p(contexts.astype(jnp.float32))
    return jnp.concatenate([found, found * scales[..., None]])


def inverse_frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, "half"]:
    """Return the rotary frequency of each pair of channels in radians per position, float32 [head_dim / 2].

    Pairs that are not rotated have frequency 0; they are the last ones.
    """
    rotated = rope.rotated(head_dim)
    speeds = 1.0 / rope.theta ** (np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    match rope.kind:
        case "none":
            speeds = np.zeros_like(speeds)
        case "linear":
            speeds = speeds / rope.factor
        case "proportional":
            speeds = speeds[: int(rope.fraction * head_dim / 2)] / rope.factor
        case "llama3":
            speeds = _llama3(rope, speeds)
        case "yarn":
            speeds = _yarn(rope, speeds)
        case "longrope":
            speeds = speeds / np.asarray(rope.long_factors if rope.is_long else rope.short_factors)
    return np.pad(speeds, (0, head_dim // 2 - len(speeds))).astype(np.float32)


def _llama3(rope: Rope, speeds: np.ndarray) -> np.ndarray:
    """Change each frequency by its wavelength in positions, as Llama 3.1 does.

    - wavelengths above ``original_max_position / low_freq_factor``: the frequency is divided by ``factor``;
    - wavelengths below ``original_max_position / high_freq_factor``: the frequency is kept;
    - wavelengths between these two limits: the frequency is interpolated. Llama 4 Scout's two limits are equal.
    """
    periods = rope.original_max_position * speeds / (2 * math.pi)  # rotations per original context
    between = max(rope.high_freq_factor - rope.low_freq_factor, 1e-12)
    kept = np.clip((periods - rope.low_freq_factor) / between, 0.0, 1.0)
    return kept * speeds + (1 - kept) * speeds / rope.factor


def _yarn(rope: Rope, speeds: np.ndarray) -> np.ndarray:
    """Divide low frequencies by ``factor`` and interpolate middle ones over their channel (arXiv:2309.00071, 3.2)."""
    pairs = len(speeds)

    def pair_of(rotations: float) -> float:
        """Return the index of the pair that makes this number of rotations in the original context."""
        return pairs * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / math.log(rope.theta)

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = np.clip((np.arange(pairs) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return speeds / rope.factor * ramp + speeds * (1 - ramp)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor of cosines and sines, 0.1 * scale * ln(factor) + 1 (arXiv:2309.00071, equation 22)."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
