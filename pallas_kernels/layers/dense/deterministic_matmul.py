"""A batch-invariant matrix product, which sums each row in the same order for any number of rows.

    parts[s, t, n] = sum_k x[t, k] w[n, k]  over the s-th of S equal parts of k;   the sum over s is x @ w.T

Libraries choose tiles, instructions and the division of the sum over k by the shape of x. So the last bits of a row's
result change with the number of rows. This kernel chooses them by the weight's shape alone. Every Pallas program holds
64 rows of x, padded if there are fewer, and executes the same instructions.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.layers.adapted import Adapted
from pallas_kernels.layers.dense.split_kernel import INNER_BYTES, LEAST_INNER, LEAST_OUT, NARROW_OUT, WIDEST_OUT
from pallas_kernels.layers.partial_sums import PartialSums, add_adapters, join
from pallas_kernels.layers.quantize_rows import Activation, gated
from pallas_kernels.layers.row_by_row import row_by_row, row_by_row_off_gpu
from pallas_kernels.layers.shard import Shard

ROWS = 64  # rows of x, and rows of the weight, per Pallas program; with 16 rows Triton uses other instructions


def fixed_parts(out: int, inner: int, dtype: jnp.dtype) -> int:
    """Returns how many parts the sum over k is divided into, for a weight [out, inner] of this dtype."""
    if not LEAST_OUT <= out <= WIDEST_OUT or inner < LEAST_INNER or inner % (4 * (INNER_BYTES // dtype.itemsize)):
        return 1
    return 4 if out <= NARROW_OUT else 2


def _reference(x, weight, *, parts, dtype):
    def product(x):
        pieces, weights = (array.reshape(array.shape[0], parts, -1) for array in (x, weight))
        exact = {"preferred_element_type": jnp.float32, "precision": jax.lax.Precision.HIGHEST}
        return jnp.einsum("tpk,npk->tpn", pieces, weights, **exact).astype(dtype)

    return row_by_row(product, x).swapaxes(0, 1)


def _kernel(
    # inputs
    x_ref,  # [T, K]
    weight_ref,  # [N, K], in the dtype of x
    # outputs
    parts_ref,  # [parts, T, N]
    # static parameters
    *,
    rows,  # T
    steps,  # loop iterations per part of k
    inner,  # values of k per loop iteration
    precision,  # precision of the matrix products
):
    """Multiplies `ROWS` rows of x by `ROWS` rows of the weight, over a part of k, in one Pallas program.

    The weight is the first operand of the tensor-core product.
    """
    part = pl.program_id(2)
    row = pl.program_id(0) * ROWS + jnp.arange(ROWS)
    out = pl.program_id(1) * ROWS + jnp.arange(ROWS)
    is_row = row < rows

    def step(index, total):
        column = (part * steps + index) * inner + jnp.arange(inner)[None, :]
        x = pltriton.load(x_ref.at[row[:, None], column], mask=is_row[:, None])  # padding rows are not stored
        weight = pltriton.load(weight_ref.at[out[:, None], column])
        return total + pltriton.dot(weight, x, trans_b=True, precision=precision)

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((ROWS, ROWS), jnp.float32))
    at = parts_ref.at[part, row[None, :], out[:, None]]
    pltriton.store(at, total.astype(parts_ref.dtype), mask=is_row[None, :])


def _pallas(x, weight, *, parts, dtype, interpret):
    (rows, inner), out = x.shape, weight.shape[0]
    columns = INNER_BYTES // weight.dtype.itemsize
    # Three TF32 products are as exact as one float32 product, and run on tensor cores. A CPU has no TF32.
    wide = x.dtype == jnp.float32 and not interpret
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if wide else jax.lax.Precision.HIGHEST
    options = {"rows": rows, "steps": inner // columns // parts, "inner": columns, "precision": precision}
    return pl.pallas_call(
        functools.partial(_kernel, **options),
        grid=(pl.cdiv(rows, ROWS), out // ROWS, parts),  # neighbouring programs share rows of the weight
        out_shape=jax.ShapeDtypeStruct((parts, rows, out), dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=4 if wide else 6),
        interpret=interpret,
        name="deterministic_matmul",
    )(x, weight)


def unsupported_weight(weight: Array) -> str | None:
    """Returns a text that says which limit of the kernel a weight exceeds; None if the weight is supported."""
    (out, inner), columns = weight.shape, INNER_BYTES // weight.dtype.itemsize
    if out % ROWS or inner % columns:
        return f"the weight must be [multiple of {ROWS}, multiple of {columns}], got {weight.shape}"
    return None


def _unsupported(x: Array, weight: Array) -> str | None:
    """Returns a text that says which limit of the kernel a call exceeds; None if the call is supported."""
    if reason := unsupported_weight(weight):
        return reason
    if x.dtype != weight.dtype or x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"x and weight must be bfloat16, float16 or float32 alike, got {x.dtype} and {weight.dtype}"
    return None


def _gated_rows(x: Array, gate: Activation | None, implementation: Implementation) -> Array:
    """Returns activation(gate) * up of rows with gate and up side by side; with gate None the rows."""
    if gate is None:
        return x
    flat = x.reshape(-1, x.shape[-1])
    flat = row_by_row_off_gpu(functools.partial(gated, activation=gate), flat, implementation=implementation)
    return flat.reshape(*x.shape[:-1], -1)


@functools.partial(jax.jit, static_argnames=("dtype", "gate", "is_whole", "implementation"))
def deterministic_matmul(
    x: Float[Array, "*rows width"],
    weight: Float[Array, "out inner"] | Shard | Adapted,
    dtype: jnp.dtype | None = None,
    *,
    gate: Activation | None = None,
    is_whole: bool = False,
    implementation: Implementation = "auto",
) -> PartialSums:
    """Returns x @ weight.T as partial sums [parts, *rows, out]; the bits of a row do not depend on the number of rows.

    Args:
        x: activations [*rows, inner].
        weight: [out, inner].
        dtype: dtype of a single partial sum; None: x's dtype. Several partial sums are always float32.
        gate: activation function; x has gate and up side by side [*rows, 2 * inner], and activation(gate) * up is
            multiplied by the weight. None: x is multiplied.
        is_whole: return a single partial sum.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernel does not support the weight or the dtypes.
    """
    if isinstance(weight, Shard):
        multiply = functools.partial(deterministic_matmul, gate=gate, is_whole=is_whole, implementation=implementation)
        return join(multiply(x, weight.weight, jnp.float32), weight, jnp.float32, deterministic=True)
    if isinstance(weight, Adapted):
        multiply = functools.partial(deterministic_matmul, dtype=jnp.float32, implementation=implementation)
        sums = multiply(x, weight.weight, gate=gate, is_whole=is_whole)
        inputs = _gated_rows(x, gate, implementation)
        result_dtype = (dtype or x.dtype) if sums.shape[0] == 1 else jnp.float32
        return add_adapters(sums, inputs, weight, lambda x, w: multiply(x, w, is_whole=True)[0], result_dtype)
    (out, inner), rows = weight.shape, x.shape[:-1]
    flat = _gated_rows(x, gate, implementation).reshape(-1, inner)
    parts = 1 if is_whole else fixed_parts(out, inner, weight.dtype)
    options = {"parts": parts, "dtype": (dtype or x.dtype) if parts == 1 else jnp.float32}
    kernel, reference = functools.partial(_pallas, **options), functools.partial(_reference, **options)
    sums = dispatch(implementation, [Kernel(TRITON, kernel, _unsupported(x, weight))], reference, flat, weight)
    return sums.reshape(parts, *rows, out)
