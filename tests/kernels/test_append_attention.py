"""Compare `append_attention` with rotation by complex numbers and attention row by row, both in float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import HeadTransform, ancestor_bits, append_attention
from pallas_kernels.attention.scores import Scores
from pallas_kernels.attention.tiling import choose_tiles
from tests.kernels.problems import make_tree
from tests.kernels.test_quantize_rows import half_step_error
from tests.kernels.test_rope_append import arguments, head_weights, oracle, rotation
from tests.reference.attention import ancestors, attention
from tests.support import cover
from tests.support.arrays import on_device
from tests.support.h200 import compile_for_h200

KV_HEADS, CAPACITY = 2, 640
# Committed rows: none; new rows cross the end of a tile; new rows begin another split; they reach the table's end.
LENGTHS = (0, 62, 255, 511, 632)
FACTORS: dict[str, tuple[Any, ...]] = {
    "tokens": (1, 5, 8),
    "tree": ("causal", "random"),
    "page": (1, 16, 64),
    "group": (1, 4, 8),
    "dim": (16, 64, 80, 128),
    "dtype": ("float32", "bfloat16", "float16"),
    "parts": (1, 2),
    "start": (0, 1),
}
TOLERANCES = {"float32": 1e-4, "bfloat16": 2**-5, "float16": 2**-8, "float8_e4m3fn": 2**-2}  # angles reach 640 rad
CASES = cover.pairwise(FACTORS, seed=0)
EXAMPLE = dict(tokens=5, tree="random", page=16, group=4, dim=64, dtype="float32", parts=2, start=1)


def problem(
    tokens: int,
    tree: str,
    page: int,
    group: int,
    dim: int,
    dtype: str,
    parts: int,
    start: int,
    lengths: Sequence[int] = LENGTHS,
    window: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    weights: str | None = None,
) -> tuple[dict[str, Any], np.ndarray]:
    """Return what `arguments` turns into arguments of `append_attention`, and the parents of new rows [batch, tokens].

    The pools hold NaN in rows that are hidden or not committed, and in the null page. Rows before a window hold
    numbers. ``weights`` is the dtype of a bias and of the norms' weights.
    """
    rng = np.random.default_rng(0)
    batch, columns, heads = len(lengths), CAPACITY // page, group * KV_HEADS
    table = rng.permutation(np.arange(1, batch * columns + 1)).reshape(batch, columns)
    pools = [np.full((batch * columns + 1, KV_HEADS, page, dim), np.nan, np.float32) for _ in range(2)]
    for b, length in enumerate(lengths):
        rows = np.arange(start, length)
        for pool in pools:
            pool[table[b, rows // page], :, rows % page] = rng.normal(size=(rows.size, KV_HEADS, dim))
    parents = np.stack([make_tree("causal" if tree == "causal" else "random", tokens, rng) for _ in lengths])
    depth = np.array([[len(ancestors(tree, node)) - 1 for node in range(tokens)] for tree in parents])
    qkv = rng.normal(size=(parts, batch, tokens, (heads + 2 * KV_HEADS) * dim))
    given = dict(
        k_pool=on_device(pools[0], dtype),
        v_pool=on_device(pools[1], dtype),
        qkv=on_device(qkv, dtype if parts == 1 else "float32"),
        **rotation(np.array(lengths)[:, None] + depth, dim),
        **(head_weights(heads, KV_HEADS, dim, weights) if weights else {}),
        page_table=on_device(table, jnp.int32),
        lengths=on_device(lengths, jnp.int32),
        valid=on_device(np.ones((batch, tokens), bool)),
        bits=None if tree == "causal" else ancestor_bits(on_device(parents)),
        heads=heads,
        start=start,
        dtype=jnp.dtype(dtype),
        window=window,
        chunk=chunk,
        scale=scale,
        softcap=softcap,
        sinks=on_device(rng.normal(size=heads) + 2, dtype) if sinks else None,
    )
    return given, parents


def errors(found: tuple[Any, ...], p: dict[str, Any], parents: np.ndarray, *, norms_last: bool = False) -> list[float]:
    """Return the largest error of the attention and of each pool against float64, divided by the dtype's tolerance.

    A NaN counts as an infinite error. ``norms_last`` is as in `oracle`.
    """
    heads, dtype = p["heads"], p["dtype"]
    q, k_pool, v_pool = oracle({**p, "first_row": p["lengths"]}, heads, norms_last=norms_last)
    q = np.asarray(on_device(q, dtype), np.float64)
    held = p["k_pool"].dtype
    pools = [np.asarray(on_device(on_device(pool, dtype), held), np.float64) for pool in (k_pool, v_pool)]
    rows = [[ancestors(tree, node) for node in range(parents.shape[1])] for tree in parents]
    options = {name: p[name] for name in ("start", "window", "chunk", "scale", "softcap")}
    options["sinks"] = None if p["sinks"] is None else np.asarray(p["sinks"], np.float64)
    expected = attention(q, *pools, np.asarray(p["page_table"]), np.asarray(p["lengths"]), rows, **options)
    most = TOLERANCES[str(held)]
    differences = []
    for one, wanted in zip(found, (expected, *pools), strict=True):
        one = np.asarray(one, np.float64)
        same = np.isnan(one) & np.isnan(wanted)
        gap = np.abs(one - wanted) / np.maximum(np.abs(wanted), 1)
        differences.append(float(np.nan_to_num(np.where(same, 0, gap), nan=np.inf).max()) / most)
    return differences


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(CASES, 3, name=cover.label, is_thinned=True))
def test_append_attention_of_random_trees_matches_float64(case: dict[str, Any], implementation: str) -> None:
    p, parents = problem(**case)
    assert max(errors(append_attention(**arguments(p), implementation=implementation), p, parents)) < 1


OPTIONS: list[dict[str, Any]] = [
    EXAMPLE | dict(window=70, softcap=2.0, sinks=True, weights="float32"),
    EXAMPLE
    | dict(tree="causal", tokens=8, page=1, group=8, dim=80, dtype="bfloat16", window=5, scale=0.02)
    | dict(weights="bfloat16"),
    EXAMPLE | dict(chunk=64, tokens=8),  # begins at depth 2 of one sequence's tree
    EXAMPLE | dict(dim=128, dtype="bfloat16", window=24, softcap=2.0, sinks=True, weights="float32"),
    EXAMPLE | dict(tokens=9, window=12, softcap=2.0, sinks=True, weights="float32"),  # two kernels
    EXAMPLE | dict(tokens=8, tree="causal", chunk=257),
]


def check_options(p: dict[str, Any], parents: np.ndarray, implementation: str) -> None:
    """Assert that attention matches float64, and differs from float64 without one option or with another one."""
    found = append_attention(**arguments(p), implementation=implementation)
    assert max(errors(found, p, parents)) < 1
    wrong: list[dict[str, Any]] = [{"softcap": None}] if p["softcap"] else []
    if p["sinks"] is not None:
        wrong += [{"sinks": None}, {"sinks": p["sinks"] + np.log(2)}]  # left out, and counted twice
    if p["window"]:
        wrong += [{"window": p["window"] - 1}, {"window": p["window"] + 1}]
    if p["chunk"]:
        wrong += [{"chunk": p["chunk"] - 1}, {"chunk": p["chunk"] + 1}, {"chunk": None}]
    if p.get("bias") is not None:
        wrong += [{"bias": None}, {"q_norm": None}, {"k_norm": None}, {"v_norm": None}, {"slope": 0}]
        assert max(errors(found, p, parents, norms_last=True)) > 2
    for changed in wrong:
        assert max(errors(found, p | changed, parents)) > 1.5, changed


@pytest.mark.parametrize(("case", "implementation"), cover.with_kernel(OPTIONS, 3, name=cover.label, is_thinned=True))
def test_append_attention_with_options_of_heads_and_scores_matches_float64(
    case: dict[str, Any], implementation: str
) -> None:
    check_options(*problem(**case, lengths=(62, 255, 511)), implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", OPTIONS, ids=cover.label)
def test_append_attention_on_gpu_with_options_of_heads_and_scores_matches_float64(case: dict[str, Any]) -> None:
    check_options(*problem(**case, lengths=(0, 62, 255, 511)), "pallas")


FEW = EXAMPLE | {"tokens": 3, "dim": 16, "dtype": "bfloat16"}  # few enough for a Pallas program of 16 packed rows


@pytest.fixture
def tiles_of_200_sequences(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `append_attention` use the tiles of 200 sequences, which do not split contexts, for a few sequences.

    A CPU would take half a minute for 200 sequences.
    """

    def tiles_of_many(q: Any, *pools: Any, **options: Any) -> Any:
        tiles = choose_tiles(jax.ShapeDtypeStruct((200, *q.shape[1:]), q.dtype), *pools, **options)
        assert (tiles.splits, tiles.packed, tiles.warps) == (1, 16, 2)
        return tiles

    module = sys.modules[append_attention.__module__]
    monkeypatch.setattr(module, "choose_tiles", tiles_of_many)
    append_attention.clear_cache()
    yield
    append_attention.clear_cache()


@pytest.mark.usefixtures("tiles_of_200_sequences")
def test_append_attention_of_unsplit_contexts_matches_float64() -> None:
    check_options(*problem(**FEW, lengths=(0, 62, 255, 632), sinks=True, softcap=2.0), "pallas")


@pytest.mark.parametrize(
    ("is_split", "implementation"),
    [
        *(pytest.param(*case, marks=pytest.mark.once) for case in ((False, "reference"), (True, "reference"))),
        pytest.param(False, "pallas", marks=pytest.mark.once),
        pytest.param(True, "pallas", marks=pytest.mark.newest),  # merging by that kernel: test_paged_attention.py
        *(pytest.param(is_split, "auto", marks=pytest.mark.gpu) for is_split in (False, True)),
    ],
)
def test_append_attention_with_quantize_output_returns_the_attention_quantised(
    is_split: bool, implementation: str, request: pytest.FixtureRequest
) -> None:
    """The kernel that merges splits quantises; if contexts are not split, a separate kernel quantises."""
    if not is_split:
        request.getfixturevalue("tiles_of_200_sequences")
    p, _ = problem(**EXAMPLE | {"dtype": "bfloat16"} if is_split else FEW)
    out, *pools = append_attention(**arguments(p), implementation=implementation)
    row, *same = append_attention(**arguments(p), quantize_output=True, implementation=implementation)
    wanted = np.asarray(out, np.float64).reshape(row.shape)
    assert row.dtype == out.dtype and half_step_error(row.values, row.scale, wanted) < 1.1
    np.testing.assert_allclose(row.scale, np.abs(wanted).max(-1) / 448, rtol=2**-7, atol=1e-37)
    for one, other in zip(pools, same, strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.once
@pytest.mark.parametrize("wrong", ["positions", "lengths", "bits", "inv_freq", "start"])
def test_append_attention_with_one_changed_argument_has_an_error_above_tolerance(wrong: str) -> None:
    """Negative control: the tolerance detects each changed argument."""
    p, parents = problem(**EXAMPLE)
    assert max(errors(append_attention(**arguments(p), implementation="pallas"), p, parents)) < 1
    other = {"bits": None, "inv_freq": p["inv_freq"][::-1], "start": 0}
    changed = p | {wrong: other[wrong] if wrong in other else p[wrong] + 1}
    assert max(errors(append_attention(**arguments(changed), implementation="reference"), p, parents)) > 10


@pytest.mark.parametrize("implementation", ["reference", "pallas", pytest.param("auto", marks=pytest.mark.gpu)])
def test_append_attention_with_invalid_rows_does_not_write_them(implementation: str) -> None:
    p, parents = problem(**EXAMPLE)
    valid = np.arange(5) < np.array([0, 1, 3, 5, 4])[:, None]
    p |= {"valid": jnp.asarray(valid)}
    found = append_attention(**arguments(p), implementation=implementation)
    assert max(errors(found, p, parents)[1:]) < 1  # NaN in rows that are not written, also in the null page
    assert np.isfinite(np.asarray(found[0])[valid]).all()  # a row sees only its ancestors, which are earlier rows


def test_append_attention_with_wrong_shapes_raises() -> None:
    p, _ = problem(**EXAMPLE)
    with pytest.raises(ValueError, match=r"qkv must be 768 wide, got 760"):
        append_attention(**arguments(p) | {"qkv": p["qkv"][..., :-8]})
    with pytest.raises(ValueError, match="bits must be"):
        append_attention(**arguments(p) | {"bits": jnp.tile(p["bits"], 2)})
    with pytest.raises(ValueError, match=r"sinks must be None or \[8\]"):
        append_attention(**arguments(p) | {"sinks": on_device(np.zeros(9))})
    with pytest.raises(ValueError, match="window must be None or at least 1, got 0"):
        append_attention(**arguments(p) | {"window": 0})


@pytest.mark.parametrize(
    ("tokens", "page", "pool"), [(9, 16, "float32"), (5, 16, "float8_e4m3fn"), (5, 160, "float32")]
)
def test_append_attention_in_two_kernels_matches_float64(tokens: int, page: int, pool: str) -> None:
    p, parents = problem(**EXAMPLE | {"tokens": tokens, "page": page}, lengths=(0, 62, 511))
    p |= {name: p[name].astype(pool) for name in ("k_pool", "v_pool")}
    assert max(errors(append_attention(**arguments(p)), p, parents)) < 1


def compile_attention(batch: int, rows: int, parts: int, start: int, *, quantize_output: bool = False) -> Any:
    shape = jax.ShapeDtypeStruct
    pools = [shape((batch * 75 + 1, 8, 16, 128), "bfloat16")] * 2
    qkv = shape((parts, batch, rows, 6144), "float32" if parts > 1 and batch * rows <= 64 else "bfloat16")
    where = shape((batch, 75), "int32"), shape((batch,), "int32"), shape((batch, rows), "bool")
    arrays = (*pools, qkv, HeadTransform(shape((2, batch, rows, 64), "float32")), *where)
    options = {"heads": 32, "start": start, "dtype": jnp.dtype("bfloat16"), "quantize_output": quantize_output}
    call = partial(append_attention, bits=None, **options)
    return compile_for_h200(call, *arrays, donate_argnums=(0, 1), fail_on_spills=True)


@pytest.mark.parametrize(
    ("batch", "rows", "parts", "start"),
    [
        pytest.param(1, 1, 2, 0, marks=pytest.mark.matrix),
        pytest.param(1, 1, 1, 1, marks=pytest.mark.long),
        pytest.param(1, 5, 2, 0, marks=pytest.mark.matrix),
        (1, 5, 2, 1),
        pytest.param(8, 5, 2, 0, marks=pytest.mark.long),
        pytest.param(16, 5, 4, 0, marks=pytest.mark.long),
        (24, 5, 4, 0),
        (32, 5, 2, 1),
        (64, 5, 1, 0),
        pytest.param(64, 1, 1, 1, marks=pytest.mark.long),
        (64, 3, 2, 1),
    ],
)
def test_append_attention_compiled_for_h200_is_one_kernel_that_writes_in_place(
    batch: int, rows: int, parts: int, start: int
) -> None:
    """The kernel also rotates the keys; split contexts need a second kernel that merges the splits."""
    program = compile_attention(batch, rows, parts, start)
    assert program.count("append_attention") == 1
    assert program.count("paged_attention_merge") == (batch < 32)
    assert program.count("rotate_append") == 0
    assert program.alias_bytes == 2 * 2 * math.prod((batch * 75 + 1, 8, 16, 128)) and not program.copies(1 << 16)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_append_attention_with_quantize_output_launches_one_more_kernel(batch: int) -> None:
    program = compile_attention(batch, 5, 2, 0, quantize_output=True)
    names = ["paged_attention_merge_and_round"] if batch < 32 else ["quantize_rows"]
    assert [launch.name for launch in program.launches][-2:] == ["append_attention", *names]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=cover.label)
def test_append_attention_on_gpu_matches_float64(case: dict[str, Any]) -> None:
    p, parents = problem(**case)
    assert max(errors(append_attention(**arguments(p), implementation="pallas"), p, parents)) < 1


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sequences", "tokens", "packed", "splits"), [(200, 3, 16, 1), (200, 5, 32, 1), (80, 5, 32, 3)]
)
def test_append_attention_on_gpu_of_many_sequences_matches_float64(
    sequences: int, tokens: int, packed: int, splits: int
) -> None:
    """With so many sequences a Pallas program has two warps."""
    p, parents = problem(**FEW | {"tokens": tokens}, lengths=[7 * b % 140 for b in range(sequences)])
    q = jax.ShapeDtypeStruct((sequences, tokens, p["heads"], 16), jnp.bfloat16)
    tiles = choose_tiles(q, p["k_pool"], p["page_table"], p["bits"], Scores(), new_rows=tokens, wide=False)
    assert (tiles.splits, tiles.packed, tiles.warps) == (splits, packed, 2)
    assert max(errors(append_attention(**arguments(p), implementation="pallas"), p, parents)) < 1
