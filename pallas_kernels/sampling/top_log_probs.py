"""Finds the k most probable tokens of each row and their log-probabilities, in two kernels without a sort.

    log p[i] = logits[i] - log sum_j exp(logits[j]);   the k largest, the smaller index first among equals

The first kernel divides a row into blocks, and stores the k largest logits and the log-sum-exp of each block. The
second kernel merges the blocks. Both kernels extract the maximum k times, so their time grows with k. `top` and
`top_in_order` find the k largest values of short rows in one kernel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int32

from pallas_kernels.dispatch import TRITON, Implementation, Kernel, dispatch
from pallas_kernels.sampling.ordered_floats import float_of, largest_bound, ordered

BLOCK = 1024  # logits that a Pallas program of the first kernel holds
MOST_KEPT = 4096  # most candidates that the second kernel can hold
OUT = np.int32(2**31 - 1)  # index of padding and of extracted values; it comes after all other indices
LEAST, ZERO = np.uint32(0x007FFFFF), np.uint32(0x80000000)  # minus infinity and 0 as `ordered` integers
MOST = np.uint32(0xFFFFFFFE)  # largest `ordered` integer used (for NaN, which comes first), so that adding 1 fits


def _largest(values, k):
    """Returns the k largest values of each row and their indices.

    0 and -0 count as equal, while `jax.lax.top_k` puts 0 before -0.
    """
    places = jax.lax.top_k(jnp.where(values == 0, 0.0, values), k)[1]
    return jnp.take_along_axis(values, places, axis=1), places


def _reference(logits, base, *shared, k):
    if shared:
        logits = logits + shared[0][shared[1]]
    best, ids = _largest(logits, k)
    log_probs = jnp.minimum(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True), 0.0)
    return (log_probs if base is None else base[:, None] + log_probs), ids


def _take_largest(values, ids, k, store):
    """Extracts the largest value k times, and calls store(rank, value, id) each time, inside a kernel.

    Among equal values, the value with the smallest id comes first. Values are compared as integers that have the same
    order, because a warp finds the maximum of integers in one instruction.
    """

    def step(rank, remaining):
        order, ids = remaining
        top = jnp.max(order)
        chosen = jnp.min(jnp.where(order == top, ids, OUT))
        store(rank, float_of(top), chosen)
        taken = ids == chosen  # replace its id too, or it would be found again among values of -inf
        return jnp.where(taken, LEAST, order), jnp.where(taken, OUT, ids)

    jax.lax.fori_loop(0, k, step, (_order(values), ids))


def _order(values):
    """Maps values to uint32 integers that have the same order, like `ordered`, but maps 0 and -0 to one integer."""
    order = jnp.minimum(ordered(values), MOST)
    return jnp.where(order == ZERO - 1, ZERO, order)


def _log_sum_exp(values):
    """Returns the logarithm of the sum of exp(values); -inf if all values are -inf."""
    top = jnp.max(values)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    return base + jnp.log(jnp.sum(jnp.exp(values - base)))


def _block_kernel(
    # inputs
    logits_ref,  # [rows, vocab] float32
    *refs,  # if there are any: shared_ref [count, vocab] float32, place_ref [rows] int32;
    # outputs: best_ref [rows, blocks, k] float32, largest logits; ids_ref [rows, blocks, k] int32;
    # sums_ref [rows, blocks] float32, log-sum-exp
    # static parameters
    vocab,
    k,
):
    """Finds the k largest logits and the log-sum-exp of one block of one row, in one Pallas program."""
    *shared_refs, best_ref, ids_ref, sums_ref = refs
    block, row = pl.program_id(0), pl.program_id(1)
    column = block * BLOCK + jnp.arange(BLOCK)
    values = pltriton.load(logits_ref.at[row, column], mask=column < vocab, other=-jnp.inf)
    if shared_refs:
        shared_ref, place_ref = shared_refs
        values += pltriton.load(shared_ref.at[place_ref[row], column], mask=column < vocab, other=0)
    sums_ref[row, block] = _log_sum_exp(values)

    def store(rank, top, chosen):
        best_ref[row, block, rank] = top
        ids_ref[row, block, rank] = chosen

    _take_largest(values, jnp.where(column < vocab, column, OUT), k, store)


def _merge_kernel(
    # inputs
    best_ref,  # as in `_block_kernel`, like the next two references
    ids_ref,
    sums_ref,
    *refs,  # base_ref [rows] float32, if there is one;
    # outputs: log_probs_ref [rows, k] float32, chosen_ref [rows, k] int32
    # static parameters
    blocks,
    kept,  # number of logits of each block
    k,
):
    """Merges all blocks of one row, in one Pallas program."""
    *base_ref, log_probs_ref, chosen_ref = refs
    row = pl.program_id(0)
    place = jnp.arange(pl.next_power_of_2(blocks * kept))
    inside, at = place < blocks * kept, (row, place // kept, place % kept)
    values = pltriton.load(best_ref.at[at], mask=inside, other=-jnp.inf)
    ids = pltriton.load(ids_ref.at[at], mask=inside, other=OUT)
    block = jnp.arange(pl.next_power_of_2(blocks))
    total = _log_sum_exp(pltriton.load(sums_ref.at[row, block], mask=block < blocks, other=-jnp.inf))

    def store(rank, top, chosen):
        log_prob = jnp.minimum(top - total, 0.0)
        log_probs_ref[row, rank] = base_ref[0][row] + log_prob if base_ref else log_prob
        chosen_ref[row, rank] = chosen

    _take_largest(values, ids, k, store)


def best_of_blocks(logits, *shared, k, interpret):
    """Returns the outputs of `_block_kernel`."""
    rows, vocab = logits.shape
    blocks = pl.cdiv(vocab, BLOCK)
    return pl.pallas_call(
        functools.partial(_block_kernel, vocab=vocab, k=k),
        grid=(blocks, rows),
        out_shape=[
            jax.ShapeDtypeStruct((rows, blocks, k), jnp.float32),
            jax.ShapeDtypeStruct((rows, blocks, k), jnp.int32),
            jax.ShapeDtypeStruct((rows, blocks), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="top_log_probs",
    )(logits, *shared)


def best_of_blocks_reference(logits, *, k):
    """Computes what `best_of_blocks` computes."""
    rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % BLOCK)), constant_values=-jnp.inf).reshape(rows, -1, BLOCK)
    best, places = _largest(padded.reshape(-1, BLOCK), k)
    best, places = (field.reshape(*padded.shape[:2], k) for field in (best, places))
    ids = places + BLOCK * jnp.arange(padded.shape[1], dtype=jnp.int32)[:, None]
    return best, jnp.where(ids < vocab, ids, OUT), jax.nn.logsumexp(padded, axis=-1)


def merge_blocks(best, ids, sums, *base, k, interpret):
    """Returns the outputs of `_merge_kernel`."""
    rows, blocks, kept = best.shape
    return pl.pallas_call(
        functools.partial(_merge_kernel, blocks=blocks, kept=kept, k=k),
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((rows, k), jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="top_log_probs_merge",
    )(best, ids, sums, *base)


def merge_blocks_reference(best, ids, sums, *base, k):
    """Computes what `merge_blocks` computes."""
    values, places = _largest(best.reshape(len(best), -1), k)
    log_probs = jnp.minimum(values - jax.nn.logsumexp(sums, axis=-1, keepdims=True), 0.0)
    chosen = jnp.take_along_axis(ids.reshape(len(ids), -1), places, axis=1)
    return (base[0][:, None] + log_probs if base else log_probs), chosen


def _pallas(logits, base, *shared, k, interpret):
    best = best_of_blocks(logits, *shared, k=k, interpret=interpret)
    return merge_blocks(*best, *([] if base is None else [base]), k=k, interpret=interpret)


def too_many_candidates(vocab: int, k: int, devices: int = 1) -> str | None:
    """Returns the text of an error if the blocks of all devices have more candidates than fit, else None."""
    if devices * pl.cdiv(vocab, BLOCK) * k > MOST_KEPT:
        return f"at most {MOST_KEPT} candidates fit: a vocabulary of {devices * vocab} allows no k of {k}"
    return None


def _unsupported(logits: Array, k: int) -> str | None:
    """Returns a text that says which limit of the kernels a call exceeds; None if the call is supported."""
    if logits.dtype != jnp.float32:
        return f"logits must be float32, got {logits.dtype}"
    return too_many_candidates(logits.shape[1], k)


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def top_log_probs(
    logits: Float[Array, "rows vocab"],
    k: int,
    *,
    base: Float[Array, " rows"] | None = None,
    shared: tuple[Float[Array, "count vocab"], Int32[Array, " rows"]] | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "rows k"], Int32[Array, "rows k"]]:
    """Returns the k largest natural log-probabilities of each row, largest first, and their token ids.

    Args:
        logits: float32 [rows, vocab]; tokens of -inf come last.
        k: at most the size of the vocabulary.
        base: number that is added to all log-probabilities of a row, after they are clipped to at most 0 [rows].
        shared: float32 logits that are added to those of rows, and the index of those of each row; None: none are.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and the kernels do not support the dtype or so many
            candidates.
    """
    kernel, reference = functools.partial(_pallas, k=k), functools.partial(_reference, k=k)
    kernels = [Kernel(TRITON, kernel, _unsupported(logits, k))]
    return dispatch(implementation, kernels, reference, logits, base, *(shared or ()))


def _top_reference(values, *, k, group):
    best, places = _largest(values, k)
    return best, places, places // group


def _top_kernel(
    # inputs
    values_ref,  # [rows, size] float32
    # outputs
    best_ref,  # [rows, k] float32
    places_ref,  # [rows, k] int32
    groups_ref,  # [rows, k] int32
    # static parameters
    *,
    size,
    k,
    group,
):
    """Finds the k largest values of one row, in descending order, in one Pallas program."""
    row, place = pl.program_id(0), jnp.arange(pl.next_power_of_2(size))
    values = pltriton.load(values_ref.at[row, place], mask=place < size, other=-jnp.inf)

    def store(rank, top, chosen):
        best_ref[row, rank] = top
        places_ref[row, rank] = chosen
        groups_ref[row, rank] = chosen // group

    _take_largest(values, jnp.where(place < size, place, OUT), k, store)


def _top_pallas(values, *, k, group, interpret):
    rows, size = values.shape
    return pl.pallas_call(
        functools.partial(_top_kernel, size=size, k=k, group=group),
        grid=(rows,),
        out_shape=[jax.ShapeDtypeStruct((rows, k), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="top",
    )(values)


@functools.partial(jax.jit, static_argnames=("k", "group", "implementation"))
def top(
    values: Float[Array, "rows size"], k: int, *, group: int = 1, implementation: Implementation = "auto"
) -> tuple[Float[Array, "rows k"], Int32[Array, "rows k"], Int32[Array, "rows k"]]:
    """Returns the k largest values of short rows, like `jax.lax.top_k`, in one kernel.

    XLA needs four operations for this: a copy, a sort and two slices.

    Args:
        values: float32 [rows, size].
        k: at most the size.
        group: number of neighbouring values that form a group.
        implementation: as in `paged_attention`.

    Returns:
        The k values of each row, largest first; their indices; and the indices of their groups (index // group).

    Raises:
        NotImplementedError: implementation is "pallas", and rows are longer than the kernel supports.
    """
    kernel, reference = (functools.partial(run, k=k, group=group) for run in (_top_pallas, _top_reference))
    return dispatch(implementation, [Kernel(TRITON, kernel, _too_long(values))], reference, values)


def _in_order_reference(values, *, k):
    return jnp.sort(_largest(values, k)[1], axis=1)


def _in_order_kernel(
    # inputs
    values_ref,  # [rows, size] float32
    # outputs
    places_ref,  # [rows, k] int32
    # static parameters
    *,
    size,
    k,
):
    """Finds the indices of the k largest values of one row, in ascending order, in one Pallas program."""
    row, place = pl.program_id(0), jnp.arange(pl.next_power_of_2(size))
    values = pltriton.load(values_ref.at[row, place], mask=place < size, other=-jnp.inf)
    order = jnp.where(place < size, _order(values), jnp.uint32(0))

    def count(chosen):
        return jnp.sum(chosen.astype(jnp.int32))

    # Find the k-th largest value by bisection. Choose all larger values, and the first ones of the values equal to it.
    # A running sum then gives each chosen value its rank.
    last = largest_bound(lambda c: count(order >= c), jnp.int32(k), jnp.min(order), jnp.max(order) + 1)
    above, equal = order > last, order == last
    chosen = above | (equal & (jnp.cumsum(equal.astype(jnp.int32)) <= k - count(above)))
    rank = jnp.where(chosen, jnp.cumsum(chosen.astype(jnp.int32)) - 1, k + place)
    # In interpret mode a store also writes the masked elements, so their ranks are past the end of the row.
    pltriton.store(places_ref.at[row, rank], place, mask=chosen)


def _in_order_pallas(values, *, k, interpret):
    rows, size = values.shape
    return pl.pallas_call(
        functools.partial(_in_order_kernel, size=size, k=k),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        compiler_params=pltriton.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="top_in_order",
    )(values)


@functools.partial(jax.jit, static_argnames=("k", "implementation"))
def top_in_order(
    values: Float[Array, "rows size"], k: int, *, implementation: Implementation = "auto"
) -> Int32[Array, "rows k"]:
    """Returns the indices of the k largest values of each row in ascending order, with one kernel instead of two sorts.

    Among equal values, the values with the smallest indices are chosen.

    Args:
        values: float32 [rows, size].
        k: at most the size.
        implementation: as in `paged_attention`.

    Raises:
        NotImplementedError: implementation is "pallas", and rows are longer than the kernel supports.
    """
    kernel, reference = (functools.partial(run, k=k) for run in (_in_order_pallas, _in_order_reference))
    return dispatch(implementation, [Kernel(TRITON, kernel, _too_long(values))], reference, values)


def _too_long(values: Array) -> str | None:
    """Returns the text of an error if rows are longer than a kernel can hold, else None."""
    return None if values.shape[1] <= MOST_KEPT else f"rows of at most {MOST_KEPT}, got {values.shape[1]}"
