"""Time attention at the shapes of an 8B model, and gated delta nets at those of a 27B; no test uses this module.

python -c "from tests.kernels.timing import attention_us as us; print(us(batch=1, queries=5, context=1024))"
python -c "from tests.kernels.timing import delta_round_us as us; print(us(batch=32, nodes=5))"
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.tools.bench import profiling
from pallas_kernels import append, causal_bits, paged_attention
from tests.kernels import test_delta_inputs as rounds

HEADS, KV_HEADS, DIM = 32, 8, 128


def attention_us(
    batch: int = 1,
    queries: int = 5,
    context: int = 1024,
    capacity: int | None = None,
    page: int = 16,
    layers: int = 32,
    implementation: str = "auto",
    write: bool = True,
) -> dict[str, float]:
    """Measure the time per layer of append and attention, and the bandwidth of reading the KV cache.

    One jitted program appends and attends in `layers` pairs of bfloat16 pools. Choose `layers` so that the pools exceed
    the device's cache (50 MB), as a model's do. The time is the median of 5 measurements of 10 calls.

    Returns:
        "us": microseconds per layer; "TB/s": terabytes of keys and values read per second.
    """
    columns = -(-(capacity or context + 128) // page)
    table = np.random.default_rng(0).permutation(np.arange(1, batch * columns + 1)).reshape(batch, columns)
    shape = (batch * columns + 1, KV_HEADS, page, DIM)
    random = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))
    caches = [(random(2 * layer), random(2 * layer + 1)) for layer in range(layers)]
    q = jax.random.normal(jax.random.key(99), (batch, queries, HEADS, DIM), jnp.bfloat16)
    bits = np.broadcast_to(causal_bits(queries), (batch, *causal_bits(queries).shape))
    arrays = [
        jnp.asarray(table, jnp.int32),
        jnp.full((batch,), context - queries, jnp.int32),
        jnp.asarray(bits),
    ]

    def step(caches, q, table, lengths, bits):
        valid, written = jnp.ones(q.shape[:2], bool), []
        for k_pool, v_pool in caches:
            if write:
                k, v = q[:, :, :KV_HEADS], q[:, :, KV_HEADS : 2 * KV_HEADS]
                k_pool, v_pool = append(k_pool, v_pool, k, v, table, lengths, valid, implementation=implementation)
            q = paged_attention(q, k_pool, v_pool, table, lengths, bits, implementation=implementation)
            written.append((k_pool, v_pool))
        return written, q

    step = jax.jit(step, donate_argnums=0)
    times = []
    for _ in range(8):
        begin = time.perf_counter()
        for _ in range(10):  # calls are dispatched ahead: the host's time does not count
            caches, out = step(caches, q, *arrays)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / 10 / layers * 1e6)
    median = statistics.median(times[3:])
    read = 2 * batch * context * KV_HEADS * DIM * 2
    return {"us": round(median, 2), "TB/s": round(read / median / 1e6, 3)}


def delta_round_us(batch: int = 1, nodes: int = 5, layers: int = 12, calls: int = 10) -> dict[str, float]:
    """Measure the kernels of one gated delta net's round at the sizes of a 27B model (16 key heads, 48 value heads).

    One jitted program runs the nodes of ``layers`` layers, whose states exceed the device's cache.

    Returns:
        Median microseconds of each kernel's launch by its name, from a trace; "all": of all launches of a layer.
    """
    mixer = dataclasses.replace(rounds.MIXER, key_heads=16, value_heads=48)
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
