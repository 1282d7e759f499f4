"""The summary at the end of a test run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.conftest import pytest_terminal_summary

pytestmark = pytest.mark.once


def test_terminal_summary_counts_skipped_tests_by_reason_most_frequent_first() -> None:
    written: list[str] = []
    reasons = ("no GPU", "no torch", "no GPU")
    skipped = [SimpleNamespace(longrepr=("file.py", 1, f"Skipped: {reason}")) for reason in reasons]
    for stats in ({"skipped": skipped, "passed": [0]}, {}):
        pytest_terminal_summary(SimpleNamespace(stats=stats, write_line=written.append))
    assert written == ["2 skipped: no GPU", "1 skipped: no torch"]
