"""What the kernels of the gated delta rule for Hopper GPUs share: operations of a warpgroup, and how it is launched.

Arrays [`HEIGHT`, n] lie in the registers of a warpgroup as `wgmma` has its results. The tensor cores get a float32
operand as two numbers of the dtype of tokens, high and low.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layers.hopper import HEIGHT

# Options of a kernel that has the barriers between stores and loads itself, and reduces only within a warp.
WITHOUT_BARRIERS = {"unsafe_no_auto_barriers": True, "reduction_scratch_bytes": 0}


def lowered_once(*static: str) -> Any:
    """Return a decorator of functions that run a kernel: all layers share what is traced and lowered.

    A kernel takes seconds to lower, so 48 layers of three kernels would take minutes.

    Args:
        static: names of further arguments that are no arrays, besides ``interpret``.
    """
    return partial(jax.jit, static_argnames=("interpret", *static))


def tiled(plgpu, shape, dtype, columns=None):
    """Returns shared memory in tiles of 8 rows and some columns, as the tensor cores read it; None: of 128 bytes."""
    size = jnp.dtype(dtype).itemsize
    columns = columns or 128 // size
    swizzle = plgpu.SwizzleTransform(columns * size)
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))


def launch(plgpu, run, name, grid, out, memory, inputs, interpret, **options):
    """Runs a kernel with one warpgroup for each place of a grid.

    Args:
        plgpu: the module of Mosaic GPU.
        run: function of the references of inputs and outputs, and of each piece of shared memory.
        name: name of the kernel.
        grid: sizes of the axes of the grid by name.
        out: shapes and dtypes of the outputs.
        memory: pieces of shared memory.
        inputs: arrays, or references to arrays that are changed in place.
        interpret: False, or jax's parameters for interpreting the kernel and detecting races.
        options: more of Mosaic GPU's compiler parameters.
    """

    def entry(*refs):
        pl.run_scoped(lambda *scoped: run(refs, *scoped), *memory, collective_axes="warpgroup")

    return plgpu.kernel(
        entry,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=False, **options
        ),
        interpret=interpret,
    )(*inputs)


def first_rows(position, count):
    """Returns the first rows of an array as a slice, for copies of more rows than the array has.

    Rows past its end are read as zeros, and are not stored. A slice with a constant beginning would be refused.

    Args:
        position: a number that is not constant and not negative.
        count: number of rows.
    """
    return pl.ds(jnp.minimum(position, 0) * 8, count)


class Warpgroup:
    """Loads, stores and products of one warpgroup, compiled or interpreted."""

    def __init__(self, plgpu: Any, dtype: Any, interpret: Any) -> None:
        """Take the module of Mosaic GPU, and the dtype of tokens."""
        self.plgpu, self.dtype, self.interpret = plgpu, dtype, bool(interpret)
        self.layout = plgpu.Layout.WGMMA

    def load(self, ref, layout=None):
        """Loads an array from global memory, or a vector from any memory; rows begin at multiples of 8 bytes."""
        if self.interpret:
            return ref[...]
        return self.plgpu.load(ref, layout=layout or self.layout, optimized=False)

    def per_column(self, ref):
        """Loads a value for each column, [`HEIGHT`, n]."""
        values = self.load(ref, self.layout.reduce(0))
        return jax.lax.broadcast_in_dim(values, (HEIGHT, *values.shape), [1])

    def per_row(self, ref, columns):
        """Loads a value for each row, [`HEIGHT`, columns]."""
        return jax.lax.broadcast_in_dim(self.load(ref, self.layout.reduce(1)), (HEIGHT, columns), [0])

    def index(self, axis, columns, rows=HEIGHT, layout=None):
        """Returns the index of each element of [rows, columns] along an axis."""
        if self.interpret:
            return jax.lax.broadcasted_iota(jnp.int32, (rows, columns), axis)
        return self.plgpu.broadcasted_iota(jnp.int32, (rows, columns), axis, layout=layout or self.layout)

    def column(self, array, index, count=None):
        """Returns one of the first ``count`` columns of an array [`HEIGHT`, n] in registers, in all n columns."""
        first = array[:, :count]
        values = jnp.sum(jnp.where(self.index(1, first.shape[1]) == index, first, 0.0), axis=1)
        return jax.lax.broadcast_in_dim(values, array.shape, [0])

    def cast(self, array):
        """Returns an array in the registers' layout."""
        return array if self.interpret else self.plgpu.layout_cast(array, self.layout)

    def read(self, ref):
        """Reads an array in shared memory."""
        return ref[...] if self.interpret else self.plgpu.load(ref, layout=self.layout)

    def read_transposed(self, ref):
        """Reads the transposed of an array in shared memory."""
        if self.interpret:
            return ref[...].T
        return self.cast(self.plgpu.load(ref.T, layout=self.plgpu.Layout.WGMMA_TRANSPOSED))

    def store_transposed(self, ref, array, is_tiled=True):
        """Stores the transposed of an array in shared memory."""
        if self.interpret:
            ref[...] = array.T
            return
        array = self.plgpu.layout_cast(array, self.plgpu.Layout.WGMMA_TRANSPOSED)
        if is_tiled or not hasattr(self.plgpu, "store"):
            ref.T[...] = array
        else:  # jax from 0.12 on compiles stores that conflict over banks only if told so
            self.plgpu.store(ref.T, array, optimized=False)

    def parts(self, array):
        """Returns a float32 array as two arrays of the dtype of tokens, high and low."""
        high = array.astype(self.dtype)
        return high, (array - high.astype(jnp.float32)).astype(self.dtype)

    def product(self, *pairs, to=None):
        """Returns the sum of the products of arrays in registers and in shared memory, added to an array if given."""
        if self.interpret:  # the interpreter has no `wgmma` with an operand in registers
            return sum((self.dot(a, b) for a, b in pairs), 0.0 if to is None else to)

        def add(sums):
            self.multiply(sums, *pairs)
            self.plgpu.wgmma_wait(0)

        def run(sums):
            add(sums)
            return sums[...]

        if to is None:
            return pl.run_scoped(run, self.plgpu.ACC((HEIGHT, pairs[0][1].shape[1]), jnp.float32))
        return pl.run_state(add)(self.plgpu.ACC.init(to))

    def multiply(self, sums, *pairs):
        """Begins to add products to sums of the tensor cores."""
        for a, b in pairs:
            self.plgpu.wgmma(sums, a, b)

    def dot(self, a, b):
        """Returns a product as the interpreter computes it."""
        return jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32), precision="highest")
