"""Compare `paged_attention` with float64: windows, chunks, and scores with a limit, with sinks or another scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import paged_attention
from pallas_kernels.attention.ptx import count_ones, scaled_tanh
from tests.kernels.problems import AttentionCase, make_problem
from tests.support import cover
from tests.support.arrays import on_device

SCORES = [  # options of the scores, alone and together
    AttentionCase(window=40, scale=0.4, softcap=1.5, sinks=True, queries=17, dim=80, lengths="full"),
    AttentionCase(sinks=True, tree="padded", queries=17, dtype="bfloat16", group=1),
    AttentionCase(softcap=2.0, tree="causal", start=1),
    AttentionCase(sinks=True, lengths="zero"),
    AttentionCase(window=70, softcap=2.0, sinks=True, tree="causal", queries=60, dtype="bfloat16", dim=64, start=1),
    AttentionCase(window=33, softcap=2.0, sinks=True, dtype="bfloat16", pool="float8_e4m3fn", dim=64),
]
CHUNKS = [  # chunks that end before, in and after the new rows of a query; the longest contexts are split
    AttentionCase(chunk=16, queries=17, tree="random"),
    AttentionCase(chunk=128, queries=17, tree="padded", dtype="bfloat16", dim=64, lengths="full"),
    AttentionCase(chunk=9, queries=60, tree="chain", page=1, start=1),
    AttentionCase(chunk=64, queries=1, tree="causal", lengths="full", group=8),
    AttentionCase(chunk=40, queries=17, tree="random", window=20, lengths="full", softcap=2.0, sinks=True),
    AttentionCase(chunk=17, queries=60, tree="chain", dtype="bfloat16", pool="float8_e4m3fn", dim=64, sinks=True),
]
LONG_CHUNKS = [  # in which other places of the new rows begin chunks
    AttentionCase(chunk=131, queries=17, tree="random", group=2, lengths="ragged"),
    AttentionCase(chunk=16, queries=60, tree="causal", start=1),
    AttentionCase(chunk=100, queries=17, tree="causal", lengths="full", page=64),
]


def check_scores(case: AttentionCase, implementation: str) -> None:
    """Assert that attention matches float64, and differs from float64 if one option of the scores is another one."""
    problem = make_problem(case)
    out = paged_attention(*problem.arrays, **problem.options, implementation=implementation)
    assert problem.error(out) <= problem.tolerance
    finite = problem.finite()
    wrong: list[dict[str, Any]] = [{"softcap": None}] if case.softcap else []
    if case.sinks:
        wrong += [{"sinks": None}, {"sinks": problem.options["sinks"] + np.log(2)}]  # left out, and counted twice
    if case.window:
        wrong += [{"window": case.window - 1}, {"window": case.window + 1}]
    if case.chunk:
        wrong += [{"chunk": case.chunk - 1}, {"chunk": case.chunk + 1}, {"chunk": None}]
    for changed in wrong:
        assert problem.error(out, finite.expected_with(**changed)) > 2 * problem.tolerance, changed


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(SCORES, 2, is_thinned=True))
def test_paged_attention_with_softcap_or_sinks_or_scale_or_window_matches_float64(case, implementation):
    check_scores(case, implementation)


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(CHUNKS, 2, long=LONG_CHUNKS))
def test_paged_attention_with_chunks_matches_float64_and_ignores_rows_before_them(case, implementation):
    """Rows before the chunk of the first new row hold NaN."""
    check_scores(case, implementation)


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_paged_attention_with_a_chunk_that_begins_in_a_tree_hides_ancestors_by_their_depth(implementation):
    """Sequence 2 has 129 committed rows. The control hides new rows by their number, as if the tree were a chain."""
    problem = make_problem(AttentionCase(tree="random", queries=17, chunk=131)).finite()
    out = np.asarray(paged_attention(*problem.arrays, chunk=131, implementation=implementation))
    assert problem.error(out) <= problem.tolerance
    rows = [[[row for row in own if row >= 2] or own for own in of_sequence] for of_sequence in problem.new_rows]
    by_number = dataclasses.replace(problem, new_rows=rows).expected_with(chunk=None, start=129)
    late = [node for node, own in enumerate(problem.new_rows[2]) if len(own) > 2 and sorted(own)[1] >= 2]
    assert late and np.abs(by_number[2, late] - out[2, late]).max() > 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*SCORES, *CHUNKS, *LONG_CHUNKS], ids=str)
def test_paged_attention_on_gpu_with_softcap_or_sinks_or_scale_or_window_or_chunk_matches_float64(case):
    check_scores(case, "pallas")


@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_paged_attention_with_a_scale_multiplies_scores_by_it(implementation):
    problem = make_problem(AttentionCase(scale=0.7))
    out = paged_attention(*problem.arrays, **problem.options, implementation=implementation)
    assert problem.error(out) <= problem.tolerance
    assert problem.error(out, problem.expected_with(scale=None)) > 0.05


@pytest.mark.once
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
@pytest.mark.parametrize("tree", ["causal", "random"])
def test_paged_attention_with_window_off_by_one_has_an_error_above_tolerance(tree, implementation):
    problem = make_problem(AttentionCase(tree=tree, queries=5, window=12, lengths="full")).finite()
    out = paged_attention(*problem.arrays, window=12, implementation=implementation)
    errors = [problem.error(out, problem.expected_with(window=window)) for window in (12, 11, 13)]
    assert errors[0] <= problem.tolerance and min(errors[1:]) > 10 * problem.tolerance


@pytest.mark.once
def test_paged_attention_with_one_window_for_all_tree_nodes_has_an_error_above_tolerance():
    """The window of each node ends at the node; the control moves all windows to that of the root."""
    problem = make_problem(AttentionCase(tree="random", queries=5, window=12, lengths="full")).finite()
    out = paged_attention(*problem.arrays, window=12, implementation="pallas")
    moved = {seen: problem.expected_with(window=11 + seen) for seen in range(1, 6)}
    fixed = [[moved[len(new)][b, node] for node, new in enumerate(rows)] for b, rows in enumerate(problem.new_rows)]
    assert problem.error(out, problem.expected_with(window=12)) <= problem.tolerance
    assert problem.error(out, np.array(fixed)) > 10 * problem.tolerance


@pytest.mark.gpu
def test_tanh_on_gpu_has_the_stated_error_and_bits_are_counted():
    """The limit of scores uses the first, the window of tree nodes the second."""
    x = np.concatenate([np.linspace(-20, 20, 4001), np.logspace(-8, 38, 95)]).astype(np.float32)
    words = np.random.default_rng(0).integers(0, 2**32, x.size, dtype=np.uint32)
    words[:2] = 0, 2**32 - 1

    def kernel(x_ref, words_ref, tanh_ref, count_ref):
        tanh_ref[...] = scaled_tanh(x_ref[...], 0.75, exact=False)
        count_ref[...] = count_ones(words_ref[...], interpret=False)

    out = [jax.ShapeDtypeStruct(x.shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    params = pltriton.CompilerParams(num_warps=4, num_stages=1)
    tanh, count = pl.pallas_call(kernel, out_shape=out, compiler_params=params)(x, words)
    assert x.size == 4096 and np.abs(np.asarray(tanh, np.float64) - np.tanh(x.astype(np.float64) * 0.75)).max() < 2**-21
    np.testing.assert_array_equal(count, [bin(word).count("1") for word in words.tolist()])


def test_paged_attention_with_invalid_options_of_scores_raises():
    with pytest.raises(ValueError, match="window must be None or at least 1, got 0"):
        paged_attention(*make_problem(AttentionCase()).arrays, window=0)
    with pytest.raises(ValueError, match="chunk must be None or at least 1, got 0"):
        paged_attention(*make_problem(AttentionCase()).arrays, chunk=0)
    for scale in (-1.0, 0.0, 1e-40, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"scale must be None or above 1e-30 and finite, got {scale}"):
            paged_attention(*make_problem(AttentionCase()).arrays, scale=scale)
    for softcap in (-1.0, 0.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"softcap must be None or above 0 and finite, got {softcap}"):
            paged_attention(*make_problem(AttentionCase()).arrays, softcap=softcap)
    with pytest.raises(ValueError, match=r"sinks must be None or \[8\], one per query head, got \(4,\)"):
        paged_attention(*make_problem(AttentionCase()).arrays, on_device(np.zeros(4)))
