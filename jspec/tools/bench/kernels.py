"""`jspec bench kernels`: times of attention and of a decoder's matrix products, beside their least possible times.

One program holds many calls, each on its own data, so no call finds its data in a cache or waits for another's result.
On a GPU the time is the sum of the kernels' times in the device's trace, launch gaps excluded; elsewhere it is the
host's. With `--power` each kernel also runs for some seconds: the energy of a step's kernels shows how far the power
limit allows the step to go.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.config import KV_DTYPES
from jspec.tools.bench import profiling, random_models, roofline
from jspec.tools.bench.report import Column, Report, columns, ints, option, scaled
from pallas_kernels import gated_matmul, paged_attention, split_matmul
from pallas_kernels.dispatch import Implementation
from pallas_kernels.layers.quantized import KINDS, matmul, quantize

BEYOND_CACHES = 256 * 2**20  # bytes that all calls read together at least; an H200's L2 holds 60 MB
MOST_CALLS = 64
REPEATS = 10
DISPATCHED = 32  # programs between two looks at the clock, where the device is kept busy
SPLIT = ("qkv", "o", "down")  # products that the decoder leaves as partial sums
ATTENTION = ("batch", "rows", "context", "heads", "kv_heads", "head_dim", "page_size", "dtype", "kv", "implementation")
SETTINGS = (*ATTENTION[:-1], "out", "inner", "quantize", "implementation")


@dataclass(frozen=True)
class Result:
    """Measured time, least time, bytes and flops of one call of a kernel."""

    name: str
    settings: dict[str, Any]
    bytes: float  # bytes that a call must read and write
    flops: float  # flops that a call must do
    floor_seconds: float  # least time of a call by memory bandwidth and arithmetic rate, seconds
    seconds: float  # measured time of a call, seconds
    timer: str  # "device" or "host"
    long_seconds: float | None  # host's time of a call in a long run, seconds; None: not requested, or no NVIDIA GPU
    clock: profiling.Clock | None  # GPU clock in the long run
    joules: float | None  # energy of a call in the long run

    share = property(lambda self: self.floor_seconds / self.seconds)
    byte_rate = property(lambda self: self.bytes / self.seconds)
    flop_rate = property(lambda self: self.flops / self.seconds)


def _setting(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda settings: str(settings.get(name, ""))


COLUMNS = (
    *columns(name="kernel"),
    *(Column("settings", name, _setting(name)) for name in SETTINGS),
    Column("bytes", "MB", scaled(1e-6, ".1f")),
    Column("floor_seconds", "least us", scaled(1e6, ".1f")),
    Column("seconds", "us", scaled(1e6, ".1f")),
    Column("byte_rate", "TB/s", scaled(1e-12, ".2f")),
    Column("flop_rate", "TFLOP/s", scaled(1e-12, ".1f")),
    *columns(".0%", share="share"),
    *columns(timer="timed by"),
    Column("long_seconds", "long us", scaled(1e6, ".1f")),
    *profiling.clock_columns(),
    Column("joules", "mJ", scaled(1e3, ".1f")),
)


def attention(settings: dict[str, Any], *, power: bool = False) -> Result:
    """Time attention of ``rows`` new tokens a sequence to ``context`` committed ones, with pages in random order.

    The settings are the values of `ATTENTION`; ``kv`` is the dtype of the caches. Power: run for some seconds too.
    """
    batch, rows, context, heads, kv_heads, head_dim, page_size, dtype, kv, how = (settings[name] for name in ATTENTION)
    own = random_models.TARGETS["llama3-8b"].resized(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    cost = roofline.attention(own, batch, rows, context, roofline.Widths(cache=jnp.dtype(kv).itemsize))
    calls = calls_for(cost.bytes)
    columns = math.ceil((context + rows) / page_size)
    shape = (batch * columns + 1, kv_heads, page_size, head_dim)
    pools = [jax.random.normal(jax.random.key(i), shape, dtype).astype(kv) for i in range(2 * calls)]
    queries = jax.random.normal(jax.random.key(2 * calls), (batch, rows, heads, head_dim), dtype)
    order = 1 + np.random.default_rng(0).permutation(batch * columns)
    page_table = jnp.asarray(order.reshape(batch, columns), jnp.int32)

    def run(queries: Any, pools: Any, page_table: Any, lengths: Any) -> list[Any]:
        pairs = zip(pools[::2], pools[1::2], strict=True)
        return [paged_attention(queries, k, v, page_table, lengths, None, implementation=how) for k, v in pairs]

    lengths = jnp.full(batch, context, jnp.int32)
    return _timed(cost, settings, run, (queries, pools, page_table, lengths), power)


def gemm(name: str, settings: dict[str, Any], *, power: bool = False) -> Result:
    """Time the product of activations [rows, inner] and a weight [out, inner], with the decoder's function."""
    keys = ("rows", "out", "inner", "dtype", "quantize", "implementation")
    rows, out, inner, dtype, kind, how = (settings[key] for key in keys)
    width = jnp.dtype(dtype).itemsize if kind is None else 1
    widths = roofline.Widths(weight=width, speed=2 if kind == "fp8_dynamic" else 1)
    cost = roofline.matmul(name, rows, out, inner, widths)
    calls = calls_for(cost.bytes)
    seeds = jax.random.split(jax.random.key(0), 2 * calls)
    weights: list[Any] = [jax.random.normal(seed, (out, inner), dtype) / math.sqrt(inner) for seed in seeds[:calls]]
    if kind is not None:
        weights = [quantize(weight, kind) for weight in weights]
    inputs = [jax.random.normal(seed, (rows, inner), dtype) for seed in seeds[calls:]]  # XLA would fuse equal inputs
    head = partial(matmul, dtype=jnp.float32)
    multiply: Any = {"gate_up": gated_matmul, "head": head, **dict.fromkeys(SPLIT, split_matmul)}[name]

    def run(inputs: Any, weights: Any) -> list[Any]:
        return [multiply(x, weight, implementation=how) for x, weight in zip(inputs, weights, strict=True)]

    return _timed(cost, settings, run, (inputs, weights), power)


def calls_for(bytes_read: float) -> int:
    """Return the number of calls in one timed program, 2 to `MOST_CALLS`: together they read more than caches hold.

    Args:
        bytes_read: bytes that one call reads.
    """
    return min(max(math.ceil(BEYOND_CACHES / bytes_read), 2), MOST_CALLS)


def _timed(
    cost: roofline.Cost, settings: dict[str, Any], run: Callable[..., Any], arguments: tuple[Any, ...], power: bool
) -> Result:
    """Return the times of one kernel, whose calls ``run`` makes, beside its ``cost``."""
    calls, program = calls_for(cost.bytes), jax.jit(run).lower(*arguments).compile()
    for _ in range(3):
        jax.block_until_ready(program(*arguments))
    times: list[float] = []
    busy = partial(_seconds, program, arguments, DISPATCHED)
    clock = profiling.watch_clock(lambda: times.append(busy())) if power else None
    long_seconds = statistics.median(times) / DISPATCHED / calls if clock else None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            seconds = [_seconds(program, arguments, 1) for _ in range(REPEATS)]
        computed = sum(event.duration_ns for event in profiling.gpu_events(folder)) / 1e9 / REPEATS
    own, timer = (computed, "device") if computed else (statistics.median(seconds), "host")
    joules = long_seconds * clock.watts if long_seconds and clock else None
    times_of_call = (cost.seconds, own / calls, timer, long_seconds, clock, joules)
    return Result(cost.name, settings, cost.bytes, cost.flops, *times_of_call)


def _seconds(program: Any, arguments: tuple[Any, ...], dispatched: int) -> float:
    began = time.perf_counter()
    for _ in range(dispatched):
        results = program(*arguments)
    jax.block_until_ready(results)
    return time.perf_counter() - began


def run(arguments: argparse.Namespace) -> Report:
    return Report("one call, random data", COLUMNS, _results(arguments))


def _results(a: argparse.Namespace) -> Iterator[Result]:
    c = random_models.TARGETS[a.shape]
    heads, dims = (a.heads or c.num_heads, a.kv_heads or c.num_kv_heads), a.head_dim or [c.head_dim]
    points = product(a.page_size, dims, a.context, a.batch, a.rows) if "attention" in a.kernel else ()
    for page, dim, context, batch, rows in points:
        values = (batch, rows, context, *heads, dim, page, a.dtype, a.kv_dtype or a.dtype, a.implementation)
        yield attention(dict(zip(ATTENTION, values, strict=True)), power=a.power)
    sizes = roofline.block_products(c, c.hidden_size) | {"head": (c.vocab_size, c.hidden_size)}
    common = dict(dtype=a.dtype, quantize=a.quantize, implementation=a.implementation)
    for rows, (name, (out, inner)) in product(a.rows, sizes.items()) if "gemm" in a.kernel else ():
        yield gemm(name, dict(rows=rows, out=out, inner=inner) | common, power=a.power)


def _sizes(flag: str, default: str, **more: Any) -> Any:
    return option(flag, type=ints, default=ints(default), metavar=default, **more)


OPTIONS = (
    option("--kernel", nargs="+", choices=("attention", "gemm"), default=("attention", "gemm")),
    option("--shape", choices=sorted(random_models.TARGETS), default="llama3-8b", help="decoder of the products"),
    _sizes("--rows", "1,5", help="rows of a product, or new tokens a sequence in attention"),
    _sizes("--batch", "1,8,32,64", help="sequences in attention"),
    _sizes("--context", "1024"),
    _sizes("--page-size", "16"),
    option("--head-dim", type=ints, metavar="64,128", help="the shape's if left out, as for the next two"),
    option("--heads", type=int),
    option("--kv-heads", type=int),
    option("--dtype", default="bfloat16"),
    option("--kv-dtype", choices=KV_DTYPES, help="dtype of attention's caches; --dtype if left out"),
    option("--quantize", choices=KINDS, help="kind for the products' weights"),
    option("--implementation", choices=get_args(Implementation), default="auto", help="where there is a kernel"),
    option("--power", action="store_true", help="run each for some seconds too: clock, watts, millijoules"),
)
