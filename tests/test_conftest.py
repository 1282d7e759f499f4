"""The summary at the end of a test run, and the limit on its memory maps."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import MEMORY_MAPS, free_programs, pytest_terminal_summary

pytestmark = pytest.mark.once


def test_terminal_summary_counts_skipped_tests_by_reason_most_frequent_first() -> None:
    written: list[str] = []
    reasons = ("no GPU", "no torch", "no GPU")
    skipped = [SimpleNamespace(longrepr=("file.py", 1, f"Skipped: {reason}")) for reason in reasons]
    for stats in ({"skipped": skipped, "passed": [0]}, {}):
        pytest_terminal_summary(SimpleNamespace(stats=stats, write_line=written.append))
    assert written == ["2 skipped: no GPU", "1 skipped: no torch"]


@pytest.mark.skipif(not MEMORY_MAPS.exists(), reason="needs Linux")
def test_free_programs_frees_memory_maps_of_unused_programs_only_above_the_limit() -> None:
    def count() -> int:
        return len(MEMORY_MAPS.read_text().splitlines())

    def compile_in_a_cycle(scale: int) -> None:
        program = jax.jit(lambda x: jnp.sort(x * scale)).lower(jnp.ones(8)).compile()
        cycle = [program]
        cycle.append(cycle)

    def compile_20_in_cycles() -> None:
        for scale in range(20):
            compile_in_a_cycle(scale)

    compile_20_in_cycles()  # what jax maps once stays
    free_programs(0)
    before = count()
    compile_20_in_cycles()
    grown = count()
    assert grown > before + 20
    free_programs(grown + 1_000)
    assert count() == grown
    free_programs(before)
    assert count() < before + 20
