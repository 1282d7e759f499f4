"""Compare packed rows of sampling parameters with `struct`, field by field."""

from __future__ import annotations

import struct

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.prompt_blocks import UNLIMITED
from jspec.core.sampling import Sampling

ORDER = "<fiffII8iii"  # of the fields, as numbers of 4 bytes
VALUES = (0.7, 40, 0.9, 0.05, 0xFFFFFFFF, 7, 5, 2**31 - 1, *[-1] * 6, 3, 2)


def row() -> Sampling:
    cuts = dict(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05)
    return Sampling.row(**cuts, seed=(0xFFFFFFFF, 7), stop_ids=(5, 2**31 - 1), draft_cap=3, adapter=2)


def test_packed_row_has_the_bytes_of_its_fields_in_order() -> None:
    assert row().pack().tobytes() == struct.pack(ORDER, *VALUES)
    assert row().pack().dtype == np.int32 and Sampling.width() == struct.calcsize(ORDER) // 4


def test_unpacked_rows_have_the_bits_and_dtypes_of_the_packed_ones() -> None:
    packed = np.stack([row().pack(), Sampling.row(seed=(1, 2)).pack()])
    rows = Sampling.unpack(jnp.asarray(packed))
    for name, field in Sampling.fields().items():
        values = np.asarray(getattr(rows, name))
        assert values.dtype == field.dtype and values.shape == (2, *field.shape)
        np.testing.assert_array_equal(values[0], getattr(row(), name))
    assert np.asarray(rows.temperature)[0] == np.float32(0.7) and np.asarray(rows.seed)[0, 0] == 0xFFFFFFFF


def test_rows_without_parameters_are_greedy_and_unlimited() -> None:
    plain, rows = Sampling.row(), Sampling.greedy(2)
    assert (plain.temperature, plain.top_p, plain.draft_cap, list(plain.stop_ids)) == (0, 1, UNLIMITED, [-1] * 8)
    for name in Sampling.fields():
        np.testing.assert_array_equal(np.asarray(getattr(rows, name))[1], getattr(plain, name))


@pytest.mark.parametrize(("name", "value"), [("top_z", 1), ("stop_ids", [1] * 9), ("seed", (2**32, 0))])
def test_row_with_an_unknown_parameter_or_a_value_that_does_not_fit_is_refused(name: str, value: object) -> None:
    with pytest.raises((KeyError, ValueError, OverflowError)):
        Sampling.row(**{name: value})
