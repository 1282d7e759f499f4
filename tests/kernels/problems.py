"""Random attention problems: trees, ragged lengths, and pools with NaN in every row that no query sees."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ancestor_bits
from tests.reference.attention import ancestors, attention
from tests.support import cover
from tests.support.arrays import on_device

FACTORS: dict[str, tuple[Any, ...]] = {
    "queries": (1, 5, 17, 60),
    "tree": ("causal", "chain", "random", "padded"),
    "page": (1, 16, 64),
    "start": (0, 1),
    "dtype": ("float32", "bfloat16"),
    "group": (1, 2, 4, 8),
    "dim": (16, 64, 128),
    "lengths": ("ragged", "zero", "full"),
}
ROWS = 320  # rows that a sequence can have: more than two of the kernel's splits

bits_of = jax.jit(ancestor_bits)


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """The shapes, dtypes and options of one attention problem."""

    queries: int = 5
    tree: str = "random"  # also "block"
    page: int = 16
    start: int = 0
    dtype: str = "float32"
    group: int = 4
    dim: int = 16
    lengths: str = "ragged"
    pool: str | None = None  # dtype of the pools; None means `dtype`
    window: int | None = None
    chunk: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        shown = [str(getattr(self, name)) for name in FACTORS]
        others = ("pool", "window", "chunk", "scale", "softcap", "sinks")
        return "-".join([*shown, *(f"{name} {getattr(self, name)}" for name in others if getattr(self, name))])


@dataclasses.dataclass
class Problem:
    """The arguments of one call of `paged_attention`, and the expected result."""

    q: Any
    k_pool: Any
    v_pool: Any
    page_table: Any
    lengths: Any
    bits: Any
    options: dict[str, Any]  # start, window, chunk, scale, softcap and sinks
    new_rows: list[list[list[int]]]  # as in `tests.reference.attention`
    expected: np.ndarray  # float64 [B, T, H, D]
    real: np.ndarray  # bool [B, T]: False for padding queries

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self.q, self.k_pool, self.v_pool, self.page_table, self.lengths, self.bits

    @property
    def tolerance(self) -> float:
        """Return the largest allowed error.

        bfloat16 rounds the weights (their sum is 1) and the output, each by at most 2**-9 of the largest |V|. float32
        adds up to 320 terms, exponentials of scores up to about 5: some 40 roundings of 2**-24.
        """
        largest = float(np.nanmax(np.abs(np.asarray(self.v_pool, np.float64))))
        return largest * (2**-8 if self.q.dtype == jnp.bfloat16 else 40 * 2**-24)

    def finite(self) -> Problem:
        """Return the problem with 0.5 instead of NaN, so that a wrong row leads to a wrong number and not to NaN."""
        pools = {name: np.array(getattr(self, name)) for name in ("k_pool", "v_pool")}
        pools = {name: on_device(np.where(np.isnan(pool), pool.dtype.type(0.5), pool)) for name, pool in pools.items()}
        return dataclasses.replace(self, **pools)

    def expected_with(self, **changed: Any) -> np.ndarray:
        """Return the expected result if some options were others, in float64 [B, T, H, D]."""
        numbers = [np.asarray(x, np.float32) for x in (self.q, self.k_pool, self.v_pool)]
        options = self.options | changed
        sinks = None if options["sinks"] is None else np.asarray(options["sinks"], np.float64)
        tables = np.asarray(self.page_table), np.asarray(self.lengths)
        with np.errstate(invalid="ignore"):
            return attention(*numbers, *tables, self.new_rows, **options | {"sinks": sinks})

    def error(self, out: Any, expected: np.ndarray | None = None) -> float:
        """Return the largest difference from the expected result over real queries; a NaN counts as infinite."""
        expected = self.expected if expected is None else expected
        difference = np.abs(np.asarray(out, np.float64) - expected)[self.real]
        return float(np.nan_to_num(difference, nan=np.inf).max())


def full_product(**wanted: Any) -> list[AttentionCase]:
    """Return a case for each combination of the factors' values; `wanted` replaces the values of some factors."""
    options = {name: (wanted[name],) if name in wanted else values for name, values in FACTORS.items()}
    return [AttentionCase(*values) for values in itertools.product(*options.values())]


def pairwise_cover(seed: int = 0) -> list[AttentionCase]:
    """Return a few cases in which every pair of values of any two factors occurs."""
    return [AttentionCase(**case) for case in cover.pairwise(FACTORS, seed=seed)]


def make_tree(kind: str, nodes: int, generator: np.random.Generator) -> np.ndarray:
    """Return parents [nodes] of a chain, a random tree, or a random tree with padding nodes at the end and inside."""
    parents = np.arange(-1, nodes - 1)
    if kind in ("random", "padded"):
        parents[1:] = [generator.integers(0, n) for n in range(1, nodes)]
    if kind == "padded":
        for node in range(1, nodes):
            hidden = node >= nodes - nodes // 4 or node == nodes // 2
            if hidden or (parents[node] > 0 and parents[parents[node]] < 0):  # a padding node has no children
                parents[node] = -1
    return parents.astype(np.int32)


def make_lengths(kind: str, queries: int) -> np.ndarray:
    """Return the numbers of committed cache rows of four sequences [4]."""
    full = ROWS - queries
    return {
        "ragged": np.array([0, 15, 129, full - 1]),
        "zero": np.array([0, 0, 1, 2]),
        "full": np.array([full, 128, 127, 64]),
    }[kind].astype(np.int32)


def make_problem(case: AttentionCase, *, seed: int = 0) -> Problem:
    """Return a problem with random values in rows that some real query sees, and NaN in all other rows of the pools."""
    generator = np.random.default_rng(seed)
    lengths = make_lengths(case.lengths, case.queries)
    batch, kv_heads, columns = len(lengths), 2, ROWS // case.page
    parents = np.stack([make_tree(case.tree, case.queries, generator) for _ in lengths])
    real = (parents >= 0) | (np.arange(case.queries) == 0)
    pages = np.random.default_rng(seed + 1).permutation(np.arange(1, batch * columns + 1))
    page_table = pages.reshape(batch, columns).astype(np.int32)
    shape = (batch * columns + 1, kv_heads, case.page, case.dim)
    k_pool, v_pool = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    new_rows = [[ancestors(tree, node) for node in range(case.queries)] for tree in parents]
    if case.tree == "block":  # every query sees all new rows, later ones too
        new_rows = [[list(range(case.queries))] * case.queries] * len(lengths)
    for b, length in enumerate(lengths):
        oldest = length - (case.window or ROWS) + 1  # first row of the first query's window and chunk
        oldest = max(oldest, length - length % case.chunk) if case.chunk else oldest
        rows = [*range(max(case.start, oldest), length), *(length + j for j in np.flatnonzero(real[b]))]
        for pool in (k_pool, v_pool):
            for row in rows:
                place = (page_table[b, row // case.page], slice(None), row % case.page)
                pool[place] = generator.standard_normal((kv_heads, case.dim))
        # Page table columns after the last used row are never read.
        page_table[b, (length + case.queries - 1) // case.page + 1 :] = 0
    q = generator.standard_normal((batch, case.queries, kv_heads * case.group, case.dim))
    q = on_device(q, case.dtype)
    k_pool, v_pool = (on_device(x, case.pool or case.dtype) for x in (k_pool, v_pool))
    sinks = on_device(generator.normal(size=q.shape[2]) + 2, case.dtype) if case.sinks else None
    options = {name: getattr(case, name) for name in ("start", "window", "chunk", "scale", "softcap")} | {
        "sinks": sinks
    }
    chain = bits_of(np.broadcast_to(np.arange(-1, case.queries - 1, dtype=np.int32), (batch, case.queries)))
    block = on_device(np.broadcast_to(np.asarray(chain)[:, -1:], chain.shape))
    bits = {"causal": None, "chain": chain, "block": block}.get(case.tree, bits_of(parents))
    arrays = (q, k_pool, v_pool, on_device(page_table), on_device(lengths), bits)
    problem = Problem(*arrays, options, new_rows, np.zeros(()), real)
    return dataclasses.replace(problem, expected=problem.expected_with())
