"""Rotary position embeddings (RoFormer, arXiv:2104.09864, section 3.4.2): their config, cosines and sines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from convert.fields import CheckpointError, short
from jspec.core.numerics import AUTO, Numerics
from jspec.models.parts.checks import positive, unsupported
from pallas_kernels.layers.row_by_row import row_by_row_off_gpu

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "none")


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding (arXiv:2104.09864); `tables` computes its cosines and sines.

    Attributes:
        theta: rotary base.
        kind: "default"; "linear" and "dynamic" (position interpolation, arXiv:2306.15595, and its form that depends on
            the length); "llama3", the scaling of Llama 3.1; "yarn" (arXiv:2309.00071); "longrope" (arXiv:2402.13753);
            "proportional": channels i and i + half of the whole head are rotated together, with the frequencies of a
            head that is rotated as a whole, of which only the first ones are used (Gemma 4); "none": no rotation.
        fraction: part of a head's channels that is rotated; the others keep their values at every position.
        factor: divisor of low frequencies ("llama3", "yarn") or of all frequencies ("linear", "dynamic",
            "proportional").
        original_max_position: context length before the scaling, in tokens ("dynamic": the longest without it).
        low_freq_factor, high_freq_factor: "llama3": limits of the interpolated frequencies, in rotations per
            ``original_max_position``.
        beta_fast, beta_slow: "yarn": limits of the interpolated frequencies, in the same unit.
        truncate: "yarn": round these limits to whole channels.
        attention_factor: factor of cosines and sines.
        short_factors, long_factors: "longrope": divisor of each frequency, for texts of up to
            ``original_max_position`` tokens and for longer texts [rotated channels / 2].
        is_long: "longrope": use ``long_factors``.
        temperature: factor b of 1 + b * ln(1 + position // original_max_position), which multiplies rotated queries
            (Ministral 3, arXiv:2501.19399); 0: none.
        temperature_offset: number that is added to the position in this factor (Llama 4: 1).
    """

    theta: float = 10000.0
    kind: str = "default"
    fraction: float = 1.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    temperature: float = 0.0
    temperature_offset: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise unsupported("rope type", self.kind, " or ".join(map(repr, ROPE_KINDS)))
        positive("rope", self, ("theta", "factor", "fraction", "attention_factor"))
        if self.theta <= 1:  # its powers would not fall, and its logarithm divides
            raise CheckpointError("rope_theta", f"expected a number above 1, got {self.theta}; correct config.json")
        if self.fraction > 1:
            raise CheckpointError("partial_rotary_factor", f"expected at most 1, got {self.fraction}")
        if self.kind not in ("default", "linear", "proportional", "none") or self.temperature:
            positive("rope", self, ("original_max_position",))
        if self.kind == "llama3":
            positive("rope", self, ("low_freq_factor",))
            if self.high_freq_factor < self.low_freq_factor:
                raise CheckpointError(
                    "rope", f"expected high_freq_factor >= low_freq_factor, got {self.high_freq_factor} and "
                    f"{self.low_freq_factor}; correct config.json",
                )  # fmt: skip
        if self.kind == "yarn":
            positive("rope", self, ("beta_fast", "beta_slow"))

    def rotated(self, head_dim: int) -> int:
        """Return the number of a head's channels that are rotated, or that could be ("proportional")."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.fraction)

    def for_length(self, max_len: int) -> Rope:
        """Return the embedding for texts of up to ``max_len`` tokens; `DecoderConfig.for_length` documents errors."""
        if self.kind == "dynamic" and max_len > self.original_max_position:
            raise unsupported(
                "max_len", max_len, f"at most {self.original_max_position} with rotary embeddings of type 'dynamic'"
            )
        return replace(self, is_long=self.kind == "longrope" and max_len > self.original_max_position)

    def describe(self) -> str:
        """Return the kind of the embedding and the values that differ from a plain one's."""
        temperature = [f"query temperature {self.temperature:g}"] if self.temperature else []
        if self.kind == "none":
            return ", ".join(["none", *temperature])
        parts = [self.kind, f"theta {self.theta:.10g}"]
        if self.factor != 1:
            parts.append(f"factor {self.factor:g}")
        if self.original_max_position:
            parts.append(f"from {self.original_max_position} tokens")
        if self.fraction != 1:
            parts.append(f"{self.fraction:g} of the channels")
        return ", ".join([*parts, *temperature])

    def check(self, head_dim: int) -> None:
        """Check the values that depend on the head's number of channels.

        Raises:
            ValueError: the number of rotated channels is odd, or "longrope" has another number of factors.
        """
        rotated = self.rotated(head_dim)
        if rotated % 2 or not rotated:
            raise CheckpointError(
                "partial_rotary_factor",
                f"expected to rotate an even number of channels, got {rotated} of {head_dim}; correct config.json",
            )
        for name, factors in (("short_factor", self.short_factors), ("long_factor", self.long_factors)):
            if self.kind == "longrope" and (len(factors) != rotated // 2 or not min(factors) > 0):
                raise CheckpointError(
                    name, f"expected {rotated // 2} numbers above 0, got {short(list(factors))}; correct config.json"
                )


PLAIN = Rope()  # without a scaling
NO_ROPE = Rope(kind="none")


def tables(
    rope: Rope,
    head_dim: int,
    positions: Int[Array, "batch tokens"],
    numerics: Numerics = AUTO,
) -> Float[Array, "tables batch tokens half"]:
    """Return cosines and sines for each pair of channels (i, i + head_dim / 2), in float32.

    Args:
        rope: the rotary embedding.
        head_dim: number of channels of a head.
        positions: position of each token.
        numerics: deterministic: the bits of a token's tables do not depend on the number of tokens.

    Returns:
        Two tables, cosines and sines. With a temperature four: those of keys, then those of queries.
    """
    compute = partial(_tables, rope, head_dim)
    if not numerics.deterministic:
        return compute(positions)
    by_row = row_by_row_off_gpu(
        lambda rows: compute(rows).swapaxes(0, 1), positions.ravel(), implementation=numerics.implementation
    )
    return by_row.swapaxes(0, 1).reshape(-1, *positions.shape, head_dim // 2)


def _tables(rope: Rope, head_dim: int, positions: Int[Array, "*rows"]) -> Float[Array, "tables *rows half"]:
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(inverse_frequencies(rope, head_dim))
    factor = np.ones(head_dim // 2, np.float32)
    factor[: rope.rotated(head_dim) // 2] = rope.attention_factor
    cos_sin = jnp.stack([jnp.cos(angles), jnp.sin(angles)])
    if rope.attention_factor != 1.0:
        cos_sin = cos_sin * factor
    if not rope.temperature:
        return cos_sin
    return jnp.concatenate([cos_sin, cos_sin * _query_factors(rope, positions)[..., None]])


def query_factors(
    rope: Rope, positions: Int[Array, "batch tokens"], numerics: Numerics = AUTO
) -> Float[Array, "batch tokens"]:
    """Return the factor of each token's queries, in float32; the arguments are those of `tables`."""
    compute = partial(_query_factors, rope)
    if not numerics.deterministic:
        return compute(positions)
    factors = row_by_row_off_gpu(compute, positions.ravel(), implementation=numerics.implementation)
    return factors.reshape(positions.shape)


def _query_factors(rope: Rope, positions: Int[Array, "*rows"]) -> Float[Array, "*rows"]:
    contexts = (positions + rope.temperature_offset) // rope.original_max_position
    return 1 + rope.temperature * jnp.log1p(contexts.astype(jnp.float32))


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
