"""Test that each kernel compiles for each generation of GPU, and that only those in `SPILLS` spill registers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels import (
    HeadTransform,
    add_rms_norm,
    ancestor_bits,
    append,
    append_attention,
    append_latent,
    gather_rows,
    head_products,
    interval_attention,
    interval_attention_gradient,
    move_rows,
    norm_columns,
    paged_attention,
    quantize_rows,
    rotate_append,
    rotate_queries,
    sample_tokens,
    sampling_threshold,
    split_matmul,
    top_log_probs,
)
from pallas_kernels.layers.dense.deterministic_matmul import deterministic_matmul
from pallas_kernels.layers.experts.routing import Choice, route
from pallas_kernels.layers.products import matmul
from pallas_kernels.layers.quantize_rows import Activation
from pallas_kernels.layers.weights import Quantized
from pallas_kernels.sampling.top_log_probs import top, top_in_order
from tests.support.gpus import GPUS, compile_for

HEADS, KV_HEADS, PAGE, PAGES, HIDDEN, VOCAB = 32, 8, 16, 2049, 4096, 128256  # Llama-3.1-8B
BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
F32, I32 = jnp.float32, jnp.int32
DIMS = (64, 128, 256, 512)  # head_dims

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def shape(*dims: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def pools(dim: int, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    return [shape(PAGES, KV_HEADS, PAGE, dim, dtype=dtype)] * 2


def attention(rows: int, dim: int, dtype: Any = BF16) -> Case:
    """Return the case of attention for a plain decoding step (1 row), a chain (5 rows) or a tree (61 rows)."""
    q, table = shape(1, rows, HEADS, dim), shape(1, 128, dtype=I32)
    bits = () if rows < 32 else (shape(1, rows, 2, dtype=jnp.uint32),)

    def attend(*arrays: Any) -> Any:
        return paged_attention(*arrays, *(() if bits else (None,)), implementation="pallas")

    return attend, (q, *pools(dim, dtype), table, shape(1, dtype=I32), *bits)


def scores(rows: int, dim: int, dtype: Any = BF16, *, deterministic: bool = False) -> Case:
    """Return the case of attention with window, chunks, softcap and sinks; 60 rows are a tree, others are causal."""
    arrays = [shape(1, rows, HEADS, dim), *pools(dim, dtype), shape(1, 128, dtype=I32), shape(1, dtype=I32)]
    mask = shape(1, 60, 9, dtype=I32) if deterministic else shape(1, 60, 2, dtype=jnp.uint32)

    def attend(sinks: Any, *arrays: Any) -> Any:
        mask = arrays[5] if rows == 60 else None
        masks = {"paths": mask} if deterministic else {}
        options = {"window": 512, "chunk": 700, "softcap": 30.0, "deterministic": deterministic}
        return paged_attention(
            *arrays[:5], None if deterministic else mask, sinks, **options, **masks, implementation="pallas"
        )

    return attend, (shape(HEADS), *arrays, *([mask] if rows == 60 else []))


def head_transform(rows: int, dim: int) -> HeadTransform:
    """Return the shapes of a transform with a bias, norms of all heads and separate tables of queries."""
    width = (HEADS + 2 * KV_HEADS) * dim
    return HeadTransform(shape(4, 1, rows, dim // 2, dtype=F32), shape(width), shape(dim), shape(dim), shape(dim), 1e-6)


def deterministic_attention(rows: int, depths: int = 0) -> Case:
    """Return the case of deterministic attention for a chain, a prefill chunk, or (with `depths`) a tree."""

    def attend(*arrays: Any) -> Any:
        own = {"paths": arrays[5]} if depths else {}
        return paged_attention(*arrays[:5], None, deterministic=True, implementation="pallas", **own)

    paths = [shape(1, rows, depths, dtype=I32)] if depths else []
    q, table = shape(1, rows, HEADS, 128), shape(1, 128, dtype=I32)
    return attend, (q, *pools(128, BF16), table, shape(1, dtype=I32), *paths)


def latent(
    rows: int, heads: int, size: int = 512, *, batch: int = 1, dtype: Any = BF16, deterministic: bool = False
) -> Case:
    """Return the case of attention over a latent cache, with DeepSeek's number of latent channels or another."""
    q, table = shape(batch, rows, heads, size + 64), shape(batch, 128, dtype=I32)
    bits = [shape(batch, rows, -(-rows // 32), dtype=jnp.uint32)] if rows > 1 and not deterministic else [None]

    def attend(*arrays: Any) -> Any:
        return paged_attention(*arrays, deterministic=deterministic, implementation="pallas")

    pool = [shape(PAGES, 1, PAGE, dim, dtype=dtype) for dim in (64, size)]
    return attend, (q, *pool, table, shape(batch, dtype=I32), *bits)


def latent_rows(rows: int, heads: int, size: int = 512, inner: tuple[int, int] = (128, 128)) -> Case:
    """Return the case of the products of heads around attention over a latent cache, and of its new rows.

    ``inner`` are the channels of a head's query that are not rotated, and those of its value.
    """
    q, tables = shape(1, rows, heads * (inner[0] + 64)), shape(2, 1, rows, 32, dtype=F32)
    pool = [shape(PAGES, 1, PAGE, dim) for dim in (64, size)]

    def run(q: Any, up: Any, tables: Any, down: Any, new: Any, *cache: Any) -> Any:
        queries, *pools = append_latent(*cache[:2], q, up, new, tables, *cache[2:], implementation="pallas")
        return head_products(queries[..., :size].reshape(1, rows, -1), down, implementation="pallas"), *pools

    weights = [shape(heads, channels, size) for channels in inner]
    cache = *pool, shape(1, 128, dtype=I32), shape(1, dtype=I32), shape(1, rows, dtype=jnp.bool)
    return run, (q, weights[0], tables, weights[1], shape(1, rows, size + 64), *cache)


def rotated_queries(dim: int) -> Case:
    """Return the case of queries without keys, with norms and rotation."""

    def run(sums: Any, tables: Any, weight: Any) -> Any:
        own = HeadTransform(tables, q_norm=weight, eps=1e-6)
        return rotate_queries(sums, own, heads=8, dtype=BF16, implementation="pallas")

    return run, (shape(2, 1, 5, 8 * dim, dtype=F32), shape(2, 1, 5, dim // 2, dtype=F32), shape(dim, dtype=F32))


def prefill(dim: int) -> Case:
    def attend(*arrays: Any) -> Any:
        return paged_attention(*arrays, None, implementation="pallas")

    q, table = shape(1, 2048, HEADS, dim), shape(1, 256, dtype=I32)
    return attend, (q, *pools(dim, BF16), table, shape(1, dtype=I32))


def intervals(dim: int, dtype: Any = BF16, *, gradient: bool) -> Case:
    """Return the case of attention in training, or of its gradient."""
    q, k, places = shape(2, 2048, HEADS, dim, dtype=dtype), shape(2, 2048, KV_HEADS, dim, dtype=dtype), (2, 2048)
    options: dict[str, Any] = {"scale": 0.1, "implementation": "pallas"}
    if not gradient:
        return partial(interval_attention, **options), (q, k, k, shape(*places, dtype=I32))
    sums = [shape(2, HEADS, 2048, dtype=F32)] * 2
    return partial(interval_attention_gradient, **options), (q, k, k, q, *[shape(*places, dtype=I32)] * 2, *sums)


def rotation(dim: int, dtype: Any = BF16, transform: HeadTransform | None = None) -> Case:
    qkv = shape(4, 1, 5, (HEADS + 2 * KV_HEADS) * dim, dtype=F32)
    transform = transform or HeadTransform(shape(2, 1, 5, dim // 2, dtype=F32))
    rows = (shape(1, 128, dtype=I32), shape(1, dtype=I32), shape(1, 5, dtype=jnp.bool))
    rotate = partial(rotate_append, heads=HEADS, dtype=BF16, implementation="pallas")
    return rotate, (*pools(dim, dtype), qkv, transform, *rows)


def appended(rows: int, dim: int, transform: HeadTransform | None = None, **options: Any) -> Case:
    qkv = shape(2, 1, rows, (HEADS + 2 * KV_HEADS) * dim, dtype=F32)
    transform = transform or HeadTransform(shape(2, 1, rows, dim // 2, dtype=F32))
    where = (shape(1, 128, dtype=I32), shape(1, dtype=I32), shape(1, rows, dtype=jnp.bool))

    def attend(*arrays: Any) -> Any:
        found = append_attention(*arrays, None, heads=HEADS, dtype=BF16, implementation="pallas", **options)
        return jax.tree.leaves(found)

    return attend, (*pools(dim, BF16), qkv, transform, *where)


def append_or_move(dtype: Any, *, move: bool) -> Case:
    table, valid = shape(2, 512, dtype=I32), shape(2, 9, dtype=jnp.bool)
    if not move:
        new = shape(2, 9, KV_HEADS, 128)
        arrays = (*pools(128, dtype), new, new, table, shape(2, dtype=I32), valid)
        return partial(append, implementation="pallas"), arrays
    k, v = pools(128, dtype)
    where = [shape(2, 9, dtype=I32)] * 2
    return partial(move_rows, implementation="pallas"), ([k] * 2, [v] * 2, table, *where, valid)


def product(rows: int, kind: Any = None, out: int = 6144) -> Case:
    weight: Any = shape(out, HIDDEN, dtype=BF16 if kind is None else jnp.int8 if kind == "int8" else FP8)
    if kind is not None:
        weight = Quantized(weight, shape(out, dtype=F32), kind)
    return partial(split_matmul, implementation="pallas"), (shape(rows, HIDDEN), weight)


def grouped_product(rows: int) -> Case:
    weight = Quantized(shape(6144, HIDDEN, dtype=FP8), shape(6144, HIDDEN // 128, dtype=F32), "fp8")
    return partial(split_matmul, implementation="pallas"), (shape(rows, HIDDEN), weight)


def packed_product(rows: int, dtype: Any = BF16) -> Case:
    values, groups = shape(6144, HIDDEN // 32, 16, dtype=jnp.uint8), (6144, HIDDEN // 128)
    weight = Quantized(values, shape(*groups, dtype=F32), "int4", shape(*groups, dtype=jnp.uint8))
    return partial(split_matmul, implementation="pallas"), (shape(rows, HIDDEN, dtype=dtype), weight)


def deterministic_product(rows: int, dtype: Any = BF16) -> Case:
    arrays = shape(rows, HIDDEN, dtype=dtype), shape(6144, HIDDEN, dtype=dtype)
    return partial(deterministic_matmul, implementation="pallas"), arrays


def xla_product(kind: Any) -> Case:
    """Return the case of a product whose output is so wide that XLA computes it."""
    weight = Quantized(shape(VOCAB, HIDDEN, dtype=FP8), shape(VOCAB, dtype=F32), kind)
    return matmul, (shape(5, HIDDEN), weight)


def norm(rows: int, parts: int) -> Case:
    delta = shape(parts, rows, HIDDEN, dtype=F32 if parts > 1 and rows <= 64 else BF16)
    return partial(add_rms_norm, eps=1e-5, implementation="pallas"), (shape(rows, HIDDEN), delta, shape(HIDDEN))


def post_norm(parts: int, norms: int) -> Case:
    """Return the case of a norm before the sum, two factors, and `norms` norms after it, with weights in float32."""
    run = partial(add_rms_norm, eps=1e-5, factor=0.25, implementation="pallas")
    weights = [shape(HIDDEN, dtype=F32)] * (1 + norms)
    arrays = shape(5, HIDDEN), shape(parts, 5, HIDDEN, dtype=F32 if parts > 1 else BF16), *weights
    return lambda x, delta, first, *others: run(x, delta, *others, post_norm=first, scale=x[0, :1]), arrays


def threshold(rows: int) -> Case:
    controls = [shape(rows, dtype=dtype) for dtype in (F32, I32, F32, F32)]
    return partial(sampling_threshold, implementation="pallas"), (shape(rows, VOCAB, dtype=F32), *controls)


def sample(rows: int) -> Case:
    arrays = [shape(rows, 2, dtype=jnp.uint32), *(shape(rows, dtype=dtype) for dtype in (I32, I32, F32, I32, F32, F32))]
    return partial(sample_tokens, implementation="pallas"), (shape(1, rows, VOCAB, dtype=F32), *arrays)


def routed(choice: Choice) -> Case:
    vectors = {"bias": shape(choice.count, dtype=F32), "correction": shape(choice.count, dtype=F32)}
    options: dict[str, Any] = {"choice": choice, "implementation": "pallas"}
    arrays = shape(5, choice.count, dtype=F32), vectors, shape(5, dtype=jnp.bool)
    return lambda logits, vectors, used: route(logits, used=used, **vectors, **options), arrays


def gather() -> Case:
    arrays = [shape(64, dtype=F32), shape(64, dtype=jnp.bool), shape(64, 2048, dtype=I32)]
    where = shape(8, dtype=I32), shape(64, dtype=jnp.bool)
    return lambda *given: gather_rows(list(given[:3]), *given[3:], implementation="pallas"), (*arrays, *where)


CASES: dict[str, Case] = {
    **{f"attention {rows} x 128": attention(rows, 128) for rows in (1, 5)},  # other head_dims: attention after append
    **{f"attention 61 x {dim}": attention(61, dim) for dim in (64, 80, 96, 128, 256)},
    **{f"prefill {dim}": prefill(dim) for dim in (64, 96, 128)},
    **{f"rotate {dim}": rotation(dim) for dim in (64, 96, 128, 256)},
    **{f"rotate queries {dim}": rotated_queries(dim) for dim in (256, 512)},
    **{f"attention after append {dim}": appended(5, dim) for dim in (64, 80, 96, 128, 256)},
    "attention after append, drafting": appended(1, 128, start=1),
    **{f"attention {rows} x {dim}, all options": scores(rows, dim) for rows in (1, 5, 60) for dim in DIMS},
    **{f"prefill {dim}, all options": scores(512, dim) for dim in DIMS},
    **{f"attention {rows}, all options, deterministic": scores(rows, 128, deterministic=True) for rows in (5, 60)},
    **{f"rotate {dim}, all options": rotation(dim, transform=head_transform(5, dim)) for dim in (80, *DIMS)},
    **{
        f"attention after append {dim}, all options": appended(
            5, dim, head_transform(5, dim), window=512, chunk=700, softcap=30.0
        )
        for dim in (80, 96, *DIMS)
    },
    **{f"intervals {dim}": intervals(dim, gradient=False) for dim in (64, 96, 128)},
    **{f"gradient of intervals {dim}": intervals(dim, gradient=True) for dim in (64, 96, 128)},
    "gradient of intervals 128, float32": intervals(128, F32, gradient=True),
    **{f"latent attention {rows} x {heads}": latent(rows, heads) for rows in (1, 5, 61) for heads in (16, 128)},
    **{f"latent rows {rows} x {heads}": latent_rows(rows, heads) for rows, heads in ((5, 16), (61, 128))},
    **{f"latent attention {rows} x 20": latent(rows, 20) for rows in (5, 61)},  # GLM-4.7-Flash
    **{f"latent attention {rows} x 32 of 256": latent(rows, 32, 256) for rows in (5, 61)},  # Mistral Small 4
    "latent rows 61 x 20": latent_rows(61, 20, inner=(192, 256)),
    "latent rows 5 x 32 of 256": latent_rows(5, 32, 256, (64, 128)),
    "latent attention 5 x 16, batch 32": latent(5, 16, batch=32),
    "latent attention 5 x 16, deterministic": latent(5, 16, deterministic=True),
    "append": append_or_move(BF16, move=False),
    "move": append_or_move(BF16, move=True),
    **{f"product {rows}": product(rows) for rows in (5, 61)},
    **{f"product {rows}, four stages": product(rows, out=4096) for rows in (5, 61)},
    "product 32, one part": product(32, out=16384),
    **{f"product {rows} int8": product(rows, "int8") for rows in (5, 61)},
    **{f"product {rows} packed": packed_product(rows) for rows in (5, 61, 160)},
    "product 5 packed, float16": packed_product(5, jnp.float16),
    "attention 5, deterministic": deterministic_attention(5),
    "attention 61, deterministic": deterministic_attention(61, depths=9),
    "prefill, deterministic": deterministic_attention(512),
    "product 5, deterministic": deterministic_product(5),
    "product 5, deterministic, float32": deterministic_product(5, F32),
    "norm": norm(5, 1),
    "norm of 4 partial sums": norm(61, 4),
    "norm of 8 bfloat16 partial sums": norm(80, 8),
    "norms before and after the sum": post_norm(4, 1),
    "norm before the sum": post_norm(1, 0),
    "norms of queries and keys": (
        lambda sums, *weights: norm_columns(sums, *weights, eps=1e-6, dtype=BF16, implementation="pallas"),
        (shape(2, 5, 12288, dtype=F32), *[shape(4096, dtype=F32)] * 2),
    ),
    "sampling threshold": threshold(5),
    "sample tokens": sample(5),
    "experts of a row": routed(Choice(128, 8)),
    "experts of a row, of many in groups": routed(Choice(512, 8, "sigmoid", groups=8, chosen_groups=4)),
    "gather rows": gather(),
    "top 10 of a vocabulary": (partial(top_log_probs, k=10, implementation="pallas"), (shape(10, 32000, dtype=F32),)),
    "top 60 of a tree's candidates": (partial(top, k=60, implementation="pallas"), (shape(8, 710, dtype=F32),)),
    "top 59 in order": (partial(top_in_order, k=59, implementation="pallas"), (shape(8, 710, dtype=F32),)),
    "ancestor bits": (ancestor_bits, (shape(8, 61, dtype=I32),)),
}
FLOAT8: dict[str, Case] = {
    **{f"attention {rows} x {dim} fp8": attention(rows, dim, FP8) for rows, dim in ((1, 256), (5, 128), (61, 128))},
    "attention after append, quantised": appended(5, 128, quantize_output=True),
    **{f"attention {rows} x {dim} fp8, all options": scores(rows, dim, FP8) for rows in (5, 60) for dim in (64, 128)},
    "latent attention 5 x 16 fp8": latent(5, 16, dtype=FP8),
    "latent attention 61 x 32 of 256 fp8": latent(61, 32, 256, dtype=FP8),
    "rotate fp8": rotation(128, FP8),
    "append fp8": append_or_move(FP8, move=False),
    "move fp8": append_or_move(FP8, move=True),
    "quantise rows": (partial(quantize_rows, implementation="pallas"), (shape(5, HIDDEN),)),
    **{
        f"{gate} and quantise": (partial(quantize_rows, gate=gate, implementation="pallas"), (shape(5, 28672),))
        for gate in get_args(Activation)
    },
    **{f"product {rows} {kind}": product(rows, kind) for rows, kind in ((5, "fp8_dynamic"), (61, "fp8"))},
    **{f"product {rows} in groups": grouped_product(rows) for rows in (5, 61, 160)},
    **{f"product by XLA, {kind}": xla_product(kind) for kind in ("fp8", "fp8_dynamic")},
}
# The default run compiles one case of each kernel. The L40 gets the larger kernels: it has the least shared memory.
DEFAULT = {
    "L40": (
        "attention 61 x 128",  # spills with every version of jax
        "attention after append, quantised",
        "rotate 256",
        "move fp8",
        "product 61 int8",
        "product 61 in groups",
        "product 61 packed",
        "norm of 4 partial sums",
        "sampling threshold",
        "sample tokens",
        "experts of a row",
        "gelu and quantise",
        "intervals 128",
        "gradient of intervals 128",
        "norms before and after the sum",
        "top 10 of a vocabulary",
        "attention 61, deterministic",
        "product 5, deterministic, float32",
    ),
    "H100": (
        "product 160 in groups",
        "append",
        "norms of queries and keys",
        "gather rows",
        "top 59 in order",
        "attention 60 x 128, all options",
        "attention after append 128, all options",
        "attention 60, all options, deterministic",
        "latent attention 61 x 16",
        "latent rows 5 x 16",
        "rotate queries 512",
    ),
}


def spilling_cases(jax_version: tuple[int, ...]) -> set[tuple[str, str]]:
    """Return (GPU, case) of each kernel that spills registers; the list depends on the version of ptxas."""
    spilling = {(gpu, f"prefill {dim}") for gpu in ("A100", "L40") for dim in (96, 128)}
    spilling |= {("L40", "attention 61 x 128")}
    spilling |= {(gpu, f"{name} 128, all options") for gpu in ("A100", "L40") for name in ("attention 60 x", "prefill")}
    spilling |= {(gpu, "gradient of intervals 128, float32") for gpu in GPUS}
    if jax_version < (0, 12):
        return spilling | {("A100", f"attention 61 x {dim}") for dim in (80, 96)}
    spilling -= {("A100", "prefill 96")}
    spilling |= {("L40", name) for name in ("attention 61 x 80", "attention 61 x 96", "ancestor bits")}
    spilling |= {("B200", f"attention {name}") for name in ("1 x 128", "61 x 64", "1 x 512, all options")}
    return spilling | {("B200", "gradient of intervals 128")}


SPILLS = spilling_cases(jax.__version_info__)


def combinations() -> list[Any]:
    """Return test parameters for each case on each GPU that supports its dtypes; only `DEFAULT` runs by default."""
    found = [(gpu, name) for gpu in GPUS for name in (*CASES, *(FLOAT8 if GPUS[gpu].has_float8 else ()))]
    default = {(gpu, name) for gpu, names in DEFAULT.items() for name in names}
    assert default <= set(found), default - set(found)
    assert default & SPILLS, "the default run needs a case that spills, as a control"
    return [
        pytest.param(*case, marks=[] if case in default else pytest.mark.long, id=", ".join(case)) for case in found
    ]


@pytest.mark.parametrize(("gpu", "name"), combinations())
def test_kernel_compiled_for_each_gpu_spills_registers_only_if_listed(gpu: str, name: str) -> None:
    """A kernel that spills registers still runs; its compilation fails because the test asks for failure on spills."""
    function, arrays = {**CASES, **FLOAT8}[name]
    spills = pytest.raises(jax.errors.JaxRuntimeError, match="discarded due to register spilling")
    with spills if (gpu, name) in SPILLS else nullcontext():
        assert compile_for(GPUS[gpu], function, *arrays, fail_on_spills=True).launches


@pytest.mark.parametrize("case", [attention(5, 128, FP8), rotation(128, FP8)], ids=["attention", "rotate"])
def test_kernel_of_float8_pools_compiled_for_a100_raises(case: Case) -> None:
    with pytest.raises(
        (NotImplementedError, jax.errors.JaxRuntimeError), match=r"float8_e4m3fn|requires .target sm_89"
    ):
        compile_for(GPUS["A100"], case[0], *case[1])


@pytest.mark.parametrize(("gpu", "fits"), [("A100", True), ("L40", False), ("H100", True)])
def test_kernel_with_144_kib_of_shared_memory_does_not_compile_for_l40(gpu: str, fits: bool) -> None:
    """Negative control: its three tiles of 48 KiB fit into the other GPUs' 163 or 227 KiB, but not into 99 KiB."""
    rows, inner = 128, 64

    def kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
        def step(index: Any, total: Any) -> Any:
            columns = index * inner + jnp.arange(inner)[None, :]
            x = pltriton.load(x_ref.at[jnp.arange(rows)[:, None], columns])
            y = pltriton.load(y_ref.at[jnp.arange(2 * rows)[:, None], columns])
            return total + pltriton.dot(x, y, trans_b=True)

        out_ref[...] = jax.lax.fori_loop(0, 64, step, jnp.zeros((rows, 2 * rows), F32))

    params = pltriton.CompilerParams(num_warps=8, num_stages=4)
    call = pl.pallas_call(kernel, out_shape=shape(rows, 2 * rows, dtype=F32), compiler_params=params)
    arrays = shape(rows, 64 * inner), shape(2 * rows, 64 * inner)
    if fits:
        assert compile_for(GPUS[gpu], call, *arrays).launches
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"[Ss]hared memory"):
            compile_for(GPUS[gpu], call, *arrays)


@pytest.mark.parametrize("gpu", GPUS)
def test_gpu_description_of_each_gpu_has_its_figures_and_none_of_the_h200(gpu: str) -> None:
    device, text = GPUS[gpu], GPUS[gpu].description()
    assert f"shared_memory_per_block_optin: {device.block_shared_kib * 1024}\n" in text
    assert f"  core_count: {device.multiprocessors}\n" in text
    assert "H200" not in text and "rate_infos" not in text
