"""Times of attention, matrix products and gated delta nets by themselves, the first two beside their least times.

python -m tests.kernels.kernel_times --kernel attention --batch 32,64
python -m tests.kernels.kernel_times --kernel gemm --rows 1,5,61
python -c "from tests.kernels.kernel_times import delta_round_us as us; print(us(batch=32, nodes=5))"

One program holds many calls, each on its own data, so no call finds its data in a cache or waits for another's result.
On a GPU the time is the sum of the kernels' times in the device's trace, launch gaps excluded; elsewhere it is the
host's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.config import KV_DTYPES
from jspec.models.config.layer_config import LayerConfig
from jspec.models.mixers.gqa import GQA
from jspec.models.weights.params import layer_params
from jspec.tools.bench import profiling, random_models, roofline
from jspec.tools.bench.options import (
    DEFAULT_SHAPE,
    DENSE,
    IMPLEMENTATION,
    KINDS,
    POINT_OPTIONS,
    count,
    counts,
    file_option,
    option,
)
from jspec.tools.bench.results import Column, Results, measure
from jspec.tools.parser import Help
from pallas_kernels import gated_matmul, paged_attention, split_matmul
from pallas_kernels.layers.formats import quantize
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.weights import FORMATS
from tests.kernels import test_delta_inputs as rounds

BEYOND_CACHES = 256 * 2**20  # bytes that all calls read together at least; an H200's L2 holds 60 MB
MOST_CALLS = 64
REPEATS = 10
SPLIT = ("qkv", "o", "down")  # products that the decoder leaves as partial sums
ATTENTION = ("batch", "rows", "context", "heads", "kv_heads", "head_dim", "page_size", "dtype", "kv", "implementation")


OPTIONS = (
    option("--kernel", nargs="+", choices=("attention", "gemm"), default=("attention", "gemm"), help="what is timed"),
    option("--shape", choices=DENSE, help=f"model sizes; {DEFAULT_SHAPE}"),
    option("--rows", type=counts, default="1,5", metavar="1,5", help="rows of a product, new tokens a sequence"),
    option("--batch", type=counts, default="1,8,32,64", metavar="1,8", help="sequences in attention"),
    *POINT_OPTIONS,
    option("--head-dim", type=counts, metavar="64,128", help="channels of a head; default: the shape's"),
    option("--heads", type=count, help="query heads; default: the shape's"),
    option("--kv-heads", type=count, help="key and value heads; default: the shape's"),
    option("--dtype", default="bfloat16", help="dtype of activations and weights"),
    option("--kv-dtype", choices=KV_DTYPES, help="dtype of attention's caches; default: --dtype"),
    option("--quantize", choices=KINDS, help="quantise the products' weights; default: no"),
    IMPLEMENTATION,
    file_option("--json", "JSON file for the results; default: none"),
)


def scaled(factor: float, spec: str) -> Callable[[float | None], str]:
    """Return a column format that multiplies a value by ``factor``; None gives an empty cell."""
    return lambda value: "" if value is None else format(value * factor, spec)


@dataclass(frozen=True)
class KernelResult:
    """The measured time, least time, bytes and flops of one call of a kernel."""

    name: Annotated[str, Column("kernel")]
    settings: Annotated[dict[str, Any], Column("")]  # a column each
    bytes: Annotated[float, Column("MB", scaled(1e-6, ".1f"))]  # bytes that a call must read and write
    flops: Annotated[float, Column("GFLOP", scaled(1e-9, ".1f"))]  # flops that a call must do
    # Least time of a call, seconds; None: the device's rates are unknown.
    floor_seconds: Annotated[float | None, Column("least us", scaled(1e6, ".1f"))]
    seconds: Annotated[float, Column("us", scaled(1e6, ".1f"))]  # measured time of a call, seconds
    share: Annotated[float | None, Column("share", ".0%")]  # least time over measured time
    timer: Annotated[str, Column("timed by")]  # "device" or "host"


def attention(settings: dict[str, Any]) -> KernelResult:
    """Time attention of ``rows`` new tokens a sequence to ``context`` committed ones, with pages in random order.

    The settings are the values of `ATTENTION`; ``kv`` is the dtype of the caches.
    """
    batch, rows, context, heads, kv_heads, head_dim, page_size, dtype, kv, how = (settings[name] for name in ATTENTION)
    widths = roofline.Widths(cache=jnp.dtype(kv).itemsize)
    cost = roofline.mixing(GQA(heads, kv_heads, head_dim), batch, rows, context, widths)
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
    return _timed(cost, settings, run, (queries, pools, page_table, lengths))


def gemm(name: str, settings: dict[str, Any]) -> KernelResult:
    """Time the product of activations [rows, inner] and a weight [out, inner], with the decoder's function."""
    keys = ("rows", "out", "inner", "dtype", "quantize", "implementation")
    rows, out, inner, dtype, kind, how = (settings[key] for key in keys)
    width = jnp.dtype(dtype).itemsize if kind is None else FORMATS[kind].value_bytes
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

    return _timed(cost, settings, run, (inputs, weights))


def calls_for(bytes_read: float) -> int:
    """Return how many calls (2 to `MOST_CALLS`) of ``bytes_read`` bytes read more than the caches hold."""
    return min(max(math.ceil(BEYOND_CACHES / bytes_read), 2), MOST_CALLS)


def _timed(
    cost: roofline.Cost, settings: dict[str, Any], run: Callable[..., Any], arguments: tuple[Any, ...]
) -> KernelResult:
    """Time the program ``run``, which calls one kernel several times; return the times of one call."""
    calls, program = calls_for(cost.bytes), jax.jit(run).lower(*arguments).compile()
    for _ in range(3):
        jax.block_until_ready(program(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            times = [_seconds(program, arguments) for _ in range(REPEATS)]
        computed = sum(event.duration_ns for event in profiling.gpu_events(folder)) / 1e9 / REPEATS
    seconds, timer = (computed / calls, "device") if computed else (statistics.median(times) / calls, "host")
    floor = roofline.seconds([cost])
    share = None if floor is None else floor / seconds
    return KernelResult(cost.name, settings, cost.bytes, cost.flops, floor, seconds, share, timer)


def _seconds(program: Any, arguments: tuple[Any, ...]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - began


def delta_round_us(batch: int = 1, nodes: int = 5, layers: int = 12, calls: int = 10) -> dict[str, float]:
    """Return median microseconds of each kernel of a gated delta net's round at the sizes of a 27B model, by its name.

    One jitted program runs the nodes of ``layers`` layers, whose states exceed the device's cache. "all" is the time of
    all launches of a layer.
    """
    mixer = replace(rounds.MIXER, key_heads=16, value_heads=48)
    slots = list(range(batch))
    layer, projected, gates, state, tokens = rounds.problem(
        list(range(-1, nodes - 1)), [1024 + slot for slot in slots], slots, mixer, all_slots=batch
    )
    states = [jax.tree.map(jnp.copy, state) for _ in range(layers)]

    def step(states, projected, gates, tokens):
        return [rounds.run_kernels(mixer, layer, projected, gates, state, tokens)[1] for state in states]

    step = jax.jit(step, donate_argnums=0)
    states = jax.block_until_ready(step(states, projected, gates, tokens))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                states = step(states, projected, gates, tokens)
            jax.block_until_ready(states)
        launches = profiling.launches_by_name(profiling.gpu_events(Path(folder)), calls * layers)
    kernels = {kernel.name: kernel.microseconds for kernel in launches[:-1] if "mosaic" in kernel.name}
    return kernels | {"all": launches[-1].milliseconds * 1e3}


def main(words: Sequence[str]) -> int:
    """Time what the words of a command line ask for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.kernel_times", formatter_class=Help)
    for flags, settings in OPTIONS:
        parser.add_argument(*flags, **settings)
    arguments = parser.parse_args(words)
    return measure(Results("one call, random data", _results(arguments)), arguments.json)


def _results(a: argparse.Namespace) -> Iterator[KernelResult]:
    c = random_models.TARGETS[a.shape or random_models.default_shape()]
    heads, dims = (a.heads or c.num_heads, a.kv_heads or c.num_kv_heads), a.head_dim or [c.head_dim]
    points = product(a.page_size, dims, a.context, a.batch, a.rows) if "attention" in a.kernel else ()
    for page, dim, context, batch, rows in points:
        values = (batch, rows, context, *heads, dim, page, a.dtype, a.kv_dtype or a.dtype, a.implementation)
        yield attention(dict(zip(ATTENTION, values, strict=True)))
    layer = layer_params(LayerConfig(c.attention, c.layers[0].mlp), c.hidden_size, c.hidden_size)
    sizes = {name: layer[name].shape for name in ("qkv", "o", "gate_up", "down")}
    sizes["head"] = c.vocab_size, c.hidden_size
    common = dict(dtype=a.dtype, quantize=a.quantize, implementation=a.implementation)
    for rows, (name, (out, inner)) in product(a.rows, sizes.items()) if "gemm" in a.kernel else ():
        yield gemm(name, dict(rows=rows, out=out, inner=inner) | common)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
