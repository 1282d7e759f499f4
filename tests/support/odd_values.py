"""Random Python values of many types, for tests of wrong input."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from jspec import Eagle3, NGram, SamplingParams, Tree

TEXTS = ("", "a", " ", "chain:2", "chain:-1", "topk:3,2,2", "static:0,9", "none", "eagle3", "é\n", "\0", "\ud800")
NUMBERS = (0, 1, -1, 3, 255, 256, 2**31, 2**63, 10**30, 10**5000, 0.5, 1.0, -0.0, 1e300, float("nan"), float("inf"))


class BadRepr:
    """A value whose repr raises an error."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def odd_value(rng: random.Random, depth: int = 2) -> Any:
    """Draw a value; containers hold values of their own down to ``depth`` levels."""
    kinds: list[Callable[[random.Random], Any]] = [_scalar, _scalar, _text, _array, _object]
    if depth:
        kinds += [lambda rng: _container(rng, depth - 1)] * 3
    return rng.choice(kinds)(rng)


def _scalar(rng: random.Random) -> Any:
    return rng.choice([None, True, False, ..., 2j, Decimal("1.5"), rng.randrange(-5, 300), *NUMBERS])


def _text(rng: random.Random) -> Any:
    text = rng.choice([*TEXTS, "x" * 600, "".join(rng.choices("ab: ,.0123", k=rng.randrange(12)))])
    return rng.choice([text, text, text, text.encode("utf-8", "replace"), bytearray(3)])


def _array(rng: random.Random) -> Any:
    shape = rng.choice([(), (0,), (3,), (2, 2), (1, 1, 1)])
    dtype = rng.choice(["int32", "uint8", "float32", "bool", "complex64", "object", "U1", "datetime64[s]"])
    return np.zeros(shape, dtype)


def _object(rng: random.Random) -> Any:
    values = [object(), BadRepr(), int, Eagle3, NGram, len, iter([1, 2]), range(3), KeyError("x"), np.int64(4)]
    return rng.choice([*values, np.float32(1), Path("/no/such/folder"), Tree.chain(2), NGram(), SamplingParams()])


def _container(rng: random.Random, depth: int) -> Any:
    items = [odd_value(rng, depth) for _ in range(rng.randrange(4))]
    if rng.random() < 0.05:
        items = items * 500
    make = rng.choice([list, list, tuple, _set, _dict, _generator, _deep])
    return make(items)


def _set(items: list[Any]) -> Any:
    return {item for item in items if isinstance(item, (int, str))}


def _dict(items: list[Any]) -> Any:
    keys = random.Random(len(items)).sample(("role", "content", "prompt", "max_tokens", "5", "temperature", 5), 4)
    return {key: value for key, value in zip((*keys, 5), items, strict=False) if key}


def _generator(items: list[Any]) -> Iterator[Any]:
    return (item for item in items)


def _deep(items: list[Any]) -> Any:
    value: Any = items
    for _ in range(3000):
        value = [value]
    return value
