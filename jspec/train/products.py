"""Products that are summed in float32, and whose gradients are products of the model's dtype too."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum32(spec: str, a: Array, b: Array) -> Array:
    """Return `jnp.einsum` of two arrays, multiplied in the dtype of the first, summed and returned in float32.

    The gradient of the result is rounded to this dtype before it is multiplied; jax would multiply it in float32, which
    takes several times as long on a GPU. Gradients have the dtypes of their arrays.

    Args:
        spec: two terms and a result, such as "th,vh->tv"; each axis is in two of the three.
        a, b: the arrays.
    """
    return _product(spec, a, b.astype(a.dtype))


def _product(spec: str, a: Array, b: Array) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _forward(spec: str, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return einsum32(spec, a, b), (a, b)


def _backward(spec: str, arrays: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    (a, b), terms, result = arrays, *spec.split("->")
    left, right = terms.split(",")
    rounded = gradient.astype(a.dtype)
    of_a = _product(f"{result},{right}->{left}", rounded, b.astype(a.dtype))
    of_b = _product(f"{result},{left}->{right}", rounded, a)
    return of_a.astype(a.dtype), of_b.astype(b.dtype)


einsum32.defvjp(_forward, _backward)
