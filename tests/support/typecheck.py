"""The type checker that jaxtyping's import hook applies in tests to the packages' functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype to the arrays of a signature; other arguments are left to the function's own checks.

    Constructors stay unchecked: jax rebuilds records with placeholders, shapes and stacked arrays for fields.
    """
    hints = {name: hint for name, hint in function.__annotations__.items() if _names_array(hint)}
    if function.__name__ == "__init__" or not hints:
        return function
    function.__annotations__ = hints
    return beartype(function)


def _names_array(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(_names_array(part) for part in get_args(hint))
