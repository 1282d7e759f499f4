"""Bytes, flops and timer of kernels that are timed by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jspec.tools.bench import roofline
from tests.kernels import kernel_times

pytestmark = pytest.mark.once

GEMM = dict(rows=5, out=96, inner=64, dtype="float32", quantize=None, implementation="auto")


@pytest.fixture(autouse=True)
def few_calls_on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make few calls, and take the floors of an H200."""
    monkeypatch.setattr(kernel_times, "MOST_CALLS", 2)
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H200"])


@pytest.mark.parametrize(("bytes_read", "calls"), [(1.0, 64), (4.2e6, 64), (33.6e6, 8), (1e9, 2)])
def test_kernel_timing_repeats_calls_until_they_exceed_the_gpu_caches(
    bytes_read: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_times, "MOST_CALLS", 64)
    assert kernel_times.calls_for(bytes_read) == calls


def test_matrix_product_bytes_and_flops_equal_those_counted_by_hand() -> None:
    result = kernel_times.gemm("o", GEMM | {"quantize": "int8"})
    assert (result.bytes, result.flops) == (96 * 64, 2 * 5 * 96 * 64)
    assert result.timer == "host" and result.seconds > 0
    assert result.floor_seconds == pytest.approx(96 * 64 / 4.3e12)


def test_kernels_script_attention_counts_bytes_and_flops_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--batch 2 --rows 3 --context 40 --heads 4 --kv-heads 2 --head-dim 16 --page-size 8 --dtype float32"
    words = f"{sizes} --kernel attention --kv-dtype bfloat16".split()
    assert kernel_times.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["bytes"] == 2 * 2 * 40 * 2 * 16 * 2  # K and V, rows of two sequences, heads, channels, two bytes
    assert result["flops"] == 4 * 2 * 3 * 4 * 16 * 40
    assert result["floor_seconds"] == pytest.approx(result["bytes"] / 4.3e12)
    printed = capsys.readouterr().out
    assert "share" in printed and " host" in printed


def test_kernels_script_products_are_those_of_a_decoder_layer_and_output_head(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--kernel", "gemm", "--shape", "tiny", "--rows", "1", "--dtype", "float32"]
    assert kernel_times.main([*words]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[3:8]] == ["qkv", "o", "gate_up", "down", "head"]


@pytest.mark.parametrize("name", ["qkv", "gate_up", "attention"])
def test_kernels_script_with_an_implementation_option_times_that_implementation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(x: jnp.ndarray, *_: Any, implementation: str) -> jnp.ndarray:
        asked.append(implementation)
        return x

    for kernel in ("split_matmul", "gated_matmul", "paged_attention"):
        monkeypatch.setattr(kernel_times, kernel, noted)
    if name == "attention":
        values = (1, 1, 8, 2, 1, 16, 8, "float32", "float32", "reference")
        result = kernel_times.attention(dict(zip(kernel_times.ATTENTION, values, strict=True)))
    else:
        result = kernel_times.gemm(name, GEMM | {"implementation": "reference"})
    assert set(asked) == {"reference"} == {result.settings["implementation"]}


def test_kernels_least_time_on_device_of_unknown_rates_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(roofline, "chip", lambda: None)
    assert kernel_times.main(["--kernel", "gemm", "--rows", "1", "--shape", "least", "--dtype", "float32"]) == 0
    heading = capsys.readouterr().out.splitlines()[1]
    assert "GFLOP" in heading and "least" not in heading and "share" not in heading
