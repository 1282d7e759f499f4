"""Test that messages arrive as they were sent, and that other bytes are refused."""

from __future__ import annotations

import io
import json
from contextlib import suppress

import numpy as np
import pytest

from jspec.distributed.frames import DTYPES, LENGTHS, BadFrame, Message, decode, encode


def read_all(frame: bytes) -> Message:
    return decode(io.BytesIO(frame).read)


def frame_of(value: object, data: bytes = b"") -> bytes:
    text = json.dumps(value).encode()
    return LENGTHS.pack(len(text), len(data)) + text + data


def test_message_of_every_dtype_and_shape_arrives_as_sent() -> None:
    rng = np.random.default_rng(0)
    shapes = [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]
    arrays = [(rng.random(shape) * 3).astype(dtype) for dtype in DTYPES for shape in shapes]
    arrays.append(np.arange(12, dtype=np.int32).reshape(3, 4).T)  # not contiguous
    sent = Message("call", {"number": 7, "name": "é", "nested": {"a": [1, None]}}, arrays)
    found = read_all(encode(sent))
    assert (found.kind, found.fields) == (sent.kind, sent.fields) and len(found.arrays) == len(arrays)
    for one, other in zip(found.arrays, arrays, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["text"]), np.zeros(2, np.complex64)])
def test_array_of_another_dtype_is_not_sent(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected arrays of bool"):
        encode(Message("call", {}, [array]))


RIGHT = {"kind": "call", "fields": {}, "arrays": []}


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (LENGTHS.pack(2**40, 0), "at most"),
        (LENGTHS.pack(2, 2**40), "at most"),
        (LENGTHS.pack(2, 0) + b"\xff\xfe", "expected a message, got an error"),
        (LENGTHS.pack(6, 0) + b"cos\nsy", "expected a message, got an error"),
        (frame_of([]), "got an error"),
        (frame_of({"kind": "call"}), "got an error"),
        (frame_of({**RIGHT, "kind": 3}), "got something else"),
        (frame_of({**RIGHT, "fields": []}), "got something else"),
        (frame_of({**RIGHT, "arrays": [["object", 1]]}, b"12345678"), "got something else"),
        (frame_of({**RIGHT, "arrays": [["int32", -1]]}), "sizes of an array"),
        (frame_of({**RIGHT, "arrays": [["int32", "2"]]}), "sizes of an array"),
        (frame_of({**RIGHT, "arrays": [["int32", 2**62]]}), "too few"),
        (frame_of({**RIGHT, "arrays": [["int32", 2]]}, b"1234"), "too few"),
        (frame_of({**RIGHT, "arrays": [["int32", *[1] * 65]]}, b"1234"), "sizes of an array"),
        (frame_of({**RIGHT, "arrays": [["int32", 0, 2**70]]}), "sizes of an array"),
        (frame_of({**RIGHT, "arrays": [["int32", 0, *[2**31] * 3]]}), "sizes of an array"),
        (frame_of(RIGHT, b"1234"), "expected 0 bytes of arrays, got 4"),
    ],
)
def test_bytes_that_are_no_message_are_refused(frame: bytes, expected: str) -> None:
    with pytest.raises(BadFrame, match=expected):
        read_all(frame)


def test_random_bytes_are_refused_or_a_message() -> None:
    """Bytes of a right frame are changed one after the other."""
    right = encode(Message("call", {"number": 7}, [np.arange(3, dtype=np.int32)]))
    for at in range(LENGTHS.size, len(right)):
        for value in (0, 34, 91, 255):
            changed = right[:at] + bytes([value]) + right[at + 1 :]
            with suppress(BadFrame):
                assert isinstance(read_all(changed), Message)
