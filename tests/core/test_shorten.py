"""Values shortened for error messages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from jspec.core.shorten import LIMIT, short

pytestmark = pytest.mark.once


class Unprintable:
    def __repr__(self) -> str:
        raise KeyError("odd")

    def __len__(self) -> int:
        raise KeyError("odd")


@pytest.mark.parametrize("value", [None, 1.5, "text", (1, 2), [-1], {1: 2.0}, {3}, "\ud800", 2**255, True, ("a",) * 6])
def test_shortened_text_of_a_short_value_is_its_repr(value: Any) -> None:
    assert short(value) == repr(value)


@pytest.mark.parametrize(
    ("value", "beginning", "end"),
    [
        ("ab" * 10**6, "'abab", "' (length 2000000)"),
        (list(range(10**6)), "[0, 1, 2, 3, 4, 5, ...]", "(length 1000000)"),
        (tuple(range(7)), "(0, 1, 2, 3, 4, 5, ...)", "(length 7)"),
        ({i: i for i in range(10**5)}, "{0: 0, 1: 1", "(length 100000)"),
        (set(range(10**5)), "{", "(length 100000)"),
        (10**10000, "<int of 33220 bits>", "bits>"),
        ([["x" * 1000] * 1000] * 1000, "[['xxx", "... (length 1000)"),
        ([10**5000], "[<int of 16610 bits>]", "]"),
        (Unprintable(), "<Unprintable instance", ">"),
        (np.zeros(10**6), "array([0., 0., 0.", ")"),
    ],
    ids=["text", "list", "tuple", "dict", "set", "int", "nested", "int in a list", "odd", "array"],
)
def test_shortened_text_of_a_long_value_has_its_beginning_and_size(value: Any, beginning: str, end: str) -> None:
    start = time.process_time()
    found = short(value)
    assert found.startswith(beginning) and found.endswith(end) and len(found) <= LIMIT
    assert time.process_time() - start < 0.1
