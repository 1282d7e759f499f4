"""Test typed reading of JSON files: a value that is out of range or has a wrong type, depth or size is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from convert.fields import MAX_DEPTH, CheckpointError, Fields, cut, listed, named, read_json, short
from convert.sources import is_finite

pytestmark = pytest.mark.once

READERS: dict[str, tuple[Callable[[Fields, str], Any], list[Any]]] = {  # method, and the values that it accepts
    "integer": (Fields.integer, [1, 7, 2**31 - 1]),
    "number": (Fields.number, [1, 7, 2**31 - 1, 2**31, 97.5]),
    "flag": (Fields.flag, [True, False]),
    "text": (Fields.text, ["", "llama"]),
    "texts": (Fields.texts, [[], ["a", "b"]]),
    "integers": (Fields.integers, [[], [0, 1]]),
    "object": (Fields.object, [{}, {"a": 1}]),
}
VALUES: list[Any] = [
    1, 7, 0, -1, 2**31 - 1, 2**31, 10**30, 10**400, 97.5, 1e-300, 0.0, -1.5, float("inf"), float("nan"), True, False,
    "", "llama", [], ["a", "b"], ["a", 1], [0, 1], [True], [-1], [1.0], [None], {}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_fields_reader_accepts_only_values_of_its_type_and_range(reader: str) -> None:
    read, accepted = READERS[reader]
    for value in VALUES:
        fields = Fields({"key": value}, "folder/config.json")
        if any(type(value) is type(good) and value == good for good in accepted):
            got = read(fields, "key")
            assert (dict(got) if reader == "object" else got) == (float(value) if reader == "number" else value)
        else:
            with pytest.raises(
                CheckpointError, match=r"^folder/config\.json: key: expected .*, got .*; correct the file$"
            ):
                read(fields, "key")


def test_fields_absent_and_null_values_return_the_default() -> None:
    fields = Fields({"null": None})
    for name in ("null", "absent"):
        assert (fields.integer(name, 5), fields.number(name, 0.5), fields.text(name, "x")) == (5, 0.5, "x")
        assert (fields.flag(name), fields.texts(name), fields.integers(name)) == (False, [], [])
        assert dict(fields.object(name)) == {}
        with pytest.raises(CheckpointError, match=f"{name}: expected an integer, got [Nn]one;"):
            fields.integer(name)


def test_fields_error_in_a_nested_object_names_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: rope_scaling: factor: expected a number, got 'x'"):
        Fields({"rope_scaling": {"factor": "x"}}).object("rope_scaling").number("factor")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "expected JSON, got an error"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "expected a"),
        (b"\xff\xfe", "expected a text in UTF-8"),
        (b"[" * 10_000 + b"]" * 10_000, f"at most {MAX_DEPTH} levels"),
        (b"[" * 900 + b"]" * 900, f"at most {MAX_DEPTH} levels"),
        (b'{"a": ' * MAX_DEPTH + b"[1]" + b"}" * MAX_DEPTH, f"at most {MAX_DEPTH} levels"),
        (b'{"a": ' + b"9" * 5000 + b"}", "expected JSON, got an error"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "got a git-lfs pointer to it; run `git lfs pull`",
        ),
    ],
)
def test_read_json_of_wrong_content_raises_a_short_error_naming_the_file(
    tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read_json(file)
    assert str(error.value).startswith(f"{file}: ") and message in str(error.value) and len(str(error.value)) < 500


def test_read_json_of_the_deepest_allowed_object_returns_it(tmp_path: Path) -> None:
    content: Any = 1
    for _ in range(MAX_DEPTH):
        content = {"ä": content}
    (tmp_path / "a.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    assert read_json(tmp_path / "a.json")["ä"] == content["ä"]


def test_long_text_in_an_error_keeps_its_beginning_and_end() -> None:
    text = cut("begin " + "x" * 10_000 + " end")
    assert len(text) <= 480 and text.startswith("begin ") and text.endswith(" end")
    assert short([[[[["x" * 10_000] * 1000]]]]) == "[[[[...]]]]"
    assert len(short("x" * 10_000)) <= 100 and len(short({str(i): "y" * 50 for i in range(1000)})) <= 100
    assert listed("abc") == "a, b, c" and listed(map(str, range(10))) == "0, 1, 2 and 7 more"
    assert listed(["a\nb", "\ud800"]) == "'a\\nb', '\\ud800'"


def test_error_context_adds_the_place_once_and_keeps_the_error_class() -> None:
    with pytest.raises(CheckpointError, match=r"^outer: inner: wrong$"), named("outer"):
        raise CheckpointError("inner", "wrong")
    with pytest.raises(CheckpointError, match=r"^outer: wrong$"), named("outer"), named("outer"):
        raise ValueError("wrong")
    with pytest.raises(NotImplementedError, match=r"^outer: not yet$"), named("outer"):
        raise NotImplementedError("not yet")
    with pytest.raises(KeyError), named("outer"):
        raise KeyError("a mistake of ours stays as it is")


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64, np.int64, np.bool_], ids=str)
def test_is_finite_equals_numpy_for_every_kind_of_value(dtype: Any) -> None:
    largest = np.finfo(np.float32).max if dtype != np.float16 else 65504
    odd = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, largest, -largest, 1e-45, -1e-45, 1.0, -1.0]
    with np.errstate(all="ignore"):
        for value in odd:
            values = (
                np.array([0.5, -2.0, value, 3.0]).astype(np.float32 if dtype != np.float64 else dtype).astype(dtype)
            )
            assert is_finite(values) == np.isfinite(values.astype(np.float64)).all(), (value, dtype)
    assert is_finite(np.zeros((0, 3), dtype))
    if dtype in (np.float16, bfloat16):
        every = np.arange(2**16, dtype=np.uint16).view(dtype)
        assert [is_finite(every[i : i + 1]) for i in range(2**16)] == np.isfinite(every.astype(np.float32)).tolist()
