"""The least time of a step (`jspec bench step`), counted by hand."""

from __future__ import annotations

import pytest

from jspec import Tree
from jspec.tools.bench import roofline
from jspec.tools.bench.step import StepCase, floor_milliseconds

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the floors of an H200."""
    monkeypatch.setattr(roofline, "chip", lambda: roofline.CHIPS["NVIDIA H200"])


def floor_seconds(case: StepCase) -> float:
    floor = floor_milliseconds(case)
    assert floor is not None
    return floor / 1e3


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


def test_least_step_time_on_device_of_unknown_rates_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "chip", lambda: None)
    assert floor_milliseconds(StepCase("llama3-8b", 1, 1024, None)) is None


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
