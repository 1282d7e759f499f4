"""The matrix products of a mixture of experts: each row is multiplied by the weights of the experts that it chooses.

    out[j, t] = x[t] @ w[chosen[j, t]].T        for each row t and each of its choices j

The rows of an expert are multiplied together, in blocks, so that its weight is read once for each block. An expert may
have any number of rows; an expert without rows is not read. With few rows, each Pallas program finds the rows of its
expert itself: it compares all choices with the expert's index, and counts. With many rows, that would take longer than
the product; then XLA counts, and writes lists of the rows of each block. No rows are sorted. `jax.lax.ragged_dot`,
which needs sorted rows, is not used: for a GPU, XLA turns it into a product of all rows with all experts, whose inputs
for 320 rows and 8 of 128 experts take 1.3 GB.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.layers.quantize_rows import Activation, activate
from pallas_kernels.layers.quantized import Quantized
from pallas_kernels.layers.split_matmul import INNER_BYTES

# Most choices of all rows that a program compares. Comparing 512 choices with the 16 places of a block takes 64 values
# of each of 128 threads; more would not fit into their registers. Lists need nine launches more.
MOST_CHOICES = 512
FEW_ROWS, MANY_ROWS = 16, 64  # rows of a block: the smallest side of a product on tensor cores; four times as many
REFERENCE_ROWS = 8  # rows of a block in the reference
TILE = 64  # output columns of a program; twice as many of an undivided product
MOST_ELEMENTS = 2**31  # addresses in a weight are 32-bit integers


class Gate(NamedTuple):
    """How an expert joins gate g and up u: activation(g) * u, or with a limit g * sigmoid(alpha * g) * (u + 1)."""

    activation: Activation = "silu"
    limit: float | None = None  # largest g, and largest u in magnitude; None: no limit
    alpha: float = 1.0  # factor of g in the sigmoid, with a limit

    def join(self, gate: Array, up: Array) -> Array:
        """Returns the joined values, inside or outside of a kernel."""
        if self.limit is None:
            return activate(gate, self.activation) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.minimum(jnp.maximum(up, -self.limit), self.limit)
        return gate * jax.lax.logistic(self.alpha * gate) * (up + 1)


class Blocks(NamedTuple):
    """Blocks of choices, each of one expert; choice j of row t of T has the index j * T + t."""

    expert: Int[Array, " blocks"]  # expert of each block; the number of experts: choices of none; one more: unused
    choices: Int[Array, "blocks size"]  # indices of the block's choices; -1: none


def blocks_of(chosen: Int[Array, " choices"], experts: int, size: int) -> Blocks:
    """Returns the choices in blocks of at most `size` choices of one expert, in the order of their indices.

    Args:
        chosen: expert of each choice; an index outside of 0 to experts - 1 means none.
        experts: number of experts.
        size: number of choices of a full block.
    """
    count = chosen.shape[0]
    own = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts)
    is_own = own[:, None] == jnp.arange(experts + 1)
    up_to = jnp.cumsum(is_own, axis=0, dtype=jnp.int32)  # number of choices of each expert up to each choice
    place = jnp.sum(jnp.where(is_own, up_to, 0), axis=1) - 1
    needed = -(-up_to[-1] // size)
    first = jnp.cumsum(needed) - needed
    block = first[own] + place // size
    blocks = min(count, experts + 1) + count // size  # the last block of an expert may not be full
    expert = jnp.full(blocks, experts + 1, jnp.int32).at[block].set(own)
    choices = jnp.full((blocks, size), -1, jnp.int32).at[block, place % size].set(jnp.arange(count, dtype=jnp.int32))
    return Blocks(expert, choices)


def _reference(x, weight, scale, bias, factors, chosen, *, gate, dtype):
    experts, flat = weight.shape[0], x.reshape(-1, x.shape[-1])

    def block(one):
        expert, choices = one
        own = jnp.minimum(expert, experts - 1)
        rows = flat[jnp.maximum(choices, 0) % flat.shape[0]]
        exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        sums = jnp.einsum("tk,nk->tn", rows, weight[own].astype(x.dtype), **exact)
        sums = sums if scale is None else sums * scale[own]
        sums = sums if bias is None else sums + bias[own].astype(jnp.float32)
        sums = gate.join(*jnp.split(sums, 2, axis=-1)) if gate else sums
        sums = sums if factors is None else sums * factors.ravel()[choices][:, None]
        return jax.lax.optimization_barrier(jnp.where(expert < experts, sums, 0).astype(dtype))

    blocks = blocks_of(chosen.ravel(), experts, REFERENCE_ROWS)
    found = jax.lax.map(block, blocks)
    at = jnp.where(blocks.choices < 0, chosen.size, blocks.choices)
    out = jnp.zeros((chosen.size, found.shape[-1]), dtype).at[at].set(found, mode="drop")
    return out.reshape(*chosen.shape, -1)


def _own_choices(chosen_ref, expert, experts, block, size):
    """Returns the indices of a block's choices among those of an expert; -1: none."""
    index = jnp.arange(pl.next_power_of_2(chosen_ref.shape[0]))
    chosen = pltriton.load(chosen_ref.at[index], mask=index < chosen_ref.shape[0], other=experts + 1)
    chosen = jnp.where((chosen >= 0) & (chosen < experts) | (index >= chosen_ref.shape[0]), chosen, experts)
    is_own = chosen == expert
    place = jnp.cumsum(is_own.astype(jnp.int32)) - 1
    wanted = block * size + jnp.arange(size)
    return jnp.max(jnp.where(is_own[None, :] & (place[None, :] == wanted[:, None]), index[None, :], -1), axis=1)


def _kernel(
    # inputs
    x_ref,  # [rows, K]
    weight_ref,  # [experts, N, K], or with a gate [experts, 2 N, K]
    *refs,  # chosen [choices], or expert [blocks] and choices [blocks, size]; of scale [experts, N], bias [experts, N]
    # and factors [choices] those that are named; output: out_ref [choices, N]
    # static parameters
    names,  # names of the optional inputs
    size,  # choices of a block
    inner,  # values of k per loop iteration
    tile,  # columns of an output tile
    gate,
    is_listed,  # whether the blocks are inputs
    precision,  # precision of the matrix products
):
    """Multiplies the rows of a block by some columns of its expert's weight, in one Pallas program."""
    lists, out_ref = refs[: 1 + is_listed], refs[-1]
    optional = dict(zip(names, refs[1 + is_listed : -1], strict=True))
    experts, rows, width = weight_ref.shape[0], x_ref.shape[0], out_ref.shape[1]
    if is_listed:
        expert = lists[0][pl.program_id(1)]
        choices = pltriton.load(lists[1].at[pl.program_id(1), jnp.arange(size)])
    else:
        expert = pl.program_id(1)
        choices = _own_choices(lists[0], expert, experts, pl.program_id(2), size)
    last = jnp.max(choices)
    has_choices, named = last >= 0, jnp.where(choices < 0, last, choices)  # padding computes the last choice again
    columns = pl.program_id(0) * tile + jnp.arange(tile)
    out = out_ref.at[named[None, :], columns[:, None]]

    @pl.when(has_choices & (expert < experts))
    def multiply():
        def step(index, totals):
            k = (index * inner + jnp.arange(inner))[None, :]
            x = pltriton.load(x_ref.at[(named % rows)[:, None], k])
            weights = [pltriton.load(weight_ref.at[expert, half[:, None], k]).astype(x.dtype) for half in halves]
            products = [pltriton.dot(weight, x, trans_b=True, precision=precision) for weight in weights]
            return tuple(total + product for total, product in zip(totals, products, strict=True))

        halves = [columns, width + columns] if gate else [columns]
        totals = (jnp.zeros((tile, size), jnp.float32),) * len(halves)
        totals = jax.lax.fori_loop(0, x_ref.shape[1] // inner, step, totals)
        for name in ("scale", "bias"):
            if name in optional:
                own = [pltriton.load(optional[name].at[expert, half])[:, None].astype(jnp.float32) for half in halves]
                combine = jnp.multiply if name == "scale" else jnp.add
                totals = tuple(combine(total, values) for total, values in zip(totals, own, strict=True))
        total = gate.join(*totals) if gate else totals[0]
        if "factors" in optional:
            total = total * pltriton.load(optional["factors"].at[named])[None, :]
        pltriton.store(out, total.astype(out_ref.dtype))

    @pl.when(has_choices & (expert == experts))
    def clear():
        pltriton.store(out, jnp.zeros((tile, size), out_ref.dtype))


def _pallas(x, weight, scale, bias, factors, chosen, *, gate, dtype, deterministic, interpret):
    (experts, out, inner), flat = weight.shape, x.reshape(-1, x.shape[-1])
    width = out // 2 if gate else out
    tile = TILE if gate or width % (2 * TILE) else 2 * TILE
    is_listed, size = deterministic or chosen.size > MOST_CHOICES, FEW_ROWS
    lists: tuple[Array, ...] = (chosen.ravel(),)
    grid: tuple[int, ...] = (width // tile, experts + 1, pl.cdiv(chosen.size, size))
    if is_listed:
        size = MANY_ROWS if deterministic or chosen.size > FEW_ROWS * experts else FEW_ROWS
        lists = blocks_of(chosen.ravel(), experts, size)
        grid = (width // tile, lists[0].shape[0])
    optional = {"scale": scale, "bias": bias, "factors": None if factors is None else factors.ravel()}
    optional = {name: array for name, array in optional.items() if array is not None}
    # Three TF32 products are as exact as one float32 product, and run on tensor cores. A CPU has no TF32.
    wide = x.dtype == jnp.float32 and not interpret
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if wide else jax.lax.Precision.HIGHEST
    own = {
        "names": tuple(optional),
        "size": size,
        "inner": _step(weight.dtype, x.dtype, inner),
        "tile": tile,
        "gate": gate,
    }
    found = pl.pallas_call(
        functools.partial(_kernel, **own, is_listed=is_listed, precision=precision),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct((chosen.size, width), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8 if tile > TILE else 4, num_stages=4),
        interpret=interpret,
        name="expert_matmul",
    )(flat, weight, *lists, *optional.values())
    return found.reshape(*chosen.shape, width)


def _step(dtype: jnp.dtype, x_dtype: jnp.dtype, inner: int) -> int:
    """Returns the number of values of k per loop iteration: `INNER_BYTES` of a weight's row, or fewer values.

    With float32 activations and 8-bit weights, more values would not fit into a GPU's shared memory.
    """
    step = INNER_BYTES // max(dtype.itemsize, x_dtype.itemsize // 2)
    return step if inner % step == 0 else step // 2


def unsupported_experts(weight: Array, *, gated: bool) -> str | None:
    """Returns a text that says which limit of the kernel the weights of experts exceed; None if they are supported."""
    _, out, inner = weight.shape
    columns, step = TILE * (1 + gated), INNER_BYTES // max(weight.dtype.itemsize, 2)
    if out % columns or inner % step or weight.size >= MOST_ELEMENTS:
        return (
            f"the experts' weights must be [experts, multiple of {columns}, multiple of {step}] with less than "
            f"{MOST_ELEMENTS} values, got {weight.shape}"
        )
    return None


@functools.partial(jax.jit, static_argnames=("gate", "dtype", "deterministic", "implementation"))
def expert_matmul(
    x: Float[Array, "rows inner"] | Float[Array, "chosen rows inner"],
    weight: Float[Array, "experts out inner"] | Quantized,
    chosen: Int[Array, "chosen rows"],
    *,
    gate: Gate | None = None,
    bias: Float[Array, "experts out"] | None = None,
    factors: Float[Array, "chosen rows"] | None = None,
    dtype: jnp.dtype | None = None,
    deterministic: bool = False,
    implementation: Implementation = "auto",
) -> Float[Array, "chosen rows width"]:
    """Returns each row times the weight of each of its experts [chosen, rows, width]; sums are computed in float32.

    Args:
        x: a row's activations for all of its experts, or for each of them.
        weight: weights of all experts; with a gate, gate above up [experts, 2 * width, inner].
        chosen: experts of each row; of an index outside of 0 to experts - 1 the result is 0.
        gate: how gate and up are joined; None: the product is returned.
        bias: bias of each expert's product; None: none.
        factors: factor of the result of each choice, in float32; None: none.
        dtype: dtype of the result; None: that of x.
        deterministic: make the bits of a row's result independent of the other rows. The bits of the reference always
            are.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the weights.
    """
    values, scale = (weight.values, weight.scale) if isinstance(weight, Quantized) else (weight, None)
    options = {"gate": gate, "dtype": dtype or x.dtype}
    kernel = functools.partial(_pallas, deterministic=deterministic, **options)
    reference = functools.partial(_reference, **options)
    unsupported = unsupported_experts(values, gated=gate is not None)
    return dispatch(implementation, unsupported, kernel, reference, x, values, scale, bias, factors, chosen)
