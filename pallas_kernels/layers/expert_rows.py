"""Lists the choices of each expert in blocks and gathers their rows, in one launch (`expert_kernel` multiplies them)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.expert_blocks import Blocks, blocks_count
from pallas_kernels.layers.expert_bytes import SLICE, slices_in_order

MOST_LISTED = 2048  # most choices that each program counts in less time than their products take
PAIRS = 8192  # pairs of a choice and an expert, or of a choice and a place of the block, that are compared at a time
ELEMENTS = 8192  # elements of x that a program copies at a time; both are 32 values of each thread
PROGRAMS = 132  # multiprocessors of an H100 or H200; fewer blocks than these are each copied by several programs


def gather_blocks(
    x: Float[Array, "rows inner"],
    chosen: Int[Array, " choices"],
    experts: int,
    size: int,
    kind: str,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "slices block_rows 128"], Blocks, Int[Array, "2"]]:
    """Returns the rows of all blocks of `blocks_of`, these blocks, and how many have an expert, and how many have none.

    What is listed for other blocks is arbitrary, and so are the rows of blocks without an expert.

    Args:
        x: activations; choice c is of row c % rows.
        chosen, experts, size: as in `blocks_of`.
        kind: kind of the weights, in whose order the columns are `registered`.
        interpret: whether the kernel is interpreted.
    """
    (count,), (_, inner) = chosen.shape, x.shape
    blocks, slices, places = blocks_count(count, experts, size), pl.cdiv(inner, SLICE), pl.next_power_of_2(size)
    own = pl.cdiv(slices, max(1, PROGRAMS // blocks))  # slices of a program
    step = min(pl.next_power_of_2(own), max(1, ELEMENTS // (SLICE * places)))
    steps = pl.cdiv(own, step)
    shapes = ((blocks,), (blocks, size), (2,))
    rows, expert, choices, counts = pl.pallas_call(
        functools.partial(_kernel, experts=experts, kind=kind, step=step, steps=steps),
        grid=(blocks, pl.cdiv(slices, step * steps)),
        out_shape=[
            jax.ShapeDtypeStruct((slices, blocks * size, SLICE), x.dtype),
            *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="gather_blocks",
    )(x, chosen.astype(jnp.int32))
    return rows, Blocks(expert, choices), counts


def _kernel(x_ref, chosen_ref, rows_ref, expert_ref, choices_ref, counts_ref, *, experts, kind, step, steps):
    """Finds the choices of one block in a Pallas program, and copies some slices of their rows."""
    block, part, size = pl.program_id(0), pl.program_id(1), choices_ref.shape[1]
    own, none = _count(chosen_ref, experts)
    needed, unused = (own + size - 1) // size, (none + size - 1) // size
    used, each = jnp.sum(needed), jnp.arange(own.shape[0])
    expert = jnp.sum(((jnp.cumsum(needed) <= block) & (each < experts)).astype(jnp.int32))
    number = block - jnp.sum(jnp.where(each < expert, needed, 0))  # among the blocks of its expert
    choices = _find(chosen_ref, expert, number * size, experts, size)
    place = jnp.arange(choices.shape[0])

    @pl.when(part == 0)
    def lists():
        expert_ref[block] = expert
        pltriton.store(choices_ref.at[block, place], choices, mask=place < size)

    @pl.when((part == 0) & (block == 0))
    def count():
        counts_ref[0], counts_ref[1] = used, unused

    @pl.when(block < used)
    def copy():
        rows, column = jnp.maximum(choices, 0) % x_ref.shape[0], jnp.arange(SLICE)[None, None, :]

        def copy_slices(number, carry):
            own = ((part * steps + number) * step + jnp.arange(step))[None, :, None]
            columns, is_row = own * SLICE + column, (choices >= 0)[:, None, None]
            at = x_ref.at[rows[:, None, None], columns]
            found = pltriton.load(at, mask=is_row & (columns < x_ref.shape[1]), other=0)
            at = rows_ref.at[own, (block * size + place)[:, None, None], column]
            mask = (own < rows_ref.shape[0]) & (place < size)[:, None, None]
            pltriton.store(at, slices_in_order(found, kind), mask=mask & (column < SLICE))
            return carry

        jax.lax.fori_loop(0, steps, copy_slices, 0)


def _load(chosen_ref, number, step, experts):
    """Returns some choices and their experts: `experts` means none, and one more that there is no such choice."""
    index, (count,) = number * step + jnp.arange(step), chosen_ref.shape
    chosen = pltriton.load(chosen_ref.at[index], mask=index < count, other=experts + 1)
    return index, jnp.where((chosen >= 0) & (chosen < experts) | (index >= count), chosen, experts)


def _count(chosen_ref, experts):
    """Returns the number of choices of each expert, and of those of none."""
    each = jnp.arange(pl.next_power_of_2(experts))
    step = min(pl.next_power_of_2(chosen_ref.shape[0]), max(1, PAIRS // each.shape[0]))

    def add(number, totals):
        _, chosen = _load(chosen_ref, number, step, experts)
        is_own = (chosen[:, None] == each[None, :]) & (each < experts)[None, :]
        own, none = (jnp.sum(one.astype(jnp.int32), axis=0) for one in (is_own, chosen == experts))
        return totals[0] + own, totals[1] + none

    nothing = jnp.zeros(each.shape[0], jnp.int32), jnp.int32(0)
    return jax.lax.fori_loop(0, pl.cdiv(chosen_ref.shape[0], step), add, nothing)


def _find(chosen_ref, expert, first, experts, size):
    """Returns an expert's choices from a place on, as many as a block has; -1: none."""
    places = pl.next_power_of_2(size)
    wanted = first + jnp.arange(places)
    step = min(pl.next_power_of_2(chosen_ref.shape[0]), max(1, PAIRS // places))

    def find(number, carry):
        seen, found = carry
        index, chosen = _load(chosen_ref, number, step, experts)
        is_own = chosen == expert
        up_to = seen + jnp.cumsum(is_own.astype(jnp.int32))
        is_wanted = is_own[None, :] & (up_to[None, :] - 1 == wanted[:, None])
        own = jnp.max(jnp.where(is_wanted, index[None, :], -1), axis=1)
        return seen + jnp.sum(is_own.astype(jnp.int32)), jnp.maximum(found, own)

    nothing = jnp.int32(0), jnp.full(places, -1, jnp.int32)
    _, found = jax.lax.fori_loop(0, pl.cdiv(chosen_ref.shape[0], step), find, nothing)
    return jnp.where(jnp.arange(places) < size, found, -1)
