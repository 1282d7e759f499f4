"""Compare `best_tree` with all paths, sorted by their log-probabilities; the kernel runs in jax's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sampling.best_tree import MOST_NODES, best_tree, run_kernel
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200
from tests.support.mosaic import interpreted as run_interpreted

mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")
# Nodes, depth, k. A thread has two paths of 129 nodes.
CASES = [(12, 3, 3), (20, 4, 4), (4, 3, 1), (2, 1, 1), (129, 3, 6)]
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def problem(depth: int, k: int, kind: str, rows: int = 2) -> Arrays:
    """Return roots, tokens and sorted log-probabilities: "random", "ties", or "impossible" with some of -inf."""
    rng = np.random.default_rng(depth)
    log_probs = np.log(rng.dirichlet(np.ones(k), (rows, depth)))
    if kind == "ties":
        log_probs = np.round(log_probs)
    if kind == "impossible":
        log_probs[:, :, max(k // 2, 1) :] = -np.inf
    tokens = rng.permuted(np.tile(np.arange(50), (rows, depth, 1)), axis=-1)[..., :k]
    ordered = -np.sort(-log_probs.astype(np.float32), axis=-1)
    return np.arange(rows, dtype=np.int32), tokens.astype(np.int32), ordered


def expected(
    root: int, tokens: np.ndarray, log_probs: np.ndarray, nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """Return tokens, parents and scores of a row's tree, by trying all paths.

    Of equal scores the path is first that is shorter, then the one whose parent is first, then the likelier token.
    """
    levels: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())]]
    for own in log_probs:
        children = [
            (np.float32(score) + own[rank], (*path, rank)) for score, path in levels[-1] for rank in range(len(own))
        ]
        levels.append(sorted(children, key=lambda child: -child[0]))  # stable: equal children stay in order
    every = list(itertools.chain(*levels[1:]))
    chosen = sorted(sorted(range(len(every)), key=lambda index: -every[index][0])[: nodes - 1])
    node_of = {(): 0} | {every[index][1]: node for node, index in enumerate(chosen, 1)}
    paths = [every[index] for index in chosen]
    own_tokens = [int(tokens[len(path) - 1, path[-1]]) for _, path in paths]
    return [root, *own_tokens], [-1, *(node_of[path[:-1]] for _, path in paths)], [0.0, *(score for score, _ in paths)]


def check(run: Callable[..., Any], nodes: int, given: Arrays) -> None:
    got = [np.asarray(field) for field in run(*map(on_device, given), nodes)]
    for row, own in enumerate(zip(*given, strict=True)):
        for field, wanted in zip(got, expected(*own, nodes), strict=True):
            np.testing.assert_array_equal(field[row], wanted)


@pytest.mark.parametrize("kind", ["random", "ties", "impossible"])
@pytest.mark.parametrize(("nodes", "depth", "k"), CASES)
def test_tree_of_a_block_has_the_most_probable_of_all_paths(nodes: int, depth: int, k: int, kind: str) -> None:
    check(best_tree, nodes, problem(depth, k, kind))


@mosaic
@pytest.mark.parametrize("kind", ["random", "ties", "impossible"])
@pytest.mark.parametrize(("nodes", "depth", "k"), CASES)
def test_kernel_interpreted_finds_the_most_probable_of_all_paths(nodes: int, depth: int, k: int, kind: str) -> None:
    check(interpreted, nodes, problem(depth, k, kind))


def interpreted(*arrays: Any) -> Any:
    *given, nodes = arrays
    return run_interpreted(run_kernel, *given, nodes=nodes)


@mosaic
def test_kernel_interpreted_with_nan_emits_a_tree_whose_parents_come_first() -> None:
    root, tokens, log_probs = problem(3, 3, "random")
    log_probs[0] = np.nan
    given = tuple(map(jnp.asarray, (root, tokens, log_probs)))
    parents = np.asarray(interpreted(*given, 12)[1])
    assert (parents[:, 1:] < np.arange(1, 12)).all() and (parents[:, 1:] >= 0).all()


@mosaic
@pytest.mark.parametrize(("nodes", "rows"), [(48, 1), pytest.param(300, 8, marks=pytest.mark.matrix)])
def test_h200_tree_of_a_block_is_one_launch_without_spills(nodes: int, rows: int) -> None:
    shapes = [jax.ShapeDtypeStruct(size, kind) for size, kind in (((rows,), "int32"), ((rows, 7, 10), "int32"))]
    arrays = (*shapes, jax.ShapeDtypeStruct((rows, 7, 10), "float32"))
    assert len(compile_for_h200(partial(best_tree, nodes=nodes), *arrays, fail_on_spills=True).launches) == 1
    too_many = compile_for_h200(partial(best_tree, nodes=MOST_NODES + 1), *arrays)
    assert len(too_many.launches) > 1, "a larger tree takes a launch a depth"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "ties", "impossible"])
@pytest.mark.parametrize(("nodes", "depth", "k", "rows"), [(48, 7, 10, 3), (60, 8, 10, 1), (1000, 7, 10, 2)])
def test_kernel_on_a_gpu_equals_the_reference(nodes: int, depth: int, k: int, rows: int, kind: str) -> None:
    given = tuple(map(jnp.asarray, problem(depth, k, kind, rows)))
    wanted = best_tree(*given, nodes, implementation="reference")
    for one, other in zip(best_tree(*given, nodes), wanted, strict=True):
        np.testing.assert_array_equal(one, other)
