"""Test that --typecheck checks the arrays of both packages; without it, no other test would tell."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jspec.verify.rejection import try_token
from pallas_kernels.attention.rope_append import rotate
from tests.support.arrays import on_device

CALLS = {
    "jspec": (try_token, ((2, 3), (2, 3)), on_device(np.zeros(2, jnp.int32)), on_device(np.zeros(3, jnp.int32))),
    "pallas_kernels": (rotate, ((2, 3, 1, 8),), on_device(np.ones((2, 2, 3, 4))), on_device(np.ones((2, 2, 4, 4)))),
}


@pytest.mark.parametrize("package", CALLS)
def test_array_of_another_size_than_its_neighbours_is_refused_under_typecheck(
    request: pytest.FixtureRequest, package: str
) -> None:
    if not request.config.getoption("--typecheck"):
        pytest.skip("needs --typecheck")
    function: Callable[..., object]
    function, shapes, fits, other = CALLS[package]
    arrays: list[jax.Array] = [on_device(np.ones(shape)) for shape in shapes]
    assert function.__module__.startswith(package)
    function(*arrays, fits)
    with pytest.raises(TypeCheckError, match=rf"the parameters of {function.__module__}\.{function.__name__}\."):
        function(*arrays, other)
