"""The type checker that jaxtyping's import hook applies in tests to the packages' functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
from beartype import beartype
from jaxtyping import AbstractArray


def arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype to the arrays of a signature; other arguments are left to the function's own checks.

    Constructors stay unchecked: jax rebuilds records with placeholders, shapes and stacked arrays for fields. So do
    calls with shapes in place of arrays, by which tests compile for devices that are not there.
    """
    hints = {name: hint for name, hint in function.__annotations__.items() if _names_array(hint)}
    if function.__name__ == "__init__" or not hints:
        return function
    function.__annotations__ = hints
    checked = beartype(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        is_abstract = any(isinstance(one, jax.ShapeDtypeStruct) for one in (*args, *options.values()))
        return (function if is_abstract else checked)(*args, **options)

    return call


def _names_array(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_names_array(part) for part in get_args(hint))
