"""The same claim at full length, and on the whole product of drafters, lengths, page sizes, buckets and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import cover
from tests.test_lossless import DRAFTERS, FACTORS, FULL, check, possible

pytestmark = pytest.mark.once


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in ("right", "wrong", "random")])
def test_tokens_equal_plain_decoding_at_full_length(drafter: str, golden: Path, data: Path) -> None:
    """Greedy; sampled rows are in the cover and in the matrix."""
    case = dict(pair="golden", drafter=drafter, tree="chain:2", page=16, buckets=(25,))
    check(case, golden, data, FULL, temperatures=(0.0,))


# One engine serves all buckets: 100 prompts in the largest, a batch of its size in each of the others.
WHOLE = [case for case in cover.product(FACTORS | {"buckets": ((1, 4, 25),)}) if possible(case)]


@pytest.mark.matrix
@pytest.mark.parametrize("case", WHOLE, ids=cover.label)
def test_tokens_equal_plain_decoding_everywhere(case: dict[str, Any], golden: Path, data: Path) -> None:
    check(case, golden, data, FULL)
