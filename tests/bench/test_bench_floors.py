"""The least time of a round, against figures worked out by hand for Llama-3.1-8B."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jspec import Tree
from jspec.tools.bench import floors, report, rounds

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
def test_bytes_bound_few_rows(
    tree: Tree | None, batch: int, quantize: str | None, kv_dtype: str | None, milliseconds: float
) -> None:
    case = rounds.Case("llama3-8b", batch, 1024, tree, quantize=quantize, kv_dtype=kv_dtype)
    assert rounds.floor(case) * 1e3 == pytest.approx(milliseconds, rel=0.005)


def test_arithmetic_bounds_many_rows() -> None:
    """Of 320 verified rows: 2 * 320 * 7.505e9 operations at 790 TFLOP/s, twice as fast in fp8, beside attention."""
    attention = 64 * 1024 * 131072 / 4.3e12
    verify = 2 * 320 * 7.505e9 / 790e12

    def floor(quantize: str | None) -> float:
        draft = rounds.floor(rounds.Case("llama3-8b", 64, 1024, Tree.chain(1), quantize=quantize))
        whole = rounds.floor(rounds.Case("llama3-8b", 64, 1024, CHAIN, quantize=quantize))
        return whole - draft

    two_rows = 2 * 7.505e9 / 4.3e12  # 128 rows are bound by bytes still
    three_passes = 3 * (2 * 373e6 + 64 * 1024 * 4096) / 4.3e12
    assert floor(None) == pytest.approx(verify - two_rows + three_passes, rel=0.03)
    assert rounds.floor(rounds.Case("llama3-8b", 64, 1024, CHAIN, quantize="fp8_dynamic")) == pytest.approx(
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
def test_the_floor_is_that_of_the_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, bandwidth: float, rate: float, named: str
) -> None:
    device = SimpleNamespace(device_kind=kind, platform="gpu")
    monkeypatch.setattr(floors.jax, "devices", lambda: [device])
    plain = rounds.floor(rounds.Case("llama3-8b", 1, 1024, None))
    assert plain == pytest.approx((2 * 7.505e9 + 1024 * 131072) / bandwidth, rel=0.005)
    assert floors.matmul("many rows", 4096, 4096, 4096, floors.BF16).seconds == pytest.approx(2 * 4096**3 / rate)
    assert report.environment()["device"] == kind and named in report.environment()["floors"]


def test_a_head_may_be_smaller_than_its_target() -> None:
    """Four passes of 373e6 weights, three of them 25e6 less, and features' 50e6, each a byte less."""
    whole, own = (rounds.Case("llama3-8b", 1, 1024, CHAIN, draft_quantize=kind) for kind in (None, "fp8"))
    assert rounds.floor(whole) - rounds.floor(own) == pytest.approx((4 * 373e6 - 3 * 25e6 + 50e6) / 4.3e12, rel=0.005)
    assert own.name != whole.name


def test_a_round_that_drafts_nothing_has_the_floor_of_plain_decoding() -> None:
    plain, chain, nothing = (
        rounds.Case("llama3-8b", 8, 1024, tree, depth=depth) for tree, depth in ((None, None), (CHAIN, 4), (CHAIN, 0))
    )
    assert rounds.floor(nothing) == rounds.floor(plain) < rounds.floor(chain)
    assert rounds.floor(chain) == rounds.floor(rounds.Case("llama3-8b", 8, 1024, CHAIN))
    assert len({case.name for case in (plain, chain, nothing)}) == 3
