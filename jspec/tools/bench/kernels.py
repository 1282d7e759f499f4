"""`jspec bench attention` and `jspec bench gemm`: a kernel by itself, beside what memory and arithmetic allow.

One program holds many calls, each on data of its own, so that none finds its data in a cache and none waits for
another's result. On a GPU the time is what the device's own trace says it computed, launches left out; elsewhere, where
there is no such trace, it is the clock's. A kernel that runs alone for some seconds also tells what it takes of a power
limit (`Sustained`): the sum over a round's kernels says what that limit leaves of a round.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.config import KV_DTYPES
from jspec.tools.bench import clocks, floors, launches, report, shapes
from jspec.tools.bench.numbers import ints
from jspec.tools.table import table
from pallas_kernels import gated_matmul, paged_attention, split_matmul
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layers.quantized import KINDS, matmul, quantize

BEYOND_CACHES = 256 * 2**20  # bytes that all calls read together at least; an H200's L2 holds 60 MB
MOST_CALLS = 64
REPEATS = 10
DISPATCHED = 32  # programs between two looks at the clock, where a device is to be kept busy
SPLIT = ("qkv", "o", "down")  # products that the decoder leaves in parts


@dataclass(frozen=True)
class Sustained:
    """One kernel after the other for `clocks.SECONDS`."""

    seconds: float  # of a call, by the host's clock
    clock: clocks.Clock

    @property
    def joules(self) -> float:
        """Of a call."""
        return self.seconds * self.clock.watts


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    name: str
    settings: dict[str, Any]
    bytes: float
    flops: float
    seconds: float  # of a call
    clock: str  # "device" or "host"
    sustained: Sustained | None = None  # None: not asked for, or no NVIDIA GPU

    @property
    def floor(self) -> float:
        return floors.Cost(self.name, self.bytes, self.flops).seconds


def calls_for(bytes_read: float) -> int:
    """Calls of one program that together read more than caches hold."""
    return min(max(math.ceil(BEYOND_CACHES / bytes_read), 2), MOST_CALLS)


def attention(
    *,
    batch: int,
    rows: int,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str,
    kv: str,
    implementation: Implementation = "auto",
    power: bool = False,
) -> Result:
    """``rows`` new tokens a sequence over ``context`` committed ones, pages in any order.

    Args:
        kv: dtype of the pools.
        power: whether to look at `Sustained` too.
    """
    settings = {name: value for name, value in locals().items() if name != "power"}
    own = shapes.TARGETS["llama3-8b"].resized(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    cost = floors.attention(own, batch, rows, context, floors.Widths(cache=jnp.dtype(kv).itemsize))
    calls = calls_for(cost.bytes)
    columns = math.ceil((context + rows) / page_size)
    shape = (batch * columns + 1, kv_heads, page_size, head_dim)
    pools = [jax.random.normal(jax.random.key(i), shape, dtype).astype(kv) for i in range(2 * calls)]
    queries = jax.random.normal(jax.random.key(2 * calls), (batch, rows, heads, head_dim), dtype)
    order = 1 + np.random.default_rng(0).permutation(batch * columns)
    page_table = jnp.asarray(order.reshape(batch, columns), jnp.int32)
    lengths = jnp.full(batch, context, jnp.int32)

    def run(queries: Any, pools: Any, page_table: Any, lengths: Any) -> list[Any]:
        pairs = zip(pools[::2], pools[1::2], strict=True)
        options: dict[str, Any] = {"implementation": implementation}
        return [paged_attention(queries, k, v, page_table, lengths, None, **options) for k, v in pairs]

    timed = time_calls(run, (queries, pools, page_table, lengths), calls, power=power)
    return Result(cost.name, settings, cost.bytes, cost.flops, *timed)


def gemm(
    name: str,
    *,
    rows: int,
    out: int,
    inner: int,
    dtype: str,
    kind: str | None,
    implementation: Implementation = "auto",
    power: bool = False,
) -> Result:
    """``rows`` rows times a weight [out, inner], as the decoder multiplies them.

    Args:
        kind: of quantisation; None: none.
        power: whether to look at `Sustained` too.
    """
    settings = {"rows": rows, "out": out, "inner": inner, "dtype": dtype, "quantize": kind}
    settings |= {"implementation": implementation}
    width = jnp.dtype(dtype).itemsize if kind is None else 1
    cost = floors.matmul(name, rows, out, inner, floors.Widths(weight=width, speed=2 if kind == "fp8_dynamic" else 1))
    calls = calls_for(cost.bytes)
    keys = jax.random.split(jax.random.key(0), 2 * calls)
    weights = [jax.random.normal(key, (out, inner), dtype) / math.sqrt(inner) for key in keys[:calls]]
    if kind is not None:
        weights = [quantize(weight, kind) for weight in weights]  # type: ignore[arg-type, misc]
    inputs = [jax.random.normal(key, (rows, inner), dtype) for key in keys[calls:]]  # else XLA would join the products
    head = partial(matmul, dtype=jnp.float32)
    multiply: Any = {"gate_up": gated_matmul, "head": head, **dict.fromkeys(SPLIT, split_matmul)}[name]

    def run(inputs: Any, weights: Any) -> list[Any]:
        return [multiply(x, weight, implementation=implementation) for x, weight in zip(inputs, weights, strict=True)]

    return Result(name, settings, cost.bytes, cost.flops, *time_calls(run, (inputs, weights), calls, power=power))


def time_calls(
    run: Callable[..., Any], arguments: tuple[Any, ...], calls: int, *, power: bool = False
) -> tuple[float, str, Sustained | None]:
    """Seconds of one of the calls that ``run`` makes, by whose clock, and what a long run of them took."""
    program = jax.jit(run).lower(*arguments).compile()
    for _ in range(3):
        jax.block_until_ready(program(*arguments))
    sustained = _sustain(program, arguments, calls) if power else None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            times = [_seconds(program, arguments) for _ in range(REPEATS)]
        if computed := sum(event.duration_ns for event in launches.events(folder)):
            return computed / 1e9 / REPEATS / calls, "device", sustained
    return statistics.median(times) / calls, "host", sustained


def _seconds(program: Any, arguments: tuple[Any, ...], dispatched: int = 1) -> float:
    began = time.perf_counter()
    for _ in range(dispatched):
        results = program(*arguments)
    jax.block_until_ready(results)
    return time.perf_counter() - began


def _sustain(program: Any, arguments: tuple[Any, ...], calls: int) -> Sustained | None:
    times: list[float] = []
    clock = clocks.watch(lambda: times.append(_seconds(program, arguments, DISPATCHED)))
    return Sustained(statistics.median(times) / DISPATCHED / calls, clock) if clock else None


def text(results: Sequence[Result]) -> str:
    """A table; the share is of the least time. Behind it, where that was asked for, what a long run took."""
    names = list(dict.fromkeys(name for result in results for name in result.settings))
    rows = [["kernel", *names, "MB", "least us", "us", "TB/s", "TFLOP/s", "share"]]
    is_sustained = any(result.sustained for result in results)
    if is_sustained:
        rows[0] += ["long us", "SM MHz", "W", "capped", "mJ"]
    for result in results:
        figures = [
            f"{result.bytes / 1e6:.1f}",
            f"{result.floor * 1e6:.1f}",
            f"{result.seconds * 1e6:.1f}",
            f"{result.bytes / result.seconds / 1e12:.2f}",
            f"{result.flops / result.seconds / 1e12:.1f}",
            f"{result.floor / result.seconds:.0%}",
        ]
        if is_sustained:
            figures += _power(result.sustained)
        rows.append([result.name, *(str(result.settings.get(name, "")) for name in names), *figures])
    return f"{table(rows)}\ntimed by the clock of the {', '.join(sorted({result.clock for result in results}))}"


def _power(sustained: Sustained | None) -> list[str]:
    if sustained is None:
        return [""] * 5
    clock, joules = sustained.clock, sustained.joules
    how = f"{sustained.seconds * 1e6:.1f}", str(clock), f"{clock.watts:.0f}", f"{clock.capped:.0%}"
    return [*how, f"{joules * 1e3:.1f}"]


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `jspec bench attention` takes."""
    for name, default in (("batch", "1,8,32,64"), ("rows", "1,5"), ("context", "1024")):
        parser.add_argument(f"--{name}", type=ints, default=ints(default), metavar=default)
    for name, default in (("page-size", "16"), ("head-dim", "128")):
        parser.add_argument(f"--{name}", type=ints, default=ints(default), metavar=default)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", help="of the queries")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, help="of the pools; the queries' if left out")
    _common_arguments(parser)
    parser.set_defaults(run=_run_attention)


def add_gemm_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `jspec bench gemm` takes."""
    parser.add_argument("--shape", choices=sorted(shapes.TARGETS), default="llama3-8b", help="whose products")
    parser.add_argument("--rows", type=ints, default=ints("1,5,40"), metavar="1,5,40")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=KINDS, help="the weights")
    _common_arguments(parser)
    parser.set_defaults(run=_run_gemm)


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    implementations = get_args(Implementation)
    parser.add_argument("--implementation", choices=implementations, default="auto", help="where there is a kernel")
    parser.add_argument("--power", action="store_true", help="run each for some seconds too: clock, watts, millijoules")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")


def _run_attention(arguments: argparse.Namespace) -> int:
    a = arguments
    return _finish(
        a,
        [
            attention(
                batch=batch,
                rows=rows,
                context=context,
                heads=a.heads,
                kv_heads=a.kv_heads,
                head_dim=dim,
                page_size=page,
                dtype=a.dtype,
                kv=a.kv_dtype or a.dtype,
                implementation=a.implementation,
                power=a.power,
            )
            for page, dim, context, batch, rows in product(a.page_size, a.head_dim, a.context, a.batch, a.rows)
        ],
    )


def _run_gemm(arguments: argparse.Namespace) -> int:
    c = shapes.TARGETS[arguments.shape]
    sizes = floors.block_products(c, c.hidden_size) | {"head": (c.vocab_size, c.hidden_size)}
    common = {name: getattr(arguments, name) for name in ("dtype", "implementation", "power")}
    results = [
        gemm(name, rows=rows, out=out, inner=inner, kind=arguments.quantize, **common)
        for rows, (name, (out, inner)) in product(arguments.rows, sizes.items())
    ]
    return _finish(arguments, results)


def _fields(result: Result) -> dict[str, Any]:
    joules = result.sustained.joules if result.sustained else None
    return {**asdict(result), "floor_seconds": result.floor, "joules": joules}


def _finish(arguments: argparse.Namespace, results: Sequence[Result]) -> int:
    print(f"one call, random data; {report.environment()}")
    print(text(results))
    if arguments.json:
        report.write(arguments.json, [_fields(result) for result in results])
    return 0
