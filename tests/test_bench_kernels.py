"""`jspec bench attention` and `gemm`: bytes and operations counted by hand, whose clock, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jspec.__main__ import main
from jspec.bench import kernels

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
