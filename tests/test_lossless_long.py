"""The same claim at full length, and on the whole product of drafters, lengths, page sizes, buckets and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import cover
from tests.test_lossless import FACTORS, check


@pytest.mark.slow
@pytest.mark.parametrize("drafter", FACTORS["drafter"])
def test_tokens_equal_plain_decoding_at_full_length(drafter: str, golden: Path, data: Path) -> None:
    case = dict(pair="golden", drafter=drafter, length=2, page=16, buckets=(8,))
    check(case, golden, data, count=100, tokens=200)


@pytest.mark.matrix
@pytest.mark.parametrize("case", cover.product(FACTORS | {"drafter": (*FACTORS["drafter"], "self")}), ids=cover.label)
def test_tokens_equal_plain_decoding_everywhere(case: dict[str, Any], golden: Path, data: Path) -> None:
    check(case, golden, data, count=100, tokens=200)
