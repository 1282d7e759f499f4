"""The sums over k of an expert's weight times rows of x, inside the kernel of `expert_matmul`."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.layers.experts import mxfp4
from pallas_kernels.layers.packed import int4


def unpacked_sums(refs, halves, row, *, inner, group, precision):
    """Returns the sums [columns, rows] for each of `halves`.

    Scales of groups multiply the sums of a step; they are loaded a step ahead, as in `packed_sums`.

    Args:
        refs: arrays of the kernel by name: x [rows, K], weight [rows of all experts, K], and if the weight has scales
            of groups, group_scale [rows of all experts, groups].
        halves: indices of rows of the weight, one or two arrays of equal length.
        row: indices of rows of x.
        inner: values of k per loop iteration, a divisor of `group`.
        group: number of columns of a group.
        precision: precision of the products.
    """
    scale_ref = refs.get("group_scale")

    def scales_at(index):
        if scale_ref is None:
            return ()
        at = jnp.minimum(index * inner // group, scale_ref.shape[1] - 1)
        return tuple(pltriton.load(scale_ref.at[half, at])[:, None] for half in halves)

    def step(index, carry):
        k = (index * inner + jnp.arange(inner))[None, :]
        x = pltriton.load(refs["x"].at[row[:, None], k])
        weights = [pltriton.load(refs["weight"].at[half[:, None], k]).astype(x.dtype) for half in halves]
        products = [pltriton.dot(weight, x, trans_b=True, precision=precision) for weight in weights]
        totals, scales = carry
        products = [product * scale for product, scale in zip(products, scales, strict=True)] if scales else products
        return tuple(total + product for total, product in zip(totals, products, strict=True)), scales_at(index + 1)

    carry = _zeros(halves, row), scales_at(0)
    return jax.lax.fori_loop(0, refs["x"].shape[1] // inner, step, carry)[0]


def packed_sums(refs, expert, halves, row, *, kind, inner, group, interpret):
    """Returns the sums for a weight in int4 or mxfp4, as `unpacked_sums` does.

    The scales of int4 multiply the sums of a step, which has columns of one group only. Those of mxfp4 multiply the
    weight, which is exact. Scales are loaded a step ahead: loads of so few bytes are not asynchronous.

    Args:
        refs: arrays of the kernel by name: x [rows, whole steps], `ordered`; weight [experts, N, K / 2]; group_scale
            [experts, N, groups], and of int4 zeros [experts, N, groups], if the weight has zero points.
        expert: index of the expert.
        halves: indices of rows of its weight, as in `unpacked_sums`.
        row, inner: as in `unpacked_sums`.
        kind: kind of the weight.
        group: number of columns of a group.
        interpret: whether the kernel is interpreted.
    """
    (_, _, size), (_, _, groups) = refs["weight"].shape, refs["group_scale"].shape
    per_step, add = max(inner // group, 1), ADD[kind]

    def scales_at(index):
        at = jnp.minimum(index * inner // group + jnp.arange(per_step), groups - 1)[None, :]
        scale_refs = [refs[name] for name in ("group_scale", "zeros") if name in refs]
        return tuple(tuple(pltriton.load(ref.at[expert, half[:, None], at]) for ref in scale_refs) for half in halves)

    def step(index, carry):
        column = jnp.arange(inner // 2)[None, :]
        xs = [pltriton.load(refs["x"].at[row[:, None], index * inner + first + column]) for first in (0, inner // 2)]
        byte = index * (inner // 2) + column
        only = {} if 2 * size % inner == 0 else {"mask": byte < size, "other": 0}
        weights = [pltriton.load(refs["weight"].at[expert, half[:, None], byte], **only) for half in halves]
        totals = tuple(
            add(total, scales, packed, xs, interpret) for total, scales, packed in zip(*carry, weights, strict=True)
        )
        return totals, scales_at(index + 1)

    carry = _zeros(halves, row), scales_at(0)
    return jax.lax.fori_loop(0, refs["x"].shape[1] // inner, step, carry)[0]


def _add_mxfp4(total, scales, packed, xs, interpret):
    """Returns a total plus the sums of a step, of which `xs` are the rows of x for low and for high values."""
    (scale,) = scales
    for values, x in zip(mxfp4.products(packed, scale, interpret), xs, strict=True):
        total += pltriton.dot(values, x, trans_b=True)
    return total


def _add_int4(total, scales, packed, xs, interpret):
    scale, *zero = scales
    zero = jnp.broadcast_to(zero[0] if zero else int4.ZERO, packed.shape)
    low, high = int4.differences(packed, zero, xs[0].dtype, interpret)
    sums = pltriton.dot(low, xs[0], trans_b=True) + pltriton.dot(high, xs[1], trans_b=True)
    return total + sums * scale


def _zeros(halves, row):
    return tuple(jnp.zeros((len(half), len(row)), jnp.float32) for half in halves)


ADD = {"int4": _add_int4, "mxfp4": _add_mxfp4}
