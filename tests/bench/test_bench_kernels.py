"""`jspec bench attention` and `gemm`: bytes and operations counted by hand, whose clock, and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jspec.__main__ import main
from jspec.tools.bench import clocks, kernels

pytestmark = pytest.mark.once


@pytest.mark.parametrize(("bytes_read", "calls"), [(1.0, 64), (4.2e6, 64), (33.6e6, 8), (1e9, 2)])
def test_so_many_calls_that_no_cache_holds_their_data(bytes_read: float, calls: int) -> None:
    assert kernels.calls_for(bytes_read) == calls


def test_a_product_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_CALLS", 2)
    result = kernels.gemm("o", rows=5, out=96, inner=64, dtype="float32", kind="int8")
    assert (result.bytes, result.flops) == (96 * 64, 2 * 5 * 96 * 64)
    assert result.clock == "host" and result.seconds > 0
    assert result.floor == pytest.approx(96 * 64 / 4.3e12)


def test_attention_is_counted_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "MOST_CALLS", 2)
    sizes = "--batch 2 --rows 3 --context 40 --heads 4 --kv-heads 2 --head-dim 16 --page-size 8 --dtype float32"
    out = tmp_path / "attention.json"
    assert main(["bench", "attention", *sizes.split(), "--kv-dtype", "bfloat16", "--json", str(out)]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert result["bytes"] == 2 * 2 * 40 * 2 * 16 * 2  # K and V, rows of two sequences, heads, channels, two bytes
    assert result["flops"] == 4 * 2 * 3 * 4 * 16 * 40
    assert result["floor_seconds"] == pytest.approx(result["bytes"] / 4.3e12)
    printed = capsys.readouterr().out
    assert "share" in printed and "clock of the host" in printed


def test_the_command_multiplies_what_a_decoder_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "MOST_CALLS", 2)
    assert main(["bench", "gemm", "--shape", "tiny", "--rows", "1", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[3:8]] == ["qkv", "o", "gate_up", "down", "head"]


def test_what_a_long_run_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joules by hand: watts times the median of the groups' times, of which each is of so many programs and calls."""
    clock, times = clocks.Clock(1560.0, 1980.0, 700.0, 1.0), iter([9.0, 2.0, 1.0, *[1e-3] * kernels.REPEATS])

    def watch(work: Callable[[], object]) -> clocks.Clock:
        for _ in range(3):
            work()
        return clock

    monkeypatch.setattr(kernels, "_seconds", lambda *_: next(times))
    monkeypatch.setattr(clocks, "watch", watch)
    monkeypatch.setattr(kernels, "MOST_CALLS", 2)
    result = kernels.gemm("o", rows=5, out=96, inner=64, dtype="float32", kind=None, power=True)
    assert result.sustained == kernels.Sustained(2.0 / kernels.DISPATCHED / 2, clock)
    assert result.sustained.joules == pytest.approx(700 * 2 / 32 / 2)
    assert kernels.text([result]).splitlines()[2].split()[-5:] == ["31250.0", "1560/1980", "700", "100%", "21875.0"]
    assert next(times, None) is None


def test_without_a_gpu_nothing_is_known_of_power(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--batch 1 --rows 1 --context 8 --heads 2 --kv-heads 1 --head-dim 16 --dtype float32 --power"
    assert main(["bench", "attention", *words.split()]) == 0
    assert "mJ" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qkv", "gate_up", "attention"])
def test_the_implementation_asked_for_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(x: jnp.ndarray, *_: Any, implementation: str) -> jnp.ndarray:
        asked.append(implementation)
        return x

    for kernel in ("split_matmul", "gated_matmul", "paged_attention"):
        monkeypatch.setattr(kernels, kernel, noted)
    sizes = {"batch": 1, "rows": 1, "context": 8, "heads": 2, "kv_heads": 1, "head_dim": 16, "page_size": 8}
    if name == "attention":
        result = kernels.attention(**sizes, dtype="float32", kv="float32", implementation="reference")
    else:
        result = kernels.gemm(name, rows=1, out=96, inner=64, dtype="float32", kind=None, implementation="reference")
    assert set(asked) == {"reference"} == {result.settings["implementation"]}
