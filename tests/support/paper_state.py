"""The state of a device of paper, and the types of what the host packs for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.core.prefill_input import SCALARS, PromptPiece
from jspec.core.records import Controls
from jspec.core.sampling import Sampling
from jspec.core.thinking import MAX_FORCED
from jspec.models.parts.kv_pool import PoolShape
from jspec.sampling.penalties import LOOK_BACK, MAX_BAD_WORDS

UNWRITTEN = -1  # a cache row's token before it is written

Row = Any  # a row of an array with named fields, of `piece_type` or `controls_type`


class PaperTable(NamedTuple):
    """A grammar's table: the class of each token, and the next state for each state and class; -1: not allowed."""

    class_of: np.ndarray
    next: np.ndarray


def piece_type(pages: int) -> np.dtype:
    """Return the type of a packed `PromptPiece`, for a page table of ``pages`` columns; parameters are fields too."""
    scalars = [(name, "i4") for name in PromptPiece._fields[:SCALARS]]
    sampling = [(name, np.dtype(field.dtype).str, field.shape) for name, field in Sampling.fields().items()]
    return np.dtype([*scalars, *sampling, ("page_row", "i4", pages)])


def controls_type(vocab: int, args: int) -> np.dtype:
    """Return the type of packed `Controls` of one slot, after the slot's number."""
    shapes: dict[str, Any] = {
        "recent": LOOK_BACK,
        "bad_beginnings": (MAX_BAD_WORDS, LOOK_BACK),
        "bad_ends": MAX_BAD_WORDS,
        "bias": vocab,
        "counts": vocab,
        "processor_args": max(args, 1),
        "think_markers": 2,
        "forced": MAX_FORCED,
    }
    floats = ("repetition", "presence", "frequency", "bias", "processor_args")
    names = ["slot", *(field.name for field in dataclasses.fields(Controls))]
    return np.dtype([(name, "f4" if name in floats else "i4", shapes.get(name, ())) for name in names])


@dataclasses.dataclass
class PaperSlot:
    """What the device knows of a slot's request; the fields are those of `SlotState`."""

    pages: np.ndarray
    piece: Row = None
    controls: Row = None
    root: int = 0
    length: int = 0
    remaining: int = 0
    is_active: bool = False
    prediction: Row = None  # packed by `jspec.draft.prediction.pack`


class PaperState:
    """The state of all slots, and the pool of cache rows."""

    def __init__(self, pool: PoolShape, columns: int) -> None:
        self.rows = np.full((pool.pages, pool.page_size), UNWRITTEN, np.int32)
        self.slots = [PaperSlot(np.zeros(columns, np.int32)) for _ in range(pool.slots)]
        self.tables: dict[int, PaperTable] = {}

    def text(self, slot: PaperSlot) -> list[int]:
        """Return the tokens of a slot's committed cache rows."""
        return self.rows[slot.pages].reshape(-1)[: slot.length].tolist()

    def write(self, slot: PaperSlot, start: int, tokens: Sequence[int]) -> None:
        """Write cache rows from row ``start`` on."""
        rows, size = np.arange(start, start + len(tokens)), self.rows.shape[1]
        self.rows[slot.pages[rows // size], rows % size] = tokens
