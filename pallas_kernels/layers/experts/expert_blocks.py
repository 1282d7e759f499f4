"""Finds the rows of each expert, in blocks of which a Pallas program multiplies one after another."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Int

# Most choices of all rows that a program compares. Comparing 512 choices with the 16 places of a block takes 64 values
# of each of 128 threads; more would not fit into their registers. Lists need nine launches more.
MOST_CHOICES = 512
# Rows of a block: the smallest side of a product on tensor cores, and for many rows more. Values of packed weights take
# registers when they are unpacked, so these have smaller blocks.
FEW_ROWS, MANY_ROWS, MANY_ROWS_OF_PACKED = 16, 64, 32


class ExpertBlocks(NamedTuple):
    """Blocks of choices, each of one expert; choice j of row t of T has the index j * T + t."""

    expert: Int[Array, " blocks"]  # expert of each block; the number of experts: choices of none; one more: unused
    choices: Int[Array, "blocks size"]  # indices of the block's choices; -1: none


def blocks_of(chosen: Int[Array, " choices"], experts: int, size: int) -> ExpertBlocks:
    """Returns the choices in blocks of at most `size` choices of one expert, in the order of their indices.

    Args:
        chosen: expert of each choice; an index outside of 0 to experts - 1 means none.
        experts: number of experts.
        size: number of choices of a full block.
    """
    count = chosen.shape[0]
    expert_of = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts)
    is_own = expert_of[:, None] == jnp.arange(experts + 1)
    up_to = jnp.cumsum(is_own, axis=0, dtype=jnp.int32)  # number of choices of each expert up to each choice
    position = jnp.sum(jnp.where(is_own, up_to, 0), axis=1) - 1
    needed = -(-up_to[-1] // size)
    first = jnp.cumsum(needed) - needed
    block = first[expert_of] + position // size
    blocks = blocks_count(count, experts, size)
    expert = jnp.full(blocks, experts + 1, jnp.int32).at[block].set(expert_of)
    choices = jnp.full((blocks, size), -1, jnp.int32).at[block, position % size].set(jnp.arange(count, dtype=jnp.int32))
    return ExpertBlocks(expert, choices)


def blocks_count(count: int, experts: int, size: int) -> int:
    """Returns the most blocks that `count` choices take; the last block of an expert may not be full."""
    return min(count, experts + 1) + count // size


class ExpertPlan(NamedTuple):
    """How the Pallas programs of one tile of columns find their blocks."""

    lists: tuple[Array, ...]  # arrays that the kernel reads: the choices, or the arrays of `ExpertBlocks`
    programs: int  # number of programs
    size: int  # choices of a block
    is_listed: bool  # whether the blocks are listed
    is_by_choice: bool  # whether a program that finds its blocks has the expert of a choice


def plan(chosen: Int[Array, " choices"], experts: int, *, is_packed: bool, deterministic: bool) -> ExpertPlan:
    """Returns how programs find blocks.

    Args:
        chosen: expert of each choice.
        experts: number of experts.
        is_packed: whether the weights are packed.
        deterministic: whether blocks have the same size for all numbers of choices.
    """
    count = chosen.shape[0]
    if count <= MOST_CHOICES and not deterministic:
        programs = min(count, experts + 1)
        return ExpertPlan((chosen,), programs, FEW_ROWS, is_listed=False, is_by_choice=programs == count)
    many = MANY_ROWS_OF_PACKED if is_packed else MANY_ROWS
    size = many if deterministic or count > FEW_ROWS * experts else FEW_ROWS
    lists = blocks_of(chosen, experts, size)
    return ExpertPlan(lists, lists.expert.shape[0], size, is_listed=True, is_by_choice=False)


def own_choices(chosen_ref, experts, is_by_choice):
    """Returns the expert of a program, the indices of all choices, and each one's place among the expert's; -1: none.

    Args:
        chosen_ref: expert of each choice.
        experts: number of experts; also the expert of the choices of none.
        is_by_choice: whether the program has the expert of a choice; only the first choice of an expert has places.
    """
    program, index = pl.program_id(1), jnp.arange(pl.next_power_of_2(chosen_ref.shape[0]))
    chosen = pltriton.load(chosen_ref.at[index], mask=index < chosen_ref.shape[0], other=experts + 1)
    chosen = jnp.where((chosen >= 0) & (chosen < experts) | (index >= chosen_ref.shape[0]), chosen, experts)
    expert = jnp.sum(jnp.where(index == program, chosen, 0)) if is_by_choice else program
    is_own = chosen == expert
    if is_by_choice:
        is_own &= jnp.min(jnp.where(is_own, index, chosen_ref.shape[0])) == program
    return expert, index, jnp.where(is_own, jnp.cumsum(is_own.astype(jnp.int32)) - 1, -1)
