"""The matrix products of a mixture of experts: each row is multiplied by the weights of the experts that it chooses.

    out[j, t] = x[t] @ w[chosen[j, t]].T        for each row t and each of its choices j

The rows of an expert are multiplied together, in blocks, so that its weight is read once for each block. An expert may
have any number of rows; an expert without rows is not read. With few rows, each Pallas program finds the rows of its
expert itself: it compares all choices with the expert's index, and counts. It multiplies all blocks of the expert, one
after another. There is a program for each expert, or for each choice if these are fewer; only the first choice of an
expert computes. With many rows, counting would take longer than the product; then XLA counts, and writes lists of the
rows of each block. No rows are sorted. On a Hopper GPU, few choices of experts with scales of groups have a kernel of
their own (`expert_kernel`). `jax.lax.ragged_dot`, which needs sorted rows, is not used: for a GPU, XLA turns it into a
product of all rows with all experts, whose inputs for 320 rows and 8 of 128 experts take 1.3 GB.

Weights of four bits are packed as `expert_bytes` says. For these a launch of its own puts x into that order.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import HOPPER, TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.dense.split_kernel import INNER_BYTES
from pallas_kernels.layers.experts import expert_kernel, expert_reference, mxfp4
from pallas_kernels.layers.experts.expert_blocks import own_choices, plan
from pallas_kernels.layers.experts.expert_bytes import PACKED, ordered
from pallas_kernels.layers.experts.expert_reference import rows_of
from pallas_kernels.layers.experts.expert_sums import packed_sums, unpacked_sums
from pallas_kernels.layers.experts.expert_tiling import packed_tiles
from pallas_kernels.layers.hopper import multiprocessors
from pallas_kernels.layers.quantize_rows import Activation, activate
from pallas_kernels.layers.weights import Quantized

TILE = 64  # output columns of a program; twice as many of an undivided product
STAGES, FEW_STAGES = 4, 6  # steps of k in flight, and in a product of gate and up with one program a multiprocessor
PACKED_STEP = 128  # most values of k per loop iteration in int4 and mxfp4; a row of them is 64 bytes
MOST_ELEMENTS = 2**31  # addresses in a weight are 32-bit integers, the last one 2**31 - 1


class Gate(NamedTuple):
    """How an expert joins gate g and up u: activation(g) * u, or with a limit g * sigmoid(alpha * g) * (u + 1).

    An expert without a gate has activation(u).
    """

    activation: Activation = "silu"
    limit: float | None = None  # largest g, and largest u in magnitude; None: no limit
    alpha: float = 1.0  # factor of g in the sigmoid, with a limit
    exists: bool = True  # whether there is a gate

    @property
    def halves(self) -> int:
        """Number of rows of the weight for each column of the result."""
        return 1 + self.exists

    def join(self, gate: Array, up: Array | None = None) -> Array:
        """Returns the joined values, inside or outside of a kernel; without a gate those of up alone."""
        if up is None:
            return activate(gate, self.activation)
        if self.limit is None:
            return activate(gate, self.activation) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.minimum(jnp.maximum(up, -self.limit), self.limit)
        return gate * jax.lax.logistic(self.alpha * gate) * (up + 1)


def _kernel(
    # inputs
    x_ref,  # [rows, K]; for packed values `ordered`
    weight_ref,  # [experts * N, K], or with a gate [experts * 2 N, K]; packed values: [experts, N, K / 2 bytes]
    *refs,  # chosen [choices], or expert [blocks] and choices [blocks, size]; of scale [experts, N], group_scale
    # [experts * N, groups] or of packed values [experts, N, groups], zeros of the same shape, bias [experts, N] and
    # factors [choices] those that are named; output: out_ref [choices, N]
    # static parameters
    names,  # names of the optional inputs
    size,  # choices of a block
    is_listed,  # whether the blocks are inputs
    is_by_choice,  # whether a program that finds its blocks has the expert of a choice
    tile,  # columns of an output tile
    experts,  # number of experts
    **options,  # static parameters of `_multiply`
):
    """Multiplies the rows of a block, or of all blocks of an expert, by some columns of the expert's weight."""
    lists = refs[: 1 + is_listed]
    named = dict(zip(("x", "weight", *names, "out"), (x_ref, weight_ref, *refs[1 + is_listed :]), strict=True))
    columns = pl.program_id(0) * tile + jnp.arange(tile)

    def multiply(expert, choices):
        _multiply(named, columns, expert, choices, experts=experts, **options)

    if is_listed:
        multiply(lists[0][pl.program_id(1)], pltriton.load(lists[1].at[pl.program_id(1), jnp.arange(size)]))
        return
    expert, index, position = own_choices(lists[0], experts, is_by_choice)

    def block(number, carry):
        wanted = number * size + jnp.arange(size)
        multiply(expert, jnp.max(jnp.where(position[None, :] == wanted[:, None], index[None, :], -1), axis=1))
        return carry

    jax.lax.fori_loop(0, (jnp.max(position) + size) // size, block, 0)


def _multiply(refs, columns, expert, choices, *, experts, sums, gate):
    """Multiplies the rows of a block by some columns of its expert's weight, in one Pallas program.

    Args:
        refs: inputs and output of `_kernel`, by name.
        columns: columns of the result that the program computes, [tile].
        expert: expert of the block; the number of experts: its choices are of none, and their results are 0.
        choices: choices of the block, [size]; -1: none.
        experts: number of experts.
        sums: function of arrays by name, expert, columns of the weight's halves and rows of x.
        gate: as in `expert_matmul`.
    """
    rows, (_, width) = refs["x"].shape[0], refs["out"].shape
    last = jnp.max(choices)
    has_choices, named = last >= 0, jnp.where(choices < 0, last, choices)  # padding computes the last choice again
    out = refs["out"].at[named[None, :], columns[:, None]]

    @pl.when(has_choices & (expert < experts))
    def multiply():
        halves = [columns, width + columns] if gate and gate.exists else [columns]
        totals = sums(refs, expert, halves, named % rows)
        for name in ("scale", "bias"):
            if name in refs:
                loaded = [pltriton.load(refs[name].at[expert, half])[:, None].astype(jnp.float32) for half in halves]
                combine = jnp.multiply if name == "scale" else jnp.add
                totals = tuple(combine(total, values) for total, values in zip(totals, loaded, strict=True))
        total = gate.join(*totals) if gate else totals[0]
        if "factors" in refs:
            total = total * pltriton.load(refs["factors"].at[named])[None, :]
        pltriton.store(out, total.astype(refs["out"].dtype))

    @pl.when(has_choices & (expert == experts))
    def clear():
        pltriton.store(out, jnp.zeros((len(columns), len(choices)), refs["out"].dtype))


def _pallas(x, weight, bias, factors, chosen, *, gate, dtype, deterministic, shared, interpret):
    (experts, out, _), flat = weight.shape, x.reshape(-1, x.shape[-1])
    if step := _packed_step(weight):
        flat = ordered(flat, step)
    is_gated = gate is not None and gate.exists
    width = out // 2 if is_gated else out
    tile = TILE if is_gated or width % (2 * TILE) else 2 * TILE
    planned = plan(chosen.ravel(), experts, is_packed=step is not None, deterministic=deterministic)
    is_alone = is_gated and width // tile * planned.programs <= (multiprocessors() or 0)
    values, optional = _stored(weight)
    optional |= {"bias": bias, "factors": None if factors is None else factors.ravel()}
    optional = {name: array for name, array in optional.items() if array is not None}
    sizes = {
        "names": tuple(optional),
        "size": planned.size,
        "is_listed": planned.is_listed,
        "is_by_choice": planned.is_by_choice,
        "tile": tile,
        "experts": experts,
        "sums": _sums(weight, x.dtype, interpret, shared),
        "gate": gate,
    }
    products = pl.pallas_call(
        functools.partial(_kernel, **sizes),
        grid=(width // tile, planned.programs),
        out_shape=jax.ShapeDtypeStruct((chosen.size, width), dtype),
        compiler_params=pltriton.CompilerParams(
            num_warps=8 if tile > TILE else 4, num_stages=FEW_STAGES if is_alone else STAGES
        ),
        interpret=interpret,
        name="expert_matmul",
    )(flat, values, *planned.lists, *optional.values())
    return products.reshape(*chosen.shape, width)


def _hopper(x, weight, bias, factors, chosen, *, gate, interpret, **options):
    joined = gate if gate is not None and gate.exists else None
    assert gate is joined or factors is None, "the kernel multiplies by factors before the activation of up"
    arguments = x, weight, bias, factors, chosen
    (sums,) = expert_kernel.multiply_chosen(*arguments, gate=joined, interpret=interpret, **options)
    return sums if gate is joined else gate.join(sums)


def _stored(weight):
    """Returns the values of a weight and its scales by name.

    The rows of all experts are one after another; the bytes of a packed weight stay [experts, N, K / 2].
    """
    if not isinstance(weight, Quantized):
        return weight.reshape(-1, weight.shape[2]), {}
    if weight.is_packed:
        return weight.values.reshape(*weight.shape[:2], -1), {"group_scale": weight.scale, "zeros": weight.zeros}
    groups = {"group_scale": weight.scale.reshape(-1, weight.scale.shape[-1])}
    return weight.values.reshape(-1, weight.shape[2]), groups if weight.has_groups else {"scale": weight.scale}


def _sums(weight, dtype, interpret, shared):
    """Returns the function (refs, expert, halves, rows of x) -> sums for a weight and activations of a dtype."""
    if step := _packed_step(weight):
        return functools.partial(packed_sums, kind=weight.kind, inner=step, group=weight.group, interpret=interpret)
    stored = weight.values.dtype if isinstance(weight, Quantized) else weight.dtype
    # Three TF32 products are as exact as one float32 product, and run on tensor cores. A CPU has no TF32.
    wide = dtype == jnp.float32 and not interpret
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if wide else jax.lax.Precision.HIGHEST
    group = weight.group if isinstance(weight, Quantized) else weight.shape[-1]
    fixed = {"inner": _step(stored, dtype, group), "group": group, "precision": precision}

    def sums(refs, expert, halves, row):
        rows = rows_of(expert, halves[0], weight.shape[:2], gated=len(halves) > 1, shared=shared)
        return unpacked_sums(refs, rows, row, **fixed)

    return sums


def _packed_step(weight: Array | Quantized) -> int | None:
    """Returns the number of values of k per loop iteration of a weight in int4 or mxfp4; None: it is neither."""
    if not isinstance(weight, Quantized) or not weight.is_packed:
        return None
    return PACKED_STEP if weight.kind == "mxfp4" else math.gcd(weight.group, PACKED_STEP)


def _step(dtype: jnp.dtype, x_dtype: jnp.dtype, group: int) -> int:
    """Returns the number of values of k per loop iteration: `INNER_BYTES` of a weight's row, or fewer values.

    With float32 activations and 8-bit weights, more values would not fit into a GPU's shared memory and registers.

    Args:
        dtype, x_dtype: dtypes of the weight's values and of the activations.
        group: number of columns that share a scale.
    """
    return math.gcd(INNER_BYTES // (4 if x_dtype == jnp.float32 else dtype.itemsize), group)


def unsupported_experts(weight: Array | Quantized, dtype: jnp.dtype, *, gated: bool) -> str | None:
    """Returns a text that says which limit of the kernel a product exceeds; None if it is supported.

    Args:
        weight: weights of all experts.
        dtype: dtype of the activations.
        gated: whether gate and up are joined.
    """
    _, out, inner = weight.shape
    values = weight.values if isinstance(weight, Quantized) else weight
    columns, step = TILE * (1 + gated), INNER_BYTES // max(values.dtype.itemsize, 2)
    if isinstance(weight, Quantized) and weight.has_groups:
        step = mxfp4.GROUP
        if weight.group % step:
            return f"groups must be multiples of {step} columns, got {weight.group}"
    if isinstance(weight, Quantized) and weight.is_packed and dtype not in (dtypes := PACKED[weight.kind].dtypes):
        return f"x must be {' or '.join(dtypes)} for experts in {weight.kind}, got {dtype}"
    if out % columns or inner % step or values.size > MOST_ELEMENTS:
        return (
            f"the experts' weights must be [experts, multiple of {columns}, multiple of {step}] with at most "
            f"{MOST_ELEMENTS} values, got {weight.shape}"
        )
    return None


@functools.partial(jax.jit, static_argnames=("gate", "dtype", "deterministic", "shared", "implementation"))
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
    shared: int = 0,
    implementation: Implementation = "auto",
) -> Float[Array, "chosen rows width"]:
    """Returns each row times the weight of each of its experts [chosen, rows, width]; sums are computed in float32.

    Args:
        x: a row's activations for all of its experts, or for each of them.
        weight: weights of all experts; an existing gate is above up [experts, 2 * width, inner]. Quantised ones have
            a scale for each row, or scales of groups, as packed ones (`int4`, `mxfp4`) have.
        chosen: experts of each row; of an index outside of 0 to experts - 1 the result is 0.
        gate: how gate and up are joined, or the activation of up; None: the product is returned.
        bias: bias of each expert's product; None: none.
        factors: factor of the result of each choice, in float32; None: none.
        dtype: dtype of the result; None: that of x.
        deterministic: make the bits of a row's result independent of the other rows.
        shared: number of the last experts whose weights are stored as one dense weight of gate and up, or of down
            (`rows_of`), not quantised.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the weights.
    """
    options, is_gated = {"gate": gate, "dtype": dtype or x.dtype}, gate is not None and gate.exists
    assert shared < 2 or not isinstance(weight, Quantized)
    kernel, reference = (
        functools.partial(run, shared=shared, deterministic=deterministic, **options)
        for run in (_pallas, expert_reference.reference)
    )
    unsupported = unsupported_experts(weight, x.dtype, gated=is_gated)
    tiles = None if deterministic else packed_tiles(weight, x.dtype, chosen.shape, gated=is_gated)
    kernels = [
        Kernel(HOPPER, functools.partial(_hopper, tiles=tiles, **options), tiles is None),
        Kernel(TRITON, kernel, unsupported),
    ]
    return dispatch(implementation, kernels, reference, x, weight, bias, factors, chosen)
