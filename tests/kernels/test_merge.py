"""Compare `paged_attention` with float64 where a context has more splits than the merging kernel reads at once."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.attention.merge import MergeShape
from pallas_kernels.attention.scores import Scores
from pallas_kernels.attention.tiling import choose_tiles
from tests.reference.attention import attention
from tests.support.arrays import on_device

PAGES, PAGE, DIM, HEADS = 132, 16, 256, 2


@pytest.mark.parametrize(("length", "start"), [(2100, 0), (2100, 2048), (40, 0)])
def test_paged_attention_of_132_splits_matches_float64(length: int, start: int) -> None:
    """Split i has rows 16 i to 16 i + 15; 128 splits are read at once. From row 2048 on, all of them are empty."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, PAGES + 1, 1, PAGE, DIM)).astype(np.float32)
    q, sinks = rng.normal(size=(1, 1, HEADS, DIM)).astype(np.float32), np.ones(HEADS, np.float32)
    table, lengths = np.arange(1, PAGES + 1, dtype=np.int32)[None], np.array([length], np.int32)
    arrays = [on_device(array) for array in (q, k, v, table, lengths)]
    tiles = choose_tiles(arrays[0], arrays[1], arrays[3], None, Scores(start=start), new_rows=1, wide=True)
    assert (tiles.splits, tiles.tile, MergeShape.of(tiles.splits, DIM).at_once) == (PAGES, PAGE, 128)

    out = paged_attention(*arrays, None, on_device(sinks), start=start, implementation="pallas")
    right = attention(q, k, v, table, lengths, [[[0]]], start=start, sinks=sinks)
    np.testing.assert_allclose(out, right, atol=1e-5)
    if length > 2048 > start:  # control: the rows of the first 128 splits alone
        assert np.abs(out - attention(q, k, v, table, np.array([2047]), [[[0]]], sinks=sinks)).max() > 1e-3
