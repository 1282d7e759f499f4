"""Count what each test file costs: engines, programs of engines, compilations, and the seconds of all these.

`tests/conftest.py` registers `Costs` as a plugin. Each worker of pytest-xdist counts its own tests, and sends the
counts with the report of a test's teardown; the process that prints the results adds them up by file.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMED = "(named engines)"  # what `shared` counts
LARGEST = 15  # files that the summary of a run prints
COLUMNS = ("seconds", "engines", "programs", "lower_s", "compilations", "compile_s")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": (("lower_s", None),),
    "/jax/core/compile/jaxpr_to_mlir_module_duration": (("lower_s", None),),
    "/jax/core/compile/backend_compile_duration": (("compile_s", None), ("compilations", 1)),
}

_counts: dict[str, Counter[str]] = defaultdict(Counter)  # of this process since the last report, by who pays
_payer: list[str] = ["test"]


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Count what runs inside as a cost of all files, because it makes an engine that several files use."""
    _payer.append(NAMED)
    try:
        yield
    finally:
        _payer.pop()


def _add(column: str, amount: float, payer: str | None = None) -> None:
    _counts[payer or _payer[-1]][column] += amount


def _on_event(event: str, seconds: float, **_: Any) -> None:
    for column, amount in EVENTS.get(event, ()):
        _add(column, seconds if amount is None else amount)


def watch() -> None:
    """Count from now on what jax compiles, and which programs the engines of this process compile or share."""
    import jax

    from jspec.step.executables import Executables

    jax.monitoring.register_event_duration_secs_listener(_on_event)
    make, compile_programs = Executables.__init__, Executables.compile
    payers: weakref.WeakKeyDictionary[Executables, str] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def make_counted(self: Executables, *arguments: Any, **options: Any) -> None:
        payers[self] = _payer[-1]  # also of programs that are compiled at a later request
        _add("engines", 1)
        make(self, *arguments, **options)

    @functools.wraps(compile_programs)
    def compile_counted(self: Executables, keys: Any, *arguments: Any, **options: Any) -> None:
        _add("programs", len(set(keys) - set(self.compiled)), payers[self])
        compile_programs(self, keys, *arguments, **options)

    Executables.__init__ = make_counted  # type: ignore[method-assign]
    Executables.compile = compile_counted  # type: ignore[method-assign]


class Costs:
    """The plugin that adds up and prints the costs, and fails a run in which a file exceeds its budget.

    Args:
        file: where the whole table of a run with budgets is written.
        budgets: most programs that the engines of a file may have, by file; None: there are no budgets.
        usual: budget of the files that are not among these.
    """

    def __init__(self, file: Path, budgets: dict[str, int] | None, usual: int) -> None:
        self.file, self.budgets, self.usual = file, budgets, usual
        self.of_files: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items and "jax" in sys.modules:
            watch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown" and _counts:
            report.user_properties.append(("costs", {payer: dict(counts) for payer, counts in _counts.items()}))
            _counts.clear()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.split("::")[0]
        self.of_files[name]["seconds"] += report.duration
        for key, costs in report.user_properties if report.when == "teardown" else ():
            if key == "costs":
                assert isinstance(costs, dict)
                for payer, counts in costs.items():
                    self.of_files[NAMED if payer == NAMED else name].update(counts)

    @property
    def excesses(self) -> list[str]:
        """What each file that exceeds its budget has to hear."""
        if self.budgets is None:
            return []
        return [
            f"{name}: its engines have {counts['programs']} programs, its budget is {budget}: use an engine of "
            "tests/support/engines.py, or raise the budget in tests/support/budgets.py"
            for name, counts in sorted(self.of_files.items())
            if name != NAMED and counts["programs"] > (budget := self.budgets.get(name, self.usual))
        ]

    def lines(self) -> list[str]:
        """The table, largest files first, and its sum."""
        rows = sorted(self.of_files.items(), key=lambda entry: -entry[1]["seconds"])
        rows.append(("all", sum(self.of_files.values(), Counter())))
        table = ["".join(f"{column:>13}" for column in COLUMNS)]
        for name, counts in rows:
            table.append("".join(f"{counts[column]:13.0f}" for column in COLUMNS) + f"  {name}")
        return table

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput") or not self.of_files:
            return
        if self.budgets is not None:
            self.file.write_text("\n".join(self.lines()) + "\n")
        if self.excesses and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.of_files) > 1:
            head, *rows, total = self.lines()
            terminalreporter.write_line("costs of the largest files:")
            for line in (head, *rows[:LARGEST], total):
                terminalreporter.write_line(line)
        for excess in self.excesses:
            terminalreporter.write_line(excess, red=True)
