"""Compare `ancestor_bits` with walking up the tree, and `mask_tile` with looking up each bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import ancestor_bits
from pallas_kernels.attention.ancestor_bits import mask_tile
from tests.kernels.problems import make_tree
from tests.reference.attention import ancestors
from tests.support.arrays import on_device


def unpack(bits: np.ndarray, nodes: int) -> np.ndarray:
    """Return packed bits as bool [..., nodes]: bit j % 32 of word j // 32 becomes entry j."""
    as_bytes = np.ascontiguousarray(bits).view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, bitorder="little")[..., :nodes] == 1


def seen_by_walking(parents: np.ndarray) -> np.ndarray:
    """Return bool [nodes, nodes]: whether a walk from the first node up to the root meets the second node."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for node in range(len(parents)):
        seen[node, ancestors(parents, node)] = True
    return seen


@pytest.mark.parametrize("kind", ["chain", "random", "padded"])
@pytest.mark.parametrize("nodes", [1, 2, 5, 31, 32, 33, 64, 65, 70, 100])
def test_ancestor_bits_of_trees_match_walking_up_to_the_root(kind, nodes):
    trees = np.stack([make_tree(kind, nodes, np.random.default_rng(seed)) for seed in range(3)])
    bits = np.asarray(jax.jit(ancestor_bits)(trees))
    assert bits.dtype == np.uint32
    assert bits.shape == (3, nodes, -(-nodes // 32))
    for tree, rows in zip(trees, bits, strict=True):
        np.testing.assert_array_equal(unpack(rows, nodes), seen_by_walking(tree))
        assert not unpack(rows, 32 * bits.shape[-1])[:, nodes:].any()


@settings(max_examples=100)
@given(st.data(), st.sampled_from([3, 20, 40]))
def test_ancestor_bits_of_drawn_parents_match_walking_up_to_the_root(data, nodes):
    parents = np.array([-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, nodes)], np.int32)
    bits = np.asarray(jax.jit(ancestor_bits)(parents[None]))[0]
    np.testing.assert_array_equal(unpack(bits, nodes), seen_by_walking(parents))


@pytest.mark.parametrize("tile", [16, 32, 64])
@pytest.mark.parametrize("words", [1, 2, 3])
def test_mask_tile_function_with_packed_bits_equals_bits_looked_up_one_by_one(words: int, tile: int) -> None:
    """Committed cache rows are visible; rows after the new rows and rows outside the bounds are hidden."""
    rng = np.random.default_rng(words * tile)
    seen = rng.integers(0, 2**32, (7, words), dtype=np.uint32)
    bits = (seen[:, :, None] >> np.arange(32, dtype=np.uint32) & 1).reshape(7, -1).astype(bool)
    table = np.concatenate([np.ones((7, 256), bool), bits, np.zeros((7, 256), bool)], axis=1)
    expand = jax.jit(mask_tile, static_argnums=4)
    for first, low, high in [(-tile, -500, 500), (-1, -1, 500), (0, 3, 40), (-33, -20, 5), (5, 5, 6), (7, 9, 9)] + [
        (int(first), -int(low), int(high)) for first, low, high in rng.integers([-80, 0, 0], [120, 90, 120], (40, 3))
    ]:
        row = first + np.arange(tile)
        wanted = table[:, 256 + row] & ((low <= row) & (row < high))
        np.testing.assert_array_equal(expand([*on_device(seen.T)], *map(jnp.int32, (first, low, high)), tile), wanted)
