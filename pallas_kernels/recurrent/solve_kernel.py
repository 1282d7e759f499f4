"""The kernel for Hopper GPUs that computes what the tokens of a chunk read of each other; `prompt_chunks` has the form.

A CTA has a chunk and a value head. The tokens' products with each other need no state, so all chunks are computed at
once. The tensor cores that read the results get float32 numbers as two bfloat16 numbers, high and low.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.recurrent.prompt_kernel import CHUNK
from pallas_kernels.recurrent.warpgroup import Warpgroup, launch, lowered_once, tiled

COLUMNS = 8  # of an inverse that substitution takes as one array


@lowered_once("key_dim")
def solve(
    rows: tuple[Array, Array],
    summed: Float[Array, "chunks heads 2 tokens"],
    rates: Float[Array, "chunks heads 2 tokens"] | None,
    used: Int[Array, "1"],
    key_dim: int,
    *,
    interpret: Any = False,
) -> tuple[Float[Array, "chunks heads 2 tokens tokens"] | None, Float[Array, "chunks heads 2 tokens tokens"]]:
    """Return the inverse and the scores of each chunk (`ChunkTables`).

    With between_ji, the sum of the log decays behind token j up to token i, the scores are ``e^between_ji (k_j . q_i)``
    for j up to i, and the inverse is that of ``1 + rate_i e^between_ji (k_j . k_i)``, for j before i, times factor_j.

    Args:
        rows: queries and keys of the tokens of chunks [chunks, `CHUNK`, channels of all key heads], bfloat16.
        summed: log decays up to each token of the chunk in two parts, whose differences are added; float32.
        rates: rates of the tokens, then the factors of their values; float32. None: the inverse is not computed.
        used: number of chunks; the results of further ones are undefined.
        key_dim: channels of a key head.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # needs absl: imported only where it is used

    (chunks, heads), dtype = summed.shape[:2], rows[1].dtype
    registers, inputs = Warpgroup(plgpu, dtype, interpret), (*rows, summed, *(() if rates is None else (rates,)), used)

    def run(refs, *memory):
        (*read, used), outputs = refs[: len(inputs)], refs[len(inputs) :]
        is_used = jax.lax.axis_index("chunk") < used[0]
        pl.when(is_used)(_SolvedChunk(registers, read, outputs, _SolveMemory(*memory)).run)

    memory = _SolveMemory(
        queries=tiled(plgpu, (CHUNK, key_dim), dtype),
        keys=tiled(plgpu, (CHUNK, key_dim), dtype),
        summed=plgpu.SMEM((2, CHUNK), jnp.float32),
        weights=plgpu.SMEM((CHUNK // COLUMNS, CHUNK, COLUMNS), jnp.float32),
        parts=tiled(plgpu, (2, CHUNK, CHUNK), dtype),
        arrived=plgpu.Barrier(num_arrivals=3),
    )
    out = (jax.ShapeDtypeStruct((chunks, heads, 2, CHUNK, CHUNK), dtype),) * (1 if rates is None else 2)
    grid = {"head": heads, "chunk": chunks}
    *inverse, scores = launch(plgpu, run, "solve_chunks", grid, out, memory, inputs, interpret)
    return inverse[0] if inverse else None, scores


class _SolveMemory(NamedTuple):
    """The shared memory of a CTA of `solve`."""

    queries: Any
    keys: Any
    summed: Any
    weights: Any  # of the matrix whose inverse is wanted, [part, token, `COLUMNS`]
    parts: Any  # high and low part of the scores, then of the inverse
    arrived: Any


class _SolvedChunk:
    """The operations of one CTA of `solve`. Arrays [token, token] have a row for each token that is read."""

    def __init__(self, registers, inputs, outputs, memory):
        self.registers, self.plgpu, self.memory, self.outputs = registers, registers.plgpu, memory, outputs
        self.rows, (summed, *rates) = inputs[:2], inputs[2:]
        place = jax.lax.axis_index("chunk"), jax.lax.axis_index("head")
        self.place, self.summed, self.heads = place, summed.at[place], summed.shape[1]
        self.rates = rates[0].at[place] if rates else None

    def run(self):
        registers, memory, plgpu = self.registers, self.memory, self.plgpu
        chunk, head = self.place
        key_dim = memory.keys.shape[1]
        key_head = jax.lax.div(head, self.heads // (self.rows[1].shape[2] // key_dim))
        for rows, target in zip(self.rows, memory[:2], strict=True):
            source = rows.at[chunk, :, pl.ds(key_head * key_dim, key_dim)]
            plgpu.copy_gmem_to_smem(source, target, memory.arrived)
        plgpu.copy_gmem_to_smem(self.summed, memory.summed, memory.arrived)
        plgpu.barrier_wait(memory.arrived)
        # Rows and columns are loaded from different memory: one load could not serve both.
        exact, rest = (
            registers.per_column(memory.summed.at[part]) - registers.per_row(self.summed.at[part], CHUNK)
            for part in (0, 1)
        )
        between = jnp.exp(jnp.minimum(exact + rest, 0.0))
        read, reader = registers.index(0, CHUNK), registers.index(1, CHUNK)
        scores = jnp.where(read <= reader, between * self.products(memory.queries), 0.0)
        if self.rates is None:
            self.store(scores, self.outputs[0])
            plgpu.wait_smem_to_gmem(0)
            return
        weights = between * self.products(memory.keys) * registers.per_column(self.rates.at[0])
        weights = jnp.where(read < reader, weights, 0.0)
        for index, first in enumerate(range(0, CHUNK, COLUMNS)):
            memory.weights[index] = registers.cast(weights[:, first : first + COLUMNS])
        self.store(scores, self.outputs[1])
        inverse = registers.cast(jnp.concatenate(self.solved(), axis=1)) * registers.per_row(self.rates.at[1], CHUNK)
        plgpu.wait_smem_to_gmem(0)
        self.store(inverse, self.outputs[0])
        plgpu.wait_smem_to_gmem(0)

    def store(self, array, output):
        """Begins to store a high and a low part; all that the warpgroup has written to shared memory is readable."""
        for part, of in enumerate(self.registers.parts(array)):
            self.memory.parts[part] = of
        self.plgpu.commit_smem()
        self.plgpu.copy_smem_to_gmem(self.memory.parts, output.at[self.place])

    def products(self, rows):
        """Returns the products of each key with each row."""
        keys = self.memory.keys
        return self.registers.product((keys[...] if self.registers.interpret else keys, rows.T))

    def solved(self):
        """Returns the inverse of 1 + weights as arrays of `COLUMNS` columns, by substitution.

        For one token after another, its column times its weights is subtracted from the later columns.
        """
        registers = self.registers
        row, column = registers.index(0, COLUMNS), registers.index(1, COLUMNS)
        arrays = [registers.cast(jnp.where(row == column + first, 1.0, 0.0)) for first in range(0, CHUNK, COLUMNS)]
        for index, first in enumerate(range(0, CHUNK, COLUMNS)):  # the columns before `first` change no more

            def substitute(token, arrays, index=index, first=first):
                factor = registers.column(arrays[0], token)
                return [
                    registers.cast(of - factor * registers.per_column(self.memory.weights.at[place, first + token]))
                    for place, of in enumerate(arrays, index)
                ]

            arrays[index:] = jax.lax.fori_loop(0, COLUMNS, substitute, arrays[index:])
        return arrays
