"""The least time of a step, against figures worked out by hand for Llama-3.1-8B."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jspec import Tree
from jspec.tools.bench import report, roofline
from jspec.tools.bench.step import Case, floor_seconds

pytestmark = pytest.mark.once

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
def test_floor_few_rows_is_bound_by_bytes(
    tree: Tree | None, batch: int, quantize: str | None, kv_dtype: str | None, milliseconds: float
) -> None:
    case = Case("llama3-8b", batch, 1024, tree, quantize=quantize, kv_dtype=kv_dtype)
    assert floor_seconds(case) * 1e3 == pytest.approx(milliseconds, rel=0.005)


def test_floor_many_rows_is_bound_by_arithmetic() -> None:
    """320 verified rows: 2 * 320 * 7.505e9 operations at 790 TFLOP/s, twice as fast in fp8, beside attention."""
    attention = 64 * 1024 * 131072 / 4.3e12
    verify = 2 * 320 * 7.505e9 / 790e12
    draft, whole = (floor_seconds(Case("llama3-8b", 64, 1024, tree)) for tree in (Tree.chain(1), CHAIN))
    two_rows = 2 * 7.505e9 / 4.3e12  # 128 rows are still bound by bytes
    three_passes = 3 * (2 * 373e6 + 64 * 1024 * 4096) / 4.3e12
    assert whole - draft == pytest.approx(verify - two_rows + three_passes, rel=0.03)
    assert floor_seconds(Case("llama3-8b", 64, 1024, CHAIN, quantize="fp8_dynamic")) == pytest.approx(
        verify / 2 + attention + 4 * (373e6 + 64 * 1024 * 4096) / 4.3e12, rel=0.03
    )


@pytest.mark.parametrize(
    ("kind", "bandwidth", "rate", "named"),
    [
        ("NVIDIA H200", 4.3e12, 790e12, "H200"),
        ("NVIDIA H100 80GB HBM3", 3.02e12, 789e12, "H100"),
        ("another", 4.3e12, 790e12, "H200"),
    ],
)
def test_floor_another_device_has_its_rates(
    monkeypatch: pytest.MonkeyPatch, kind: str, bandwidth: float, rate: float, named: str
) -> None:
    device = SimpleNamespace(device_kind=kind, platform="gpu")
    monkeypatch.setattr(roofline.jax, "devices", lambda: [device])
    plain = floor_seconds(Case("llama3-8b", 1, 1024, None))
    assert plain == pytest.approx((2 * 7.505e9 + 1024 * 131072) / bandwidth, rel=0.005)
    assert roofline.matmul("many rows", 4096, 4096, 4096, roofline.BF16).seconds == pytest.approx(2 * 4096**3 / rate)
    assert report.environment()["device"] == kind and named in report.environment()["floors"]


def test_floor_quantised_head_has_fewer_bytes() -> None:
    """Four passes of 373e6 weights, three of them 25e6 less, and features' 50e6, each one byte less."""
    whole, own = (Case("llama3-8b", 1, 1024, CHAIN, draft_quantize=kind) for kind in (None, "fp8"))
    saved = (4 * 373e6 - 3 * 25e6 + 50e6) / 4.3e12
    assert floor_seconds(whole) - floor_seconds(own) == pytest.approx(saved, rel=0.005)


def test_floor_depth_0_is_that_of_plain_decoding() -> None:
    options = ((None, None), (CHAIN, 4), (CHAIN, 0))
    plain, chain, nothing = (Case("llama3-8b", 8, 1024, tree, depth=depth) for tree, depth in options)
    assert floor_seconds(nothing) == floor_seconds(plain) < floor_seconds(chain)
    assert floor_seconds(chain) == floor_seconds(Case("llama3-8b", 8, 1024, CHAIN))
