"""The feed-forward of a mixture's experts: a product with gate and up, and the product of its result with down."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HOPPER, Implementation, Kernel, dispatch
from pallas_kernels.layers.experts.expert_kernel import multiply, named
from pallas_kernels.layers.experts.expert_matmul import Gate, expert_matmul
from pallas_kernels.layers.experts.expert_rows import gather_blocks
from pallas_kernels.layers.experts.expert_tiling import packed_tiles
from pallas_kernels.layers.packed.int4_tiling import Int4Tiles
from pallas_kernels.layers.weights import Quantized

PARTS = (1, 2)  # parts of k of the product with down, added up together with the outputs of a row's experts


class ExpertMlp(NamedTuple):
    """The weights of all experts; without gates ``gate_up`` has up alone [experts, width, hidden]."""

    gate_up: Float[Array, "experts twice_width hidden"] | Quantized
    down: Float[Array, "experts hidden width"] | Quantized
    gate_up_bias: Float[Array, "experts twice_width"] | None = None
    down_bias: Float[Array, "experts hidden"] | None = None


def _products(x, weights, factors, chosen, *, gate, shared=0, **options):
    # Without gates the rows of shared experts lie one expert after another in the first product too.
    of_gates = shared if gate.exists else 0
    inner = expert_matmul(x, weights.gate_up, chosen, gate=gate, bias=weights.gate_up_bias, shared=of_gates, **options)
    return expert_matmul(inner, weights.down, chosen, bias=weights.down_bias, factors=factors, shared=shared, **options)


def multiply_packed(
    x: Array,
    weights: ExpertMlp,
    factors: Array | None,
    chosen: Array,
    *,
    gate: Gate,
    tiles: tuple[Int4Tiles, Int4Tiles],
    interpret: Any,
) -> Array:
    """Runs the Hopper kernel of narrow experts for gate and up, then for down, on the same blocks of gathered rows.

    Args:
        x, weights, factors, chosen, gate: as in `expert_mlp`.
        tiles: static sizes of both calls, with blocks of the same number of rows.
        interpret: as in `expert_kernel.multiply`.

    Returns:
        Partial sums of the second product, [parts, chosen, rows, hidden].
    """
    (gate_up, down, gate_up_bias, down_bias), (first, second) = weights, tiles
    assert first.height == second.height and isinstance(gate_up, Quantized) and isinstance(down, Quantized)
    fixed: dict[str, Any] = {"size": first.height, "kind": gate_up.kind, "interpret": bool(interpret)}
    rows, blocks, counts = gather_blocks(x.reshape(-1, x.shape[-1]), chosen.ravel(), down.shape[0], **fixed)
    run = functools.partial(multiply, blocks=(blocks, counts), choices=chosen.size, dtype=x.dtype, interpret=interpret)
    # With ``order`` the first run returns what the second takes as x: rows by block, columns as down's kind needs them.
    inner = run(rows, gate_up, optional=named(bias=gate_up_bias), gate=gate, tiles=first, order=down.kind)
    sums = run(inner, down, optional=named(bias=down_bias, factors=factors), gate=None, tiles=second)
    return sums.reshape(second.parts, *chosen.shape, -1)


def _hopper(*arguments, **options):
    sums = multiply_packed(*arguments, **options)
    return sums.reshape(-1, *sums.shape[2:])


def _reference(x, weights, factors, chosen, *, gate, parts):
    """Computes what the kernel does; the first part of k has the whole sums."""
    sums = _products(x, weights, factors, chosen, gate=gate, implementation="reference")
    return jnp.pad(sums, ((0, (parts - 1) * len(sums)), (0, 0), (0, 0)))


@functools.partial(jax.jit, static_argnames=("gate", "deterministic", "shared", "implementation"))
def expert_mlp(
    x: Float[Array, "rows hidden"] | Float[Array, "chosen rows hidden"],
    weights: ExpertMlp,
    chosen: Int[Array, "chosen rows"],
    *,
    gate: Gate,
    factors: Float[Array, "chosen rows"] | None = None,
    deterministic: bool = False,
    shared: int = 0,
    implementation: Implementation = "auto",
) -> Float[Array, "parts rows hidden"]:
    """Returns partial sums of each row's result: one for each of its experts, or one for each part of each product.

    Weights with scales of groups and few choices take two launches of the Hopper kernel, and one that lists and gathers
    the rows of each expert. Else, and without gates, both products are those of `expert_matmul`.

    Args:
        x, chosen, gate, factors, deterministic, shared, implementation: as in `expert_matmul`.
        weights: weights of all experts.
    """
    gate_up, down, *_ = weights
    find = functools.partial(packed_tiles, dtype=jnp.dtype(x.dtype), chosen=chosen.shape)
    first, second = find(gate_up, gated=True), find(down, gated=False, parts=PARTS)
    if deterministic or not gate.exists or first is None or second is None:
        fixed: dict[str, Any] = {"deterministic": deterministic, "shared": shared, "implementation": implementation}
        return _products(x, weights, factors, chosen, gate=gate, **fixed)
    kernel = functools.partial(_hopper, gate=gate, tiles=(first, second))
    reference = functools.partial(_reference, gate=gate, parts=second.parts)
    return dispatch(implementation, [Kernel(HOPPER, kernel)], reference, x, weights, factors, chosen)
