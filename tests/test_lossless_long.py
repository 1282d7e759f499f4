"""The same claim at full length, and on the whole product of drafters, lengths, page sizes, buckets and models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import cover
from tests.test_lossless import DRAFTERS, DYNAMIC, FACTORS, STATIC, STATIC_ONLY, check, possible


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_equal_plain_decoding_at_full_length(drafter: str, golden: Path, data: Path) -> None:
    tree = STATIC if drafter in STATIC_ONLY else DYNAMIC
    case = dict(pair="golden", drafter=drafter, tree=tree, page=16, buckets=(25,))
    check(case, golden, data, count=100, tokens=200)


@pytest.mark.matrix
@pytest.mark.parametrize("case", filter(possible, cover.product(FACTORS)), ids=cover.label)
def test_tokens_equal_plain_decoding_everywhere(case: dict[str, Any], golden: Path, data: Path) -> None:
    check(case, golden, data, count=100, tokens=200)
