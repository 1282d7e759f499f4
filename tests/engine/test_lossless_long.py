"""Test losslessness for all combinations of drafters, trees, page sizes, buckets and models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_lossless import DYNAMIC, FACTORS, FAKES, FULL, SHORT, check
from tests.support import cover

STATIC_ONLY = ("medusa", *FAKES)


def possible(case: dict[str, Any]) -> bool:
    return case["tree"] != DYNAMIC or case["drafter"] not in STATIC_ONLY


# One engine serves all buckets: 100 prompts in the largest one, one full batch in each other one.
WHOLE = [case for case in cover.product(FACTORS | {"page": (1, 16, 64), "buckets": ((1, 4, 25),)}) if possible(case)]


@pytest.mark.matrix
@pytest.mark.usefixtures("runs_long")
@pytest.mark.parametrize("case", WHOLE, ids=cover.label)
def test_engine_with_every_combination_of_options_emits_tokens_of_plain_decoding(
    case: dict[str, Any],
) -> None:
    check(case, {0.0: FULL, 1.0: SHORT})
