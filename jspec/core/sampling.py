"""The sampling parameters that requests bring to the device, each declared once."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from jspec.core.prompt_blocks import MAX_STOP_IDS, UNLIMITED


class RowField(NamedTuple):
    """How one value that a request brings is stored: dtype of 4 bytes, value of unused rows, and shape of a row."""

    dtype: Any
    default: float
    shape: tuple[int, ...] = ()


def row_field(dtype: Any, default: float, *shape: int) -> Any:
    """Declare a field of a record that has a row for each request."""
    return struct.field(metadata={"row": RowField(dtype, default, shape)})


@struct.dataclass
class Sampling:
    """Sampling parameters of each row. The rows are slots in `SlotState`, and rows of the bucket in `SlotView`.

    A request brings one row to the device; on the host it is a record of numpy arrays without the axis of rows. A
    parameter is declared here and nowhere else: packing, defaults, slots and views follow from the fields.
    """

    temperature: Float[Array, "rows"] = row_field(np.float32, 0)  # divisor of the logits; 0: greedy
    top_k: Int[Array, "rows"] = row_field(np.int32, 0)  # number of most likely tokens kept; 0: off
    top_p: Float[Array, "rows"] = row_field(np.float32, 1)  # probability mass kept; 1: off
    # Smallest probability kept, divided by the most likely token's probability; 0: off.
    min_p: Float[Array, "rows"] = row_field(np.float32, 0)
    seed: UInt32[Array, "rows 2"] = row_field(np.uint32, 0, 2)  # 64-bit seed, high word first
    stop_ids: Int[Array, "rows 8"] = row_field(np.int32, -1, MAX_STOP_IDS)  # ids that end the row; -1 where unused
    draft_cap: Int[Array, "rows"] = row_field(np.int32, UNLIMITED)  # most draft tokens that a step accepts
    adapter: Int[Array, "rows"] = row_field(np.int32, 0)  # table of the target's adapter, counted from 1; 0: none

    @classmethod
    @functools.cache
    def fields(cls) -> dict[str, RowField]:
        """Return how each parameter is stored, by name."""
        return {field.name: field.metadata["row"] for field in dataclasses.fields(cls)}

    @classmethod
    def greedy(cls, rows: int) -> Sampling:
        """Make the parameters of ``rows`` greedy rows without stop ids or draft caps; no two fields share an array."""
        fields = cls.fields().items()
        return cls(**{name: jnp.full((rows, *field.shape), field.default, field.dtype) for name, field in fields})

    @classmethod
    def width(cls) -> int:
        """Return the number of int32 values of a packed row."""
        return sum(math.prod(field.shape) for field in cls.fields().values())

    @classmethod
    def row(cls, **values: Any) -> Sampling:
        """Make one row of the host; parameters that are not given have the values of unused rows.

        Args:
            values: parameters by name; a vector may be shorter than its field.
        """
        row = {name: np.full(field.shape, field.default, field.dtype) for name, field in cls.fields().items()}
        for name, value in values.items():
            row[name][... if np.ndim(value) == 0 else slice(len(value))] = value
        return cls(**row)  # type: ignore[arg-type]

    def pack(self) -> np.ndarray:
        """Pack one row of the host into an int32 vector; floats and seeds keep their bits."""
        return np.concatenate([np.ravel(getattr(self, name)).view(np.int32) for name in self.fields()])

    @classmethod
    def unpack(cls, packed: Int[Array, "rows width"]) -> Sampling:
        """Split packed rows into their fields on the device; this is the inverse of `pack`."""
        values, first = {}, 0
        for name, field in cls.fields().items():
            words = packed[:, first : first + math.prod(field.shape)].reshape(-1, *field.shape)
            values[name] = jax.lax.bitcast_convert_type(words, field.dtype)
            first += math.prod(field.shape)
        return cls(**values)
