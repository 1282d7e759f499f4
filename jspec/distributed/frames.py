"""The messages between the processes of a job: fields as JSON, and arrays as their bytes. Nothing is unpickled.

A frame is the lengths of both parts in bytes (two unsigned 64-bit numbers, big endian), the JSON text, and the arrays
one after another. The JSON has the fields of the message, and under "arrays" dtype and shape of each array.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LENGTHS = struct.Struct(">QQ")
MAX_TEXT = 2**24  # largest JSON text of a message, in bytes
MAX_DATA = 2**31  # largest size of a message's arrays, in bytes
DTYPES = ("bool", "int8", "uint8", "int16", "int32", "uint32", "float32")

Read = Callable[[int], bytes]  # function that reads this number of bytes


@dataclass(frozen=True)
class Message:
    """A message of one process to another.

    Attributes:
        kind: what the message is about, which selects its reader.
        fields: values that JSON can express.
        arrays: arrays with a dtype of `DTYPES`.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()


class BadFrame(ValueError):
    """Bytes that are no message."""


def encode(message: Message) -> bytes:
    """Return a message as a frame.

    Raises:
        ValueError: an array has another dtype, or the message is too large.
    """
    arrays = [np.ascontiguousarray(array).reshape(np.shape(array)) for array in message.arrays]
    if wrong := [array.dtype.name for array in arrays if array.dtype.name not in DTYPES]:
        raise ValueError(f"message: expected arrays of {', '.join(DTYPES)}, got {wrong[0]}")
    shapes = [[array.dtype.name, *array.shape] for array in arrays]
    text = json.dumps({"kind": message.kind, "fields": message.fields, "arrays": shapes}).encode()
    data = b"".join(array.tobytes() for array in arrays)
    _check_size(len(text), len(data))
    return LENGTHS.pack(len(text), len(data)) + text + data


def decode(read: Read) -> Message:
    """Read one frame.

    Raises:
        BadFrame: the bytes are no message; the message says what is wrong.
    """
    lengths = LENGTHS.unpack(read(LENGTHS.size))
    _check_size(*lengths)
    text, data = (read(length) for length in lengths)
    try:
        parsed = json.loads(text)
        kind, fields, shapes = parsed["kind"], parsed["fields"], parsed["arrays"]
        sizes = [(np.dtype(name), tuple(shape)) for name, *shape in shapes if name in DTYPES]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadFrame(f"expected a message, got an error: {error!s:.100}") from None
    if not (isinstance(kind, str) and isinstance(fields, dict) and len(sizes) == len(shapes)):
        raise BadFrame("expected a message of kind, fields and arrays, got something else")
    return Message(kind, fields, _split(data, sizes))


def _check_size(text: int, data: int) -> None:
    if text > MAX_TEXT or data > MAX_DATA:
        raise BadFrame(f"expected at most {MAX_TEXT} bytes of text and {MAX_DATA} of arrays, got {text} and {data}")


def _split(data: bytes, sizes: Sequence[tuple[np.dtype, tuple[Any, ...]]]) -> list[np.ndarray]:
    """Return the arrays whose bytes follow each other in ``data``."""
    arrays, first = [], 0
    for dtype, shape in sizes:
        if not all(type(size) is int and size >= 0 for size in shape):
            raise BadFrame(f"expected the sizes of an array, got {shape!r:.100}")
        count = math.prod(shape)
        if first + count * dtype.itemsize > len(data):
            raise BadFrame(f"expected the bytes of an array {dtype}{list(shape)}, got too few")
        try:
            arrays.append(np.frombuffer(data, dtype, count, first).reshape(shape))
        except (ValueError, OverflowError) as error:  # more dimensions or elements than numpy can express
            raise BadFrame(f"expected the sizes of an array, got {shape!r:.100} ({error})") from None
        first += count * dtype.itemsize
    if first != len(data):
        raise BadFrame(f"expected {first} bytes of arrays, got {len(data)}")
    return arrays
