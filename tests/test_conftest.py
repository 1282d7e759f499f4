"""The summary at the end of a test run, and the limit on its memory maps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests import conftest
from tests.conftest import MEMORY_MAPS, NO_SYMBOLS, REPOSITORY, free_programs, pytest_terminal_summary
from tests.support.costs import NAMED, Costs

pytestmark = pytest.mark.once


def test_terminal_summary_counts_skipped_tests_by_reason_most_frequent_first() -> None:
    written: list[str] = []
    reasons = ("no GPU", "no torch", "no GPU")
    skipped = [SimpleNamespace(longrepr=("file.py", 1, f"Skipped: {reason}")) for reason in reasons]
    for stats in ({"skipped": skipped, "passed": [0]}, {}):
        pytest_terminal_summary(SimpleNamespace(stats=stats, write_line=written.append))
    assert written == ["2 skipped: no GPU", "1 skipped: no torch"]


def test_file_that_imports_a_missing_package_of_an_extra_is_skipped_with_the_reason() -> None:
    """Another missing module is an error."""
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "tests/server/test_limits.py"]
    for name, outcome in (("starlette", "1 skipped: needs the package starlette: pip install"), ("jspec", "1 error")):
        script = f"import sys, pytest; sys.modules[{name!r}] = None; sys.exit(pytest.main(sys.argv[1:]))"
        command = [sys.executable, "-c", script, *options]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert outcome in done.stdout, done.stdout + done.stderr


def test_costs_are_added_up_by_file_and_a_file_over_its_budget_is_named(tmp_path: Path) -> None:
    costs = Costs(tmp_path / "costs.txt", {"a.py": 5}, usual=2)
    for node, programs in (("a.py::x", 3), ("a.py::y", 2), ("b.py::x", 2)):
        for when in ("setup", "call", "teardown"):
            counts = {"test": {"programs": programs, "engines": 1}, NAMED: {"programs": 9}}
            properties = [("costs", counts)] if when == "teardown" else []
            costs.pytest_runtest_logreport(
                SimpleNamespace(nodeid=node, duration=0.5, when=when, user_properties=properties)
            )
    assert costs.excesses == []
    head, *rows = [line.split() for line in costs.lines()]
    assert head[:3] == ["seconds", "engines", "programs"]
    assert [(row[0], row[2], row[-1]) for row in rows] == [
        *(("3", "5", "a.py"), ("2", "2", "b.py"), ("0", "27", "engines)"), ("4", "34", "all"))
    ]
    costs.usual = 1
    (excess,) = costs.excesses
    assert excess.startswith("b.py: its engines have 2 programs, its budget is 1")


def test_a_test_without_float16_is_skipped_only_where_xla_cannot_compile_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another error of a test fails everywhere."""
    item: Any = SimpleNamespace(location=("file.py", 1, "test"))
    for message, can_compile, outcome in (
        (NO_SYMBOLS, False, "skipped"),
        (NO_SYMBOLS, True, "failed"),
        ("other", False, "failed"),
    ):
        monkeypatch.setattr(conftest, "compiles_float16", lambda can=can_compile: can)
        report = SimpleNamespace(failed=True, outcome="failed")
        call: Any = SimpleNamespace(excinfo=SimpleNamespace(value=RuntimeError(message)))
        hook = conftest.pytest_runtest_makereport(item, call)
        next(hook)
        with pytest.raises(StopIteration):
            hook.send(report)
        assert report.outcome == outcome


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
