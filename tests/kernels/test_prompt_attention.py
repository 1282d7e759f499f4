"""Compare the attention of prompts with `paged_attention`'s reference, with NaN in every row that no query sees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, prompt_attention
from pallas_kernels.attention.prompt_kernel import attend_prompts
from pallas_kernels.attention.prompt_steps import PromptSizes
from tests.support.arrays import on_device
from tests.support.gpus import H100, compile_for
from tests.support.mosaic import interpreted as run_interpreted

BF16, I32, BLOCK = jnp.bfloat16, jnp.int32, 16
mosaic = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernel needs jax 0.11")

# Pieces of prompts: (first row, number of tokens).
CASES: list[tuple[list[tuple[int, int]], dict[str, Any]]] = [
    ([(0, 40)], {}),
    ([(0, 300)], {}),  # several tiles
    ([(100, 20), (0, 5), (37, 70)], {}),  # a pair of blocks of two sequences, and a padding block
    ([(130, 17), (260, 40)], {"group": 8}),  # a block for both warpgroups
    ([(0, 33), (200, 64)], {"dim": 64}),
    ([(200, 64), (0, 20)], {"window": 90}),  # rows before the window are NaN
    ([(300, 16), (150, 40)], {"window": 130, "page": 64}),
    ([(64, 70)], {"page": 8}),
    # Warpgroups with several blocks, of one sequence or of several ones, of 1, 2 and 4 heads of 256 channels.
    ([(0, 150)], {"dim": 256, "group": 6}),
    ([(100, 20), (0, 5), (37, 70), (130, 9)], {"dim": 256, "group": 6}),
    ([(0, 17), (200, 64), (0, 20)], {"dim": 256, "group": 2, "window": 90, "kv_heads": 2}),
    ([(60, 30), (0, 5), (70, 3)], {"dim": 256, "group": 3}),
    ([(130, 17), (70, 40)], {"dim": 256, "group": 8, "page": 64}),
]


def problem(
    pieces: list[tuple[int, int]],
    *,
    group: int = 4,
    dim: int = 128,
    page: int = 16,
    window: int | None = None,
    columns: int = 60,
    kv_heads: int = 1,
) -> tuple[list[jax.Array], np.ndarray]:
    """Return the arrays of a call, and which queries [blocks, BLOCK] are real."""
    rng = np.random.default_rng(len(pieces))
    blocks = sum(-(-count // BLOCK) for _, count in pieces)
    blocks += -blocks % PromptSizes(BLOCK, group, page, dim, window).blocks
    num_pages = [-(-(start + count) // page) for start, count in pieces]
    free = iter(rng.permutation(np.arange(1, 1 + sum(num_pages))))
    pools = np.full((2, 1 + sum(num_pages), kv_heads, page, dim), np.nan, np.float32)
    table = np.zeros((blocks, columns), np.int32)
    first, ends = np.zeros((2, blocks), np.int32)
    sequence = np.full(blocks, len(pieces), np.int32)
    block = 0
    for index, (start, count) in enumerate(pieces):
        own = [next(free) for _ in range(num_pages[index])]
        for row in range(0 if window is None else max(start - window + 1, 0), start + count):
            pools[:, own[row // page], :, row % page] = rng.normal(size=(2, kv_heads, dim))
        for offset in range(0, count, BLOCK):
            table[block, : len(own)], sequence[block] = own, index
            first[block], ends[block] = start + offset, start + count
            block += 1
    q = rng.normal(size=(blocks, BLOCK, kv_heads * group, dim))
    arrays = [*(on_device(x, BF16) for x in (q, *pools)), *map(on_device, (table, first, sequence, ends))]
    return arrays, first[:, None] + np.arange(BLOCK) < ends[:, None]


def wanted(arrays: list[jax.Array], window: int | None) -> np.ndarray:
    *first, _, _ = arrays
    return np.asarray(paged_attention(*first, None, window=window, implementation="reference"), np.float32)


def interpreted(arrays: list[jax.Array], **options: Any) -> np.ndarray:
    """Run the Hopper kernel in jax's interpreter; fail if races are detected."""
    return np.asarray(
        run_interpreted(attend_prompts, *arrays, scale=arrays[0].shape[-1] ** -0.5, **options), np.float32
    )


@mosaic
@pytest.mark.parametrize(("pieces", "options"), CASES, ids=str)
def test_prompt_kernel_interpreted_matches_paged_attention_with_nan_in_unseen_rows(
    pieces: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    arrays, is_real = problem(pieces, **options)
    window = options.get("window")
    right = wanted(arrays, window)[is_real]
    assert np.abs(interpreted(arrays, window=window)[is_real] - right).max() < 0.02


@mosaic
@pytest.mark.parametrize("wrong", ["swapped tables", "first row", "window", "sequence"])
def test_prompt_kernel_interpreted_with_a_wrong_argument_differs(wrong: str) -> None:
    """The controls of the test above: it fails if the kernel uses another block's table, row, window or sequence."""
    window = 90 if wrong == "window" else None
    sizes = {"group": 2, "dim": 256} if wrong == "sequence" else {}  # two blocks in a warpgroup
    arrays, is_real = problem([(64, 16), (64, 16)], **sizes)
    right = wanted(arrays, window)[is_real]
    if wrong == "swapped tables":
        arrays[3] = arrays[3][::-1]
    if wrong == "first row":
        arrays[4] = arrays[4] - 1
    if wrong == "sequence":
        arrays[5] = arrays[5].at[:2].set(0)
    got = interpreted(arrays, window=None if wrong != "window" else 60)
    assert np.abs(got[is_real] - right).max() > 0.1


@pytest.mark.parametrize("implementation", ["auto", "pallas", "reference"])
def test_prompt_attention_on_cpu_is_paged_attention(implementation: Any) -> None:
    arrays, is_real = problem([(0, 40)], dim=64)
    got = np.asarray(prompt_attention(*arrays, implementation=implementation), np.float32)
    assert np.abs(got - wanted(arrays, None))[is_real].max() < 0.02


def shapes(
    rows: int = 2048, heads: int = 32, kv_heads: int = 8, dim: int = 128, page: int = 16, dtype: Any = BF16
) -> list[Any]:
    blocks = rows // BLOCK
    pool = jax.ShapeDtypeStruct((513, kv_heads, page, dim), dtype)
    ints = [jax.ShapeDtypeStruct(dims, I32) for dims in ((blocks, 128), (blocks,), (blocks,), (blocks,))]
    return [jax.ShapeDtypeStruct((blocks, BLOCK, heads, dim), BF16), pool, pool, *ints]


@mosaic
@pytest.mark.parametrize(
    ("sizes", "options", "is_served"),
    [
        ({}, {}, True),
        ({"heads": 64}, {}, True),
        ({"dim": 64, "page": 64}, {"window": 1024}, True),
        ({}, {"quantize_output": True}, True),
        ({"rows": 128}, {}, False),
        ({"heads": 16}, {}, False),
        ({"dim": 256, "heads": 24, "kv_heads": 4}, {}, True),
        ({"dim": 256, "heads": 16}, {"window": 1024}, True),
        ({"dim": 256, "page": 128}, {}, False),
        ({"dim": 512}, {}, False),
        ({"page": 1}, {}, False),
        ({"dtype": jnp.float8_e4m3fn}, {}, False),
        ({}, {"softcap": 30.0}, False),
        ({}, {"chunk": 8192}, False),
    ],
    ids=str,
)
def test_prompt_attention_compiled_for_an_h100_runs_the_hopper_kernel_where_it_serves(
    sizes: dict[str, Any], options: dict[str, Any], is_served: bool
) -> None:
    program = compile_for(H100, lambda *arrays: jax.tree.leaves(prompt_attention(*arrays, **options)), *shapes(**sizes))
    assert ('custom_call_target="mosaic_gpu' in (program.compiled.as_text() or "")) == is_served
    assert (program.count("paged_attention") > 0) != is_served


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("pieces", "options"),
    [
        *CASES,
        ([(0, 2048)], {"columns": 130, "kv_heads": 8}),
        ([(100, 700), (0, 5), (4000, 300)], {"columns": 300, "kv_heads": 8}),
        ([(130, 17), (2600, 540)], {"columns": 300, "group": 8}),
        ([(3000, 600)], {"columns": 300, "window": 1000}),
    ],
    ids=str,
)
def test_prompt_kernel_on_gpu_matches_paged_attention(pieces: Any, options: dict[str, Any]) -> None:
    arrays, is_real = problem(pieces, **options)
    window = options.get("window")
    run = jax.jit(lambda *arrays: attend_prompts(*arrays, scale=arrays[0].shape[-1] ** -0.5, window=window))
    assert np.abs(np.asarray(run(*arrays), np.float32) - wanted(arrays, window))[is_real].max() < 0.02
