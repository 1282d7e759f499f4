"""Lists the choices of each expert in blocks and gathers their rows, in one launch, for `expert_kernel`."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int

from pallas_kernels.layers.experts.expert_blocks import ExpertBlocks, blocks_count
from pallas_kernels.layers.experts.expert_bytes import SLICE, slices_in_order

MOST_LISTED = 2048  # most choices that each program counts in less time than their products take
LEAST_COUNTED = 16  # choices that are counted at a time
# Pairs of a choice and four experts, or of a choice and a place of the block, that are compared at a time: 8 of each
# thread. With 16 of each, registers spill for 512 experts.
PAIRS = 2048
ELEMENTS = 8192  # elements of x that a program copies at a time
PROGRAMS = 132  # multiprocessors of an H100 or H200; fewer blocks than these are each copied by several programs


def gather_blocks(
    x: Float[Array, "rows inner"],
    chosen: Int[Array, " choices"],
    experts: int,
    size: int,
    kind: str,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "slices block_rows 128"], ExpertBlocks, Int[Array, "2"]]:
    """Returns the rows of all blocks of `blocks_of`, these blocks, and how many have an expert, and how many have none.

    What is listed for other blocks is arbitrary, and so are the rows of blocks without an expert.

    Args:
        x: activations; choice c is of row c % rows.
        chosen, experts, size: as in `blocks_of`.
        kind: kind of the weights, in whose order the columns are `registered`.
        interpret: whether the kernel is interpreted.
    """
    (count,), (_, inner) = chosen.shape, x.shape
    assert count <= MOST_LISTED, f"expected at most {MOST_LISTED} choices, got {count}"
    blocks, slices, places = blocks_count(count, experts, size), pl.cdiv(inner, SLICE), pl.next_power_of_2(size)
    program_slices = pl.cdiv(slices, max(1, PROGRAMS // blocks))  # slices of a program
    step = min(pl.next_power_of_2(program_slices), max(1, ELEMENTS // (SLICE * places)))
    steps = pl.cdiv(program_slices, step)
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
    return rows, ExpertBlocks(expert, choices), counts


def _kernel(x_ref, chosen_ref, rows_ref, expert_ref, choices_ref, counts_ref, *, experts, kind, step, steps):
    """Finds the choices of one block in a Pallas program, and copies some slices of their rows."""
    block, part, size = pl.program_id(0), pl.program_id(1), choices_ref.shape[1]
    counted, none = _count(chosen_ref, experts)
    needed, unused = (counted + size - 1) // size, (none + size - 1) // size
    used, of_words = jnp.sum(needed), jnp.sum(needed, axis=0)
    ends = (jnp.cumsum(of_words) - of_words)[None, :] + jnp.cumsum(needed, axis=0)  # of the blocks of each expert
    is_before = (ends <= block) & (_experts_of(counted.shape[1]) < experts)
    expert = jnp.sum(is_before.astype(jnp.int32))
    number = block - jnp.sum(jnp.where(is_before, needed, 0))  # among the blocks of its expert
    choices = _find(chosen_ref, expert, number * size, experts, size)
    position = jnp.arange(choices.shape[0])

    @pl.when(part == 0)
    def lists():
        expert_ref[block] = expert
        pltriton.store(choices_ref.at[block, position], choices, mask=position < size)

    @pl.when((part == 0) & (block == 0))
    def count():
        counts_ref[0], counts_ref[1] = used, unused

    @pl.when(block < used)
    def copy():
        rows, column = jnp.maximum(choices, 0) % x_ref.shape[0], jnp.arange(SLICE)[None, None, :]

        def copy_slices(number, carry):
            copied = ((part * steps + number) * step + jnp.arange(step))[None, :, None]
            columns, is_row = copied * SLICE + column, (choices >= 0)[:, None, None]
            at = x_ref.at[rows[:, None, None], columns]
            values = pltriton.load(at, mask=is_row & (columns < x_ref.shape[1]), other=0)
            at = rows_ref.at[copied, (block * size + position)[:, None, None], column]
            mask = (copied < rows_ref.shape[0]) & (position < size)[:, None, None]
            pltriton.store(at, slices_in_order(values, kind), mask=mask & (column < SLICE))
            return carry

        jax.lax.fori_loop(0, steps, copy_slices, 0)


def _load(chosen_ref, number, step):
    """Returns some choices and their experts."""
    index = number * step + jnp.arange(step)
    return index, pltriton.load(chosen_ref.at[index], mask=index < chosen_ref.shape[0], other=-1)


def _experts_of(words):
    """Returns the experts whose choices are counted in each byte of words, [4, words]."""
    return 4 * jnp.arange(words)[None, :] + jnp.arange(4)[:, None]


def _count(chosen_ref, experts):
    """Returns the number of choices of each expert of `_experts_of`, and of those of none.

    The choices of four experts are counted in the four bytes of a word, in a quarter of the instructions of counting
    each by itself. A byte gets one choice at a time, at most MOST_LISTED / LEAST_COUNTED = 128 in all.
    """
    (count,), words = chosen_ref.shape, pl.next_power_of_2(pl.cdiv(experts, 4))
    step = min(pl.next_power_of_2(count), max(PAIRS // words, LEAST_COUNTED))

    def add(number, counted):
        _, chosen = _load(chosen_ref, number, step)
        is_own = (chosen >> 2)[None, :] == jnp.arange(words)[:, None]
        return counted + jnp.where(is_own, (1 << 8 * (chosen & 3))[None, :], 0)

    counted = jax.lax.fori_loop(0, pl.cdiv(count, step), add, jnp.zeros((words, step), jnp.int32))
    pairs = jnp.sum(counted[None] >> 8 * jnp.arange(2)[:, None, None] & 0x00FF00FF, axis=2)  # bytes 0 and 2, 1 and 3
    counts = (pairs[None] >> 16 * jnp.arange(2)[:, None, None] & 0xFFFF).reshape(4, words)
    counts = jnp.where(_experts_of(words) < experts, counts, 0)
    return counts, count - jnp.sum(counts)


def _find(chosen_ref, expert, first, experts, size):
    """Returns an expert's choices from a place on, as many as a block has; -1: none. `experts` has those of none."""
    places = pl.next_power_of_2(size)
    wanted = first + jnp.arange(places)
    step = min(pl.next_power_of_2(chosen_ref.shape[0]), max(1, PAIRS // places))

    def find(number, carry):
        seen, indices = carry
        index, chosen = _load(chosen_ref, number, step)
        is_none = ((chosen < 0) | (chosen >= experts)) & (index < chosen_ref.shape[0])
        is_own = (chosen == expert) | is_none & (expert == experts)
        up_to = seen + jnp.cumsum(is_own.astype(jnp.int32))
        is_wanted = is_own[None, :] & (up_to[None, :] - 1 == wanted[:, None])
        indices = jnp.where(is_wanted, index[None, :], indices)
        return seen + jnp.sum(is_own.astype(jnp.int32)), indices

    nothing = jnp.int32(0), jnp.full((places, step), -1, jnp.int32)
    _, indices = jax.lax.fori_loop(0, pl.cdiv(chosen_ref.shape[0], step), find, nothing)
    return jnp.where(jnp.arange(places) < size, jnp.max(indices, axis=1), -1)
