"""`jspec bench kernels`: bytes, flops and timer; and the least time of a step, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jspec import Tree
from jspec.__main__ import main
from jspec.tools.bench import kernels, roofline
from jspec.tools.bench.step import StepCase, floor_milliseconds

pytestmark = pytest.mark.once

GEMM = dict(rows=5, out=96, inner=64, dtype="float32", quantize=None, implementation="auto")


@pytest.fixture(autouse=True)
def few_calls_on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make few calls, and take the floors of an H200."""
    monkeypatch.setattr(kernels, "MOST_CALLS", 2)
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H200"])


def floor_seconds(case: StepCase) -> float:
    floor = floor_milliseconds(case)
    assert floor is not None
    return floor / 1e3


@pytest.mark.parametrize(("bytes_read", "calls"), [(1.0, 64), (4.2e6, 64), (33.6e6, 8), (1e9, 2)])
def test_kernel_timing_repeats_calls_until_they_exceed_the_gpu_caches(
    bytes_read: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST_CALLS", 64)
    assert kernels.calls_for(bytes_read) == calls


def test_matrix_product_bytes_and_flops_equal_those_counted_by_hand() -> None:
    result = kernels.gemm("o", GEMM | {"quantize": "int8"})
    assert (result.bytes, result.flops) == (96 * 64, 2 * 5 * 96 * 64)
    assert result.timer == "host" and result.seconds > 0
    assert result.floor_seconds == pytest.approx(96 * 64 / 4.3e12)


def test_kernels_command_attention_counts_bytes_and_flops_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--batch 2 --rows 3 --context 40 --heads 4 --kv-heads 2 --head-dim 16 --page-size 8 --dtype float32"
    words = f"{sizes} --kernel attention --kv-dtype bfloat16".split()
    assert main(["bench", "kernels", *words, "--json", str(tmp_path / "out.json")]) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["bytes"] == 2 * 2 * 40 * 2 * 16 * 2  # K and V, rows of two sequences, heads, channels, two bytes
    assert result["flops"] == 4 * 2 * 3 * 4 * 16 * 40
    assert result["floor_seconds"] == pytest.approx(result["bytes"] / 4.3e12)
    printed = capsys.readouterr().out
    assert "share" in printed and " host" in printed


def test_kernels_command_products_are_those_of_a_decoder_layer_and_output_head(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--kernel", "gemm", "--shape", "tiny", "--rows", "1", "--dtype", "float32"]
    assert main(["bench", "kernels", *words]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[3:8]] == ["qkv", "o", "gate_up", "down", "head"]


@pytest.mark.parametrize("name", ["qkv", "gate_up", "attention"])
def test_kernels_command_with_an_implementation_option_times_that_implementation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(x: jnp.ndarray, *_: Any, implementation: str) -> jnp.ndarray:
        asked.append(implementation)
        return x

    for kernel in ("split_matmul", "gated_matmul", "paged_attention"):
        monkeypatch.setattr(kernels, kernel, noted)
    if name == "attention":
        values = (1, 1, 8, 2, 1, 16, 8, "float32", "float32", "reference")
        result = kernels.attention(dict(zip(kernels.ATTENTION, values, strict=True)))
    else:
        result = kernels.gemm(name, GEMM | {"implementation": "reference"})
    assert set(asked) == {"reference"} == {result.settings["implementation"]}


CHAIN = Tree.chain(4)


@pytest.mark.parametrize(
    ("tree", "batch", "quantize", "kv_dtype", "milliseconds"),
    [
        # 7.505e9 weights and 1024 * 131072 bytes of keys and values a sequence, at 4.3 TB/s
        (None, 1, None, None, (2 * 7.505e9 + 1024 * 131072) / 4.3e9),
        (None, 64, None, None, (2 * 7.505e9 + 64 * 1024 * 131072) / 4.3e9),
        (None, 1, "int8", None, (7.505e9 + 1024 * 131072) / 4.3e9),
        (None, 64, "fp8", "float8_e4m3fn", (7.505e9 + 32 * 1024 * 131072) / 4.3e9),
        # and four passes of 373e6 weights, three of them 25e6 less, and 4096 bytes a row of cache; features' 50e6 once
        (CHAIN, 1, None, None, (2 * (7.505e9 + 4 * 373e6 - 3 * 25e6 + 50e6) + 1024 * (131072 + 4 * 4096)) / 4.3e9),
        (CHAIN, 1, "fp8", None, (7.505e9 + 4 * 373e6 - 3 * 25e6 + 50e6 + 1024 * (131072 + 4 * 4096)) / 4.3e9),
    ],
)
def test_least_step_time_of_few_rows_equals_bytes_over_bandwidth(
    tree: Tree | None, batch: int, quantize: str | None, kv_dtype: str | None, milliseconds: float
) -> None:
    case = StepCase("llama3-8b", batch, 1024, tree, quantize=quantize, kv_dtype=kv_dtype)
    assert floor_seconds(case) * 1e3 == pytest.approx(milliseconds, rel=0.005)


def test_least_step_time_of_many_rows_equals_flops_over_arithmetic_rate() -> None:
    """320 verified rows: 2 * 320 * 7.505e9 operations at 790 TFLOP/s, twice as fast in fp8, beside attention."""
    attention = 64 * 1024 * 131072 / 4.3e12
    verify = 2 * 320 * 7.505e9 / 790e12
    draft, whole = (floor_seconds(StepCase("llama3-8b", 64, 1024, tree)) for tree in (Tree.chain(1), CHAIN))
    two_rows = 2 * 7.505e9 / 4.3e12  # 128 rows are still bound by bytes
    three_passes = 3 * (2 * 373e6 + 64 * 1024 * 4096) / 4.3e12
    assert whole - draft == pytest.approx(verify - two_rows + three_passes, rel=0.03)
    assert floor_seconds(StepCase("llama3-8b", 64, 1024, CHAIN, quantize="fp8_dynamic")) == pytest.approx(
        verify / 2 + attention + 4 * (373e6 + 64 * 1024 * 4096) / 4.3e12, rel=0.03
    )


@pytest.mark.parametrize(
    ("kind", "bandwidth", "rate"), [("NVIDIA H200", 4.3e12, 790e12), ("NVIDIA H100 80GB HBM3", 3.02e12, 789e12)]
)
def test_least_step_time_on_another_device_uses_the_rates_of_that_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, bandwidth: float, rate: float
) -> None:
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS[kind])
    plain = floor_seconds(StepCase("llama3-8b", 1, 1024, None))
    assert plain == pytest.approx((2 * 7.505e9 + 1024 * 131072) / bandwidth, rel=0.005)
    many_rows = roofline.seconds([roofline.matmul("many rows", 4096, 4096, 4096, roofline.BF16)])
    assert many_rows == pytest.approx(2 * 4096**3 / rate)


def test_least_time_on_device_of_unknown_rates_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "chip", lambda: None)
    assert floor_milliseconds(StepCase("llama3-8b", 1, 1024, None)) is None
    assert main(["bench", "kernels", "--kernel", "gemm", "--rows", "1", "--shape", "least", "--dtype", "float32"]) == 0
    heading = capsys.readouterr().out.splitlines()[1]
    assert "GFLOP" in heading and "least" not in heading and "share" not in heading


def test_least_step_time_of_a_quantised_head_counts_fewer_bytes() -> None:
    """Four passes read 373e6 weights (three of them 25e6 less), the fusion 50e6; each is one byte smaller."""
    whole, own = (StepCase("llama3-8b", 1, 1024, CHAIN, draft_quantize=kind) for kind in (None, "fp8"))
    saved = (4 * 373e6 - 3 * 25e6 + 50e6) / 4.3e12
    assert floor_seconds(whole) - floor_seconds(own) == pytest.approx(saved, rel=0.005)


def test_least_step_time_of_draft_depth_0_equals_that_of_plain_decoding() -> None:
    options = ((None, None), (CHAIN, 4), (CHAIN, 0))
    plain, chain, nothing = (StepCase("llama3-8b", 8, 1024, tree, depth=depth) for tree, depth in options)
    assert floor_seconds(nothing) == floor_seconds(plain) < floor_seconds(chain)
    assert floor_seconds(chain) == floor_seconds(StepCase("llama3-8b", 8, 1024, CHAIN))
